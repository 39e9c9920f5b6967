"""What the API answers of all instances: each one's answers, put together. With one instance they are that one's."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

from mpsagent.agent.host import Agent
from mpsagent.agent.node import Node
from mpsagent.interfaces.answers import Answers, one_line
from mpsagent.interfaces.backend import Json, Problem
from mpsagent.interfaces.cli_words import many
from mpsagent.policy import apart
from mpsagent.system.database import Query

OF_NODE = frozenset({"agent", "health", "gate", "pipe_directory", "policy", "history"})
"""What of a status page is about the whole agent."""
LISTS = ("devices", "servers", "users", "waiting", "outside", "not_guaranteed")
SUMS = ("clients", "waiting_users", "waiting_processes", "outside_processes", "unknown_lines", "foreign_lines")


class Everything:
    """The backend of a node. Orders are for all instances or for a named one."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._made: dict[str, Answers] = {}
        self._pages: dict[str, Json] = {}
        self._status: Json = {}

    @property
    def _each(self) -> dict[str, Answers]:
        """By section. Those of users apart are not among them."""
        return {agent.name: self._of(agent) for agent in self._node.apart.templates()}

    def _of(self, agent: Agent) -> Answers:
        known = self._made.get(agent.name)
        if known is None or known.agent is not agent:
            there = {one.name for one in self._node.agents}
            self._made = {name: one for name, one in self._made.items() if name in there}
            section = self._node.apart.section(agent)
            recent = None if section is agent else self._of(section).recent
            known = self._made[agent.name] = Answers(self._node, agent, recent)
        return known

    def _users(self, template: str) -> list[Answers]:
        """Those of its users, where it is apart."""
        agent = self._node.find(template)
        return [] if agent is None else [self._of(one) for one in self._node.apart.of(agent)]

    @property
    def _first(self) -> Answers:
        return next(iter(self._each.values()))

    def _those(self, instance: str | None) -> dict[str, Answers]:
        each = self._each
        if instance is None:
            return each
        found = each.get(instance)
        if found is None:
            raise Problem(404, f"there is no instance {instance!r}", "instance", f"known: {', '.join(each)}")
        return {instance: found}

    # --- reading ------------------------------------------------------------------------------------------------------

    def status(self) -> Json:
        """The same object as before while each instance's page is."""
        every = {agent.name: self._of(agent).status() for agent in self._node.agents}
        if every.keys() == self._pages.keys() and all(page is self._pages[name] for name, page in every.items()):
            return self._status
        pages, apart = {}, {}
        for name in self._each:
            users = {user.agent.name: every[user.agent.name] for user in self._users(name)}
            apart[name] = list(map(_user_apart, users.items()))
            is_apart = every[name]["mode"]["sharing"] == "apart"
            pages[name] = _with_users(every[name], users) if is_apart else every[name]
        parts = [
            {"name": name, "log_directory": one.agent.policy.log_directory,
             "environment": self._node.environment_of(name),
             **{key: value for key, value in pages[name].items() if key not in OF_NODE},
             "apart": apart[name]}
            for name, one in self._each.items()
        ]  # fmt: skip
        first = next(iter(pages.values()))
        page = first if len(pages) == 1 else _together(pages)
        self._pages, self._status = every, {**page, "environment": self._node.environment, "instances": parts}
        return self._status

    def servers(self) -> Iterable[Mapping[str, Any]]:
        return self._all(Answers.servers)

    def clients(self) -> Iterable[Mapping[str, Any]]:
        return self._all(Answers.clients)

    def queue(self) -> Iterable[Mapping[str, Any]]:
        return self._all(Answers.queue)

    def _all(self, read: Callable[[Answers], Iterable[Mapping[str, Any]]]) -> Iterator[Mapping[str, Any]]:
        each = self._each
        found = [(name, read(one)) for name in each for one in (each[name], *self._users(name))]  # all of one moment
        for name, rows in found:
            for row in rows:
                yield {**row, "instance": name}

    async def look_again(self, most: float) -> None:
        for agent in self._node.agents:
            await self._of(agent).look_again(0.0)
        if most:
            await asyncio.gather(*(self._of(agent).look_again(most) for agent in self._node.agents))

    def owner(self, pid: int) -> int | None:
        every = (self._of(agent) for agent in self._node.agents)
        return next((uid for one in every if (uid := one.owner(pid)) is not None), None)

    def waits(self, pid: int) -> bool:
        return any(self._of(agent).waits(pid) for agent in self._node.agents)

    def policy(self) -> Json:
        return self._first.policy()

    async def explain(self, user: str, instance: str | None = None) -> Json:
        """With several instances and none named, as it is where the user belongs."""
        found = self._those(instance)
        name, who = next(iter(found)), await self._first.identity(user)
        if instance is None and len(found) > 1:
            name = self._node.placing.where(who) or name
        own = next((one for one in self._users(name) if one.agent.policy.user == who.uid), found.get(name))
        answer = await (own or self._first).explain(user)
        return answer if len(self._each) == 1 else {**answer, "instance": name}

    async def policy_diff(self) -> Json:
        found = {name: await one.policy_diff() for name, one in self._each.items()}
        return next(iter(found.values())) if len(found) == 1 else _differences(found)

    async def records(self, cursor: int | None, limit: int) -> list[Json]:
        return await self._first.records(cursor, limit)

    async def find(self, user: str | None, query: Query) -> tuple[list[Json], float]:
        return await self._first.find(user, query)

    async def report(self, by: str, first: str, last: str, job: str | None = None) -> Json:
        return await self._first.report(by, first, last, job)

    def newest(self) -> int:
        return self._first.newest()

    def event(self, record: Json) -> Json:
        return self._first.event(record)

    async def wait_events(self, cursor: int, timeout: float) -> None:
        await self._first.wait_events(cursor, timeout)

    def health(self) -> tuple[bool, list[str]]:
        return self._first.health()

    def leases(self) -> Iterable[Json]:
        return self._first.leases()

    # --- acting -------------------------------------------------------------------------------------------------------

    async def terminate(self, pid: int, *, now: bool, dry_run: bool, by: int) -> Json:
        every = (self._of(agent) for agent in self._node.agents)
        one = next((one for one in every if one.owner(pid) is not None), self._first)
        return await one.terminate(pid, now=now, dry_run=dry_run, by=by)

    async def shutdown_server(self, pid: int, timeout: float | None, *, force: bool, dry_run: bool, by: int) -> Json:
        agents = self._node.agents
        there = next((one for one in agents if pid in one.state.servers), agents[0])
        return await self._of(there).shutdown_server(pid, timeout, force=force, dry_run=dry_run, by=by)

    async def drain(self, timeout: float | None, by: int, instance: str | None = None) -> Json:
        return await self._order(instance, lambda one: one.drain(timeout, by))

    async def resume(self, by: int, instance: str | None = None) -> Json:
        return await self._order(instance, lambda one: one.resume(by))

    async def restart(
        self, timeout: float | None, by: int, instance: str | None = None, *, dry_run: bool = False
    ) -> Json:
        found = await self._order(instance, lambda one: one.restart(timeout, by, dry_run=True))  # all, or none
        return found if dry_run else await self._order(instance, lambda one: one.restart(timeout, by))

    async def _order(self, instance: str | None, order: Callable[[Answers], Awaitable[Json]]) -> Json:
        found = self._those(instance)
        answers = [await order(one) for name, first in found.items() for one in (first, *self._users(name))]
        drained = {"drained": any(one["drained"] for one in answers)} if "drained" in answers[-1] else {}
        return {**answers[-1], **drained, "instances": list(found)}

    async def give_lease(self, body: Json, by: int) -> Json:
        return await self._first.give_lease(body, by)

    async def end_lease(self, number: int, by: int) -> Json:
        return await self._first.end_lease(number, by)

    async def reload(self, by: int) -> Json:
        return await self._first.reload(by)

    def one_line(self) -> str:
        """The state in a line, for ``systemctl status``."""
        agents, conditions = self._node.agents, self._node.all_conditions()
        if len(agents) == 1:
            return one_line(agents[0], conditions)
        clients = sum(len(agent.state.clients) for agent in agents)
        waiting = sum(len(agent.view().waiting()) for agent in agents)
        apart = sum(1 for agent in agents if agent.policy.user is not None)
        text = f"{len(agents) - apart} instances, " if len(agents) - apart > 1 else ""
        text += f"{many(apart, 'user')} apart, " if apart else ""
        text += f"{many(clients, 'client')}, {many(waiting, 'user')} {'waits' if waiting == 1 else 'wait'}"
        return f"{conditions[0].what} ({many(len(conditions), 'problem')}); {text}" if conditions else text


