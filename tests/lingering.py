"""A user who sends a descriptor that takes long to close: whoever receives the message last closes it, and waits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpsagent.linux.sent_descriptors import can_refuse

SECONDS = 30
_SCRIPT = r"""
import array, os, socket, struct, sys
kind, path, uid, seconds = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
os.setgroups([]); os.setgid(uid); os.setuid(uid)
listener = socket.socket(); listener.bind(("127.0.0.1", 0)); listener.listen(1)
unsent = socket.socket(); unsent.connect(listener.getsockname())
unsent.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, seconds))
unsent.setblocking(False)
try:
    while True: unsent.send(bytes(65536))
except BlockingIOError: pass
sock = socket.socket(socket.AF_UNIX, kind); sock.connect(path)
try:
    sock.sendmsg([b"GET "], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [unsent.fileno()]))])
    unsent.close()
    print("sent", flush=True)
except PermissionError:
    print("refused", flush=True)
sys.stdin.read()
"""


@contextmanager
def lingering(path: Path, kind: int, uid: int) -> Iterator[str]:
    """What became of the message: "sent" or "refused". Who takes it when it was sent stands still for SECONDS; who has
    taken it before leaves that to the sender."""
    words = [sys.executable, "-I", "-S", "-c", _SCRIPT, *map(str, (kind, path, uid, SECONDS))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def needs_refusal() -> None:
    """Skips where the kernel cannot refuse descriptors."""
    if not can_refuse():
        pytest.skip("this kernel has no SO_PASSRIGHTS (Linux 6.16)")
