"""Parts for experiments at the control socket: a daemon, a relay that can be stopped at each of its steps, clients.

Nothing that a `Bench` started outlives it.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from campaigns.begin import Broken, parser, place
from tests.conformance.backends import Backend

HELLO, CREDENTIALS, PASSED = b"OUTBHELL\0", b"OUTBCRED\0", b"OUTBCUFD\0"
SO_PASSCRED, SCM_CREDENTIALS = 16, 2
MARK = "MPS_QUESTIONS"


# --- the relay --------------------------------------------------------------------------------------------------------


@dataclass
class Connection:
    """One connection that gave its credentials. `index`: 0 is the channel, 1 and up are the contexts of this pid."""

    pid: int
    uid: int
    gid: int
    kind: bytes
    index: int
    at: dict[str, float] = field(default_factory=dict)
    answer: str = ""


Hook = Callable[[str, Connection], None]


class Relay:
    """Listens in `public`, forwards to `real`. `hook(step, connection)` is called in the connection's own thread at
    `asked`, `answered` (descriptor held, not yet passed), `passed`, `acknowledged`."""

    def __init__(self, public: Path, real: Path, hook: Hook | None = None) -> None:
        self.public, self.real, self.hook = public, real, hook
        self.connections: list[Connection] = []
        self.lost: list[str] = []
        self.one_at_a_time = threading.Lock()
        public.mkdir(mode=0o755, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (public / "control").unlink()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.setsockopt(socket.SOL_SOCKET, SO_PASSCRED, 1)
        self.listener.bind(str(public / "control"))
        (public / "control").chmod(0o666)
        self.listener.listen(256)
        threading.Thread(target=self._accept, daemon=True).start()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def of(self, pid: int) -> list[Connection]:
        return [one for one in self.connections if one.pid == pid]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._guarded, args=(self.listener.accept()[0],), daemon=True).start()

    def _guarded(self, client: socket.socket) -> None:
        with client:
            try:
                self._serve(client)
            except OSError as error:
                self.lost.append(f"{type(error).__name__}: {error}")

    def _serve(self, client: socket.socket) -> None:
        client.setsockopt(socket.SOL_SOCKET, SO_PASSCRED, 1)
        client.settimeout(60)
        client.send(HELLO)
        message, ancillary, _, _ = client.recvmsg(64, 256)
        if message != CREDENTIALS:
            return  # the probe of every client
        pid, uid, gid = next(struct.unpack("iII", data[:12]) for _, kind, data in ancillary if kind == SCM_CREDENTIALS)
        kind = client.recv(64)
        one = Connection(pid, uid, gid, kind, len(self.of(pid)))
        self.connections.append(one)
        with self.one_at_a_time:
            self._step("asked", one)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as daemon:
                self._forward(client, daemon, one)

    def _forward(self, client: socket.socket, daemon: socket.socket, one: Connection) -> None:
        daemon.settimeout(60)
        daemon.connect(str(self.real / "control"))
        daemon.recv(64)
        claim = [(socket.SOL_SOCKET, SCM_CREDENTIALS, struct.pack("iII", one.pid, one.uid, one.gid))]
        daemon.sendmsg([CREDENTIALS], claim)
        daemon.sendmsg([one.kind], claim)
        self._step("sent", one)
        answer, ancillary, _, _ = daemon.recvmsg(64, 256)
        raw = b"".join(data[: len(data) // 4 * 4] for _, what, data in ancillary if what == socket.SCM_RIGHTS)
        descriptors = array.array("i", raw)
        one.answer = f"{answer!r} + {len(descriptors)} descriptor"
        try:
            self._step("answered", one)
            if descriptors:
                client.sendmsg([answer], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if not descriptors:
            return
        self._step("passed", one)
        acknowledged = client.recv(64)
        one.answer += f", client {acknowledged.hex() or 'hung up'}"
        if acknowledged:
            self._step("acknowledged", one)
            daemon.sendmsg([acknowledged], claim)

    def _step(self, step: str, one: Connection) -> None:
        one.at[step] = time.monotonic()
        if self.hook is not None:
            self.hook(step, one)


# --- daemons and clients ----------------------------------------------------------------------------------------------


class Output:
    """A process with its output in a file."""

    def __init__(self, bench: Bench, command: Sequence[str], environment: dict[str, str], uid: int | None) -> None:
        bench.files += 1
        self.path = bench.base / f"out{bench.files}"
        identity = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
        self.since = time.monotonic()
        with self.path.open("wb") as out:
            self.process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=out, stderr=out, env=environment, cwd="/",
                start_new_session=True, **identity,
            )  # fmt: skip
        self.pid = self.process.pid

    def text(self) -> str:
        return self.path.read_text(errors="replace")

    def said(self, pattern: str, timeout: float = 20.0) -> re.Match[str] | None:
        end = time.monotonic() + timeout
        while True:
            ended = self.process.poll() is not None
            if match := re.search(pattern, self.text()):
                return match
            if ended or time.monotonic() > end:
                return None
            time.sleep(0.002)

    def ended(self, timeout: float = 20.0) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout)
        return None

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process.poll() is None:
            os.kill(self.pid, number)

    def seen(self, prefix: str = "") -> tuple[int, int] | None:
        """(multiprocessors, free MiB) that it printed."""
        match = re.search(rf"\] {prefix}sms (\d+) meminfo \w+ free (\d+) MiB", self.text())
        return (int(match[1]), int(match[2])) if match else None

    def short(self) -> str:
        """What it printed, without the heads of the lines."""
        return " | ".join(line.split("] ", 1)[-1] for line in self.text().splitlines()) or "(nothing)"


class Daemon:
    """A control daemon with directories of its own."""

    def __init__(self, bench: Bench, *options: str, modes: tuple[int, int, int] = (0o755, 0o755, 0o755)) -> None:
        bench.files += 1
        self.bench = bench
        self.home = bench.base / f"d{bench.files}"
        self.pipe, self.log = self.home / "pipe", self.home / "log"
        for path, mode in ((self.home, modes[0]), (self.pipe, modes[1]), (self.log, modes[2])):
            path.mkdir()
            path.chmod(mode)
        self.public = bench.base / f"p{bench.files}"
        self.offsets = {"control": 0, "server": 0}
        started = Output(bench, [bench.control, "-d", *options], self.environment(), None)
        rc = started.ended(20)
        bench.say(f"daemon {options} modes {[oct(mode) for mode in modes]}: rc {rc} {started.text().strip()}")
        bench.daemons.append(self)

    def environment(self) -> dict[str, str]:
        return self.bench.environment(self.pipe, self.log)

    def ctl(self, *commands: str, timeout: float = 10.0) -> str:
        """One run of the front-end; its output, or what went wrong in parentheses."""
        text = "\n".join(commands) + "\n"
        try:
            done = subprocess.run(
                [self.bench.control], input=text, capture_output=True, text=True, timeout=timeout, cwd="/",
                env=self.environment(),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"(no answer in {timeout:g} s)"
        return done.stdout + (f"(rc {done.returncode} {done.stderr.strip()})" if done.returncode else "")

    def servers(self) -> list[int]:
        listed = self.ctl("get_server_list", timeout=3.0)
        return [] if listed.startswith("(") else [int(word) for word in listed.split() if word.isdigit()]

    def limits(self, percent: str, size: str) -> bool:
        """Both the defaults and the limits of each server; False when the daemon does not answer."""
        commands = [f"set_default_active_thread_percentage {percent}", f"set_default_device_pinned_mem_limit 0 {size}"]
        listed = self.ctl("get_server_list", timeout=1.5)
        if "no answer" in listed:
            return False
        for server in (word for word in listed.split() if word.isdigit()):
            commands += [f"set_active_thread_percentage {server} {percent}"]
            commands += [f"set_device_pinned_mem_limit {server} 0 {size}"]
        return "no answer" not in self.ctl(*commands, timeout=1.5)

    def news(self, name: str = "control", skip: str = "") -> list[str]:
        """New lines of a log, without those that match `skip`."""
        try:
            data = (self.log / f"{name}.log").read_bytes()
        except FileNotFoundError:
            return []
        fresh, self.offsets[name] = data[self.offsets[name] :], len(data)
        return [line for line in fresh.decode(errors="replace").splitlines() if not skip or not re.search(skip, line)]

    def show(self, *names: str, skip: str = "", most: int = 40) -> None:
        for name in names or ("control", "server"):
            lines = self.news(name, skip)
            for line in lines[:most]:
                self.bench.say(f"      {name}.log| {line}")
            if len(lines) > most:
                self.bench.say(f"      {name}.log| ... {len(lines) - most} more")

    def end(self) -> None:
        self.ctl("quit -t 1", timeout=5)
        self.bench.clear(f"={self.pipe}")


class Bench:
    """The place, the transcript, and the clearing away. `uids`: users of the clients."""

    def __init__(self, control: str, client: Sequence[str], extra: dict[str, str], out: Path | None, seconds: float):
        os.umask(0o022)
        self.control, self.client_command, self.extra = control, tuple(client), extra
        self.base = Path(f"/tmp/mpsq{secrets.token_hex(3)}")
        self.base.mkdir(mode=0o755)
        self.transcript = out.open("w") if out else None
        self.began = time.monotonic()
        self.deadline = self.began + seconds
        self.files = 0
        self.mark = secrets.token_hex(8)
        self.daemons: list[Daemon] = []
        self.relays: list[Relay] = []

    def say(self, text: str) -> None:
        line = f"[{time.monotonic() - self.began:7.2f}] {text}"
        if text.startswith(("ANSWER", "====")) or not self.transcript:  # the rest is in the transcript
            print(line[:700], flush=True)
        if self.transcript:
            self.transcript.write(line + "\n")
            self.transcript.flush()

    def environment(self, pipe: Path, log: Path | None = None) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_MPS_")}
        found = {**clean, **self.extra, MARK: self.mark, "CUDA_MPS_PIPE_DIRECTORY": str(pipe)}
        return {**found, "CUDA_MPS_LOG_DIRECTORY": str(log or self.base / "nowhere")}

    def relay(self, daemon: Daemon, hook: Hook | None = None) -> Relay:
        found = Relay(daemon.public, daemon.pipe, hook)
        self.relays.append(found)
        return found

    def client(self, daemon: Daemon, uid: int, *words: object) -> Output:
        command = [*self.client_command, *map(str, words)]
        return Output(self, command, self.environment(daemon.public), uid)

    def clear(self, token: str) -> None:
        """SIGKILL what has `token` in its environment."""
        for _ in range(20):
            found = []
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if int(process.name) != os.getpid() and token.encode() in (process / "environ").read_bytes():
                        found.append(int(process.name))
            for pid in found:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)
                    os.kill(pid, signal.SIGKILL)
            if not found:
                return
            time.sleep(0.05)

    def between(self) -> None:
        """After a question: nothing is left of it."""
        for relay in self.relays:
            relay.end()
        self.relays.clear()
        for daemon in self.daemons:
            with contextlib.suppress(Exception):
                daemon.ctl("quit -t 1", timeout=3)
        self.daemons.clear()
        self.clear(f"{MARK}={self.mark}")

    def end(self) -> None:
        self.between()
        shutil.rmtree(self.base, ignore_errors=True)


def bench_of(options: argparse.Namespace, backend: Backend, name: str) -> Bench:
    """All that is said goes to `name`.txt."""
    extra = {**backend.environment, **({"LD_LIBRARY_PATH": options.libraries} if options.libraries else {})}
    out = options.out / f"{name}.txt" if options.out else None
    return Bench(backend.control, backend.client, extra, out, options.seconds)


def main(text: str | None, name: str, questions: Mapping[str, tuple[Callable[[Bench], None], float]]) -> int:
    """Asks these, each for so many seconds at most."""
    arguments = parser(text, sum(seconds for _, seconds in questions.values()))
    arguments.add_argument("--libraries", default="", help="LD_LIBRARY_PATH of the daemon and the clients")
    options = arguments.parse_args()
    if unknown := set(options.only) - set(questions):
        arguments.error(f"no question {', '.join(sorted(unknown))}; there are {', '.join(questions)}")
    with place(options.sim) as (backend, _, _):
        bench = bench_of(options, backend, name)
        try:
            for question in options.only or questions:
                ask, seconds = questions[question]
                left = min(seconds, bench.deadline - time.monotonic())
                if left < 2:
                    bench.say(f"==== {question}: left out, the time is over")
                    continue
                bench.say(f"==== {question}")
                signal.setitimer(signal.ITIMER_REAL, left)
                try:
                    ask(bench)
                except Broken as error:
                    bench.say(f"ANSWER {question}: broken off: {error}")
                    if Broken.all:
                        break
                except Exception:
                    bench.say(f"ANSWER {question}: broken off: {traceback.format_exc()}")
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    bench.between()
        finally:
            bench.end()
    return 0
