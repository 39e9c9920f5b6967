"""A gate that is killed in a hand-over goes on with it; tests/world kills it before each of its steps."""

from __future__ import annotations

import os
import signal

import pytest

from mpsagent.wire.link import Failed, Knock, Known, Named, Passed, Synced, User
from tests.gate.rig import A, B, Rig, admissions, limits
from tests.waiting import until

pytestmark = pytest.mark.root


def test_a_hand_over_that_was_cut_while_a_server_started_goes_on(rig: Rig) -> None:
    """On the same connection to the daemon: a server waits for ever for a client whose relay left after the daemon was
    told (seen on an H100)."""
    daemon, agent = rig.start(admissions(others=User(0, "all", limits(30, 4))), f"start={rig.directory}/started")
    client = rig.waiting_client(A)
    until(lambda: daemon.saw("starting"))
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


def test_own_limits_stay_after_a_hand_over_that_was_cut(rig: Rig) -> None:
    """The next context had the limits of its user (world, habits, seed 668262307)."""
    user = User(A, "all", limits(60, 20), named=True)
    daemon, agent = rig.start(admissions(user), f"start={rig.directory}/started")
    client = rig.waiting_client(A)
    named = Named(client.pid, agent.wait(Knock).start, limits(30, 4))
    agent.say(admissions(user, processes={named.key: named}, number=1))
    until(lambda: daemon.saw("starting"))
    rig.kill_gate()
    agent = rig.agent()
    agent.wait(Synced)
    (rig.directory / "started").touch()
    assert client.served()["threads"] == "30.0"
    agent.say(admissions(user, number=2))
    client.more()
    assert client.served(2)["threads"] == "30.0"


def test_a_hand_over_that_was_cut_after_the_descriptor_counts_as_passed(rig: Rig) -> None:
    """The client is stopped with its descriptor: the next gate finds that in its socket, and knows its process."""
    daemon, agent = rig.start(admissions(others=User(0, "all", limits(30, 4))))
    client = rig.client(A, "stop")
    until(lambda: daemon.saw("gave", uid=A))
    rig.kill_gate()
    client.stopped()
    os.kill(client.pid, signal.SIGCONT)
    client.served()
    agent = rig.agent()
    until(lambda: agent.all(Known, pid=client.pid) or agent.all(Passed, pid=client.pid) or resync(rig, client.pid))
    assert len(client.saw("served")) == 1
    until(lambda: daemon.saw("acknowledged", uid=A))
    assert not daemon.saw("hung up", uid=A)
    rig.client(B).served()


@pytest.mark.parametrize("dies", [False, True])
def test_a_hand_over_that_was_cut_after_a_false_acknowledgement_is_finished_by_the_next_gate(
    rig: Rig, dies: bool
) -> None:
    """Else the server would wait for ever, with MPS and everybody's clients."""
    daemon, _ = rig.start(admissions(others=User(0, "all", limits(30, 4))))
    rig.client(B).served()
    liar = rig.client(A, "lie")
    until(lambda: daemon.saw("acknowledged", uid=A))
    if dies:
        os.kill(rig.gate_pid(), signal.SIGSTOP)
        liar.end()
    rig.kill_gate()
    if not dies:
        failed = rig.agent().wait(Failed, uid=A)
        assert (failed.pid, failed.lost) == (liar.pid, True)
    rig.client(B).served()
    until(lambda: daemon.saw("met", uid=A))
    assert [(one["pid"], one["well"]) for one in daemon.saw("met", uid=A)] == [(rig.gate_pid(), True)]
    assert not daemon.saw("stuck")
    assert not daemon.saw("gone", uid=B)


def resync(rig: Rig, pid: int) -> bool:
    agent = rig.agent()
    agent.wait(Synced)
    return bool(agent.all(Known, pid=pid))
