"""The machine on which a control daemon and its servers run, as they see it.

Both are generators. Each time they wait, they yield the files of which one has to become readable (none to let time
pass) and the time until which they wait at most (None: without a limit). `linux_host` runs them as processes with real
sockets. The tests run the same generators in virtual time. This module is imported for types only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from mpsagent_sim import wire
from mpsagent_sim.delays import Delays

T = TypeVar("T")
Steps = Generator[tuple[list[Any], float | None], None, T]


class Descriptor(Protocol):
    """An open file that can be sent to another process."""

    def close(self) -> None: ...


class Message(Protocol):
    """A packet with its sender's credentials. ``data`` is empty at the end of the connection."""

    data: bytes
    credentials: tuple[int, int, int] | None

    def close(self) -> None:
        """Close the descriptors that came with it."""


class Connection(Protocol):
    """One end of a connection. ``fd``: its descriptor; ``file``: what is waited for."""

    fd: int
    file: Any
    over: bool
    """The end has been reached."""

    def send(self, data: bytes, descriptor: Any = None) -> bool:
        """Return False if the connection is closed."""

    def send_credentials(self, data: bytes) -> bool: ...

    def receive(self, size: int = ...) -> Steps[Message]:
        """Wait for the next packet."""

    def next(self) -> Message | None:
        """Return a packet that has come, or None."""

    def readable(self) -> bool:
        """Return True if a packet, or the end, had come when the last wait ended."""

    def hung_up(self) -> bool:
        """Return True if the other end is closed, even if packets are unread."""

    def close(self) -> None: ...


class Listener(Protocol):
    file: Any

    def accept(self) -> Connection | None:
        """Return the next connection that has come, or None."""


class Child(Protocol):
    """A server process. ``file``: its pidfd."""

    pid: int
    file: Any

    def readable(self) -> bool:
        """Return True if it had exited when the last wait ended."""

    def kill(self) -> None: ...

    def reap(self) -> int:
        """Return the exit status of an exited server, 0 if a signal has killed it."""


class Host(Protocol):
    """A process."""

    pid: int
    log: wire.Log
    delays: Delays

    @property
    def now(self) -> float:
        """The monotonic clock."""


class DaemonHost(Host, Protocol):
    """The process of a control daemon. ``pipe``: its directory, which user ``owner`` has made."""

    pipe: str
    owner: int
    listeners: list[Any]
    """Listener: of `control` and of `control_privileged`."""

    @property
    def environment(self) -> Mapping[str, str]: ...

    def pair(self) -> tuple[Descriptor, Descriptor]:
        """Return two connected sockets."""

    def start_server(self, uid: int, after_a_kill: bool) -> Child: ...

    def close_descriptor_0(self, connections: Iterable[Any]) -> None:
        """Close descriptor 0, which one of these Connections may have."""

    def crash(self) -> None:
        """Exit by SIGSEGV."""

    def remove_files(self) -> None:
        """Remove the files that an orderly exit removes."""


class ServerHost(Host, Protocol):
    """The process of a server."""

    pipe: str

    def connect(self) -> Connection:
        """Return a connection to the control daemon. Raises OSError."""

    def connection(self, message: Any) -> Connection:
        """Return the connection that came with a Message."""

    def spare(self) -> Descriptor:
        """Return a descriptor of no use."""

    def start_error(self) -> str:
        """Return the error with which the driver fails to start, or an empty text."""

    def in_use(self, ordinal: int) -> bool:
        """Return True if a process uses this GPU."""

    def use(self, ordinal: int, mebibytes: int) -> None:
        """Note that the server uses memory of this GPU."""

    def note_work(self, ordinals: set[int], later: Callable[[float, Callable[[], None]], None]) -> None:
        """Note which GPUs run a kernel from now on. ``later`` calls a function after so many seconds."""

    def leave(self) -> None:
        """Forget what `use` has noted."""

    def holds(self, pid: int) -> bool:
        """Return True if the driver still keeps the GPU memory of a process."""

    def name(self, pid: int) -> str:
        """Return the name of a client that has not sent its own, in hexadecimal digits."""

    def namespace(self) -> str:
        """Return the number of the pid namespace."""
