#!/usr/bin/env python3
"""PyTorch and JAX programs for busy_ends.py and busy_ways.py.

`busy_programs.py fork` makes PyTorch processes by fork, so that none of them has to import PyTorch again. Each line of
standard input, `NUMBER UID ON_ERROR OUTPUT TABLE ENTRY QUEUED`, starts a process of that user. The answer is
`NUMBER PID`. `busy_programs.py torch ON_ERROR` and `busy_programs.py jax ON_ERROR` are single processes, started in the
usual way.

A process launches forty (QUEUED) products of half-precision matrices of 8192 x 8192, waits for them and starts again.
ON_ERROR: `exit` raises the first CUDA error, as programs do; `stay` catches it and sleeps, as a notebook does. Lines in
OUTPUT: `T SECONDS ready` when the first forty have been launched, `T SECONDS round SECONDS` when they are done, `T
SECONDS error TEXT`. TABLE is a file of doubles: the time of the last step is written into entry ENTRY. The first forty
are launched when its last entry is not 0 any more.
"""

import ctypes
import mmap
import os
import signal
import struct
import sys
import time

QUEUED = 40
SIZE = 8192
GO = 511
PR_SET_DUMPABLE = 4


def say(text):
    os.write(1, f"T {time.time():.6f} {text}\n".encode())


def torch_rounds(table=None, queued=QUEUED):
    import torch

    a = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.half)
    b = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.half)
    c = torch.empty(SIZE, SIZE, device="cuda", dtype=torch.half)
    torch.mm(a, b, out=c)
    torch.cuda.synchronize()
    done = torch.cuda.Event(blocking=True)
    if table is not None:
        say("loaded")
        while not any(table[8 * GO : 8 * GO + 8]):
            time.sleep(0.02)
    while True:
        for _ in range(queued):
            torch.mm(a, b, out=c)
        yield
        if table is None:
            torch.cuda.synchronize()
        else:  # many of them must not occupy all cores
            done.record()
            done.synchronize()


def jax_rounds(table=None, queued=QUEUED):
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax

    a = jax.random.normal(jax.random.key(1), (SIZE, SIZE), dtype=jax.numpy.float16)
    product = jax.jit(lambda x, y: x @ y / SIZE)
    product(a, a).block_until_ready()
    while True:
        c = a
        for _ in range(queued):
            c = product(a, c)
        yield
        c.block_until_ready()


def work(rounds, on_error, table=None, entry=0, queued=QUEUED):
    try:
        for number, _ in enumerate(rounds(table, queued)):
            if number == 0:
                say("ready")
                begun = time.time()
            elif number == 1:
                say(f"round {time.time() - begun:.4f}")
            if table is not None:
                table[8 * entry : 8 * entry + 8] = struct.pack("d", time.time())
    except RuntimeError as error:
        say(f"error {str(error).splitlines()[0]}")
        if on_error == "stay":
            while True:
                time.sleep(1000)
        raise


def child(uid, on_error, output, table, entry, queued):
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    shared = None
    if table != "-":
        with open(table, "r+b") as opened:
            shared = mmap.mmap(opened.fileno(), 4096)
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # as after an execve
    os.chdir("/")
    work(torch_rounds, on_error, shared, entry, queued)


def fork():
    import torch  # noqa: F401 (children find it loaded; the import alone makes no CUDA call)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("LOADED", flush=True)
    while line := sys.stdin.buffer.raw.readline():
        number, uid, on_error, output, table, entry, queued = line.decode().split()
        pid = os.fork()
        if pid == 0:
            child(int(uid), on_error, output, table, int(entry), int(queued))
            return
        print(number, pid, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "fork":
        fork()
    else:
        work({"torch": torch_rounds, "jax": jax_rounds}[sys.argv[1]], sys.argv[2])
