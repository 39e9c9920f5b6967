"""Keeps a gate running. Under systemd its units are looked after; without systemd there is the gate's keeper, which
binds the public sockets and outlives the agent as the control daemon does.

A gate or keeper that runs already is left alone. A gate whose keeper has died keeps running alone, because a new start
would refuse waiting users; when it has gone too, both are started again.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mpsagent.agent.recorder import Recorder
from mpsagent.agent.settings import Settings
from mpsagent.linux.backoff import Backoff
from mpsagent.linux.processes import Process, parent
from mpsagent.system import directories
from mpsagent.system.gate_units import GateUnits
from mpsagent.system.user_environment import write_user_environment

PROGRAM = "mpsagent.gate.main"
AGAIN = 2.0
"""Seconds until a public directory that cannot be used is looked at again."""
REST, LONGEST_REST = 0.3, 10.0
"""Seconds from the end of a keeper or gate to the look at what is left, doubling while they do not last."""
LASTED = 10.0
BINDS = 10.0
"""Seconds that a keeper may take until the public sockets are there."""
UNITS_AGAIN, UNITS_AGAIN_MOST = 5.0, 60.0
"""Seconds until systemd is asked again about the gate's units, doubling while that does not help."""


class GateKeeper:
    """The gate's units or keeper, for one agent. ``where()``: the directories of the first instance, whose public one
    is the gate's; ``environment()``: the variables of users' programs; ``gate()``: the pid of the gate that the link
    leads to."""

    def __init__(
        self,
        recorder: Recorder,
        settings: Settings,
        where: Callable[[], directories.Directories],
        environment: Callable[[], dict[str, str]],
        gate: Callable[[], int | None],
    ) -> None:
        self._recorder, self._clock, self._conditions = recorder, recorder.clock, recorder.conditions
        self._settings = settings
        self._where = where
        self._environment = environment
        self._gate = gate
        self._units = GateUnits()
        self._asking, self._ask_at, self._ask_again = False, float("-inf"), Backoff(UNITS_AGAIN, UNITS_AGAIN_MOST)
        self._child: subprocess.Popen[bytes] | None = None
        self._held: Process | None = None
        self._since, self._rest = float("-inf"), REST

    @property
    def _public(self) -> str:
        return self._where().public

    async def start(self) -> None:
        """Raises DirectoryRefused or OSError where the public directory cannot be used: at the agent's start that is
        its end, because no client would ever come to it."""
        if self._settings.supervise == "systemd":
            what = write_user_environment(self._environment())
            self._conditions.set("user environment", what, self._clock.now(), "set pipe_directory in [instance.NAME]")
            self.look(missing=True)  # it is not known yet
            return
        if self._hold_running():
            return
        taken = directories.listener_of(f"{self._public}/control")
        if taken is not None:
            self._say_taken(*taken)
            self._recorder.spawn(self._later(AGAIN))
            return
        now = self._clock.now()
        directories.prepare_hidden(self._where())
        for note in directories.prepare_public(self._public):
            self._recorder.record("directory", now, text=note)
        process = self._child = self._run()
        end = now + BINDS  # who starts before runs outside MPS: until then the agent does not say that it is ready
        while directories.listener_of(f"{self._public}/control") is None and process.poll() is None:
            if self._clock.now() > end:
                break
            await asyncio.sleep(0.02)
        self._hold_keeper(process.pid)

    def look(self, *, missing: bool) -> None:
        """``missing``: the gate or its public socket is not there. Without systemd the keeper sees to that itself."""
        now = self._clock.now()
        if not missing:
            self._conditions.set("gate units", None, now)
        elif self._settings.supervise == "systemd" and not self._asking and now >= self._ask_at:
            self._asking = True
            self._recorder.spawn(self._ask_units())

    async def _ask_units(self) -> None:
        what = await self._units.ensure(self._where())
        now = self._clock.now()
        if what is None:
            self._ask_again.reset()
        self._asking, self._ask_at = False, now + self._ask_again.pause()
        if self._conditions.set("gate units", what, now, "the agent goes on trying") and what is not None:
            self._recorder.record("gate.units", now, text=what)

    def close(self) -> None:
        """Lets go; the keeper runs on."""
        if self._held is not None:
            self._held.close()
            self._held = None

    # --- one that runs ------------------------------------------------------------------------------------------------

    def _hold_running(self) -> bool:
        """Hold gate and keeper by the sockets on which they listen. Return False when neither runs."""
        gate = self._gate()
        if gate is None:  # to connect there takes the link's place
            gate, _ = directories.listener_of(self._settings.gate_link) or (None, 0)
        if gate is not None:
            above = parent(gate)
            if above is not None and is_keeper(above):
                self._hold_keeper(above)
                return True
            what = f"the gate (process {gate}) runs without its parent process: waiting clients are refused if it dies"
            do = "it goes on as it is; when no client works, end it, and both are started again"
            self._conditions.set("gate keeper", what, self._clock.now(), do)
            self._hold(Process.open(gate), "the gate without a parent process")
            return True
        found = directories.listener_of(f"{self._public}/control")  # the keeper is about to start a gate
        if found is not None and is_keeper(found[0]):
            self._hold_keeper(found[0])
            return True
        return False

    def _hold_keeper(self, pid: int) -> None:
        """Hold the keeper that runs, and forget earlier failures."""
        for topic in ("public directory taken", "gate directory", "gate keeper"):
            self._conditions.set(topic, None, self._clock.now())
        self._hold(Process.open(pid), "the gate's parent process")

    def _hold(self, process: Process | None, who: str) -> None:
        self.close()
        if process is None:
            self._recorder.spawn(self._later(REST))
            return
        self._held, self._since = process, self._clock.now()
        process.when_gone(lambda: self._gone(process, who))

    def _gone(self, process: Process, who: str) -> None:
        if self._held is process:
            self.close()
        if self._child is not None:
            self._child.poll()
        now = self._clock.now()
        text = f"{who} (process {process.pid}) has ended; see {self._settings.run_directory}/gate.log"
        self._recorder.record("gate.keeper_ended", now, pid=process.pid, text=text)
        self._conditions.set("gate keeper", text, now, "it is started again when the gate has gone too")
        self._rest = REST if now > self._since + LASTED else min(2 * self._rest, LONGEST_REST)
        self._recorder.spawn(self._later(self._rest))

    # --- starting one -------------------------------------------------------------------------------------------------

    async def _later(self, pause: float) -> None:
        """Once the agent runs, a directory that cannot be used is a condition, not its end."""
        await asyncio.sleep(pause)
        try:
            await self.start()
        except (directories.DirectoryRefused, OSError) as error:
            self._conditions.set("gate directory", str(error), self._clock.now())
            self._recorder.spawn(self._later(AGAIN))

    def _say_taken(self, pid: int, uid: int) -> None:
        """Report a control daemon that was started by hand. Its clients keep running. New clients have no limits."""
        now = self._clock.now()
        who = f"process {pid} of user {uid}" if pid else "a process that cannot be seen"
        what = f"{self._public} is served by {who}, not by the gate: its clients have no limits and no turns"
        quit_it = f"echo quit | CUDA_MPS_PIPE_DIRECTORY={shlex.quote(self._public)} nvidia-cuda-mps-control"
        do = f"when its work is done: {quit_it}; its place is taken then"
        if self._conditions.set("public directory taken", what, now, do):
            self._recorder.record("directory.taken", now, pid=pid, uid=uid, text=what)

    def _run(self) -> subprocess.Popen[bytes]:
        """Not a subprocess of asyncio's: from Python 3.12 on those are killed when the loop ends."""
        settings = self._settings
        command = [sys.executable, "-P", "-m", PROGRAM, "keep", "--public", self._public]
        command += ["--daemon", self._where().hidden, "--link", settings.gate_link]
        command += ["--state", settings.run_directory]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        path = f"{settings.run_directory}/gate.log"
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            return subprocess.Popen(
                command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        finally:
            os.close(log)


def is_keeper(pid: int) -> bool:
    """Return whether one of our processes is a gate's keeper, by its command line."""
    with suppress(OSError):
        if Path(f"/proc/{pid}").stat().st_uid == os.geteuid():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            return b"keep" in words and any(word in (PROGRAM.encode(), b"mpsagent-gate") or
                                            word.endswith(b"/mpsagent-gate") for word in words)  # fmt: skip
    return False
