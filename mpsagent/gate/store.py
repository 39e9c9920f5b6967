"""systemd's file descriptor store (or the keeper's, which speaks the same): what lies there outlives the gate.

Names carry what the kernel cannot say of a descriptor. They are short, because all of them come back in one environment
variable, and the kernel takes none longer than 128 KiB.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mpsagent.linux import notify
from mpsagent.linux.descriptors import with_descriptors
from mpsagent.mps.limits import Limits
from mpsagent.wire.codec import instance_name

NAMES_BUDGET = 116_000
"""Bytes of all names with their separators, and what of it is for hand-overs that are under way."""
RESERVED = 4_000
MOST_WAITING = 32_768
LONGEST_NAME = 250
"""systemd takes names of at most 255 characters."""
BELOW_NORMAL = "-"
"""In a name, after the limits: the client has the lower priority."""
MOST = "+"
"""In a name, after the limits: the most that any hand-over gave follows, where that is more than the last one gave."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class ConnectionName:
    """A connection at the public socket: its number (which orders it) and the start time of its process."""

    number: int
    start: int
    privileged: bool = False

    def __str__(self) -> str:
        return f"{'p' if self.privileged else 'c'}{_short(self.number)}.{_short(self.start)}"


@dataclass(frozen=True, slots=True)
class KnownName:
    """The pidfd of a process that was handed over, or came through another one (``unseen``); ``left``: it has left its
    server, and only its instance counts. ``since`` in seconds. ``limits`` None: unknown; ``most``: the most that any of
    its hand-overs gave it, None: unknown; ``own``: its limits are its own, not those of its user;
    ``bare``: it has not asked for a context."""

    uid: int
    gid: int
    start: int
    since: float
    limits: Limits | None = None
    instance: str = ""
    unseen: bool = False
    left: bool = False
    own: bool = False
    most: Limits | None = None
    bare: bool = False

    def __str__(self) -> str:
        numbers = self.uid, self.gid, self.start, round(self.since * 1000)
        passed = ("w" if self.own else "b") if self.bare else ("o" if self.own else "k")
        letter = "l" if self.left else "u" if self.unseen else passed
        return _name(letter, numbers, self.limits, self.instance, self.most)


@dataclass(frozen=True, slots=True)
class DaemonName:
    """The connection to the daemon of a hand-over: the number of the client's connection, which attempt it is, whose
    client, and the limits that were set for it; ``own``: as in :class:`KnownName`."""

    number: int
    generation: int
    uid: int
    gid: int
    fail_safe: bool
    limits: Limits | None = None
    instance: str = ""
    own: bool = False

    def __str__(self) -> str:
        numbers = (self.number, self.generation, self.uid, self.gid, int(self.fail_safe))
        return _name("e" if self.own else "d", numbers, self.limits, self.instance, self.limits)


def _name(letter: str, numbers: Iterable[int], limits: Limits | None, instance: str, most: Limits | None) -> str:
    """Return the name without the limits if it would be too long with them."""
    words = [*map(_short, numbers), *([] if limits is None else _limit_words(limits))]
    if limits is not None and most != limits:
        words += [MOST, *([] if most is None else _limit_words(most))]
    text = letter + ".".join(words) + (f"@{instance}" if instance else "")
    return text if limits is None or len(text) < LONGEST_NAME else _name(letter, numbers, None, instance, None)


def _limit_words(limits: Limits) -> list[str]:
    memory = [f"{_short(device)}={_short(size)}" for device, size in sorted(limits.memory.items())]
    return [_short(round(limits.threads * 10)), *memory, *([BELOW_NORMAL] if limits.below_normal else [])]


def _limits_of(words: list[str]) -> Limits:
    below_normal, tenths = words[-1] == BELOW_NORMAL, _long(words[0])
    if not 0 < tenths <= 1000:
        raise ValueError(words[0])
    pairs = [word.split("=", 1) for word in (words[1:-1] if below_normal else words[1:])]
    return Limits(tenths / 10, {_long(device): _long(size) for device, size in pairs}, below_normal)


def parse_name(text: str) -> ConnectionName | KnownName | DaemonName | None:
    """Return what a name says; None for a name that this gate does not write."""
    found = _parsed(text)
    return found if str(found) == text else None


