"""CUDA's driver by ctypes, as far as the benchmark needs it: one device, its primary context, kernels as PTX text."""

from __future__ import annotations

import ctypes
from importlib import resources
from typing import Any

LIBRARIES = ("libcuda.so.1", "/usr/local/nvidia/lib64/libcuda.so.1", "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
             "/usr/lib64/libcuda.so.1", "/usr/lib/aarch64-linux-gnu/libcuda.so.1")  # fmt: skip
_KERNELS = resources.files("mpsagent_bench").joinpath("kernels.ptx").read_bytes() + b"\0"
"""Read at the start, because a process may become another user's, who cannot read this program's files."""
_MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT

Argument = ctypes.c_int | ctypes.c_float | ctypes.c_uint64


class CudaError(Exception):
    """A call of the driver failed, or there is no driver."""


class Gpu:
    """Device 0 of this process, with a context. ``kernels``: text that ends with a zero. The constructor raises
    CudaError."""

    def __init__(self, kernels: bytes = _KERNELS) -> None:
        self._library = _library()
        self._call("cuInit", ctypes.c_uint(0))
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        name = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", name, ctypes.c_int(128), device)
        self.name = name.value.decode(errors="replace")
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        count = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(count), ctypes.c_int(_MULTIPROCESSORS), device)
        self.multiprocessors = count.value
        """The number that MPS lets this process use."""
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(kernels))
        self._module = module
        self._kernels: dict[str, ctypes.c_void_p] = {}

    def allocate(self, size: int) -> ctypes.c_uint64:
        """``size`` bytes of device memory."""
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer

    def upload(self, to: ctypes.c_uint64, values: Any) -> None:
        """A ctypes array, whole."""
        self._call("cuMemcpyHtoD_v2", to, ctypes.byref(values), ctypes.c_size_t(ctypes.sizeof(values)))

    def download(self, values: Any, start: ctypes.c_uint64) -> None:
        """Fill a ctypes array from the GPU, after all kernels that were launched before."""
        self._call("cuMemcpyDtoH_v2", ctypes.byref(values), start, ctypes.c_size_t(ctypes.sizeof(values)))

    def launch(self, kernel: str, threads: int, block: int, *arguments: Argument) -> None:
        """At least ``threads`` threads in blocks of ``block``; does not wait."""
        function = self._kernels.get(kernel)
        if function is None:
            function = ctypes.c_void_p()
            name = ctypes.c_char_p(kernel.encode())
            self._call("cuModuleGetFunction", ctypes.byref(function), self._module, name)
            self._kernels[kernel] = function
        pointers = [ctypes.cast(ctypes.pointer(one), ctypes.c_void_p) for one in arguments]
        one = ctypes.c_uint(1)
        self._call(
            "cuLaunchKernel", function,
            ctypes.c_uint(-(-threads // block)), one, one, ctypes.c_uint(block), one, one,
            ctypes.c_uint(0), None, (ctypes.c_void_p * len(pointers))(*pointers), None,
        )  # fmt: skip

    def wait(self) -> None:
        """Until everything that was launched is done."""
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(result), ctypes.byref(text))
            raise CudaError(f"{name}: {text.value.decode() if text.value else 'error'} ({result})")


def version() -> str:
    """The CUDA version of the driver, as ``13.0``. Raises CudaError when there is none."""
    number = ctypes.c_int()
    if _library().cuDriverGetVersion(ctypes.byref(number)):
        raise CudaError("libcuda.so.1 does not say its version")
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _library() -> ctypes.CDLL:
    problem: OSError | None = None
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            problem = problem or error
    raise CudaError(f"NVIDIA's driver is not installed here: {problem}")
