"""The recorded scenarios, as short scripts over a rig. Each is independent of the others and selectable by name.

A scenario of the recordings does the same commands in the same order; where a recording started in the middle of something,
what led there is played first and goes into a section of its own (`NAME before`), so that the recorded section can be
compared by itself. Pauses are shorter than in the recordings where those waited without need.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM

from tests.conformance.rig import NOBODY, SLOW_CLIENT, USERS, Rig, exited

A, B, C, D = USERS


@dataclass(frozen=True)
class Scenario:
    name: str
    title: str
    play: Callable[[Rig], None]
    gpus: int
    before: bool  # starts with a part that is not in the recording


ALL: dict[str, Scenario] = {}


def scenario(
    name: str, title: str, *, gpus: int = 1, before: bool = False
) -> Callable[[Callable[[Rig], None]], Callable[[Rig], None]]:
    def register(play: Callable[[Rig], None]) -> Callable[[Rig], None]:
        ALL[name] = Scenario(name, title, play, gpus, before)
        return play

    return register


def play(chosen: Scenario, rig: Rig) -> None:
    rig.section(f"{chosen.name} before" if chosen.before else f"{chosen.name} {chosen.title}")
    chosen.play(rig)
    rig.drain()


def now_the_recorded_part(rig: Rig, name: str) -> None:
    rig.section(f"{name} {ALL[name].title}")


def query(rig: Rig, uid: int, **kwargs: dict[str, str]) -> str:
    """A client that looks and leaves."""
    client = rig.spawn(uid, "query", **kwargs)
    rig.wait(client)
    return client


def sleeper(rig: Rig, uid: int, seconds: float, **kwargs: dict[str, str]) -> str:
    """A client at work: it has its context when this returns."""
    client = rig.spawn(uid, "sleep", seconds, **kwargs)
    rig.working(client)
    return client


def spinner(rig: Rig, uid: int, seconds: float) -> str:
    """A client with a kernel in flight."""
    client = rig.spawn(uid, "spin", seconds)
    rig.wait_output(client, "launch")
    rig.pause(0.2)
    return client


def set_defaults(rig: Rig, threads: int | str, memory: str) -> None:
    rig.ctl(
        f"set_default_active_thread_percentage {threads}\nset_default_device_pinned_mem_limit 0 {memory}",
    )


def idle_server(rig: Rig, uid: int) -> int:
    """The server of `uid`, left behind by a client that has gone."""
    query(rig, uid)
    return rig.server()


def stop_all(rig: Rig) -> None:
    rig.ctl("quit -t 1")
    rig.pause(0.1)
    rig.drain()


# --- Recording 01: commands, switching, terminating


@scenario("S0", "no daemon")
def s0(rig: Rig) -> None:
    for option in ("-h", "--help", "-v", "--version"):
        rig.control(option)
    rig.ctl("get_server_list")
    rig.ls()


@scenario("S1", "start -d")
def s1(rig: Rig) -> None:
    rig.start("-d")
    rig.ls()
    rig.ps()


S2_COMMANDS = """help
get_server_list
get_default_active_thread_percentage
set_default_active_thread_percentage 50
get_default_active_thread_percentage
set_default_active_thread_percentage 0
set_default_active_thread_percentage 101
set_default_active_thread_percentage abc
set_default_active_thread_percentage 33.3
get_default_active_thread_percentage
set_default_active_thread_percentage 100
get_default_device_pinned_mem_limit 0
set_default_device_pinned_mem_limit 0 10G
get_default_device_pinned_mem_limit 0
set_default_device_pinned_mem_limit 0 500M
get_default_device_pinned_mem_limit 0
set_default_device_pinned_mem_limit 0 1X
set_default_device_pinned_mem_limit 7 1G
set_default_device_pinned_mem_limit 0 0G
get_default_device_pinned_mem_limit 0
set_default_device_pinned_mem_limit 0 512K
set_default_device_pinned_mem_limit 0 1.5G
get_device_client_list
get_client_list 99999
get_server_status 99999
ps
foo
get_default_client_priority
set_default_client_priority 1
get_default_client_priority
set_default_client_priority 0
lspart
device_query
get_active_thread_percentage 99999
terminate_client 99999 1
shutdown_server 99999
start_server
start_server -uid
start_server -uid abc""".splitlines()


@scenario("S2", "commands without server", before=True)
def s2(rig: Rig) -> None:
    rig.start("-d")
    now_the_recorded_part(rig, "S2")
    for command in S2_COMMANDS:
        rig.ctl(command)
    rig.ctl("get_server_list\nget_default_active_thread_percentage\nfoo\nget_server_list")
    rig.ctl("")


def s3_commands(rig: Rig) -> int:
    """Up to the moment at which A's server is being shut down because B's was asked for, and A's again."""
    rig.ctl("set_default_device_pinned_mem_limit 0 140000M")
    begin = time.monotonic()
    rig.ctl(f"start_server -uid {A}")
    rig.wait_log("Starting new server", 5)
    rig.ctl("get_server_list", quiet=True)
    server = rig.server()
    rig.ctl(f"get_server_status {server}", quiet=True)
    rig.note(f"ready after {time.monotonic() - begin}")
    rig.drain()
    rig.ctl("get_server_list")
    rig.ps()
    rig.ls()
    for command in (
        f"get_server_status {server}",
        f"get_active_thread_percentage {server}",
        f"get_device_pinned_mem_limit {server} 0",
        f"get_client_list {server}",
        f"set_active_thread_percentage {server} 50",
        f"get_active_thread_percentage {server}",
        f"set_device_pinned_mem_limit {server} 0 1G",
        f"get_device_pinned_mem_limit {server} 0",
        "ps",
        f"start_server -uid {B}",
        f"start_server -uid {A}",
    ):
        rig.ctl(command)
    return server


