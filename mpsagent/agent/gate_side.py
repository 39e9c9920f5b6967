"""What the gate tells, into the engine. From its hello until it has told everything, messages are put together: no
decision rests on a part of what it holds, and what an earlier agent had begun goes on from there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from mpsagent.agent import kept, missed
from mpsagent.agent.gate_messages import to_input
from mpsagent.core import inputs as inp
from mpsagent.core.transitions import ClientWaiting
from mpsagent.gate import link
from mpsagent.system.gate_link import GateLink
from mpsagent.system.processes import Process

if TYPE_CHECKING:
    from mpsagent.agent.host import Agent


class GateSide:
    """Of one agent. ``link`` leads to the gate."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.link = GateLink(agent.settings.gate_link, self.receive, lost=self._lost)
        self.earlier: dict[str, Any] | None = None
        """What an earlier agent remembered, until the gate has said who lives."""
        self._told: list[inp.Input] | None = None
        history = agent.history
        self._open = missed.open_ends(history.since(0, history.newest))

    def is_new(self, one: ClientWaiting) -> bool:
        """False for what an earlier agent has written down."""
        return missed.is_new(self._open, one)

    def keep(self) -> None:
        """On disk. Not before the gate has said who lives: what the earlier agent kept still counts then."""
        if self.earlier is None:
            store, core = self._agent.store, self._agent.core
            store.put("ending", kept.ending_rows(core))
            store.put("turn", kept.turn_row(core))
            store.put("served", kept.served_rows(core))

    def receive(self, message: link.FromGate, process: Process | None) -> None:
        agent = self._agent
        now, clients = agent.clock.now(), agent.clients
        match message:
            case link.Hello():
                clients.forget_waiting()
                self._told = []
            case link.Knock():
                clients.came(message.connection, process)
            case link.Known():
                if process is not None and clients.get(message.pid, message.start) is None:
                    clients.known(process)
                elif process is not None:
                    process.close()
            case link.Left():
                clients.left(message.connection)
            case link.Passed():
                if not clients.passed(message.connection, message.pid, message.start):
                    self._soon_ended(message.pid)
            case link.Failed():
                if message.lost:
                    clients.left(message.connection)
            case _:
                pass
        events: list[inp.Input] = [to_input(message, now)]
        if isinstance(message, link.Knock | link.Known) and agent.people.meet([message.uid]):
            events.insert(0, inp.PeopleKnown(now, agent.people.known))
        if self._told is None:
            agent.take(events)
            return
        self._told += events
        if isinstance(message, link.Synced):
            self._synced(now)

    def _synced(self, now: float) -> None:
        agent = self._agent
        agent.conditions.set("gate", None, now)
        agent.conditions.set("public directory", None, now)
        told, self._told = self._told or [], None
        first, self.earlier = self.earlier, None
        if first is None:
            agent.take(told)
            return
        kept.take_up_turn(agent.core, first, told)
        agent.take([*told, kept.ending(first, now)])
        for one in missed.missed(self._open, agent.state, told, now) if agent.inherited else ():
            agent.counts["missed"] += 1
            agent.write_down(one, now)
        self.keep()

    def _soon_ended(self, pid: int) -> None:
        """It passed, and ended before its pidfd could be held."""
        agent = self._agent
        asyncio.get_running_loop().call_soon(lambda: agent.take([inp.ProcessEnded(agent.clock.now(), pid)]))

    def _lost(self, why: str) -> None:
        agent = self._agent
        self._told = None
        agent.clients.forget_waiting()
        now = agent.clock.now()
        agent.conditions.set("gate", why, now, "it comes back by itself; who waits is held by its keeper")
        agent.take([inp.GateLost(now)])
