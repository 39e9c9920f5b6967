"""`mpsagent-cli timeline` of a real agent: what has been so is in the picture."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.agent.stage import A, B, Stage

PROGRAM = str(Path(sys.executable).with_name("mpsagent-cli"))


def test_a_wait_a_forced_end_and_who_works_now(stage: Stage, tmp_path: Path) -> None:
    """A works, B waits; A's client is ended by an administrator, and B works."""
    agent = stage.with_agent("[limits]\nthreads = 50\n")
    first = stage.client(A, "sleep", 600)
    first.known()
    second = stage.client(B, "sleep", 600)
    stage.waiting(second)
    assert agent.api.ask("POST", f"/v1/clients/{first.pid}/terminate", {"now": True})[0] == 200
    second.working()
    stage.record("client.ended", pid=first.pid)
    page = tmp_path / "page.html"
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "MPSAGENT_SOCKET": str(stage.place / "agent.sock")}
    command = [PROGRAM, "timeline", "--since", "10m", "--html", str(page)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    rows = re.findall(r"<tr><td>[^<]*</td><td>([^<]*)</td><td>([^<]*)</td><td>([^<]*)</td></tr>", page.read_text())
    kinds = {(who, what) for who, what, _ in rows}
    a, b = (
        next(who for who, what, text in rows if what == "at work" and str(one.pid) in text) for one in (first, second)
    )
    assert a != b
    assert {(a, "ended by mpsagent"), (b, "waits at the gate"), (b, "at work"), ("GPU", "has the GPU alone")} <= kinds
    assert "not on record" not in page.read_text()
    assert [who for who, what, _ in rows if what == "at work"].count(b) == 1
    assert any(who == b and "still" in text and "50 %" in text for who, _, text in rows)
