"""/run/mpsagent/user.env: what users' processes need to find MPS, where NVIDIA's defaults do not do.

The environment generator (user services) and the profile snippet (login shells) read it. A client without it would look
for NVIDIA's default directory and run outside MPS, or look for GPUs that its instance does not have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from mpsagent.linux import atomic_file
from mpsagent.system.control import DEFAULT_PIPE_DIRECTORY

USER_ENVIRONMENT = "/run/mpsagent/user.env"


def write_user_environment(environment: Mapping[str, str], path: str = USER_ENVIRONMENT) -> str | None:
    """Complete, or not there at all: with the default directory alone there is nothing to say. None, or what is
    wrong."""
    place = Path(path)
    try:
        if environment == {"CUDA_MPS_PIPE_DIRECTORY": DEFAULT_PIPE_DIRECTORY}:
            place.unlink(missing_ok=True)
            return None
        # Shells and systemd read it, each with other rules for quotes: what needs none is the same for both.
        for value in environment.values():
            if not re.fullmatch(r"[A-Za-z0-9_./+:@,-]+", value):
                place.unlink(missing_ok=True)
                return f"{value} has characters that cannot stand in {path}: users do not get it by themselves"
        atomic_file.write(place, "".join(f"{name}={value}\n" for name, value in environment.items()), 0o644)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None
