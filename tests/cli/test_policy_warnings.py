"""Warnings about this machine: real users, groups and programs, and a name service that hangs."""

from __future__ import annotations

import asyncio
import os
import pwd
import threading
from pathlib import Path

import pytest

from mpsagent.cli import policy_warnings
from mpsagent.cli.policy_warnings import known, warnings
from mpsagent.mps.limits import Device
from tests.policies import policy

H200 = Device(0, "GPU-1", "NVIDIA H200", 140 << 30, 132)


def test_this_machines_users_groups_and_programs(tmp_path: Path) -> None:
    """root is there, rooot is not, and of three programs one can be run."""
    script, plain = tmp_path / "run", tmp_path / "plain"
    for path, mode in ((script, 0o755), (plain, 0o644)):
        path.write_text("#!/bin/sh\n")
        path.chmod(mode)
    found = known(["root", "rooot"], ["root", "rooot"], [str(script), str(plain), str(tmp_path), "/no/where"])
    assert "root" in found.users & found.groups
    assert "rooot" not in found.users | found.groups
    assert found.programs == {
        str(plain): f"{plain} is not executable; allow it: chmod +x {plain}",
        str(tmp_path): f"{tmp_path} is not a file",
        "/no/where": "/no/where: No such file or directory",
    }
    script.chmod(0o777)
    assert "can be written to by others" in known([], [], [str(script)]).programs[str(script)]


def test_a_part_of_the_policy_that_is_not_read_because_of_its_name(tmp_path: Path) -> None:
    """A file `20-students` was passed over without a word; copies that were put aside are not meant to be read."""
    for name in ("10-a.toml", "20-students", "30.TOML", "README.md", ".swp", "40.toml~", "50.toml.dpkg-old", "\x1b.x"):
        (tmp_path / name).write_text("")
    found = asyncio.run(warnings(policy(""), (), parts=tmp_path))
    over = [one for one in found if "is not read" in one.problem]
    assert [one.file.removeprefix(f"{tmp_path}/") for one in over] == ["20-students", "30.TOML", "\\x1b.x"]
    assert not [
        one for one in asyncio.run(warnings(policy(""), (), parts=tmp_path / "none")) if "is not read" in one.problem
    ]


def test_a_group_of_ordinary_users_as_administrators_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """admin_group = "users" was called good."""

    def account(name: str, uid: int, gid: int) -> pwd.struct_passwd:
        return pwd.struct_passwd((name, "x", uid, gid, "", "/", "/bin/sh"))

    monkeypatch.setattr(policy_warnings.pwd, "getpwall", lambda: [account("a", 1001, 0), account("b", 1002, 0)])
    for group, warned in (("root", True), ("daemon", False), ("nogroup", True)):
        found = asyncio.run(warnings(policy(f'[agent]\nadmin_group = "{group}"\n'), ()))
        assert any("ordinary users" in one.problem for one in found) is warned, group


def test_a_program_that_is_not_on_path() -> None:
    """`control_daemon_path` may be a name; one with a mistake in it was called good."""
    found = known([], [], ["sh", "nvidia-cuda-mps-contrl"]).programs
    assert list(found) == ["nvidia-cuda-mps-contrl"]
    assert found["nvidia-cuda-mps-contrl"].startswith("nvidia-cuda-mps-contrl is not on PATH (/")


def test_a_hook_that_the_units_sandbox_hides_is_warned_about_at_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`policy check` saw a hook in /root and called the policy good; the agent could not see it."""
    hook = tmp_path / "hook"
    hook.write_text("#!/bin/sh\n")
    hook.chmod(0o755)
    monkeypatch.setattr(policy_warnings, "HOMES", (f"{tmp_path}/",))
    monkeypatch.setattr(policy_warnings, "SYSTEMD", tmp_path)
    assert known([], [], [str(hook)]).programs == {str(hook): f"{hook} lies {policy_warnings.HIDDEN}"}
    monkeypatch.setattr(policy_warnings, "SYSTEMD", tmp_path / "no-systemd")
    assert known([], [], [str(hook)]).programs == {}


def test_a_name_that_no_list_has_is_asked_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directory services often list no one, and know everyone by name."""
    monkeypatch.setattr(pwd, "getpwall", list)
    assert known(["root", "rooot"], [], []).users == {"root"}


def test_names_that_no_name_service_can_take() -> None:
    """A name with a NUL or of any length is unknown, and nothing worse."""
    assert known(["a\0b", "x" * 100_000, ""], ["a\0b"], []).users.isdisjoint({"a\0b", ""})


def test_all_warnings_in_the_order_of_the_file() -> None:
    """What `policy check` prints."""
    made = policy(
        "[limits]\nactive_threads = 500\n[user.rooot]\nactive_threads = '5%'\n[hooks]\npre_terminate = '/no/where'\n"
        "[group.root]\nactive_threads = '3%'\n"
    )
    found = asyncio.run(warnings(made, [H200]))
    assert [(one.line, one.key) for one in found] == [
        (2, "limits.active_threads"),
        (3, "user.rooot"),
        (6, "hooks.pre_terminate"),
    ]


def test_a_name_service_that_hangs_costs_its_warnings_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """LDAP is down: the policy is loaded all the same, and the GPUs are compared."""
    released = threading.Event()
    monkeypatch.setattr(policy_warnings, "known", lambda *_: released.wait(60))
    try:
        made = policy("[limits]\nactive_threads = 500\n[user.rooot]\n")
        found = asyncio.run(warnings(made, [H200], deadline=0.05))
    finally:
        released.set()
    assert [one.key for one in found] == ["limits.active_threads"]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_a_program_of_another_user_is_warned_about(tmp_path: Path) -> None:
    """Root would run what that user writes into it."""
    path = tmp_path / "run"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    os.chown(path, 65534, 65534)
    assert "belongs to uid 65534" in known([], [], [str(path)]).programs[str(path)]


def test_a_user_whose_groups_leave_no_room_is_warned_of() -> None:
    """root is in the group root wherever there is one: what the name service says is held against the totals."""
    made = policy(
        "[user.root]\nactive_threads = '70%'\n[group.root]\nactive_threads = '20%'\ntotal_active_threads = '60%'\n"
    )
    found = asyncio.run(warnings(made, []))
    assert [(one.line, one.problem[:39]) for one in found] == [(5, "no client process of root ever fits: th")]
    assert (
        asyncio.run(
            warnings(policy("[group.root]\nactive_threads = '20%'\n[user.root]\ntotal_active_threads = '60%'\n"), [])
        )
        == ()
    )
