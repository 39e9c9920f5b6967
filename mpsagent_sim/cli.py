"""The program mpsagent-sim: it installs the simulated programs and describes them."""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from mpsagent_sim import gpu

DESCRIPTION = """\
What is simulated
  nvidia-cuda-mps-control   options -h -v -d -f -M, a batch of commands on standard input, exit statuses, texts
  the control daemon        pipe directory, sockets, FIFO, pid file, lock, control.log; pending list, back-off, blocking
  the control sockets       NVIDIA's messages, byte for byte, from greeting to descriptor, and those of front-ends
  nvidia-cuda-mps-server    a process of the user with group 0, server.log, limits at each hand-over, 48 clients, FAULT,
                            terminate_client; -M: one for all users
  cuda-client               query, alloc, sleep, spin, oob, work; outside MPS when it cannot reach the socket
  GPUs                      multiprocessors and memory as recorded on an NVIDIA H200; which processes use them

What is not
  kernels compute nothing and do not slow each other down; no priorities; no MPS v3 interface; no CUDA library;
  real NVML does not know these GPUs: the files of MPSSIM_REGISTRY stand in for it

Environment of the daemon (and of clients outside MPS)
  MPSSIM_GPUS      number of GPUs (1)
  MPSSIM_SPEED     divides every delay of the GPU (1); the back-off and `quit -t` keep their times
  MPSSIM_SEED      fixes the draws of delays
  MPSSIM_FAIL_START  what the driver says when no server can start; @PATH: what that file says, while it exists
  MPSSIM_REGISTRY  directory with a file per device and process (DIR/processes after `install`):
                   `<ordinal>.<pid>` holding `<server|mps|bypass> <uid> <MiB> <start time>`;
                   `<ordinal>.compute_mode` holding EXCLUSIVE_PROCESS makes clients outside MPS fail beside a server
Real beside it: processes, users, sockets, signals. Without root everything runs as the one user.
"""

_PROGRAMS = {"nvidia-cuda-mps-control": "front_end", "cuda-client": "cuda_client"}
_WRAPPER = """\
#!{python} -IS
import os, sys
sys.path.insert(0, {root!r})
for key, value in {environment!r}.items():
    os.environ.setdefault(key, value)
from mpsagent_sim.{module} import main
sys.exit(main())
"""


def devices(count: int) -> list[dict[str, object]]:
    """Return the GPUs for the agent, which does not ask NVML then. Memory is in bytes."""
    return [
        {
            "ordinal": device.ordinal,
            "uuid": device.uuid,
            "name": gpu.NAME,
            "memory": gpu.TOTAL * 1048576,
            "multiprocessors": gpu.MULTIPROCESSORS,
        }
        for device in gpu.machine(count)
    ]


def open_to_all(path: Path) -> bool:
    """Return True if each user can read this file and enter its parents, because clients run as other users."""
    path = path.resolve()
    return bool(path.stat().st_mode & 0o004) and all(parent.stat().st_mode & 0o001 for parent in path.parents)


def interpreter() -> str:
    """This interpreter if other users can run it, else the system's if that is new enough, else this one anyway."""
    own = str(getattr(sys, "_base_executable", None) or sys.executable)
    for name in (own, "/usr/bin/python3", "/usr/local/bin/python3"):
        # exists() of pathlib raises if a parent may not be entered, such as /root
        if os.path.exists(name) and open_to_all(Path(name)):  # noqa: PTH110
            check = "import sys; sys.exit(sys.version_info < (3, 11))"
            if subprocess.run([name, "-IS", "-c", check], check=False).returncode == 0:
                return name
    return own


def install(directory: Path, gpus: int) -> None:
    """Write the programs, devices.json and the directory of simulated processes."""
    directory.mkdir(parents=True, exist_ok=True)
    processes = directory.absolute() / "processes"
    processes.mkdir(exist_ok=True)
    processes.chmod(0o1777)
    device = directory / "dev" / "nvidia-uvm"
    device.parent.mkdir(exist_ok=True)
    device.touch()
    device.chmod(0o666)
    package = Path(__file__).resolve().parent
    if not open_to_all(package / "cli.py"):
        copy = directory.absolute() / "lib" / package.name
        copy.mkdir(parents=True, exist_ok=True)
        for module_file in package.glob("*.py"):
            shutil.copyfile(module_file, copy / module_file.name)
        package = copy
    python = interpreter()
    # other users cannot write compiled modules, and a start should not compile
    subprocess.run([python, "-IS", "-m", "compileall", "-q", *map(str, package.glob("*.py"))], check=False)
    environment = {"MPSSIM_GPUS": str(gpus), "MPSSIM_REGISTRY": str(processes)}
    for name, module in _PROGRAMS.items():
        text = _WRAPPER.format(python=python, root=str(package.parent), environment=environment, module=module)
        _write(directory / name, text, 0o755)
    _write(directory / "nvidia-cuda-mps-server", _SERVER, 0o755)
    _write(directory / "devices.json", json.dumps(devices(gpus), indent=2) + "\n", 0o644)


_SERVER = """\
#!/bin/sh
echo "nvidia-cuda-mps-server is started by the control daemon" >&2
exit 1
"""


def _write(path: Path, text: str, mode: int) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    temporary.chmod(mode)
    temporary.replace(path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="mpsagent-sim", description="A stand-in for NVIDIA MPS.", epilog=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    verb = parser.add_subparsers(required=True).add_parser("install", help="write the programs into a directory")
    verb.add_argument("directory", type=Path)
    verb.add_argument("--gpus", type=int, default=int(os.environ.get("MPSSIM_GPUS") or 1))
    chosen = parser.parse_args(arguments)
    install(chosen.directory, chosen.gpus)
    print(f"installed; put it first on PATH: export PATH={shlex.quote(str(chosen.directory.absolute()))}:$PATH")
    return 0


if __name__ == "__main__":
    sys.exit(main())
