"""Which container a process is in, by the name that engines give a container's cgroup. Pure.

Root's engines make cgroups that users cannot enter. Below a user's own (``user@UID.service``) the user makes the names:
what is found there is as good as the user's word, and says nothing about anyone else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

_PREFIXES = {
    "libpod": "podman", "docker": "docker", "nerdctl": "containerd", "cri-containerd": "containerd", "crio": "cri-o",
}  # fmt: skip
_SCOPE = re.compile(r"(libpod|docker|nerdctl|cri-containerd|crio)-([0-9a-f]{12,64})(?:\.scope)?", re.ASCII)
_BARE = re.compile(r"[0-9a-f]{64}", re.ASCII)
_POD = re.compile(r"(?:.*-)?pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})(?:\.slice)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Container:
    """``engine`` None: its name does not say. ``pod``: the uid of its Kubernetes pod."""

    engine: str | None
    id: str
    pod: str | None = None


@lru_cache(1024)  # each client is looked at for each list of clients
def container(cgroup: str | None) -> Container | None:
    """The innermost one; None: the cgroup is no container's that is known by its name."""
    found: Container | None = None
    pod: str | None = None
    above = ""
    for part in (cgroup or "").split("/"):
        if match := _POD.fullmatch(part):
            pod = match[1].replace("_", "-")
        elif match := _SCOPE.fullmatch(part):
            found = Container(_PREFIXES[match[1]], match[2], pod)
        elif _BARE.fullmatch(part):  # engines that make cgroups themselves: /docker/ID, …/podUID/ID
            found = Container("docker" if above == "docker" else None, part, pod)
        above = part
    return found
