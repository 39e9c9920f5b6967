"""The link to the gate: each of its messages goes to the instance that it is about, and each user who comes to the
instance where that user belongs. What the gate says of an instance counts; where it has none, placement decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from mpsagent.agent.apart import Apart
from mpsagent.agent.conditions import note_files
from mpsagent.agent.host import Agent
from mpsagent.agent.people import People
from mpsagent.agent.recorder import Recorder
from mpsagent.core import inputs as inp
from mpsagent.core import placement
from mpsagent.core.placement import Place, Process
from mpsagent.policy.identity import Identity
from mpsagent.system.gate_link import GateLink
from mpsagent.system.processes import Process as Pidfd
from mpsagent.system.processes import open_files
from mpsagent.wire import link

NOWHERE = "the policy has no instance for this user: none names the user or a group of the user's"


class Placing:
    """Of one node. A knock whose user has to be known by name first waits here, and in the gate."""

    def __init__(self, recorder: Recorder, agents: list[Agent], users: Apart, people: People, path: str) -> None:
        self._recorder, self._clock = recorder, recorder.clock
        self._agents = agents
        self._apart = users
        self._people = people
        self._own = False
        self._how: Callable[[], placement.Placement]
        self.link = GateLink(path, self._receive, read=self._decide, connected=self._name_all, lost=self._lost)
        self._knocks: dict[int, tuple[link.Knock, Agent]] = {}
        self._waits: dict[int, tuple[Agent, int]] = {}
        """By user: where, and with how many connections."""
        self._known: list[tuple[Process, Agent]] = []
        """Told since the gate's hello, until it has told everything."""
        self._scheduled = False
        self._hello: link.Hello | None = None
        """Of the gate that is connected; then whether it has told everything."""
        self._synced = False
        self._unplaced: dict[int, tuple[link.Knock, Pidfd | None]] = {}

    def begin(self, how: Callable[[], placement.Placement], *, own: bool) -> None:
        """``how()``: as the policy says; ``own``: each instance has a public directory of its own."""
        self._how, self._own = how, own

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

    # --- instances that come and go -----------------------------------------------------------------------------------

    def joined(self, agent: Agent) -> None:
        """An instance that is new among the node's. The gate is told of it, and it of the gate."""
        self._name_all()
        if self._hello is not None:
            agent.gate.receive(self._hello, None)
        if self._synced:
            agent.gate.receive(link.Synced(), None)

    def parted(self, agent: Agent, to: Agent) -> None:
        """It is not among the node's any more; who waits there waits at another one."""
        self._name_all()
        self._move_all([one for one, (_, where) in self._knocks.items() if where is agent], agent, to)

    def move(self, uid: int, agent: Agent, to: Agent) -> None:
        """What this user has waiting there waits elsewhere."""
        self._move_all([one for one, (knock, where) in self._knocks.items() if knock.uid == uid and where is agent],
                       agent, to)  # fmt: skip

    def _move_all(self, connections: list[int], agent: Agent, to: Agent) -> None:
        for uid in dict.fromkeys(self._knocks[one][0].uid for one in connections):
            self._recorder.record("user.moved", self._clock.now(), uid=uid, before=agent.name, instance=to.name)
        for one in connections:
            self._move(one, agent, to)
        if connections:
            agent.take([])
            to.gate.decide()

    # --- from the gate ------------------------------------------------------------------------------------------------

    def _name_all(self) -> None:
        own = [agent.name for agent in self._apart.sections()[1:]] if self._own else []
        self.link.send(link.Instances(tuple(agent.name for agent in self._agents), tuple(own)))

    def _decide(self) -> None:
        for agent in self._agents:
            agent.gate.decide()

    def _lost(self, why: str) -> None:
        self._forget()
        self._hello, self._synced = None, False
        do = "clients are held, and served as the gate was told last; see the gate's own log"
        self._recorder.conditions.set("gate", why, self._clock.now(), do)
        for agent in self._agents:
            agent.gate.lost()

    def _forget(self) -> None:
        self._knocks.clear()
        self._waits.clear()
        self._known.clear()
        for _, process in self._unplaced.values():
            if process is not None:
                process.close()
        self._unplaced.clear()

    def _receive(self, message: link.FromGate, process: Pidfd | None) -> None:
        match message:
            case link.Hello() | link.Synced():
                self._known.clear()
                if isinstance(message, link.Hello):
                    self._hello = message
                self._synced = isinstance(message, link.Synced)
                if self._synced:
                    self._say_synced()
                for agent in list(self._agents):
                    agent.gate.receive(message, None)
            case link.Knock():
                self._knocked(message, process)
            case link.Left() | link.Refused():
                _, waiting = self._unplaced.pop(message.connection, (None, None))
                if waiting is not None:
                    waiting.close()
                found = self._gone(message.connection)
                if found is None and isinstance(message, link.Refused):
                    found = self._agents[0]
                if found is not None:
                    found.gate.receive(message, None)
            case _:
                self._told(message, process)

    def _say_synced(self) -> None:
        now, conditions = self._clock.now(), self._recorder.conditions
        conditions.set("gate", None, now)
        conditions.set("public directory", None, now)
        note_files(conditions, "the gate", None if self._hello is None else open_files(self._hello.gate), now)

    def _told(self, message: link.FromGate, process: Pidfd | None) -> None:
        found = self._apart.find(getattr(message, "instance", ""))
        if found is None:  # it is not there any more
            if process is not None:
                process.close()
            return
        if isinstance(message, link.Known):
            self._known.append(((message.pid, message.start, message.uid), found))
        if isinstance(message, link.Handing | link.Passed):
            self._moved(message.connection, found)
        if isinstance(message, link.Passed) or (isinstance(message, link.Failed) and message.lost):
            self._gone(message.connection)
        found.gate.receive(message, process)

    def _moved(self, connection: int, to: Agent) -> None:
        """The gate hands a connection over elsewhere than it was thought to wait: the gate is right."""
        _, agent = self._knocks.get(connection, (None, None))
        if agent is not None and agent is not to:
            self._move(connection, agent, to)

    def _move(self, connection: int, agent: Agent, to: Agent) -> None:
        knock, _ = self._knocks[connection]
        process = agent.clients.give(connection)
        agent.gate.decide()
        agent.absorb([inp.GateSaid(agent.clock.now(), link.Left(connection))])  # not to be written down: it waits still
        self._deliver(knock, process, to)

    # --- who goes where -----------------------------------------------------------------------------------------------

    def _knocked(self, knock: link.Knock, process: Pidfd | None) -> None:
        if self._own:
            self._asked(knock, process)
            return
        agents = self._agents
        found = None if knock.instance is None else self._apart.find(knock.instance)
        if len(agents) == 1:
            found = agents[0]
        if found is None:
            found = self._waits.get(knock.uid, (None, 0))[0]
        if found is None:
            found = self._apart.of_user(knock.uid)
        if found is None:
            found = next((agent for agent in agents if agent.gate.waited_here(knock)), None)
        if found is None:
            places = self.places()
            name = placement.stays(knock.uid, places)
            if name is None:
                who = self._identified(knock, process, places)
                if who is None:
                    return
                name = placement.place(who, places, self._how())
            if name is None:
                self._refuse(knock, process, NOWHERE)
                return
            found = self._apart.find(name)
            assert found is not None
        self._deliver(knock, process, self._apart.instance_for(found, knock.uid))

    def _asked(self, knock: link.Knock, process: Pidfd | None) -> None:
        """It came in the directory of an instance, and is for that one or for none."""
        places = self.places()
        name = knock.asked or self._agents[0].name
        who = self._identified(knock, process, places)
        if who is None:
            return
        mine = placement.open_to(who, places)
        found = self._apart.find(name)
        if found is not None and name in mine:
            self._deliver(knock, process, self._apart.instance_for(found, knock.uid))
            return
        names = ", ".join(mine)
        why = f"the directory is that of {name}; the policy has {names} for this user" if mine else NOWHERE
        self._refuse(knock, process, why)

    def _identified(self, knock: link.Knock, process: Pidfd | None, places: Sequence[Place]) -> Identity | None:
        """Who knocks; None: the name service has to say so first."""
        self._people.meet([knock.uid])
        who = self._people.known.get(knock.uid)
        if who is None and placement.needs_names(places):
            self._unplaced[knock.connection] = (knock, process)
            return None
        return who or Identity(knock.uid)

    def _refuse(self, knock: link.Knock, process: Pidfd | None, why: str) -> None:
        if process is not None:
            process.close()
        self._recorder.record("client.refused", self._clock.now(), pid=knock.pid, uid=knock.uid, why=why)
        self.link.send(link.Refuse(knock.connection, why))

    def idle(self) -> None:
        """No user is at work or waits at an instance."""
        if self._knocks and not self._scheduled and not self._own:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._spread)

    def _spread(self) -> None:
        """Who waits elsewhere and has no client at work goes to an instance that is idle."""
        self._scheduled = False
        for agent in self._apart.sections():
            for uid in agent.view().waiting():
                places = self.places()
                here = next(one for one in places if one.name == agent.name)
                who = self._people.known.get(uid, Identity(uid))
                name = placement.free(who, places, self._how())
                to = None if name is None else self._apart.find(name)
                if to is None or uid in here.admitted or here.there == {uid} or agent.state.clients_of_user(uid):
                    continue
                self.move(uid, agent, to)

    def places(self) -> list[placement.Place]:
        """Those of users apart are part of their section's."""
        found = []
        for section in self._apart.sections():
            users = self._apart.lanes(section)
            every = [placement.place_of(one.policy, one.view(), self._processes(one)) for one in (section, *users)]
            found.append(placement.merged(every))
        return found

    def _processes(self, agent: Agent) -> list[Process]:
        waiting = [(one.pid, one.start, one.uid) for one, where in self._knocks.values() if where is agent]
        return waiting + [process for process, where in self._known if where is agent]

    def _deliver(self, knock: link.Knock, process: Pidfd | None, agent: Agent) -> None:
        self._gone(knock.connection)
        self._knocks[knock.connection] = (knock, agent)
        self._waits[knock.uid] = (agent, self._waits.get(knock.uid, (agent, 0))[1] + 1)
        agent.gate.receive(knock, process)

    def _gone(self, connection: int) -> Agent | None:
        """It does not wait any more; where it did."""
        knock, agent = self._knocks.pop(connection, (None, None))
        if knock is not None:
            where, count = self._waits.pop(knock.uid)
            if count > 1:
                self._waits[knock.uid] = (where, count - 1)
        return agent
