"""What the command line says; everything else is in the policy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Settings:
    """``state_directory`` None: nothing is kept on disk. ``run_directory``: hidden directories of the control daemons,
    and the link to the gate. ``devices_file``: GPUs as JSON instead of asking NVML (the simulator, tests)."""

    policy: str = "/etc/mpsagent/policy.toml"
    socket: str = "/run/mpsagent/mpsagent.sock"
    state_directory: str | None = "/var/lib/mpsagent"
    run_directory: str = "/run/mpsagent"
    supervise: Literal["child", "systemd"] = "child"
    devices_file: str | None = None

    @property
    def api_directory(self) -> str | None:
        """Where the api keeps the history."""
        return None if self.state_directory is None else f"{self.state_directory.rstrip('/')}-api"

    @property
    def pages(self) -> str:
        """The socket on which the api listens for the agent, which root alone can connect to."""
        return f"{self.run_directory}/pages.sock"

    @property
    def device_directory(self) -> str:
        """Where the files are that a program opens to use a GPU."""
        return "/dev" if self.devices_file is None else f"{Path(self.devices_file).parent}/dev"

    @property
    def gate_link(self) -> str:
        """The socket on which the gate listens for the agent."""
        return f"{self.run_directory}/gate.sock"