def _parsed(text: str) -> ConnectionName | KnownName | DaemonName | None:
    """Return what a name says. Some texts that nothing writes are accepted, such as a maximum without limits."""
    text, at, instance = text.partition("@")
    letter, words = text[:1], text[1:].split(".")
    count = {"c": 2, "p": 2, "k": 4, "o": 4, "b": 4, "w": 4, "u": 4, "l": 4, "d": 5, "e": 5}.get(letter)
    if count is None or len(words) < count or (at and not instance_name(instance)):
        return None
    try:
        numbers = [_long(word) for word in words[:count]]
        end = words.index(MOST) if count == 4 and MOST in words else len(words)
        limits = _limits_of(words[count:end]) if end > count else None
        most = limits if end == len(words) else _limits_of(words[end + 1 :]) if words[end + 1 :] else None
    except (ValueError, IndexError):
        return None
    if count == 5:
        number, generation, uid, gid, fail_safe = numbers
        return DaemonName(number, generation, uid, gid, fail_safe == 1, limits, instance, letter == "e")
    if count == 4:
        uid, gid, start, since = numbers
        if since >= 1 << 50:  # milliseconds, of which a float keeps no more
            return None
        unseen, left, own, bare = letter == "u", letter == "l", letter in "ow", letter in "bw"
        return KnownName(uid, gid, start, since / 1000, limits, instance, unseen, left, own, most, bare)
    return ConnectionName(numbers[0], numbers[1], letter == "p") if limits is None else None


def _short(number: int) -> str:
    digits = ""
    while True:
        number, digit = divmod(number, len(_DIGITS))
        digits = _DIGITS[digit] + digits
        if number <= 0:
            return digits


def _long(text: str) -> int:
    if not 0 < len(text) <= 12:
        raise ValueError(text)
    number = 0
    for letter in text:
        number = number * len(_DIGITS) + _DIGITS.index(letter)
    return number


class DescriptorStore:
    """Tells the service manager. Nothing here blocks or raises; without one, nothing is kept."""

    def __init__(self, loop: asyncio.AbstractEventLoop, address: str | None = None) -> None:
        self._loop = loop
        self._address = notify.address() if address is None else address
        self._socket: socket.socket | None = None
        self._waiting: deque[tuple[bytes, int | None]] = deque()
        self._names: set[str] = set()
        self._used = 0
        self._when_free: list[Callable[[], None]] = []

    @property
    def present(self) -> bool:
        return bool(self._address)

    @property
    def congested(self) -> bool:
        """The manager is behind: what is given to it now is not safe yet."""
        return bool(self._waiting)

    def when_free(self, call: Callable[[], None]) -> None:
        """Calls once when it is not congested any more."""
        self._when_free.append(call)

    def adopt(self, names: Iterable[str]) -> None:
        """These lie in the store already."""
        for name in set(names) - self._names:
            self._names.add(name)
            self._used += len(name) + 1

    def keep(self, name: str, descriptor: int) -> bool:
        """Puts a copy into the store; False when it has no room. Safe from the moment this returns."""
        if not self.present or name in self._names:
            return self.present
        # a hand-over that is under way always has room
        if self._used + len(name) + 1 > NAMES_BUDGET + (0 if name[:1] != "d" else RESERVED):
            return False
        self._names.add(name)
        self._used += len(name) + 1
        # systemd would drop a socket that hangs up, and with it the client's last word (FDPOLL, systemd 246)
        poll = "" if name[:1] in "kobwul" else "\nFDPOLL=0"
        self._tell(f"FDSTORE=1\nFDNAME={name}{poll}".encode(), descriptor)
        return True

    def drop(self, name: str) -> None:
        if name in self._names:
            self._names.discard(name)
            self._used -= len(name) + 1
            self._tell(f"FDSTOREREMOVE=1\nFDNAME={name}".encode(), None)

    def tell(self, *lines: str) -> None:
        """READY=1, STATUS=… and the like."""
        if self.present:
            self._tell("\n".join(lines).encode(), None)

    def close(self) -> None:
        if self._socket is not None:
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _tell(self, message: bytes, descriptor: int | None) -> None:
        if self._waiting or not self._send(message, descriptor):
            if len(self._waiting) >= MOST_WAITING:
                return
            # the manager is busy: the order of messages must stay, and the descriptor may be closed before it is sent
            copy = None
            if descriptor is not None:
                try:
                    copy = os.dup(descriptor)
                except OSError:
                    return
            self._waiting.append((message, copy))
            self._watch()

    def _watch(self) -> None:
        if self._socket is not None:
            self._loop.add_writer(self._socket.fileno(), self._flush)

    def _send(self, message: bytes, descriptor: int | None) -> bool:
        """False when it has to be tried again later."""
        for _ in range(2):
            try:
                if self._socket is None:
                    self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
                    self._socket.setblocking(False)
                    self._socket.connect(self._address)
                self._socket.sendmsg([message], with_descriptors(() if descriptor is None else (descriptor,)))
                return True
            except BlockingIOError:
                return False
            except OSError:
                self.close()  # the manager has a new socket at the same place
        return True

    def _flush(self) -> None:
        while self._waiting:
            message, descriptor = self._waiting[0]
            if not self._send(message, descriptor):
                self._watch()
                return
            self._waiting.popleft()
            if descriptor is not None:
                os.close(descriptor)
        if self._socket is not None:
            self._loop.remove_writer(self._socket.fileno())
        calls, self._when_free = self._when_free, []
        for call in calls:
            call()
