"""One connection at the public socket until it is clear what it is. Messages in, what it is out; no I/O, no clock.

The mark of a connection is kept in the kernel, on the socket itself, because the socket outlives the gate in the file
descriptor store: a gate that was killed in the middle finds there how far the last one came.
"""

from __future__ import annotations

from enum import IntEnum

from mpsagent.linux.peers import Credentials
from mpsagent.mps.rendezvous import CREDENTIALS, Kind, kind_of


class Mark(IntEnum):
    """How far a connection has come. Set before the message that proves it is taken out of the socket."""

    NEW = 0
    """Accepted. The greeting may be out or not."""
    GREETED = 1
    HELD = 2
    """A CUDA client that has sent its whole greeting."""
    PASSING = 3
    """Its descriptor is being sent to it, or was."""
    PASSED = 4
    """Its descriptor was sent to it."""
    DEBUGGED = 5
    """A program that is being debugged. It is held and never handed over."""
    UNKNOWN = 6
    """A program that sent something that no driver up to 580 sends. It is held and never handed over."""

    @property
    def may_have_descriptor(self) -> bool:
        return self in (Mark.PASSING, Mark.PASSED)


class Handshake:
    """The peer's side of the rendezvous: credentials, then a kind.

    ``peer`` is what the kernel says of the process that connected. Credentials of another process or user mean that the
    connection changed hands; the process that we would hand over is then not the one that connected. ``restored``: an
    earlier gate may have taken the credentials already."""

    def __init__(self, peer: Credentials, *, restored: bool = False) -> None:
        self._peer = peer
        self._may_skip = restored
        self._named = False
        self.heard = False
        """The peer has said something."""

    def expects_kind(self) -> bool:
        """True when the next message may be the last one, so that the mark has to be set before it is taken."""
        return self._named or self._may_skip

    def message(self, data: bytes, credentials: Credentials | None) -> Kind | str | None:
        """Take in one message of the peer, with the credentials that came along. Return its kind; None: that is not
        clear yet; a text: the connection must be closed, and why. Once it has sent its credentials, no message closes
        it: the driver
        would take that for no MPS, and run the program without limits (seen with cuda-gdb on an H100)."""
        self.heard = True
        if not self._named and data == CREDENTIALS:
            if credentials is None:
                return "sent no credentials"
            if (credentials.pid, credentials.uid) != (self._peer.pid, self._peer.uid):
                return (
                    f"sent the credentials of process {credentials.pid} of user {credentials.uid}, but process "
                    f"{self._peer.pid} of user {self._peer.uid} has connected"
                )
            self._named = True
            return None
        if not self.expects_kind():
            return f"sent {data[:16].hex() or 'nothing'} where credentials were expected"
        kind = kind_of(data)
        return kind if kind in (Kind.CLIENT, Kind.FRONT_END, Kind.DEBUGGER) else Kind.UNKNOWN

    def mark(self, data: bytes) -> Mark | None:
        """Return the mark that this message of the peer makes, before it is taken out of the socket; None: none."""
        if not data or not self.expects_kind() or (data == CREDENTIALS and not self._named):
            return None
        marks = {Kind.CLIENT: Mark.HELD, Kind.DEBUGGER: Mark.DEBUGGED, Kind.FRONT_END: None}
        return marks.get(kind_of(data) or Kind.UNKNOWN, Mark.UNKNOWN)