@scenario("S3", "start_server -uid 1001", before=True)
def s3(rig: Rig) -> None:
    rig.start("-d")
    rig.ctl("set_default_device_pinned_mem_limit 7 1G")
    now_the_recorded_part(rig, "S3")
    s3_commands(rig)


@scenario("S4", "client of 1001", before=True)
def s4(rig: Rig) -> None:
    rig.start("-d")
    rig.ctl("set_default_device_pinned_mem_limit 7 1G")
    old = s3_commands(rig)
    now_the_recorded_part(rig, "S4")
    holder = rig.spawn(A, "sleep", 6)
    rig.working(holder)
    rig.pause(1)
    rig.drain()
    for command in (
        f"get_client_list {old}",
        "ps",
        "get_device_client_list",
        f"get_device_client_list {old}",
        f"set_active_thread_percentage {old} 25",
    ):
        rig.ctl(command)
    query(rig, A)
    for size in (900, 600):
        rig.wait(rig.spawn(A, "alloc", size, 0))
    query(rig, A, env={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "10"})
    query(rig, A, env={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "90"})
    query(rig, A, env={"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=700M"})
    rig.wait(holder)


@scenario("S5", "user switch: 1002 arrives while 1001 works", before=True)
def s5(rig: Rig) -> None:
    rig.start("-d")
    idle_server(rig, A)
    now_the_recorded_part(rig, "S5")
    holder = sleeper(rig, A, 4)
    rig.pause(0.5)
    second = rig.spawn(B, "sleep", 1)
    rig.wait_log(f"from user {B}: Server is not ready", 5)
    third = rig.spawn(C, "sleep", 1)
    rig.wait_log(f"from user {C}: Server is not ready", 5)
    rig.pause(0.5)
    rig.drain()
    rig.ctl("ps")
    rig.ctl("get_server_list")
    rig.wait(holder)
    rig.working(second)
    rig.drain()
    rig.ctl("get_server_list")
    rig.wait(second)
    rig.wait(third)
    rig.pause(0.2)
    rig.drain()
    rig.ps()


