"""The doors: what the real code knows of the outside, by name, and the models that stand there in a world.

The product needs no change for this. Its modules reach the outside by the names of Python's own modules (``socket``,
``os``, ``select``, ``time`` ...); for as long as a world runs, these names lead to the stand-ins here, which ask the
kernel of the present world (``opened``). What is not modelled is an AttributeError, never the machine that runs this.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl as real_fcntl
import functools
import grp as real_grp
import io
import os as real_os
import pathlib
import select as real_select
import signal as real_signal
import socket as real_socket
import stat as st
import struct
import sys
import termios
import time as real_time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import psutil as real_psutil

from tests.world.kernel import Inode, Kernel, Killed, Notices, Opened, PidFd, Process, Socket

kernel: Kernel
"""Of the present world."""


def _error(number: int) -> OSError:
    return OSError(number, real_os.strerror(number))


def _refused(number: int) -> OSError:
    """The call that was entered has changed nothing."""
    kernel.nothing()
    return _error(number)


def _call(what: str) -> Process:
    return kernel.enter(what)


# --- sockets ---------------------------------------------------------------------------------------------------------

SO_PEERPIDFD, SO_PASSRIGHTS = 77, 83
_CREDENTIALS = struct.Struct("iII")


class SocketObject:
    """socket.socket."""

    def __init__(self, family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None) -> None:  # noqa: A002
        process = kernel.current
        if fileno is None:
            process = _call("socket")
            fileno = process.install(Socket(kernel, bool(type & 15 == real_socket.SOCK_DGRAM)))
        self._fd = fileno
        self._file = process.file(fileno)
        if not isinstance(self._file, Socket):
            raise _error(errno.ENOTSOCK)
        self.type = real_socket.SOCK_SEQPACKET

    def __enter__(self) -> SocketObject:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def file(self) -> Socket:
        if self._fd < 0:
            raise _error(errno.EBADF)
        assert isinstance(self._file, Socket)
        return self._file

    def fileno(self) -> int:
        return self._fd

    def detach(self) -> int:
        fd, self._fd = self._fd, -1
        return fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self.detach())

    def setblocking(self, _yes: bool) -> None:
        if self._fd < 0:
            raise _error(errno.EBADF)

    def getsockname(self) -> str:
        return self.file.address

    def bind(self, path: str) -> None:
        process = _call("bind")
        path = resolve(process, path)
        if path in kernel.nodes:
            raise _refused(errno.EADDRINUSE)
        self.file.address = path
        kernel.make(path, st.S_IFSOCK | 0o600, process.uid, process.gid).listener = self.file

    def listen(self, backlog: int) -> None:
        process = _call("listen")
        self.file.queue, self.file.backlog = deque(), backlog
        self.file.owner = (process, process.uid, process.gid)

    def connect(self, path: str) -> None:
        process = _call("connect")
        kernel.connect(process, resolve(process, path), self.file)

    def accept(self) -> tuple[SocketObject, str]:
        process = _call("accept")
        if not self.file.queue:
            raise _refused(errno.EAGAIN)
        file = self.file.queue.popleft()
        if file.peer is not None:
            file.peer.accepted = kernel.now
        return SocketObject(fileno=process.install(file)), ""

    def send(self, data: bytes) -> int:
        return self.sendmsg([data])

    def sendmsg(self, buffers: list[bytes], ancillary: Any = ()) -> int:
        process = _call("send")
        file, data = self.file, b"".join(buffers)
        who, files = None, []
        for _, kind, content in ancillary:
            if kind == 2:
                who = _CREDENTIALS.unpack(content)
                if process.uid and (who[1] not in (process.real, process.uid, process.saved) or who[2] != process.gid):
                    raise _refused(errno.EPERM)
            else:
                files = [process.file(fd) for (fd,) in struct.iter_unpack("i", content)]
        kernel.say(file, data, process, files, who)
        return len(data)

    def recv(self, size: int, flags: int = 0) -> bytes:
        return bytes(self.recvmsg(size, 0, flags)[0])

    def recvmsg(self, size: int, space: int = 0, flags: int = 0) -> tuple[bytes, list[Any], int, None]:
        process = _call("peek" if flags & real_socket.MSG_PEEK else "receive")
        file = self.file
        if file.reset:
            file.reset = False
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        if not file.messages:
            if file.over:
                kernel.nothing()
                return b"", [], 0, None
            raise _refused(errno.EAGAIN)
        peek = bool(flags & real_socket.MSG_PEEK)
        message = file.messages[0] if peek else file.next()
        said: list[Any] = []
        if file.credentials and space >= real_socket.CMSG_SPACE(12):
            said.append((1, 2, _CREDENTIALS.pack(*message.credentials)))
            space -= real_socket.CMSG_SPACE(12)
        room = max(0, (space - real_socket.CMSG_LEN(0)) // 4)
        if message.files and room:
            installed = [process.install(one) for one in message.files[:room]]
            said.append((1, 1, struct.pack(f"{len(installed)}i", *installed)))
        if not peek:
            for one in message.files:
                one.drop()
        return message.data[:size], said, 0, None

    def setsockopt(self, level: int, option: int, value: int) -> None:
        _call("setsockopt")
        if option == real_socket.SO_PRIORITY:
            self.file.priority = value
        elif option == real_socket.SO_PASSCRED:
            self.file.credentials = bool(value)
        elif option == SO_PASSRIGHTS:
            raise _error(errno.ENOPROTOOPT)

    def getsockopt(self, level: int, option: int, size: int = 0) -> Any:
        process = _call("getsockopt")
        if option == real_socket.SO_PRIORITY:
            return self.file.priority
        if option == real_socket.SO_ACCEPTCONN:
            return int(self.file.queue is not None)
        if self.file.owner is None:
            raise _error(errno.ENODATA)
        other, uid, gid = self.file.owner
        if option == real_socket.SO_PEERCRED:
            return _CREDENTIALS.pack(0 if other.hidden else other.pid, uid, gid)
        if option == SO_PEERPIDFD:
            if other.gone:
                raise _error(errno.ESRCH)
            return struct.pack("i", process.install(PidFd(kernel, other)))
        raise _error(errno.ENOPROTOOPT)

    def shutdown(self, _how: int) -> None:
        _call("shutdown")
        file = self.file
        if file.peer is None:
            raise _refused(errno.ENOTCONN)
        file.peer.hang_up(False)
        file.hang_up(False)


class _Module:
    """Constants and pure functions of the real module; anything else has to be modelled."""

    real: Any
    pure: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.real, name)
        if name in self.pure or isinstance(value, int | str | bytes | type | tuple):
            self.__dict__[name] = value  # found without this the next time
            return value
        raise AttributeError(f"the world has no {self.real.__name__}.{name}")


class SocketModule(_Module):
    real = real_socket
    pure = ("CMSG_SPACE", "CMSG_LEN")
    socket = SocketObject

    def socketpair(self, family: int = 1, type: int = 5, proto: int = 0) -> tuple[SocketObject, SocketObject]:  # noqa: A002
        process = _call("socketpair")
        one, other = kernel.pair()
        one.owner = other.owner = (process, process.uid, process.gid)
        return SocketObject(fileno=process.install(one)), SocketObject(fileno=process.install(other))


# --- files -----------------------------------------------------------------------------------------------------------


def resolve(process: Process, path: Any, dir_fd: int | None = None) -> str:
    path = real_os.fsdecode(real_os.fspath(path))
    if dir_fd is not None and not path.startswith("/"):
        above = process.file(dir_fd)
        assert isinstance(above, Opened)
        path = f"{above.path}/{path}"
    if path.startswith("/proc/self/fd/"):
        number, _, rest = path.removeprefix("/proc/self/fd/").partition("/")
        file = process.file(int(number))
        assert isinstance(file, Opened)
        path = f"{file.path}/{rest}" if rest else file.path
    words = path.split("/")
    if path.startswith("/proc/") and len(words) > 3 and words[3] == "root":
        path = "/" + "/".join(words[4:])
    return _normal(path)


@functools.lru_cache(4096)
def _normal(path: str) -> str:
    return real_os.path.normpath(path).replace("//", "/")


def _node(path: str) -> Inode:
    node = kernel.nodes.get(path)
    if node is None:
        above = kernel.nodes.get(path.rpartition("/")[0] or "/")
        raise _refused(errno.ENOTDIR if above is not None and not st.S_ISDIR(above.mode) else errno.ENOENT)
    return node


def _on_disk(path: str) -> bool:
    return path.startswith("/var/")


def _writable(path: str) -> None:
    if kernel.disk in ("full", "read-only") and _on_disk(path):
        raise _error(errno.ENOSPC if kernel.disk == "full" else errno.EROFS)


def _proc(path: str) -> bytes | None:
    """What a file of /proc says; None: it is none."""
    words = path.split("/")
    if len(words) < 4 or words[1] != "proc":
        return None
    if words[2] == "self":
        if words[3] == "fdinfo":
            file = kernel.current.file(int(words[4]))
            pid = file.pid if isinstance(file, PidFd) else None
            return b"pos:\t0\n" + (b"" if pid is None else b"Pid:\t%d\n" % pid)
        words[2] = str(kernel.current.pid)
    if words[2] == "sys":
        return b"a-boot\n" if words[-1] == "boot_id" else None
    process = kernel.seen(int(words[2])) if words[2].isdigit() else None
    if process is None:
        raise _error(errno.ENOENT)
    what = words[3]
    if what == "stat":
        state = "T" if process.stopped else "S" if process.alive else "Z"
        parent = process.parent.pid if process.parent is not None else 0
        fields = [
            state,
            str(parent),
            *["0"] * 9,
            str(int(process.busy * 100)),
            *["0"] * 7,
            str(process.start),
            *["0"] * 25,
        ]
        return f"{process.pid} ({process.name[:15]}) {' '.join(fields)}\n".encode()
    if what == "status":
        uids = "\t".join(map(str, (process.real, process.uid, process.saved, process.uid)))
        gids = "\t".join([str(process.gid)] * 4)
        caught = sum(1 << number - 1 for number in process.handlers)
        rest = f"NSpid:\t{process.pid}\nSigCgt:\t{caught:016x}\n"
        return f"Name:\t{process.name}\nUid:\t{uids}\nGid:\t{gids}\n{rest}".encode()
    if not process.alive:
        return b""
    if what == "comm":
        return process.name[:15].encode() + b"\n"
    if what == "cmdline":
        return b"".join(word.encode() + b"\0" for word in process.command)
    if what == "environ":
        return b"".join(f"{key}={value}\0".encode() for key, value in process.environment.items())
    if what == "cgroup":
        return f"0::/user.slice/user-{process.slice}.slice\n".encode()
    raise _error(errno.ENOENT)


class _Written(io.BytesIO):
    """A file object."""

    def __init__(self, descriptor: int, data: bytes) -> None:
        super().__init__(data)
        self._descriptor = descriptor
        self.added = b""

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        os.write(self._descriptor, data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._descriptor)


def open_file(path: Any, mode: str = "r", buffering: int = -1, **_: Any) -> Any:
    """open()."""
    process = _call("open")
    kernel.nothing()
    if isinstance(path, int):
        return _Written(path, _data(process, path))
    name = real_os.fsdecode(real_os.fspath(path))
    said = _proc(name)
    if said is not None:
        return io.BytesIO(said) if "b" in mode else io.StringIO(said.decode())
    if name == real_os.devnull:
        return _Written(process.install(Opened(kernel, Inode(0, st.S_IFCHR | 0o666, 0, 0), name)), b"")
    fd = os.open(path, os.O_RDONLY)
    data = _data(process, fd)
    return _Written(fd, data) if "b" in mode else io.StringIO(data.decode())


def _data(process: Process, fd: int) -> bytes:
    file = process.file(fd)
    return bytes(file.node.data) if isinstance(file, Opened) else b""


class PathFunctions:
    """os.path."""

    def __getattr__(self, name: str) -> Any:
        if name in ("join", "dirname", "basename", "normpath", "abspath", "samestat"):
            return getattr(real_os.path, name)
        raise AttributeError(f"the world has no os.path.{name}")

    def lexists(self, path: Any) -> bool:
        process = _call("stat")
        return resolve(process, path) in kernel.nodes

    exists = lexists

    def realpath(self, path: Any) -> str:
        return resolve(kernel.current, path)

    def isdir(self, path: Any) -> bool:
        node = kernel.nodes.get(resolve(kernel.current, path))
        return node is not None and st.S_ISDIR(node.mode)


class OsModule(_Module):
    real = real_os
    pure = ("fspath", "fsencode", "fsdecode", "strerror", "sysconf", "waitstatus_to_exitcode")
    path = PathFunctions()

    @property
    def environ(self) -> dict[str, str]:
        return kernel.current.environment

    def getpid(self) -> int:
        return kernel.current.pid

    def geteuid(self) -> int:
        return kernel.current.uid

    getuid = geteuid

    def getegid(self) -> int:
        return kernel.current.gid

    def umask(self, _mask: int) -> int:
        return 0o22

    def set_inheritable(self, _fd: int, _yes: bool) -> None: ...

    def set_blocking(self, _fd: int, _yes: bool) -> None: ...

    def _exit(self, status: int) -> None:
        kernel.exit(kernel.current, status)
        raise Killed

    def close(self, fd: int) -> None:
        process = _call("close")
        process.file(fd)
        process.fds.pop(fd).drop()

    def dup(self, fd: int) -> int:
        process = _call("dup")
        return process.install(process.file(fd))

    def pidfd_open(self, pid: int) -> int:
        process = _call("pidfd_open")
        found = kernel.seen(pid)
        if found is None:
            raise _error(errno.ESRCH)
        return process.install(PidFd(kernel, found))

    def getpgid(self, pid: int) -> int:
        if kernel.seen(pid) is None:
            raise _error(errno.ESRCH)
        return pid

    def fstat(self, fd: int) -> Any:
        file = kernel.current.file(fd)
        if isinstance(file, Opened):
            return file.node.stat()
        kind = st.S_IFSOCK if isinstance(file, Socket) else 0
        return Inode(0, kind | 0o600, 0, 0).stat()

    def stat(self, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> Any:
        process = _call("stat")
        name = real_os.fsdecode(real_os.fspath(path))
        if name.startswith("/proc/") and "/ns/" in name:
            return Inode(4_026_531_836, st.S_IFREG | 0o444, 0, 0).stat()
        if name.startswith("/proc/") and name.count("/") == 2:
            found = kernel.seen(int(name[6:]))
            if found is None:
                raise _error(errno.ENOENT)
            return Inode(1, st.S_IFDIR | 0o555, found.uid, found.gid).stat()
        return _node(resolve(process, path, dir_fd)).stat()

    lstat = stat

    def open(self, path: Any, flags: int = 0, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        process = _call("open")
        name = resolve(process, path, dir_fd)
        node = kernel.nodes.get(name)
        if flags & (real_os.O_WRONLY | real_os.O_RDWR | real_os.O_CREAT):
            _writable(name)
        if node is not None and flags & real_os.O_EXCL:
            raise _refused(errno.EEXIST)
        if node is not None and not flags & real_os.O_TRUNC:
            kernel.nothing()
        if node is None and flags & real_os.O_CREAT:
            _node(name.rpartition("/")[0] or "/")
            node = kernel.make(name, st.S_IFREG | mode & 0o777, process.uid, process.gid)
        node = node or _node(name)
        if flags & real_os.O_DIRECTORY and not st.S_ISDIR(node.mode):
            raise _refused(errno.ENOTDIR)
        if flags & real_os.O_TRUNC:
            node.data.clear()
        return process.install(Opened(kernel, node, name, bool(flags & real_os.O_APPEND)))

    def _opened(self, fd: int) -> Opened:
        file = kernel.current.file(fd)
        if not isinstance(file, Opened):
            raise _error(errno.EINVAL)
        return file

    def read(self, fd: int, size: int) -> bytes:
        process = _call("read")
        found = process.file(fd)
        if isinstance(found, Notices):
            if not found.touched:
                raise _error(errno.EAGAIN)
            found.touched = False
            return b"\0" * 16
        file = self._opened(fd)
        data = bytes(file.node.data[file.position : file.position + size])
        file.position += len(data)
        return data

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        return bytes(self._opened(fd).node.data[offset : offset + size])

    def write(self, fd: int, data: Any) -> int:
        _call("write")
        file = self._opened(fd)
        _writable(file.path)
        if kernel.disk == "torn" and _on_disk(file.path):
            kernel.disk, data = "", bytes(data)[: len(data) // 2]
            file.node.data[file.position : file.position + len(data)] = data
            kernel.signal(kernel.current, 9)
            raise Killed
        at = len(file.node.data) if file.append else file.position
        file.node.data[at : at + len(data)] = data
        file.position = at + len(data)
        file.node.touch()
        return len(data)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        kernel.changed()
        self._opened(fd).node.data[offset : offset + len(data)] = data
        return len(data)

    def lseek(self, _fd: int, offset: int, _how: int) -> int:
        return offset

    def ftruncate(self, fd: int, size: int) -> None:
        kernel.changed()
        del self._opened(fd).node.data[size:]

    def fdopen(self, fd: int, _mode: str) -> Any:
        return _Written(fd, _data(kernel.current, fd))

    def fsync(self, _fd: int) -> None:
        _call("fsync")

    def fchmod(self, fd: int, mode: int) -> None:
        kernel.changed()
        node = self._opened(fd).node
        node.mode = st.S_IFMT(node.mode) | mode

    def chmod(self, path: Any, mode: int, *, dir_fd: int | None = None) -> None:
        kernel.changed()
        node = _node(resolve(kernel.current, path, dir_fd))
        node.mode = st.S_IFMT(node.mode) | mode

    def fchown(self, *_: Any) -> None: ...

    def kill(self, pid: int, number: int) -> None:
        _call("kill")
        found = kernel.seen(pid)
        if found is None:
            raise _error(errno.ESRCH)
        kernel.signal(found, number)

    def removexattr(self, *_: Any, **__: Any) -> None:
        raise _error(errno.ENODATA)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        process = _call("unlink")
        name = resolve(process, path, dir_fd)
        _node(name)
        kernel.remove(name)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        process = _call("mkdir")
        name = resolve(process, path, dir_fd)
        if name in kernel.nodes:
            raise _refused(errno.EEXIST)
        _node(name.rpartition("/")[0] or "/")
        kernel.make(name, st.S_IFDIR | mode, process.uid, process.gid)

    def rmdir(self, path: Any) -> None:
        process = _call("rmdir")
        name = resolve(process, path)
        _node(name)
        if kernel.names(name):
            raise _refused(errno.ENOTEMPTY)
        kernel.remove(name)

    def rename(self, old: Any, new: Any) -> None:
        process = _call("rename")
        _writable(resolve(process, new))
        node = _node(resolve(process, old))
        kernel.nodes.pop(resolve(process, old))
        kernel.nodes[resolve(process, new)] = node

    def listdir(self, path: Any) -> list[str]:
        process = _call("listdir")
        return kernel.names(resolve(process, path))

    @contextmanager
    def scandir(self, path: Any) -> Iterator[list[Any]]:
        yield [pathlib.PurePosixPath(one) for one in self.listdir(path)]

    def fstatvfs(self, _fd: int) -> Any:
        return real_os.statvfs_result((4096, 4096, 1000, 900, 900, 1000, 900, 900, 0, 255))

    statvfs = fstatvfs


class Path(pathlib.PurePosixPath):
    """pathlib.Path."""

    def stat(self, *, follow_symlinks: bool = True) -> Any:
        return os.stat(self)

    lstat = stat

    def exists(self) -> bool:
        return os.path.lexists(self)

    def is_dir(self) -> bool:
        return os.path.isdir(self)

    def is_symlink(self) -> bool:
        return False

    def absolute(self) -> Path:
        return self

    def resolve(self, strict: bool = False) -> Path:
        return self

    def readlink(self) -> Path:
        raise _error(errno.ENOENT)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            os.unlink(self)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        if parents and not self.parent.exists():
            self.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.mkdir(self, mode)
        except FileExistsError:
            if not exist_ok:
                raise

    def rmdir(self) -> None:
        os.rmdir(self)

    def chmod(self, mode: int) -> None:
        os.chmod(self, mode)

    def rename(self, target: Any) -> None:
        os.rename(self, target)

    def iterdir(self) -> list[Path]:
        if not self.exists():
            raise _error(errno.ENOENT)
        return [self / one for one in os.listdir(self)]

    def glob(self, pattern: str) -> list[Path]:
        return sorted(one for one in (self / name for name in os.listdir(self)) if one.match(pattern))

    def read_bytes(self) -> bytes:
        with open_file(self, "rb") as file:
            return bytes(file.read())

    def read_text(self, *_: Any, **__: Any) -> str:
        return self.read_bytes().decode()


class InotifyObject:
    """asyncinotify.Inotify."""

    def __init__(self) -> None:
        self._file = Notices(kernel)
        self.fd = kernel.current.install(self._file)

    def add_watch(self, path: Any, _mask: Any) -> None:
        node = _node(resolve(kernel.current, path))
        node.watches.append(self._file)
        self._file.watched.append(node)

    def close(self) -> None:
        os.close(self.fd)


# --- the rest --------------------------------------------------------------------------------------------------------


class Poll:
    """select.poll, for a look without waiting."""

    def __init__(self) -> None:
        self._registered: list[tuple[int, int]] = []

    def register(self, what: Any, mask: int = 1) -> None:
        self._registered.append((what if isinstance(what, int) else what.fileno(), mask))

    def poll(self, _timeout: float | None = None) -> list[tuple[int, int]]:
        process, found = _call("poll"), []
        for fd, mask in self._registered:
            file = process.file(fd)
            gone = isinstance(file, Socket) and file.over
            if gone or (mask & real_select.POLLIN and file.readable()):
                found.append((fd, real_select.POLLIN))
        return found


class SelectModule(_Module):
    real = real_select
    poll = Poll


class FcntlModule(_Module):
    real = real_fcntl

    def ioctl(self, fd: int, what: int, buffer: Any = 0) -> Any:
        process = _call("ioctl")
        file = process.file(fd)
        if isinstance(file, Socket) and what in (termios.FIONREAD, termios.TIOCOUTQ):
            one = file if what == termios.FIONREAD else file.peer
            buffer[0] = sum(len(message.data) for message in one.messages) if one is not None else 0
            return 0
        raise _error(errno.ENOTTY)

    def flock(self, fd: int, _how: int) -> None:
        process = _call("flock")
        file = process.file(fd)
        assert isinstance(file, Opened)
        if file.node.locked not in (None, file):
            raise _error(errno.EAGAIN)
        file.node.locked = file


class TimeModule(_Module):
    real = real_time
    pure = ("strftime", "gmtime")

    def monotonic(self) -> float:
        return kernel.now

    def monotonic_ns(self) -> int:
        return int(kernel.now * 1e9)

    def time(self) -> float:
        return kernel.now + kernel.wall

    def time_ns(self) -> int:
        return int(self.time() * 1e9)

    def clock_gettime(self, _clock: int) -> float:
        return kernel.now


class SignalModule(_Module):
    real = real_signal

    def pidfd_send_signal(self, fd: int, number: int) -> None:
        process = _call("kill")
        file = process.file(fd)
        assert isinstance(file, PidFd)
        if file.process.ended:
            raise _refused(errno.ESRCH)
        kernel.sends(file.process, int(number))
        kernel.signal(file.process, int(number))


class ResourceModule(_Module):
    import resource as real

    def prlimit(self, *_: Any) -> Any:
        raise _error(errno.EPERM)

    def getrlimit(self, _which: int) -> tuple[int, int]:
        return 16384, 524288


class PsutilModule(_Module):
    real = real_psutil

    def pids(self) -> list[int]:
        return sorted(int(name) for name in os.listdir("/proc"))

    class Process:
        def __init__(self, pid: int) -> None:
            try:
                self._fields = open_file(f"/proc/{pid}/stat", "rb").read().rpartition(b")")[2].split()
            except OSError:
                raise real_psutil.NoSuchProcess(pid) from None

        def status(self) -> str:
            return real_psutil.STATUS_STOPPED if self._fields[0] == b"T" else real_psutil.STATUS_SLEEPING

        def ppid(self) -> int:
            return int(self._fields[1])

        def cpu_times(self) -> Any:
            return SimpleNamespace(user=int(self._fields[11]) / 100, system=0.0)


class ShutilModule(_Module):
    import shutil as real

    def which(self, *_: Any, **__: Any) -> str | None:
        """NVIDIA's program is not where the agent would ask it what it can do."""
        return None


