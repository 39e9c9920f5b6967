"""An open front-end as the control daemon sees it: commands in, answers out, one packet each (recording 08, G4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpsagent_sim.host import Connection, DaemonHost, Steps

_END = bytes(8)
ANSWER = b"\0\0\0\0"
STATUS = b"\1\0\0\0"
MAX_TEXT = 4096


class Session:
    """A front-end's connection, whose credentials have `uid`. privileged: it came to control_privileged; root's at
    `control` may not change anything either (driver 550)."""

    __slots__ = ("connection", "host", "privileged", "uid")

    def __init__(self, host: DaemonHost, connection: Connection, uid: int, privileged: bool) -> None:
        self.host = host
        self.connection = connection
        self.uid = uid
        self.privileged = privileged

    def command(self) -> Steps[str | None]:
        """The next command, waiting for it: a packet of 8 bytes with the length, then the text. None when the front-end
        has ended, has gone, or breaks the rules."""
        length = yield from self.connection.receive()
        length.close()
        size = int.from_bytes(length.data, "little")
        if len(length.data) != 8 or length.data == _END:
            return None
        if size > MAX_TEXT:  # the length is believed, and NVIDIA's daemon ends like this (470, 535, 550)
            self.host.crash()
        text = yield from self.connection.receive(size + 1)
        text.close()
        if len(text.data) != size:
            return None
        return text.data.removesuffix(b"\0").removesuffix(b"\n").decode("utf-8", "replace")

    def answer(self, text: str) -> None:
        """Send an answer, to which the front-end adds the newline. Nothing is sent to a closed connection."""
        self.connection.send(ANSWER + text.encode("utf-8", "surrogateescape"))

    def end(self, status: int = 0) -> None:
        """The exit status for the front-end, and the end of the connection."""
        self.connection.send(STATUS + status.to_bytes(4, "little"))
        self.connection.close()
