"""Recording 02: limits, faults, quit, several users."""

from __future__ import annotations

import os
import time
from signal import SIGKILL, SIGTERM

from tests.conformance.rig import SLOW_CLIENT, Rig, exited
from tests.conformance.script import (
    A,
    B,
    C,
    idle_server,
    now_the_recorded_part,
    query,
    scenario,
    shut_down_until_gone,
    sleeper,
    spinner,
    stop_all,
)


@scenario("R1", "limits race: default set before the user's server starts")
def r1(rig: Rig) -> None:
    rig.start("-d")
    rig.ctl("set_default_active_thread_percentage 30")
    rig.ctl("set_default_device_pinned_mem_limit 0 2G")
    rig.wait(rig.spawn(A, "alloc", 1500, 0))
    rig.wait(rig.spawn(A, "alloc", 2500, 0))
    server = rig.server()
    rig.drain()
    rig.ctl("get_server_list")
    rig.ctl("set_default_active_thread_percentage 100")
    rig.ctl(f"set_active_thread_percentage {server} 40")
    rig.ctl(f"set_device_pinned_mem_limit {server} 0 1G")
    rig.wait(rig.spawn(A, "alloc", 900, 0))
    rig.wait(rig.spawn(A, "alloc", 100, 0))
    rig.ctl(f"get_device_pinned_mem_limit {server} 0")
    for value in ("1X", "1.5G", "0G"):
        rig.ctl(f"set_device_pinned_mem_limit {server} 0 {value}")
        rig.ctl(f"get_device_pinned_mem_limit {server} 0")
    stop_all(rig)


@scenario("R2", "limits race: react to NEW SERVER Ready")
def r2(rig: Rig) -> None:
    rig.start("-d")
    for uid in (A, B, A, B):
        client = rig.spawn(uid, "query")
        ready = rig.wait_log(r"NEW SERVER (\d+): Ready", 10)
        begin = time.monotonic()
        if ready:
            rig.ctl(f"set_active_thread_percentage {ready[1]} 20", quiet=True)
            rig.ctl(f"set_device_pinned_mem_limit {ready[1]} 0 1G", quiet=True)
        rig.note(f"reacted in ms {(time.monotonic() - begin) * 1000}")
        rig.wait(client)
    stop_all(rig)


@scenario("R3", "user switch nudge: shutdown_server as soon as the last client left")
def r3(rig: Rig) -> None:
    """Only the shortest of the three times that the recording has: the wait grows with it, the script does not."""
    rig.start("-d")
    for early in (False, True):
        holder = rig.spawn(A, "sleep", 3)
        rig.working(holder)
        rig.pause(1)
        waiting = rig.spawn(B, "query")
        rig.wait_log(f"from user {B}: Server is not ready", 5)
        server = rig.server()
        while rig.clients[holder].process.poll() is None:
            rig.pause(0.001)
        left = time.monotonic()
        if early:
            shut_down_until_gone(rig, server)
        rig.wait(waiting)
        rig.note(f"SWITCH nudge={early} hold=3 gap={time.monotonic() - left:.3f}")
    stop_all(rig)


@scenario("R4", "fault with neighbours")
def r4(rig: Rig) -> None:
    rig.start("-d")
    leftover = rig.spawn(A, "sleep", 12)
    rig.working(leftover)
    rig.pause(0.5)
    spinning = rig.spawn(A, "spin", 3)
    rig.wait_output(spinning, "launch")
    culprit = rig.spawn(A, "oob", 0.5)
    rig.wait_output(culprit, "oob sync")
    rig.pause(0.7)
    server = rig.server()
    rig.drain()
    rig.ctl("get_server_list")
    rig.ctl(f"get_server_status {server}")
    rig.ctl(f"get_client_list {server}")
    rig.ctl("ps")
    refused = rig.spawn(A, "query")
    rig.wait(refused, 2)
    rig.ctl(f"get_server_status {server}")
    rig.drain()
    rig.wait(leftover, 0)
    rig.wait(spinning)
    rig.wait(culprit)
    rig.ps()
    rig.ctl(f"get_server_status {server}")
    rig.signal(leftover, SIGKILL)
    rig.wait(leftover)
    rig.pause(1)
    rig.drain()
    rig.ctl("get_server_list")
    query(rig, A)
    rig.drain()
    rig.ps()


@scenario("R5", "SIGKILL client in a long kernel; SIGINT client", before=True)
def r5(rig: Rig) -> None:
    rig.start("-d")
    server = idle_server(rig, A)
    now_the_recorded_part(rig, "R5")
    neighbour = sleeper(rig, A, 5)
    rig.pause(0.3)
    victim = spinner(rig, A, 30)
    rig.pause(0.3)
    rig.signal(victim, SIGKILL)
    begin = time.monotonic()
    rig.wait(victim)
    rig.note(f"reaped after {time.monotonic() - begin}")
    rig.pause(1)
    rig.drain()
    rig.ctl("get_server_list")
    rig.ctl(f"get_client_list {server}")
    rig.ctl(f"get_server_status {server}")
    query(rig, A)
    rig.wait(neighbour)
    rig.pause(0.2)
    rig.drain()
    rig.ps()


@scenario("R6", "SIGKILL server", before=True)
def r6(rig: Rig) -> None:
    rig.start("-d")
    server = idle_server(rig, A)
    now_the_recorded_part(rig, "R6")
    client = sleeper(rig, A, 4)
    rig.pause(0.5)
    rig.ctl("get_server_list")
    rig.drain()
    rig.signal(server, SIGKILL, "server")
    rig.wait_output(client, "work now")
    rig.pause(1)
    rig.ctl("get_server_list")
    query(rig, A)
    rig.wait(client)
    rig.pause(0.1)
    rig.drain()
    rig.ps()


