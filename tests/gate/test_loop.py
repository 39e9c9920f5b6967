"""The gate as a process: who is held, who is let in and in which order; the agent at the other end of the link."""

from __future__ import annotations

import os
import select
import stat
import time

import pytest

from mpsagent.wire.link import (
    Applied,
    Failed,
    Found,
    Handing,
    HandshakeSeen,
    Hello,
    Knock,
    Known,
    Left,
    Passed,
    Refuse,
    Release,
    Synced,
    User,
)
from tests.gate.rig import A, B, C, Rig, admissions, limits, wait_for

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
    (acknowledged,) = wait_for(lambda: daemon.saw("acknowledged"))
    assert acknowledged["data"] == "00000000"
    assert acknowledged["by"] == [rig.gate_pid(), A, A]
    assert agent.wait(HandshakeSeen).known
    assert agent.wait(Handing).connection == knock.connection
    assert not agent.all(Failed)


def test_each_user_gets_their_own_limits_whatever_the_order(rig: Rig) -> None:
    _, agent = rig.start()
    agent.say(
        admissions(User(A, "all", limits(60, 20)), User(B, "all", limits(19.7, 16)), User(C, "all", limits(10, 4)))
    )
    wanted = {A: ("60.0", 20 << 10), B: ("19.7", 16 << 10), C: ("10.0", 4 << 10)}
    for client in [rig.client(uid) for _ in range(4) for uid in (A, B, C)]:
        served = client.served()
        assert (served["threads"], served["memory"]["0"]) == wanted[client.uid]


def test_order_of_arrival_and_known_processes_first(rig: Rig) -> None:
    daemon, agent = rig.start(admissions(User(B, "all", limits(30))))
    known = rig.client(B)
    known.served()
    agent.say(admissions(open=False))
    first, second = rig.waiting_client(A), rig.waiting_client(C)
    third = rig.waiting_client(A)
    known.more()
    agent.wait(Knock, 2, pid=known.pid)  # the gate has read it
    agent.wait(Knock, pid=third.pid)
    agent.say(admissions(*(User(uid, "all", limits(30)) for uid in (A, B, C))))
    for client in (first, second, third):
        client.served()
    known.served(2)
    wait_for(lambda: len(daemon.saw("met")) == 5)
    assert [one["pid"] for one in daemon.saw("met")[1:]] == [known.pid, first.pid, second.pid, third.pid]


def test_known_processes_only(rig: Rig) -> None:
    """A turn that ends: what has begun goes on, what is new is held; a process that was released has to knock anew."""
    _, agent = rig.start(admissions(User(A, "all", limits(30))))
    old = rig.client(A)
    old.served()
    agent.say(admissions(User(A, "known", limits(30))))
    new = rig.waiting_client(A)
    old.more()
    old.served(2)
    start = agent.wait(Passed, pid=old.pid).start
    agent.say(Release(old.pid, start))
    old.more()
    old.waiting(3)
    agent.wait(Knock, 3, pid=old.pid)
    assert not new.saw("served")
    assert len(old.saw("served")) == 2
    agent.say(admissions(User(A, "all", limits(30))))
    new.served()
    old.served(3)


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


def test_room_is_counted_in_processes_and_freed_by_their_end(rig: Rig) -> None:
    _, agent = rig.start(admissions(User(A, "all", limits(30)), User(B, "all", limits(30), max_clients=1), room=2))
    first, second = rig.client(B), rig.client(A)
    first.served()
    second.served()
    third, fourth = rig.waiting_client(B), rig.waiting_client(A)
    agent.wait(Knock, pid=fourth.pid)
    second.end()
    fourth.served()
    assert not third.saw("served")
    first.end()
    third.served()


def test_a_client_that_leaves_is_forgotten(rig: Rig) -> None:
    _, agent = rig.start()
    client = rig.waiting_client(A)
    knock = agent.wait(Knock)
    client.end()
    assert agent.wait(Left).connection == knock.connection
    assert select.select([agent.pidfds["knock", client.pid]], [], [], 60)[0]


def test_a_client_that_is_refused_gets_its_error_after_its_credentials(rig: Rig) -> None:
    _, agent = rig.start()
    client = rig.waiting_client(A)
    agent.say(Refuse(agent.wait(Knock).connection, "not on this machine"))
    assert wait_for(lambda: client.saw("refused"))[0]["why"] == ""


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
    wait_for(lambda: first.sock.recv(1 << 17) == b"")
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


def test_only_root_is_an_agent(rig: Rig) -> None:
    rig.start_gate()
    assert stat.S_IMODE(rig.link.stat().st_mode) == 0o600
    assert rig.link.stat().st_uid == 0


def test_an_agent_that_talks_nonsense_is_cut_off_and_the_next_one_served(rig: Rig) -> None:
    rig.start_gate()
    agent = rig.agent()
    agent.wait(Synced)
    agent.sock.send(b'{"kind":"admissions","open":"yes"}')
    wait_for(lambda: agent.sock.recv(1 << 17) == b"")
    rig.agent().wait(Synced)
