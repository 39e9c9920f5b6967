"""The gate as a process: real sockets, real users, a keeper that holds what it stores, a stand-in for the daemon."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import stat
import struct
import time

import pytest

from mpsagent.gate.link import (
    Applied,
    Failed,
    Handing,
    HandshakeSeen,
    Hello,
    Knock,
    Known,
    Left,
    Passed,
    Refuse,
    Refused,
    Release,
    Synced,
    Unconfirmed,
    User,
)
from mpsagent.mps.rendezvous import CREDENTIALS, Kind
from tests.gate.rig import A, B, C, Rig, admissions, descriptor, introduce, limits, raw, wait_for

pytestmark = pytest.mark.root


def everybody(threads: float = 30, gigabytes: int = 2) -> User:
    return User(0, "all", limits(threads, gigabytes))


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
    rig.start_daemon()
    rig.start_gate()
    agent = rig.agent()
    agent.say(
        admissions(User(A, "all", limits(60, 20)), User(B, "all", limits(19.7, 16)), User(C, "all", limits(10, 4)))
    )
    wanted = {A: ("60.0", 20 << 10), B: ("19.7", 16 << 10), C: ("10.0", 4 << 10)}
    for client in [rig.client(uid) for _ in range(4) for uid in (A, B, C)]:
        served = client.served()
        assert (served["threads"], served["memory"]["0"]) == wanted[client.uid]


def test_order_of_arrival_and_known_processes_first(rig: Rig) -> None:
    daemon = rig.start_daemon()
    rig.start_gate()
    agent = rig.agent()
    agent.say(admissions(User(B, "all", limits(30))))
    known = rig.client(B)
    known.served()
    agent.say(admissions(open=False))
    first, second = rig.waiting_client(A), rig.waiting_client(C)
    third = rig.waiting_client(A)
    known.more()
    known.waiting(2)
    agent.say(admissions(*(User(uid, "all", limits(30)) for uid in (A, B, C))))
    for client in (first, second, third):
        client.served()
    known.served(2)
    wait_for(lambda: len(daemon.saw("met")) == 5)
    assert [one["pid"] for one in daemon.saw("met")[1:]] == [known.pid, first.pid, second.pid, third.pid]


def test_known_processes_only(rig: Rig) -> None:
    """A turn that ends: what has begun goes on, what is new is held; a process that was released has to knock anew."""
    rig.start_daemon()
    rig.start_gate()
    agent = rig.agent()
    agent.say(admissions(User(A, "all", limits(30))))
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


def test_room_is_counted_in_processes_and_freed_by_their_end(rig: Rig) -> None:
    rig.start_daemon()
    rig.start_gate()
    agent = rig.agent()
    agent.say(admissions(User(A, "all", limits(30)), User(B, "all", limits(30), max_clients=1), room=2))
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
    rig.start_daemon()
    rig.start_gate()
    agent = rig.agent()
    client = rig.waiting_client(A)
    knock = agent.wait(Knock)
    client.end()
    assert agent.wait(Left).connection == knock.connection
    assert select.select([agent.pidfds["knock", client.pid]], [], [], 60)[0]


def test_a_client_that_is_refused_gets_its_error_after_its_credentials(rig: Rig) -> None:
    rig.start_daemon()
    rig.start_gate()
    agent = rig.agent()
    client = rig.waiting_client(A)
    agent.say(Refuse(agent.wait(Knock).connection, "not on this machine"))
    assert wait_for(lambda: client.saw("refused"))[0]["why"] == ""


def test_the_agent_may_come_late_go_and_be_replaced(rig: Rig) -> None:
    """The gate goes on with what it was told last; the latest agent counts, and hears everything from the start."""
    rig.start_daemon()
    rig.start_gate()
    first = rig.agent()
    first.say(admissions(User(A, "all", limits(30))))
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


# --- the daemon ------------------------------------------------------------------------------------------------------


def test_without_a_daemon_everybody_waits_and_is_served_when_it_comes(rig: Rig) -> None:
    rig.start_gate()
    agent = rig.agent()
    agent.say(admissions(User(A, "all", limits(30))))
    client = rig.waiting_client(A)
    assert agent.wait(Failed).stage == "limits"
    rig.start_daemon()
    client.served()


def test_a_new_daemon_is_greeted_and_told_the_limits_anew(rig: Rig) -> None:
    first = rig.start_daemon("server=77")
    rig.start_gate()
    agent = rig.agent()
    agent.say(admissions(User(A, "all", limits(30, 5))))
    rig.client(A).served()
    rig.stop_daemon()
    client = rig.waiting_client(A)
    second = rig.start_daemon("server=78")
    assert client.served()["memory"] == {"0": 5120}
    wait_for(lambda: {first.process.pid, second.process.pid} == {one.daemon for one in agent.all(HandshakeSeen)})


def test_a_daemon_that_turns_a_client_away_is_asked_again(rig: Rig) -> None:
    rig.start_daemon("refuse=3")
    rig.start_gate()
    agent = rig.agent()
    agent.say(admissions(User(A, "all", limits(30))))
    rig.client(A).served()
    failed = agent.all(Failed)
    assert [(one.stage, one.lost) for one in failed] == [("answer", False)] * 3


def test_limits_that_are_not_confirmed_lead_to_the_fail_safe(rig: Rig) -> None:
    rig.start_daemon("forget=1")
    rig.start_gate()
    agent = rig.agent()
    agent.say(admissions(User(A, "all", limits(30, 8)), fail_safe=limits(10)))
    client = rig.client(A)
    assert client.served()["threads"] == "10.0"
    passed = agent.wait(Passed)
    assert (passed.limits, passed.fail_safe) == (limits(10), True)
    doubt = agent.wait(Unconfirmed)
    assert (doubt.uid, doubt.wanted) == (A, limits(30, 8))
    assert "memory limit of device 0" in doubt.why


def test_a_fail_safe_that_is_not_confirmed_holds_the_client(rig: Rig) -> None:
    """And is asked for ever more rarely, whoever waits: each time is a dozen lines of control.log."""
    rig.start_daemon("forget=1")
    rig.start_gate()
    agent = rig.agent()
    agent.say(admissions(User(A, "all", limits(30, 8)), User(B, "all", limits(30, 8)), fail_safe=limits(10, 4)))
    began = time.monotonic()
    client, other = rig.waiting_client(A), rig.waiting_client(B)
    agent.wait(Failed, 5, stage="limits")
    assert time.monotonic() - began >= 0.1 + 0.2 + 0.4 + 0.8
    assert not client.saw("served")
    assert not other.saw("served")
    agent.say(admissions(User(A, "all", limits(30))))
    client.served()


def test_limits_may_be_left_to_others(rig: Rig) -> None:
    daemon = rig.start_daemon()
    rig.start_gate()
    rig.agent().say(admissions(User(A, "all", limits(30)), set_limits=False))
    assert rig.client(A).served()["threads"] == "100.0"
    assert not daemon.saw("command")


def test_another_front_end_at_the_daemon_is_waited_out(rig: Rig) -> None:
    rig.start_daemon()
    rig.start_gate()
    agent = rig.agent()
    other = introduce(raw(rig.hidden / "control_privileged"), Kind.FRONT_END)
    agent.say(admissions(User(A, "all", limits(30))))
    client = rig.waiting_client(A)
    agent.wait(Handing)
    other.close()
    assert client.served()["threads"] == "30.0"
    assert not agent.all(Failed)


def test_an_unknown_greeting_is_passed_on_untouched(rig: Rig) -> None:
    """Whatever is said after it, with descriptors and the client's user and group."""
    greeting = b"OUTBHAIL\0"
    daemon = rig.start_daemon(f"greeting={greeting.hex()}")
    rig.start_gate()
    seen = rig.agent().wait(HandshakeSeen)
    assert (seen.known, seen.greeting) == (False, greeting.hex())
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(str(rig.public / "control"))
    assert sock.recv(64) == greeting
    assert descriptor(introduce(sock))["threads"] == "100.0"
    acknowledged = wait_for(lambda: daemon.saw("acknowledged"))
    assert acknowledged[0]["by"] == [rig.gate_pid(), 0, 0]
    sock.close()
    rig.stop_daemon()
    rig.start_daemon()
    # the next daemon greets as we know it: from its first connection on everything is as usual
    raw(rig.public / "control").close()
    agent = rig.agent()
    agent.say(admissions(User(A, "all", limits(30))))
    wait_for(lambda: agent.all(HandshakeSeen, known=True))
    assert rig.client(A).served()["threads"] == "30.0"


