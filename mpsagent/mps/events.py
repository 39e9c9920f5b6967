"""What MPS says and what else is learned about it, as frozen values.

One class for each kind of line in control.log and server.log, and one for each thing the agent learns by other means
(a process ended, a command was answered). ``at`` is seconds since the epoch. A kind that changes nothing in the model
is still an event of its own, so that a line that no rule knows stands out as :class:`Unknown`.
"""

from __future__ import annotations

from typing import NamedTuple

# --- control.log -----------------------------------------------------------------------------------------------------


class ControlStarted(NamedTuple):
    """``Starting control daemon using socket …``: everything before this line belongs to an earlier daemon."""

    at: float
    pid: int
    socket: str


class ControlVersion(NamedTuple):
    at: float
    pid: int
    version: int


class ControlExited(NamedTuple):
    at: float
    pid: int
    status: int


class ClientQueued(NamedTuple):
    """``NEW CLIENT P from user U: Server is not ready, push client to pending list``."""

    at: float
    pid: int
    uid: int


class ClientAdmitted(NamedTuple):
    """``NEW CLIENT P from user U: Server already exists``: once for its channel and once for each CUDA context."""

    at: float
    pid: int
    uid: int


class ServerStarting(NamedTuple):
    at: float
    pid: int
    uid: int


class ServerReady(NamedTuple):
    at: float
    pid: int


class ServerExited(NamedTuple):
    at: float
    pid: int
    status: int


class ShutdownTried(NamedTuple):
    """``Try shutting down server S, backoff is …``."""

    at: float
    pid: int
    backoff: bool


class ShutdownRefused(NamedTuple):
    """``Server S has N active worker threads. Server will not shutdown.``"""

    at: float
    pid: int
    threads: int


class ShutdownLater(NamedTuple):
    """``Control will try shutting down server S again in at most Nms``; ``delay`` in seconds."""

    at: float
    pid: int
    delay: float


class ShutdownForced(NamedTuple):
    at: float
    pid: int


class QuitIssued(NamedTuple):
    """``quit command issued with timeout of N`` (seconds)."""

    at: float
    timeout: int


class CommandRead(NamedTuple):
    """``Cmd:…``: a front-end's command, ours or not."""

    at: float
    text: str


class CommandAnswer(NamedTuple):
    """A line of the answer to the last command. Its text is whatever the asker provoked: never a fact."""

    at: float
    text: str


class ConnectionLine(NamedTuple):
    """``Accepting connection...``, ``NEW UI``, ``UI closed``, ``User did not send valid credentials``, ``Unable to
    accept connection``: said at every connection, changing nothing."""

    at: float
    text: str


class ControlLine(NamedTuple):
    """A line of the control daemon that changes nothing in the model (a connection of an unknown kind, a warning)."""

    at: float
    text: str


class SharedMemoryRemoved(NamedTuple):
    """``Removed Shm file at PATH``: the daemon gave a user's server up, and closed who waited for it. After six starts
    that failed for a waiting client, or one of ``start_server`` (recording 10, H6); the path is empty there."""

    at: float
    path: str


# --- server.log ------------------------------------------------------------------------------------------------------


class ServerFailed(NamedTuple):
    """``Failed to start : R`` (470: ``MPS server failed to start : R``): the server ends right after it. ``reason`` is
    empty where MPS gives none. ``Failed to start server using uid U. R`` of the control daemon's child is one, too."""

    at: float
    server: int
    reason: str


class ClientLine(NamedTuple):
    """A line with the head of a client process, which writes through the FIFO ``log`` (recording 08, G13). Whoever may
    open that FIFO can write anything there, other heads included."""

    at: float
    pid: int
    text: str


class ServerLine(NamedTuple):
    """A line of a server's life that changes nothing in the model (start-up, worker threads, refused shutdown)."""

    at: float
    server: int
    text: str


class ServerStartup(NamedTuple):
    """``Startup``: the first line of a new server process."""

    at: float
    server: int


class ServerStarted(NamedTuple):
    """``Server has started``: all limits it starts with have been reported in the lines before."""

    at: float
    server: int


class ServerStuck(NamedTuple):
    """``User did not send valid credentials`` from a server: it waits for ever for a client that died in the pending
    list, and takes no other client (conformance scenarios X1, X15 and X18). The control daemon says the same text at
    every connection, where it means nothing."""

    at: float
    server: int


