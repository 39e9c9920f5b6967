"""Deaths in the middle of a hand-over, in front of the simulated MPS, whose servers are stuck for ever when nobody
finishes a client's handshake, as the real ones are (X1, X15; measured on an H100)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from mpsagent.mps.limits import Limits
from mpsagent.wire.link import Failed, Handing, Left, Passed, User
from tests.gate.rig import Agent, Rig, admissions, rigs, wait_for
from tests.sim.conftest import A, B, Client, Mps, mps, programs

__all__ = ["mps", "programs"]

pytestmark = pytest.mark.root


@dataclass
class Scene:
    mps: Mps
    rig: Rig
    agent: Agent
    shared: bool

    def client(self, uid: int, *arguments: str) -> Client:
        return self.mps.client(uid, *arguments, CUDA_MPS_PIPE_DIRECTORY=str(self.rig.public))

    def all_is_well(self, worker: Client, server: int) -> None:
        """MPS answers, the same server serves on, and whoever worked beside it has noticed nothing."""
        assert self.mps.ctl(f"get_server_status {server}") == "ACTIVE\n"
        late = self.client(B if self.shared else A, "query")
        assert (late.sms(), late.end()) == (26, 0)
        assert self.mps.ctl("get_server_list") == f"{server}\n"
        assert worker.process.poll() is None
        assert "ERROR" not in worker.text()


@pytest.fixture(params=["own", "shared"])
def scene(request: pytest.FixtureRequest, mps: Mps) -> Iterator[Scene]:
    shared = request.param == "shared"
    mps.start(*(["--multiuser-server"] if shared else []))
    for rig in rigs():
        rig.hidden = mps.pipe
        rig.start_gate()
        agent = rig.agent()
        agent.say(admissions(others=User(0, "all", Limits(20))))
        wait_for((rig.state / "admissions.json").exists)
        yield Scene(mps, rig, agent, shared)


@pytest.fixture
def worker(scene: Scene) -> Client:
    worker = scene.client(A, "sleep", "600")
    worker.saw("meminfo")
    return worker


@pytest.mark.parametrize("point", ["given", "1", "met"])
def test_a_client_that_dies_with_its_descriptor(scene: Scene, worker: Client, point: str) -> None:
    """Before its handshake, in the middle, and after the server's answer; more places in test_loop."""
    server = scene.mps.server()
    for _ in range(2):
        dying = scene.rig.client(A, f"die {point}")
        assert scene.agent.wait(Failed, pid=dying.pid).lost
    scene.all_is_well(worker, server)


def test_a_client_that_dies_as_soon_as_it_has_met_its_server_for_a_context(scene: Scene, worker: Client) -> None:
    """MPS's server ends if it sees that in this moment (server-deaths.txt); the gate's copy of the descriptor hides
    it."""
    server = scene.mps.server()
    for _ in range(4):
        dying = scene.client(A, "sleep", "600")
        scene.agent.wait(Passed, count=2, pid=dying.pid)
        dying.process.kill()
        dying.end()
    scene.all_is_well(worker, server)


def test_a_client_that_is_stopped_and_killed(scene: Scene, worker: Client) -> None:
    server = scene.mps.server()
    stopped = scene.rig.client(A, "stop")
    scene.agent.wait(Handing, pid=stopped.pid)
    stopped.stopped()
    waiting = scene.client(A, "query")
    os.kill(stopped.pid, signal.SIGKILL)
    assert waiting.end() == 0
    scene.all_is_well(worker, server)


def test_a_client_that_dies_while_its_server_starts(scene: Scene) -> None:
    dying = scene.rig.waiting_client(A)
    scene.mps.saw("control.log", "Starting new server")
    dying.end()
    scene.agent.wait(Left)
    worker = scene.client(A, "sleep", "600")
    worker.saw("meminfo")
    server = scene.mps.server()
    assert server == scene.mps.server_process()
    scene.all_is_well(worker, server)


