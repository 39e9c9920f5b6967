"""Finding control daemons, and the proof that a process is ours.

The pid file has mode 0666 and drivers 470 and 535 write none, so it is only a hint. A process is believed to be the
daemon of a pipe directory by its owner, its command line, and the directory that its environment names, looked up in
its own mount namespace: a container's /run/mpsagent is another one than ours.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from mpsagent.linux import proc
from mpsagent.linux.atomic_file import opened
from mpsagent.linux.processes import Process, parent
from mpsagent.linux.threads import in_thread
from mpsagent.system.control import (
    DEFAULT_LOG_DIRECTORY,
    DEFAULT_PIPE_DIRECTORY,
    MULTIUSER,
    PID_FILE,
    PROGRAM,
    SERVER,
    ControlProblem,
    ProblemKind,
    Running,
)

PROOF_DEADLINE = 2.0
"""Seconds: reading another process's command line waits for its memory map, which a dying process may hold."""
MOST_FOREIGN = 16


@dataclass(frozen=True, slots=True)
class Foreign:
    """A control daemon of root's that is not ours, for people to read about: it is never touched."""

    pid: int
    uid: int
    pipe_directory: str | None
    """None: its environment cannot be read."""
    public: bool
    """It serves the public directory: it was started by hand, and the gate has to wait for its end."""
    namespace: int | None
    """Its mount namespace, where that can be read."""
    elsewhere: bool
    """In another mount namespace than the agent and the host: a container's."""
    later: str = ""

    def text(self) -> str:
        where = f"on {self.pipe_directory}" if self.pipe_directory else "on a directory that cannot be seen"
        whose = f", in another mount namespace ({self.namespace}): a container's" if self.elsewhere else ""
        return f"control daemon {self.pid} of uid {self.uid} {where}{whose}{self.later and f', with {self.later}'}"

    def of_instance(self, place: Path) -> str | None:
        """The name of the instance whose hidden directory below ``place`` it serves."""
        home = Path(self.pipe_directory or "/").parent
        return home.name if self.uid == os.geteuid() and not self.elsewhere and home.parent == place else None

    def command(self) -> str:
        """What ends it."""
        place = shlex.quote(self.pipe_directory or DEFAULT_PIPE_DIRECTORY)
        return f"kill {self.pid}" if self.elsewhere else f"echo quit | CUDA_MPS_PIPE_DIRECTORY={place} {PROGRAM}"


@dataclass(frozen=True, slots=True)
class _Daemon:
    """A process that looks like a control daemon."""

    process: Process
    options: tuple[str, ...]
    environ: dict[str, str] | None

    @property
    def flags(self) -> str:
        return "".join(word[1:] for word in self.options if word.startswith("-") and not word.startswith("--"))

    @property
    def foreground(self) -> bool:
        return "f" in self.flags or any(word.startswith("--for") for word in self.options)

    @property
    def background(self) -> bool:
        return "d" in self.flags or "--daemon" in self.options

    @property
    def later(self) -> str:
        """What it has of drivers after 580, in words: the gate has no use for it."""
        words = " ".join(self.options)
        asked = re.search(r"(?:^| )-p ?(\d+)", words)
        protocol = asked[1] if asked else (self.environ or {}).get("CUDA_MPS_PROTOCOL_VERSION", "2")
        found = ["static partitions (-S)"] if "S" in self.flags else []
        return " and ".join(found + ([] if protocol == "2" else [f"protocol {protocol[:8]}"]))

    @property
    def pipe_directory(self) -> str | None:
        if self.environ is None:
            return None
        return self.environ.get("CUDA_MPS_PIPE_DIRECTORY") or DEFAULT_PIPE_DIRECTORY


def read_pid_file(pipe_directory: str) -> int | None:
    """The number in the pid file: a hint."""
    with suppress(OSError), open(opened(f"{pipe_directory}/{PID_FILE}"), "rb") as file:
        text = file.read(32).strip()
        return int(text) if text.isdigit() and len(text) < 11 else None
    return None


async def prove(pid: int, pipe_directory: str, how: str, program: str = PROGRAM) -> Running | ControlProblem:
    """What process ``pid`` is, with a deadline."""
    try:
        return await in_thread(_prove, pid, pipe_directory, how, program, deadline=PROOF_DEADLINE)
    except TimeoutError:
        text = f"process {pid}: /proc/{pid} could not be read within {PROOF_DEADLINE:g} s"
        return ControlProblem(ProblemKind.UNSAFE, text, (f"kill -KILL {pid}",))


