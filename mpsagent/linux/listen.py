"""Listening sockets: those that systemd passed, and those of a process without systemd.

The agent has one socket for all readers, and two for orders: one for all users, and one to which only root and the
admin group can connect. However many users connect in a loop, they cannot fill the backlog of that one.
"""

from __future__ import annotations

import grp
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

FIRST_DESCRIPTOR = 3
"""The first descriptor that systemd passes."""
MOST = 1 << 20
"""Descriptors that a process may have, unless the administrator has raised fs.nr_open."""


def descriptors() -> list[tuple[str, int]]:
    """Return the open descriptors that the service manager passed (LISTEN_FDS) and their names.

    No child gets them. The variables are removed, so that no child believes that they are meant for it.
    """
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    pid, count = os.environ.get("LISTEN_PID", ""), os.environ.get("LISTEN_FDS", "")
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    for variable in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        os.environ.pop(variable, None)
    found = []
    for index in range(min(int(count), MOST)):
        descriptor = FIRST_DESCRIPTOR + index
        with suppress(OSError):
            os.set_inheritable(descriptor, False)
            found.append((names[index] if index < len(names) else "", descriptor))
    return found


def sockets() -> list[socket.socket]:
    """Return the listening Unix sockets that systemd passed. Other descriptors stay open and are not used."""
    found = []
    for _, descriptor in descriptors():
        with suppress(OSError):  # it is another kind of file
            sock = socket.socket(fileno=descriptor)
            if sock.family == socket.AF_UNIX and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append(sock)
            else:
                sock.detach()
    return found


def administrators_path(path: Path) -> Path:
    """Return ``mpsagent-admin.sock`` for ``mpsagent.sock``."""
    return path.with_name(f"{path.stem}-admin{path.suffix}")


def orders_path(path: Path) -> Path:
    """Return ``mpsagent-orders.sock`` for ``mpsagent.sock``."""
    return path.with_name(f"{path.stem}-orders{path.suffix}")


def bind_administrators(public: Path, group: str | None) -> socket.socket:
    """Return a listening socket for orders of root, and of ``group`` if that group exists and may own the socket.

    Raises OSError as :func:`bind`.
    """
    path = administrators_path(public)
    with suppress(KeyError, PermissionError):
        if group is not None:
            return _bind(path, 0o660, grp.getgrnam(group).gr_gid, socket.SOCK_SEQPACKET)
    return _bind(path, 0o600, -1, socket.SOCK_SEQPACKET)


def bind_orders(public: Path) -> socket.socket:
    """Return a listening socket for orders of all users. Raises OSError as :func:`bind`."""
    return _bind(orders_path(public), 0o666, -1, socket.SOCK_SEQPACKET)


def bind(path: Path) -> socket.socket:
    """Return a listening socket to which all users may connect. The directory is created.

    The socket of an agent that has ended is replaced in one step. Raises OSError if a process listens there or
    the file is not a socket.
    """
    path.parent.mkdir(mode=0o755, exist_ok=True)
    return _bind(path, 0o666, -1, socket.SOCK_STREAM)


def bind_masked(sock: socket.socket, address: str, mask: int = 0o177) -> None:
    """Bind a socket whose file has the permissions that ``mask`` leaves (only its owner's) from the first moment on.

    Raises OSError.
    """
    before = os.umask(mask)
    try:
        sock.bind(address)
    finally:
        os.umask(before)


def _bind(path: Path, mode: int, gid: int, kind: socket.SocketKind) -> socket.socket:
    _refuse_living(path, kind)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    try:
        bind_masked(sock, str(new))
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
