"""No signal of the gate reaches another process, even when the gate is taken over.

Without CAP_KILL root may still signal root's processes, set their resource limits (one second of processor time is an
end, too), and have the kernel send any signal to any user's process as the owner of a file (F_SETOWN, F_SETSIG). A unit
lists system calls, not their arguments. So the gate has the kernel refuse these from its start on.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

# <linux/prctl.h>, <linux/seccomp.h>, <linux/audit.h>
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO = 0x7FFF0000, 0x00050000
# The machine's number, and those of its calls kill, tgkill, prlimit64, fcntl, ioctl.
MACHINES = {
    "x86_64": (0xC000003E, 62, 234, 302, 72, 16),
    "aarch64": (0xC00000B7, 129, 131, 261, 25, 29),
}
F_SETOWN, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP = 8, 15, 0x8901, 0x8902
# <linux/bpf_common.h>: load a word of the call, go on after so many steps if it is equal, answer. Of a call: its
# number, the machine, and the low halves of its first two arguments, which are all that the kernel takes of these.
LOAD, EQUAL, ANSWER = 0x20, 0x15, 0x06
NUMBER, MACHINE, FIRST, SECOND = 0, 4, 16, 24


def _step(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_so, if_not, value)


def _refusals(pid: int, kill: int, tgkill: int, prlimit64: int, fcntl: int, ioctl: int) -> bytes:
    """For each call its argument must be one of two values, or must be neither."""
    refuse = _step(ANSWER, SECCOMP_RET_ERRNO | errno.EPERM)
    allow = _step(ANSWER, SECCOMP_RET_ALLOW)
    program = b""
    for number, argument, values, allowed in (
        (kill, FIRST, (pid, 0), True),
        (tgkill, FIRST, (pid, 0), True),
        (prlimit64, FIRST, (pid, 0), True),
        (fcntl, SECOND, (F_SETOWN, F_SETOWN_EX), False),
        (ioctl, SECOND, (FIOSETOWN, SIOCSPGRP), False),
    ):
        named, other = (allow, refuse) if allowed else (refuse, allow)
        program += _step(LOAD, NUMBER) + _step(EQUAL, number, 0, 5) + _step(LOAD, argument)
        program += _step(EQUAL, values[0], 2, 0) + _step(EQUAL, values[1], 1, 0) + other + named
    return program + allow


def keep() -> str:
    """From now on, in this thread and those that it starts; why not, where it cannot be."""
    machine, *numbers = MACHINES.get(platform.machine(), (0,))
    if not numbers:
        return f"not known for {platform.machine()}"
    program = _step(LOAD, MACHINE) + _step(EQUAL, machine, 1, 0) + _step(ANSWER, SECCOMP_RET_ALLOW)
    program += _refusals(os.getpid(), *numbers)
    steps = ctypes.create_string_buffer(program, len(program))
    filled = struct.pack("HP", len(program) // 8, ctypes.addressof(steps))
    call = ctypes.CDLL(None, use_errno=True).prctl
    if call(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or call(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filled, 0, 0):
        return os.strerror(ctypes.get_errno())
    return ""
