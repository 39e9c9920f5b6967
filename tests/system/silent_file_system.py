"""A file system of one file whose server answers until the file has been opened once, and never again: to the programs
on it, a server of NFS that has died. It speaks FUSE's protocol (linux/fuse.h) and needs root."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LOOKUP, GETATTR, OPEN, INIT = 1, 3, 14, 26
NO_FLUSH = 1 << 5
"""A close of the file asks the server nothing."""
NOT_SUPPORTED = -38
NAME = "log"


@contextmanager
def silent_file_system(directory: Path, uid: int) -> Iterator[Path]:
    """Yield the path of the file, which is the user's. At the end all calls that wait for it fail."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no FUSE here")
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    if ctypes.CDLL(None).mount(b"silent", os.fsencode(directory), b"fuse", 0, options.encode()):
        os.close(device)
        pytest.skip("the kernel mounts no FUSE")
    server = threading.Thread(target=_serve, args=(device, uid))
    server.start()
    try:
        yield directory / NAME
    finally:
        server.join()
        os.close(device)
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def _serve(device: int, uid: int) -> None:
    opened = False
    while not opened:
        request = os.read(device, 1 << 17)
        _, kind, unique, node = struct.unpack_from("=IIQQ", request)
        opened = kind == OPEN
        answer = _answer(kind, node, uid)
        error = 0 if answer is not None else NOT_SUPPORTED
        os.write(device, struct.pack("=IiQ", 16 + len(answer or b""), error, unique) + (answer or b""))


def _answer(kind: int, node: int, uid: int) -> bytes | None:
    if kind == INIT:
        return struct.pack("=IIIIHHIIHHI28x", 7, 38, 0, 0, 12, 9, 4096, 1, 0, 0, 0)
    if kind == LOOKUP:
        return struct.pack("=QQQQII", 2, 1, 0, 0, 0, 0) + _attributes(2, uid)
    if kind == GETATTR:
        return struct.pack("=QII", 0, 0, 0) + _attributes(node, uid)
    return struct.pack("=QII", 1, NO_FLUSH, 0) if kind == OPEN else None


def _attributes(node: int, uid: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if node == 1 else stat.S_IFREG | 0o644
    return struct.pack("=QQQQQQIIIIIIIIII", node, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, uid, uid, 0, 4096, 0)
