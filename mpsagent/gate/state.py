"""The last admissions of each instance on disk, so that a gate that starts without an agent goes on with what it was
told last."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from mpsagent.linux import atomic_file
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
        message = decode_from_agent(atomic_file.read(path, LONGEST_PACKET))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise StateError(f"{path} is not used: {error}") from None
    if not isinstance(message, Admissions):
        raise StateError(f"{path} holds no table and is not used")
    return message


def save(directory: Path, admissions: Admissions) -> None:
    """In one step: a gate that is killed leaves the old file or the new one. Where it cannot be written, none is left:
    the old one lets in whom the new one shuts out. Raises OSError and LinkError."""
    path = place(directory, admissions.instance)
    try:
        atomic_file.write(path, encode(admissions))
    except (OSError, LinkError):
        path.unlink(missing_ok=True)
        raise
