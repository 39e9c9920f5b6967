"""What the API answers about one instance, from the agent's page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import mpsagent
from mpsagent.agent.conditions import Condition
from mpsagent.agent.page import Instance, Page
from mpsagent.api import views
from mpsagent.api.received import Json, Received
from mpsagent.core import usage
from mpsagent.core.inputs import Peer
from mpsagent.core.view import View
from mpsagent.mps.units import limits_words
from mpsagent.policy import values
from mpsagent.policy.identity import Identity
from mpsagent.policy.keys import OF_CGROUPS
from mpsagent.policy.sharing import WORDS

PAGE_AGE = 0.1
"""Seconds for which a status page is given to others, too, when nothing has changed."""


class Answers:
    """``conditions``: what is wrong anywhere, for people."""

    def __init__(self, received: Received, name: str) -> None:
        self._received, self.name = received, name
        self._page: tuple[Page | None, tuple[Condition, ...], float, Json] | None = None

    @property
    def one(self) -> Instance:
        page = self._received.page
        assert page is not None
        return next(one for one in page.instances if one.name == self.name)

    @property
    def view(self) -> View:
        return self.one.view

    def status(self, conditions: tuple[Condition, ...]) -> Json:
        """Made again when anything has changed, and after a moment for the spans of time in it."""
        page, now = self._received.page, self._received.now()
        if self._page is None or self._page[:2] != (page, conditions) or not 0 <= now - self._page[2] < PAGE_AGE:
            self._page = (page, conditions, now, dict(views.status(self.view, self._about(conditions), now)))
        return self._page[3]

    def servers(self) -> Iterable[Mapping[str, Any]]:
        return views.servers(self.view, self._about(()))

    def clients(self) -> Iterable[Mapping[str, Any]]:
        return views.clients(self.view, self._received.now(), self.one.memory)

    def queue(self) -> Iterable[Mapping[str, Any]]:
        return views.queue(self.view.state, self.one.waiting, self._received.now())

    def explain(self, who: Identity, cgroup: str | None = None) -> Json:
        one, sharing = self.one, self.view.policy.sharing
        devices = self.view.state.devices if one.devices_known else ()
        return {
            **self.view.policy.rules(who).explain(devices),
            **({} if cgroup is None else self._there(who, cgroup)),
            "sharing": {sharing: WORDS[sharing]},
            "now": self._now(who.uid, self._received.now()),
        }

    def _there(self, who: Identity, cgroup: str) -> Json:
        """What a process of this user gets in a cgroup, alone and together with the others there."""
        share = self.view.share(Peer(0, who.uid, 0, 0, cgroup))
        if share is None:
            return {"cgroup.limits": {"value": None, "from": "the user's: no section and no lease is for this cgroup"}}
        place = share.source if share.origin is None else share.origin._asdict()
        given = {name: getattr(share, name) for name in OF_CGROUPS}
        limits = self.view.policy.rules(who).limits_within(share, self.view.state.devices)
        each = {"cgroup.limits": {"value": limits_words(limits.as_json()), "from": f"each process of {share.whose}"}}
        return each | {
            f"cgroup.{name}": {"value": values.written(value), "from": place} for name, value in given.items()
            if value is not None
        }  # fmt: skip

    def _now(self, uid: int, now: float) -> Json:
        """What holds for this user at this moment, and what will happen to it when."""
        view = self.view
        turn = views.turn(view, now) if view.turn is not None and view.turn.uid == uid else None
        return {
            "clients": len(view.state.clients_of_user(uid)),
            "waiting": next((one for one in self.queue() if one["uid"] == uid), None),
            "turn": turn,
            "gpu_seconds_last_day": round(usage.spent(self.one.usage, uid, now), 1),
        }

    def _about(self, conditions: tuple[Condition, ...]) -> views.About:
        received, one, page = self._received, self.one, self._received.page
        assert page is not None
        sessions = received.history.sessions
        change, fault = received.last(sessions.changes, self.name), received.last(sessions.faults, self.name)
        users = [uid for found in (change, fault) if found is not None for uid in (found.uid, found.more.get("before"))]
        users += [found.seen.uid for found in one.outside]
        return views.About(
            version=mpsagent.__version__,
            instance=self.name,
            pid=page.pid,
            started=page.started,
            conditions=conditions,
            checked=one.checked,
            devices_known=one.devices_known,
            gpus=page.gpus,
            outside=one.outside,
            waiting=one.waiting,
            memory=one.memory,
            names={uid: name for uid in users if uid is not None and (name := received.name(uid)) is not None},
            last_change=change,
            last_fault=fault,
            policy_loaded=page.policy_loaded,
            policy_errors=tuple(page.policy_errors),
            oldest_cursor=received.history.oldest - 1,
            newest_cursor=received.history.newest,
        )
