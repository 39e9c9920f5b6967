"""Answers as a person reads them: short, the important thing first, aligned, local time, safe for a terminal. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from datetime import datetime
from itertools import islice
from textwrap import wrap

from mpsagent.cli.gpus import gpus_now
from mpsagent.cli.tables import WIDE, table
from mpsagent.cli.wording import Json, in_use, limits, local, many, safe, size, user
from mpsagent.core.words import worth_telling
from mpsagent.mps.units import duration_text

Paint = Callable[[str, str], str]
_COLOURS = {"good": "32", "bad": "31;1", "warn": "33", "dim": "2", "bold": "1"}
PAGE, LINE = 80, 100
"""Columns of the status, and of a line of events."""
SCREEN = 23
"""Lines of the status: a screen's, less one for the prompt."""
_LABEL = 9


def plain(text: str, colour: str) -> str:
    return text


def painted(text: str, colour: str) -> str:
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


# --- status -----------------------------------------------------------------------------------------------------------


def status(body: Json, paint: Paint, now: datetime) -> list[str]:
    """The page of ``mpsagent-cli status``: one screen of 80 columns. What is too much for it is counted."""
    for most in (5, 3, 2, 1):
        lines = _page(body, paint, now, most)
        if len(lines) <= SCREEN:
            break
    return lines


def _page(body: Json, paint: Paint, now: datetime, most: int) -> list[str]:
    """``most``: the largest number of problems and of users, each."""
    agent, problems = body["agent"], body["health"]["problems"]
    good = body["health"]["ok"]
    word = paint("healthy", "good") if good else paint(many(len(problems), "problem"), "bad")
    drained = [one for one in body["instances"] if one["drain"]["draining"] and not one["drain"]["restart"]]
    if drained:
        part = [] if len(drained) == len(body["instances"]) else [safe(one["name"], 60) for one in drained]
        state = paint(f"draining {', '.join(part)}".rstrip(), "warn")
        word = state if good and not part else f"{word}, {state}"
    colour = "bad" if not good else "warn" if drained else "good"
    lines = [f"{paint('●', colour)} mpsagent {safe(agent['version'])}: {word}, up {duration_text(agent['uptime'])}"]
    for one in problems[:most]:
        since = f" (since {local(one['since'], now)})" if one["since"] else ""
        lines += _block(f"  {paint('!', 'bad')} ", 4, safe(one["what"], 400 if most > 1 else 200) + since)
        if one["do"]:
            lines += _block("      ", 6, safe(one["do"], 400 if most > 1 else 200))
    if len(problems) > most:
        lines.append(f"  {paint('!', 'bad')} and {many(len(problems) - most, 'problem')} more (mpsagent-cli doctor)")
    for label, text, colour in _rows(body, now, most):
        for line in _block(f"  {label:<{_LABEL}}", 2 + _LABEL, text):
            head, tail = line[: 2 + _LABEL], line[2 + _LABEL :]
            lines.append(head + (paint(tail, colour) if colour else tail))
    return lines


def _block(head: str, indent: int, text: str) -> list[str]:
    """Text that goes on below its own beginning."""
    parts = wrap(text, PAGE - indent, break_long_words=True, break_on_hyphens=False) or [""]
    return [head + parts[0], *(" " * indent + part for part in parts[1:])]


def _rows(body: Json, now: datetime, most: int) -> list[tuple[str, str, str]]:
    """Label, text, colour."""
    rows, several = list[tuple[str, str, str]](), len(body["instances"]) > 1
    for one in body["instances"]:
        name = [(safe(one["name"], 60), "", "bold")] if several else []
        rows += [*name, *_of_one(one, now, most, known=several or body["gate"]["connected"])]
    return [*rows, *_of_all(body, now)]


