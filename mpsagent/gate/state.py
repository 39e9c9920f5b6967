"""The last admissions of each instance on disk, so that a gate that starts without an agent goes on with what it was
told last."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from mpsagent.wire.codec import LONGEST_PACKET, LinkError, encode, instance_name
from mpsagent.wire.link import Admissions, decode_from_agent


def place(directory: Path, instance: str) -> Path:
    return directory / f"admissions{'-' if instance else ''}{instance}.json"


class StateError(Exception):
    """The file is there but cannot be trusted or read; the text says why."""


def instances(directory: Path) -> list[str]:
    """Those whose admissions are there; first the one without a name, which is the one that the gate is started for."""
    found = sorted(path.stem.removeprefix("admissions") for path in directory.glob("admissions*.json"))
    return [name[1:] for name in found if not name or (name[0] == "-" and instance_name(name[1:]))]


def forget(directory: Path, kept: Collection[str]) -> None:
    """Only the files of these instances are left, and that of the first one."""
    for name in instances(directory):
        if name and name not in kept:
            with suppress(OSError):
                place(directory, name).unlink()


def load(directory: Path, instance: str = "") -> Admissions | None:
    """None when there is none. Raises StateError."""
    path = place(directory, instance)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}") from None
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
            raise StateError(f"{path} is not a file of root's that nobody else may write; it is not used")
        data = file.read(LONGEST_PACKET + 1)
    try:
        message = decode_from_agent(data)
    except LinkError as error:
        raise StateError(f"{path} is damaged and not used: {error}") from None
    if not isinstance(message, Admissions):
        raise StateError(f"{path} holds no admissions and is not used")
    return message


def save(directory: Path, admissions: Admissions) -> None:
    """In one step: a gate that is killed leaves the old file or the new one. Raises OSError."""
    path = place(directory, admissions.instance)
    temporary = path.with_name(f".{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)
        file.write(encode(admissions))
    temporary.replace(path)
