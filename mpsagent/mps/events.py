"""What MPS says: the table of the lines of control.log and server.log, and a line as a value. Pure.

A row has the recording that shows the line (``X``: a conformance scenario; ``lib``: not watched, it only stands in the
programs of 470 to 580), what it means, and its text after the head. In the text ``<pid>`` and the like stand for a
field of :class:`Line`, ``<n>`` for a number and ``<any>`` for text that nothing is made of; the rest is as MPS writes
it, oddities (``recevie``, ``trigging``, ``Context:`` without ID) included. A line that changes nothing is Harmless, so
that one that no row has stands out as Unknown. Drivers before 550 leave the client's pid out of most lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

SHOWN = 200
"""Characters of a line that are kept."""


class What:
    """What a line means. ``fields`` of :class:`Line` that it has, in this order where one is made: the process that
    wrote it, when its text does not name it, comes first."""

    def __init__(self, fields: str, meaning: str) -> None:
        self.fields = tuple(fields.split())
        self.meaning = meaning

    def __call__(self, at: float, *values: float | str) -> Line:
        return Line(at, self, **dict(zip(self.fields, values, strict=True)))  # type: ignore[arg-type]

    def said(self, at: float, text: str) -> Line:
        """The same for one that has its text alone, quicker: most lines are of this kind."""
        return _new(Line, (at, self, 0, 0, 0, 0, 0, 0, 0, 0.0, text, ""))

    def __repr__(self) -> str:
        return next(name for name, what in globals().items() if what is self)


class Line(NamedTuple):
    """``at``: seconds since the epoch. ``server``: the pid of one. ``pid``: of the control daemon or a client; 0 or
    less where MPS does not know it. ``context`` 0 is a process's channel to its server. ``number``: see the row."""

    at: float
    what: What
    server: int = 0
    pid: int = 0
    uid: int = 0
    context: int = 0
    device: int = 0
    number: int = 0
    size: int = 0
    percent: float = 0.0
    text: str = ""
    source: str = ""


_new = tuple.__new__  # quicker than Line(...)


# --- of either log ----------------------------------------------------------------------------------------------------

Harmless = What("text", "changes nothing: start-up, worker threads, odd connections, a client's own words")
Unknown = What("source text", "no row has it: counted and shown, never acted upon")

# --- of control.log ---------------------------------------------------------------------------------------------------

ControlStarted = What("pid text", "everything before it belongs to an earlier daemon; `text`: its socket")
ControlVersion = What("pid number", "its binary version")
ControlExited = What("pid number", "the control daemon ends")
ClientQueued = What("pid uid", "a client waits for a server of its user")
ClientAdmitted = What("pid uid", "once for a client's channel and once for each of its contexts")
ServerStarting = What("server uid", "a server of this user starts")
ServerReady = What("server", "it takes clients: who waited for it is let in")
ServerExited = What("server number", "it has ended, with this status")
ShutdownTried = What("server", "another user waits, or a person wants it")
ShutdownRefused = What("server", "its clients are still there; tried again later")
ShutdownForced = What("server", "its clients lose it")
QuitIssued = What("number", "`quit -t`: after so many seconds it ends its servers by force")
CommandRead = What("text", "a front-end's command, ours or not")
CommandAnswer = What("text", "of the answer to the last command: whatever the asker provoked, never a fact")
ConnectionLine = What("text", "said at every connection")
SharedMemoryRemoved = What(
    "text",
    "a user's server is given up and who waited for it closed: six starts failed for a waiting client, or one of "
    "`start_server` (recording 10, H6; there the path is empty)",
)

# --- of server.log ----------------------------------------------------------------------------------------------------

