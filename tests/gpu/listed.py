#!/usr/bin/env python3
"""On which GPU does NVML list a client of MPS? `listed.py` asks on a machine with two GPUs or more.

A control daemon that has the last GPU alone, by CUDA_VISIBLE_DEVICES, by a /dev without the others (only.sh), and so in
a pid namespace; and a client that computes. Prints what NVML says of every GPU meanwhile. Root; nothing is left.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pynvml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.conformance import rig as rigs

ONLY = str(Path(__file__).with_name("only.sh"))
NAMESPACE = ["unshare", "--fork", "--pid", "--mount", "--mount-proc", "--kill-child=KILL", "--"]


def listed(title: str, ours: list[int]) -> None:
    for number in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(number)
        busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
        for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses"):
            pids = {one.pid: one.usedGpuMemory for one in getattr(pynvml, name)(handle)}
            print(f"{title}: GPU {number}, {busy} % busy, {name[13:]}: {pids}, ours: {sorted(pids.keys() & set(ours))}")


def main() -> int:
    pynvml.nvmlInit()
    last = pynvml.nvmlDeviceGetCount() - 1
    uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(last))
    minor = pynvml.nvmlDeviceGetMinorNumber(pynvml.nvmlDeviceGetHandleByIndex(last))
    with tempfile.TemporaryDirectory(prefix="mpsl", dir="/tmp") as directory:
        base = Path(directory)
        base.chmod(0o755)
        backend = rigs.real_backend(base)
        for title in ("visible", "hidden", "namespace"):
            rig = rigs.Rig(backend, base / title)
            own = rig.environment({"CUDA_VISIBLE_DEVICES": uuid} if title == "visible" else None)
            user = ["setpriv", "--reuid", str(rigs.USERS[0]), "--regid", str(rigs.USERS[0]), "--clear-groups"]
            client = [*user, "env", "CUDA_VISIBLE_DEVICES=0", *backend.client, "work", "1000"]
            script = f"{backend.control} -d && {shlex.join(client)}; echo quit -t 1 | {backend.control}"
            before = {"visible": [], "hidden": [ONLY, str(minor)], "namespace": [ONLY, str(minor), *NAMESPACE]}[title]
            process = subprocess.Popen([*before, "sh", "-c", script], env=own)
            try:
                time.sleep(4.0)
                listed(title, [one.pid for one in psutil.Process(process.pid).children(recursive=True)])
                process.wait(60)
            finally:
                rig.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
