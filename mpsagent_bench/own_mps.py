"""An agent, a gate and a control daemon for the benchmark alone, in the namespaces that it made for itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_POLICY = """\
[agent]
on_stop = "quit"
[turn]
time_limit = "1h"
{limits}
[instance.bench]
sharing = "{mode}"
pipe_directory = "{place}/pipe"
log_directory = "{place}/log"
devices = [{gpus}]
control_daemon_path = "{control}"
"""
START, STOP = 30.0, 15.0
"""Seconds that the gate's socket and the end of the agent may take."""


class OwnMpsError(Exception):
    """The agent does not start. The text ends with its last message."""


class OwnMps:
    """A separate MPS with its agent. ``programs``: the simulator's directory. ``gpu``: the UUID of its GPU; None: all
    GPUs, of which clients see the first."""

    def __init__(self, place: Path, mode: str, limits: str, programs: Path | None, gpu: str = "") -> None:
        self._place, self._programs = place, programs
        control = "nvidia-cuda-mps-control" if programs is None else str(programs / "nvidia-cuda-mps-control")
        gpus = f'"{gpu}"' if gpu else ""
        self._policy = _POLICY.format(place=place, mode=mode, limits=limits, control=control, gpus=gpus)
        self._agent: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of its clients, which see one GPU."""
        return {"CUDA_MPS_PIPE_DIRECTORY": f"{self._place}/pipe", "CUDA_VISIBLE_DEVICES": "0"}

    def start(self) -> None:
        """Returns when clients can connect to the gate: it holds them until all else is there. Raises OwnMpsError."""
        self._place.mkdir(mode=0o755)
        (self._place / "policy.toml").write_text(self._policy)
        (self._place / "policy.toml").chmod(0o644)
        command = [sys.executable, "-P", "-m", "mpsagent.agent.main", "run", "--supervise", "child"]
        command += ["--policy", str(self._place / "policy.toml"), "--socket", str(self._place / "agent.sock")]
        command += ["--state-directory", str(self._place / "state"), "--run-directory", str(self._place / "run")]
        if self._programs is not None:
            command += ["--devices", str(self._programs / "devices.json")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with (self._place / "agent.log").open("wb") as log:
            self._agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        end = time.monotonic() + START
        while not (self._place / "pipe" / "control").exists():
            trouble = self._trouble()
            if trouble or self._agent.poll() is not None or time.monotonic() > end:
                self.stop()
                raise OwnMpsError(f"MPS does not start: {trouble or 'see mpsagent-cli doctor'}")
            time.sleep(0.05)

    def _trouble(self) -> str:
        """The first thing that went wrong for the agent, in its words."""
        for line in (self._place / "agent.log").read_text(errors="replace").splitlines():
            for kind in ("policy.rejected", "action.failed"):
                if kind in line:
                    return line.split(kind)[1].strip()
        return ""

    def stop(self) -> None:
        """Nothing of it runs when this returns."""
        if self._agent is None:
            return
        self._agent.terminate()
        try:
            self._agent.wait(STOP)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            self._agent.wait()
        kill_all_others()


def kill_all_others() -> None:
    """Every other process of this pid namespace, which must be our own."""
    if os.getpid() != 1:
        raise RuntimeError("not alone in a pid namespace")
    try:
        os.kill(-1, signal.SIGKILL)
        while True:
            os.waitpid(-1, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
