"""The model of the kernel: virtual time, processes, descriptors, Unix sockets, pidfds, files, and who runs next.

One seeded source of chance orders everything. Nothing here knows what runs on it: a process is a *body*, which is
either a generator (the models of NVIDIA's programs and of people) or an event loop (``loop.Loop``: the real gate and
agent). A body runs until it waits; who is ready runs a moment later, and the moments are drawn by chance, so
any order that a real machine can have comes up. In the middle of a real program's system calls others may run, too.
"""

from __future__ import annotations

import errno
import heapq
import random
import stat as st
from collections import deque
from collections.abc import Callable, Generator, Iterable
from math import log
from typing import Any

LATENCY = 50e-6
"""Mean seconds from being ready to running."""
READY = 1 / LATENCY
BOOT = 1_000.0
EPOCH = 1_800_000_000.0
PIDS = 400
"""Process numbers are few, so that they are used again soon."""
HIDDEN = 1_000_000
BUFFER, OVERHEAD, DATAGRAMS = 212_992, 768, 512
"""Bytes that a socket may have on the way, what each message counts beside its own, and how many datagrams wait."""


EFFECTS = frozenset({
    "accept", "bind", "close", "connect", "flock", "kill", "listen", "mkdir", "open", "receive", "rename", "rmdir",
    "send", "setsockopt", "shutdown", "unlink", "write",
})  # fmt: skip
"""Calls that others can notice. To die before any other one is the same as to die before the next of these."""


LEFT_BY_DEATH = frozenset({"close", "flock"})
"""Of these: to die behind it leaves the same as to die before it."""


class Killed(BaseException):
    """The process that runs has been killed. It is thrown at its next system call."""


class File:
    """An open file, pipe end, socket or pidfd: what descriptors point to. It goes with its last descriptor."""

    kind = "file"

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.references = 0
        self.watchers: dict[Process, int] = {}

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def changed(self) -> None:
        """Who waits for it looks again."""
        if self.watchers:
            for process in list(self.watchers):
                process.look(self)

    def take(self) -> File:
        self.references += 1
        return self

    def drop(self) -> None:
        self.references -= 1
        if self.references == 0:
            self.last()

    close = drop

    def last(self) -> None:
        """Its last descriptor has been closed."""


class Message:
    __slots__ = ("credentials", "data", "files")

    def __init__(self, data: bytes, credentials: tuple[int, int, int] | None, files: list[File]) -> None:
        self.data, self.credentials, self.files = data, credentials, files

    def close(self) -> None:
        """Nothing is done with its files."""
        for file in self.files:
            file.drop()
        self.files = []


class Socket(File):
    kind = "socket"

    def __init__(self, kernel: Kernel, datagrams: bool = False) -> None:
        super().__init__(kernel)
        self.datagrams = datagrams
        self.peer: Socket | None = None
        self.messages: deque[Message] = deque()
        self.waiting = 0
        """Bytes that have come and are unread."""
        self.queue: deque[Socket] | None = None
        """Connections that are not accepted yet; None: it does not listen."""
        self.backlog = 0
        self.owner: tuple[Process, int, int] | None = None
        """Who is at the other end: the process that connected, or listened, with its user and group at that time."""
        self.senders: list[Socket] = []
        """Of datagrams."""
        self.priority = 0
        self.credentials = False
        self.accepted = float("-inf")
        """When the other end was."""
        self.reset = self.over = False
        self.address = self.heard = ""

    def readable(self) -> bool:
        return bool(self.messages or self.queue or self.over or self.reset)

    def writable(self) -> bool:
        return self.peer is None or not self.peer.full

    @property
    def full(self) -> bool:
        return self.waiting >= self.kernel.buffer or (self.datagrams and len(self.messages) >= DATAGRAMS)

    def hear(self, message: Message) -> None:
        self.kernel.happened += 1
        self.messages.append(message)
        self.waiting += len(message.data) + OVERHEAD
        self.changed()

    def next(self) -> Message:
        message = self.messages.popleft()
        self.waiting -= len(message.data) + OVERHEAD
        for one in (self.peer, *self.senders):
            if one is not None:
                one.changed()
        return message

    def hang_up(self, rude: bool) -> None:
        """The other end has gone; ``rude``: with something unread."""
        self.over = True
        self.reset = self.reset or rude
        self.changed()

    def last(self) -> None:
        for one in self.queue or ():
            if one.peer is not None:
                one.peer.hang_up(True)
            one.peer = None
        self.queue = None
        rude = bool(self.messages)
        for message in self.messages:
            for file in message.files:
                file.drop()
        self.messages.clear()
        if self.peer is not None:
            peer, self.peer = self.peer, None
            if self.datagrams:
                peer.senders.remove(self)
            else:
                peer.peer = None
                peer.hang_up(rude)


