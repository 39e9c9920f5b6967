"""Scenarios beyond the recordings: waiting clients that die, a shut pipe directory, a socket in the daemon's place."""

from __future__ import annotations

import socket
import threading
import time
from signal import SIGKILL

from tests.conformance.questions import leave, pending
from tests.conformance.rig import NOBODY, Rig
from tests.conformance.script import A, B, C, query, scenario, set_defaults, sleeper, stop_all


@scenario("X15", "a waiting client dies and nobody waits behind it")
def x15(rig: Rig) -> None:
    rig.start("-d")
    holder = sleeper(rig, A, 30)
    rig.server()
    dead = pending(rig, B, "query")
    rig.pause(0.3)
    leave(rig, dead)
    leave(rig, holder)
    rig.wait_log("for user 20002", 10)
    rig.pause(1.5)
    rig.drain()
    rig.ctl("get_server_list", 3)
    rig.drain()
    late = rig.spawn(B, "query")
    rig.wait(late, 5)
    other = rig.spawn(C, "query")
    rig.wait(other, 5)
    rig.drain()
    for client in (late, other):
        rig.signal(client, SIGKILL)
    rig.ctl("get_server_list", 3)


@scenario("X16", "the server that was started for a dead waiting client is killed")
def x16(rig: Rig) -> None:
    rig.start("-d")
    set_defaults(rig, 50, "8G")
    holder = sleeper(rig, A, 30)
    rig.server()
    dead = pending(rig, B, "query")
    third = pending(rig, C, "query")
    rig.pause(0.3)
    leave(rig, dead)
    set_defaults(rig, 30, "4G")
    leave(rig, holder)
    rig.wait_log("for user 20002", 10)
    rig.wait_log("NEW SERVER", 10)
    rig.pause(1.5)
    rig.drain()
    asked = rig.begin("set_default_active_thread_percentage 10\nset_default_device_pinned_mem_limit 0 2G")
    rig.pause(0.5)
    server = next(one.pid for one in rig.ours() if one.uid == B)
    started = time.monotonic()
    rig.signal(server, SIGKILL)
    rig.finish(asked, 5)
    rig.wait(third, 10)
    rig.note(f"served {time.monotonic() - started:.2f} s after the kill")
    rig.drain()
    query(rig, B)
    stop_all(rig)


@scenario("X17", "a packet socket in the control daemon's place")
def x17(rig: Rig) -> None:
    rig.start("-d")
    rig.ctl("quit -t 1")
    rig.pause(0.3)
    place = rig.pipe / "control"
    for manner in ("closes at once", "closes after a second", "answers rubbish"):
        rig.note(f"socket that {manner}")
        place.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(place))
            place.chmod(0o666)
            listener.listen(16)
            listener.settimeout(6)

            def serve(listener: socket.socket = listener, manner: str = manner) -> None:
                try:
                    while True:
                        peer, _ = listener.accept()
                        if manner == "closes after a second":
                            time.sleep(1)
                        if manner == "answers rubbish":
                            peer.settimeout(2)
                            try:
                                rig.note(f"client says {peer.recv(4096)!r}")
                                peer.send(b"\\0" * 64)
                            except OSError as error:
                                rig.note(f"peer: {error}")
                        peer.close()
                except OSError:
                    return

            threading.Thread(target=serve, daemon=True).start()
            client = rig.spawn(A, "query")
            rig.wait(client, 5)
        rig.signal(client, SIGKILL)
        rig.wait(client)
    rig.note("clients wait at a socket that never accepts; then a daemon starts over it")
    place.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(place))
    place.chmod(0o666)
    listener.listen(16)
    client = rig.spawn(A, "query")
    rig.pause(1)
    rig.start("-d")
    rig.pause(0.5)
    fresh = query(rig, B)
    rig.wait(client, 2)
    rig.note(f"closing the old socket after {fresh}")
    listener.close()
    rig.wait(client, 8)
    rig.signal(client, SIGKILL)
    stop_all(rig)


@scenario("X18", "of two waiting clients of a user one dies")
def x18(rig: Rig) -> None:
    for first in (True, False):
        rig.note(f"the {'first' if first else 'second'} dies")
        rig.start("-d")
        holder = sleeper(rig, A, 30)
        rig.server()
        clients = [pending(rig, B, "sleep", 2)]
        rig.skip_log()
        clients.append(pending(rig, B, "sleep", 2))
        rig.pause(0.3)
        leave(rig, clients[0 if first else 1])
        leave(rig, holder)
        other = rig.spawn(C, "query")
        rig.wait(clients[1 if first else 0], 8)
        rig.wait(other, 8)
        rig.drain()
        for client in (*clients, other):
            rig.signal(client, SIGKILL)
        rig.signal(rig.daemon(), SIGKILL)
        rig.pause(0.5)


@scenario("X19", "a server is started while the pipe directory is shut")
def x19(rig: Rig) -> None:
    for mode in (0o700, 0o711):
        rig.pipe.chmod(0o755)
        rig.start("-d")
        rig.pipe.chmod(mode)
        rig.note(f"mode {mode:o}")
        rig.ctl(f"start_server -uid {NOBODY}", 5)
        rig.pause(1)
        rig.drain()
        rig.ctl("get_server_list", 3)
        query(rig, A)
        rig.drain()
        stop_all(rig)


@scenario("X20", "a client of the user whose server is exiting: who is served next")
def x20(rig: Rig) -> None:
    rig.start("-d")
    for pause in (0.0, 0.01, 0.03, 0.05):
        rig.note(f"pause {pause}")
        query(rig, A)
        other = rig.spawn(B, "query")
        rig.wait_log("from user 20002: Server is not ready", 5)
        rig.pause(pause)
        # Started before, so that it knocks within the exit (its start takes longer than that).
        own = [rig.spawn(A, "query") for _ in range(2)]
        for client in (other, *own):
            rig.wait(client)
        rig.drain()
    stop_all(rig)


@scenario("X21", "clients of the leaving user knock all the time while another user is served")
def x21(rig: Rig) -> None:
    rig.start("-d")
    for _ in range(4):
        query(rig, A)
        own = [rig.spawn(A, "query") for _ in range(3)]
        other = rig.spawn(B, "query")
        own += [rig.spawn(A, "query") for _ in range(6)]
        for client in (other, *own):
            rig.wait(client)
        rig.drain()
    stop_all(rig)
