"""The pipe and log directories of an instance: made safely, checked before they are trusted, opened last.

MPS creates its pipe directory with mode 0777: any user could put sockets of his own into the place of its own. So the
agent makes the directory first, as root. While its mode is 0700 no user's client can reach the control daemon.
Everything is done on descriptors; nothing is looked up twice by name.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MPS_NAMES = ("control", "control_privileged", "control_lock", "log", "nvidia-cuda-mps-control.pid")
"""What a control daemon leaves in its pipe directory (recording 01, S1)."""
LONGEST_SOCKET_PATH = 107
"""Bytes: sun_path of a Unix socket without its NUL."""
OPEN, SHUT = 0o755, 0o700
_ACL = "system.posix_acl_access"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class PipeDirectoryRefused(Exception):
    """The directory is not safe to use. The text says what is wrong, and the command that puts it right."""


def prepare(path: str) -> list[str]:
    """Makes the pipe directory (mode 0700: shut) or checks the one that is there, whose mode is left as it is.

    Returns warnings: what is safe but will not work. Raises PipeDirectoryRefused, or OSError from the file system.
    """
    if len(os.fsencode(path)) + len("/control_privileged") > LONGEST_SOCKET_PATH:
        raise PipeDirectoryRefused(
            f"{path}: too long a path; with /control_privileged it may have {LONGEST_SOCKET_PATH} bytes. "
            f"Choose a shorter pipe directory"
        )
    return _prepare(path, SHUT)


def prepare_log_directory(path: str) -> list[str]:
    """The same for the log directory, mode 0755: users may read the logs."""
    return _prepare(path, OPEN)


def open_door(path: str) -> None:
    """From now on users' clients can reach the control daemon. Raises like :func:`prepare`."""
    with _opened(path) as directory:
        with suppress(OSError):  # there is none, usually
            os.removexattr(directory, _ACL)
        os.fchmod(directory, OPEN)


def shut_door(path: str) -> None:
    """No new client reaches the control daemon; whoever comes runs outside MPS, and a user's server cannot start
    (conformance scenario X19). So not for longer than it takes to set the limits. Raises like :func:`prepare`."""
    with _opened(path) as directory:
        os.fchmod(directory, SHUT)


