"""What the API answers, from a running agent: :class:`mpsagent.interfaces.backend.Backend` over :class:`Agent`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

import mpsagent
from mpsagent.agent import orders
from mpsagent.agent.loop import Agent
from mpsagent.core import turns
from mpsagent.interfaces import views
from mpsagent.interfaces.backend import CursorGone, Json, Problem
from mpsagent.policy.identity import Identity


class Answers:
    """One agent's answers. Reading is from memory; acting is what the agent's loop does next."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    # --- reading ------------------------------------------------------------------------------------------------------

    def status(self) -> Json:
        return dict(views.status(self._agent.state, self._about(), self._agent.clock.now()))

    def servers(self) -> list[Json]:
        return [dict(one) for one in views.servers(self._agent.state, self._about())]

    def clients(self) -> list[Json]:
        return [dict(one) for one in views.clients(self._agent.state, self._about(), self._agent.clock.now())]

    def queue(self) -> list[Json]:
        return [dict(one) for one in views.queue(self._agent.state, self._about(), self._agent.clock.now())]

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
        now = agent.clock.now()
        return {**rules.explain(agent.devices), "now": self._now(identity.uid, now)}

    def _now(self, uid: int, now: float) -> Json:
        """What is so for this user at this moment, and what will happen to it when."""
        world, memory = self._agent.world(), self._agent.memory
        found: Json = {
            "clients": sum(c.uid == uid for c in world.state.clients.values()),
            "waiting": None,
            "turn": None,
        }
        for one in self.queue():
            if one["uid"] == uid:
                found["waiting"] = one
        turn = memory.turns.turn
        if turn is not None and turn.uid == uid:
            times = turns.deadlines(world, turn)
            found["turn"] = {
                "contested_since": views.iso(turn.since),
                "warned": views.iso_or_none(times[0] if times else None),
                "ends": views.iso_or_none(times[1] if times else None),
                "ends_in": None if times is None else round(max(0.0, times[1] - now), 3),
                "action": world.rules(uid).switch_action,
            }
        return found

    def events(self, cursor: int | None, limit: int) -> list[Json]:
        history = self._agent.history
        if cursor is None:
            cursor = max(history.oldest - 1, history.newest - limit)
        elif cursor < history.oldest - 1 or cursor > history.newest:
            raise CursorGone(cursor, history.oldest - 1)
        return [_event(record) for record in history.since(cursor, limit)]

    async def wait_events(self, cursor: int, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._agent.history.wait(cursor)
        except TimeoutError:
            return

    def health(self) -> tuple[bool, list[str]]:
        troubles = self._agent.troubles.all()
        return not troubles, [f"{t.what}; {t.do}" if t.do else t.what for t in troubles]

    # --- acting -------------------------------------------------------------------------------------------------------

    async def terminate(self, pid: int, *, now: bool, dry_run: bool, by: int) -> Json:
        found = orders.end_client(self._agent, pid, at_once=now, dry_run=dry_run, by=by)
        if not found["ok"]:
            raise Problem(404, f"{pid} is no client of a server", "pid", "see mpsagent-cli clients")
        await self._written_down()
        return found

    async def drain(self, timeout: float | None, by: int) -> Json:
        until = orders.drain(self._agent, timeout, by)
        await self._written_down()
        return {"draining": True, "deadline": views.iso_or_none(until)}

    async def _written_down(self) -> None:
        """An order that was answered outlives the agent: its record is on disk, if the disk answers."""
        await self.wait_events(self._agent.history.last - 1, 1.0)

    async def resume(self, by: int) -> Json:
        orders.resume(self._agent, by)
        await self._written_down()
        return {"draining": False}

    async def restart(self, by: int) -> Json:
        orders.restart(self._agent, by)
        return {"restarting": True}

    async def reload(self, by: int) -> Json:
        errors = await self._agent.load_policy()
        if errors:
            lines = "; ".join(str(error) for error in errors[:10])
            raise Problem(422, f"the policy has {len(errors)} mistakes: {lines}", "policy", "the old one is in force")
        return {"digest": self._agent.policy.digest, "files": list(self._agent.policy.sources)}

    # --- what the views need ------------------------------------------------------------------------------------------

    def _about(self) -> views.About:
        agent = self._agent
        world = agent.world()
        uids = {s.uid for s in agent.state.servers.values() if s.uid is not None}
        drain = agent.drain
        return views.About(
            version=mpsagent.__version__,
            pid=os.getpid(),
            started=agent.started,
            pipe_directory=agent.policy.pipe_directory,
            troubles=tuple(views.Trouble(t.what, t.since, t.do) for t in agent.troubles.all()),
            names={uid: one.name for uid, one in agent.people.known.items() if one.name is not None},
            wanted={uid: world.limits(uid) for uid in uids},
            parked_uid=world.parked_uid,
            turns=views.expected_turns(world, agent.memory.turns.turn, agent.clock.now()),
            last_switch=agent.last_switch,
            draining_since=None if drain is None else drain.since,
            drain_deadline=None if drain is None else drain.until,
            policy_digest=agent.policy.digest or None,
            policy_loaded=agent.policy_loaded,
            policy_errors=tuple(str(error) for error in agent.policy_errors),
            oldest_cursor=agent.history.oldest - 1,
            newest_cursor=agent.history.newest,
        )

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


def _event(record: Mapping[str, Any]) -> Json:
    """A record of the history as the API shows it: ``cursor``, ``at`` as ISO time, ``kind`` and its fields."""
    rest = {key: value for key, value in record.items() if key not in ("seq", "at", "kind")}
    return {"cursor": record["seq"], "at": views.iso(record["at"]), "kind": record["kind"], **rest}


def one_line(agent: Agent) -> str:
    """The state in a line, for ``systemctl status``."""
    troubles = agent.troubles.all()
    holder = agent.world().holder()
    who = "nobody holds the GPU"
    if holder is not None:
        name = agent.people.known[holder.uid].name if holder.uid in agent.people.known else None
        who = f"{name or holder.uid} holds the GPU with {len(agent.state.clients_of(holder.pid))} clients"
    wait = f", {len(agent.state.next_users())} users wait" if agent.state.waiting else ""
    return f"{troubles[0].what} ({len(troubles)} problems); {who}{wait}" if troubles else f"{who}{wait}"
