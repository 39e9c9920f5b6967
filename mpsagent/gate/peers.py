"""Who is at the other end of a socket, from the kernel alone: credentials, pidfd, start time, cgroup and namespace."""

from __future__ import annotations

import functools
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

from mpsagent.gate import identity
from mpsagent.mps.rendezvous import CREDENTIALS_SIZE, Credentials

SO_PEERPIDFD = 77
"""Linux 6.5 and later: a pidfd of the process that connected, which no other process can be taken for."""
LONGEST_CGROUP = 512


def peer(sock: socket.socket) -> Credentials:
    """The process that connected, its user and group at that moment. Raises OSError."""
    return Credentials.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS_SIZE))


def start_of_users(pid: int, uid: int) -> int:
    """The start time, where this is a process of that user; else 0."""
    return identity.start_time(pid) if uid in identity.ids(pid, b"Uid:") else 0


def real_gid(pid: int, uid: int) -> int | None:
    """The group of a process whose real user this is; None where it is another's, or has gone."""
    group = identity.ids(pid, b"Gid:")
    return group[0] if identity.ids(pid, b"Uid:")[:1] == (uid,) and group else None


def peer_pidfd(sock: socket.socket, pid: int, start: int) -> int | None:
    """A new pidfd of the process that connected, or None when it has gone: its pid may be another's by then. Where the
    kernel cannot say it by the socket, the start time proves that the pid is still that process."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4)
        return int(struct.unpack("i", raw)[0])
    except OSError:
        return None if peers_have_pidfds() or not start else open_pidfd(pid, start)


@functools.cache
def peers_have_pidfds() -> bool:
    """Whether this kernel tells a socket's process by a pidfd."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        try:
            os.close(struct.unpack("i", one.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4))[0])
        except OSError:
            return False
        return True


def start_of_peer(sock: socket.socket, pid: int, start: int) -> int:
    """The start time of the process that connected; 0 when it has gone. ``start``: what is known of it, or 0."""
    descriptor = peer_pidfd(sock, pid, start)
    if descriptor is None:
        return 0
    try:
        # as long as the pidfd names a pid, that pid is no other process's
        found = identity.start_time(pid)
        return found if identity.pid_of(descriptor) == pid and start in (0, found) else 0
    finally:
        os.close(descriptor)


def open_pidfd(pid: int, start: int) -> int | None:
    """A new pidfd of the process with this start time; None when it has gone."""
    if pid <= 0:
        return None
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    if start and identity.start_time(pid) != start:
        os.close(descriptor)
        return None
    return descriptor


def cgroup(pid: int) -> str | None:
    """The path of the process's cgroup."""
    return cgroup_of(identity.said(pid, "cgroup").decode("utf-8", "replace"))


def cgroup_of(text: str) -> str | None:
    """One path of those in /proc/PID/cgroup: the freezer's where there is one (version 1), because systemd leaves that
    hierarchy to batch systems and names their service in all others; else the unified one's; else the first that says
    more than the root. A path may have every letter but a newline, and users name cgroups of their own."""
    rows = [line.split(":", 2) for line in text.split("\n") if line.count(":") >= 2]
    rows.sort(key=lambda row: (row[1] != "freezer", row[:2] != ["0", ""]))
    said = next((path for _, _, path in rows if path != "/"), "/")
    return said[:LONGEST_CGROUP] if rows else None


def pid_namespace(pid: int) -> int | None:
    """The inode of the process's pid namespace."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    return None


def contained(pid: int, start: int) -> bool:
    """Whether the process is in a pid namespace below this one, as those of containers are; also when it has gone, for
    then that cannot be known. /proc/PID/ns would need rights over the process, and its status does not."""
    return len(identity.ids(pid, b"NSpid:")) > 1 or not start or identity.start_time(pid) != start
