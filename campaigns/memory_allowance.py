#!/usr/bin/env python3
"""A question to a real MPS: how much more than its limit NVML shows of an honest client that fills its memory.

    memory_allowance.py [--seconds 110] [--churn 200] [--only raw,torch]      writes $OUT/allowance.txt and .json

Root, an NVIDIA GPU, NVML; PyTorch, CuPy and JAX are used where they are. Control daemons of its own, one for each pair
of limits (set as defaults before their servers begin), each with directories of its own. Clients of many kinds fill
what they may have to the last piece, while NVML is read every 20 ms for every pid. The figure that counts is `over`:
the most that NVML said of a pid, less its limit. The kinds `lifted…` are not honest: they show the other side.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

MIB = 1 << 20
NAME = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
LIMITS = {"512M": 512, "600M": 600, "1G": 1024, "2G": 2048, "8G": 8192, "20G": 20480, "64G": 65536}

# --- the client -------------------------------------------------------------------------------------------------------

cuda = None


def load():
    global cuda
    for name in ("libcuda.so.1", "/usr/local/nvidia/lib64/libcuda.so.1", "/usr/lib/x86_64-linux-gnu/libcuda.so.1"):
        try:
            cuda = ctypes.CDLL(name)
            return
        except OSError:
            continue
    raise SystemExit("no libcuda.so.1")


def call(name, *arguments):
    return getattr(cuda, name)(*arguments)


def told():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    result = call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return {"result": result, "free": free.value // MIB, "total": total.value // MIB}


def say(phase, **more):
    time.sleep(0.3)  # so that whoever looks from outside has looked
    more = {"phase": phase, "pid": os.getpid(), **more}
    if cuda is not None:
        more["cuda"] = told()
    os.write(1, (json.dumps(more) + "\n").encode())


def begin(device=0):
    load()
    if result := call("cuInit", 0):
        raise SystemExit(f"cuInit {result}")
    handle, context, size = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t()
    call("cuDeviceGet", ctypes.byref(handle), device)
    call("cuDeviceTotalMem_v2", ctypes.byref(size), handle)
    if result := call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle):
        say("no context", error=result)
        raise SystemExit(f"context {result}")
    call("cuCtxSetCurrent", context)
    say("context", device_total=size.value // MIB)
    return handle


def fill(allocate, *sizes):
    """MiB that were to be had, in pieces of `sizes` MiB, each size until it fails."""
    had, last = 0.0, 0
    for size in sizes:
        while not (last := allocate(int(size * MIB))):
            had += size
    return had, last


POINTERS = []


def plain(size):
    pointer = ctypes.c_uint64()
    result = call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
    if not result:
        POINTERS.append(pointer)
        call("cuMemsetD8_v2", pointer, 1, ctypes.c_size_t(size))
        call("cuCtxSynchronize")
    return result


def full(phase="full", *, allocate=plain, sizes=(256, 32, 2, 1, 0.0625)):
    had, last = fill(allocate, *sizes)
    say(phase, allocated=had, last=last)


def raw(limit):
    begin()
    full()


def pieces2(limit):
    begin()
    full(sizes=(2,))


def pieces_small(limit):
    begin()
    full(sizes=(512, 0.25) if limit > 4096 else (0.25,))


def nothing(limit):
    begin()
    time.sleep(1)
    say("end")


def contexts(limit):
    handle = begin()
    for number in range(3):
        context = ctypes.c_void_p()
        result = call("cuCtxCreate_v2", ctypes.byref(context), 0, handle)
        say(f"context {number + 2}", error=result)
        full(f"full {number + 2}")


def contexts_late(limit):
    """Full first, then more contexts."""
    handle = begin()
    full()
    for number in range(4):
        context = ctypes.c_void_p()
        result = call("cuCtxCreate_v2", ctypes.byref(context), 0, handle)
        say(f"late context {number + 2}", error=result)


def modules(limit):
    """Global variables of 64 MiB in modules until no more can be loaded."""
    begin()
    text = b".version 7.0\n.target sm_70\n.address_size 64\n.visible .global .align 8 .b8 big%d[67108864];\n"
    number = 0
    while True:
        module = ctypes.c_void_p()
        if result := call("cuModuleLoadData", ctypes.byref(module), text % number):
            break
        number += 1
    say("modules", loaded=number, last=result)
    full()


def stack(limit):
    """What the driver takes by itself: local memory, printf's buffer, the heap of the device; before and after full."""
    begin()
    kernel = (
        b".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry k(.param .u64 p)\n{\n.local .b8 l[%d];\n"
        b".reg .b64 %%r<4>;\nld.param.u64 %%r1, [p];\nmov.u64 %%r2, l;\nadd.u64 %%r3, %%r2, %%r1;\n"
        b"st.local.u8 [%%r3], 1;\nret;\n}\n"
    )
    for when in ("before", "after"):
        for size in (1024, 4096, 16384, 65536):
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            result = call("cuModuleLoadData", ctypes.byref(module), kernel % size)
            result = result or call("cuModuleGetFunction", ctypes.byref(function), module, b"k")
            value = ctypes.c_uint64(7)
            given = (ctypes.c_void_p * 1)(ctypes.addressof(value))
            result = result or call("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, None, given, None)
            say(f"local {size} {when}", error=result or call("cuCtxSynchronize"))
        for which, size in ((0, 16384), (1, 256 * MIB), (2, 1024 * MIB)):
            say(f"limit {which} {when}", error=call("cuCtxSetLimit", which, ctypes.c_size_t(size)))
        full(f"full {when}")


def managed(limit, times=1.0):
    """Managed memory of `times` the limit, touched on the GPU; then plain memory until it is full."""
    begin()
    had = 0
    while had < limit * times:
        pointer = ctypes.c_uint64()
        if result := call("cuMemAllocManaged", ctypes.byref(pointer), ctypes.c_size_t(128 * MIB), 1):
            break
        call("cuMemsetD8_v2", pointer, 1, ctypes.c_size_t(128 * MIB))
        result = call("cuCtxSynchronize")
        had += 128
        if result:
            break
    say(f"managed x{times}", allocated=had, last=result)
    full()


def managed_twice(limit):
    managed(limit, 2.0)


def pools(limit):
    begin()

    def allocate(size):
        pointer = ctypes.c_uint64()
        result = call("cuMemAllocAsync", ctypes.byref(pointer), ctypes.c_size_t(size), None)
        if not result:
            POINTERS.append(pointer)
            call("cuMemsetD8Async", pointer, 1, ctypes.c_size_t(size), None)
        return result or call("cuStreamSynchronize", None)

    full(allocate=allocate, sizes=(256, 32, 2))
    full("and plain")
    for pointer in POINTERS:
        call("cuMemFreeAsync", pointer, None)
    call("cuCtxSynchronize")
    say("freed")


class Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_uint), ("handles", ctypes.c_uint), ("place", ctypes.c_uint), ("device", ctypes.c_int),
        ("windows", ctypes.c_void_p), ("flags", ctypes.c_uint64),
    ]  # fmt: skip