@scenario("S6", "starving user switch: shutdown_server then -f", before=True)
def s6(rig: Rig) -> None:
    rig.start("-d")
    idle_server(rig, C)
    now_the_recorded_part(rig, "S6")
    holder = sleeper(rig, A, 7)
    rig.pause(0.5)
    waiting = rig.spawn(B, "sleep", 1)
    rig.wait_log(f"from user {B}: Server is not ready", 5)
    rig.pause(0.5)
    server = rig.server()
    rig.ctl("get_server_list")
    rig.ctl(f"get_server_status {server}")
    rig.ctl(f"shutdown_server {server}")
    rig.pause(0.7)
    rig.drain()
    latecomer = rig.spawn(A, "query")
    rig.wait_log(f"from user {A}", 5)
    rig.pause(0.7)
    rig.drain()
    rig.ctl(f"shutdown_server {server} -f")
    rig.wait(waiting)
    rig.drain()
    rig.wait(holder, 0)
    rig.wait(latecomer)
    rig.wait(holder)


@scenario("S7", "terminate_client of a long kernel, neighbour works", before=True)
def s7(rig: Rig) -> None:
    rig.start("-d")
    idle_server(rig, B)
    now_the_recorded_part(rig, "S7")
    neighbour = sleeper(rig, A, 5)
    rig.pause(0.3)
    victim = spinner(rig, A, 20)
    rig.pause(0.5)
    server = rig.server()
    rig.ctl("get_server_list")
    rig.ctl(f"get_client_list {server}")
    rig.ctl(f"terminate_client {server} {rig.pid(victim)}")
    rig.drain()
    rig.wait(victim)
    rig.ctl(f"get_server_status {server}")
    query(rig, A)
    rig.wait(neighbour)
    stop_all(rig)


# --- Recording 02: limits, faults, quit, several users


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
    rig.drain()
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
    rig.drain()
    stop_all(rig)


@scenario("R3", "user switch nudge: shutdown_server as soon as the last client left")
def r3(rig: Rig) -> None:
    """Only the shortest of the three times that the recording has: the wait grows with it, the script does not."""
    rig.start("-d")
    for nudge in (False, True):
        holder = rig.spawn(A, "sleep", 3)
        rig.working(holder)
        rig.pause(1)
        waiting = rig.spawn(B, "query")
        rig.wait_log(f"from user {B}: Server is not ready", 5)
        server = rig.server()
        while rig.clients[holder].process.poll() is None:
            rig.pause(0.001)
        left = time.monotonic()
        if nudge:
            # The first nudge can come before the server has noticed that its client is gone, so it is repeated.
            while not rig.wait_log(f"Server {server} exited", 0.1, quiet=True) and time.monotonic() < left + 5:
                rig.ctl(f"shutdown_server {server}", quiet=True)
        rig.wait(waiting)
        rig.note(f"SWITCH nudge={nudge} hold=3 gap={time.monotonic() - left:.3f}")
    rig.drain()
    stop_all(rig)


@scenario("R4", "fault with neighbours")
def r4(rig: Rig) -> None:
    rig.start("-d")
    leftover = rig.spawn(A, "sleep", 12)
    rig.working(leftover)
    rig.pause(0.5)
    spinning = rig.spawn(A, "spin", 3)
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
    rig.ctl("quit -t 2", 15)
    rig.delay("quit -t 2", time.monotonic() - begin)
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


# --- Recording 03: arming too late, recovery, admission


@scenario("Q1", "pre-arm: set defaults between 'Starting new server' and Ready")
def q1(rig: Rig) -> None:
    """A race that is mostly lost, so what each client got says nothing here; the order of the lines does."""
    rig.start("-d")
    for uid, threads, memory in ((A, 20, "1G"), (B, 60, "3G"), (C, 35, "2G")):
        client = rig.spawn(uid, "query")
        rig.wait_log(f"Starting new server .* for user {uid}", 10)
        begin = time.monotonic()
        rig.ctl(f"set_default_active_thread_percentage {threads}", quiet=True)
        rig.ctl(f"set_default_device_pinned_mem_limit 0 {memory}", quiet=True)
        rig.note(f"pre-armed {uid} in ms {(time.monotonic() - begin) * 1000}")
        rig.wait(client)
    rig.drain()
    stop_all(rig)


