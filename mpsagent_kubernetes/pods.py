"""A pod's uid and cgroup by its name, from the kubelet's directories of logs and the kernel.

The API server is not asked: a node that cannot reach it keeps working.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from mpsagent_kubernetes.shares import Pod, is_uid

DEEPEST = 4


class Unknown(Exception):
    """A fact that is needed to give a pod its lease cannot be found out."""


class Pods:
    """``logs``: /var/log/pods, with a directory NAMESPACE_NAME_UID of each pod. ``cgroups``: where the hierarchy is
    mounted."""

    def __init__(self, logs: Path, cgroups: Path) -> None:
        self._logs = logs
        self._root = cgroups.stat().st_uid
        # version 1: the hierarchies have the same names, and the gate reads the freezer's
        self._cgroups = cgroups / "freezer" if (cgroups / "freezer").is_dir() else cgroups

    def pod(self, namespace: str, name: str, shares: int) -> Pod:
        """Raises Unknown."""
        # neither a namespace nor a pod's name has a _
        begin = f"{namespace}_{name}_"
        try:
            made = [one for one in self._logs.iterdir() if one.name.startswith(begin)]
            made.sort(key=lambda one: one.stat().st_ctime, reverse=True)
        except OSError as error:
            raise Unknown(f"{self._logs}: {error.strerror}") from None
        uids = [uid for one in made if is_uid(uid := one.name.removeprefix(begin))]
        for uid in uids:  # of a pod that was made again under its name the later one
            if (cgroup := self._cgroup(uid)) is not None:
                return Pod(namespace, name, uid, cgroup, shares)
        what = f"no cgroup of {uids[0]} below {self._cgroups}" if uids else f"no {begin}UID in {self._logs}"
        raise Unknown(f"pod {namespace}/{name}: {what}")

    def gone(self, cgroup: str) -> bool:
        """Return True if no process can be in this cgroup any longer; False if that is unknown."""
        return (self._cgroups / "cgroup.procs").exists() and not (self._cgroups / cgroup.lstrip("/")).exists()

    def _cgroup(self, uid: str) -> str | None:
        """Return the path of the pod's cgroup, as /proc/PID/cgroup has it.

        Root must have created it: users may create cgroups with any name.
        """
        ending = re.compile(rf"(?:.*-)?pod{uid.replace('-', '[-_]')}(?:\.slice)?")
        for depth in range(DEEPEST):
            for path in self._cgroups.glob("*/" * depth + "*pod*"):
                with suppress(OSError):
                    if ending.fullmatch(path.name) and path.stat().st_uid == self._root:
                        return f"/{path.relative_to(self._cgroups)}"
        return None
