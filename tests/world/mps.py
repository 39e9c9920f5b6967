"""The model of MPS: control daemon and servers as generators in virtual time.

What they say, in which order and how long it takes is the simulator's (``mpsagent.sim``: texts, delays, whose turn it
is, how limits are read), which is held against NVIDIA's programs by conformance. Written again is only what waits:
a process of its own can block, and a model in virtual time has to say what it waits for. Each wait here is one there.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

from mpsagent.sim import gpu, limits, texts
from mpsagent.sim.delays import Delays
from mpsagent.sim.server_clients import MAX_CLIENTS
from mpsagent.sim.turns import Turns
from tests.world.kernel import File, Message, PidFd, Process, Socket

if TYPE_CHECKING:
    from tests.world.world import World

GREETING, CREDENTIALS, DESCRIPTOR = b"OUTBHELL\0", b"OUTBCRED\0", b"OUTBCUFD\0"
CLIENT, FRONT_END = b"\2\0\0\0", b"\4\0\0\0"
READY, NO_DEVICE = b"\0", b"\xff\0\0\0"
Steps = Generator[tuple[list[File], float | None], None, Any]


def word(number: int) -> bytes:
    return number.to_bytes(4, "little")


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


class Log:
    """One of the two log files, opened once for append."""

    def __init__(self, world: World, path: str, tag: str, pid: int) -> None:
        self.kernel, self.tag, self.pid = world.kernel, tag, pid
        self.node = world.kernel.nodes.get(path) or world.kernel.make(path, 0o100644, 0, 0)

    def write(self, *lines: str) -> None:
        now = self.kernel.now + self.kernel.wall
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}"
        head = f"[{stamp} {self.tag} {self.pid:5d}] "
        self.node.data += "".join(f"{head}{line}\n" for line in lines).encode()
        self.node.touch()


class Server:
    """A server as its daemon sees it."""

    def __init__(self, process: Process, uid: int, orders: End, pidfd: PidFd) -> None:
        self.process, self.pid, self.uid, self.orders, self.pidfd = process, process.pid, uid, orders, pidfd
        self.ready = self.dismissed = False
        self.gone_at: float | None = None


class Daemon:
    """nvidia-cuda-mps-control -d."""

    def __init__(self, world: World, process: Process, pipe: str, logs: str, multiuser: bool) -> None:
        self.world, self.kernel, self.process = world, world.kernel, process
        self.pipe, self.logs, self.multiuser = pipe, logs, multiuser
        self.delays: Delays = world.delays
        self.turns = Turns()
        self.servers: dict[int, Server] = {}
        self.server: Server | None = None
        self.waiting: dict[int, tuple[End, int]] = {}
        self.ui: tuple[End, int, bool] | None = None
        self.next_try: float | None = None
        self.quit_at: float | None = None
        self.up = self.quitting = self.after_a_kill = False
        given = limits.percentage(process.environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", ""))
        self.percentage = 100.0 if given is None else given
        self.limits: dict[int, int] = {}
        self.priority = 0

    def run(self) -> Steps:
        kernel, process = self.kernel, self.process
        yield [], kernel.now + self.world.chance.uniform(0.01, 0.04)
        Log(self.world, f"{self.logs}/server.log", "Other", process.pid)  # its servers inherit it
        self.log = Log(self.world, f"{self.logs}/control.log", "Control", process.pid)
        listeners = [kernel.listen(process, f"{self.pipe}/{name}", mode, 128)
                     for name, mode in (("control", 0o666), ("control_privileged", 0o755))]  # fmt: skip
        for listener in listeners:
            listener.credentials = True
            process.install(listener)
        kernel.make(f"{self.pipe}/nvidia-cuda-mps-control.pid", 0o100666, 0, 0).data[:] = str(process.pid).encode()
        self.log.write(
            texts.STARTING.format(pipe=self.pipe), texts.CONNECT_HINT.format(pipe=self.pipe), texts.CONTROL_VERSION
        )
        self.up = True
        while True:
            files: list[File] = [*listeners, *(one.pidfd for one in self.servers.values() if one.gone_at is None)]
            if self.ui is not None and not self.quitting:
                files.append(self.ui[0].file)
            times = [at for at in (self.next_try, self.quit_at) if at is not None]
            times += [one.gone_at for one in self.servers.values() if one.gone_at is not None]
            fresh = [one for one in self.servers.values() if not one.ready and one.gone_at is None]
            if not fresh:
                yield files, min(times, default=None)
            for listener in listeners:
                while listener.queue:
                    yield from self.accept(listener.queue.popleft(), listener is listeners[1])
            if self.ui is not None and self.ui[0].file.readable() and not self.quitting:
                yield from self.command(*self.ui)
            for one in fresh:
                yield from self.starting(one)
            for one in list(self.servers.values()):
                if one.gone_at is None and one.process.ended:
                    one.gone_at = kernel.now + (0 if one.dismissed else self.delays.killed_exit())
                if one.gone_at is not None and kernel.now >= one.gone_at:
                    self.reap(one)
            if self.quit_at is not None and kernel.now >= self.quit_at:
                self.quit_at = None
                if self.server is not None and not self.server.dismissed:
                    yield from self.try_shutdown(self.server, force=True)
            if self.next_try is not None and kernel.now >= self.next_try:
                self.next_try = None
                if self.server is not None and not self.server.dismissed:
                    yield from self.try_shutdown(self.server, by_timer=True)
            if self.quitting and not self.servers:
                self.log.write(texts.EXIT.format(status=0))
                self.close_ui()
                for name in ("log", "nvidia-cuda-mps-control.pid"):
                    if f"{self.pipe}/{name}" in kernel.nodes:
                        kernel.remove(f"{self.pipe}/{name}")
                return 0

    # --- connections

    def accept(self, file: Socket, privileged: bool) -> Steps:
        end = End(self.process, file)
        self.log.write(texts.ACCEPTING)
        if not end.say(GREETING):
            self.log.write(texts.UNABLE_TO_ACCEPT)
            end.close()
            return
        message = yield from end.hear()
        if message is None or message.data != CREDENTIALS:
            self.log.write(texts.NO_CREDENTIALS)
            end.close()
            return
        pid, uid, _ = message.who
        if privileged and uid:
            self.log.write(texts.NOT_PRIVILEGED)
            end.close()
            return
        kind = yield from end.hear()
        said = b"" if kind is None else kind.data
        if said == CLIENT:
            yield from self.client(end, pid, uid)
            return
        if said == FRONT_END and self.ui is None and not self.quitting:
            self.ui = (end, uid, privileged)
            self.log.write(texts.NEW_UI)
            return
        if not said:
            self.log.write(texts.KIND_UNREADABLE)
        end.close()

    def client(self, end: End, pid: int, uid: int) -> Steps:
        if self.quitting:
            end.close()
            return
        uid = 0 if self.multiuser else uid
        todo = self.turns.client(uid, end.fd)
        if todo == "attach":
            self.log.write(texts.CLIENT_ATTACHED.format(pid=pid, uid=uid))
            yield from self.attach(end, pid)
            return
        self.log.write(texts.CLIENT_PENDING.format(pid=pid, uid=uid))
        self.waiting[end.fd] = (end, pid)
        yield from self.follow(todo)

    def attach(self, end: End, pid: int) -> Steps:
        """One end of a new pair for the server, the other for the client; then the client's word that they have met."""
        ours, theirs = self.kernel.pair()
        for one in (ours, theirs):
            one.credentials = True
            one.take()
        taken = self.server is not None and self.server.orders.say(b"ATTACH %d" % pid, [ours])
        ours.drop()
        told = taken and end.say(DESCRIPTOR, [theirs])
        theirs.drop()
        if told:
            yield from end.hear()
        end.close()

    def follow(self, todo: str) -> Steps:
        if todo == "start":
            uid = self.turns.next_user()
            if uid is not None:
                self.start_server(uid)
        elif todo == "try" and self.server is not None:
            yield from self.try_shutdown(self.server)

    # --- servers

    def start_server(self, uid: int) -> None:
        self.turns.starting(uid)
        process = self.kernel.spawn("nvidia-cuda-mps-server", uid, 0, self.process)
        process.command = ["nvidia-cuda-mps-server", *(["-multiuser-server"] if self.multiuser else [])]
        process.environment = dict(self.process.environment)
        ours, theirs = self.kernel.pair()
        server = ServerProcess(self.world, process, uid, End(process, theirs), self.pipe, self.logs, self.after_a_kill)
        self.after_a_kill = False
        pidfd = PidFd(self.kernel, process)
        self.process.install(pidfd)
        self.server = self.servers[process.pid] = Server(process, uid, End(self.process, ours), pidfd)
        self.log.write(texts.STARTING_SERVER.format(pid=process.pid, uid=uid))
        self.kernel.program(process, server.run())

    def starting(self, one: Server) -> Steps:
        """Until it says that it is ready the daemon serves no one else."""
        said = yield from one.orders.hear()
        if said is None:
            self.log.write(texts.KIND_UNREADABLE)
            one.gone_at = self.kernel.now + self.delays.killed_exit()
            while not one.process.ended:
                yield [one.pidfd], None
            return
        one.ready = True
        self.log.write(texts.SERVER_READY.format(pid=one.pid))
        given = ",".join(f"{device}={size}" for device, size in reversed(self.limits.items()) if size)
        one.orders.say(f"START {self.percentage} {self.priority} {given}".encode())
        attach, others = self.turns.ready()
        for key in attach:
            yield from self.attach(*self.waiting.pop(key))
        if others or self.quitting:
            yield from self.try_shutdown(one)

    def ask(self, one: Server, question: str) -> Generator[tuple[list[File], float | None], None, str | None]:
        if not one.orders.say(question.encode()):
            return None
        answer = yield from one.orders.hear()
        return None if answer is None else answer.data.decode()

    def try_shutdown(self, one: Server, by_timer: bool = False, force: bool = False) -> Steps:
        self.log.write((texts.TRY_AGAIN if by_timer else texts.TRY_FIRST).format(pid=one.pid))
        reply = yield from self.ask(one, "SHUTDOWN")
        if reply is None:
            return
        said, _, count = reply.partition(" ")
        if said == "OK":
            self.dismiss(one)
            return
        self.log.write(texts.SERVER_BUSY.format(pid=one.pid, count=count))
        if force:
            self.log.write(texts.FORCE.format(pid=one.pid))
            self.dismiss(one)
            one.dismissed = False
            self.kernel.signal(one.process, 9)
            return
        interval = self.turns.back_off.busy(by_timer)
        self.next_try = self.kernel.now + interval / 1000
        self.log.write(texts.NEXT_TRY.format(pid=one.pid, ms=interval))

    def dismiss(self, one: Server) -> None:
        one.dismissed = True
        self.turns.leaving()
        self.next_try = None

    def reap(self, one: Server) -> None:
        self.log.write(texts.SERVER_EXITED.format(pid=one.pid, status=0))
        self.after_a_kill = not one.dismissed
        one.orders.close()
        for fd, file in list(self.process.fds.items()):
            if file is one.pidfd:
                self.process.fds.pop(fd).drop()
        del self.servers[one.pid]
        if self.server is one:
            self.server, self.next_try = None, None
            uid = self.turns.gone()
            if not self.quitting and uid is not None:
                self.start_server(uid)

    # --- front-ends

    def close_ui(self) -> None:
        if self.ui is not None:
            self.ui[0].say(word(1) + word(0))
            self.ui[0].close()
            self.ui = None

    def say(self, *lines: str) -> None:
        self.log.write(*lines)
        if self.ui is not None:
            for line in lines:
                self.ui[0].say(word(0) + line.encode())

    def command(self, end: End, uid: int, privileged: bool) -> Steps:
        length = yield from end.hear()
        if length is None or length.data == bytes(8) or len(length.data) != 8:
            self.log.write(texts.UI_CLOSED)
            self.close_ui()
            return
        text = yield from end.hear()
        if text is None:
            self.log.write(texts.UI_CLOSED)
            self.close_ui()
            return
        command = text.data.removesuffix(b"\0").removesuffix(b"\n").decode()
        self.log.write(texts.COMMAND.format(command=command))
        words = command.split()
        changes = words[0].startswith(("set_", "start_", "shutdown_", "terminate_"))
        if not privileged and (changes or words[0] == "quit"):
            self.say(texts.NO_QUIT_PRIVILEGE if words[0] == "quit" else texts.NO_PRIVILEGE.format(uid=uid))
            return
        yield from self.do(words)

    def do(self, words: list[str]) -> Steps:
        name = words[0]
        if name == "get_server_list":
            self.say(*map(str, self.servers))
        elif name == "set_default_active_thread_percentage":
            self.percentage = limits.percentage(words[1]) or self.percentage
            self.say(str(self.percentage))
        elif name == "get_default_active_thread_percentage":
            self.say(str(self.percentage))
        elif name == "set_default_device_pinned_mem_limit":
            self.limits[int(words[1])] = limits.memory(words[2])
        elif name == "get_default_device_pinned_mem_limit":
            if self.limits.get(int(words[1])):
                self.say(limits.shown(self.limits[int(words[1])]))
        elif name == "set_default_client_priority":
            self.priority = int(words[1])
        elif name == "get_default_client_priority":
            self.say(str(self.priority))
        elif name == "quit":
            self.log.write(texts.QUIT_TIMEOUT.format(seconds=int(words[2]) if len(words) > 2 else 0))
            self.quitting = True
            self.quit_at = self.kernel.now + int(words[2]) if len(words) > 2 else None
            for waiting, _ in self.waiting.values():
                waiting.close()
            self.waiting.clear()
            self.turns.waiting.clear()
            if self.server is not None and not self.server.dismissed:
                yield from self.try_shutdown(self.server)
        elif name == "get_device_client_list":
            for one in list(self.servers.values()):
                self.tell((yield from self.ask(one, "DEVICE_CLIENTS")))
        else:
            yield from self.do_at_server(words)

    def do_at_server(self, words: list[str]) -> Steps:
        questions = {
            "get_server_status": "STATUS", "get_client_list": "CLIENTS", "set_active_thread_percentage": "PERCENTAGE",
            "get_active_thread_percentage": "PERCENTAGE", "set_device_pinned_mem_limit": "SET_LIMIT",
            "get_device_pinned_mem_limit": "GET_LIMIT", "terminate_client": "TERMINATE", "shutdown_server": "",
        }  # fmt: skip
        if words[0] not in questions:
            self.say(texts.UNKNOWN_COMMAND.format(command=words[0]))
            return
        one = self.servers.get(int(words[1]))
        if one is None:
            self.say(*([f"Server {words[1]} not found!", "1"] if words[0] == "terminate_client" else
                       [texts.SERVER_NOT_FOUND.format(pid=words[1])]))  # fmt: skip
            return
        if words[0] == "shutdown_server":
            if not one.dismissed:
                yield from self.try_shutdown(one, force="-f" in words)
            return
        more = words[2:]
        if words[0] == "set_device_pinned_mem_limit":
            more = [more[0], str(limits.memory(more[1]))]
        answer = yield from self.ask(one, " ".join([questions[words[0]], *more]))
        if words[0] == "terminate_client":
            self.say(answer or "1")
        elif words[0] == "get_device_pinned_mem_limit":
            if answer and int(answer):
                self.say(limits.shown(int(answer)))
        elif words[0] != "set_device_pinned_mem_limit":
            self.tell(answer)

    def tell(self, answer: str | None) -> None:
        if answer:
            self.say(*answer.split(";"))


