"""The gate in front of the simulated MPS: its servers, its clients, its front-end; limits as the clients see them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from mpsagent.gate.pacing import Rates, answers_cost, command_cost
from mpsagent.mps.limits import Limits
from mpsagent.mps.units import MIB, multiprocessors_for_percent
from mpsagent.wire.link import Applied, Failed, Passed, Refused, User
from tests.gate.rig import GIB, Agent, Rig, admissions, rigs, wait_for
from tests.sim.conftest import A, B, C, Client, Mps, mps, programs

__all__ = ["mps", "programs"]

pytestmark = pytest.mark.root


_LOOP = r"""
import os, socket, struct, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
for _ in range(3): os.fork()
while True:
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.connect(sys.argv[1])
    s.recv(64)
    who = struct.pack("iII", os.getpid(), os.geteuid(), os.getegid())
    s.sendmsg([b"OUTBCRED\0"], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, who)])
    for word in (b"\4\0\0\0", struct.pack("<Q", 30), b"get_server_status 1234567890\n\0", bytes(8)): s.send(word)
    print(s.recv(8192)[4:].decode(), flush=True)
    assert s.recv(8192) == b"\1" + bytes(7)
"""


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
    assert gated.mps.ctl("get_device_client_list").count(f"{greedy.pid}.") == 4
    beside[0].process.kill()
    for client in late[0], late[2]:
        assert client.end() == 0
    assert late[1].process.poll() is None, "who has no context waits"
    greedy.process.kill()
    assert late[1].end() == 0
    assert "ERROR" not in beside[1].text()
    assert "Failed to accept new client" not in gated.mps.log("server.log")


@pytest.mark.parametrize("gated", ["shared"], indirect=True)
def test_who_was_told_808_works_on_in_its_contexts_and_has_another_for_one_that_ends(gated: Gated) -> None:
    gated.agent.say(admissions(User(A, "all", Limits(20), max_contexts=4), number=2))
    gated.agent.wait(Applied, number=2)
    client = gated.client(A, "contexts", "60", "600")
    client.saw("made 4 contexts, last CUDA_ERROR_MPS_MAX_CLIENTS_REACHED")
    for times in range(1, 4):
        os.kill(client.pid, signal.SIGUSR1)
        client.saw(f"(works everywhere CUDA_SUCCESS, another ctx CUDA_SUCCESS, works CUDA_SUCCESS[^w]*){{{times}}}")
    assert gated.mps.ctl("get_device_client_list").count(f"{client.pid}.") == 4
    assert len(gated.agent.all(Refused)) == 1


def test_kills_of_the_gate_under_load(gated: Gated, present: int) -> None:
    gated.agent.say(admissions(others=User(0, "all", Limits(20)), number=2))
    gated.agent.wait(Applied, number=2)
    clients = []
    for _ in range(8):
        clients += [gated.client(A, "query") for _ in range(2)]
        pid = gated.rig.gate_pid()
        if pid:
            os.kill(pid, signal.SIGKILL)
    seen, wanted = [client.sms() for client in clients], multiprocessors_for_percent(20, present)
    # One that is killed between accepting a connection and storing it loses it, and that client is outside MPS: a known
    # limit (docs/architecture.md).
    assert set(seen) <= {wanted, present}, seen
    assert seen.count(present) <= 1, seen
    assert [client.end() for client in clients] == [0] * len(clients)


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


def test_a_loop_of_a_user_fills_no_log_and_keeps_no_one_waiting(gated: Gated) -> None:
    """Eight loops of one user, a session for each command; meanwhile other users' front-ends and clients come."""
    gated.agent.say(admissions(others=User(0, "all", Limits(20))))
    answers = gated.mps.directory / "answers"
    size = command_cost("get_server_status 1234567890") + answers_cost(["Server 1234567890 not found"])

    def asked() -> int:
        return gated.mps.log("control.log").count("Cmd:get_server_status 1234567890\n")

    begun = time.monotonic()
    with answers.open("wb") as file:
        words = [sys.executable, "-I", "-S", "-c", _LOOP, str(gated.rig.public / "control"), str(A)]
        loops = subprocess.Popen(words, stdout=file, start_new_session=True)
    try:
        wait_for(lambda: asked() * size >= Rates().burst)
        for uid in (B, C, B):
            client = gated.client(uid, "query")
            client.sms()
            client.end()
        gated.mps.environment["CUDA_MPS_PIPE_DIRECTORY"] = str(gated.rig.public)
        for uid in (B, 0, C, 0):
            assert re.fullmatch(r"\d+\n", gated.mps.ctl("get_server_list", uid))
        before = asked()
        wait_for(lambda: asked() > before)
        written = asked() * size
        assert written <= Rates().burst + Rates().rate * (time.monotonic() - begun) + 8 * size
        assert set(answers.read_text().splitlines()) == {"Server 1234567890 not found"}
    finally:
        os.killpg(loops.pid, signal.SIGKILL)
        loops.wait()
