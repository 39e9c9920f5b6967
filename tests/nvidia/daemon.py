"""NVIDIA's control daemon, and ways to talk to it: natively, by its own front-end, and as a CUDA client."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mpsagent.linux import peers
from mpsagent.mps import rendezvous as rv
from mpsagent.mps.events import Line
from mpsagent.mps.loglines import LogParser
from tests.nvidia.fetch import Driver
from tests.waiting import until

SO_PASSCRED, SCM_CREDENTIALS = 16, 2
LIMIT = 60.0
"""Seconds after which something that should happen counts as not happening."""
USER = 61101
"""A uid that no account has."""

# The interpreter may lie where only root may look, so it starts as root and becomes the user before libcuda is loaded.
_CUDA = """
import ctypes, os, sys
if int(sys.argv[1]):
    os.setgroups([])
    os.setresgid(*[int(sys.argv[1])] * 3)
    os.setresuid(*[int(sys.argv[1])] * 3)
print(ctypes.CDLL(sys.argv[2]).cuInit(0))
"""


# NVIDIA's libcuda makes /dev/nvidiactl where there is none, when root runs it, and leaves it behind.
WITHOUT_DEVICE_FILES = ["setpriv", "--inh-caps", "-mknod", "--bounding-set", "-mknod"] if os.geteuid() == 0 else []


def as_user(uid: int) -> list[str]:
    return ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups"] if uid else []


class Daemon:
    """A control daemon of its own directories below ``place``: ``pipe`` and ``log``, with ``mode``. ``prefix``: what
    starts it, in the foreground."""

    def __init__(
        self, driver: Driver, place: Path, mode: int = 0o710, foreground: bool = False, prefix: Sequence[str] = ()
    ) -> None:
        self.driver = driver
        self.pipe, self.log = place / "pipe", place / "log"
        place.mkdir()
        place.chmod(0o755)
        for directory in (self.pipe, self.log):
            directory.mkdir()
            directory.chmod(mode)
        self.environment = {
            **driver.environment(),
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.log),
        }
        # In the foreground it writes no files: what it prints is kept where they would be.
        self.printed = place / "printed"
        self._keeper: subprocess.Popen[bytes] | None = None
        if foreground:
            with self.printed.open("wb") as out:
                self._keeper = subprocess.Popen(
                    [*prefix, *WITHOUT_DEVICE_FILES, "nvidia-cuda-mps-control", "-f"],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    preexec_fn=_no_core,
                )
            self._find()
        else:
            done = self.start_again()
            assert done.returncode == 0, done

    def start_again(self, **environment: str) -> subprocess.CompletedProcess[bytes]:
        """One more ``nvidia-cuda-mps-control -d`` in these directories."""
        done = subprocess.run(
            [*WITHOUT_DEVICE_FILES, "nvidia-cuda-mps-control", "-d"],
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT,
            preexec_fn=_no_core,
        )
        if done.returncode == 0:
            self._find()
        return done

    def _find(self) -> None:
        until(self._answers, "the daemon does not listen")
        with self._connected("control") as probe:
            self.pid = _peer(probe)

    @property
    def control(self) -> Path:
        return self.pipe / "control"

    @property
    def privileged(self) -> Path:
        return self.pipe / "control_privileged"

    def _connected(self, name: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(str(self.pipe / name))
        except OSError:
            connection.close()
            raise
        return connection

    def _answers(self) -> bool:
        try:
            with self._connected("control") as probe:
                return bool(select.select([probe], [], [], 1.0)[0])
        except OSError:
            return False

    @property
    def alive(self) -> bool:
        if self._keeper is not None:
            return self._keeper.poll() is None
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def end(self) -> None:
        """SIGKILL; its servers exit with it."""
        if self.alive:
            with suppress(ProcessLookupError):  # one that was told to quit
                os.kill(self.pid, signal.SIGKILL)
        if self._keeper is not None:
            self._keeper.wait(LIMIT)

    def lines(self, name: str = "control") -> list[str]:
        """Lines of a log without their heads; in the foreground control's and servers' lines come mixed."""
        return [line.partition("] ")[2] for line in self.text(name).splitlines()]

    def text(self, name: str = "control") -> str:
        path = self.printed if self._keeper is not None else self.log / f"{name}.log"
        return path.read_text(errors="replace")

    def events(self) -> list[Line]:
        """What the parser makes of all that was written."""
        if self._keeper is not None:
            return LogParser("merged").feed(self.printed.read_bytes())
        return [
            *LogParser("control").feed((self.log / "control.log").read_bytes()),
            *LogParser("server").feed((self.log / "server.log").read_bytes()),
        ]

    def front_end(self, text: str, uid: int = 0) -> subprocess.CompletedProcess[str]:
        return front_end(self.driver, self.pipe, text, uid)

    def session(self, uid: int = 0, socket_name: str = "") -> Session:
        """A front-end's session; root's at ``control_privileged`` like NVIDIA's own, others' at ``control``."""
        return Session(self.pipe / (socket_name or ("control" if uid else "control_privileged")), uid)


class Session:
    """What a relay run by root says for a front-end or a client: their credentials, passed on."""

    def __init__(self, path: Path, uid: int = 0, kind: rv.Kind | None = rv.Kind.FRONT_END, pid: int = 0) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setsockopt(socket.SOL_SOCKET, SO_PASSCRED, 1)
        self.socket.settimeout(LIMIT)
        self.socket.connect(str(path))
        self._kind = kind
        self._number = 0
        self._credentials = peers.Credentials(pid or os.getpid(), uid, uid)
        self.greeting = self.receive()
        self.send_as(rv.CREDENTIALS)
        if kind is not None:
            self.send_as(rv.kind_bytes(kind))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        """A front-end's session ends in the proper way where it can: closed without it, the daemon may take the next
        connection before it has seen that this one is gone, and turn it away."""
        if self._kind is rv.Kind.FRONT_END:
            try:
                self.socket.send(rv.END)
                while self.receive():
                    pass
            except OSError:
                pass
        self.socket.close()

    def send_as(self, message: bytes) -> None:
        self.socket.sendmsg([message], [(socket.SOL_SOCKET, SCM_CREDENTIALS, self._credentials.pack())])

    def receive(self) -> bytes:
        """The next message; nothing when the daemon has closed."""
        try:
            return self.socket.recvmsg(rv.LONGEST_MESSAGE + 1, 512)[0]
        except ConnectionResetError:
            return b""

    def send(self, text: str) -> None:
        for message in rv.command_messages(text):
            self.socket.send(message)

    def ask(self, text: str) -> list[str]:
        """All answers to a command: those before the answer to a question that no other command answers like that."""
        self._number += 1
        token = f"token-{self._number}"
        self.send(text)
        self.send(token)
        answers = []
        while True:
            message = self.receive()
            answer = rv.decode_answer(message)
            assert isinstance(answer, rv.Answer), (text, answers, message)
            if answer.text == f'Unknown command "{token}"':
                return answers
            answers.append(answer.text)

    def finish(self) -> rv.Exit:
        self.socket.send(rv.END)
        answer = rv.decode_answer(self.receive())
        assert isinstance(answer, rv.Exit), answer
        return answer


def front_end(driver: Driver, pipe: Path, text: str, uid: int = 0) -> subprocess.CompletedProcess[str]:
    """NVIDIA's own front-end, as a user."""
    return subprocess.run(
        [*as_user(uid), "nvidia-cuda-mps-control"],
        env={**driver.environment(), "CUDA_MPS_PIPE_DIRECTORY": str(pipe)},
        input=text,
        text=True,
        errors="replace",  # those of 470 and 535 print what lies behind the longest answer, too
        capture_output=True,
        timeout=LIMIT,
    )


def client_words(driver: Driver, uid: int = 0, python: str = sys.executable) -> list[str]:
    """The command line of a CUDA client, which becomes user ``uid``."""
    return [python, "-I", "-S", "-c", _CUDA, str(uid), str(driver.libraries / "libcuda.so.1")]


def client(driver: Driver, pipe: Path, uid: int = 0, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
    """A CUDA client: a process that calls ``cuInit`` of NVIDIA's libcuda and prints what it returns."""
    return subprocess.Popen(
        [*prefix, *WITHOUT_DEVICE_FILES, *client_words(driver, uid)],
        env={**driver.environment(), "CUDA_MPS_PIPE_DIRECTORY": str(pipe)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> int:
    """What ``cuInit`` returned."""
    out, _ = process.communicate(timeout=LIMIT)
    return int(out)


def _peer(connection: socket.socket) -> int:
    return peers.peer(connection).pid


def _no_core() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
