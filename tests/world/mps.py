"""The host of MPS in virtual time: the simulator's control daemon and servers on the model of the kernel.

What they say, in which order and how long it takes is `mpsagent_sim`'s, which is held against NVIDIA's programs by
conformance. Here is only the machine that `mpsagent_sim.host` describes, and what the judges hear.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any

from mpsagent_sim import control_daemon, gpu, server, texts, wire
from mpsagent_sim.rendezvous import CLIENT, CREDENTIALS, DESCRIPTOR, FRONT_END, GREETING, READY, word
from mpsagent_sim.rendezvous import NO_DEVICE as _NO_DEVICE
from mpsagent_sim.server_clients import Client as ClientOf
from mpsagent_sim.server_clients import Link
from tests.world.kernel import File, Inode, Kernel, Message, Opened, PidFd, Process, Socket

if TYPE_CHECKING:
    from tests.world.world import World

__all__ = ["CLIENT", "CREDENTIALS", "DESCRIPTOR", "FRONT_END", "GREETING", "NO_DEVICE", "READY", "ClientOf", "Daemon",
           "End", "ServerProcess", "Steps", "is_context", "word"]  # fmt: skip
NO_DEVICE = word(_NO_DEVICE)
Steps = Generator[tuple[list[File], float | None], None, Any]


def is_context(answer: Message | None) -> bool:
    """Whether a server's answer gives a context its limits; a channel's has a word less."""
    return answer is not None and answer.data.startswith(b"OK ") and answer.data.count(b" ") == 3


class End:
    """A process's end of a connection."""

    def __init__(self, process: Process, file: Socket) -> None:
        self.process, self.file = process, file
        self.fd = process.install(file)

    def close(self) -> None:
        if self.fd >= 0 and self.process.alive:
            self.process.fds.pop(self.fd).drop()
        self.fd = -1

    def say(self, data: bytes, files: Iterable[File] = (), who: tuple[int, int, int] | None = None) -> bool:
        """False when the other end has gone."""
        try:
            self.process.kernel.say(self.file, data, self.process, files, who)
        except OSError:
            return False
        return True

    def hear(self, until: float | None = None) -> Generator[tuple[list[File], float | None], None, Message | None]:
        """The next message, waiting for it; None at the end, or when it is too late."""
        while True:
            self.file.reset = False
            if self.file.messages:
                return self.file.next()
            if self.file.over or (until is not None and self.process.kernel.now >= until):
                return None
            yield [self.file], until

    @property
    def over(self) -> bool:
        return self.file.over

    # --- as mpsagent_sim.host.Connection

    def send(self, data: bytes, descriptor: File | None = None) -> bool:
        return self.say(data, () if descriptor is None else (descriptor,))

    send_credentials = send

    def receive(self, _size: int = 0) -> Generator[tuple[list[File], float | None], None, Message]:
        return (yield from self.hear()) or Message(b"", None, [])

    def next(self) -> Message | None:
        self.file.reset = False
        return self.file.next() if self.file.messages else None

    def readable(self) -> bool:
        return self.file.readable()

    def hung_up(self) -> bool:
        return self.file.over


class Log(wire.Log):
    """One of the two log files."""

    __slots__ = ()
    file: tuple[Kernel, Inode]

    def _clock(self) -> tuple[float, time.struct_time]:
        kernel = self.file[0]
        now = kernel.now + kernel.wall
        return now, time.gmtime(now)

    def _append(self, data: bytes) -> None:
        node = self.file[1]
        node.data += data
        node.touch()


class Host:
    """A process of MPS."""

    def __init__(self, world: World, process: Process, pipe: str, logs: str) -> None:
        self.world, self.kernel, self.process = world, world.kernel, process
        self.pipe, self.logs, self.pid, self.delays = pipe, logs, process.pid, world.delays

    def open_log(self, name: str, tag: str) -> Log:
        path = f"{self.logs}/{name}.log"
        node = self.kernel.nodes.get(path) or self.kernel.make(path, 0o100644, 0, 0)
        return Log((self.kernel, node), tag, self.pid)

    @property
    def now(self) -> float:
        return self.kernel.now


class Listener:
    def __init__(self, process: Process, file: Socket) -> None:
        self.process, self.file = process, file
        file.credentials = True
        process.install(file)

    def accept(self) -> End | None:
        return End(self.process, self.file.queue.popleft()) if self.file.queue else None


class Child:
    def __init__(self, parent: Process, process: Process) -> None:
        self.parent, self.process, self.pid = parent, process, process.pid
        self.file = PidFd(process.kernel, process)
        self.fd = parent.install(self.file)

    def readable(self) -> bool:
        return self.process.ended

    def kill(self) -> None:
        self.process.kernel.signal(self.process, 9)

    def reap(self) -> int:
        self.parent.fds.pop(self.fd).drop()
        return max(0, self.process.status)


