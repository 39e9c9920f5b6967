"""The simulated processes on each simulated GPU, as NVML would report them. `mpsagent-sim --help` has the files.

The file of a process that has exited is stale; `processes()` skips it. A server also writes
`<machine ordinal>.busy.<pid>`, which remains: the seconds in which a kernel ran there, and the start of the present
kernel (monotonic), or 0.
"""

# pathlib and contextlib cost more than everything else in the start of a front-end or client
# ruff: noqa: PTH102, PTH104, PTH108, PTH112, PTH118, PTH120, PTH208, SIM105

import fcntl
import os
import struct

DEFAULT = "/tmp/mpsagent-sim-processes"


def directory() -> str:
    return os.environ.get("MPSSIM_REGISTRY") or DEFAULT


def start_time(pid: int) -> str | None:
    """Return field 22 of /proc/PID/stat; None if there is no such process or it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def _lock(kind: int, at: int) -> bytes:
    """`struct flock` for one byte."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, at, 1, 0)


def _device() -> int:
    return os.open(os.path.join(os.path.dirname(directory()), "dev/nvidia-uvm"), os.O_RDWR | os.O_CLOEXEC)


def open_device() -> None:
    """Open the device as a CUDA program does when it begins: `dev/nvidia-uvm` next to the directory is its file.
    Its byte with the number of the process is locked until the last duplicate of the descriptor is closed, as the
    driver keeps the memory of a process until then."""
    try:
        fcntl.fcntl(_device(), fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, os.getpid()))
    except OSError:
        pass


def is_open(pid: int) -> bool:
    """Return whether the device is open by a process, or by another process with duplicates of its descriptors."""
    try:
        fd = _device()
    except OSError:
        return False
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, pid))
        return int(struct.unpack("hhqqi4x", found)[0]) != fcntl.F_UNLCK
    except OSError:
        return False
    finally:
        os.close(fd)


class Entry:
    """This process's own entries, one per device."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.paths: dict[int, str] = {}

    def write(self, ordinal: int, mebibytes: int) -> None:
        """Write the process's file. Errors are ignored: a CUDA program does not fail because of them."""
        pid = os.getpid()
        try:
            if not os.path.isdir(directory()):
                old = os.umask(0)
                try:
                    os.mkdir(directory(), 0o1777)
                finally:
                    os.umask(old)
            path = f"{directory()}/{ordinal}.{pid}"
            with open(f"{path}.new", "w") as file:
                file.write(f"{self.kind} {os.getuid()} {mebibytes} {start_time(pid)}\n")
            os.rename(f"{path}.new", path)  # who reads it meanwhile must not miss this process
            self.paths[ordinal] = path
        except OSError:
            pass

    def remove(self) -> None:
        for path in self.paths.values():
            try:
                os.unlink(path)
            except OSError:
                pass
        self.paths.clear()


class Busy:
    """In which seconds a kernel runs on a device, as NVML would charge this server with them."""

    def __init__(self, ordinal: int) -> None:
        self.path = f"{directory()}/{ordinal}.busy.{os.getpid()}"
        self.seconds = self.since = 0.0
        self.written: tuple[float, float] = (0.0, 0.0)

    def note(self, now: float, busy: bool) -> bool:
        """True: there is something to write."""
        if busy and not self.since:
            self.since = now
        elif self.since and not busy:
            self.seconds, self.since = self.seconds + now - self.since, 0.0
        return (self.seconds, self.since) != self.written

    def write(self) -> None:
        if self.written == (self.seconds, self.since):
            return
        self.written = self.seconds, self.since
        try:
            with open(f"{self.path}.new", "w") as file:
                file.write(f"{self.seconds:.6f} {self.since:.6f}\n")
            os.rename(f"{self.path}.new", self.path)
        except OSError:
            pass


def processes(ordinal: int) -> list[tuple[int, str, int, int]]:
    """(pid, kind, uid, MiB) of every living process on the device."""
    found = []
    try:
        names = os.listdir(directory())
    except OSError:
        return []
    for name in names:
        device, _, pid = name.partition(".")
        if device != str(ordinal) or not pid.isdigit():
            continue
        try:
            with open(f"{directory()}/{name}") as file:
                kind, uid, mebibytes, started = file.read(200).split()
        except (OSError, ValueError):
            continue
        if start_time(int(pid)) == started:
            found.append((int(pid), kind, int(uid), int(mebibytes)))
    return sorted(found)


def exclusive(ordinal: int) -> bool:
    """Return True if the device's compute mode is EXCLUSIVE_PROCESS."""
    try:
        with open(f"{directory()}/{ordinal}.compute_mode") as file:
            return file.read(100).strip() == "EXCLUSIVE_PROCESS"
    except OSError:
        return False
