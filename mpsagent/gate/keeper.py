"""The parent for machines without systemd: binds the public sockets, starts the gate, keeps what the gate stores, and
starts it again when it dies. Small and slow to surprise, because everything hangs on it; the standard library's
smallest modules only."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mpsagent.linux import notify
from mpsagent.linux.backoff import Backoff
from mpsagent.linux.descriptors import SCM_CREDENTIALS, SO_PASSCRED, close_all, descriptors_in
from mpsagent.linux.listen import FIRST_DESCRIPTOR, bind_masked
from mpsagent.mps.rendezvous import CONTROL, PRIVILEGED

MOST_KEPT = 40_000
OF_PROCESSES = tuple("kobwul")
"""With these letters the names of processes begin, see :class:`mpsagent.gate.store.KnownName`."""
BACKLOG = 4096
FIRST_PAUSE = 0.02
LONGEST_PAUSE = 2.0
LIVED = 10.0
"""Seconds after which a gate that dies counts as one that had worked."""
STOPPING = 5.0
LOOK = 1.0
"""Seconds between two looks whether the public sockets are still there."""
NAME_SPACE = 120_000


PUBLIC_NAMES = (CONTROL, PRIVILEGED)


def say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"mpsagent-gate keep: {text}\n".encode())


def raise_file_limit() -> None:
    """As many descriptors as the kernel lets us."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        wanted = max(most, 65_536)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
        return
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def public_sockets(directory: Path, *, named: bool = False) -> list[tuple[str, socket.socket]]:
    """The listening sockets ``control`` and ``control_privileged``, in a directory that only we may write to.
    ``named``: their address is its path, whose parents are ours too. Raises OSError."""
    directory.mkdir(mode=0o755, parents=False, exist_ok=True)
    place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(place)
        if found.st_uid != os.geteuid():
            raise PermissionError(
                f"{directory} belongs to user {found.st_uid}, who could replace the gate's sockets there: remove "
                "it, or choose another directory"
            )
        os.fchmod(place, 0o755)
        sockets = []
        for name, mode in zip(PUBLIC_NAMES, (0o666, 0o755), strict=True):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            sock.setsockopt(socket.SOL_SOCKET, SO_PASSCRED, 1)
            path = f"{directory}/{name}" if named else f"/proc/self/fd/{place}/{name}"
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=place)
            bind_masked(sock, path, 0o777 & ~mode)
            os.chmod(name, mode, dir_fd=place)
            sock.listen(BACKLOG)
            sockets.append((name, sock))
        return sockets
    finally:
        os.close(place)


