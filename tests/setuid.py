"""A program of root's that anyone may start and only root may signal, as `passwd` is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.conformance.backends import other_users_python

BECOME_ROOT = "import os, time; os.setuid(0); print('is root', flush=True); time.sleep(600)"


def setuid_python(directory: Path) -> list[str]:
    """The words that start it; after them comes what it is to do as root."""
    program = directory / "setuid"
    shutil.copy(os.path.realpath(other_users_python(65534)), program)
    program.chmod(0o4755)
    return [str(program), "-I", "-S", "-c"]
