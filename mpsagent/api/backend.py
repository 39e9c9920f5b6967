"""What HTTP needs. :mod:`mpsagent.api.instances` implements :class:`Backend`; tests use a stand-in.

The shapes of the answers are the TypedDicts in :mod:`mpsagent.api.shapes`, built by
:mod:`mpsagent.api.views`. Most answer at once from memory; nothing here may block the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from mpsagent.agent.problem import Json, Problem
from mpsagent.api.database import Query


class CursorGone(Problem):
    """The reader's cursor is older than what the history keeps (or not of this history).

    ``oldest`` is a cursor from which everything that is still kept can be read.
    """

    def __init__(self, cursor: int, oldest: int) -> None:
        super().__init__(
            410,
            f"the events after cursor {cursor} are not kept (any more)",
            "cursor",
            f"go on with cursor={oldest}; what was between is lost",
            oldest=oldest,
        )


class Backend(Protocol):
    """What there is to read."""

    def status(self) -> Json:
        """See :class:`mpsagent.api.shapes.Status`."""

    def servers(self) -> Iterable[Mapping[str, Any]]: ...

    def clients(self) -> Iterable[Mapping[str, Any]]: ...

    async def first(self) -> None:
        """Wait for a moment, where nothing is known yet."""

    async def look_again(self, most: float) -> None:
        """Have the GPUs asked who uses what memory, if the last answer is old. Waits for ``most`` seconds at most."""

    def queue(self) -> Iterable[Mapping[str, Any]]: ...

    def policy(self) -> Json:
        """The policy in force: ``digest``, ``loaded``, ``files``, ``errors`` and its ``sections``."""

    async def explain(self, user: str) -> Json:
        """What applies to a user (name or uid), where each value comes from, and what would happen to the user now.

        May ask the name service. Raises Problem(404) for an unknown user.
        """

    async def records(self, cursor: int | None, limit: int) -> list[Json]:
        """At most ``limit`` records after ``cursor``, oldest first; with None the newest ``limit``. Raises CursorGone.

        As the history keeps them: ``seq`` (increasing integers), ``at`` (seconds), ``kind``.
        """

    async def find(self, user: str | None, query: Query) -> list[Json]:
        """Records, as :meth:`records` gives them, that answer the query; ``user``: a name or uid. Raises Problem."""

    async def report(self, by: str, first: str, last: str, job: str | None = None) -> Json:
        """Sums of these days: see :class:`mpsagent.api.shapes.Report`; ``job``: of this one alone. Raises
        Problem."""

    def newest(self) -> int:
        """``seq`` of the newest record."""

    def event(self, record: Json) -> Json:
        """A record as the API shows it: ``cursor``, ``at`` (ISO time), ``kind``, ``sentence`` and its fields."""

    async def wait_events(self, cursor: int, timeout: float) -> None:
        """Return when there is an event after ``cursor``, at the latest after ``timeout`` seconds."""

    def health(self) -> tuple[bool, list[str]]:
        """Whether everything is as it should be, and otherwise what is not, one line each."""

    def leases(self) -> Iterable[Mapping[str, Any]]:
        """See :class:`mpsagent.api.shapes_rows.Lease`."""
