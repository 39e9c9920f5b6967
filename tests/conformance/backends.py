"""What can be played on: the real MPS of this machine, or the simulator."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
REPOSITORY = Path(__file__).resolve().parents[2]
# Where NVIDIA's program may be when it is not on PATH (containers bind the driver in).
CONTROL_PLACES = ("/usr/bin", "/usr/local/nvidia/bin", "/usr/local/bin", "/usr/local/cuda/bin", "/opt/nvidia/bin")
# Four users without passwd entries; MPS looks only at the numbers.
USERS = tuple(int(uid) for uid in os.environ.get("RIG_USERS", "20001,20002,20003,20004").split(","))


class RigError(Exception):
    """The scenario cannot be played at all on this machine (no such program, not root, ...)."""


def other_users_python(uid: int) -> str:
    """A Python that user `uid` may run: an interpreter below /root is closed to him."""
    candidates = [sys.executable, "/usr/bin/python3", "/usr/local/bin/python3", "/opt/venv/bin/python3"]
    candidates += sorted(str(path) for path in Path("/usr/bin").glob("python3.??"))
    problems = []
    for candidate in candidates:
        if not candidate or not Path(candidate).exists():
            continue
        try:
            done = subprocess.run(
                [candidate, "-S", "-E", "-c", "import ctypes, _signal"],
                user=uid, group=uid, extra_groups=[], cwd="/", capture_output=True, timeout=20,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            problems.append(f"{candidate}: {error}")
            continue
        if done.returncode == 0:
            return candidate
        problems.append(f"{candidate}: {done.stderr.decode(errors='replace')[-200:]}")
    raise RigError(f"no Python that uid {uid} may run (clients run as ordinary users): {problems}")


@dataclass(frozen=True)
class Backend:
    """What stands behind the command lines: the control program and the CUDA client."""

    name: str
    control: str
    client: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    # The same client started so that it stands any argv[0], and what it needs in its environment for that.
    renamed_client: tuple[str, ...] = ()
    renamed_environment: dict[str, str] = field(default_factory=dict)


def real_backend(place: Path) -> Backend:
    """NVIDIA's own daemon, and the client in Python copied to `place`, where every user can read it."""
    given = os.environ.get("MPS_CONTROL")
    path = os.pathsep.join([os.environ.get("PATH", ""), *CONTROL_PLACES])
    control = given or shutil.which(CONTROL, path=path)
    if not control:
        raise RigError(f"{CONTROL} is neither on PATH nor in {', '.join(CONTROL_PLACES)}; name it in MPS_CONTROL")
    client = place / "cuda_client.py"
    client.write_bytes((REPOSITORY / "tests/conformance/cuda_client.py").read_bytes())
    client.chmod(0o644)
    python = other_users_python(USERS[0])
    prefixes = "import sys; print(sys.base_prefix + ':' + sys.base_exec_prefix)"
    found = subprocess.run([python, "-S", "-E", "-c", prefixes], capture_output=True, text=True, timeout=20, check=True)
    return Backend(
        "real",
        control,
        (python, "-S", "-E", str(client)),
        renamed_client=(python, "-S", str(client)),
        renamed_environment={"PYTHONHOME": found.stdout.strip()},
    )


def sim_backend(place: Path, gpus: int = 1) -> Backend:
    """The simulator's two programs, installed into `place`."""
    programs = place / f"bin{gpus}"
    programs.mkdir(mode=0o755)
    python = other_users_python(USERS[0])
    done = subprocess.run(
        [python, "-m", "mpsagent_sim.cli", "install", str(programs), "--gpus", str(gpus)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if done.returncode:
        raise RigError(f"mpsagent-sim install failed with status {done.returncode}: {done.stdout}{done.stderr}")
    client = str(programs / "cuda-client")
    # A script's argv[0] is its interpreter's, so the interpreter is named to give it another one.
    return Backend("sim", str(programs / CONTROL), (client,), renamed_client=(python, "-IS", client))
