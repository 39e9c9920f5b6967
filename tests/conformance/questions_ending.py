"""Scenarios beyond the recordings: ending a stopped client without harm, and a socket in the place of the daemon's."""

from __future__ import annotations

import socket
import threading
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM

from tests.conformance.rig import Rig
from tests.conformance.script import A, scenario, sleeper, spinner, stop_all


def stopped(rig: Rig, order: str) -> None:
    """A neighbour works beside a stopped client with a kernel in flight; `order` says what is done to it: T
    terminate_client, C SIGCONT, E SIGTERM, K SIGKILL, digits are pauses in seconds, w waits for the answer."""
    rig.note(f"order {order}")
    neighbour = sleeper(rig, A, 9)
    victim = spinner(rig, A, 60)
    server = rig.server()
    rig.signal(victim, SIGSTOP)
    rig.pause(0.3)
    asked = None
    for position, step in enumerate(order):
        if step == "T":
            rig.skip_log()
            asked = rig.begin(f"terminate_client {server} {rig.pid(victim)}")
            if order[position + 1] in "EC":
                rig.wait_log("Cmd:terminate_client", 5)  # else a slower front-end comes after the signals
        elif step == "w" and asked is not None:
            rig.finish(asked, 4)
            asked = None
        elif step.isdigit():
            rig.pause(float(step))
        else:
            rig.signal(victim, {"C": SIGCONT, "E": SIGTERM, "K": SIGKILL}[step])
    if asked is not None:
        rig.finish(asked, 4)
    rig.signal(victim, SIGKILL)
    rig.wait(victim)
    rig.wait(neighbour, 20)
    rig.ctl(f"get_server_status {server}")
    rig.drain()


@scenario("X13", "ways to end a stopped client with a kernel in flight")
def x13(rig: Rig) -> None:
    rig.start("-d")
    for order in ("TCw", "CTw", "T1CwE", "TEC1w", "T5K", "T1K", "TK"):
        stopped(rig, order)
    stop_all(rig)


@scenario("X14", "a socket in the control daemon's place: what does a client do")
def x14(rig: Rig) -> None:
    rig.start("-d")
    rig.ctl("quit -t 1")
    rig.pause(0.3)
    place = rig.pipe / "control"
    for manner in ("closes at once", "listens and never accepts", "accepts and says nothing"):
        rig.note(f"socket that {manner}")
        place.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(place))
            place.chmod(0o666)
            listener.listen(16)
            held: list[socket.socket] = []

            def serve(
                listener: socket.socket = listener, manner: str = manner, held: list[socket.socket] = held
            ) -> None:
                try:
                    while manner != "listens and never accepts":
                        peer, _ = listener.accept()
                        if manner == "closes at once":
                            peer.close()
                        else:
                            held.append(peer)
                except OSError:
                    return

            threading.Thread(target=serve, daemon=True).start()
            client = rig.spawn(A, "query")
            rig.wait(client, 4)
            # How do those who wait end when the listener goes away?
            listener.shutdown(socket.SHUT_RDWR)
            for peer in held:
                peer.close()
        rig.wait(client, 10)
        rig.signal(client, SIGKILL)
        rig.wait(client)
    place.unlink(missing_ok=True)
    rig.note("SOCK_SEQPACKET in its place")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(place))
        place.chmod(0o666)
        listener.listen(16)
        client = rig.spawn(A, "query")
        rig.wait(client, 4)
    rig.wait(client, 10)
    rig.signal(client, SIGKILL)
    rig.wait(client)
