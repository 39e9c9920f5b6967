"""Scenarios beyond the recordings: a server that is killed before it is Ready, and a front-end that stays connected."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from signal import SIGKILL

from tests.conformance.questions import pending
from tests.conformance.rig import Rig, Started
from tests.conformance.script import A, B, C, query, scenario, set_defaults, stop_all


def starting(rig: Rig, uid: int) -> int:
    """Pid of the server of `uid` that has just been started; 0 if none came."""
    found = rig.wait_log(rf"Starting new server (\d+) for user {uid}$", 5)
    return int(found[1]) if found else 0


STRICT = "set_default_active_thread_percentage 10\nset_default_device_pinned_mem_limit 0 2G"


def killed_while_starting(rig: Rig, delay: float, *, asked_first: bool, clients: int = 1) -> None:
    """User A's server goes for B's clients; B's server is killed `delay` seconds after its start, with other defaults
    asked for before or after the kill."""
    set_defaults(rig, 50, "8G")
    query(rig, A)
    rig.skip_log()
    waiting = [pending(rig, B, "query") for _ in range(clients)]
    server = starting(rig, B)
    asked: Started | None = rig.begin(STRICT) if asked_first else None
    rig.pause(delay)
    rig.signal(server, SIGKILL, "server")
    rig.finish(asked or rig.begin(STRICT), 5)
    for client in waiting:
        rig.wait(client, 5)
    rig.drain()


@scenario("X22", "a server is killed while it starts, with other defaults already asked for")
def x22(rig: Rig) -> None:
    rig.start("-d")
    for delay in (0.005, 0.02, 0.04):
        rig.note(f"delay {delay}")
        killed_while_starting(rig, delay, asked_first=True)
    rig.note("three clients wait")
    killed_while_starting(rig, 0.01, asked_first=True, clients=3)
    rig.ctl("get_server_list", 3)
    stop_all(rig)


@scenario("X23", "a server is killed while it starts, then other defaults are asked for")
def x23(rig: Rig) -> None:
    rig.start("-d")
    for delay in (0.0, 0.02):
        rig.note(f"delay {delay}")
        killed_while_starting(rig, delay, asked_first=False)
    stop_all(rig)


@scenario("X24", "a server is killed while it starts, again and again; then it may live")
def x24(rig: Rig) -> None:
    rig.start("-d")
    query(rig, A)
    rig.skip_log()
    waiting, third = pending(rig, B, "query"), pending(rig, C, "query")
    for _ in range(3):
        found = rig.wait_log(r"Starting new server (\d+) for user (\d+)$", 5)
        if found is None:
            break
        rig.signal(int(found[1]), SIGKILL, "server")
        rig.note(f"it was for user {found[2]}")
    rig.wait(waiting, 10)
    rig.wait(third, 10)
    rig.drain()
    rig.ctl("get_server_list", 3)
    stop_all(rig)


@scenario("X25", "a front-end that stays connected: who is answered, who is served")
def x25(rig: Rig) -> None:
    rig.start("-d")
    query(rig, A)
    session, writer = rig.session()
    rig.pause(0.3)
    rig.note("connected, nothing asked")
    rig.drain()
    rig.ctl("get_server_list", 3)
    query(rig, A)
    query(rig, B)
    rig.drain()
    os.write(writer, b"get_default_active_thread_percentage\n")
    rig.pause(0.2)
    rig.note("asked once")
    rig.drain()
    query(rig, A)
    rig.drain()
    os.close(writer)
    rig.finish(session, 3)
    stop_all(rig)


@scenario("X26", "the server of the leaving user, started again before a waiting user's, is killed while it starts")
def x26(rig: Rig) -> None:
    rig.start("-d")
    for _ in range(4):
        query(rig, A)
        other = rig.spawn(B, "query")
        rig.wait_log("from user 20002: Server is not ready", 5)
        own = rig.spawn(A, "query")
        found = rig.wait_log(r"Starting new server (\d+) for user (\d+)$", 5)
        if found is not None:
            rig.signal(int(found[1]), SIGKILL, "server")
            rig.note(f"it was for user {found[2]}")
        for client in (other, own):
            rig.wait(client)
        rig.drain()
    stop_all(rig)


@scenario("X27", "an ordinary user's front-end stays connected: what root is answered")
def x27(rig: Rig) -> None:
    rig.start("-d")
    session, writer = rig.session(uid=A)
    rig.pause(0.3)
    for command in ("get_server_list", STRICT, "quit -t 1"):
        rig.ctl(command, 3)
    rig.ctl("get_server_list", 3, uid=B)
    rig.note("it is killed")
    session.process.kill()
    rig.finish(session, 3)
    os.close(writer)
    rig.ctl("get_server_list", 3)
    stop_all(rig)


@scenario("X28", "a server is killed while it starts: the daemon closes its descriptor 0, whoever's that is by now")
def x28(rig: Rig) -> None:
    rig.start("-d")
    descriptor_0(rig)
    killed_alone(rig, A)
    descriptor_0(rig)
    server = rig.server()
    rig.ctl(f"shutdown_server {server}")
    rig.wait_log(f"Server {server} exited", 5)
    rig.note("a front-end comes when descriptor 0 is free, and goes when the next server has another one")
    session, writer = rig.session()
    rig.pause(0.3)
    query(rig, A)
    os.close(writer)
    rig.finish(session, 3)
    rig.pause(0.1)
    descriptor_0(rig)
    killed_alone(rig, B)
    rig.wait_log("NEW SERVER", 5)  # and there the daemon hangs


def killed_alone(rig: Rig, uid: int) -> None:
    """A client of `uid`, whose server is killed when it has just connected to the daemon."""
    rig.skip_log()
    client = rig.spawn(uid, "query")
    server = starting(rig, uid)
    rig.pause(0.01)
    rig.signal(server, SIGKILL, "server")
    rig.wait(client, 5)
    rig.drain()


def descriptor_0(rig: Rig) -> None:
    try:
        found = os.readlink(f"/proc/{rig.daemon()}/fd/0").split("[")[0]
    except FileNotFoundError:
        found = "closed"
    rig.note(f"descriptor 0 of the daemon: {found}")


@scenario("X29", "somebody connects to the control socket and says nothing")
def x29(rig: Rig) -> None:
    rig.start("-d")
    query(rig, A)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(str(rig.pipe / "control"))
        rig.pause(0.3)
        rig.drain()
        rig.ctl("get_server_list", 3)
        client = rig.spawn(A, "query")
        rig.wait(client, 3)
        rig.drain()
        silent.settimeout(0.5)
        with suppress(OSError):
            silent.recv(4096)
    rig.note("it has gone")
    rig.wait(client, 3)
    query(rig, A)
    stop_all(rig)