@scenario("Q3", "fault culprit in dmesg")
def q3(rig: Rig) -> None:
    rig.start("-d")
    bystander = sleeper(rig, A, 3)
    rig.pause(0.3)
    culprit = rig.spawn(A, "oob", 0.3)
    rig.wait(culprit)
    rig.note(f"culprit was {rig.pid(culprit)} victim {rig.pid(bystander)}")
    rig.pause(0.5)
    rig.drain()
    server = rig.server()
    rig.ctl("get_server_list")
    rig.ctl(f"get_server_status {server}")


@scenario("Q4", "FAULT: terminate_client on the sticky one", before=True)
def q4(rig: Rig) -> None:
    rig.start("-d")
    leftover = sleeper(rig, A, 7)
    culprit = rig.spawn(A, "oob", 0.3)
    rig.wait(culprit)
    rig.pause(0.5)
    server = rig.server()
    rig.ctl("get_server_list")
    rig.ctl(f"get_server_status {server}")
    now_the_recorded_part(rig, "Q4")
    rig.ctl(f"terminate_client {server} {rig.pid(leftover)}", 2)
    rig.ctl(f"get_server_status {server}", 15)
    rig.drain()
    query(rig, A)
    rig.wait(leftover)
    query(rig, A)
    rig.ctl(f"get_server_status {server}")


@scenario("Q5", "terminate_client then SIGKILL keeps neighbours; SIGTERM alone does not", before=True)
def q5(rig: Rig) -> None:
    rig.start("-d")
    server = idle_server(rig, A)
    now_the_recorded_part(rig, "Q5")

    neighbour = sleeper(rig, A, 3)
    victim = spinner(rig, A, 60)
    rig.ctl("get_server_list")
    rig.ctl(f"terminate_client {server} {rig.pid(victim)}")
    rig.pause(0.05)
    rig.signal(victim, SIGKILL)
    rig.wait(victim)
    rig.ctl(f"get_server_status {server}")
    rig.wait(neighbour)
    rig.drain()

    neighbour = sleeper(rig, A, 4)
    victim = spinner(rig, A, 60)
    rig.signal(victim, SIGTERM)
    rig.wait(victim)
    rig.pause(1)
    rig.ctl("get_server_list")
    rig.ctl(f"get_server_status {server}")
    rig.wait(neighbour)
    rig.pause(0.2)
    rig.drain()

    neighbour = sleeper(rig, A, 3)
    victim = sleeper(rig, A, 60)
    rig.pause(0.3)
    rig.signal(victim, SIGKILL)
    rig.wait(victim)
    rig.pause(0.5)
    rig.ctl("get_server_list")
    rig.ctl(f"get_server_status {server}")
    rig.note("SIGKILL of a client with NO running kernel, neighbour:")
    rig.wait(neighbour)


@scenario("Q6", "terminate_client of a SIGSTOPped client", before=True)
def q6(rig: Rig) -> None:
    rig.start("-d")
    server = idle_server(rig, A)
    now_the_recorded_part(rig, "Q6")
    neighbour = sleeper(rig, A, 6)
    victim = spinner(rig, A, 60)
    rig.signal(victim, SIGSTOP)
    rig.ctl("get_server_list")
    rig.ctl(f"terminate_client {server} {rig.pid(victim)}", 2.5)
    rig.ctl(f"get_server_status {server}", 1.5)
    rig.drain()
    rig.signal(victim, SIGKILL)
    rig.wait(victim)
    rig.pause(1)
    rig.ctl(f"get_server_status {server}")
    rig.wait(neighbour)
    rig.drain()
    stop_all(rig)