async def search(pipe_directory: str, program: str = PROGRAM, how: str | None = None) -> Running | ControlProblem:
    """The control daemon of ``pipe_directory``: by its pid file, otherwise among all processes of the machine."""
    pid = read_pid_file(pipe_directory)
    absent = ControlProblem(ProblemKind.ABSENT, f"no control daemon runs on {pipe_directory}")
    if pid is not None:
        found = await prove(pid, pipe_directory, how or "its pid file", program)
        if isinstance(found, Running) or found.kind is ProblemKind.UNSAFE:
            return found
    how = how or "its command line; the pid file is missing or wrong"
    try:
        return await in_thread(_search, pipe_directory, how, program, deadline=2 * PROOF_DEADLINE) or absent
    except TimeoutError:
        return absent


async def foreign(public_directory: str, own: Collection[int] = (), program: str = PROGRAM) -> list[Foreign]:
    """Root's control daemons that are not ours (``own``: pids), those on ``public_directory`` first; at most
    ``MOST_FOREIGN``. Empty when /proc cannot be read in time."""
    try:
        return await in_thread(_foreign, public_directory, own, program, deadline=2 * PROOF_DEADLINE)
    except TimeoutError:
        return []


async def end_orphans(pipe_directory: str, program: str = PROGRAM) -> list[int]:
    """Servers exit with their control daemon, but for one that is stopped: it would keep its memory for good (recording
    12, H6). Ends those of a daemon of ``pipe_directory`` that has gone, and returns their pids."""
    try:
        return await in_thread(_end_orphans, pipe_directory, program, deadline=2 * PROOF_DEADLINE)
    except TimeoutError:
        return []


# --- in a thread: reading /proc may block ----------------------------------------------------------------------------
#
# A user can keep who reads the user's command line waiting for ever, so that is asked of no process of another user.


def _foreign(public_directory: str, own: Collection[int], program: str) -> list[Foreign]:
    near = {proc.namespace("self", "mnt"), proc.namespace(1, "mnt")} - {None}
    found = []
    for pid in psutil.pids():
        if pid in own or _owner(pid) not in (0, os.geteuid()):
            continue
        if (daemon := _look(pid, Path(program).name, PROGRAM)) is None:
            continue
        process = daemon.process
        if process.alive and (daemon.foreground or daemon.background):
            directory, namespace = daemon.pipe_directory, proc.namespace(pid, "mnt")
            public = process.uid == os.geteuid() and _same_directory(pid, directory or "", public_directory)
            elsewhere = bool(near) and namespace is not None and namespace not in near
            found.append(
                Foreign(pid, process.uid, directory, public and not elsewhere, namespace, elsewhere, daemon.later)
            )
        process.close()
    return sorted(found, key=lambda one: (not one.public, one.elsewhere, one.pid))[:MOST_FOREIGN]


def _search(pipe_directory: str, how: str, program: str) -> Running | ControlProblem | None:
    problem = None
    for pid in psutil.pids():
        found = _prove(pid, pipe_directory, how, program)
        if isinstance(found, Running):
            return found
        if found.kind is ProblemKind.UNSAFE:
            problem = found
    return problem


def _prove(pid: int, pipe_directory: str, how: str, program: str) -> Running | ControlProblem:
    absent = ControlProblem(ProblemKind.ABSENT, f"process {pid} is not the control daemon of {pipe_directory}")
    if (uid := _owner(pid)) is None or (uid != os.geteuid() and not _owns_pid_file(uid, pipe_directory)):
        return absent
    if (daemon := _look(pid, Path(program).name, PROGRAM)) is None:
        return absent
    verdict: Running | ControlProblem = absent
    try:
        verdict = _judge(daemon, pipe_directory, how) or absent
        if not daemon.process.alive:
            verdict = absent
    finally:
        if not isinstance(verdict, Running):
            daemon.process.close()
    return verdict


def _end_orphans(pipe_directory: str, program: str) -> list[int]:
    ended = []
    for pid in psutil.pids():
        # MPS's servers run with root's group (recording 08, G1; drivers 470 and 535, too), which no user gets. Before
        # its memory is read, which a user could make hang.
        if set(proc.ids(pid, b"Gid:")) != {os.getegid()} or (server := _look(pid, SERVER)) is None:
            continue
        ours = _same_directory(pid, server.pipe_directory or "", pipe_directory)
        if ours and not _is_daemon(parent(pid), program) and server.process.send(signal.SIGKILL) is None:
            ended.append(pid)
        server.process.close()
    return ended