ServerFailed = What("server text", "the server ends right after it; `text`: why, empty where MPS says nothing")
ServerStartup = What("server", "the first line of a new server process")
ServerStarted = What("server", "all limits that it starts with have been said in the lines before")
ServerStopping = What("server", "it has accepted its shutdown")
ServerStuck = What(
    "server",
    "it waits for ever for a client that died in the pending list, and takes no other (conformance scenarios X1, X15, "
    "X18). The control daemon says the same text at every connection, where it means nothing",
)
ThreadsSet = What("server percent", "the proof of what a server started with")
MemorySet = What("server device size", "the same, in bytes; 0: no limit")
ContextConnected = What("server pid context", "a client's channel, or a context of it")
ContextLost = What(
    "server pid context",
    "its client has closed it. The client's own thread says so at once; the server says ContextExiting later, if it is "
    "waiting for another client in a hand-over (rendezvous-questions.txt, 5)",
)
ContextExiting = What("server pid context", "and no more")
ClientDisconnected = What("server pid", "the whole process has left")
ClientUnnamed = What("server", "about a client that it does not name")
ClientRefused = What("server pid text", "not let in: the server is in FAULT (status 807) or full")
ClientsFull = What("server number", "not let in; `number`: how many it takes")
DeviceAssociated = What("server text", "the uuid, for the client whose context connected last")
DriverNamed = What("server number", "the driver's branch")
TerminationAsked = What("server pid", "`terminate_client`")
FaultStarted = What("server", "FAULT: its clients on the devices that follow are lost, and it takes no new ones")
FaultDevice = What("server device", "a number below their heading")
FaultClient = What(
    "server pid",
    "a number below their heading. All listed are alike; the one named as having `encountered a fatal GPU error` is "
    "often not the culprit (recording 03, Q3)",
)
ContextDestroyed = What("server device", "the faulted device's last client has gone")

# --- the tables -------------------------------------------------------------------------------------------------------

_CONTROL = """
01  ClientAdmitted       NEW CLIENT <pid> from user <uid>: Server already exists
01  ClientQueued         NEW CLIENT <pid> from user <uid>: Server is not ready, push client to pending list
01  ServerReady          NEW SERVER <server>: Ready
01  ShutdownRefused      Server <server> has <n> active worker threads. Server will not shutdown.
01  ServerExited         Server <server> exited with status <-number>
01  ShutdownTried        Try shutting down server <server>, backoff is <any>
01  Harmless             Control will try shutting down server <n> again in at most <n>ms
01  ServerStarting       Starting new server <server> for user <uid>
01  ShutdownForced       Force shutting down server <server>
01  ControlStarted       Starting control daemon using socket <text>
01  Harmless             To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY=<any>
01  ControlVersion       CUDA MPS Control binary version: <number>
01  QuitIssued           quit command issued with timeout of <number>
01  ControlExited        Exit with status <-number>
02  Harmless             Using log directory: <any>
09  SharedMemoryRemoved  Removed Shm file at <text>
lib ServerFailed         Failed to start server using uid <n>. <text>
09  Harmless             Start
09  Harmless             Server encountered a fatal exception. Shutting down
lib Harmless             NEW SERVER <n>: Ignoring <any>
lib Harmless             NEW DEBUGGEE <n> from user <n>
lib Harmless             Unknown type of connection
lib Harmless             Unable to accept priviliged connection from other user
lib Harmless             Warning: Failed writing log files to directory [<any>]. No logs will be available.
lib Harmless             Failed to create control pid file <any>
lib Harmless             CUDA MPS log recorder error
lib Harmless             Internal error<any>
"""
# `Failed to start server …` is said by the child that was to become the server (550 and later).

