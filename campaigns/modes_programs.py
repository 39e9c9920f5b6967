#!/usr/bin/env python3
"""What users run for modes.py: `modes_programs.py resnet50|small|heavy|stand-in`.

Says LOADED once it has what it needs outside the GPU, and then does what the lines on its standard input say: `load`
(a context, the model, a few rounds; READY {what it was given}), `go SECONDS BATCH CORE AT` (from that time of the
monotonic clock on; DONE {begin, end, count, milliseconds of each request}), `end`.

resnet50: pictures through ResNet-50 in half precision, eager PyTorch, each batch waited for. small: a request each 5 ms
to ResNet-18, one picture, or at once where the last one took longer. heavy: products of matrices of 8192 in bfloat16,
ten in a row waited for. stand-in: the simulator's client, and nothing is computed.

Lies beside gate_programs.py and cuda_client.py.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

EVERY = 0.005
IN_A_ROW = 10


def resnet(depth):
    import gate_programs
    import torch

    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = gate_programs.network(depth).half().eval()
    pictures = {}

    def load():
        model.cuda()
        for size in (1, 16):
            pictures[size] = torch.randn(size, 3, 224, 224).half().cuda()
            for _ in range(20 // size + 2):
                some(size)
        return gate_programs.driver_view()

    def some(size):
        with torch.inference_mode():
            model(pictures[size]).argmax(1).tolist()  # waits for the result, as who asks for a picture's class does
        return size

    return load, some


def products():
    import gate_programs
    import torch

    torch.set_num_threads(1)
    given = {}

    def load():
        given["a"] = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        given["b"] = torch.empty_like(given["a"])
        some(1)
        return gate_programs.driver_view()

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


def main(what):
    ways = {
        "resnet50": lambda: resnet(50), "small": lambda: resnet(18),
        "heavy": products, "stand-in": stand_in,
    }  # fmt: skip
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


if __name__ == "__main__":
    main(sys.argv[1])
