"""What records of the agent before mean for the one that comes: drains and ladders, nothing of them twice."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from mpsagent.agent.resume import climbs_of, drain_of
from mpsagent.core.ladder import Rung
from mpsagent.core.model import Client, Server, State, Status
from mpsagent.policy.policy import Policy
from mpsagent.system.processes import start_time

NOW = 1000.0


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as one:
        yield one
        one.kill()


def state(pid: int, *, terminated: bool = False, since: float = 900.0) -> State:
    client = Client(pid=pid, uid=os.geteuid(), server=7, since=since, terminated=terminated)
    server = Server(pid=7, uid=os.geteuid(), status=Status.ACTIVE, started=800.0)
    return State(servers={7: server}, clients={pid: client})


def record(kind: str, at: float = 990.0, **fields: Any) -> dict[str, Any]:
    return {"seq": 1, "kind": kind, "at": at, **fields}


def climbs(records: list[dict[str, Any]], known: State) -> Any:
    return climbs_of(records, known, Policy(), NOW)


def test_the_last_word_about_a_drain_counts() -> None:
    ordered, resumed = record("drain.ordered", 10.0, timeout=60), record("drain.resumed", 20.0)
    assert drain_of([]) is None
    assert drain_of([ordered, resumed]) is None
    drain = drain_of([resumed, ordered])
    assert drain is not None
    assert (drain.since, drain.until) == (10.0, 70.0)
    assert drain_of([record("drain.ordered", 5.0, timeout=None)]).until is None  # type: ignore[union-attr]


def test_a_client_that_was_ordered_to_end_is_ended(process: subprocess.Popen[bytes]) -> None:
    """The order was given to an agent that died before it could carry it out."""
    (climb,) = climbs([record("client.end_ordered", pid=process.pid)], state(process.pid)).values()
    assert (climb.rung, climb.asked, climb.start) == (Rung.TERMINATE, False, start_time(process.pid))


def test_what_mps_was_asked_is_not_asked_again(process: subprocess.Popen[bytes]) -> None:
    """A second terminate_client hangs the daemon until the process exits (conformance scenario X8)."""
    records = [record("action", action="TerminateClient", pid=process.pid, server=7)]
    (climb,) = climbs(records, state(process.pid, terminated=True)).values()
    assert (climb.rung, climb.asked) == (Rung.SIGTERM, False)


def test_a_signal_that_was_sent_is_not_sent_again(process: subprocess.Popen[bytes]) -> None:
    """The grace runs on from when it was sent."""
    start = start_time(process.pid)
    sent = record("action", action="SignalClient", pid=process.pid, uid=os.geteuid(), start=start, signal=15)
    (climb,) = climbs([sent], State()).values()
    assert (climb.rung, climb.asked, climb.at) == (Rung.SIGTERM, True, 990.0)


def test_nobody_else_is_put_on_the_ladder(process: subprocess.Popen[bytes]) -> None:
    """Numbers are used again, users differ, orders are old, actions were only reported."""
    pid, uid, start = process.pid, os.geteuid(), start_time(process.pid)
    sent = {"action": "SignalClient", "pid": pid, "uid": uid, "start": start, "signal": 15}
    assert climbs([record("action", **{**sent, "start": (start or 0) + 1})], State()) == {}
    assert climbs([record("action", **{**sent, "uid": uid + 1})], State()) == {}
    assert climbs([record("action", **{**sent, "enforce": False})], State()) == {}
    assert climbs([record("client.end_ordered", at=800.0, pid=pid)], state(pid)) == {}, "before it was a client"
    assert climbs([record("client.end_ordered", pid=pid)], State()) == {}, "no client any more"
    assert (
        climbs([record("action", action="TerminateClient", pid="x"), record("server.ready", pid=pid)], state(pid)) == {}
    )
