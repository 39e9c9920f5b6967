"""How long one hand-over takes: from a client's credentials to its descriptor, which is what a client waits for."""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.figure import Figure, p50_p99, percentile
from benchmarks.place import ALICE, BOB, DAVE, Knocker, agent_and_gate, busy_cores, cpu, stage
from demo.stage import Stage
from mpsagent.mps.session import FrontEndSession, How

COMMANDS = (
    "set_default_active_thread_percentage 10.0",
    "set_default_device_pinned_mem_limit 0 2048M",
    "get_default_active_thread_percentage",
    "get_default_device_pinned_mem_limit 0",
)
"""What is said to the daemon at each hand-over, as one session."""
SILENT = 500
AIM_P50, AIM_P99 = 0.003, 0.030


def hand_over(quick: bool) -> list[Figure]:
    """One multi-user server that stays. A process of the user who has the GPU needs the gate alone; another user's
    needs the agent as well: a turn ends and the next one begins."""
    count = 40 if quick else 300
    found = []
    with stage(server="shared") as node, stage() as bare:
        node.start_agent()
        node.open()
        bare.start_control(multiuser=True)
        for name, load in (("idle", contextlib.nullcontext), ("both cores busy", busy_cores)):
            with load():
                found += _hand_overs(node, bare, name, count)
    return found


def _hand_overs(node: Stage, bare: Stage, name: str, count: int) -> list[Figure]:
    stay = [one.client(ALICE, "sleep", "600") for one in (node, bare)]
    for client in stay:
        client.saw("^ctx")
    mine, plain = Knocker(node, ALICE), Knocker(bare, ALICE)
    pids = agent_and_gate(node)
    before = [cpu(pid) for pid in pids]
    ours, theirs = _by_turns(count, mine.knock, plain.knock)
    spent = [(cpu(pid) - was) / count * 1000 for pid, was in zip(pids, before, strict=True)]
    program, native = _by_turns(count // 4, lambda: _program(bare), lambda: _native(bare.pipe))
    for client in stay:
        client.process.kill()
        client.wait()
    time.sleep(0.5)
    users = [Knocker(node, ALICE), Knocker(node, BOB)]
    changes = []
    for number in range(count // 2):
        changes.append(users[number % 2].knock())
        time.sleep(0.02)
    middle, most = percentile(ours, 0.5), percentile(ours, 0.99)
    alone = percentile(theirs, 0.5)
    aim = f"p50 {AIM_P50 * 1000:.0f}, p99 {AIM_P99 * 1000:.0f} ms" if name == "idle" else ""
    return [
        Figure(f"hand-over, credentials to descriptor, {name}: p50, p99 of {count}", p50_p99(ours), aim,
               middle <= AIM_P50 and most <= AIM_P99 if aim else None,
               f"the simulated daemon alone: {p50_p99(theirs)}; p50 {middle / alone:.1f} times"),
        Figure(f"… CPU time of agent and gate for each, {name}", f"{spent[0]:.1f} ms, {spent[1]:.1f} ms"),
        Figure(f"… with a change of turn, {name}: p50, p99 of {len(changes)}", p50_p99(changes[2:]), "", None,
               f"the same user: {middle * 1000:.1f} ms, {percentile(changes[2:], 0.5) / middle:.1f} times"),
        Figure(f"limits set and read back in a session of four commands, {name}: p50, p99 of {len(native)}",
               p50_p99(native), "", None,
               f"the front-end's program, the same commands: {p50_p99(program)}; p50 "
               f"{percentile(program, 0.5) / percentile(native, 0.5):.0f} times"),
    ]  # fmt: skip


def _by_turns(count: int, first: Callable[[], float], second: Callable[[], float]) -> tuple[list[float], list[float]]:
    """Both by turns, so that both see the same machine."""
    ours, theirs = [], []
    for _ in range(count):
        ours.append(first())
        theirs.append(second())
    return ours, theirs


def _program(bare: Stage) -> float:
    began = time.perf_counter()
    bare.command("\n".join(COMMANDS))
    return time.perf_counter() - began


def _native(pipe: Path) -> float:
    """The gate's own session, without its loop."""
    began = time.perf_counter()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(10)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        sock.connect(str(pipe / "control_privileged"))
        session = FrontEndSession(COMMANDS)
        while session.how is None:
            if not (data := sock.recv(65536)):
                session.closed()
            for message in session.message(data) if data else ():
                sock.send(message)
    assert session.how is How.DONE, session
    return time.perf_counter() - began


def silent(quick: bool) -> list[Figure]:
    """Connections of another user that say nothing, or stop after their credentials, and stay."""
    count = 40 if quick else 200
    with stage(server="shared") as node:
        node.start_agent()
        node.open()
        stay = node.client(ALICE, "sleep", "600")
        stay.saw("^ctx")
        one = Knocker(node, ALICE)
        before = [one.knock() for _ in range(count)]
        guests = [node.guest(DAVE, what, SILENT // 2) for what in ("silent", "half")]
        beside = [one.knock() for _ in range(count)]
        for guest in guests:
            guest.kill()
            guest.wait()
        time.sleep(0.5)
        after = [one.knock() for _ in range(count)]
    usual = statistics.median(before + after)
    added = (statistics.median(beside) - usual) * 1000
    slowest = (percentile(beside, 0.99) - percentile(before + after, 0.99)) * 1000
    return [
        Figure(f"added to a hand-over by {SILENT} silent, half-open connections of another user: p50, p99 of {count}",
               f"{added:.2f} ms, {slowest:.2f} ms", "under 50 ms", max(added, slowest) < 50,
               f"without them: {p50_p99(before + after)}; p50 {statistics.median(beside) / usual:.2f} times")
    ]  # fmt: skip
