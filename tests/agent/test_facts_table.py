"""docs/develop/facts.md is walked: every field has its row, and after each death it is known from where the row says.

The gate with its keeper is real, and so are the engine, the state file and what takes in the gate's messages. MPS is
the gate's stand-in, and what MPS would answer is told to the engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from mpsagent.agent import saved
from mpsagent.agent.clients import ClientProcesses
from mpsagent.agent.clock import SteadyClock
from mpsagent.agent.gate_side import GateSide
from mpsagent.agent.people import People
from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core.coordinator import Core
from mpsagent.core.ladder import Climb
from mpsagent.core.model import Client
from mpsagent.core.view import Turn
from mpsagent.gate.places import KnownProcess
from mpsagent.linux.processes import Process
from mpsagent.mps import events as ev
from mpsagent.mps.limits import Device
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.policy.shares import Lease, Share
from mpsagent.policy.values import Percent
from mpsagent.system.names import Names
from mpsagent.system.store import Store
from mpsagent.wire import link
from tests.gate.rig import A, Agent, B, Rig, rigs

PAGE = Path(__file__).parents[2] / "docs/develop/facts.md"
CLASSES = {one.__name__: one for one in (Client, KnownProcess, Turn, Lease, Climb)}
DEATHS = ("agent dies", "gate dies", "both die", "both die, store lost", "all lost")
KNOWN = {"agent", "gate", "name", "file", "kernel", "MPS", "made"}
WORDS = KNOWN | {"anew", "unknown"}
GIB = 1 << 30
GPU = Device(0, "GPU-0", "NVIDIA H200", 140 * GIB, 132)
SERVER = 4_000_000
POLICY = """
[limits]
active_threads = '{threads}%'
memory_limit = "{memory}"
[user.nobody]
active_threads = '5%'
memory_limit = "1G"
[turn]
time_limit = "1s"
grace = "1h"
[instance.gpu]
sharing = "turns"
server_scope = "all"
"""


# --- the page ---------------------------------------------------------------------------------------------------------


def tables() -> dict[str, dict[str, dict[str, str]]]:
    """By class and field: where it is known from, by death."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    rows: dict[str, dict[str, str]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"mpsagent/\S+\.py::(\w+)", line):
            rows = found.setdefault(match[1], {})
        cells = [one.strip() for one in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 7 and cells[0] != "field":
            rows[cells[0]] = dict(zip(DEATHS, cells[1:6], strict=True))
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_has_its_row(name: str) -> None:
    rows = tables()[name]
    assert list(rows) == [one.name for one in fields(CLASSES[name])]
    cells = {cell for row in rows.values() for cell in row.values()}
    assert {word for cell in cells for word in cell.split(", ")} <= WORDS


# --- both sides -------------------------------------------------------------------------------------------------------


class Side:
    """The agent's side: what it takes in, decides and keeps. ``path``: its state file. MPS is what ``mps`` says."""

    def __init__(self, rig: Rig, path: Path, mps: Mps) -> None:
        self.rig, self.mps = rig, mps
        self.clock, self.core, self.store = SteadyClock(), Core(), Store(path)
        earlier = self.store.load()
        self.clock.carry_on(earlier.pop(saved.CLOCK, None))
        self.store.put(saved.CLOCK, self.clock.kept())
        self.done: list[act.Action] = []
        now = self.clock.now()
        self.core.absorb([
            inp.PolicyChanged(now, mps.policy), inp.DevicesFound(now, (GPU,)),
            inp.PeopleKnown(now, {uid: Identity(uid, f"user{uid}") for uid in (A, B)}),
            inp.ControlRuns(now, SERVER - 1, mps.started, "/s", True), *mps.lines,
            *saved.leases(earlier, now),
        ])  # fmt: skip
        self.clients = ClientProcesses(lambda pid, start, lives: self.gate.process_ended(pid, start, lives))
        people = People(Names(), lambda: None)
        self.gate = GateSide(self.core, self.clock, self.clients, people, self.store, None, self.take)
        self.gate.take_up(earlier)
        self.link: Agent | None = None
        self.heard = 0
        self.connect()

    def connect(self) -> None:
        self.link, self.heard = self.rig.agent(), 0

    def lost(self) -> None:
        self.gate.lost()
        self.connect()

    def keep(self) -> None:
        """All that it knows is on disk. Then it is killed."""
        self.store.put(saved.LEASES, saved.lease_rows(self.core))
        self.gate.keep()
        self.store.close()
        self.clients.close()

    def take(self, events: list[inp.Input]) -> None:
        now = self.clock.now()
        for action in self.core.receive_all(events, now).actions:
            self.done.append(action)
            self.perform(action, now)
        self.gate.keep()

    def perform(self, action: act.Action, now: float) -> None:
        assert self.link is not None
        if isinstance(action, act.TellGate):
            self.link.say(
                replace(action.message, instance="") if hasattr(action.message, "instance") else action.message
            )
        elif isinstance(action, act.Reconcile):
            self.take([*self.mps.answer(now), act.Done(now, action, True)])  # type: ignore[list-item]

    def hear(self) -> None:
        assert self.link is not None
        for message in self.link.read()[self.heard :]:
            self.heard += 1
            process = None
            if isinstance(message, link.Knock):
                process = Process.open(message.pid, started=message.start)
            self.gate.receive(message, process)
        self.gate.decide()
        step = self.core.tick(self.clock.now())
        for action in step.actions:
            self.done.append(action)
            self.perform(action, self.clock.now())

    async def until(self, so: Callable[[], object]) -> None:
        for _ in range(3000):
            self.hear()
            if so():
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"not within a minute; the clients are {list(self.core.state.clients)}")

    def client(self, pid: int) -> Client:
        return self.core.state.clients[pid]

    @property
    def turn(self) -> Turn:
        found = self.core.memories.turns.turn
        assert found is not None
        return found

    @property
    def climbs(self) -> dict[int, Climb]:
        return dict(self.core.engines[None].memories.ladder.climbs)

    def known(self) -> dict[int, link.Known]:
        """What this gate has said of processes, the last word about each."""
        assert self.link is not None
        return {one.pid: one for one in self.link.all(link.Known)}


