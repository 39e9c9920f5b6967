"""How limits are told to the daemon in a front-end session, and when its answers confirm them.

One session lists the servers, asks those that ran when last asked whether they are in FAULT, sets the defaults and
these servers' limits, and asks for everything again. An answer has no mark at its end and a device without limit
answers nothing, so a question that is always answered stands before each of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from mpsagent.mps.limits import Limits
from mpsagent.mps.units import GIB, MIB, limit_text, percent_text

MOST_SERVERS = 8
"""More servers than these at one daemon are not believed."""

_PERCENT = re.compile(r"\d{1,3}\.\d", re.ASCII)
_SIZE = re.compile(r"\d{1,9}[MG]", re.ASCII)
_PID = re.compile(r"\d{1,10}", re.ASCII)
_NO_MEMORY = re.compile(r'Unknown command "[gs]et_(default_)?device_pinned_mem_limit"')
"""Driver 470's MPS: it has no memory limits, so none are in force."""
_NO_PRIORITY = re.compile(r'Unknown command "[gs]et_default_client_priority"')
"""The same of client priorities."""
_STATUS = re.compile(r'ACTIVE|FAULT|Server \d{1,10} not found|Unknown command "get_server_status"')
"""What a server's status may be: one that has just ended, and drivers 470 and 535, do not have one."""


def threads_text(limits: Limits) -> str:
    return percent_text(limits.settable().threads)


def memory_text(limits: Limits, device: int) -> str:
    """``0G`` takes a limit away (recording 01, S2)."""
    size = limits.memory.get(device, 0)
    return limit_text(size) if size > 0 else "0G"


