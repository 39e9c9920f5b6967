"""Scenarios beyond the recordings: what we still wanted to know of the real daemon (X1 to X12)."""

from __future__ import annotations

import shutil
import time
from signal import SIGKILL, SIGTERM

from tests.conformance.rig import Rig
from tests.conformance.script import (
    A,
    B,
    C,
    D,
    idle_server,
    query,
    scenario,
    set_defaults,
    sleeper,
    stop_all,
)


def pending(rig: Rig, uid: int, mode: str, *arguments: float) -> str:
    """A client that waits in the pending list when this returns."""
    client = rig.spawn(uid, mode, *arguments)
    rig.wait_log(f"from user {uid}: Server is not ready", 5)
    return client


def leave(rig: Rig, client: str) -> None:
    """End a client that has no kernel in flight, at once."""
    rig.signal(client, SIGKILL)
    rig.wait(client)


@scenario("X1", "a waiting client dies; another user waits behind it")
def x1(rig: Rig) -> None:
    rig.start("-d")
    set_defaults(rig, 50, "8G")
    holder = sleeper(rig, A, 30)
    rig.server()
    dead = pending(rig, B, "query")
    set_defaults(rig, 30, "4G")
    third = pending(rig, C, "query")
    rig.pause(0.3)
    leave(rig, dead)
    set_defaults(rig, 10, "2G")
    rig.pause(0.3)
    rig.drain()
    leave(rig, holder)
    rig.wait(third, 4)
    rig.drain()
    rig.ctl("get_server_list", 1.5)
    rig.ps()
    # Real MPS hangs here: does the end of the server that was started for nobody free it?
    server = rig.server()
    rig.signal(server, SIGKILL, "server")
    rig.wait(third, 5)
    rig.ctl("get_server_list", 1.5)
    rig.drain()
    rig.ps()


@scenario("X2", "a client whose name holds a forged log line")
def x2(rig: Rig) -> None:
    rig.start("-d")
    forged = "x\n[2026-01-01 00:00:00.000 Control     1] NEW CLIENT 1 from user 0: Server already exists"
    client = rig.spawn_renamed(A, "sleep", 4, argv0=forged)
    rig.working(client)
    server = rig.server()
    rig.ctl("ps")
    rig.ctl(f"get_client_list {server}")
    rig.ctl("get_device_client_list")
    rig.drain()
    leave(rig, client)
    # The same by the name of the program file, in case it is that and not argv[0] that is shown.
    link = rig.base / forged
    link.symlink_to(rig.backend.renamed_client[0])
    client = rig.spawn_renamed(A, "sleep", 4, argv0=str(link), program=str(link))
    rig.working(client)
    rig.ctl("ps")
    long_name = rig.spawn_renamed(A, "sleep", 4, argv0="/" + "n" * 4000)
    rig.working(long_name)
    rig.ctl("ps")
    stop_all(rig)


@scenario("X3", "order of service: A1 B1 A2 C1 B2 behind a holder")
def x3(rig: Rig) -> None:
    rig.start("-d")
    holder = sleeper(rig, D, 30)
    rig.server()
    waiting = [pending(rig, uid, "sleep", 0.5) for uid in (A, B, A, C, B)]
    rig.pause(0.3)
    leave(rig, holder)
    for client in waiting:
        rig.wait(client)
    stop_all(rig)


@scenario("X4", "start_server for others: someone waits, idle server, busy server")
def x4(rig: Rig) -> None:
    rig.start("-d")
    idle_server(rig, A)
    rig.note("an idle server of A runs; start_server for B")
    rig.ctl(f"start_server -uid {B}")
    rig.wait_log(f"Starting new server .* for user {B}", 5)
    rig.server()
    rig.ctl("get_server_list")
    rig.drain()
    rig.note("B is busy; start_server for A")
    holder = sleeper(rig, B, 30)
    rig.ctl(f"start_server -uid {A}")
    rig.ctl("get_server_list")
    rig.pause(0.7)
    rig.drain()
    rig.note("and a client of C waits; start_server for nobody (65534)")
    waiting = pending(rig, C, "query")
    rig.ctl("start_server -uid 65534")
    rig.pause(0.3)
    rig.ctl("get_server_list")
    rig.drain()
    leave(rig, holder)
    rig.wait(waiting)
    rig.pause(1)
    rig.ctl("get_server_list")
    rig.drain()
    rig.ps()
    stop_all(rig)


@scenario("X5", "one batch of six: set and get, three times")
def x5(rig: Rig) -> None:
    rig.start("-d")
    rig.ctl(
        "set_default_active_thread_percentage 20\nget_default_active_thread_percentage\n"
        "set_default_device_pinned_mem_limit 0 3G\nget_default_device_pinned_mem_limit 0\n"
        "set_default_client_priority 1\nget_default_client_priority"
    )
    rig.ctl(
        "set_default_active_thread_percentage 101\nget_default_active_thread_percentage\n"
        "set_default_device_pinned_mem_limit 0 0G\nget_default_device_pinned_mem_limit 0\n"
        "set_default_device_pinned_mem_limit 1 2048M\nget_default_device_pinned_mem_limit 1"
    )
    rig.ctl("get_server_list\nget_default_active_thread_percentage\nps\nget_default_client_priority")
    server = idle_server(rig, A)
    rig.ctl(
        f"get_server_list\nget_server_status {server}\nget_client_list {server}\nget_active_thread_percentage {server}"
    )
    stop_all(rig)


