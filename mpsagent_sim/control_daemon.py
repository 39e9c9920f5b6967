"""The control daemon: one thread, one connection at a time, blocking wherever the real one was seen to block."""

import _socket
import gc
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NoReturn

from mpsagent_sim import gpu, limits, rendezvous, server, texts, wire
from mpsagent_sim.control_files import AlreadyRunning, Files
from mpsagent_sim.control_servers import Server
from mpsagent_sim.control_session import Session
from mpsagent_sim.delays import Delays
from mpsagent_sim.process_title import ProcessTitle
from mpsagent_sim.turns import Turns


class Daemon:
    """State and loop. Making one takes the pipe directory; raises AlreadyRunning, OSError, ValueError."""

    def __init__(self, foreground: bool, multiuser: bool) -> None:
        self.foreground, self.multiuser = foreground, multiuser
        self.files = Files()
        self.pipe = self.files.pipe
        self.owner = os.getuid()
        self.title = ProcessTitle()
        self.server_log, control_log = self.files.open(foreground)
        self.log = wire.Log(control_log, "Control")
        self.listeners = self.files.listen()
        words = ["nvidia-cuda-mps-control", "-f" if foreground else "-d"]
        self.title.set(*words, *(["--multiuser-server"] if multiuser else []))
        self.log.write(
            texts.STARTING.format(pipe=self.pipe), texts.CONNECT_HINT.format(pipe=self.pipe), texts.CONTROL_VERSION
        )
        self.turns = Turns()
        self.servers: dict[int, Server] = {}
        self.server: Server | None = None
        self.waiting: dict[int, tuple[_socket.socket, int]] = {}
        self.ui: Session | None = None
        self.leaked: list[_socket.socket] = []
        self.next_try: float | None = None
        self.quitting = False
        self.exit_status = 0
        self.quit_at: float | None = None
        self.after_a_kill = False
        everything = gpu.machine(int(os.environ.get("MPSSIM_GPUS") or 1))
        self.devices = gpu.visible(everything, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self.delays = Delays(float(os.environ.get("MPSSIM_SPEED") or 1), os.environ.get("MPSSIM_SEED"))
        given = limits.percentage(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", ""))
        self.default_percentage = 100.0 if given is None else given
        self.default_limits: dict[int, int] = {}  # CUDA_MPS_PINNED_DEVICE_MEM_LIMIT has no effect (07 W1)
        self.default_priority = 0

    # the loop

    def run(self) -> NoReturn:
        gc.freeze()
        while True:
            poll = select.poll()
            for listener in self.listeners:
                poll.register(listener.fileno(), select.POLLIN)
            if self.ui is not None and not self.quitting:
                poll.register(self.ui.connection.fileno(), select.POLLIN)
            for one in self.servers.values():
                if one.gone_at is None:
                    poll.register(one.pidfd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(self._timeout_ms())}
            for listener in self.listeners:
                # all who have connected, before anything else is done (Q10 of the real runs)
                while listener.fileno() in ready and self.connection_waits(listener):
                    self.accept(listener)
            ui = None if self.quitting else self.ui  # `quit` keeps its front-end until the end
            if ui is not None and ui.connection.fileno() in ready:
                self.user_interface(ui)
            now = time.monotonic()
            for one in list(self.servers.values()):
                if one.pidfd in ready and one.gone_at is None:
                    one.gone_at = now if one.dismissed else now + self.delays.killed_exit()
            self.timers(now)

    def _timeout_ms(self) -> float | None:
        times = [at for at in (self.next_try, self.quit_at) if at is not None]
        times += [one.gone_at for one in self.servers.values() if one.gone_at is not None]
        return max(0.0, (min(times) - time.monotonic()) * 1000 + 0.5) if times else None

    def timers(self, now: float) -> None:
        for one in list(self.servers.values()):
            if one.gone_at is not None and now >= one.gone_at:
                self.reap(one)
        if self.quit_at is not None and now >= self.quit_at:
            self.quit_at = None
            if self.server is not None and not self.server.dismissed:
                self.try_shutdown(self.server, force=True)
        if self.next_try is not None and now >= self.next_try:
            self.next_try = None
            if self.server is not None and not self.server.dismissed:
                self.try_shutdown(self.server, by_timer=True)

    # connections

    def connection_waits(self, listener: _socket.socket) -> bool:
        poll = select.poll()
        poll.register(listener.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def accept(self, listener: _socket.socket) -> None:
        fd, _ = listener._accept()  # type: ignore[attr-defined]
        connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, fileno=fd)
        self.log.write(texts.ACCEPTING)
        connection.setsockopt(_socket.SOL_SOCKET, _socket.SO_PASSCRED, 1)
        if not rendezvous.send(connection, rendezvous.GREETING):
            self.log.write(texts.UNABLE_TO_ACCEPT)  # it has gone already
            connection.close()
            return
        # it waits for each answer without a limit: a silent peer blocks the daemon (X29)
        peer = rendezvous.credentials(connection)
        if peer is None:
            self.log.write(texts.NO_CREDENTIALS)
            connection.close()
            return
        pid, uid, _ = peer
        privileged = listener is self.listeners[1]
        if privileged and uid not in (0, self.owner):
            self.log.write(texts.NOT_PRIVILEGED)
            connection.close()
            return
        one = self.servers.get(pid)
        if one is not None and one.lines is None:
            self.server_connected(one, connection)
            return
        kind = rendezvous.receive(connection)
        kind.close()
        if kind.data == rendezvous.CLIENT:
            self.client(connection, pid, uid)
            return
        if kind.data == rendezvous.FRONT_END:
            # a second front-end is rejected while one is open (03 Q4), and during `quit` (02 R10)
            if self.ui is None and not self.quitting:
                self.ui = Session(connection, uid, privileged)
                self.log.write(texts.NEW_UI)
                return
        elif kind.data == rendezvous.SERVER:
            self.log.write(texts.STRANGE_SERVER.format(pid=pid))
        elif kind.data == rendezvous.DEBUGGER:
            self.log.write(texts.NEW_DEBUGGEE.format(pid=pid, uid=uid))
        elif kind.data:
            self.log.write(texts.UNKNOWN_KIND)
            self.leaked.append(connection)  # and never closed
            return
        else:
            self.log.write(texts.KIND_UNREADABLE)
        connection.close()

    def client(self, connection: _socket.socket, pid: int, uid: int) -> None:
        """Pass a client's connection (for a channel or a context) to its user's server, or let it wait."""
        if self.quitting:
            connection.close()
            return
        if self.multiuser:
            uid = 0
        key = connection.fileno()
        todo = self.turns.client(uid, key)
        if todo == "attach":
            self.log.write(texts.CLIENT_ATTACHED.format(pid=pid, uid=uid))
            self.attach(connection, pid)
            return
        self.log.write(texts.CLIENT_PENDING.format(pid=pid, uid=uid))
        self.waiting[key] = (connection, pid)
        self.follow(todo)

    def attach(self, connection: _socket.socket, pid: int) -> None:
        """Hand the client over to the server; its connection ends with that."""
        if self.server is not None:
            self.server.take(connection, pid)
        connection.close()

    def follow(self, todo: str) -> None:
        """Do what `Turns` answered."""
        if todo == "start":
            uid = self.turns.next_user()
            if uid is not None:
                self.start_server(uid)
        elif todo == "try" and self.server is not None:
            self.try_shutdown(self.server)

    # servers

    def start_server(self, uid: int) -> None:
        self.turns.starting(uid)
        after_a_kill, self.after_a_kill = self.after_a_kill, False
        pid = os.fork()
        if pid == 0:
            self._become_server(uid, after_a_kill)
        self.server = self.servers[pid] = Server(pid, uid)

    def _become_server(self, uid: int, after_a_kill: bool) -> NoReturn:
        status = 1
        try:
            self.log.pid = os.getpid()
            self.log.write(texts.STARTING_SERVER.format(pid=os.getpid(), uid=uid))
            kept = max(self.server_log, 2)
            os.closerange(3, kept)
            os.closerange(kept + 1, 4096)
            os.dup2(os.open("/dev/null", os.O_RDWR), 0)  # it may have been a client's (X28)
            os.chdir("/")
            self.title.set("nvidia-cuda-mps-server", *(["-multiuser-server"] if self.multiuser else []))
            status = server.main(self.pipe, self.server_log, self.devices, self.delays, uid, after_a_kill)
        except BaseException as error:
            wire.Log(self.server_log, "Other").write(f"simulator error: {error!r}")
        finally:
            os._exit(status)

    def server_connected(self, one: Server, connection: _socket.socket) -> None:
        """Wait for a new server's introduction, which it sends when it is ready, and serve nothing else meanwhile."""
        lines = one.lines = wire.Lines(connection)
        kind = rendezvous.receive(connection).data
        if kind == rendezvous.FAILED:
            one.failed = True
            self.log.write(texts.SERVER_FAILED)
            return
        if kind != rendezvous.SERVER:
            self.log.write(texts.KIND_UNREADABLE)  # it died; its pidfd reports its end
            return
        one.ready = True
        self.log.write(texts.SERVER_READY.format(pid=one.pid))
        wire.send(lines.connection, f"PERCENTAGE {self.default_percentage}")
        # the device that was named last for the first time comes first (S3 of recording 01 and of the real runs)
        for device, mebibytes in reversed(self.default_limits.items()):
            if mebibytes:
                wire.send(lines.connection, f"LIMIT {device} {mebibytes}")
        wire.send(lines.connection, f"START {self.default_priority}")
        attach, others = self.turns.ready()
        for key in attach:
            self.attach(*self.waiting.pop(key))
        if others or self.quitting:
            self.try_shutdown(one)

    def try_shutdown(self, one: Server, by_timer: bool = False, force: bool = False) -> None:
        first = not by_timer
        self.log.write((texts.TRY_FIRST if first else texts.TRY_AGAIN).format(pid=one.pid))
        reply = one.ask("SHUTDOWN")
        if reply is None:
            return  # it was killed; its pidfd tells
        word, _, count = reply.partition(" ")
        if word == "OK":
            if force:
                self.log.write(texts.FORCE.format(pid=one.pid))
            self.dismiss(one)
            return
        self.log.write(texts.SERVER_BUSY.format(pid=one.pid, count=count))
        if force:
            self.log.write(texts.FORCE.format(pid=one.pid))
            self.dismiss(one)
            one.dismissed = False  # it does not say goodbye: notice comes as for a killed one
            signal.pidfd_send_signal(one.pidfd, signal.SIGKILL)
            one.lines = None
            return
        interval_ms = self.turns.back_off.busy(by_timer)
        self.next_try = time.monotonic() + interval_ms / 1000
        self.log.write(texts.NEXT_TRY.format(pid=one.pid, ms=interval_ms))

    def dismiss(self, one: Server) -> None:
        one.dismissed = True
        self.turns.leaving()
        self.next_try = None

    def reap(self, one: Server) -> None:
        _, status = os.waitpid(one.pid, 0)
        # whatever else happened to it, a server is reported with status 0 (02 R6, X19 of the real runs)
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
        self.log.write(texts.SERVER_EXITED.format(pid=one.pid, status=int(one.failed)))
        if one.failed:
            self.exit_status = 1
            if self.turns.failed():
                self.log.write(texts.REMOVED_SHM)
                self.give_up()
        elif code:
            self.give_up()
        if not one.ready:
            self.close_descriptor_0()
        self.after_a_kill = not one.dismissed
        os.close(one.pidfd)
        if one.lines is not None:
            one.lines.connection.close()
        del self.servers[one.pid]
        if self.server is one:
            self.server = None
            self.next_try = None
            uid = self.turns.gone()
            if self.quitting:
                self.exit()
            elif uid is not None:
                self.start_server(uid)

    def close_descriptor_0(self) -> None:
        """Close descriptor 0, as the real daemon does when a server exits that was never Ready (X28)."""
        if (client := self.waiting.get(0)) is not None:  # it stays in the list
            client[0].shutdown(_socket.SHUT_RDWR)
            return
        if self.ui is not None and self.ui.connection.fileno() == 0:
            self.ui.connection.shutdown(_socket.SHUT_RDWR)
            return
        if all(one.lines is None or one.lines.connection.fileno() != 0 for one in self.servers.values()):
            with suppress(OSError):
                os.close(0)

    def give_up(self) -> None:
        """The server could not start (no way into the pipe directory): its user's clients wait no longer."""
        keys, _ = self.turns.ready()
        for key in keys:
            self.waiting.pop(key)[0].close()

    # front-ends

    def user_interface(self, ui: Session) -> None:
        """Read a command of the open front-end, or its end."""
        command = ui.command()
        if command is None:
            self.log.write(texts.UI_CLOSED)
            self.close_ui()
            return
        self.log.write(texts.COMMAND.format(command=command))
        execute(self, command, ui)

    def say(self, *lines: str) -> None:
        """An answer: to the front-end and into the log."""
        self.log.write(*lines)
        if self.ui is not None:
            for line in lines:
                self.ui.answer(line)

    def close_ui(self) -> None:
        if self.ui is not None:
            self.ui.end(self.exit_status if self.quitting else 0)
            self.ui = None

    def quit(self, timeout: float | None) -> None:
        self.quitting = True
        if timeout is not None:
            self.quit_at = time.monotonic() + timeout
        for connection, _ in self.waiting.values():
            connection.close()
        self.waiting.clear()
        self.turns.waiting.clear()
        if self.server is None:
            self.exit()
        elif not self.server.dismissed:
            self.try_shutdown(self.server)

    def exit(self) -> NoReturn:
        self.log.write(texts.EXIT.format(status=self.exit_status))
        self.files.leave()
        self.close_ui()
        os._exit(0)


# The commands and their answers, word for word. Exit status 0 whatever happens.

_PRIVILEGED = {
    "set_default_active_thread_percentage",
    "set_active_thread_percentage",
    "set_default_device_pinned_mem_limit",
    "set_device_pinned_mem_limit",
    "set_default_client_priority",
    "start_server",
    "shutdown_server",
    "terminate_client",
}


def _number(words: list[str], at: int) -> int:
    """The argument as a number, 0 when it is missing or none (as atoi does)."""
    return int(words[at]) if at < len(words) and words[at].isdigit() and len(words[at]) < 19 else 0


def _find(daemon: Daemon, words: list[str]) -> Server | None:
    """The server named by the first argument; its absence is answered in words."""
    pid = _number(words, 1)
    found = daemon.servers.get(pid)
    if found is None:
        daemon.say(texts.SERVER_NOT_FOUND.format(pid=pid))
    return found


def _tell(daemon: Daemon, reply: str | None) -> None:
    """A server's answer: fields separated by semicolons, a line each; nothing when it died."""
    if reply:
        daemon.say(*reply.split(";"))


def _forward(question: str, daemon: Daemon, words: list[str]) -> None:
    if found := _find(daemon, words):
        _tell(daemon, found.ask(question))


def _device_rows(daemon: Daemon, csv: bool) -> list[str]:
    if csv:
        rows = [f"{at},{device.pci},{device.uuid},{gpu.NAME},N/A" for at, device in enumerate(daemon.devices)]
        return [texts.DEVICE_HEADER_CSV, *rows]
    rows = [f"{at:<16}{device.pci}  {device.uuid}  {gpu.NAME:<34}N/A" for at, device in enumerate(daemon.devices)]
    return [texts.DEVICE_HEADER, *rows]


def execute(daemon: Daemon, command: str, ui: Session) -> None:
    """Execute a command of the open front-end. Text after a newline in it was only written into the log."""
    command = command.partition("\n")[0]
    words = command.split()
    name = words[0] if words else ""
    handler = _COMMANDS.get(name)
    if handler is None:
        daemon.say(texts.UNKNOWN_COMMAND.format(command=command if not words else name))
    elif ui.privileged:
        handler(daemon, words)
    elif name == "quit":
        daemon.say(texts.NO_QUIT_PRIVILEGE)
    elif name in _PRIVILEGED:
        daemon.say(texts.NO_PRIVILEGE.format(uid=ui.uid))
    else:
        handler(daemon, words)


def get_device_client_list(daemon: Daemon, words: list[str]) -> None:
    named = [_find(daemon, words)] if len(words) > 1 else list(daemon.servers.values())
    for one in filter(None, named):
        _tell(daemon, one.ask("DEVICE_CLIENTS"))


def ps(daemon: Daemon, words: list[str]) -> None:
    if "-p" in words:
        at = words.index("-p") + 1
        found = daemon.servers.get(_number(words, at))
        if found is None:
            daemon.say(*[texts.SERVER_NOT_FOUND.format(pid=_number(words, at))] * 2)
            if daemon.ui is not None:
                daemon.ui.answer("")
            return
        servers = [found]
    else:
        servers = list(daemon.servers.values())
        if not servers:
            daemon.say(texts.NO_SERVER)
            return
    rows: list[str] = []
    for one in servers:
        for row in (one.ask("PS") or "").split(";"):
            columns, _, name = row.partition("|")
            if name:  # whatever the client is called, line feeds and all: MPS prints it as it is
                rows.append(f"{columns}{os.fsdecode(bytes.fromhex(name)):<15}")
    if rows:
        daemon.say(texts.PS_HEADER, *rows)


def set_default_active_thread_percentage(daemon: Daemon, words: list[str]) -> None:
    value = limits.percentage(words[1] if len(words) > 1 else "")
    if value is None:
        daemon.log.write(texts.BAD_PERCENTAGE)
    else:
        daemon.default_percentage = value
    daemon.say(str(daemon.default_percentage))


def set_active_thread_percentage(daemon: Daemon, words: list[str]) -> None:
    if found := _find(daemon, words):
        value = limits.percentage(words[2] if len(words) > 2 else "")
        if value is None:
            daemon.log.write(texts.BAD_PERCENTAGE)
            _tell(daemon, found.ask("GET_PERCENTAGE"))
        else:
            _tell(daemon, found.ask(f"SET_PERCENTAGE {value}"))


def set_default_device_pinned_mem_limit(daemon: Daemon, words: list[str]) -> None:
    device, value = _number(words, 1), words[2] if len(words) > 2 else ""
    daemon.log.write(f"set_default_device_pinned_mem_limit {device} {value}.")
    daemon.default_limits[device] = limits.memory(value)  # 0 for none; the device keeps its place


def get_default_device_pinned_mem_limit(daemon: Daemon, words: list[str]) -> None:
    value = daemon.default_limits.get(_number(words, 1))
    if not value:
        daemon.log.write(texts.NO_DEFAULT_LIMIT)
    else:
        daemon.say(limits.shown(value))


def set_device_pinned_mem_limit(daemon: Daemon, words: list[str]) -> None:
    if found := _find(daemon, words):
        mebibytes = limits.memory(words[3] if len(words) > 3 else "")
        found.ask(f"SET_LIMIT {_number(words, 2)} {mebibytes}")


def get_device_pinned_mem_limit(daemon: Daemon, words: list[str]) -> None:
    if found := _find(daemon, words):
        mebibytes = int(found.ask(f"GET_LIMIT {_number(words, 2)}") or 0)
        if mebibytes:
            daemon.say(limits.shown(mebibytes))


def set_default_client_priority(daemon: Daemon, words: list[str]) -> None:
    daemon.default_priority = _number(words, 1)
    for one in daemon.servers.values():
        one.ask(f"PRIORITY {daemon.default_priority}")


def device_query(daemon: Daemon, words: list[str]) -> None:
    rows = _device_rows(daemon, "--csv" in words)
    daemon.say("Default", *rows)
    for one in daemon.servers.values():
        if one.ask("DEVICE_QUERY") is not None:
            daemon.say(f"\nServer {one.pid}", *rows)


def start_server(daemon: Daemon, words: list[str]) -> None:
    if len(words) < 3 or words[1] != "-uid" or not words[2].isdigit():
        daemon.say(texts.UID_REQUIRED)
        return
    uid = 0 if daemon.multiuser else int(words[2])
    daemon.follow(daemon.turns.start_request(uid))


def shutdown_server(daemon: Daemon, words: list[str]) -> None:
    found = _find(daemon, words)
    if found is not None and not found.dismissed and found.lines is not None:
        daemon.try_shutdown(found, force="-f" in words)


def terminate_client(daemon: Daemon, words: list[str]) -> None:
    found = _find(daemon, words)
    if found is None:
        daemon.say(f"Server {_number(words, 1)} not found!", "1")
        return
    daemon.say(found.ask(f"TERMINATE {_number(words, 2)}") or "1")


def leave(daemon: Daemon, words: list[str]) -> None:
    timeout = None
    if "-t" in words:
        timeout = float(_number(words, words.index("-t") + 1))
        daemon.log.write(texts.QUIT_TIMEOUT.format(seconds=int(timeout)))
    daemon.quit(timeout)


_COMMANDS: dict[str, Callable[[Daemon, list[str]], None]] = {
    "get_server_list": lambda daemon, _: daemon.say(*map(str, daemon.servers)) if daemon.servers else None,
    "get_server_status": partial(_forward, "STATUS"),
    "get_client_list": partial(_forward, "CLIENTS"),
    "get_device_client_list": get_device_client_list,
    "ps": ps,
    "set_default_active_thread_percentage": set_default_active_thread_percentage,
    "get_default_active_thread_percentage": lambda daemon, _: daemon.say(str(daemon.default_percentage)),
    "set_active_thread_percentage": set_active_thread_percentage,
    "get_active_thread_percentage": partial(_forward, "GET_PERCENTAGE"),
    "set_default_device_pinned_mem_limit": set_default_device_pinned_mem_limit,
    "get_default_device_pinned_mem_limit": get_default_device_pinned_mem_limit,
    "set_device_pinned_mem_limit": set_device_pinned_mem_limit,
    "get_device_pinned_mem_limit": get_device_pinned_mem_limit,
    "set_default_client_priority": set_default_client_priority,
    "get_default_client_priority": lambda daemon, _: daemon.say(str(daemon.default_priority)),
    "device_query": device_query,
    "start_server": start_server,
    "shutdown_server": shutdown_server,
    "terminate_client": terminate_client,
    "quit": leave,
}


def _run(foreground: bool, multiuser: bool, report: int | None) -> NoReturn:
    try:
        daemon = Daemon(foreground, multiuser)
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
        daemon.run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        daemon.log.write("simulator error: " + repr(sys.exc_info()[1]))
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
