"""A systemd of our own: PID 1 of fresh namespaces, over a copy-on-write view of this machine's root file system, or of
another root file system, packed, where this machine has no systemd.

What happens inside stays inside: files go to a tmpfs, /proc/sys and /sys are read-only, there is no network, and
everything ends with the process that booted it. Needs root, overlayfs and a cgroup2 tree; `why_not()` says what is
missing.
"""

from __future__ import annotations

import contextlib
import functools
import lzma
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

SYSTEMD = Path("/lib/systemd/systemd")
DIE_WITH_US = ("setpriv", "--pdeathsig", "KILL")
NAMESPACES = ("unshare", "--mount", "--pid", "--cgroup", "--uts", "--ipc", "--net", "--fork", "--kill-child")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# The file system of the machine, in a mount namespace that lives as long as the machine does, across its reboots.
HOLD = r"""
set -eu
work=$1
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$work"
mkdir "$work/upper" "$work/work" "$work/root"
# Nobody of this machine lives there: a whiteout.
[ -n "$3$4" ] || mknod "$work/upper/home" c 0 0
[ -z "$4" ] || tar -xf "$4" --xattrs --xattrs-include='*' --numeric-owner -C "$work/upper"
if [ -n "$3" ]; then
    tar -xf "$3" --numeric-owner -C "$work/root"
else
    mount -t overlay overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" "$work/root"
fi
cd "$work/root"
# Only what the tests enable runs: neither this machine's services nor its mounts.
rm -rf etc/systemd/system etc/systemd/user etc/init.d etc/rc?.d etc/rcS.d
# Container images tell packages to start nothing; here they may.
rm -f usr/sbin/policy-rc.d
mkdir -p etc/systemd/system etc/init.d etc/systemd/journald.conf.d home
# The names and numbers of this machine's people are free for the tests' own.
if [ -z "$3$4" ]; then
    people=$(awk -F: '$3 >= 1000 && $3 < 60000 { printf " %s ", $1 }' etc/passwd etc/group)
    for file in etc/passwd etc/group etc/shadow etc/gshadow; do
        awk -F: -v people="$people" '!index(people, " " $1 " ")' "$file" >"$file.new"
        cat "$file.new" >"$file"
        rm "$file.new"
    done
fi
: >etc/fstab
printf '%s\n' "$2" >etc/machine-id
printf 'mpstest\n' >etc/hostname
printf '[Journal]\nStorage=volatile\nRateLimitIntervalSec=0\n' >etc/systemd/journald.conf.d/test.conf
for unit in getty.target console-getty.service dev-hugepages.mount sys-kernel-debug.mount sys-kernel-tracing.mount \
    sys-fs-fuse-connections.mount sys-kernel-config.mount proc-sys-fs-binfmt_misc.automount \
    systemd-modules-load.service; do
    ln -s /dev/null "etc/systemd/system/$unit"
done
echo held
exec sleep infinity
"""

# Arguments after the first two: what of this machine is to be seen inside, each as it is here and where it is to be.
BOOT = r"""
set -eu
root=$1 path=$2
shift 2
mount --make-rprivate /
mount --bind "$root" "$root"
cd "$root"
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sysfs sys || mount --rbind /sys sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs dev
for node in null zero full random urandom tty; do
    : >"dev/$node"
    mount --bind "/dev/$node" "dev/$node"
done
mkdir dev/shm dev/pts
mount -t tmpfs tmpfs dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
while [ $# -gt 0 ]; do
    if [ -d "$1" ]; then mkdir -p "./$2"; else mkdir -p "./$(dirname "$2")" && : >"./$2"; fi
    mount --rbind "$1" "./$2"
    shift 2
done
mkdir -p .outside
pivot_root . .outside
umount -l /.outside
exec env -i container=mpstest PATH="$path" /lib/systemd/systemd --system --unit=multi-user.target \
    --log-target=console --log-level=notice --show-status=no
"""

PROBE = r"""
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
mount -t proc proc "$1/root/proc"
mount -t cgroup2 cgroup2 "$1/root/sys/fs/cgroup" || mount -t cgroup2 cgroup2 "$1/upper"
"""


def _cgroup() -> Path:
    """Where this process is in the cgroup2 tree (beside the old one on some machines)."""
    mount = Path("/sys/fs/cgroup/unified")
    if not (mount / "cgroup.procs").exists():
        mount = Path("/sys/fs/cgroup")
    own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    group = mount / own.removeprefix("0::").lstrip("/")
    return group if group.is_dir() else mount  # a container may see another part of the tree than its path says


@functools.cache
def why_not(own_systemd: bool = True) -> str:
    """Why no machine can be booted here; empty if one can. `own_systemd`: it is this machine's that is to boot."""
    if os.geteuid() != 0:
        return "not root"
    for program in ("unshare", "nsenter", "setpriv", "pivot_root"):
        if shutil.which(program) is None:
            return f"{program} is missing"
    if own_systemd and not SYSTEMD.exists():
        return "systemd is not installed"
    try:
        group = _cgroup() / f"mpsagent-probe-{os.getpid()}"
        group.mkdir()
        group.rmdir()
    except (OSError, StopIteration) as error:
        return f"no cgroup2 tree that may be written: {error}"
    if not own_systemd:
        return ""
    with tempfile.TemporaryDirectory() as place:
        probe = subprocess.run(
            [*NAMESPACES, "sh", "-c", PROBE, "sh", place], capture_output=True, text=True, timeout=120
        )
    return f"no namespaces or no overlay here: {probe.stderr.strip()}" if probe.returncode else ""


