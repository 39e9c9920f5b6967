"""What the agent shows: its pages and records, as they come. What is kept of them outlives both."""

from __future__ import annotations

import asyncio
import io
import json
import pickle
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from functools import lru_cache
from typing import Any

import structlog

import mpsagent
from mpsagent.api import without_agent
from mpsagent.api.history import History
from mpsagent.api.metrics import Metrics
from mpsagent.core.model import Client, State, Use
from mpsagent.core.sentences import sentence
from mpsagent.core.sessions import Key, Session
from mpsagent.core.transitions import Transition, transition_fields
from mpsagent.policy import apart
from mpsagent.policy.identity import Identity
from mpsagent.policy.policy import Policy
from mpsagent.snapshot.page import HAS, LENGTH, LOOK, POLICIES, SAID, SHOWS, Frame, Page, Record, policy_of
from mpsagent.system.names import Names

SETTLE = 5.0
"""Seconds after which it is looked again whether all that is open is still there."""
SILENT = 1.9
"""Seconds after which an agent that says nothing is said to be silent; it says something once a second."""
FIRST = 3.0
LONGEST = 256 << 20
NAMES = 10_000
NAMED, MOST_ASKED = 0.3, 64
"""Seconds that a reader waits for names, and users asked about at a time."""
Json = dict[str, Any]
log = structlog.get_logger("mpsagent")


class OtherVersion(Exception):
    """The agent was upgraded: this program is started again, and is the new one then."""


def _member(kind: type[Enum], name: str) -> Enum:
    return kind[name]


class _Reader(pickle.Unpickler):
    """Of what root has written: our own values, and sets."""

    def find_class(self, module: str, name: str) -> Any:
        of_pages = ("core", "policy", "wire", "mps", "snapshot", "system")
        ours = module.startswith(tuple(f"mpsagent.{one}." for one in of_pages))
        if (module, name) == (policy_of.__module__, policy_of.__name__):
            return _policy
        if ours or (module, name) in {("builtins", "frozenset"), ("builtins", "set"), ("collections", "Counter")}:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # for a member of an enumeration, in some releases of Python 3.11
            return _member
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a page")


@lru_cache(POLICIES)
def _policy(data: bytes) -> Policy:
    """Read once, and so is what it remembers of users."""
    policy: Policy = _Reader(io.BytesIO(data)).load()
    return policy