@scenario("Q7", "admission: control socket not writable for 1002")
def q7(rig: Rig) -> None:
    """By file mode only: the recording also tried a POSIX ACL, for which a borrowed machine may have no program."""
    rig.start("-d")
    (rig.pipe / "control").chmod(0o600)
    query(rig, B)
    (rig.pipe / "control").chmod(0o666)
    query(rig, C)
    rig.drain()
    stop_all(rig)


@scenario("Q8", "daemon down: does a client run without MPS?")
def q8(rig: Rig) -> None:
    query(rig, A)


@scenario("Q9", "exec latency")
def q9(rig: Rig) -> None:
    rig.start("-d")
    one = sorted(rig.ctl("get_default_active_thread_percentage", quiet=True).seconds for _ in range(20))
    batch = "\n".join(["get_default_active_thread_percentage"] * 20)
    many = sorted(rig.ctl(batch, quiet=True).seconds for _ in range(10))
    rig.note(f"exec one command: median ms {one[10] * 1000:.3f} worst {one[-1] * 1000:.3f}")
    rig.note(f"exec 20 commands in one session: median ms {many[5] * 1000:.3f}")


@scenario("Q10", "SIGSTOP the control daemon / the server: what do commands do", before=True)
def q10(rig: Rig) -> None:
    rig.start("-d")
    now_the_recorded_part(rig, "Q10")
    client = sleeper(rig, A, 9)
    rig.pause(0.3)
    rig.ctl("get_server_list")
    server, daemon = rig.server(), rig.daemon()
    rig.signal(daemon, SIGSTOP, "control")
    rig.ctl("get_server_list", 1)
    rig.signal(daemon, SIGCONT, "control")
    rig.pause(0.2)
    rig.ctl("get_server_list")
    rig.signal(server, SIGSTOP, "server")
    for command in (f"get_server_status {server}", f"get_client_list {server}", "ps", f"shutdown_server {server} -f"):
        rig.ctl(command, 1)
    rig.drain()
    rig.ctl("get_server_list", 1)
    rig.signal(server, SIGCONT, "server")
    rig.pause(0.5)
    rig.drain()
    rig.wait(client)
    rig.ps()


@scenario("Q11", "two clients, env per-context partition and priorities")
def q11(rig: Rig) -> None:
    rig.start("-d")
    rig.ctl("device_query --csv")
    rig.ctl("ps -p 1")
    client = sleeper(rig, A, 2)
    rig.pause(0.3)
    server = rig.server()
    rig.ctl("get_server_list")
    rig.ctl(f"device_query {server}")
    rig.ctl(f"ps -p {server}")
    rig.ctl("set_default_client_priority 1")
    rig.ctl("get_default_client_priority")
    rig.wait(client)
    rig.drain()
    stop_all(rig)


# --- Recording 04: the parked server, and clients beside MPS


@scenario("T1", "parked server: react to the pending client, then compare what each first client got")
def t1(rig: Rig) -> None:
    rig.start("-d")
    rig.ctl(f"start_server -uid {NOBODY}")
    rig.server()
    limits = {A: (20, "1G"), B: (60, "3G"), C: (35, "2G")}
    for uid in (A, B, C, B, A, C, C):
        client = rig.spawn(uid, "query")
        if rig.wait_log(f"NEW CLIENT .* from user {uid}: Server (is not ready|already exists)", 10):
            set_quietly(rig, *limits[uid])
        rig.wait(client)
    rig.drain()
    stop_all(rig)


def set_quietly(rig: Rig, threads: int, memory: str) -> None:
    begin = time.monotonic()
    rig.ctl(
        f"set_default_active_thread_percentage {threads}\nset_default_device_pinned_mem_limit 0 {memory}", quiet=True
    )
    rig.note(f"set in ms {(time.monotonic() - begin) * 1000:.1f}")