class AccountsModule(_Module):
    """pwd and grp: nobody is known; users' names are ``World.others``'s."""

    import pwd as real

    def unknown(self, *_: Any) -> Any:
        raise KeyError

    getpwnam = getpwuid = getgrnam = getgrgid = unknown


async def in_thread(function: Callable[..., Any], *arguments: object, deadline: float, slots: object = None) -> Any:
    """threads.in_thread: the call takes a while, in which others run; where threads are slow seconds, or too long."""
    takes = kernel.chance.expovariate(1 / 0.0005)
    if kernel.disk == "slow":
        takes = kernel.chance.uniform(0.5, SLOWEST)
    await asyncio.sleep(min(takes, deadline))
    if takes > deadline:
        raise TimeoutError
    return function(*arguments)


SLOWEST = 9.0
"""Seconds: more than what the agent waits for its own files, and less than the 10 s that the policy has to be read. An
agent that starts and cannot read it admits nobody (docs/measured/world.md)."""


class _NoThreads:
    """threading, for the agent's store: its thread runs when it is told that there is something to write."""

    class Thread:
        def __init__(self, target: Callable[[], None], **_: Any) -> None:
            self.target, self.owner, self.due = target, kernel.current, False
            _NoThreads.made[kernel.current.pid] = self

        def start(self) -> None: ...

        def join(self, _timeout: float) -> None: ...

        def run(self) -> None:
            self.due = False
            if self.owner.alive and not self.owner.do(self._work):
                self.soon()

        def _work(self) -> None:
            with suppress(_Waits):
                self.target()

        def soon(self) -> None:
            if not self.due:
                self.due = True
                slow = kernel.disk == "slow"
                kernel.after(
                    kernel.chance.uniform(0.5, SLOWEST) if slow else kernel.chance.uniform(0.0005, 0.01), self.run
                )

    class Condition:
        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

        def wait(self, _timeout: float | None = None) -> None:
            raise _Waits

        def notify_all(self) -> None:
            thread = _NoThreads.made.get(kernel.current.pid)
            if thread is not None and thread.owner is kernel.current:
                thread.soon()

    made: ClassVar[dict[int, Any]] = {}


