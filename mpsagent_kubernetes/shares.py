"""What the shares of the GPU are, who has which, and which leases follow. Pure.

A share is a device to the kubelet: it says how many there are, and gives each to one container at a time. Shares have
the same names for ever, so neither a new kubelet nor a new plugin can give one twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

Json = dict[str, Any]
LASTING = 30 * 86400.0
"""Seconds that a lease is given for. It is given again when half of them are left, for as long as its pod is there."""
UNTIL = f"{LASTING / 3600:g}h"
_UID = re.compile(r"[0-9a-f][0-9a-f-]{31,35}", re.ASCII)
_NAMED = re.compile(r"pod:.*:([0-9a-f-]{32,36})", re.ASCII)
_LONGEST = 50


@dataclass(frozen=True, slots=True)
class Shares:
    """``count``: into how many the GPU is divided. ``memory``: whether a share is one of its memory, too.
    ``processes``: how many processes of a pod have its shares together, each an equal part."""

    count: int = 100
    memory: bool = True
    processes: int = 1

    @property
    def devices(self) -> list[str]:
        return [f"share-{number}" for number in range(self.count)]

    def percent(self, shares: int) -> float:
        """Rounded down, as MPS counts."""
        return shares * 1000 // self.count / 10


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that has shares. ``uid``: what tells it from a later one of the same name."""

    namespace: str
    name: str
    uid: str
    cgroup: str
    shares: int


def is_uid(text: str) -> bool:
    return _UID.fullmatch(text) is not None


def lease(pod: Pod, shares: Shares) -> Json:
    """As the API takes it. A later one of the same name takes the place of the one before."""
    percent = shares.percent(pod.shares)
    each = max(0.1, percent * 10 // shares.processes / 10)
    memory = {"memory_limit": f"{each:g}%", "total_memory_limit": f"{percent:g}%"} if shares.memory else {}
    name = f"pod:{pod.namespace[:20]}/{pod.name[-(_LONGEST - 20) :].lstrip('-.')}:{pod.uid}"
    threads = {"active_threads": f"{each:g}%", "total_active_threads": f"{percent:g}%"}
    return {"cgroup": pod.cgroup, **threads, **memory, "until": UNTIL, "name": name}


def has_lease(pod: Pod, leases: Iterable[Json]) -> bool:
    return any(_pod_of(one) == pod.uid for one in leases)


def ours(leases: Iterable[Json]) -> list[Json]:
    """Those that a plugin has given."""
    return [one for one in leases if _pod_of(one) is not None]


def renewed(one: Json, now: float) -> Json | None:
    """The same lease for longer, as the API takes it; None while there is time. With what it was given, not with what
    the policy says now."""
    if datetime.fromisoformat(one["until"]).timestamp() - now > LASTING / 2:
        return None
    given = {**one, "memory_limit": None if one["memory_limit"] is None else one["memory_limit"][""], "until": UNTIL}
    keys = "cgroup", "active_threads", "memory_limit", "total_active_threads", "total_memory_limit", "until", "name"
    return {key: given[key] for key in keys if given[key] is not None}


def _pod_of(one: Json) -> str | None:
    found = _NAMED.fullmatch(one.get("name") or "")
    return None if found is None else found[1]
