#!/usr/bin/env python3
"""What users run on a GPU for gate.py and modes.py: `user_programs.py WHAT`.

torch, jax, cupy: the framework works a little, then says what the driver gives this process and how much it can
allocate in steps of 64 MiB: one line `RESULT {...}`. Every error is said in the result.

resnet50, small, heavy, stand-in: say LOADED once they have what they need outside the GPU, and then do what the lines
on their standard input say: `load` (a context, the model, a few rounds; READY {what it was given}), `go SECONDS BATCH
CORE AT` (from that time of the monotonic clock on; DONE {begin, end, count, milliseconds of each request}), `end`.
resnet50: pictures through ResNet-50 in half precision, eager PyTorch, each batch waited for. small: a request each 5 ms
to ResNet-18, one picture, or at once where the last one took longer. heavy: products of matrices of 8192 in bfloat16,
ten in a row waited for. stand-in: the simulator's client, and nothing is computed.

Bare Python; lies beside cuda_client.py.
"""

import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time

STEP = 64 << 20
MOST_STEPS = 4096
SM_COUNT = 0  # CU_EXEC_AFFINITY_TYPE_SM_COUNT


class _Affinity(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("value", ctypes.c_uint), ("rest", ctypes.c_uint * 4))


def driver_view():
    """What the driver says in this process: multiprocessors, exec affinity, memory (MiB), MPS."""
    import cuda_client

    cuda = cuda_client.Driver()
    found = {"init": cuda.call("cuInit", ctypes.c_uint(0))}
    _, device = cuda.device(0)
    found["context"] = cuda.primary_context(device)
    found["sms"] = cuda.multiprocessors(device)
    affinity = _Affinity()
    try:
        result = cuda.call("cuCtxGetExecAffinity", ctypes.byref(affinity), ctypes.c_int(SM_COUNT))
        found["affinity"] = affinity.value if result == 0 else cuda.name(result)
    except AttributeError as error:
        found["affinity"] = str(error)
    result, free, total = cuda.memory()
    found["free"], found["total"] = free >> 20, total >> 20
    found["mps"] = cuda.attribute(cuda_client.MPS_ENABLED, device)[1]
    return found


def until_out_of_memory(allocate, is_full):
    """(MiB that were allocated, what ended it); `allocate` returns what has to be kept."""
    kept = []
    for _ in range(MOST_STEPS):
        try:
            kept.append(allocate())
        except Exception as error:
            end = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
            return kept, len(kept) * STEP >> 20, end, bool(is_full(error))
    return kept, MOST_STEPS * STEP >> 20, "no end", False


def limits(name):
    began = time.monotonic()
    found = {"framework": name}
    work = {"torch": _torch, "jax": _jax, "cupy": _cupy}[name]
    allocate, is_full = work(found)
    found["before"] = driver_view()
    _kept, found["allocated"], found["ended_by"], found["out_of_memory"] = until_out_of_memory(allocate, is_full)
    found["after"] = driver_view()
    found["seconds"] = round(time.monotonic() - began, 2)
    print("RESULT " + json.dumps(found), flush=True)
    os._exit(0)  # no tidy end of a framework out of memory: it ends as a process


def _torch(found):
    import torch

    found["version"] = torch.__version__
    one = torch.ones(512, 512, device="cuda", dtype=torch.float16)
    found["worked"] = float((one @ one)[0, 0]) == 512.0
    del one
    torch.cuda.empty_cache()
    found["framework_sms"] = torch.cuda.get_device_properties(0).multi_processor_count
    full = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
    return (
        lambda: torch.empty(STEP, dtype=torch.uint8, device="cuda").fill_(1),
        lambda error: isinstance(error, full),
    )


def _jax(found):
    import jax
    import jax.numpy as jnp

    found["version"] = jax.__version__
    one = jnp.ones((512, 512), jnp.float16)
    found["worked"] = float((one @ one)[0, 0]) == 512.0
    device = jax.devices()[0]
    found["framework_sms"] = getattr(device, "core_count", None)
    found["platform"] = device.platform
    make = jax.jit(lambda: jnp.ones((STEP,), jnp.uint8))
    return lambda: make().block_until_ready(), lambda error: "RESOURCE_EXHAUSTED" in str(error)


def _cupy(found):
    import cupy

    found["version"] = cupy.__version__
    try:
        one = cupy.ones((512, 512), cupy.float16)
        found["worked"] = float((one @ one)[0, 0]) == 512.0
        del one
    except Exception as error:  # a compiler or a library of CUDA is missing there: limits can be seen all the same
        found["worked"] = f"{type(error).__name__}: {str(error)[:160]}"
    cupy.get_default_memory_pool().free_all_blocks()
    found["framework_sms"] = cupy.cuda.Device(0).attributes["MultiProcessorCount"]

    def allocate():
        block = cupy.cuda.alloc(STEP)
        block.memset(1, STEP)
        cupy.cuda.runtime.deviceSynchronize()
        return block

    return allocate, lambda error: isinstance(error, cupy.cuda.memory.OutOfMemoryError)


