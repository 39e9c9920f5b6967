"""Shares of the GPU, the pods that have them, and the resulting leases. Pure.

A share is a device for the kubelet, which publishes the number of devices and gives each to one container at a time.
The names of shares never change, so that neither a new kubelet nor a new plugin can give a share twice.
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
    """A pod that has shares. ``uid`` distinguishes it from a later pod of the same name."""

    namespace: str
    name: str
    uid: str
    cgroup: str
    shares: int


def is_uid(text: str) -> bool:
    return _UID.fullmatch(text) is not None


def lease(pod: Pod, shares: Shares) -> Json:
    """Return the request for the pod's lease. A later lease of the same name replaces it."""
    percent = shares.percent(pod.shares)
    each = max(0.1, percent * 10 // shares.processes / 10)
    memory = {"memory_limit": f"{each:g}%", "total_memory_limit": f"{percent:g}%"} if shares.memory else {}
    name = f"pod:{pod.namespace[:20]}/{pod.name[-(_LONGEST - 20) :].lstrip('-.')}:{pod.uid}"
    threads = {"active_threads": f"{each:g}%", "total_active_threads": f"{percent:g}%"}
    return {"cgroup": pod.cgroup, **threads, **memory, "until": UNTIL, "name": name}


def has_lease(pod: Pod, leases: Iterable[Json]) -> bool:
    return any(_pod_of(one) == pod.uid for one in leases)


def ours(leases: Iterable[Json]) -> list[Json]:
    """Return the leases that a plugin has given."""
    return [one for one in leases if _pod_of(one) is not None]


def renewed(one: Json, now: float) -> Json | None:
    """Return the request that extends a lease with its own limits; None if it does not expire soon."""
    if datetime.fromisoformat(one["until"]).timestamp() - now > LASTING / 2:
        return None
    given = {**one, "memory_limit": None if one["memory_limit"] is None else one["memory_limit"][""], "until": UNTIL}
    keys = "cgroup", "active_threads", "memory_limit", "total_active_threads", "total_memory_limit", "until", "name"
    return {key: given[key] for key in keys if given[key] is not None}


def _pod_of(one: Json) -> str | None:
    found = _NAMED.fullmatch(one.get("name") or "")
    return None if found is None else found[1]