def physical(limit):
    """cuMemCreate, as PyTorch's expandable segments and NCCL do; a second process is given the first of them."""
    begin()
    ask = Properties(1, 1, 1, 0, None, 0)
    handles = []

    def allocate(size):
        handle = ctypes.c_uint64()
        result = call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(ask), ctypes.c_uint64(0))
        if not result:
            handles.append(handle)
        return result

    full(allocate=allocate, sizes=(256, 32, 2))
    descriptor = ctypes.c_int(-1)
    result = call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handles[0], 1, ctypes.c_uint64(0))
    say("exported", error=result)
    if not result:
        run = [sys.executable, __file__, "client", "import-physical", str(limit), str(descriptor.value)]
        subprocess.run(run, pass_fds=[descriptor.value], timeout=40)
        say("shared")


def import_physical(limit):
    begin()
    full()
    handle = ctypes.c_uint64()
    result = call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(int(sys.argv[4])), 1)
    say("imported", error=result)
    address, size = ctypes.c_uint64(), ctypes.c_size_t(256 * MIB)
    result = call(
        "cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0)
    )
    result = result or call("cuMemMap", address, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
    access = (ctypes.c_uint * 3)(1, 0, 3)
    result = result or call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
    say("mapped", error=result)


def ipc(limit):
    """All but 300 MiB in one piece is given to two processes that fill what is theirs as well."""
    begin()
    size = int(told()["free"] * 0.9)
    result = plain(size * MIB)
    handle = (ctypes.c_char * 64)()
    result = result or call("cuIpcGetMemHandle", ctypes.byref(handle), POINTERS[0])
    say("exported", allocated=size, error=result)
    others = [
        subprocess.Popen([sys.executable, __file__, "client", kind, str(limit), bytes(handle).hex()])
        for kind in ("import-full", "import-first")
    ]
    for other in others:
        other.wait(timeout=40)
    say("shared")


class Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


def opened():
    handle, pointer = Handle.from_buffer_copy(bytes.fromhex(sys.argv[4])), ctypes.c_uint64()
    cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
    say("imported", error=call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, 1))


