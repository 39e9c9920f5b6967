#!/usr/bin/env python3
"""What a change of user costs on one control daemon with a server for each user, and what makes it shorter. Bare MPS.

    campaigns/change_of_user.py [--sim] [--rounds 4] [--out DIR]

Two questions, each way tried with each holder, by turns. Is a server gone sooner when it is told by force in the moment
in which its last client has ended (`forced`), instead of when its log says so (`asked`, as the agent does)? And does
the next one start sooner while another process keeps the device: one with the device files open, with NVML, with a
server of another daemon, with a context outside MPS? (Without any, a server took 140 to 160 ms to start, beside one 57
to 61.)

A line for each: seconds from A's end to the server's exit, of the next server's start, and from A's end to B's context,
where B's program starts at A's end. Root and a GPU (or --sim); no setting of a GPU is touched. About 90 seconds.
Exit status: how many rounds came to nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGKILL, SIGUSR1

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.conformance.rig import NOBODY, Rig, exited, real_backend, sim_backend
from tests.conformance.script import A, B, C

FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm")
WAYS = ("asked", "forced")


@contextlib.contextmanager
def nobody_holds(_rig: Rig) -> Iterator[None]:
    yield


@contextlib.contextmanager
def device_files(_rig: Rig) -> Iterator[None]:
    opened = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in FILES]
    yield
    for descriptor in opened:
        os.close(descriptor)


@contextlib.contextmanager
def nvml(_rig: Rig) -> Iterator[None]:
    library, handle = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)):
        raise OSError("NVML does not answer")
    yield
    library.nvmlShutdown()


@contextlib.contextmanager
def other_server(rig: Rig) -> Iterator[None]:
    rig.start("-d", where="2")
    rig.ctl(f"start_server -uid {NOBODY}", where="2")
    yield
    rig.ctl("quit -t 2", where="2")


@contextlib.contextmanager
def outside(rig: Rig) -> Iterator[None]:
    client = rig.spawn(C, "sleep", 600, env={"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"})
    rig.working(client)
    yield
    rig.signal(client, SIGKILL)
    exited(rig.clients[client].process, 10)


HOLDERS: dict[str, Callable[[Rig], contextlib.AbstractContextManager[None]]] = {
    "none": nobody_holds, "device files": device_files, "NVML": nvml, "server of another daemon": other_server,
    "context outside MPS": outside,
}  # fmt: skip


def start_took(rig: Rig, server: int) -> float:
    """By the stamps of control.log, in ms."""
    stamps = {}
    words = re.compile(rf" (\d\d):(\d\d):(\d\d\.\d+) Control.*(Starting new server {server} for|NEW SERVER {server})")
    for line in rig.logs["control"].lines:
        found = words.search(line)
        if found:
            stamps[found[4][:3]] = int(found[1]) * 3600 + int(found[2]) * 60 + float(found[3])
    return stamps["NEW"] - stamps["Sta"]


def one_round(rig: Rig, way: str) -> tuple[float, float, float]:
    first = rig.spawn(A, "sleep", 600)
    if not rig.working(first):
        raise RuntimeError("A is not served")
    server = rig.server()
    time.sleep(0.5)
    rig.skip_log()
    rig.skip_log("server")
    rig.signal(first, SIGUSR1)
    exited(rig.clients[first].process, 10)
    ended = time.monotonic()
    second = rig.spawn(B, "sleep", 600)
    if way == "asked" and rig.wait_log(f"Client process {rig.pid(first)} disconnected", 5, log="server") is None:
        raise RuntimeError("the server does not say that its client has left")
    asked = rig.begin(f"shutdown_server {server}{' -f' if way == 'forced' else ''}")
    if rig.wait_log(f"Server {server} exited", 10) is None:
        raise RuntimeError("the server does not exit")
    gone = time.monotonic()
    if not rig.working(second):
        raise RuntimeError("B is not served")
    there = time.monotonic()
    rig.finish(asked)
    found = gone - ended, start_took(rig, rig.server()), there - ended
    rig.signal(second, SIGUSR1)
    exited(rig.clients[second].process, 10)
    time.sleep(0.2)
    rig.ctl(f"shutdown_server {rig.server()}")
    time.sleep(0.5)
    return found


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--sim", action="store_true", help="on the simulator")
    words.add_argument("--rounds", type=int, default=4)
    words.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    asked = words.parse_args()
    failed, rows = 0, list[str]()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        rig = Rig(sim_backend(place) if asked.sim else real_backend(place), place / "rig")
        rig.start("-d")
        try:
            for holder, hold in HOLDERS.items():
                got: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
                try:
                    with hold(rig):
                        for way in WAYS * asked.rounds:
                            got[way].append(one_round(rig, way))
                except (OSError, RuntimeError, KeyError) as error:
                    rows.append(f"{holder}: {type(error).__name__}: {error}")
                    failed += not isinstance(error, OSError)  # no such device here
                for way, each in got.items():
                    parts = [" ".join(f"{one:.3f}" for one in column) for column in zip(*each, strict=True)]
                    middle = f"median {statistics.median(one[2] for one in each):.3f}" if each else "nothing"
                    rows.append(f"{holder}, {way}: exit, start, context: {'; '.join(parts)}; {middle}")
                print("\n".join(rows[-len(WAYS) :]), flush=True)
        finally:
            rig.ctl("quit -t 2")
            rig.end()
            (asked.out / "change-of-user.log").write_text("\n".join(rig.transcript))
    (asked.out / "change-of-user.txt").write_text("\n".join(rows) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