def _differences(found: Mapping[str, Json]) -> Json:
    """What a reload would change, with the instance where it would."""
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


def _user_apart(named: tuple[str, Json]) -> Json:
    """The control daemon of a user apart."""
    name, page = named
    control = page["control"] or {}
    found = apart.split(name)
    return {
        "name": name,
        "uid": None if found is None else found[1],
        "control": control.get("pid"),
        "started": control.get("started"),
        "servers": [one["pid"] for one in page["servers"]],
        "clients": page["clients"],
        "waiting": page["waiting_processes"],
        "draining": page["drain"]["draining"],
    }


def _with_users(page: Json, users: Mapping[str, Json]) -> Json:
    """The page of an instance apart: its users' are part of it."""
    found = _together({"": page, **users}, named=False)
    found["drain"] = page["drain"]
    found["not_guaranteed"] = list(dict.fromkeys(found["not_guaranteed"]))
    return {**found, "devices": page["devices"], "last_fault": page["last_fault"]}


def _together(pages: Mapping[str, Json], *, named: bool = True) -> Json:
    """One page of several, whose rows say of which instance they are if these are ``named``. Whose turn it is and how a
    control daemon does is each instance's own: null here."""
    every = list(pages.values())
    first = every[0]
    found: Json = {key: first[key] for key in first}
    found |= dict.fromkeys(("control", "turn", "holder", "last_switch", "last_change", "last_fault"))
    found |= {key: sum(page[key] for page in every) for key in SUMS}
    for key in LISTS:
        found[key] = [
            row if not named else {**row, "instance": name} if isinstance(row, dict) else f"{name}: {row}"
            for name, page in pages.items() for row in page[key]
        ]  # fmt: skip
    by_uid: Counter[str] = Counter()
    for page in every:
        by_uid.update(page["clients_by_uid"])
    found["clients_by_uid"] = dict(by_uid)
    found["limits"] = {key: [one for page in every for one in page["limits"][key]] for key in first["limits"]}
    found["drain"] = next((page["drain"] for page in every if not page["drain"]["draining"]), first["drain"])
    found["gate"] = {
        **first["gate"],
        "open": any(page["gate"]["open"] for page in every),
        "admitted": [uid for page in every for uid in page["gate"]["admitted"]],
        "in_force": all(page["gate"]["in_force"] for page in every),
    }
    return found
