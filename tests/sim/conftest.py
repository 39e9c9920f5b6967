"""A simulated MPS in a directory of its own: real daemon, real servers, real clients under other users' ids."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsagent_sim import cli, registry

A, B, C = 20001, 20002, 20003
PATIENCE = 60.0
_STAMP = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (\w+) +(\d+)\] ")


class Client:
    """A running cuda-client; its output goes to a file so that nothing can block on a pipe."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process = process
        self.output = output

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self) -> str:
        return self.output.read_text()

    def saw(self, pattern: str) -> re.Match[str]:
        """Wait until the output matches."""
        end = time.monotonic() + PATIENCE
        while (found := re.search(pattern, self.text())) is None:
            assert time.monotonic() < end, f"no {pattern!r} in {self.text()!r}"
            time.sleep(0.01)
        return found

    def end(self) -> int:
        return self.process.wait(PATIENCE)

    def sms(self) -> int:
        return int(self.saw(r"sms (\d+)")[1])

    def free(self) -> int:
        return int(self.saw(r"free (\d+) MiB")[1])


class Mps:
    def __init__(self, programs: Path, directory: Path) -> None:
        self.programs, self.directory = programs, directory
        self.pipe, self.logs = directory / "pipe", directory / "log"
        self.processes = directory / "processes"
        self.clients: list[Client] = []
        self.daemons: list[int] = []  # pidfds: a pid may be another process's by the time of the clean-up
        self.environment = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.logs),
            "MPSSIM_REGISTRY": str(self.processes),
            "MPSSIM_SEED": "1",
        }

    def program(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.programs / "nvidia-cuda-mps-control"), *arguments],
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def start(self, *options: str, **environment: str) -> int:
        """`nvidia-cuda-mps-control -d`; answers the daemon's pid."""
        started = self.program("-d", *options, **environment)
        assert (started.returncode, started.stdout, started.stderr) == (0, "", "")
        return self.watch(int((self.pipe / "nvidia-cuda-mps-control.pid").read_text()))

    def watch(self, pid: int) -> int:
        """Have this daemon killed in the end, if it is still there."""
        self.daemons.append(os.pidfd_open(pid))
        return pid

    def run(self, commands: str, uid: int = 0, timeout: float = PATIENCE) -> tuple[int, str, str]:
        """One run of the front-end: exit status, output, errors. Raises TimeoutExpired (and kills it)."""
        done = subprocess.run(
            [str(self.programs / "nvidia-cuda-mps-control")],
            input=commands + "\n",
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            **({"user": uid, "group": uid, "extra_groups": []} if uid else {}),  # type: ignore[call-overload]
        )
        return done.returncode, done.stdout, done.stderr

    def ctl(self, commands: str, uid: int = 0) -> str:
        status, output, errors = self.run(commands, uid)
        assert (status, errors) == (0, "")
        return output

    def front_end(self, commands: str) -> subprocess.Popen[bytes]:
        """A front-end that is left running."""
        process = subprocess.Popen(
            [str(self.programs / "nvidia-cuda-mps-control")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self.environment,
        )
        assert process.stdin is not None
        process.stdin.write(commands.encode() + b"\n")
        process.stdin.close()
        return process

    def client(self, uid: int, *arguments: str, **environment: str) -> Client:
        output = self.directory / f"client{len(self.clients)}"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [str(self.programs / "cuda-client"), *arguments],
                env=self.environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                **({"user": uid, "group": uid, "extra_groups": []} if uid else {}),  # type: ignore[call-overload]
            )
        self.clients.append(Client(process, output))
        return self.clients[-1]

    def busy(self, uid: int, *arguments: str, **environment: str) -> Client:
        """A client that has its context and is at work."""
        client = self.client(uid, *arguments, **environment)
        client.saw(r"launch cudaSuccess" if arguments[0] in ("spin", "train") else r"meminfo")
        return client

    def log(self, name: str) -> str:
        return (self.logs / name).read_text()

    def saw(self, name: str, pattern: str, after: int = 0) -> re.Match[str]:
        """Wait until the log matches, from byte `after` on."""
        end = time.monotonic() + PATIENCE
        while (found := re.search(pattern, self.log(name)[after:])) is None:
            assert time.monotonic() < end, f"no {pattern!r} in {name}:\n{self.log(name)[after:]}"
            time.sleep(0.005)
        return found

    def server(self) -> int:
        return int(self.ctl("get_server_list"))

    def server_process(self) -> int:
        """The server by the log, without asking the daemon."""
        return int(self.saw("control.log", r"NEW SERVER (\d+): Ready")[1])

    def clean_up(self) -> None:
        for client in self.clients:
            with contextlib.suppress(ProcessLookupError):
                client.process.kill()
            client.process.wait()
        for pidfd in self.daemons:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        # servers follow their daemon, but for a stopped one
        for path in self.processes.glob("*.*"):
            pid = path.name.partition(".")[2]
            with contextlib.suppress(OSError, ValueError, IndexError):
                pidfd = os.pidfd_open(int(pid))
                if registry.start_time(int(pid)) == path.read_text().split()[3]:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)


def messages(text: str) -> list[str]:
    """Log lines without their time stamps."""
    return [_STAMP.sub("", line) for line in text.splitlines()]


@pytest.fixture(scope="session")
def programs() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="mpssim-", dir="/tmp"))
    directory.chmod(0o755)
    cli.install(directory, gpus=1)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def mps(programs: Path) -> Iterator[Mps]:
    """Not started yet: `mps.start()`. The directory is short enough for socket names and open to other users."""
    if os.geteuid() != 0:
        pytest.skip("clients of several users need root")
    directory = Path(tempfile.mkdtemp(prefix="mpssim-", dir="/tmp"))
    directory.chmod(0o755)
    processes = directory / "processes"
    processes.mkdir()
    processes.chmod(0o1777)
    instance = Mps(programs, directory)
    yield instance
    instance.clean_up()
    shutil.rmtree(directory, ignore_errors=True)