class Mps:
    """One server for all users. ``contexts``: the pids that it lists, with their users."""

    def __init__(self, now: float) -> None:
        self.started = now
        self.policy = policy(60, "20G")
        self.contexts: dict[int, tuple[int, int]] = {}
        self.lines: list[inp.Input] = [ev.ServerStarting(now, SERVER, 0), ev.ServerReady(now, SERVER)]

    def works(self, side: Side, pid: int) -> None:
        """Its log says that this client has a context."""
        client, now = side.client(pid), side.clock.now()
        self.contexts[pid] = client.uid, client.peer.start
        lines = [ev.ContextConnected(now, SERVER, pid, context) for context in (0, 1)]
        self.lines += lines
        side.take([*lines])

    def answer(self, now: float) -> list[inp.Input]:
        seen = {pid: inp.Seen(now, uid, start, 0.0) for pid, (uid, start) in self.contexts.items()}
        return [
            inp.ServersListed(now, {SERVER: 0}, frozenset({SERVER})), inp.ServerStatusSeen(now, SERVER, "ACTIVE"),
            inp.ClientsListed(now, SERVER, frozenset(self.contexts), seen),
        ]  # fmt: skip


def policy(threads: int, memory: str) -> Any:
    found, errors = load([("policy.toml", POLICY.format(threads=threads, memory=memory))])
    assert found is not None, errors
    return found


@pytest.fixture
def rig() -> Iterator[Rig]:
    yield from rigs()


# --- the deaths -------------------------------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("death", DEATHS)
def test_every_fact_is_known_from_where_its_row_says(rig: Rig, death: str, tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(_walk(rig, death, tmp_path / "state.json"), 300))


async def _walk(rig: Rig, death: str, path: Path) -> None:
    rig.start_daemon()
    rig.start_gate()
    side = Side(rig, path, Mps(SteadyClock().now()))
    pids, waiting = await _work(rig, side)
    clients = {pid: side.client(pid) for pid in pids}
    turn, leases, climbs = side.turn, side.core.state.leases, side.climbs
    assert clients[pids[0]].most_memory == {0: 20 * GIB}
    assert (clients[pids[0]].limits or clients[pids[1]].limits).memory == {0: 10 * GIB}  # type: ignore[union-attr]
    assert (turn.uid, turn.warned is not None) == (A, True)
    assert (clients[pids[1]].job, list(climbs)) == ("slurm-7", [pids[1]])

    after = await _death(rig, side, death, path)
    await after.until(lambda: set(pids) <= after.core.state.clients.keys() and set(pids) <= after.known().keys())
    await after.until(lambda: after.core.memories.turns.turn is not None)

    rows = tables()
    for pid in pids:
        found = after.client(pid)
        _compare(rows["Client"], death, clients[pid], found, skip=() if death != "all lost" else ("outcome",))
        _compare_known(rows["KnownProcess"], death, clients[pid], after.known()[pid])
    _compare(rows["Turn"], death, turn, after.turn)
    for before, found_lease in zip(leases, after.core.state.leases or [None] * len(leases), strict=True):
        if found_lease is None:
            assert set(_cells(rows["Lease"], death)) == {"unknown"}
        else:
            _compare(rows["Lease"], death, before, found_lease)
    if pids[1] in after.climbs:
        moves = ("rung", "at", "asked") if death == "gate dies" else ()  # the agent that lives climbs on
        _compare(rows["Climb"], death, climbs[pids[1]], after.climbs[pids[1]], moves)
    else:
        assert rows["Climb"]["pid"][death] == "unknown"
    _nothing_is_ended_for_what_is_not_known(after, pids[0], 15 if death == "all lost" else 25)
    after.keep()
    waiting.end()