def _of_one(body: Json, now: datetime, most: int, *, known: bool) -> list[tuple[str, str, str]]:
    """``known``: who waits."""
    rows = [("GPU", _gpus(body["devices"]), "")]
    at_work = [body["turn"]] if body["turn"] is not None else body["users"]
    least = sum(one["memory"] or 0 for one in at_work)
    rows += [("", safe(text), style) for text, style in gpus_now(body["devices"][:most], now, least)]
    rows.append(("MPS", *_mps(body, now)))
    if body["mode"]["why"]:
        rows.append(("turns", safe(body["mode"]["why"], 400), ""))
    if body["drain"]["draining"]:
        rows.append(("drain", _drain(body["drain"], now), "warn"))

    def first(label: str, texts: Iterable[str], colour: str, count: int, what: str, rest: str) -> None:
        """As many as there is room for; how many more there are, and where."""
        rows.extend((label if i == 0 else "", text, colour) for i, text in enumerate(islice(texts, most)))
        if count > most:
            more = many(count - most, what) if what else count - most
            rows.append(("", f"and {more} more {rest}", colour))

    if body["turn"] is None and body["users"]:
        using = (_using(one, now) for one in body["users"])
        first("in use", using, "good", len(body["clients_by_uid"]), "user", "(mpsagent-cli clients)")
    else:
        rows.append(("in use", *in_use(body, now)))
    waits = (waiting(one, now) for one in body["waiting"])
    first("waiting", waits, "", body["waiting_users"], "user", "(mpsagent-cli queue)")
    if not body["waiting"] and known:
        rows.append(("waiting", "no user", "dim"))
    ending = [_outside(one, now) for one in body["outside"] if one["ends"]]
    first("outside", ending, "warn", len(ending), "process", "to be ended")
    if body["last_change"]:
        rows.append(("change", _change(body["last_change"], now), ""))
    if body["last_fault"]:
        rows.append(
            ("fault", _fault(body["last_fault"], now), "" if body["last_fault"]["seconds"] is not None else "bad")
        )
    if body["unknown_lines"]:
        unknown = f"{many(body['unknown_lines'], 'line')} not understood (mpsagent-cli events --kind log.unknown)"
        rows.append(("log", unknown, "warn"))
    return rows


def _of_all(body: Json, now: datetime) -> list[tuple[str, str, str]]:
    policy = body["policy"]
    errors = f"; the files have {many(len(policy['errors']), 'mistake')}" if policy["errors"] else ""
    check = " (mpsagent-cli policy check)" if errors else ""
    digest = safe(policy["digest"] or "the defaults")[:12]
    loaded = f", loaded {local(policy['loaded'], now)}" if policy["loaded"] else ""
    one = body["instances"][0] if len(body["instances"]) > 1 else body
    report = "" if one["mode"]["enforced"] else "; report mode: no limit is set, no program is terminated"
    return [("policy", f"{digest}{loaded}{report}{errors}{check}", "bad" if errors else "")]


def _outside(one: Json, now: datetime) -> str:
    return f"process {one['pid']} of {user(one)}, outside MPS, is due to be ended at {local(one['ends'], now)}"


def _gpus(devices: list[Json]) -> str:
    """Equal ones are said once."""
    if not devices:
        return "not known yet"
    kinds = Counter((one["name"], one["memory"], one["multiprocessors"]) for one in devices)
    return ", ".join(
        f"{f'{count} × ' if count > 1 else ''}{safe(name, 40)} ({memory / (1 << 30):.0f} GiB, {sms} multiprocessors)"
        for (name, memory, sms), count in kinds.items()
    )


def _mps(body: Json, now: datetime) -> tuple[str, str]:
    control, mode = body["control"], body["mode"]
    form = "one server for all users" if mode["server"] == "all" else "a server for each turn"
    form = "all users together on one server" if mode["sharing"] == "one-server" else form
    if mode["sharing"] == "per-user":
        count = sum(1 for one in body["daemons"] if one["control"])
        return f"a control daemon for each user: {count or 'none'} {'runs' if count < 2 else 'run'} now", ""
    if control is None or not control["running"]:
        return f"the control daemon does not run ({form})", "bad"
    version = control["version"]
    cuda = f"of CUDA {version // 1000}.{version % 1000 // 10}, " if isinstance(version, int) else ""
    quitting = ", quitting" if control["quitting"] else ""
    since = local(control["started"], now)
    return f"{cuda}control daemon {control['pid']} since {since}{quitting}, {form}", "warn" if quitting else ""


