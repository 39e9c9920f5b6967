"""What a process shows of itself, read without rights over its owner's files."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpsagent.linux.proc import start_time
from mpsagent.system.outsider import Shown, environment_of, facts, lifts


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


@pytest.mark.parametrize(
    ("switch", "percentage", "right"),
    [
        *((one, None, True) for one in ("1", "01", " 1")),
        *((one, None, False) for one in (None, "0", "", "2", "yes", "true", "no", "10")),
        *(("1", one, False) for one in ("0.04", "5", "010", "10x", "1e1", " 10", "+10", "10.", "50", "99.9")),
        *(("1", one, True) for one in ("100", "100.0", "150", "0", "", "-5", "x")),
        *(("1", one, True) for one in ("99.99999999999999", "1e-300", "99." + "0" * 99 + "e9", "nan", "inf")),
        ("0", "100", False),
    ],
)
def test_who_is_held_to_no_thread_limit(switch: str | None, percentage: str | None, right: bool) -> None:
    """The first lines as MPS was seen to read them, then what is no safe number."""
    names = ("CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    given = {name: value for name, value in zip(names, (switch, percentage), strict=True) if value is not None}
    with sleeper({"A": "1", **given}) as process:
        start = start_time(process.pid) or 0
        found = lifts([(process.pid, start), (process.pid, start + 1)], ())
        assert found == [(right, None), (False, None)]


UUID = "GPU-513e171f-4520-0894-ba89-06b9f5c1d7b8"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *((one, None) for one in (None, "", "0=2G", "0=100G", "0=700M", f"{UUID}=2G")),
        *((one, one) for one in ("x", "7=4G", "0=2G,1=4G", "0=2G,7=1G", f"{UUID[:-1]}9=4G", "0=", "=2G", ",")),
        ("x\x1b[31m\n" + "y" * 100, "x?[31m?" + "y" * 53),
    ],
)
def test_who_is_held_to_no_memory_limit(text: str | None, shown: str | None) -> None:
    """Recording 11, E1; and no control character of a process's comes out."""
    given = {} if text is None else {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": text}
    with sleeper({"A": "1", **given}) as process:
        start = start_time(process.pid) or 0
        found = lifts([(process.pid, start), (process.pid, start + 1)], ("0", UUID))
        assert found == [(False, shown), (False, None)]
