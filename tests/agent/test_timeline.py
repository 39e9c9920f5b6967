"""`mpsagent-cli timeline` of a real agent: what has been so is in the picture."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.agent.stage import A, B, Stage

PROGRAM = str(Path(sys.executable).with_name("mpsagent-cli"))


def rows(stage: Stage, page: Path) -> list[tuple[str, str, str]]:
    """Who, what, in words: the table of a page that the command has just written."""
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "MPSAGENT_SOCKET": str(stage.place / "agent.sock")}
    command = [PROGRAM, "timeline", "--since", "10m", "--html", str(page)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return re.findall(r"<tr><td>[^<]*</td><td>([^<]*)</td><td>([^<]*)</td><td>([^<]*)</td></tr>", page.read_text())


def test_a_wait_a_forced_end_and_who_works_now(stage: Stage, tmp_path: Path) -> None:
    """A works, B waits; A's client is ended by an administrator, and B works."""
    agent = stage.with_agent("[limits]\nthreads = 50\n")
    first = stage.client(A, "sleep", 600)
    first.known()
    second = stage.client(B, "sleep", 600)
    stage.waiting(second)
    assert agent.api.order("terminate", pid=first.pid, now=True)[0] == 200
    second.working()
    stage.record("client.ended", pid=first.pid)
    page = tmp_path / "page.html"
    found = rows(stage, page)
    kinds = {(who, what) for who, what, _ in found}
    a, b = (
        next(who for who, what, text in found if what == "at work" and str(one.pid) in text) for one in (first, second)
    )
    assert a != b
    assert {(a, "ended by mpsagent"), (b, "waits at the gate"), (b, "at work"), ("GPU", "has the GPU alone")} <= kinds
    assert "not on record" not in page.read_text()
    assert [who for who, what, _ in found if what == "at work"].count(b) == 1
    assert any(who == b and "still" in text and "50 %" in text for who, _, text in found)


def test_a_pause_while_it_goes_on_and_when_it_is_over(stage: Stage, tmp_path: Path) -> None:
    """A stands while B works, until B's process has ended."""
    policy = f'[switch]\naction = "pause"\nslice = "10m"\n[user.{A}]\nswitch.slice = "1s"\n'
    stage.policy(policy, extra='server = "shared"')
    stage.again()
    first = stage.client(A, "sleep", 600)
    stage.record("client.connected", pid=first.pid)
    second = stage.client(B, "sleep", 600)
    second.working()

    def pause() -> str:
        found = rows(stage, tmp_path / "page.html")
        user = next(who for who, what, text in found if what == "at work" and str(first.pid) in text)
        assert not {"several users at once", "turn ended by the policy"} & {what for _, what, _ in found}
        (text,) = [text for who, what, text in found if what == "paused until its next turn" and who == user]
        return text

    assert re.search(r"was paused from .* still .*, 1 process frozen", pause())
    second.kill()
    stage.record("user.resumed", uid=A)
    assert re.search(r"was paused from .* until .*, 1 process frozen", pause())
