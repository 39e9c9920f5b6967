"""What to say to the control daemon and what its answers mean. Texts only; nothing here sends anything.

Exit status 0 says nothing: refusals are text on stdout, and some wrong values are taken or dropped without a word
(recording 01, S2). So every builder that sets something asks for it again in the same batch, and ``check_*`` compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from mpsagent.mps.limits import Limits
from mpsagent.mps.units import limit_bytes, limit_text, percent_text

PROOF = "get_default_active_thread_percentage"
"""Always answered. Behind every batch, because a front-end that was turned away (another one is connected) may end with
exit status 0 and print nothing (scenario X27), which is also the answer of a daemon without servers."""
_PROVEN = re.compile(r"(?s:(.*\n)?)\d{1,3}(?:\.\d+)?\s*", re.ASCII)


def proven(out: str) -> str | None:
    """The answers without that of ``PROOF``; None when it is missing."""
    found = _PROVEN.fullmatch(out)
    return None if found is None else found[1] or ""


# --- questions -------------------------------------------------------------------------------------------------------


def _devices(limits: Limits, devices: Iterable[int]) -> list[int]:
    return sorted({*limits.memory, *devices})


def _memory(limits: Limits, device: int) -> str:
    """``0G`` takes a limit away (recording 01, S2)."""
    size = limits.memory.get(device, 0)
    return limit_text(size) if size > 0 else "0G"


def _threads(limits: Limits) -> str:
    """0.0 is refused; 0.1 is the smallest percentage that one decimal can say."""
    return percent_text(min(100.0, max(0.1, limits.threads)))


def set_defaults(limits: Limits, devices: Iterable[int] = ()) -> list[str]:
    """One batch: the limits of the next server for ``devices`` and every device in ``limits``, and their read-back.

    A device without a limit answers its ``get`` with nothing at all, so a ``get`` of the percentage stands before
    each of them: it always answers and says whose line is missing.
    """
    wanted = _devices(limits, devices)
    commands = [f"set_default_active_thread_percentage {_threads(limits)}"]
    commands += [f"set_default_device_pinned_mem_limit {device} {_memory(limits, device)}" for device in wanted]
    for device in wanted:
        commands += ["get_default_active_thread_percentage", f"get_default_device_pinned_mem_limit {device}"]
    return commands


def set_server_limits(server: int, limits: Limits, devices: Iterable[int] = ()) -> list[str]:
    """The same for a running server; it reaches contexts that are created later."""
    wanted = _devices(limits, devices)
    commands = [f"set_active_thread_percentage {server} {_threads(limits)}"]
    commands += [f"set_device_pinned_mem_limit {server} {device} {_memory(limits, device)}" for device in wanted]
    for device in wanted:
        commands += [f"get_active_thread_percentage {server}", f"get_device_pinned_mem_limit {server} {device}"]
    return commands


def server_limits(server: int, devices: Iterable[int]) -> list[str]:
    """What a running server's next contexts get."""
    commands = [f"get_active_thread_percentage {server}"]
    for device in sorted(devices):
        commands += [f"get_active_thread_percentage {server}", f"get_device_pinned_mem_limit {server} {device}"]
    return commands


def start_server(uid: int) -> list[str]:
    return [f"start_server -uid {uid}"]


def shutdown_server(pid: int, force: bool = False) -> list[str]:
    return [f"shutdown_server {pid} -f" if force else f"shutdown_server {pid}"]


def terminate_client(server: int, pid: int) -> list[str]:
    return [f"terminate_client {server} {pid}"]


def quit_command(timeout: int | None = None) -> list[str]:
    """``timeout`` in whole seconds: after it the daemon ends its servers by force."""
    return ["quit"] if timeout is None else [f"quit -t {timeout}"]


def server_list() -> list[str]:
    return ["get_server_list"]


def server_status(pid: int) -> list[str]:
    return [f"get_server_status {pid}"]


def client_list(pid: int) -> list[str]:
    return [f"get_client_list {pid}"]


def clients() -> list[str]:
    return ["ps"]


# --- refusals --------------------------------------------------------------------------------------------------------


class RefusalKind(StrEnum):
    """Why the control daemon did not do it."""

    NO_SUCH_SERVER = "no such server"
    NO_SERVER = "no server"
    UNKNOWN_COMMAND = "unknown command"
    NOT_PRIVILEGED = "not privileged"
    UID_MISSING = "user id missing"
    BAD_PERCENTAGE = "bad percentage"
    NOT_TERMINATED = "client not terminated"


class Refusal(NamedTuple):
    """A refusal in an answer; ``text`` is MPS's own line, ``server`` the pid that it names."""

    kind: RefusalKind
    text: str
    server: int | None = None


_REFUSALS = (
    (RefusalKind.NO_SUCH_SERVER, re.compile(r"Server (\d{1,10}) not found!?", re.ASCII)),
    (RefusalKind.NO_SERVER, re.compile(r"Server not found!?")),
    (RefusalKind.UNKNOWN_COMMAND, re.compile(r'Unknown command ".*"')),
    (RefusalKind.NOT_PRIVILEGED, re.compile(r"Insufficient privileges for UID \d{1,10}\..*", re.ASCII)),
    (RefusalKind.NOT_PRIVILEGED, re.compile(r"Not enough privilege to execute .* command")),
    (RefusalKind.UID_MISSING, re.compile(r"A user id \(UID\) is required to start a new server")),
    (RefusalKind.BAD_PERCENTAGE, re.compile(r"Invalid percentage, expected between .*")),
)


