"""A control daemon as the agent has it: its directories, its process, its two logs, and what it is asked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from datetime import UTC
from pathlib import Path
from typing import Any

from mpsagent.agent.bypass import Inside
from mpsagent.agent.catch_up import Caught, catch_up, child_of, foreign
from mpsagent.agent.clients import ClientProcesses
from mpsagent.agent.clock import SteadyClock
from mpsagent.agent.conditions import Conditions
from mpsagent.agent.executor import Executor, control_runs, mps_environment
from mpsagent.agent.journaling import log
from mpsagent.agent.log_side import LogSide
from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core.coordinator import Core
from mpsagent.core.model import Key, State
from mpsagent.linux import lock
from mpsagent.mps.events import Line
from mpsagent.mps.loglines import LogParser
from mpsagent.policy import apart
from mpsagent.policy.policy import Policy
from mpsagent.system import control_search, directories
from mpsagent.system.control import ControlSupervisor, ProblemKind, Running
from mpsagent.system.freezer import Freezer
from mpsagent.system.frontend import FrontEndQueue
from mpsagent.system.gate_link import GateLink
from mpsagent.system.gpu_files import GpuFiles
from mpsagent.system.logfiles import Position
from mpsagent.system.terminal import Terminals

MakeSupervisor = Callable[[Policy, directories.Directories, Callable[[int], None]], ControlSupervisor]
Caughts = dict[str, tuple[Position | None, LogParser]]
"""For each log, how far it has been read and by which parser."""


class Lane:
    """Of an instance whose engine is ``core``. ``key``: the user whose own it is; None: it is for all users. ``take``
    decides on what is new, ``absorb`` does not; ``record`` writes down."""

    def __init__(
        self,
        key: Key,
        policy: Policy,
        run_directory: str,
        *,
        core: Core,
        clock: SteadyClock,
        conditions: Conditions,
        record: Callable[..., int],
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        take: Callable[[Sequence[inp.Input]], None],
        link: GateLink,
        clients: ClientProcesses,
        freezer: Freezer,
        terminals: Terminals,
        gpu_files: GpuFiles,
        make_supervisor: MakeSupervisor,
    ) -> None:
        self.key = key
        self.name = apart.daemon_name(policy.instance, key)
        self.conditions = conditions
        self.up_since: float | None = None
        """Since when the control daemon runs."""
        log_directory = policy.log_directory if key is None else apart.log_directory(policy, key)
        self.where = directories.directories(self.name, policy.pipe_directory, log_directory, run_directory)
        self._core, self._clock, self._record, self._take = core, clock, record, take
        self._spawn_aside = spawn
        self._tasks: set[asyncio.Task[Any]] = set()
        self._clients = clients
        self._front_end = FrontEndQueue(policy.control_daemon_path, mps_environment(policy, self.where))
        self.supervisor = make_supervisor(policy, self.where, self._control_gone)
        self.executor = Executor(
            self.where, self._front_end, self.supervisor, link, clients, clock, self._say, self.state, freezer,
            terminals, gpu_files,
        )  # fmt: skip
        self.logs = LogSide(self.where.log, self.state, clock, conditions, self._logged, self.spawn)
        self._held: int | None = None
        self._trouble: tuple[str, str] | None = None

    def state(self) -> State:
        """What the engine knows of it."""
        engine = self._core.engines.get(self.key)
        return State(self._core.state.policy) if engine is None else engine.state

    @property
    def inside(self) -> Inside:
        """What is inside MPS here."""
        running = self.supervisor.running
        return Inside(None if running is None else running.pid, self.state(), self._clients)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._spawn_aside(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def of(self, events: Sequence[inp.Input]) -> list[inp.Input]:
        """Said to be about this lane."""
        return list(events) if self.key is None else [inp.Of(self.key, one) for one in events]  # type: ignore[arg-type]

    def _say(self, events: Sequence[inp.Input]) -> None:
        self._take(self.of(events))

    # --- start and end ------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Take hold of the directories: one agent looks after them. Raises AlreadyLocked when another agent does,
        DirectoryRefused, or OSError."""
        directories.prepare_hidden(self.where)
        what = "the control daemon" if self.key is None else f"the control daemon of user {self.key}"
        self._held = lock.take(f"{self.where.home}/agent.lock", f"{what} of {self.where.public}")

    async def adopt(self) -> list[inp.Input]:
        """Take over our own control daemon that runs already, and name those of others. Returns what the engine has to
        know."""
        await self.end_orphans()
        found = await self.supervisor.adopt()
        now = self._clock.now()
        if isinstance(found, Running):
            self.up_since = now
            self._record("control.adopted", now, pid=found.pid, how=found.how)
            what = _differs(found, self.where.log, self._core.state.policy.devices)
            self.conditions.set("adopted", what, now, "when no client works: mpsagent-cli restart-mps")
            return [control_runs(found, self.where, now)]
        if found.kind is ProblemKind.UNSAFE:
            self.conditions.set("control daemon", found.text, now, do=" && ".join(found.commands))
            self._record("control.unsafe", now, text=found.text, commands=list(found.commands))
        return []

    async def end_orphans(self) -> None:
        for pid in await control_search.end_orphans(self.where.hidden, self._core.state.policy.control_daemon_path):
            log.warning("server", text=f"server {pid} has outlived its control daemon: killed")

    async def read_logs(self) -> tuple[list[Line], Caughts]:
        """What the logs say of the daemon that runs, from its first line on, and how far they have been read."""
        paths = f"{self.where.log}/control.log", f"{self.where.log}/server.log"
        control, server = LogParser("control", UTC), LogParser("server", UTC)
        running = self.supervisor.running
        if running is None:
            caught = Caught([], _end(paths[0]), _end(paths[1]))
        else:
            control.daemon = running.pid
            control.ours = server.ours = child_of(control.daemon)
            caught = await asyncio.to_thread(catch_up, *paths, control, server, f"{self.where.hidden}/control")
            if caught.passed_over:
                text = f"the logs are too long: {caught.passed_over} bytes were not read; rotate them (logrotate)"
                log.warning("logs", text=text)
        return _so_far(caught.events, self._clock.now()), {
            "server": (caught.server, server),
            "control": (caught.control, control),
        }

    async def follow(self, caught: Caughts) -> None:
        for name, (position, parser) in caught.items():
            await self.logs.follow(name, position, parser)

    async def quit(self, timeout: int) -> None:
        quit_it = act.QuitControl(timeout=timeout, reason="the agent is being stopped", rule="agent.on_stop")
        done = await self.executor.perform(quit_it)
        self._record("control.quit", done.at, ok=done.ok, text=done.text)

    async def end(self) -> None:
        """Let go of everything. A daemon that runs, runs on."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.logs.close()
        self.supervisor.close()
        self._front_end.close()
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def clean(self, run_directory: str) -> None:
        """Take away what a user's lane leaves but its logs."""
        with suppress(OSError, directories.DirectoryRefused):  # something is in it that is not ours
            directories.clean(self.where.hidden)
            Path(self.where.home, "agent.lock").unlink(missing_ok=True)
            Path(self.where.hidden).rmdir()
            Path(self.where.home).rmdir()
        Path(run_directory, f"instance-{self.name}.env").unlink(missing_ok=True)

    # --- what comes in ------------------------------------------------------------------------------------------------

    def _control_gone(self, pid: int) -> None:
        now = self._clock.now()
        self.up_since = None
        self.spawn(self.end_orphans())
        self.conditions.set("adopted", None, now)
        self._say([inp.ControlGone(now, pid)])

    def _logged(self, name: str, events: list[Line]) -> None:
        """A log says this."""
        events = _so_far(events, self._clock.now())
        if name == "control" and events:
            self.executor.heard(events[-1].at)
        self._say([event for event in events if not foreign(event, f"{self.where.hidden}/control")])

    def started(self, at: float) -> None:
        """Its control daemon has been started."""
        self.conditions.set("adopted", None, at)
        self.up_since = at

    # --- every second -------------------------------------------------------------------------------------------------

    def look(self) -> None:
        self.logs.look(self.up_since)
        if self.state().silent_since is not None and not self.executor.busy:
            self.spawn(self.executor.listen())
        found = None if self.supervisor.running is None else directories.hidden_trouble(self.where)
        what, do = found if found is not None and found == self._trouble else (None, "")  # twice: it may be ending
        self._trouble = found
        self.conditions.set("hidden directory", what, self._clock.now(), do)
        self.conditions.expire(self._clock.now())

    def note_conditions(self) -> None:
        now, executor = self._clock.now(), self.executor
        wanted = self.key not in self._core.engines or self._core.view(self.key).wanted
        used = wanted or self.supervisor.running is not None
        what = executor.front_end_problem if used else None
        self.conditions.set("front-end", what, now, "is the NVIDIA driver installed?")
        if not used:
            self.conditions.set("log disk", None, now)
        what = executor.start_problem if wanted else None
        self.conditions.set("control daemon", what, now, "see mpsagent-cli events")
        problem = executor.multiuser_problem
        what = None if problem is None else f"{problem}, so each turn has a server of its own"
        self.conditions.set("shared server", what, now, 'set server_scope = "user" in [instance.NAME]')


def _differs(found: Running, log_directory: str, devices: Sequence[str]) -> str | None:
    """What of the policy's instance the daemon was not started with: it takes hold when that is started again."""
    wrong = []
    if os.path.realpath(found.log_directory) != os.path.realpath(log_directory):
        wrong.append(f"writes its logs to {found.log_directory}, not to {log_directory}, so faults are not seen")
    if (found.devices or "") != ",".join(devices):
        meant = ", ".join(devices) or "all GPUs"
        wrong.append(f"serves {found.devices or 'all GPUs'}, and the policy says {meant}")
    return f"control daemon {found.pid}, which runs already, {'; it '.join(wrong)}" if wrong else None


def _end(path: str) -> Position | None:
    """Where a log ends now: no daemon runs, so what it says is over."""
    with suppress(OSError):
        status = Path(path).stat()
        return Position(status.st_ino, status.st_size)
    return None


def _so_far(events: list[Line], now: float) -> list[Line]:
    """Lines from before the wall clock was set back are of the future, and a client can write such ones: what is waited
    for after them would never be due."""
    return [one if one.at <= now else one._replace(at=now) for one in events]