_SERVER = """
01  ContextConnected     Client {PID: <-pid>, Context ID: <context>} connected
01  ContextExiting       Client {PID: <-pid>, Context ID: <context>} exiting. <any>active client contexts is <n>.
01  ClientDisconnected   Client process <pid> disconnected
X   Harmless             Client termination request failed: There is no active client context found for process <n>.
X   Harmless             Client termination failed with <any>.
01  Harmless             Client termination succeeded.
02  Harmless             Client {PID: <n>, Context ID: <n>} on device <n> to be torn down
02  Harmless             Client {PID: <n>, Context ID: <n>} on the error-trigging process <n> to be torn down
02  Harmless             Client {PID: <n>, Context: <n>} encountered a fatal GPU error.
03  Harmless             Client Priority set to <n>
01  Harmless             Creating worker thread for client {PID: <n>, Context ID: <n>}
01  Harmless             Creating server context on device <n> (<any>)
01  Harmless             Created anonymous shared memory region <any>
01  Harmless             Connecting to control daemon on socket: <any>
02  ContextDestroyed     Destroy server context on device <device><any>
01  DeviceAssociated     Device <any> (uuid <uuid>) is associated
01  MemorySet            Device pinned memory limit for device <device> set to <size> bytes
01  ThreadsSet           Active Threads Percentage set to <percent>
01  Harmless             Received new client request for {PID: <n>, Context ID: <n>}
03  Harmless             Received device query command. There are <n> devices
01  ContextLost          Server failed to recevie <any>, assuming client {PID: <-pid>, Context ID: <context>} exit
02  Harmless             Server teardown in progress. Refusing to accept new client {PID: <n>, Context ID: <n>}
02  ClientRefused        Failed to accept client {PID: <-pid>, Context ID: <n>} with <text>
02  ClientsFull          Failed to accept new client. Maximum number of clients (<number>) reached.
01  Harmless             Status of client {PID: <n>, Context ID: <n>} is <any>
01  TerminationAsked     MPS server requesting client {PID: <pid>, Context ID: <n>} to exit
01  Harmless             Server was unable to shutdown due to <n> active clients
01  Harmless             Server Priority set to <n>
02  Harmless             All clients belonging to error trigging process <n> will be torn down
01  Harmless             CUDA MPS Server for Linux/Unix. Binary version: <n>
01  DriverNamed          Display Driver version: <number><any>
02  Harmless             Using log directory: <any>
01  ServerStartup        Startup
01  ServerStopping       Exiting
01  ServerStopping       Waiting for current clients to finish
02  FaultStarted         Server is handling a fatal GPU error.
01  ServerStuck          User did not send valid credentials
01  Harmless             Server has been notified to shutdown
01  ServerStarted        Server has started
01  Harmless             Initializing server process
09  Harmless             Driver initialization failed with: <any>
09  ServerFailed         Failed to start : <text>
09  ServerFailed         MPS server failed to start : <text>
09  ServerFailed         MPS server failed to start
09  Harmless             MPS is only supported on <any>
09  ServerStartup        Start
09  ServerStarted        MPS Server is started
09  Harmless             MPS Server connecting to control daemon on socket: <any>
09  ClientUnnamed        MPS Server: worker created
09  ThreadsSet           activeThreadsPercentage set to <percent>
09  ClientUnnamed        Received new client request
09  ClientUnnamed        Receive command failed, assuming client exit
09  ClientUnnamed        Worker created
09  ClientUnnamed        Creating worker thread
09  Harmless             Created named shared memory region <any>
09  ClientUnnamed        Volta MPS Server: Received new client request
09  ClientUnnamed        Volta MPS: Creating worker thread
09  Harmless             Volta MPS: Creating server context on device <n>
09  ClientUnnamed        Volta MPS: Client disconnected. <any>
09  ClientUnnamed        Volta MPS: Client process disconnected
09  Harmless             Volta MPS: Device <any> (uuid <id>) is associated
09  ContextConnected     New client <pid> connected
09  ClientDisconnected   Client <pid> disconnected
05  Harmless             Device (uuid <any>) is invisible to this MPS server.
08  Harmless             Failed to send credentials to server
lib ClientUnnamed        Client disconnected. <any>
lib ClientUnnamed        Client process disconnected
lib ClientUnnamed        MPS Server: Received new client request
lib ClientsFull          Volta MPS: Failed to accept new client. Maximum number of clients (<number>) reached.
lib Harmless             Client {<n>, <n>} exit
lib Harmless             Client process <n> encountered a fatal GPU error.
lib Harmless             Client termination command is only supported on Volta or higher GPUs.
lib Harmless             Clients snapshot command is only supported on Volta or higher GPUs.
lib Harmless             Client Priority Override is only supported on Volta or higher GPUs.
lib Harmless             Command handle failed
lib Harmless             Device (uuid <any>) is not supported by this MPS server
lib Harmless             Device pinned memory limit <any> command is only supported on Volta or higher GPUs
lib Harmless             Failed to accept new client. Reached maximum number of device connections.
lib Harmless             Failed to allocate shared memory region in /dev/shm.
lib Harmless             Failed to connect to control daemon on socket: <any>
lib Harmless             Failed to create worker
lib Harmless             Failed to create/open SHM segment.
lib Harmless             Failed to send credentials to control daemon: <any>
lib Harmless             Failed to terminate client {<n>, <n>}.
lib Harmless             Forcefully terminating client <n>
lib Harmless             Internal error when allocating <n> bytes
lib Harmless             MPS Server failed to create/open SHM segment.
lib Harmless             MPS Server forcefully terminating client <n>
lib Harmless             MPS Server: Failed to create worker
lib Harmless             MPS server is tearing down, client creation denied
lib Harmless             Pre-Volta device (uuid <any>) is filtered out by this Volta MPS server.
lib Harmless             Reply command failed
lib Harmless             Server enters tearing down state
lib Harmless             Server was unable to shutdown due to <n> active workers threads
lib Harmless             Server will wait <n>ms before connecting to the control daemon
lib Harmless             Status of client {<n>, <n>} is <any>
lib Harmless             Teardown in progress, client creation denied
lib Harmless             There is no active context bound to <n>
lib Harmless             Volta MPS: Destroy server context on device <n>
lib Harmless             Volta MPS: Device (uuid <any>) is not supported by this MPS server
lib Harmless             Volta MPS: Failed to accept new client. Reached maximum number of device connections.
lib Harmless             Warning: File descriptor limit may be set too low, consider increasing it<any>
"""

