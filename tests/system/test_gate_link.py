"""The agent's end of the link to the gate, against a peer that speaks the same codec over a real socket."""

from __future__ import annotations

import array
import asyncio
import itertools
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mpsagent.linux.processes import Process
from mpsagent.system import gate_link
from mpsagent.system.gate_link import GateLink
from mpsagent.wire.codec import LONGEST_PACKET, LinkError, encode
from mpsagent.wire.link import (
    VERSION,
    Admissions,
    FromGate,
    Hello,
    Knock,
    Known,
    Left,
    Refuse,
    Release,
    Synced,
    decode_from_agent,
)
from tests.coroutines import until

pytestmark = pytest.mark.usefixtures("no_leak")


class Gate:
    """A gate's end: listens, and says what the test wants."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self.listener.bind(str(path))
        self.listener.listen()
        self.agent: socket.socket | None = None

    async def meet(self) -> None:
        """Waits for the agent."""
        found: list[socket.socket] = []

        def come() -> bool:
            try:
                found.append(self.listener.accept()[0])
            except BlockingIOError:
                return False
            return True

        await until(come)
        if self.agent is not None:
            self.agent.close()
        self.agent = found[0]

    def say(self, message: FromGate, *descriptors: int) -> None:
        self.raw(encode(message), *descriptors)

    def raw(self, data: bytes, *descriptors: int) -> None:
        assert self.agent is not None
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())]
        self.agent.sendmsg([data], rights if descriptors else [])

    def close(self) -> None:
        self.listener.close()
        self.path.unlink()
        if self.agent is not None:
            self.agent.close()


class Heard:
    """What the link has told the agent."""

    def __init__(self, path: Path) -> None:
        self.messages: list[FromGate] = []
        self.processes: list[Process | None] = []
        self.told: list[str] = []
        self.bursts: list[int] = []
        self.link = GateLink(
            str(path),
            self._receive,
            read=lambda: self.bursts.append(len(self.messages)),
            connected=lambda: self.told.append("connected"),
            lost=lambda why: self.told.append(f"lost: {why}"),
        )

    def _receive(self, message: FromGate, process: Process | None) -> None:
        self.messages.append(message)
        self.processes.append(process)


def knock(pid: int, number: int = 1) -> Knock:
    return Knock(number, pid, 2001, 2001, 4711, 1.5, command="train.py")


async def test_a_knock_brings_the_process_itself(tmp_path: Path) -> None:
    """What is signalled later is the process that knocked, by the pidfd taken at that moment, not a number."""
    gate, heard = Gate(tmp_path / "gate.sock"), Heard(tmp_path / "gate.sock")
    child = subprocess.Popen(["sleep", "600"], user=2001 if os.geteuid() == 0 else None)
    heard.link.start()
    await gate.meet()
    assert heard.link.problem
    pidfd = os.pidfd_open(child.pid)
    gate.say(Hello(7, 1.0))
    gate.say(knock(child.pid), pidfd)
    gate.say(Known(child.pid, 2001, 2001, 4711, 1.0), pidfd)
    gate.say(knock(child.pid, 2))
    gate.say(Synced())
    os.close(pidfd)
    await until(lambda: heard.link.synced)
    assert heard.told == ["connected"]
    first, again = heard.processes[1:3]
    assert first is not None
    assert again is not None
    assert (first.pid, first.uid, first.started) == (child.pid, 2001, 4711)
    assert heard.processes[3] is None, "it had gone already"
    assert first.send(9) is None
    child.wait()
    for process in (first, again):
        assert not process.alive
        process.close()
    heard.link.close()
    gate.close()


async def test_a_descriptor_that_is_not_that_process_never_becomes_a_target(tmp_path: Path) -> None:
    """A gate that is mistaken, or taken over, cannot make root's agent signal any process it likes."""
    gate, heard = Gate(tmp_path / "gate.sock"), Heard(tmp_path / "gate.sock")
    heard.link.start()
    await gate.meet()
    gate.say(Hello(7, 1.0))
    own, null = os.pidfd_open(os.getpid()), os.open("/dev/null", os.O_RDONLY)
    gate.say(knock(os.getppid(), 1), own)
    gate.say(knock(os.getppid(), 2), null)
    gate.say(Left(3), null, null, null)
    gate.say(Synced())
    os.close(own)
    os.close(null)
    await until(lambda: heard.link.synced)
    assert heard.processes == [None] * 5
    heard.link.close()
    gate.close()


async def test_what_the_agent_says_arrives_in_order_and_only_after_hello(tmp_path: Path) -> None:
    """Before, the gate is not known to be one."""
    gate, heard = Gate(tmp_path / "gate.sock"), Heard(tmp_path / "gate.sock")
    assert not heard.link.send(Refuse(1, "no"))
    heard.link.start()
    await gate.meet()
    assert not heard.link.send(Refuse(1, "no"))
    gate.say(Hello(7, 1.0))
    await until(lambda: heard.link.problem is None)
    said = [Admissions(1, open=True), Refuse(2, "by the policy"), Release(3, 4)]
    assert all(heard.link.send(message) for message in said)
    assert gate.agent is not None
    assert [decode_from_agent(gate.agent.recv(LONGEST_PACKET)) for _ in said] == said
    with pytest.raises(LinkError, match="longer"):
        heard.link.send(Admissions(1, devices=tuple(range(100_000))))
    assert heard.link.problem is None
    heard.link.close()
    gate.close()