# --- clients that stop, leave, or are another's -------------------------------------------------------------------


def test_a_client_that_is_stopped_with_its_descriptor_is_waited_for(rig: Rig) -> None:
    """MPS answers nothing until it has met its server (measured on an H100): to go on would be of no use. An agent that
    comes in the middle hears of it, so that it can resume or kill it."""
    daemon = rig.start_daemon()
    rig.start_gate()
    agent = rig.agent()
    agent.say(admissions(User(A, "all", limits(30))))
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
    daemon = rig.start_daemon()
    rig.start_gate()
    agent = rig.agent()
    agent.say(admissions(others=everybody(), room=1))
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
    daemon = rig.start_daemon()
    rig.start_gate()
    agent = rig.agent()
    agent.say(admissions(others=everybody()))
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


def test_a_client_that_meets_a_server_in_fault_is_reported_and_the_others_wait(rig: Rig) -> None:
    """The agent needs a moment to hear of the fault; who is handed over in it is lost."""
    daemon = rig.start_daemon()
    rig.start_gate()
    agent = rig.agent()
    agent.say(admissions(others=everybody()))
    client = rig.client(A, "fault")
    passed = agent.wait(Passed, pid=client.pid)
    assert (passed.acknowledged, passed.status) == (True, 807)
    waiting = rig.waiting_client(B)
    agent.say(admissions(open=False))
    agent.wait(Knock, pid=waiting.pid)
    assert not daemon.saw("gave", uid=B)
    agent.say(admissions(others=everybody()))
    waiting.served()
    again = rig.agent()
    again.wait(Synced)
    assert [one.pid for one in again.all(Known)] == [client.pid, waiting.pid], "its word is no proof"


