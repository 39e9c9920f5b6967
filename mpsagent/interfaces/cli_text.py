"""Answers as a person reads them: short, the important thing first, aligned, local time, safe for a terminal. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from datetime import datetime
from textwrap import wrap
from typing import Any

from mpsagent.core.sentences import limits_words
from mpsagent.mps.units import duration_text, limit_text

Json = dict[str, Any]
Paint = Callable[[str, str], str]
_COLOURS = {"good": "32", "bad": "31;1", "warn": "33", "dim": "2", "bold": "1"}
PAGE, LINE = 80, 100
"""Columns of the status, and of a line of events."""
_LABEL = 9
_USERS = 5
"""Waiting users that the status shows."""


def plain(text: str, colour: str) -> str:
    return text


def painted(text: str, colour: str) -> str:
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def safe(value: object, most: int = 200) -> str:
    """Anything, with what a terminal would obey (control characters, bidirectional overrides) written out."""
    text = str(value)
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:most])
    return shown + "…" if len(text) > most else shown


def table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    """Left-aligned columns, two spaces apart; the last is not padded."""
    cells = [head, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def user(one: Json) -> str:
    """``alice`` or ``user 1001``."""
    if one.get("user"):
        return safe(one["user"], 40)
    return "?" if one.get("uid") is None else f"user {one['uid']}"


def many(count: int, one: str) -> str:
    if count == 1:
        return f"1 {one}"
    return f"{count} {one}es" if one.endswith("s") else f"{count} {one}s"


def limits(value: Json | None) -> str:
    """``60 %, 20G``"""
    return safe(limits_words(value))


def local(text: object, now: datetime) -> str:
    """A time of an answer in this machine's time: ``14:02:31`` of today, else with its date."""
    if not text:
        return "-"
    try:
        at = datetime.fromisoformat(str(text)).astimezone(now.tzinfo)
    except (ValueError, OverflowError):
        return safe(text, 40)
    return at.strftime("%H:%M:%S" if at.date() == now.date() else "%Y-%m-%d %H:%M:%S")


# --- status -----------------------------------------------------------------------------------------------------------


def status(body: Json, paint: Paint, now: datetime) -> list[str]:
    """The page of ``mpsagent-cli status``: one screen of 80 columns."""
    agent, problems = body["agent"], body["health"]["problems"]
    good = body["health"]["ok"]
    word = paint("healthy", "good") if good else paint(many(len(problems), "problem"), "bad")
    lines = [
        f"{paint('●', 'good' if good else 'bad')} mpsagent {safe(agent['version'])}: {word}, "
        f"up {duration_text(agent['uptime'])}"
    ]
    for one in problems:
        since = f" (since {local(one['since'], now)})" if one["since"] else ""
        lines += _block(f"  {paint('!', 'bad')} ", 4, safe(one["what"], 400) + since)
        if one["do"]:
            lines += _block("      ", 6, safe(one["do"], 400))
    for label, text, colour in _rows(body, now):
        first, *rest = _block(f"  {label:<{_LABEL}}", 2 + _LABEL, text)
        head, tail = first[: 2 + _LABEL], first[2 + _LABEL :]
        lines.append(head + (paint(tail, colour) if colour else tail))
        lines += [
            one[: 2 + _LABEL] + (paint(one[2 + _LABEL :], colour) if colour else one[2 + _LABEL :]) for one in rest
        ]
    return lines


def _block(head: str, indent: int, text: str) -> list[str]:
    """Text that goes on below its own beginning."""
    parts = wrap(text, PAGE - indent, break_long_words=True, break_on_hyphens=False) or [""]
    return [head + parts[0], *(" " * indent + part for part in parts[1:])]


