"""What the API answers, from a running agent: :class:`mpsagent.interfaces.backend.Backend` over :class:`Agent`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import mpsagent
from mpsagent.agent import policies, requests
from mpsagent.agent.conditions import Condition
from mpsagent.agent.host import Agent
from mpsagent.agent.node import Node
from mpsagent.core import usage
from mpsagent.core.model import user_text
from mpsagent.core.sentences import named, sentence
from mpsagent.core.view import View
from mpsagent.interfaces import accounting, gpus, lease_body, policy_diff, views
from mpsagent.interfaces.backend import CursorGone, Json, Problem, no_client
from mpsagent.interfaces.recent import Recent
from mpsagent.policy import apart
from mpsagent.policy.identity import Identity
from mpsagent.policy.origins import PolicyError
from mpsagent.policy.sharing import WORDS
from mpsagent.system.database import Query

T = TypeVar("T")
NAMES_WAIT = 5.0
"""Seconds for the name service to say who the users of a policy are."""
WARNED = 2.0
"""Seconds that the answer to a reload waits for what is surely not meant in the policy."""
PAGE_AGE = 0.1
"""Seconds for which a status page is given to others, too, when nothing has changed."""
GATE_WAIT, GATE_LOOK = 5.0, 0.005
"""Seconds for the gate to say that it goes by a new lease; between two looks whether it has."""


class Answers:
    """One agent's answers. Reading is from memory; acting is what the agent's loop does next."""

    def __init__(self, node: Node, agent: Agent, recent: Recent | None = None) -> None:
        self.node = node
        self.agent = agent
        history = agent.history
        self._page: tuple[View, views.About, float, Json] | None = None
        self.recent = recent or Recent(lambda cursor: history.since(cursor, history.last), self._is_mine)

    def _is_mine(self, record: Mapping[str, Any]) -> bool:
        """Whether it is about this instance, or, where users are apart, about one of its users'."""
        user = apart.split(str(record.get("instance"))) if self.agent.policy.sharing == "apart" else None
        return self.node.is_about(self.agent.name, record) or (user is not None and user[0] == self.agent.name)

    # --- reading ------------------------------------------------------------------------------------------------------

    def status(self) -> Json:
        """Made again when anything has changed, and after a moment for the spans of time in it."""
        view, about, now = self.agent.view(), self._about(), self.agent.clock.now()
        if self._page is None or self._page[:2] != (view, about) or not 0 <= now - self._page[2] < PAGE_AGE:
            self._page = (view, about, now, dict(views.status(view, about, now)))
        return self._page[3]

    def servers(self) -> Iterable[Mapping[str, Any]]:
        return views.servers(self.agent.view(), self._about())

    def clients(self) -> Iterable[Mapping[str, Any]]:
        return views.clients(self.agent.view(), self.agent.clock.now(), self.agent.observer.memory())

    async def look_again(self, most: float) -> None:
        await self.agent.observer.look_again(most)

    def queue(self) -> Iterable[Mapping[str, Any]]:
        return views.queue(self.agent.view(), self.agent.clock.now())

    def owner(self, pid: int) -> int | None:
        client = self.agent.state.clients.get(pid)
        return None if client is None else client.uid

    def waits(self, pid: int) -> bool:
        return bool(self.agent.state.held.of_pid(pid))

    def policy(self) -> Json:
        agent = self.agent
        return {
            "digest": agent.policy.digest or None,
            "loaded": views.iso_or_none(self.node.policy_loaded),
            "files": list(agent.policy.sources),
            "errors": [str(error) for error in self.node.policy_errors],
            "sections": self.node.policy.sections(),
        }

    async def explain(self, user: str) -> Json:
        agent = self.agent
        identity = await self.identity(user)
        rules = agent.policy.rules(identity)
        sharing = agent.policy.sharing
        return {
            **rules.explain(agent.devices),
            "sharing": {sharing: WORDS[sharing]},
            "now": self._now(identity.uid, agent.clock.now()),
        }

    def _now(self, uid: int, now: float) -> Json:
        """What holds for this user at this moment, and what will happen to it when."""
        view = self.agent.view()
        turn = views.turn(view, now) if view.turn is not None and view.turn.uid == uid else None
        return {
            "clients": len(view.state.clients_of_user(uid)),
            "waiting": next((one for one in views.queue(view, now) if one["uid"] == uid), None),
            "turn": turn,
            "gpu_seconds_last_day": round(usage.spent(self.agent.core.memories.usage, uid, now), 1),
        }

    async def policy_diff(self) -> Json:
        agent = self.agent
        fresh, errors = await policies.read(agent.settings, remember=False)
        if fresh is None:
            raise _mistakes(errors)
        each = self.node.each_of(fresh)
        now = {one.name for one in self.node.apart.templates()}
        policy = each.get(agent.name, agent.policy)
        users = await self._users(policy_diff.named_users([agent.policy, policy]))
        later = [name for name in policies.FIXED if getattr(agent.policy, name) != getattr(policy, name)]
        found = policy_diff.differences(agent.policy, policy, users, agent.devices, later)
        if now != each.keys():
            before, after = (", ".join(sorted(names)) for names in (now, each))
            found["settings"].append({"key": "instances", "before": before, "after": after, "restart": True})
            found |= {"same": False, "digest": fresh.digest or None}
        return dict(found)

    async def _users(self, names: list[str]) -> list[Identity]:
        """Those with these names or uids, and those who have to do with MPS now. Whom the name service does not know,
        or not in time, is taken by what the policy calls him."""
        state = self.agent.state
        present = {*state.users(), *state.queue()}
        found: dict[object, Identity] = {uid: who for uid, who in state.identities.items() if uid in present}
        end = asyncio.get_running_loop().time() + NAMES_WAIT
        for name in names:
            who = Identity(int(name)) if name.isdecimal() else Identity(policy_diff.OTHERS, name)
            if asyncio.get_running_loop().time() < end:
                with suppress(Problem):
                    who = await self.identity(name)
            found[name if who.uid == policy_diff.OTHERS else who.uid] = who
        return list(found.values())

    async def records(self, cursor: int | None, limit: int) -> list[Json]:
        history = self.agent.history
        if cursor is None:
            cursor = max(history.in_memory - 1, history.newest - limit)
        elif cursor < history.oldest - 1 or cursor > history.newest:
            raise CursorGone(cursor, history.oldest - 1)
        if cursor < history.in_memory - 1:
            found, _ = await _kept(history.find(Query(after=cursor, limit=limit)))
            if found:
                return [one for one in found if _number(one) <= history.newest]
        return history.since(cursor, limit)

    async def find(self, user: str | None, query: Query) -> tuple[list[Json], float]:
        if user is not None:
            query = query._replace(uid=(await self.identity(user)).uid)
        return await _kept(self.agent.history.find(query))

    async def report(self, by: str, first: str, last: str, job: str | None = None) -> Json:
        history, now, names = self.agent.history, self.agent.clock.now(), self.agent.names
        if by == "job":
            rows: list[Json] = await _kept(history.report_jobs(first, last, job, now))
            uids = sorted({row["uid"] for row in rows})
            who = dict(zip(uids, await asyncio.gather(*map(names.look_up, uids)), strict=True))
            rows = accounting.of_jobs(rows, [who[row["uid"]] for row in rows])
            return {"by": by, "first": first, "last": last, "rows": rows}
        rows = await _kept(history.report(first, last, "day" if by == "day" else "uid", now))
        if by != "day":
            users = await asyncio.gather(*(names.look_up(row["uid"]) for row in rows))
            rows = (
                accounting.of_users(rows, users)
                if by == "user"
                else accounting.of_groups(rows, users, self.agent.policy.groups)
            )
        return {"by": by, "first": first, "last": last, "rows": rows}

    def newest(self) -> int:
        return self.agent.history.newest

    def event(self, record: Json) -> Json:
        rest = {key: value for key, value in record.items() if key not in ("seq", "at", "kind")}
        return {
            "cursor": record["seq"],
            "at": views.iso(record["at"]),
            "kind": record["kind"],
            "sentence": sentence(record, self._name),
            **rest,
        }

    async def wait_events(self, cursor: int, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self.agent.history.wait(cursor)
        except TimeoutError:
            return

    def health(self) -> tuple[bool, list[str]]:
        conditions = self.node.all_conditions()
        texts = [f"{one.what}; {one.do}" if one.do else one.what for one in conditions]
        return not conditions, [named(text, self._name) for text in texts]

    # --- acting -------------------------------------------------------------------------------------------------------

    async def terminate(self, pid: int, *, now: bool, dry_run: bool, by: int) -> Json:
        found = requests.end_client(self.agent, pid, at_once=now, dry_run=dry_run, by=by)
        if not found["ok"]:
            raise no_client(pid, held=self.waits(pid))
        await self._written_down()
        return {**found, "user": self._name(found["uid"])}

    async def shutdown_server(self, pid: int, timeout: float | None, *, force: bool, dry_run: bool, by: int) -> Json:
        found = requests.shutdown_server(self.agent, pid, timeout, force=force, dry_run=dry_run, by=by)
        if found is None:
            raise Problem(404, f"process {pid} is not a server of MPS", "pid", "see `mpsagent-cli servers`")
        await self._written_down()
        clients = [{**one, "user": self._name(one["uid"])} for one in found["clients"]]
        user = None if found["uid"] is None else self._name(found["uid"])
        return {**found, "user": user, "clients": clients}

    async def drain(self, timeout: float | None, by: int) -> Json:
        until = requests.drain(self.agent, timeout, by)
        await self._written_down()
        return {"draining": True, "deadline": views.iso_or_none(until)}

    async def _written_down(self) -> None:
        """An order that was answered outlives the agent: it and its record are on disk, if the disk answers."""
        await self.agent.store.flushed(1.0)
        await self.wait_events(self.agent.history.last - 1, 1.0)

    async def resume(self, by: int) -> Json:
        drained = requests.resume(self.agent, by)
        await self._written_down()
        return {"draining": False, "drained": drained}

    async def restart(self, timeout: float | None, by: int, *, dry_run: bool = False) -> Json:
        if not requests.restart(self.agent, timeout, by, dry_run=dry_run):
            hint = "mpsagent-cli resume, then restart; drain --timeout 0s ends what still works"
            raise Problem(409, "nothing is started in a drain", "drain", hint)
        await self._written_down()
        return {"restarting": not dry_run}

    def leases(self) -> Iterable[Json]:
        view = self.agent.view()
        known = self.node.names.known
        return (lease_body.shown(one, view, None if one.uid is None else known(one.uid)) for one in view.state.leases)

    async def give_lease(self, body: Json, by: int) -> Json:
        found = requests.give_lease(self.node, lease_body.asked(body, self.agent.clock.now()), by)
        if isinstance(found, str):
            raise Problem(409, found, "lease")
        await self._written_down()
        in_force = await self._in_force()
        who = None if found.uid is None else await self.node.names.look_up(found.uid)
        return {**lease_body.shown(found, self.agent.view(), who), "in_force": in_force}

    async def _in_force(self) -> bool:
        """Whether the gate goes by what it was told last, at all instances. It is waited for, if there is one."""
        loop, agents = asyncio.get_running_loop(), self.node.agents
        end = loop.time() + GATE_WAIT
        while not (settled := all(one.view().settled for one in agents)) and loop.time() < end:
            if any(one.state.gate is None for one in agents):
                break
            await asyncio.sleep(GATE_LOOK)
        return settled

    async def end_lease(self, number: int, by: int) -> Json:
        if not requests.end_lease(self.node, number, by):
            raise Problem(404, f"there is no lease {number}", "lease", "see `mpsagent-cli lease list`")
        await self._written_down()
        return {"ended": number}

    async def reload(self, by: int) -> Json:
        errors = await self.node.load_policy()
        if errors:
            raise _mistakes(errors)
        found: Sequence[PolicyError] = ()
        with suppress(TimeoutError):  # names may be slow; `status` says it later
            async with asyncio.timeout(WARNED):
                found = await self.node.policy_warnings()
        node = self.node
        return {
            "digest": node.policy.digest,
            "files": list(node.policy.sources),
            "later": node.left,
            "warnings": [str(one) for one in found[:20]],
        }

    # --- what the views need ------------------------------------------------------------------------------------------

    def _about(self) -> views.About:
        agent, recent, seen = self.agent, self.recent.look(), self.node.gpus
        started = agent.core.memories.limits
        users = [one.uid for one in (recent.change, recent.fault) if one is not None]
        if recent.change is not None:
            users.append(recent.change.before)
        users += [one.seen.uid for one in agent.bypass.found.values()]
        return views.About(
            version=mpsagent.__version__,
            pid=os.getpid(),
            started=self.node.started,
            conditions=tuple(
                views.Condition(named(one.what, self._name), one.since, one.do) for one in self.node.all_conditions()
            ),
            checked={pid: pid not in started.differs for pid in started.seen},
            devices_known=bool(agent.devices),
            compute_modes=seen.modes,
            gpus=gpus.Seen(seen.seen, seen.nvml.xids, seen.nvml.xids_seen, seen.at, seen.problem),
            outside=tuple(agent.bypass.found.values()),
            memory=agent.observer.memory(),
            names={uid: name for uid in users if uid is not None and (name := self._name(uid)) is not None},
            last_change=recent.change,
            last_fault=recent.fault,
            policy_loaded=self.node.policy_loaded,
            policy_errors=tuple(str(error) for error in self.node.policy_errors),
            oldest_cursor=agent.history.oldest - 1,
            newest_cursor=agent.history.newest,
        )

    def _name(self, uid: int) -> str | None:
        """Without asking: who is not known has only a number."""
        known = self.agent.people.known.get(uid) or self.agent.names.known(uid)
        return None if known is None else known.name

    async def identity(self, user: str) -> Identity:
        """Raises Problem(404) for an unknown user."""
        names = self.agent.names
        uid = int(user) if user.isascii() and user.isdecimal() and len(user) <= 10 else None
        if uid is None:
            try:
                uid = await names.uid_of(user)
            except TimeoutError:
                raise Problem(503, "the name service does not answer", "user", "try the uid instead") from None
        if uid is None:
            raise Problem(404, f"there is no user {user!r}", "user", "see getent passwd")
        return await names.look_up(uid)


async def _kept(answer: Awaitable[T]) -> T:
    """What the database says. Raises Problem where it says nothing."""
    try:
        return await answer
    except OSError as error:
        raise Problem(503, f"the history cannot be read: {error.strerror}", "history", "see `status`") from None


def _number(record: Json) -> int:
    return int(record["seq"])


def _mistakes(errors: Sequence[PolicyError]) -> Problem:
    count = "a mistake" if len(errors) == 1 else f"{len(errors)} mistakes, the first"
    hint = "the old one is in force; `mpsagent-cli policy check` shows every mistake with its line"
    return Problem(422, f"the policy has {count}: {errors[0]}", "policy", hint)


def one_line(agent: Agent, conditions: Sequence[Condition]) -> str:
    """The state in a line, for ``systemctl status``."""
    view = agent.view()
    users = view.state.users()
    if view.turn is None and users:
        processes = "1 process" if len(view.state.clients) == 1 else f"{len(view.state.clients)} processes"
        text = f"{'1 user works' if len(users) == 1 else f'{len(users)} users work'} with {processes}"
    elif view.turn is None:
        text = "no user has the GPU"
    else:
        count = len(view.state.clients_of_user(view.turn.uid))
        processes = "1 process" if count == 1 else f"{count} processes"
        text = f"{user_text(view.state, view.turn.uid)} has the GPU with {processes}"
    waiting = len(view.waiting())
    if waiting:
        text += ", 1 user waits" if waiting == 1 else f", {waiting} users wait"
    if not conditions:
        return text
    count, what = len(conditions), named(conditions[0].what, agent.name_of)
    return f"{what} ({'1 problem' if count == 1 else f'{count} problems'}); {text}"
