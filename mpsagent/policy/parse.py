"""One value of a policy file at a time: from what TOML gave to what the agent uses, or what is wrong with it.

Every function takes any TOML value and raises Wrong for one that does not fit; nothing else is ever raised.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from mpsagent.mps import units
from mpsagent.policy import values
from mpsagent.policy.origins import printable

YEAR = 365 * 86400.0
MOST_MEMORY = 100 << 40
LEAST_SIZE = 16 << 20
SHOWN = 40
NEVER = "never"
OLD_WORDS: tuple[tuple[object, str], ...] = (
    ("together", "one-server"), ("apart", "per-user"), ("own", "user"), ("own", "by-directory"), ("shared", "all"),
    ("leave", "unchanged"), ("quit", "restart-mps"), ("memory", "terminate-memory"), (False, "report"),
    (True, "enforce"),
)  # fmt: skip
"""Values from before version 1.0, each with the new word. They are mistakes unless the key still has them."""
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)\s*%", re.ASCII)
_ORDINAL = re.compile(r"0|[1-9]\d{0,2}", re.ASCII)
_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z][0-9A-Za-z./-]{0,95}", re.ASCII)
_SIZE_WITHOUT_UNIT = re.compile(r"\s*\d{1,30}(?:\.\d{1,30})?\s*", re.ASCII)


class Fault(NamedTuple):
    """``key``: the part below the value's own key that is wrong (a device, an entry), or empty."""

    key: str
    problem: str
    hint: str


class Wrong(ValueError):
    """A value that does not fit, with every reason."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__("; ".join(fault.problem for fault in faults))
        self.faults = faults


def wrong(problem: str, hint: str, key: str = "") -> Wrong:
    return Wrong(Fault(key, problem, hint))


def shown(value: object) -> str:
    """A value as an error may show it: short, on one line, without control characters."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        text = f'"{value[: SHOWN + 1]}"'
    elif isinstance(value, int):
        # A number of thousands of digits is not worth printing (and Python refuses to).
        text = str(value) if abs(value) < 10**18 else "a number of more than 18 digits"
    elif isinstance(value, float):
        text = str(value)
    elif isinstance(value, dict):
        text = "a table"
    elif isinstance(value, list):
        text = "a list"
    else:
        text = str(value)[: SHOWN + 1]
    text = printable(text)
    return text if len(text) <= SHOWN + 2 else text[: SHOWN - 1] + "…" + ('"' if text[0] == '"' else "")


