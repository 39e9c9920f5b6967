"""``mpsagent-cli`` as a program: run, and read on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

from tests.interfaces.stand_in import Served

PROGRAM = str(Path(sys.executable).with_name("mpsagent-cli"))


def run(served: Served | None, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", **environ}
    if served is not None:
        env["MPSAGENT_SOCKET"] = str(served.path)
    return subprocess.run([PROGRAM, *words], env=env, capture_output=True, text=True, timeout=60)


def read_on_terminal(*words: str) -> list[str]:
    """What is read on 80 columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TERM": "xterm"}
    out = b""
    with subprocess.Popen([PROGRAM, *words], env=env, stdout=slave, stderr=slave):
        os.close(slave)
        try:
            while data := os.read(master, 65536):
                out += data
        except OSError:  # EIO: the child has closed its end
            pass
    os.close(master)
    return out.decode().splitlines()
