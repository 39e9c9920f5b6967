"""Instances with ``sharing = "apart"``: a user who is held at a section's gets one, and it goes when it is idle.

That of the section has no control daemon: users wait there until theirs is there. Users' instances are as all others:
a fault, a hang or a restart of one is none of the others' business. An agent that comes anew finds them by their
directories, and proves their control daemons as those of all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mpsagent.agent.host import Agent
from mpsagent.agent.recorder import Recorder
from mpsagent.core import inputs as inp
from mpsagent.policy import apart
from mpsagent.policy.policy import Policy
from mpsagent.system import directories
from mpsagent.system.lock import AlreadyLocked
from mpsagent.wire.codec import MOST_INSTANCES

AGAIN = 5.0
"""Seconds until an instance that could not be made is tried again."""


class Apart:
    """Of one node, whose ``agents`` come and go here. ``moved(uid, from, to)``: what this user has waiting waits
    elsewhere; ``joined(instance)``: it is new; ``parted(instance, to)``: it has gone, and who waits there goes on."""

    def __init__(
        self,
        recorder: Recorder,
        agents: list[Agent],
        run_directory: str,
        make: Callable[[Policy], Agent],
        *,
        moved: Callable[[int, Agent, Agent], None],
        joined: Callable[[Agent], None],
        parted: Callable[[Agent, Agent], None],
    ) -> None:
        self._recorder = recorder
        self._agents = agents
        self._run_directory = run_directory
        self._make_instance = make
        self._moved, self._joined, self._parted = moved, joined, parted
        self._closed = False
        self._later: dict[str, Policy] = {}
        """By section: a policy with another way of sharing, which takes hold when no user's instance is left."""
        self._going: dict[str, str] = {}
        """Instances that are being taken away, with their sections; their directories are not free yet."""
        self._failed: dict[str, float] = {}
        """By name: when an instance that could not be made is tried again."""
        self._scheduled = False

    @property
    def going(self) -> frozenset[str]:
        """Users' instances that are being ended."""
        return frozenset(self._going)

    def close(self) -> None:
        """No further instance is made."""
        self._closed = True

    def find(self, name: str) -> Agent | None:
        """An instance by its name; empty: the first one."""
        if not name:
            return self._agents[0]
        return next((agent for agent in self._agents if agent.name == name), None)

    def sections(self) -> list[Agent]:
        """All instances that are no user's own."""
        return [agent for agent in self._agents if agent.policy.user is None]

    def lanes(self, section: Agent) -> list[Agent]:
        """Its users' instances, in the order in which they came."""
        users = (agent for agent in self._agents if agent.policy.user is not None)
        return [agent for agent in users if apart.section(agent.policy) == section.name]

    def of_user(self, uid: int) -> Agent | None:
        """Where this user's clients go."""
        mine = (agent for agent in self._agents if agent.policy.user == uid)
        return next((agent for agent in mine if apart.section(agent.policy) not in self._later), None)

    # --- the start ----------------------------------------------------------------------------------------------------

    def found(self, policies: Iterable[Policy]) -> list[Policy]:
        """The instances of these sections, and those of users whose directories an earlier agent has left. A section
        that is apart no more stays so until these have ended."""
        made: list[Policy] = []
        place = Path(self._run_directory, "instances")
        names = sorted(path.name for path in place.glob("*-u*")) if place.is_dir() else []
        for policy in policies:
            uids = [one[1] for one in map(apart.split, names) if one is not None and one[0] == policy.instance]
            if uids and policy.sharing != "apart":
                self._later[policy.instance] = policy
                policy = replace(policy, sharing="apart")
            made += [policy, *(apart.of_user(policy, uid) for uid in uids)]
        return made

    # --- another policy -----------------------------------------------------------------------------------------------

    def use_policy(self, section: Agent, policy: Policy | None) -> str | None:
        """As :meth:`Agent.use_policy`, for a section and its users' instances."""
        users = self.lanes(section)
        if policy is not None and users and policy.sharing != "apart":
            self._later[section.name] = policy
            policy = replace(policy, sharing="apart")
        elif policy is not None and self._later.pop(section.name, None) is not None:
            for one in users:
                one.take([inp.DrainResumed(one.clock.now())])
        left = section.use_policy(policy)
        for one in users if policy is not None else ():
            assert one.policy.user is not None
            one.use_policy(apart.of_user(section.policy, one.policy.user))
        self.soon()
        return left

    # --- who gets one, and which of them go ---------------------------------------------------------------------------

    def soon(self) -> None:
        """Something has changed that may make an instance needed."""
        if not self._scheduled and any(one.view().elsewhere for one in self.sections()):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._look_soon)

    def _look_soon(self) -> None:
        self._scheduled = False
        for section in self.sections():
            self._begin(section)

    def look(self) -> None:
        """Every second."""
        for section in self.sections():
            self._leave(section)
            for one in self.lanes(section):
                if self._over(one):
                    self._end(section, one)
            self._begin(section)

    def _begin(self, section: Agent) -> None:
        """Each user who is held there gets an instance, as far as there is room."""
        users = section.state.held.users()
        for uid in users:
            there = self.instance_for(section, uid)
            if there is not section:
                self._moved(uid, section, there)
        why = self._why_not(section)
        if users and section.state.apart_held != why:
            section.take([inp.ApartHeld(section.clock.now(), why)])

    def instance_for(self, section: Agent, uid: int) -> Agent:
        """Where this user goes, who belongs to the section: the user's own instance, made now if it may be."""
        view, name = section.view(), apart.name(section.name, uid)
        if not view.elsewhere or not section.ready or self._closed:
            return section
        if section.state.drain is not None or section.name in self._later or name in self._going:
            return section
        there = self.find(name)
        if there is not None:
            return there
        if view.denied(uid) or not view.identified(uid) or self._why_not(section) is not None:
            return section
        if section.clock.now() < self._failed.get(name, 0.0):
            return section
        return self._make(section, uid) or section

    def _why_not(self, section: Agent) -> str | None:
        """Why no further instance is made now."""
        if section.name in self._later:
            return f'sharing = "{self._later[section.name].sharing}" takes hold when the clients at work have ended'
        count, most = len(self.lanes(section)), section.policy.apart_users
        count += list(self._going.values()).count(section.name)
        if count >= most or len(self._agents) + len(self._going) >= MOST_INSTANCES:
            return f"no more users may have a control daemon of their own (apart_users = {most})"
        return None

    def _make(self, section: Agent, uid: int) -> Agent | None:
        """An instance for this user, at work in a moment."""
        now, made = section.clock.now(), self._make_instance(apart.of_user(section.policy, uid))
        try:
            made.prepare()
        except (OSError, AlreadyLocked, directories.DirectoryRefused) as error:
            self._not_made(section, made, error)
            self._recorder.spawn(made.end())
            return None
        self._failed.pop(made.name, None)
        self._agents.append(made)
        made.absorb([
            inp.DevicesFound(now, section.state.devices), *(inp.LeaseGiven(now, one) for one in section.state.leases)
        ])  # fmt: skip
        self._joined(made)
        self._recorder.spawn(self._work(section, made))
        return made

    def _not_made(self, section: Agent, made: Agent, error: Exception) -> None:
        now = section.clock.now()
        self._failed[made.name] = now + AGAIN
        what = f"user {made.policy.user} gets no control daemon: {error}"
        section.conditions.set("apart", what, now, "it is tried again by itself", until=now + 2 * AGAIN)

    async def _work(self, section: Agent, made: Agent) -> None:
        try:
            await made.begin(None)
        except OSError as error:
            if made in self._agents:
                self._not_made(section, made, error)
                self._end(section, made)

    def _leave(self, section: Agent) -> None:
        """Where another way of sharing waits: clients at work go on, and nothing new is let in."""
        later, now, users = self._later.get(section.name), section.clock.now(), self.lanes(section)
        what = None
        if later is not None and not users and section.name not in self._going.values():
            del self._later[section.name]
            section.use_policy(later)
        elif later is not None:
            for one in users:
                if one.ready and one.state.drain is None:
                    one.take([inp.DrainOrdered(now, now, None)])
            count = sum(len(one.state.clients) for one in users)
            what = (
                f'sharing = "{later.sharing}" takes hold later: the old way holds until {count} '
                f"process{'' if count == 1 else 'es'} of {len(users)} user{'' if len(users) == 1 else 's'} apart "
                f"{'has' if count == 1 else 'have'} ended; new clients are held meanwhile"
            )
        do = "it takes hold by itself; to wait no longer, end those clients (mpsagent-cli clients)"
        section.conditions.set("sharing apart", what, now, do)

    def _over(self, one: Agent) -> bool:
        """It has no control daemon, and no user who needs one."""
        view = one.view()
        if not one.at_rest or view.control_alive or not view.synced or one.state.clients:
            return False
        return apart.section(one.policy) in self._later or not one.state.held

    def _end(self, section: Agent, one: Agent) -> None:
        self._agents.remove(one)
        self._going[one.name] = section.name
        self._parted(one, section)
        self._recorder.spawn(self._take_away(one))

    async def _take_away(self, one: Agent) -> None:
        try:
            await one.end()
            one.store.clear()
            self._clean(one)
        finally:
            self._going.pop(one.name, None)
            self.soon()

    def _clean(self, one: Agent) -> None:
        """What a user's instance leaves but its logs."""
        with suppress(OSError, directories.DirectoryRefused):  # something is in it that is not ours
            directories.clean(one.where.hidden)
            Path(one.where.home, "agent.lock").unlink(missing_ok=True)
            Path(one.where.hidden).rmdir()
            Path(one.where.home).rmdir()
        Path(self._run_directory, f"instance-{one.name}.env").unlink(missing_ok=True)
