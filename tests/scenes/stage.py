"""A stage: the agent as a real process beside one MPS, simulated or NVIDIA's own, and clients of several users.

A scene is a function `scene(stage, count) -> Result`: it plays `count` rounds of something and counts how they ended.
The same scenes run on the simulator with small counts (`make test`) and on a GPU with full ones (`make test-gpu`).

Directories, users, clients and the clearing away are those of the conformance rig. Nothing that a stage started
outlives it: daemons are found by their pipe directory too, because the agent starts them with an environment of theirs.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from mpsagent.mps.units import multiprocessors_for_percent
from tests.conformance import rig as rigs
from tests.policies import SCOPES

REPOSITORY = Path(__file__).resolve().parents[2]
USERS = (20001, 20002, 20003, 20004, 20005)
A, B, C, D, E = USERS
PATIENCE = 60.0
"""Seconds for what should come at once; a busy machine may take longer, and waiting costs nothing when it comes."""
Json = dict[str, Any]


AS_USER = """
import os, resource, sys
from mpsagent.cli import main, program, run, verbs, wording  # as root: the user may not be able to read this checkout
uid, os.environ["MPSAGENT_SOCKET"], *words = sys.argv[1:]
os.setgroups([]); os.setgid(int(uid)); os.setuid(int(uid))
sys.argv[1:] = words
main.main()
"""


class StageError(Exception):
    """The scene cannot go on: something that every scene needs did not come."""


@dataclass
class Result:
    """How a scene ended: figures for the table, whether the promise was kept, and that in words."""

    figures: Json
    good: bool
    verdict: str
    raw: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Scene:
    """`full` and `quick`: rounds on a GPU and in `make test`; `seconds`: what the full scene takes there, about."""

    name: str
    title: str
    play: Callable[[Stage, int], Result]
    full: int
    quick: int
    seconds: float
    only: str = ""  # "sim" or "real"; empty: both


@dataclass(frozen=True)
class Machine:
    """What a client outside MPS sees: all multiprocessors and all memory of device 0."""

    multiprocessors: int
    total_mib: int


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Api:
    """The agent's socket, with the standard library alone."""

    def __init__(self, path: Path, timeout: float = PATIENCE) -> None:
        self.path, self.timeout = path, timeout

    def ask(self, target: str) -> tuple[int, Json]:
        connection = _UnixConnection(str(self.path), self.timeout)
        try:
            connection.request("GET", target)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def text(self, target: str) -> str:
        connection = _UnixConnection(str(self.path), self.timeout)
        try:
            connection.request("GET", target)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def order(self, name: str, /, **body: object) -> tuple[int, Json]:
        """To the agent itself, as this user."""
        return self.say(json.dumps({"order": name, **body}).encode())

    def say(self, message: bytes) -> tuple[int, Json]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(self.timeout)
            sock.connect(str(self.path.with_name(f"{self.path.stem}-orders{self.path.suffix}")))
            sock.send(message)
            said = json.loads(sock.recv(1 << 20))
        return said["status"], said["answer"]

    def get(self, target: str) -> Json:
        return self.ask(target)[1]

    def status(self) -> Json:
        return self.get("/v1/status")

    def problems(self) -> list[str]:
        """What /healthz complains of; empty when it is healthy."""
        return [str(one) for one in self.get("/healthz")["problems"]]


