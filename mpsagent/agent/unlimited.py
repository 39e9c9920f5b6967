"""Clients that MPS does not hold to a thread limit, because their environment asks for partitioning by context.

Measured on driver 580.159.04 (docs/measured.md, "A client's own environment"): such a client of a server with 20
percent saw and used all multiprocessors, unless it had a percentage of its own below 100. Nothing in MPS prevents it;
what becomes of it is the policy's (:mod:`mpsagent.core.caps`). Only the environment that a process was started with can
be seen: who sets the variable in the process itself is not found.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from mpsagent.core import caps
from mpsagent.system import outsider
from mpsagent.system.threads import in_thread

if TYPE_CHECKING:
    from mpsagent.agent.host import Agent

DEADLINE = 5.0
"""Seconds for a process to show its environment; one that hangs in the kernel may show nothing for ever."""
MOST = 64
"""Processes that are looked at in one go."""
SHOWN = 5


class Unlimited:
    """Of one instance. Each client is looked at once, soon after it was let in."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._looked: dict[int, int] = {}
        """Start times by pid."""
        self._busy = False
        self.found: set[int] = set()

    def look(self) -> None:
        """Begin to look at those who are new, aside."""
        clients = {pid: client.peer.start for pid, client in self._agent.state.clients.items()}
        self._looked = {pid: start for pid, start in self._looked.items() if clients.get(pid) == start}
        self.found &= self._looked.keys()
        fresh = [one for one in clients.items() if one[0] not in self._looked][:MOST]
        if fresh and not self._busy:
            self._busy = True
            self._agent.spawn(self._look(fresh))

    async def _look(self, fresh: list[tuple[int, int]]) -> None:
        asking = list[bool]()
        try:
            with suppress(TimeoutError, OSError):
                asking = await in_thread(outsider.unlimited, fresh, deadline=DEADLINE, slots=outsider.LOOKS)
        finally:
            self._busy = False
        self._looked |= dict(fresh)
        self.found |= {pid for (pid, _), asks in zip(fresh, asking, strict=False) if asks}

    def trouble(self) -> str | None:
        found = caps.unlimited(self._agent.core.view())
        if not found:
            return None
        who = "; ".join(f"process {client.pid} of user {client.uid}" for client in found[:SHOWN])
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        return f"may use all multiprocessors, whatever its thread limit: {who}{more}"
