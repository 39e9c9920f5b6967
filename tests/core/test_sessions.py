"""Records as sessions: each process, turn, pause and fault once, with when it began and how it ended."""

from __future__ import annotations

from typing import Any

import pytest

from mpsagent.core.sessions import Session, Sessions, how


def told(*records: tuple[float, str, dict[str, Any]], sessions: Sessions | None = None) -> dict[int, Session]:
    """All that there are, by number."""
    found: dict[int, Session] = {}
    fold = Sessions() if sessions is None else sessions
    for number, (at, kind, fields) in enumerate(records, 1):
        for one in fold.take({"seq": number, "at": at, "kind": kind, **fields}):
            found[one.number] = one
    return found


def client(at: float, kind: str, pid: int = 5, uid: int = 1, **more: Any) -> tuple[float, str, dict[str, Any]]:
    return at, f"client.{kind}", {"pid": pid, "uid": uid, **more}


def row(one: Session) -> tuple[Any, ...]:
    return one.came, one.passed, one.ended, one.outcome


def test_a_process_is_one_session_from_its_coming_to_its_end() -> None:
    """With what it was given, and why it was ended."""
    limits = {"threads": 20.0, "memory": {"0": 1}}
    found = told(
        client(10.0, "waiting"),
        client(14.0, "connected", waited=4.0, limits=limits, lease=3, job="train"),
        (20.0, "action.done", {"action": "TerminateClient", "pid": 5, "rule": "turn.time_limit", "reason": "over"}),
        client(21.0, "ended", outcome="ended", seconds=7.0),
    )  # fmt: skip
    (one,) = found.values()
    assert row(one) == (10.0, 14.0, 21.0, "ended")
    assert (one.why, one.job) == ("over", "train")
    assert one.more == {"limits": limits, "lease": 3, "rule": "turn.time_limit"}


@pytest.mark.parametrize(("kind", "why"), [("action.done", "it is over"), ("action.failed", None)])
def test_why_a_client_was_ended_is_known_before_mps_answers(kind: str, why: str | None) -> None:
    asked = {"action": "TerminateClient", "pid": 5, "rule": "turn.time_limit", "reason": "it is over"}
    end = client(21.0, "ended", outcome="ended", seconds=7.0)
    first = told(client(10.0, "connected"), (20.0, "action", asked), end)
    later = told(client(10.0, "connected"), (20.0, "action", asked), (20.5, kind, asked), end)
    assert [one.why for one in first.values()] == ["it is over"]
    assert [one.why for one in later.values()] == [why]


def test_the_reason_stays_when_a_signal_comes_before_the_answer_of_mps() -> None:
    asked = {"action": "TerminateClient", "pid": 5, "rule": "turn.time_limit", "reason": "it is over"}
    signalled = (25.0, "action.done", {**asked, "action": "SignalClient"})
    records = client(10.0, "connected"), (20.0, "action", asked), signalled, (25.1, "action.failed", asked)
    (one,) = told(*records, client(26.0, "ended", outcome="ended", seconds=16.0)).values()
    assert (one.why, one.more) == ("it is over", {"rule": "turn.time_limit"})


def test_a_warning_is_no_end_of_a_client() -> None:
    warned = {"action": "WarnClient", "pid": 5, "rule": "turn.warning_signal", "reason": "its turn ends in 1m"}
    end = client(3600.0, "ended", outcome="ok", seconds=3590.0)
    (one,) = told(client(10.0, "connected"), (20.0, "action.done", warned), end).values()
    assert (one.outcome, one.why, one.more) == ("ok", None, {})


def test_a_server_that_crashes_after_a_drain_was_resumed_is_a_fault() -> None:
    """It was drawn as an end by the administrator, a day later."""
    ordered = (20.0, "drain.ordered", {"by": 0, "timeout": None})
    end = client(90_000.0, "ended", outcome="lost", seconds=89_990.0)
    (one,) = told(client(10.0, "connected"), ordered, (30.0, "drain.resumed", {"by": 0}), end).values()
    assert (one.outcome, one.why) == ("lost", None)
    (one,) = told(client(10.0, "connected"), ordered, end).values()
    assert one.why is not None