class Agent:
    """One `mpsagent run`. Its log is in `started.err`."""

    def __init__(self, started: rigs.Started, api: Api) -> None:
        self.started, self.api = started, api
        self.cursor = 0
        self.events: list[Json] = []

    @property
    def pid(self) -> int:
        return self.started.process.pid

    def log(self) -> str:
        return self.started.err.read_text(errors="replace") + self.started.read()

    def news(self) -> list[Json]:
        """All records so far, read on from where the last reading ended."""
        while True:
            answer = self.api.get(f"/v1/events?cursor={self.cursor}&limit=1000")
            if "events" not in answer:
                raise StageError(f"the history does not answer: {answer}")
            self.events += answer["events"]
            if not answer["events"]:
                return self.events
            self.cursor = answer["cursor"]

    def written_down(self) -> None:
        """Returns when all that the agent knows by now is on record, if it runs: an order of root's is answered after
        that, and this one changes nothing."""
        with contextlib.suppress(OSError, ValueError):
            if Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TtZX":
                self.api.order("restart-mps", dry_run=True)

    def mark(self) -> int:
        """How many records there are by now; for `found(since=...)`."""
        self.written_down()
        return len(self.news())

    def found(self, kind: str, since: int = 0, **fields: object) -> list[Json]:
        """Records of a kind with these fields."""
        self.written_down()
        return self._found(kind, since, fields)

    def _found(self, kind: str, since: int, fields: Mapping[str, object]) -> list[Json]:
        return [
            event for event in self.news()[since:]
            if event["kind"] == kind and all(event.get(name) == value for name, value in fields.items())
        ]  # fmt: skip

    def wait(self, kind: str, timeout: float = PATIENCE, since: int = 0, **fields: object) -> Json:
        end = time.monotonic() + timeout
        while not (found := self._found(kind, since, fields)):
            if time.monotonic() > end:
                raise StageError(f"no {kind} {fields} within {timeout:g} s")
            time.sleep(0.03)
        return found[0]


def seconds_of(event: Mapping[str, Any]) -> float:
    """A record's time, seconds since the epoch."""
    return datetime.fromisoformat(str(event["at"])).timestamp()


class _Rig(rigs.Rig):
    def _started(self, environment: bytes) -> bool:
        """Also what has one of this rig's directories in its environment: daemons that the agent started."""
        return f"={self.base}/".encode() in environment or super()._started(environment)


