"""Hand-overs that do not go on by themselves: clients that stop, leave or die in them, or that are another's."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time

import pytest

from mpsagent.mps.rendezvous import CREDENTIALS, Kind
from mpsagent.wire.link import Applied, Failed, Handing, Knock, Known, Left, Passed, Refused, Release, Synced, User
from tests.gate.rig import A, B, Lines, Rig, admissions, everybody, introduce, limits, raw, wait_for

pytestmark = pytest.mark.root


def test_a_client_that_is_stopped_with_its_descriptor_is_waited_for(rig: Rig) -> None:
    """MPS answers nothing until it has met its server (measured on an H100): to go on would be of no use. An agent that
    comes in the middle hears of it, so that it can resume or kill it."""
    daemon, agent = rig.start(admissions(User(A, "all", limits(30))))
    waiting = rig.waiting_client(B)
    agent.wait(Knock, pid=waiting.pid)
    stopped = rig.client(A, "stop")
    wait_for(lambda: daemon.saw("gave", uid=A))
    agent.say(admissions(others=everybody()))
    time.sleep(0.3)
    assert not agent.all(Passed)
    agent = rig.agent()
    assert agent.wait(Handing).pid == stopped.pid
    assert len(daemon.saw("gave")) == 1
    stopped.stopped()
    os.kill(stopped.pid, signal.SIGCONT)
    stopped.served()
    waiting.served()
    passed = agent.wait(Passed, pid=stopped.pid)
    assert (passed.acknowledged, passed.status) == (True, 0)
    assert len(daemon.saw("acknowledged")) >= 1


def test_a_client_that_leaves_with_its_descriptor_and_lives_counts_until_it_ends(rig: Rig) -> None:
    """It may have met its server; the gate does it in its place all the same."""
    daemon, agent = rig.start(admissions(others=everybody(), room=1))
    client = rig.client(A, "leave")
    passed = agent.wait(Passed, pid=client.pid)
    assert not passed.acknowledged
    again = rig.agent()
    again.wait(Synced)
    assert [one.pid for one in again.all(Known)] == [client.pid]
    (met,) = wait_for(lambda: daemon.saw("met"))
    assert (met["pid"], met["uid"], met["well"]) == (rig.gate_pid(), A, True)
    wait_for(lambda: daemon.saw("gone", uid=A))
    waiting = rig.waiting_client(B)
    again.wait(Knock, pid=waiting.pid)
    assert not waiting.saw("served")
    client.end()
    waiting.served()


@pytest.mark.parametrize("point", ["given", "0", "1", "2", "3", "met", "acknowledged"])
def test_a_client_that_dies_with_its_descriptor_leaves_no_server_stuck(rig: Rig, point: str) -> None:
    daemon, agent = rig.start(admissions(others=everybody()))
    for _ in range(3):
        client = rig.client(A, f"die {point}")
        client.process.wait(60)
        wait_for(lambda: any(one.pid == client.pid for one in agent.all(Failed) + agent.all(Passed)))  # noqa: B023
        if point == "acknowledged":
            assert agent.wait(Passed, pid=client.pid).acknowledged
        else:
            failed = agent.wait(Failed, pid=client.pid)
            assert (failed.stage, failed.lost) == ("acknowledgement", True)
    rig.client(B).served()
    wait_for(lambda: len(daemon.saw("gone", uid=A)) == 3)
    assert not daemon.saw("stuck")
    assert not daemon.saw("hung up")
    wait_for(lambda: len(daemon.saw("acknowledged")) == 4)
    if point in ("given", "0"):  # the client had not said a word: all of it is the gate's
        assert [(one["pid"], one["well"]) for one in daemon.saw("met", uid=A)] == [(rig.gate_pid(), True)] * 3
    elif point in ("3", "met", "acknowledged"):
        assert rig.gate_pid() not in [one["pid"] for one in daemon.saw("met")]


def rescued(rig: Rig, daemon: Lines) -> None:
    """The gate has said the rest to the server of A's client, and B's works on."""
    assert [(one["pid"], one["well"]) for one in daemon.saw("met", uid=A)] == [(rig.gate_pid(), True)]
    assert not daemon.saw("stuck")
    assert not daemon.saw("gone", uid=B)


def test_a_client_that_says_it_has_met_its_server_and_has_not_holds_others_up_once(rig: Rig) -> None:
    """It lives and says nothing to its server, which answers nobody (recording 12, H2): the gate says the rest."""
    daemon, agent = rig.start(admissions(others=everybody()))
    neighbour = rig.client(B)
    neighbour.served()
    liar = rig.client(A, "lie")
    again = rig.client(A, "lie")
    other = rig.waiting_client(B)
    other.served()
    failed = agent.wait(Failed, uid=A)
    assert failed.lost
    assert "says that it has met its server" in failed.why
    assert failed.pid in (liar.pid, again.pid)
    assert not agent.wait(Passed, uid=A).acknowledged
    for _ in range(3):
        rig.client(B).served()
    assert len(daemon.saw("gave", uid=A)) == 1, "the user's next one comes behind all others"
    rescued(rig, daemon)


def test_a_client_that_says_so_and_ends_is_not_waited_for(rig: Rig) -> None:
    """It cannot meet its server any more (make hostile: 5 s for each, as for one that lives)."""
    daemon, agent = rig.start(admissions(others=everybody()))
    neighbour = rig.client(B)
    neighbour.served()
    liar = rig.client(A, "die lied")
    failed = agent.wait(Failed, pid=liar.pid)
    assert failed.lost
    assert "has ended without" in failed.why
    rig.client(B).served()
    rescued(rig, daemon)


def test_a_client_that_says_807_holds_up_no_other_user(rig: Rig) -> None:
    """The server's own word counts, and each hand-over asks for it (recording 12, H3)."""
    daemon, agent = rig.start(admissions(others=everybody()))
    for number in range(1, 6):
        agent.wait(Passed, pid=rig.client(A, "fault").pid)
        rig.client(B).served()
        assert len(daemon.saw("gave", uid=B)) == number