def test_a_hand_over_that_is_not_allowed_any_more_is_withdrawn(rig: Rig) -> None:
    daemon = rig.start_daemon()
    rig.start_gate()
    agent = rig.agent()
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
    daemon = rig.start_daemon(f"start={rig.directory}/started")
    rig.start_gate()
    agent = rig.agent()
    agent.say(admissions(others=everybody()))
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


def test_a_connection_that_changed_hands_is_refused(rig: Rig) -> None:
    """Who connected is who would be ended for it, so a child may not take its parent's place."""
    rig.start_daemon()
    rig.start_gate()
    agent = rig.agent()
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
    daemon = rig.start_daemon()
    rig.start_gate()
    agent = rig.agent()
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


# --- pass ------------------------------------------------------------------------------------------------------------


def test_pass_lets_everybody_in_with_the_fail_safe_limits(rig: Rig) -> None:
    rig.start_daemon()
    rig.start_gate()
    rig.agent().say(admissions(fail_safe=limits(15, 2)))
    wait_for((rig.state / "admissions.json").exists)
    assert rig.keeper is not None
    rig.keeper.terminate()
    rig.keeper.wait()
    rig.start_gate("pass")
    for uid in (A, B):
        served = rig.client(uid).served()
        assert (served["threads"], served["memory"]) == ("15.0", {"0": 2048})


def test_pass_is_strict_when_nothing_was_ever_said(rig: Rig) -> None:
    rig.start_daemon()
    rig.start_gate("pass")
    assert rig.client(A).served()["threads"] == "10.0"


def test_a_file_of_admissions_that_cannot_be_trusted_holds_everybody(rig: Rig) -> None:
    rig.start_daemon()
    rig.state.mkdir(mode=0o700)
    (rig.state / "admissions.json").write_text(json.dumps({"kind": "admissions", "open": True}))
    (rig.state / "admissions.json").chmod(0o666)
    rig.start_gate()
    client = rig.waiting_client(A)
    time.sleep(0.2)
    assert not client.saw("served")
    assert "nobody else may write" in rig.errors.read_text()


def test_the_keeper_takes_no_directory_of_another_user(rig: Rig) -> None:
    rig.public.mkdir()
    os.chown(rig.public, A, A)
    with pytest.raises(AssertionError, match=f"belongs to user {A}"):
        rig.start_gate()
    rig.may_end = True


def test_the_public_sockets_have_the_modes_of_the_daemons_own(rig: Rig) -> None:
    rig.start_gate()
    found = {one.name: stat.S_IMODE(one.stat().st_mode) for one in rig.public.iterdir()}
    assert found == {"control": 0o666, "control_privileged": 0o755}
    assert stat.S_IMODE(rig.public.stat().st_mode) == 0o755
