"""The listening sockets: systemd's, if it passed them, otherwise our own.

One is for everybody who reads. Two beside it are for orders: everybody's, and one that root and the admin group alone
can connect to, so that however many users connect in a loop, they cannot fill its backlog.
"""

from __future__ import annotations

import grp
import os
import socket
import stat
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

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
        if sock.family == socket.AF_UNIX and listening:
            found.append(sock)
        else:
            sock.detach()
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        environ.pop(name, None)
    return found


def administrators_path(path: Path) -> Path:
    """``mpsagent-admin.sock`` beside ``mpsagent.sock``."""
    return path.with_name(f"{path.stem}-admin{path.suffix}")


def orders_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}-orders{path.suffix}")


def bind_administrators(public: Path, group: str | None) -> socket.socket:
    """A listening socket for orders of root, and of ``group`` if there is such a group and it may be given it. Raises
    OSError as :func:`bind`."""
    path = administrators_path(public)
    with suppress(KeyError, PermissionError):
        if group is not None:
            return _bind(path, 0o660, grp.getgrnam(group).gr_gid, socket.SOCK_SEQPACKET)
    return _bind(path, 0o600, -1, socket.SOCK_SEQPACKET)


def bind_orders(public: Path) -> socket.socket:
    """The same for everybody."""
    return _bind(orders_path(public), 0o666, -1, socket.SOCK_SEQPACKET)


def bind(path: Path) -> socket.socket:
    """A listening socket at ``path`` that everybody may connect to. What a dead agent left there is replaced in one
    step; a living one is an error (OSError), and so is anything that is not a socket. The directory is made."""
    path.parent.mkdir(mode=0o755, exist_ok=True)
    return _bind(path, 0o666, -1, socket.SOCK_STREAM)


def _bind(path: Path, mode: int, gid: int, kind: socket.SocketKind) -> socket.socket:
    _refuse_living(path, kind)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    try:
        old = os.umask(0o177)
        try:
            sock.bind(str(new))
        finally:
            os.umask(old)
        if gid != -1:
            os.chown(new, -1, gid)
        new.chmod(mode)
        sock.listen(128)
        new.rename(path)
    except OSError:
        sock.close()
        new.unlink(missing_ok=True)
        raise
    return sock


def _refuse_living(path: Path, kind: socket.SocketKind) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(f"{path} exists and is not a socket; remove it or choose another path")
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
        except FileNotFoundError:
            return
    raise FileExistsError(f"another mpsagent answers on {path}; stop it first (systemctl stop mpsagent)")
