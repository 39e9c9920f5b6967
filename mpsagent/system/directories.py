"""The directories of an instance: hidden pipe directory, public directory, log directory.

The control daemon listens in a hidden directory that only root and the servers (group 0) can enter; the gate listens
in the public one. Everything is done on descriptors: what was checked is what is used. A directory that someone else
could have filled is taken back (it is root's, only its mode was wrong) or refused with the command that puts it right.
"""

from __future__ import annotations

import errno
import os
import shlex
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mpsagent.linux.peers import peer
from mpsagent.policy.parse import SHARED

NOWHERE = "/nonexistent/mpsagent-asks-without-mps"
"""The pipe directory of programs of ours that ask the driver: they are never clients of MPS."""
DAEMON_NAMES = ("control", "control_privileged", "control_lock", "log", "nvidia-cuda-mps-control.pid")
"""What a control daemon leaves in its pipe directory (recording 01, S1)."""
LOG_NAMES = ("control.log", "server.log")
LONGEST_SOCKET_PATH = 107
"""Bytes: sun_path of a Unix socket without its NUL."""
HIDDEN, PUBLIC = 0o710, 0o755
_ACL = "system.posix_acl_access"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class DirectoryRefused(Exception):
    """The directory is not safe to use. The text says what is wrong, and the command that puts it right."""


@dataclass(frozen=True, slots=True)
class Directories:
    """Where one instance lives. ``hidden``: the control daemon's pipe directory; ``public``: where clients connect;
    ``home``: root's own, above ``hidden`` (lock, state of the instance)."""

    home: str
    hidden: str
    public: str
    log: str


def directories(instance: str, public: str, log: str, run: str = "/run/mpsagent") -> Directories:
    """The directories of ``instance`` under the run directory ``run``. Pure."""
    home = f"{run}/instances/{instance}"
    return Directories(home, f"{home}/pipe", public, log)


# --- before a control daemon is started ------------------------------------------------------------------------------


def prepare_hidden(where: Directories) -> list[str]:
    """Makes ``instances``, the instance's directory and its pipe directory, or puts their modes right: servers run with
    group 0 (recording 08, G1). Returns notes for people. Raises DirectoryRefused or OSError."""
    _check_length(where.hidden, "run directory")
    notes: list[str] = []
    for path in (str(Path(where.home).parent), where.home, where.hidden):
        notes += _prepare(path, HIDDEN)
    return notes


def prepare_public(path: str) -> list[str]:
    """Makes or checks the public directory, 0755, before the gate's sockets are made there: users enter, only root
    writes. What a dead control daemon or another user has left under MPS's names is removed. Returns notes for people.
    Raises DirectoryRefused when it is someone else's, or when a process listens there already; or OSError."""
    _check_length(path, "pipe_directory")
    notes = _prepare(path, PUBLIC)
    found = listener_of(f"{path}/control")
    if found is not None:
        who = f"process {found[0]} of {_who(found[1])}" if found[0] else "a process that cannot be seen"
        raise DirectoryRefused(
            f"{path} is served by {who}, which is not the gate: a control daemon started by hand? When its work "
            f"is done, end it: echo quit | CUDA_MPS_PIPE_DIRECTORY={shlex.quote(path)} nvidia-cuda-mps-control"
        )
    with _opened(path) as directory:
        for name in DAEMON_NAMES:
            with suppress(FileNotFoundError):
                uid = os.stat(name, dir_fd=directory, follow_symlinks=False).st_uid
                _remove(directory, name, path)
                if uid != os.geteuid():
                    notes.append(f"{path}/{name} of {_who(uid)} was removed: only the gate's sockets belong there")
    return notes


def prepare_log(path: str) -> list[str]:
    """Makes or checks the log directory, 0755: users read the logs, only root writes. Log files that are there must be
    plain files of ours, because root's control daemon appends to them. Raises DirectoryRefused or OSError."""
    try:
        notes = _prepare(path, PUBLIC)
        with _opened(path) as directory:
            for name in LOG_NAMES:
                with suppress(FileNotFoundError):
                    notes += _check_log(directory, name, path)
            if os.fstatvfs(directory).f_flag & os.ST_RDONLY:
                raise OSError(errno.EROFS, "")
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        raise DirectoryRefused(
            f"{path} is on a read-only file system, so the control daemon cannot write the logs that the agent needs. "
            f"Set log_directory in [instance.NAME] to a place that can be written to"
        ) from None
    return notes


def refusal(path: str) -> str | None:
    """Why the public directory cannot be used as it is now, or None (it is fine, or not there). Changes nothing."""
    try:
        with _opened(path):
            return None
    except FileNotFoundError:
        return None
    except (DirectoryRefused, OSError) as error:
        return str(error)


