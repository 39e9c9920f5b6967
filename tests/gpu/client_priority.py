#!/usr/bin/env python3
"""MPS's priority for clients, normal (0) and below normal (1): what it does, and who sets it.

    client_priority.py [mps] [servers] [product]

Two clients, 3 s each pair, told apart by how they load the GPU:

    filling  queues kernels of four times as many blocks as fit, 1 ms a block: there is always a block that waits
    short    one block of 0.1 ms, waited for, again and again: what a user at a prompt notices

    mps      two clients of one user on one server. The priority is set by the client's environment
             (CUDA_MPS_CLIENT_PRIORITY), or by the control daemon's set_default_client_priority just before the client
             connects; then by both, to see which counts, and behind a client that is connected and has no context yet
    servers  two users, each with a control daemon and a server, as with `sharing = "apart"`
    product  two users behind agent and gate, `sharing = "together"`, and a policy with `client_priority`

Root, the real MPS, a GPU, for `product` mpsagent importable; about 2 min; nothing is left. Prints a Markdown table,
then what server.log says of priorities.
"""

import ctypes
import json
import os
import sys
import time

PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"
SECONDS = 3.0
AHEAD = 4
"""Kernels that a filling client has queued."""
THREADS = 64
RESIDENT = 32
"""Blocks of one multiprocessor, on every GPU since Volta (two warps each, 64 warps)."""


