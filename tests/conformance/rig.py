"""Drives one MPS instance, simulated or real, and writes down everything that can be seen of it.

The transcript has the form of the recordings: `ctl> 'CMD' rc=… ms out=… err=…` is one run of the front-end,
`control.log|` and `server.log|` are new log lines, `cN|` is a client's own output. Runs with a bare Python 3.11
or later, because on a borrowed GPU machine nothing of this project is installed.

Nothing that a rig started outlives it: `end()` finds its processes by a mark in their environment, by parentage and by
the pid file, and signals them through pidfds.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.conformance.backends import CONTROL, USERS, Backend, RigError, other_users_python, real_backend, sim_backend
from tests.conformance.processes import Log, Process, await_ends, exited, processes, send_signal

if TYPE_CHECKING:
    from tests.conformance.questions_handovers import Relay

__all__ = [
    "CONTROL", "NOBODY", "SLOW_CLIENT", "USERS", "Backend", "Log", "Reply", "Rig", "RigError", "Started",
    "exited", "other_users_python", "real_backend", "send_signal", "sim_backend",
]  # fmt: skip

MARK = "MPS_RIG"
NOBODY = 65534
SLOW_CLIENT = 20.0  # seconds that an ordinary client may take


@dataclass(frozen=True)
class Reply:
    """One run of the front-end. rc is None when it was given up."""

    rc: int | None
    out: str
    err: str
    seconds: float


@dataclass
class Started:
    """A process of ours with its output in files, so that nobody can block on a full pipe."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path
    since: float
    uid: int = 0
    text: str = ""

    def read(self) -> str:
        return self.out.read_text(errors="replace")


