"""The listening socket: systemd's, if it passed one, otherwise our own."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import MutableMapping
from pathlib import Path

DEFAULT_PATH = Path("/run/mpsagent/mpsagent.sock")
_FIRST_FD = 3


def inherited(environ: MutableMapping[str, str] = os.environ) -> list[socket.socket]:
    """The listening Unix sockets that systemd passed (LISTEN_FDS), and the variables are taken away, so that no child
    believes that they are meant for it. Other descriptors are left alone."""
    pid, count = environ.get("LISTEN_PID", ""), environ.get("LISTEN_FDS", "")
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    found: list[socket.socket] = []
    for fd in range(_FIRST_FD, _FIRST_FD + min(int(count), 64)):
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            os.set_inheritable(fd, False)
            sock = socket.socket(fileno=fd)
        except OSError:
            continue
        listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if sock.family == socket.AF_UNIX and sock.type == socket.SOCK_STREAM and listening:
            found.append(sock)
        else:
            sock.detach()
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        environ.pop(name, None)
    return found


def bind(path: Path) -> socket.socket:
    """A listening socket at ``path`` that everybody may connect to. What a dead agent left there is replaced in one
    step; a living one is an error (OSError), and so is anything that is not a socket."""
    _refuse_living(path)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.bind(str(new))
        new.chmod(0o666)  # who may do what is decided by the peer's uid
        sock.listen(128)
        new.rename(path)
    except OSError:
        sock.close()
        new.unlink(missing_ok=True)
        raise
    return sock


def _refuse_living(path: Path) -> None:
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise FileExistsError(f"{path} exists and is not a socket; remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
        except FileNotFoundError:
            return
    raise FileExistsError(f"another mpsagent answers on {path}; stop it first (systemctl stop mpsagent)")
