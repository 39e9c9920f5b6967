"""The processes of the control daemon and the servers on this machine: real time, sockets and pidfds.

The daemon forks its servers. Both run the generators of `control_daemon` and `server` with poll().
"""

# pathlib costs more than everything else in the start of a daemon
# ruff: noqa: PTH116

from __future__ import annotations

import _io
import _socket
import fcntl
import gc
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from mpsagent_sim import registry, rendezvous, texts, wire
from mpsagent_sim.control_daemon import Daemon
from mpsagent_sim.control_files import AlreadyRunning, Files
from mpsagent_sim.delays import Delays, start_error
from mpsagent_sim.process_title import ProcessTitle, become
from mpsagent_sim.server import Server

if TYPE_CHECKING:
    from mpsagent_sim.host import Message, Steps

BUSY_EVERY = 0.1
"""Seconds between two notes of how long kernels have run."""


class Process:
    """This process. `ready`: the descriptors that were readable when its last wait ended."""

    def __init__(self, log: wire.Log, delays: Delays, pipe: str) -> None:
        self.log, self.delays, self.pipe = log, delays, pipe
        self.pid = os.getpid()
        self.ready: set[int] = set()

    @property
    def now(self) -> float:
        return time.monotonic()

    def run(self, steps: Steps[int]) -> int:
        """Run a generator to its end and return its result."""
        while True:
            try:
                files, until = next(steps)
            except StopIteration as end:
                return int(end.value)
            left = None if until is None else max(0.0, until - time.monotonic())
            if not files and left is not None:
                time.sleep(left)
                continue
            poll = select.poll()
            for file in files:
                poll.register(file, select.POLLIN)
            self.ready = {fd for fd, _ in poll.poll(None if left is None else left * 1000 + 0.5)}


class Connection:
    """One end of a connection. The descriptor is what is waited for."""

    __slots__ = ("fd", "file", "over", "process", "socket")

    def __init__(self, process: Process, socket: _socket.socket) -> None:
        self.process, self.socket = process, socket
        self.fd = self.file = socket.fileno()
        self.over = False

    def send(self, data: bytes, descriptor: Any = None) -> bool:
        return rendezvous.send(self.socket, data, None if descriptor is None else descriptor.fileno())

    def send_credentials(self, data: bytes) -> bool:
        return rendezvous.send_credentials(self.socket, data)

    def receive(self, size: int = rendezvous.SIZE) -> Steps[Message]:
        yield [self.file], None
        return rendezvous.receive(self.socket, size)

    def next(self) -> Message | None:
        message = rendezvous.arrived(self.socket, wire.MESSAGE)
        if message is None or message.data:
            return message
        self.over = True
        return None

    def readable(self) -> bool:
        return self.file in self.process.ready

    def hung_up(self) -> bool:
        return rendezvous.hung_up(self.socket)

    def close(self) -> None:
        self.socket.close()


class Listener:
    def __init__(self, process: Process, socket: _socket.socket) -> None:
        self.process, self.socket = process, socket
        self.file = socket.fileno()
        socket.setblocking(False)

    def accept(self) -> Connection | None:
        try:
            fd, _ = self.socket._accept()  # type: ignore[attr-defined]
        except BlockingIOError:
            return None
        connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, fileno=fd)
        connection.setsockopt(_socket.SOL_SOCKET, _socket.SO_PASSCRED, 1)
        return Connection(self.process, connection)