class ThreadsSet(NamedTuple):
    """``Active Threads Percentage set to X``: the proof of what a server started with."""

    at: float
    server: int
    percent: float


class MemorySet(NamedTuple):
    """``Device pinned memory limit for device D set to 0x… bytes`` (0 bytes: no limit)."""

    at: float
    server: int
    device: int
    size: int


class ServerStopping(NamedTuple):
    """``Waiting for current clients to finish`` or ``Exiting``: the server has accepted its shutdown."""

    at: float
    server: int


class ContextConnected(NamedTuple):
    """``Client {PID: P, Context ID: N} connected``; context 0 is the process's channel to the server."""

    at: float
    server: int
    pid: int
    context: int


class ContextExiting(NamedTuple):
    at: float
    server: int
    pid: int
    context: int


class ClientUnnamed(NamedTuple):
    """A line about a client that does not say which: drivers before 580 write ``Received new client request``, ``Worker
    created``, ``Client process disconnected`` without a pid (recording 09)."""

    at: float
    server: int


class ClientDisconnected(NamedTuple):
    at: float
    server: int
    pid: int


class DeviceAssociated(NamedTuple):
    """``Device NAME (uuid GPU-…) is associated``: said for the client whose context connected last."""

    at: float
    server: int
    uuid: str


class FaultStarted(NamedTuple):
    """``Server is handling a fatal GPU error.``"""

    at: float
    server: int


class FaultDevice(NamedTuple):
    at: float
    server: int
    device: int


class FaultClient(NamedTuple):
    """A pid below ``The following client process have a sticky error set:``. All listed are alike; the client named as
    having ``encountered a fatal GPU error`` is often not the culprit (recording 03, Q3)."""

    at: float
    server: int
    pid: int


class ContextDestroyed(NamedTuple):
    """``Destroy server context on device D``: the faulted device's last client has gone."""

    at: float
    server: int
    device: int


class TerminationAsked(NamedTuple):
    at: float
    server: int
    pid: int


class TerminationDone(NamedTuple):
    """``Client termination succeeded.`` It does not name the client."""

    at: float
    server: int


class ClientRefused(NamedTuple):
    """A client that was not let in: server in FAULT (status 807) or full."""

    at: float
    server: int
    pid: int
    reason: str


class ClientsFull(NamedTuple):
    """``Failed to accept new client. Maximum number of clients (48) reached.``"""

    at: float
    server: int
    limit: int


class DriverNamed(NamedTuple):
    """``Display Driver version: 580``"""

    at: float
    server: int
    driver: int


# --- either log ------------------------------------------------------------------------------------------------------


class Unknown(NamedTuple):
    """A line no rule knows, cut to 200 characters. Counted and shown, never acted upon."""

    at: float
    source: str
    text: str


# --- not from a log --------------------------------------------------------------------------------------------------


class ProcessGone(NamedTuple):
    """The kernel says that a process the agent was watching (by pidfd) has ended."""

    at: float
    pid: int


class ServerStatusSeen(NamedTuple):
    """``get_server_status`` answered; ``status`` is MPS's own word."""

    at: float
    server: int
    status: str


class ControlGone(NamedTuple):
    """The control daemon's process has ended, whatever its log says. ``pid`` None: whichever it was."""

    at: float
    pid: int | None = None


LogEvent = (
    ControlStarted
    | ControlVersion
    | ControlExited
    | ClientQueued
    | ClientAdmitted
    | ServerStarting
    | ServerReady
    | ServerExited
    | ShutdownTried
    | ShutdownRefused
    | ShutdownLater
    | ShutdownForced
    | QuitIssued
    | CommandRead
    | CommandAnswer
    | ConnectionLine
    | ControlLine
    | SharedMemoryRemoved
    | ServerFailed
    | ClientLine
    | ServerLine
    | ServerStartup
    | ServerStarted
    | ServerStuck
    | ThreadsSet
    | MemorySet
    | ServerStopping
    | ContextConnected
    | ContextExiting
    | ClientUnnamed
    | ClientDisconnected
    | DeviceAssociated
    | FaultStarted
    | FaultDevice
    | FaultClient
    | ContextDestroyed
    | TerminationAsked
    | TerminationDone
    | ClientRefused
    | ClientsFull
    | DriverNamed
    | Unknown
)
Event = LogEvent | ProcessGone | ServerStatusSeen | ControlGone