async def test_a_gate_that_does_not_read_is_cut_off_and_everything_is_bounded(tmp_path: Path) -> None:
    """A stopped gate: of the snapshots only the newest waits, the rest up to a bound; then the link breaks."""
    gate, heard = Gate(tmp_path / "gate.sock"), Heard(tmp_path / "gate.sock")
    heard.link.start()
    await gate.meet()
    gate.say(Hello(7, 1.0))
    await until(lambda: heard.link.problem is None)
    snapshots = 5000
    assert all(heard.link.send(Admissions(number)) for number in range(snapshots))
    assert gate.agent is not None
    gate.agent.settimeout(60)
    last = -1
    while last != snapshots - 1:  # the newest one arrives at last
        message = decode_from_agent(gate.agent.recv(LONGEST_PACKET))
        assert isinstance(message, Admissions)
        last = message.number
        await asyncio.sleep(0)  # the link has a turn to write
    refused = 0
    while heard.link.send(Refuse(refused, "x" * 1000)):
        refused += 1
        assert refused < 10_000
    assert heard.link.problem
    assert any("unread" in told for told in heard.told)
    heard.link.close()
    gate.close()


async def test_it_comes_back_by_itself_and_hears_everything_anew(tmp_path: Path) -> None:
    """The gate is restarted, upgraded, killed: the agent says and hears the whole again."""
    path = tmp_path / "gate.sock"
    heard = Heard(path)
    heard.link.start()
    assert "cannot be reached" in (heard.link.problem or "")
    for _ in range(3):
        gate = Gate(path)
        await gate.meet()
        gate.say(Hello(7, 1.0))
        gate.say(Synced())
        await until(lambda: heard.link.synced)
        assert heard.link.problem is None
        gate.close()
        await until(lambda: heard.link.problem)
        assert "closed the link" in (heard.link.problem or "") or "reached" in (heard.link.problem or "")
    assert [told.split(":")[0] for told in heard.told] == ["connected", "lost"] * 3
    heard.link.close()


@pytest.mark.parametrize(
    ("packets", "words"),
    [
        ([b"{"], "not JSON"),
        ([b'{"kind":"knock"}'], "not complete"),
        ([encode(Left(1))], "hello"),
        ([encode(Hello(7, 1.0, version=99))], f"version 99 of the link, this agent {VERSION}: the agent is older"),
        (
            [encode(Hello(7, 1.0, version=1))],
            "the gate is older and has to be restarted (systemctl restart mpsagent-gate)",
        ),
        ([encode(Hello(7, 1.0)), b'{"kind":"left","connection":-1}'], "makes sense"),
        ([encode(Hello(7, 1.0)), b"\xff" * 1000], "not JSON"),
        ([encode(Hello(7, 1.0)), b" " * (LONGEST_PACKET + 100)], "a packet of more than"),
    ],
)
async def test_a_peer_that_is_no_gate_is_left(tmp_path: Path, packets: list[bytes], words: str) -> None:
    """Nothing of it is taken in; the link breaks, says why, and is tried again."""
    gate, heard = Gate(tmp_path / "gate.sock"), Heard(tmp_path / "gate.sock")
    heard.link.start()
    await gate.meet()
    for packet in packets:
        gate.raw(packet)
    while words not in (heard.link.problem or ""):  # each turn of the loop: it is said until the link is tried again
        await asyncio.sleep(0)
    assert [message for message in heard.messages if not isinstance(message, Hello)] == []
    await gate.meet()
    gate.say(Hello(7, 1.0))
    await until(lambda: heard.link.problem is None)
    heard.link.close()
    gate.close()


async def test_what_lies_there_together_is_decided_upon_once(tmp_path: Path) -> None:
    """A user who connected and left in a loop kept the next user waiting for 11 s: there was a decision on each."""
    gate, heard = Gate(tmp_path / "gate.sock"), Heard(tmp_path / "gate.sock")
    heard.link.start()
    await gate.meet()
    gate.say(Hello(7, 1.0))
    for number in range(50):
        gate.say(knock(1, number))
    gate.close()
    await until(lambda: any("lost" in one for one in heard.told))
    assert len(heard.messages) == 51
    assert heard.bursts[-1] == 51
    assert len(heard.bursts) < 10
    heard.link.close()


async def test_many_messages_do_not_keep_the_loop_from_its_other_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 knocks after a restart: the loop has a turn after every few of them."""
    monkeypatch.setattr(gate_link, "AT_A_TIME", 8)
    gate, heard = Gate(tmp_path / "gate.sock"), Heard(tmp_path / "gate.sock")
    heard.link.start()
    await gate.meet()
    gate.say(Hello(7, 1.0))
    for number in range(100):
        gate.say(knock(1, number))
    turns: list[int] = []

    def turn(*_: Any) -> bool:
        turns.append(len(heard.messages))
        return len(heard.messages) == 101

    while not turn():
        await asyncio.sleep(0)
    assert max(after - before for before, after in itertools.pairwise(turns)) <= 8
    heard.link.close()
    gate.close()
