"""Make this process show up in ps as MPS's own would: /proc/PID/comm and /proc/PID/cmdline."""

import ctypes
import os

_PR_SET_DUMPABLE, _PR_SET_MM, _PR_SET_MM_ARG_END = 4, 35, 9


class ProcessTitle:
    """Remembers where the kernel keeps this process's arguments; create it before the first change."""

    def __init__(self) -> None:
        with open("/proc/self/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        self.start, self.end = int(fields[45]), int(fields[46])

    def set(self, *words: str) -> None:
        """Best effort. Without CAP_SYS_RESOURCE the rest of the old arguments stays as empty ones."""
        name = words[0]
        title = b"\0".join(word.encode() for word in words) + b"\0"
        try:
            with open("/proc/self/comm", "w") as comm:
                comm.write(name[:15])
            if len(title) <= self.end - self.start:
                with open("/proc/self/mem", "r+b", buffering=0) as memory:
                    memory.seek(self.start)
                    memory.write(title.ljust(self.end - self.start, b"\0"))
                libc = ctypes.CDLL(None, use_errno=True)
                end = ctypes.c_ulong(self.start + len(title))
                libc.prctl(_PR_SET_MM, ctypes.c_ulong(_PR_SET_MM_ARG_END), end, ctypes.c_ulong(0), ctypes.c_ulong(0))
        except OSError:
            pass


def become(uid: int, gid: int) -> None:
    """Give up root for `uid`; without root everything runs as the one user."""
    if os.getuid() != 0 or uid == 0:
        return
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
    # a process that changed its user hides behind root in /proc otherwise
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(1), *[ctypes.c_ulong(0)] * 3)
