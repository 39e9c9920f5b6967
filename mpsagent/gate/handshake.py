"""One connection at the public socket until it is clear what it is. Messages in, what it is out; no I/O, no clock.

The mark of a connection is kept in the kernel, on the socket itself, because the socket outlives the gate in the file
descriptor store: a gate that was killed in the middle finds there how far the last one came.
"""

from __future__ import annotations

from enum import IntEnum

from mpsagent.mps.rendezvous import CREDENTIALS, Credentials, Kind, kind_of


class Mark(IntEnum):
    """How far a connection has come. Set before the message that proves it is taken out of the socket."""

    NEW = 0
    """Accepted. The greeting may be out or not."""
    GREETED = 1
    HELD = 2
    """A CUDA client that has said all it has to say."""
    PASSING = 3
    """Its descriptor is being sent to it, or was."""
    PASSED = 4
    """Its descriptor was sent to it."""


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
        """One message of the peer, with the credentials that came along. What it is; None: that is not clear yet; a
        text: the connection must be closed, and why."""
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
        if kind in (Kind.CLIENT, Kind.FRONT_END):
            return kind
        return f"says it is of kind {data[:8].hex()}, which is neither a client nor a front-end"
