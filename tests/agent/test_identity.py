"""Who a client is comes from the kernel at the gate, never from a log: forged lines of every kind hit nobody, change no
limit and move no turn."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsagent.mps.loglines import LogParser
from tests.agent.forgery import Forger
from tests.agent.stage import A, Agent, B, C, D, Stage, alive
from tests.conformance.backends import other_users_python
from tests.core.reducing import KINDS

# Every deadline is short, so that what a forged line sets off comes while we look.
POLICY = (
    f'[limits]\nthreads = 10\nmemory = "2G"\n[user.{A}]\nthreads = 40\n[user.{B}]\nthreads = 20\n'
    '[switch]\nafter = "10m"\n[hang]\ncontrol = "5s"\nterminate = "5s"\nserver_ready = "5s"\nexit = "5s"\n'
    'fault = "5s"\nkill_grace = "1s"\n'
)
HITS = {"SignalClient", "SignalHeld", "TerminateClient", "KillServer", "KillControl", "ShutdownServer", "QuitControl"}
# Says which signals it gets, of any kind that can be held back.
LISTENER = """
import signal
every = set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}
signal.pthread_sigmask(signal.SIG_BLOCK, every)
print("ready", flush=True)
while True:
    print(signal.sigwait(every).name, flush=True)
"""


@pytest.fixture
def bystanders() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of users that have nothing to do with MPS."""
    found = [
        subprocess.Popen(
            [other_users_python(uid), "-S", "-E", "-c", LISTENER],
            stdout=subprocess.PIPE,
            user=uid,
            group=uid,
            extra_groups=[],
        )
        for uid in (A, B, D)
    ]
    for one in found:
        assert one.stdout is not None
        assert one.stdout.readline() == b"ready\n"
    yield found
    for one in found:
        one.kill()
        one.wait()


def append(path: Path, text: str) -> None:
    with path.open("a", errors="surrogateescape") as file:
        file.write(text)


def hits(stage: Stage) -> list[dict[str, object]]:
    """What was done to a process: what was asked for and not done hits nobody."""
    return [one for one in stage.records("action.done", ok=True) if one["action"] in HITS]


def test_the_forged_lines_are_of_every_kind() -> None:
    """Otherwise the next test would say less than it seems to."""
    control, server = Forger(1, [40], [7], [1000], "/p/control").all_kinds()
    found = [*LogParser("control").feed(control.encode()), *LogParser("server").feed(server.encode())]
    assert {one.what for one in found} == set(KINDS)


@pytest.mark.timeout(400)
def test_forged_lines_hit_nobody_and_move_no_turn(stage: Stage, bystanders: list[subprocess.Popen[bytes]]) -> None:
    """Everything that any driver writes, about everybody and said by everybody, 10,000 times, beside live clients of
    several users; then everything is as it was, and the next one gets exactly what is due."""
    agent = stage.with_agent(POLICY)
    holder, beside = stage.client(A, "sleep", 600), stage.client(A, "sleep", 600)
    holder.known()
    beside.known()
    waiting = [stage.client(B, "query"), stage.client(C, "query")]
    for one in waiting:
        stage.waiting(one)
    (server,) = agent.api.status()["servers"]
    control, gate, keeper = stage.control(agent), stage.gate(agent), stage.keeper(agent)
    people = [one.pid for one in (holder, beside, *waiting, *bystanders)]
    heads = [control, server["pid"], *people, 1, 4_000_001]
    socket = f"{stage.hidden()}/control"
    forger = Forger(2026, heads, [*heads, gate, keeper, agent.pid], [0, A, B, C, D], socket)
    before = whose(agent), hits(stage)
    for number in range(21):
        said = forger.all_kinds() if number % 10 == 0 else forger.some(556)
        for name, text in zip(("control", "server"), said, strict=True):
            append(stage.rig.log / f"{name}.log", text)
        time.sleep(0.1)
    time.sleep(9)  # every deadline has passed by then
    assert [one.pid for one in (holder, beside) if one.rc is not None] == []
    assert [one.poll() for one in bystanders] == [None] * len(bystanders)
    assert all(map(alive, (server["pid"], control, gate, keeper)))
    assert whose(agent) == before[0], "whose turn it is, since when, and who waits"
    assert [one.rc for one in waiting] == [None, None]
    assert hits(stage) == before[1] == []
    holder.kill()
    beside.kill()
    for one, percent in zip(waiting, (20, 10), strict=True):
        assert one.ended() == 0, one.text()
        assert one.inside(percent), one.text()
    for one in bystanders:
        one.kill()
        assert one.stdout is not None
        assert one.stdout.read() == b"", "no signal of any kind"
    assert stage.records("agent.error") == stage.records("client.refused") == []


def whose(agent: Agent) -> object:
    status = agent.api.status()
    turn = {name: status["turn"][name] for name in ("uid", "since")}
    return turn, [(one["uid"], one["since"], one["clients"]) for one in agent.api.get("/v1/queue")["queue"]]


def test_a_client_whose_process_cannot_be_seen_is_refused(stage: Stage) -> None:
    """An agent in a container without the host's pid namespace sees pid 0. It used to serve that and count it as ended
    at once, so the next user's turn began beside the work. Clients of its own namespace are served."""
    stage.policy("")
    agent = stage.start_agent(
        prefix=["unshare", "--propagation", "unchanged", "--pid", "--fork", "--kill-child", "--mount-proc"]
    )
    stage.answering(agent)
    stage.open(agent)
    outside = stage.client(A)
    assert outside.ended() == 10
    assert "MPS_CONNECTION_FAILED" in outside.text()
    assert "pid namespace" in stage.record("client.refused", uid=A)["why"]
    stage.until(lambda: "hostPID" in str(agent.api.status()["not_guaranteed"]), "status says it")
    inner = next(one.pid for one in stage.rig.ours() if one.parent == agent.pid)
    within = ["nsenter", f"--pid=/proc/{inner}/ns/pid", *stage.backend.client, "query"]
    started = stage.rig.run(within, env=stage.rig.environment())
    stage.until(lambda: started.process.poll() is not None, "a client inside ends")
    assert started.process.returncode == 0, started.read()
    stage.record("client.connected", uid=0)
    stage.killed(agent)  # unshare does not pass SIGTERM on


TALKATIVE = """
import socket, sys
one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
one.setsockopt(socket.SOL_SOCKET, 16, 1)
one.connect(sys.argv[1])
one.recv(64)
for word in (b"OUTBCRED\\0", bytes([2, 0, 0, 0]), b"now"):
    one.send(word)
assert one.recv(64) == b""
"""


def test_who_talks_while_held_does_not_wait_on_as_a_phantom(stage: Stage) -> None:
    """The gate closes it. The agent used to keep it in the queue, and to give the GPU to a process that had ended."""
    stage.with_agent("")
    holder = stage.client(A, "sleep", 600)
    assert holder.working()
    talkative = stage.rig.run([other_users_python(B), "-c", TALKATIVE, str(stage.rig.pipe / "control")], uid=B)
    stage.until(lambda: talkative.process.poll() is not None, "it is hung up on")
    assert talkative.process.returncode == 0, talkative.err.read_text()
    stage.record("client.refused", uid=B)
    last = stage.client(C)
    last.queued()
    holder.kill()
    assert last.ended() == 0
    assert [one["uid"] for one in stage.records("turn.began")] == [A, C]
