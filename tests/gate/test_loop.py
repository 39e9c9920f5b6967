"""The gate as a process: real sockets, real users, a keeper that holds what it stores, and a stand-in for the daemon."""

from __future__ import annotations

import os
import select

import pytest

from mpsagent.gate.link import Failed, Handing, HandshakeSeen, Hello, Knock, Left, Passed, Release, Synced, User
from tests.gate.rig import A, B, Rig, admissions, limits, wait_for

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
    assert (gave["pid"], gave["uid"], gave["gid"]) == (client.pid, A, A)
    (acknowledged,) = wait_for(lambda: daemon.saw("acknowledged"))
    assert acknowledged["data"] == "00000000"
    assert acknowledged["by"] == [client.pid, A, A]
    assert agent.wait(HandshakeSeen).known
    assert agent.wait(Handing).connection == knock.connection
    assert not agent.all(Failed)
