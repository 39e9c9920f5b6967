"""What the API needs from the agent. The agent implements :class:`Backend`; tests use a stand-in.

The shapes of the answers are the TypedDicts in :mod:`mpsagent.interfaces.shapes`, built by
:mod:`mpsagent.interfaces.views`. Reading methods answer at once from memory; nothing here may block the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, Protocol

from mpsagent.system.database import Query

Json = dict[str, Any]


class Problem(Exception):
    """An answer that is an error. ``status`` is an HTTP status; the texts are for the person who asked.

    The body is a problem detail (RFC 9457); ``more`` goes into it too (the oldest cursor of a 410, for instance).
    """

    def __init__(self, status: int, what: str, where: str = "", hint: str = "", **more: Any) -> None:
        super().__init__(what)
        self.status, self.what, self.where, self.hint, self.more = status, what, where, hint, more

    def body(self) -> Json:
        title = HTTPStatus(self.status).phrase
        told = {"detail": self.what, "where": self.where, "hint": self.hint}
        return {"type": "about:blank", "title": title, "status": self.status, **told, **self.more}


def no_client(pid: int, held: bool) -> Problem:
    """Nothing to end there; ``held``: it is a process that waits, which `clients` lists, too."""
    if held:
        what, hint = (
            f"process {pid} waits at the gate: it is no client yet, and nothing runs",
            f"kill {pid} takes it away",
        )
        return Problem(404, what, "pid", f"{hint}, for root and its user")
    return Problem(404, f"process {pid} is not a client of MPS", "pid", "see `mpsagent-cli clients`")


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
    """The agent, as its interfaces see it. Lists are iterators over one state: a long one is read in slices."""

    def status(self) -> Json:
        """See :class:`mpsagent.interfaces.shapes.Status`."""

    def servers(self) -> Iterable[Mapping[str, Any]]: ...

    def clients(self) -> Iterable[Mapping[str, Any]]: ...

    async def look_again(self, most: float) -> None:
        """Have the GPUs asked who uses what memory, if the last answer is old. Waits for ``most`` seconds at most."""

    def queue(self) -> Iterable[Mapping[str, Any]]: ...

    def owner(self, pid: int) -> int | None:
        """The uid of a client (a process that passed the gate); None when there is no such client."""

    def waits(self, pid: int) -> bool:
        """Whether the gate holds a connection of this process."""

    def policy(self) -> Json:
        """The policy in force: ``digest``, ``loaded``, ``files``, ``errors`` and its ``sections``."""

    async def explain(self, user: str) -> Json:
        """What applies to a user (name or uid), where each value comes from, and what would happen to the user now.

        May ask the name service. Raises Problem(404) for an unknown user.
        """

    async def policy_diff(self) -> Json:
        """What the policy files would change: see :class:`mpsagent.interfaces.shapes_policy.PolicyDiff`. Raises
        Problem(422) when they have mistakes."""

    async def records(self, cursor: int | None, limit: int) -> list[Json]:
        """At most ``limit`` records after ``cursor``, oldest first; with None the newest ``limit``. Raises CursorGone.

        As the history keeps them: ``seq`` (increasing integers), ``at`` (seconds), ``kind``.
        """

    async def find(self, user: str | None, query: Query) -> tuple[list[Json], float]:
        """Records, as :meth:`records` gives them, that answer the query, and the seconds of work that it was;
        ``user``: a name or uid. Raises Problem."""

    async def report(self, by: str, first: str, last: str, job: str | None = None) -> Json:
        """Sums of these days: see :class:`mpsagent.interfaces.shapes.Report`; ``job``: of this one alone. Raises
        Problem."""

    def newest(self) -> int:
        """``seq`` of the newest record."""

    def event(self, record: Json) -> Json:
        """A record as the API shows it: ``cursor``, ``at`` (ISO time), ``kind``, ``sentence`` and its fields."""

    async def wait_events(self, cursor: int, timeout: float) -> None:
        """Return when there is an event after ``cursor``, at the latest after ``timeout`` seconds."""

    def health(self) -> tuple[bool, list[str]]:
        """Whether everything is as it should be, and otherwise what is not, one line each."""

    async def terminate(self, pid: int, *, now: bool, dry_run: bool, by: int) -> Json:
        """End one client by the ladder. ``by``: the uid that asked; already checked by the API."""

    async def shutdown_server(self, pid: int, timeout: float | None, *, force: bool, dry_run: bool, by: int) -> Json:
        """End one server; its clients get ``timeout`` seconds to end by themselves (None: the policy's ``kill_grace``).
        ``force``: it ends under them. Raises Problem(404)."""

    async def drain(self, timeout: float | None, by: int, instance: str | None = None) -> Json:
        """Let nothing new in; after ``timeout`` seconds (None: never) end what still runs. ``instance``: only there.
        Raises Problem(404) when there is none of that name."""

    async def resume(self, by: int, instance: str | None = None) -> Json: ...

    async def restart(
        self, timeout: float | None, by: int, instance: str | None = None, *, dry_run: bool = False
    ) -> Json:
        """Start the control daemon again, also out of the failed state; clients get ``timeout`` seconds to end by
        themselves (None: the policy's ``kill_grace``). Raises Problem(409) in a drain."""

    def leases(self) -> Iterable[Mapping[str, Any]]:
        """See :class:`mpsagent.interfaces.shapes_rows.Lease`."""

    async def give_lease(self, body: Json, by: int) -> Json:
        """A share for a job. Raises Problem(400) for a body that is wrong, Problem(409) when it cannot be given."""

    async def end_lease(self, number: int, by: int) -> Json:
        """Raises Problem(404)."""

    async def reload(self, by: int) -> Json:
        """Read the policy again; a bad one leaves the old one in force and is in the answer."""
