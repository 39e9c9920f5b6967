"""The link to the gate: each of its messages goes to the instance that it is about, and each user who comes to the
instance where that user belongs. What the gate says of an instance counts; where it has none, placement decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from mpsagent.agent.clock import SteadyClock
from mpsagent.agent.conditions import Conditions, note_files
from mpsagent.agent.host import Agent
from mpsagent.agent.people import People
from mpsagent.core import inputs as inp
from mpsagent.core import placement
from mpsagent.core.model import Key
from mpsagent.core.placement import Place
from mpsagent.linux.processes import Process as Pidfd
from mpsagent.linux.processes import open_files
from mpsagent.policy import apart
from mpsagent.policy.identity import Identity
from mpsagent.system.gate_link import GateLink
from mpsagent.wire import link

LINE_FIRST = 0.5
"""Seconds in which a process gets the line with the reason: it may exit as soon as it is refused."""
GONE = "its process has worked at instance {}, which the policy no longer has: start the program again"


class Placing:
    """The placement of one node's users. A client whose user has to be known by name first waits here, and at the gate.
    ``how()``: the policy's way; ``own()``: each instance has its own public directory."""

    def __init__(
        self,
        agents: list[Agent],
        path: str,
        *,
        clock: SteadyClock,
        conditions: Conditions,
        people: People,
        record: Callable[..., int],
        how: Callable[[], placement.Placement],
        own: Callable[[], bool],
    ) -> None:
        self._agents = agents
        self._clock, self._conditions, self._people, self._record = clock, conditions, people, record
        self._how, self._own = how, own
        self.link = GateLink(path, self._receive, read=self._decide, connected=self.name_all, lost=self._lost)
        self._scheduled = False
        self.gate: int | None = None
        """The pid of the gate that is connected."""
        self._unplaced: dict[int, tuple[link.Knock, Pidfd | None]] = {}
        self._gone: dict[tuple[int, int], str] = {}
        """Instances that the policy has no more, by pid and start time of the processes that work there."""

    def close(self) -> None:
        self.link.close()
        self._forget()

    @property
    def unplaced(self) -> int:
        """Connections whose users are not known by name yet."""
        return len(self._unplaced)

    def again(self) -> None:
        """A name has become known, or the policy is another."""
        waiting, self._unplaced = self._unplaced, {}
        for knock, process in waiting.values():
            self._knocked(knock, process)
        self._decide()

    def find(self, name: str) -> tuple[Agent, Key] | None:
        """An instance and a lane of it, by the lane's name; empty: that of all users of the first one."""
        if not name:
            return self._agents[0], None
        found = ((agent, lane.key) for agent in self._agents for lane in agent.lanes.values() if lane.name == name)
        return next(found, None)

    def _move_user(self, uid: int, agent: Agent, to: Agent) -> None:
        """Move this user's waiting connections to another instance."""
        self._record("user.moved", self._clock.now(), uid=uid, before=agent.name, instance=to.name)
        mine = agent.state.held.line(uid)
        for one in mine:
            self._move(one.connection, agent, to)
        if mine:
            agent.take([])
            to.gate.decide()

    # --- from the gate ------------------------------------------------------------------------------------------------

    def name_all(self) -> None:
        """Send the names of all instances and lanes to the gate."""
        own = [agent.name for agent in self._agents[1:]] if self._own() else []
        names = [agent.name for agent in self._agents]
        names += [lane.name for agent in self._agents for lane in agent.lanes.values() if lane.key is not None]
        self.link.send(link.Instances(tuple(names), tuple(own)))

    def _decide(self) -> None:
        for agent in self._agents:
            agent.gate.decide()

    def _lost(self, why: str) -> None:
        self._forget()
        self.gate = None
        do = "clients are held, or served by what the agent told the gate last; see the gate's own log"
        self._conditions.set("gate", why, self._clock.now(), do)
        for agent in self._agents:
            agent.gate.lost()

    def _forget(self) -> None:
        for _, process in self._unplaced.values():
            if process is not None:
                process.close()
        self._unplaced.clear()

    def _receive(self, message: link.FromGate, process: Pidfd | None) -> None:
        match message:
            case link.Hello() | link.Synced():
                if isinstance(message, link.Hello):
                    self.gate = message.gate
                    self._gone.clear()
                else:
                    self._say_synced()
                for agent in self._agents:
                    agent.gate.receive(message, None)
            case link.Knock():
                self._knocked(message, process)
            case link.Left() | link.Refused():
                _, waiting = self._unplaced.pop(message.connection, (None, None))
                if waiting is not None:
                    waiting.close()
                found = self._at(message.connection)
                if found is None and isinstance(message, link.Refused):
                    found = self._agents[0]
                if found is not None:
                    found.gate.receive(message, None)
            case _:
                self._told(message, process)

    def _say_synced(self) -> None:
        now, conditions = self._clock.now(), self._conditions
        conditions.set("gate", None, now)
        conditions.set("public directory", None, now)
        note_files(conditions, "the gate", None if self.gate is None else open_files(self.gate), now)

    def _told(self, message: link.FromGate, process: Pidfd | None) -> None:
        place = self.find(getattr(message, "instance", ""))
        if place is None:  # it is no longer there
            if isinstance(message, link.Known) and (section := self._left_behind(message.instance)) is not None:
                self._gone[message.pid, message.start] = section
            if process is not None:
                process.close()
            return
        found, lane = place
        if isinstance(message, link.Handing | link.Passed):
            self._moved(message.connection, found)
        found.gate.receive(message, process, lane)

    def _left_behind(self, name: str) -> str | None:
        """Return the instance of a process that works there, if the policy no longer has that instance."""
        section, _ = apart.split(name) or (name, None)
        return None if self._section(section) is not None else section

    def _moved(self, connection: int, to: Agent) -> None:
        """The gate hands a connection over elsewhere than it was thought to wait, or before its user was known by name:
        the gate is right."""
        if (unplaced := self._unplaced.pop(connection, None)) is not None:
            to.gate.receive(*unplaced)
        agent = self._at(connection)
        if agent is not None and agent is not to:
            self._move(connection, agent, to)

    def _at(self, connection: int) -> Agent | None:
        """Return the instance at which it waits."""
        return next((agent for agent in self._agents if agent.clients.holds(connection)), None)

    def _move(self, connection: int, agent: Agent, to: Agent) -> None:
        knock, process = agent.clients.give(connection)
        agent.gate.decide()
        agent.absorb([inp.GateSaid(agent.clock.now(), link.Left(connection))])  # not to be written down: it waits still
        to.gate.receive(knock, process)

    # --- who goes where -----------------------------------------------------------------------------------------------

    def _knocked(self, knock: link.Knock, process: Pidfd | None) -> None:
        if knock.never:  # it is refused nowhere: it would run without MPS
            (self._there(knock) or self._agents[0]).gate.receive(knock, process)
            return
        if (gone := self._gone.get((knock.pid, knock.start))) is not None:
            self._refuse(knock, process, GONE.format(gone))
            return
        if self._own():
            self._asked(knock, process)
            return
        found = self._there(knock)
        if found is None and knock.asked:
            self._refuse(knock, process, GONE.format(knock.asked))
            return
        if found is None:
            places = self.places()
            name = placement.stays(knock.uid, places)
            if name is None:
                who = self._identified(knock, process, places)
                if who is None:
                    return
                name = placement.place(who, places, self._how())
            if name is None:
                self._refuse(knock, process, placement.NOWHERE)
                return
            found = self._section(name)
            assert found is not None
        found.gate.receive(knock, process)

    def _there(self, knock: link.Knock) -> Agent | None:
        """Return the instance where its process has worked; else where the gate has it; else where its user waits, has
        a lane, or waited when the earlier agent ended."""
        agents, uid = self._agents, knock.uid
        if knock.asked:
            return self._section(knock.asked)
        if len(agents) == 1:
            return agents[0]
        if knock.instance is not None and (place := self.find(knock.instance)) is not None:
            return place[0]
        return (
            next((agent for agent in agents if agent.gate.waits(uid)), None)
            or next((agent for agent in agents if uid in agent.lanes), None)
            or next((agent for agent in agents if agent.gate.waited(uid)), None)
        )

    def _section(self, name: str | None) -> Agent | None:
        return next((agent for agent in self._agents if agent.name == name), None)

    def _asked(self, knock: link.Knock, process: Pidfd | None) -> None:
        """It came in the directory of an instance, and is for that one or for none."""
        places = [placement.named(one.policy) for one in self._agents]
        name = knock.asked or self._agents[0].name
        who = self._identified(knock, process, places)
        if who is None:
            return
        mine = placement.open_to(who, places)
        found = self._section(name)
        if found is not None and name in mine:
            found.gate.receive(knock, process)
            return
        names = ", ".join(mine)
        why = f"the directory is that of {name}; the policy has {names} for this user" if mine else placement.NOWHERE
        self._refuse(knock, process, why)

    def _identified(self, knock: link.Knock, process: Pidfd | None, places: Sequence[Place]) -> Identity | None:
        """Who the user of a client that comes is; None: the name service has to say so first."""
        self._people.meet([knock.uid])
        who = self._people.known.get(knock.uid)
        if who is None and placement.needs_names(places):
            self._unplaced[knock.connection] = (knock, process)
            return None
        return who or Identity(knock.uid)

    def _refuse(self, knock: link.Knock, process: Pidfd | None, why: str) -> None:
        if process is not None:
            process.close()
        refused = link.Refused(knock.connection, knock.pid, knock.uid, why, knock.start, knock.cgroup)
        self._agents[0].gate.receive(refused, None)  # it is recorded there, and the process gets a line
        asyncio.get_running_loop().call_later(LINE_FIRST, self.link.send, link.Refuse(knock.connection, why))

    def idle(self) -> None:
        """No user is at work or waits at an instance."""
        if not self._scheduled and not self._own():
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._spread)

    def _spread(self) -> None:
        """Who waits elsewhere and has no client at work goes to an instance that is idle; not with a process that has
        to stay."""
        self._scheduled = False
        places = self.places()
        for agent in self._agents:
            for uid in agent.core.view(None).waiting():
                here = next(one for one in places if one.name == agent.name)
                who = self._people.known.get(uid, Identity(uid))
                name = placement.free(who, places, self._how())
                to = self._section(name)
                if to is None or uid in here.admitted or here.there == {uid} or agent.state.clients_of_user(uid):
                    continue
                if any(held.of_client or agent.clients.bound(held.connection) for held in agent.state.held.line(uid)):
                    continue
                self._move_user(uid, agent, to)
                places = self.places()

    def places(self) -> list[placement.Place]:
        return [
            placement.place_of(one.policy, one.core.view(), one.gate.coming, lost=not one.observer.gpus_serve)
            for one in self._agents
        ]
