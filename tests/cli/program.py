"""``mpsagent-cli`` as a program: run, and read on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

from tests.api.stand_in import Served

PROGRAM = str(Path(sys.executable).with_name("mpsagent-cli"))


def run(served: Served | None, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", **environ}
    if served is not None:
        env["MPSAGENT_SOCKET"] = str(served.path)
    return subprocess.run([PROGRAM, *words], env=env, capture_output=True, text=True, timeout=60)


def on_terminal(
    command: Sequence[str], *, columns: int = 80, rows: int = 24, typed: bool = False, quit_at: bytes = b"", **env: str
) -> tuple[int, bytes]:
    """Exit status, and what is read. ``typed``: it may ask there, too; ``quit_at``: when that is read, `q` is typed."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TERM": "xterm", **env}
    stdin, out = slave if typed else subprocess.DEVNULL, b""
    with subprocess.Popen(command, env=env, stdin=stdin, stdout=slave, stderr=slave) as child:
        os.close(slave)
        with contextlib.suppress(OSError):  # EIO: the child has closed its end
            while data := os.read(master, 65536):
                if quit_at and quit_at not in out and quit_at in out + data:
                    os.write(master, b"q")
                out += data
        status = child.wait(60)
    os.close(master)
    return status, out


def read_on_terminal(*words: str) -> list[str]:
    """What is read on 80 columns."""
    return on_terminal([PROGRAM, *words])[1].decode().splitlines()
