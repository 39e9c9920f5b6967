"""What the two logs say from now on, into the engine: only the lines of our own control daemon and its servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from datetime import UTC
from typing import Any

from mpsagent.agent.catch_up import child_of
from mpsagent.agent.clock import SteadyClock
from mpsagent.agent.conditions import Conditions
from mpsagent.agent.recorder import FORGET
from mpsagent.core.model import State
from mpsagent.linux.proc import start_time
from mpsagent.linux.threads import in_thread
from mpsagent.mps.events import Line
from mpsagent.mps.loglines import LogParser
from mpsagent.system.logfiles import Chunk, LogFollower, Position, at_position

KEPT_PARSERS = 4
DISK_EVERY = 10.0
BLIND = "faults and server ends are not seen meanwhile"


class LogSide:
    """Of one lane, whose ``state`` is the engine's, in a ``directory``. ``said(name, events)`` takes what the log of
    this name says. ``followers`` by name."""

    def __init__(
        self,
        directory: str,
        state: Callable[[], State],
        clock: SteadyClock,
        conditions: Conditions,
        said: Callable[[str, list[Line]], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._directory = directory
        self._state = state
        self._clock = clock
        self._conditions = conditions
        self._said = said
        self._spawn = spawn
        self._disk_at, self._disk_busy = float("-inf"), False
        self._other: int | None = None
        """Another control daemon that writes into these logs."""
        self.followers: dict[str, LogFollower] = {}
        self._parsers: dict[tuple[str, int], LogParser] = {}
        """By log and inode: after a rename the old file may go on beside the new one."""
        self._at_start: dict[str, tuple[int, int]] = {}
        self._daemons: set[int] = set()
        """The pids of our control daemons: an earlier one's last lines may come late."""

    async def follow(self, name: str, position: Position | None, parser: LogParser) -> None:
        """From where the log was read to, with the parser that knows how its last line began."""
        if position is not None:
            self._parsers[name, position.inode] = parser
            self._at_start[name] = (position.inode, position.offset)
        follower = self.followers[name] = LogFollower(
            f"{self._directory}/{name}.log",
            lambda chunk: self._read(name, chunk),
            on_problem=lambda text: self._problem(name, text),
            first=None if position is None else at_position(position),
            most=lambda: self._state().policy.log_size // 2,
            on_long=lambda text: self._long(name, text),
        )
        await follower.start()

    def close(self) -> None:
        for follower in self.followers.values():
            follower.close()

    # --- every second -------------------------------------------------------------------------------------------------

    def look(self, since: float | None) -> None:
        """Whether the logs can be written and read. ``since``: since when the control daemon runs, None: it does
        not."""
        now, conditions = self._clock.now(), self._conditions
        if since is not None and now >= self._disk_at + DISK_EVERY and not self._disk_busy:
            self._disk_at, self._disk_busy = now, True
            self._spawn(self._disk())
        for name, follower in self.followers.items():
            gone = follower.missing and since is not None and now > since + 3.0
            what = f"{follower.path} has gone while MPS runs; MPS never opens it again" if gone else None
            do = f"{BLIND}, unless the agent has the old file open still; when all is idle: mpsagent-cli restart-mps"
            conditions.set(f"{name}.log missing", what, now, do)
        if self._other is not None and not start_time(self._other):
            self._other = None
            conditions.set("other daemon", None, now)

    def _other_daemon(self, pid: int) -> None:
        """Said for as long as that runs, or for a while."""
        self._other = pid
        now = self._clock.now()
        what = f"another control daemon (process {pid}) writes into the same log files"
        do = f"give it a log directory of its own; {self._directory} is this instance's"
        self._conditions.set("other daemon", what, now, do, until=now + FORGET)

    async def _disk(self) -> None:
        path = self._directory
        try:
            found = await in_thread(os.statvfs, path, deadline=5.0)
            full = found.f_bavail == 0 and found.f_blocks > 0
            what = f"{path}: the disk is full, so MPS cannot write its logs" if full else None
        except TimeoutError:
            what = f"{path}: the file system does not answer"
        except OSError:  # it is not there: said elsewhere
            what = None
        finally:
            self._disk_busy = False
        self._conditions.set("log disk", what, self._clock.now(), BLIND)

    def _problem(self, name: str, text: str | None) -> None:
        do = "what happens in MPS is not seen until it can be read"
        self._conditions.set(f"{name}.log", text, self._clock.now(), do)

    def _long(self, name: str, text: str | None) -> None:
        do = "rotate it with copytruncate (logrotate), or it fills the disk"
        self._conditions.set(f"{name}.log size", text, self._clock.now(), do)

    def _read(self, name: str, chunk: Chunk) -> None:
        parser = self._parsers.get((name, chunk.inode))
        if parser is None or (chunk.fresh and self._at_start.pop(name, None) != (chunk.inode, chunk.offset)):
            parser = LogParser("control" if name == "control" else "server", UTC)
            for old in [key for key in self._parsers if key[0] == name][:-KEPT_PARSERS]:
                del self._parsers[old]
            self._parsers[name, chunk.inode] = parser
        control = self._state().control
        parser.daemon = control.pid if control is not None and control.proven else None
        parser.ours = None
        if parser.daemon is not None:
            self._daemons.add(parser.daemon)
            parser.ours = child_of(parser.daemon)
        events = parser.feed(chunk.data, self._clock.shift())
        if parser.other is not None and parser.other not in self._daemons:
            self._other_daemon(parser.other)
        parser.other = None
        self._said(name, events)