def clean(path: str) -> list[str]:
    """Removes what a control daemon that is surely dead has left in its pipe directory; returns the names. Raises like
    :func:`prepare_hidden`."""
    removed = []
    try:
        with _opened(path) as directory:
            for name in DAEMON_NAMES:
                with suppress(FileNotFoundError):
                    if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                        continue
                    os.unlink(name, dir_fd=directory)
                    removed.append(name)
    except FileNotFoundError:
        return []
    return removed


def unusable(path: str, *, users: bool = False) -> tuple[str, str] | None:
    """Why no process, or with ``users`` no user, can connect to the socket that should be at ``path``; and how to let
    them, empty: it has to be made again. None: they can."""
    file = Path(path)
    try:
        if not stat.S_ISSOCK(file.lstat().st_mode):
            return f"{path} is no socket", ""
        for step in (file, *file.parents) if users and os.geteuid() == 0 else ():
            mode = stat.S_IMODE(step.stat().st_mode)
            needed, letters = (0o002, "rw") if step == file else (0o001, "x")
            if not mode & needed:
                return f"{step} is closed to users (mode {mode:04o})", f"chmod a+{letters} {shlex.quote(str(step))}"
    except FileNotFoundError:
        return f"{path} has gone", ""
    except OSError as error:
        return f"{path} cannot be looked at: {error.strerror}", ""
    return None


def hidden_trouble(where: Directories) -> tuple[str, str] | None:
    """Why clients or servers cannot come to a control daemon that runs, or users can, and what to do."""
    with suppress(OSError):
        for path in (Path(where.home).parent, Path(where.home), Path(where.hidden)):
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode != HIDDEN:
                who = "users may go past the gate" if mode & 0o007 else "MPS's servers cannot start"
                return f"{path} has mode {mode:04o}: {who}", f"chmod {HIDDEN:04o} {shlex.quote(str(path))}"
    found = unusable(f"{where.hidden}/control")
    return None if found is None else (f"{found[0]}: no client can be handed over", "mpsagent-cli restart-mps")


def listener_of(path: str) -> tuple[int, int] | None:
    """pid and uid of the process that listens on the socket ``path``, or None. pid 0: in a pid namespace that cannot be
    seen. A listener whose queue is full is there, too: pid 0, uid -1.
    """
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
        with socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC) as probe:
            probe.setblocking(False)
            try:
                probe.connect(path)
            except BlockingIOError:
                return 0, -1
            except OSError:
                continue
            who = peer(probe)
            return who.pid, who.uid
    return None


# --- one step at a time ----------------------------------------------------------------------------------------------


def _check_length(path: str, key: str) -> None:
    if len(os.fsencode(path)) + len("/control_privileged") > LONGEST_SOCKET_PATH:
        raise DirectoryRefused(
            f"{path}: too long a path; with /control_privileged it may have {LONGEST_SOCKET_PATH} bytes. "
            f"Choose a shorter {key}"
        )


def _prepare(path: str, mode: int) -> list[str]:
    with _parent(path, create=True) as (parent, name, notes):
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            directory = _enter(parent, name, path)
        else:
            directory = os.open(name, _DIRECTORY, dir_fd=parent)
        try:
            status = os.fstat(directory)
            present = stat.S_IMODE(status.st_mode)
            if mode == PUBLIC and (present & stat.S_ISVTX or path in SHARED):
                raise DirectoryRefused(
                    f"{path} (mode {present:04o}) is used by others too; MPS needs a directory of its own. Write one "
                    f"below it into [instance.NAME], like {path}/nvidia-mps"
                )
            if present & 0o022 and present != mode:
                notes.append(f"{path} could be written to by others (mode {present:04o}); it has mode {mode:04o} now")
            if status.st_gid != os.getegid():
                with suppress(PermissionError):  # a parent with a set-group-id bit, or a group that an admin chose
                    os.fchown(directory, -1, os.getegid())
            with suppress(OSError):  # there is none, usually
                os.removexattr(directory, _ACL)
            if present != mode:
                os.fchmod(directory, mode)
        finally:
            os.close(directory)
        return notes


def _check_log(directory: int, name: str, path: str) -> list[str]:
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    place, quoted = f"{path}/{name}", shlex.quote(f"{path}/{name}")
    problem = None
    if stat.S_ISLNK(status.st_mode):
        target = os.readlink(name, dir_fd=directory)
        problem = f"is a symbolic link of {_who(status.st_uid)} to {target[:200]}"
    elif not stat.S_ISREG(status.st_mode):
        problem = "is not a plain file"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to {_who(status.st_uid)}"
    elif status.st_nlink > 1:
        problem = f"has {status.st_nlink} names (hard links)"
    if problem is not None:
        raise DirectoryRefused(
            f"{place} {problem}: root's control daemon would append to whatever that is. Remove it: rm {quoted}"
        )
    if stat.S_IMODE(status.st_mode) & 0o022:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        try:
            os.fchmod(file, stat.S_IMODE(status.st_mode) & ~0o022)
        finally:
            os.close(file)
        return [f"{place} could be written to by others; it cannot any more"]
    return []


