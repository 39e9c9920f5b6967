"""`mpsagent run` as systemd and administrators run it: sockets, notifications, reload, exit statuses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mpsagent.cli.client import request
from tests.agent.stage import A, Agent, Stage
from tests.conformance import rig as rigs
from tests.lingering import SECONDS, lingering
from tests.scenes.stage import Api
from tests.waiting import until

PROGRAM = (sys.executable, "-m", "mpsagent.agent.main")
POLICY = "[limits]\nactive_threads = '50%'\n"
# Hands descriptor 3 to the program as systemd does: LISTEN_PID is the program's own pid.
LISTENER = """
import os, sys
fd = int(sys.argv[1])
if fd != 3:
    os.dup2(fd, 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
os.execv(sys.argv[2], sys.argv[2:])
"""


class Systemd:
    """The two sockets that systemd would have: it listens for notifications and holds the API's socket."""

    def __init__(self, place: Path) -> None:
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify.bind(str(place / "notify"))
        self.notify.settimeout(0.2)
        self.listen = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listen.bind(str(place / "api"))
        self.listen.listen(64)
        self.place = place
        self.said: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, stage: Stage, program: Sequence[str] = PROGRAM, **environment: str) -> Agent:
        devices = Path(stage.backend.control).with_name("devices.json")
        command = [sys.executable, "-c", LISTENER, str(self.listen.fileno()), *program, "run"]
        command += ["--policy", str(stage.place / "policy.toml"), "--socket", str(self.place / "elsewhere")]
        command += ["--state-directory", str(stage.place / "state"), "--devices", str(devices), "--log-format", "text"]
        command += ["--run-directory", str(stage.place / "run")]
        env = {**stage.python_environment(), "NOTIFY_SOCKET": str(self.place / "notify"), **environment}
        self.process = subprocess.Popen(command, env=env, pass_fds=[self.listen.fileno()], stderr=subprocess.DEVNULL)
        return Agent(rigs.Started.__new__(rigs.Started), Api(self.place / "api"))

    def hear(self) -> list[str]:
        """Everything said so far, line by line."""
        while True:
            try:
                self.said += self.notify.recv(65536).decode().split("\n")
            except TimeoutError:
                return self.said

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.notify.close()
        self.listen.close()


@pytest.fixture
def systemd(stage: Stage) -> Iterator[Systemd]:
    one = Systemd(stage.place)
    yield one
    one.close()


def test_it_tells_systemd_what_it_needs_to_know(stage: Stage, systemd: Systemd) -> None:
    """READY only when it is at work, the watchdog while the loop turns, a status that follows what happens; and the
    socket that systemd passed is the one that answers."""
    stage.policy("[limits]\nactive_threads = '50%'\n")
    agent = systemd.start(stage, WATCHDOG_USEC="1000000")
    until(lambda: "READY=1" in systemd.hear(), "READY=1")
    assert stage.waits_for(agent) == ""
    assert not (stage.place / "elsewhere").exists()
    until(lambda: systemd.hear().count("WATCHDOG=1") > 4, "WATCHDOG=1, again and again")
    assert "STATUS=no user has the GPU" in systemd.said
    client = stage.client(A, "sleep", 600)
    client.working()
    until(lambda: any("has the GPU with 1 process" in line for line in systemd.hear()), "the holder in the status")
    assert systemd.stop() == 0
    assert "STOPPING=1" in systemd.hear()
    assert client.rc is None, "MPS and its clients go on when the agent is stopped"
    assert stage.client(A).ended() == 0, "and who comes is served as the gate was told last"


def test_requests_wait_while_the_agent_is_away(stage: Stage, systemd: Systemd) -> None:
    """An upgrade must not look like an outage: the connection is accepted by the next agent."""
    stage.policy(POLICY)
    systemd.start(stage)
    until(lambda: "READY=1" in systemd.hear(), "READY=1")
    systemd.stop(signal.SIGKILL)
    with socket.socket(socket.AF_UNIX) as early:
        early.connect(str(stage.place / "api"))
        early.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        systemd.start(stage)
        early.settimeout(60)
        assert early.recv(65536).startswith(b"HTTP/1.1 200")


def test_the_watchdog_hears_nothing_from_a_stopped_agent(stage: Stage, systemd: Systemd) -> None:
    """What the watchdog is for."""
    stage.policy(POLICY)
    systemd.start(stage, WATCHDOG_USEC="600000")
    until(lambda: "READY=1" in systemd.hear(), "READY=1")
    assert systemd.process is not None
    systemd.process.send_signal(signal.SIGSTOP)
    systemd.hear()
    systemd.said.clear()
    time.sleep(1.5)
    assert systemd.hear() == []
    systemd.process.send_signal(signal.SIGCONT)
    until(lambda: "WATCHDOG=1" in systemd.hear(), "it goes on")