def _rows(body: Json, now: datetime) -> list[tuple[str, str, str]]:
    """Label, text, colour."""
    rows = [("GPU", _gpus(body["devices"]), ""), ("MPS", *_mps(body, now))]
    if body["drain"]["draining"]:
        until = local(body["drain"]["deadline"], now) if body["drain"]["deadline"] else "mpsagent-cli resume"
        since = local(body["drain"]["since"], now)
        rows.append(("drain", f"since {since}, until {until}: nothing new is let in", "warn"))
    rows.append(("in use", *_in_use(body, now)))
    rows += [("waiting" if i == 0 else "", _waiting(one, now), "") for i, one in enumerate(body["waiting"][:_USERS])]
    if body["waiting_users"] > _USERS:
        rows.append(("", f"and {many(body['waiting_users'] - _USERS, 'user')} more (mpsagent-cli queue)", ""))
    if not body["waiting"] and body["gate"]["connected"]:
        rows.append(("waiting", "no user", "dim"))
    for i, text in enumerate(body["not_guaranteed"]):
        rows.append(("not sure" if i == 0 else "", safe(text, 400), "warn"))
    if body["limits"]["drifted"]:
        which = ", ".join(str(pid) for pid in body["limits"]["drifted"])
        rows.append(("limits", f"server {which} started with other limits than its first client's", "bad"))
    if body["last_change"]:
        rows.append(("change", _change(body["last_change"], now), ""))
    if body["last_fault"]:
        rows.append(
            ("fault", _fault(body["last_fault"], now), "" if body["last_fault"]["seconds"] is not None else "bad")
        )
    policy = body["policy"]
    errors = f"; the files have {many(len(policy['errors']), 'mistake')}" if policy["errors"] else ""
    check = " (mpsagent-cli policy check)" if errors else ""
    digest = safe(policy["digest"] or "the defaults")[:12]
    loaded = f", loaded {local(policy['loaded'], now)}" if policy["loaded"] else ""
    rows.append(("policy", f"{digest}{loaded}{errors}{check}", "bad" if errors else ""))
    if body["unknown_lines"]:
        rows.append(("log", f"{many(body['unknown_lines'], 'line')} not understood (mpsagent-cli events)", "warn"))
    return rows


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
    form = "one server for all users" if mode["server"] == "shared" else "a server for each turn"
    if control is None or not control["running"]:
        return f"the control daemon does not run ({form})", "bad"
    version = control["version"]
    cuda = f"of CUDA {version // 1000}.{version % 1000 // 10}, " if isinstance(version, int) else ""
    quitting = ", quitting" if control["quitting"] else ""
    since = local(control["started"], now)
    return f"{cuda}control daemon {control['pid']} since {since}{quitting}, {form}", "warn" if quitting else ""


def _in_use(body: Json, now: datetime) -> tuple[str, str]:
    turn, holder = body["turn"], body["holder"]
    if turn is None:
        return "by no user", "dim"
    if not turn["processes"] and not turn["ending"] and not body["waiting_users"]:
        server = "" if holder is None else f", and its server {holder['pid']} is {safe(holder['status'])}"
        return f"by no user; {user(turn)} had it last{server}", "dim"
    text = f"by {user(turn)} since {local(turn['since'], now)}, {many(turn['processes'], 'process')}"
    text += f", {limits(turn['limits'])} each"
    colour = "good"
    if holder is not None and holder["status"] != "ACTIVE":
        text += f"; server {holder['pid']} is {safe(holder['status'])}"
        colour = "bad" if holder["status"] == "FAULT" else "warn"
    return f"{text}; {_until(turn, now)}", colour


def _until(turn: Json, now: datetime) -> str:
    end = {"terminate": "then its clients are ended", "quit": "then MPS is started anew"}.get(turn["action"], "")
    if turn["ending"]:
        return f"being ended since {local(turn['ending'], now)}"
    if turn["ends"]:
        return f"until {local(turn['ends'], now)} at the latest, {end}"
    if turn["after"] is None:
        return "for as long as it wants"
    return f"for {duration_text(turn['after'] + turn['grace'])} once another user waits"


def _waiting(one: Json, now: datetime) -> str:
    turn = "" if one["turn"] is None else f"; served by {local(one['turn'], now)} at the latest"
    return (
        f"{user(one)} since {local(one['since'], now)} ({duration_text(one['seconds'])}), "
        f"{many(one['processes'], 'process')}: {safe(one['why'], 300)}{turn}"
    )


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


def servers(found: list[Json], now: datetime) -> list[str]:
    rows = [
        [
            str(one["pid"]),
            "all" if one["shared"] else user(one),
            safe(one["status"]),
            f"{one['clients']}/{one['max_clients']}",
            limits(one["limits"]),
            {True: "as set", False: "DIFFERENT", None: "-"}[one["verified"]],
            local(one["started"], now),
        ]
        for one in found
    ]
    head = ["PID", "USER", "STATUS", "CLIENTS", "STARTED WITH", "LIMITS", "SINCE"]
    return table(head, rows) if rows else ["no servers"]


def clients(found: list[Json], width: int = 160) -> list[str]:
    rows = [
        [
            str(one["pid"]),
            user(one),
            safe(one["state"]),
            duration_text(one["seconds"]),
            "-" if one["waited"] is None else duration_text(one["waited"]),
            limits(one["limits"]) + (" (fail-safe)" if one["fail_safe"] else "") if one["limits"] else "-",
            safe(one["command"] or "-", 400),
        ]
        for one in found
    ]
    lines = table(["PID", "USER", "STATE", "FOR", "WAITED", "LIMITS", "COMMAND"], rows) if rows else ["no clients"]
    return [cut(line, width) for line in lines]