class Kept:
    """What the gate has stored: names and our copies of the descriptors. One name, one descriptor."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def items(self) -> list[tuple[str, int]]:
        return list(self._descriptors.items())

    def hear(self, message: bytes, descriptors: Sequence[int]) -> None:
        """One notification. Descriptors that are not kept are closed."""
        fields = dict(line.partition("=")[::2] for line in message.decode("utf-8", "replace").splitlines())
        name = fields.get("FDNAME", "")
        kept = None
        if fields.get("FDSTORE") == "1" and descriptors and _is_name(name) and len(self._descriptors) < MOST_KEPT:
            self.drop(name)
            kept = descriptors[0]
            self._descriptors[name] = kept
        elif fields.get("FDSTOREREMOVE") == "1":
            self.drop(name)
        close_all(one for one in descriptors if one != kept)

    def drop(self, name: str) -> None:
        descriptor = self._descriptors.pop(name, None)
        if descriptor is not None:
            close_all([descriptor])

    def forget_the_dead(self) -> None:
        """Before a start: processes that have ended need not be given to the gate."""
        poll = select.poll()
        for name, descriptor in self._descriptors.items():
            # what a client sent before it hung up may say that it has its descriptor: the gate looks at those itself
            if name.startswith(OF_PROCESSES):
                poll.register(descriptor, select.POLLIN)
        gone = {descriptor for descriptor, _ in poll.poll(0)}
        for name, descriptor in self.items():
            if descriptor in gone:
                self.drop(name)


def _is_name(name: str) -> bool:
    return 0 < len(name) < 256 and all(" " <= letter <= "~" and letter != ":" for letter in name)


class Keeper:
    """``command`` runs the gate; ``directory`` is the state directory, where the notification socket lies."""

    def __init__(self, command: Sequence[str], public: Path, directory: Path) -> None:
        self._command = list(command)
        self._kept = Kept()
        self._child = 0
        self._stopping = False
        self._public = public
        self._sockets = public_sockets(public)
        self._said = ""
        self._address = str(directory / "notify")
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._notify.setsockopt(socket.SOL_SOCKET, SO_PASSCRED, 1)
        with suppress(OSError):
            self._notify.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        with suppress(FileNotFoundError):
            Path(self._address).unlink()
        bind_masked(self._notify, self._address)
        self._ready_to = notify.address()

    def run(self) -> int:
        """Until SIGTERM or SIGINT; the exit status."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        poll = select.poll()
        poll.register(self._notify, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        again, started, start_at = Backoff(FIRST_PAUSE, LONGEST_PAUSE), 0.0, 0.0
        while not self._stopping:
            now = time.monotonic()
            if not self._child and now >= start_at:
                started = now
                self._listen()
                self._kept.forget_the_dead()
                try:
                    self._child = self._start()
                except OSError as error:
                    say(f"the gate cannot be started: {error}")
                    start_at = now + again.pause()
            timeout = LOOK if self._child else max(0.0, start_at - time.monotonic())
            poll.poll(timeout * 1000)
            self._look()
            with suppress(BlockingIOError):
                os.read(wake_read, 4096)
            self._listen()
            status = self._reap()
            if status is not None and not self._stopping:
                start_at = time.monotonic()
                if start_at - started >= LIVED:
                    again.reset()
                else:
                    start_at += again.pause()
                say(f"the gate has ended ({_ended(status)}) and is started again with {len(self._kept.items())} kept")
        return self._end()

    def _look(self) -> None:
        """Public sockets that were removed are made again: who starts without them runs outside MPS. The gate gets them
        by being started anew, and those before once more, because a client may be about to be accepted there."""
        if self._stopping or all(os.path.lexists(self._public / name) for name in PUBLIC_NAMES):
            return
        try:
            made = public_sockets(self._public)
        except OSError as error:
            text = f"the public sockets have been removed and cannot be made again: {error}"
            if text != self._said:
                say(text)
            self._said = text
            return
        self._said = ""
        say(f"the public sockets in {self._public} had been removed and are made again")
        for _, sock in self._sockets[len(made) :]:
            sock.close()
        self._sockets = [*made, *self._sockets[: len(made)]]
        if self._child:
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGTERM)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _end(self) -> int:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._child:
                with suppress(ProcessLookupError):
                    os.kill(self._child, number)
            limit = time.monotonic() + STOPPING
            while self._child and time.monotonic() < limit:
                time.sleep(0.01)
                self._reap()
        with suppress(OSError):
            Path(self._address).unlink()
        return 0

    def _reap(self) -> int | None:
        """The wait status of the gate, when it has ended. Other children are not ours to have."""
        if not self._child:
            return None
        try:
            pid, status = os.waitpid(self._child, os.WNOHANG)
        except ChildProcessError:
            pid, status = self._child, 0
        if pid == 0:
            return None
        self._listen()  # what it stored last
        self._child = 0
        return status

    # --- notifications ---

    def _listen(self) -> None:
        while True:
            try:
                message, ancillary, _, _ = self._notify.recvmsg(4096, 256, socket.MSG_CMSG_CLOEXEC)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                say(f"a notification is lost: {error}")
                return
            senders = [struct.unpack("i", one[:4])[0] for _, kind, one in ancillary if kind == SCM_CREDENTIALS]
            descriptors = descriptors_in(ancillary)
            if not self._child or senders != [self._child]:
                close_all(descriptors)
                continue
            self._kept.hear(message, descriptors)
            self._pass_on(message)

    def _pass_on(self, message: bytes) -> None:
        """READY=1 and the like to whoever started us."""
        words = [line for line in message.splitlines() if not line.startswith((b"FDSTORE", b"FDNAME", b"FDPOLL"))]
        if words:
            notify.send(self._ready_to, b"\n".join(words))

    # --- the child ---

    def _start(self) -> int:
        given = [(name, sock.fileno()) for name, sock in self._sockets]
        room = NAME_SPACE
        for name, descriptor in self._kept.items():
            room -= len(name) + 1
            if room > 0:
                given.append((name, descriptor))
        pid = os.fork()
        if pid:
            return pid
        try:
            self._become_gate(given)
        except BaseException as error:
            say(f"the gate cannot be started: {error}")
        os._exit(127)

    def _become_gate(self, given: Sequence[tuple[str, int]]) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        lowest = FIRST_DESCRIPTOR + len(given)
        copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, lowest) for _, descriptor in given]
        for index, copy in enumerate(copies):
            os.dup2(copy, FIRST_DESCRIPTOR + index, inheritable=True)
        os.closerange(lowest, max(copies, default=lowest) + 1)
        environment: Mapping[str, str] = {
            **os.environ,
            "LISTEN_PID": str(os.getpid()),
            "LISTEN_FDS": str(len(given)),
            "LISTEN_FDNAMES": ":".join(name for name, _ in given),
            "NOTIFY_SOCKET": self._address,
        }
        os.execve(self._command[0], self._command, environment)  # noqa: S606


def _ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return f"exit status {os.waitstatus_to_exitcode(status)}"


def gate_command(arguments: Sequence[str]) -> list[str]:
    """The gate itself, run by this interpreter."""
    return [sys.executable, "-P", "-m", "mpsagent.gate.main", "run", *arguments]


def check_state_directory(directory: Path) -> None:
    """Makes it, and makes sure that only we may write there (others may enter: the API's socket may lie there, too).
    Raises OSError."""
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{directory} must be a directory of user {os.geteuid()} that only this user may write to"
        )
