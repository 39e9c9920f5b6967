"""Processes whose environment takes limits away that MPS should hold them to, and who is beyond them.

With partitioning by context a client uses all multiprocessors (docs/measured.md, "A client's own environment"), with a
text in CUDA_MPS_PINNED_DEVICE_MEM_LIMIT that MPS cannot read it has no memory limit (recording 11). Nothing in MPS
prevents either; what becomes of it is the policy's (:mod:`mpsagent.core.caps`). Only the environment that a process was
started with can be seen: who sets a variable in the process itself is found by the memory that it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from mpsagent.agent import gpus
from mpsagent.agent.conditions import some
from mpsagent.core import caps
from mpsagent.core import inputs as inp
from mpsagent.core.model import State
from mpsagent.core.view import View
from mpsagent.linux.threads import in_thread
from mpsagent.system import outsider

DEADLINE = 5.0
"""Seconds for a process to show its environment; one that hangs in the kernel may show nothing for ever."""
MOST = 64
"""Processes that are looked at in one go."""
MOST_FOUND = 256
"""Processes that are spoken of, beside clients: a user may have thousands at the gate."""


class Lifted:
    """Of one instance. Each process is looked at once, soon after it came or was let in. ``spawn``: have it done
    aside."""

    def __init__(self, state: Callable[[], State], spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self._state = state
        self._spawn = spawn
        self._looked: dict[int, int] = {}
        """Start times by pid."""
        self._busy = False
        self.found: dict[int, inp.Lifts] = {}

    def look(self) -> None:
        """Begin to look at those who are new, aside."""
        state = self._state()
        here = {pid: client.peer.start for pid, client in state.clients.items()}
        here |= {held.peer.pid: held.peer.start for held in state.held.values()}
        self._looked = {pid: start for pid, start in self._looked.items() if here.get(pid) == start}
        self.found = {pid: one for pid, one in self.found.items() if pid in self._looked}
        fresh = [one for one in here.items() if one[0] not in self._looked][:MOST]
        if fresh and not self._busy:
            self._busy = True
            self._spawn(self._look(fresh))

    async def _look(self, fresh: list[tuple[int, int]]) -> None:
        shown = list[tuple[bool, str | None]]()
        devices = {name for one in gpus.known(self._state().devices) for name in (str(one.ordinal), one.uuid)}
        try:
            with suppress(TimeoutError, OSError):
                shown = await in_thread(outsider.lifts, fresh, devices, deadline=DEADLINE, slots=outsider.LOOKS)
        finally:
            self._busy = False
        self._looked |= dict(fresh)
        clients = self._state().clients
        for (pid, start), (threads, memory) in zip(fresh, shown, strict=False):
            if (threads or memory is not None) and (len(self.found) < MOST_FOUND or pid in clients):
                self.found[pid] = inp.Lifts(start, threads, memory)


def trouble(view: View) -> str | None:
    """Who is beyond the limits, in words."""
    found = [reason for _, _, reason in caps.beyond(view)]
    return f"MPS does not hold them to their limits: {some(found, '; ')}" if found else None
