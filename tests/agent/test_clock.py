"""The time of a log line: UTC for our own daemon, the machine's zone for other people's logs, the hour that comes twice
in autumn included."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from mpsagent.agent.clock import SteadyClock
from mpsagent.agent.host import Agent
from mpsagent.mps.loglines import LogParser
from tests.agent.inside import node_of, play

BERLIN = ZoneInfo("Europe/Berlin")
# The clocks went from 3:00 to 2:00 on 2026-10-25, at 01:00 UTC.
NIGHT = [datetime(2026, 10, 24, 23, 30, tzinfo=UTC).timestamp() + 120.0 * n for n in range(75)]


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def line(at: float, zone: ZoneInfo) -> bytes:
    stamp = datetime.fromtimestamp(at, zone).strftime("%Y-%m-%d %H:%M:%S.000")
    return f"[{stamp} Control    40] Accepting connection...\n".encode()


def times(data: bytes, zone: ZoneInfo | None) -> list[float]:
    return [event.at for event in LogParser("control", zone).feed(data)]


def test_an_hour_that_comes_twice_is_read_by_the_order_of_its_lines() -> None:
    """Otherwise a night's replay has turns of minus one hour."""
    assert times(b"".join(line(at, BERLIN) for at in NIGHT), BERLIN) == NIGHT


def test_the_machines_own_zone_too(berlin: None) -> None:
    """What other people's logs are written in, as far as can be known."""
    assert times(b"".join(line(at, BERLIN) for at in NIGHT), None) == NIGHT


def test_a_log_that_is_silent_for_most_of_it_goes_on_in_the_second_hour() -> None:
    """02:40 and then 02:20 can only be an hour apart."""
    found = [NIGHT[0], NIGHT[0] + 70 * 60, NIGHT[0] + 110 * 60]
    assert [datetime.fromtimestamp(at, BERLIN).strftime("%H:%M") for at in found] == ["01:30", "02:40", "02:20"]
    assert times(b"".join(line(at, BERLIN) for at in found), BERLIN) == found


def test_lines_a_little_out_of_order_stay_where_they_are() -> None:
    """The threads of a server write side by side: a millisecond back is no hour forward."""
    found = [NIGHT[20], NIGHT[20] - 0.5, NIGHT[20] + 0.2]
    stamps = [datetime.fromtimestamp(at, BERLIN).strftime("%Y-%m-%d %H:%M:%S.%f")[:23] for at in found]
    data = "".join(f"[{stamp} Control    40] Accepting connection...\n" for stamp in stamps).encode()
    assert times(data, BERLIN) == pytest.approx(found)


def test_our_own_daemon_writes_in_utc_and_knows_no_such_hour() -> None:
    """It is started with TZ=UTC, so the zone of the machine says nothing about its log."""
    utc = ZoneInfo("UTC")
    assert times(b"".join(line(at, utc) for at in NIGHT), utc) == NIGHT
    back = [NIGHT[20], NIGHT[20] - 1800.0]
    assert times(b"".join(line(at, utc) for at in back), utc) == back, "what goes back there has gone back"


def test_a_step_of_the_machines_clock_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns are counted in durations; what MPS stamps after a step is shifted to where it happened."""
    clock = SteadyClock()
    before, real = clock.now(), time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600.0)
    assert 0.0 <= clock.now() - before < 60.0
    assert clock.shift() == pytest.approx(-3600.0, abs=1.0)


def test_a_later_agent_goes_on_with_the_clock_unless_it_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that an agent has kept are moved where the wall clock was set between the two; without that one who had a
    turn waited for hours, and a drain, a lease and a grace ended at once or hours late."""
    first, real = SteadyClock(), time.time
    same = SteadyClock()
    assert same.carry_on(first.kept()) == 0.0
    assert same.kept() == first.kept(), "exactly: records are told apart by the millisecond"
    served = first.now()
    for step in (-3 * 3600.0, 3 * 3600.0):
        monkeypatch.setattr(time, "time", lambda step=step: real() + step)
        later = SteadyClock()
        by = later.carry_on(first.kept())
        assert by == pytest.approx(step, abs=1.0)
        assert 0.0 <= later.now() - (served + by) < 60.0
        assert later.carry_on(["another boot", 5.0]) == 0.0
        for broken in (None, 7, [], ["x"], {"a": 1}, [None, None, None], [first.kept()[0], "x"]):
            assert later.carry_on(broken) == 0.0


def test_until_of_a_lease_is_a_time_of_the_wall_clock(tmp_path: Path) -> None:
    """The wall clock was set back by an hour since the agent's start: in half an hour is no time of the past."""

    async def scenario(agent: Agent) -> None:
        agent.clock._offset += 3600.0
        until = datetime.fromtimestamp(time.time() + 1800.0, UTC).isoformat()
        given = await node_of(agent).acting.give_lease({"uid": 20001, "active_threads": "30%", "until": until}, 0)
        assert given["id"] == 1
        (lease,) = agent.state.leases
        assert lease.until - agent.clock.now() == pytest.approx(1800.0, abs=60.0)

    play(tmp_path, scenario)


def test_a_kept_clock_is_of_the_same_boot_or_not() -> None:
    kept = SteadyClock().kept()
    assert SteadyClock().same_boot(kept)
    for other in (["another boot", *kept[1:]], [], None, "text"):
        assert not SteadyClock().same_boot(other)
