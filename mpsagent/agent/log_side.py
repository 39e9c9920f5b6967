"""What the two logs say from now on, into the engine: only the lines of our own control daemon and its servers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC

from mpsagent.agent.catch_up import child_of
from mpsagent.agent.clock import SteadyClock
from mpsagent.agent.conditions import Conditions
from mpsagent.core.model import State
from mpsagent.mps.events import Line
from mpsagent.mps.loglines import LogParser
from mpsagent.system.logfiles import Chunk, LogFollower, Position, at_position

KEPT_PARSERS = 4


class LogSide:
    """Of one instance, whose ``state`` is the engine's. ``said(name, events)`` takes what the log of this name says,
    ``other(pid)`` that another control daemon writes into it. ``followers`` by name."""

    def __init__(
        self,
        state: Callable[[], State],
        clock: SteadyClock,
        conditions: Conditions,
        said: Callable[[str, list[Line]], None],
        other: Callable[[int], None],
    ) -> None:
        self._state = state
        self._clock = clock
        self._conditions = conditions
        self._said = said
        self._other = other
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
            f"{self._state().policy.log_directory}/{name}.log",
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
            self._other(parser.other)
        parser.other = None
        self._said(name, events)
