"""What happens goes into the journal and to the api; the agent reports its own errors, and goes on."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine
from typing import Any

from mpsagent.agent.clock import SteadyClock
from mpsagent.agent.conditions import Conditions
from mpsagent.agent.journaling import Telling
from mpsagent.agent.people import People
from mpsagent.agent.records import JournalLines
from mpsagent.agent.showing import Showing
from mpsagent.core.words import worth_telling

FORGET = 600.0
"""Seconds until a mistake of ours that has not come again is no condition any more."""


class Recorder:
    """Records, conditions and tasks of one agent."""

    def __init__(self, shown: Showing, telling: Telling, clock: SteadyClock, people: People) -> None:
        self.shown = shown
        self.telling = telling
        self.clock = clock
        self.people = people
        self.conditions = Conditions()
        self._lines = JournalLines()
        self.tasks: set[asyncio.Task[Any]] = set()

    def record(self, kind: str, at: float, **fields: object) -> int:
        """Into the journal, and to the api, which keeps it; returns its number. Never raises."""
        try:
            record = {"kind": kind, **fields}
            now = self.clock.now()
            for left_out in self._lines.left_out(now):
                self.telling.tell(left_out, self.people.name)
            if worth_telling(record) and self._lines.may(record, now):
                self.telling.tell(record, self.people.name)
            return self.shown.append(kind, at, **fields)
        except Exception as error:  # a field that cannot be written must not stop what it is about
            self.conditions.set("records", f"{kind} could not be written down: {error!r}", at, "", until=at + FORGET)
            return 0

    def failed(self, what: str, error: BaseException) -> None:
        """A mistake of ours: on record and among the conditions; the agent goes on. ``what``: one of few texts."""
        now = self.clock.now()
        last = traceback.extract_tb(error.__traceback__)[-1:]
        where = ", ".join(f"{frame.filename}:{frame.lineno}" for frame in last)
        text = f"{what}: {error!r} at {where}"
        do = "please report it with the journal; if it comes again: systemctl restart mpsagent"
        if self.conditions.set(f"agent: {what}", f"internal error, {text}", now, do, until=now + FORGET):
            self.record("agent.error", now, text=text)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Have it done aside; what goes wrong is reported."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed("a task failed", error)

    def loop_failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.failed("a callback failed", error or RuntimeError(str(context.get("message"))[:300]))
