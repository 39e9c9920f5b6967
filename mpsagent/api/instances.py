"""What the API answers, of all instances together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any, TypeVar

from mpsagent.api import database, views
from mpsagent.api.database import Query
from mpsagent.api.explaining import explained
from mpsagent.api.received import Received
from mpsagent.api.sums import SUMS, USED, add
from mpsagent.core import placement
from mpsagent.core.sentences import sentence
from mpsagent.core.words import Names, named
from mpsagent.policy.identity import Identity
from mpsagent.snapshot import lease_body
from mpsagent.snapshot.condition import Condition, problems
from mpsagent.snapshot.page import InstancePage, Page
from mpsagent.snapshot.problem import Json, Problem

T = TypeVar("T")
PAGE_AGE = 0.1
"""Seconds for which a status page is given to others, too, when nothing has changed."""
LOOKED_AT = 64
"""Waiting connections of a user among which its waiting jobs are found."""
FORGET = 600.0
"""Seconds for which it is said what the history has found amiss."""


class CursorGone(Problem):
    """The cursor is older than what the history keeps, or not of this history."""

    def __init__(self, cursor: int, oldest: int) -> None:
        super().__init__(
            410,
            f"the events after cursor {cursor} are not kept",
            "cursor",
            f"go on with cursor={oldest}; the events between are lost",
            oldest=oldest,
        )


class Everything:
    """What there is to read, of what was received of the agent. Most answer at once from memory; nothing here may block
    the loop. The shapes of the answers are the TypedDicts in :mod:`mpsagent.api.shapes`."""

    def __init__(self, received: Received) -> None:
        self._received, self._history = received, received.history
        self._status: tuple[Page, tuple[Condition, ...], float, Json] | None = None
        self._notes: list[Condition] = []
        self._since: dict[str, float] = {}

    @property
    def _page(self) -> Page:
        page = self._received.page
        if page is None:
            hint = "systemctl status mpsagent; start it: systemctl enable --now mpsagent"
            raise Problem(503, "the agent has not sent anything yet: it does not run, or is only starting", "", hint)
        return page

    # --- the state ---------------------------------------------------------------------------------------------------

    def status(self) -> Json:
        """Made again when anything has changed, and after a moment for the spans of time in it; else the same."""
        conditions, page, now, last = self._conditions(), self._page, self._received.now(), self._status
        if last is None or last[0] is not page or last[1] != conditions or not 0 <= now - last[2] < PAGE_AGE:
            sessions, history = self._history.sessions, self._history
            about = views.About(
                self._received.name, conditions, sessions.changes, sessions.faults, history.oldest - 1, history.newest
            )
            last = self._status = (page, conditions, now, views.status(page, about, now))
        return last[3]

    def servers(self) -> Iterable[Json]:
        return self._all(lambda one, names, _: views.servers(one, names))

    def clients(self) -> Iterable[Json]:
        return self._all(views.clients)

    def queue(self) -> Iterable[Json]:
        return self._all(views.queue, views.numbered)

    def _all(
        self,
        read: Callable[[InstancePage, Names, float], Iterable[Json]],
        among: Callable[[Iterable[Json]], Iterable[Json]] = iter,
    ) -> Iterator[Json]:
        """``among``: what becomes of the rows of one instance."""
        page, name, now = self._page, self._received.name, self._received.now()
        for one in page.instances:
            if one.view.user is None:
                parts = (one, *views.users_of(page, one.name))
                for row in among(chain.from_iterable(read(part, name, now) for part in parts)):
                    yield {**row, "instance": one.name}

    async def first(self) -> None:
        """Wait for a moment, where nothing is known yet."""
        await self._received.first()

    async def look_again(self, most: float) -> None:
        """Have the GPUs asked who uses what memory, if the last answer is old. Waits for ``most`` seconds at most."""
        await self._received.look(most)

    def leases(self) -> Iterable[Json]:
        """Each with the clients that were let in with it, or with an earlier lease of that name, in all lanes."""
        view, came = self._page.instances[0].view, dict[int | str | None, list[int]]()
        for instance in self._page.instances:
            for client in instance.view.state.clients.values():
                came.setdefault(client.job or client.lease, []).append(client.pid)
        waits = self._waiting_jobs() if view.state.leases else {}
        for one in view.state.leases:
            clients, who = came.get(one.name or one.number, ()), self._received.identity(one.uid)
            yield lease_body.shown(one, view, who, clients, waits.get(one.number))

    def _waiting_jobs(self) -> dict[int, str]:
        """Return why processes of jobs wait, by the numbers of the leases. Of a user the first ones are looked at."""
        found = dict[int, str]()
        for instance in self._page.instances:
            state = instance.view.state
            for user in instance.waiting:
                for held in islice(state.held.line(user.uid), LOOKED_AT):
                    if (lease := state.lease(held.peer)) is not None:
                        found.setdefault(lease.number, named(user.why.text, self._received.name))
        return found

    def health(self) -> tuple[bool, list[str]]:
        """Whether everything is as it should be, and otherwise what is not, one line each."""
        conditions = problems(self._conditions())
        return not conditions, [f"{one.what}; {one.do}" if one.do else one.what for one in conditions]

    def drains(self) -> list[Json]:
        """Return the instances that are drained by order until a resume."""
        page, found = self._received.page, []
        for one in () if page is None else page.instances:
            drain = one.view.state.drain
            if one.view.user is None and drain is not None and not drain.restart:
                by = None if drain.by is None else self._received.name(drain.by)
                found.append({"instance": one.name, "since": views.when(drain.since), "by": drain.by, "by_user": by})
        return found

    def _conditions(self) -> tuple[Condition, ...]:
        """The agent's, and what is wrong here."""
        now, found = self._received.now(), []
        if (old := self._received.old) is not None:
            span, what = old
            since = None if self._received.page is None else now - span
            what += "" if since is None else ": what is shown is of that time"
            found.append(Condition(what, since, "systemctl status mpsagent; journalctl -u mpsagent"))
        problem = self._history.problem
        if problem is None:
            self._since.clear()
        else:
            since = self._since.setdefault("history", now)
            found.append(Condition(problem, since, "make room, or mend the disk; the api then goes on by itself"))
        for text in self._history.notes:
            self._notes.append(Condition(text, now, "mpsagent goes on; sqlite3 reads it"))
            self._received.append("history.broken", now, text=text)
        self._history.notes.clear()
        self._notes = [one for one in self._notes if one.since is not None and now < one.since + FORGET]
        of_agent = () if self._received.page is None else self._received.page.conditions
        named_ones = [replace(one, what=one.text(self._received.name)) for one in of_agent]
        return (*found, *named_ones, *self._notes)

    # --- the policy ---------------------------------------------------------------------------------------------------

    def policy(self) -> Json:
        """The policy in force: ``digest``, ``loaded``, ``files``, ``errors`` and its ``sections``."""
        page = self._page
        return {
            "digest": page.policy.digest or None,
            "loaded": views.when(page.policy_loaded),
            "files": list(page.policy.sources),
            "errors": list(page.policy_errors),
            "sections": page.policy.sections(),
        }

    async def explain(self, user: str, cgroup: str | None = None) -> Json:
        """What applies to a user (name or uid), where each value comes from, and what would happen to the user now.
        With several instances, as it is where the user belongs; who belongs nowhere is denied. May ask the name
        service. Raises Problem(404)."""
        page, who = self._page, await self._identity(user)
        sections = {one.name: one for one in page.instances if one.view.user is None}
        places, first = page.places, next(iter(sections))
        name = first if len(sections) == 1 else placement.stays(who.uid, places)
        name = name or placement.place(who, places, page.policy.placement)
        one = sections[name or first]
        for own in (own for own in page.instances if own.view.user == who.uid):
            one, name = own, own.view.policy.instance
        answer = explained(one, who, cgroup, self._received.name, self._received.now())
        if name is None:
            answer["access"] = {"value": "deny", "from": placement.NOWHERE}
        return answer if len(sections) == 1 else {**answer, "instance": name}

    async def _identity(self, user: str) -> Identity:
        """Raises Problem(404) for an unknown user."""
        names = self._received.names
        uid = int(user) if user.isascii() and user.isdecimal() and len(user) <= 10 else None
        if uid is None:
            try:
                uid = await names.uid_of(user)
            except TimeoutError:
                raise Problem(503, "the name service does not answer", "user", "try the uid instead") from None
        if uid is None:
            raise Problem(404, f"there is no user {user!r}", "user", "see getent passwd")
        return self._page.names.get(uid) or await names.look_up(uid)

    # --- what was -----------------------------------------------------------------------------------------------------

    async def records(self, cursor: int | None, limit: int) -> list[Json]:
        """At most ``limit`` records after ``cursor``, oldest first; None: the newest ``limit``. Raises CursorGone."""
        history = self._history
        if cursor is None:
            cursor = max(history.in_memory - 1, history.newest - limit)
        elif cursor < history.oldest - 1 or cursor > history.newest:
            raise CursorGone(cursor, history.oldest - 1)
        if cursor < history.in_memory - 1:
            found = await self._kept(database.find, Query(after=cursor, limit=limit))
            if found:
                return [one for one in found if int(str(one["seq"])) <= history.newest]
        return history.since(cursor, limit)

    async def find(self, user: str | None, query: Query) -> list[Json]:
        """Records, as :meth:`records` gives them, that answer the query; ``user``: a name or uid. Raises Problem."""
        if user is not None:
            query = query._replace(uid=(await self._identity(user)).uid)
        return await self._kept(database.find, query)

    async def sessions(self, user: str | None, query: Query) -> list[Json]:
        if user is not None:
            query = query._replace(uid=(await self._identity(user)).uid)
        now, live = self._received.now(), {one.number: one for one in self._history.sessions.open.values()}
        used = dict(self._received.live)
        found = await self._kept(database.sessions, query)  # those that go on have used more memory since
        uids = {one.uid for one in found if one.uid is not None}
        who = await asyncio.gather(*map(self._received.names.look_up, uids))
        names = {one.uid: one.name for one in who}

        def name(uid: int) -> str | None:
            return names.get(uid) or self._received.name(uid)

        return [views.session(live.get(one.number, one), now, name, used.get(one.number)) for one in found]

    async def report(self, by: str, first: str, last: str, job: str | None = None) -> Json:
        """Sums of these days; ``job``: of this one alone. Raises Problem."""
        now, names = self._received.now(), self._received.names
        kind, live = by if by in ("day", "job") else "uid", dict(self._received.live)
        kept: list[Json] = await self._kept(database.report, first, last, kind, now, job, live)
        uids = sorted({row["uid"] for row in kept if by != "day"})
        who = dict(zip(uids, await asyncio.gather(*map(names.look_up, uids)), strict=True))
        if by == "group":
            rows = of_groups(kept, [who[row["uid"]] for row in kept], self._page.policy.groups)
        else:
            rows = kept if by == "day" else [{**row, "user": who[row["uid"]].name} for row in kept]
        return {"by": by, "first": first, "last": last, "rows": [_with_utilization(row) for row in rows]}

    async def _kept(self, question: Callable[..., T], *words: Any) -> T:
        """What the history's file says. Raises Problem where it says nothing."""
        try:
            return await self._history.ask(lambda path: question(path, *words))
        except OSError as error:
            raise Problem(503, f"the history cannot be read: {error.strerror}", "history", "see `status`") from None

    def newest(self) -> int:
        """``seq`` of the newest record."""
        return self._history.newest

    def event(self, record: Json) -> Json:
        """A record as the API shows it: ``cursor``, ``at`` (ISO time), ``kind``, ``sentence`` and its fields."""
        rest = {key: value for key, value in record.items() if key not in ("seq", "at", "kind")}
        return {
            "cursor": record["seq"],
            "at": views.when(record["at"]),
            "kind": record["kind"],
            "sentence": sentence(record, self._received.name),
            **rest,
        }

    async def wait_events(self, cursor: int, timeout: float) -> None:
        """Return when there is an event after ``cursor``, at the latest after ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._history.wait(cursor)
        except TimeoutError:
            return


def of_groups(rows: Iterable[Json], who: Iterable[Identity], named: Iterable[str]) -> list[Json]:
    """Each user in one group: the first of those ``named`` by the policy that the user is in, else the user's first.
    None for users whose groups are not known."""
    found: dict[str | None, Json] = {}
    for row, one in zip(rows, who, strict=True):
        group = next((name for name in (*named, *one.groups) if name in one.groups), None)
        names = (*SUMS, *USED)
        total = found.setdefault(group, {"group": group, "users": 0, **dict.fromkeys(names, 0)})
        total["users"] += 1
        add(total, row, names)
    return sorted(found.values(), key=lambda row: str(row["group"]))


def _with_utilization(row: Json) -> Json:
    ratio = row["busy"] / row["counted"] if row["counted"] else None
    return {**row, "shared": bool(row["shared"]), "utilization": ratio}