def test_who_was_not_let_in_is_a_session_too() -> None:
    """Also where its coming is not on record; another connection of a client ends nothing."""
    found = told(
        client(10.0, "waiting"), client(14.0, "left", waited=4.0), client(20.0, "left", waited=5.0),
        client(30.0, "refused", why="denied"), client(40.0, "connected"), client(41.0, "refused", why="full"),
    )  # fmt: skip
    assert [row(one) for one in found.values()] == [
        (10.0, None, 14.0, "left"), (15.0, None, 20.0, "left"), (30.0, None, 30.0, "refused"),
        (40.0, 40.0, None, None), (41.0, None, 41.0, "refused"),
    ]  # fmt: skip
    assert found[4].why == "denied"


def test_who_goes_away_in_its_hand_over_does_not_wait_for_ever() -> None:
    """One that lives has been let in, and goes on."""
    failed = {"stage": "acknowledgement", "why": "it went away"}
    found = told(
        client(10.0, "waiting"), client(11.0, "handover_failed", lost=False, **failed),
        client(12.0, "handover_failed", lost=True, **failed),
        client(20.0, "connected", pid=6), client(20.0, "handover_failed", pid=6, lost=True, **failed),
    )  # fmt: skip
    assert [row(one) for one in found.values()] == [(10.0, None, 12.0, "left"), (20.0, 20.0, None, None)]
    assert found[1].why == "it went away"


def test_a_number_that_is_used_again_is_another_session() -> None:
    found = told(client(10.0, "waiting"), client(12.0, "waiting"), client(13.0, "connected"), client(19.0, "connected"))
    assert [row(found[number]) for number in (1, 2, 4)] == [
        (10.0, None, 12.0, "left"), (12.0, 13.0, 19.0, "unknown"), (19.0, 19.0, None, None),
    ]  # fmt: skip


def test_who_loses_a_server_by_an_order_knows_why() -> None:
    found = told(
        client(10.0, "connected"), client(20.0, "ended", outcome="lost", seconds=10.0), client(30.0, "connected"),
        (40.0, "control.restart_ordered", {"by": 0, "timeout": None}),
        client(41.0, "ended", outcome="lost", seconds=11.0),
    )  # fmt: skip
    assert (found[1].why, found[3].outcome) == (None, "lost")
    assert "ordered a restart" in (found[3].why or "")


@pytest.mark.parametrize(("where", "ordered"), [("gpu", True), ("other", False)])
def test_an_order_for_a_section_is_why_a_user_apart_loses_a_server(where: str, ordered: bool) -> None:
    """It was on record as a fault: the order names the section, and the client the user's lane."""
    found = told(
        client(10.0, "connected", instance="gpu-u1"),
        (40.0, "drain.ordered", {"by": 0, "timeout": None, "instance": where}),
        client(41.0, "ended", outcome="lost", seconds=31.0, instance="gpu-u1"),
    )
    assert (found[1].why is not None) == ordered


def test_an_end_that_no_agent_has_seen_counts_until_the_last_record() -> None:
    """The machine was off for a week: nobody had the GPU then."""
    sessions = Sessions([Session(1, "client", None, 7, 5, 30.0, 30.0)])
    sessions.seen = 60.0
    (one,) = sessions.take({"seq": 9, "at": 90.0, "kind": "client.ended", "pid": 5, "uid": 7, "outcome": "unknown"})
    assert row(one) == (30.0, 30.0, 60.0, "unknown")
    assert not sessions.open


def test_turns_pauses_and_faults_are_sessions() -> None:
    """What began before the first record is known from its end."""
    found = told(
        (10.0, "turn.began", {"uid": 1}), (20.0, "turn.ended", {"uid": 1, "seconds": 10.0, "forced": True}),
        (20.0, "user.paused", {"uid": 1, "clients": 2}), (20.1, "turn.began", {"uid": 2, "gap": 0.1}),
        (30.0, "server.fault", {"server": 9, "uid": 2}),
        (31.0, "server.fault_over", {"server": 9, "seconds": 1.0, "recovered": False}),
        (40.0, "turn.began", {"uid": 1, "gap": 0.2}), (40.0, "user.resumed", {"uid": 1, "seconds": 20.0}),
        (50.0, "user.resumed", {"uid": 3, "seconds": 45.0}),
    )  # fmt: skip
    assert [(one.kind, one.uid, *row(one)[1:]) for one in found.values()] == [
        ("turn", 1, 10.0, 20.0, "forced"), ("pause", 1, 20.0, 40.0, "resumed"), ("turn", 2, 20.1, 40.0, "unknown"),
        ("fault", 2, 30.0, 31.0, "ended"), ("turn", 1, 40.0, None, None), ("pause", 3, 5.0, 50.0, "resumed"),
    ]  # fmt: skip
    assert (found[7].more, found[3].more) == ({"gap": 0.2, "before": 2}, {"clients": 2})


