"""Slurm of one node in namespaces of its own: munged, slurmctld and slurmd are Debian's, users and jobs are real.

MPSAGENT_SLURM_TREE names a tree of another Debian whose Slurm is taken (debian13.sh makes one); it is not changed. The
node's processes stand in the machine's cgroups (version 1, the freezer), below a name that is this cluster's alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tests.scenes.stage import REPOSITORY, USERS, StageError

TREE = os.environ.get("MPSAGENT_SLURM_TREE")
FREEZER = Path("/sys/fs/cgroup/freezer")
_PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "munged": "munge",
    "sbatch": "slurm-client",
    "ip": "iproute2",
}
# Another Debian's tree becomes the root, with what both have in common: the stage's directories, repository, devices.
_ROOT = """
mount --make-rprivate /
root=$PWD/root
mkdir over "$root"
mount -t tmpfs tmpfs over
mkdir over/upper over/work
mount -t overlay overlay -o "lowerdir=$TREE,upperdir=over/upper,workdir=over/work" "$root"
mkdir -p "$root$REPOSITORY" "$root$PWD"
for path in /dev /sys /proc; do mount --rbind "$path" "$root$path"; done
for path in /tmp "$REPOSITORY"; do mount --bind "$path" "$root$path"; done
exec chroot "$root" sh -ec 'cd "$1"; shift; eval "$INSIDE"' sh "$PWD" "$1"
"""
# Files of a tree of /usr (campaigns/slurm_packages.sh makes one) stand where this machine's /usr has none. What is
# mounted below /usr, a driver for example, is there again.
_BELOW = """
mount --make-rprivate /
mkdir before
mounts=$(cut -d ' ' -f 2 /proc/self/mounts | sed -n 's|^/usr/||p')
mount --rbind /usr before
mount -t overlay overlay -o "lowerdir=/usr:$BELOW" /usr
for path in $mounts; do mount --rbind "before/$path" "/usr/$path"; done
eval "$INSIDE"
"""
# Slurm asks for addresses only where there is one that is not the loopback's; its users need names.
_INSIDE = """
mount --make-rprivate /
hostname "$1.host"
ip link set lo up
ip address add 10.9.8.7/32 dev lo
for file in passwd group hosts; do mount --bind "$file" "/etc/$file"; done
# For jobs: the way to both may be closed to their users.
mkdir repository libraries
mount --bind "$REPOSITORY" repository
[ ! -d "$LIBRARIES" ] || mount --bind "$LIBRARIES" libraries
munged --force --foreground --key-file="$PWD/key" --socket="$PWD/munge.sock" --pid-file="$PWD/munge.pid" \\
    --log-file="$PWD/munge.log" --seed-file="$PWD/seed" &
