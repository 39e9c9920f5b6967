"""From the start of the agent to the first client that is served, and to READY."""

from __future__ import annotations

import socket
import statistics
import time
from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.place import ALICE, BOB, stage, timed
from demo.stage import Stage, until


def starting(quick: bool) -> list[Figure]:
    """With nothing there; beside gate and daemon, with a user who waits; the same with a long control.log."""
    size, rounds = (20_000_000, 1) if quick else (100_000_000, 2)
    cold = statistics.median(_cold() for _ in range(rounds))
    with stage() as node:
        node.start_agent()
        node.open()
        warm = statistics.median(_first(node) for _ in range(rounds))
        _fill(node, size)
        long = statistics.median(_first(node) for _ in range(rounds))
        copied = min(timed(["cp", str(node.logs / "control.log"), "/dev/null"]) for _ in range(3))
        clients = [node.client(ALICE, "sleep", "600") for _ in range(48)]
        for client in clients:
            client.saw("^sms")
        ready = min(_ready(node) for _ in range(rounds))
        seen = node.ask("/v1/status")["clients"]
    megabytes = size // 1_000_000
    return [
        Figure(f"start to first admission, nothing runs, median of {rounds}", f"{cold:.2f} s", "", None,
               "control daemon, gate and server are started as well"),
        Figure(f"start to first admission, gate and daemon run, a user waits, median of {rounds}", f"{warm:.2f} s", "",
               None, f"with nothing there: {cold:.2f} s"),
        Figure(f"… with {megabytes} MB of polled control.log", f"{long:.2f} s", "", None,
               f"without it: {warm:.2f} s, {long / warm:.1f} times; reading the log: {copied:.2f} s"),
        Figure(f"start to READY, 48 clients, {megabytes} MB of control.log, best of {rounds}", f"{ready:.2f} s",
               "under 1 s", ready < 1, f"clients found: {seen}; first admission without them: {warm:.2f} s"),
    ]  # fmt: skip


def _cold() -> float:
    """Seconds until a client that came as soon as there was a public socket has its context."""
    with stage() as node:
        began = time.time()
        node.start_agent(wait=False)
        until("the public socket", lambda: (node.pipe / "control").exists())
        client = node.client(BOB, "query")
        client.saw("^ctx CUDA_SUCCESS")
        return (client.served() or float("inf")) - began


def _first(node: Stage) -> float:
    """Bob waits, alice has left and the agent has been killed: seconds from the next agent's start until bob is served.
    The gate alone lets in who is admitted, and that was alice."""
    first = node.client(ALICE, "sleep", "600")
    first.saw("^ctx")
    second = node.client(BOB, "query")
    node.held(second)
    assert node.agent is not None
    node.agent.kill()
    node.agent.wait()
    first.process.kill()
    first.wait()
    time.sleep(0.3)
    if second.served() is not None:
        raise RuntimeError("bob was let in without an agent")
    began = time.time()
    node.start_agent(wait=False)
    second.saw("^ctx CUDA_SUCCESS")
    took = (second.served() or float("inf")) - began
    second.wait()
    node.open()
    return took


def _ready(node: Stage) -> float:
    """Seconds from starting the agent to its READY=1."""
    node.stop_agent()
    path = str(node.directory / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(path)
        notify.settimeout(60)
        began = time.perf_counter()
        node.start_agent(notify=path, wait=False)
        while b"READY=1" not in notify.recv(4096):
            pass
        took = time.perf_counter() - began
    Path(path).unlink()
    return took


def _fill(node: Stage, size: int) -> None:
    """Append what days of polling write, five lines a time."""
    head = f"[{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())}.000 Control {node.control_pid():5}] "
    poll = ("Accepting connection...", "NEW UI", "Cmd:get_server_list", "4242", "UI closed")
    block = "".join(f"{head}{line}\n" for line in poll * 1000).encode()
    with (node.logs / "control.log").open("ab") as log:
        for _ in range(size // len(block) + 1):
            log.write(block)