@scenario("T2", "bypass: a client outside MPS while an MPS server runs")
def t2(rig: Rig) -> None:
    rig.start("-d")
    inside = sleeper(rig, A, 2.5)
    rig.pause(0.3)
    outside = sleeper(rig, B, 1, env={"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"})
    rig.ctl("ps")
    rig.wait(inside)
    rig.wait(outside)
    stop_all(rig)


@scenario("T3", "server start with mem limit units and two-digit precision")
def t3(rig: Rig) -> None:
    rig.start("-d")
    rig.ctl("set_default_active_thread_percentage 12.75")
    rig.ctl("get_default_active_thread_percentage")
    query(rig, A)
    rig.drain()
    stop_all(rig)


# --- Recording 05: two GPUs


def m1_commands(rig: Rig) -> tuple[str, str, int]:
    rig.start("-d")
    rig.ctl("device_query")
    rig.ctl("set_default_device_pinned_mem_limit 0 4G")
    rig.ctl("set_default_device_pinned_mem_limit 1 6G")
    first = sleeper(rig, A, 30, env={"DEV": "0"})
    rig.pause(0.5)
    second = sleeper(rig, A, 30, env={"DEV": "1"})
    rig.pause(0.5)
    server = rig.server()
    rig.drain()
    rig.ctl("get_server_list")
    rig.ps()
    rig.ctl("get_device_client_list")
    rig.ctl(f"get_device_client_list {server}")
    rig.ctl("ps")
    rig.ctl(f"get_device_pinned_mem_limit {server} 0")
    rig.ctl(f"get_device_pinned_mem_limit {server} 1")
    rig.ctl(f"device_query {server}")
    query(rig, A, env={"DEV": "0"})
    query(rig, A, env={"DEV": "1"})
    return first, second, server


@scenario("M1", "one daemon, two GPUs", gpus=2)
def m1(rig: Rig) -> None:
    m1_commands(rig)


@scenario("M2", "fault on GPU 0: does GPU 1's client live, are new clients accepted?", gpus=2, before=True)
def m2(rig: Rig) -> None:
    first, second, server = m1_commands(rig)
    now_the_recorded_part(rig, "M2")
    rig.wait(rig.spawn(A, "oob", 0.3, env={"DEV": "0"}))
    rig.pause(1)
    rig.drain()
    rig.ctl(f"get_server_status {server}")
    rig.ctl("ps")
    rig.wait(first, 0)
    rig.wait(second, 0)
    query(rig, A, env={"DEV": "1"})
    query(rig, A, env={"DEV": "0"})
    rig.drain()
    rig.signal(first, SIGKILL)
    rig.wait(first)
    rig.pause(1)
    rig.ctl(f"get_server_status {server}")
    rig.drain()
    query(rig, A, env={"DEV": "1"})
    query(rig, A, env={"DEV": "0"})
    rig.wait(second, 0)
    rig.signal(second, SIGKILL)
    rig.wait(second)
    rig.pause(1)
    rig.drain()
    stop_all(rig)


@scenario("M3", "one instance per GPU, two users at once", gpus=2)
def m3(rig: Rig) -> None:
    import re

    rig.start("-d")
    reply = rig.ctl("device_query")
    uuids = list(dict.fromkeys(re.findall(r"GPU-[0-9a-f-]{36}", reply.out)))
    stop_all(rig)
    if len(uuids) < 2:
        rig.note("SKIPPED fewer than two devices")
        return
    pipes = {}
    for number, uuid in enumerate(uuids[:2]):
        where = f"g{number}"
        rig.start("-d", env={"CUDA_VISIBLE_DEVICES": uuid}, where=where)
        pipes[where] = {"CUDA_MPS_PIPE_DIRECTORY": str(rig.base / f"pipe{where}")}
    first = sleeper(rig, A, 3, env=pipes["g0"])
    second = sleeper(rig, B, 3, env=pipes["g1"])
    rig.pause(0.3)
    rig.ps()
    rig.ctl("device_query", where="g1")
    rig.ctl("set_default_device_pinned_mem_limit 0 3G", where="g1")
    rig.ctl("ps", where="g1")
    rig.wait(first)
    rig.wait(second)
    for visible in ("1", "0", uuids[0]):
        query(rig, B, env={**pipes["g1"], "CUDA_VISIBLE_DEVICES": visible})
    for where in pipes:
        rig.ctl("quit -t 1", where=where)


