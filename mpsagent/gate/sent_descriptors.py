"""What users send must not hold up who receives it.

Whoever receives a message with a descriptor closes it, and the last close of a TCP connection with SO_LINGER and unsent
data waits as long as its sender likes: 3 s of 3 s asked for, in which nobody was served. Linux 6.16 and later refuse
descriptors where they are not wanted. Before that, a thread sees that the loop's thread stands in the kernel, and
interrupts it: within 0.4 s, the next ones after 4 ms each (measured with Linux 6.18, whose refusal was left out).
"""

from __future__ import annotations

import os
import platform
import signal
import socket
import threading
import time
from contextlib import suppress

SO_PASSRIGHTS = 83
LOOK, QUICK_LOOK, QUICK = 0.2, 0.002, 10.0
"""Seconds between two looks (0.06 % of a core); the same after a user has done this, and for how long."""
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


def watch_over() -> None:
    """The calling thread, which is the main thread and runs the loop, from now on; where the kernel can refuse there is
    no need."""
    closes = _CLOSES.get(platform.machine())
    if closes is None or can_refuse():
        return
    try:
        shows = os.open(f"/proc/self/task/{threading.get_native_id()}/syscall", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    signal.signal(signal.SIGURG, lambda *_: None)  # one that is ignored interrupts nothing
    words = (threading.get_ident(), shows, closes)
    threading.Thread(target=_watch, args=words, name="linger", daemon=True).start()


def _watch(thread: int, shows: int, closes: tuple[bytes, ...]) -> None:
    before, quick = b"", 0.0
    while True:
        time.sleep(QUICK_LOOK if time.monotonic() < quick else LOOK)
        with suppress(OSError):
            where = os.pread(shows, 256, 0)
            if where == before and where.startswith(closes):
                signal.pthread_kill(thread, signal.SIGURG)
                quick = time.monotonic() + QUICK
            before = where