class PidFd(File):
    kind = "pidfd"

    def __init__(self, kernel: Kernel, process: Process) -> None:
        super().__init__(kernel)
        self.process = process
        process.pidfds.append(self)

    def readable(self) -> bool:
        return self.process.ended

    @property
    def pid(self) -> int:
        """As /proc/self/fdinfo has it."""
        return -1 if self.process.gone else 0 if self.process.hidden else self.process.pid

    def last(self) -> None:
        self.process.pidfds.remove(self)


class Notices(File):
    """An inotify instance: readable when something it watches was touched."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.touched = False
        self.watched: list[Inode] = []

    def readable(self) -> bool:
        return self.touched

    def last(self) -> None:
        for node in self.watched:
            node.watches.remove(self)
        self.watched.clear()


class Inode:
    def __init__(self, number: int, mode: int, uid: int, gid: int) -> None:
        self.number, self.mode, self.uid, self.gid = number, mode, uid, gid
        self.data = bytearray()
        self.listener: Socket | None = None
        self.locked: Opened | None = None
        self.links = 1
        self.watches: list[Notices] = []

    def touch(self) -> None:
        for one in list(self.watches):
            one.kernel.happened += 1
            one.touched = True
            one.changed()

    def stat(self) -> Any:
        fields = (self.mode, self.number, 1, self.links, self.uid, self.gid, len(self.data), 0, 0, 0)
        import os

        return os.stat_result(fields)


class Opened(File):
    """A descriptor of a file or directory."""

    def __init__(self, kernel: Kernel, node: Inode, path: str, append: bool = False) -> None:
        super().__init__(kernel)
        self.node, self.path, self.append = node, path, append
        self.position = 0

    def last(self) -> None:
        if self.node.locked is self:
            self.node.locked = None


class Process:
    """``body``: what runs in it. ``ended``: its pidfd says so; ``gone``: it is reaped and its number is free. ``uid``:
    the effective one, which a connection has; ``real``, ``saved``: its other uids."""

    def __init__(self, kernel: Kernel, pid: int, name: str, uid: int, gid: int, parent: Process | None) -> None:
        self.kernel, self.pid, self.name, self.uid, self.gid, self.parent = kernel, pid, name, uid, gid, parent
        self.real = self.saved = self.slice = uid
        self.hidden = False
        """In a pid namespace that cannot be seen: for everybody else its pid is 0."""
        self.start = int(kernel.now * 100)
        self.command: list[str] = [name]
        self.environment: dict[str, str] = {}
        self.fds: dict[int, File] = {}
        self.alive, self.ended, self.gone, self.stopped = True, False, False, False
        self.ignores: set[int] = set()
        self.handlers: dict[int, Callable[[], None]] = {}
        """By signal: what it does instead of its end."""
        self.pending = 0
        """A signal that ends it when it goes on."""
        self.status = 0
        self.pidfds: list[PidFd] = []
        self.body: Body | None = None
        self.due: float | None = None
        self.running = False
        self.missed = False
        self.calls = 0
        self.slow = 0.0
        """Seconds for which it is ready and does not run, each time."""
        self.busy = 0.0
        """Seconds of processor time, as /proc has it."""
        self.on_end: list[Callable[[Process], None]] = []

    def __repr__(self) -> str:
        return f"{self.name}[{self.pid}]"

    def become(self, uid: int, *, program: bool) -> None:
        """It executes a setuid ``program``, or is of that user from now on in every way. Pid, start and pidfds stay."""
        self.uid = self.saved = uid
        if not program:
            self.real = self.gid = uid

    def install(self, file: File) -> int:
        number = 3
        while number in self.fds:
            number += 1
        self.fds[number] = file.take()
        return number

    def file(self, number: int) -> File:
        found = self.fds.get(number)
        if found is None:
            raise OSError(errno.EBADF, "Bad file descriptor")
        return found

    def look(self, file: File) -> None:
        if self.body is not None:
            self.body.look(file)

    def wake(self, at: float | None = None) -> None:
        """It runs at that time, or a moment from now."""
        if not self.alive:
            return
        kernel = self.kernel
        if at is None:
            at = kernel.now + self.slow - log(1.0 - kernel.random()) / READY  # chance.expovariate
        elif at < kernel.now:
            at = kernel.now
        if self.due is None or at < self.due:
            self.due = at
            kernel.at(at, self._run, at)

    def _run(self, at: float) -> None:
        if self.due == at:
            self.due = None
            assert self.body is not None
            if not self.do(self.body.run):
                self.missed = True

    def do(self, what: Callable[[], None]) -> bool:
        """Has the process do it; False when it cannot now."""
        if not self.alive or self.stopped or self.running:
            return False
        kernel = self.kernel
        kernel.turn += 1
        before, kernel.current, self.running = kernel.current, self, True
        try:
            what()
        except Killed:
            pass
        finally:
            self.running = False
            if not self.alive and self.body is not None:
                self.body.clear()
            kernel.current = before
        if self.alive and self.missed:
            self.missed = False
            self.wake()
        return True


class Body:
    """What runs in a process."""

    def run(self) -> None: ...

    def look(self, file: File) -> None:
        """Something about this file has changed."""

    def clear(self) -> None:
        """Its process has been killed."""


Steps = Generator[tuple[list[File], float | None], None, Any]
"""A model's program: each time it waits it yields what for: files of which one becomes readable, and until when."""


