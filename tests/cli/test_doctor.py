"""`mpsagent-cli doctor` about what the agent knows, and what takes long while it says so."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpsagent.api import views
from mpsagent.cli import doctor
from mpsagent.snapshot.condition import Condition
from mpsagent.system.control import ControlProblem, installed
from tests.api.stand_in import START, Served, StandIn, serve
from tests.cli.program import run
from tests.never_comes import process_that_cannot_be_read


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
    assert found["note", "not sure"]["do"] == "use hostPID"


def test_a_program_that_was_installed_after_the_agent_had_looked_is_not_said_to_be_missing(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a problem, "not installed", above a line that gave its path."""
    for name in ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = installed("nvidia-cuda-mps-control", {"PATH": "/nowhere"})
    assert isinstance(found, ControlProblem)
    served.backend.conditions = (Condition(found.text, START, "install it"),)
    seen = doctor._ask(str(served.path))
    (one,) = [one for one in doctor._agent(str(served.path), seen) if "nvidia-cuda-mps-control" in one.what]
    assert one.what == f"nvidia-cuda-mps-control is there now ({tmp_path}/nvidia-cuda-mps-control), and was not before"
    assert "the agent tries again within a minute" in one.do


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root to start a process of another user")
def test_a_process_that_cannot_be_read_is_named_as_what_keeps_the_look_waiting(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole of `doctor` would wait for as long as that process lives."""
    monkeypatch.setattr(doctor, "CHECK", 2.0)
    ended = queue.SimpleQueue[list[doctor.Finding]]()
    with process_that_cannot_be_read():
        seen = doctor._ask(str(served.path))
        threading.Thread(target=lambda: ended.put(list(doctor._findings(str(served.path), seen))), daemon=True).start()
        found = ended.get(timeout=60)
    assert [one.topic for one in found if "could not be looked at within" in one.what] == ["processes"]


@pytest.mark.parametrize(("grades", "strict", "status"), [
    (["ok", "note"], True, 0), (["ok", "warning"], False, 0), (["ok", "warning"], True, 1), (["problem"], False, 1),
])  # fmt: skip
def test_a_problem_fails_and_with_strict_a_warning(
    served: Served, monkeypatch: pytest.MonkeyPatch, grades: list[str], strict: bool, status: int
) -> None:
    monkeypatch.setattr(doctor, "_findings", lambda _path, _seen: [doctor.Finding(one, "topic", one) for one in grades])
    assert doctor.doctor(str(served.path), False, strict) == status
    assert doctor.doctor(str(served.path) + "-none", False, strict) == 3


def test_a_check_that_fails_is_a_finding_and_keeps_no_other_from_being_made(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> list[doctor.Finding]:
        raise PermissionError(13, "Permission denied", "/x")

    monkeypatch.setattr(doctor.checkup, "log_rotation", fails)
    found = list(doctor._findings(str(served.path), doctor._ask(str(served.path))))
    assert [one.grade for one in found if "/x" in one.what] == ["warning"]
    assert found[-1].topic == "doctor" or os.geteuid() == 0
    assert {"mpsagent", "programs", "driver"} <= {one.topic for one in found}


def test_findings_of_the_agent_and_of_the_machine_are_shown_once(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = [
        doctor.Finding("problem", "one", "the same for user 0"),
        doctor.Finding("note", "two", "the same for root"),
    ]
    monkeypatch.setattr(doctor, "_findings", lambda _path, _seen: twice)
    doctor.doctor(str(served.path), True, False)
    assert [one["topic"] for one in json.loads(capsys.readouterr().out)["findings"]] == ["one"]