async def _work(rig: Rig, side: Side) -> tuple[tuple[int, int], Any]:
    """Two clients of A: one was given less for its second context, and one has a lease and is being ended. B waits."""
    first = rig.client(A)
    await side.until(lambda: first.pid in side.core.state.clients and first.saw("served"))
    side.mps.works(side, first.pid)
    side.mps.policy = policy(60, "10G")
    side.take([inp.PolicyChanged(side.clock.now(), side.mps.policy)])
    await side.until(lambda: side.core.view().settled)
    first.more()
    await side.until(lambda: side.client(first.pid).connections == 2)
    now = side.clock.now()
    share = Share("lease 1", threads=Percent(20.0), job="slurm-7")
    side.take([inp.LeaseOrdered(now, Lease(1, share, now, now + 9e5, 0, A, name="slurm-7"))])
    second = rig.client(A)
    await side.until(lambda: second.pid in side.core.state.clients and second.saw("served"))
    second.more()
    await side.until(lambda: side.client(second.pid).connections == 2)
    side.mps.works(side, second.pid)
    waiting = rig.client(B)
    await side.until(lambda: side.core.memories.turns.turn and side.turn.warned)
    side.take([inp.EndOrdered(side.clock.now(), second.pid, 0, True)])
    await side.until(lambda: any(isinstance(one, act.TerminateClient) for one in side.done))
    (asked,) = [one for one in side.done if isinstance(one, act.TerminateClient)]
    side.take([act.Done(side.clock.now(), asked, True)])  # type: ignore[list-item]
    assert side.client(second.pid).terminated
    return (first.pid, second.pid), waiting


async def _death(rig: Rig, side: Side, death: str, path: Path) -> Side:
    if death == "gate dies":
        rig.kill_gate()
        side.lost()
        return side
    side.keep()
    if death == "both die":
        rig.kill_gate()
    elif death != "agent dies":
        assert rig.keeper is not None
        gate = rig.gate_pid()
        for pid in (rig.keeper.pid, gate):
            os.kill(pid, 9)
        rig.keeper.wait()
        while Path(f"/proc/{gate}").exists():
            await asyncio.sleep(0.02)
        rig.start_gate()
        rig.waiting_client(B)  # the one that waited has lost its place
    if death == "all lost":
        path.unlink()
    return Side(rig, path, side.mps)


def _cells(rows: dict[str, dict[str, str]], death: str) -> list[str]:
    return [row[death] for row in rows.values()]


def _compare(rows: dict[str, dict[str, str]], death: str, before: Any, after: Any, skip: tuple[str, ...] = ()) -> None:
    for name, row in rows.items():
        words = set(row[death].split(", "))
        had, has = _plain(getattr(before, name)), _plain(getattr(after, name))
        if words == {"unknown"}:
            assert has in (None, False, "ok"), f"{name} is not known and is {has!r}"
        elif words <= KNOWN and name not in skip and words != {"made"}:
            assert has == had, f"{name}: {had!r} before, {has!r} after: {death}"


def _compare_known(rows: dict[str, dict[str, str]], death: str, before: Client, said: link.Known) -> None:
    """What the gate says of the process, held against what the agent knew of it."""
    most = None if said.most is None else dict(said.most.memory)
    limits = said.limits
    had = {"pid": before.pid, "uid": before.uid, "gid": before.uid, "start": before.peer.start, "limits": before.limits,
           "most": before.most_memory, "instance": "", "unseen": before.unseen, "since": before.since}  # fmt: skip
    has = {"pid": said.pid, "uid": said.uid, "gid": said.gid, "start": said.start, "limits": limits, "most": most,
           "instance": said.instance, "unseen": said.connections == 0}  # fmt: skip
    for name, value in has.items():
        words = set(rows[name][death].split(", "))
        if words == {"unknown"}:
            assert value is None, f"{name} is not known to the gate and is {value!r}"
        elif words <= KNOWN and not (name == "unseen" and death == "all lost"):
            assert value == had[name], f"{name}: {had[name]!r} before, {value!r} after: {death}"


def _plain(value: Any) -> Any:
    """For a comparison: a time may differ by the moment between two processes."""
    if isinstance(value, inp.Peer):
        return value.pid, value.uid, value.start
    if isinstance(value, float):
        return pytest.approx(value, abs=2.0)
    return json.loads(json.dumps(value, default=str)) if isinstance(value, dict) else value


def _nothing_is_ended_for_what_is_not_known(side: Side, pid: int, gigabytes: int) -> None:
    """With less memory in use than it was ever given no client is ended. Unless the most is known: then it is."""
    before, now = len(side.done), side.clock.now()
    for look in range(1, 15):
        used = inp.MemorySeen(now + 2.0 * look, {pid: {GPU.uuid: gigabytes * GIB}})
        side.done += side.core.receive_all([used], now + 2.0 * look).actions
    ends = [one for one in side.done[before:] if isinstance(one, act.TerminateClient | act.SignalClient)]
    ends = [one for one in ends if one.pid == pid]
    assert bool(ends) == (side.client(pid).most_memory is not None), ends
