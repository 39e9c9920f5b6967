"""`policy advise`: from who waited and who was at work to another policy, with figures; none where little is known."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from typing import Any

import pytest

from mpsagent_tools.advise import facts, judged, page
from tests.api.stand_in import serve
from tests.cli.program import run

HOUR = 3600.0
Json = dict[str, Any]


def work(uid: int, pid: int, begin: float, end: float, waited: float = 0.0, threads: float = 100.0,
         outcome: str = "ok") -> list[Json]:  # fmt: skip
    came, began = (datetime.fromtimestamp(1e9 + at, UTC).isoformat() for at in (begin - waited, begin))
    return [{"kind": "client", "uid": uid, "pid": pid, "came": came, "began": began, "waited": waited,
             "worked": end - begin, "outcome": outcome, "limits": {"threads": threads, "memory": {}}}]  # fmt: skip


def ordered(*parts: list[Json]) -> list[Json]:
    return sorted((one for part in parts for one in part), key=lambda one: one["came"])


def turns(count: int = 24) -> list[Json]:
    """Two users, an hour each by turns; who comes next has waited half an hour of the other's."""
    return ordered(*(work(n % 2, n, n * HOUR, (n + 1) * HOUR, HOUR / 2 if n else 0.0) for n in range(count)))


def test_turns_in_which_users_wait_for_each_other() -> None:
    found = judged(facts(turns()), "turns")
    assert found["enough"]
    of = found["facts"]
    assert (of["clients"], of["users"], of["busy_seconds"], of["hours"]) == (24, 2, 24 * 3600, 24.0)
    assert of["waited_behind_others_seconds"] == of["waited_seconds"] == 23 * 1800
    assert (of["users_at_once_most"], of["users_at_once_usual"], of["longest_wait_seconds"]) == (1, 2, 1800)
    (one,) = found["advice"]
    assert one["what"] == 'sharing = "one-server", active_threads = "50%" in [limits]'
    assert "11h30m" in one["why"]


def test_turns_in_which_nobody_waits_are_left_alone() -> None:
    """Also where users wait for something else than each other: MPS that starts, a drain."""
    apart = ordered(*(work(n % 2, n, n * 2 * HOUR, n * 2 * HOUR + HOUR, HOUR / 2) for n in range(24)))
    found = judged(facts(apart), "turns")
    assert (found["enough"], found["advice"]) == (True, [])
    assert (found["facts"]["waited_seconds"], found["facts"]["waited_behind_others_seconds"]) == (24 * 1800, 0)


def test_a_user_who_is_alone_with_a_small_share() -> None:
    found = judged(
        facts(ordered(*(work(1, n, n * HOUR, (n + 1) * HOUR, threads=25.0) for n in range(24)))), "one-server"
    )
    (one,) = found["advice"]
    assert one["what"] == 'active_threads = "100%" in [limits]'
    assert "100% of 24h00m" in one["why"]
    assert "25 %" in one["why"]


def test_users_at_once_with_all_of_the_gpu_have_nothing_to_gain() -> None:
    both = ordered(*(work(n % 2, n, n // 2 * HOUR, (n // 2 + 1) * HOUR, threads=50.0) for n in range(48)))
    found = judged(facts(both), "one-server")
    assert found["advice"] == []
    assert found["facts"]["turns_would_cost_seconds"] == 24 * 3600
    assert found["facts"]["threads_in_use_percent"] == 100.0


def test_faults_that_hit_everybody_speak_for_turns() -> None:
    faults = [{"kind": "fault", "came": datetime.fromtimestamp(1e9, UTC).isoformat()} for _ in range(6)]
    hit = (work(n % 2, n, n // 2 * HOUR, n // 2 * HOUR + 10.0, threads=50.0, outcome="faulted") for n in range(48))
    happened = ordered(*hit, faults)
    (one,) = judged(facts(happened), "one-server")["advice"]
    assert one["what"] == 'sharing = "turns"'
    assert "6 faults in 1 day ended 48 clients" in one["why"]
    assert not judged(facts(happened), "per-user")["advice"]  # they hit nobody else there


def test_memory_is_judged_by_the_most_that_was_facts() -> None:
    """Of each client that had a limit and was looked at."""
    given = {"limits": {"threads": 50.0, "memory": {"0": 20 << 30}}}
    used = [{**one, **given, "memory": 3 << 30} for one in turns()]
    (one,) = [row for row in judged(facts(used), "one-server")["advice"] if "memory_limit in" in row["what"]]
    assert "3G of 20G (15%)" in one["why"]
    used[5]["memory"] = 15 << 30
    assert not [row for row in judged(facts(used), "one-server")["advice"] if "memory_limit in" in row["what"]]
    assert not [row for row in judged(facts(turns()), "one-server")["advice"] if "memory_limit in" in row["what"]]


@pytest.mark.parametrize("sessions", [[], turns(4), [*turns(24)][:10], work(1, 1, 0.0, 100 * HOUR)])
def test_too_little_is_said_as_that(sessions: list[Json]) -> None:
    found = judged(facts(sessions), "turns")
    assert (found["enough"], found["advice"]) == (False, [])
    assert any("Too little" in line for line in page({"instance": None, **found}))


def test_against_counting_second_by_second() -> None:
    """Any history: nobody is at work or waits longer than by looking at each second."""
    source = random.Random(7)
    for _ in range(30):
        parts, work_spans, wait_spans = [], [], []
        for pid in range(12):
            uid, begin, long, waited = (source.randrange(bound) for bound in (3, 60, 40, 20))
            parts.append(work(uid, pid, float(begin + 20), float(begin + 20 + long), float(waited)))
            work_spans.append((uid, begin + 20, begin + 20 + long))
            wait_spans.append((uid, begin + 20 - waited, begin + 20))
        busy = behind = overlap = 0
        for second in range(150):
            at_work = {uid for uid, begin, end in work_spans if begin <= second < end}
            waiting = {uid for uid, begin, end in wait_spans if begin <= second < end}
            busy += bool(at_work)
            overlap += max(0, len(at_work) - 1)
            behind += sum(bool(at_work - {uid}) for uid in waiting)
        found = facts(ordered(*parts))
        seconds = [found[f"{name}_seconds"] for name in ("busy", "waited_behind_others", "turns_would_cost")]
        assert seconds == [busy, behind, overlap]


def test_on_the_command_line() -> None:
    """An agent with a short history says that it is short."""
    with serve() as served:
        done = run(served, "policy", "advise")
        assert done.returncode == 0, done.stderr
        assert "Too little" in done.stdout
        body = json.loads(run(served, "policy", "advise", "--json").stdout)
        assert [one["enough"] for one in body["instances"]] == [False]
