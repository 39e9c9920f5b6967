"""What to say to the control daemon and what its answers mean. Texts only; nothing here sends anything.

Exit status 0 says nothing: refusals are text on stdout (recording 01, S2). Limits are set and read back by the gate
(:mod:`mpsagent.gate.limits`).
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

PROOF = "get_default_active_thread_percentage"
"""Always answered. Behind every batch, because a front-end that was turned away (another one is connected) may end with
exit status 0 and print nothing (scenario X27), which is also the answer of a daemon without servers."""
_PROVEN = re.compile(r"(?s:(.*\n)?)\d{1,3}(?:\.\d+)?\s*", re.ASCII)


def proven(out: str) -> str | None:
    """The answers without that of ``PROOF``; None when it is missing."""
    found = _PROVEN.fullmatch(out)
    return None if found is None else found[1] or ""


# --- questions -------------------------------------------------------------------------------------------------------


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
