"""Servers that cannot start (recordings 08, G3, and 09; driver 550 on a machine without a GPU)."""

from __future__ import annotations

import os
import re

from tests.sim import relay
from tests.sim.conftest import A, B, Mps, messages

ERROR = "no CUDA-capable device is detected"


def starts(mps: Mps) -> list[str]:
    return [
        {str(A): "A", str(B): "B"}.get(user, user) if user else "dropped"
        for user in re.findall(
            r"Starting new server \d+ for user (\d+)|Removed Shm file at $", mps.log("control.log"), re.M
        )
    ]


def test_six_tries_for_a_waiting_client(mps: Mps) -> None:
    """Then it is dropped, and its cuInit fails; a start request has one try; `quit` remembers it."""
    mps.start(MPSSIM_FAIL_START=ERROR)
    client = mps.client(A, "query")
    assert client.end() == 10
    assert "cuInit CUDA_ERROR_MPS_CONNECTION_FAILED" in client.text()
    log = messages(mps.log("control.log"))[3:]
    server = int(re.findall(r"Starting new server (\d+)", "\n".join(log))[-1])
    assert log[-5:] == [
        f"Starting new server {server} for user {A}",
        "Accepting connection...",
        "Server encountered a fatal exception. Shutting down",
        f"Server {server} exited with status 1",
        "Removed Shm file at ",
    ]
    assert starts(mps) == ["A"] * 6 + ["dropped"]
    assert mps.log("server.log").splitlines()[-1].endswith(f"Other {server:5d}] Failed to start : {ERROR}")
    assert messages(mps.log("server.log"))[-3:-1] == [
        "Initializing server process",
        f"Driver initialization failed with: {ERROR}",
    ]
    mps.ctl(f"start_server -uid {B}")
    mps.saw("control.log", f"for user {B}(?s:.*)Removed Shm")
    assert starts(mps)[-2:] == ["B", "dropped"]
    assert mps.run("quit") == (1, "", "")
    assert messages(mps.log("control.log"))[-1] == "Exit with status 1"


def test_two_users_fail_in_turn(mps: Mps) -> None:
    """As with driver 550: the user whose server was started at once has two tries first, then by turns, six each. The
    second user has said everything before the daemon hears who the first one is, so no server fails between them."""
    mps.start(MPSSIM_FAIL_START=ERROR)
    control = mps.pipe / "control"
    with relay.connect(control) as first, relay.connect(control) as second:
        for client, uid in ((second, B), (first, A)):
            relay.say(client, b"OUTBCRED\0", (os.getpid(), uid, uid))
            relay.say(client, b"\2\0\0\0")
        for client in (first, second):
            assert relay.packet(client)[0] == b"OUTBHELL\0"
            assert relay.packet(client)[0] == b""
    order = ["A", "A", "B", "A", "B", "A", "B", "A", "B", "A", "dropped", "B", "B", "dropped"]
    assert starts(mps) == order


def test_a_driver_that_comes_back(mps: Mps) -> None:
    """With @PATH servers fail as long as the file is there."""
    error = mps.directory / "error"
    error.write_text(ERROR + "\n")
    error.chmod(0o644)
    mps.start(MPSSIM_FAIL_START=f"@{error}")
    assert mps.client(A, "query").end() == 10
    error.unlink()
    assert mps.client(A, "query").end() == 0
