"""Every line that NVIDIA's programs of three drivers can write is known to the parser: read out of the programs."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from mpsagent.mps import events as ev
from mpsagent.mps.loglines import LogParser
from tests.nvidia.fetch import Driver

# A text of a log line begins like this in the programs; what begins like this and is none is named below.
_SERVER = re.compile(
    r"(Active Threads|Client[ s]|Command handle|Connecting to|Created named|Creating (server|worker)|Destroy server|"
    r"Device (%s|\(uuid|pinned)|Driver init|Failed to (accept|allocate shared|connect to control|create worker|"
    r"create/open|send cred|start|terminate client)|Forcefully|Initializing server|Internal error when|"
    r"MPS ([Ss]erver|is only)|Pre-Volta device|Receive command|Received new client|Reply command|"
    r"Server (Prio|enters|has|is h|was|will)|Status of client|Teardown in|The following (client|device)|"
    r"There is no active context|User did not send|%?s?Volta MPS|Waiting for current|Warning: File desc|Worker created)"
)
_NO_LOG_LINE = re.compile(
    r"Client requested %s which is not a valid GPU ID|MPS client failed|MPS server is not ready to accept|"
    r"Worker is in reset|.*(limits of|maximum number of devices)"
)
_CONTROL = re.compile(
    r"(Accepting conn|CUDA MPS log rec|Control will|Exit with|Failed to (create control pid|start server)|"
    r"Force shutting|NEW |Removed Shm|Server (%d (exited|has)|encountered)|Starting (control|new)|To connect CUDA|"
    r"Try shutting|UI closed|Unable to|Unknown type|User did not|Using log|Warning: Failed|quit command issued)"
)
_PARTS = {
    "start%s%s": "start : %s",
    "disconnected. %sNumber": "disconnected. Worker is in reset. Number",
    "backoff is %s": "backoff is enabled",
    "%sMPS Server: R": "Volta MPS Server: R",
}
"""What the programs put together."""
_VALUES = {"%s": "text", "%d": "7", "%ld": "7", "%lu": "7", "%u": "7", "%llx": "ff", "%.1f": "12.5", "%#x": "0x1f"}


@cache
def texts(program: Path, wanted: re.Pattern[str]) -> frozenset[str]:
    """Texts of a program that begin as wanted, with values in the place of their conversions."""
    return frozenset(_texts(program, wanted))


def _texts(program: Path, wanted: re.Pattern[str]) -> Iterator[str]:
    with program.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for match in re.finditer(rb"(?<=\0)[ -~]{5,200}(?=\n?\0)", data):
            text = match[0].decode("ascii")
            if wanted.match(text) and not _NO_LOG_LINE.match(text):
                for part, whole in _PARTS.items():
                    text = text.replace(part, whole)
                yield re.sub(r"%(?:\.1)?#?l{0,2}[sduxf]", lambda found: _VALUES[found[0]], text)


def unknown(source: str, head: str, lines: frozenset[str]) -> list[str]:
    found = []
    for line in sorted(lines):
        # One parser a line: an answer or a list of clients before it would explain anything.
        (event,) = LogParser(source).feed(f"[2026-11-21 19:35:17.073 {head}     9] {line}\n".encode())  # type: ignore[arg-type]
        if event.what is ev.Unknown:
            found.append(line)
    return found


def test_every_line_of_the_server(nvidia: Driver) -> None:
    lines = texts((nvidia.libraries / "libcuda.so.1").resolve(), _SERVER)
    assert len(lines) > 25, "the texts are not found any more"
    assert unknown("server", "Server", lines) == []


def test_every_line_of_the_control_daemon(nvidia: Driver) -> None:
    lines = texts(nvidia.control, _CONTROL)
    assert len(lines) > 15, "the texts are not found any more"
    assert unknown("control", "Control", lines) == []


@pytest.mark.parametrize("text", ["Server is on fire", "NEW CLIENT 1 from user 2: Hello"])
def test_a_line_that_is_none(text: str) -> None:
    assert unknown("control", "Control", frozenset({text})) == [text]
