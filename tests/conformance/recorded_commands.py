"""Recording 01: commands, user switches, terminating a client."""

from __future__ import annotations

import time

from tests.conformance.rig import Rig
from tests.conformance.script import (
    A,
    B,
    C,
    idle_server,
    now_the_recorded_part,
    query,
    scenario,
    sleeper,
    spinner,
    stop_all,
)


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


def as_after_s3(rig: Rig) -> None:
    """The daemon with the limits that it had in the rest of the recording."""
    rig.start("-d")
    rig.ctl("set_default_device_pinned_mem_limit 7 1G")
    rig.ctl("set_default_device_pinned_mem_limit 0 140000M")


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
    as_after_s3(rig)
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
    as_after_s3(rig)
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
    as_after_s3(rig)
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
