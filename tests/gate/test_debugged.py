"""Peers that MPS cannot serve: debugged programs and unknown kinds. If they are closed, they run without MPS."""

from __future__ import annotations

import os
import socket

import pytest

from mpsagent.mps.rendezvous import CREDENTIALS, Kind
from mpsagent.wire.link import Applied, Handing, Knock, Left, Refused, Synced, User
from tests.gate.rig import A, Rig, admissions, introduce, limits, raw

pytestmark = pytest.mark.root
KINDS = {"debugged": bytes([3, 0, 0, 0]), "unknown": bytes([7, 0, 0, 0])}


def come(rig: Rig, kind: bytes) -> socket.socket:
    sock = raw(rig.public / "control")
    sock.sendmsg([CREDENTIALS])
    sock.send(kind)
    return sock


def open_(sock: socket.socket) -> bool:
    """Nothing has come, and it is not closed."""
    sock.setblocking(False)
    try:
        return sock.recv(64) != b""
    except BlockingIOError:
        return True


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_held_and_never_handed_over(rig: Rig, kind: str) -> None:
    """Also when the gate was killed, and beside clients of the same user, which are served."""
    everybody = admissions(others=User(0, "all", limits(30)), number=3)
    daemon, agent = rig.start(everybody)
    with come(rig, KINDS[kind]) as sock:
        assert agent.wait(Knock, pid=os.getpid()).never == kind
        rig.client(A).served()
        rig.kill_gate()
        agent = rig.agent()
        agent.wait(Synced)
        assert agent.wait(Knock, pid=os.getpid()).never == kind
        agent.say(everybody)
        agent.wait(Applied, number=3)
        with introduce(raw(rig.public / "control")):
            assert agent.wait(Handing, pid=os.getpid()).connection != agent.wait(Knock, never=kind).connection
        assert open_(sock)
        assert len(daemon.saw("gave", uid=0)) <= 1, "the client of the same process alone"
    agent.wait(Left)
    assert not agent.all(Refused)


def test_what_else_it_says_does_not_close_it_and_is_bounded(rig: Rig) -> None:
    """What a kind says that is not known is not known; a peer that never ends saying it is closed."""
    _, agent = rig.start(admissions(others=User(0, "all", limits(30))))
    with come(rig, KINDS["unknown"]) as sock:
        agent.wait(Knock)
        sock.send(b"what else it has to say")
        rig.client(A).served()
        assert open_(sock)
        for _ in range(100):
            try:
                sock.send(b"more")
            except OSError:
                break
        assert agent.wait(Refused).why == "sent one message after the other while it was held"


@pytest.mark.parametrize("says", [bytes([1, 0, 0, 0]), b"\3\0\0\0\0", b"OUTBSOME\0"])
def test_whatever_comes_after_the_credentials_closes_nothing(rig: Rig, says: bytes) -> None:
    _, agent = rig.start(admissions(others=User(0, "all", limits(30))))
    with come(rig, says) as sock:
        assert agent.wait(Knock).never == "unknown"
        assert open_(sock)
    assert Kind.UNKNOWN not in (Kind.CLIENT, Kind.FRONT_END)
