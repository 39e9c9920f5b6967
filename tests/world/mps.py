"""The model of MPS: control daemon and servers as generators in virtual time.

What they say, in which order and how long it takes is the simulator's (``mpsagent_sim``: texts, delays, whose turn it
is, how limits are read), which is held against NVIDIA's programs by conformance. Written again is only what waits:
a process of its own can block, and a model in virtual time has to say what it waits for. Each wait here is one there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mpsagent_sim import gpu, limits, texts
from mpsagent_sim.control_daemon import _PRIVILEGED, _device_rows, _number
from mpsagent_sim.delays import Delays
from mpsagent_sim.server_clients import MAX_CLIENTS
from mpsagent_sim.turns import Turns
from tests.world.kernel import File, Message, Opened, PidFd, Process, Socket

if TYPE_CHECKING:
    from tests.world.world import World

GREETING, CREDENTIALS, DESCRIPTOR = b"OUTBHELL\0", b"OUTBCRED\0", b"OUTBCUFD\0"
SERVER, CLIENT, FRONT_END = b"\1\0\0\0", b"\2\0\0\0", b"\4\0\0\0"
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

    def tell(self, what: str) -> None:
        """The other end reads it at once: no copy of its descriptor can."""
        if self.file.peer is not None:
            self.file.peer.heard = what

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
    """A server as its daemon sees it. ``orders``: its connection, once it has come."""

    def __init__(self, process: Process, uid: int, pidfd: PidFd) -> None:
        self.process, self.pid, self.uid, self.pidfd = process, process.pid, uid, pidfd
        self.orders: End | None = None
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
        others = Log(self.world, f"{self.logs}/server.log", "Other", process.pid)  # its servers inherit it
        lock = f"{self.pipe}/control_lock"
        taken = Opened(kernel, kernel.nodes.get(lock) or kernel.make(lock, 0o100666, 0, 0), lock)
        process.install(taken)
        if taken.node.locked is not None:
            others.write(texts.LOG_DIRECTORY.format(directory=self.logs))
            self.world.tell(f"{process} ends: {texts.ALREADY_RUNNING.rstrip()}")
            return 1
        taken.node.locked = taken
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
            yield files, min(times, default=None)
            for listener in listeners:
                while listener.queue:
                    yield from self.accept(listener.queue.popleft(), listener is listeners[1])
            if self.ui is not None and self.ui[0].file.readable() and not self.quitting:
                yield from self.command(*self.ui)
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
            if self.quitting and self.server is None:
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
        one = self.servers.get(pid)
        if one is not None and one.orders is None:
            yield from self.connected(one, end)
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
        if said not in (CLIENT, FRONT_END):
            self.log.write(texts.UNKNOWN_KIND if said else texts.KIND_UNREADABLE)
        end.close()

    def client(self, end: End, pid: int, uid: int) -> Steps:
        self.world.judges.asked(pid, uid)
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
        orders = None if self.server is None else self.server.orders
        taken = orders is not None and orders.say(b"ATTACH %d" % pid, [ours])
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
        server = ServerProcess(self.world, process, uid, self.pipe, self.logs, self.after_a_kill)
        self.after_a_kill = False
        pidfd = PidFd(self.kernel, process)
        self.process.install(pidfd)
        self.server = self.servers[process.pid] = Server(process, uid, pidfd)
        forked = Log(self.world, f"{self.logs}/control.log", "Control", process.pid)
        forked.write(texts.STARTING_SERVER.format(pid=process.pid, uid=uid))
        self.kernel.program(process, server.run())

    def connected(self, one: Server, end: End) -> Steps:
        """A server has come. Until it says that it is ready the daemon serves no one else."""
        one.orders = end
        said = yield from end.hear()
        if said is None or said.data != SERVER:
            self.log.write(texts.KIND_UNREADABLE)  # it died; its pidfd tells the rest
            return
        one.ready = True
        self.log.write(texts.SERVER_READY.format(pid=one.pid))
        given = ",".join(f"{device}={size}" for device, size in reversed(self.limits.items()) if size)
        end.say(f"START {self.percentage} {self.priority} {given}".encode())
        attach, others = self.turns.ready()
        for key in attach:
            yield from self.attach(*self.waiting.pop(key))
        if others or self.quitting:
            yield from self.try_shutdown(one)

    def ask(self, one: Server, question: str) -> Generator[tuple[list[File], float | None], None, str | None]:
        if one.orders is None or not one.orders.say(question.encode()):
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
            if force:
                self.log.write(texts.FORCE.format(pid=one.pid))
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
        if one.process.status > 0:
            self.give_up()
        self.after_a_kill = not one.dismissed
        if one.orders is not None:
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

    def give_up(self) -> None:
        """The server could not start (no way into the pipe directory): its user's clients wait no longer."""
        for key in self.turns.ready()[0]:
            self.waiting.pop(key)[0].close()

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
        words = command.split() or [""]
        if not privileged and words[0] == "quit":
            self.say(texts.NO_QUIT_PRIVILEGE)
        elif not privileged and words[0] in _PRIVILEGED:
            self.say(texts.NO_PRIVILEGE.format(uid=uid))
        else:
            yield from self.do(command, words)

    def do(self, command: str, words: list[str]) -> Steps:
        name, argument = words[0], words[1] if len(words) > 1 else ""
        if name == "get_server_list":
            if self.servers:
                self.say(*map(str, self.servers))
        elif name == "set_default_active_thread_percentage":
            if (value := limits.percentage(argument)) is None:
                self.log.write(texts.BAD_PERCENTAGE)
            else:
                self.percentage = value
            self.say(str(self.percentage))
        elif name == "get_default_active_thread_percentage":
            self.say(str(self.percentage))
        elif name == "set_default_device_pinned_mem_limit":
            device, text = _number(words, 1), words[2] if len(words) > 2 else ""
            self.log.write(f"set_default_device_pinned_mem_limit {device} {text}.")
            self.limits[device] = limits.memory(text)
        elif name == "get_default_device_pinned_mem_limit":
            if size := self.limits.get(_number(words, 1)):
                self.say(limits.shown(size))
            else:
                self.log.write(texts.NO_DEFAULT_LIMIT)
        elif name == "set_default_client_priority":
            self.priority = _number(words, 1)
            for one in list(self.servers.values()):
                yield from self.ask(one, f"PRIORITY {self.priority}")
        elif name == "get_default_client_priority":
            self.say(str(self.priority))
        elif name == "start_server":
            if len(words) < 3 or argument != "-uid" or not words[2].isdigit():
                self.say(texts.UID_REQUIRED)
            else:
                yield from self.follow(self.turns.start_request(0 if self.multiuser else int(words[2])))
        elif name == "quit":
            yield from self.quit(float(_number(words, words.index("-t") + 1)) if "-t" in words else None)
        elif name == "get_device_client_list" and not argument:
            for one in list(self.servers.values()):
                self.tell((yield from self.ask(one, "DEVICE_CLIENTS")))
        elif name == "ps":
            yield from self.ps(words)
        elif name == "device_query":
            rows = _device_rows(SimpleNamespace(devices=[gpu.Device(0)]), "--csv" in words)  # type: ignore[arg-type]
            self.say("Default", *rows)
            for one in list(self.servers.values()):
                if (yield from self.ask(one, "DEVICE_QUERY")) is not None:
                    self.say(f"\nServer {one.pid}", *rows)
        else:
            yield from self.do_at_server(command, words)

    def quit(self, seconds: float | None) -> Steps:
        if seconds is not None:
            self.log.write(texts.QUIT_TIMEOUT.format(seconds=int(seconds)))
            self.quit_at = self.kernel.now + seconds
        self.quitting = True
        for waiting, _ in self.waiting.values():
            waiting.close()
        self.waiting.clear()
        self.turns.waiting.clear()
        if self.server is not None and not self.server.dismissed:
            yield from self.try_shutdown(self.server)

    def ps(self, words: list[str]) -> Steps:
        servers = list(self.servers.values())
        if "-p" in words:
            pid = _number(words, words.index("-p") + 1)
            servers = [one for one in servers if one.pid == pid]
            if not servers:
                self.say(*[texts.SERVER_NOT_FOUND.format(pid=pid)] * 2)
                if self.ui is not None:
                    self.ui[0].say(word(0))
                return
        if not servers:
            self.say(texts.NO_SERVER)
            return
        rows: list[str] = []
        for one in servers:
            rows += [row for row in ((yield from self.ask(one, "PS")) or "").split(";") if row]
        if rows:
            self.say(texts.PS_HEADER, *rows)

    def do_at_server(self, command: str, words: list[str]) -> Steps:
        questions = {
            "get_server_status": "STATUS", "get_client_list": "CLIENTS", "set_active_thread_percentage": "PERCENTAGE",
            "get_active_thread_percentage": "PERCENTAGE", "set_device_pinned_mem_limit": "SET_LIMIT",
            "get_device_pinned_mem_limit": "GET_LIMIT", "terminate_client": "TERMINATE", "shutdown_server": "",
            "get_device_client_list": "DEVICE_CLIENTS",
        }  # fmt: skip
        name = words[0]
        if name not in questions:
            self.say(texts.UNKNOWN_COMMAND.format(command=name or command))
            return
        one = self.servers.get(_number(words, 1))
        if one is None:
            pid = _number(words, 1)
            more = [f"Server {pid} not found!", "1"] if name == "terminate_client" else []
            self.say(texts.SERVER_NOT_FOUND.format(pid=pid), *more)
            return
        if name == "shutdown_server":
            if not one.dismissed and one.orders is not None:
                yield from self.try_shutdown(one, force="-f" in words)
            return
        more = words[2:] if name != "get_device_client_list" else []
        if name == "set_device_pinned_mem_limit":
            more = [str(_number(words, 2)), str(limits.memory(words[3] if len(words) > 3 else ""))]
        elif name == "set_active_thread_percentage":
            value = limits.percentage(words[2] if len(words) > 2 else "")
            more = [] if value is None else [str(value)]
            if value is None:
                self.log.write(texts.BAD_PERCENTAGE)
        elif more:
            more = [str(_number(words, 2))]
        answer = yield from self.ask(one, " ".join([questions[name], *more]))
        if name == "terminate_client":
            self.say(answer or "1")
        elif name == "get_device_pinned_mem_limit":
            if answer and int(answer):
                self.say(limits.shown(int(answer)))
        elif name != "set_device_pinned_mem_limit":
            self.tell(answer)

    def tell(self, answer: str | None) -> None:
        if answer:
            self.say(*answer.split(";"))


