"""Lines of other drivers than that of the first recordings: what they mean, and that none is missed."""

from __future__ import annotations

import re

import pytest

from mpsagent.mps import events as ev
from mpsagent.mps.loglines import LogParser
from tests import recordings

_CUT_OFF = "NEW CLIENT 4267 from user 1000"
"""The one line of recording 09 that its source does not give whole."""


def parse(*lines: str, source: str = "merged") -> list[ev.Line]:
    text = "".join(f"[2026-11-21 19:35:17.073 {line}\n" for line in lines)
    return LogParser(source).feed(text.encode())  # type: ignore[arg-type]


def groups() -> dict[str, str]:
    """Heading -> lines, of recording 09."""
    found: dict[str, str] = {}
    for block in re.split(r"(?m)^# ", recordings.path("09").read_text())[2:]:
        heading, _, lines = block.partition("\n")
        if lines.startswith("["):
            found[heading] = lines
    return found


@pytest.mark.parametrize("heading", groups())
def test_every_public_line_is_known(heading: str) -> None:
    unknown = [event.text for event in LogParser("merged").feed(groups()[heading].encode()) if event.what is ev.Unknown]
    # Answers stand among these lines without their question where the excerpt left it out.
    assert [line for line in unknown if line != _CUT_OFF] == []


def test_why_a_server_failed() -> None:
    (event,) = parse("Other  6555] Failed to start : no CUDA-capable device is detected")
    assert event == ev.ServerFailed(event.at, 6555, "no CUDA-capable device is detected")
    (event,) = parse("Other  6296] MPS server failed to start : no CUDA-capable device is detected")
    assert event == ev.ServerFailed(event.at, 6296, "no CUDA-capable device is detected")
    (event,) = parse("Server 29489] MPS server failed to start")
    assert event == ev.ServerFailed(event.at, 29489, "")
    (event,) = parse("Control 7000] Failed to start server using uid 1101. Resource temporarily unavailable")
    assert event == ev.ServerFailed(event.at, 7000, "Resource temporarily unavailable")


def test_the_daemon_gives_up() -> None:
    assert parse("Control 1] Removed Shm file at ")[0].text == ""
    assert parse("Control 1] Removed Shm file at /dev/shm/cuda.shm.0.52.1")[0].text == "/dev/shm/cuda.shm.0.52.1"
    assert parse("Control 1] Server encountered a fatal exception. Shutting down")[0].what is ev.Harmless


def test_threads_and_start_of_460() -> None:
    found = parse(
        "Other    17] Start", "Other    17] activeThreadsPercentage set to 33.000000", "Other 17] MPS Server is started"
    )
    assert [event.what for event in found] == [ev.ServerStartup, ev.ThreadsSet, ev.ServerStarted]
    assert found[1].percent == 33.0


def test_a_worker_in_reset_has_left() -> None:
    line = "Server 9] Client {PID: 3131, Context ID: 1} exiting. Worker is in reset. Number of active client contexts is 3."  # noqa: E501
    (event,) = parse(line)
    assert event == ev.ContextExiting(event.at, 9, 3131, 1)


def test_heads_of_other_writers() -> None:
    (event,) = parse("Legacy Server  812] Server has started", source="server")
    assert event == ev.ServerStarted(event.at, 812)
    (event,) = parse("Client  3675] Server has started", source="server")
    assert event == ev.Harmless(event.at, "Server has started"), "a client says nothing about the server"
    assert parse("Client  3675] NEW SERVER 1: Ready", source="control")[0].what is ev.Unknown


@pytest.mark.parametrize(
    "line",
    [
        "NEW SERVER 6471: Ignoring old connection request",
        "NEW SERVER 6471: Ignoring connection from user",
        "NEW DEBUGGEE 6471 from user 0",
        "Unknown type of connection",
        "Unable to accept priviliged connection from other user",
        "Warning: Failed writing log files to directory [/var/log/x]. No logs will be available.",
        "Failed to create control pid file /run/x/nvidia-cuda-mps-control.pid",
    ],
)
def test_lines_of_the_daemon_that_change_nothing(line: str) -> None:
    assert parse(f"Control 1] {line}", source="control")[0].what is ev.Harmless


def test_a_forged_answer_is_no_failure() -> None:
    """``ps`` prints the command names of users' processes."""
    found = parse(
        "Control 1] Cmd:ps",
        "Control 1] Failed to start server using uid 0. x",
        "Control 1] Removed Shm file at /x",
        source="control",
    )
    assert [event.what for event in found] == [ev.CommandRead, ev.CommandAnswer, ev.CommandAnswer]
