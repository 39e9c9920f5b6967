#!/usr/bin/env python3
"""A question to a real MPS: a client dies between its descriptor and its acknowledgement; what frees its server?

    stuck_server.py [--out DIR] [--only plain,garbage] [--sim]

Root, and a GPU with a driver that knows --multiuser-server; about two minutes. The relay stops the client right after
it has passed the descriptor on (so that it has said nothing to its server yet, or is in the middle), kills it, and then
does one of WAYS. After each: does the daemon answer, is another user's client served, is the server the same?
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.conformance.backends import real_backend, sim_backend
from tests.gpu.rendezvous_bench import CREDENTIALS, SCM_CREDENTIALS, Bench, Connection, Daemon, Relay

A, B = 20001, 20002


class Undertaker(Relay):
    """Keeps a copy of the descriptor of `index`; stops the client at once, kills it after `pause` and does `way`."""

    def __init__(self, bench: Bench, public: Path, real: Path, way: str, index: int, pause: float) -> None:
        self.bench, self.way, self.victim_index, self.delay = bench, way, index, pause
        self.done = threading.Event()
        super().__init__(public, real)

    def _forward(self, client: socket.socket, daemon: socket.socket, one: Connection) -> None:
        if one.index != self.victim_index or self.done.is_set():
            super()._forward(client, daemon, one)
            return
        daemon.settimeout(20)
        daemon.connect(str(self.real / "control"))
        daemon.recv(64)
        claim = [(socket.SOL_SOCKET, SCM_CREDENTIALS, struct.pack("iII", one.pid, one.uid, one.gid))]
        daemon.sendmsg([CREDENTIALS], claim)
        daemon.sendmsg([one.kind], claim)
        answer, ancillary, _, _ = daemon.recvmsg(64, 256)
        number = next(struct.unpack("i", data[:4])[0] for _, what, data in ancillary if what == socket.SCM_RIGHTS)
        if self.delay == 0:  # it never sees its descriptor
            os.kill(one.pid, signal.SIGSTOP)
        client.sendmsg([answer], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", number))])
        if self.delay:
            time.sleep(self.delay)
        os.kill(one.pid, signal.SIGKILL)
        time.sleep(0.3)
        with suppress(BlockingIOError, ConnectionError):
            client.settimeout(0.0)
            one.answer = f"client said {client.recv(64).hex() or 'nothing, gone'}"
        server = socket.socket(fileno=number)
        server.settimeout(1.0)
        if self.way == "plain":
            server.close()
            daemon.close()
        else:
            WAYS[self.way](server, daemon)
        self.bench.say(f"   {self.way}: {one.answer}")
        self.done.set()
        time.sleep(5)  # what was left open stays open while it is looked at
        server.close()


def own() -> list[tuple[int, int, bytes]]:
    return [(socket.SOL_SOCKET, SCM_CREDENTIALS, struct.pack("iII", os.getpid(), 0, 0))]


def garbage(server: socket.socket, daemon: socket.socket) -> None:
    """Where the server waits for credentials it gets something else."""
    server.send(b"OUTBNOPE\0")
    server.close()
    daemon.close()


def garbage_only(server: socket.socket, daemon: socket.socket) -> None:
    server.send(b"OUTBNOPE\0")


def shut(server: socket.socket, daemon: socket.socket) -> None:
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    daemon.close()


def acknowledge(server: socket.socket, daemon: socket.socket) -> None:
    """The daemon is told that all is well."""
    server.close()
    daemon.sendmsg([bytes(4)], own())
    daemon.close()


def acknowledge_error(server: socket.socket, daemon: socket.socket) -> None:
    """The daemon is told MPS_CONNECTION_FAILED."""
    server.close()
    daemon.sendmsg([struct.pack("<I", 805)], own())
    daemon.close()


def finish(server: socket.socket, daemon: socket.socket) -> None:
    """The client's part is played to its end (recording 08, G1), with our own credentials, and then hung up."""
    with suppress(OSError):
        for _ in range(8):
            data, ancillary, _, _ = server.recvmsg(64, 256)
            for _, kind, content in ancillary:
                if kind == socket.SCM_RIGHTS:
                    for (number,) in struct.iter_unpack("i", content):
                        os.close(number)
            if data == b"\0" or not data:
                break
    with suppress(OSError):
        server.sendmsg([CREDENTIALS], own())
        server.send(bytes(4))
        server.send(b"\xff\0\0\0")
        server.recv(64)
    server.close()
    with suppress(OSError):
        daemon.sendmsg([bytes(4)], own())
    daemon.close()


def hang_up_first(server: socket.socket, daemon: socket.socket) -> None:
    """Only the way to the daemon is closed; the copy of the descriptor stays."""
    daemon.close()


WAYS: dict[str, Callable[[socket.socket, socket.socket], None]] = {
    "plain": lambda *_: None,
    "finish": finish,
    "garbage": garbage,
    "acknowledge": acknowledge,
    "shut": shut,
    "acknowledge_error": acknowledge_error,
    "garbage_only": garbage_only,
    "hang_up_first": hang_up_first,
}


def attempt(bench: Bench, way: str, index: int, pause: float) -> None:
    daemon = Daemon(bench, "--multiuser-server")
    first = Relay(daemon.public, daemon.pipe)
    warm = bench.client(daemon, A, "sleep", 60)
    warm.said(r"\] sms ")
    first.end()
    servers = daemon.servers()
    relay = Undertaker(bench, daemon.public, daemon.pipe, way, index, pause)
    bench.relays.append(relay)
    victim = bench.client(daemon, B, "query")
    relay.done.wait(15)
    victim.ended(2)
    began = time.monotonic()
    listed = daemon.ctl("get_server_list", "get_default_active_thread_percentage", timeout=1.5).split()
    asked = daemon.ctl(f"get_active_thread_percentage {servers[0]}", timeout=1.5).strip() if servers else ""
    # past the lock of the relay, which the victim's thread still has
    relay.one_at_a_time = threading.Lock()
    other = bench.client(daemon, A, "query")
    rc = other.ended(3)
    title = f"{way}, connection {index}, killed {'stopped' if not pause else f'after {pause * 1000:g} ms'}"
    bench.say(
        f"ANSWER {title}: daemon {listed}, server before {servers}, limits {asked!r}, next client rc {rc} "
        f"{other.short()[-70:]!r} ({time.monotonic() - began:.2f} s); neighbour alive {warm.process.poll() is None}"
    )
    daemon.show("control", "server", skip="Accepting|NEW UI|UI closed|Cmd:", most=12)
    bench.between()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", ""))
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--sim", action="store_true")
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="mpss", dir="/tmp"))
    place.chmod(0o755)
    backend = sim_backend(place) if options.sim else real_backend(place)
    out = Path(options.out) if options.out else None
    bench = Bench(backend.control, backend.client, dict(backend.environment), out, options.seconds)
    try:
        for way in WAYS:
            if options.only and way not in options.only.split(","):
                continue
            for index, pause in ((0, 0.0), (1, 0.0), (0, 0.002), (1, 0.002)):
                if pause and way not in ("plain", "finish", "garbage"):
                    continue
                if time.monotonic() > bench.deadline - 20:
                    bench.say(f"left out: {way} {index} {pause}")
                    continue
                try:
                    attempt(bench, way, index, pause)
                except Exception as error:
                    bench.say(f"ANSWER {way}, connection {index}: broken off: {error!r}")
                    bench.between()
    finally:
        bench.end()
        shutil.rmtree(place, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
