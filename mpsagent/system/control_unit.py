"""The control daemon in a systemd unit of its own, ``mpsagent-control@NAME.service``, over D-Bus.

So it has its own cgroup: the agent can crash, restart or be upgraded while CUDA work goes on. What the daemon is to be
started with goes into a file that the unit reads (EnvironmentFile=). D-Bus is used in a thread with a deadline.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from mpsagent.linux import atomic_file
from mpsagent.linux.threads import in_thread
from mpsagent.mps.commands import NO_DAEMON_TEXT
from mpsagent.system.control import (
    MULTIUSER,
    PROGRAM,
    ControlProblem,
    ControlSupervisor,
    ProblemKind,
    Running,
    daemon_environment,
    installed,
    start_failure,
)
from mpsagent.system.control_search import prove, search

RUN_DIRECTORY = "/run/mpsagent"
START_DEADLINE = 30.0
CALL_DEADLINE = 5.0
"""Seconds for one question to systemd; it answers in milliseconds unless it is in difficulty itself."""
STEP = 0.02


class UnitState(NamedTuple):
    """What systemd says of a unit. ``active``: its ActiveState (``active``, ``activating``, ``inactive``, ``failed``);
    ``load``: ``loaded`` or ``not-found``; ``result``: why it failed; ``status``: exit status of its ExecStart=;
    ``job``: what was asked of it waits or goes on, so that it may be ``inactive`` and about to start."""

    load: str
    active: str
    main_pid: int
    result: str
    status: int = 0
    job: bool = False


class SystemBus:
    """systemd over the system bus, one connection for each call: a broken one is never met again. Blocks, and raises
    whatever pystemd raises."""

    def call(self, method: str, *arguments: bytes) -> None:
        """Of systemd's manager."""
        from pystemd.dbuslib import DBus
        from pystemd.systemd1 import Manager

        with DBus() as bus:
            getattr(Manager(bus=bus, _autoload=True).Manager, method)(*arguments)

    def start(self, unit: str) -> None:
        self.forget_failure(unit)
        self.call("StartUnit", unit.encode(), b"replace")

    def forget_failure(self, unit: str) -> None:
        with suppress(Exception):  # it says so when the unit had not failed
            self.call("ResetFailedUnit", unit.encode())

    def state(self, unit: str) -> UnitState:
        with units(unit) as (found,):
            job = found.Unit.Job[0] != 0  # before the state: it may end in between, and then the state is new
            load, active = text_of(found.Unit.LoadState), text_of(found.Unit.ActiveState)
            if load != "loaded":
                return UnitState(load, active, 0, "")
            service = found.Service
            starts = service.ExecStart  # per command: path, words, ignore, four times, pid, code, status
            status = int(starts[-1][-1]) if starts else 0
            return UnitState(load, active, int(service.MainPID), text_of(service.Result), status, job)


@contextmanager
def units(*names: str) -> Iterator[list[Any]]:
    """As systemd has them."""
    from pystemd.dbuslib import DBus
    from pystemd.systemd1 import Unit

    with DBus() as bus:
        yield [Unit(name.encode(), bus=bus, _autoload=True) for name in names]


