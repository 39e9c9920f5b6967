"""The processes of clients, held by the pidfds that the gate took when they came.

Only these are ever signalled. A held connection's process is kept until it passes or leaves; a client's until it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from mpsagent.linux.proc import exists, start_time
from mpsagent.linux.processes import Process
from mpsagent.wire.link import Knock

CPU_STEP = 0.02
"""Seconds of CPU time that count as work: an idle interpreter's own housekeeping uses less."""


class ClientProcesses:
    """``on_end(pid, start, lives)`` is called once for each client whose process ends, or ``lives`` and is no longer a
    client."""

    def __init__(self, on_end: Callable[[int, int, bool], None]) -> None:
        self._on_end = on_end
        self._waiting: dict[int, Knock] = {}
        self._held: dict[tuple[int, int], tuple[Process, set[int]]] = {}
        """The processes of held connections by pid and start time, each with its connections: one pidfd for all."""
        self._unheld: set[tuple[int, int]] = set()
        """Clients of which no pidfd could be taken: pid and start time."""
        self._clients: dict[int, Process] = {}
        self._cpu: dict[int, tuple[float, float]] = {}

    def came(self, knock: Knock, process: Process | None) -> None:
        """A connection is held."""
        self.left(knock.connection)
        self._waiting[knock.connection] = knock
        held = self._held.get((knock.pid, knock.start))
        if held is not None:
            held[1].add(knock.connection)
            if process is not None:
                process.close()
        elif process is not None:
            self._held[knock.pid, knock.start] = process, {knock.connection}

    def holds(self, connection: int) -> bool:
        return connection in self._waiting

    def bound(self, connection: int) -> bool:
        """Return whether one instance alone may serve this held connection."""
        waiting = self._waiting.get(connection)
        return waiting is not None and waiting.asked is not None

    def give(self, connection: int) -> tuple[Knock, Process | None]:
        """A held connection, for another owner."""
        knock = self._waiting[connection]
        return knock, self._release(connection) or Process.open(knock.pid, knock.uid, knock.start)

    def _release(self, connection: int) -> Process | None:
        """Forget a held connection. Return its process if no other connection needs it."""
        knock = self._waiting.pop(connection, None)
        process, connections = self._held.get((knock.pid, knock.start), (None, set())) if knock else (None, set())
        connections.discard(connection)
        if knock is None or process is None or connections:
            return None
        del self._held[knock.pid, knock.start]
        return process

    def left(self, connection: int) -> None:
        process = self._release(connection)
        if process is not None:
            process.close()

    def passed(self, connection: int, pid: int, start: int) -> bool:
        """The connection was handed over. Return False if the process has ended."""
        process = self._release(connection)
        if process is not None:
            if (process.pid, process.started) == (pid, start) and self.get(pid, start) is None:
                self.known(process)
                return True
            process.close()
        return self.get(pid, start) is not None or self.hold(pid, start)

    def hold(self, pid: int, start: int) -> bool:
        """Hold a process that passed and whose pidfd did not come. Return False if it has ended. If there is no
        descriptor for it, it counts as living, and :meth:`hold_again` tries again."""
        process = Process.open(pid, started=start)
        if process is None and (
            not exists(pid) or (start_time(pid) and (process := Process.open(pid, started=start)) is None)
        ):
            return False  # its start time could be read, so there are descriptors
        if process is None or not process.kept:
            if process is not None:
                process.close()
            self._unheld.add((pid, start))
            return True
        self.known(process)
        return True

    @property
    def unheld(self) -> int:
        """The number of clients that are not held by a pidfd: no limit, turn or order reaches them."""
        return len(self._unheld)

    def hold_again(self) -> None:
        """Try to hold the clients that could not be held."""
        unheld, self._unheld = self._unheld, set()
        for pid, start in unheld:
            if self.get(pid, start) is None and not self.hold(pid, start):
                self._on_end(pid, start, False)

    def known(self, process: Process) -> None:
        """A process that passed."""
        self.forget(process.pid)
        self._clients[process.pid] = process
        process.when_gone(lambda: self.lose(process))

    def get(self, pid: int, start: int) -> Process | None:
        """Return the client with this pid, if its process started then."""
        process = self._clients.get(pid)
        return process if process is not None and process.started == start else None

    def waiting(self, connection: int, start: int) -> Process | None:
        """The process of a held connection."""
        knock = self._waiting.get(connection)
        if knock is None or knock.start != start:
            return None
        return self._held.get((knock.pid, start), (None, ()))[0]

    def released(self, clients: Collection[int]) -> list[list[int]]:
        """Return pid and start time of the processes that passed and are no longer among these clients: they have
        left their servers, or lost them, and live."""
        return [[pid, one.started] for pid, one in self._clients.items() if pid not in clients]

    def forget(self, pid: int) -> None:
        process = self._clients.pop(pid, None)
        self._cpu.pop(pid, None)
        if process is not None:
            process.close()

    def forget_waiting(self) -> None:
        """The link is lost: the gate tells everything again."""
        for connection in list(self._waiting):
            self.left(connection)

    def stopped(self) -> frozenset[int]:
        return frozenset(pid for pid, process in self._clients.items() if process.stopped())

    def idle_since(self, pids: Iterable[int], now: float) -> Mapping[int, float]:
        """Since when each of these clients has used no CPU time."""
        found: dict[int, float] = {}
        for pid in pids:
            process = self._clients.get(pid)
            used = process.cpu_seconds() if process is not None else None
            if used is None:
                continue
            last = self._cpu.get(pid)
            if last is None or used > last[0] + CPU_STEP:
                last = self._cpu[pid] = (used, now)
            found[pid] = last[1]
        return found

    def forget_idle(self, pids: Iterable[int]) -> None:
        """These have not been idle: they could not work."""
        for pid in pids:
            self._cpu.pop(pid, None)

    def close(self) -> None:
        self.forget_waiting()
        self._unheld.clear()
        for pid in list(self._clients):
            self.forget(pid)

    def lose(self, process: Process, *, lives: bool = False) -> None:
        """Forget a process that has ended, or that ``lives`` and is no longer a client."""
        if self._clients.get(process.pid) is process:
            self.forget(process.pid)
            self._on_end(process.pid, process.started, lives)