def test_a_client_that_meets_a_server_in_fault_is_reported_and_its_users_others_wait(rig: Rig) -> None:
    """The agent needs a moment to hear of the fault; who is handed over in it is lost."""
    daemon, agent = rig.start(admissions(others=everybody()))
    client = rig.client(A, "fault")
    passed = agent.wait(Passed, pid=client.pid)
    assert (passed.acknowledged, passed.status) == (True, 807)
    waiting = rig.waiting_client(A)
    agent.say(admissions(open=False))
    agent.wait(Knock, pid=waiting.pid)
    assert len(daemon.saw("gave", uid=A)) == 1
    agent.say(admissions(others=everybody()))
    agent.wait(Passed, pid=waiting.pid)
    again = rig.agent()
    again.wait(Synced)
    assert [one.pid for one in again.all(Known)] == [client.pid, waiting.pid], "its word is no proof"


def test_a_hand_over_that_is_not_allowed_any_more_is_withdrawn(rig: Rig) -> None:
    daemon, agent = rig.start()
    other = introduce(raw(rig.hidden / "control_privileged"), Kind.FRONT_END)  # holds the limits' session up
    agent.say(admissions(others=everybody()))
    client = rig.waiting_client(A)
    agent.wait(Handing)
    agent.say(admissions(open=False, number=7))
    agent.wait(Applied, number=7)
    told = agent.wait(Failed, pid=client.pid)  # an agent that is not told waits for its end for ever
    assert (told.stage, told.lost) == ("limits", False)
    other.close()
    time.sleep(0.2)
    assert not daemon.saw("gave")
    assert not client.saw("served")
    agent.say(admissions(others=everybody()))
    client.served()


