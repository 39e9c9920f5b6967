"""Recordings 03 and 04: defaults set too late, recovery, admission; a server for no user, and clients beside MPS."""

from __future__ import annotations

import time
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM

from tests.conformance.rig import NOBODY, Rig
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

# Recording 03: defaults set too late, recovery, admission


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
    stop_all(rig)


@scenario("Q7", "admission: control socket not writable for 1002")
def q7(rig: Rig) -> None:
    """By file mode only: the recording also tried a POSIX ACL, for which a borrowed machine may have no program."""
    rig.start("-d")
    (rig.pipe / "control").chmod(0o600)
    query(rig, B)
    (rig.pipe / "control").chmod(0o666)
    query(rig, C)
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
    rig.ctl("get_default_active_thread_percentage")
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
    stop_all(rig)


# Recording 04: a server for no user, and clients beside MPS


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
    stop_all(rig)