def _drain(one: Json, now: datetime) -> str:
    until = "MPS has been started again" if one.get("restart") else "mpsagent-cli resume"
    by = "" if one["by"] is None else f", by {user({'uid': one['by'], 'user': one['by_user']})}"
    text = f"since {local(one['since'], now)}{by}, until {until}: no new client is admitted"
    to_come = one["deadline"] and datetime.fromisoformat(one["deadline"]) > now
    return f"{text}; clients still at work at {local(one['deadline'], now)} are ended" if to_come else text


def _using(one: Json, now: datetime) -> str:
    """One of several users at once."""
    memory = "" if one["memory"] is None else f" with {size(one['memory'])}"
    return f"by {user(one)} since {local(one['since'], now)}, {many(one['processes'], 'process')}{memory}"


def waiting(one: Json, now: datetime) -> str:
    """One user in the queue: since when, why, until when at the latest."""
    turn = "" if one["turn"] is None else f"; served by {local(one['turn'], now)} at the latest"
    return (
        f"{user(one)} since {local(one['since'], now)} ({duration_text(one['seconds'])}), "
        f"{many(one['processes'], 'process')}: {_why(one, now)}{turn}"
    )


def _why(one: Json, now: datetime) -> str:
    until = "" if one.get("until") is None else f", until {local(one['until'], now)} at the latest"
    return safe(one["why"], 600) + until


def _change(one: Json, now: datetime) -> str:
    before = ""
    if one["before"] is not None:
        before = f"from {user({'uid': one['before'], 'user': one['before_user']})} "
    gap = "" if one["gap"] is None else f", {duration_text(one['gap'])} apart"
    return f"{local(one['at'], now)} {before}to {user(one)}{gap}"


def _fault(one: Json, now: datetime) -> str:
    whose = f" of {user(one)}" if one["uid"] is not None else ""
    end = "it goes on" if one["seconds"] is None else f"over after {duration_text(one['seconds'])}"
    end += "" if one["recovered"] is not False else ", the server ended"
    return f"{local(one['at'], now)} on server {one['server']}{whose}, {end}"


# --- tables -----------------------------------------------------------------------------------------------------------


def servers(found: list[Json], now: datetime, width: int = WIDE) -> list[str]:
    rows = [
        [
            str(one["pid"]),
            "all" if one["shared"] else user(one),
            safe(one["status"]),
            f"{one['clients']}/{one['max_clients']}",
            limits(one["limits"]).removesuffix(" on each GPU"),
            {True: "as set", False: "DIFFERENT", None: "-"}[one["verified"]],
            local(one["started"], now),
        ]
        for one in found
    ]
    head = ["PID", "USER", "STATUS", "CLIENTS", "STARTED WITH", "LIMITS", "SINCE"]
    return table(head, rows, width, names=(1,)) if rows else ["no servers"]


def _given(client: Json) -> str:
    """Return a client's limits in words."""
    if client["limits"] is None and client["state"] != "waiting":
        return "unknown"
    return limits(client["limits"]).removesuffix(" on each GPU") + " (fallback)" * bool(client["fail_safe"])


def clients(found: list[Json], width: int = WIDE) -> list[str]:
    rows = [
        [
            str(one["pid"]),
            user(one),
            safe(one["state"]) + (" (not seen by the gate)" if one.get("unseen") else ""),
            duration_text(one["seconds"]),
            "-" if one["waited"] is None else duration_text(one["waited"]),
            size(one["memory"]),
            _given(one),
            safe("; ".join(filter(None, (one.get("why"), one["command"]))) or "-", 400),
        ]
        for one in found
    ]
    head = ["PID", "USER", "STATE", "FOR", "WAITED", "MEMORY", "LIMITS", "COMMAND"]
    if any(one["container"] for one in found):
        head.insert(-1, "CONTAINER")
        for row, one in zip(rows, found, strict=True):
            row.insert(-1, container(one["container"]))
    return table(head, rows, width, names=(1,)) if rows else ["no clients"]