def test_a_second_agent_is_refused(stage: Stage) -> None:
    """Two of them would undo each other's work. By the instance, by the state directory."""
    agent = stage.with_agent(POLICY)
    devices = str(Path(stage.backend.control).with_name("devices.json"))
    policy = str(stage.place / "policy.toml")
    ways = {
        "already runs for the control daemon": ("other.sock", "other-state"),
        "already runs for what is kept": ("other.sock", "state"),
    }
    for words, (sock, state) in ways.items():
        command = [
            *PROGRAM,
            "run",
            "--run-directory",
            str(stage.place / "run"),
            "--policy",
            policy,
            "--socket",
            str(stage.place / sock),
        ]
        command += ["--state-directory", str(stage.place / state), "--devices", devices, "--log-format", "text"]
        done = subprocess.run(command, env=stage.python_environment(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert f"mpsagent {agent.pid} {words}" in done.stderr
    assert agent.api.problems() == []
    assert request(str(agent.api.path), "/healthz")[0] == 200


def test_stopped_at_any_moment_of_its_start_it_stops(stage: Stage) -> None:
    """systemd may change its mind; an agent that finishes its start first would be killed for it."""
    stage.policy(POLICY)
    for wait in (0.3, 0.5):
        agent = stage.start_agent()
        time.sleep(wait)
        os.kill(agent.pid, signal.SIGTERM)
        assert rigs.exited(agent.started.process, 60)
        assert agent.started.process.returncode in (0, -signal.SIGTERM), agent.log()
        assert "Traceback" not in agent.log()
        stage.agents.remove(agent)


# --- what only a person can put right, and what waits for nobody ------------------------------------------------------


def test_what_is_not_installed_is_said_and_ready_waits_for_nothing(stage: Stage, systemd: Systemd) -> None:
    """The most frequent mistake of a first installation; a boot must not hang on it: here for an hour if it did."""
    stage.policy(POLICY, control="/nonexistent/nvidia-cuda-mps-control")
    patient = "import sys; from mpsagent.agent import main as one; one.OPENING = 3600.0; sys.exit(one.main())"
    agent = systemd.start(stage, (sys.executable, "-c", patient))
    until(lambda: "READY=1" in systemd.hear(), "READY=1")
    stage.until(
        lambda: any("/nonexistent/nvidia-cuda-mps-control" in one for one in agent.api.problems()), "it is said why"
    )
    failed = stage.record("action.failed", action="StartControl")
    assert (failed["ok"], "/nonexistent" in failed["text"]) == (False, True), "and no record says that it was done"
    assert stage.records("action.done", action="StartControl") == []


def test_a_low_limit_of_open_files_is_said(stage: Stage) -> None:
    """With `ulimit -n 64` the agent, the gate and MPS fail one by one, each in its own words."""
    stage.policy(POLICY)
    agent = stage.start_agent(prefix=("prlimit", "--nofile=64:64"))
    stage.answering(agent)
    assert "only 64 files" in stage.problem(agent, "the agent may open")
    assert "only 64 files" in stage.problem(agent, "the gate may open")
    assert "the agent may open only 64 files" in agent.log()


def test_a_descriptor_that_takes_long_to_close_holds_nobody_up_where_it_cannot_be_refused(
    stage: Stage, tmp_path: Path
) -> None:
    """Before Linux 6.16. The api is stopped meanwhile, so that it is the last one who has the descriptor."""
    code = "import mpsagent.linux.sent_descriptors as one; one.SO_PASSRIGHTS = 9999"
    (tmp_path / "sitecustomize.py").write_text(code)
    stage.policy(POLICY)
    agent = stage.start_agent(prefix=("env", f"PYTHONPATH={tmp_path}:{Path(__file__).parents[2]}"))
    stage.answering(agent)
    api = stage.api(agent)
    os.kill(api, signal.SIGSTOP)
    begun = time.monotonic()
    with lingering(Path(agent.api.path), socket.SOCK_STREAM, A) as became:
        assert became == "sent"
        os.kill(api, signal.SIGCONT)
        agent.api.status()
        assert time.monotonic() - begun < SECONDS / 2


def test_a_public_directory_of_a_user_ends_the_start_with_the_way_out(stage: Stage) -> None:
    """Whoever it belongs to could answer clients in the gate's place, so none of them may come there."""
    stage.policy(POLICY)
    os.chown(stage.rig.pipe, A, A)
    agent = stage.start_agent()
    assert rigs.exited(agent.started.process, 60)
    stage.agents.remove(agent)
    assert agent.started.process.returncode == 1
    said = agent.log()
    assert f"{stage.rig.pipe} belongs to uid {A}" in said
    assert f"rm -r {stage.rig.pipe}" in said
    assert "Traceback" not in said


def test_the_log_has_one_line_for_an_action_and_its_outcome(stage: Stage) -> None:
    """In sentences, with what was asked for, and without the questions that the agent asks for itself."""
    agent = stage.with_agent(POLICY)
    client = stage.client(A, "sleep", 600)
    client.known()
    assert agent.api.order("terminate", pid=client.pid)[0] == 200
    stage.record("client.ended", pid=client.pid)
    stage.until(
        lambda: all(words in agent.log() for words in ("asked MPS to terminate", "ordered by root")), "it is said"
    )
    assert stage.records("action.done", action="Reconcile"), "asked, and kept in the history"
    lines = [line for line in agent.log().splitlines() if "client" in line or "control daemon" in line]
    assert len([line for line in lines if f"asked MPS to terminate client {client.pid}" in line]) == 1
    assert len([line for line in lines if "started the control daemon" in line]) == 1
    assert not [line for line in lines if "(begun)" in line or "for its servers" in line]
    assert [line for line in lines if "ordered by root" in line]