def secure(path: str) -> str | None:
    """What a daemon that was started by hand has left open: its directory has mode 0777, and anybody could put his own
    socket into the place of MPS's. Takes the others' right to write away if nobody has used it; says so in words, or
    None when there was nothing to do. Raises PipeDirectoryRefused or OSError."""
    try:
        directory = os.open(path, _DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(directory)
        if status.st_uid != os.geteuid() or not stat.S_IMODE(status.st_mode) & 0o022:
            return None
        os.fchmod(directory, OPEN)  # first: what is looked at now cannot be replaced any more
        for name in MPS_NAMES:
            with suppress(FileNotFoundError):
                owner = os.stat(name, dir_fd=directory, follow_symlinks=False).st_uid
                if owner != os.geteuid():
                    raise PipeDirectoryRefused(
                        f"{path}/{name} belongs to {_who(owner)}, who has put his own into the place of MPS's, because "
                        f"everybody could write there. Stop what uses it, then remove it: rm -r {shlex.quote(path)}"
                    )
    finally:
        os.close(directory)
    return f"{path} could be written to by everybody (mode {stat.S_IMODE(status.st_mode):04o}); it has mode 0755 now"


def is_open(path: str) -> bool:
    """True when users can enter the directory."""
    with suppress(OSError):
        return bool(Path(path).lstat().st_mode & stat.S_IXOTH)
    return False


def reachable(path: str) -> bool:
    """False when the control daemon's socket is not there: clients then run outside MPS, and the daemon hears nobody
    for the rest of its life (conformance scenario X10)."""
    return os.path.lexists(Path(path, "control"))


def clean(path: str) -> list[str]:
    """Removes what a dead control daemon has left in its pipe directory, and nothing else; returns the names.

    The caller has made sure that it is dead. Raises like :func:`prepare`; a missing directory is clean.
    """
    removed = []
    try:
        with _opened(path) as directory:
            for name in MPS_NAMES:
                with suppress(FileNotFoundError):
                    if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                        continue
                    os.unlink(name, dir_fd=directory)
                    removed.append(name)
    except FileNotFoundError:
        return []
    return removed


# --- one step at a time ----------------------------------------------------------------------------------------------


def _prepare(path: str, mode: int) -> list[str]:
    with _parent(path, create=True) as (parent, name, warnings):
        try:
            os.mkdir(name, SHUT, dir_fd=parent)
        except FileExistsError:
            directory = _enter(parent, name, path)
        else:
            directory = os.open(name, _DIRECTORY, dir_fd=parent)
            with suppress(PermissionError):  # of a parent with a set-group-id bit
                os.fchown(directory, os.geteuid(), os.getegid())
            os.fchmod(directory, mode)
        os.close(directory)
        return warnings


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """A descriptor of the checked directory."""
    with _parent(path) as (parent, name, _):
        directory = _enter(parent, name, path)
        try:
            yield directory
        finally:
            os.close(directory)


def _enter(parent: int, name: str, path: str) -> int:
    """Opens the directory itself; it must be ours and writable by nobody else."""
    _refuse_link(parent, name, path)
    try:
        directory = os.open(name, _DIRECTORY, dir_fd=parent)
    except NotADirectoryError:
        raise PipeDirectoryRefused(f"{path} is not a directory. Remove it: rm {shlex.quote(path)}") from None
    status = os.fstat(directory)
    mode = stat.S_IMODE(status.st_mode)
    problem = None
    if status.st_uid != os.geteuid():
        problem = f"belongs to {_who(status.st_uid)} (mode {mode:04o}), not to {_who(os.geteuid())}"
    elif mode & 0o022:
        problem = f"can be written to by others (owner {_who(status.st_uid)}, mode {mode:04o})"
    if problem is not None:
        os.close(directory)
        raise PipeDirectoryRefused(
            f"{path} {problem}: anybody who can write there can put his own socket into the place of MPS's. "
            f"Stop what uses it, then remove it: rm -r {shlex.quote(path)}"
        )
    return directory


@contextmanager
def _parent(path: str, create: bool = False) -> Iterator[tuple[int, str, list[str]]]:
    """Walks down to the directory above ``path``: its descriptor, the last name, and warnings."""
    if not path.startswith("/") or os.path.normpath(path) != path or path.startswith("//") or path == "/":
        raise PipeDirectoryRefused(f'"{path}" has to be an absolute path without "." and ".." and double slashes')
    *above, last = path[1:].split("/")
    # A link in the path may only be root's (/var/run); then what it leads to is walked instead.
    for depth in range(1, len(above) + 1):
        step = Path("/", *above[:depth])
        if step.is_symlink() and step.lstat().st_uid not in (0, os.geteuid()):
            raise PipeDirectoryRefused(f"{step} is a link of {_who(step.lstat().st_uid)}: rm {shlex.quote(str(step))}")
    above = os.path.realpath(os.path.dirname(path))[1:].split("/") if above else []  # noqa: PTH120
    warnings: list[str] = []
    descriptor = os.open("/", _DIRECTORY)
    try:
        walked = ""
        for name in filter(None, above):
            walked += "/" + name
            if create:
                with suppress(FileExistsError):
                    os.mkdir(name, OPEN, dir_fd=descriptor)
            _refuse_link(descriptor, name, walked)
            below = os.open(name, _DIRECTORY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
            warnings += _check_parent(os.fstat(descriptor), walked, path)
        yield descriptor, last, warnings
    finally:
        os.close(descriptor)


def _check_parent(status: os.stat_result, parent: str, path: str) -> list[str]:
    mode = stat.S_IMODE(status.st_mode)
    quoted = shlex.quote(parent)
    if status.st_uid not in (0, os.geteuid()):
        raise PipeDirectoryRefused(
            f"{parent}, above {path}, belongs to {_who(status.st_uid)}, who can replace what is in it. "
            f"Make it root's: chown root {quoted}"
        )
    if mode & 0o022 and not mode & stat.S_ISVTX:
        raise PipeDirectoryRefused(
            f"{parent}, above {path}, can be written to by others (mode {mode:04o}). Forbid it: chmod go-w {quoted}"
        )
    if not mode & stat.S_IXOTH:
        return [
            f"{parent} (mode {mode:04o}) cannot be entered by users, so their clients and servers do not reach "
            f"{path}. Allow it: chmod o+x {quoted}"
        ]
    return []


def _refuse_link(parent: int, name: str, path: str) -> None:
    status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        raise PipeDirectoryRefused(
            f"{path} is a symbolic link of {_who(status.st_uid)}, not a directory. Remove it: rm {shlex.quote(path)}"
        )


def _who(uid: int) -> str:
    """A number, because a name service may hang."""
    return "root" if uid == 0 else f"uid {uid}"
