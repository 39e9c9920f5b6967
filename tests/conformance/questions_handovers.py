"""Scenarios beyond the recordings: a client dies at each step of its hand-over, behind a relay that can stand still, as
mpsagent's gate is one. Root's relay passes the client's credentials on."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
from signal import SIGKILL, SIGSTOP

from tests.conformance.rig import Rig
from tests.conformance.script import A, B, query, scenario, sleeper, stop_all

STEPS = {
    "said": "it has said who it is, and nothing was passed on",
    "asked": "the daemon has heard who it is",
    "answered": "the daemon has answered with a descriptor, which the relay has",
    "given": "it is stopped, and has not read its descriptor",
    "acknowledged": "it has met its server and said so, and the daemon was not told",
}


class Relay:
    """At DIRECTORY/control; stands still before the step that was named, in the hand-over of that number."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.directory = str(rig.base / "relay")
        os.mkdir(self.directory, 0o755)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.listener.bind(f"{self.directory}/control")
        os.chmod(f"{self.directory}/control", 0o666)
        self.listener.listen(64)
        self.stop: tuple[int, str] | None = None
        self.count = 0
        self.reached, self.goes = threading.Event(), threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def at(self, number: int, step: str) -> None:
        self.stop = number, step

    def wait(self, seconds: float = 10.0) -> bool:
        return self.reached.wait(seconds)

    def go(self) -> None:
        self.stop = None
        self.goes.set()

    def close(self) -> None:
        self.go()
        self.listener.close()

    def _hold(self, step: str) -> None:
        if self.stop == (self.count, step):
            self.reached.set()
            self.goes.wait(30)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self.listener.accept()[0]
                with contextlib.suppress(OSError), client:
                    self._serve(client)

    def _serve(self, client: socket.socket) -> None:
        client.send(b"OUTBHELL\0")
        said, who, _ = _packet(client)
        if said != b"OUTBCRED\0" or _packet(client)[0] != b"\2\0\0\0":
            return
        self.count += 1
        self._hold("said")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as daemon:
            daemon.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            daemon.connect(str(self.rig.pipe / "control"))
            _packet(daemon)
            daemon.sendmsg([said], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, who)])
            daemon.send(b"\2\0\0\0")
            self._hold("asked")
            answer, _, descriptors = _packet(daemon)
            try:
                if answer:
                    self._hold("answered")
                    given = array.array("i", descriptors)
                    client.sendmsg([answer], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, given)])
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            if answer:
                self._hold("given")
                status = _packet(client)[0]
                self._hold("acknowledged")
                if status:
                    daemon.send(status)


def _packet(connection: socket.socket) -> tuple[bytes, bytes, list[int]]:
    """One packet: its bytes, its credentials and its descriptors."""
    data, ancillary, _, _ = connection.recvmsg(8192, 512)
    who, descriptors = b"", array.array("i")
    for _, kind, content in ancillary:
        if kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) // 4 * 4])
        elif kind == socket.SCM_CREDENTIALS:
            who = content
    return data, who, list(descriptors)


def dies(rig: Rig, number: int, step: str, multiuser: bool) -> None:
    """A client behind the relay is killed there; a neighbour works, and another user's client comes afterwards."""
    rig.start("-d", *(["--multiuser-server"] if multiuser else []))
    neighbour = sleeper(rig, A, 6)
    relay = rig.relay()
    relay.at(number, "answered" if step == "given" else step)
    client = rig.spawn(A, "query", env={"CUDA_MPS_PIPE_DIRECTORY": relay.directory})
    if not relay.wait():
        rig.note("WAIT-TIMEOUT the relay never came there")
    if step == "given":
        rig.signal(client, SIGSTOP)
        relay.go()
    rig.pause(0.3)
    rig.drain()
    rig.signal(client, SIGKILL)
    rig.pause(0.3)
    relay.go()
    rig.pause(0.3)
    rig.wait(client)
    rig.drain()
    server = rig.server()
    rig.ctl("get_server_list", 2)
    rig.ctl(f"get_server_status {server}", 2)
    rig.ctl(f"get_client_list {server}", 2)
    late = rig.spawn(A, "query")
    rig.wait(late, 4)
    rig.wait(neighbour, 8)
    rig.drain()
    relay.close()
    if multiuser:
        other = rig.spawn(B, "query")
        rig.wait(other, 4)
        rig.signal(other, SIGKILL)
    rig.signal(late, SIGKILL)
    rig.drain()


def _register(name: str, number: int, step: str, multiuser: bool) -> None:
    what = "its channel" if number == 1 else "its context"
    form = "on a server for all users" if multiuser else "on a server of its user"

    @scenario(name, f"a client dies in the hand-over of {what}, {form}: {STEPS[step]}")
    def play(rig: Rig) -> None:
        dies(rig, number, step, multiuser)


for _place, _step in enumerate(STEPS):
    _register(f"H{_place + 1}", 1, _step, False)
    _register(f"H{_place + 6}", 2, _step, False)
    _register(f"H{_place + 11}", 1 + _place % 2, _step, True)


@scenario("H16", "a relay passes on who came, and nobody dies: what MPS says of its client")
def h16(rig: Rig) -> None:
    rig.start("-d")
    relay = rig.relay()
    client = rig.spawn(A, "sleep", 2, env={"CUDA_MPS_PIPE_DIRECTORY": relay.directory})
    rig.working(client)
    rig.pause(0.2)
    server = rig.server()
    rig.ctl("get_server_list")
    rig.ctl(f"get_client_list {server}")
    rig.ctl(f"get_server_status {server}")
    query(rig, A)
    rig.wait(client)
    rig.drain()
    relay.close()
    stop_all(rig)