def number(value: object, low: float, high: float, hint: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(f"{shown(value)} is not a number", hint)
    if isinstance(value, float) and not math.isfinite(value):
        raise wrong(f"{shown(value)} is not a usable number", hint)
    if value > high:
        raise wrong(f"{shown(value)} is more than {high:g}", hint)
    if value < low:
        raise wrong(f"{shown(value)} is less than {low:g}", hint)
    return float(value)


def whole(low: int, high: int) -> Callable[[object], int]:
    hint = f"write a whole number from {low} to {high}"

    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong(f"{shown(value)} is not a whole number", hint)
        return int(number(value, low, high, hint))

    return parse


def flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise wrong(f"{shown(value)} is neither true nor false", "write true or false, without quotes")
    return value


def new_word(value: object, words: Collection[str]) -> str | None:
    """Return the word, one of ``words``, that replaces a value from before version 1.0."""
    return next((new for old, new in OLD_WORDS if old == value and new in words), None)


def choice(*words: str) -> Callable[[object], str]:
    """Return a parser for one of some words."""
    hint = "write " + " or ".join(f'"{word}"' for word in words)

    def parse(value: object) -> str:
        if isinstance(value, str) and value in words:
            return value
        if (renamed := new_word(value, words)) is not None:
            raise wrong(f"{shown(value)} is not possible here", f'it is called "{renamed}" now')
        near = units.nearest(value[:SHOWN], list(words)) if isinstance(value, str) else None
        raise wrong(f"{shown(value)} is not possible here", f'did you mean "{near}"?' if near else hint)

    return parse


def duration(low: float, high: float, *, never: bool = False) -> Callable[[object], float | None]:
    """Seconds from a text such as ``"10m"``; with ``never``, None for the word "never"."""
    hint = 'write a duration like "30s", "10m" or "1h30m"' + (f', or "{NEVER}"' if never else "")

    def parse(value: object) -> float | None:
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise wrong(f"{shown(value)} has no unit", hint)
        if not isinstance(value, str):
            raise wrong(f"{shown(value)} is not a duration", hint)
        if never and value == NEVER:
            return None
        if len(value) > SHOWN:
            raise wrong(f"{shown(value)} is longer than {SHOWN} characters", hint)
        try:
            seconds = units.parse_duration(value)
        except ValueError:
            raise wrong(f"{shown(value)} is not a duration", hint) from None
        if seconds > high:
            raise wrong(f"{shown(value)} is more than {span(high)}", hint)
        if seconds < low:
            raise wrong(f"{shown(value)} is less than {span(low)}", hint)
        return seconds

    return parse


def span(seconds: float) -> str:
    """A bound on a duration as one writes it in a policy."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m"), (1, "s")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds * 1000:g}ms"


THREADS_HINT = 'write a percentage like "25%", a number of multiprocessors like 26, { clients = 4 } or { weight = 3 }'
TOTAL_HINT = 'write a percentage like "50%", or a number of multiprocessors like 52'


def threads(value: object) -> values.Threads:
    if isinstance(value, str):
        part = _PERCENT.fullmatch(value.strip())
        if part is None:
            raise wrong(f"{shown(value)} is not a percentage", THREADS_HINT)
        return values.Percent(_percent(float(part[1]), value, "the multiprocessors"))
    if isinstance(value, float):
        raise wrong(f"{shown(value)} has no percent sign", f'write "{100 * value if 0 < value <= 1 else value:g}%"')
    if not isinstance(value, dict):
        return values.Multiprocessors(_multiprocessors(value))
    kinds = [kind for kind in ("clients", "weight") if kind in value]
    allowed = {"clients": ["clients", "rule"]}.get(kinds[0], kinds) if kinds else ["clients", "weight"]
    faults = [Fault(key, *_unknown(key)) for key in value if key not in (*kinds, *allowed)]
    if not kinds and not faults:
        faults = [Fault("", "says nothing", THREADS_HINT)]
    if len(kinds) > 1:
        faults.append(Fault("", f"has {' and '.join(kinds)}", "keep one of them"))
    read: dict[str, Any] = {}
    for key, parse in _PARTS.items():
        if key in kinds or (key == "rule" and key in value and "clients" in kinds):
            try:
                read[key] = parse(value[key])
            except Wrong as error:
                faults += [fault._replace(key=key) for fault in error.faults]
    if faults:
        raise Wrong(*faults)
    return values.Weight(**read) if kinds == ["weight"] else values.Clients(read["clients"], read.get("rule", "even"))


def total_threads(value: object) -> values.TotalThreads:
    found = threads(value)
    if isinstance(found, values.Clients | values.Weight):
        raise wrong(f"{shown(value)} is not a total", TOTAL_HINT)
    return found


_at_least_two = whole(2, 100_000)


def _multiprocessors(value: object) -> int:
    """Return a number of multiprocessors. MPS gives a client no less than 2."""
    try:
        return _at_least_two(value)
    except Wrong:
        raise wrong(f"{shown(value)} is not a number of multiprocessors", THREADS_HINT) from None


def _weight(value: object) -> float:
    return number(value, 0.001, 1_000_000, "write a number from 0.001 to 1000000")


_PARTS: dict[str, Callable[[object], Any]] = {
    "clients": whole(1, 1000), "weight": _weight, "rule": choice("even", "double"),
}  # fmt: skip


def _unknown(key: str) -> tuple[str, str]:
    near = units.nearest(key[:SHOWN], ["clients", "rule", "weight"])
    return (
        ("not possible here", "remove it")
        if key == near
        else ("unknown key", f'did you mean "{near}"?' if near else THREADS_HINT)
    )


MEMORY_HINT = 'write a size like "20G" or "512M", or a part of the device like "25%"'


def amount(value: object) -> values.Memory:
    if not isinstance(value, str):
        lacks = "has no unit" if isinstance(value, int | float) and not isinstance(value, bool) else "is not a size"
        raise wrong(f"{shown(value)} {lacks}", MEMORY_HINT)
    part = _PERCENT.fullmatch(value.strip())
    if part is not None:
        return values.Percent(_percent(float(part[1]), value, "the device"))
    if _SIZE_WITHOUT_UNIT.fullmatch(value) and value.strip(" 0."):
        raise wrong(f"{shown(value)} has no unit", MEMORY_HINT)
    if len(value) > SHOWN:
        raise wrong(f"{shown(value)} is longer than {SHOWN} characters", MEMORY_HINT)
    try:
        size = units.parse_bytes(value)
    except ValueError:
        raise wrong(f"{shown(value)} is not a size", MEMORY_HINT) from None
    if size == 0:
        raise wrong(f"{shown(value)} would take the limit away in MPS", 'write "100%" for no limit, or at least "1M"')
    if size < units.MIB:
        raise wrong(f"{shown(value)} is less than 1M", "MPS counts in whole MiB: write at least 1M")
    if size > MOST_MEMORY:
        raise wrong(f"{shown(value)} is more than 100T", MEMORY_HINT)
    return size


def size(value: object) -> int:
    """Bytes of a file."""
    found = amount(value)
    if not isinstance(found, int) or found < LEAST_SIZE:
        raise wrong(f"{shown(value)} is not a size of at least 16M", 'write "512M" or "2G"')
    return found


def _percent(percent: float, value: object, whole: str) -> float:
    hint = f"write a part of {whole} from 0.1% to 100%"
    if percent > 100:
        raise wrong(f"{shown(value)} is more than 100%", hint)
    if percent < values.LEAST_PERCENT:
        raise wrong(f"{shown(value)} is less than 0.1%", hint)
    return percent


def memory(value: object) -> dict[str, values.Memory]:
    """By device ordinal or UUID; the key ALL_DEVICES when one value was written for every device."""
    if not isinstance(value, dict):
        return {values.ALL_DEVICES: amount(value)}
    if not value:
        raise wrong("says nothing", MEMORY_HINT + ', or { 0 = "20G" } by device')
    table: dict[str, values.Memory] = {}
    faults = []
    for key, one in value.items():
        if not _ORDINAL.fullmatch(key) and not _UUID.fullmatch(key):
            faults.append(
                Fault(key, "is not a device", 'write its number as MPS counts (0, 1, …) or its UUID ("GPU-…")')
            )
        try:
            table[key] = amount(one)
        except Wrong as error:
            faults += [fault._replace(key=key) for fault in error.faults]
    if faults:
        raise Wrong(*faults)
    return table


EACH = "each"
"""In the place of a list of GPUs: an instance for each of them."""


def device_list(value: object) -> tuple[str, ...]:
    hint = 'write the UUIDs that nvidia-smi -L prints: ["GPU-…"]'
    if not isinstance(value, list):
        raise wrong(f"{shown(value)} is not a list", hint)
    if value == [EACH]:
        return (EACH,)
    if len(value) > 64:
        raise wrong(f"{len(value)} devices are more than 64", hint)
    faults = []
    for place, one in enumerate(value):
        if not isinstance(one, str) or not _UUID.fullmatch(one):
            faults.append(Fault(str(place), f"{shown(one)} is not the UUID of a GPU", hint))
        elif one in value[:place]:
            faults.append(Fault(str(place), f"{shown(one)} is there twice", "remove one of them"))
    if faults:
        raise Wrong(*faults)
    return tuple(value)


def path(longest: int) -> Callable[[object], str]:
    def parse(value: object) -> str:
        hint = "write an absolute path"
        if not isinstance(value, str) or not value.startswith("/"):
            raise wrong(f"{shown(value)} is not an absolute path", hint)
        if not value.isprintable() or ".." in value.split("/"):
            raise wrong(f'{shown(value)} has control characters or ".."', hint)
        if len(value.encode("utf-8", "replace")) > longest:
            raise wrong(f"{shown(value)} is longer than {longest} bytes", "choose a shorter path")
        return "/" + "/".join(part for part in value.split("/") if part not in ("", "."))

    return parse


SHARED = frozenset({
    "/", "/boot", "/dev", "/dev/shm", "/etc", "/home", "/media", "/mnt", "/opt", "/proc", "/root", "/run", "/run/lock",
    "/run/mpsagent", "/run/mpsagent/instances", "/srv", "/sys", "/tmp", "/usr", "/usr/local", "/var", "/var/cache",
    "/var/lib", "/var/lib/mpsagent", "/var/log", "/var/run", "/var/spool", "/var/tmp",
})  # fmt: skip
"""Directories that are not MPS's alone: their modes are not to be changed, nor files of theirs removed."""


def directory(longest: int) -> Callable[[object], str]:
    def parse(value: object) -> str:
        text = path(longest)(value)
        if text in SHARED:
            raise wrong(f"{text} is not a directory of its own", f'write one below it: "{text.rstrip("/")}/nvidia-mps"')
        if text.startswith(("/run/mpsagent/instances/", "/var/run/mpsagent/instances/", "/proc/", "/sys/")):
            raise wrong(f"{text} is not a directory of its own", "write another place, like /run/nvidia-mps")
        return text

    return parse


def program(value: object) -> str:
    """An absolute path, or a bare name that is looked up on PATH."""
    if isinstance(value, str) and re.fullmatch(r"[0-9A-Za-z_.+-]{1,255}", value, re.ASCII) and value not in (".", ".."):
        return value
    try:
        return path(1024)(value)
    except Wrong:
        raise wrong(
            f"{shown(value)} is not a program", "write its absolute path, or its bare name to look it up on PATH"
        ) from None


def name(value: object) -> str:
    """The name of a user or a group."""
    hint = "write it as `getent` prints it"
    if not isinstance(value, str) or not value:
        raise wrong(f"{shown(value)} is not a name", hint)
    if not value.isprintable() or value != value.strip() or ":" in value or "/" in value:
        raise wrong(f"{shown(value)} is not a name", hint)
    if len(value) > 256:
        raise wrong(f"{shown(value)} is longer than 256 characters", hint)
    return value


def instance(value: object) -> str:
    """The name of an instance: of a unit and a directory."""
    text = name(value)
    if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", text) and text not in (".", ".."):
        return text
    raise wrong(f"{shown(text)} cannot be part of a unit's name", "write at most 64 letters, digits, _, . and -")


def cgroup(value: object) -> str:
    """A cgroup's path from the root on, or the name of a unit or slice; both may have * and ?."""
    hint = 'write a path like "/slurm/*", or a unit or slice like "jobs.slice"'
    if not isinstance(value, str) or not 0 < len(value) <= 512 or not value.isprintable():
        raise wrong(f"{shown(value)} is no cgroup", hint)
    if ("/" in value) != value.startswith("/") or value.endswith("/") or "//" in value or "[" in value:
        raise wrong(f"{shown(value)} is no cgroup", hint)
    return value


def names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise wrong(f"{shown(value)} is not a list", 'write names as `getent` prints them: ["alice", "bob"]')
    if len(value) > 1000:
        raise wrong(f"{len(value)} names are more than 1000", "name a group instead")
    return tuple(dict.fromkeys(map(name, value)))


def user(value: object) -> str:
    """A user's name, or a uid in decimal."""
    text = name(value)
    if text.isascii() and text.isdigit() and (int(text[:11]) >= 2**32 - 1 or (text[0] == "0" and text != "0")):
        raise wrong(f"{shown(text)} is not a uid", "write a uid from 0 to 4294967294, without leading zeros")
    return text
