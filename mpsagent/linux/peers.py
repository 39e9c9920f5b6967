"""The process at the other end of a Unix socket, from the kernel alone."""

from __future__ import annotations

import functools
import os
import socket
import struct
from dataclasses import dataclass

from mpsagent.linux import proc

SO_PEERPIDFD = 77
"""Linux 6.5 and later: a pidfd of the process that connected."""
_CREDENTIALS = struct.Struct("iII")
CREDENTIALS_SIZE = _CREDENTIALS.size


@dataclass(frozen=True, slots=True)
class Credentials:
    """A process as the kernel vouches for it (SCM_CREDENTIALS, SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int

    def pack(self) -> bytes:
        """Return the bytes of a ``struct ucred``."""
        return _CREDENTIALS.pack(self.pid, self.uid, self.gid)

    @classmethod
    def unpack(cls, data: bytes) -> Credentials:
        """Return the credentials in a ``struct ucred``. Raises ValueError if ``data`` is too short."""
        if len(data) < _CREDENTIALS.size:
            raise ValueError(f"{len(data)} bytes are not a process's credentials")
        return cls(*_CREDENTIALS.unpack(data[: _CREDENTIALS.size]))


def peer(sock: socket.socket) -> Credentials:
    """Return the process that connected (of a client's socket: the process that listens), with its user and group at
    that moment. Raises OSError."""
    return Credentials.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS_SIZE))


def peer_pidfd(sock: socket.socket, pid: int, start: int) -> int | None:
    """Return a new pidfd of the process that connected; None if it has ended, because its pid may be another process's
    by then. On a kernel without SO_PEERPIDFD the start time proves that the pid is still that process's."""
    try:
        return _pidfd(sock)
    except OSError:
        return None if peers_have_pidfds() or not start else proc.open_pidfd(pid, start)


def _pidfd(sock: socket.socket) -> int:
    """Raises OSError."""
    return int(struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4))[0])


@functools.cache
def peers_have_pidfds() -> bool:
    """Return True if this kernel has SO_PEERPIDFD."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        try:
            os.close(_pidfd(one))
        except OSError:
            return False
        return True


def start_of_peer(sock: socket.socket, pid: int, start: int) -> int:
    """Return the start time of the process that connected; 0 if it has ended. ``start``: its known start time, or 0."""
    descriptor = peer_pidfd(sock, pid, start)
    if descriptor is None:
        return 0
    try:
        # as long as the pidfd names a pid, that pid is no other process's
        found = proc.start_time(pid)
        return found if proc.pid_of(descriptor) == pid and start in (0, found) else 0
    finally:
        os.close(descriptor)
