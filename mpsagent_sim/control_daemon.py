"""The control daemon: one thread, one connection at a time, blocking wherever the real one was seen to block."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from mpsagent_sim import gpu, limits, rendezvous, texts
from mpsagent_sim.control_servers import Server
from mpsagent_sim.control_session import Session
from mpsagent_sim.turns import Turns

if TYPE_CHECKING:
    from mpsagent_sim.host import Connection, DaemonHost, Steps


class Exit(Exception):
    """The daemon exits."""


class Daemon:
    def __init__(self, host: DaemonHost, multiuser: bool) -> None:
        self.host, self.multiuser = host, multiuser
        self.log = host.log
        self.delays = host.delays
        self.turns = Turns()
        self.servers: dict[int, Server] = {}
        self.server: Server | None = None
        self.waiting: dict[int, tuple[Connection, int]] = {}
        self.ui: Session | None = None
        self.leaked: list[Connection] = []
        self.next_try: float | None = None
        self.quitting = False
        self.exit_status = 0
        self.quit_at: float | None = None
        self.after_a_kill = False
        environment = host.environment
        everything = gpu.machine(int(environment.get("MPSSIM_GPUS") or 1))
        self.devices = gpu.visible(everything, environment.get("CUDA_VISIBLE_DEVICES"))
        given = limits.percentage(environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", ""))
        self.default_percentage = 100.0 if given is None else given
        self.default_limits: dict[int, int] = {}  # CUDA_MPS_PINNED_DEVICE_MEM_LIMIT has no effect (07 W1)
        self.default_priority = 0
        pipe = host.pipe
        self.log.write(texts.STARTING.format(pipe=pipe), texts.CONNECT_HINT.format(pipe=pipe), texts.CONTROL_VERSION)

    # the loop

    def run(self) -> Steps[int]:
        """Return the exit status."""
        try:
            return (yield from self.serve())
        except Exit:
            return 0

    def serve(self) -> Steps[int]:
        while True:
            ui = None if self.quitting else self.ui  # `quit` keeps its front-end until the end
            running = [one for one in self.servers.values() if one.gone_at is None]
            files = [listener.file for listener in self.host.listeners]
            files += [one.process.file for one in running]
            if ui is not None:
                files.append(ui.connection.file)
            yield files, self._until()
            commanded = ui is not None and ui.connection.readable()
            exited = [one for one in running if one.process.readable()]
            for listener in self.host.listeners:
                # all connections that have come, before anything else is done (Q10 of the real runs)
                while (connection := listener.accept()) is not None:
                    yield from self.accept(connection, privileged=listener is self.host.listeners[1])
            if ui is not None and commanded:
                yield from self.user_interface(ui)
            now = self.host.now
            for one in exited:
                one.gone_at = now if one.dismissed else now + self.delays.killed_exit()
            yield from self.timers(now)

    def _until(self) -> float | None:
        times = [at for at in (self.next_try, self.quit_at) if at is not None]
        times += [one.gone_at for one in self.servers.values() if one.gone_at is not None]
        return min(times, default=None)

    def timers(self, now: float) -> Steps[None]:
        for one in list(self.servers.values()):
            if one.gone_at is not None and now >= one.gone_at:
                self.reap(one)
        if self.quit_at is not None and now >= self.quit_at:
            self.quit_at = None
            if self.server is not None and not self.server.dismissed:
                yield from self.try_shutdown(self.server, force=True)
        if self.next_try is not None and now >= self.next_try:
            self.next_try = None
            if self.server is not None and not self.server.dismissed:
                yield from self.try_shutdown(self.server, by_timer=True)

    # connections

    def accept(self, connection: Connection, privileged: bool) -> Steps[None]:
        self.log.write(texts.ACCEPTING)
        if not connection.send(rendezvous.GREETING):
            self.log.write(texts.UNABLE_TO_ACCEPT)  # it has gone already
            connection.close()
            return
        # it waits for each answer without a limit: a silent peer blocks the daemon (X29)
        message = yield from connection.receive()
        message.close()
        if message.data != rendezvous.CREDENTIALS or message.credentials is None:
            self.log.write(texts.NO_CREDENTIALS)
            connection.close()
            return
        pid, uid, _ = message.credentials
        if privileged and uid not in (0, self.host.owner):
            self.log.write(texts.NOT_PRIVILEGED)
            connection.close()
            return
        one = self.servers.get(pid)
        if one is not None and one.connection is None:
            yield from self.server_connected(one, connection)
            return
        kind = yield from connection.receive()
        kind.close()
        if kind.data == rendezvous.CLIENT:
            yield from self.client(connection, pid, uid)
            return
        if kind.data == rendezvous.FRONT_END:
            # a second front-end is rejected while one is open (03 Q4), and during `quit` (02 R10)
            if self.ui is None and not self.quitting:
                self.ui = Session(self.host, connection, uid, privileged)
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

    def client(self, connection: Connection, pid: int, uid: int) -> Steps[None]:
        """Pass a client's connection (for a channel or a context) to its user's server, or let it wait."""
        if self.quitting:
            connection.close()
            return
        if self.multiuser:
            uid = 0
        key = connection.fd
        todo = self.turns.client(uid, key)
        if todo == "attach":
            self.log.write(texts.CLIENT_ATTACHED.format(pid=pid, uid=uid))
            yield from self.attach(connection, pid)
            return
        self.log.write(texts.CLIENT_PENDING.format(pid=pid, uid=uid))
        self.waiting[key] = (connection, pid)
        yield from self.follow(todo)

    def attach(self, client: Connection, pid: int) -> Steps[None]:
        """Hand a client over: one end of a new pair of sockets to the server, the other one to the client.

        Then wait for the client's word that the two have met, or for its end: a hung server holds up the daemon (X15).
        """
        ours, theirs = self.host.pair()
        orders = None if self.server is None else self.server.connection
        # a server that has died and is not noticed yet cannot take it: the client is turned away
        taken = orders is not None and orders.send(b"ATTACH %d" % pid, ours)
        ours.close()
        told = taken and client.send(rendezvous.DESCRIPTOR, theirs)
        theirs.close()
        if told:
            status = yield from client.receive()
            status.close()
        client.close()

    def follow(self, todo: str) -> Steps[None]:
        """Do what `Turns` answered."""
        if todo == "start":
            uid = self.turns.next_user()
            if uid is not None:
                self.start_server(uid)
        elif todo == "try" and self.server is not None:
            yield from self.try_shutdown(self.server)

    # servers

    def start_server(self, uid: int) -> None:
        self.turns.starting(uid)
        after_a_kill, self.after_a_kill = self.after_a_kill, False
        process = self.host.start_server(uid, after_a_kill)
        self.server = self.servers[process.pid] = Server(process, uid)

    def server_connected(self, one: Server, connection: Connection) -> Steps[None]:
        """Wait for a new server's introduction, which it sends when it is ready, and serve nothing else meanwhile."""
        one.connection = connection
        message = yield from connection.receive()
        message.close()
        kind = message.data
        if kind == rendezvous.FAILED:
            one.failed = True
            self.log.write(texts.SERVER_FAILED)
            return
        if kind != rendezvous.SERVER:
            self.log.write(texts.KIND_UNREADABLE)  # it died; its pidfd reports its end
            return
        one.ready = True
        self.log.write(texts.SERVER_READY.format(pid=one.pid))
        # the device that was named last for the first time comes first (S3 of recording 01 and of the real runs)
        given = [f"{device}={size}" for device, size in reversed(self.default_limits.items()) if size]
        connection.send(" ".join([str(self.default_percentage), str(self.default_priority), *given]).encode())
        attach, others = self.turns.ready()
        for key in attach:
            yield from self.attach(*self.waiting.pop(key))
        if others or self.quitting:
            yield from self.try_shutdown(one)

    def try_shutdown(self, one: Server, by_timer: bool = False, force: bool = False) -> Steps[None]:
        first = not by_timer
        self.log.write((texts.TRY_FIRST if first else texts.TRY_AGAIN).format(pid=one.pid))
        reply = yield from one.ask("SHUTDOWN")
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
            one.process.kill()
            if one.connection is not None:
                one.connection.close()
                one.connection = None
            return
        interval_ms = self.turns.back_off.busy(by_timer)
        self.next_try = self.host.now + interval_ms / 1000
        self.log.write(texts.NEXT_TRY.format(pid=one.pid, ms=interval_ms))

    def dismiss(self, one: Server) -> None:
        one.dismissed = True
        self.turns.leaving()
        self.next_try = None

    def reap(self, one: Server) -> None:
        status = one.process.reap()
        # whatever else happened to it, a server is reported with status 0 (02 R6, X19 of the real runs)
        self.log.write(texts.SERVER_EXITED.format(pid=one.pid, status=int(one.failed)))
        if one.failed:
            self.exit_status = 1
            if self.turns.failed():
                self.log.write(texts.REMOVED_SHM)
                self.give_up()
        elif status:
            self.give_up()
        if not one.ready:
            self.host.close_descriptor_0(self._connections())
        self.after_a_kill = not one.dismissed
        if one.connection is not None:
            one.connection.close()
        del self.servers[one.pid]
        if self.server is one:
            self.server = None
            self.next_try = None
            uid = self.turns.gone()
            if self.quitting:
                self.exit()
            elif uid is not None:
                self.start_server(uid)

    def _connections(self) -> list[Connection]:
        ui = [] if self.ui is None else [self.ui.connection]
        servers = [one.connection for one in self.servers.values() if one.connection is not None]
        return [*(client for client, _ in self.waiting.values()), *ui, *servers]

    def give_up(self) -> None:
        """The server could not start (no way into the pipe directory): its user's clients wait no longer."""
        keys, _ = self.turns.ready()
        for key in keys:
            self.waiting.pop(key)[0].close()

    # front-ends

    def user_interface(self, ui: Session) -> Steps[None]:
        """Read a command of the open front-end, or its end."""
        command = yield from ui.command()
        if command is None:
            self.log.write(texts.UI_CLOSED)
            self.close_ui()
            return
        self.log.write(texts.COMMAND.format(command=command))
        yield from execute(self, command, ui)

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

    def quit(self, timeout: float | None) -> Steps[None]:
        self.quitting = True
        if timeout is not None:
            self.quit_at = self.host.now + timeout
        for connection, _ in self.waiting.values():
            connection.close()
        self.waiting.clear()
        self.turns.waiting.clear()
        if self.server is None:
            self.exit()
        elif not self.server.dismissed:
            yield from self.try_shutdown(self.server)

    def exit(self) -> NoReturn:
        self.log.write(texts.EXIT.format(status=self.exit_status))
        self.host.remove_files()
        self.close_ui()
        raise Exit


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


