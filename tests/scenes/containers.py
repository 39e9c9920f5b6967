"""Containers of podman as clients: private pid, ipc, network and mount namespaces, and the CDI file.

podman of Debian 12 reads CDI files from /etc/cdi and /run/cdi only, so each run has a mount namespace of its own with a
fresh /run, and a fresh /dev/shm where podman has its locks: the machine's own containers are not touched. A pid
namespace around it ends podman's helpers with it. Images cannot be had without a registry: the root is an empty
directory with this machine's /usr.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.conformance.backends import REPOSITORY, USERS, other_users_python

DEVICE = "mpsagent/mps=all"
# crun of Debian 12 does not start beside a version 2 of cgroups that has controllers.
_NAMESPACE = """
if mountpoint -q /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mkdir /run/cdi
cp "$1" /run/cdi/mpsagent.json
shift
exec "$@"
"""


class Podman:
    """podman with its state below ``place``. ``shown``: what of this machine containers see at the same path, beside
    /usr, this repository, and the interpreter of clients."""

    def __init__(self, place: Path, shown: Sequence[Path] = ()) -> None:
        place.mkdir(mode=0o755)
        self._place, self._number = place, itertools.count()
        self.spec = place / "mpsagent.json"
        """The CDI file."""
        self.python = other_users_python(USERS[0])
        paths = {REPOSITORY, Path(self.python).resolve().parents[1], *shown}
        self._shown = ["/usr", *(str(path) for path in paths if not path.is_relative_to("/usr"))]

    def command(
        self,
        uid: int,
        *words: str,
        mapped: bool = False,
        device: bool = True,
        environment: Mapping[str, str] | None = None,
        parent: str | None = None,
        runtime: Path | None = None,
    ) -> list[str]:
        """``podman run`` for a user. ``mapped``: in a user namespace, where the user is root. ``parent``: in a cgroup
        of podman's below this one; None: in none of its own. ``runtime``: in the place of podman's own."""
        storage = self._place / f"storage-{next(self._number)}"
        cgroups = ["--cgroups", "disabled"] if parent is None else ["--cgroup-parent", parent]
        inside = ["--uidmap", f"0:{uid}:1", "--gidmap", f"0:{uid}:1"] if mapped else ["--user", f"{uid}:{uid}"]
        return [
            "unshare", "--mount-proc", "--pid", "--fork", "--kill-child", "sh", "-ec", _NAMESPACE, "sh", str(self.spec),
            "podman", "--root", str(storage), "--runroot", "/run/podman",
            "--storage-driver", "vfs", "--cgroup-manager", "cgroupfs", "--events-backend", "none",
            *([] if runtime is None else ["--runtime", str(runtime)]),
            "run", "--rm", "--ipc", "private", "--network", "none", *cgroups, *inside,
            "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096",  # not more than here is allowed
            *(word for path in self._shown for word in ("--volume", f"{path}:{path}:ro")),
            *(word for key, value in (environment or {}).items() for word in ("--env", f"{key}={value}")),
            *(["--device", DEVICE] if device else []),
            "--rootfs", str(self._root(uid)), *words,
        ]  # fmt: skip

    def _root(self, uid: int) -> Path:
        """Open to all, because the mount points in it are made by the container's root, who may be that user."""
        root = self._place / f"rootfs-{uid}"
        if not root.exists():
            for path in (root, *(root / name for name in ("usr", "proc", "sys", "dev", "tmp", "etc", "run"))):
                path.mkdir()
                path.chmod(0o777)
            for name in ("bin", "lib", "lib64"):
                (root / name).symlink_to(f"usr/{name}")
        return root


@contextlib.contextmanager
def cgroup_parent() -> Iterator[str]:
    """The path of a cgroup for containers. It, and what they leave in it, goes with the context."""
    path = f"/mpsagent-test-{os.getpid()}"
    try:
        yield path
    finally:
        top = Path("/sys/fs/cgroup")
        for hierarchy in (top, *top.iterdir()):
            for left in sorted(hierarchy.glob(f"{path[1:]}/**/"), reverse=True):
                with contextlib.suppress(OSError):
                    left.rmdir()


def why_not_mapped() -> str | None:
    """Why no container can have a user namespace here; None: it can."""
    done = subprocess.run(["unshare", "--user", "true"], capture_output=True, text=True, timeout=60)
    return f"no user namespaces, as in a chroot: {done.stderr.strip()}" if done.returncode else None


def why_not(place: Path, parent: str | None = None) -> str | None:
    """Why no container can be had here (with a cgroup below ``parent``); None: it can."""
    if os.geteuid() != 0:
        return "needs root: containers of several users"
    for program in ("podman", "unshare", "mountpoint"):
        if shutil.which(program) is None:
            return f"no {program} (Debian: apt install podman crun)"
    podman = Podman(place / "try")
    podman.spec.touch()
    try:
        done = subprocess.run(
            podman.command(0, "true", device=False, parent=parent), capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        return "podman does not start a container within 60 s"
    return None if done.returncode == 0 else f"podman cannot start a container: {done.stderr.strip()[-300:]}"
