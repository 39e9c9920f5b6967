"""With ``placement = "by-directory"``: the public directories of instances, whose sockets the gate makes itself.

Who connects in one of them is served by its instance alone; the first instance has the directory that all others share
otherwise. The listening sockets lie in the store, as connections do, so they outlive the gate. An accepted socket has
the address of the one that it came by, also for a later gate: so the kernel says where a connection belongs.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpsagent.gate.connection import Connection
from mpsagent.gate.keeper import public_sockets
from mpsagent.gate.store import DescriptorStore
from mpsagent.wire.codec import instance_name

DIRECTORY = "mps"
"""Beside the directory of the instances."""


def own_root(daemon: Path) -> Path:
    """Where these directories are; ``daemon``: the pipe directory of the first control daemon."""
    return daemon.parent.parent.parent / DIRECTORY


def address_of(descriptor: int) -> str:
    """Of a socket; empty: it has none."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            address = sock.getsockname()
    except OSError:
        return ""
    return address if isinstance(address, str) else ""


@dataclass(eq=False, repr=False)
class OwnDirectories:
    """``listen`` takes a socket that listens, by its name in the store. ``on``: each connection belongs to the instance
    in whose directory it came; that is what the agent says, or what an earlier gate has left."""

    _root: Path
    _store: DescriptorStore
    _listen: Callable[[str, int], None]
    _say: Callable[[str], None]
    _said: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self.on = False

    def at(self, address: str) -> str | None:
        """The instance in whose directory a socket with this address is."""
        place = Path(address).parent
        return place.name if place.parent == self._root and instance_name(place.name) else None

    def of(self, connection: Connection) -> str | None:
        """The instance in whose directory this one came; None: it came in the directory of the first."""
        return self.at(address_of(connection.sock.fileno()))

    def restored(self, name: str, address: str) -> None:
        """An earlier gate has left the socket ``name``."""
        if self.at(address) is not None:
            self._store.adopt([name])
            self.on = True

    def use(self, names: Sequence[str]) -> None:
        """These instances have directories of their own from now on. One that was made stays: who looked for MPS where
        nothing is would run outside."""
        self.on = bool(names)
        self._names = tuple(names)
        self.look()

    def look(self) -> None:
        """Makes what is not there."""
        for name in self._names:
            place = self._root / name
            if all(os.path.lexists(place / one) for one in ("control", "control_privileged")):
                continue
            try:
                self._root.mkdir(mode=0o755, exist_ok=True)
                self._root.chmod(0o755)  # whatever the umask
                made = public_sockets(place, named=True)
            except OSError as error:
                text = f"the directory of instance {name} cannot be made: {error}"
                if text != self._said:
                    self._say(text)
                self._said = text
                continue
            for kind, sock in made:
                self._keep(f"{kind}@{name}", sock)

    def _keep(self, name: str, sock: socket.socket) -> None:
        self._store.drop(name)  # one that was removed
        self._store.keep(name, sock.fileno())
        self._listen(name, sock.detach())