@pytest.mark.parametrize("scene", ["own"], indirect=True)
def test_a_client_that_dies_while_another_users_server_is_busy(scene: Scene, worker: Client) -> None:
    """It is in the pending list: its server starts when the first one has gone, and meets the gate."""
    server = scene.mps.server()
    dying = scene.rig.waiting_client(B)
    scene.mps.saw("control.log", f"from user {B}: Server is not ready")
    dying.end()
    worker.process.kill()
    scene.mps.saw("control.log", f"Starting new server .* for user {B}")
    scene.agent.wait(Left)
    late = scene.client(A, "query")
    assert (late.sms(), late.end()) == (26, 0)
    assert scene.mps.server() != server


def test_a_gate_that_dies_while_a_server_starts(scene: Scene) -> None:
    worker = scene.client(A, "sleep", "600")
    scene.mps.saw("control.log", "Starting new server")
    scene.rig.kill_gate()
    worker.saw("meminfo")
    scene.all_is_well(worker, scene.mps.server())
    assert worker.sms() == 26


def test_a_gate_and_a_client_that_die_while_a_server_starts(scene: Scene) -> None:
    dying = scene.rig.waiting_client(A)
    scene.mps.saw("control.log", "Starting new server")
    gate = scene.rig.gate_pid()
    os.kill(gate, signal.SIGSTOP)
    dying.end()
    os.kill(gate, signal.SIGKILL)
    worker = scene.client(A, "sleep", "600")
    worker.saw("meminfo")
    scene.all_is_well(worker, scene.mps.server_process())


@pytest.mark.parametrize("fate", ["goes on", "dies with it", "dies after it"])
def test_a_gate_that_dies_while_a_client_has_its_descriptor(scene: Scene, worker: Client, fate: str) -> None:
    server = scene.mps.server()
    stopped = scene.rig.client(A, "stop")
    scene.agent.wait(Handing, pid=stopped.pid)
    stopped.stopped()
    gate = scene.rig.gate_pid()
    if fate == "dies with it":
        os.kill(gate, signal.SIGSTOP)
        os.kill(stopped.pid, signal.SIGKILL)
    os.kill(gate, signal.SIGKILL)
    wait_for(lambda: scene.rig.gate_pid() not in (0, gate))
    agent = scene.rig.agent()
    if fate == "goes on":
        agent.wait(Handing, pid=stopped.pid)
        os.kill(stopped.pid, signal.SIGCONT)
        assert agent.wait(Passed, pid=stopped.pid).acknowledged
        scene.mps.saw("server.log", f"PID: {stopped.pid}, Context ID: 0. connected")
    elif fate == "dies after it":
        agent.wait(Handing, pid=stopped.pid)
        os.kill(stopped.pid, signal.SIGKILL)
        assert agent.wait(Failed, pid=stopped.pid).lost
    scene.all_is_well(worker, server)


def test_without_anyone_who_finishes_it_the_server_is_stuck(scene: Scene, worker: Client) -> None:
    """What the others would look like: keeper and gate are killed with the client, so that nobody is left."""
    server = scene.mps.server()
    stopped = scene.rig.client(A, "stop")
    scene.agent.wait(Handing, pid=stopped.pid)
    stopped.stopped()
    gate = scene.rig.gate_pid()
    assert scene.rig.keeper is not None
    scene.rig.may_end = True
    scene.rig.keeper.kill()
    os.kill(gate, signal.SIGKILL)
    scene.rig.keeper.wait()
    os.kill(stopped.pid, signal.SIGKILL)
    scene.mps.saw("server.log", rf"Server +{server}\] User did not send valid credentials")
    asking = scene.mps.front_end(f"get_server_status {server}")
    scene.mps.saw("control.log", "Cmd:get_server_status")
    assert asking.poll() is None
    os.kill(server, signal.SIGKILL)
    asking.wait(60)
