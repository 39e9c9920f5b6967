"""What to say to the control daemon and what its answers mean. Texts only; nothing here sends anything.

Exit status 0 says nothing: refusals are text on stdout (recording 01, S2). Limits are set and read back by the gate
(:mod:`mpsagent.gate.limits`).
"""

from __future__ import annotations

import re

PROOF = "get_default_active_thread_percentage"
"""Always answered. Behind every batch of NVIDIA's front-end: one that was turned away (another one is connected) may
end with exit status 0 and print nothing (scenario X27), which is also the answer of a daemon without servers."""
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


def quit_command(timeout: int) -> list[str]:
    """``timeout`` in whole seconds: after it the daemon ends its servers by force."""
    return [f"quit -t {timeout}"]


def server_list() -> list[str]:
    return ["get_server_list"]


def server_status(pid: int) -> list[str]:
    return [f"get_server_status {pid}"]


def client_list(pid: int) -> list[str]:
    return [f"get_client_list {pid}"]


# --- answers ---------------------------------------------------------------------------------------------------------

_REFUSAL = re.compile(
    r'Server (\d{1,10} )?not found!?|Unknown command ".*"|Insufficient privileges for UID \d{1,10}\..*|'
    r"Not enough privilege to execute .* command|A user id \(UID\) is required to start a new server|"
    r"Invalid percentage, expected between .*",
    re.ASCII,
)


NO_DAEMON_TEXT = "Cannot find MPS control daemon process"
BUSY_TEXT = "Cannot send command to MPS control daemon process"
"""What NVIDIA's front-end says on stderr."""


def refusal(out: str) -> str | None:
    """MPS's own line that says why the control daemon did not do it, or None."""
    return next((line.strip()[:200] for line in out.splitlines() if _REFUSAL.fullmatch(line.strip())), None)


def pids(out: str) -> tuple[int, ...]:
    """Of servers, or of a server's clients: each on a line of its own. There is none in a refusal."""
    return tuple(int(line) for line in map(str.strip, out.splitlines()) if re.fullmatch(r"\d{1,10}", line, re.ASCII))


def parse_status(out: str) -> str | None:
    """``ACTIVE``, ``FAULT``, ``INITIALIZING`` … as MPS says it, or None."""
    word = out.strip()
    return word if re.fullmatch(r"[A-Z][A-Z_]{2,30}", word, re.ASCII) else None


def not_terminated(out: str) -> str | None:
    """None when the answer is ``0``: the client's GPU work has been ended. Otherwise why not (recording 01, S2)."""
    lines = out.split()
    if not lines:
        return refusal(out) or "no answer"
    if lines[-1] == "0":
        return refusal(out)
    if refused := refusal(out):
        return refused
    if lines[-1] == "201":  # CUDA_ERROR_INVALID_CONTEXT
        return "MPS has no context of this client to end (CUDA error 201); no action needed"
    if re.fullmatch(r"\d{1,10}", lines[-1], re.ASCII):
        return f"MPS answered with CUDA error {lines[-1]}"
    return " ".join(lines)[:200]