class Program(Body):
    """A generator as a process."""

    def __init__(self, process: Process, steps: Steps) -> None:
        self.process, self.steps = process, steps
        self.files: list[File] = []
        self.until: float | None = None
        self.waits = False

    def run(self) -> None:
        process, kernel = self.process, self.process.kernel
        late = self.until is not None and kernel.now >= self.until
        if self.waits and not late and not any(one.readable() for one in self.files):
            if self.until is not None:
                process.wake(self.until)
            return
        process.calls += 1
        kernel.called(process, "step")
        if not process.alive:
            return
        self._forget()
        self.waits = True
        try:
            self.files, self.until = next(self.steps)
        except StopIteration as end:
            kernel.exit(process, end.value if isinstance(end.value, int) else 0)
            return
        for file in self.files:
            file.watchers[process] = file.watchers.get(process, 0) + 1
        if any(file.readable() for file in self.files):
            process.wake()
        elif self.until is not None:
            process.wake(self.until)

    def look(self, file: File) -> None:
        if file.readable():
            self.process.wake()

    def _forget(self) -> None:
        for file in self.files:
            file.watchers[self.process] -= 1
            if not file.watchers[self.process]:
                del file.watchers[self.process]
        self.files, self.until = [], None

    def clear(self) -> None:
        self._forget()
        self.steps.close()


