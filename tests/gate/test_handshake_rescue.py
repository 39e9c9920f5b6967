"""The rest of a handshake that a client has begun, or has not."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from mpsagent.gate.announcement import Announcement, Told
from mpsagent.gate.handshake_rescue import PATIENCE, SETTLING, UNSURE, Rescue, Rescuer
from mpsagent.gate.orphans import Orphans
from mpsagent.gate.store import DaemonName, DescriptorStore
from mpsagent.linux.descriptors import with_descriptors
from mpsagent.linux.peers import Credentials

FD, READY = b"OUTBCUFD\0", b"\0"
ALL = [b"OUTBCRED\0", bytes(4), b"\xff\0\0\0"]


@pytest.mark.parametrize("untouched", [True, False])
def test_a_client_that_had_not_read_everything_had_said_nothing(untouched: bool) -> None:
    rescue = Rescue(untouched=untouched)
    assert [rescue.message(FD) for _ in range(4)] == [[]] * 4
    assert rescue.message(READY) == ALL
    assert (rescue.over, rescue.patience) == (False, PATIENCE)
    assert rescue.message(bytes(4)) == []
    assert (rescue.over, rescue.why) == (True, None)


def test_a_client_that_had_said_everything_is_answered_soon() -> None:
    rescue = Rescue(untouched=False)
    assert rescue.patience == UNSURE
    assert rescue.message(bytes(4)) == []
    assert (rescue.over, rescue.why) == (True, None)


def test_where_nothing_is_to_be_seen_everything_is_said() -> None:
    rescue = Rescue(untouched=False)
    assert rescue.silent() == ALL
    assert rescue.silent() == []
    assert rescue.over
    assert "wait for ever" in (rescue.why or "")


def test_one_that_never_had_it_is_not_hurried() -> None:
    assert Rescue(untouched=True).patience == PATIENCE


def test_a_server_that_goes_is_no_trouble() -> None:
    rescue = Rescue(untouched=True)
    rescue.closed()
    assert (rescue.over, rescue.why, rescue.silent(), rescue.message(READY)) == (True, None, [], [])


def test_an_error_of_the_server_is_its_answer_too() -> None:
    rescue = Rescue(untouched=True)
    rescue.message(READY)
    rescue.message(bytes.fromhex("27030000"))
    assert (rescue.over, rescue.why) == (True, None)


def test_only_an_answer_to_what_was_said_proves_that_a_client_has_not_met_its_server() -> None:
    """It works, if it has: nothing is hung up then."""
    for what in (lambda one: one.message(b"work"), lambda one: one.closed(), lambda one: (one.silent(), one.silent())):
        rescue = Rescue(untouched=False, acknowledged=True)
        what(rescue)
        assert rescue.over
        assert rescue.why is not None
    rescue = Rescue(untouched=False, acknowledged=True)
    assert rescue.silent() == ALL
    rescue.message(bytes(4))
    assert (rescue.over, rescue.why) == (True, None)


def test_the_connection_of_a_client_that_has_met_its_server_is_not_hung_up() -> None:
    """The server is silent for another reason, or busy with it: the copy is closed, and the client's works on."""

    async def play() -> str | None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[str | None] = loop.create_future()
        who = Credentials(os.getpid(), os.geteuid(), os.getegid())
        copy = os.dup(theirs.fileno())
        Rescuer(loop, copy, who, done.set_result, untouched=False, acknowledged=True)
        why = await asyncio.wait_for(done, 30)
        await asyncio.sleep(2 * SETTLING)
        assert [ours.recv(64) for _ in ALL] == ALL
        ours.send(b"to the client")
        assert theirs.recv(64) == b"to the client"
        ours.close()
        theirs.close()
        return why

    assert asyncio.run(play())


def test_a_client_that_has_acknowledged_to_an_earlier_gate_works_on_also_if_its_connection_is_not_kept() -> None:
    """The store was full. Twice, and the daemon had hung up with the second one unread."""

    async def play() -> None:
        server, client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours, daemon = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        daemon.sendmsg([FD], with_descriptors((client.fileno(),)))
        ours.send(bytes(4))
        ours.send(bytes(4))
        daemon.recv(64)
        daemon.close()
        loop = asyncio.get_running_loop()
        left = Announcement(
            loop, DescriptorStore(loop, ""), ours, DaemonName(1, 1, os.getuid(), os.getgid(), fail_safe=False)
        )
        left.told = Told.ACKNOWLEDGED
        Orphans(loop).add(left)
        server.setblocking(False)
        said = [await asyncio.wait_for(loop.sock_recv(server, 64), 30) for _ in ALL]
        assert said == ALL
        while left.open:
            await asyncio.sleep(SETTLING)
        await asyncio.sleep(2 * SETTLING)
        server.send(b"to the client")
        assert client.recv(64) == b"to the client"
        server.close()
        client.close()

    asyncio.run(play())


def test_a_server_that_has_answered_is_hung_up_on_later() -> None:
    """It ends, with everybody's work, when that comes before it has called the context ACTIVE (server-deaths.txt)."""

    async def scenario() -> tuple[bool, float]:
        loop = asyncio.get_running_loop()
        ours, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server.send(bytes(4))
        over: asyncio.Future[str | None] = loop.create_future()
        who = Credentials(os.getpid(), os.getuid(), os.getgid())
        Rescuer(loop, ours.detach(), who, over.set_result, untouched=False)
        assert await asyncio.wait_for(over, 60) is None
        answered = loop.time()
        server.setblocking(False)
        with pytest.raises(BlockingIOError):  # the connection stands, and nothing was said
            server.recv(16)
        ended = await asyncio.wait_for(loop.sock_recv(server, 16), 60)
        server.close()
        return ended == b"", loop.time() - answered

    ended, after = asyncio.run(scenario())
    assert ended
    assert after >= SETTLING * 0.9