# --- programs that are told when to work -----------------------------------------------------------------------------

DEPTHS = {50: (3, 4, 6, 3), 18: (2, 2, 2, 2)}


def network(depth=50):
    """ResNet-50 or 18 as in He et al. 2015, that of 50 with the stride in the 3x3 convolution."""
    from torch import nn
    from torch.nn import functional

    def unit(inside, outside, size, stride=1):
        conv = nn.Conv2d(inside, outside, size, stride, size // 2, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outside))

    class Block(nn.Module):
        def __init__(self, inside, middle, outside, stride):
            super().__init__()
            if depth == 50:
                units = [unit(inside, middle, 1), unit(middle, middle, 3, stride), unit(middle, outside, 1)]
            else:
                units = [unit(inside, middle, 3, stride), unit(middle, outside, 3)]
            self.units = nn.ModuleList(units)
            self.past = unit(inside, outside, 1, stride) if stride > 1 or inside != outside else nn.Identity()

        def forward(self, x):
            y = x
            for one in self.units[:-1]:
                y = functional.relu(one(y))
            return functional.relu(self.units[-1](y) + self.past(x))

    layers = [unit(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inside, wider = 64, 4 if depth == 50 else 1
    for middle, count, stride in zip((64, 128, 256, 512), DEPTHS[depth], (1, 2, 2, 2), strict=True):
        for number in range(count):
            layers.append(Block(inside, middle, middle * wider, stride if number == 0 else 1))
            inside = middle * wider
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


EVERY = 0.005
IN_A_ROW = 10


def resnet(depth):
    import torch

    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = network(depth).half().eval()
    pictures = {}

    def load():
        model.cuda()
        for size in (1, 16):
            pictures[size] = torch.randn(size, 3, 224, 224).half().cuda()
            for _ in range(20 // size + 2):
                some(size)
        return driver_view()

    def some(size):
        with torch.inference_mode():
            model(pictures[size]).argmax(1).tolist()  # waits for the result, as who asks for a picture's class does
        return size

    return load, some


def products():
    import torch

    torch.set_num_threads(1)
    given = {}

    def load():
        given["a"] = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        given["b"] = torch.empty_like(given["a"])
        some(1)
        return driver_view()

    def some(_):
        for _ in range(IN_A_ROW):
            torch.mm(given["a"], given["a"], out=given["b"])
        torch.cuda.synchronize()
        return IN_A_ROW

    return load, some


def stand_in():
    """A client of the simulator has its place at the gate."""
    held = []

    def load():
        command = [*shlex.split(os.environ["STAND_IN"]), "sleep", "600"]
        client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        held.append(client)
        while "] sms " not in (line := client.stdout.readline()):
            if not line:
                raise SystemExit("the simulator's client was not served")
        return {"sms": int(line.split("] sms ")[1].split()[0]), "mps": 1}

    def some(size):
        time.sleep(0.005)
        return size

    def over():
        for client in held:
            client.send_signal(signal.SIGUSR1)
            client.communicate()

    return load, some, over


def go(some, seconds, batch, core, at, paced):
    if core >= 0:
        os.sched_setaffinity(0, {core})
    time.sleep(max(0.0, at - time.monotonic()))
    count, took, begin = 0, [], time.monotonic()
    due, end = begin, begin + seconds
    while (now := time.monotonic()) < end:
        if paced:
            if now < due:
                time.sleep(due - now)
            since = time.monotonic()
            due = max(since, due) + EVERY
            count += some(batch)
            took.append(round((time.monotonic() - since) * 1000, 3))
        else:
            count += some(batch)
    return {"begin": begin, "end": time.monotonic(), "count": count, "took": took}


def serve(what):
    """Does what standard input says."""
    ways = {"resnet50": lambda: resnet(50), "small": lambda: resnet(18), "heavy": products, "stand-in": stand_in}
    load, some, *over = ways[what]()
    paced = "small" in (what, os.environ.get("PACED"))
    print("LOADED", flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "load":
            print("READY", json.dumps(load()), flush=True)
        elif words[0] == "go":
            seconds, batch, core, at = float(words[1]), int(words[2]), int(words[3]), float(words[4])
            print("DONE", json.dumps(go(some, seconds, batch, core, at, paced)), flush=True)
        else:
            break
    for one in over:
        one()
    os._exit(0)


def main(what):
    if what not in ("torch", "jax", "cupy"):
        serve(what)
    try:
        limits(what)
    except BaseException as failure:
        import traceback

        traceback.print_exc()
        print("RESULT " + json.dumps({"framework": what, "error": f"{type(failure).__name__}: {failure}"[:400]}))
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