class Kernel:
    """``chance`` is the only source of it. ``preempt``: how likely others run within a real program's system call."""

    def __init__(self, seed: int | str, preempt: float = 0.02) -> None:
        self.chance = random.Random(seed)
        self.random = self.chance.random
        self.preempt = preempt
        self.now = BOOT
        self.wall = EPOCH - BOOT
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self._depth = 0
        self.turn = self.happened = 0
        """How often a process has run, and how often one heard something: a message, or that a file was touched."""
        self.left = self._effect = True
        """Who dies behind the last call with an effect leaves something that is not left by who dies before it."""
        self.processes: dict[int, Process] = {}
        self._last_pid, self.pids = 100, PIDS
        self.current: Process
        self.nodes: dict[str, Inode] = {}
        self._inode = 1
        self.buffer = BUFFER
        """net.core.wmem_default of this machine."""
        self.called: Callable[[Process, str], None] = lambda process, what: None
        """Hears of each system call of a real program that has an effect, and of each step of a model, before it is
        done: here faults come in."""
        self.sends: Callable[[Process, int], None] = lambda process, number: None
        """Hears of each signal that a real program sends by a pidfd."""
        self.disk = ""
        """What is wrong with /var, and with threads: full, read-only, torn (the next who writes there dies in it),
        slow."""
        for path in ("/", "/tmp", "/proc", "/run", "/var", "/var/log", "/var/lib", "/etc", "/dev"):
            self.make(path, st.S_IFDIR | (0o1777 if path == "/tmp" else 0o755), 0, 0)
        self.init = self.spawn("systemd", 0, 0, None)
        self.current = self.init

    # --- time

    def at(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self.events, (when, self._number, what, arguments))

    def after(self, seconds: float, what: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + seconds, what, *arguments)

    def run(self, until: float) -> None:
        """All that happens until then."""
        events, pop = self.events, heapq.heappop
        while events and events[0][0] <= until:
            when, _, what, arguments = pop(events)
            if when > self.now:
                self.now = when
            what(*arguments)
        if until > self.now:
            self.now = until

    def enter(self, what: str) -> Process:
        """A system call of a real program: it may be its last, and others may run before it is done."""
        process = self.current
        if not process.alive:
            raise Killed
        process.calls += 1
        self._effect = what in EFFECTS
        if self._effect:
            self.called(process, what)
            self.left = what not in LEFT_BY_DEATH
        if self._depth < 2 and self.random() < self.preempt:
            self._depth += 1
            try:
                self.run(self.now + self.chance.expovariate(1 / 500e-6))
            finally:
                self._depth -= 1
                self.current = process
        if not process.alive:
            raise Killed
        return process

    def nothing(self) -> None:
        """What was called last has changed nothing."""
        if self._effect:
            self.left = False

    def changed(self) -> None:
        """Something, by a call that does not count."""
        self._effect, self.left = False, True

    # --- processes

    def hide(self, process: Process) -> None:
        """It has begun in a pid namespace that cannot be seen. Its number is one that no other process has."""
        del self.processes[process.pid]
        process.hidden, process.pid = True, HIDDEN + process.pid
        self.processes[process.pid] = process

    def seen(self, pid: int) -> Process | None:
        """By this number, in the namespace of those who look."""
        process = self.processes.get(pid)
        return None if process is None or process.hidden else process

    def spawn(self, name: str, uid: int, gid: int, parent: Process | None) -> Process:
        pid = self._last_pid
        while True:
            pid = pid + 1 if pid < self.pids else 101
            if pid not in self.processes:
                break
        self._last_pid = pid
        if name == "systemd":
            pid = 1
        process = self.processes[pid] = Process(self, pid, name, uid, gid, parent)
        return process

    def name_of(self, pid: int) -> str:
        process = self.processes.get(pid)
        return "?" if process is None else process.command[0]

    def program(self, process: Process, steps: Steps) -> Process:
        process.body = Program(process, steps)
        process.wake()
        return process

    def exit(self, process: Process, status: int = 0) -> None:
        """Its descriptors are closed first, in the order of their numbers; a moment later it has ended."""
        if not process.alive:
            return
        process.alive, process.status = False, status
        for number in sorted(process.fds):
            process.fds.pop(number).drop()
        if process.body is not None and not process.running:
            before, self.current = self.current, process
            process.body.clear()
            self.current = before
        self.after(self.chance.uniform(0.0001, 0.004), self._end, process)

    def _end(self, process: Process) -> None:
        process.ended = True
        for one in list(process.pidfds):
            one.changed()
        for child in list(self.processes.values()):
            if child.parent is process:
                child.parent = self.init
        for call in process.on_end:
            call(process)
        self.after(self.chance.uniform(0.0, 0.01), self._reap, process)

    def _reap(self, process: Process) -> None:
        process.gone = True
        if self.processes.get(process.pid) is process:
            del self.processes[process.pid]

    def signal(self, process: Process, number: int) -> None:
        """SIGSTOP, SIGCONT, SIGKILL, and SIGTERM and others, which end it if it has no handler for them."""
        if not process.alive or number == 0:
            return
        if number == 19:
            process.stopped = True
        elif number == 18:
            process.stopped = False
            if process.pending:
                number, process.pending = process.pending, 0
                self.signal(process, number)
            if process.missed:
                process.missed = False
                process.wake()
        elif number == 9:
            process.stopped = False
            self.exit(process, -9)
        elif number in (1, 2, 10, 12, 15) and number not in process.ignores:
            if process.stopped:
                process.pending = number
            elif number in process.handlers:
                process.handlers[number]()
            else:
                self.exit(process, -number)

    # --- files

    def make(self, path: str, mode: int, uid: int, gid: int) -> Inode:
        self._inode += 1
        node = self.nodes[path] = Inode(self._inode, mode, uid, gid)
        above = self.nodes.get(path.rpartition("/")[0] or "/")
        if above is not None and above is not node:
            above.touch()
        return node

    def remove(self, path: str) -> None:
        node = self.nodes.pop(path)
        node.links -= 1
        above = self.nodes.get(path.rpartition("/")[0] or "/")
        if above is not None:
            above.touch()

    def names(self, path: str) -> list[str]:
        if path == "/proc":
            return [str(pid) for pid, process in self.processes.items() if not process.hidden]
        above = path.rstrip("/") + "/"
        return [one[len(above) :] for one in self.nodes if one.startswith(above) and "/" not in one[len(above) :]]

    # --- what models use: the same things, without errors to handle

    def listen(self, process: Process, path: str, mode: int, backlog: int) -> Socket:
        listener = Socket(self)
        if path in self.nodes:
            self.remove(path)
        listener.queue, listener.backlog = deque(), backlog
        listener.owner = (process, process.uid, process.gid)
        listener.address = path
        self.make(path, st.S_IFSOCK | mode, process.uid, process.gid).listener = listener
        return listener

    def connect(self, process: Process, path: str, sock: Socket) -> None:
        """Raises what connect(2) does."""
        node = self.nodes.get(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        if process.uid and not (self._may(node, process, 0o2) and self.may_enter(process, path)):
            raise PermissionError(errno.EACCES, "Permission denied")
        listener = node.listener
        if listener is None or (listener.queue is None and not listener.datagrams):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        if listener.datagrams:
            sock.peer = listener
            listener.senders.append(sock)
            return
        assert listener.queue is not None
        if len(listener.queue) > listener.backlog:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        other = Socket(self)
        other.peer, sock.peer = sock, other
        other.owner = (process, process.uid, process.gid)
        sock.owner = listener.owner
        other.credentials = listener.credentials
        other.address = path
        listener.queue.append(other)
        listener.changed()

    def may_enter(self, process: Process, path: str) -> bool:
        """Whether its user may go through the directories above."""
        above = path.rpartition("/")[0]
        while above:
            node = self.nodes.get(above)
            if node is not None and not self._may(node, process, 0o1):
                return False
            above = above.rpartition("/")[0]
        return True

    @staticmethod
    def _may(node: Inode, process: Process, what: int) -> bool:
        if node.uid == process.uid:
            return bool(node.mode & what << 6)
        return bool(node.mode & (what << 3 if node.gid == process.gid else what))

    def pair(self) -> tuple[Socket, Socket]:
        one, other = Socket(self), Socket(self)
        one.peer, other.peer = other, one
        return one, other

    def say(
        self,
        sock: Socket,
        data: bytes,
        process: Process,
        files: Iterable[File] = (),
        who: tuple[int, int, int] | None = None,
    ) -> None:
        """Raises what sendmsg(2) does."""
        if sock.reset and not sock.datagrams:
            sock.reset = False
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        if sock.peer is None or sock.over or (sock.peer.datagrams and not sock.peer.references):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        if sock.peer.full:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        who = who or (process.pid, process.uid, process.gid)
        if process.hidden:
            who = 0, *who[1:]
        sock.peer.hear(Message(data, who, [one.take() for one in files]))