def _forward(question: str, daemon: Daemon, words: list[str]) -> Steps[None]:
    if found := _find(daemon, words):
        _tell(daemon, (yield from found.ask(question)))


def _device_rows(daemon: Daemon, csv: bool) -> list[str]:
    if csv:
        rows = [f"{at},{device.pci},{device.uuid},{gpu.NAME},N/A" for at, device in enumerate(daemon.devices)]
        return [texts.DEVICE_HEADER_CSV, *rows]
    rows = [f"{at:<16}{device.pci}  {device.uuid}  {gpu.NAME:<34}N/A" for at, device in enumerate(daemon.devices)]
    return [texts.DEVICE_HEADER, *rows]


def execute(daemon: Daemon, command: str, ui: Session) -> Steps[None]:
    """Execute a command of the open front-end. Text after a newline in it was only written into the log."""
    command = command.partition("\n")[0]
    words = command.split()
    name = words[0] if words else ""
    handler = _COMMANDS.get(name)
    if handler is None:
        daemon.say(texts.UNKNOWN_COMMAND.format(command=command if not words else name))
    elif name == "quit" and not ui.privileged:
        daemon.say(texts.NO_QUIT_PRIVILEGE)
    elif name in _PRIVILEGED and not ui.privileged:
        daemon.say(texts.NO_PRIVILEGE.format(uid=ui.uid))
    elif (steps := handler(daemon, words)) is not None:
        yield from steps