class Rig:
    """One fresh pair of pipe and log directories, and what happens in it."""

    def __init__(self, backend: Backend, base: Path, *, echo: Callable[[str], None] | None = None) -> None:
        self.backend = backend
        self.base = base
        self.pipe, self.log = base / "pipe", base / "log"
        self.transcript: list[str] = []
        self.since = time.monotonic()
        self.echo = echo
        self.mark = secrets.token_hex(8)
        self.clients: dict[str, Started] = {}
        self.others: list[Started] = []
        self.logs: dict[str, Log] = {}
        self.files = 0
        os.umask(0o022)
        base.mkdir(mode=0o755, parents=True)
        (base / "out").mkdir(mode=0o755)
        self.directories("")

    # What is written down

    def note(self, text: str) -> None:
        stamp = f"[{time.monotonic() - self.since:8.3f}] "
        for line in (stamp + text).split("\n"):
            self.transcript.append(line)
            if self.echo:
                self.echo(line)

    def section(self, title: str) -> None:
        """Start the part of the transcript that has this title."""
        if self.transcript:
            self.drain()
        self.note(f"==================== {title}")

    def delay(self, name: str, seconds: float) -> None:
        """A duration that matters; compared in coarse classes."""
        self.note(f"DELAY {name} {seconds:.3f}")

    def directories(self, where: str) -> None:
        """Pipe and log directory of instance `where` ("" is the ordinary one)."""
        for name in ("pipe", "log"):
            (self.base / f"{name}{where}").mkdir(mode=0o755, exist_ok=True)
        for name in ("control", "server"):
            key = f"{name}{where}"
            self.logs.setdefault(key, Log(self.base / f"log{where}" / f"{name}.log", f"{key}.log"))

    def drain(self) -> None:
        """Append the new lines of the logs."""
        for log in self.logs.values():
            log.refresh()
            for line in log.lines[log.drained :]:
                self.note(f"   {log.label}| {line}")
            log.drained = len(log.lines)

    def environment(self, extra: dict[str, str] | None = None, where: str = "") -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_MPS_")}
        return {
            **clean,
            **self.backend.environment,
            MARK: self.mark,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.base / f"pipe{where}"),
            "CUDA_MPS_LOG_DIRECTORY": str(self.base / f"log{where}"),
            **(extra or {}),
        }

    def run(
        self,
        arguments: Sequence[str],
        *,
        stdin: bytes | None = None,
        stdin_from: int = subprocess.DEVNULL,
        uid: int | None = None,
        env: dict[str, str] | None = None,
        argv0: str | None = None,
        program: str | None = None,
    ) -> Started:
        """Start a program with output in files. The caller waits for it or `end` kills it."""
        self.files += 1
        out, err = (self.base / "out" / f"{self.files}.{kind}" for kind in ("out", "err"))
        identity = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
        with out.open("wb") as out_file, err.open("wb") as err_file:
            since = time.monotonic()
            process = subprocess.Popen(
                [argv0, *arguments[1:]] if argv0 is not None else list(arguments),
                executable=program or arguments[0],
                stdin=stdin_from if stdin is None else subprocess.PIPE,
                stdout=out_file, stderr=err_file, env=env if env is not None else self.environment(),
                cwd="/", start_new_session=True, **identity,
            )  # fmt: skip
        if stdin is not None and process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(stdin)
                process.stdin.close()
        started = Started(process, out, err, since, uid or 0)
        self.others.append(started)
        return started

    # The control program

    def session(self, uid: int | None = None) -> tuple[Started, int]:
        """A front-end whose standard input stays open: it, and the descriptor to write its commands to."""
        reader, writer = os.pipe()
        started = self.run([self.backend.control], stdin_from=reader, uid=uid)
        os.close(reader)
        return started, writer

    def control(self, *arguments: str, timeout: float = 10.0) -> None:
        """Run the control program with options that end at once (`-h`, `-v`)."""
        started = self.run([self.backend.control, *arguments])
        rc = started.process.returncode if exited(started.process, timeout) else "TIMEOUT"
        self.note(f"{list(arguments)!r} rc {rc} OUT {started.read()} ERR {started.err.read_text(errors='replace')}")

    def start(
        self, *arguments: str, env: dict[str, str] | None = None, where: str = "", timeout: float = 20.0
    ) -> Reply:
        """Start the daemon with an option that returns (`-d`)."""
        self.directories(where)
        for log in self.logs.values():
            log.reopen_if_replaced()
        started = self.run([self.backend.control, *arguments], env=self.environment(env, where))
        rc = started.process.returncode if exited(started.process, timeout) else None
        reply = Reply(rc, started.read(), started.err.read_text(errors="replace"), time.monotonic() - started.since)
        extra = f" with {env!r}" if env else ""
        place = f" in {where}" if where else ""
        self.note(f"start{place} {arguments!r}{extra} rc={rc} out={reply.out!r} err={reply.err!r}")
        if rc == 0:  # the daemon's first lines may come a moment after its parent has returned
            self.wait_log("CUDA MPS Control binary version", 2, log=f"control{where}", quiet=True)
        self.drain()
        return reply

    def foreground(self, *arguments: str) -> Started:
        """Start the daemon in the foreground; its output is noted by `foreground_output`."""
        started = self.run([self.backend.control, *arguments])
        self.note(f"foreground {arguments!r}")
        return started

    def foreground_ended(self, started: Started, what: str, timeout: float = 5.0) -> None:
        rc = started.process.returncode if exited(started.process, timeout) else "TIMEOUT"
        self.note(f"control rc after {what} {rc}")

    def foreground_output(self, started: Started) -> None:
        self.note("fg stdout:")
        for line in started.read().splitlines():
            self.note(f"   fg| {line}")

    def begin(self, command: str, *, uid: int | None = None, where: str = "") -> Started:
        """Send a batch and do not wait for the answer; `finish` does."""
        started = self.run(
            [self.backend.control], stdin=(command + "\n").encode(), uid=uid, env=self.environment(where=where)
        )
        started.text = command
        return started

    def finish(self, started: Started, timeout: float = 10.0, *, quiet: bool = False, where: str = "") -> Reply:
        done = exited(started.process, max(0.0, timeout - (time.monotonic() - started.since)))
        seconds = time.monotonic() - started.since
        who = f"ctl as {started.uid}" if started.uid else "ctl"
        who += f" in {where}" if where else ""
        if not done:
            started.process.kill()
            exited(started.process, 5)
            if not quiet:
                self.note(f"{who}> {started.text!r} TIMEOUT after {timeout:g}s out=None")
            return Reply(None, "", "", seconds)
        reply = Reply(started.process.returncode, started.read(), started.err.read_text(errors="replace"), seconds)
        if not quiet:
            self.note(
                f"{who}> {started.text!r} rc={reply.rc} {seconds * 1000:.1f}ms out={reply.out!r} err={reply.err!r}"
            )
        return reply

    def ctl(
        self, command: str, timeout: float = 10.0, *, uid: int | None = None, where: str = "", quiet: bool = False
    ) -> Reply:
        """One run of the front-end with `command` (several lines are one batch) on its standard input."""
        return self.finish(self.begin(command, uid=uid, where=where), timeout, quiet=quiet, where=where)

    # Clients

    def spawn(self, uid: int, mode: str, *arguments: float | str, env: dict[str, str] | None = None) -> str:
        """Start a CUDA client of user `uid` and return its name (c1, c2, ...)."""
        command = [*self.backend.client, mode, *(str(argument) for argument in arguments)]
        return self._client(self.run(command, uid=uid, env=self.environment(env)), uid, (mode, *arguments), env)

    def spawn_renamed(self, uid: int, mode: str, *arguments: float | str, argv0: str, program: str = "") -> str:
        """A client whose argv[0], and with `program` (a link) also whose command name, is not its own."""
        command = [*self.backend.renamed_client, mode, *(str(argument) for argument in arguments)]
        environment = self.environment(self.backend.renamed_environment)
        started = self.run(command, uid=uid, env=environment, argv0=argv0, program=program or None)
        return self._client(started, uid, (mode, *arguments), None)

    def _client(self, started: Started, uid: int, what: tuple[float | str, ...], env: dict[str, str] | None) -> str:
        name = f"c{len(self.clients) + 1}"
        self.others.remove(started)
        self.clients[name] = started
        self.note(f"spawn {name} pid {started.process.pid} uid {uid} {what!r} {env or ''}")
        return name

    def pid(self, target: str | int) -> int:
        return target if isinstance(target, int) else self.clients[target].process.pid

    def wait(self, name: str, timeout: float = SLOW_CLIENT) -> int | None:
        """Wait for a client to end and write down what it printed; None if it still runs."""
        started = self.clients[name]
        rc = started.process.returncode if exited(started.process, timeout) else None
        self.note(f"{name} pid {started.process.pid} rc={rc} output:")
        for line in started.read().splitlines():
            self.note(f"   {name}| {line}")
        for line in started.err.read_text(errors="replace").splitlines()[-20:]:
            self.note(f"   {name} stderr| {line}")
        return rc

    def wait_output(self, name: str, pattern: str, timeout: float = SLOW_CLIENT) -> bool:
        """Wait until a client has printed a line with `pattern`."""
        end = time.monotonic() + timeout
        while not re.search(pattern, self.clients[name].read()):
            if time.monotonic() > end or (exited(self.clients[name].process, 0) and not self._printed(name, pattern)):
                self.note(f"WAIT-TIMEOUT {name} never printed {pattern!r}")
                return False
            time.sleep(0.002)
        return True

    def _printed(self, name: str, pattern: str) -> bool:
        return re.search(pattern, self.clients[name].read()) is not None

    def working(self, name: str) -> bool:
        """Wait until a client has its context (and so counts for MPS)."""
        return self.wait_output(name, r"\] sms ")

    def signal(self, target: str | int, number: signal.Signals, who: str = "") -> bool:
        sent = send_signal(self.pid(target), number)
        label = target if isinstance(target, str) else f"{who} {target}".strip()
        self.note(f"signal {number.name} {label}{'' if sent else ' (gone)'}")
        return sent

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def relay(self) -> Relay:
        """Between clients and the daemon, for those whose pipe directory is its ``directory``."""
        from tests.conformance.questions_handovers import Relay

        return Relay(self)

    # What the log says

    def wait_log(
        self, pattern: str, timeout: float, *, log: str = "control", quiet: bool = False
    ) -> re.Match[str] | None:
        """The next line with `pattern` after the last one found here, waiting for it if needed."""
        followed = self.logs[log]
        regex = re.compile(pattern)
        end = time.monotonic() + timeout
        while True:
            followed.refresh()
            for number in range(followed.seen, len(followed.lines)):
                if match := regex.search(followed.lines[number]):
                    followed.seen = number + 1
                    return match
            if time.monotonic() > end:
                if not quiet:
                    self.note(f"WAIT-TIMEOUT {log}.log has no {pattern!r}")
                return None
            time.sleep(0.0005)

    def skip_log(self, log: str = "control") -> None:
        """Let `wait_log` look only at what comes from now on."""
        self.logs[log].refresh()
        self.logs[log].seen = len(self.logs[log].lines)

    def server(self, timeout: float = 5.0, where: str = "") -> int:
        """Pid of the server that was started last, once it is Ready; 0 if none came."""
        followed = self.logs[f"control{where}"]
        end = time.monotonic() + timeout
        while True:
            followed.refresh()
            ready = [m[1] for line in followed.lines if (m := re.search(r"NEW SERVER (\d+): Ready", line))]
            started = [m[1] for line in followed.lines if (m := re.search(r"Starting new server (\d+) for", line))]
            if started and started[-1] in ready:
                return int(started[-1])
            if time.monotonic() > end:
                self.note("WAIT-TIMEOUT no server became Ready")
                return int(started[-1]) if started else 0
            time.sleep(0.001)

    def daemon(self, where: str = "") -> int:
        """Pid of the control daemon, from its first log line; 0 if unknown."""
        followed = self.logs[f"control{where}"]
        followed.refresh()
        found = [m[1] for line in followed.lines if (m := re.search(r"Control +(\d+)\] Starting control daemon", line))]
        return int(found[-1]) if found else 0

    # What the system says

    def ours(self) -> list[Process]:
        """Everything that this rig started and that lives: marked processes and their descendants."""
        everything = list(processes())
        mine = {process.pid for process, environment in everything if self._started(environment)} | self._pid_files()
        grown = True
        while grown:
            more = {process.pid for process, _ in everything if process.parent in mine} - mine
            mine |= more
            grown = bool(more)
        mine.discard(os.getpid())
        return [process for process, _ in everything if process.pid in mine and process.state != "Z"]

    def _started(self, environment: bytes) -> bool:
        return f"{MARK}={self.mark}".encode() in environment.split(b"\0")

    def _pid_files(self) -> set[int]:
        """Daemons by their pid files. Every user may write these, so the process must also look like one."""
        found = set()
        for path in self.base.glob(f"pipe*/{CONTROL}.pid"):
            with contextlib.suppress(OSError, ValueError):
                pid = int(path.read_text())
                if CONTROL.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(pid)
        return found

    def ps(self) -> None:
        for process in sorted(self.ours(), key=lambda process: process.pid):
            self.note(f"   ps| {process.pid:5} {process.parent:5} {process.uid:5} {process.state} {process.arguments}")

    def ls(self, where: str = "") -> None:
        """Names, types, modes and owners in the log and the pipe directory."""
        for directory in (self.base / f"log{where}", self.base / f"pipe{where}"):
            self.note(f"   ls| {directory}:")
            try:
                names = sorted(os.listdir(directory))
            except OSError as error:
                self.note(f"   ls| {error.strerror}")
                continue
            for name in names:
                with contextlib.suppress(OSError):
                    status = os.lstat(directory / name)
                    mode = stat.filemode(status.st_mode)
                    self.note(f"   ls| {mode} 1 {status.st_uid} {status.st_gid} {status.st_size} - - - {name}")

    # The end

    def end(self) -> list[str]:
        """Kill whatever this rig started and still runs. Returns what could not be ended."""
        self.drain()
        for started in self.clients.values():
            if started.process.poll() is None:
                send_signal(started.process.pid, signal.SIGKILL)
        for started in self.clients.values():
            exited(started.process, 3)
        remaining = self.ours()
        for process in remaining:
            send_signal(process.pid, signal.SIGCONT)
        if self.backend.name == "real" and any(CONTROL in process.arguments for process in remaining):
            for pipe in sorted(self.base.glob("pipe*")):
                self.ctl("quit -t 1", 4, where=pipe.name.removeprefix("pipe"), quiet=True)
            remaining = self.ours()
        number, end = signal.SIGTERM, time.monotonic() + 30
        while remaining and time.monotonic() < end:
            for process in remaining:
                send_signal(process.pid, number)
            await_ends([process.pid for process in remaining], 1.0)
            for started in (*self.others, *self.clients.values()):
                started.process.poll()
            remaining, number = self.ours(), signal.SIGKILL
        for log in self.logs.values():
            log.close()
        return [f"{process.pid} {process.state} {process.arguments}" for process in remaining]
