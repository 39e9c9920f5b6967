"""Descriptors that users send must not hold up the process that receives them.

Whoever takes a message out of a socket closes the descriptors in it, and the last close may take long: of a TCP
connection with SO_LINGER and unsent data as long as its sender likes, of 120 inotify descriptors up to 1.2 s, of a
memfd of 6 GiB 3 s. Linux 6.16 and later refuse descriptors where they are not wanted. Before that, the loop looks first
(:func:`look_first`), and takes no message with descriptors; threads of their own close such connections
(:func:`let_go`), after they have read what lies there, so that systemd, which has copies, does not close it last. One
more thread sees that one of these is blocked in the kernel, and interrupts it: within 0.4 s, the next time after 4 ms.
That ends SO_LINGER, and nothing else (measured with Linux 6.18, whose refusal was left out)."""

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
"""Seconds between two looks (0.06 % of a core); the same after a user has done this, and for how long."""
CLOSERS, MOST_CLOSING = 4, 4096
"""Threads, so that four have to be blocked before others wait; connections that may wait for them, of a quarter of the
process's descriptors at most."""
_CLOSES = {"x86_64": (b"3 ", b"45 ", b"47 "), "aarch64": (b"57 ", b"207 ", b"212 ")}
"""close, recvfrom and recvmsg, as /proc says them: where what a user has sent is closed."""


def accept_descriptors(sock: socket.socket, *, yes: bool) -> None:
    """Whether any may be sent to this socket, and to what it accepts."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, int(yes))


def can_refuse() -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS)
        except OSError:
            return False
    return True


_closing: queue.SimpleQueue[socket.socket] | None = None
"""Connections that are to be closed; None where the loop's thread may do it."""
_most = 0


def watch_over(closers: int = CLOSERS) -> None:
    """The calling thread, which is the main thread and runs the loop, from now on; where the kernel can refuse there is
    no need. ``closers``: threads for :func:`let_go`."""
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
    signal.signal(signal.SIGURG, lambda *_: None)  # one that is ignored interrupts nothing
    threading.Thread(target=_watch, args=(shows, closes), name="linger", daemon=True).start()


def look_first(sock: socket.socket) -> None:
    """Before a message is taken out of a user's socket, which has SO_PASSCRED. Raises OSError: there is none, or it has
    descriptors, and is not to be taken."""
    if _closing is None:
        return
    how = socket.MSG_PEEK | socket.MSG_CMSG_CLOEXEC
    _, ancillary, flags, _ = sock.recvmsg(1, socket.CMSG_SPACE(CREDENTIALS_SIZE), how)
    found = descriptors_in(ancillary)  # copies; only without SO_PASSCRED there is room for them
    for descriptor in found:
        os.close(descriptor)
    if found or flags & socket.MSG_CTRUNC:
        raise OSError("a message has descriptors")


async def look_when_readable(sock: socket.socket) -> None:
    """The same, once there is a message."""
    if _closing is not None:
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(sock, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(sock)
        look_first(sock)


def let_go(sock: socket.socket) -> None:
    """Closes a user's connection, with whatever lies there unread. The user hears of it at once, whoever has copies."""
    if _closing is None:
        sock.close()
    elif sock.fileno() >= 0:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        _closing.put(socket.socket(sock.family, sock.type, sock.proto, sock.detach()))


def no_room() -> bool:
    """So many wait to be closed that no user's connection may be accepted."""
    return _closing is not None and _closing.qsize() >= _most


def _close(closing: queue.SimpleQueue[socket.socket]) -> None:
    while True:
        with suppress(Exception), closing.get() as sock:
            _empty(sock)


def _empty(sock: socket.socket) -> None:
    """Where somebody has a copy (systemd), the last close is not ours."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, SO_PASSCRED, 1)  # an empty message has credentials, the end has none
    for _ in range(2):  # a reset is said once, ahead of what lies there
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
