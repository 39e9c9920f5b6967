"""The public socket: who is slow, as on a busy machine, is not refused for that."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from mpsagent.gate.connection import Connection, restored
from mpsagent.gate.public import UNSURE, PublicSockets
from mpsagent.gate.store import ConnectionName, DescriptorStore
from mpsagent.linux import proc
from mpsagent.mps.rendezvous import CREDENTIALS, HELLO, Kind, kind_bytes


class Loop(asyncio.SelectorEventLoop):
    """Its clock goes forward at once."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead

    def later(self, seconds: float) -> None:
        """What is to be read is read, and what is due by then is done."""
        self.run_until_complete(asyncio.sleep(0.02))
        self.ahead += seconds
        self.run_until_complete(asyncio.sleep(0.02))


class NoStore:
    congested = False

    def keep(self, _name: str, _descriptor: int) -> bool:
        return False


@pytest.mark.parametrize("slow", ["greeting", "credentials"])
def test_a_client_that_needs_minutes_to_say_what_it_is_is_held(tmp_path: Path, slow: str) -> None:
    held: list[Connection] = []
    who = struct.pack("iII", os.getpid(), os.geteuid(), os.getegid())
    with closing(Loop()) as loop, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        public = PublicSockets(
            loop, cast("DescriptorStore", NoStore()), held.append, lambda _: pytest.fail("it is no front-end"),
            lambda _: False, lambda _, why: pytest.fail(why),
        )  # fmt: skip
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(tmp_path / "control"))
        listener.listen()
        public.listen(listener, privileged=False)
        client.setblocking(False)
        client.connect(str(tmp_path / "control"))
        loop.later(300 if slow == "greeting" else 0)
        assert client.recv(64) == HELLO
        client.sendmsg([CREDENTIALS], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, who)])
        loop.later(300 if slow == "credentials" else 0)
        client.send(kind_bytes(Kind.CLIENT))
        loop.later(0)
        listener.close()
    assert [one.peer.pid for one in held] == [os.getpid()]
    held[0].sock.close()


def test_a_connection_of_an_earlier_gate_is_greeted_if_it_was_not_and_leaves_the_store(tmp_path: Path) -> None:
    """The earlier gate died between its accept and its greeting. A client that is not greeted runs outside MPS."""

    class Kept(NoStore):
        dropped: list[ConnectionName] = []  # noqa: RUF012

        def drop(self, name: ConnectionName) -> None:
            self.dropped.append(name)

    with closing(Loop()) as loop, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        store = Kept()
        public = PublicSockets(
            loop, cast("DescriptorStore", store), lambda _: pytest.fail("it is not known yet"),
            lambda _: pytest.fail("it is no front-end"), lambda _: False, lambda _, why: pytest.fail(why),
        )  # fmt: skip
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(tmp_path / "control"))
            listener.listen()
            client.connect(str(tmp_path / "control"))
            taken = listener.accept()[0]
        connection = restored(taken, ConnectionName(1, proc.start_time(os.getpid())))
        assert connection is not None
        client.setblocking(False)
        public.restore(connection)
        loop.later(UNSURE)
        assert client.recv(64) == HELLO
        client.close()
        loop.later(0)
        assert store.dropped == [connection.name]
