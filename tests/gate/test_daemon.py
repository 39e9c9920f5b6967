"""The gate and the control daemon behind it: none, a new one, limits that it does not confirm, an unknown greeting."""

from __future__ import annotations

import socket
import time

import pytest

from mpsagent.gate.handshake_rescue import SETTLING
from mpsagent.gate.queue import FIRST_PAUSE
from mpsagent.wire.link import Failed, Handing, HandshakeSeen, Passed, Refused, Release, User
from tests.gate.rig import A, B, Rig, admissions, descriptor, introduce, limits, raw
from tests.waiting import until

pytestmark = pytest.mark.root


def test_who_has_lost_the_server_while_it_started_is_refused_its_context(rig: Rig) -> None:
    """MPS would give it no memory limit (4 clients of an H100), also when the agent has long released it as one without
    a server: a new daemon may take seconds. Who lost a server later is served by the next one."""
    _, agent = rig.start(admissions(User(A, "all", limits(30, 5))), "lose=1")
    client = rig.client(A)
    client.served()
    time.sleep(2 * SETTLING)
    agent.say(Release(client.pid, agent.wait(Passed).start, 1))
    client.more()
    until(lambda: client.saw("refused"))
    refused = agent.wait(Refused)
    assert (refused.pid, "its server ended while it started" in refused.why) == (client.pid, True)
    later = rig.client(A)
    later.served()
    time.sleep(2 * SETTLING)
    rig.stop_daemon()
    rig.start_daemon()
    later.more()
    assert later.served(2)["memory"] == {"0": 5120}


def test_while_one_users_limits_are_not_confirmed_others_are_served(rig: Rig) -> None:
    """That user came first, and would be asked for first again after each rest of all."""
    _, agent = rig.start(
        admissions(User(A, "all", limits(30, 8)), User(B, "all", limits(20)), fail_safe=limits(10, 4)), "forget=1"
    )
    client = rig.waiting_client(A)
    agent.wait(Failed, 3, uid=A, stage="limits")
    for _ in range(3):
        assert rig.client(B).served()["threads"] == "20.0"
    assert not client.saw("served")
    agent.wait(Failed, 5, uid=A, stage="limits")


@pytest.mark.parametrize(("stage", "clients"), [("greeting", 6), ("answer", 1)])
def test_a_daemon_that_closes_is_asked_again_after_pauses_that_double(rig: Rig, stage: str, clients: int) -> None:
    """Before it greets, all rest; in the place of an answer, it may be for this client alone, which rests."""
    daemon, agent = rig.start(admissions(open=False, set_limits=False))
    waiting = [rig.waiting_client(A) for _ in range(clients)]
    agent.wait(HandshakeSeen)
    daemon.end()
    daemon = rig.start_daemon(f"close={stage}")
    agent.say(admissions(User(A, "all", limits(30)), set_limits=False))
    agent.wait(Handing, 6)
    began = [one.at for one in agent.all(Handing)]
    # Each pause may be up to a quarter shorter.
    assert began[5] - began[0] >= 3 / 4 * sum(FIRST_PAUSE * 2**tries for tries in range(5))
    daemon.end()
    rig.start_daemon()
    for client in waiting:
        client.served()


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
    acknowledged = until(lambda: daemon.saw("acknowledged"))
    assert acknowledged[0]["by"] == [rig.gate_pid(), 0, 0]
    sock.close()
    rig.stop_daemon()
    rig.start_daemon()
    # the next daemon greets as we know it: from its first connection on everything is as usual
    raw(rig.public / "control").close()
    agent = rig.agent()
    agent.say(admissions(User(A, "all", limits(30))))
    until(lambda: agent.all(HandshakeSeen, known=True))
    assert rig.client(A).served()["threads"] == "30.0"
