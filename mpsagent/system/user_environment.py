"""/run/mpsagent/user.env: the pipe directory for users' processes, where it is not NVIDIA's default.

The environment generator (user services) and the profile snippet (login shells) read it. A client without it would look
for NVIDIA's default and run outside MPS.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from mpsagent.system.control import DEFAULT_PIPE_DIRECTORY

USER_ENVIRONMENT = "/run/mpsagent/user.env"


def write_user_environment(pipe_directory: str, path: str = USER_ENVIRONMENT) -> str | None:
    """Complete, or not there at all: with the default there is nothing to say. None, or what is wrong."""
    place = Path(path)
    fresh = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        if pipe_directory == DEFAULT_PIPE_DIRECTORY:
            place.unlink(missing_ok=True)
            return None
        # Shells and systemd read it, each with other rules for quotes: what needs none is the same for both.
        if not re.fullmatch(r"[A-Za-z0-9_./+:@,-]+", pipe_directory):
            place.unlink(missing_ok=True)
            return f"{pipe_directory} has characters that cannot stand in {path}: users do not get it by themselves"
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(fd, "w") as file:
            os.fchmod(fd, 0o644)  # whatever the agent's umask
            file.write(f"CUDA_MPS_PIPE_DIRECTORY={pipe_directory}\n")
        fresh.rename(place)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        return f"{path}: {error.strerror}"
    return None
