"""Descriptors that users send must not hold up the process that receives them.

The process that receives a message closes the descriptors in it, and the last close may block: for a TCP connection
with SO_LINGER and unsent data as long as its sender likes, for 120 inotify descriptors up to 1.2 s, for a memfd of
6 GiB 3 s.

Linux 6.16 and later can refuse descriptors at a socket. On older kernels the loop checks each message before it
receives it (:func:`look_first`), and receives none that has descriptors. Other threads close such connections
(:func:`let_go`), after they have read the messages there, so that systemd, which has copies, does not close them last.
One more thread interrupts a thread that is blocked in such a close: within 0.4 s, and after 4 ms the next time. That
ends SO_LINGER and nothing else (measured with Linux 6.18 without its refusal).
"""

from __future__ import annotations

import asyncio
import os
import platform
import queue
import resource
import signal
import socket
import threading
import time
from contextlib import suppress

from mpsagent.linux.descriptors import SO_PASSCRED, descriptors_in
from mpsagent.linux.peers import CREDENTIALS_SIZE

SO_PASSRIGHTS = 83
LOOK, QUICK_LOOK, QUICK = 0.2, 0.002, 10.0
"""Seconds between two checks for blocked threads (0.06 % of a core). Seconds between two checks after a user has
blocked one, and for how many seconds."""
CLOSERS, MOST_CLOSING = 4, 4096
"""Threads that close connections. Connections that may wait for them (at most a quarter of all descriptors)."""
_CLOSES = {"x86_64": (b"3 ", b"45 ", b"47 "), "aarch64": (b"57 ", b"207 ", b"212 ")}
"""The numbers of close, recvfrom and recvmsg in /proc/PID/syscall: the calls that close received descriptors."""


def accept_descriptors(sock: socket.socket, *, yes: bool) -> None:
    """Let the kernel accept or refuse descriptors at this socket and at the connections that it accepts."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, int(yes))


def can_refuse() -> bool:
    """Return True if this kernel can refuse descriptors."""
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS)
        except OSError:
            return False
    return True


_closing: queue.SimpleQueue[socket.socket] | None = None
"""Connections to close; None if the loop's thread may close them."""
_most = 0


def watch_over(closers: int = CLOSERS) -> None:
    """Watch the calling thread, which is the main thread and runs the loop, unless the kernel can refuse descriptors.

    ``closers``: threads for :func:`let_go`.
    """
    global _closing, _most
    if can_refuse():
        return
    threads = [threading.main_thread()]
    if closers:
        _closing = queue.SimpleQueue()
        _most = min(MOST_CLOSING, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
    for _ in range(closers):
        threads.append(threading.Thread(target=_close, args=(_closing,), name="closer", daemon=True))
        threads[-1].start()
    closes, shows = _CLOSES.get(platform.machine()), {}
    if closes is None:
        return
    try:
        for thread in threads:
            where = f"/proc/self/task/{thread.native_id}/syscall"
            shows[thread.ident or 0] = os.open(where, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    signal.signal(signal.SIGURG, lambda *_: None)  # an ignored signal interrupts nothing
    threading.Thread(target=_watch, args=(shows, closes), name="linger", daemon=True).start()


def look_first(sock: socket.socket) -> None:
    """Check the next message of a user's socket, which has SO_PASSCRED, before it is received.

    Raises OSError if there is no message, or if it has descriptors and must not be received.
    """
    if _closing is None:
        return
    how = socket.MSG_PEEK | socket.MSG_CMSG_CLOEXEC
    _, ancillary, flags, _ = sock.recvmsg(1, socket.CMSG_SPACE(CREDENTIALS_SIZE), how)
    found = descriptors_in(ancillary)  # copies; there is room for them only without SO_PASSCRED
    for descriptor in found:
        os.close(descriptor)
    if found or flags & socket.MSG_CTRUNC:
        raise OSError("a message has descriptors")


async def look_when_readable(sock: socket.socket) -> None:
    """Wait for a message and check it as :func:`look_first` does."""
    if _closing is not None:
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(sock, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(sock)
        look_first(sock)


def let_go(sock: socket.socket) -> None:
    """Close a user's connection with its unread messages. The user notices it at once, even if systemd has a copy."""
    if _closing is None:
        sock.close()
    elif sock.fileno() >= 0:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        _closing.put(socket.socket(sock.family, sock.type, sock.proto, sock.detach()))


def no_room() -> bool:
    """Return True if so many connections wait to be closed that no connection of a user may be accepted."""
    return _closing is not None and _closing.qsize() >= _most


def _close(closing: queue.SimpleQueue[socket.socket]) -> None:
    while True:
        with suppress(Exception), closing.get() as sock:
            _empty(sock)


def _empty(sock: socket.socket) -> None:
    """Read all messages: if systemd has a copy of the connection, the last close is systemd's."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, SO_PASSCRED, 1)  # an empty message has credentials, the end of the stream none
    for _ in range(2):  # a reset is reported once, before the messages
        with suppress(ConnectionResetError):
            while sock.recvmsg(1, socket.CMSG_SPACE(CREDENTIALS_SIZE))[1]:
                pass


def _watch(shows: dict[int, int], closes: tuple[bytes, ...]) -> None:
    before, quick = dict.fromkeys(shows, b""), 0.0
    while True:
        time.sleep(QUICK_LOOK if time.monotonic() < quick else LOOK)
        for thread, descriptor in shows.items():
            with suppress(OSError):
                where = os.pread(descriptor, 256, 0)
                if where == before[thread] and where.startswith(closes):
                    signal.pthread_kill(thread, signal.SIGURG)
                    quick = time.monotonic() + QUICK
                before[thread] = where