@scenario("R7", "unprivileged user commands", before=True)
def r7(rig: Rig) -> None:
    rig.start("-d")
    idle_server(rig, A)
    now_the_recorded_part(rig, "R7")
    for command in (
        "get_server_list",
        "get_default_active_thread_percentage",
        "set_default_active_thread_percentage 10",
        "ps",
        "quit",
    ):
        rig.ctl(command, uid=A)


@scenario("R8", "second daemon same pipe; other pipe same GPU", before=True)
def r8(rig: Rig) -> None:
    rig.start("-d")
    idle_server(rig, A)
    now_the_recorded_part(rig, "R8")
    rig.start("-d")
    rig.start("-d", where="2")
    first = rig.spawn(A, "sleep", 2)
    second = rig.spawn(B, "sleep", 2, env={"CUDA_MPS_PIPE_DIRECTORY": str(rig.base / "pipe2")})
    rig.working(first)
    rig.working(second)
    rig.pause(0.5)
    rig.ps()
    rig.wait(first)
    rig.wait(second)
    rig.ctl("quit -t 1", where="2")


@scenario("R9", "control.log rename / truncate while running", before=True)
def r9(rig: Rig) -> None:
    rig.start("-d")
    idle_server(rig, A)
    now_the_recorded_part(rig, "R9")
    path = rig.log / "control.log"
    moved = rig.log / "control.log.1"
    path.rename(moved)
    before = moved.stat().st_size
    rig.ctl("get_server_list")
    rig.pause(0.05)
    rig.note(f"exists after rename: {path.exists()} grew: {moved.stat().st_size > before}")
    rig.drain()
    os.truncate(moved, 0)
    rig.logs["control"].refresh()  # before it can grow past its old length
    rig.ctl("get_server_list")
    rig.pause(0.05)
    content = moved.read_bytes()
    rig.note(f"after truncate starts with a hole: {content[:1] == bytes(1)} with a line: {content[:1] == b'['}")
    (rig.log / "server.log").rename(rig.log / "server.log.1")
    query(rig, C)
    rig.note(f"server.log exists after rename: {(rig.log / 'server.log').exists()}")
    stop_all(rig)


@scenario("R10", "quit -t with a hang; plain quit with a client")
def r10(rig: Rig) -> None:
    rig.start("-d")
    client = rig.spawn(A, "spin", 30)
    rig.wait_output(client, "launch")
    rig.pause(0.5)
    begin = time.monotonic()
    rig.ctl("quit -t 3", 15)
    rig.delay("quit -t 3", time.monotonic() - begin)
    rig.drain()
    rig.wait(client)
    rig.ls()
    rig.start("-d")
    client = sleeper(rig, A, 4)
    rig.pause(0.5)
    quitting = rig.begin("quit")
    rig.wait_log("Cmd:quit$", 5)
    rig.pause(0.5)
    refused = rig.spawn(A, "query")
    rig.pause(0.2)
    rig.ctl("get_server_list")
    rig.pause(0.5)
    rig.drain()
    rig.ps()
    rig.finish(quitting, 15)
    rig.wait(client)
    rig.wait(refused)
    rig.drain()


@scenario("R11", "foreground -f, SIGTERM, SIGKILL and stale files")
def r11(rig: Rig) -> None:
    for number in (SIGTERM, SIGKILL):
        daemon = rig.foreground("-f")
        end = time.monotonic() + 5
        while "binary version" not in daemon.read() and time.monotonic() < end:
            rig.pause(0.01)
        client = rig.spawn(A, "sleep", 2.5)
        rig.working(client)
        rig.pause(0.3)
        rig.ps()
        rig.signal(daemon.process.pid, number, "control")
        rig.foreground_ended(daemon, str(int(number)))
        rig.pause(0.2)
        rig.ps()
        rig.ls()
        rig.wait(client)
        rig.foreground_output(daemon)
        rig.ctl("get_server_list", 5)
        query(rig, A)
    rig.start("-d")
    query(rig, A)
    rig.drain()
    rig.ps()
    stop_all(rig)


@scenario("R12", "multiuser server")
def r12(rig: Rig) -> None:
    rig.start("-d", "--multiuser-server")
    first = sleeper(rig, A, 3)
    rig.pause(0.2)
    second = sleeper(rig, B, 2)
    rig.pause(0.2)
    rig.ps()
    rig.ctl("get_server_list")
    rig.ctl("ps")
    rig.drain()
    rig.wait(first)
    rig.wait(second)
    stop_all(rig)


@scenario("R13", "client limit")
def r13(rig: Rig) -> None:
    rig.start("-d")
    clients = [rig.spawn(A, "sleep", 8) for _ in range(64)]
    end = time.monotonic() + 15
    waiting = set(clients)
    while waiting and time.monotonic() < end:
        waiting = {name for name in waiting if "sms " not in rig.clients[name].read() and not _ended(rig, name)}
        rig.pause(0.02)
    server = rig.server()
    rig.ctl("get_server_list")
    listed = rig.ctl(f"get_client_list {server}", quiet=True).out.split()
    rig.note(f"clients listed {len(listed)}")
    for name in clients:
        exited(rig.clients[name].process, SLOW_CLIENT)
    failed = [name for name in clients if rig.clients[name].process.returncode]
    for name in failed[:3]:
        rig.wait(name)
    rig.note(f"failed clients {len(failed)}")


def _ended(rig: Rig, name: str) -> bool:
    return rig.clients[name].process.poll() is not None
