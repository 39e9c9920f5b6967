"""Run a command as `make test` runs the tests, and report the things that it left on the machine: processes, enabled
units, lines in a shell's history, new files in the home directory, temporary files.

    python3 tests/left_behind.py COMMAND...      The status is the command's; 1 if it succeeded and something is left.

Temporary files go to a directory of this run. It is removed if the command succeeds, and named if it fails. Programs of
other users and of other runs do not count: a process is recognised by a variable in its environment, a line by the
path of this checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])
MARK = "MPSAGENT_TEST_RUN"
PYTEST = "t"
"""The name of the directory that the Makefile gives to pytest."""
PATIENCE = 20.0
"""Seconds for processes that are about to exit."""
HISTORIES = (".bash_history", ".zsh_history", ".python_history", ".local/share/fish/fish_history")
HOME_PLACES = ("", ".config", ".local/share", ".cache")


def enabled() -> set[str]:
    """Return the links by which units are enabled."""
    return {f"enabled: {path}" for path in Path("/etc/systemd").rglob("*") if path.is_symlink()}


def in_home(home: Path) -> set[str]:
    """Return the names in the places where programs keep their files."""
    found = set()
    for place in HOME_PLACES:
        if (home / place).is_dir():
            found |= {f"file: {path}" for path in (home / place).iterdir() if path.name not in HISTORIES}
    return found


def lines_about_us(home: Path) -> set[str]:
    """Return the lines with the path of this checkout in the histories of shells."""
    found = set()
    for name in HISTORIES:
        if (home / name).is_file():
            text = (home / name).read_text(errors="replace")
            found |= {f"line in {home / name}: {line}" for line in text.splitlines() if ROOT in line}
    return found


def machine(home: Path) -> set[str]:
    return enabled() | in_home(home) | lines_about_us(home)


def processes(mark: str) -> Iterator[str]:
    """Yield the processes, except this one and its ancestors, with the mark in their environment."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if f"{MARK}={mark}".encode() in variables and words:
                yield f"process {entry.name}: {words.strip()[:200]}"


def main(command: list[str]) -> int:
    home, mark = Path.home(), uuid.uuid4().hex
    before = machine(home)
    # Short, because the path of a socket has 107 bytes, and open to the other users whom the tests become.
    place = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    place.chmod(0o755)
    environment = {**os.environ, MARK: mark, "TMPDIR": str(place), "TEST_TEMPORARY": f"{place}/{PYTEST}"}
    status = subprocess.run(command, env=environment, check=False, close_fds=False).returncode
    end = time.monotonic() + PATIENCE
    while (running := sorted(processes(mark))) and time.monotonic() < end:
        time.sleep(0.2)
    left = sorted(machine(home) - before) + running
    if status == 0:
        left += [f"file: {path}" for path in sorted(place.iterdir()) if path.name != PYTEST]
        shutil.rmtree(place, ignore_errors=True)
    else:
        print(f"Temporary files of this run are kept in {place}", file=sys.stderr)
    for one in left:
        print(f"left behind by the tests: {one}", file=sys.stderr)
    return status or int(bool(left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
