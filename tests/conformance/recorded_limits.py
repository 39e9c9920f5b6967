"""Recordings 05 to 07: two GPUs; defaults, hangs and the ladder; the floor in the environment."""

from __future__ import annotations

import re
import time
from signal import SIGKILL, SIGSTOP, SIGTERM

from tests.conformance.rig import Rig
from tests.conformance.script import (
    A,
    B,
    C,
    idle_server,
    now_the_recorded_part,
    query,
    scenario,
    set_defaults,
    shut_down_until_gone,
    sleeper,
    spinner,
    stop_all,
)

# Recording 05: two GPUs


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
    stop_all(rig)


@scenario("M3", "one instance per GPU, two users at once", gpus=2)
def m3(rig: Rig) -> None:
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


# Recording 06: defaults, hangs, the ladder


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
    shut_down_until_gone(rig, server)
    rig.wait_log("NEW SERVER .* Ready", 5)
    rig.pause(0.3)
    set_defaults(rig, 45, "2G")
    query(rig, B)
    rig.wait(second)
    rig.wait(third)


@scenario("V3", "stopped server, then SIGKILL of it, with a user waiting", before=True)
def v3(rig: Rig) -> None:
    rig.start("-d")
    set_defaults(rig, 45, "2G")
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
    set_defaults(rig, 45, "2G")
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
    stop_all(rig)


# Recording 07: the floor in the daemon's environment


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
    stop_all(rig)


@scenario("W2", "several devices and M units in the environment")
def w2(rig: Rig) -> None:
    rig.start("-d", env={"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1500M"})
    rig.ctl("get_default_device_pinned_mem_limit 0")
    query(rig, A)
    rig.ctl("set_default_device_pinned_mem_limit 0 0G")
    rig.ctl("get_default_device_pinned_mem_limit 0")
    query(rig, B)
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
    stop_all(rig)


@scenario("W4", "priority default")
def w4(rig: Rig) -> None:
    rig.start("-d")
    rig.ctl("set_default_client_priority 1")
    query(rig, A)
    stop_all(rig)
