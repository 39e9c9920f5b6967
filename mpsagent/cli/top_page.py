"""The screen of ``mpsagent-cli top``: rows from the agent's answers, sorted, filtered, fitted into a terminal. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from textwrap import wrap
from typing import Any, NamedTuple

from mpsagent.cli import tables, wording
from mpsagent.cli.tables import cut
from mpsagent.cli.wording import Json, many, safe, size, user, utilization
from mpsagent.mps.units import duration_text

KEYS = "↑↓ choose  s sort  r reverse  / filter  u users  k end client  q quit"


class ScreenLine(NamedTuple):
    """``style``: plain, head, chosen, bad, warn or dim."""

    text: str
    style: str = "plain"


class Column(NamedTuple):
    """``order``: by what the table is sorted; what is largest first is negative there. ``right``: numbers."""

    title: str
    text: Callable[[Json], str]
    order: Callable[[Json], Any]
    right: bool = False


def _share(one: Json) -> float | None:
    """Percent of the multiprocessors that it may use."""
    return None if one["limits"] is None else float(one["limits"]["threads"])


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:g}%"


_STATES = ("ending", "sticky", "running", "paused", "starting", "detached", "waiting")
CLIENTS = (
    Column("STATE", lambda one: safe(one["state"]), lambda one: (_STATES.index(one["state"]), one["since"])),
    Column("PID", lambda one: str(one["pid"]), lambda one: one["pid"], right=True),
    Column("USER", lambda one: cut(user(one), 16), user),
    Column("FOR", lambda one: duration_text(one["seconds"]), lambda one: -one["seconds"], right=True),
    Column(
        "WAITED",
        lambda one: "-" if one["waited"] is None else duration_text(one["waited"]),
        lambda one: -(one["waited"] or 0.0),
        right=True,
    ),
    Column("MEMORY", lambda one: size(one["memory"]), lambda one: -(one["memory"] or 0), right=True),
    Column("UTIL", utilization, lambda one: -(one["utilization"] or 0.0), right=True),
    Column("SHARE", lambda one: _percent(_share(one)), lambda one: -(_share(one) or 0.0), right=True),
    Column("COMMAND", lambda one: safe(one["command"] or "-", 400), lambda one: one["command"] or ""),
)
USERS = (
    Column("USER", lambda one: cut(user(one), 24), user),
    Column("CLIENTS", lambda one: str(one["clients"]), lambda one: -one["clients"], right=True),
    Column("WAITING", lambda one: str(one["waiting"]), lambda one: -one["waiting"], right=True),
    Column("MEMORY", lambda one: size(one["memory"]), lambda one: -(one["memory"] or 0), right=True),
    Column("UTIL", utilization, lambda one: -(one["utilization"] or 0.0), right=True),
    Column("SHARE", lambda one: _percent(one["share"]), lambda one: -(one["share"] or 0.0), right=True),
    Column("LONGEST WAIT", lambda one: duration_text(one["longest"]), lambda one: -one["longest"], right=True),
    Column("WHY IT WAITS", lambda one: safe(one["why"], 600), lambda one: one["why"]),
)


SMALL = 20
"""Lines of a terminal that has no room for a summary in full."""
FILTERED = frozenset({"USER", "PID", "STATE", "COMMAND"})
"""Columns in which the filter's words are looked for."""


class TopView:
    """What the person at the terminal has chosen. ``sort``: a column's number, in each table; ``chosen``: a client's
    pid; ``first``: the row at the top; ``question``: asked in the last line, in place of the keys."""

    def __init__(self) -> None:
        self.users = False
        self.sort = {False: 0, True: 0}
        self.reverse = False
        self.filter = ""
        self.chosen: int | None = None
        self.first = 0
        self.message = self.question = ""

    @property
    def columns(self) -> tuple[Column, ...]:
        return USERS if self.users else CLIENTS


def rows(status: Json, clients: list[Json], view: TopView) -> list[Json]:
    """Clients, or users, with the filter's words in them, in the order that is chosen."""
    found = _users(status, clients) if view.users else clients
    words = view.filter.lower().split()
    column = view.columns[view.sort[view.users]]
    where = [one for one in view.columns if one.title in FILTERED]
    matching = [one for one in found if all(word in _words(one, where) for word in words)]
    return sorted(matching, key=column.order, reverse=view.reverse)


def _words(one: Json, columns: Sequence[Column]) -> str:
    return " ".join(column.text(one) for column in columns).lower()


