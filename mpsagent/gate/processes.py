"""Processes that were handed over: each has a pidfd in the loop, which tells its end, and one in the store. Also of
those that have left their servers, because they stay in their instance until they end."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from mpsagent.gate import identity, peers
from mpsagent.gate.connection import Connection
from mpsagent.gate.queue import KnownProcess, Process, Queue
from mpsagent.gate.store import KnownName, Store
from mpsagent.mps.limits import Limits


@dataclass(slots=True)
class _Watched:
    pidfd: int
    name: str


@dataclass(eq=False, repr=False)
class KnownProcesses:
    """``ended`` hears of each end, after the process is known no more."""

    _loop: asyncio.AbstractEventLoop
    _queue: Queue
    _store: Store
    _ended: Callable[[Process], None]
    _watched: dict[Process, _Watched] = field(default_factory=dict, init=False)

    def prepare(self, connection: Connection, limits: Limits, instance: str) -> bool:
        """Before the descriptor goes out: from then on the process counts, whatever happens to this gate. False when it
        has ended."""
        process = connection.process
        known = self._queue.known_process(process)
        if known is not None and (known.limits == limits or known.limits is None):
            return True
        pidfd = peers.peer_pidfd(connection.sock, *process)
        if pidfd is None:
            return False
        if identity.has_ended(pidfd):
            os.close(pidfd)
            return False
        since = known.since if known is not None else time.monotonic()
        who = connection.peer
        name = str(KnownName(who.uid, who.gid, connection.start, since, limits, instance))
        self._replace(process, pidfd, name)
        return True

    def _replace(self, process: Process, pidfd: int, name: str) -> None:
        before = self._watched.get(process)
        self._store.keep(name, pidfd)
        if before is not None:
            self._loop.remove_reader(before.pidfd)
            if before.name != name:
                self._store.drop(before.name)
            os.close(before.pidfd)
        self._watched[process] = _Watched(pidfd, name)
        self._loop.add_reader(pidfd, self._end, process)

    def lives(self, connection: Connection) -> bool:
        """Whether the process of a connection that was prepared has not ended yet."""
        watched = self._watched.get(connection.process)
        return watched is not None and not identity.has_ended(watched.pidfd)

    def passed(self, connection: Connection, limits: Limits, instance: str) -> KnownProcess:
        """The hand-over is done."""
        process = connection.process
        known = self._queue.known_process(process)
        if known is None:
            who = connection.peer
            known = KnownProcess(
                who.pid, who.uid, who.gid, connection.start, time.monotonic(), limits, instance=instance
            )
            self._queue.know(known)
        known.limits = limits
        known.connections += 1
        if process not in self._watched:  # it has gone already
            self._forget(process)
        return known

    def not_passed(self, connection: Connection) -> None:
        """The hand-over came to nothing after :meth:`prepare`."""
        process = connection.process
        if (left := self._queue.left(process)) is not None:
            self._stays(left)
        elif self._queue.known_process(process) is None:
            self._forget(process)

    def restore(self, name: str, said: KnownName, pidfd: int, instance: str) -> bool:
        """A pidfd out of the store; False when its process has gone (the descriptor is closed then)."""
        pid = identity.pid_of(pidfd)
        process = (pid, said.start)
        if pid <= 0 or identity.start_time(pid) != said.start or process in self._watched:
            with suppress(OSError):
                os.close(pidfd)
            return False
        known = KnownProcess(
            pid, said.uid, said.gid, said.start, said.since, said.limits, 0 if said.unseen else 1, instance, True
        )
        if said.left:
            self._queue.leave(known)
        else:
            self._queue.know(known)
            self._queue.places(instance).doubtful = True
        self._watched[process] = _Watched(pidfd, name)
        self._loop.add_reader(pidfd, self._end, process)
        return True

    def found(self, process: Process, uid: int, limits: Limits, instance: str) -> KnownProcess | None:
        """One that MPS has and that came through another: it counts from now on. None when it is no process of that
        user's, or has ended."""
        known = self._queue.known_process(process)
        pidfd = peers.open_pidfd(*process) if known is None else None
        if pidfd is None:
            return known
        gid = peers.real_gid(process[0], uid)
        if gid is None or identity.has_ended(pidfd):
            os.close(pidfd)
            return None
        known = KnownProcess(process[0], uid, gid, process[1], time.monotonic(), limits, instance=instance)
        self._queue.know(known)
        self._replace(process, pidfd, str(KnownName(uid, gid, process[1], known.since, limits, instance, True)))
        return known

    def release(self, process: Process, connections: int | None = None, *, given: bool = False) -> None:
        """The agent says that it has left its server, when it had passed so often (None: whatever it has done since).
        One that has passed since is at work again. ``given``: another connection of it is being handed over, and it
        will be known by that."""
        known = self._queue.known_process(process)
        if known is None:
            return
        if connections is not None and known.connections > connections:
            known.connections -= connections  # the agent counts anew, with what it has still to hear
            return
        beyond = self._queue.leave(known)
        if not given:
            self._stays(known)
        if beyond is not None:
            self._forget(beyond)

    def _stays(self, left: KnownProcess) -> None:
        """Who has left its server lies in the store as that."""
        name = str(KnownName(left.uid, left.gid, left.start, left.since, None, left.instance, left=True))
        watched = self._watched.get(left.process)
        if watched is not None and watched.name == name:
            return
        pidfd = peers.open_pidfd(*left.process)  # another one, because systemd keeps none twice
        if pidfd is None:
            self._forget(left.process)
        else:
            self._replace(left.process, pidfd, name)

    def pidfd(self, process: Process) -> int | None:
        """A copy, for another owner to close."""
        watched = self._watched.get(process)
        if watched is None:
            return None
        try:
            return os.dup(watched.pidfd)
        except OSError:
            return None

    def _end(self, process: Process) -> None:
        self._forget(process)
        self._ended(process)

    def _forget(self, process: Process) -> None:
        self._queue.forget(process)
        watched = self._watched.pop(process, None)
        if watched is not None:
            self._loop.remove_reader(watched.pidfd)
            self._store.drop(watched.name)
            os.close(watched.pidfd)