def queue(found: list[Json], now: datetime, width: int = 160) -> list[str]:
    rows = [
        [
            str(one["position"]),
            user(one),
            str(one["processes"]),
            duration_text(one["seconds"]),
            "-" if one["turn"] is None else local(one["turn"], now),
            safe(one["why"], 300),
        ]
        for one in found
    ]
    lines = table(["#", "USER", "PROCESSES", "WAITING", "SERVED BY", "WHY"], rows) if rows else ["no user waits"]
    return [cut(line, width) for line in lines]


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


# --- events -----------------------------------------------------------------------------------------------------------


def event(one: Json, now: datetime) -> list[str]:
    """``2026-11-21 14:02:31  the GPU goes to bob, 0.10s after the user before``, at most 100 columns wide."""
    try:
        at = datetime.fromisoformat(str(one.get("at", ""))).astimezone(now.tzinfo).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError):
        at = "-"
    head = f"{at:<19}  "
    text = safe(one.get("sentence") or one.get("kind", ""), 600)
    parts = wrap(text, LINE - len(head), break_on_hyphens=False) or [""]
    return [head + parts[0], *(" " * len(head) + part for part in parts[1:])]


class Pairs:
    """Events with each action and its outcome in one line: the beginning of an action is left out when its outcome
    comes. ``take`` gives what can be shown now, ``rest`` the actions whose outcome is still to come. Questions to the
    control daemon that went well are left out: there is one every two minutes."""

    MOST = 256

    def __init__(self) -> None:
        self._begun: dict[int, Json] = {}

    def take(self, one: Json) -> list[Json]:
        if one.get("kind") == "action" and isinstance(one.get("cursor"), int):
            self._begun[one["cursor"]] = one
            return [self._begun.pop(next(iter(self._begun)))] if len(self._begun) > self.MOST else []
        if one.get("kind") == "action.done":
            self._begun.pop(one.get("begun", -1), None)
            if one.get("action") == "Reconcile" and one.get("ok"):
                return []
        return [one]

    def rest(self) -> list[Json]:
        found = list(self._begun.values())
        self._begun.clear()
        return found


# --- anything else ----------------------------------------------------------------------------------------------------


def tree(value: Any, indent: str = "") -> list[str]:
    """Any JSON as indented ``key: value`` lines, for answers whose shape is the policy's."""
    lines: list[str] = []
    pairs = value.items() if isinstance(value, dict) else [("-", each) for each in value]
    for key, each in pairs:
        name = safe(key, 60) if key == "-" else f"{safe(key, 60)}:"
        if isinstance(each, dict | list) and each:
            lines += [f"{indent}{name}", *tree(each, indent + "  ")]
        else:
            shown = (
                "-"
                if each in (None, [], {})
                else {True: "yes", False: "no"}.get(each, each)
                if isinstance(each, bool)
                else each
            )
            lines.append(f"{indent}{name} {safe(shown, 400)}")
    return lines


def explained(body: Json) -> list[str]:
    """``policy explain``: one line for each value, with the place that gives it; then whatever else there is."""
    rows: list[list[str]] = []
    rest: Json = {}
    for key, one in body.items():
        if isinstance(one, dict) and "value" in one and "from" in one:
            rows.append([safe(key), _value(key, one), _place(one["from"])])
        elif key not in ("user", "uid", "groups"):
            rest[key] = one
    groups = ", ".join(safe(group) for group in body.get("groups", [])) or "none"
    head = f"{safe(body.get('user'))} (uid {safe(body.get('uid'))}), groups: {groups}"
    return [head, "", *table(["KEY", "VALUE", "FROM"], rows), *(["", *tree(rest)] if rest else [])]


def _value(key: str, one: Json) -> str:
    value = one.get("written", one["value"])
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key == "threads" and isinstance(one["value"], int | float):
        return f"{one['value']:g} %"
    if isinstance(value, dict) and len({str(size) for size in value.values()}) == 1:
        size = next(iter(value.values()))
        text = limit_text(size) if isinstance(size, int) else safe(size)
        return f"{text} on each of {len(value)} GPUs" if len(value) > 1 else text
    if isinstance(value, int | float) and key not in ("threads", "max_clients"):
        return duration_text(value)
    return safe(value)


def _place(origin: Any) -> str:
    if not isinstance(origin, dict):
        return safe(origin)
    if not origin.get("file"):
        return "built-in default"
    return f"{safe(origin['file'])}:{origin['line']} {safe(origin['key'])}"
