"""Messages between daemon, servers and clients of the simulator after the rendezvous, and the log writer.

NVIDIA's messages at the control socket are in `rendezvous`. After them each packet of the simulator is a line of text.
A server answers the orders of its daemon, and a client sends its server, after the handshake,
    NAME name               what it is called, in hexadecimal digits
"""

from __future__ import annotations

import os
import time

PIPE_DIRECTORY = "/tmp/nvidia-mps"
LOG_DIRECTORY = "/var/log/nvidia-mps"
MESSAGE = 131072


def directories() -> tuple[str, str]:
    """Pipe and log directory as the environment says."""
    return (
        os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or PIPE_DIRECTORY,
        os.environ.get("CUDA_MPS_LOG_DIRECTORY") or LOG_DIRECTORY,
    )


def text(data: bytes) -> str:
    """Return the line in a packet, without its newline: an empty answer has one, because an empty packet is the end."""
    return data.decode("utf-8", "replace").removesuffix("\n")


class Log:
    """A log file opened once for append, as MPS does; in foreground mode it is standard output."""

    __slots__ = ("file", "pid", "tag")

    def __init__(self, file: int, tag: str, pid: int) -> None:
        self.file = file
        self.tag = tag
        self.pid = pid

    def of(self, tag: str, pid: int) -> Log:
        """Return the same file for the lines of another program."""
        return type(self)(self.file, tag, pid)

    def write(self, *lines: str) -> None:
        now, local = self._clock()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", local) + f".{int(now * 1000) % 1000:03d}"
        prefix = f"[{stamp} {self.tag} {self.pid:5d}] "
        self._append("".join(f"{prefix}{line}\n" for line in lines).encode())

    def _clock(self) -> tuple[float, time.struct_time]:
        now = time.time()
        return now, time.localtime(now)

    def _append(self, data: bytes) -> None:
        os.write(self.file, data)
