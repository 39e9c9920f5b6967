"""The gate in front of the simulated MPS: its servers, its clients, its front-end; limits as the clients see them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from mpsagent.mps.limits import Limits
from mpsagent.mps.units import multiprocessors_for_percent
from mpsagent.wire.link import Applied, Refused, User
from tests.gate.rig import Agent, Rig, admissions, rigs
from tests.sim.conftest import A, B, C, Client, Mps, mps, programs
from tests.waiting import until

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


@pytest.mark.parametrize("gated", ["shared"], indirect=True)
def test_one_process_that_makes_contexts_without_end_beside_others(gated: Gated, present: int) -> None:
    """Recording 12, H4: it filled the server, and everybody else was refused. It has its user's places and is told 808
    at the next; others have theirs; who finds none is held until there is one, also when the gate was killed."""
    users = [User(uid, "all", Limits(20), max_contexts=4) for uid in (A, B)]
    gated.agent.say(admissions(*users, room=6, number=2))
    gated.agent.wait(Applied, number=2)
    greedy = gated.client(A, "contexts", "60", "600")
    greedy.saw("made 4 contexts, last CUDA_ERROR_MPS_MAX_CLIENTS_REACHED")
    refused = gated.agent.wait(Refused, pid=greedy.pid)
    assert refused.why == "its user has as many contexts as max_contexts allows, 4 (CUDA error 808)"
    beside = [gated.client(B, "sleep", "600") for _ in range(2)]
    for client in beside:
        assert sms(client, 20, present)
    late = [gated.client(B, "query"), gated.client(A, "query")]
    os.kill(gated.rig.gate_pid(), signal.SIGKILL)
    late.append(gated.client(B, "query"))
    time.sleep(2.5)  # MPS is asked several times meanwhile
    assert [one.process.poll() for one in late] == [None, None, None]
    # the gate asks, too, and a front-end beside another one is turned away
    listed = until(lambda: gated.mps.run("get_device_client_list")[1])
    assert listed.count(f"{greedy.pid}.") == 4
    beside[0].process.kill()
    for client in late[0], late[2]:
        assert client.end() == 0
    assert late[1].process.poll() is None, "who has no context waits"
    greedy.process.kill()
    assert late[1].end() == 0
    assert "ERROR" not in beside[1].text()
    assert "Failed to accept new client" not in gated.mps.log("server.log")


def test_a_client_that_comes_in_a_fault_is_held_though_no_agent_says_so(gated: Gated, present: int) -> None:
    """A leftover keeps the server in FAULT; 807 would be the end of each client that met it."""
    gated.agent.say(admissions(others=User(0, "all", Limits(20)), number=2))
    gated.agent.wait(Applied, number=2)
    gated.agent.close()
    leftover = gated.client(A, "sleep", "600")
    leftover.saw(r"\] sms ")
    assert gated.client(A, "oob", "0.2").end() == 17
    server = gated.mps.server()
    until(lambda: gated.mps.run(f"get_server_status {server}")[1] == "FAULT\n")
    asked = len(gated.mps.log("control.log"))
    later = [gated.client(A, "query") for _ in range(3)]
    until(lambda: gated.mps.log("control.log")[asked:].count(f"Cmd:get_server_status {server}") >= 3)
    assert "ERROR" not in "".join(client.text() for client in later)
    os.kill(leftover.pid, signal.SIGKILL)
    for client in later:
        assert sms(client, 20, present)
        assert client.end() == 0


def test_roots_front_end_through_the_public_directory(gated: Gated) -> None:
    gated.mps.environment["CUDA_MPS_PIPE_DIRECTORY"] = str(gated.rig.public)
    assert gated.mps.ctl("get_default_active_thread_percentage") == "100.0\n"
    assert gated.mps.ctl("get_default_active_thread_percentage", A) == "100.0\n"
