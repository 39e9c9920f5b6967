"""Reading logs and deciding, without any process. Times are CPU times of this one: lines per second per core."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC

from benchmarks.figure import Figure
from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core.coordinator import Core
from mpsagent.mps import events as ev
from mpsagent.mps.limits import Device
from mpsagent.mps.loglines import LogParser, Source
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.wire import link
from tests import recordings
from tests.core.said import knocked, passed

H200 = Device(0, "GPU-513e171f-4520-0894-ba89-06b9f5c1d7b8", "NVIDIA H200", 143155 << 20, 132)
POLICY = '[limits]\nactive_threads = "50%"\nmemory_limit = "10G"\n[turn]\ntime_limit = "1h"\n'
NOW = 1_000_000.0
PIECE = 4096
"""Bytes of a log that come at once, about."""


def _cpu(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _read(source: Source, data: bytes, times: int) -> float:
    """As at the start: everything is taken in, nothing decided."""
    parser, core = LogParser(source, UTC), Core()

    def work() -> None:
        for _ in range(times):
            core.absorb(parser.feed(data))

    return _cpu(work)


def log_lines(quick: bool) -> list[Figure]:
    """The recordings' own lines over and over: parsed, and reduced to a state."""
    logs = [recordings.logs(name) for name in recordings.names()]
    both: dict[Source, bytes] = {
        "control": b"".join(one.control for one in logs),
        "server": b"".join(one.server for one in logs),
    }
    found, total, spent, split_total = [], 0, 0.0, 0.0
    for source, data in both.items():
        times = max(1, (4_000_000 if quick else 24_000_000) // len(data))
        lines = data.count(b"\n") * times
        seconds = _read(source, data, times)
        split = _cpu(lambda data=data, times=times: [data.split(b"\n") for _ in range(times)])  # type: ignore[misc]
        total, spent, split_total = total + data.count(b"\n"), spent + seconds / times, split_total + split / times
        found.append(
            Figure(f"{source}.log lines per second per core", f"{lines / seconds:,.0f}", "", None,
                   f"bytes.split of the same bytes: {seconds / split:.0f} times as long")
        )  # fmt: skip
    rate = total / spent
    against = f"bytes.split of the same bytes: {spent / split_total:.0f} times as long"
    what = "log lines per second per core, both logs as recorded"
    return [Figure(what, f"{rate:,.0f}", "300,000 or more", rate >= 300_000, against), *found]


def crowded() -> Core:
    """One server with 48 clients of one user; 200 clients of 40 other users are held."""
    policy, mistakes = load([("policy.toml", POLICY)])
    assert policy is not None, mistakes
    core = Core()
    users = {1000 + number: Identity(1000 + number, f"user{number}") for number in range(41)}
    step = core.receive_all(
        [inp.PolicyChanged(NOW, policy), inp.DevicesFound(NOW, (H200,)), inp.PeopleKnown(NOW, users),
         inp.ControlRuns(NOW, 49, NOW, "/s", False),
         *(inp.GateSaid(NOW, one) for one in (link.Hello(60, NOW), link.Synced(), link.HandshakeSeen(True, "")))], NOW,
    )  # fmt: skip
    now = NOW
    at_work = [inp.Peer(2000 + number, 1000, 1000, number) for number in range(48)]
    held = [inp.Peer(3000 + number, 1001 + number % 40, 1000, number) for number in range(200)]
    for number, peer in enumerate([*at_work, *held], 1):
        now += 0.001
        step = core.receive(knocked(now, number, peer, now), now)
        for action in step.actions:
            if isinstance(action, act.TellGate) and isinstance(action.message, link.Admissions):
                applied = link.Applied(action.message.number)
                core.receive_all([act.Done(now, action, True), inp.GateSaid(now, applied)], now)
        if number == 1:
            core.receive_all([ev.ServerStarting(now, 50, 1000), ev.ServerReady(now, 50)], now)
        if peer.uid == 1000:
            limits = policy.rules(users[1000]).limits((H200,))
            core.receive(passed(now, number, peer, limits, False, 0.002), now)
            core.receive(ev.ContextConnected(now, 50, peer.pid, 1), now)
    assert (len(core.state.clients), len(core.state.held)) == (48, 200), core.state
    return core


def decisions(quick: bool) -> list[Figure]:
    """All rules, over a whole state; and one input with its decision, a client's knock."""
    core, times = crowded(), 300 if quick else 2000

    def ticks() -> None:
        for number in range(times):
            core.tick(NOW + 1 + number * 0.001)

    def knocks() -> None:
        for number in range(times):
            now = NOW + 10 + number * 0.001
            peer = inp.Peer(5000, 1005, 1000, number)
            core.receive(knocked(now, 9999, peer, now), now)
            core.receive(inp.GateSaid(now, link.Left(9999)), now)

    walked = _cpu(lambda: [_walk(core) for _ in range(times)]) / times
    rule, knock = _cpu(ticks) / times, _cpu(knocks) / times / 2
    return [
        Figure("decisions per second, 48 clients and 200 held", f"{1 / rule:,.0f}", "", None,
               f"one walk over the same clients and connections: {rule / walked:.0f} times as long"),
        Figure("connections that come or go, taken in and decided upon, per second", f"{1 / knock:,.0f}", "", None,
               f"the same walk: {knock / walked:.0f} times as long"),
    ]  # fmt: skip


def _walk(core: Core) -> tuple[list[int], list[int]]:
    return [c.pid for c in core.state.clients.values()], list(core.state.held)