class Child:
    """A server process that this process has forked."""

    def __init__(self, process: Process, pid: int) -> None:
        self.process, self.pid = process, pid
        # out of the way: what is free below is for connections, as in the real daemon (X28)
        self.file = fcntl.fcntl(fd := os.pidfd_open(pid), fcntl.F_DUPFD_CLOEXEC, 64)
        os.close(fd)

    def readable(self) -> bool:
        return self.file in self.process.ready

    def kill(self) -> None:
        signal.pidfd_send_signal(self.file, signal.SIGKILL)

    def reap(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        os.close(self.file)
        return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0


class DaemonProcess(Process):
    """The process of the control daemon. Making it takes the pipe directory; raises AlreadyRunning, OSError."""

    def __init__(self, foreground: bool, multiuser: bool) -> None:
        self.files = Files()
        self.title = ProcessTitle()
        self.server_log, control_log = self.files.open(foreground)
        delays = Delays(float(os.environ.get("MPSSIM_SPEED") or 1), os.environ.get("MPSSIM_SEED"))
        super().__init__(wire.Log(control_log, "Control", os.getpid()), delays, self.files.pipe)
        self.owner = os.getuid()
        self.environment = os.environ
        self.listeners = [Listener(self, socket) for socket in self.files.listen()]
        words = ["nvidia-cuda-mps-control", "-f" if foreground else "-d"]
        self.title.set(*words, *(["--multiuser-server"] if multiuser else []))
        self.daemon = Daemon(self, multiuser)

    def pair(self) -> tuple[_socket.socket, _socket.socket]:
        pair = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        for end in pair:
            end.setsockopt(_socket.SOL_SOCKET, _socket.SO_PASSCRED, 1)
        return pair

    def start_server(self, uid: int, after_a_kill: bool) -> Child:
        pid = os.fork()
        if pid == 0:
            self._become_server(uid, after_a_kill)
        return Child(self, pid)

    def _become_server(self, uid: int, after_a_kill: bool) -> NoReturn:
        status = 1
        try:
            self.log.of("Control", os.getpid()).write(texts.STARTING_SERVER.format(pid=os.getpid(), uid=uid))
            kept = max(self.server_log, 2)
            os.closerange(3, kept)
            os.closerange(kept + 1, 4096)
            os.dup2(os.open("/dev/null", os.O_RDWR), 0)  # it may have been a client's (X28)
            os.chdir("/")
            self.title.set("nvidia-cuda-mps-server", *(["-multiuser-server"] if self.daemon.multiuser else []))
            become(uid, 0)  # with group 0 and no others (recording 08, G1)
            process = ServerProcess(wire.Log(self.server_log, "Other", os.getpid()), self.delays, self.pipe)
            process.busy = [registry.Busy(device.ordinal) for device in self.daemon.devices]
            status = process.run(Server(process, self.daemon.devices, uid).run(after_a_kill))
        except BaseException as error:
            wire.Log(self.server_log, "Other", os.getpid()).write(f"simulator error: {error!r}")
        finally:
            os._exit(status)

    def close_descriptor_0(self, connections: Iterable[Connection]) -> None:
        for one in connections:
            if one.fd == 0:  # it stays in its list
                one.socket.shutdown(_socket.SHUT_RDWR)
                return
        with suppress(OSError):
            os.close(0)

    def crash(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def remove_files(self) -> None:
        self.files.leave()


class ServerProcess(Process):
    """The process of a server."""

    def __init__(self, log: wire.Log, delays: Delays, pipe: str) -> None:
        super().__init__(log, delays, pipe)
        self.entry = registry.Entry("server")
        self.busy: list[registry.Busy] = []
        self.noting = False

    def connect(self) -> Connection:
        return Connection(self, rendezvous.connect(f"{self.pipe}/control"))

    def connection(self, message: rendezvous.Message) -> Connection:
        return Connection(self, _socket.socket(fileno=message.descriptors.pop(0)))

    def spare(self) -> _io.FileIO:
        return _io.FileIO("/dev/null")

    def start_error(self) -> str:
        return start_error()

    def in_use(self, ordinal: int) -> bool:
        return bool(registry.processes(ordinal))

    def use(self, ordinal: int, mebibytes: int) -> None:
        self.entry.write(ordinal, mebibytes)

    def holds(self, pid: int) -> bool:
        return registry.is_open(pid)

    def name(self, pid: int) -> str:
        return "3f"

    def namespace(self) -> str:
        try:
            return str(os.stat("/proc/self/ns/pid").st_ino)
        except OSError:
            return "0"

    def note_work(self, working: set[int], later: Callable[[float, Callable[[], None]], None]) -> None:
        """Note the values of NVML's counters. They are written a moment later, because there may be many short
        kernels."""
        now = self.now
        changed = [busy.note(now, at in working) for at, busy in enumerate(self.busy)]
        if any(changed) and not self.noting:
            self.noting = True
            later(BUSY_EVERY, self._write_work)

    def _write_work(self) -> None:
        self.noting = False
        for busy in self.busy:
            busy.write()

    def leave(self) -> None:
        self._write_work()
        self.entry.remove()


def _run(foreground: bool, multiuser: bool, report: int | None) -> NoReturn:
    try:
        process = DaemonProcess(foreground, multiuser)
    except AlreadyRunning:
        os.write(1, texts.ALREADY_RUNNING.encode())
        os._exit(1)
    except (OSError, ValueError) as error:
        os.write(2, f"mpsagent-sim: {error}\n".encode())
        os._exit(1)
    if report is not None:
        os.write(report, b"+")
        os.close(report)
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(null)
    try:
        gc.freeze()
        os._exit(process.run(process.daemon.run()))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        process.log.write("simulator error: " + repr(sys.exc_info()[1]))
    os._exit(1)


def main(foreground: bool, multiuser: bool) -> int:
    """Run in the foreground, or start in the background and return when that daemon is up."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if foreground:
        _run(True, multiuser, None)
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        os.setsid()
        _run(False, multiuser, writer)
    os.close(writer)
    return 0 if os.read(reader, 1) == b"+" else 1
