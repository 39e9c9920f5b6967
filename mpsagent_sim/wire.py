"""Messages between daemon, servers and clients of the simulator after the rendezvous, and the log writer.

NVIDIA's messages at the control socket are in `rendezvous`. After them the simulator has a line protocol: a server
answers the orders of its daemon, and a client sends its server, after the handshake,
    NAME name               what it is called, in hexadecimal digits
"""

import _socket
import os
import time

from mpsagent_sim import rendezvous

PIPE_DIRECTORY = "/tmp/nvidia-mps"
LOG_DIRECTORY = "/var/log/nvidia-mps"
MAX_LINE = 65536
MESSAGE = 131072


def directories() -> tuple[str, str]:
    """Pipe and log directory as the environment says."""
    return (
        os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or PIPE_DIRECTORY,
        os.environ.get("CUDA_MPS_LOG_DIRECTORY") or LOG_DIRECTORY,
    )


class Lines:
    """Lines out of a socket, with the file descriptors that came along."""

    __slots__ = ("buffer", "connection", "ended", "fds")

    def __init__(self, connection: _socket.socket) -> None:
        self.connection = connection
        self.buffer = b""
        self.ended = False
        self.fds: list[int] = []

    def read(self) -> None:
        """Read once (blocking if there is no data). A reset counts as the end."""
        try:
            data, ancillary, _, _ = self.connection.recvmsg(MESSAGE, 256)
        except (InterruptedError, ConnectionResetError):  # reported once, before the data
            return
        except OSError:
            self.ended = True
            return
        self.fds += rendezvous.came_along(ancillary, _socket.SCM_RIGHTS)
        if not data:
            self.ended = True
        self.buffer += data
        if len(self.buffer) > MAX_LINE and b"\n" not in self.buffer:
            self.ended = True

    def pop(self) -> str | None:
        """The next complete line, without its newline; None when there is none yet."""
        line, newline, rest = self.buffer.partition(b"\n")
        if not newline:
            return None
        self.buffer = rest
        return line.decode("utf-8", "replace")

    def wait(self) -> str | None:
        """The next line, waiting for it; None at the end of the stream."""
        while True:
            line = self.pop()
            if line is not None:
                return line
            if self.ended:
                return None
            self.read()


def send(connection: _socket.socket, line: str, fd: int | None = None) -> bool:
    """Send a line, with a descriptor if one is given. Return False if the connection is closed."""
    data = line.encode() + b"\n"
    try:
        if fd is None:
            connection.sendall(data)
        else:
            return rendezvous.send(connection, data, fd)  # a message goes out whole
    except OSError:
        return False
    return True


class Log:
    """A log file opened once for append, as MPS does; in foreground mode it is standard output."""

    __slots__ = ("fd", "pid", "tag")

    def __init__(self, fd: int, tag: str) -> None:
        self.fd = fd
        self.tag = tag
        self.pid = os.getpid()

    def write(self, *lines: str) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now)) + f".{int(now * 1000) % 1000:03d}"
        prefix = f"[{stamp} {self.tag} {self.pid:5d}] "
        os.write(self.fd, "".join(f"{prefix}{line}\n" for line in lines).encode())
