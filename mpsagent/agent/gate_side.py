"""What the gate tells, into the engine. From its hello until it has told everything, messages are put together: no
decision rests on a part of what it holds, and what an earlier agent had begun goes on from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpsagent.agent import kept, missed
from mpsagent.agent.conditions import note_files
from mpsagent.agent.gate_messages import to_input
from mpsagent.core import inputs as inp
from mpsagent.core.engine import Core
from mpsagent.core.transitions import ClientWaiting
from mpsagent.gate import link
from mpsagent.system.processes import Process, command, lineage, open_files

if TYPE_CHECKING:
    from mpsagent.agent.host import Agent


_KEPT: tuple[tuple[str, Callable[[Core], object], Callable[[Core], object]], ...] = (
    ("ending", lambda core: core.memories.ladder, kept.ending_rows),
    ("shutdowns", lambda core: core.state.servers, kept.shutdown_rows),
    ("turn", lambda core: core.memories.turns, kept.turn_row),
    ("served", lambda core: core.memories.turns, kept.served_rows),
    ("suspended", lambda core: core.memories.turns, kept.suspended_rows),
    ("usage", lambda core: core.memories.usage, kept.usage_rows),
    ("leases", lambda core: core.state.leases, kept.lease_rows),
)
"""What is kept on disk: its name, what it is made of, and how."""


class GateSide:
    """Of one instance. ``link`` leads to the gate, and is that of all instances."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.link = agent.node.placing.link
        self.earlier: dict[str, Any] | None = None
        """What an earlier agent remembered, until the gate has said who lives."""
        self._kept: dict[str, object] = {}
        """What was kept last, by its name."""
        self._told: list[inp.Input] | None = None
        self._coming: list[inp.Input] = []
        """What came together: decided upon once. A user who connects and leaves in a loop must not keep others waiting
        for the decisions on each of these."""
        history = agent.history
        earlier = [] if agent.node.begun else history.since(0, history.newest)
        moved = agent.node.moved
        mine = [{**one, "at": float(str(one["at"])) + moved} for one in earlier if agent.is_mine(one)]
        self._open = missed.open_ends(mine)

    def is_new(self, one: ClientWaiting) -> bool:
        """False for what an earlier agent has written down."""
        return missed.is_new(self._open, one)

    def waited_here(self, knock: link.Knock) -> bool:
        """Whether an earlier agent has written down that this connection waits at this instance."""
        return missed.mark(knock.pid, self._agent.clock.at(knock.since)) in self._open.waiting

    def keep(self) -> None:
        """On disk. Not before the gate has said who lives: what the earlier agent kept still counts then."""
        if self.earlier is not None:
            return
        store, core = self._agent.store, self._agent.core
        for name, source, rows in _KEPT:
            if self._kept.get(name) is not source(core):  # hundreds of leases seldom change
                store.put(name, rows(core))
                self._kept[name] = source(core)

    def receive(self, message: link.FromGate, process: Process | None) -> None:
        agent = self._agent
        now, clients = agent.clock.now(), agent.clients
        ended: list[inp.Input] = []
        match message:
            case link.Hello():
                clients.forget_waiting()
                self._told = []
            case link.Knock():
                clients.came(message.connection, process)
            case link.Known():
                process = process or Process.open(message.pid, started=message.start)
                if clients.get(message.pid, message.start) is not None:
                    if process is not None:
                        process.close()
                elif process is not None:
                    clients.known(process)
                else:
                    ended.append(inp.ProcessEnded(now, message.pid, message.start))  # while the gate told of it
            case link.Left():
                clients.left(message.connection)
            case link.Passed():
                if not clients.passed(message.connection, message.pid, message.start):
                    ended.append(inp.ProcessEnded(now, message.pid))  # before its pidfd could be held
            case link.Failed():
                if message.lost:
                    clients.left(message.connection)
            case _:
                pass
        event = to_input(message, now, agent.clock.at)
        if isinstance(event, inp.Knocked) and any(one.process for one in agent.state.leases):
            event = event._replace(peer=event.peer._replace(lineage=lineage(event.peer.pid)))
        if isinstance(event, inp.Known):  # the gate says neither, and an earlier agent knew both
            found = event.peer._replace(command=command(event.peer.pid))
            event = event._replace(peer=found, waited=missed.waited(self._open, event))
        events: list[inp.Input] = [event, *ended]
        if isinstance(message, link.Knock | link.Known) and agent.people.meet([message.uid]):
            events.insert(0, inp.PeopleKnown(now, agent.people.known))
        if self._told is None:
            self._coming += events
            return
        self._told += events
        if isinstance(message, link.Synced):
            self._synced(now)

    def decide(self) -> None:
        """All that came has been received."""
        if self._coming:
            events, self._coming = self._coming, []
            self._agent.take(events)

    def _synced(self, now: float) -> None:
        agent = self._agent
        agent.conditions.set("gate", None, now)
        agent.conditions.set("public directory", None, now)
        told, self._told = self._told or [], None
        hello = next((one for one in told if isinstance(one, inp.GateConnected)), None)
        note_files(agent.conditions, "the gate", None if hello is None else open_files(hello.pid), now)
        first, self.earlier = self.earlier, None
        if first is None:
            agent.take(told)
            return
        kept.take_up_turn(agent.core, first, told, now)
        kept.take_up_usage(agent.core, first, now)
        agent.take([*told, *kept.shutdowns(first, agent.core, now), kept.ending(first, now)])
        for one in missed.missed(self._open, agent.state, told, now) if agent.inherited else ():
            agent.counts["missed"] += 1
            agent.write_down(one, now)
        self.keep()

    def lost(self, why: str) -> None:
        """The link has broken."""
        agent = self._agent
        self.decide()
        self._told = None
        agent.clients.forget_waiting()
        now = agent.clock.now()
        agent.conditions.set("gate", why, now, "it comes back by itself; who waits is held by its keeper")
        agent.take([inp.GateLost(now)])