def _is_daemon(pid: int | None, program: str) -> bool:
    daemon = _look(pid or 0, Path(program).name, PROGRAM)
    if daemon is not None:
        daemon.process.close()
    return daemon is not None


def _judge(daemon: _Daemon, pipe_directory: str, how: str) -> Running | ControlProblem | None:
    process, environ = daemon.process, daemon.environ
    pid = process.pid
    if process.uid != os.geteuid():
        # Another user's daemon: its environment cannot tell us anything that we would trust.
        if _owns_pid_file(process.uid, pipe_directory):
            text = f"{pipe_directory} belongs to a control daemon of uid {process.uid} (process {pid})"
            return ControlProblem(ProblemKind.UNSAFE, text, (f"kill {pid}", f"rm -r {shlex.quote(pipe_directory)}"))
        return None
    theirs = daemon.pipe_directory
    if environ is None or theirs is None or not daemon.options or not _same_directory(pid, theirs, pipe_directory):
        return None
    if not (daemon.foreground or daemon.background):
        return None
    if daemon.foreground or daemon.later:
        how = f"was started by hand with {daemon.later}, which mpsagent does not use, so mpsagent did not start it"
        if daemon.foreground:
            how = "runs in the foreground (-f): its logs go to its standard output, and without them it cannot be seen "
            how += "which client does what"
        stop = f"echo quit -t 30 | CUDA_MPS_PIPE_DIRECTORY={shlex.quote(pipe_directory)} {PROGRAM}"
        return ControlProblem(ProblemKind.UNSAFE, f"control daemon {pid} {how}", (stop,))
    return Running(
        process,
        pipe_directory=pipe_directory,
        log_directory=environ.get("CUDA_MPS_LOG_DIRECTORY") or DEFAULT_LOG_DIRECTORY,
        devices=environ.get("CUDA_VISIBLE_DEVICES"),
        threads=environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
        multiuser="M" in daemon.flags or MULTIUSER in daemon.options,
        how=how,
    )


def _look(pid: int, *programs: str) -> _Daemon | None:
    """What ``pid`` says of itself when its command line has a program's name: the program itself, or an interpreter
    and the program; or NVIDIA's name, which it may start. The caller closes its process."""
    with suppress(OSError):
        words = [word.decode(errors="replace") for word in _proc(pid, "cmdline").split(b"\0")[:-1]]
        names = [index for index, word in enumerate(words[:3]) if Path(word).name in programs]
        if not names or (process := Process.open(pid)) is None:
            return None
        return _Daemon(process, tuple(words[names[0] + 1 :]), environment(pid))
    return None


def environment(pid: int) -> dict[str, str] | None:
    """What a process was started with; None where that cannot be read."""
    with suppress(OSError):
        pairs = (entry.partition(b"=") for entry in _proc(pid, "environ").split(b"\0") if b"=" in entry)
        return {key.decode(errors="replace"): value.decode(errors="replace") for key, _, value in pairs}
    return None


def _proc(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read(256 << 10)


def _owner(pid: int) -> int | None:
    """The real uid. The owner of /proc/PID is root for a process whose memory is not to be dumped."""
    return next(iter(proc.ids(pid, b"Uid:")), None)


def _same_directory(pid: int, theirs: str, ours: str) -> bool:
    """Whether what process ``pid`` calls ``theirs`` is our directory ``ours``: the same inode, each looked up in its
    own mount namespace. Where that cannot be seen, the same path in the same namespace."""
    try:
        there = Path(f"/proc/{pid}/root/{theirs.lstrip('/')}").stat()
        return theirs.startswith("/") and os.path.samestat(there, Path(ours).stat())
    except PermissionError:
        return os.path.realpath(theirs) == os.path.realpath(ours) and proc.namespace(pid, "mnt") in (
            None,
            proc.namespace("self", "mnt"),
        )
    except OSError:
        return False


def _owns_pid_file(uid: int, pipe_directory: str) -> bool:
    try:
        return Path(pipe_directory, PID_FILE).lstat().st_uid == uid
    except OSError:
        return False
