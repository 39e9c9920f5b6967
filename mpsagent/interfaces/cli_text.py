"""Answers as a person reads them: short, the important thing first, aligned, safe for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mpsagent.mps.units import duration_text, limit_text

Json = dict[str, Any]
Paint = Callable[[str, str], str]
_COLOURS = {"good": "32", "bad": "31;1", "warn": "33", "dim": "2", "bold": "1"}


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
    """``alice`` or ``uid 1001``."""
    if one.get("user"):
        return safe(one["user"], 40)
    return "?" if one.get("uid") is None else f"uid {one['uid']}"


def limits(value: Json | None) -> str:
    """``60.0 %, 20G``"""
    if not value or value.get("threads") is None:
        return "-"
    memory = value["memory"]
    sizes = [limit_text(size) if len(memory) == 1 else f"{safe(d)}={limit_text(size)}" for d, size in memory.items()]
    return ", ".join([f"{value['threads']:g} %", " ".join(sizes) or "no memory limit"])


def many(count: int, one: str) -> str:
    return f"{count} {one}" if count == 1 else f"{count} {one}s"


def status(body: Json, paint: Paint) -> list[str]:
    """The page of ``mpsagent-cli status``."""
    agent, problems, drain = body["agent"], body["health"]["problems"], body["drain"]
    word = paint("healthy", "good") if body["health"]["ok"] else paint(many(len(problems), "problem"), "bad")
    dot = paint("●", "good" if body["health"]["ok"] else "bad")
    lines = [f"{dot} mpsagent {safe(agent['version'])}: {word}, up {duration_text(agent['uptime'])}"]
    for one in problems:
        since = f" (since {safe(one['since'])})" if one["since"] else ""
        lines.append(f"  {paint('!', 'bad')} {safe(one['what'], 400)}{since}")
        if one["do"]:
            lines.append(f"      {safe(one['do'], 400)}")
    rows: list[tuple[str, str]] = []
    if drain["draining"]:
        rows.append(
            ("draining", paint(f"since {safe(drain['since'])}, until {safe(drain['deadline'] or 'resume')}", "warn"))
        )
    rows += [("gpu", _holder(body["holder"], paint))]
    rows += [("waiting" if i == 0 else "", _waiting(one)) for i, one in enumerate(body["waiting"][:10])]
    if len(body["waiting"]) > 10:
        rows.append(("", f"and {len(body['waiting']) - 10} more"))
    if body["limits"]["drifted"]:
        which = ", ".join(str(pid) for pid in body["limits"]["drifted"])
        rows.append(("drifted", paint(f"server {which} does not have its policy's limits", "bad")))
    rows.append(("control", _control(body["control"], paint)))
    policy = body["policy"]
    wrong = (
        paint(f", {many(len(policy['errors']), 'error')} (mpsagent-cli policy check)", "bad")
        if policy["errors"]
        else ""
    )
    rows.append(
        ("policy", f"{safe(policy['digest'] or 'defaults')[:12]}, loaded {safe(policy['loaded'] or 'never')}{wrong}")
    )
    if body["last_switch"]:
        rows.append(("switch", f"last at {safe(body['last_switch'])}"))
    if body["unknown_lines"]:
        rows.append(("log", paint(f"{many(body['unknown_lines'], 'line')} not understood", "warn")))
    return lines + [f"  {name:<9}{text}" for name, text in rows]


def _holder(one: Json | None, paint: Paint) -> str:
    if one is None:
        return paint("nobody (no server runs)", "dim")
    if one["parked"]:
        return paint(f"free (server {one['pid']} is parked)", "dim")
    word = safe(one["status"])
    colour = "good" if word == "ACTIVE" else "bad" if word == "FAULT" else "warn"
    proof = {True: paint("verified", "good"), False: paint("DRIFTED", "bad"), None: "not verified"}[one["verified"]]
    return (
        f"{user(one)}, server {one['pid']} {paint(word, colour)}, {many(one['clients'], 'client')}, "
        f"{limits(one['limits'])} ({proof})"
    )


def _waiting(one: Json) -> str:
    turn = "" if one["turn_seconds"] is None else f", turn in {duration_text(one['turn_seconds'])} at most"
    return f"{user(one)} for {duration_text(one['seconds'])} ({many(len(one['clients']), 'client')}){turn}"


def _control(one: Json | None, paint: Paint) -> str:
    if one is None or not one["running"]:
        return paint("not running", "bad")
    quitting = paint(", quitting", "warn") if one["quitting"] else ""
    return f"pid {one['pid']}, MPS {safe(one['version'] or '?')}, since {safe(one['started'])}{quitting}"


def servers(found: list[Json]) -> list[str]:
    rows = [
        [
            str(one["pid"]),
            user(one),
            safe(one["status"]) + (" (parked)" if one["parked"] else ""),
            f"{one['clients']}/{one['max_clients']}",
            limits(one["limits"]),
            {True: "verified", False: "DRIFTED", None: "-"}[one["verified"]],
            safe(one["started"]),
        ]
        for one in found
    ]
    return table(["PID", "USER", "STATUS", "CLIENTS", "LIMITS", "POLICY", "STARTED"], rows) if rows else ["no servers"]


def clients(found: list[Json]) -> list[str]:
    rows = [
        [
            str(one["pid"]),
            user(one),
            "-" if one["server"] is None else str(one["server"]),
            safe(one["state"]),
            duration_text(one["seconds"]),
            "-" if one["waited"] is None else duration_text(one["waited"]),
            safe(one["command"] or "-", 60),
        ]
        for one in found
    ]
    return table(["PID", "USER", "SERVER", "STATE", "FOR", "WAITED", "COMMAND"], rows) if rows else ["no clients"]


def queue(found: list[Json]) -> list[str]:
    rows = [
        [
            str(one["position"]),
            user(one),
            duration_text(one["seconds"]),
            "-" if one["turn_seconds"] is None else f"in {duration_text(one['turn_seconds'])}",
            " ".join(str(pid) for pid in one["clients"][:8]),
        ]
        for one in found
    ]
    return table(["#", "USER", "WAITING", "TURN", "CLIENTS"], rows) if rows else ["nobody waits"]


def event(one: Json) -> str:
    """``2026-11-21T00:00:31.147+00:00  fault  text  key=value …``"""
    rest = {k: v for k, v in one.items() if k not in ("cursor", "at", "kind", "text") and v not in (None, "", [], {})}
    parts = [safe(one.get("at", "")), f"{safe(one.get('kind', '')):<18}"]
    if one.get("text"):
        parts.append(safe(one["text"], 400))
    return "  ".join([*parts, " ".join(f"{safe(key, 40)}={safe(value)}" for key, value in rest.items())]).rstrip()


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


def story(body: Json) -> list[str]:
    """The page of ``mpsagent-cli replay``."""
    counts: dict[str, int] = {}
    for one in body["clients"]:
        counts[one["outcome"]] = counts.get(one["outcome"], 0) + 1
    summary = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())) or "none"
    longest = max((one["wait_seconds"] for one in body["clients"]), default=0.0)
    lines = [
        f"{many(len(body['servers']), 'server')}; clients: {summary}; longest wait {duration_text(longest)}; "
        f"{many(len(body['faults']), 'fault')}, {len(body['refused'])} refused, {body['unknown_lines']} unknown lines",
        "",
    ]
    rows = [
        [
            str(one["pid"]),
            "?" if one["uid"] is None else str(one["uid"]),
            safe(one["started"] or "-"),
            safe(one["exited"] or "-") + (" (forced)" if one["forced"] else ""),
            limits(one["limits"]),
            str(one["faults"]),
        ]
        for one in body["servers"]
    ]
    lines += [*table(["SERVER", "UID", "STARTED", "EXITED", "LIMITS", "FAULTS"], rows), ""]
    rows = [
        [
            str(one["pid"]),
            "?" if one["uid"] is None else str(one["uid"]),
            "-" if one["server"] is None else str(one["server"]),
            safe(one["queued"] or one["connected"] or "-"),
            duration_text(one["wait_seconds"]),
            safe(one["outcome"]),
        ]
        for one in body["clients"]
    ]
    lines += table(["CLIENT", "UID", "SERVER", "ARRIVED", "WAITED", "OUTCOME"], rows)
    if "would" in body:
        rows = [[safe(one["at"]), safe(one["action"]), safe(one["reason"], 400)] for one in body["would"]]
        lines += ["", *table(["THE AGENT, AT", "WOULD", "BECAUSE"], rows)]
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
    if isinstance(value, int | float) and key not in ("threads", "max_clients"):
        return duration_text(value)
    return safe(value)


def _place(origin: Any) -> str:
    if not isinstance(origin, dict):
        return safe(origin)
    if not origin.get("file"):
        return "built-in default"
    return f"{safe(origin['file'])}:{origin['line']} {safe(origin['key'])}"