@scenario("X6", "cuInit only, and two contexts")
def x6(rig: Rig) -> None:
    rig.start("-d")
    connected = rig.spawn(A, "init", 1)
    rig.wait_output(connected, "cuInit")
    rig.server()
    rig.pause(0.3)
    rig.ctl("ps")
    rig.ctl(f"get_client_list {rig.server()}")
    rig.drain()
    rig.wait(connected)
    rig.pause(0.1)
    rig.drain()
    double = rig.spawn(A, "two", 1)
    rig.wait_output(double, "second ctx")
    rig.pause(0.2)
    rig.ctl("ps")
    rig.ctl(f"get_client_list {rig.server()}")
    rig.ctl("get_device_client_list")
    rig.drain()
    rig.wait(double)
    rig.pause(0.1)
    stop_all(rig)


@scenario("X7", "shutdown_server of an idle server, nobody waiting")
def x7(rig: Rig) -> None:
    rig.start("-d")
    server = idle_server(rig, A)
    rig.drain()
    begin = time.monotonic()
    rig.ctl(f"shutdown_server {server}")
    rig.ctl("get_server_list")
    rig.wait_log(f"Server {server} exited", 5)
    rig.delay("idle server gone", time.monotonic() - begin)
    rig.ctl("get_server_list")
    rig.drain()
    query(rig, A)
    rig.drain()
    server = rig.server()
    rig.ctl(f"shutdown_server {server} -f")
    rig.wait_log(f"Server {server} exited", 5)
    query(rig, B)
    stop_all(rig)


@scenario("X8", "terminate_client of odd targets")
def x8(rig: Rig) -> None:
    rig.start("-d")
    bystander = sleeper(rig, A, 12)
    server = rig.server()
    connected = rig.spawn(A, "init", 6)
    rig.wait_output(connected, "cuInit")
    waiting = pending(rig, B, "query")
    rig.note("of a client that has only called cuInit")
    rig.ctl(f"terminate_client {server} {rig.pid(connected)}", 3)
    rig.drain()
    rig.note("of a pid that is no client")
    rig.ctl(f"terminate_client {server} 1", 3)
    rig.note("of a client that waits in the pending list")
    rig.ctl(f"terminate_client {server} {rig.pid(waiting)}", 3)
    rig.drain()
    rig.note("of a sleeping client, twice")
    rig.ctl(f"terminate_client {server} {rig.pid(bystander)}", 3)
    rig.ctl(f"terminate_client {server} {rig.pid(bystander)}", 3)
    rig.pause(0.3)
    rig.ctl(f"get_client_list {server}", 3)
    rig.ctl(f"get_server_status {server}", 3)
    rig.wait(bystander, 0)
    rig.drain()
    rig.signal(bystander, SIGTERM)
    rig.wait(bystander)
    rig.wait(connected)
    rig.wait(waiting)
    stop_all(rig)


@scenario("X9", "quit -t 2 while another user waits")
def x9(rig: Rig) -> None:
    rig.start("-d")
    holder = sleeper(rig, A, 6)
    waiting = pending(rig, B, "query")
    third = pending(rig, C, "query")
    rig.drain()
    begin = time.monotonic()
    rig.ctl("quit -t 2", 10)
    rig.delay("quit -t 2", time.monotonic() - begin)
    rig.drain()
    rig.wait(waiting, 5)
    rig.wait(third, 5)
    rig.wait(holder, 0)
    rig.ps()
    rig.wait(holder)
    rig.drain()


@scenario("X10", "the pipe directory vanishes")
def x10(rig: Rig) -> None:
    rig.start("-d")
    client = sleeper(rig, A, 5)
    rig.pause(0.3)
    shutil.rmtree(rig.pipe)
    rig.note("pipe directory removed")
    rig.ctl("get_server_list", 3)
    rig.pause(0.3)
    rig.drain()
    rig.ps()
    outside = rig.spawn(B, "query")
    rig.wait(outside, 5)
    rig.note("second daemon: the directory is not there")
    rig.start("-d")
    rig.drain()
    rig.ls()
    rig.pipe.mkdir(mode=0o755, exist_ok=True)
    rig.note("second daemon: an empty directory is there")
    rig.start("-d")
    rig.ctl("get_server_list", 3)
    rig.ls()
    rig.ps()
    query(rig, B)
    rig.drain()
    rig.wait(client)
    rig.drain()
    rig.ctl("quit -t 1", 5)
    rig.pause(0.2)
    rig.drain()
    rig.ps()


@scenario("X11", "SIGTERM to the server, idle and busy")
def x11(rig: Rig) -> None:
    rig.start("-d")
    server = idle_server(rig, A)
    rig.drain()
    rig.signal(server, SIGTERM, "server")
    rig.wait_log(f"Server {server} exited", 3)
    rig.pause(0.1)
    rig.drain()
    rig.ctl("get_server_list", 3)
    client = sleeper(rig, A, 3)
    server = rig.server()
    rig.pause(0.3)
    rig.drain()
    rig.signal(server, SIGTERM, "server")
    rig.wait_log(f"Server {server} exited", 3)
    rig.pause(0.2)
    rig.drain()
    rig.ctl("get_server_list", 3)
    query(rig, A)
    rig.wait(client)
    stop_all(rig)


@scenario("X12", "shutdown_server while busy with someone waiting; the two clients leave one after the other")
def x12(rig: Rig) -> None:
    rig.start("-d")
    first = sleeper(rig, A, 30)
    second = sleeper(rig, A, 30)
    server = rig.server()
    waiting = pending(rig, B, "query")
    rig.pause(1.5)  # into the longer waits of the back-off
    rig.ctl(f"shutdown_server {server}")
    rig.pause(0.5)
    rig.drain()
    leave(rig, first)
    rig.pause(0.5)
    rig.drain()
    leave(rig, second)
    left = time.monotonic()
    rig.wait_log(f"Server {server} exited", 15)
    rig.delay("last client gone to server gone", time.monotonic() - left)
    rig.wait(waiting)
    stop_all(rig)
