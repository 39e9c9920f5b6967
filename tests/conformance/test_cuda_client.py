"""The CUDA client in Python against a stand-in for the driver library: modes, output lines, exit statuses, signals.

The kernels' text itself needs a real driver; campaigns/ run it there.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CLIENT = HERE / "cuda_client.py"
COMPILER = shutil.which("cc") or shutil.which("gcc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler for the stand-in library")
HEAD = ["cuInit CUDA_SUCCESS", "ctx CUDA_SUCCESS", "devices 1 using GPU-a0a1a2a3",
        "sms 132 meminfo CUDA_SUCCESS free 142565 MiB total 143155 MiB"]  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda")
    assert COMPILER
    source = HERE / "stand_in_libcuda.c"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    return folder


def start(library: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-S", "-E", str(CLIENT), *arguments]
    return subprocess.Popen(
        command, stdout=-1, stderr=-1, text=True, env={"LD_LIBRARY_PATH": str(library), **environment}
    )


def said(output: str) -> list[str]:
    """The texts of the lines, each with its prefix checked and without the times."""
    texts = []
    for line in output.splitlines():
        match = re.fullmatch(r"\[ *\d+\.\d{3} pid \d+ uid \d+\] (.*)", line)
        assert match, line
        texts.append(re.sub(r"after \d+\.\d{3} s", "after T", re.sub(r"done \d+ it", "done N it", match[1])))
    return texts


@needs_compiler
@pytest.mark.parametrize(
    ("arguments", "status", "texts"),
    [
        ([], 0, HEAD),
        (["query"], 0, HEAD),
        (["alloc", "100"], 0, [*HEAD, "cuMemAlloc 100 MiB: CUDA_SUCCESS"]),
        (["alloc", "20000", "0"], 13, [*HEAD, "cuMemAlloc 20000 MiB: CUDA_ERROR_OUT_OF_MEMORY"]),
        (["sleep", "0.1"], 0, [*HEAD, "done N iterations, last CUDA_SUCCESS"]),
        (["spin", "0.05"], 0, [*HEAD, "launch cudaSuccess", "sync CUDA_SUCCESS after T"]),
        (["oob", "0"], 17, [*HEAD, "oob launch cudaSuccess", "oob sync CUDA_ERROR_ILLEGAL_ADDRESS"]),
        (["work", "3"], 0, [*HEAD, "done N iterations, last CUDA_SUCCESS"]),
        (["init", "0"], 0, HEAD[:1]),
        (["two", "0"], 0, [*HEAD, "second ctx CUDA_SUCCESS"]),
        (["contexts", "3", "0"], 0, [*HEAD, "made 3 contexts, last CUDA_SUCCESS"]),
        (["unheard-of"], 99, HEAD),
        (["sleep", "long"], 99, ["arguments must be numbers: long"]),
    ],
)
def test_modes(library: Path, arguments: list[str], status: int, texts: list[str]) -> None:
    """The lines and statuses that the scenarios, the benchmarks and the simulator's client have in common."""
    client = start(library, *arguments)
    output, errors = client.communicate(timeout=60)
    assert (said(output), client.returncode, errors) == (texts, status, "")


@needs_compiler
def test_a_device_that_is_not_there(library: Path) -> None:
    client = start(library, "query", DEV="3")
    assert said(client.communicate(timeout=60)[0])[-1] == "cuDeviceGet CUDA_ERROR_INVALID_DEVICE"
    assert client.returncode == 11


def test_without_the_library_it_says_so(tmp_path: Path) -> None:
    client = start(tmp_path, "query")
    output = client.communicate(timeout=60)[0]
    if client.returncode == 98:
        assert "libcuda.so.1 cannot be loaded" in output
    else:
        pytest.skip("this machine has a CUDA driver")


@needs_compiler
def test_one_context_for_another(library: Path) -> None:
    client = start(library, "contexts", "3", "600")
    assert client.stdout
    while "made 3" not in client.stdout.readline():
        time.sleep(0.001)
    client.send_signal(signal.SIGUSR1)
    line = client.stdout.readline()
    client.kill()
    assert "works everywhere CUDA_SUCCESS, another ctx CUDA_SUCCESS, works CUDA_SUCCESS" in line
    client.communicate()


@needs_compiler
@pytest.mark.parametrize(
    ("option", "number", "status"),
    [
        ([], signal.SIGTERM, -signal.SIGTERM),
        ([], signal.SIGINT, -signal.SIGINT),
        (["--ignore-term"], signal.SIGTERM, 0),
    ],
)
def test_signals_end_it_as_they_end_a_program_in_c(
    library: Path, option: list[str], number: signal.Signals, status: int
) -> None:
    """Python would turn SIGINT into an exception and run on for a while; the ladder is tested with --ignore-term."""
    client = start(library, "sleep", "1", *option)
    assert client.stdout
    while "sms" not in client.stdout.readline():
        time.sleep(0.001)
    client.send_signal(number)
    client.communicate(timeout=60)
    assert client.returncode == status
