"""What `mpsagent-cli policy explain` and `policy diff` print. Pure."""

from __future__ import annotations

from datetime import datetime
from textwrap import wrap
from typing import Any

from mpsagent.cli.answer_text import waiting
from mpsagent.cli.order_text import tree
from mpsagent.cli.tables import WIDE, table
from mpsagent.cli.wording import Json, local, safe, whose_turn
from mpsagent.mps.units import duration_text, limit_text

COUNTS = ("max_clients", "max_contexts", "queue_priority", "max_users")
"""Keys whose number is one, and no time."""
NEVER = ("time_limit", "max_runtime", "idle_timeout")
_REPORTED = "Report mode: no value of this table is in force. mpsagent reports what it would have done."


def shown(body: Json, now: datetime, width: int = WIDE) -> list[str]:
    """``policy show``: what the files give, each with its place; what they do not give is the default."""
    loaded = f", loaded {local(body['loaded'], now)}" if body["loaded"] else ""
    files = ", ".join(safe(one) for one in body["files"]) or "no file: the defaults"
    rows = [[safe(key), _value(key, one), _line(one["from"])] for key, one in body["sections"].items()]
    lines = [f"{safe(body['digest'] or '-')[:12]}{loaded}, from {files}"]
    for one in body["errors"]:
        lines += wrap(f"mistake: {safe(one, 400)}", width, subsequent_indent="  ", break_on_hyphens=False)
    return [*lines, *(["", *table(["KEY", "VALUE", "FROM"], rows, width, names=(1,), below=True)] if rows else [])]


def explained(body: Json, now: datetime, width: int = WIDE) -> list[str]:
    """``policy explain``: one line for each value, with the place that gives it; then what goes on at this moment, and
    whatever else there is."""
    rows: list[list[str]] = []
    rest: Json = {}
    for key, one in body.items():
        if isinstance(one, dict) and "value" in one and "from" in one:
            rows.append([safe(key), _value(key, one), _place(one["from"])])
        elif key not in ("user", "uid", "groups"):
            rest[key] = _now(one, now) if key == "now" and isinstance(one, dict) else one
    groups = ", ".join(safe(group) for group in body.get("groups", [])) or "none"
    head = f"{safe(body.get('user'))} (uid {safe(body.get('uid'))}), groups: {groups}"
    return [
        head,
        *([_REPORTED] if body.get("mode", {}).get("value") == "report" else []),
        "",
        *table(["KEY", "VALUE", "FROM"], rows, width, names=(1,), below=True),
        *(["", *tree(rest)] if rest else []),
    ]


def _now(one: Json, now: datetime) -> Json:
    """In the words of `status` and `queue`."""
    place, turn = one["waiting"], one["turn"]
    return {
        "clients": one["clients"],
        "waiting": "no" if place is None else f"number {place['position']}: {waiting(place, now)}",
        "turn": "no" if turn is None else whose_turn(turn, now),
    }


def _value(key: str, one: Json) -> str:
    key, value = key.rpartition(".")[2], one.get("written", one["value"])
    if value is None:
        return "never" if key in NEVER else "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key == "active_threads" and "multiprocessors" in one and one["value"] is not None:
        seen = " or ".join(str(count) for count in sorted(set(one["multiprocessors"].values())))
        return f"{one['value']:g} %" + (f" ({seen} multiprocessors)" if seen else "")
    if key in ("active_threads", "total_active_threads") and isinstance(value, str | int):
        return safe(value) if isinstance(value, str) else f"{value} multiprocessors"
    if key == "total_memory_limit":
        return f"{limit_text(value) if isinstance(value, int) else safe(value)} on each GPU"
    if key == "active_threads" and isinstance(value, dict):
        return _threads(value)
    if isinstance(value, dict):
        value = {device or "each": one for device, one in value.items()}
        return _by_device({device: limit_text(one) if isinstance(one, int) else one for device, one in value.items()})
    if isinstance(value, list):
        return safe(", ".join(map(str, value)) or "none")
    if key == "log_size":
        return limit_text(value)
    if isinstance(value, int | float) and key not in COUNTS:
        return duration_text(value)
    return safe(value)


def _threads(value: Json) -> str:
    """As the policy has them, where they are no percentage."""
    if "clients" in value:
        return safe(f"for {value['clients']} clients, {value.get('rule')}")
    return f"weight {value['weight']:g}" if "weight" in value else safe(value)


def _by_device(texts: Json) -> str:
    if len(texts) > 1 and len(set(texts.values())) == 1:
        return f"{safe(next(iter(texts.values())))} on each of {len(texts)} GPUs"
    return safe(" ".join(f"{device}={text}" for device, text in texts.items()))


def _line(origin: Any) -> str:
    return f"{safe(origin['file'])}:{origin['line']}" if isinstance(origin, dict) and origin.get("file") else "-"


def _place(origin: Any) -> str:
    if not isinstance(origin, dict):
        return safe(origin)
    if not origin.get("file"):
        return "built-in default"
    return f"{safe(origin['file'])}:{origin['line']} {safe(origin['key'])}"


def changes(body: Json, width: int = WIDE) -> list[str]:
    """``policy diff``: for each user, what a reload changes from what to what, and which line says so."""
    if body["same"]:
        return ["A reload changes nothing: what the files say is in force."]
    lines: list[str] = []
    for one in body["users"]:
        lines.append(safe(one["who"]))
        rows = [
            [safe(change["key"]), _value(change["key"], change["before"]), "->", _value(change["key"], change["after"]),
             safe(change["where"])]
            for change in one["changes"]
        ]  # fmt: skip
        lines += [f"  {line}" for line in table(None, rows, width - 2, names=(1, 3), below=True)]
    if body["settings"]:
        lines.append("mpsagent itself")
        rows = [
            [safe(one["key"]), safe(one["before"]), "->", safe(one["after"]),
             "when mpsagent is restarted" if one["restart"] else ""]
            for one in body["settings"]
        ]  # fmt: skip
        lines += [f"  {line}" for line in table(None, rows, width - 2, names=(1, 3), below=True)]
    later = [one for one in body["settings"] if one["restart"]]
    now = body["users"] or len(later) < len(body["settings"])
    if now:
        lines += ["", "A CUDA context keeps its limits. The next one gets the new limits."]
        lines.append("To apply it: mpsagent-cli reload")
    if later:
        what = "the settings with that note" if now else "it"
        lines += ["", f"To apply {what}: systemctl restart mpsagent (no CUDA work is lost)"]
    return lines
