"""`mpsagent-cli doctor` about what the agent knows, and what takes long while it says so."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mpsagent.agent.conditions import Condition
from mpsagent.api import views
from mpsagent.cli import progress as cli_progress
from mpsagent.cli.progress import Progress
from tests.api.stand_in import START, Served, StandIn, serve
from tests.cli.program import run


class Forward(StandIn):
    """Its newest event lies an hour ahead."""

    def event(self, record: Any) -> Any:
        return {**super().event(record), "at": views.iso(time.time() + 3600)}


@pytest.fixture
def served() -> Iterator[Served]:
    with serve(Forward()) as one:
        yield one


def test_what_the_agent_knows_is_found_with_how_to_mend_it(served: Served) -> None:
    """A client outside MPS, a policy that has mistakes, a clock that was set back."""
    backend = served.backend
    backend.happen("one")
    backend.errors = ('policy.toml:3: unknown key "thread"',)
    backend.conditions = (
        Condition("computing outside MPS, without limits: process 77", START, "set it right"),
        Condition("2 clients were refused", START, "use hostPID", bad="not sure"),
    )
    done = run(served, "doctor", "--json")
    assert (done.returncode, done.stderr) == (1, "")
    found = {(one["grade"], one["topic"]): one for one in json.loads(done.stdout)["findings"]}
    assert found["problem", "policy"]["do"] == "mpsagent-cli policy check"
    texts = [one["what"] for one in json.loads(done.stdout)["findings"]]
    assert "computing outside MPS, without limits: process 77" in texts
    assert [one for one in texts if "the clock was set back" in one]
    assert found["warning", "not sure"]["do"] == "use hostPID"


class Terminal:
    def __init__(self, *, there: bool) -> None:
        self.there, self.text = there, ""

    def isatty(self) -> bool:
        return self.there

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_what_takes_long_says_what_it_is_at_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(cli_progress, "AFTER", 0.01)
    monkeypatch.setattr(cli_progress, "EVERY", 0.01)
    for there in (True, False):
        monkeypatch.setattr("sys.stderr", terminal := Terminal(there=there))
        with Progress("one thing") as progress:
            end = time.monotonic() + (30 if there else 0.1)
            while "one thing … " not in terminal.text and time.monotonic() < end:
                time.sleep(0.005)
            progress.at("another")
            while "\ranother … " not in terminal.text and time.monotonic() < end:
                time.sleep(0.005)
        assert ("\ranother … " in terminal.text, terminal.text.endswith("\r\x1b[K")) == (there, there)


def test_what_is_quick_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(cli_progress, "AFTER", 60.0)
    monkeypatch.setattr("sys.stderr", terminal := Terminal(there=True))
    with Progress("one thing"):
        pass
    assert terminal.text == ""
