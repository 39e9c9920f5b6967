"""What the two logs say from now on, into the engine: only the lines of our own control daemon and its servers."""

from __future__ import annotations

from datetime import UTC
from typing import TYPE_CHECKING

from mpsagent.agent import startup
from mpsagent.agent.catch_up import foreign
from mpsagent.mps.loglines import LogParser
from mpsagent.system.logfiles import Chunk, LogFollower, Position, at_position

if TYPE_CHECKING:
    from mpsagent.agent.host import Agent

KEPT_PARSERS = 4


class LogSide:
    """Of one agent. ``followers`` by name."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
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
            f"{self._agent.policy.log_directory}/{name}.log",
            lambda chunk: self._read(name, chunk),
            on_problem=lambda text: self._problem(name, text),
            first=None if position is None else at_position(position),
            most=lambda: self._agent.policy.log_size // 2,
            on_long=lambda text: self._long(name, text),
        )
        await follower.start()

    def close(self) -> None:
        for follower in self.followers.values():
            follower.close()

    def _problem(self, name: str, text: str | None) -> None:
        do = "what happens in MPS is not seen until it can be read"
        self._agent.conditions.set(f"{name}.log", text, self._agent.clock.now(), do)

    def _long(self, name: str, text: str | None) -> None:
        do = "rotate it with copytruncate (logrotate), or it fills the disk"
        self._agent.conditions.set(f"{name}.log size", text, self._agent.clock.now(), do)

    def _read(self, name: str, chunk: Chunk) -> None:
        agent = self._agent
        parser = self._parsers.get((name, chunk.inode))
        if parser is None or (chunk.fresh and self._at_start.pop(name, None) != (chunk.inode, chunk.offset)):
            parser = LogParser("control" if name == "control" else "server", UTC)
            for old in [key for key in self._parsers if key[0] == name][:-KEPT_PARSERS]:
                del self._parsers[old]
            self._parsers[name, chunk.inode] = parser
        control = agent.state.control
        parser.daemon = control.pid if control is not None and control.proven else None
        parser.ours = None
        if parser.daemon is not None:
            self._daemons.add(parser.daemon)
            parser.ours = startup.child_of(parser.daemon)
        events = parser.feed(chunk.data, agent.clock.shift())
        if name == "control" and events:
            agent.executor.heard(events[-1].at)
        agent.counts["log lines"] += len(events)
        events = [event for event in events if not foreign(event, agent.socket_path)]
        if parser.other is not None and parser.other not in self._daemons:
            agent.observer.other_daemon(parser.other)
        parser.other = None
        agent.take(events)