_PLACES: dict[str, tuple[str, str, Callable[[str], float | str]]] = {
    "pid": ("pid", r"\d{1,10}", int),
    "-pid": ("pid", r"-?\d{1,10}", int),
    **{name: (name, r"\d{1,10}", int) for name in ("server", "uid", "context", "device")},
    "number": ("number", r"\d{1,10}", int),
    "-number": ("number", r"-?\d{1,10}", int),
    "size": ("size", r"0x[0-9a-f]{1,16}", lambda text: int(text, 16)),
    "percent": ("percent", r"\d{1,3}(?:\.\d{1,6})?", float),
    "uuid": ("text", r"[A-Za-z0-9/-]{1,80}", str),
    "text": ("text", r".{0,4096}", lambda text: text[:SHOWN]),
}
_ANY = {"<n>": r"-?\d{1,20}", "<id>": r"[A-Za-z0-9/-]{1,80}", "<any>": r".{0,4096}"}


class Row:
    """A row of the tables. ``match`` is given a message without its head."""

    def __init__(self, line: str) -> None:
        self.recording, name, text = line.split(None, 2)
        self.what: What = globals()[name]
        parts = re.split(r"(<[a-z-]+>)", text)
        places = [_PLACES[part[1:-1]] for part in parts[1::2] if part not in _ANY]
        fields = Line._fields.index
        head = next((one for one in self.what.fields if one not in [field for field, _, _ in places]), "text")
        self._head = None if head == "text" else fields(head)
        self._groups = [(fields(field), read, number) for number, (field, _, read) in enumerate(places, 1)]
        parts[::2] = map(re.escape, parts[::2])
        parts[1::2] = [_ANY.get(part) or f"({_PLACES[part[1:-1]][1]})" for part in parts[1::2]]
        self.match = re.compile("".join(parts), re.ASCII).fullmatch

    def line(self, at: float, head: int, found: re.Match[str]) -> Line:
        """``head``: the process that wrote it."""
        if self.what is Harmless:
            return Harmless.said(at, found[0][:SHOWN])
        values: list[Any] = [at, self.what, 0, 0, 0, 0, 0, 0, 0, 0.0, "", ""]
        if self._head is not None:
            values[self._head] = head
        for place, read, number in self._groups:
            values[place] = read(found[number])
        return _new(Line, values)


def _by_word(table: str) -> dict[str, list[Row]]:
    """By the first word of the message: one dictionary look-up instead of a try of every pattern."""
    rows: dict[str, list[Row]] = {}
    for line in table.strip().splitlines():
        rows.setdefault(line.split(None, 2)[2].partition(" ")[0], []).append(Row(line))
    return rows


CONTROL, SERVER = _by_word(_CONTROL), _by_word(_SERVER)
SERVER_LOG = {FaultDevice, FaultClient} | {row.what for rows in SERVER.values() for row in rows} - {Harmless}
"""What only server.log says."""
