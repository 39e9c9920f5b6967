"""A gate that is killed at any moment comes back with everybody who waited, in their order, and with who was served."""

from __future__ import annotations

import os
import signal
import struct
import time

import pytest

from mpsagent.mps.rendezvous import CREDENTIALS, Kind, kind_bytes
from mpsagent.wire.link import Knock, Known, Passed, Synced, User
from tests.gate.rig import A, B, C, Rig, admissions, descriptor, limits, raw, wait_for

pytestmark = pytest.mark.root


def test_who_waits_is_found_again_in_the_same_order(rig: Rig) -> None:
    daemon, first = rig.start()
    clients = [rig.waiting_client(uid) for uid in (A, B, A, C)]
    knocks = [first.wait(Knock, pid=client.pid) for client in clients]
    rig.kill_gate()
    agent = rig.agent()
    agent.wait(Synced)
    assert agent.all(Knock) == knocks
    rig.kill_gate()
    agent = rig.agent()
    agent.say(admissions(others=User(0, "all", limits(30))))
    for client in clients:
        assert client.served()["threads"] == "30.0"
    assert [one["pid"] for one in daemon.saw("met")] == [client.pid for client in clients]


@pytest.mark.parametrize("messages", [0, 1, 2])
def test_a_handshake_that_was_cut_is_taken_up_where_it_was(rig: Rig, messages: int) -> None:
    """The gate is stopped, so that it has read nothing, or everything but the last, when it is killed."""
    _, agent = rig.start()
    sock = raw(rig.public / "control")
    pid = rig.gate_pid()
    who = struct.pack("iII", os.getpid(), 0, 0)
    words = [lambda: sock.sendmsg([CREDENTIALS], [(1, 2, who)]), lambda: sock.send(kind_bytes(Kind.CLIENT))]
    for word in words[:messages]:
        word()
    time.sleep(0.1)
    os.kill(pid, signal.SIGSTOP)
    for word in words[messages:]:
        word()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: rig.gate_pid() not in (0, pid))
    agent = rig.agent()
    agent.say(admissions(others=User(0, "all", limits(30))))
    assert descriptor(sock)["threads"] == "30.0"


def test_a_hand_over_that_was_cut_while_a_server_started_goes_on(rig: Rig) -> None:
    """On the same connection to the daemon: a server waits for ever for a client whose relay left after the daemon was
    told (seen on an H100)."""
    daemon, agent = rig.start(admissions(others=User(0, "all", limits(30, 4))), f"start={rig.directory}/started")
    client = rig.waiting_client(A)
    wait_for(lambda: daemon.saw("starting"))
    rig.kill_gate()
    agent = rig.agent()
    agent.wait(Synced)
    (rig.directory / "started").touch()
    assert client.served()["memory"] == {"0": 4096}
    passed = agent.wait(Passed)
    assert (passed.pid, passed.limits, passed.fail_safe) == (client.pid, limits(30, 4), False)
    rig.client(B).served()
    assert len(daemon.saw("starting")) == 1
    assert [one["pid"] for one in daemon.saw("met", uid=A)] == [client.pid]
    assert len(daemon.saw("gave", uid=A)) == 1
    assert not daemon.saw("hung up")


def test_a_hand_over_that_was_cut_after_the_descriptor_counts_as_passed(rig: Rig) -> None:
    """The client is stopped with its descriptor: the next gate finds that in its socket, and knows its process."""
    daemon, agent = rig.start(admissions(others=User(0, "all", limits(30, 4))))
    client = rig.client(A, "stop")
    wait_for(lambda: daemon.saw("gave", uid=A))
    rig.kill_gate()
    client.stopped()
    os.kill(client.pid, signal.SIGCONT)
    client.served()
    agent = rig.agent()
    wait_for(lambda: agent.all(Known, pid=client.pid) or agent.all(Passed, pid=client.pid) or resync(rig, client.pid))
    assert len(client.saw("served")) == 1
    wait_for(lambda: daemon.saw("acknowledged", uid=A))
    assert not daemon.saw("hung up", uid=A)
    rig.client(B).served()


def resync(rig: Rig, pid: int) -> bool:
    agent = rig.agent()
    agent.wait(Synced)
    return bool(agent.all(Known, pid=pid))