class Link:
    """A client's connection at its server: its channel (number 0) or a context. ``said`` and ``lost``: what its own
    thread has heard while another client was waited for, and whether it has written down that the client has gone."""

    def __init__(self, end: End, client: ClientOf, number: int) -> None:
        self.end, self.client, self.number = end, client, number
        self.kernel = self.sticky = self.terminating = self.lost = False
        self.leaves_at = 0.0
        self.said: deque[bytes] = deque()


class ClientOf:
    """A client process as its server knows it, with the limits of the moment in which its channel came; ``channel``:
    whether it came to this server, and not to one that was killed while the client started."""

    def __init__(self, pid: int, limits: str, channel: bool) -> None:
        self.pid, self.limits, self.channel = pid, limits, channel
        self.contexts: dict[int, Link] = {}
        self.number = 0
        """Of the clients of this server that have made a context."""
        self.last_close = 0.0


class ServerProcess:
    """nvidia-cuda-mps-server."""

    orders: End

    def __init__(self, world: World, process: Process, uid: int, pipe: str, logs: str, after_a_kill: bool) -> None:
        self.world, self.kernel, self.process, self.uid = world, world.kernel, process, uid
        self.pipe, self.after_a_kill, self.delays = pipe, after_a_kill, world.delays
        self.log = Log(world, f"{logs}/server.log", "Other", process.pid)
        self.percentage = 100.0
        self.limits: dict[int, int] = {}
        self.clients: dict[int, ClientOf] = {}
        self.links: list[Link] = []
        self.closing = self.count = 0
        self.faulted = self.destroyed = False
        self.hung = False
        self.busy_until = 0.0
        self.alarms: list[tuple[float, Any]] = []
        self.threads: list[tuple[float, Any]] = []
        """What clients' own threads do, also while another client is waited for: such a thread hears of its client's
        end then (H8)."""

    def run(self) -> Steps:
        kernel, delays = self.kernel, self.delays
        yield [], kernel.now + self.world.chance.uniform(0.001, 0.004)
        self.orders = End(self.process, Socket(kernel))
        try:
            kernel.connect(self.process, f"{self.pipe}/control", self.orders.file)
        except OSError:
            return 1  # as the user it may not enter the pipe directory, or the daemon has gone
        self.log.write(*[line.format(pipe=self.pipe) for line in texts.SERVER_BEGIN])
        if (yield from self.orders.hear()) is None:
            return 1
        self.orders.say(CREDENTIALS)
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
        self.orders.say(SERVER)
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
            files: list[File] = [self.orders.file, *(link.end.file for link in self.links)]
            times = [at for at, _ in (*self.alarms, *self.threads)] + (
                [self.busy_until] if self.busy_until > kernel.now else []
            )
            if self.busy_until > kernel.now and not self.orders.over:
                files.remove(self.orders.file)
            yield files, min(times, default=None)
            if self.orders.over:
                return 0
            if not self.hung and kernel.now >= self.busy_until and self.orders.file.messages:
                message = self.orders.file.next()
                if (status := (yield from self.order(message))) is not None:
                    return status
            for link in sorted(self.links, key=lambda one: -one.number):
                if not self.hung:
                    yield from self.listen(link)
                elif link.end.over:  # the client's own thread hears that it has gone, and no more comes of it (H1)
                    self.links.remove(link)
                    link.end.close()
                    self.lost(link)
                else:
                    link.end.file.messages.clear()
            self.own_threads()
            for alarm in [one for one in self.alarms if one[0] <= kernel.now]:
                self.alarms.remove(alarm)
                alarm[1]()

    def later(self, seconds: float, what: Any) -> None:
        self.alarms.append((self.kernel.now + seconds, what))

    def own_threads(self) -> None:
        for one in [one for one in self.threads if one[0] <= self.kernel.now]:
            self.threads.remove(one)
            one[1]()

    def hear(self, link: Link) -> None:
        link.end.file.reset = False
        while link.end.file.messages:
            link.said.append(link.end.file.next().data)
        if link.end.over:
            self.lost(link)

    def lost(self, link: Link) -> None:
        if not link.lost:
            link.lost = True
            self.log.write(texts.LOST.format(pid=link.client.pid, context=link.number))

    def contexts(self) -> list[Link]:
        return [link for client in self.clients.values() for link in client.contexts.values()]

    def places(self) -> int:
        """With one for each client that has no context."""
        return sum(max(1, len(client.contexts)) for client in self.clients.values())

    def set_limit(self, device: int, mebibytes: int) -> None:
        self.limits[device] = mebibytes
        self.log.write(texts.MEMORY_LIMIT.format(device=device, limit=mebibytes * 1048576))

    def order(self, message: Message) -> Generator[tuple[list[File], float | None], None, int | None]:
        """Its exit status when it ends."""
        words = message.data.decode().split()
        reply = ""
        if words[0] == "ATTACH":
            file = message.files[0]
            assert isinstance(file, Socket)
            end = End(self.process, file)
            file.drop()
            return (yield from self.attach(end))  # type: ignore[no-any-return]
        if words[0] == "SHUTDOWN":
            self.log.write(texts.NOTIFIED)
            count = len(self.links) + self.closing
            if count:
                self.log.write(texts.UNABLE_TO_SHUTDOWN.format(count=count))
                self.orders.say(f"BUSY {count}".encode())
                return None
            self.log.write(texts.FINISHING, texts.EXITING)
            self.orders.say(b"OK")
            yield [], self.kernel.now + self.delays.idle_exit()
            return 0
        if words[0] == "TERMINATE":
            self.terminate(int(words[1]))
            return None
        if words[0] == "STATUS":
            reply = "FAULT" if self.faulted else "ACTIVE"
        elif words[0] == "CLIENTS":
            reply = ";".join(str(pid) for pid, client in self.clients.items() if client.contexts)
        elif words[0] == "DEVICE_CLIENTS":
            rows = [f"[0] 00:00.0, {gpu.NAME}", *(f"{one.client.pid}.{one.number}" for one in self.contexts())]
            reply = ";".join(rows)
        elif words[0] == "PS":
            reply = ";".join(
                f"{one.pid:<10}{one.number:<10}{self.process.pid:<15}{self.world.device.uuid[:22]:<26}4026531836     "
                f"{self.kernel.name_of(one.pid):<15}" for one in self.clients.values() if one.contexts)  # fmt: skip
        elif words[0] == "PRIORITY":
            self.log.write(texts.CLIENT_PRIORITY.format(priority=words[1]))
        elif words[0] == "DEVICE_QUERY":
            self.log.write(texts.DEVICE_QUERY.format(count=1))
        elif words[0] == "PERCENTAGE":
            self.percentage = float(words[1]) if len(words) > 1 else self.percentage
            reply = str(self.percentage)
        elif words[0] == "SET_LIMIT":
            self.set_limit(int(words[1]), int(words[2]))
        elif words[0] == "GET_LIMIT":
            reply = str(self.limits.get(int(words[1]), 0))
        self.orders.say(reply.encode())
        return None

    def terminate(self, pid: int) -> None:
        self.world.judges.to_end(pid)
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
        if link.kernel:
            others = sum(one.kernel for one in self.contexts() if one is not link)
            link.leaves_at = self.kernel.now + self.delays.leaving(others)
        link.terminating = link.kernel = False
        self.log.write(texts.TERMINATED)
        if not any(one.terminating for one in link.client.contexts.values()):
            self.orders.say(b"0")

    def attach(self, end: End) -> Generator[tuple[list[File], float | None], None, int | None]:
        """The handshake with a client; nothing else is done meanwhile, and one that leaves in it leaves it hung."""
        self.log.write(texts.REQUEST.format(pid=0, context=0))
        for _ in range(4):
            end.say(DESCRIPTOR, [File(self.kernel)])
        end.say(READY)
        said: list[Message] = []
        for _ in range(3):
            while not end.file.messages and not end.over:
                files = [end.file, *(link.end.file for link in self.links if not link.lost)]
                files += [] if self.orders.file.messages else [self.orders.file]  # an order has to wait
                yield files, min((at for at, _ in self.threads), default=None)
                if self.orders.over:
                    return 0
                for link in sorted(self.links, key=lambda one: -one.number):
                    self.hear(link)
                self.own_threads()
            message = yield from end.hear()
            if message is None:
                self.log.write(texts.NO_CREDENTIALS)
                self.hung = True
                return None
            said.append(message)
        pid, number = said[0].who[0], int.from_bytes(said[1].data, "little")
        if self.faulted:
            self.log.write(
                texts.TEARDOWN.format(pid=pid, context=number), texts.NOT_ACCEPTED.format(pid=pid, context=number)
            )
            end.say(word(807))
            end.close()
            return None
        if self.destroyed:
            self.destroyed = False
            self.log.write(texts.CREATING_CONTEXT.format(device=0, name=gpu.NAME))
            yield [], self.kernel.now + self.delays.recreate()
        end.say(word(0))
        if number == 0:
            self.clients[pid] = ClientOf(pid, f"{self.percentage} {self.limits.get(0, 0)}", True)
        elif number == 1:
            self.clients.setdefault(pid, ClientOf(pid, "- -", False))
        client = self.clients.get(pid)
        if client is None:
            end.say(b"FAIL 806")
            end.close()
            return None
        self.log.write(texts.CONNECTED.format(pid=pid, context=number), texts.WORKER.format(pid=pid, context=number))
        if number and len(self.contexts()) >= MAX_CLIENTS:
            self.log.write(
                texts.ASSOCIATED.format(name=gpu.NAME, uuid=self.world.device.uuid),
                texts.MAX_CLIENTS.format(count=MAX_CLIENTS),
                texts.DISCONNECTED.format(pid=pid),
            )
            end.say(b"FAIL 808")
            end.close()
            return None
        link = Link(end, client, number)
        self.links.append(link)
        if number == 0:
            end.say(b"OK")
            told = self.kernel.now + self.delays.limits_told()
            self.threads.append((told, lambda: end.tell(client.limits)))
            self.world.judges.arrived(self, pid, client)
            self.world.judges.takes(self.process.pid, self.places())
            return None
        if not client.number:
            self.count += 1
            client.number = self.count
        client.contexts[number] = link
        self.world.judges.takes(self.process.pid, self.places())
        self.log.write(texts.ASSOCIATED.format(name=gpu.NAME, uuid=self.world.device.uuid))
        yield [], self.kernel.now + self.delays.association()
        if end.over:  # measured: that ends the server, with everybody's work on it
            count = len(self.contexts()) - 1
            self.log.write(
                texts.LOST.format(pid=pid, context=number),
                texts.EXITING_CLIENT.format(pid=pid, context=number, count=count),
            )
            return 1
        self.log.write(texts.STATUS.format(pid=pid, context=number))
        wait = self.delays.client_context(0, self.kernel.now)
        if not client.channel:
            self.world.judges.arrived(self, pid, client)
        self.world.judges.context(pid, (self.percentage, self.limits.get(0, 0)))
        end.say(f"OK {client.limits} {wait:.3f}".encode())
        return None

    def listen(self, link: Link) -> Steps:
        link.end.file.reset = False
        while link.said or link.end.file.messages:
            said = link.said.popleft() if link.said else link.end.file.next().data
            if said in (b"KERNEL", b"IDLE"):
                link.kernel = said == b"KERNEL"
            elif said == b"TERMINATED" and link.terminating:
                yield [], self.kernel.now + self.delays.terminate()
                self.terminated(link)
            elif said == b"FAULT":
                self.later(self.delays.fault_notice(), lambda: self.fault(link.client.pid))
        if link.end.over and link in self.links:
            self.links.remove(link)
            link.end.close()
            client = link.client
            if not link.number:
                self.closing += 1
                # a killed process's contexts are closed in the same moment, and noticed first
                last = self.kernel.now if client.contexts else client.last_close
                self.later(max(0.0, last + self.delays.channel_close() - self.kernel.now), lambda: self.lose(link))
                return
            client.last_close = self.kernel.now
            client.contexts.pop(link.number, None)
            if not client.channel and not client.contexts:
                self.clients.pop(client.pid, None)
            self.lost(link)
            kernel = link.kernel
            if link.terminating:
                self.terminated(link)
            self.left_early(link)
            self.log.write(texts.EXITING_CLIENT.format(pid=client.pid, context=link.number, count=len(self.contexts())))
            if kernel and not link.sticky:  # also if it was asked to exit and could not answer (X13)
                self.later(self.delays.fault_notice(), lambda: self.fault(client.pid))
            if link.sticky and not any(one.sticky for one in self.contexts()):
                self.log.write(texts.DESTROY_CONTEXT.format(device=0, name=gpu.NAME))
                self.faulted, self.destroyed = False, True
                self.busy_until = self.kernel.now + self.delays.destroy()

    def left_early(self, link: Link) -> None:
        """A client whose work is still on the GPU has gone. Nothing happens as long as its memory is kept."""
        now, process = self.kernel.now, self.kernel.processes.get(link.client.pid)
        if link.sticky or now >= link.leaves_at:
            return
        if (process is not None and process.alive) or self.world.held.get(link.client.pid, now) > now:
            self.later(0.02, lambda: self.left_early(link))
        else:
            self.later(self.delays.late_fault(), lambda: self.fault(link.client.pid))

    def lose(self, link: Link) -> None:
        """A channel."""
        client = link.client
        self.lost(link)
        if self.kernel.now >= self.busy_until:
            self.disconnect(client)
        else:  # after the order that came meanwhile: it still counts as a worker thread (Q4, Q6 of the real runs)
            self.later(self.busy_until - self.kernel.now + 0.002, lambda: self.disconnect(client))

    def disconnect(self, client: ClientOf) -> None:
        self.closing -= 1
        self.log.write(texts.DISCONNECTED.format(pid=client.pid))
        if self.clients.get(client.pid) is client:
            del self.clients[client.pid]

    def fault(self, culprit: int) -> None:
        """A fatal error: every client gets it, and no new one is accepted until the last of them has gone."""
        hit = [one for one in self.links if one.number]
        if not hit:
            return
        self.world.judges.harmed(culprit, {one.client.pid for one in hit})
        hit[1:] = hit[:0:-1]  # the first to connect, then the last, the last but one, ... (02 R4, R4 of the real runs)
        pids = [one.client.pid for one in hit]
        blamed = [pids[0], culprit] if culprit in pids else [pids[0]]
        torn = [texts.TORN_DEVICE.format(pid=one.client.pid, context=one.number, device=0) for one in hit]
        self.log.write(texts.FATAL.format(pid=blamed[self.delays.pick(len(blamed))], context=1), texts.HANDLING, *torn)
        for one in hit:
            pid = one.client.pid
            self.log.write(texts.TORN_PROCESS.format(pid=pid), texts.TORN_CLIENT.format(pid=pid, context=one.number))
        self.log.write(texts.RESET_DEVICES, "0", texts.STICKY, *map(str, pids))
        self.faulted = True
        for one in hit:
            one.sticky = True
            one.end.say(b"STICKY")
