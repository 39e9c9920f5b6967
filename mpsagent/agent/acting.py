"""Orders, carried out at one instance or at all of them; each is on record, and on disk when it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from mpsagent.agent import policies, policy_diff, saved
from mpsagent.agent.clock import SteadyClock
from mpsagent.agent.host import Agent
from mpsagent.agent.settings import Settings
from mpsagent.core import inputs as inp
from mpsagent.core.ladder import TERMINATE
from mpsagent.core.model import Client, State
from mpsagent.core.pause_room import has_to_leave
from mpsagent.linux.processes import lineage
from mpsagent.linux.threads import in_thread
from mpsagent.mps.units import iso
from mpsagent.policy.identity import Identity
from mpsagent.policy.origins import PolicyError
from mpsagent.policy.policy import Policy
from mpsagent.policy.shares import Lease, Share, matches
from mpsagent.snapshot import lease_body
from mpsagent.snapshot.problem import Json, Problem
from mpsagent.system.names import Names
from mpsagent.system.store import Store

NAMES_WAIT = 5.0
"""Seconds for the name service to identify the users of a policy."""
LOOK_WAIT = 2.0
"""Seconds for finding the descendants of a process in /proc, and for comparing cgroups."""
GATE_WAIT, GATE_LOOK = 5.0, 0.005
"""Seconds for the gate to confirm a new lease; between two looks for that."""
MOST_LEASES = 1000


class Those(NamedTuple):
    """Clients: of one user, if `uid` is given, and of a job, in a cgroup or below the process `below`, if that is."""

    uid: int | None = None
    job: str | None = None
    cgroup: str | None = None
    below: int | None = None

    def among(self, clients: Sequence[Client]) -> list[Client]:
        """A process that has left its server and lives on is not among them: its end hurts no neighbour. Reads
        /proc."""
        found = [
            one for one in clients
            if one.detached is None and self.uid in (None, one.uid) and self.job in (None, one.job)
            and (self.cgroup is None or (one.peer.cgroup is not None and matches(self.cgroup, one.peer.cgroup)))
        ]  # fmt: skip
        if self.below is None:
            return found
        lines = [(one, lineage(one.pid)) for one in found]
        return [one for one, line in lines if line[:1] == ((one.pid, one.peer.start),) and self.below in dict(line)]


def no_client(pid: int, held: bool) -> Problem:
    """Nothing to end there; ``held``: it is a process that waits, which `clients` lists, too."""
    if held:
        what, hint = (
            f"process {pid} waits at the gate: it is not a client yet",
            f"to remove it: kill {pid}",
        )
        return Problem(404, what, "pid", f"{hint}, for root and its user")
    return Problem(404, f"process {pid} is not a client of MPS", "pid", "see `mpsagent-cli clients`")


class Acting:
    """The orders of one node. ``by``: the uid that asked. An order that cannot be done raises Problem. ``written``
    waits until the api shows the new state; ``load`` reads the policy and applies it; ``each_of``: a policy's
    instances by name."""

    def __init__(
        self,
        agents: Sequence[Agent],
        *,
        clock: SteadyClock,
        name: Callable[[int], str | None],
        names: Names,
        store: Store,
        written: Callable[[float], Awaitable[None]],
        settings: Settings,
        load: Callable[[], Awaitable[policies.Loaded]],
        each_of: Callable[[Policy], Mapping[str, Policy]],
    ) -> None:
        self._agents, self._clock, self._store = agents, clock, store
        self.name, self._names = name, names
        self._written = written
        self._settings, self._load, self._each_of = settings, load, each_of

    def _of_client(self, pid: int) -> Agent:
        return next((one for one in self._agents if pid in one.state.clients), self._agents[0])

    def _those(self, instance: str | None) -> list[Agent]:
        found = [one for one in self._agents if instance in (None, one.name)]
        if not found:
            known = ", ".join(one.name for one in self._agents)
            raise Problem(404, f"there is no instance {instance!r}", "instance", f"known: {known}")
        return found

    def owner(self, pid: int) -> int | None:
        """Return the uid of a client (a process that passed the gate); None if no such client exists."""
        client = self._of_client(pid).state.clients.get(pid)
        return None if client is None else client.uid

    def waits(self, pid: int) -> bool:
        """Return whether the gate holds a connection of this process."""
        return any(one.state.held.of_pid(pid) for one in self._agents)

    async def terminate(self, pid: int, *, now: bool, dry_run: bool, by: int) -> Json:
        """End one client by the ladder."""
        agent = self._of_client(pid)
        client = agent.state.clients.get(pid)
        if client is None:
            raise no_client(pid, held=self.waits(pid))
        found = ending(agent.state, client, at_once=now, dry_run=dry_run)
        if not dry_run:
            _end(agent, [client], at_once=now, by=by)
        await self._written_down()
        return {**found, "user": self.name(client.uid)}

    async def terminate_each(self, those: Those, *, now: bool, dry_run: bool, by: int) -> Json:
        """End several clients, each as :meth:`terminate` does; `ending`: which."""
        clients = [one for agent in self._agents for one in agent.state.clients.values()]
        found = await in_thread(those.among, clients, deadline=LOOK_WAIT)
        ordered = False
        for agent in () if dry_run else self._agents:
            there, ending = agent.state.clients, agent.core.view().ending
            fresh = [
                there[one.pid] for one in found
                if one.pid in there and there[one.pid].peer.start == one.peer.start
                and (one.pid not in ending or (now and ending[one.pid].hook))
            ]  # fmt: skip
            if fresh:  # else who asks again and again fills the history
                ordered = True
                _end(agent, fresh, at_once=now, by=by)
        if ordered:
            await self._written_down()
        rows = [{"pid": one.pid, "uid": one.uid, "user": self.name(one.uid)} for one in found]
        return {"ok": True, "dry_run": dry_run, "ending": rows}

    async def drain(self, timeout: float | None, by: int, instance: str | None = None) -> Json:
        """Let nothing new in; after ``timeout`` seconds (None: never) end what still runs. ``instance``: only there."""
        now = self._clock.now()
        until = None if timeout is None else now + timeout

        def order(one: Agent) -> None:
            one.record("drain.ordered", now, by=by, timeout=timeout)
            _drain(one, now, until, by, restart=False)

        if instance is None:
            self._store.put(saved.DRAINED, {"since": now, "until": until, "restart": False})
        found = await self._each(instance, order)
        return {"draining": True, "deadline": None if until is None else iso(until), **found}

    async def resume(self, by: int, instance: str | None = None) -> Json:
        """End a drain: waiting users are admitted at once. ``drained``: whether there was a drain."""
        now, drained = self._clock.now(), []

        def order(one: Agent) -> None:
            drained.append(one.state.drain is not None)
            one.store.put("drain", None)
            if drained[-1]:
                one.record("drain.resumed", now, by=by)
            one.take([inp.DrainResumed(now)])

        if instance is None:
            self._store.put(saved.DRAINED, None)
        found = await self._each(instance, order)
        return {"draining": False, "drained": any(drained), **found}

    async def extend_turn(self, uid: int | None, seconds: float | None, by: int) -> Json:
        """Let the turn of a user last ``seconds`` longer than its known end, or than now if no end is known."""
        if uid is None or seconds is None:
            raise Problem(400, "whose turn, and how much longer?", "order", 'for example "uid": 1001, "by": "1h"')
        now, user = self._clock.now(), self.name(uid) or f"user {uid}"
        turns = [(one, view, view.turn) for one in self._agents if (view := one.core.view()).turn is not None]
        found = next(((one, view, turn) for one, view, turn in turns if turn is not None and turn.uid == uid), None)
        if found is None and all(one.core.view().sharing != "turns" for one in self._agents):
            hint = 'turns need sharing = "turns" in [instance.NAME]'
            raise Problem(409, "there are no turns, because all users work at the same time", "turn", hint)
        if found is None:
            raise Problem(409, f"{user} has no turn at present", "turn", "see `mpsagent-cli status`")
        agent, view, turn = found
        if not turn.let_in:
            raise Problem(409, f"the turn of {user} is ending already", "turn")
        if not has_to_leave(view, uid):
            raise Problem(409, f"the turn of {user} has no time limit", "turn", f"mpsagent-cli policy explain {user}")
        until = max(now, turn.ends or now) + seconds
        agent.record("turn.extended", now, uid=uid, by=by, until=until)
        agent.take([inp.TurnExtended(now, uid, until)])
        agent.store.put(saved.EXTENDED, saved.by_user(agent.state.extended))
        return {"uid": uid, "user": self.name(uid), "until": iso(until), **await self._written_down()}

    async def restart(
        self, timeout: float | None, by: int, instance: str | None = None, *, dry_run: bool = False
    ) -> Json:
        """Start the control daemon again, also where starts have failed; a running one is asked to quit first, when its
        clients have ended or after ``timeout`` seconds (None: the policy's ``sigkill_delay``). All, or none: in a drain
        nothing is started, and who works would lose it for nothing."""
        now = self._clock.now()
        drains = [each.state.drain for one in self._those(instance) for each in one.core.engines.values()]
        if any(drain is not None and not drain.restart for drain in drains):
            hint = "run mpsagent-cli resume first; drain --timeout 0s terminates clients that still work"
            raise Problem(409, "no control daemon is started in a drain", "drain", hint)

        def order(one: Agent) -> None:
            if dry_run:
                return
            one.record("control.restart_ordered", now, by=by, timeout=timeout)
            alive = [key for key in one.core.engines if timeout is not None and one.core.view(key).control_alive]
            if timeout is not None and alive:
                _drain(one, now, now + timeout, by, restart=True)
            one.take([inp.Of(key, inp.RestartOrdered(now, by)) for key in one.core.engines if key not in alive])

        found = await self._each(instance, order)
        return {"restarting": not dry_run, **found}

    async def _each(self, instance: str | None, order: Callable[[Agent], object]) -> Json:
        those = self._those(instance)
        for one in those:
            order(one)
        return {"instances": [one.name for one in those], **await self._written_down()}

    async def _written_down(self) -> Json:
        """Wait until the order is on disk, so that it outlives the agent, and until readers see it. Returns ``unsaved``
        with the reason if it is not on disk."""
        saved_now, _ = await asyncio.gather(self._store.flushed(1.0), self._written(1.0))
        return {} if saved_now else {"unsaved": self._store.problem or "the disk does not answer"}

    async def give_lease(self, body: Json, by: int) -> Json:
        """A share for a job, in place of an earlier one of that name."""
        first, now = self._agents[0], self._clock.now()
        asked, process = lease_body.asked(body, now - self._clock.shift()), None
        given = first.state.leases
        earlier = [one for one in given if asked.name is not None and one.name == asked.name]
        if len(given) - len(earlier) >= MOST_LEASES:
            raise Problem(409, f"there are {MOST_LEASES} leases already", "lease")
        if asked.pid is not None:
            line = lineage(asked.pid)
            if not line:
                raise Problem(409, f"there is no process {asked.pid}", "lease")
            process = line[0]
        number = int(self._store.get(saved.LEASE, 0)) + 1
        source = f"lease {number}"
        share = Share(source, **asked.share, job=asked.name or source)
        until = now + asked.seconds if asked.seconds is not None else (asked.until or 0.0) + self._clock.shift()
        found = Lease(number, share, now, until, by, asked.uid, asked.cgroup, process, asked.name)
        self._store.put(saved.LEASE, number)
        self._on_leases([*(inp.LeaseEndOrdered(now, one.number, by) for one in earlier), inp.LeaseOrdered(now, found)])
        in_force = await self._in_force()
        unsaved = await self._written_down()
        who = None if found.uid is None else await self._names.look_up(found.uid)
        return {**lease_body.shown(found, first.core.view(), who), "in_force": in_force, **unsaved}

    async def _in_force(self) -> bool:
        """Wait for the gate, if there is one. Return whether it has applied its last table, at all instances."""
        loop = asyncio.get_running_loop()
        end = loop.time() + GATE_WAIT
        while not (settled := all(one.core.view().settled for one in self._agents)) and loop.time() < end:
            if any(one.state.gate is None for one in self._agents):
                break
            await asyncio.sleep(GATE_LOOK)
        return settled

    async def end_lease(self, number: int, by: int) -> Json:
        if all(one.number != number for one in self._agents[0].state.leases):
            raise Problem(404, f"there is no lease {number}", "lease", "see `mpsagent-cli lease list`")
        self._on_leases([inp.LeaseEndOrdered(self._clock.now(), number, by)])
        return {"ended": number, **await self._written_down()}

    def _on_leases(self, events: list[inp.Input]) -> None:
        """At all instances: a job may be placed at any."""
        for one in self._agents:
            one.take(events)
        self._store.put(saved.LEASES, saved.lease_rows(self._agents[0].core))

    # --- the policy

    async def reload(self, by: int) -> Json:
        """Read the policy again; a bad one leaves the old one in force and is in the answer."""
        found = await self._load()
        await self._written_down()
        if found.errors:
            raise _mistakes(found.errors)
        return {"digest": found.policy.digest, "files": list(found.policy.sources), "later": found.later}

    async def policy_diff(self) -> Json:
        """Return the changes of a reload, with the users that they concern."""
        fresh, errors = await policies.read(self._settings, remember=False)
        if fresh is None:
            raise _mistakes(errors)
        each = self._each_of(fresh)
        names = policy_diff.named_users([*(one.policy for one in self._agents), fresh])
        known = await self._identities(names)
        found: dict[str, Json] = {}
        for one in self._agents:
            present = {*one.state.users(), *one.state.held.users()}
            users = {uid: who for uid, who in one.state.identities.items() if uid in present} | known
            policy = each.get(one.name, one.policy)
            later = [name for name in policies.FIXED if getattr(one.policy, name) != getattr(policy, name)]
            found[one.name] = policy_diff.differences(one.policy, policy, list(users.values()), one.devices, later)
        answer = next(iter(found.values())) if len(found) == 1 else _together(found)
        before = ", ".join(sorted(one.policy.instance for one in self._agents))
        after = ", ".join(sorted(one.instance for one in each.values()))
        if before != after:
            answer["settings"].append({"key": "instances", "before": before, "after": after, "restart": True})
            answer |= {"same": False, "digest": fresh.digest or None}
        return answer

    async def _identities(self, names: Sequence[str]) -> dict[object, Identity]:
        """Those with these names or uids. Whom the name service does not know, or not in time, is taken by what the
        policy calls him."""
        service, found = self._names, dict[object, Identity]()
        with suppress(TimeoutError):
            async with asyncio.timeout(NAMES_WAIT):
                for name in names:
                    with suppress(TimeoutError):
                        uid = int(name) if name.isdecimal() else await service.uid_of(name)
                        if uid is not None:
                            found[uid] = await service.look_up(uid)
        told = {one.name for one in found.values()} | {str(uid) for uid in found}
        for name in names:
            if name not in told:
                uid = int(name) if name.isdecimal() else policy_diff.OTHERS
                found[name] = Identity(uid, None if name.isdecimal() else name)
        return found


def ending(state: State, client: Client, *, at_once: bool, dry_run: bool) -> Json:
    """Return the steps by which a client is ended."""
    policy, server = state.policy, state.server_of(client.pid)
    steps = [f"terminate_client {server.pid if server is not None else 'SERVER'} {client.pid}, "
             f"at most {TERMINATE:g} s", "SIGTERM"]  # fmt: skip
    steps.append(f"after {policy.kill_grace:g} s SIGKILL")
    if policy.before_end is not None and not at_once:
        steps.insert(0, f"hook {policy.before_end}, at most {policy.hook_deadline:g} s")
    return {
        "pid": client.pid, "dry_run": dry_run, "ok": True, "uid": client.uid,
        "server": None if server is None else server.pid, "steps": steps,
    }  # fmt: skip


def _end(agent: Agent, clients: Sequence[Client], *, at_once: bool, by: int) -> None:
    """Put clients on the ladder."""
    now = agent.clock.now()
    for one in clients:
        agent.record("client.end_ordered", now, pid=one.pid, uid=one.uid, start=one.peer.start, by=by)
    agent.take([inp.EndOrdered(now, one.pid, by, at_once) for one in clients])


def _drain(agent: Agent, now: float, until: float | None, by: int, *, restart: bool) -> None:
    agent.take([inp.DrainOrdered(now, now, until, restart, by)])
    drains = (one.state.drain for one in agent.core.engines.values())
    since = min((drain.since for drain in drains if drain is not None), default=now)
    agent.store.put("drain", {"since": since, "until": until, "restart": restart, "by": by})


def _mistakes(errors: Sequence[PolicyError]) -> Problem:
    count = "a mistake" if len(errors) == 1 else f"{len(errors)} mistakes, the first"
    hint = "the old one is in force; `mpsagent-cli policy check` shows every mistake with its line"
    return Problem(422, f"the policy has {count}: {errors[0]}", "policy", hint)


def _together(found: Mapping[str, Json]) -> Json:
    """Return the changes of a reload, with the instance of each change."""
    users = [
        {**row, "who": f"{row['who']} at {name}"} for name, one in found.items() for row in one["users"]
    ]  # fmt: skip
    settings: dict[str, Json] = {}
    for name, one in found.items():
        for row in one["settings"]:
            section, _, key = str(row["key"]).partition(".")
            shown = f"instance.{name}.{key}" if section == "instance" else str(row["key"])
            settings[shown] = {**row, "key": shown}
    digest = next(iter(found.values()))["digest"]
    return {"same": not users and not settings, "digest": digest, "users": users, "settings": list(settings.values())}
