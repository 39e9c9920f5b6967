"""The control daemon's files: directories, lock, sockets, FIFO, pid file and logs, with the recorded modes (01 S1)."""

import _socket
import contextlib
import fcntl
import os

from mpsagent_sim import texts, wire

# ruff: noqa: PTH101, PTH103, PTH108, PTH112


class AlreadyRunning(Exception):
    """Another daemon holds this pipe directory."""


class Files:
    def __init__(self) -> None:
        self.pipe, self.logs = wire.directories()

    def open(self, foreground: bool) -> tuple[int, int]:
        """Take the lock and open the logs for append: descriptors of server log and control log.

        In the foreground both go to standard output, and there are no files. Raises AlreadyRunning, OSError.
        """
        old = os.umask(0)
        for directory in (self.pipe, self.logs):
            if not os.path.isdir(directory):
                os.makedirs(directory, 0o777)
        server_log = 1 if foreground else self._append("server.log")
        self.lock = os.open(f"{self.pipe}/control_lock", os.O_RDWR | os.O_CREAT, 0o666)
        os.umask(old)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            wire.Log(server_log, "Other", os.getpid()).write(texts.LOG_DIRECTORY.format(directory=self.logs))
            raise AlreadyRunning from error
        return server_log, 1 if foreground else self._append("control.log")

    def listen(self) -> list[_socket.socket]:
        """Sockets, FIFO and pid file, over whatever an earlier daemon left behind."""
        old = os.umask(0)
        listeners = [self._listen("control", 0o666), self._listen("control_privileged", 0o755)]
        self._remove("log")
        os.mkfifo(f"{self.pipe}/log", 0o777)
        self._remove("nvidia-cuda-mps-control.pid")
        pid_file = os.open(f"{self.pipe}/nvidia-cuda-mps-control.pid", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        os.write(pid_file, str(os.getpid()).encode())
        os.close(pid_file)
        os.umask(old)
        return listeners

    def leave(self) -> None:
        """Remove the files that an orderly exit removes. Sockets and lock remain."""
        self._remove("log")
        self._remove("nvidia-cuda-mps-control.pid")

    def _append(self, name: str) -> int:
        return os.open(f"{self.logs}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.pipe}/{name}")

    def _listen(self, name: str, mode: int) -> _socket.socket:
        self._remove(name)
        listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        listener.bind(f"{self.pipe}/{name}")
        os.chmod(f"{self.pipe}/{name}", mode)
        listener.listen(128)
        return listener
