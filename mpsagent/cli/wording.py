"""Words of the command line's pages: users, sizes, times, who has the GPU; short and safe for a terminal. Pure.

Apart from the pages because these take next to nothing to import.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from mpsagent.mps.units import duration_text, limits_words
from mpsagent.policy.origins import printable

Json = dict[str, Any]


def safe(value: object, most: int = 200) -> str:
    """Anything, with what a terminal would obey (control characters, bidirectional overrides) written out."""
    text = str(value)
    return printable(text[:most]) + "…" * (len(text) > most)


def user(one: Json) -> str:
    """``alice`` or ``user 1001``."""
    if one.get("user"):
        return safe(one["user"], 40)
    if one.get("uid") == 0:
        return "root"
    return "?" if one.get("uid") is None else f"user {one['uid']}"


def many(count: int, one: str) -> str:
    if count == 1:
        return f"1 {one}"
    return f"{count} {one}es" if one.endswith("s") else f"{count} {one}s"


def size(value: int | None) -> str:
    """Memory in use, in words: ``4.2 GiB``, ``570 MiB``."""
    if value is None:
        return "-"
    return f"{value / (1 << 30):.1f} GiB" if value >= 1 << 30 else f"{value >> 20} MiB"


def utilization(one: Json) -> str:
    """``85%``; ``85%*``: of several users on one server."""
    value = one["utilization"]
    return "-" if value is None else f"{value:.0%}" + "*" * bool(one["shared"])


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


def draining(one: Json, now: datetime) -> str:
    """Return since when an instance is drained, by whom, and what ends that."""
    who = "" if one.get("by") is None else f", by {user({'uid': one['by'], 'user': one.get('by_user')})}"
    where = "" if one.get("instance", "default") == "default" else f"{safe(one['instance'], 60)}: "
    since = local(one["since"], now)
    return f"{where}draining since {since}{who}: no new program is admitted until mpsagent-cli resume"


def in_use(body: Json, now: datetime) -> tuple[str, str]:
    """Return who uses the GPU, and a colour."""
    turn, holder = body["turn"], body["holder"]
    if turn is None and body["users"]:
        return f"by {_named(body['users'], len(body['clients_by_uid']))}", "good"
    if turn is None:
        return "by no user", "dim"
    if not turn["processes"] and not turn["ending"] and not body["waiting_users"]:
        server = "" if holder is None else f", and its server {holder['pid']} is {safe(holder['status'])}"
        return f"by no user; {user(turn)} had it last{server}", "dim"
    text, colour = f"by {user(turn)} {_at_work(turn, now)}", "good"
    if holder is not None and holder["status"] != "ACTIVE":
        word = "in FAULT" if holder["status"] == "FAULT" else safe(holder["status"])
        text += f"; server {holder['pid']} is {word}"
        colour = "bad" if holder["status"] == "FAULT" else "warn"
    return f"{text}; {_until(turn, body['drain']['deadline'], now)}", colour


def _named(users: list[Json], count: int) -> str:
    """Return the first users by name, and how many more of ``count`` there are."""
    names = list(dict.fromkeys(map(user, users)))[:4]  # a user may be in several instances
    if count > len(names):
        names.append(many(count - len(names), "more user"))
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def whose_turn(turn: Json, now: datetime) -> str:
    """A turn without its user: since when, with how much, until when."""
    return f"{_at_work(turn, now)}; {_until(turn, None, now)}"


def _at_work(turn: Json, now: datetime) -> str:
    memory = "" if turn["memory"] is None else f" with {size(turn['memory'])}"
    each = ", " if turn["processes"] == 1 else ", each with "
    differ = " with limits that are not known" if turn["processes"] == 1 else ", with different or unknown limits"
    own = f"{each}{limits(turn['limits'])}" if turn["limits"] else differ
    return f"since {local(turn['since'], now)}, {many(turn['processes'], 'process')}{memory}{own}"


def _until(turn: Json, drained: str | None, now: datetime) -> str:
    """``drained``: when a drain ends what still runs."""
    end = {"terminate": ", then its clients are ended", "restart-mps": ", then MPS is restarted"}.get(
        turn["on_expiry"], ""
    )
    if turn["ending"]:
        return f"being ended since {local(turn['ending'], now)}"
    if drained and not (turn["ends"] and turn["ends"] < drained):
        return f"until {local(drained, now)} at the latest, then its clients are ended"
    if turn["ends"]:
        return f"until {local(turn['ends'], now)} at the latest{end}"
    if turn["time_limit"] is None:
        return "no time limit"
    return f"for {duration_text(turn['time_limit'] + turn['grace'])} once another user waits"