def _users(status: Json, clients: list[Json]) -> list[Json]:
    why = {one["uid"]: one["why"] for one in status["waiting"]}
    found: dict[int, Json] = {}
    for one in clients:
        mine = found.setdefault(
            one["uid"],
            {"uid": one["uid"], "user": one["user"], "clients": 0, "waiting": 0, "memory": None, "share": None,
             "utilization": None, "shared": False, "longest": 0.0, "why": why.get(one["uid"], "")},
        )  # fmt: skip
        if one["state"] == "waiting":
            mine["waiting"] += 1
            mine["longest"] = max(mine["longest"], one["seconds"])
            continue
        mine["clients"] += 1
        for key, value in (("memory", one["memory"]), ("share", _share(one))):
            if value is not None:
                mine[key] = (mine[key] or 0) + value
        if one["utilization"] is not None:
            mine["utilization"] = max(one["utilization"], mine["utilization"] or 0.0)
            mine["shared"] |= one["shared"]
    return list(found.values())


def page(
    status: Json, clients: list[Json], view: TopView, now: datetime, width: int, height: int | None = None
) -> list[ScreenLine]:
    """At most ``height`` lines of ``width``: the summary, the table around the chosen row, a line for keys. None: all
    rows, for a pipe. Sets the view's first row, and its chosen one where that has gone."""
    found = rows(status, clients, view)
    small = height is not None and height < SMALL
    head = [part for line in _head(status, clients, now) for part in ((line,) if small else _folded(line, width))]
    order = view.columns[view.sort[view.users]].title
    told = f"{many(len(found), 'user' if view.users else 'client')}, by {order.lower()}{' reversed' * view.reverse}"
    told += f", only with “{safe(view.filter, 40)}”" if view.filter else ""
    head.append(ScreenLine(told, "dim"))
    room = len(found) if height is None else max(1, height - len(head) - 2 - bool(view.message))
    pids = [] if view.users else [one["pid"] for one in found]
    if view.chosen not in pids:
        view.chosen = pids[min(view.first, len(pids) - 1)] if pids else None
    at = pids.index(view.chosen) if view.chosen in pids else view.first
    view.first = max(0, min(max(view.first, at - room + 1), at, len(found) - room))
    shown = [[column.text(one) for column in view.columns] for one in found]
    numbers = [number for number, column in enumerate(view.columns) if column.right]
    table = tables.table([column.title for column in view.columns], shown, right=numbers)
    lines = [*head, ScreenLine(table[0], "head")]
    for number, one in enumerate(found[view.first : view.first + room], view.first):
        chosen = not view.users and one["pid"] == view.chosen
        lines.append(ScreenLine(table[number + 1], "chosen" if chosen and height is not None else _style(one)))
    if height is not None:
        last = [ScreenLine(view.message, "warn")] if view.message else []
        last.append(ScreenLine(view.question, "warn") if view.question else ScreenLine(KEYS, "dim"))
        lines = lines[: max(0, height - len(last))]
        lines = [*lines, *[ScreenLine("")] * (height - len(last) - len(lines)), *last][-height:]
    return [ScreenLine(cut(line.text, width), line.style) for line in lines]


def _folded(line: ScreenLine, width: int) -> list[ScreenLine]:
    """Return a line of the summary as two, if it is too long: its end says until when."""
    first, *rest = wrap(line.text, max(20, width), subsequent_indent=" " * 8, break_on_hyphens=False) or [""]
    return [ScreenLine(first, line.style), *(ScreenLine(one, line.style) for one in rest[:1])]


def _head(status: Json, clients: list[Json], now: datetime) -> list[ScreenLine]:
    agent, problems, waiting = status["agent"], status["health"]["problems"], status["waiting"]
    calm = "draining" if status["drain"]["draining"] and not status["drain"]["restart"] else "healthy"
    healthy = calm if status["health"]["ok"] else f"{many(len(problems), 'problem')}: {safe(problems[0]['what'])}"
    known = [one["memory"] for one in clients if one["memory"] is not None]
    total = sum(one["memory"] for one in status["devices"])
    used = f"{size(sum(known)) if known else '-'} of {size(total) if total else '-'}"
    text, colour = wording.in_use(status, now)
    lines = [
        ScreenLine(
            f"mpsagent {safe(agent['version'])}, {now:%H:%M:%S}, up {duration_text(agent['uptime'])}, {healthy}",
            "plain" if status["health"]["ok"] else "bad",
        ),
        ScreenLine(
            f"memory  {used}; {many(status['clients'], 'client')} of {many(len(status['clients_by_uid']), 'user')}"
        ),
        ScreenLine(f"in use  {text}", {"bad": "bad", "warn": "warn"}.get(colour, "plain")),
    ]
    if not waiting:
        return [*lines, ScreenLine("waiting no user", "dim")]
    latest = f", served by {wording.local(waiting[0]['turn'], now)} at the latest" if waiting[0]["turn"] else ""
    count = f"{many(status['waiting_users'], 'user')} with {many(status['waiting_processes'], 'process')}"
    return [*lines, ScreenLine(f"waiting {count}; first {user(waiting[0])}{latest}: {safe(waiting[0]['why'])}")]


def _style(one: Json) -> str:
    return {"sticky": "bad", "ending": "warn", "waiting": "dim", "paused": "dim"}.get(one.get("state", ""), "plain")
