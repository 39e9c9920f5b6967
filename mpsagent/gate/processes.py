"""Processes that were handed over: each has a pidfd in the loop, which tells its end, and one in the store. Also of
those that have left their servers, because they stay in their instance until they end."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from mpsagent.gate.connection import Connection
from mpsagent.gate.places import KEPT
from mpsagent.gate.queue import KnownProcess, Process, Queue
from mpsagent.gate.store import DescriptorStore, KnownName
from mpsagent.linux import peers, proc
from mpsagent.mps.limits import Limits
from mpsagent.wire.link import Found


@dataclass(slots=True)
class _Watched:
    """``since``: when its first hand-over began, on the monotonic clock."""

    pidfd: int
    name: str
    since: float


@dataclass(eq=False, repr=False)
class KnownProcesses:
    """``ended`` hears of each end, after the process is known no more; ``gave_up`` of each process that has made no
    context for a while and no longer counts."""

    _loop: asyncio.AbstractEventLoop
    _queue: Queue
    _store: DescriptorStore
    _ended: Callable[[Process], None]
    _gave_up: Callable[[KnownProcess], None]
    _watched: dict[Process, _Watched] = field(default_factory=dict, init=False)

    def prepare(self, connection: Connection, limits: Limits | None, instance: str) -> bool:
        """Before the descriptor goes out: from then on the process counts, whatever happens to this gate. False when it
        has ended. ``limits`` None: unknown."""
        process = connection.process
        known = self._queue.known_process(process)
        coming = self._new(connection, limits, instance) if known is None else replace(known)
        if known is not None:
            coming.given(limits)
        name = self._name(coming)
        watched = self._watched.get(process)
        if known is not None and (watched is None or watched.name == name):
            return True
        pidfd = peers.peer_pidfd(connection.sock, *process)
        if pidfd is None:
            return False
        if proc.has_ended(pidfd):
            os.close(pidfd)
            return False
        self._replace(coming, pidfd, name)
        return True

    def _new(self, connection: Connection, limits: Limits | None, instance: str) -> KnownProcess:
        who, watched = connection.peer, self._watched.get(connection.process)
        prepared = watched is not None and self._queue.left(connection.process) is None
        since = watched.since if watched is not None and prepared else time.monotonic()
        return KnownProcess(
            who.pid, who.uid, who.gid, connection.start, since, limits, instance=instance, most=limits
        )  # fmt: skip

    def _name(self, known: KnownProcess) -> str:
        """Return the name in the store, which carries the knowledge of this process to a later gate."""
        own = self._queue.is_own(known.process)
        of = known.uid, known.gid, known.start, known.since, known.limits, known.instance
        return str(KnownName(*of, unseen=known.unseen, own=own, most=known.most, bare=not known.context))

    def _replace(self, known: KnownProcess, pidfd: int, name: str) -> None:
        process = known.process
        before = self._watched.get(process)
        self._store.keep(name, pidfd)
        if before is not None:
            self._loop.remove_reader(before.pidfd)
            if before.name != name:
                self._store.drop(before.name)
            os.close(before.pidfd)
        self._watched[process] = _Watched(pidfd, name, known.since)
        self._loop.add_reader(pidfd, self._end, process)

    def lives(self, connection: Connection) -> bool:
        """Whether the process of a connection that was prepared has not ended yet."""
        watched = self._watched.get(connection.process)
        return watched is not None and not proc.has_ended(watched.pidfd)

    def passed(
        self, connection: Connection, limits: Limits | None, instance: str, *, fail_safe: bool = False
    ) -> KnownProcess:
        """The hand-over is done."""
        process = connection.process
        known = self._queue.known_process(process)
        if known is None:
            known = self._new(connection, limits, instance)
            self._queue.know(known)
            self._keep_place(known)
        else:
            known.given(limits)
            self._queue.places(known.instance).count(known, yes=True)
        known.fail_safe = fail_safe
        known.connections += 1
        if process not in self._watched:  # it has gone already
            self._forget(process)
        return known

    def not_passed(self, connection: Connection) -> None:
        """The hand-over came to nothing after :meth:`prepare`."""
        process = connection.process
        known = self._queue.known_process(process)
        if (left := self._queue.left(process)) is not None:
            self._stays(left)
        elif known is None:
            self._forget(process)
        else:
            self._write(known, self._name(known))

    def _keep_place(self, known: KnownProcess) -> None:
        """Let a process without a context count for a while from its first hand-over on."""
        self._loop.call_later(max(0.0, known.since + KEPT - time.monotonic()), self._give_up, known)

    def _give_up(self, known: KnownProcess) -> None:
        """Let it count no longer, unless it has asked for a context by now."""
        places = self._queue.places(known.instance)
        if self._queue.known_process(known.process) is not known or known.context or not known.counts:
            return
        if self._queue.waits_for_context(known.process) or not places.may_give_up(known):
            self._loop.call_later(KEPT, self._give_up, known)
            return
        places.count(known, yes=False)
        self._gave_up(known)

    def restore(self, name: str, said: KnownName, pidfd: int, instance: str) -> bool:
        """A pidfd out of the store; False when its process has gone (the descriptor is closed then)."""
        pid = proc.pid_of(pidfd)
        process = (pid, said.start)
        if pid <= 0 or proc.start_time(pid) != said.start or process in self._watched:
            with suppress(OSError):
                os.close(pidfd)
            return False
        known = KnownProcess(
            pid, said.uid, said.gid, said.start, said.since, said.limits, 0 if said.unseen else 1, instance, True,
            most=said.most, unseen=said.unseen, context=not said.bare,
        )  # fmt: skip
        if said.left:
            self._queue.leave(known)
        else:
            # One that waits for a context may have lost its place to another process under the earlier gate.
            known.counts = not said.bare or time.monotonic() < said.since + KEPT
            self._queue.know(known)
            self._queue.places(instance).doubtful = True
            self._keep_place(known)
        if said.own:
            self._queue.keep_own(process)
        self._watched[process] = _Watched(pidfd, name, said.since)
        self._loop.add_reader(pidfd, self._end, process)
        return True

    def found(self, said: Found, instance: str) -> KnownProcess | None:
        """Return a process that the agent says is a client of MPS: it counts from now on. None if it is not a process
        of that user, or has ended."""
        process, uid = (said.pid, said.start), said.uid
        known = self._queue.known_process(process)
        pidfd = proc.open_pidfd(*process) if known is None else None
        if pidfd is None:
            return known
        gid = proc.real_gid(process[0], uid)
        if gid is None or proc.has_ended(pidfd):
            os.close(pidfd)
            return None
        known = KnownProcess(
            said.pid, uid, gid, said.start, time.monotonic(), said.limits, said.connections, instance, most=said.most,
            unseen=not said.connections, context=said.connections != 1,
        )  # fmt: skip
        self._queue.know(known)
        if said.own:
            self._queue.keep_own(process)
        self._queue.places(instance).doubtful = True  # an agent that was away may have missed a context
        self._keep_place(known)
        self._replace(known, pidfd, self._name(known))
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
        self._write(left, str(KnownName(left.uid, left.gid, left.start, left.since, None, left.instance, left=True)))

    def _write(self, known: KnownProcess, name: str) -> None:
        """Keep the process in the store under this name."""
        watched = self._watched.get(known.process)
        if watched is not None and watched.name == name:
            return
        pidfd = proc.open_pidfd(*known.process)  # another one, because systemd keeps none twice
        if pidfd is None:
            self._forget(known.process)
        else:
            self._replace(known, pidfd, name)

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
