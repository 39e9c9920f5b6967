"""A gate on the stage: keeper, gate, stand-in daemon, clients of other users, and an agent's end of the link."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from mpsagent.mps.limits import Limits
from mpsagent.mps.rendezvous import CREDENTIALS, DESCRIPTOR, HELLO, Kind, kind_bytes
from mpsagent.wire.codec import encode
from mpsagent.wire.link import Admissions, FromAgent, FromGate, User, decode_from_gate
from tests.waiting import until

A, B, C = 30001, 30002, 30003
PATIENCE = 60.0
ROOT = Path(__file__).resolve().parent.parent.parent
GIB = 1 << 30
T = TypeVar("T")


def limits(threads: float, gigabytes: int = 0) -> Limits:
    return Limits(threads, {0: gigabytes * GIB} if gigabytes else {})


def admissions(*users: User, **more: Any) -> Admissions:
    values: dict[str, Any] = {"open": True, "devices": (0,), "fail_safe": limits(10, 1), "parallel": True}
    return Admissions(users={user.uid: user for user in users}, **(values | more))


def everybody(threads: float = 30, gigabytes: int = 2) -> User:
    return User(0, "all", limits(threads, gigabytes))


class Lines:
    """A process and what it prints, one JSON object a line; into a file, so that nothing waits for us to read."""

    def __init__(self, command: list[str], **more: Any) -> None:
        with tempfile.TemporaryFile() as output:
            self.process = subprocess.Popen(command, stdout=output, bufsize=0, **more)
            self._output = os.open(f"/proc/self/fd/{output.fileno()}", os.O_RDONLY)
        self.events: list[dict[str, Any]] = []
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        while data := os.read(self._output, 65536):
            *lines, self._rest = (self._rest + data).split(b"\n")
            self.events += [json.loads(line) for line in lines]
        return self.events

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if self._output >= 0:
            os.close(self._output)
            self._output = -1

    def saw(self, event: str, **more: Any) -> list[dict[str, Any]]:
        self.read()
        return [one for one in self.events if one["event"] == event and more.items() <= one.items()]


class Agent:
    """The agent's end of the link."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.connect(str(path))
        self.heard: list[FromGate] = []
        self.pidfds: dict[tuple[str, int], int] = {}

    def say(self, message: FromAgent) -> None:
        self.sock.send(encode(message))

    def read(self) -> list[FromGate]:
        while True:
            try:
                data, ancillary, _, _ = self.sock.recvmsg(1 << 17, 64, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            if not data:
                break
            message = decode_from_gate(data)
            self.heard.append(message)
            for _, kind, content in ancillary:
                assert kind == socket.SCM_RIGHTS
                key = (message.kind, message.pid)  # type: ignore[union-attr]
                if key in self.pidfds:
                    os.close(self.pidfds[key])
                self.pidfds[key] = struct.unpack("i", content)[0]
        return self.heard

    def all(self, cls: type[T], **more: Any) -> list[T]:
        self.read()
        return [
            one
            for one in self.heard
            if isinstance(one, cls) and all(getattr(one, name) == value for name, value in more.items())
        ]

    def wait(self, cls: type[T], count: int = 1, **more: Any) -> T:
        """The last of `count` such messages."""
        return until(lambda: found if len(found := self.all(cls, **more)) >= count else None)[count - 1]

    def close(self) -> None:
        self.sock.close()
        for descriptor in self.pidfds.values():
            os.close(descriptor)
        self.pidfds.clear()


_CLIENT = r"""
import json, os, signal, socket, struct, sys, time
path, uid, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
signal.signal(signal.SIGINT, signal.SIG_IGN)
if uid != os.getuid():
    os.setgroups([]); os.setgid(uid); os.setuid(uid)
def say(event, **more): print(json.dumps({"event": event, "at": time.monotonic(), **more}), flush=True)
def connect():
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    s.connect(path)
    assert s.recv(64) == b"OUTBHELL\0"
    return s
def one():
    try:
        connect().close()
        s = connect()
        who = struct.pack("iII", os.getpid(), os.geteuid(), os.getegid())
        s.sendmsg([b"OUTBCRED\0"], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, who)])
        s.send(b"\2\0\0\0")
        say("waiting")
        data, ancillary, _, _ = s.recvmsg(64, 256)
    except OSError as error:
        return say("refused", why=str(error))
    fds = [f for _, k, c in ancillary if k == socket.SCM_RIGHTS for (f,) in struct.iter_unpack("i", c)]
    if data != b"OUTBCUFD\0" or len(fds) != 1:
        return say("refused", why=data.hex())
    server = socket.socket(fileno=fds[0])
    if mode == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    if mode == "leave": return say("left")
    if mode == "leave to a child":
        if os.fork(): os._exit(0)
        sys.stdin.read()
        os._exit(0)
    if mode in ("lie", "lie and die"):
        s.send(bytes(4))
        if mode == "lie": return server
        os.kill(os.getpid(), signal.SIGKILL)
    while (word := server.recvmsg(64, 64)[0]) != b"\0": assert word
    for word in (b"OUTBCRED\0", bytes(4), b"\xff\0\0\0"):
        server.sendmsg([word], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, who)])
    assert server.recv(64) == bytes(4)
    got = server.recv(4096)
    if mode == "fault":
        s.send(struct.pack("<I", 807))
        return say("refused", why="807")
    s.send(bytes(4))
    s.close()
    say("served", **json.loads(got))
    return server
servers = [one()]
for line in sys.stdin:
    servers.append(one()) if line.strip() == "more" else None
    if line.strip() == "end": break
"""


class Client(Lines):
    """A CUDA client as far as the rendezvous goes: a probe, then a connection that waits for its descriptor."""

    def __init__(self, path: Path, uid: int, mode: str = "serve") -> None:
        command = [sys.executable, "-I", "-S", "-c", _CLIENT, str(path), str(uid), mode]
        super().__init__(command, stdin=subprocess.PIPE)
        self.uid = uid

    @property
    def pid(self) -> int:
        return self.process.pid

    def more(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"more\n")

    def waiting(self, count: int = 1) -> None:
        until(lambda: len(self.saw("waiting")) >= count)

    def stopped(self) -> None:
        """Waits until it has stopped itself: a signal to go on that comes before that is lost."""
        until(lambda: Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")

    def served(self, count: int = 1) -> dict[str, Any]:
        until(lambda: len(self.saw("served")) >= count or self.saw("refused"))
        assert not self.saw("refused"), self.saw("refused")
        return self.saw("served")[count - 1]


class Rig:
    """Everything in a directory that other users may enter; :meth:`close` ends what was started."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="gate"))
        self.directory.chmod(0o755)
        self.public = self.directory / "public"
        self.hidden = self.directory / "hidden"
        self.hidden.mkdir(mode=0o710)
        self.state = self.directory / "state"
        self.link = self.directory / "link"
        self.daemon: Lines | None = None
        self.others: list[Lines] = []
        """Daemons of further instances."""
        self.keeper: subprocess.Popen[bytes] | None = None
        self.may_end = False
        self._clients: list[Client] = []
        self._agents: list[Agent] = []
        self.errors = self.directory / "stderr"

    # --- parts ---

    def start_daemon(self, *options: str) -> Lines:
        command = [sys.executable, "-I", str(Path(__file__).with_name("stand_in.py")), str(self.hidden), *options]
        self.daemon = Lines(command)
        until(lambda: self.daemon.saw("ready"))  # type: ignore[union-attr]
        return self.daemon

    def start_instances(self, *names: str) -> list[Lines]:
        """A daemon each, the first of them the one that the gate is started for."""
        self.others = []
        for name in names:
            self.hidden = self.directory / "instances" / name / "pipe"
            self.hidden.mkdir(parents=True)
            self.others.append(self.start_daemon())
        self.hidden = self.directory / "instances" / names[0] / "pipe"
        self.daemon = self.others.pop(0)
        return [self.daemon, *self.others]

    def stop_daemon(self) -> None:
        assert self.daemon is not None
        self.daemon.end()

    def start_gate(self, program: str = "keep") -> None:
        words = ["--public", self.public, "--daemon", self.hidden, "--state", self.state]
        words += [] if program == "pass" else ["--link", self.link]
        with self.errors.open("ab") as errors:
            self.keeper = subprocess.Popen(
                [sys.executable, "-m", "mpsagent.gate.main", program, *map(str, words)], cwd=ROOT, stderr=errors
            )
        until(self._answers)
        if program == "keep":
            until(self.gate_pid)
            until(self.link.exists)

    def _answers(self) -> bool:
        assert self.keeper is not None
        assert self.keeper.poll() is None, self.errors.read_text()
        with suppress(OSError):
            raw(self.public / "control").close()
            return True
        return False

    def gate_pid(self) -> int:
        """The gate, child of the keeper; 0 when there is none."""
        assert self.keeper is not None
        assert self.keeper.poll() is None, self.errors.read_text()
        text = Path(f"/proc/{self.keeper.pid}/task/{self.keeper.pid}/children").read_text().split()
        return int(text[0]) if text else 0

    def kill_gate(self) -> None:
        """SIGKILL, and wait for the next one."""
        pid = until(self.gate_pid)
        os.kill(pid, signal.SIGKILL)
        until(lambda: self.gate_pid() not in (0, pid))

    def agent(self) -> Agent:
        def attempt() -> Agent | None:
            with suppress(OSError):
                return Agent(self.link)
            return None

        agent = until(attempt)
        self._agents.append(agent)
        return agent

    def start(self, said: FromAgent | None = None, *options: str) -> tuple[Lines, Agent]:
        """The daemon, and behind the gate an agent that has said this."""
        daemon = self.start_daemon(*options)
        self.start_gate()
        agent = self.agent()
        if said is not None:
            agent.say(said)
        return daemon, agent

    def client(self, uid: int, mode: str = "serve") -> Client:
        client = Client(self.public / "control", uid, mode)
        self._clients.append(client)
        return client

    def waiting_client(self, uid: int) -> Client:
        client = self.client(uid)
        client.waiting()
        return client

    def close(self) -> None:
        for client in self._clients:
            with suppress(ProcessLookupError):
                os.kill(client.pid, signal.SIGCONT)
            client.end()
            assert client.process.stdin is not None
            client.process.stdin.close()
        for agent in self._agents:
            agent.close()
        ended = ""
        if self.keeper is not None:
            if self.keeper.poll() is not None and not self.may_end:
                ended = f"it ended with {self.keeper.returncode}: {self.errors.read_text()}"
            self.keeper.terminate()
            self.keeper.wait(PATIENCE)
        if self.daemon is not None:
            self.stop_daemon()
        for other in self.others:
            other.end()
        shutil.rmtree(self.directory, ignore_errors=True)
        assert not ended, ended


def rigs() -> Iterator[Rig]:
    rig = Rig()
    try:
        yield rig
    finally:
        rig.close()


def raw(path: Path) -> socket.socket:
    """A connection that has read its greeting."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    sock.settimeout(PATIENCE)
    sock.connect(str(path))
    assert sock.recv(64) == HELLO
    return sock


def introduce(sock: socket.socket, kind: Kind = Kind.CLIENT) -> socket.socket:
    who = struct.pack("iII", os.getpid(), os.geteuid(), os.getegid())
    sock.sendmsg([CREDENTIALS], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, who)])
    sock.send(kind_bytes(kind))
    return sock


def descriptor(sock: socket.socket) -> dict[str, Any]:
    """Takes the descriptor, acknowledges, and says which limits it came with."""
    data, ancillary, _, _ = sock.recvmsg(64, 256)
    assert data == DESCRIPTOR
    number = next(struct.unpack("i", content)[0] for _, kind, content in ancillary if kind == socket.SCM_RIGHTS)
    with socket.socket(fileno=number) as server:
        while server.recv(64) != b"\0":
            pass
        for word in (CREDENTIALS, bytes(4), b"\xff\0\0\0"):
            server.send(word)
        assert server.recv(64) == bytes(4)
        sock.send(bytes(4))
        return dict(json.loads(server.recv(4096)))