until [ -S munge.sock ]; do sleep 0.05; done
slurmctld -D -c &
slurmd -D -N "$1" &
echo ready
wait
"""


def why_not(below: Path | None = None) -> str | None:
    """Why there can be no cluster here; None: there can."""
    if os.geteuid() != 0:
        return "needs root: jobs of several users"
    path = None if TREE is None else os.pathsep.join(f"{TREE}/usr/{place}" for place in ("bin", "sbin"))
    for program, package in _PROGRAMS.items():
        found = shutil.which(program, path=path)
        if found is None and not (below and any((below / place / program).exists() for place in ("bin", "sbin"))):
            return f"no {program} (Debian: apt install {package})"
    if not FREEZER.is_dir():
        known = Path("/proc/cgroups").read_text().splitlines()
        return None if any(row.startswith("freezer\t") for row in known) else "the kernel has no freezer for jobs"
    trial = FREEZER / f"mpsagent-test-{os.getpid()}"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        return f"no cgroups for jobs here: {error}"
    return None


class Cluster:
    """``client``: the words of mpsagent-cli. ``settings``: lines of the hooks' settings, in sh. ``proctrack``: how
    slurmd keeps the processes of a job together. ``check``: seconds between health checks. ``below``: a tree of /usr
    for a machine without Slurm. ``shared``: how each of its ``gpus`` is. ``kill_wait``: seconds from SIGTERM to
    SIGKILL."""

    def __init__(
        self, place: Path, client: Sequence[str], settings: str = "", proctrack: str = "cgroup", check: int = 2,
        below: Path | None = None, shared: str = "mps:100", kill_wait: int = 2, gpus: int = 1,
    ) -> None:  # fmt: skip
        place.mkdir(mode=0o755)
        self.client = client
        self.place, self.node = place, f"node{os.getpid()}"
        self._environment = {"SLURM_CONF": str(place / "slurm.conf"), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        if "LD_LIBRARY_PATH" in os.environ:  # a driver's libraries may be found by that alone
            self._environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        (place / "jobs").mkdir()
        (place / "jobs").chmod(0o1777)
        self._freezer = FREEZER
        if not FREEZER.is_dir():  # cgroups of version 2 alone: the hooks take Slurm's to be there, too
            self._freezer = place / "cgroup/freezer"
            self._freezer.mkdir(parents=True)
            subprocess.run(["mount", "-t", "cgroup", "-o", "freezer", "freezer", self._freezer], check=True)
            settings += "\ncgroup=/slurm*/uid_$uid/job_$job"
        self._write(client, settings, proctrack, check, shared, kill_wait, gpus)
        inside = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._log = (place / "log").open("wb")
        self._outer = subprocess.Popen(
            [*inside, "sh", "-ec", _ROOT if TREE else _BELOW if below else _INSIDE, "sh", self.node], cwd=place,
            env={
                **self._environment, "TREE": TREE or "", "BELOW": str(below), "REPOSITORY": str(REPOSITORY),
                "LIBRARIES": sysconfig.get_path("purelib"), "INSIDE": _INSIDE,
            },
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
        )  # fmt: skip

    def _write(
        self, client: Sequence[str], settings: str, proctrack: str, check: int, shared: str, kill_wait: int, gpus: int
    ) -> None:
        for name, row in (("passwd", "{0}:x:{1}:{1}::/tmp:/bin/sh\n"), ("group", "{0}:x:{1}:\n")):
            rows = [row.format(f"job{uid}", uid) for uid in USERS]
            (self.place / name).write_text("".join([Path("/etc", name).read_text(), *rows]))
        (self.place / "hosts").write_text(f"127.0.0.1 localhost\n10.9.8.7 {self.node} {self.node}.host\n")
        (self.place / "key").write_bytes(os.urandom(1024))
        (self.place / "key").chmod(0o600)
        devices = [self.place / f"nvidia{number}" for number in range(gpus)]
        for number, device in enumerate(devices):
            os.mknod(device, 0o20666, os.makedev(195, number))
        # A health check has nothing of slurmd's environment.
        lines = [f'client="{" ".join(client)}"', f"export SLURM_CONF={self.place}/slurm.conf"]
        lines += [
            f"known={self.place}/proctrack",
            f"gpus={self.place}/gpus",
            f"comments={self.place}/comments",
            settings,
            "",
        ]
        (self.place / "settings").write_text("\n".join(lines))
        for name in ("prolog", "epilog", "task-prolog", "health-check"):
            hook = self.place / name
            command = f"MPSAGENT_SLURM_SETTINGS={self.place}/settings {self.place}/repository/packaging/slurm/{name}"
            note = "" if name == "task-prolog" else f"echo {name} >>{self.place}/ran\n"
            # slurmd starts one each interval, also beside others that have not ended: on a busy machine ever more
            alone = f"exec 9>{hook}.lock; flock -n 9 || exit 0\n" if name == "health-check" else ""
            hook.write_text(f"#!/bin/sh\n{alone}{command} || exit 1\n{note}")
            hook.chmod(0o755)
        kind, _, count = shared.partition(":")
        gres = [f"Name=gpu Type=fake File={device}\n" for device in devices]
        gres += [f"Name={kind} Count={count} File={device}\n" for device in devices]
        (self.place / "gres.conf").write_text("".join(["AutoDetect=off\n", *gres]))
        (self.place / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={self._freezer.parent}\n")
        for name in ("state", "spool"):
            (self.place / name).mkdir()
        values = {
            "ClusterName": "test", "SlurmctldHost": f"{self.node}(10.9.8.7)", "SlurmUser": "root", "SlurmdUser": "root",
            # A job whose prolog has failed is tried again after that many seconds, 120 where nothing is said.
            "AuthType": "auth/munge", "AuthInfo": f"socket={self.place}/munge.sock,cred_expire=40",
            "CredType": "cred/munge",
            "StateSaveLocation": self.place / "state", "SlurmdSpoolDir": self.place / "spool",
            "SlurmctldPidFile": self.place / "slurmctld.pid", "SlurmdPidFile": self.place / "slurmd.pid",
            "ProctrackType": f"proctrack/{proctrack}", "TaskPlugin": "task/none", "MpiDefault": "none",
            "JobAcctGatherType": "jobacct_gather/none", "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU", "GresTypes": f"gpu,{kind}",
            "SlurmdParameters": "config_overrides",
            "SchedulerParameters": "nohold_on_prolog_fail,sched_min_interval=0,batch_sched_delay=0",
            "PrologFlags": "Alloc", "KillWait": kill_wait, "MailProg": "/bin/true", "HealthCheckInterval": check,
            "Prolog": self.place / "prolog", "Epilog": self.place / "epilog", "TaskProlog": self.place / "task-prolog",
            "HealthCheckProgram": self.place / "health-check",
        }  # fmt: skip
        rows = [f"{key}={value}" for key, value in values.items()]
        rows.append(f"NodeName={self.node} NodeAddr=10.9.8.7 CPUs=64 Gres=gpu:fake:{gpus},{kind}:{int(count) * gpus}")
        rows.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES")
        (self.place / "slurm.conf").write_text("\n".join(rows) + "\n")

    def _inside(self) -> int:
        """The pid of the first process in the namespaces; 0 while there is none."""
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        found = children.read_text().split() if self._outer.poll() is None else []
        return int(found[0]) if found else 0

    def run(self, *words: str, uid: int = 0) -> str:
        """What a command of Slurm's says. Raises StageError."""
        who = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if uid else []
        enter = ["nsenter", f"--target={self._inside()}", "--mount", "--root", "--wd", "--net", "--uts", "--pid"]
        done = subprocess.run(
            [*enter, *who, *words], cwd="/", env=self._environment, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=60,
        )  # fmt: skip
        if done.returncode:
            raise StageError(f"{words}: {done.stderr}\n{self.log()}")
        return done.stdout

    def ready(self) -> bool:
        """Whether jobs would start. Raises StageError: they never will."""
        if self._outer.poll() is not None:
            raise StageError(f"Slurm has ended:\n{self.log()}")
        return b"ready" in (self.place / "log").read_bytes() and self.state() == "IDLE"

    def state(self) -> str:
        """The node's state: "IDLE", "MIXED+DRAIN"; empty while slurmctld does not answer."""
        return self._field("State=")

    def reason(self) -> str:
        return self._field("Reason=")

    def _field(self, name: str) -> str:
        try:
            said = self.run("scontrol", "--oneliner", "show", "node", self.node)
        except StageError:
            return ""
        after = said.partition(f" {name}")[2]
        return after.split(" [")[0].strip() if name == "Reason=" else after.split(" ")[0]

    def submit(self, uid: int, gres: str, *lines: str, options: Sequence[str] = ()) -> int:
        """A batch job with ``--gres=GRES``; its number. What it prints is in ``said``."""
        script = self.place / "jobs" / f"script-{len(list((self.place / 'jobs').iterdir()))}"
        script.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        script.chmod(0o755)
        out = self.place / "jobs" / "%j.out"
        words = ["sbatch", "--parsable", f"--gres={gres}", "--ntasks=1", f"--output={out}", *options, str(script)]
        return int(self.run(*words, uid=uid))

    def said(self, job: int) -> str:
        path = self.place / "jobs" / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def show(self, job: int) -> str:
        return self.run("scontrol", "--oneliner", "show", "job", str(job))

    def jobs(self) -> list[str]:
        """The states of jobs that have not ended altogether: their epilog may still run."""
        return self.run("squeue", "--noheader", "--states=all", "--format=%i %T").splitlines()

    def unfinished(self) -> list[str]:
        done = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT")
        return [row for row in self.jobs() if row.split()[1] not in done]

    def ran(self, hook: str) -> int:
        """How often one of root's hooks has ended well."""
        path = self.place / "ran"
        return path.read_text().split().count(hook) if path.exists() else 0

    def everything_said(self) -> str:
        """By the daemons and, with them, the hooks."""
        return (self.place / "log").read_text(errors="replace")

    def log(self) -> str:
        return self.everything_said()[-4000:]

    def end(self) -> None:
        """Kill everything in the namespaces and remove the cgroups."""
        first = self._inside()
        if first:
            os.kill(first, 9)  # the first process of a pid namespace takes all others with it
        self._outer.wait(20)
        self._log.close()
        for top in self._freezer.glob(f"slurm*{self.node}"):
            for path, _, _ in os.walk(top, topdown=False):
                Path(path).rmdir()
        if self._freezer != FREEZER:
            subprocess.run(["umount", self._freezer], check=True)
