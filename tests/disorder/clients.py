"""Starts the clients and guests of a population, does to them what it says, and writes down what they print.

One loop over pipes, pidfds and a heap of times; a thousand processes may live at once. Signals go through pidfds, and
only to processes that were started here.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import resource
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.disorder.population import Deed

MOST_OUTPUT = 64 << 10


@dataclass
class Record:
    """One process and what became of it. Times in seconds since the run began; `lines`: when read, and what."""

    number: int
    deed: Deed
    pid: int = 0
    started: float = 0.0
    lines: list[tuple[float, str]] = field(default_factory=list)
    signals: list[tuple[float, str]] = field(default_factory=list)
    ended: float | None = None
    rc: int | None = None

    def json(self) -> dict[str, Any]:
        return {**asdict(self), "deed": asdict(self.deed)}

    def at(self, words: str) -> float | None:
        """When a line with these words was printed, at the latest."""
        found = self.between(words)
        return None if found is None else found[1]

    def between(self, words: str) -> tuple[float, float] | None:
        """When a line with these words was printed: not before, and not after. Each line has seconds by a clock that
        starts when its process runs: after its start, and before its first line was read (later, on a busy machine)."""
        stamps = [_stamp(line) for _, line in self.lines]
        began = min((read - stamp for (read, _), stamp in zip(self.lines, stamps, strict=True) if stamp is not None),
                    default=0.0)  # fmt: skip
        for (read, line), stamp in zip(self.lines, stamps, strict=True):
            if words in line:
                return (self.started, read) if stamp is None else (self.started + stamp, min(read, began + stamp))
        return None

    def said(self, words: str) -> bool:
        return any(words in line for _, line in self.lines)


def _stamp(line: str) -> float | None:
    """Of `[   0.012 pid 5 uid 7] text` the seconds."""
    try:
        return float(line[1:].split(" pid ")[0]) if line.startswith("[") else None
    except ValueError:
        return None


@dataclass
class _Living:
    record: Record
    process: subprocess.Popen[bytes]
    pidfd: int
    pipe: int
    rest: bytes = b""
    watched_for: list[tuple[str, float, str]] = field(default_factory=list)
    """Words to wait for, then seconds, then what is sent."""


class Field:
    """Where it all happens. `command`: of a client or a guest; `environment`: for every one of them."""

    def __init__(
        self,
        client: Sequence[str],
        guest: Sequence[str],
        environment: Mapping[str, str],
        guest_arguments: Sequence[str],
        echo: Callable[[str], None] | None = None,
    ) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 16384)), hard))
        self.client, self.guest, self.environment = tuple(client), tuple(guest), dict(environment)
        self.guest_arguments, self.echo = tuple(guest_arguments), echo
        self.began = time.monotonic()
        self.records: list[Record] = []
        self.living: dict[int, _Living] = {}
        self.poll = select.epoll()
        self.by_descriptor: dict[int, _Living] = {}
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()

    def now(self) -> float:
        return time.monotonic() - self.began

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (when, next(self.order), what))

    def play(self, deeds: Sequence[Deed], extra: Sequence[tuple[float, Callable[[], None]]] = ()) -> None:
        """Start every deed at its time; returns when the last one has begun."""
        self.began = time.monotonic()
        for deed in deeds:
            self.at(deed.at, lambda deed=deed: self.start(deed))  # type: ignore[misc]
        for when, what in extra:
            self.at(when, what)
        last = max((deed.at for deed in deeds), default=0.0)
        self.loop(lambda: self.now() > last and not any(at <= last for at, _, _ in self.heap[:1]), last + 600)

    def wait(self, seconds: float) -> list[Record]:
        """Until all have ended, at most so long; who has not."""
        self.loop(lambda: not self.living and not self.heap, self.now() + seconds)
        return [one.record for one in self.living.values()]

    def loop(self, done: Callable[[], bool], until: float) -> None:
        while self.now() < until and not done():
            next_at = self.heap[0][0] if self.heap else until
            pause = max(0.0, min(next_at, until, self.now() + 0.25) - self.now())
            self._look(pause)
            while self.heap and self.heap[0][0] <= self.now():
                heapq.heappop(self.heap)[2]()
                self._look(0)

    def _look(self, pause: float) -> None:
        for descriptor, _ in self.poll.poll(pause, 256):
            if (one := self.by_descriptor.get(descriptor)) is not None:
                self._read(one) if descriptor == one.pipe else self._ended(one)

    # one process

    def start(self, deed: Deed) -> None:
        record = Record(len(self.records), deed)
        self.records.append(record)
        if deed.guest:
            command = [*self.guest, *deed.arguments, *self.guest_arguments]
        else:
            command = [*self.client, *deed.arguments]
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        record.started = self.now()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, cwd="/", start_new_session=True,
            user=deed.uid, group=deed.uid, extra_groups=[], env={**self.environment, "DEV": str(deed.device)},
        )  # fmt: skip
        os.close(writer)
        record.pid = process.pid
        one = _Living(record, process, os.pidfd_open(process.pid), reader)
        self.living[process.pid] = one
        for descriptor in (one.pidfd, one.pipe):
            self.by_descriptor[descriptor] = one
            self.poll.register(descriptor, select.EPOLLIN)
        self._arrange(one)

    def _arrange(self, one: _Living) -> None:
        """What will be done to it: at once, or once it has printed something."""
        deed = one.record.deed
        match deed.kind:
            case "kill-early":
                self._later(one, deed.after, "KILL")
            case "kill-waiting":
                self.at(self.now() + deed.after, lambda: self._send_unless_served(one, "KILL"))
            case "stop-early":
                self._later(one, deed.after, "STOP")
                self._later(one, deed.until, "CONT")
            case "kill-kernel":
                one.watched_for.append(("launch", deed.after, "KILL"))
            case "kill-idle":
                one.watched_for.append(("] sms ", deed.after, "KILL"))
            case "term":
                one.watched_for.append(("] sms ", deed.after, "TERM"))
            case "stop":
                one.watched_for.append(("] sms ", deed.after, "STOP"))
                one.watched_for.append(("] sms ", deed.until, "CONT"))

    def _later(self, one: _Living, seconds: float, name: str) -> None:
        self.at(self.now() + seconds, lambda: self.send(one.record.pid, name))

    def _send_unless_served(self, one: _Living, name: str) -> None:
        if not one.record.said("] sms "):
            self.send(one.record.pid, name)

    def send(self, pid: int, name: str) -> bool:
        """A signal to a process of ours that lives."""
        one = self.living.get(pid)
        if one is None:
            return False
        try:
            signal.pidfd_send_signal(one.pidfd, getattr(signal, f"SIG{name}"))
        except ProcessLookupError:
            return False
        one.record.signals.append((self.now(), name))
        return True

    def _read(self, one: _Living) -> None:
        while True:
            try:
                data = os.read(one.pipe, 65536)
            except BlockingIOError:
                return
            if not data:
                self._forget(one.pipe)
                return
            *lines, one.rest = (one.rest + data[:MOST_OUTPUT]).split(b"\n")
            for raw in lines:
                line = raw.decode(errors="replace")
                one.record.lines.append((self.now(), line))
                for words, seconds, name in one.watched_for:
                    if words in line:
                        self._later(one, seconds, name)

    def _ended(self, one: _Living) -> None:
        if self.by_descriptor.get(one.pipe) is one:
            self._read(one)
        one.record.rc = one.process.wait()
        one.record.ended = self.now()
        if one.rest:
            one.record.lines.append((self.now(), one.rest.decode(errors="replace")))
        del self.living[one.record.pid]
        self._forget(one.pidfd)
        if self.by_descriptor.get(one.pipe) is one:
            self._forget(one.pipe)
        if self.echo is not None:
            self.echo(f"{one.record.number} {one.record.deed.kind} {one.record.deed.uid} rc {one.record.rc}")

    def _forget(self, descriptor: int) -> None:
        del self.by_descriptor[descriptor]
        self.poll.unregister(descriptor)
        os.close(descriptor)

    def end(self) -> None:
        """Nothing is left of what was started here."""
        for one in list(self.living.values()):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(one.pidfd, signal.SIGCONT)
                signal.pidfd_send_signal(one.pidfd, signal.SIGKILL)
        self.heap.clear()
        self.loop(lambda: not self.living, self.now() + 10)
