"""The program mpsagent-directories, which units run before they start: makes or checks a directory, and says in words
why it cannot be used."""

from __future__ import annotations

import shlex
import stat
import sys
from contextlib import suppress
from pathlib import Path

from mpsagent.system import directories
from mpsagent.system.directories import DirectoryRefused

USAGE = "usage: mpsagent-directories public DIR | log DIR | instance NAME"


def entry_problem(path: str) -> str | None:
    """A directory above ``path`` that users cannot enter, in words: their clients do not reach what is in ``path`` and
    run outside MPS. None when all can be entered."""
    for step in reversed(Path(path).parents):
        with suppress(OSError):
            mode = stat.S_IMODE(step.stat().st_mode)
            if not mode & stat.S_IXOTH:
                return (
                    f"{step} (mode {mode:04o}) cannot be entered by users, so their clients do not reach {path} and "
                    f"run outside MPS. Allow it: chmod o+x {shlex.quote(str(step))}"
                )
    return None


def main() -> int:
    """The exit status: 0, 1 when the directory is refused, 2 for a wrong call."""
    words = sys.argv[1:]
    if len(words) != 2 or words[0] not in ("public", "log", "instance"):
        print(USAGE, file=sys.stderr)  # noqa: T201
        return 2
    kind, what = words
    try:
        if kind == "public":
            notes = directories.prepare_public(what)
            if problem := entry_problem(what):
                notes.append(problem)
        elif kind == "log":
            notes = directories.prepare_log(what)
        else:
            notes = directories.prepare_hidden(directories.directories(what, "", ""))
    except DirectoryRefused as error:
        print(f"<3>{error}", file=sys.stderr)  # noqa: T201
        return 1
    except OSError as error:
        print(f"<3>{what}: {error.strerror}", file=sys.stderr)  # noqa: T201
        return 1
    for note in notes:
        print(f"<4>{note}", file=sys.stderr)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
