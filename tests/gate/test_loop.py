"""The gate as a process: who is held, who is let in and in which order; the agent at the other end of the link."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import stat
import time
from contextlib import closing
from pathlib import Path

import pytest

from mpsagent.gate.handovers import FIRST_NOT_READY
from mpsagent.gate.loop import Gate, Options
from mpsagent.mps.rendezvous import Kind
from mpsagent.wire.link import (
    Applied,
    Failed,
    Found,
    Handing,
    HandshakeSeen,
    Hello,
    Knock,
    Known,
    Passed,
    Release,
    Synced,
    User,
)
from tests.gate.rig import A, B, C, Lines, Rig, admissions, everybody, introduce, limits, raw
from tests.waiting import until

pytestmark = pytest.mark.root


def test_a_client_is_held_until_it_is_admitted_and_gets_exactly_its_limits(rig: Rig) -> None:
    daemon = rig.start_daemon()
    rig.start_gate()
    client = rig.waiting_client(A)
    agent = rig.agent()
    agent.wait(Synced)
    hello, *_ = agent.heard
    assert isinstance(hello, Hello)
    assert hello.gate == rig.gate_pid()
    knock = agent.wait(Knock)
    assert (knock.pid, knock.uid, knock.gid) == (client.pid, A, A)
    assert knock.pid_namespace == os.stat("/proc/self/ns/pid").st_ino
    assert knock.command.startswith("python")
    assert not select.select([agent.pidfds["knock", client.pid]], [], [], 0)[0]
    assert not client.saw("served")
    agent.say(admissions(User(A, "all", limits(20, 3))))
    assert client.served()["threads"] == "20.0"
    assert client.served()["memory"] == {"0": 3072}
    passed = agent.wait(Passed)
    assert (passed.connection, passed.pid, passed.limits) == (knock.connection, client.pid, limits(20, 3))
    assert passed.acknowledged
    assert not passed.fail_safe
    (gave,) = daemon.saw("gave")
    # the gate's own pid, without CAP_SYS_ADMIN; the server learns the client's from the client
    assert (gave["pid"], gave["uid"], gave["gid"]) == (rig.gate_pid(), A, A)
    (met,) = daemon.saw("met")
    assert (met["pid"], met["uid"], met["well"]) == (client.pid, A, True)
    (acknowledged,) = until(lambda: daemon.saw("acknowledged"))
    assert acknowledged["data"] == "00000000"
    assert acknowledged["by"] == [rig.gate_pid(), A, A]
    assert agent.wait(HandshakeSeen).known
    assert agent.wait(Handing).connection == knock.connection
    assert not agent.all(Failed)


def test_a_process_that_came_through_another_counts_until_it_ends(rig: Rig) -> None:
    """The agent says who it is; the gate asks the kernel, and tells of it, to a later agent too."""
    _, agent = rig.start()
    hidden = rig.waiting_client(A)
    knock = agent.wait(Knock, pid=hidden.pid)
    agent.say(Found(hidden.pid, B, knock.start, limits(30)))  # not this user's
    agent.say(Found(hidden.pid, A, knock.start + 1, limits(30)))  # another process
    agent.say(admissions(User(B, "all", limits(30), max_clients=1)))
    before = rig.client(B)
    before.served()
    before.end()
    agent.say(Found(hidden.pid, A, knock.start, limits(30)))
    known = agent.wait(Known, pid=hidden.pid)
    assert (known.uid, known.connections, known.limits) == (A, 0, limits(30))
    assert knock.since <= known.since <= time.monotonic(), "times of the same clock, which nobody sets"
    assert not select.select([agent.pidfds["known", hidden.pid]], [], [], 0)[0]
    again = rig.agent()
    assert again.wait(Known, pid=hidden.pid).connections == 0
    again.say(admissions(User(A, "all", limits(30), max_clients=1)))
    new = rig.waiting_client(A)
    hidden.served()  # its own connection is one of a known process
    assert not new.saw("served")
    hidden.end()
    new.served()


def test_a_client_that_is_stopped_with_its_descriptor_is_waited_for(rig: Rig) -> None:
    """MPS answers nothing until it has met its server (measured on an H100): to go on would be of no use. An agent that
    comes in the middle hears of it, so that it can resume or kill it."""
    daemon, agent = rig.start(admissions(User(A, "all", limits(30))))
    waiting = rig.waiting_client(B)
    agent.wait(Knock, pid=waiting.pid)
    stopped = rig.client(A, "stop")
    until(lambda: daemon.saw("gave", uid=A))
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
    liar = rig.client(A, "lie and die")
    failed = agent.wait(Failed, pid=liar.pid)
    assert failed.lost
    assert "has ended without" in failed.why
    rig.client(B).served()
    rescued(rig, daemon)


def test_a_client_that_leaves_with_its_descriptor_and_lives_counts_until_it_ends(rig: Rig) -> None:
    """It may have met its server; the gate does it in its place all the same."""
    daemon, agent = rig.start(admissions(others=everybody(), room=1))
    client = rig.client(A, "leave")
    passed = agent.wait(Passed, pid=client.pid)
    assert not passed.acknowledged
    assert "went away" in agent.wait(Failed, pid=client.pid).why, "nothing was waited for"
    again = rig.agent()
    again.wait(Synced)
    assert [one.pid for one in again.all(Known)] == [client.pid]
    (met,) = until(lambda: daemon.saw("met"))
    assert (met["pid"], met["uid"], met["well"]) == (rig.gate_pid(), A, True)
    until(lambda: daemon.saw("gone", uid=A))
    waiting = rig.waiting_client(B)
    again.wait(Knock, pid=waiting.pid)
    assert not waiting.saw("served")
    client.end()
    waiting.served()


def test_a_client_that_ends_and_leaves_its_descriptor_to_a_child_is_not_waited_for(rig: Rig) -> None:
    """Its connection stays open, and the child does not meet the server in its place."""
    daemon, agent = rig.start(admissions(others=everybody()))
    client = rig.client(A, "leave to a child")
    failed = agent.wait(Failed, pid=client.pid)
    assert failed.lost
    assert "went away" in failed.why
    rig.client(B).served()
    rescued(rig, daemon)


def test_a_client_that_meets_a_server_in_fault_is_reported_and_its_users_others_wait(rig: Rig) -> None:
    """The agent needs a moment to hear of the fault; who is handed over in it is lost."""
    _, agent = rig.start(admissions(open=False))
    client = rig.client(A, "fault")
    client.waiting()
    waiting = rig.waiting_client(A)
    agent.say(admissions(others=everybody()))
    passed, later = agent.wait(Passed, pid=client.pid), agent.wait(Passed, pid=waiting.pid)
    assert (passed.acknowledged, passed.status) == (True, 807)
    assert later.at - passed.at >= FIRST_NOT_READY
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


def test_a_table_that_shuts_out_who_has_the_descriptor_is_in_force_behind_that_hand_over(rig: Rig) -> None:
    """Else two users could be at work at once."""
    _, agent = rig.start(admissions(others=everybody()))
    client = rig.client(A, "stop")
    client.stopped()
    agent.say(admissions(open=False, number=7))
    agent.wait(Knock, pid=rig.waiting_client(B).pid)  # so long that the gate has the table
    os.kill(client.pid, signal.SIGCONT)
    applied = agent.wait(Applied, number=7)
    assert agent.heard.index(agent.wait(Passed, pid=client.pid)) < agent.heard.index(applied)


def test_a_release_that_crosses_a_hand_over_does_not_make_room_for_another_process(rig: Rig) -> None:
    """The process has left its server, the agent says so, and its next context is on its way meanwhile."""
    daemon, agent = rig.start(admissions(User(A, "all", limits(30), max_clients=1)))
    client = rig.client(A, "stop")
    client.stopped()
    os.kill(client.pid, signal.SIGCONT)
    client.served()
    client.more()
    until(lambda: len(daemon.saw("gave", uid=A)) == 2)
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


def test_the_agent_may_come_late_go_and_be_replaced(rig: Rig) -> None:
    """The gate goes on with what it was told last; the latest agent counts, and hears everything from the start."""
    _, first = rig.start(admissions(User(A, "all", limits(30))))
    served, waiting = rig.client(A), rig.waiting_client(B)
    served.served()
    first.wait(Passed, pid=served.pid)
    second = rig.agent()
    second.wait(Synced)
    assert second.all(Known)[0].pid == served.pid
    assert second.all(Known)[0].limits == limits(30)
    assert not select.select([second.pidfds["known", served.pid]], [], [], 0)[0]
    assert second.all(Knock)[0].pid == waiting.pid
    until(lambda: first.sock.recv(1 << 17) == b"")
    second.close()
    rig.client(A).served()
    assert not waiting.saw("served")


def test_a_table_that_cannot_be_written_does_not_leave_the_one_of_before(rig: Rig) -> None:
    """/run was full, the turn went from A to B, gate and agent died: the next gate let A in beside B."""
    rig.start_daemon()
    rig.start_gate()
    agent = rig.agent()
    agent.say(admissions(User(A, "all", limits(30)), number=1))
    assert not agent.wait(Applied, number=1).unkept
    (rig.state / ".admissions.json.new").mkdir()
    agent.say(admissions(User(B, "all", limits(20)), number=2))
    assert str(rig.state) in agent.wait(Applied, number=2).unkept
    rig.client(B).served()  # what is said counts, on disk or not
    agent.close()
    rig.kill_gate()
    client = rig.waiting_client(A)
    rig.waiting_client(C)
    agent = rig.agent()
    agent.wait(Knock, uid=C)  # who comes first is handed over first, and A was here before
    assert agent.all(Knock, pid=client.pid)
    assert not agent.all(Handing)


def test_a_process_that_another_releases_gate_has_stored_does_not_keep_this_one_from_starting(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its name is not known here. The gate did not start, and each restart found the same descriptor."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "state").mkdir()
    process = os.pidfd_open(os.getpid())
    with closing(asyncio.new_event_loop()) as loop:
        Gate(loop, Options(tmp_path / "hidden", tmp_path / "state"), [("z1.2.3.4", process)])
    assert "'z1.2.3.4' that the service manager gave is of no use, and is dropped" in capfd.readouterr().err
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(process)


def test_only_root_is_an_agent(rig: Rig) -> None:
    rig.start_gate()
    assert stat.S_IMODE(rig.link.stat().st_mode) == 0o600
    assert rig.link.stat().st_uid == 0


def test_an_agent_that_talks_nonsense_is_cut_off_and_the_next_one_served(rig: Rig) -> None:
    rig.start_gate()
    agent = rig.agent()
    agent.wait(Synced)
    agent.sock.send(b'{"kind":"admissions","open":"yes"}')
    until(lambda: agent.sock.recv(1 << 17) == b"")
    rig.agent().wait(Synced)
