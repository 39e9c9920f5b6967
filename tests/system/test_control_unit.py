"""The control daemon as a systemd unit, against a stand-in for systemd itself: real processes, real files."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsagent.system import control_unit
from mpsagent.system.control import PID_FILE, ControlProblem, ProblemKind, Running
from mpsagent.system.control_unit import ControlUnit, UnitState, write_environment
from tests.coroutines import until
from tests.system.conftest import MakeProgram

pytestmark = pytest.mark.usefixtures("no_leak")

DAEMON = 'echo $$ >"$CUDA_MPS_PIPE_DIRECTORY/' + PID_FILE + '"; while :; do sleep 0.2; done'


class Systemd:
    """Starts the program with the environment file, as the unit would."""

    def __init__(self, program: Path, environment: Path) -> None:
        self.program = program
        self.environment = environment
        self.child: subprocess.Popen[bytes] | None = None
        self.calls: list[str] = []
        self.states: list[UnitState] = []
        self.hang = 0.0
        self.guesses = True

    def start(self, unit: str) -> None:
        self.calls.append(f"start {unit}")
        time.sleep(self.hang)
        given = dict(word.split("=", 1) for word in shlex.split(self.environment.read_text()))
        words = [given["MPSAGENT_CONTROL"], "-d", *given["MPSAGENT_CONTROL_OPTIONS"].split()]
        self.child = subprocess.Popen(words, env={"PATH": "/usr/bin:/bin", **given})
        queued = UnitState("loaded", "inactive", 0, "success", job=True)
        self.states = [queued, *[UnitState("loaded", "activating", 0, "success", job=True)] * 3]

    def state(self, unit: str) -> UnitState:
        time.sleep(self.hang)
        if self.states:
            return self.states.pop(0)
        if self.child is None:
            return UnitState("not-found", "inactive", 0, "")
        if self.child.poll() is not None:
            code = self.child.poll()
            if code is not None and code > 0:
                return UnitState("loaded", "failed", 0, "exit-code", code)
            return UnitState("loaded", "failed", 0, "signal")
        return UnitState("loaded", "active", self.child.pid if self.guesses else 0, "success")

    def forget_failure(self, unit: str) -> None:
        self.calls.append(f"forget {unit} with {len(self.states)} states before it")


@pytest.fixture
def pipe(tmp_path: Path) -> str:
    (tmp_path / "pipe").mkdir()
    return str(tmp_path / "pipe")


@pytest.fixture
def systemd(program: MakeProgram, tmp_path: Path) -> Iterator[Systemd]:
    stand_in = Systemd(program(DAEMON), tmp_path / "instance-gpu0.env")
    yield stand_in
    if stand_in.child is not None:
        stand_in.child.kill()
        stand_in.child.wait()


def unit(systemd: Systemd, pipe: str, gone: list[int]) -> ControlUnit:
    return ControlUnit(
        "gpu0",
        pipe,
        gone.append,
        program=str(systemd.program),
        run_directory=str(systemd.environment.parent),
        systemd=systemd,
    )


async def test_it_is_started_and_proved_through_its_unit(systemd: Systemd, pipe: str) -> None:
    """The fail-safe limit and the hidden directory reach the daemon through the environment file."""
    gone: list[int] = []
    control = unit(systemd, pipe, gone)
    running = await control.start({"CUDA_VISIBLE_DEVICES": "GPU-1"}, 10, multiuser=True)
    assert isinstance(running, Running), running
    assert running.threads == "10.0"
    assert running.devices == "GPU-1"
    assert running.multiuser
    assert running.how == "started as mpsagent-control@gpu0.service"
    assert control.kill() is None
    await until(lambda: gone == [running.pid])
    assert systemd.calls == ["start mpsagent-control@gpu0.service"]
    control.close()


async def test_a_restarted_agent_adopts_the_unit_or_else_what_runs_there(systemd: Systemd, pipe: str) -> None:
    """Its own unit first; otherwise what runs on the same directory, also when systemd does not answer."""
    absent = await unit(systemd, pipe, []).adopt()
    assert isinstance(absent, ControlProblem)
    assert absent.kind is ProblemKind.ABSENT
    first = unit(systemd, pipe, [])
    started = await first.start({}, 10)
    assert isinstance(started, Running)
    first.close()
    second = unit(systemd, pipe, [])
    adopted = await second.adopt()
    assert isinstance(adopted, Running)
    assert (adopted.pid, adopted.how) == (started.pid, "its unit mpsagent-control@gpu0.service")
    second.close()
    systemd.states = [UnitState("not-found", "inactive", 0, "")]
    third = unit(systemd, pipe, [])
    await until(lambda: Path(pipe, PID_FILE).exists())
    by_hand = await third.adopt()
    assert isinstance(by_hand, Running)
    assert (by_hand.pid, by_hand.how) == (started.pid, "its pid file")
    third.close()


@pytest.mark.parametrize(
    ("script", "multiuser", "kind", "words"),
    [
        ("exit 244", False, ProblemKind.FAILED, "cannot load libcuda.so.1"),
        ("exit 1", False, ProblemKind.FAILED, "status 1"),
        ("exit 1", True, ProblemKind.UNSUPPORTED, "does not know --multiuser-server"),
        ("kill -KILL $$", False, ProblemKind.FAILED, "failed, signal"),
    ],
)
async def test_a_unit_that_fails_says_why_and_where_to_look(
    systemd: Systemd, pipe: str, program: MakeProgram, script: str, multiuser: bool, kind: str, words: str
) -> None:
    """With the commands for the person on call."""
    systemd.program = program(script)
    control = unit(systemd, pipe, [])
    found = await control.start({}, 10, multiuser=multiuser)
    assert isinstance(found, ControlProblem)
    assert found.kind is kind
    assert words in found.text
    assert "journalctl -b -u mpsagent-control@gpu0.service" in found.commands
    control.close()


async def test_a_missing_program_is_said_before_the_unit_is_asked(systemd: Systemd, pipe: str) -> None:
    """The reason would otherwise stand in another unit's journal, 15 s later."""
    systemd.program = Path("/nowhere/nvidia-cuda-mps-control")
    control = unit(systemd, pipe, [])
    found = await control.start({}, 10)
    assert isinstance(found, ControlProblem)
    assert found.kind is ProblemKind.MISSING
    assert systemd.calls == []
    control.close()