def _unpacked(tree: Path, plain: Path) -> Path:
    """The .tar of a .tar.xz; there is not an xz everywhere."""
    with lzma.open(tree) as packed, plain.open("wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
    return plain


class Machine:
    """`boot()`, then `run()`; files through `path()`; `reboot()` keeps the disk and loses /run and /tmp."""

    def __init__(
        self,
        work: Path,
        tree: Path | None = None,
        seen: Mapping[str, str] | None = None,
        changes: Path | None = None,
    ) -> None:
        """`tree`: a packed root file system instead of this machine's. `seen`: files, devices and directories of this
        machine, by where they are inside. `changes`: what another machine has kept: it begins with that disk."""
        self.work = work
        self._seen = [text for inside, here in (seen or {}).items() for text in (here, inside.lstrip("/"))]
        self.console = work.with_suffix(".console")
        self.pid1 = 0
        self.group = _cgroup() / f"mpsagent-test-{uuid.uuid4().hex[:12]}"
        self.group.mkdir()
        work.mkdir(parents=True, exist_ok=True)
        plain = _unpacked(tree, work.with_suffix(".tar")) if tree else ""
        self._holder = subprocess.Popen(
            [
                *(*DIE_WITH_US, "unshare", "--mount", "sh", "-c", HOLD, "sh"),
                *(str(work), uuid.uuid4().hex, str(plain), str(changes or "")),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline().strip() == "held", "the machine's file system could not be set up"
        if plain:
            Path(plain).unlink()
        self._init: subprocess.Popen[bytes] | None = None

    def boot(self, timeout: float = 120) -> None:
        """Until systemd says that it is up, whether or not a unit failed."""
        enter = 'echo $$ >"$1"; shift; exec "$@"'
        with self.console.open("ab") as console:
            self._init = subprocess.Popen(
                [
                    *(*DIE_WITH_US, "sh", "-c", enter, "sh", str(self.group / "cgroup.procs")),
                    *("nsenter", "-t", str(self._holder.pid), "-m", "-r", "--", *NAMESPACES),
                    *("sh", "-c", BOOT, "sh", str(self.work / "root"), PATH, *self._seen),
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._init.poll() is not None:
                break
            children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()
            if children and Path(f"/proc/{children[0]}/comm").read_text().strip() == "systemd":
                self.pid1 = int(children[0])
                state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
                if state in ("running", "degraded"):
                    return
            time.sleep(0.05)
        raise AssertionError(f"systemd did not come up:\n{self.console.read_text(errors='replace')[-4000:]}")

    def path(self, path: str) -> Path:
        """A file inside, for reading and writing from here."""
        return Path(f"/proc/{self.pid1}/root") / path.lstrip("/")

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        file = self.path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)

    def run(
        self,
        *command: str,
        check: bool = True,
        text: str | None = None,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
        timeout: float = 180,
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self._inside(command, user, environment),
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def start(
        self, *command: str, user: str | None = None, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """A process inside that goes on; its output and errors in one pipe."""
        return subprocess.Popen(
            self._inside(command, user, environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def systemctl(self, *arguments: str, check: bool = True) -> str:
        return self.run("systemctl", "--no-pager", *arguments, check=check).stdout.strip()

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit."""
        lines = self.systemctl("show", unit, *(f"--property={name}" for name in names)).splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def journal(self, *arguments: str) -> str:
        return self.run("journalctl", "--no-pager", "-o", "cat", *arguments).stdout

    def reboot(self, timeout: float = 120) -> None:
        """Orderly, as an administrator does it."""
        self.run("systemctl", "reboot", check=False)
        assert self._init is not None
        self._init.wait(timeout)
        self.boot(timeout)

    def keep(self, changes: Path) -> None:
        """Ends it, with its disk in a file: what differs from this machine's."""
        assert self._init is not None
        self._init.kill()
        self._init.wait(60)
        pack = ["tar", "-cf", str(changes), "--xattrs", "--xattrs-include=*", "--numeric-owner", "-C"]
        enter = ["nsenter", "-t", str(self._holder.pid), "-m", "-r", "--"]
        subprocess.run([*enter, *pack, str(self.work / "upper"), "."], check=True, timeout=120)

    def end(self) -> None:
        """All of it, at once."""
        for process in (self._init, self._holder):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait(60)
        for _ in range(300):
            # Emptied by the kernel a little after the last process has gone; deepest first.
            groups = sorted(self.group.rglob("*/"), key=lambda group: -len(group.parts))
            with contextlib.suppress(OSError):
                for group in groups:
                    group.rmdir()
                self.group.rmdir()
                break
            time.sleep(0.1)
        with contextlib.suppress(OSError):
            self.work.rmdir()

    def _inside(self, command: tuple[str, ...], user: str | None, environment: Mapping[str, str] | None) -> list[str]:
        assert self.pid1, "the machine is not booted"
        become = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--"] if user else []
        variables = [f"{name}={value}" for name, value in {"PATH": PATH, **(environment or {})}.items()]
        return ["nsenter", "-t", str(self.pid1), "-a", "-r", "--", *become, "env", "-i", *variables, *command]


@contextlib.contextmanager
def booted(
    work: Path,
    tree: Path | None = None,
    seen: Mapping[str, str] | None = None,
    changes: Path | None = None,
) -> Iterator[Machine]:
    machine = Machine(work, tree, seen, changes)
    try:
        machine.boot()
        yield machine
    finally:
        machine.end()
