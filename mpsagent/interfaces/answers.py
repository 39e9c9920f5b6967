"""What the API answers, from a running agent: :class:`mpsagent.interfaces.backend.Backend` over :class:`Agent`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from typing import Any

import mpsagent
from mpsagent.agent import requests
from mpsagent.agent.host import Agent
from mpsagent.core.sentences import sentence
from mpsagent.interfaces import views, waits
from mpsagent.interfaces.backend import CursorGone, Json, Problem
from mpsagent.interfaces.recent import Recent
from mpsagent.policy.identity import Identity


class Answers:
    """One agent's answers. Reading is from memory; acting is what the agent's loop does next."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        history = agent.history
        self._recent = Recent(lambda cursor: history.since(cursor, history.last))

    # --- reading ------------------------------------------------------------------------------------------------------

    def status(self) -> Json:
        return dict(views.status(self._agent.view(), self._about(), self._agent.clock.now()))

    def servers(self) -> Iterable[Mapping[str, Any]]:
        return views.servers(self._agent.view(), self._about())

    def clients(self) -> Iterable[Mapping[str, Any]]:
        return views.clients(self._agent.view(), self._agent.clock.now())

    def queue(self) -> Iterable[Mapping[str, Any]]:
        return views.queue(self._agent.view(), self._agent.clock.now())

    def owner(self, pid: int) -> int | None:
        client = self._agent.state.clients.get(pid)
        return None if client is None else client.uid

    def policy(self) -> Json:
        agent = self._agent
        return {
            "digest": agent.policy.digest or None,
            "loaded": views.iso_or_none(agent.policy_loaded),
            "files": list(agent.policy.sources),
            "errors": [str(error) for error in agent.policy_errors],
            "sections": agent.policy.sections(),
        }

    async def explain(self, user: str) -> Json:
        agent = self._agent
        identity = await self._identity(user)
        rules = agent.policy.rules(identity)
        return {**rules.explain(agent.devices), "now": self._now(identity.uid, agent.clock.now())}

    def _now(self, uid: int, now: float) -> Json:
        """What holds for this user at this moment, and what will happen to it when."""
        view = self._agent.view()
        turn = views.turn(view, now) if view.turn is not None and view.turn.uid == uid else None
        return {
            "clients": len(view.state.clients_of_user(uid)),
            "waiting": next((one for one in views.queue(view, now) if one["uid"] == uid), None),
            "turn": turn,
        }

    def records(self, cursor: int | None, limit: int) -> list[Json]:
        history = self._agent.history
        if cursor is None:
            cursor = max(history.oldest - 1, history.newest - limit)
        elif cursor < history.oldest - 1 or cursor > history.newest:
            raise CursorGone(cursor, history.oldest - 1)
        return history.since(cursor, limit)

    def newest(self) -> int:
        return self._agent.history.newest

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
                await self._agent.history.wait(cursor)
        except TimeoutError:
            return

    def health(self) -> tuple[bool, list[str]]:
        conditions = self._agent.conditions.all()
        return not conditions, [f"{one.what}; {one.do}" if one.do else one.what for one in conditions]

    # --- acting -------------------------------------------------------------------------------------------------------

    async def terminate(self, pid: int, *, now: bool, dry_run: bool, by: int) -> Json:
        found = requests.end_client(self._agent, pid, at_once=now, dry_run=dry_run, by=by)
        if not found["ok"]:
            raise Problem(404, f"process {pid} is not a client of MPS", "pid", "see `mpsagent-cli clients`")
        await self._written_down()
        return found

    async def drain(self, timeout: float | None, by: int) -> Json:
        until = requests.drain(self._agent, timeout, by)
        await self._written_down()
        return {"draining": True, "deadline": views.iso_or_none(until)}

    async def _written_down(self) -> None:
        """An order that was answered outlives the agent: it and its record are on disk, if the disk answers."""
        await self._agent.store.flushed(1.0)
        await self.wait_events(self._agent.history.last - 1, 1.0)

    async def resume(self, by: int) -> Json:
        requests.resume(self._agent, by)
        await self._written_down()
        return {"draining": False}

    async def restart(self, by: int) -> Json:
        requests.restart(self._agent, by)
        return {"restarting": True}

    async def reload(self, by: int) -> Json:
        errors = await self._agent.load_policy()
        if errors:
            lines = "; ".join(str(error) for error in errors[:10])
            count = "a mistake" if len(errors) == 1 else f"{len(errors)} mistakes"
            raise Problem(422, f"the policy has {count}: {lines}", "policy", "the old one is in force")
        return {"digest": self._agent.policy.digest, "files": list(self._agent.policy.sources)}

    # --- what the views need ------------------------------------------------------------------------------------------

    def _about(self) -> views.About:
        agent, recent = self._agent, self._recent.look()
        started = agent.core.memories.limits
        users = [one.uid for one in (recent.change, recent.fault) if one is not None]
        if recent.change is not None:
            users.append(recent.change.before)
        return views.About(
            version=mpsagent.__version__,
            pid=os.getpid(),
            started=agent.started,
            conditions=tuple(views.Condition(one.what, one.since, one.do) for one in agent.conditions.all()),
            checked={pid: pid not in started.differs for pid in started.seen},
            devices_known=bool(agent.devices),
            names={uid: name for uid in users if uid is not None and (name := self._name(uid)) is not None},
            last_change=recent.change,
            last_fault=recent.fault,
            policy_loaded=agent.policy_loaded,
            policy_errors=tuple(str(error) for error in agent.policy_errors),
            oldest_cursor=agent.history.oldest - 1,
            newest_cursor=agent.history.newest,
        )

    def _name(self, uid: int) -> str | None:
        """Without asking: who is not known has only a number."""
        known = self._agent.people.known.get(uid) or self._agent.names.known(uid)
        return None if known is None else known.name

    async def _identity(self, user: str) -> Identity:
        names = self._agent.names
        uid = int(user) if user.isascii() and user.isdecimal() and len(user) <= 10 else None
        if uid is None:
            try:
                uid = await names.uid_of(user)
            except TimeoutError:
                raise Problem(503, "the name service does not answer", "user", "try the uid instead") from None
        if uid is None:
            raise Problem(404, f"there is no user {user!r}", "user", "see getent passwd")
        return await names.look_up(uid)


def one_line(agent: Agent) -> str:
    """The state in a line, for ``systemctl status``."""
    view, conditions = agent.view(), agent.conditions.all()
    if view.turn is None:
        text = "no user has the GPU"
    else:
        count = len(view.state.clients_of_user(view.turn.uid))
        processes = "1 process" if count == 1 else f"{count} processes"
        text = f"{waits.user_text(view.state, view.turn.uid)} has the GPU with {processes}"
    waiting = len(view.waiting())
    if waiting:
        text += ", 1 user waits" if waiting == 1 else f", {waiting} users wait"
    if not conditions:
        return text
    count = len(conditions)
    return f"{conditions[0].what} ({'1 problem' if count == 1 else f'{count} problems'}); {text}"
