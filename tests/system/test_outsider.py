"""What a process shows of itself, read without rights over its owner's files."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpsagent.system.outsider import Shown, environment_of, facts
from mpsagent.system.processes import start_time


@contextmanager
def sleeper(environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose memory is its program's: Popen comes back when the kernel has begun with that."""
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        try:
            deadline = time.monotonic() + 30
            while not Path(f"/proc/{process.pid}/environ").read_bytes() and time.monotonic() < deadline:
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


def test_its_command_environment_and_age(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as public:
        public.bind(f"{tmp_path}/control")
        environment = {"A": "1", "CUDA_MPS_PIPE_DIRECTORY": "/elsewhere"}
        with sleeper(environment) as process:
            start = start_time(process.pid) or 0
            (shown,) = facts([(process.pid, start)], str(tmp_path))
            assert (shown.command, shown.directory, shown.reaches) == ("sleep 600", "/elsewhere", True)
            assert shown.began is not None
            assert environment_of(process.pid) == b"A=1\0CUDA_MPS_PIPE_DIRECTORY=/elsewhere\0"
            assert facts([(process.pid, start + 1)], str(tmp_path)) == [Shown()], "another one with its number"
        assert facts([(process.pid, start)], str(tmp_path)) == [Shown()]


def test_without_a_variable_it_is_empty_and_without_a_socket_it_is_not_known(tmp_path: Path) -> None:
    with sleeper({"A": "1"}) as process:
        (shown,) = facts([(process.pid, start_time(process.pid) or 0)], str(tmp_path))
        assert (shown.directory, shown.reaches) == ("", None)
    assert environment_of(os.getpid()) is not None