def import_full(limit):
    begin()
    full()
    opened()


def import_first(limit):
    begin()
    opened()
    full()


def pinned_host(limit):
    begin()
    pointer = ctypes.c_void_p()
    say("host memory", error=call("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(1024 * MIB), 2))
    full()


def slowly(limit):
    """Frees a piece every 30 ms, for three seconds; takes all again; and so on."""
    begin()
    full()
    for turn in range(2):
        end = time.monotonic() + 3
        while POINTERS and time.monotonic() < end:
            call("cuMemFree_v2", POINTERS.pop(0))
            time.sleep(0.03)
        say(f"freed {turn}")
        full(f"full {turn}")


def killed(limit):
    """Ends with all that it has by SIGKILL."""
    begin()
    full()
    os.kill(os.getpid(), signal.SIGKILL)


def quick(limit):
    """For the churn: no pause in between. MOST: MiB at which it stops (one without a limit would take the GPU)."""
    begin()
    left = int(os.environ.get("MOST", "1000000"))
    while left > 0 and not plain(64 * MIB):
        left -= 64
    if "MOST" not in os.environ:
        fill(plain, 2, 0.25)
    say("full")


def devices(limit):
    count = ctypes.c_int()
    load()
    call("cuInit", 0)
    call("cuDeviceGetCount", ctypes.byref(count))
    for device in range(count.value):
        begin(device)
        full(f"full device {device}")


def torch_(limit):
    import torch

    load()
    one = torch.ones(2048, 2048, device="cuda", dtype=torch.half)
    for _ in range(3):
        one = (one @ one).clamp(0, 1)
    image = torch.randn(8, 3, 224, 224, device="cuda")
    torch.nn.functional.conv2d(image, torch.randn(64, 3, 7, 7, device="cuda"), stride=2)
    torch.cuda.synchronize()
    say("worked", version=torch.__version__)
    kept, had = [], 0
    for size in (256, 32, 2):
        while True:
            try:
                kept.append(torch.ones(size * MIB, dtype=torch.uint8, device="cuda"))
                had += size
            except torch.OutOfMemoryError:
                break
    say("full", allocated=had)
    try:
        (one @ one).sum().item()
    except RuntimeError as error:
        say("no work when full", error=str(error)[:80])
    del kept
    torch.cuda.empty_cache()
    say("freed")


def cupy_(limit):
    import cupy

    load()
    one = cupy.ones((2048, 2048), cupy.float16)
    for _ in range(3):
        one = one @ one
    cupy.cuda.runtime.deviceSynchronize()
    say("worked", version=cupy.__version__)
    kept, had = [], 0
    for size in (256, 32, 2):
        while True:
            try:
                kept.append(cupy.ones(size * MIB, cupy.uint8))
                cupy.cuda.runtime.deviceSynchronize()
                had += size
            except cupy.cuda.memory.OutOfMemoryError:
                break
    say("full", allocated=had)


def jax_(limit):
    import jax
    import jax.numpy as jnp

    load()
    say("begun", version=jax.__version__, device=str(jax.devices()[0]))
    one = jnp.ones((2048, 2048), jnp.float16)
    for _ in range(3):
        one = one @ one
    one.block_until_ready()
    image = jnp.ones((8, 3, 224, 224))
    jax.lax.conv(image, jnp.ones((64, 3, 7, 7)), (2, 2), "SAME").block_until_ready()
    stats = jax.devices()[0].memory_stats() or {}
    say("worked", pool=int(stats.get("bytes_limit", 0)) // MIB)
    kept, had = [], 0
    for size in (256, 32, 2):
        while True:
            try:
                kept.append(jnp.ones((size * MIB,), jnp.uint8))
                kept[-1].block_until_ready()
                had += size
            except Exception as error:
                if "RESOURCE_EXHAUSTED" not in str(error) and "memory" not in str(error):
                    raise
                break
    say("full", allocated=had)


KINDS = {
    "raw": raw, "pieces2": pieces2, "pieces-small": pieces_small, "nothing": nothing, "contexts": contexts,
    "contexts-late": contexts_late, "modules": modules, "stack": stack, "managed": managed,
    "managed-twice": managed_twice, "pools": pools, "physical": physical, "import-physical": import_physical,
    "ipc": ipc,
    "import-full": import_full, "import-first": import_first, "pinned-host": pinned_host, "slowly": slowly,
    "killed": killed, "quick": quick, "devices": devices, "torch": torch_, "cupy": cupy_, "jax": jax_,
}  # fmt: skip

# --- NVML -------------------------------------------------------------------------------------------------------------


class Info(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu", ctypes.c_uint), ("compute", ctypes.c_uint)
    ]  # fmt: skip


class Memory(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint),
        *((name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")),
    ]


class Nvml:
    """Reads every 20 ms what each pid uses on each device, by both lists."""

    def __init__(self):
        self.lib = ctypes.CDLL("libnvidia-ml.so.1")
        if result := self.lib.nvmlInit_v2():
            raise SystemExit(f"nvmlInit {result}")
        count = ctypes.c_uint()
        self.lib.nvmlDeviceGetCount_v2(ctypes.byref(count))
        self.handles = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            self.lib.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
            self.handles.append(handle)
        self.now, self.most, self.first, self.gone, self.seen = {}, {}, {}, {}, {}
        self.differ = set()
        self.reads, self.slowest, self.end = 0, 0.0, False
        self.thread = threading.Thread(target=self._loop, daemon=True)
        self.thread.start()

    def _list(self, which, handle):
        count, rows = ctypes.c_uint(1024), (Info * 1024)()
        result = getattr(self.lib, f"nvmlDeviceGet{which}RunningProcesses_v3")(handle, ctypes.byref(count), rows)
        if result:
            return {}
        return {row.pid: row.used for row in rows[: count.value] if row.used < 1 << 60}

    def _loop(self):
        while not self.end:
            began, now = time.monotonic(), {}
            for index, handle in enumerate(self.handles):
                mps, plain = self._list("MPSCompute", handle), self._list("Compute", handle)
                for pid in mps.keys() & plain.keys():
                    if mps[pid] != plain[pid]:
                        self.differ.add(pid)
                for pid, used in {**plain, **mps}.items():
                    now[pid, index] = max(now.get((pid, index), 0), used / MIB)
            for key, used in now.items():
                self.first.setdefault(key, used)
                self.most[key] = max(self.most.get(key, 0), used)
                self.seen[key] = began
            self.now = now
            self.reads += 1
            self.slowest = max(self.slowest, time.monotonic() - began)
            time.sleep(0.02)

    def memory(self):
        found = []
        for handle in self.handles:
            new, old = Memory(version=ctypes.sizeof(Memory) | 2 << 24), (ctypes.c_ulonglong * 3)()
            result = self.lib.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(new))
            self.lib.nvmlDeviceGetMemoryInfo(handle, old)
            bar = (ctypes.c_ulonglong * 3)()
            self.lib.nvmlDeviceGetBAR1MemoryInfo(handle, bar)
            found.append({
                "v1_total": old[0] / MIB, "v1_used": old[2] / MIB, "v2_result": result, "v2_total": new.total / MIB,
                "v2_reserved": new.reserved / MIB, "v2_used": new.used / MIB, "v2_free": new.free / MIB,
                "bar1": bar[0] / MIB,
            })  # fmt: skip
        return found


# --- the rounds -------------------------------------------------------------------------------------------------------


class Daemon:
    def __init__(self, place, limit, threads, devices, base):
        self.place, self.limit, self.threads = place / f"{limit}-{threads}", limit, threads
        self.environment = {
            **base,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.place / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self.place / "log"),
        }
        (self.place / "pipe").mkdir(parents=True)
        (self.place / "log").mkdir()
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=self.environment, check=True, timeout=20)
        for device in range(devices):
            self.ask(f"set_default_device_pinned_mem_limit {device} {limit}")
        self.ask(f"set_default_active_thread_percentage {threads}")

    def ask(self, text):
        run = ["nvidia-cuda-mps-control"]
        try:
            return subprocess.run(
                run, input=text + "\n", env=self.environment, capture_output=True, text=True, timeout=15
            ).stdout.strip()
        except subprocess.TimeoutExpired:
            return "(no answer)"

    def end(self):
        self.ask("quit -t 2")
        try:
            pid = int((self.place / "pipe" / "nvidia-cuda-mps-control.pid").read_text())
            os.kill(pid, signal.SIGKILL)
        except (OSError, ValueError):
            pass


class Room:
    """So many MiB and so many processes at a time."""

    def __init__(self, mib, most):
        self.free, self.places, self.changed = mib, most, threading.Condition()

    def enter(self, mib):
        with self.changed:
            self.changed.wait_for(lambda: self.places and (self.free >= mib))
            self.free -= mib
            self.places -= 1

    def leave(self, mib):
        with self.changed:
            self.free += mib
            self.places += 1
            self.changed.notify_all()


def one(nvml, daemon, kind, extra, patience=45.0):
    """One client from its start to its end: what it said, with what NVML said of it then."""
    program = kind.split(":")[0].removeprefix("lifted-")
    argv = [sys.executable, __file__, "client", program, str(LIMITS[daemon.limit])]
    process = subprocess.Popen(
        argv, env={**daemon.environment, **extra}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    killer = threading.Timer(patience, lambda: os.killpg(process.pid, signal.SIGKILL))
    killer.start()
    rows, pids = [], {process.pid}
    for line in process.stdout:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        pids.add(row["pid"])
        row["nvml"] = [round(nvml.now.get((row["pid"], index), -1), 1) for index in range(len(nvml.handles))]
        rows.append(row)
    errors = process.stderr.read().strip().splitlines()[-3:]
    status, ended = process.wait(), time.monotonic()
    killer.cancel()
    time.sleep(0.5)
    limit = LIMITS[daemon.limit]
    most = {f"{pid}/{index}": round(nvml.most[pid, index], 1) for pid, index in list(nvml.most) if pid in pids}
    late = max((nvml.seen[key] - ended for key in list(nvml.seen) if key[0] in pids), default=None)
    return {
        "kind": kind, "limit": limit, "threads": daemon.threads, "status": status, "most": most,
        "over": round(max(most.values(), default=-1) - limit, 1), "listed_after_end": late, "rows": rows,
        "errors": errors if status else [],
    }  # fmt: skip


def jobs(total):
    """(limit, threads, kind, more environment, MiB that it may take)"""
    small = ("raw", "pieces2", "pieces-small", "nothing", "contexts", "contexts-late", "modules", "stack", "managed",
             "managed-twice", "pools", "physical", "ipc", "pinned-host", "slowly", "killed", "devices")  # fmt: skip
    for limit, mib in LIMITS.items():
        for threads in (10, 100):
            kinds = small if mib <= 20480 else ("raw", "contexts", "managed", "stack")
            for kind in kinds:
                if kind in ("slowly", "pinned-host", "killed", "devices") and threads == 10:
                    continue
                weight = mib * {"managed": 2, "managed-twice": 3, "ipc": 3, "physical": 2}.get(kind, 1.3)
                if weight < 100_000:
                    yield limit, threads, kind, {}, weight
            if mib < 1024:
                continue
            lifted = {NAME: "x"}
            if threads == 100 and mib <= 8192:
                yield limit, threads, "lifted-nothing", lifted, 700
                yield limit, threads, "lifted-quick", {**lifted, "MOST": str(mib * 2)}, mib * 3
            if threads == 100 or mib == 8192:
                yield limit, threads, "torch", {}, mib * 1.1
                yield limit, threads, "cupy", {}, mib * 1.1
                if mib == 8192:
                    yield (
                        limit,
                        threads,
                        "torch:expandable",
                        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
                        mib * 1.1,
                    )
                    yield limit, threads, "jax:platform", {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, mib * 1.1
                for name, had in (("all", mib), ("0.9", mib * 0.9), ("less-600", mib - 600), ("less-1G", mib - 1024)):
                    if had > 256 and (mib >= 8192 or name != "0.9"):
                        fraction = f"{had / total:.5f}"
                        yield limit, threads, f"jax:{name}", {"XLA_PYTHON_CLIENT_MEM_FRACTION": fraction}, mib * 1.1


def line(row):
    said = [
        f"{one['phase']}: nvml {'/'.join(f'{n:.0f}' for n in one['nvml'])} free {one.get('cuda', {}).get('free', '?')}"
        + "".join(f" {key} {one[key]}" for key in ("allocated", "last", "error", "loaded", "pool") if key in one)
        for one in row["rows"]
    ]
    head = f"{row['limit']:6} {row['threads']:3}% {row['kind']:18} over {row['over']:9} status {row['status']}"
    return f"{head} | {' ; '.join(said)} {row['errors'] or ''}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=110.0, help="no client is begun later")
    parser.add_argument("--churn", type=int, default=200)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    out = Path(os.environ.get("OUT", "."))
    base = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS_")}
    place = Path(tempfile.mkdtemp(prefix="mpsmem", dir="/tmp"))
    began, nvml = time.monotonic(), Nvml()
    facts = {"nvml_idle": nvml.memory(), "python": sys.version.split()[0], "cpus": os.cpu_count()}
    rows, skipped, daemons, threads = [], [], {}, []
    lock, report = threading.Lock(), []
    try:
        bare = {**base, "CUDA_MPS_PIPE_DIRECTORY": str(place / "nobody")}
        run = [sys.executable, __file__, "client", "nothing", "0"]
        facts["outside MPS"] = subprocess.run(
            run, env=bare, capture_output=True, text=True, timeout=30
        ).stdout.splitlines()
        total = json.loads(facts["outside MPS"][0])["cuda"]["total"]
        for limit in LIMITS:
            for percent in (10, 100):
                daemons[limit, percent] = Daemon(place, limit, percent, len(nvml.handles), base)
        room = Room(nvml.memory()[0]["v2_free"] - 8192, max(8, min(14, os.cpu_count() or 8)))

        def play(limit, percent, kind, extra, weight):
            room.enter(weight)
            try:
                if time.monotonic() - began > options.seconds:
                    skipped.append(f"{limit} {percent} {kind}")
                    return
                row = one(nvml, daemons[limit, percent], kind, extra)
            except Exception as error:
                skipped.append(f"{limit} {percent} {kind}: {error!r}")
                return
            finally:
                room.leave(weight)
            with lock:
                rows.append(row)

        # short ones and frameworks mixed, so that what is cut off is no kind as a whole
        todo = list(jobs(total))
        random.Random(1).shuffle(todo)
        wanted = options.only.split(",") if options.only else []
        todo = [job for job in todo if not wanted or job[2].split(":")[0].removeprefix("lifted-") in wanted]
        todo += [("1G", 100 if number % 2 else 10, "quick", {}, 1100) for number in range(options.churn)]
        threads = [threading.Thread(target=play, args=job) for job in todo]
        for number, thread in enumerate(threads):
            thread.start()
            if number % 40 == 39:
                time.sleep(0.05)
        for thread in threads:
            thread.join()
    finally:
        facts["nvml_end"] = nvml.memory()
        for daemon in daemons.values():
            daemon.end()
        nvml.end = True
        nvml.thread.join(timeout=5)
        facts |= {"nvml_reads": nvml.reads, "nvml_slowest_read": nvml.slowest, "lists_differ": len(nvml.differ),
                  "seconds": time.monotonic() - began}  # fmt: skip
        rows.sort(key=lambda row: (row["limit"], row["kind"], row["threads"]))
        honest = [row for row in rows if not row["kind"].startswith("lifted")]
        kinds = sorted({row["kind"] for row in rows})
        report.append(json.dumps(facts, indent=1))
        report.append(
            "\n# The most over, by kind: MiB; clients; named with an allowance of 0, 2, 16, 64, 256, 512, 1024 MiB"
        )
        for kind in kinds:
            over = [row["over"] for row in rows if row["kind"] == kind and row["most"]]
            named = [sum(value > allowance for value in over) for allowance in (0, 2, 16, 64, 256, 512, 1024)]
            report.append(f"{kind:20} {max(over, default=-1):9} of {len(over):4} {named}")
        report.append(
            f"honest: {len(honest)}, most over {max((row['over'] for row in honest if row['most']), default=-1)}"
        )
        report.append(f"not played: {skipped}\n\n# Each client, those of the churn that are not over left out")
        report += [line(row) for row in rows if row["kind"] != "quick" or row["over"] > 0 or row["status"]]
        (out / "allowance.txt").write_text("\n".join(report) + "\n")
        (out / "allowance.json").write_text(json.dumps({"facts": facts, "skipped": skipped, "rows": rows}))
        shutil.rmtree(place, ignore_errors=True)
    print("\n".join(report[:60])[:11000])
    return 0


if __name__ == "__main__":
    if len(sys.argv) > 3 and sys.argv[1] == "client":
        KINDS[sys.argv[2]](int(sys.argv[3]))
        sys.exit(0)
    sys.exit(main())