def client(load):
    """In a process of the user's: waits for a line at `connected` and at `ready`; then one line of JSON."""
    from cuda_client import Driver

    cuda = Driver()
    result = cuda.call("cuInit", 0)
    print("connected", flush=True)
    sys.stdin.readline()
    _, device = cuda.device(0)
    result = result or cuda.primary_context(device)
    result = result or cuda.load_kernels()
    blocks = 4 * RESIDENT * cuda.multiprocessors(device) if load == "filling" else 1
    length = ctypes.c_uint64(1_000_000 if load == "filling" else 100_000)
    pointers = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(length), ctypes.c_void_p))
    print("ready", flush=True)
    sys.stdin.readline()
    times, end = [], time.monotonic() + SECONDS
    while not result and time.monotonic() < end:
        since = time.monotonic()
        for _ in range(AHEAD if load == "filling" else 1):
            result = result or cuda.call(
                "cuLaunchKernel", cuda.kernels[b"spin"], blocks, 1, 1, THREADS, 1, 1, 0, None, pointers, None
            )
        result = result or cuda.call("cuCtxSynchronize")
        times.append((time.monotonic() - since) * 1e3)
    times.sort()
    said = {"result": cuda.name(result), "steps": len(times)}
    if times:
        said.update(p50=round(times[len(times) // 2], 3), p99=round(times[len(times) * 99 // 100], 3))
    print(json.dumps(said), flush=True)


def main():
    import re
    import subprocess
    import tempfile
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.conformance import rig as rigs
    from tests.scenes.stage import Stage, look_at

    parts = sys.argv[1:] or ["mps", "servers", "product"]
    told = []

    def until(process, word):
        for line in process.stdout:
            if line.strip() == word:
                return
        raise SystemExit(f"a client ended before it was {word}")

    def go(process):
        process.stdin.write("\n")
        process.stdin.flush()

    def priorities(rig):
        log = rig.base / "log" / "server.log"
        found = re.findall(r"\] (.*[Pp]riority.*)", log.read_text(errors="replace")) if log.exists() else []
        return "; ".join(found)

    with tempfile.TemporaryDirectory(prefix="mpsp", dir="/tmp") as directory:
        base = Path(directory)
        base.chmod(0o755)
        backend = rigs.real_backend(base)
        (base / "client_priority.py").write_bytes(Path(__file__).read_bytes())
        (base / "client_priority.py").chmod(0o644)

        def start(rig, load, user, environment):
            command = [*backend.client[:-1], str(base / "client_priority.py"), "client", load]
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                    user=user, group=user, extra_groups=[], cwd="/", text=True,
                                    env=rig.environment(environment))  # fmt: skip

        def pair(title, clients):
            """`clients`: for each its rig, user, load, its environment's priority, and the daemon's default when it
            connects and when it makes its context."""
            processes = []
            try:
                for rig, user, load, own, connecting, context in clients:
                    if connecting is not None:
                        rig.ctl(f"set_default_client_priority {connecting}")
                    processes.append(start(rig, load, user, {} if own is None else {PRIORITY: str(own)}))
                    until(processes[-1], "connected")
                    if context is not None:
                        rig.ctl(f"set_default_client_priority {context}")
                    go(processes[-1])
                    until(processes[-1], "ready")
                for process in processes:
                    go(process)
                said = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
            finally:
                for process in processes:
                    process.kill()
            for (_, _, load, *numbers), got in zip(clients, said, strict=True):
                shown = ("" if one is None else one for one in numbers)
                cells = [title, load, *shown, got["steps"], got.get("p50", ""), got.get("p99", ""), got["result"]]
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)

        def on_one(title, *clients):
            rig = rigs.Rig(backend, base / title)
            rig.start("-d")
            try:
                pair(title, [(rig, rigs.USERS[0], *one) for one in clients])
                default = rig.ctl("get_default_client_priority").out.strip()
                told.append(f"{title}: the daemon's default at the end {default}; server.log: {priorities(rig)}")
            finally:
                rig.end()

        print(
            "| pair | load | own environment | daemon's at cuInit | daemon's at the context | steps | p50 ms | p99 ms "
            "| result |\n|---|---|---|---|---|---|---|---|---|"
        )
        if "mps" in parts:
            for load in ("filling", "short"):
                # The second one of a pair is always a filling one, connected after the first.
                for first, second in ((0, 0), (0, 1), (1, 0), (1, 1)):
                    title = f"{load}-environment-{first}{second}"
                    on_one(title, (load, first, None, None), ("filling", second, None, None))
                for first, second in ((0, 1), (1, 0)):
                    on_one(f"{load}-daemon-{first}{second}", (load, None, first, None), ("filling", None, second, None))
            on_one("against-lower", ("filling", None, 0, None), ("filling", 0, 1, None))
            on_one("against-higher", ("filling", None, 0, None), ("filling", 1, 0, None))
            on_one("behind-lower", ("filling", None, 0, 0), ("filling", None, 0, 1))
            on_one("behind-higher", ("filling", None, 0, 0), ("filling", None, 1, 0))
        if "servers" in parts:
            for load in ("filling", "short"):
                for first, second in ((0, 0), (0, 1), (1, 0)):
                    title = f"{load}-servers-{first}{second}"
                    two = [rigs.Rig(backend, base / f"{title}-{number}") for number in (1, 2)]
                    for rig in two:
                        rig.start("-d")
                    try:
                        pair(title, [(two[0], rigs.USERS[0], load, None, first, None),
                                     (two[1], rigs.USERS[1], "filling", None, second, None)])  # fmt: skip
                    finally:
                        for rig in two:
                            rig.end()
        if "product" in parts:
            looked = look_at(backend, base / "look")[0]
            with Stage(backend, base / "s", looked) as stage:
                for load in ("filling", "short"):
                    for lower in ((), (1,), (0,)):
                        policy = "".join(
                            f'[user.{rigs.USERS[one]}]\nclient_priority = "below-normal"\n' for one in lower
                        )
                        stage.policy(policy, extra='sharing = "together"')
                        agent = stage.agents[-1] if stage.agents else None
                        if agent is None:
                            agent = stage.with_agent(policy, extra='sharing = "together"')
                        agent.api.ask("POST", "/v1/reload", {})
                        title = f"{load}-product-{''.join(map(str, lower)) or 'none'}-lower"
                        pair(title, [(stage.rig, rigs.USERS[0], load, None, None, None),
                                     (stage.rig, rigs.USERS[1], "filling", None, None, None)])  # fmt: skip
                told.append(f"product: server.log: {priorities(stage.rig)}")
        print("\n" + "\n".join(told), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"]:
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
        client(sys.argv[2])
    else:
        main()
