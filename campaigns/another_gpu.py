"""A process that met one GPU's control daemon at its cuInit gets its next context from another GPU's: what then?

    python3 campaigns/another_gpu.py     two GPUs, root; no setting of a GPU is touched

Two bare control daemons, one for each GPU. The client's pipe directory is a link, which is turned from one to the other
between its contexts: after it has closed its context itself, and after its server was killed; once to the same daemon
again. Printed: what the client sees, whose client MPS says it is, and on which GPU NVML shows it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CONTROL = "nvidia-cuda-mps-control"


def client() -> int:
    """A context for each line of its input; says how each went."""
    from tests.conformance.cuda_client import Driver

    cuda = Driver()
    print("cuInit", cuda.name(cuda.call("cuInit", ctypes.c_uint(0))), flush=True)
    result, device = cuda.device(0)
    print("device", cuda.name(result), cuda.uuid_start(device), flush=True)
    for _ in sys.stdin:
        context = ctypes.c_void_p()
        made = cuda.call("cuCtxCreate_v2", ctypes.byref(context), ctypes.c_uint(0), device)
        said = ["context", cuda.name(made)]
        if not made:
            memory, free, total = cuda.memory()
            said += ["GPU", cuda.uuid_start(device), "memory", cuda.name(memory), f"{free >> 20} of {total >> 20} MiB"]
            cuda.kernels = {}
            said += ["kernel", cuda.name(cuda.launch(b"spin", 1_000_000) or cuda.synchronize())]
        print(*said, flush=True)
        if sys.stdin.readline() == "":
            break
        if not made:
            worked = cuda.launch(b"spin", 1_000_000) or cuda.synchronize()
            print("works", cuda.name(worked), "destroyed", cuda.name(cuda.call("cuCtxDestroy_v2", context)), flush=True)
        else:
            print("nothing to destroy", flush=True)
    return 0


class Daemon:
    def __init__(self, base: Path, uuid: str) -> None:
        self.pipe, self.uuid = base / uuid, uuid
        self.pipe.mkdir(mode=0o755)
        self._words = {
            **os.environ,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.pipe),
        }
        subprocess.run([CONTROL, "-d"], env={**self._words, "CUDA_VISIBLE_DEVICES": uuid}, check=True)

    def ask(self, command: str) -> str:
        words = [CONTROL]
        done = subprocess.run(words, input=command + "\n", env=self._words, capture_output=True, text=True, timeout=20)
        return " ".join(done.stdout.split())

    def servers(self) -> list[int]:
        return [int(word) for word in self.ask("get_server_list").split() if word.isdigit()]

    def clients(self) -> dict[int, str]:
        return {server: self.ask(f"get_client_list {server}") for server in self.servers()}


def seen_by_nvml() -> str:
    import pynvml

    pynvml.nvmlInit()
    found = []
    for number in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(number)
        there = [
            *pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handle),
            *pynvml.nvmlDeviceGetComputeRunningProcesses(handle),
        ]
        found.append(
            f"GPU {number}: "
            + (", ".join(f"{one.pid} {(one.usedGpuMemory or 0) >> 20} MiB" for one in there) or "none")
        )
    return "; ".join(found)


def turn(link: Path, to: Daemon) -> None:
    new = link.with_name("new")
    new.symlink_to(to.pipe)
    new.replace(link)


def case(title: str, base: Path, first: Daemon, then: Daemon, kill: bool) -> None:
    print(f"== {title}", flush=True)
    link = base / "public"
    turn(link, first)
    words = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(link), "CUDA_VISIBLE_DEVICES": "0"}
    one = subprocess.Popen(
        [sys.executable, __file__, "client"],
        env=words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert one.stdin is not None
    assert one.stdout is not None
    print("client", one.pid, "|", one.stdout.readline().strip(), "|", one.stdout.readline().strip())
    for step in ("first", "next"):
        one.stdin.write("context\n")
        print(f"{step}:", one.stdout.readline().strip())
        for each in {first, then}:
            print(f"   daemon of {each.uuid[:8]}: clients by server {each.clients()}")
        print(f"   NVML: {seen_by_nvml()}")
        if step == "first" and kill:
            for server in first.servers():
                os.kill(server, signal.SIGKILL)
            time.sleep(1.0)
        turn(link, then)
        one.stdin.write("end it\n")
        print("  ", one.stdout.readline().strip(), flush=True)
    one.stdin.close()
    print("exit", one.wait(20))


def main() -> int:
    if sys.argv[1:] == ["client"]:
        return client()
    import pynvml

    pynvml.nvmlInit()
    print("driver", pynvml.nvmlSystemGetDriverVersion())
    uuids = [str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(number))) for number in range(2)]
    base = Path(tempfile.mkdtemp(prefix="another", dir="/tmp"))
    base.chmod(0o755)
    daemons = []
    try:
        daemons = [Daemon(base, uuid) for uuid in uuids]
        zero, one = daemons
        print("GPUs", *(uuid[4:12] for uuid in uuids))
        case("it closes its context itself; the next one from the other GPU's daemon", base, one, zero, kill=False)
        case("its server is killed; the next one from the same daemon", base, one, one, kill=True)
        case("its server is killed; the next one from the other GPU's daemon", base, one, zero, kill=True)
    finally:
        for each in daemons:
            each.ask("quit -t 2")
        time.sleep(3)
        shutil.rmtree(base, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
