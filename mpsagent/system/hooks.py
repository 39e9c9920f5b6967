"""Programs that an administrator wants run before a forced end: JSON on their input, a deadline, no shell."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from mpsagent.system.spawn import Ended, run_program

ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


def refused(program: str) -> str | None:
    """Why ``program`` must not be run as root, or None. It and all above it have to be root's alone (or the agent's own
    user's, when that is not root)."""
    if not program.startswith("/"):
        return f'"{program}" is not an absolute path'
    try:
        real = Path(program).resolve(strict=True)
        status = real.stat()
        if not stat.S_ISREG(status.st_mode):
            return f"{program} is not a file"
        if not os.access(real, os.X_OK):
            return f"{program} is not executable; allow it: chmod +x {real}"
        for step in (real, *real.parents):
            status = step.stat()
            mode = stat.S_IMODE(status.st_mode)
            if status.st_uid not in (0, os.geteuid()):
                return f"{step} belongs to uid {status.st_uid}, who could have anything run as root"
            if mode & 0o022 and not (step.is_dir() and mode & stat.S_ISVTX):
                return f"{step} can be written to by others (mode {mode:04o}); forbid it: chmod go-w {step}"
    except (OSError, RuntimeError) as error:
        return f"{program}: {error.strerror if isinstance(error, OSError) else error}"
    return None


async def run_hook(program: str, subject: Mapping[str, object], *, deadline: float) -> Ended:
    """Runs ``program`` with ``subject`` as JSON on its input. At the deadline it is killed with what it has started.
    Never raises: what went wrong is in ``problem``."""
    problem = refused(program)
    if problem is not None:
        return Ended(None, problem=problem)
    feed = json.dumps(subject, default=str).encode() + b"\n"
    return await run_program([program], ENVIRONMENT, feed=feed, deadline=deadline)
