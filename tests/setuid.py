"""A program of root's, or of another user's, that anyone may start and only they may signal, as `passwd` is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.conformance.backends import other_users_python


def become(uid: int) -> str:
    """What the program does: it is of that user in all ids."""
    return f"import os, time; os.setresuid({uid}, {uid}, {uid}); print('is {uid}', flush=True); time.sleep(600)"


def setuid_python(directory: Path, uid: int = 0) -> list[str]:
    """The words that start it; after them comes what it is to do as that user."""
    program = directory / f"setuid-{uid}"
    shutil.copy(os.path.realpath(other_users_python(65534)), program)
    os.chown(program, uid, uid)
    program.chmod(0o4755)
    return [str(program), "-I", "-S", "-c"]
