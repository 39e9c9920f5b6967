"""Server processes as the control daemon sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpsagent_sim import wire

if TYPE_CHECKING:
    from mpsagent_sim.host import Child, Connection, Steps


class Server:
    """A server process as the daemon sees it."""

    def __init__(self, process: Child, uid: int) -> None:
        self.process = process
        self.pid = process.pid
        self.uid = uid
        self.ready = False
        self.failed = False  # it has reported that it cannot start
        self.connection: Connection | None = None
        self.dismissed = False
        self.gone_at: float | None = None

    def ask(self, question: str) -> Steps[str | None]:
        """Return the answer to a question, without a limit of time; None if the server died meanwhile."""
        if self.connection is None or not self.connection.send(question.encode()):
            return None
        reply = yield from self.connection.receive(wire.MESSAGE)
        return wire.text(reply.data) if reply.data else None