def _remove(directory: int, name: str, path: str) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except IsADirectoryError:
        place = shlex.quote(f"{path}/{name}")
        raise DirectoryRefused(f"{path}/{name} is a directory, not a socket. Remove it: rm -r {place}") from None


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """A descriptor of the checked directory."""
    with _parent(path) as (parent, name, _):
        directory = _enter(parent, name, path)
        try:
            if stat.S_IMODE(os.fstat(directory).st_mode) & 0o022:
                mode = stat.S_IMODE(os.fstat(directory).st_mode)
                raise DirectoryRefused(
                    f"{path} can be written to by others (mode {mode:04o}), who can replace what is in it. "
                    f"Forbid it: chmod go-w {shlex.quote(path)}"
                )
            yield directory
        finally:
            os.close(directory)


def _enter(parent: int, name: str, path: str) -> int:
    """Opens the directory itself; it must be ours."""
    _refuse_link(parent, name, path)
    try:
        directory = os.open(name, _DIRECTORY, dir_fd=parent)
    except NotADirectoryError:
        raise DirectoryRefused(f"{path} is not a directory. Remove it: rm {shlex.quote(path)}") from None
    status = os.fstat(directory)
    if status.st_uid != os.geteuid():
        os.close(directory)
        raise DirectoryRefused(
            f"{path} belongs to {_who(status.st_uid)} (mode {stat.S_IMODE(status.st_mode):04o}), not to "
            f"{_who(os.geteuid())}, who could answer clients there in the place of MPS: nothing is served until it is "
            f"gone. Look who made it, then remove it: rm -r {shlex.quote(path)}"
        )
    return directory


@contextmanager
def _parent(path: str, create: bool = False) -> Iterator[tuple[int, str, list[str]]]:
    """Walks down to the directory above ``path``: its descriptor, the last name, and notes."""
    if not path.startswith("/") or os.path.normpath(path) != path or path.startswith("//") or path == "/":
        raise DirectoryRefused(f'"{path}" has to be an absolute path without "." and ".." and double slashes')
    *above, last = path[1:].split("/")
    # A link in the path may only be root's (/var/run); then what it leads to is walked instead.
    for depth in range(1, len(above) + 1):
        step = Path("/", *above[:depth])
        if step.is_symlink() and step.lstat().st_uid not in (0, os.geteuid()):
            raise DirectoryRefused(f"{step} is a link of {_who(step.lstat().st_uid)}: rm {shlex.quote(str(step))}")
    above = os.path.realpath(os.path.dirname(path))[1:].split("/") if above else []  # noqa: PTH120
    notes: list[str] = []
    descriptor = os.open("/", _PLACE)
    try:
        walked = ""
        for name in filter(None, above):
            walked += "/" + name
            if create:
                with suppress(FileExistsError):
                    os.mkdir(name, PUBLIC, dir_fd=descriptor)
                    _correct_mode(descriptor, name)
            _refuse_link(descriptor, name, walked)
            below = os.open(name, _PLACE, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
            notes += _check_parent(os.fstat(descriptor), walked, path)
        yield descriptor, last, notes
    finally:
        os.close(descriptor)


def _correct_mode(parent: int, name: str) -> None:
    """A parent that was just made; the umask (0077 under systemd) must not keep users out of it."""
    fresh = os.open(name, _DIRECTORY, dir_fd=parent)
    try:
        os.fchmod(fresh, PUBLIC)
    finally:
        os.close(fresh)


def _check_parent(status: os.stat_result, parent: str, path: str) -> list[str]:
    mode = stat.S_IMODE(status.st_mode)
    quoted = shlex.quote(parent)
    if status.st_uid not in (0, os.geteuid()):
        raise DirectoryRefused(
            f"{parent}, above {path}, belongs to {_who(status.st_uid)}, who can replace what is in it. "
            f"Make it root's: chown root {quoted}"
        )
    if mode & 0o022 and not mode & stat.S_ISVTX:
        raise DirectoryRefused(
            f"{parent}, above {path}, can be written to by others (mode {mode:04o}). Forbid it: chmod go-w {quoted}"
        )
    return []


def _refuse_link(parent: int, name: str, path: str) -> None:
    status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        raise DirectoryRefused(
            f"{path} is a symbolic link of {_who(status.st_uid)}, not a directory. Remove it: rm {shlex.quote(path)}"
        )


def _who(uid: int) -> str:
    """A number, because a name service may hang."""
    return "root" if uid == 0 else f"uid {uid}"