async def test_a_unit_that_serves_another_directory_is_left_alone(systemd: Systemd, pipe: str) -> None:
    """After an upgrade from the first edition: its daemon serves the public directory, with people's work."""
    Path(pipe).with_name("public").mkdir()
    older = unit(systemd, str(Path(pipe).with_name("public")), [])
    running = await older.start({}, 10)
    assert isinstance(running, Running)
    older.close()
    systemd.start = lambda unit: systemd.calls.append(unit)  # type: ignore[method-assign]
    control = unit(systemd, pipe, [])
    found = await control.start({}, 10)
    assert isinstance(found, ControlProblem)
    assert found.kind is ProblemKind.UNSAFE
    assert f"process {running.pid}" in found.text
    assert found.commands == ("systemctl stop mpsagent-control@gpu0.service",)
    assert Path(f"/proc/{running.pid}").exists()
    control.close()


async def test_a_daemon_whose_process_systemd_could_not_guess_is_searched_for(systemd: Systemd, pipe: str) -> None:
    """A server may be there already when the first process returns; then systemd names none."""
    systemd.guesses = False
    control = unit(systemd, pipe, [])
    running = await control.start({}, 10)
    assert isinstance(running, Running), running
    assert systemd.child is not None
    assert running.pid == systemd.child.pid
    control.close()


async def test_a_hanging_bus_does_not_stall_the_agent(
    systemd: Systemd, pipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call stays behind in its thread; the agent gets a text in time."""
    monkeypatch.setattr(control_unit, "CALL_DEADLINE", 0.1)
    systemd.hang = 1.5
    control = unit(systemd, pipe, [])
    found = await control.start({}, 10)
    assert isinstance(found, ControlProblem)
    assert "systemd does not answer" in found.text
    absent = await control.adopt()
    assert isinstance(absent, ControlProblem)
    await until(lambda: systemd.child is not None)
    control.close()


async def test_no_system_bus_is_a_sentence(tmp_path: Path, pipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container without systemd: pystemd's own error, in words."""
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/no-bus")
    control = ControlUnit("gpu0", pipe, lambda _: None, program="/bin/true", run_directory=str(tmp_path))
    found = await control.start({}, 10)
    assert isinstance(found, ControlProblem)
    assert "could not be started: " in found.text
    assert len(found.text) > len("mpsagent-control@gpu0.service could not be started: ")


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 65, "ä", "a\n", "a@b"])
def test_names_that_are_no_part_of_a_unit_name_are_refused(name: str) -> None:
    """The name comes from a policy and becomes a path and a D-Bus argument."""
    with pytest.raises(ValueError, match="unit name"):
        ControlUnit(name, "/tmp/x", lambda _: None)


def test_the_environment_file_is_private_whole_and_quoted(tmp_path: Path) -> None:
    """No one ever reads half of it; values with quotes, dollars and blanks stay what they are."""
    path = tmp_path / "instance-x.env"
    tricky = 'a "b" $c `d` \\ e'
    write_environment(path, {"A": tricky, "B": ""})
    assert shlex.split(path.read_text()) == [f"A={tricky}", "B="]
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["instance-x.env"]
    for bad in ({"A": "x\ny"}, {"A B": "x"}, {"": "x"}, {"1A": "x"}):
        with pytest.raises(ValueError, match="cannot be written"):
            write_environment(path, bad)
    assert shlex.split(path.read_text()) == [f"A={tricky}", "B="]


async def test_a_killed_daemon_is_noticed(systemd: Systemd, pipe: str) -> None:
    """By its pidfd, without asking systemd."""
    gone: list[int] = []
    control = unit(systemd, pipe, gone)
    running = await control.start({}, 10)
    assert isinstance(running, Running)
    os.kill(running.pid, signal.SIGKILL)
    await until(lambda: gone == [running.pid])
    assert control.running is None


async def test_nothing_is_taken_from_a_unit_before_it_has_ended(systemd: Systemd, pipe: str) -> None:
    """What it runs at its end reads the environment file: without it the compute mode was not given back, and the unit
    had failed."""
    states = [("active", False), ("deactivating", False), ("deactivating", True), ("failed", False)]
    systemd.states = [UnitState("loaded", active, 0, "success", job=job) for active, job in states]
    await unit(systemd, pipe, []).forget()
    assert systemd.calls == ["forget mpsagent-control@gpu0.service with 0 states before it"]