class Daemon(Host):
    """nvidia-cuda-mps-control -d."""

    def __init__(self, world: World, process: Process, pipe: str, logs: str, multiuser: bool) -> None:
        super().__init__(world, process, pipe, logs)
        self.multiuser, self.owner, self.environment = multiuser, 0, process.environment
        self.up = False

    def run(self) -> Steps:
        kernel, process = self.kernel, self.process
        yield [], kernel.now + self.world.chance.uniform(0.01, 0.04)
        others = self.open_log("server", "Other")  # its servers inherit it
        lock = f"{self.pipe}/control_lock"
        taken = Opened(kernel, kernel.nodes.get(lock) or kernel.make(lock, 0o100666, 0, 0), lock)
        process.install(taken)
        if taken.node.locked is not None:
            others.write(texts.LOG_DIRECTORY.format(directory=self.logs))
            self.world.tell(f"{process} ends: {texts.ALREADY_RUNNING.rstrip()}")
            return 1
        taken.node.locked = taken
        self.log = self.open_log("control", "Control")
        self.listeners = [Listener(process, kernel.listen(process, f"{self.pipe}/{name}", mode, 128))
                          for name, mode in (("control", 0o666), ("control_privileged", 0o755))]  # fmt: skip
        kernel.make(f"{self.pipe}/nvidia-cuda-mps-control.pid", 0o100666, 0, 0).data[:] = str(process.pid).encode()
        daemon = _Daemon(self, self.multiuser)
        self.up = True
        return (yield from daemon.run())

    def pair(self) -> tuple[Socket, Socket]:
        pair = self.kernel.pair()
        for one in pair:
            one.credentials = True
            one.take()
        return pair

    def start_server(self, uid: int, after_a_kill: bool) -> Child:
        process = self.kernel.spawn("nvidia-cuda-mps-server", uid, 0, self.process)
        process.command = ["nvidia-cuda-mps-server", *(["-multiuser-server"] if self.multiuser else [])]
        process.environment = dict(self.process.environment)
        self.log.of("Control", process.pid).write(texts.STARTING_SERVER.format(pid=process.pid, uid=uid))
        child = Child(self.process, process)
        self.kernel.program(process, ServerHost(self.world, process, self.pipe, self.logs).run(uid, after_a_kill))
        return child

    def close_descriptor_0(self, connections: Iterable[End]) -> None:
        """No process has one here."""

    def crash(self) -> None:
        self.kernel.exit(self.process, -11)

    def remove_files(self) -> None:
        for name in ("log", "nvidia-cuda-mps-control.pid"):
            if f"{self.pipe}/{name}" in self.kernel.nodes:
                self.kernel.remove(f"{self.pipe}/{name}")


class _Daemon(control_daemon.Daemon):
    host: Daemon

    def client(self, connection: End, pid: int, uid: int) -> Steps:
        self.host.world.judges.asked(pid, uid)
        return super().client(connection, pid, uid)


class ServerHost(Host):
    """The process of nvidia-cuda-mps-server."""

    def run(self, uid: int, after_a_kill: bool) -> Steps:
        self.log = self.open_log("server", "Other")
        yield [], self.kernel.now + self.world.chance.uniform(0.001, 0.004)
        return (yield from ServerProcess(self, [gpu.Device(0)], uid).run(after_a_kill))

    def connect(self) -> End:
        end = End(self.process, Socket(self.kernel))
        self.kernel.connect(self.process, f"{self.pipe}/control", end.file)
        return end

    def connection(self, message: Message) -> End:
        file = message.files[0]
        assert isinstance(file, Socket)
        end = End(self.process, file)
        message.close()
        return end

    def spare(self) -> File:
        return File(self.kernel).take()

    def start_error(self) -> str:
        return ""

    def in_use(self, _ordinal: int) -> bool:
        return bool(self.world.uses)

    def use(self, _ordinal: int, mebibytes: int) -> None:
        self.world.uses[self.pid] = ("server", mebibytes)
        self.process.on_end.append(lambda process: self.world.uses.pop(process.pid, None))

    def note_work(self, _working: set[int], _later: Callable[..., None]) -> None: ...

    def leave(self) -> None: ...

    def holds(self, pid: int) -> bool:
        process = self.kernel.processes.get(pid)
        return (process is not None and process.alive) or self.world.held.get(pid, self.now) > self.now

    def name(self, pid: int) -> str:
        return self.kernel.name_of(pid).encode().hex()

    def namespace(self) -> str:
        return "4026531836"


class ServerProcess(server.Server):
    """nvidia-cuda-mps-server, with judges who hear what it does."""

    host: ServerHost

    @property
    def process(self) -> Process:
        return self.host.process

    @property
    def judges(self) -> Any:
        return self.host.world.judges

    def note_work(self) -> None: ...

    def tell_neighbours(self, link: Link, word: str) -> None:
        """Nobody's kernels stand still here while another's is interrupted: to wake everybody for it costs time."""

    def terminate(self, pid: int) -> None:
        self.judges.to_end(pid)
        super().terminate(pid)

    def register(self, link: Link) -> None:
        super().register(link)
        if link.number == 0:
            self.judges.arrived(self, link.client.pid, link.client)
        # with one for each client that has no context
        places = sum(max(1, len(client.contexts)) for client in self.clients.values())
        self.judges.takes(self.process.pid, places)

    def active(self, link: Link) -> None:
        super().active(link)
        if link.client.channel is None:
            self.judges.arrived(self, link.client.pid, link.client)
        self.judges.context(link.client.pid, (self.percentage, self.limits.get(0, 0)))

    def tell_limits(self, link: Link) -> None:
        """The other end reads it at once: no copy of its descriptor can."""
        client, peer = link.client, link.connection.file.peer
        if peer is not None:
            peer.heard = f"{client.percentage} {client.limits.get(0, 0)}"

    def fault(self, device: int, culprit: int) -> None:
        if hit := {one.client.pid for one in self.links if one.number}:
            self.judges.harmed(culprit, hit)
        super().fault(device, culprit)
