"""The number of places taken of an instance's servers: contexts, of which a server has 48 on each device. Pure.

A hand-over is seen here, the end of a context is not: so what was handed over counts until MPS's own list
(``get_device_client_list``) says otherwise, which is right 3 ms after a context's end. Channels do not count, primary
contexts do, and each device has its own places (docs/measured/2026-11-23-2xH200-580.159.04/contexts-full.txt). A
process has one place from its hand-over on, so that its first context finds it; on which device a context will be the
list alone says. A process that has made no context for a while gives that place back, and its share of every total: it
is a launcher, such as torchrun, and its ranks need both. Its first context waits for room then, like a new process.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from mpsagent.gate.counts import Counts
from mpsagent.mps.limits import Limits

LIST = "get_device_client_list"
SETTLED = 1.0
"""Seconds after its hand-over in which a context may not be in the list yet, and after its end in it still: it takes
0.15 s to be made, and 46 that are killed at once 0.9 s to go (contexts-full.txt, an H200)."""
MOST_DEVICES = 16
KEPT = 2.0
"""Seconds for which a process has its place from its first hand-over on, whether it makes a context or not. A program
that makes one at once asks for it 0.1 s later; torchrun's ranks need longer than this for their imports."""
MOST_WITHOUT = 128
"""Living processes of one user without a place; any beyond them keep theirs. MPS has no bound for them (56 of 56 on two
H200), but each has a thread of the server."""

_DEVICE = re.compile(r"\[(\d{1,4})\] .*", re.ASCII)
_CONTEXT = re.compile(r"(\d{1,10})\.\d{1,10}", re.ASCII)

Process = tuple[int, int]
"""(pid, start time): what a process is told by."""


@dataclass(slots=True)
class KnownProcess:
    """A process that was handed over and lives. ``limits``: those of its last hand-over, ``most``: the most that any of
    its hand-overs gave it, None: unknown. ``listed``: its contexts by device; ``opened``: when further ones were handed
    over; ``fail_safe``: the fallback limits were taken."""

    pid: int
    uid: int
    gid: int
    start: int
    since: float
    limits: Limits | None
    connections: int = 0
    instance: str = ""
    restored: bool = False
    """An earlier gate knew it, and may have died in its first hand-over, which this gate then counts again."""
    context: bool = False
    """True if it has asked for a context: its first connection is its channel, each further one is a context."""
    counts: bool = True
    """True if it takes a place, and a share of the totals of its user and its job."""
    listed: Counter[int] = field(default_factory=Counter)
    opened: list[float] = field(default_factory=list)
    most: Limits | None = None
    fail_safe: bool = False
    unseen: bool = False
    """True if it came through another process, and has not passed itself."""

    def given(self, limits: Limits | None) -> None:
        """Note a further hand-over, which is that of a context, and its limits."""
        self.context = True
        self.most = None if self.most is None or limits is None else self.most.joined(limits)
        self.limits = limits
        self.unseen = False

    @property
    def process(self) -> Process:
        return (self.pid, self.start)

    @property
    def section(self) -> str:
        """The instance that it passed in; apart, that of which this is its user's."""
        return self.instance.removesuffix(f"-u{self.uid}")

    def on(self, device: int) -> int:
        return self.listed[device] + len(self.opened) if self.has_any else int(self.counts)

    @property
    def has_any(self) -> bool:
        return bool(self.listed or self.opened)


