"""Hooks run as root: only root's own programs, with a deadline, and never in the way."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from mpsagent.system.hooks import refused, run_hook
from tests.coroutines import until
from tests.system.conftest import Play

pytestmark = pytest.mark.usefixtures("no_leak")


def hook(base: Path, text: str) -> str:
    path = base / "hook"
    fresh = base / "hook.new"
    fresh.write_text(f"#!/bin/sh\n{text}\n")
    fresh.chmod(0o755)
    fresh.rename(path)
    return str(path)


def test_the_subject_is_json_on_the_input_and_the_environment_is_small(base: Path, play: Play) -> None:
    """A hook gets what it needs and none of the agent's environment."""
    path = hook(base, "/bin/cat; echo SECRET=$MPSAGENT_SECRET >&2; exit 3")
    os.environ["MPSAGENT_SECRET"] = "x"

    async def scenario() -> None:
        ended = await run_hook(path, {"pid": 606, "user": "alice", "paths": [Path("/x")]}, deadline=60)
        assert json.loads(ended.out) == {"pid": 606, "user": "alice", "paths": ["/x"]}
        assert ended.err == "SECRET=\n"
        assert ended.code == 3
        assert ended.problem is None

    try:
        play(scenario())
    finally:
        del os.environ["MPSAGENT_SECRET"]


async def test_at_its_deadline_it_is_killed_with_its_children_and_the_loop_went_on(base: Path) -> None:
    """A hook that hangs delays nothing but itself."""
    path = hook(base, f"sleep 600 & echo $! >{base}/child; trap '' TERM; wait; sleep 600")
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.01)

    task = asyncio.create_task(others())
    ended = await run_hook(path, {}, deadline=3.0)
    task.cancel()
    assert ended.code is None
    assert "within 3 s" in (ended.problem or "")
    assert turns > 5
    child = int((base / "child").read_text())
    await until(lambda: not Path(f"/proc/{child}").exists() or _is_zombie(child))


async def test_output_is_bounded(base: Path) -> None:
    """A hook that prints for ever costs no memory; one that prints much and ends has ended well."""
    ended = await run_hook(hook(base, "exec yes"), {}, deadline=1)
    assert ended.code is None
    assert len(ended.out) <= 64 << 10
    assert "more than 64 KiB" in (ended.problem or "")
    ended = await run_hook(hook(base, "head -c 200000 /dev/zero"), {}, deadline=60)
    assert (ended.code, len(ended.out), ended.problem) == (0, 64 << 10, None)
    ended = await run_hook(hook(base, "exit 0"), {"x": "y" * 100_000}, deadline=60)
    assert ended.code is None
    assert "input" in (ended.problem or "")


async def test_a_hook_that_does_not_read_is_no_trouble(base: Path) -> None:
    """No SIGPIPE for the agent, no wait."""
    ended = await run_hook(hook(base, "exec 0<&-; exit 0"), {"x": "y" * 20_000}, deadline=60)
    assert ended.code == 0


async def test_what_is_not_a_program_is_refused(base: Path) -> None:
    """Each with its own words; nothing is run."""
    plain = base / "plain"
    plain.write_text("x")
    plain.chmod(0o644)
    assert "absolute" in (refused("hook") or "")
    assert "absolute" in (refused("") or "")
    assert "No such file" in (refused(str(base / "absent")) or "")
    assert "not a file" in (refused(str(base)) or "")
    assert "not executable" in (refused(str(plain)) or "")
    (base / "loop").symlink_to(base / "loop")
    assert refused(str(base / "loop")) is not None
    ended = await run_hook(str(base / "absent"), {}, deadline=1)
    assert ended.code is None
    assert "absent" in (ended.problem or "")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root to give files to another user")
def test_what_another_user_can_change_is_refused(base: Path) -> None:
    """The file, a directory above it, or what a link leads to."""
    path = hook(base, "exit 0")
    assert refused(path) is None
    link = base / "link"
    link.symlink_to(path)
    assert refused(str(link)) is None
    Path(path).chmod(0o775)
    assert "chmod go-w" in (refused(path) or "")
    Path(path).chmod(0o755)
    os.chown(path, 20001, 0)
    assert "20001" in (refused(path) or "")
    assert "20001" in (refused(str(link)) or "")
    os.chown(path, 0, 0)
    base.chmod(0o777)
    assert str(base) in (refused(path) or "")
    base.chmod(0o755)
    os.chown(base, 20001, 0)
    assert "20001" in (refused(path) or "")
    os.chown(base, 0, 0)
    assert refused(path) is None


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