class Stage:
    """One pair of pipe and log directories, an agent or none, and clients. Use as a context manager."""

    def __init__(
        self,
        backend: rigs.Backend,
        place: Path,
        machine: Machine,
        *,
        quick: bool = False,
        lanes: int = 1,
        echo: Callable[[str], None] | None = None,
    ) -> None:
        self.backend, self.place, self.machine, self.quick = backend, place, machine, quick
        self.lanes = lanes
        # In `make test` few cores are shared by many tests: the processes themselves may take much longer.
        self.allowance = PATIENCE if quick else 0.0
        self.echo = echo
        self.rig = _Rig(backend, place, echo=echo)
        self.agents: list[Agent] = []
        self.left: list[str] = []
        self.said: list[str] = []
        self.others: list[Stage] = []
        self.ended = False

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def say(self, text: str) -> None:
        """A line for whoever watches, and for raw.json."""
        self.said.append(text)
        self.rig.note(text)

    def another(self) -> Stage:
        """A stage beside this one; it ends with this one at the latest."""
        place = self.place.with_name(f"{self.place.name}-{len(self.others) + 1}")
        other = Stage(self.backend, place, self.machine, quick=self.quick, lanes=self.lanes, echo=self.echo)
        self.others.append(other)
        return other

    def side_by_side(self, count: int, work: Callable[[Stage, int], None], period: float) -> None:
        """Share `count` rounds of waiting among `lanes` stages beside each other, each an MPS of its own on the same
        device, begun apart so that their changes do not meet. `period`: seconds that a round takes, about."""
        lanes = max(1, min(self.lanes, count))
        problems: list[Exception] = []

        def lane(number: int, stage: Stage) -> None:
            try:
                with stage:
                    time.sleep(number * period / lanes)
                    work(stage, count // lanes + (number < count % lanes))
            except Exception as error:
                problems.append(error)
            finally:
                self.said += [f"lane {number}: {line}" for line in stage.said]

        threads = [threading.Thread(target=lane, args=(n, self.another()), daemon=True) for n in range(lanes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]

    def cli(self, agent: Agent, *arguments: str, uid: int | None = None, timeout: float = PATIENCE) -> tuple[int, str]:
        """Exit status and output of `mpsagent-cli`."""
        command = [sys.executable, "-m", "mpsagent.cli.main", "--socket", str(agent.api.path), *arguments]
        started = self.rig.run(command, uid=uid, env={**self.python_environment()})
        if not rigs.exited(started.process, timeout):
            started.process.kill()
            raise StageError(f"mpsagent-cli {arguments} took more than {timeout:g} s")
        return started.process.returncode, started.read() + started.err.read_text(errors="replace")

    def python_environment(self) -> dict[str, str]:
        """For a Python of ours that has to find this package; MPS's directories are not in it."""
        found = self.rig.environment()
        inherited = [found["PYTHONPATH"]] if found.get("PYTHONPATH") else []
        found["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *inherited])
        for key in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
            del found[key]
        # The simulated daemon gets this from the agent: by it, it is found even where its directories are NVIDIA's own.
        found["MPSSIM_SCENE"] = f"{self.place}/"
        return found

    def kill_daemons(self) -> None:
        """End every control daemon, and its servers with it."""
        for process in self.rig.ours():
            if rigs.CONTROL in process.arguments:
                rigs.send_signal(process.pid, signal.SIGKILL)
        self.until(lambda: not any(rigs.CONTROL in p.arguments for p in self.rig.ours()), "no daemon is left")

    # The agent

    def policy(self, text: str, *, control: str | None = None, extra: str = "") -> Path:
        """Write a policy: `text` and this stage's directories. `control`: another control program. Users take turns
        unless `extra`, the rest of the instance's section, says otherwise."""
        extra = extra if "sharing =" in extra else f'sharing = "turns"\n{extra}'
        path = self.place / "policy.toml"
        temporary = path.with_name("policy.new")
        temporary.write_text(
            f"{text}\n[instance.scene]\n"
            f'pipe_directory = "{self.rig.pipe}"\nlog_directory = "{self.rig.log}"\n'
            f'control_daemon_path = "{control or self.backend.control}"\n{extra}\n'
        )
        temporary.replace(path)
        return path

    def start_agent(self, *, prefix: Sequence[str] = ()) -> Agent:
        """`mpsagent run` on the policy that was written, without waiting for anything."""
        program = Path(os.environ.get("MPSAGENT_PROGRAM") or Path(sys.executable).with_name("mpsagent"))
        command = [
            *prefix,
            *([str(program)] if program.exists() else [sys.executable, "-m", "mpsagent.agent.main"]),
        ]
        socket_path = self.place / "agent.sock"
        command += ["run", "--policy", str(self.place / "policy.toml"), "--socket", str(socket_path)]
        command += ["--state-directory", str(self.place / "state"), "--log-format", "text"]
        command += ["--run-directory", str(self.place / "run"), "--supervise", "child"]
        devices = Path(self.backend.control).with_name("devices.json")
        if devices.exists():  # there is no GPU to ask
            command += ["--devices", str(devices)]
        for log in self.rig.logs.values():
            log.reopen_if_replaced()
        agent = Agent(self.rig.run(command, env=self.python_environment()), Api(socket_path))
        self.agents.append(agent)
        return agent

    def with_agent(
        self, policy: str = "", *, control: str | None = None, extra: str = "", server: str = "own"
    ) -> Agent:
        """The agent at work: its control daemon runs, and the gate hands over. `server`: "own" or "shared"."""
        self.policy(policy, control=control, extra=f'server_scope = "{SCOPES[server]}"\n{extra}')
        return self.again()

    def again(self) -> Agent:
        """Another agent on the same policy, at work."""
        agent = self.start_agent()
        self.answering(agent)
        self.open(agent)
        return agent

    def answering(self, agent: Agent, timeout: float = PATIENCE) -> None:
        """Wait until the API answers."""

        def answers() -> bool:
            if agent.started.process.poll() is not None:
                raise StageError(f"mpsagent ended with {agent.started.process.returncode}:\n{agent.log()[-4000:]}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                return "agent" in agent.api.status()
            return False

        self.until(answers, "the agent's socket answers", timeout)

    def open(self, agent: Agent, timeout: float = PATIENCE) -> None:
        """Wait until a client that comes now would be handed over."""

        def is_open() -> bool:
            status = agent.api.status()
            gate, control = status["gate"], status["control"]
            return bool(
                control and control["running"] and gate["connected"] and gate["synced"] and gate["handshake"]
                and gate["open"] and gate["in_force"] and (self.rig.pipe / "control").exists()
            )  # fmt: skip

        self.until(is_open, "the gate is open", timeout)

    def stop_agent(self, agent: Agent, number: signal.Signals = signal.SIGTERM) -> None:
        """End the agent; MPS runs on."""
        rigs.send_signal(agent.pid, number)
        if not rigs.exited(agent.started.process, 20):
            rigs.send_signal(agent.pid, signal.SIGKILL)
            rigs.exited(agent.started.process, PATIENCE)
        if agent in self.agents:
            self.agents.remove(agent)
        self.until(lambda: not self._is_served(agent.api.path), "its api has ended")

    def _is_served(self, path: Path) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(PATIENCE)
            return sock.connect_ex(str(path)) == 0

    def without_agent(self, server: str = "own") -> None:
        """A plain control daemon, as people run it today."""
        reply = self.rig.start("-d", *(["--multiuser-server"] if server == "shared" else []))
        if reply.rc != 0:
            raise StageError(f"the control daemon does not start: {reply}")

    def until(self, true: Callable[[], object], what: str, timeout: float = PATIENCE, every: float = 0.0) -> float:
        """Wait until something is so; how long that took. `every`: seconds between two looks."""
        since = time.monotonic()
        pause, longest = (every, every) if every else (0.03, 0.15 if self.quick else 0.03)
        while not true():
            if time.monotonic() > since + timeout:
                raise StageError(f"not within {timeout:g} s: {what}\n{self.last_words()}")
            time.sleep(pause)
            pause = min(1.2 * pause, longest)  # a look is a question to the agent: few cores have more to do than that
        return time.monotonic() - since

    def last_words(self) -> str:
        """The ends of the logs, for whoever has to find out."""
        found = [f"--- agent\n{agent.log()[-3000:]}" for agent in self.agents]
        self.rig.drain()
        found += [f"--- {log.label}\n" + "\n".join(log.lines[-25:]) for log in self.rig.logs.values()]
        return "\n".join(found)

    # Clients

    def client(self, uid: int, mode: str = "query", *arguments: float | str, **environment: str) -> Client:
        return Client(self, self.rig.spawn(uid, mode, *arguments, env=environment or None), uid)

    def run_verb(self, agent: Agent, uid: int, *words: str) -> rigs.Started:
        """`mpsagent-cli run` as this user."""
        command = [sys.executable, "-c", AS_USER, str(uid), str(agent.api.path), "run", *words]
        environment = {**self.rig.environment(), "PYTHONPATH": self.python_environment()["PYTHONPATH"]}
        return self.rig.run(command, env=environment)

    def served(self, uid: int, timeout: float = PATIENCE) -> float:
        """Seconds that a new client of this user takes from its start to its end; raises if it is not served."""
        client = self.client(uid)
        if client.ended(timeout) != 0:
            raise StageError(f"client of {uid} was not served: rc {client.rc} {client.text()!r}\n{self.last_words()}")
        return time.monotonic() - client.started.since

    # The end

    def end(self) -> None:
        """End everything. What could not be ended is in `left`."""
        if self.ended:
            return
        self.ended = True
        for other in self.others:
            other.end()
            self.left += other.left
        for agent in list(self.agents):
            rigs.send_signal(agent.pid, signal.SIGCONT)
            self.stop_agent(agent)
        for process in self.rig.ours():
            rigs.send_signal(process.pid, signal.SIGCONT)
        self.left += self.rig.end()
        shutil.rmtree(self.place, ignore_errors=True)


class Client:
    """A CUDA client and what it printed."""

    def __init__(self, stage: Stage, name: str, uid: int) -> None:
        self.stage, self.name, self.uid = stage, name, uid
        self.started = stage.rig.clients[name]

    @property
    def pid(self) -> int:
        return self.started.process.pid

    @property
    def rc(self) -> int | None:
        return self.started.process.poll()

    def text(self) -> str:
        return self.started.read()

    def working(self, timeout: float = PATIENCE) -> bool:
        """Wait until it has its context."""
        return self.stage.rig.wait_output(self.name, r"\] sms ", timeout)

    def known(self) -> None:
        """Wait until it has its context, and the agent knows of it and of its server: it hears of both on its own."""
        if not self.working():
            raise StageError(f"client {self.name} is not at work: {self.text()}\n{self.stage.last_words()}")
        api = self.stage.agents[-1].api

        def is_known() -> bool:
            listed = {one["pid"]: one["state"] for one in api.get("/v1/clients")["clients"]}
            return listed.get(self.pid, "waiting") != "waiting" and bool(api.status()["servers"])

        self.stage.until(is_known, f"the agent lists client {self.name} and its server")

    def saw(self, pattern: str, timeout: float = PATIENCE) -> bool:
        return self.stage.rig.wait_output(self.name, pattern, timeout)

    def ended(self, timeout: float = PATIENCE) -> int | None:
        """Its exit status, None if it still runs after `timeout`."""
        return self.started.process.returncode if rigs.exited(self.started.process, timeout) else None

    def seen(self) -> tuple[int, int] | None:
        """Multiprocessors and free MiB that it was given; None if it never got that far."""
        match = re.search(r"\] sms (\d+) meminfo \w+ free (\d+) MiB", self.text())
        return (int(match[1]), int(match[2])) if match else None

    def inside(self, percent: float) -> bool:
        """Whether it ended well, with the multiprocessors of `percent`: outside MPS it has all of them."""
        got = self.seen()
        return (
            self.rc == 0 and got is not None
            and got[0] == multiprocessors_for_percent(percent, self.stage.machine.multiprocessors)
        )  # fmt: skip

    def queued(self, timeout: float = PATIENCE) -> float:
        """Wait until it is held at the gate, or without an agent in MPS's own pending list; the time (monotonic)."""
        if not self.stage.agents:
            if self.stage.rig.wait_log(rf"NEW CLIENT {self.pid} from user .* pending list", timeout) is None:
                raise StageError(f"client {self.name} is not in the pending list\n{self.stage.last_words()}")
            return time.monotonic()
        api = self.stage.agents[-1].api
        self.stage.until(
            lambda: any(self.pid in one["clients"] for one in api.get("/v1/queue")["queue"]),
            f"client {self.name} is held at the gate", timeout, every=0.01,
        )  # fmt: skip
        return time.monotonic()

    def signal(self, number: signal.Signals) -> None:
        self.stage.rig.signal(self.name, number)

    def finish(self) -> int | None:
        """Tells one that sleeps that it has worked enough; its exit status. How long something else takes to come is
        not to be known before, so who is to be there meanwhile sleeps for long."""
        self.signal(signal.SIGUSR1)
        return self.ended()

    def kill(self) -> None:
        if self.rc is None:
            self.signal(signal.SIGKILL)
            self.ended()


def median(values: Iterable[float]) -> float | None:
    found = list(values)
    return round(statistics.median(found), 3) if found else None


def spread(values: Sequence[float]) -> str:
    """`median (least to most)` in seconds."""
    if not values:
        return "none"
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


# --- machines and backends --------------------------------------------------------------------------------------------


def look_at(backend: rigs.Backend, place: Path) -> tuple[Machine, list[str]]:
    """What one client outside MPS sees, and its transcript. Where not even that works nothing else will."""
    rig = rigs.Rig(backend, place)
    try:
        name = rig.spawn(USERS[0], "query", env={"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"})
        rig.wait(name, 60)
        text = rig.clients[name].read()
    finally:
        rig.end()
        shutil.rmtree(place, ignore_errors=True)
    match = re.search(r"\] sms (\d+) .* total (\d+) MiB", text)
    if match is None:
        raise rigs.RigError("a CUDA client cannot run here even without MPS:\n" + "\n".join(rig.transcript))
    return Machine(int(match[1]), int(match[2])), rig.transcript


@contextlib.contextmanager
def backend_of(kind: str, place: Path, gpus: int = 1) -> Iterator[tuple[rigs.Backend, Machine]]:
    """The backend and its machine; `place` is created, and removed at the end."""
    place.mkdir(mode=0o755, parents=True, exist_ok=True)
    place.chmod(0o755)
    try:
        backend = rigs.real_backend(place) if kind == "real" else rigs.sim_backend(place, gpus)
        machine, _ = look_at(backend, place / "look")
        yield backend, machine
    finally:
        shutil.rmtree(place, ignore_errors=True)