# --- Recording 06: defaults, hangs, the ladder


def v1_commands(rig: Rig, seconds: float) -> tuple[str, int]:
    rig.start("-d")
    rig.ctl("set_default_active_thread_percentage 60")
    rig.ctl("set_default_device_pinned_mem_limit 0 6G")
    holder = sleeper(rig, A, seconds)
    rig.pause(0.5)
    rig.ctl("set_default_active_thread_percentage 10")
    rig.ctl("set_default_device_pinned_mem_limit 0 1G")
    query(rig, A)
    server = rig.server()
    rig.ctl("get_server_list")
    rig.ctl(f"get_active_thread_percentage {server}")
    rig.ctl(f"get_device_pinned_mem_limit {server} 0")
    rig.drain()
    return holder, server


@scenario("V1", "does a changed default reach a running server?")
def v1(rig: Rig) -> None:
    v1_commands(rig, 3)


@scenario(
    "V2", "arm for a waiting user while the holder starts more clients; re-arm for the third after Ready", before=True
)
def v2(rig: Rig) -> None:
    holder, server = v1_commands(rig, 20)
    now_the_recorded_part(rig, "V2")
    second = rig.spawn(B, "sleep", 2)
    rig.wait_log(f"from user {B}: Server is not ready", 5)
    rig.pause(0.2)
    third = rig.spawn(C, "query")
    rig.wait_log(f"from user {C}: Server is not ready", 5)
    rig.pause(0.2)
    set_defaults(rig, 30, "3G")
    query(rig, A)
    rig.signal(holder, SIGKILL)
    rig.wait(holder)
    while not rig.wait_log(f"Server {server} exited", 0.05, quiet=True):
        rig.ctl(f"shutdown_server {server}", quiet=True)
    rig.wait_log("NEW SERVER .* Ready", 5)
    rig.pause(0.3)
    set_defaults(rig, 45, "2G")
    query(rig, B)
    rig.wait(second)
    rig.wait(third)


@scenario("V3", "stopped server, then SIGKILL of it, with a user waiting", before=True)
def v3(rig: Rig) -> None:
    rig.start("-d")
    idle_server(rig, C)
    now_the_recorded_part(rig, "V3")
    holder = sleeper(rig, A, 20)
    server = rig.server()
    rig.pause(0.5)
    rig.ctl("get_server_list")
    rig.signal(server, SIGSTOP, "server")
    waiting = rig.spawn(B, "query")
    rig.wait_log(f"from user {B}: Server is not ready", 5)
    rig.pause(0.5)
    rig.ctl(f"get_server_status {server}", 1.5)
    rig.signal(server, SIGKILL, "server")
    begin = time.monotonic()
    rig.wait(waiting)
    rig.delay("waiting user served", time.monotonic() - begin)
    rig.ctl("get_server_list")
    rig.drain()
    rig.wait(holder, 0)
    rig.signal(holder, SIGKILL)
    rig.wait(holder)


@scenario("V4", "stopped control daemon, SIGKILL, restart", before=True)
def v4(rig: Rig) -> None:
    rig.start("-d")
    now_the_recorded_part(rig, "V4")
    holder = sleeper(rig, A, 20)
    rig.pause(0.3)
    daemon = rig.daemon()
    rig.signal(daemon, SIGSTOP, "control")
    waiting = rig.spawn(B, "query")
    rig.pause(0.5)
    rig.ctl("get_server_list", 1.5)
    rig.signal(daemon, SIGKILL, "control")
    rig.pause(0.5)
    rig.ps()
    rig.wait(waiting)
    rig.start("-d")
    query(rig, B)
    rig.signal(holder, SIGKILL)
    rig.wait(holder)
    rig.drain()
    rig.ps()
    stop_all(rig)


