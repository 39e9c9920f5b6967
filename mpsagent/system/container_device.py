"""The gate as a device of containers: the Container Device Interface (CDI), and its file, which engines read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mpsagent.linux import atomic_file

KIND = "mpsagent/mps"
NAME = "all"


def device(directory: str, environment: Mapping[str, str]) -> dict[str, object]:
    """``directory``: the public one. ``environment``: what users' programs need."""
    # A client needs to write to the sockets, which it may in a directory that is mounted read-only.
    options = ["bind", "ro", "nosuid", "nodev", "noexec"]
    mount = {"hostPath": directory, "containerPath": directory, "options": options}
    edits = {"env": [f"{name}={value}" for name, value in environment.items()], "mounts": [mount]}
    devices = [{"name": NAME, "containerEdits": edits}]
    return {"cdiVersion": "0.3.0", "kind": KIND, "devices": devices}  # the first version: all know it


def text(directory: str, environment: Mapping[str, str]) -> str:
    return json.dumps(device(directory, environment), indent=2) + "\n"


def install(path: str, wanted: str) -> str | None:
    """Complete, or as it was. None, or what is wrong. The directory has to be there: elsewhere no engine would look."""
    place = Path(path)
    try:
        if not _has(place, wanted.encode()):
            atomic_file.write(place, wanted, 0o644)  # containers of users read it
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


def _has(place: Path, wanted: bytes) -> bool:
    """No more is read than that takes."""
    with suppress(OSError), open(atomic_file.opened(place), "rb") as file:
        return file.read(len(wanted) + 1) == wanted
    return False
