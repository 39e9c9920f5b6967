"""A program of root's, or of another user's, that anyone may start and only they may signal, as `passwd` is."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conformance.backends import other_users_python


def become(uid: int) -> str:
    """What the program does: it is of that user in all ids."""
    return f"import os, time; os.setresuid({uid}, {uid}, {uid}); print('is {uid}', flush=True); time.sleep(600)"


@contextmanager
def setuid_python(uid: int = 0) -> Iterator[list[str]]:
    """The words that start it; after them comes what it is to do as that user. Where the bit counts: a booted Debian 13
    has a /tmp without."""
    places = [place for place in (tempfile.gettempdir(), "/var/tmp") if not os.statvfs(place).f_flag & os.ST_NOSUID]
    if not places:
        pytest.skip("temporary files are where no setuid bit counts")
    with tempfile.TemporaryDirectory(dir=places[0]) as place:
        Path(place).chmod(0o755)
        program = Path(place, "setuid")
        shutil.copy(os.path.realpath(other_users_python(65534)), program)
        os.chown(program, uid, uid)
        program.chmod(0o4755)
        yield [str(program), "-I", "-S", "-c"]
