"""A user's process of which nobody can read arguments or environment, for as long as its user likes: it maps a file of
the user's own file system, the kernel waits in that call for an answer of the file system, and holds the lock of the
process's memory meanwhile. `ps` and `pgrep` wait with it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from mpsagent.linux.proc import fields
from tests.waiting import until

USER = 20001
_PROGRAM = f"""
import ctypes, mmap, os, signal, struct, sys
libc = ctypes.CDLL(None)
os.path.exists("/dev/fuse") and libc.unshare(0x20000) == 0 or sys.exit("no /dev/fuse")
device, place = os.open("/dev/fuse", os.O_RDWR), sys.argv[1]
libc.mount(None, b"/", None, 1 << 18 | 1 << 14, None)
options = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % device
libc.mount(b"never", place.encode(), b"fuse", 0, options) == 0 or sys.exit("no mount")

def attributes(node):
    mode = 0o40755 if node == 1 else 0o100644
    return struct.pack("6Q10I", node, 4096, 0, 0, 0, 0, 0, 0, 0, mode, *[0] * 6)

def serve():  # linux/fuse.h; what is written to the file is never acknowledged
    opened = 0
    while True:
        asked = os.read(device, 1 << 18)
        _, code, number, node = struct.unpack_from("IIQQ", asked)
        if code == 16:
            continue
        answers = {{
            26: struct.pack("4I2H2I2H8I", 7, 31, 0, 0, 0, 0, 4096, 1, 0, 0, *[0] * 8),
            1: struct.pack("4Q2I", 2, 0, 999, 999, 0, 0) + attributes(2),
            3: struct.pack("Q2I", 999, 0, 0) + attributes(node),
            14: struct.pack("Q2I", 0, 3 if opened else 2, 0),  # FOPEN_DIRECT_IO, FOPEN_KEEP_CACHE
            15: bytes(struct.unpack_from("I", asked, 56)[0]) if code == 15 else b"",
        }}
        opened += code == 14
        answer = answers.get(code, b"")
        os.write(device, struct.pack("IiQ", 16 + len(answer), 0 if code in answers else -38, number) + answer)

if os.fork() == 0:
    signal.alarm(60)  # its end lets all go on: a test that is killed takes nobody along
    serve()
os.close(device)
file = os.open(place + "/file", os.O_RDWR)
changed = mmap.mmap(file, 4096)
changed[0] = 1
again = os.open(place + "/file", os.O_RDWR)
libc.setresgid({USER}, {USER}, {USER}), libc.setresuid({USER}, {USER}, {USER})
libc.prctl(4, 1)  # PR_SET_DUMPABLE, as it is after exec: /proc/PID is the user's
print("ready", flush=True)
mmap.mmap(again, 4096, mmap.MAP_PRIVATE)
"""


@contextmanager
def process_that_cannot_be_read() -> Iterator[int]:
    """Its pid."""
    words = ["/usr/bin/python3", "-I", "-S", "-c", _PROGRAM]
    with (
        tempfile.TemporaryDirectory() as place,
        subprocess.Popen([*words, place], stdout=subprocess.PIPE, text=True, start_new_session=True) as process,
    ):
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "ready\n":
                pytest.skip("no file system of a user's own here")
            until(lambda: fields(process.pid)[:1] == [b"D"], "it waits in the kernel")
            yield process.pid
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