class _Waits(BaseException):
    """The thread waits."""


os = OsModule()
socket = SocketModule()
fcntl = FcntlModule()
select = SelectModule()
time = TimeModule()
signal = SignalModule()
resource = ResourceModule()

STANDS_FOR: dict[Any, Any] = {
    real_os: os, real_socket: socket, real_fcntl: fcntl, real_select: select, real_time: time, real_signal: signal,
    ResourceModule.real: resource, ShutilModule.real: ShutilModule(), AccountsModule.real: AccountsModule(),
    real_grp: AccountsModule(), pathlib.Path: Path, real_psutil: PsutilModule(),
}  # fmt: skip
REAL = ("linux", "gate", "agent", "system", "wire", "api")
"""Layers of mpsagent that reach the outside. The layers below them do not."""


@functools.cache
def _doors() -> list[tuple[dict[str, Any], str, Any]]:
    """Every name in the rooms `REAL` that leads to the outside, and its stand-in in a world."""
    found: list[tuple[dict[str, Any], str, Any]] = []
    for module in [one for name, one in sorted(sys.modules.items()) if name.startswith("mpsagent.")]:
        if module.__name__.split(".")[1] not in REAL:
            continue
        names = vars(module)
        for name, value in names.items():
            by_name = {"in_thread": in_thread, "Inotify": InotifyObject}.get(name)
            if by_name is not None:
                found.append((names, name, by_name))
            elif isinstance(value, ModuleType | type) and (stand_in := STANDS_FOR.get(value)) is not None:
                found.append((names, name, stand_in))
        found.append((names, "open", open_file))
    return found


@contextmanager
def opened(world: Kernel, others: dict[tuple[str, str], Any]) -> Iterator[None]:
    """The doors lead into this world. ``others``: what else stands there, by module and name."""
    global kernel
    kernel = world
    _NoThreads.made.clear()
    there = [*_doors(), *((vars(sys.modules[module]), name, what) for (module, name), what in others.items())]
    before = [(names, name, names.get(name, _Waits)) for names, name, _ in there]
    for names, name, what in there:
        names[name] = what
    try:
        yield
    finally:
        for names, name, value in reversed(before):
            if value is _Waits:
                names.pop(name, None)
            else:
                names[name] = value
