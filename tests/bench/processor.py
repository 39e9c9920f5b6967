"""The kernels of the benchmark on the processor: kernels.cu compiled as C++, and as much of a GPU as workloads need.

The kernels are plain loops without shared memory and barriers, so threads may as well run one after the other.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import mpsagent_bench

SOURCE = Path(mpsagent_bench.__file__).with_name("kernels.cu")
_HEAD = """\
#include <math.h>
struct Three { unsigned x; };
static Three blockIdx, blockDim, threadIdx;
#define __global__ static
"""


def kernels(source: Path = SOURCE) -> dict[str, list[str]]:
    """Each kernel of the source with the types of its arguments."""
    found = re.findall(r"__global__ void (\w+)\(([^)]*)\)", source.read_text())
    return {
        name: [one.strip().rpartition(" ")[0] + "*" * ("*" in one) for one in text.split(",")] for name, text in found
    }


def compiled(place: Path, source: Path = SOURCE) -> ctypes.CDLL:
    lines = [_HEAD, source.read_text(), 'extern "C" {']
    for name, types in kernels(source).items():
        takes = ", ".join(f"{one} a{i}" for i, one in enumerate(types))
        gives = ", ".join(f"a{i}" for i in range(len(types)))
        lines.append(
            f"void run_{name}(unsigned blocks, unsigned threads, {takes}) {{ blockDim.x = threads;"
            "for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)"
            f"for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) {name}({gives}); }}"
        )
    text, library = place / "kernels.cc", place / "kernels.so"
    text.write_text("\n".join([*lines, "}"]))
    subprocess.run(["g++", "-O3", "-shared", "-fPIC", "-o", str(library), str(text)], check=True)
    return ctypes.CDLL(str(library))


class Processor:
    """In the place of `mpsagent_bench.driver.Gpu`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._memory: list[Any] = []
        self.launched: list[str] = []

    def allocate(self, size: int) -> ctypes.c_uint64:
        self._memory.append(ctypes.create_string_buffer(size))
        return ctypes.c_uint64(ctypes.addressof(self._memory[-1]))

    def upload(self, to: ctypes.c_uint64, values: Any) -> None:
        ctypes.memmove(to.value, ctypes.byref(values), ctypes.sizeof(values))

    def download(self, values: Any, start: ctypes.c_uint64) -> None:
        ctypes.memmove(ctypes.byref(values), start.value, ctypes.sizeof(values))

    def launch(self, kernel: str, threads: int, block: int, *arguments: Any) -> None:
        self.launched.append(kernel)
        blocks = -(-threads // block)
        getattr(self._library, f"run_{kernel}")(ctypes.c_uint(blocks), ctypes.c_uint(block), *arguments)

    def wait(self) -> None:
        pass