def printed(limits: Limits, device: int) -> str | None:
    """How MPS prints this limit: 1 GiB and more in whole G, rounded down (recording 08, G14); None: no line at all."""
    size = limits.memory.get(device, 0)
    if size <= 0:
        return None
    mebibytes = max(1, size // MIB)
    return f"{mebibytes * MIB // GIB}G" if mebibytes * MIB >= GIB else f"{mebibytes}M"


def _ordinals(limits: Limits, devices: Iterable[int]) -> list[int]:
    return sorted({*limits.memory, *devices})


def commands(limits: Limits, devices: Iterable[int], servers: Collection[int], *, priority: bool = False) -> list[str]:
    """The session: who serves, the status of ``servers``, the defaults, the limits of ``servers``, and every value
    asked for again. ``priority``: the client's too. It counts from the moment at which the client connects to its
    server, and the default holds for one that runs as well (docs/measured.md)."""
    ordinals = _ordinals(limits, devices)
    percent = threads_text(limits)
    batch = ["get_server_list", *(f"get_server_status {server}" for server in sorted(servers))]
    batch += [f"set_default_active_thread_percentage {percent}"]
    batch += [f"set_default_device_pinned_mem_limit {device} {memory_text(limits, device)}" for device in ordinals]
    for device in ordinals:
        batch += ["get_default_active_thread_percentage", f"get_default_device_pinned_mem_limit {device}"]
    batch += ["get_default_active_thread_percentage"]
    for server in sorted(servers):
        batch += [f"set_active_thread_percentage {server} {percent}"]
        batch += [f"set_device_pinned_mem_limit {server} {device} {memory_text(limits, device)}" for device in ordinals]
        for device in ordinals:
            batch += [f"get_active_thread_percentage {server}", f"get_device_pinned_mem_limit {server} {device}"]
        batch += [f"get_active_thread_percentage {server}"]
    if priority:
        batch += [f"set_default_client_priority {int(limits.below_normal)}", "get_default_client_priority"]
    return batch


def question(servers: Collection[int]) -> list[str]:
    """The session that each of these servers has to answer, which none does that waits for a client; or who serves."""
    return [f"get_active_thread_percentage {server}" for server in sorted(servers)] or ["get_server_list"]


def servers_in(answers: Sequence[str]) -> tuple[int, ...]:
    """Who serves, by the answers to the second question; none by those to the first."""
    return tuple(sorted({int(line) for answer in answers for line in answer.splitlines() if _PID.fullmatch(line)}))


@dataclass(frozen=True, slots=True)
class Verdict:
    """``servers``: who serves now. ``why``: None when every value is confirmed, else what is not. ``again``: the
    servers were others than expected, or one of them does not say what it should: it may be about to end, and the
    session has to be repeated. ``never``: this driver's MPS cannot do it at all. ``fault``: a server takes no one."""

    servers: tuple[int, ...]
    why: str | None = None
    again: bool = False
    never: bool = False
    fault: bool = False


def judge(
    limits: Limits, devices: Iterable[int], servers: Collection[int], answers: Sequence[str], *, priority: bool = False
) -> Verdict:
    """What the answers to :func:`commands` say."""
    ordinals = _ordinals(limits, devices)
    said = [line.strip() for answer in answers for line in answer.splitlines() if line.strip()]
    every = [line for line in said if not _NO_PRIORITY.fullmatch(line)]
    lines = [line for line in every if not _NO_MEMORY.fullmatch(line)]
    no_memory = len(lines) < len(every)
    none = "none, which this driver's MPS does not have" if no_memory else "none"
    found: list[int] = []
    while lines and _PID.fullmatch(lines[0]):
        found.append(int(lines.pop(0)))
    present = tuple(sorted(set(found)))
    if len(present) > MOST_SERVERS:
        return Verdict((), f"MPS names {len(present)} servers")
    fault = False
    for _ in servers:
        if lines and _STATUS.fullmatch(lines[0]):
            fault |= lines.pop(0) == "FAULT"
    if fault:
        return Verdict(present, "its server is in FAULT and takes no clients", fault=True)
    rest, why = _compare(limits, ordinals, lines, "the default", none)
    if why is not None:
        return Verdict(present, why, never=no_memory and any(limits.memory.values()))
    if present != tuple(sorted(servers)):
        return Verdict(present, again=True)
    for server in present:
        rest, why = _compare(limits, ordinals, rest, f"server {server}'s", none)
        if why is not None:  # or the server is on its way out and says nothing, or 0.0
            return Verdict(present, why, again=True)
    if priority and len(every) == len(said):
        got = rest.pop(0) if rest else "nothing"
        if got != str(int(limits.below_normal)):
            return Verdict(present, f"the default client priority reads {got[:80]}, not {int(limits.below_normal)}")
    elif priority and limits.below_normal:
        why = "the policy gives a lower client priority, which this driver's MPS does not have"
        return Verdict(present, why, never=True)
    if rest:
        return Verdict(present, f'MPS answered "{rest[0][:80]}" where nothing more was expected')
    return Verdict(present)


def _compare(
    limits: Limits, ordinals: list[int], lines: list[str], whose: str, none: str
) -> tuple[list[str], str | None]:
    """Takes the answers of one target off ``lines``; what is left, and what is wrong with them. ``none``: how a memory
    limit that is not there is told."""
    left = list(lines)
    wanted = threads_text(limits)

    def percentage() -> str | None:
        line = left.pop(0) if left else "nothing"
        if not _PERCENT.fullmatch(line):
            return f'MPS answered "{line[:120]}" where {whose} active thread percentage was expected'
        if line != wanted:
            return f"{whose} active thread percentage reads {line}, not {wanted}"
        return None

    if (why := percentage()) is not None:  # the answer of the set
        return left, why
    for device in ordinals:
        if (why := percentage()) is not None:
            return left, why
        said = left.pop(0) if left and _SIZE.fullmatch(left[0]) else None
        if said != printed(limits, device):
            return (
                left,
                f"{whose} memory limit of device {device} reads {said or none}, not {printed(limits, device)}",
            )
    return left, percentage()