def test_a_turn_whose_beginning_is_not_on_record_is_no_change_of_user() -> None:
    """From whom to whom it was is not known; the last one that is stays."""
    sessions = Sessions()
    told((10.0, "turn.began", {"uid": 1, "gap": None}), (20.0, "turn.ended", {"uid": 1, "seconds": 10.0}),
         (30.0, "turn.ended", {"uid": 2, "seconds": 5.0}), sessions=sessions)  # fmt: skip
    assert sessions.changes[None].uid == 1


def test_who_waits_at_an_instance_that_is_not_idle_may_be_moved() -> None:
    sessions = Sessions()
    told(client(10.0, "waiting", instance="a"), (11.0, "user.moved", {"uid": 1, "before": "a", "instance": "b"}),
         client(10.0, "waiting", instance="b"), sessions=sessions)  # fmt: skip
    assert list(sessions.open) == [("client", "b", 5)]


def test_with_a_second_instance_what_goes_on_is_at_the_first_and_back() -> None:
    """Records name an instance only where there are several: a client's end must find its session."""
    sessions = Sessions()
    told(client(10.0, "connected"), sessions=sessions)
    sessions.place("left")
    assert list(sessions.open) == [("client", "left", 5)]
    sessions.place(None)
    assert [one.outcome for one in told(client(20.0, "ended", outcome="ok"), sessions=sessions).values()] == ["ok"]
    assert not sessions.open


def test_what_is_not_there_any_more_has_ended() -> None:
    """Of a flood of processes not every leaving is on record: what is open is bounded by what is there."""
    sessions = Sessions()
    told(client(10.0, "waiting"), client(11.0, "connected", pid=6), client(12.0, "connected", pid=7), sessions=sessions)
    gone = sessions.settle({("client", None, 7)}, 20.0)
    assert [(one.pid, one.outcome, one.ended) for one in gone] == [(5, "left", 20.0), (6, "unknown", 20.0)]
    assert list(sessions.open) == [("client", None, 7)]


@pytest.mark.parametrize("broken", [{}, {"uid": None}, {"uid": 1, "pid": "x"}, {"uid": 1, "pid": 5, "outcome": None}])
def test_a_record_that_lacks_something_is_no_mistake(broken: dict[str, Any]) -> None:
    """Of an agent of another version."""
    sessions = Sessions()
    told(*((1.0, kind, broken) for kind in ("client.ended", "client.left", "turn.ended", "server.fault_over")),
         sessions=sessions)  # fmt: skip
    assert not sessions.open


@pytest.mark.parametrize(
    ("rule", "word"),
    [
        ("turn.time_limit", "turn"),
        ("user.alice.turn.time_limit", "turn"),
        ("user.turn.turn.on_expiry", "turn"),
        ("user.turn.max_runtime", "max_runtime"),
        ("group.turn.idle_timeout", "idle_timeout"),
        ('user."a.turn.b".on_limit_exceeded', "on_limit_exceeded"),
        ("timeouts.fault_recovery", "fault"),
        ("user.timeouts.max_runtime", "max_runtime"),
    ],
)
def test_how_a_client_ended_is_by_the_key_and_not_by_the_name_of_its_user(rule: str, word: str) -> None:
    assert how("ended", rule) == word


def test_a_client_from_before_instances_were_named_is_one_session() -> None:
    """Users got control daemons of their own while it worked: it was counted twice."""
    found = told(
        client(1.0, "waiting"), client(2.0, "connected", waited=1.0),
        client(9.0, "ended", outcome="ok", seconds=7.0, instance="default"),
    )  # fmt: skip
    (one,) = found.values()
    assert (*row(one), one.instance) == (1.0, 2.0, 9.0, "ok", "default")