def get_device_client_list(daemon: Daemon, words: list[str]) -> Steps[None]:
    named = [_find(daemon, words)] if len(words) > 1 else list(daemon.servers.values())
    for one in filter(None, named):
        _tell(daemon, (yield from one.ask("DEVICE_CLIENTS")))


def ps(daemon: Daemon, words: list[str]) -> Steps[None]:
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
        for row in ((yield from one.ask("PS")) or "").split(";"):
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


def set_active_thread_percentage(daemon: Daemon, words: list[str]) -> Steps[None]:
    if found := _find(daemon, words):
        value = limits.percentage(words[2] if len(words) > 2 else "")
        if value is None:
            daemon.log.write(texts.BAD_PERCENTAGE)
            _tell(daemon, (yield from found.ask("GET_PERCENTAGE")))
        else:
            _tell(daemon, (yield from found.ask(f"SET_PERCENTAGE {value}")))


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


def set_device_pinned_mem_limit(daemon: Daemon, words: list[str]) -> Steps[None]:
    if found := _find(daemon, words):
        mebibytes = limits.memory(words[3] if len(words) > 3 else "")
        yield from found.ask(f"SET_LIMIT {_number(words, 2)} {mebibytes}")


def get_device_pinned_mem_limit(daemon: Daemon, words: list[str]) -> Steps[None]:
    if found := _find(daemon, words):
        mebibytes = int((yield from found.ask(f"GET_LIMIT {_number(words, 2)}")) or 0)
        if mebibytes:
            daemon.say(limits.shown(mebibytes))


