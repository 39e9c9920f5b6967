"""What the kernel and the name service say: which processes live, which are stopped, who people are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping

from mpsagent.core.decide import Memory
from mpsagent.core.model import State
from mpsagent.core.world import Process as Alive
from mpsagent.policy.identity import Identity
from mpsagent.system.names import Names
from mpsagent.system.processes import Process, Watcher, real_uid

AGAIN = 5.0
"""Seconds until a silent name service is asked again."""
KEPT_PEOPLE = 1000
MOST_QUESTIONS = 16
"""Users asked about at a time; with a range of uids of his own a user may come as thousands."""
CPU_LOOK = 5.0
"""Seconds between two readings of the CPU time of clients."""


def wanted_processes(state: State, memory: Memory) -> dict[int, int | None]:
    """pid -> uid of every process whose end matters; None where MPS has not named a user yet."""
    wanted: dict[int, int | None] = {server.pid: server.uid for server in state.servers.values()}
    wanted.update({client.pid: client.uid for client in state.clients.values() if client.uid is not None})
    wanted.update({climb.pid: climb.uid for climb in memory.ladder.climbs.values()})
    turns = memory.turns.leaving + ((memory.turns.turn,) if memory.turns.turn else ())
    for turn in turns:
        wanted.update(turn.members)
    for one in state.waiting:  # last: any user may start thousands, and not all may fit
        wanted.setdefault(one.pid, one.uid)
    return wanted


class Processes:
    """Live processes by pid. ``on_gone(pid)`` once for each that ends."""

    def __init__(self, on_gone: Callable[[int], None]) -> None:
        self._watcher = Watcher(on_gone)
        self._known: dict[int, Alive] = {}
        self._gone: set[int] = set()
        """Ended, but MPS still lists them: not to be held again under a number that may be somebody else's."""
        self._cpu: dict[int, tuple[float, float]] = {}
        self._looked = float("-inf")
        self.overflow = False

    def follow(self, wanted: Mapping[int, int | None], control: Process | None) -> Mapping[int, Alive]:
        """Hold exactly the wanted processes and return the live ones."""
        self._gone &= wanted.keys()
        if wanted.keys() - self._gone != self._known.keys() - ({control.pid} if control else set()):
            for pid in self._known.keys() - wanted.keys():
                self._watcher.forget(pid)
                self._known.pop(pid)
                self._cpu.pop(pid, None)
            self.overflow = False
            for pid, uid in wanted.items():
                if pid in self._gone or pid in self._known:
                    continue
                if uid and real_uid(pid) == 0:
                    continue  # a server that is starting has not become its user yet; it is looked at again
                if not self._watcher.watch(pid, uid):
                    self.overflow = True
                held = self._watcher.get(pid)
                if held is not None:
                    self._known[pid] = Alive(uid=held.uid, start=held.started)
        if control is not None and control.pid not in self._known:
            self._known[control.pid] = Alive(uid=control.uid, start=control.started)
        return self._known

    def get(self, pid: int) -> Process | None:
        return self._watcher.get(pid)

    def gone(self, pid: int) -> None:
        self._known.pop(pid, None)
        self._cpu.pop(pid, None)
        self._gone.add(pid)

    def look(self, pids: Iterable[int], control: Process | None, clients: Iterable[int], now: float) -> bool:
        """Read whether servers and control daemon are stopped and, every few seconds, the CPU time of ``clients``.
        True when anything changed."""
        before = dict(self._known)
        for pid in pids:
            held = control if control is not None and control.pid == pid else self._watcher.get(pid)
            known = self._known.get(pid)
            if held is not None and known is not None:
                self._known[pid] = Alive(known.uid, known.start, held.stopped(), known.cpu_idle_since)
        if now >= self._looked + CPU_LOOK:
            self._looked = now
            for pid in clients:
                self._look_at_cpu(pid, now)
        return before != self._known

    def _look_at_cpu(self, pid: int, now: float) -> None:
        held, known = self._watcher.get(pid), self._known.get(pid)
        used = held.cpu_seconds() if held is not None else None
        if used is None or known is None:
            return
        last = self._cpu.get(pid)
        if last is None or used > last[0] + 0.02:
            self._cpu[pid] = (used, now)
        since = self._cpu[pid][1]
        self._known[pid] = Alive(known.uid, known.start, known.stopped, since)

    def close(self) -> None:
        self._watcher.close()


class People:
    """Identities by uid. An unknown one is looked up aside; ``on_known`` is called when the answer is there. Only those
    are kept who have anything to do with MPS now."""

    def __init__(self, names: Names, on_known: Callable[[], None]) -> None:
        self._names = names
        self._on_known = on_known
        self._pending: set[asyncio.Task[None]] = set()
        self._asking: set[int] = set()
        self.known: dict[int, Identity] = {}

    def meet(self, uids: Iterable[int]) -> None:
        """Make sure that all these users are known, now or soon. Groups change: what the name service says anew of a
        known one counts from then on."""
        for uid in uids:
            identity = self._names.known(uid)
            if identity is not None:
                if self.known.get(uid) != identity:
                    self.known[uid] = identity
            elif uid not in self.known:
                self._start(uid)

    def keep(self, uids: Collection[int]) -> None:
        """Forget all others, when they are many."""
        if len(self.known) > KEPT_PEOPLE + len(uids):
            self.known = {uid: identity for uid, identity in self.known.items() if uid in uids}

    async def _ask(self, uid: int) -> None:
        try:
            await self._names.look_up(uid)
            identity = self._names.known(uid)
            if identity is not None:
                if self.known.get(uid) != identity:
                    self.known[uid] = identity
                    self._on_known()
            else:
                await asyncio.sleep(AGAIN)  # the name service does not answer: the floor until it does
        finally:
            self._asking.discard(uid)

    def refresh(self) -> None:
        """Names and groups may have changed: ask again; until the answer is there the old one counts."""
        self._names.forget()
        for uid in list(self.known):
            self._start(uid)

    def _start(self, uid: int) -> None:
        if uid not in self._asking and len(self._asking) < MOST_QUESTIONS:  # else when it is met again
            self._asking.add(uid)
            task = asyncio.get_running_loop().create_task(self._ask(uid))
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)

    def close(self) -> None:
        for task in self._pending:
            task.cancel()