@scenario("V5", "no server: how long from pending to Starting, and does one batch sent at pending win?")
def v5(rig: Rig) -> None:
    rig.start("-d")
    rig.ctl("set_default_active_thread_percentage 100")
    query(rig, A)
    rig.drain()
    stop_all(rig)


@scenario("V6", "ladder on a client that ignores SIGTERM and one that is stopped, neighbours beside")
def v6(rig: Rig) -> None:
    rig.start("-d")
    neighbour = sleeper(rig, A, 4)
    victim = rig.spawn(A, "spin", 60, "--ignore-term")
    rig.wait_output(victim, "launch")
    rig.pause(0.3)
    server = rig.server()
    rig.ctl("get_server_list")
    rig.ctl(f"terminate_client {server} {rig.pid(victim)}")
    rig.signal(victim, SIGTERM)
    rig.pause(0.5)
    rig.signal(victim, SIGKILL)
    rig.wait(victim)
    rig.wait(neighbour)
    rig.drain()

    neighbour = sleeper(rig, A, 4)
    victim = spinner(rig, A, 60)
    rig.signal(victim, SIGSTOP)
    rig.ctl("get_server_list")
    asked = rig.begin(f"terminate_client {server} {rig.pid(victim)}")
    rig.pause(1)
    rig.signal(victim, SIGKILL)
    rig.finish(asked)
    rig.wait(victim)
    rig.wait(neighbour)
    rig.drain()
    stop_all(rig)


# --- Recording 07: the floor in the daemon's environment


@scenario("W1", "floor in the daemon's own environment at start")
def w1(rig: Rig) -> None:
    rig.start("-d", env={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "10", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G"})
    rig.ctl("get_default_active_thread_percentage")
    rig.ctl("get_default_device_pinned_mem_limit 0")
    query(rig, A)
    rig.drain()
    set_defaults(rig, 60, "6G")
    query(rig, B)
    server = rig.server()
    rig.ctl("get_server_list")
    rig.ctl(f"get_active_thread_percentage {server}")
    rig.ctl(f"get_device_pinned_mem_limit {server} 0")
    rig.ctl(f"set_active_thread_percentage {server} 80\nset_device_pinned_mem_limit {server} 0 9G")
    query(rig, B)
    rig.drain()
    stop_all(rig)


@scenario("W2", "several devices and M units in the environment")
def w2(rig: Rig) -> None:
    rig.start("-d", env={"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1500M"})
    rig.ctl("get_default_device_pinned_mem_limit 0")
    query(rig, A)
    rig.ctl("set_default_device_pinned_mem_limit 0 0G")
    rig.ctl("get_default_device_pinned_mem_limit 0")
    query(rig, B)
    rig.drain()
    stop_all(rig)


@scenario("W3", "how is an unlimited memory default set back after a limit?")
def w3(rig: Rig) -> None:
    rig.start("-d")
    rig.ctl("set_default_device_pinned_mem_limit 0 2G")
    query(rig, A)
    rig.ctl("set_default_device_pinned_mem_limit 0 0G")
    query(rig, B)
    rig.ctl("set_default_device_pinned_mem_limit 0 0M")
    rig.ctl("get_default_device_pinned_mem_limit 0")
    rig.ctl("set_default_device_pinned_mem_limit 0 1000G")
    rig.ctl("get_default_device_pinned_mem_limit 0")
    query(rig, A)
    rig.drain()
    stop_all(rig)


@scenario("W4", "priority default")
def w4(rig: Rig) -> None:
    rig.start("-d")
    rig.ctl("set_default_client_priority 1")
    query(rig, A)
    rig.drain()
    stop_all(rig)


# Questions that no recording answers yet are in questions.py; importing it registers them.
from tests.conformance import questions  # noqa: E402,F401