class ControlUnit(ControlSupervisor):
    """Supervises the daemon of instance ``name``. ``on_gone(pid)`` is called when it has ended."""

    def __init__(
        self,
        name: str,
        pipe_directory: str,
        on_gone: Callable[[int], None],
        *,
        program: str = PROGRAM,
        run_directory: str = RUN_DIRECTORY,
        systemd: SystemBus | None = None,
    ) -> None:
        super().__init__(pipe_directory, on_gone, program)
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
            raise ValueError(f'"{name}" cannot be part of a unit name; use letters, digits, "_", "." and "-"')
        self.unit = f"mpsagent-control@{name}.service"
        self.environment_file = Path(run_directory, f"instance-{name}.env")  # the unit names the same path
        self._systemd = systemd or SystemBus()

    async def start(
        self,
        environment: Mapping[str, str],
        threads: float,
        *,
        multiuser: bool = False,
        deadline: float = START_DEADLINE,
    ) -> Running | ControlProblem:
        """Starts the unit with ``environment``, the hidden directory and ``threads`` in its environment file."""
        path = installed(self.program, os.environ)
        if isinstance(path, ControlProblem):
            return path
        unit = {"MPSAGENT_CONTROL": path, "MPSAGENT_CONTROL_OPTIONS": MULTIUSER if multiuser else ""}
        own = daemon_environment(self.pipe_directory, threads)
        try:
            write_environment(self.environment_file, {**environment, **own, **unit})
            async with asyncio.timeout(deadline):
                # A start would cancel the `systemctl stop` of an administrator, which then fails.
                with suppress(Exception):  # systemd in difficulty: the start reports it
                    await self._settled()
                await in_thread(self._systemd.start, self.unit, deadline=CALL_DEADLINE)
                state = await self._settled()
        except TimeoutError:
            return self._failed(f"{self.unit} was not up after {deadline:g} s, or systemd does not answer")
        except Exception as error:
            return self._failed(f"{self.unit} could not be started: {reason(error)}")
        if state.active != "active":
            return self._not_started(path, state, multiuser)
        found = await self._main_process(state, f"started as {self.unit}")
        if isinstance(found, Running):
            return self.hold(found)
        if found.kind is ProblemKind.ABSENT and state.main_pid:
            text = f"{self.unit} runs already on another directory (process {state.main_pid}), of an older mpsagent?"
            return ControlProblem(
                ProblemKind.UNSAFE, f"{text} When its work is done:", (f"systemctl stop {self.unit}",)
            )
        return self._failed(f"{self.unit} runs, but its control daemon is not found: {found.text}")

    async def adopt(self) -> Running | ControlProblem:
        """The unit's daemon, otherwise one that runs on the same hidden directory."""
        with suppress(Exception):  # systemd in difficulty: the process itself is proof enough
            state = await in_thread(self._systemd.state, self.unit, deadline=CALL_DEADLINE)
            if state.main_pid:
                found = await prove(state.main_pid, self.pipe_directory, f"its unit {self.unit}", self.program)
                if isinstance(found, Running):
                    return self.hold(found)
        found = await search(self.pipe_directory, self.program)
        return self.hold(found) if isinstance(found, Running) else found

    async def forget(self) -> None:
        """Waits for the end of its unit, which reads the environment file again after its daemon's. One whose daemon
        was killed has failed, until it is told that this does not matter any more."""
        with suppress(Exception):  # systemd in difficulty
            async with asyncio.timeout(START_DEADLINE):
                while (await self._settled()).active not in ("inactive", "failed"):
                    await asyncio.sleep(STEP)
            await in_thread(self._systemd.forget_failure, self.unit, deadline=CALL_DEADLINE)

    async def _main_process(self, state: UnitState, how: str) -> Running | ControlProblem:
        """systemd guesses the main process; where it could not, the daemon is searched for."""
        if state.main_pid:
            found = await prove(state.main_pid, self.pipe_directory, how, self.program)
            if isinstance(found, Running) or found.kind is not ProblemKind.ABSENT:
                return found
        return await search(self.pipe_directory, self.program, how)

    def _not_started(self, path: str, state: UnitState, multiuser: bool) -> ControlProblem:
        # The last words are in the journal. Status 1 with the option: drivers before 580 do not know it.
        unknown = multiuser and state.status == 1
        said = NO_DAEMON_TEXT if unknown else "its messages are in the journal"
        if state.result == "exit-code" and state.status:
            problem = start_failure(path, state.status, said, multiuser)
            return ControlProblem(problem.kind, f"{self.unit}: {problem.text}", (*problem.commands, *self._commands()))
        return self._failed(f"{self.unit} did not start: {state.active}, {state.result or state.load}")

    async def _settled(self) -> UnitState:
        """Waits while the unit is on its way from one state to another, or is to go: systemd says yes before it begins,
        and begins when all is up that the unit comes after."""
        while True:
            state = await in_thread(self._systemd.state, self.unit, deadline=CALL_DEADLINE)
            if not (state.job or state.active.endswith("ing")):
                return state
            await asyncio.sleep(STEP)

    def _failed(self, text: str) -> ControlProblem:
        return ControlProblem(ProblemKind.FAILED, text, self._commands())

    def _commands(self) -> tuple[str, str]:
        return f"systemctl status {self.unit}", f"journalctl -b -u {self.unit}"


def write_environment(path: Path, environment: Mapping[str, str]) -> None:
    """An EnvironmentFile= for systemd: complete or not there at all. Raises ValueError for what it cannot hold."""
    lines = []
    for key, value in environment.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key) or any(ord(sign) < 32 for sign in value):
            raise ValueError(f"{key} cannot be written to {path}: names are letters, values have no control characters")
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        lines.append(f'{key}="{escaped}"\n')
    atomic_file.write(path, "".join(lines))


def text_of(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "systemd does not answer"
    if isinstance(error, ImportError):
        return f"pystemd is not usable here: {error}"
    return " ".join(text_of(part) for part in error.args) or type(error).__name__
