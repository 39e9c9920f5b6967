"""`mpsagent-cli timeline` of a real agent: what has been so is in the picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.agent.stage import A, B, Stage

PROGRAM = str(Path(sys.executable).with_name("mpsagent-cli"))


def rows(stage: Stage) -> list[tuple[str, str, str]]:
    """Who, what, in words: of a picture that the command has just made."""
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "MPSAGENT_SOCKET": str(stage.place / "agent.sock")}
    command = [PROGRAM, "timeline", "--since", "10m", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    picture = json.loads(done.stdout)
    return [
        (row["label"], one["kind"], one["text"])
        for row in (*picture["gpus"], *picture["users"]) for one in (*row["spans"], *row["marks"])
    ]  # fmt: skip


def test_a_wait_a_forced_end_and_who_works_now(stage: Stage) -> None:
    """A works, B waits; A's client is ended by an administrator, and B works."""
    agent = stage.with_agent("[limits]\nthreads = 50\n")
    first = stage.client(A, "sleep", 600)
    first.known()
    second = stage.client(B, "sleep", 600)
    stage.waiting(second)
    assert agent.api.order("terminate", pid=first.pid, now=True)[0] == 200
    second.working()
    stage.record("client.ended", pid=first.pid)
    found = rows(stage)
    kinds = {(who, what) for who, what, _ in found}
    a, b = (
        next(who for who, what, text in found if what == "work" and str(one.pid) in text) for one in (first, second)
    )
    assert a != b
    assert {(a, "forced"), (b, "wait"), (b, "work"), ("GPU", "alone")} <= kinds
    assert not [text for _, _, text in found if "not on record" in text]
    assert [who for who, what, _ in found if what == "work"].count(b) == 1
    assert any(who == b and "still" in text and "50 %" in text for who, _, text in found)
