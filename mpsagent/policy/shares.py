"""What a policy or a lease gives the processes of a job or container, and which processes those are. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from mpsagent.mps.limits import Device, Limits, Total
from mpsagent.policy import values
from mpsagent.policy.origins import Origin

LONGEST_NAME = 64
"""Letters."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a job may have within what its user may: ``threads`` and ``memory`` of each client process (None, or a
    device that is not named: as the user's), ``total_…`` and ``max_clients`` of all together. ``memory``: by device, as
    a policy has it. ``source``: where that was written. ``job``: whose processes count together: a lease's name or
    number, or the path of a cgroup."""

    source: str
    threads: values.Threads | None = None
    memory: Mapping[str, values.Memory] | None = None
    total_threads: values.TotalThreads | None = None
    total_memory: values.Memory | None = None
    max_clients: int | None = None
    job: str = ""
    origin: Origin | None = None

    @property
    def bounds(self) -> bool:
        """The processes of the job have something together."""
        return (self.total_threads, self.total_memory, self.max_clients) != (None, None, None)

    @property
    def whose(self) -> str:
        """``cgroup /a``, ``job slurm-17``, ``lease 3``."""
        kind = "cgroup " if self.job.startswith("/") else "" if self.job == self.source else "job "
        return kind + self.job

    @property
    def counted_as(self) -> str:
        """The job's name between agent and gate. A process that was let in with an earlier lease of that name is not
        the job's. It is short, because users name cgroups and all jobs have to fit into one message."""
        name = self.job if self.job.startswith("/") else self.source
        return name if len(name) <= LONGEST_NAME else hashlib.sha256(name.encode()).hexdigest()

    def total(self, devices: Sequence[Device]) -> Total | None:
        """What all client processes of the job may use together; None: there is no such bound."""
        return values.total(self.total_threads, self.total_memory, self.threads, devices)

    def key(self, name: str) -> str:
        """A value's place, as a policy has it."""
        return f"{self.source}.{name}"

    def place(self, name: str) -> str:
        """The key of a value with the file and line of its section; of a lease its number."""
        return self.source if self.origin is None else self.origin._replace(key=self.key(name)).place

    def lower(self, limits: Limits, devices: Sequence[Device]) -> Limits:
        """Limits that are nowhere more than this share."""
        threads, memory = limits.threads, dict(limits.memory)
        if self.threads is not None:
            threads = min(threads, values.percent_of(self.threads, devices, 1.0))
        for device in devices if self.memory is not None else ():
            key = values.for_device(self.memory or {}, device)
            size = None if key is None else values.bytes_of((self.memory or {})[key], device)
            if size is not None:
                memory[device.ordinal] = min(size, memory.get(device.ordinal, size))
        return (self.total(devices) or Total()).cap(replace(limits, threads=threads, memory=memory))


@dataclass(frozen=True, slots=True)
class Lease:
    """A share for a job until some time (seconds since the epoch). A process is the job's when it is of the user, in
    the cgroup, and it or a process that it descends from is ``process`` (pid and start time), as far as these are
    given. ``by``: the uid that ordered it. ``name``: what the batch system calls the job."""

    number: int
    share: Share
    since: float
    until: float
    by: int
    uid: int | None = None
    cgroup: str | None = None
    process: tuple[int, int] | None = None
    name: str | None = None

    def fits(self, uid: int, cgroup: str | None, lineage: tuple[tuple[int, int], ...]) -> bool:
        """``lineage``: the process and those it descends from."""
        if self.uid not in (None, uid) or (self.process is not None and self.process not in lineage):
            return False
        return self.cgroup is None or (cgroup is not None and matches(self.cgroup, cgroup))


def matches(pattern: str, cgroup: str) -> bool:
    """Whether a cgroup is one that a pattern names, or lies below it."""
    return named(pattern, cgroup) is not None


def named(pattern: str, cgroup: str) -> str | None:
    """Which cgroup, that one or one above it, a pattern names. A pattern with a slash is a path from the root on;
    without one it is the name of a unit or slice, at any place. * and ? stand for any letters but a slash."""
    parts = [part for part in cgroup.split("/") if part]
    wanted = [part for part in pattern.split("/") if part]
    depth: int | None
    if pattern.startswith("/"):
        depth = len(wanted) if len(parts) >= len(wanted) and all(map(_fits, parts, wanted)) else None
    else:
        depth = next((count for count, part in enumerate(parts, 1) if _fits(part, pattern)), None)
    return None if depth is None else "/" + "/".join(parts[:depth])


def _fits(part: str, pattern: str) -> bool:
    return _expression(pattern).fullmatch(part) is not None


@lru_cache(256)
def _expression(pattern: str) -> re.Pattern[str]:
    """In time that grows with the product of both lengths, because what a * took is not tried anew: who names a cgroup
    may be hostile."""
    first, *others = (re.escape(one).replace(r"\?", ".") for one in pattern.split("*"))
    between = "".join(f"(?>.*?{one})" for one in others[:-1])
    return re.compile(f"{first}{between}{''.join(f'.*{last}' for last in others[-1:])}", re.DOTALL)
