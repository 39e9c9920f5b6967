"""The gate in front of the simulated MPS: its servers, its clients, its front-end; limits as the clients see them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from mpsagent.gate.link import Applied, Failed, Passed, User
from mpsagent.mps.limits import Limits
from mpsagent.mps.units import MIB, multiprocessors_for_percent
from tests.gate.rig import GIB, Agent, Rig, admissions, rigs, wait_for
from tests.sim.conftest import A, B, C, Client, Mps, mps, programs

__all__ = ["mps", "programs"]

pytestmark = pytest.mark.root


@dataclass
class Gated:
    mps: Mps
    rig: Rig
    agent: Agent

    def client(self, uid: int, *arguments: str) -> Client:
        return self.mps.client(uid, *arguments, CUDA_MPS_PIPE_DIRECTORY=str(self.rig.public))


@pytest.fixture(params=["own", "shared"])
def gated(request: pytest.FixtureRequest, mps: Mps) -> Iterator[Gated]:
    mps.start(*(["--multiuser-server"] if request.param == "shared" else []))
    for rig in rigs():
        rig.hidden = mps.pipe
        rig.start_gate()
        yield Gated(mps, rig, rig.agent())


def sms(client: Client, threads: float, present: int) -> bool:
    return client.sms() == multiprocessors_for_percent(threads, present)


@pytest.fixture
def present(gated: Gated) -> int:
    """The multiprocessors of the simulated GPU, as a client without limits sees them."""
    gated.agent.say(admissions(others=User(0, "all", Limits())))
    client = gated.client(C, "query")
    return client.sms()


def test_the_first_client_of_each_user_has_exactly_its_limits(gated: Gated, present: int) -> None:
    wanted = {A: Limits(60, {0: 20389 * MIB}), B: Limits(19.7, {0: 16 * GIB})}
    gated.agent.say(admissions(*(User(uid, "all", limits) for uid, limits in wanted.items())))
    for uid in (A, B, A, B, B, A):
        client = gated.client(uid, "query")
        assert sms(client, wanted[uid].threads, present)
        size = wanted[uid].memory[0] // MIB
        assert size - 400 < client.free() <= size
        client.end()
    assert not gated.agent.all(Failed)
    assert not any(one.fail_safe for one in gated.agent.all(Passed))


def test_a_client_that_is_at_work_keeps_its_limits_while_others_come(gated: Gated, present: int) -> None:
    gated.agent.say(admissions(User(A, "all", Limits(60))))
    worker = gated.client(A, "sleep", "30")
    assert sms(worker, 60, present)
    gated.agent.say(admissions(User(A, "all", Limits(20))))
    assert sms(gated.client(A, "query"), 20, present)
    assert "ERROR" not in worker.text()


def test_kills_of_the_gate_under_load(gated: Gated, present: int) -> None:
    gated.agent.say(admissions(others=User(0, "all", Limits(20)), number=2))
    gated.agent.wait(Applied, number=2)
    clients = []
    for _ in range(8):
        clients += [gated.client(A, "query") for _ in range(2)]
        pid = gated.rig.gate_pid()
        if pid:
            os.kill(pid, signal.SIGKILL)
    for client in clients:
        assert sms(client, 20, present)
        assert client.end() == 0


def test_a_client_that_comes_in_a_fault_is_held_though_no_agent_says_so(gated: Gated, present: int) -> None:
    """A leftover keeps the server in FAULT; 807 would be the end of each client that met it."""
    gated.agent.say(admissions(others=User(0, "all", Limits(20)), number=2))
    gated.agent.wait(Applied, number=2)
    gated.agent.close()
    leftover = gated.client(A, "sleep", "600")
    leftover.saw(r"\] sms ")
    assert gated.client(A, "oob", "0.2").end() == 17
    server = gated.mps.server()
    wait_for(lambda: gated.mps.ctl(f"get_server_status {server}") == "FAULT\n")
    asked = len(gated.mps.log("control.log"))
    later = [gated.client(A, "query") for _ in range(3)]
    wait_for(lambda: gated.mps.log("control.log")[asked:].count(f"Cmd:get_server_status {server}") >= 3)
    assert "ERROR" not in "".join(client.text() for client in later)
    os.kill(leftover.pid, signal.SIGKILL)
    for client in later:
        assert sms(client, 20, present)
        assert client.end() == 0


def test_roots_front_end_through_the_public_directory(gated: Gated) -> None:
    gated.mps.environment["CUDA_MPS_PIPE_DIRECTORY"] = str(gated.rig.public)
    assert gated.mps.ctl("get_default_active_thread_percentage") == "100.0\n"
    assert gated.mps.ctl("get_default_active_thread_percentage", A) == "100.0\n"