def set_default_client_priority(daemon: Daemon, words: list[str]) -> Steps[None]:
    daemon.default_priority = _number(words, 1)
    for one in daemon.servers.values():
        yield from one.ask(f"PRIORITY {daemon.default_priority}")


def device_query(daemon: Daemon, words: list[str]) -> Steps[None]:
    rows = _device_rows(daemon, "--csv" in words)
    daemon.say("Default", *rows)
    for one in daemon.servers.values():
        if (yield from one.ask("DEVICE_QUERY")) is not None:
            daemon.say(f"\nServer {one.pid}", *rows)


def start_server(daemon: Daemon, words: list[str]) -> Steps[None]:
    if len(words) < 3 or words[1] != "-uid" or not words[2].isdigit():
        daemon.say(texts.UID_REQUIRED)
        return
    uid = 0 if daemon.multiuser else int(words[2])
    yield from daemon.follow(daemon.turns.start_request(uid))


def shutdown_server(daemon: Daemon, words: list[str]) -> Steps[None]:
    found = _find(daemon, words)
    if found is not None and not found.dismissed and found.connection is not None:
        yield from daemon.try_shutdown(found, force="-f" in words)


def terminate_client(daemon: Daemon, words: list[str]) -> Steps[None]:
    found = _find(daemon, words)
    if found is None:
        daemon.say(f"Server {_number(words, 1)} not found!", "1")
        return
    daemon.say((yield from found.ask(f"TERMINATE {_number(words, 2)}")) or "1")


def leave(daemon: Daemon, words: list[str]) -> Steps[None]:
    timeout = None
    if "-t" in words:
        timeout = float(_number(words, words.index("-t") + 1))
        daemon.log.write(texts.QUIT_TIMEOUT.format(seconds=int(timeout)))
    yield from daemon.quit(timeout)


_COMMANDS: dict[str, Callable[[Daemon, list[str]], Steps[None] | None]] = {
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