class Places:
    """Places of one instance. ``doubtful``: an earlier gate has handed over processes here, and only MPS knows the
    number of their contexts."""

    def __init__(self) -> None:
        self.doubtful = False
        self.of_user = Counts()
        """Known processes."""
        self.counted = Counts()
        """Known processes that count."""
        self._processes: dict[Process, KnownProcess] = {}
        self._others: Counter[int] = Counter()
        """Contexts by device of processes that are not known: they have ended, or have not passed here."""
        self._listable = True
        self._asked = float("-inf")
        """When MPS was asked for the list that counts."""
        self._taken: dict[int | None, int] = {}
        """What :meth:`taken` has found since something changed."""

    def __len__(self) -> int:
        return len(self._processes)

    def __iter__(self) -> Iterator[KnownProcess]:
        return iter(self._processes.values())

    def know(self, known: KnownProcess) -> None:
        self._processes[known.process] = known
        self.of_user.add(known.uid)
        if known.counts:
            self.counted.add(known.uid)
        self._taken.clear()

    def count(self, known: KnownProcess, *, yes: bool) -> None:
        """A known process counts from now on, or no longer."""
        if known.counts is not yes:
            known.counts = yes
            (self.counted.add if yes else self.counted.remove)(known.uid)
            self._taken.clear()

    def may_give_up(self, known: KnownProcess) -> bool:
        """Return whether its user may have one more process without a place."""
        return self.of_user[known.uid] - self.counted[known.uid] < MOST_WITHOUT

    def forget(self, known: KnownProcess) -> None:
        """It has ended or left; its contexts take their places until MPS's list is without them: MPS needs a moment,
        and a process that it has forked may go on with them (measured)."""
        del self._processes[known.process]
        self.of_user.remove(known.uid)
        if known.counts:
            self.counted.remove(known.uid)
        for device in {0, *known.listed} if known.has_any else ():
            self._others[device] += known.on(device)
        self._taken.clear()

    def opened(self, process: Process, now: float) -> None:
        """A context of a known process was handed over."""
        one = self._processes.get(process)
        if one is not None and self._listable:
            one.opened.append(now)
            self._taken.clear()

    def has_any(self, process: Process) -> bool:
        """Whether it may have a context."""
        one = self._processes.get(process)
        return one is not None and one.has_any

    def keeps_one(self, process: Process) -> bool:
        """Return whether the first context of this process has its place already."""
        one = self._processes.get(process)
        return one is not None and one.counts and not one.has_any

    def beyond(self, process: Process, most: int, since: float) -> bool:
        """Whether this process has contexts and its user as many as it may, by MPS's list alone, which was asked for
        long enough after ``since``: what it waits for it has itself, or others of its user wait for it."""
        one = self._processes.get(process)
        if one is None or not one.listed or self._asked < since + SETTLED:
            return False
        certain: Counter[int] = Counter()
        for other in self._processes.values():
            if other.uid == one.uid:
                certain.update(other.listed if other.has_any else dict.fromkeys(one.listed, int(other.counts)))
        return max(certain.values()) >= most

    def taken(self, uid: int | None = None) -> int:
        """Places on the fullest device, of this user alone or of everybody."""
        if not self._taken:
            devices = {0}.union(self._others, *(one.listed for one in self._processes.values()))
            everybody = Counter(self._others)
            of_users: dict[int, Counter[int]] = {}
            for one in self._processes.values():
                mine = of_users.setdefault(one.uid, Counter())
                for device in devices:
                    mine[device] += one.on(device)
                    everybody[device] += one.on(device)
            self._taken = {None: max(everybody.values(), default=0)}
            self._taken |= {one: max(mine.values()) for one, mine in of_users.items()}
        return self._taken.get(uid, 0)

    def listed(self, answers: Iterable[str] | None, asked: float) -> None:
        """What MPS has answered to :data:`LIST`; None: nothing. Before driver 580 there is no such list, nor a server
        for several users; then each process counts as one."""
        self.doubtful = False
        if answers is None:
            return
        self._asked = asked
        lines = [line.strip() for answer in answers for line in answer.splitlines()]
        if any(line.startswith("Unknown command") for line in lines):
            self._listable = False
        of_pid: dict[int, Counter[int]] = {}
        device = 0
        for line in lines:
            if match := _DEVICE.fullmatch(line):
                device = min(MOST_DEVICES, int(match[1]))
            elif match := _CONTEXT.fullmatch(line):
                of_pid.setdefault(int(match[1]), Counter())[device] += 1
        for (pid, _), one in self._processes.items():
            one.listed = of_pid.pop(pid, Counter())
            one.opened = [at for at in one.opened if at > asked - SETTLED and self._listable]
            if one.listed:
                one.context = True
                self.count(one, yes=True)
        self._others = sum(of_pid.values(), Counter())
        self._taken.clear()
