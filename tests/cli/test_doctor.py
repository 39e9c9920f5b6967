"""`mpsagent-cli doctor` about what the agent knows, and what takes long while it says so."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mpsagent.agent.condition import Condition
from mpsagent.api import views
from tests.api.stand_in import START, Served, StandIn, serve
from tests.cli.program import run


class Forward(StandIn):
    """Its newest event lies an hour ahead."""

    def event(self, record: Any) -> Any:
        return {**super().event(record), "at": views.when(time.time() + 3600)}


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