class Received:
    """``metered`` counts what comes."""

    def __init__(self, history: History, names: Names, metered: Metrics) -> None:
        self.history, self.names, self._metered = history, names, metered
        self.page: Page | None = None
        self.lost = 0
        self._begun, self._first = time.monotonic(), asyncio.Event()
        self._heard = self._so = float("-inf")
        """When the agent last said anything, and that the page holds."""
        self._number = -1
        self._writer: asyncio.StreamWriter | None = None
        self._looked = 0
        self._look: asyncio.Future[None] | None = None
        self._run, self._last, self._before = 0.0, 0, 0
        self._numbers: deque[tuple[int, int]] = deque(maxlen=NAMES)
        """Of actions: the agent's number and ours."""
        self._there: dict[tuple[object, ...], list[int]] = {}
        """What was on record when this run of the agent was met: an api that was killed had not said so yet."""
        self._caught_up = False
        self._before_this: dict[int, tuple[float, float | None]] = {}
        """What was open then, as the agent before has said it, by its clock."""
        self._settled = 0.0
        self.live: dict[int, Use] = {}
        """By session: what a client has used that is not on record yet."""
        self._known: dict[int, Identity] = {}
        self._asked: dict[int, asyncio.Task[Identity]] = {}
        """By user: questions to the name service that are not answered yet."""
        self._fresh: list[asyncio.Task[Identity]] = []
        """Those that no reader has waited for."""

    # --- what is known

    @property
    def old(self) -> tuple[float, str] | None:
        """Seconds since which the page may not hold any more, when these are too many, and why."""
        now = time.monotonic()
        silent = now - self._heard >= SILENT
        why = "the agent is silent" if silent else "the agent cannot show its state"
        return None if now - self._so < SILENT else (now - self._so, why)

    def now(self) -> float:
        """By the agent's clock."""
        return time.time() if self.page is None else self.page.offset + time.monotonic()

    def name(self, uid: int) -> str | None:
        """Return the name of a user, None if it is not known yet: the name service is asked behind the scenes."""
        known = self.identity(uid)
        return None if known is None else known.name

    def identity(self, uid: int | None) -> Identity | None:
        """Return what is known of a user now."""
        known = None if uid is None else self._known.get(uid) or self.names.known(uid)
        if uid is not None and known is None and uid not in self._asked and len(self._asked) < MOST_ASKED:
            with suppress(RuntimeError):  # no loop runs
                task = self._asked[uid] = asyncio.get_running_loop().create_task(self.names.look_up(uid))
                task.add_done_callback(lambda _: self._asked.pop(uid, None))
                self._fresh.append(task)
        return known

    def _meet(self, page: Page) -> None:
        """Ask for the names of the users that a status shows and the agent does not meet any more."""
        sessions = self.history.sessions
        shown = [*sessions.changes.values(), *sessions.faults.values()]
        uids = [uid for one in shown for uid in (one.uid, one.more.get("before"))]
        uids += [lease.uid for one in page.instances[:1] for lease in one.view.state.leases]
        uids += [one.view.state.drain.by for one in page.instances if one.view.state.drain is not None]
        uids += [outsider.seen.uid for one in page.instances for outsider in one.outside]
        for uid in uids:
            self.identity(uid)

    async def first(self) -> None:
        """Wait for the agent's first page if this program has only just started, and for names that were asked for."""
        if self._fresh:
            fresh, self._fresh = self._fresh, []  # each is waited for once
            await asyncio.wait(fresh, timeout=NAMED)
        left = self._begun + FIRST - time.monotonic()
        if self.page is None and left > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._first.wait(), left)

    async def look(self, most: float) -> None:
        """Have the GPUs looked at again, and wait for that."""
        if self._writer is None:
            return
        if self._look is None:
            self._looked += 1
            self._look = asyncio.get_running_loop().create_future()
            self._say(LOOK, self._looked)
        if most:
            await asyncio.wait({self._look}, timeout=most)

    # --- the stream

    async def listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the agent ends, or another one comes. Raises OtherVersion."""
        if self._writer is not None:
            self._writer.close()
        self._writer, self._look, self._number = writer, None, -1
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                if length > LONGEST:
                    return
                self._take(_Reader(io.BytesIO(await reader.readexactly(length))).load())
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()
            if self._writer is writer:
                self._writer = None

    def _say(self, what: bytes, number: int) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(SAID.pack(what, number))

    def _take(self, frame: Frame) -> None:
        if frame.version != mpsagent.__version__:
            raise OtherVersion(frame.version)
        self._heard = time.monotonic()
        if frame.run != self._run:
            self._run, self._last, self._before, self._caught_up = frame.run, 0, self.history.last, False
            self._number = -1
            self._numbers.clear()
            sessions = self.history.sessions
            self._before_this = {one.number: (one.came, one.passed) for one in sessions.open.values()}
            sessions.seen = sessions.last
            self._there = {}
            for one in self.history.since(0, NAMES):
                mark = one["kind"], one["at"], one.get("pid"), one.get("action")
                self._there.setdefault(mark, []).append(int(str(one["seq"])))
        self.lost = frame.lost
        if frame.page is not None:
            self._show(frame.page)
            self._number = frame.number
        if frame.number == self._number:
            self._so = self._heard
        self._find(frame)
        self._write(frame.records)
        page = self.page
        views = [] if page is None or len(frame.records) == 1000 else [one.view for one in page.instances]
        if page is not None and views and all(view.synced for view in views):
            if not self._caught_up:
                self._catch_up(page)
            elif frame.page is not None and self._heard > self._settled + SETTLE:
                self.history.settle(there_now(page), self.now())
                self._settled = self._heard
        if self._look is not None and frame.looked == self._looked and not self._look.done():
            self._look.set_result(None)
            self._look = None
        if frame.page is not None:
            self._say(SHOWS, frame.number)
        if frame.records and self.history.newest >= self.history.last:
            self._say(HAS, self._last)
        elif frame.records:
            asyncio.get_running_loop().create_task(self._acknowledge(self._last, self.history.last))

    async def _acknowledge(self, number: int, last: int) -> None:
        await self.history.wait(last - 1)
        self._say(HAS, number)

    def _show(self, page: Page) -> None:
        if self.page is None or (self.page.single, self.page.first) != (page.single, page.first):
            self.history.sessions.place(None if page.single else page.first)
        self.page = page
        self._first.set()
        self.history.keep = page.policy.history_keep
        self._known.update(page.names)
        self._meet(page)
        while len(self._known) > NAMES:
            del self._known[next(iter(self._known))]
        users: dict[str, list[int]] = {}
        used: dict[str, list[Client]] = {}
        self.live.clear()
        for one in page.instances:
            paused, there = one.view.suspended, users.setdefault(one.view.policy.instance, [])
            there += [uid for uid in one.view.state.users() if uid not in paused]
            where = None if page.single else one.name
            for pid, size in one.memory.items():
                client = self.history.sessions.open.get(("client", where, pid))
                if client is not None:
                    client.more["memory"] = max(size, client.more.get("memory", 0))
            for mine in one.view.state.clients.values():
                client = self.history.sessions.open.get(("client", where, mine.pid))
                if client is not None and mine.use.energy:
                    self.live[client.number] = mine.use
                used.setdefault(one.view.policy.instance, []).append(mine)
        for name, there in users.items():
            self._metered.work(name, there)
            self._metered.use(name, used.get(name, ()))

    # --- records

    def append(self, kind: str, at: float, **fields: Any) -> int:
        number = self.history.append(kind, at, **fields)
        name = str(fields.get("instance", "default" if self.page is None else self.page.first))
        user = apart.split(name)
        try:
            self._metered.hear(name if user is None else user[0], {"kind": kind, **fields})
        except (KeyError, TypeError, ValueError):  # a record of another form
            log.warning("metrics", text=f"{kind} could not be counted")
        return number

    def _write(self, records: Iterable[Record]) -> None:
        begun = dict(self._numbers)
        for number, kind, at, text in records:
            if number <= self._last:
                continue
            self._last, fields = number, json.loads(text)
            there = self._there.get((kind, at, fields.get("pid"), fields.get("action")))
            if there:
                begun[number] = there.pop(0)
            else:
                if "begun" in fields:
                    fields["begun"] = begun.get(fields["begun"], 0)
                begun[number] = self.append(kind, at, **fields)
            if kind == "action":
                self._numbers.append((number, begun[number]))

    def _find(self, frame: Frame) -> None:
        """What the agent's start has found in the logs: what of it is not on record yet."""
        old = self.history.since(0, NAMES) if frame.found else []
        found: list[tuple[str, Transition]] = []
        for name in dict.fromkeys(name for name, _ in frame.found if old):
            since = float(str(old[-1]["at"])) - without_agent.OVERLAP
            happened = [one for where, one in frame.found if where == name and one.at > since]
            found += [(name, one) for one in without_agent.not_yet_written(happened, old)]
        self._tell(found)

    def _catch_up(self, page: Page) -> None:
        """What happened at the gate while no agent was there, once the gate has told the agent everything. A user's
        lane that has been closed since then has no clients."""
        self._caught_up, sessions = True, self.history.sessions
        states, missed = {one.name: one.view.state for one in page.instances}, list[tuple[str, Transition]]()
        known: dict[str, list[Session]] = {name: [] for name in states}
        for mine in sessions.open.values():
            where = page.first if page.single else mine.instance or page.first
            if mine.kind == "client" and (where in known or apart.section_of(where, mine.uid) in states):
                if self._before_this.get(mine.number) == (mine.came, mine.passed):
                    mine = replace(mine, came=mine.came + page.moved, passed=mine.passed and mine.passed + page.moved)
                known.setdefault(where, []).append(mine)
        for name, clients in known.items() if self._before else ():  # else there was no agent before
            found = without_agent.missed(clients, states.get(name, State()), page.started, self.now())
            missed += [(name, one) for one in found]
        self._tell(missed)
        sessions.seen = None

    def _tell(self, happened: Iterable[tuple[str, Transition]]) -> None:
        """Write down what happened in the instances, in the order of time."""
        for instance, one in sorted(happened, key=lambda each: each[1].at):
            named = {} if self.page is None or self.page.single else {"instance": instance}
            fields = {**named, **transition_fields(one)}
            self.append(one.kind, one.at, **fields)
            log.info(one.kind, **fields, sentence=sentence({"kind": one.kind, **fields}, self.name))


def there_now(page: Page) -> set[Key]:
    """What may be open: other sessions have ended."""
    found: set[Key] = set()
    for one in page.instances:
        name, state = None if page.single else one.name, one.view.state
        pids = [*state.clients, *(held.peer.pid for held in (*state.held.values(), *state.never.values()))]
        for kind, these in (("client", pids), ("fault", state.servers), ("pause", one.view.suspended)):
            found.update((kind, name, which) for which in these)
        if one.view.turn is not None:
            found.add(("turn", name, one.view.turn.uid))
    return found
