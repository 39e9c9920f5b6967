"""The gate's messages, into the engine. From its hello until it has told everything, messages are put together: no
decision rests on a part of them, and the work of an earlier agent continues from there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mpsagent.agent import saved
from mpsagent.agent.clients import ClientProcesses
from mpsagent.agent.clock import SteadyClock
from mpsagent.agent.people import People
from mpsagent.core import inputs as inp
from mpsagent.core.coordinator import Core
from mpsagent.core.model import Key
from mpsagent.core.transitions import ClientHeld, ClientWaiting
from mpsagent.linux.proc import command
from mpsagent.linux.processes import Process, lineage
from mpsagent.system.store import Store, StorePart
from mpsagent.wire import link


class GateSide:
    """Of one instance. ``since``: connections from before that time an earlier agent has recorded; None: there was
    none. ``take`` decides on what came."""

    def __init__(
        self,
        core: Core,
        clock: SteadyClock,
        clients: ClientProcesses,
        people: People,
        store: Store | StorePart,
        since: float | None,
        take: Callable[[list[inp.Input]], None],
    ) -> None:
        self._core = core
        self._clock = clock
        self._clients = clients
        self._people = people
        self._store = store
        self._take = take
        self.earlier: dict[str, Any] | None = None
        """The memory of an earlier agent, until the gate has named the living clients."""
        self._kept: dict[str, object] = {}
        """The values that were kept last, by name."""
        self._told: list[inp.Input] | None = None
        self._coming: list[inp.Input] = []
        """Inputs that came together: decided upon once. A user who connects and leaves in a loop must not keep others
        waiting for the decisions on each of these."""
        self.coming: dict[int, set[tuple[int, int]]] = {}
        """Processes (pid, start) by user, reported by the gate and not yet taken in by the engine."""
        self._since = since
        self._waiting: frozenset[int] = frozenset()
        self._remembered: dict[tuple[int, int], saved.EarlierClient] = {}
        """Clients of an earlier agent, until the gate has named the living ones."""
        self._released: list[tuple[int, int]] = []
        """Processes that had been clients of an earlier agent."""

    def take_up(self, earlier: dict[str, Any] | None) -> None:
        """Take up the state that an earlier agent has kept; None: there was no earlier agent."""
        self.earlier = earlier
        self._waiting = saved.waited_here(earlier or {})
        self._remembered = saved.clients(earlier or {}, self._clock.now())
        self._released = saved.released(earlier or {})

    def is_new(self, one: ClientWaiting | ClientHeld) -> bool:
        """Return False for a client from before this agent."""
        return self._since is None or one.at >= self._since

    def waits(self, uid: int) -> bool:
        """Return whether this user waits here, or works here and the engine has not taken that in yet."""
        return uid in self.coming or self._core.state.held.first(uid) is not None

    def waited(self, uid: int) -> bool:
        """Return whether this user waited here when the earlier agent ended."""
        return uid in self._waiting

    def keep(self) -> None:
        """Write the state to disk. Until the gate has named the living clients, the earlier agent's state counts."""
        if self.earlier is not None:
            return
        core = self._core
        for name, row in saved.ROWS.items():
            if row.source is not None and self._kept.get(name) != row.source(core):
                self._store.put(name, row.write(core))
                self._kept[name] = row.source(core)
        if self._kept.get(saved.RELEASED) is not core.state.clients:
            self._store.put(saved.RELEASED, self._clients.released(core.state.clients)[: saved.MOST])
            self._kept[saved.RELEASED] = core.state.clients

    def receive(self, message: link.FromGate, process: Process | None, lane: Key = None) -> None:
        """``lane``: the user whose lane it is about."""
        now, clients = self._clock.now(), self._clients
        ended: list[inp.Input] = []
        match message:
            case link.Hello():
                clients.forget_waiting()
                self._told = []
            case link.Knock():
                clients.came(message, process)
            case link.Known():
                if clients.get(message.pid, message.start) is not None:
                    if process is not None:
                        process.close()
                elif process is not None:
                    clients.known(process)
                elif not clients.hold(message.pid, message.start):
                    ended.append(inp.ProcessEnded(now, message.pid, message.start))  # while the gate told of it
            case link.Left() | link.Refused():
                clients.left(message.connection)
            case link.Passed():
                if not clients.passed(message.connection, message.pid, message.start):
                    ended.append(inp.ProcessEnded(now, message.pid, message.start))
            case link.Failed():
                if message.lost:
                    clients.left(message.connection)
        said = self._event(message, now)
        event = said if lane is None else inp.Of(lane, said)
        events: list[inp.Input] = [event, *ended]
        if isinstance(message, link.Knock | link.Known):
            self.coming.setdefault(message.uid, set()).add((message.pid, message.start))
            self._people.meet([message.uid])
        if self._told is None:
            self._coming += events
            return
        self._told += events
        if isinstance(message, link.Synced):
            self._synced(now)

    def _event(self, message: link.FromGate, now: float) -> inp.GateSaid[link.FromGate]:
        if isinstance(message, link.Knock | link.Known):
            message = replace(message, since=min(self._clock.at(message.since), now))
        if isinstance(message, link.Slowed):
            message = replace(message, until=self._clock.at(message.until))
        event = inp.GateSaid(now, message)
        if isinstance(message, link.Knock | link.Known) and any(one.process for one in self._core.state.leases):
            event = event._replace(lineage=lineage(message.pid))
        if isinstance(message, link.Known):  # the gate says neither, and an earlier agent knew both
            kept = self._remembered.pop((message.pid, message.start), None)
            earlier = None if kept is None or kept.peer.uid != message.uid else kept.what
            return event._replace(command=command(message.pid), earlier=earlier)
        return event

    def _remember(self, now: float) -> list[inp.Input]:
        """Return the clients of an earlier agent of which the gate has not told and whose processes live."""
        found: list[inp.Input] = []
        remembered, self._remembered = self._remembered, {}
        for pid, start in self._released:
            process = None if self._clients.get(pid, start) is not None else Process.open(pid, started=start)
            if process is not None:
                self._clients.known(process)
        leases = any(one.process for one in self._core.state.leases)
        for (pid, start), kept in remembered.items():
            process = Process.open(pid, kept.peer.uid, start)
            if process is None:
                continue
            if self._clients.get(pid, start) is None:
                self._clients.known(process)
            else:
                process.close()
            peer = kept.peer._replace(command=command(pid), lineage=lineage(pid) if leases else ())
            event = inp.ClientRemembered(now, peer, kept.what)
            found.append(event if kept.daemon is None else inp.Of(kept.daemon, event))
        self._people.meet([one.peer.uid for one in remembered.values()])
        return found

    def decide(self) -> None:
        """Takes in all messages of this read at once: one decision for them."""
        if self._coming:
            events, self._coming = self._coming, []
            self.coming.clear()
            self._take(events)

    def _synced(self, now: float) -> None:
        told, self._told = self._told or [], None
        self.coming.clear()
        first, self.earlier = self.earlier, None
        if first is None:
            self._take(told)
            return
        told[1:1] = self._remember(now)  # behind the greeting: what these clients wait for is a further context
        saved.take_up_turn(self._core, first, told, now)
        self._take([*told, saved.ending(first, now)])
        self.keep()

    def process_ended(self, pid: int, start: int, lives: bool) -> None:
        """Take in the end of a client. ``lives``: its process lives and is no longer a client. While the gate tells all
        that it holds, its messages about the client are taken in later, and so is the client's end."""
        event = inp.ProcessEnded(self._clock.now(), pid, start, lives)
        self._take([event])
        if self._told is not None:
            self._told.append(event)

    def lost(self) -> None:
        """The link has broken."""
        self.decide()
        self._told = None
        self.coming.clear()
        self._clients.forget_waiting()
        self._take([inp.LinkLost(self._clock.now())])