def refusal(out: str) -> Refusal | None:
    """The first refusal in an answer, or None."""
    for line in out.splitlines():
        for kind, pattern in _REFUSALS:
            match = pattern.fullmatch(line.strip())
            if match is not None:
                server = int(match[1]) if kind is RefusalKind.NO_SUCH_SERVER else None
                return Refusal(kind, line.strip()[:200], server)
    return None


# --- answers ---------------------------------------------------------------------------------------------------------


def _numbers(out: str) -> tuple[int, ...]:
    return tuple(int(line) for line in out.split() if re.fullmatch(r"\d{1,10}", line, re.ASCII))


def parse_server_list(out: str) -> tuple[int, ...]:
    """pids of the servers; empty when there is none."""
    return _numbers(out)


def parse_client_list(out: str) -> tuple[int, ...]:
    """pids of a server's clients. A server that has gone has none; see :func:`refusal`."""
    return () if refusal(out) else _numbers(out)


def parse_status(out: str) -> str | None:
    """``ACTIVE``, ``FAULT``, ``INITIALIZING`` … as MPS says it, or None."""
    word = out.strip()
    return word if re.fullmatch(r"[A-Z][A-Z_]{2,30}", word, re.ASCII) else None


def parse_terminate(out: str) -> Refusal | None:
    """None when the answer is ``0``: the client's GPU work has been ended. Otherwise why not (recording 01, S2)."""
    said = refusal(out)
    if said is not None:
        return said
    lines = out.split()
    if lines and lines[-1] == "0":
        return None
    return Refusal(RefusalKind.NOT_TERMINATED, " ".join(lines)[:200] or "no answer")


class ClientRow(NamedTuple):
    """A row of ``ps``: one CUDA context of a client. ``device`` is a shortened UUID, ``namespace`` the inode of its pid
    namespace, ``command`` whatever the process calls itself."""

    pid: int
    context: int
    server: int
    device: str
    namespace: int
    command: str


_ROW = re.compile(r"(\d{1,10})\s+(\d{1,10})\s+(\d{1,10})\s+([\w.-]{1,80})\s+(\d{1,20})\s+(\S.*?)?\s*", re.ASCII)


def parse_ps(out: str) -> tuple[ClientRow, ...]:
    """The rows of ``ps``; its heading, refusals and anything else are left out."""
    rows = []
    for line in out.splitlines():
        match = _ROW.fullmatch(line)
        if match is not None:
            pid, context, server, device, namespace, command = match.groups()
            rows.append(ClientRow(int(pid), int(context), int(server), device, int(namespace), command or ""))
    return tuple(rows)


def parse_limits(out: str, devices: Iterable[int]) -> Limits | None:
    """The answer to :func:`server_limits`; None when it is not one."""
    percent, memory, unclear = _read_back(out, sorted(devices))
    if unclear is not None or not percent:
        return None
    return Limits(float(percent[0]), {device: limit_bytes(text) for device, text in memory.items()})


def check_defaults(limits: Limits, out: str, devices: Iterable[int] = ()) -> str | None:
    """None when the answer to :func:`set_defaults` confirms every limit, else a sentence that says what differs."""
    return _check(limits, out, _devices(limits, devices), "the default")


def check_server_limits(server: int, limits: Limits, out: str, devices: Iterable[int] = ()) -> str | None:
    """The same for :func:`set_server_limits`."""
    return _check(limits, out, _devices(limits, devices), f"server {server}'s")


def _check(limits: Limits, out: str, devices: list[int], whose: str) -> str | None:
    said = refusal(out)
    if said is not None:
        return f"MPS refused: {said.text}"
    percent, memory, unclear = _read_back(out, devices)
    if unclear is not None:
        return unclear
    wanted = _threads(limits)
    if any(value != wanted for value in percent):
        wrong = next(value for value in percent if value != wanted)
        return f"{whose} active thread percentage reads {wrong}, not {wanted}"
    for device in devices:
        text, size = memory.get(device), limits.memory.get(device, 0)
        expected = limit_bytes(limit_text(size)) if size > 0 else 0
        if (limit_bytes(text) if text else 0) != expected:
            asked = limit_text(size) if size > 0 else "none"
            return f"{whose} memory limit of device {device} reads {text or 'none'}, not {asked}"
    return None


def _read_back(out: str, devices: list[int]) -> tuple[list[str], Mapping[int, str], str | None]:
    """The percentages, the memory limits by device, and what is wrong with the answer's shape."""
    percent: list[str] = []
    memory: dict[int, str] = {}
    for line in out.split():
        if re.fullmatch(r"\d{1,3}\.\d", line, re.ASCII):
            percent.append(line)
            continue
        # Answers so far: one percentage of the set, and one before each device's memory limit.
        index = len(percent) - 2
        if (
            not re.fullmatch(r"\d{1,9}[MG]", line, re.ASCII)
            or not 0 <= index < len(devices)
            or devices[index] in memory
        ):
            return percent, memory, f'MPS answered "{line[:60]}" where a limit was expected'
        memory[devices[index]] = line
    if len(percent) != 1 + len(devices):
        return percent, memory, f"MPS answered {len(percent)} of {1 + len(devices)} questions about the percentage"
    return percent, memory, None
