"""A node on a stage: simulated MPS, agent and gate, and clients of several users, all in a temporary directory.

Demo and benchmarks share it. Everything started here carries the directory in its environment, so that the end can
find all of it, also what MPS has started, and nothing else.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpsagent.cli import client as api
from mpsagent_sim import cli as simulator

Json = dict[str, Any]
MARK = "MPSSIM_STAGE"
"""The agent passes MPSSIM_… on to the control daemon that it starts."""
PATIENCE = 60.0


SCOPES = {"own": "user", "shared": "all"}
"""`server_scope` of the policy by the parameter `server` of a stage."""


class StageError(Exception):
    """Something that should have come did not; says what."""


def until(what: str, done: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """The first true answer of ``done``."""
    end = time.monotonic() + patience
    while not (answer := done()):
        if time.monotonic() > end:
            raise StageError(f"{what}: not within {patience:g} s")
        time.sleep(0.005)
    return answer


class Client:
    """A running CUDA client. ``lines``: (time.time(), text) of its output as it came."""

    def __init__(self, process: subprocess.Popen[bytes], uid: int) -> None:
        self.process, self.uid, self.pid = process, uid, process.pid
        self.began = time.time()
        self.ended: float | None = None
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with suppress(ValueError, OSError):
            for line in self.process.stdout:
                self.lines.append((time.time(), line.decode(errors="replace").split("] ", 1)[-1].rstrip()))
        self.process.wait()
        self.ended = time.time()

    def find(self, pattern: str) -> tuple[float, re.Match[str]] | None:
        return next(((at, m) for at, text in list(self.lines) if (m := re.search(pattern, text))), None)

    def saw(self, pattern: str, patience: float = PATIENCE) -> tuple[float, re.Match[str]]:
        """Wait for a line of output. Raises StageError when the client ends without it."""

        def look() -> tuple[float, re.Match[str]] | None:
            ended = self.ended is not None  # read before the lines: what came last is not missed
            found = self.find(pattern)
            if found is None and ended:
                raise StageError(f"client {self.pid} ended without {pattern!r}: {[text for _, text in self.lines]}")
            return found

        found: tuple[float, re.Match[str]] = until(f"{pattern!r} of client {self.pid}", look, patience)
        return found

    def served(self) -> float | None:
        """When it had its context, or None."""
        found = self.find(r"^ctx CUDA_SUCCESS")
        return None if found is None else found[0]

    def waited(self) -> float:
        """Seconds from its start until it had its context; infinite when it never had one."""
        return (self.served() or float("inf")) - self.began

    def limits(self) -> tuple[int, int] | None:
        """Multiprocessors, and MiB of device memory that it might allocate; None before it is served."""
        found = self.find(r"^sms (\d+) .*free (\d+) MiB")
        return None if found is None else (int(found[1][1]), int(found[1][2]))

    def error(self) -> str | None:
        """The CUDA error with which it was turned away, or None: it was served, or has not been yet."""
        found = self.find(r"^(?:cuInit|ctx) (CUDA_ERROR_\w+)")
        return None if found is None else found[1][1]

    def outside(self) -> bool:
        """Whether it ran without MPS, and so without limits."""
        return self.find("^mps no") is not None

    def wait(self, patience: float = PATIENCE) -> int:
        until(f"the end of client {self.pid}", lambda: self.ended is not None, patience)
        return self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)


class Stage:
    """``policy``: TOML without its [instance] section; ``server``: "own" or "shared"; ``each``: an instance for each of
    the ``gpus``; ``sharing``: how users share them; ``extra``: more lines of the instance. Use it in a ``with``: the
    end ends everything."""

    def __init__(
        self, policy: str, *, environment: dict[str, str] | None = None, server: str = "own", gpus: int = 1,
        each: bool = False, sharing: str = "turns", extra: str = "",
    ) -> None:  # fmt: skip
        self.directory = Path(tempfile.mkdtemp(prefix=f"mpsagent-{os.getpid()}-", dir="/tmp"))
        self.directory.chmod(0o755)
        self.sim, self.pipe, self.logs = (self.directory / name for name in ("sim", "pipe", "log"))
        self.socket = str(self.directory / "api")
        self.control = self.sim / "nvidia-cuda-mps-control"
        self.environment = {
            "PATH": f"{self.sim}:{os.environ.get('PATH', '/usr/bin:/bin')}",
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.logs),
            "MPSSIM_REGISTRY": str(self.sim / "processes"),
            "SAY_MPS": "1",
            MARK: str(self.directory),
            **(environment or {}),
        }
        simulator.install(self.sim, gpus=gpus)
        (self.directory / "policy.toml").write_text(
            f'{policy}\n[instance.stage]\npipe_directory = "{self.pipe}"\nlog_directory = "{self.logs}"\n'
            f'control_daemon_path = "{self.control}"\nsharing = "{sharing}"\nserver_scope = "{SCOPES[server]}"\n'
            + 'devices = ["each"]\n' * each
            + extra
        )
        self.python = simulator.interpreter()
        self.clients: list[Client] = []
        self.others: list[subprocess.Popen[bytes]] = []
        self.agent: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the agent ----------------------------------------------------------------------------------------------------

    def start_agent(self, *, notify: str | None = None, wait: bool = True) -> None:
        """Returns when its API answers, or at once. ``notify``: a socket that hears what systemd would."""
        with (self.directory / "agent.log").open("ab") as log:
            self.agent = subprocess.Popen(
                [sys.executable, "-m", "mpsagent.agent.main", "run", *self._options()],
                env=self._agent_environment(notify), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        if wait:
            until("the agent's API", self._answers)

    def _options(self) -> list[str]:
        options = {
            "policy": self.directory / "policy.toml",
            "socket": self.socket,
            "state-directory": self.directory / "state",
            "run-directory": self.directory / "run",
            "devices": self.sim / "devices.json",
            "log-format": "text",
        }
        return [f"--{name}={value}" for name, value in options.items()]

    def _agent_environment(self, notify: str | None) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if name not in ("NOTIFY_SOCKET", "WATCHDOG_USEC")}
        ours |= {name: value for name, value in self.environment.items() if not name.startswith("CUDA_")}
        return ours | ({"NOTIFY_SOCKET": notify} if notify is not None else {})

    def _answers(self) -> bool:
        assert self.agent is not None
        if self.agent.poll() is not None:
            raise StageError(f"the agent ended: {(self.directory / 'agent.log').read_text()[-2000:]}")
        try:
            self.ask("/v1/status")
        except api.Unreachable:
            return False
        return True

    def stop_agent(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.agent is not None:
            self.agent.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                self.agent.wait(15)
            self.agent.kill()
            self.agent.wait()
            self.agent = None

    def stop_gate(self) -> None:
        """It outlives the agent, and without systemd only its keeper can end it."""
        keepers = [
            pid for pid in self.processes() if b"keep" in _command(pid) and b"mpsagent.gate.main" in _command(pid)
        ]
        for pid in keepers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        until("the end of the gate", lambda: not any(_command(pid) for pid in keepers))

    def ask(self, target: str) -> Json:
        answer: Json = api.ask(self.socket, target)[0]
        return answer

    def order(self, name: str, **body: Any) -> None:
        api.order(self.socket, name, body)

    def events(self, cursor: int = 0, limit: int = 1000) -> list[Json]:
        found: list[Json] = self.ask(f"/v1/events?cursor={cursor}&limit={limit}")["events"]
        return found

    def open(self) -> Json:
        """Wait until a client that comes now would be handed over; the status."""

        def is_open() -> Json | None:
            status = self.ask("/v1/status")
            gate = status["gate"]
            good = all(one["control"] and one["control"]["running"] for one in status["instances"])
            return status if good and all(gate[name] for name in ("synced", "handshake", "in_force", "open")) else None

        status: Json = until("the open gate", is_open)
        return status

    def held(self, client: Client, *, served: bool = False) -> None:
        """Wait until the gate holds it; ``served``: or it has been served at once."""

        def is_held() -> bool:
            if served and client.served() is not None:
                return True
            return any(client.pid in one["clients"] for one in self.ask("/v1/queue")["queue"])

        until(f"client {client.pid} at the gate", is_held)

    def gate_pid(self) -> int:
        return int(until("the gate", lambda: self.ask("/v1/status")["gate"]["pid"]))

    # --- MPS and clients ----------------------------------------------------------------------------------------------

    def start_control(self, *, multiuser: bool = False) -> None:
        """A control daemon without agent and gate."""
        self.pipe.mkdir(mode=0o755, exist_ok=True)
        self.logs.mkdir(mode=0o755, exist_ok=True)
        options = ["-d", *(["--multiuser-server"] if multiuser else [])]
        subprocess.run([str(self.control), *options], env=self.environment, stdin=subprocess.DEVNULL, check=True)

    def command(self, text: str, uid: int = 0) -> str:
        """One run of the front-end in the public directory."""
        done = subprocess.run(
            [str(self.control)], input=text + "\n", env=self.environment, capture_output=True, text=True, timeout=30,
            check=False, **_as(uid),
        )  # fmt: skip
        return done.stdout

    def control_pid(self) -> int:
        if self.agent is None:
            return int((self.pipe / "nvidia-cuda-mps-control.pid").read_text())
        return int(self.ask("/v1/status")["control"]["pid"])

    def guest(self, uid: int, what: str, count: int = 1) -> subprocess.Popen[bytes]:
        """A user at the control socket who is no CUDA client; see demo/guest.py. Returns when it is there."""
        process = self.script(uid, Path(__file__).with_name("guest.py"), [what, str(self.pipe / "control"), str(count)])
        assert process.stdout is not None
        if process.stdout.readline() != b"there\n":
            raise StageError(f"{what} at the control socket did not come about")
        return process

    def script(self, uid: int, path: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
        """Bare Python as that user, with pipes at standard input and output."""
        copy = self.directory / path.name  # where other users can read it
        if not copy.exists():
            shutil.copyfile(path, copy)
        process = subprocess.Popen(
            [self.python, "-IS", str(copy), *arguments], env=self.environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, cwd="/", **_as(uid),
        )  # fmt: skip
        self.others.append(process)
        return process

    def client(self, uid: int, *arguments: str) -> Client:
        """Starts ``cuda-client`` as that user (without root: as the one who runs this)."""
        process = subprocess.Popen(
            [str(self.sim / "cuda-client"), *arguments], env=self.environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/", **_as(uid),
        )  # fmt: skip
        self.clients.append(Client(process, uid))
        return self.clients[-1]

    def end_guests(self) -> None:
        for other in self.others:
            other.kill()
            other.wait()

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends all that was started here. Raises StageError when something would not end."""
        if self.agent is not None:
            self.agent.kill()
            self.agent.wait()
        for one in self.clients:
            one.signal(signal.SIGKILL)
        self.end_guests()
        end = time.monotonic() + 10
        while left := self.processes():
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > end:
                raise StageError(f"processes {left} do not end")
            time.sleep(0.02)
        shutil.rmtree(self.directory, ignore_errors=True)

    def processes(self) -> list[int]:
        """Every live process with this stage's mark in the environment that it was started with."""
        return list(_with(f"={self.directory}".encode()))


def _as(uid: int) -> Json:
    """For Popen: as that user, without root as the one who runs this."""
    return {"user": uid, "group": uid, "extra_groups": []} if os.geteuid() == 0 else {}


def _command(pid: int) -> list[bytes]:
    """Empty when the process has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    return []


def _with(mark: bytes) -> Iterable[int]:
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) != os.getpid():
            with suppress(OSError):
                environment = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                if any(one.endswith(mark) for one in environment):
                    yield int(entry)