class Link:
    """A client's connection at its server: its channel (number 0) or a context."""

    def __init__(self, end: End, client: ClientOf, number: int) -> None:
        self.end, self.client, self.number = end, client, number
        self.kernel = self.sticky = self.terminating = False


class ClientOf:
    """A client process as its server knows it, with the limits of the moment in which its channel came."""

    def __init__(self, pid: int, percentage: float, memory: int) -> None:
        self.pid, self.percentage, self.memory = pid, percentage, memory
        self.contexts: dict[int, Link] = {}


class ServerProcess:
    """nvidia-cuda-mps-server."""

    def __init__(
        self, world: World, process: Process, uid: int, orders: End, pipe: str, logs: str, after_a_kill: bool
    ) -> None:
        self.world, self.kernel, self.process, self.uid, self.orders = world, world.kernel, process, uid, orders
        self.pipe, self.after_a_kill, self.delays = pipe, after_a_kill, world.delays
        self.log = Log(world, f"{logs}/server.log", "Other", process.pid)
        self.percentage = 100.0
        self.limits: dict[int, int] = {}
        self.clients: dict[int, ClientOf] = {}
        self.links: list[Link] = []
        self.closing = 0
        self.faulted = self.destroyed = False
        self.hung = False
        self.busy_until = 0.0
        self.alarms: list[tuple[float, Any]] = []

    def run(self) -> Steps:
        kernel, delays = self.kernel, self.delays
        self.log.write(*[line.format(pipe=self.pipe) for line in texts.SERVER_BEGIN])
        self.log.tag = "Server"
        kind = "used" if self.world.uses else "after a kill" if self.after_a_kill else delays.usual_start()
        yield [], kernel.now + delays.initialise(kind, 1)
        self.log.write(texts.CREATING_CONTEXT.format(device=0, name=gpu.NAME))
        yield [], kernel.now + delays.context(kind)
        self.log.write(
            texts.SHARED_MEMORY.format(uid=self.uid, pid=self.process.pid), texts.SERVER_VERSION, texts.DRIVER
        )
        self.world.uses[self.process.pid] = ("server", gpu.SERVER_USAGE)
        self.process.on_end.append(lambda process: self.world.uses.pop(process.pid, None))
        self.orders.say(b"READY")
        order = yield from self.orders.hear()
        if order is None:
            return 0
        _, percentage, priority, *given = order.data.decode().split()
        self.percentage = float(percentage)
        self.log.write(texts.PERCENTAGE.format(percentage=self.percentage))
        for one in given[0].split(",") if given else ():
            device, _, size = one.partition("=")
            self.set_limit(int(device), int(size))
        self.log.write(texts.PRIORITY.format(priority=priority), texts.STARTED)
        while True:
            files: list[File] = [self.orders.file, *([] if self.hung else [link.end.file for link in self.links])]
            times = [at for at, _ in self.alarms] + ([self.busy_until] if self.busy_until > kernel.now else [])
            if self.busy_until > kernel.now and not self.orders.over:
                files.remove(self.orders.file)
            yield files, min(times, default=None)
            if self.orders.over:
                return 0
            if not self.hung and kernel.now >= self.busy_until and self.orders.file.messages:
                message = self.orders.file.next()
                if (yield from self.order(message)):
                    return 0
            for link in [] if self.hung else sorted(self.links, key=lambda one: -one.number):
                yield from self.listen(link)
            for alarm in [one for one in self.alarms if one[0] <= kernel.now]:
                self.alarms.remove(alarm)
                alarm[1]()

    def later(self, seconds: float, what: Any) -> None:
        self.alarms.append((self.kernel.now + seconds, what))

    def contexts(self) -> list[Link]:
        return [link for client in self.clients.values() for link in client.contexts.values()]

    def set_limit(self, device: int, mebibytes: int) -> None:
        self.limits[device] = mebibytes
        self.log.write(texts.MEMORY_LIMIT.format(device=device, limit=mebibytes * 1048576))

    def order(self, message: Message) -> Generator[tuple[list[File], float | None], None, bool]:
        """True when it ends."""
        words = message.data.decode().split()
        reply = ""
        if words[0] == "ATTACH":
            file = message.files[0]
            assert isinstance(file, Socket)
            end = End(self.process, file)
            file.drop()
            return bool((yield from self.attach(end)))
        if words[0] == "SHUTDOWN":
            self.log.write(texts.NOTIFIED)
            count = len(self.links) + self.closing
            if count:
                self.log.write(texts.UNABLE_TO_SHUTDOWN.format(count=count))
                self.orders.say(f"BUSY {count}".encode())
                return False
            self.log.write(texts.FINISHING, texts.EXITING)
            self.orders.say(b"OK")
            yield [], self.kernel.now + self.delays.idle_exit()
            return True
        if words[0] == "TERMINATE":
            self.terminate(int(words[1]))
            return False
        if words[0] == "STATUS":
            reply = "FAULT" if self.faulted else "ACTIVE"
        elif words[0] == "CLIENTS":
            reply = ";".join(str(pid) for pid, client in self.clients.items() if client.contexts)
        elif words[0] == "DEVICE_CLIENTS":
            rows = [f"[0] 00:00.0, {gpu.NAME}", *(f"{one.client.pid}.{one.number}" for one in self.contexts())]
            reply = ";".join(rows)
        elif words[0] == "PERCENTAGE":
            self.percentage = float(words[1]) if len(words) > 1 else self.percentage
            reply = str(self.percentage)
        elif words[0] == "SET_LIMIT":
            self.set_limit(int(words[1]), int(words[2]))
        elif words[0] == "GET_LIMIT":
            reply = str(self.limits.get(int(words[1]), 0))
        self.orders.say(reply.encode())
        return False

    def terminate(self, pid: int) -> None:
        client = self.clients.get(pid)
        if client is None or not client.contexts:
            self.log.write(texts.NO_CONTEXT.format(pid=pid), texts.NOT_TERMINATED)
            self.orders.say(b"201")
            return
        for link in client.contexts.values():
            self.log.write(texts.REQUESTING_EXIT.format(pid=pid, context=link.number))
            link.terminating = True
            if not link.sticky:
                link.end.say(b"TERMINATE")

    def terminated(self, link: Link) -> None:
        link.terminating = link.kernel = False
        self.log.write(texts.TERMINATED)
        if not any(one.terminating for one in link.client.contexts.values()):
            self.orders.say(b"0")

    def attach(self, end: End) -> Generator[tuple[list[File], float | None], None, bool]:
        """The handshake with a client; nothing else is done meanwhile, and one that leaves in it leaves it hung."""
        self.log.write(texts.REQUEST.format(pid=0, context=0))
        for _ in range(4):
            end.say(DESCRIPTOR, [File(self.kernel)])
        end.say(READY)
        said: list[Message] = []
        for _ in range(3):
            while not end.file.messages and not end.over:
                yield [end.file, self.orders.file], None
                if self.orders.over:
                    return True
                if not end.file.messages and not end.over:  # an order; it has to wait
                    yield [end.file], None
            message = yield from end.hear()
            if message is None:
                self.log.write(texts.NO_CREDENTIALS)
                self.hung = True
                return False
            said.append(message)
        pid, number = said[0].who[0], int.from_bytes(said[1].data, "little")
        if self.faulted:
            self.log.write(
                texts.TEARDOWN.format(pid=pid, context=number), texts.NOT_ACCEPTED.format(pid=pid, context=number)
            )
            end.say(word(807))
            end.close()
            return False
        if self.destroyed:
            self.destroyed = False
            self.log.write(texts.CREATING_CONTEXT.format(device=0, name=gpu.NAME))
            yield [], self.kernel.now + self.delays.recreate()
        end.say(word(0))
        if number == 0:
            self.clients[pid] = ClientOf(pid, self.percentage, self.limits.get(0, 0))
        client = self.clients.get(pid)
        if client is None:
            end.say(b"FAIL 806")
            end.close()
            return False
        self.log.write(texts.CONNECTED.format(pid=pid, context=number), texts.WORKER.format(pid=pid, context=number))
        if number and len(self.contexts()) >= MAX_CLIENTS:
            self.log.write(texts.MAX_CLIENTS.format(count=MAX_CLIENTS), texts.DISCONNECTED.format(pid=pid))
            end.say(b"FAIL 808")
            end.close()
            return False
        link = Link(end, client, number)
        self.links.append(link)
        if number == 0:
            end.say(b"OK")
            self.world.judges.arrived(self, pid, client)
            return False
        client.contexts[number] = link
        self.log.write(texts.ASSOCIATED.format(name=gpu.NAME, uuid=self.world.device.uuid))
        yield [], self.kernel.now + self.delays.association()
        if end.over:  # measured: that ends the server, with everybody's work on it
            self.log.write(texts.LOST.format(pid=pid, context=number))
            return True
        self.log.write(texts.STATUS.format(pid=pid, context=number))
        wait = self.delays.client_context(0, self.kernel.now)
        end.say(f"OK {client.percentage} {client.memory} {wait:.3f}".encode())
        return False

    def listen(self, link: Link) -> Steps:
        link.end.file.reset = False
        while link.end.file.messages:
            said = link.end.file.next().data
            if said in (b"KERNEL", b"IDLE"):
                link.kernel = said == b"KERNEL"
            elif said == b"TERMINATED" and link.terminating:
                yield [], self.kernel.now + self.delays.terminate()
                self.terminated(link)
            elif said == b"FAULT":
                self.later(self.delays.fault_notice(), self.fault)
        if link.end.over and link in self.links:
            self.links.remove(link)
            link.end.close()
            client = link.client
            if not link.number:
                self.closing += 1
                self.later(self.delays.channel_close(), lambda: self.disconnect(client))
                return
            client.contexts.pop(link.number, None)
            self.log.write(texts.LOST.format(pid=client.pid, context=link.number))
            kernel = link.kernel
            if link.terminating:
                self.terminated(link)
            self.log.write(texts.EXITING_CLIENT.format(pid=client.pid, context=link.number, count=len(self.contexts())))
            if kernel and not link.sticky:  # also if it was asked to exit and could not answer (X13)
                self.later(self.delays.fault_notice(), self.fault)
            if link.sticky and not any(one.sticky for one in self.contexts()):
                self.log.write(texts.DESTROY_CONTEXT.format(device=0, name=gpu.NAME))
                self.faulted, self.destroyed = False, True
                self.busy_until = self.kernel.now + self.delays.destroy()

    def disconnect(self, client: ClientOf) -> None:
        self.closing -= 1
        self.log.write(texts.LOST.format(pid=client.pid, context=0), texts.DISCONNECTED.format(pid=client.pid))
        if self.clients.get(client.pid) is client:
            del self.clients[client.pid]

    def fault(self) -> None:
        """A fatal error: every client gets it, and no new one is accepted until the last of them has gone."""
        hit = self.contexts()
        if not hit:
            return
        blamed = hit[self.delays.pick(len(hit))].client.pid
        torn = [texts.TORN_DEVICE.format(pid=one.client.pid, context=one.number, device=0) for one in hit]
        self.log.write(texts.FATAL.format(pid=blamed, context=1), texts.HANDLING, *torn)
        self.log.write(texts.RESET_DEVICES, "0", texts.STICKY, *[str(one.client.pid) for one in hit])
        self.faulted = True
        for one in hit:
            one.sticky = True
            one.end.say(b"STICKY")