def container(one: Json | None) -> str:
    """As engines abbreviate it."""
    if one is None:
        return "-"
    pod = f" pod {safe(one['pod'])[:8]}" if one["pod"] else ""
    return f"{safe(one['engine'] or '')} {safe(one['id'])[:12]}{pod}".strip()


def none_waits(explained: Json) -> list[str]:
    """For a user of whom no process waits; ``explained``: what the policy has for them, if that is known."""
    access = explained.get("access", {})
    if access.get("value") != "deny":
        return ["No process of yours waits.", ""]
    place = access["from"]
    if isinstance(place, str):
        why = safe(place)
    else:
        where = f" ({safe(place['key'])}, {safe(place['file'])}:{place['line']})" if place["line"] else ""
        why = f"the policy denies you MPS{where}"
    text = f"No process of yours waits: {why}, so CUDA programs are refused."
    return [*wrap(text, PAGE, break_on_hyphens=False, break_long_words=False), ""]


def own_place(found: list[Json], me: int, now: datetime) -> list[str]:
    """For a user: where they stand in the queue, why, and when they are served at the latest."""
    mine = next((one for one in found if one["uid"] == me), None)
    if mine is None:
        return []
    if mine["turn"] is not None:
        latest = f"served by {local(mine['turn'], now)} at the latest"
    elif mine["reason"] == "turn":
        latest = (
            "a turn before yours has no time limit (turn.time_limit), so no latest time is known; ask its user or an "
            "administrator"
        )
    else:
        latest = "no latest time is known"
    beside = sum(one.get("instance") == mine.get("instance") for one in found)  # each has a queue
    text = (
        f"You are number {mine['position']} of {beside}, with {many(mine['processes'], 'process')}, since "
        f"{local(mine['since'], now)} ({duration_text(mine['seconds'])}): {_why(mine, now)}; {latest}."
    )
    return [*wrap(text, PAGE, break_on_hyphens=False), ""]


def queue(found: list[Json], now: datetime, width: int = WIDE) -> list[str]:
    """What does not fit into the width goes on below."""
    rows = [
        [
            str(one["position"]),
            user(one),
            str(one["processes"]),
            duration_text(one["seconds"]),
            "-" if one["turn"] is None else local(one["turn"], now),
            _why(one, now),
        ]
        for one in found
    ]
    if not rows:
        return ["no user waits"]
    head = ["#", "USER", "PROCESSES", "WAITING", "SERVED BY", "WHY"]
    if len({one.get("instance") for one in found}) > 1:
        head.insert(1, "INSTANCE")
        for row, one in zip(rows, found, strict=True):
            row.insert(1, safe(one["instance"]))
    return table(head, rows, width, names=(head.index("USER"),), below=True)


# --- events -----------------------------------------------------------------------------------------------------------


def event(one: Json, now: datetime, width: int = LINE) -> list[str]:
    """``2026-11-21 14:02:31  the GPU goes to bob, 0.10s after the user before``, at most 100 columns wide."""
    try:
        at = datetime.fromisoformat(str(one.get("at", ""))).astimezone(now.tzinfo).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError):
        at = "-"
    head = f"{at:<19}  "
    text = safe(one.get("sentence") or one.get("kind", ""), 600)
    parts = wrap(text, max(20, min(width, LINE) - len(head)), break_on_hyphens=False) or [""]
    return [head + parts[0], *(" " * len(head) + part for part in parts[1:])]


class Pairs:
    """Events with each action and its outcome in one line: the beginning of an action is left out when its outcome
    comes. ``take`` gives what can be shown now, ``rest`` the actions whose outcome is still to come."""

    MOST = 256

    def __init__(self) -> None:
        self._begun: dict[int, Json] = {}

    def take(self, one: Json) -> list[Json]:
        if one.get("kind") == "action" and isinstance(one.get("cursor"), int):
            self._begun[one["cursor"]] = one
            return [self._begun.pop(next(iter(self._begun)))] if len(self._begun) > self.MOST else []
        if one.get("kind") in ("action.done", "action.failed"):
            self._begun.pop(one.get("begun", -1), None)
        return [one] if worth_telling(one) else []

    def rest(self) -> list[Json]:
        found = list(self._begun.values())
        self._begun.clear()
        return found