def test_a_client_that_dies_while_a_server_starts_is_waited_out(rig: Rig) -> None:
    """Closed early, the daemon would start a server for it that hangs (scenario X1). The gate takes its place."""
    daemon, agent = rig.start(admissions(others=everybody()), f"start={rig.directory}/started")
    client = rig.waiting_client(A)
    wait_for(lambda: daemon.saw("starting"))
    client.end()
    (rig.directory / "started").touch()
    other = rig.waiting_client(B)
    agent.wait(Left)
    other.served()
    (met,) = wait_for(lambda: daemon.saw("met", uid=A))
    assert (met["pid"], met["well"]) == (rig.gate_pid(), True)
    assert not daemon.saw("stuck")
    assert not daemon.saw("hung up")


def test_a_release_that_crosses_a_hand_over_does_not_make_room_for_another_process(rig: Rig) -> None:
    """The process has left its server, the agent says so, and its next context is on its way meanwhile."""
    daemon, agent = rig.start(admissions(User(A, "all", limits(30), max_clients=1)))
    client = rig.client(A, "stop")
    client.stopped()
    os.kill(client.pid, signal.SIGCONT)
    client.served()
    client.more()
    wait_for(lambda: len(daemon.saw("gave", uid=A)) == 2)
    client.stopped()
    agent.say(Release(client.pid, agent.wait(Knock, pid=client.pid).start))
    agent.say(admissions(User(A, "all", limits(30), max_clients=1), number=7))
    agent.wait(Applied, number=7)
    os.kill(client.pid, signal.SIGCONT)
    client.served(2)
    other = rig.waiting_client(A)
    agent.wait(Knock, pid=other.pid)
    time.sleep(0.5)
    assert not other.saw("served")
    client.end()
    other.served()


def test_a_release_from_before_the_last_hand_over_makes_no_room_for_another_process(rig: Rig) -> None:
    """The agent had not heard yet that the process had passed again, and two worked beside max_clients = 1."""
    _, agent = rig.start(admissions(User(A, "all", limits(30), max_clients=1)))
    client = rig.client(A)
    client.served()
    client.more()
    client.served(2)
    start = agent.wait(Passed, 2, pid=client.pid).start
    agent.say(Release(client.pid, start, 1))
    other = rig.waiting_client(A)
    agent.wait(Knock, pid=other.pid)
    for number in (7, 8):  # the gate has looked who may pass
        agent.say(admissions(User(A, "all", limits(30), max_clients=1), number=number))
        agent.wait(Applied, number=number)
    assert not agent.all(Passed, pid=other.pid)
    agent.say(Release(client.pid, start, 1))  # by now it has heard of it, and counts anew
    other.served()


def test_a_connection_that_changed_hands_is_refused(rig: Rig) -> None:
    """Who connected is who would be ended for it, so a child may not take its parent's place."""
    _, agent = rig.start()
    agent.wait(Synced)
    sock = raw(rig.public / "control")
    child = os.fork()
    if child == 0:
        who = struct.pack("iII", os.getpid(), 0, 0)
        sock.sendmsg([CREDENTIALS], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, who)])
        os._exit(0)
    os.waitpid(child, 0)
    assert sock.recv(64) == b""
    assert f"process {child}" in agent.wait(Refused).why


def test_a_connection_whose_process_has_ended_is_not_handed_over(rig: Rig) -> None:
    """A child may hold it open."""
    daemon, agent = rig.start()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        sock = introduce(raw(rig.public / "control"))
        if os.fork() == 0:
            os.close(write)
            os.read(read, 1)
        os._exit(sock.fileno() & 0)
    os.waitpid(child, 0)
    agent.wait(Knock)
    agent.say(admissions(others=everybody()))
    agent.wait(Left)
    rig.client(A).served()
    assert not daemon.saw("gave", uid=0)
    os.close(write)
    os.close(read)
