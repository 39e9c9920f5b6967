"""One hand-over, event by event."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from mpsagent.gate import handovers
from mpsagent.gate.handover import (
    Abandon,
    Acknowledge,
    Action,
    Announce,
    ClientFailed,
    ClientGone,
    ClientPassed,
    Connect,
    Give,
    HandOver,
    LimitsDoubted,
    Plan,
    RunSession,
    Stage,
    StartRescue,
    Withdrawn,
)
from mpsagent.gate.handshake import Mark
from mpsagent.gate.store import DaemonName
from mpsagent.mps.limits import Limits

WANTED, SAFE = Limits(60), Limits(10)
PLAN = Plan(WANTED, SAFE)
GOOD = ["60.0", "60.0"]
GOOD_SAFE = ["10.0", "10.0"]
GREETING, ANSWER = b"OUTBHELL\0", b"OUTBCUFD\0"
ASKED = RunSession(("get_server_list",))


def met(machine: HandOver, word: bytes = bytes(4)) -> list[Action]:
    """The client acknowledges, and its server answers."""
    assert machine.client_message(word) == [Acknowledge(word), ASKED]
    return machine.session([])


def until(stage: Stage, plan: Plan = PLAN) -> HandOver:
    """A hand-over that has come so far without trouble."""
    machine = HandOver(plan)
    machine.start()
    steps: list[Callable[[], object]] = [
        lambda: machine.session(GOOD),
        machine.connected,
        lambda: machine.daemon_message(GREETING, 0),
        lambda: machine.daemon_message(ANSWER, 1),
    ]
    while machine.stage is not stage:
        steps.pop(0)()
    return machine


def test_limits_then_daemon_then_client_then_acknowledgement() -> None:
    machine = HandOver(PLAN)
    (run,) = machine.start()
    assert isinstance(run, RunSession)
    assert "set_default_active_thread_percentage 60.0" in run.commands
    assert machine.session(GOOD) == [Connect()]
    assert machine.connected() == []
    assert machine.daemon_message(GREETING, 0) == [Announce()]
    assert machine.daemon_message(ANSWER, 1) == [Give(ANSWER)]
    assert machine.client_message(bytes(4)) == [Acknowledge(bytes(4)), ASKED]
    assert machine.session([]) == [ClientPassed(WANTED, False)]
    assert machine.stage is Stage.DONE


def test_without_limits_to_set_the_daemon_is_asked_at_once() -> None:
    assert HandOver(Plan(WANTED, SAFE, set_limits=False)).start() == [Connect()]


def test_a_server_that_was_not_expected_has_its_limits_set_in_a_second_session() -> None:
    machine = HandOver(PLAN)
    machine.start()
    (again,) = machine.session(["77", *GOOD])
    assert isinstance(again, RunSession)
    assert "set_active_thread_percentage 77 60.0" in again.commands
    assert machine.session(["77", *GOOD, *GOOD]) == [Connect()]
    assert machine.servers == (77,)


def test_unconfirmed_limits_lead_to_the_fail_safe() -> None:
    machine = HandOver(PLAN)
    machine.start()
    doubt, run = machine.session(["60.0", "50.0"])
    assert isinstance(doubt, LimitsDoubted)
    assert doubt.wanted == WANTED
    assert isinstance(run, RunSession)
    assert "set_default_active_thread_percentage 10.0" in run.commands
    machine.session(GOOD_SAFE)
    machine.connected()
    machine.daemon_message(GREETING, 0)
    machine.daemon_message(ANSWER, 1)
    assert met(machine) == [ClientPassed(SAFE, True)]


def test_a_fail_safe_that_is_not_confirmed_either_hands_nothing_over() -> None:
    machine = HandOver(PLAN)
    machine.start()
    machine.session(["60.0", "50.0"])
    (failed,) = machine.session(["10.0", "50.0"])
    assert isinstance(failed, ClientFailed)
    assert (failed.stage, failed.unconfirmed, failed.never) == (Stage.LIMITS, True, False)


def test_limits_that_this_driver_cannot_have_are_not_waited_for() -> None:
    """Driver 470 has no memory limits, and a newer one is not installed while a client waits."""
    machine = HandOver(Plan(Limits(60, {0: 2 << 30}), Limits(10, {0: 1 << 30})))
    machine.start()
    no = 'Unknown command "set_default_device_pinned_mem_limit"'
    machine.session(["60.0", no, "60.0", no.replace("set_", "get_"), "60.0"])
    (failed,) = machine.session(["10.0", no, "10.0", no.replace("set_", "get_"), "10.0"])
    assert isinstance(failed, ClientFailed)
    assert (failed.stage, failed.unconfirmed, failed.never) == (Stage.LIMITS, False, True)


def test_a_server_that_is_about_to_end_does_not_cost_a_client_its_limits() -> None:
    """Killed a moment ago it is still named, and answers nothing, or 0.0 (seen on an H100)."""
    machine = HandOver(PLAN)
    machine.start()
    machine.session(["77", *GOOD])
    (again,) = machine.session(["77", *GOOD, "0.0"])
    assert isinstance(again, RunSession)
    assert again.pause > 0
    (once_more,) = machine.session(GOOD)  # it has gone
    assert isinstance(once_more, RunSession)
    assert machine.session(GOOD) == [Connect()]
    assert (machine.fail_safe, machine.servers) == (False, ())


def test_a_server_that_never_says_the_right_thing_leads_to_the_fail_safe() -> None:
    machine = HandOver(PLAN)
    machine.start()
    actions = machine.session(["77", *GOOD])
    while not any(isinstance(action, LimitsDoubted) for action in actions):
        actions = machine.session(["77", *GOOD, "50.0", "50.0"])
    assert machine.fail_safe


def test_servers_that_change_at_every_look_are_not_followed_for_ever() -> None:
    machine = HandOver(PLAN)
    actions = machine.start()
    for server in range(70, 90):
        actions = machine.session([str(server), *(GOOD if not machine.fail_safe else GOOD_SAFE)])
        if isinstance(actions[-1], ClientFailed):
            break
    else:
        pytest.fail("it goes on and on")


def closed(machine: HandOver) -> list[Action]:
    return machine.daemon_closed()


def expired(machine: HandOver) -> list[Action]:
    return machine.expired()


@pytest.mark.parametrize(
    ("stage", "event", "lost", "daemon"),
    [
        (Stage.LIMITS, lambda machine: machine.session(None, "why"), False, True),
        (Stage.CONNECT, lambda machine: machine.unreachable("why"), False, True),
        (Stage.CONNECT, expired, False, True),
        (Stage.GREETING, closed, False, True),
        (Stage.GREETING, expired, False, True),
        (Stage.GREETING, lambda machine: machine.daemon_message(b"HELLO", 0), False, True),
        (Stage.ANSWER, closed, False, False),
        (Stage.ANSWER, lambda machine: machine.daemon_message(ANSWER, 0), False, False),
        (Stage.ANSWER, lambda machine: machine.daemon_message(b"OUTBNOPE\0", 1), False, False),
        (Stage.ANSWER, lambda machine: machine.unreachable("why"), False, True),
    ],
)
def test_what_goes_wrong_says_where(
    stage: Stage, event: Callable[[HandOver], list[Action]], lost: bool, daemon: bool
) -> None:
    machine = until(stage)
    (failed,) = event(machine)
    assert isinstance(failed, ClientFailed)
    assert (failed.stage, failed.lost, failed.daemon) == (stage, lost, daemon)
    assert machine.stage is Stage.DONE
    assert machine.expired() == machine.daemon_closed() == machine.client_message(b"") == []


def test_a_client_that_does_not_acknowledge_in_time_is_replaced() -> None:
    """MPS answers nobody until it has met its server: so long, and no longer, can anyone hold it up."""
    machine = until(Stage.ACKNOWLEDGEMENT)
    assert machine.expired() == [StartRescue(untouched=False)]
    _, failed = machine.rescued(None)
    assert isinstance(failed, ClientFailed)
    assert failed.lost
    assert "in time" in failed.why


def test_an_answer_that_does_not_come_in_time_is_awaited_by_others() -> None:
    """To hang up would leave a server that waits for ever (scenario X1)."""
    abandon, failed = until(Stage.ANSWER).expired()
    assert abandon == Abandon()
    assert isinstance(failed, ClientFailed)
    assert (failed.stage, failed.lost, failed.daemon) == (Stage.ANSWER, False, False)


def test_a_daemon_that_ends_before_the_acknowledgement_has_done_its_part() -> None:
    machine = until(Stage.ACKNOWLEDGEMENT)
    assert machine.daemon_closed() == []
    assert met(machine) == [ClientPassed(WANTED, False)]


def test_an_acknowledgement_counts_when_the_server_has_answered_a_question() -> None:
    """The one that was started for this client was not known before; one that was may have ended meanwhile."""
    machine = until(Stage.ACKNOWLEDGEMENT)
    assert machine.client_message(bytes(4)) == [Acknowledge(bytes(4)), ASKED]
    assert machine.session(["77"]) == [RunSession(("get_active_thread_percentage 77",))]
    assert machine.session(["Server 77 not found"]) == [ASKED]
    assert machine.session(["78"]) == [RunSession(("get_active_thread_percentage 78",))]
    assert machine.stage is Stage.MEETING
    assert machine.session(["60.0"]) == [ClientPassed(WANTED, False)]
    assert machine.servers == (78,)


def test_a_server_that_does_not_answer_after_an_acknowledgement_is_told_the_rest() -> None:
    machine = until(Stage.ACKNOWLEDGEMENT)
    machine.client_message(bytes(4))
    assert machine.client_closed() == machine.daemon_closed() == machine.client_message(bytes(4)) == []
    assert machine.expired() == [StartRescue(untouched=False, acknowledged=True)]
    assert machine.session(["77", "60.0"]) == [], "that is the server's answer to the rest"
    _, failed = machine.rescued(None)
    assert isinstance(failed, ClientFailed)
    assert (failed.stage, failed.lost) == (Stage.ACKNOWLEDGEMENT, True)
    assert "has not" in failed.why


def test_a_server_that_is_silent_for_another_reason_is_no_fault_of_its_last_client() -> None:
    machine = until(Stage.ACKNOWLEDGEMENT)
    machine.client_message(bytes(4))
    machine.expired()
    assert machine.rescued("its server has not answered") == [ClientPassed(WANTED, False)]
    machine = until(Stage.ACKNOWLEDGEMENT)
    machine.client_message(bytes(4))
    assert machine.session(None, "the daemon has ended") == [ClientPassed(WANTED, False)]


def test_a_client_that_dies_in_the_pending_list_is_replaced_when_its_answer_comes() -> None:
    """Closed early, the daemon would start a server for it that hangs (scenario X1)."""
    machine = until(Stage.ANSWER)
    assert machine.client_closed() == []
    assert machine.daemon_message(ANSWER, 1) == [StartRescue(untouched=True)]
    assert machine.rescued(None) == [Acknowledge(bytes(4)), ClientGone()]


def test_a_client_that_dies_with_its_descriptor_is_replaced() -> None:
    machine = until(Stage.ACKNOWLEDGEMENT)
    assert machine.client_closed() == [StartRescue(untouched=False)]
    assert machine.expired() == machine.daemon_closed() == machine.client_message(bytes(4)) == []
    acknowledge, failed = machine.rescued(None)
    assert acknowledge == Acknowledge(bytes(4))
    assert isinstance(failed, ClientFailed)
    assert (failed.stage, failed.lost, failed.daemon) == (Stage.ACKNOWLEDGEMENT, True, False)


def test_a_descriptor_that_cannot_be_delivered_is_used_up() -> None:
    machine = until(Stage.ACKNOWLEDGEMENT)
    assert machine.undeliverable() == [StartRescue(untouched=True)]
    assert machine.rescued(None) == [Acknowledge(bytes(4)), ClientGone()]


def test_a_rescue_that_may_have_failed_is_told() -> None:
    machine = until(Stage.ANSWER)
    machine.client_closed()
    machine.daemon_message(ANSWER, 1)
    _, failed = machine.rescued("its server has not answered")
    assert isinstance(failed, ClientFailed)
    assert failed.lost
    assert "has not answered" in failed.why


def test_what_an_earlier_gate_had_begun_goes_on() -> None:
    machine = HandOver(PLAN)
    assert machine.resume(fail_safe=False) == []
    assert machine.daemon_message(ANSWER, 1) == [Give(ANSWER)]
    machine = HandOver(Plan(SAFE, SAFE))
    assert machine.resume_given(fail_safe=True) == []
    assert met(machine) == [ClientPassed(SAFE, True)]


@pytest.mark.parametrize(
    ("stage", "event"),
    [
        (Stage.LIMITS, lambda machine: machine.session(GOOD)),
        (Stage.LIMITS, lambda machine: machine.session(None, "why")),
        (Stage.GREETING, lambda machine: machine.daemon_message(GREETING, 0)),
        (Stage.ANSWER, closed),
    ],
)
def test_a_client_that_leaves_early_is_not_handed_over(stage: Stage, event: Callable[[HandOver], list[Action]]) -> None:
    machine = until(stage)
    assert machine.client_closed() == []
    assert event(machine) == [ClientGone()]


def test_an_acknowledgement_is_the_clients_own_status() -> None:
    """807 in FAULT: the daemon gives a descriptor all the same (seen on an H100)."""
    machine = until(Stage.ACKNOWLEDGEMENT)
    word = bytes.fromhex("27030000")
    assert met(machine, word) == [ClientPassed(WANTED, False, 807)]


def test_a_client_is_not_handed_over_to_a_server_in_fault() -> None:
    machine = HandOver(Plan(WANTED, SAFE, servers=(77,)))
    machine.start()
    why = "its server is in FAULT and takes no clients"
    assert machine.session(["77", "FAULT"]) == [ClientFailed(Stage.LIMITS, why, fault=True)]


@pytest.mark.parametrize("stage", [Stage.LIMITS, Stage.CONNECT, Stage.GREETING])
def test_until_the_daemon_is_told_a_hand_over_can_be_withdrawn(stage: Stage) -> None:
    machine = until(stage)
    assert machine.withdraw() == [Withdrawn()]
    assert machine.stage is Stage.DONE


@pytest.mark.parametrize("stage", [Stage.ANSWER, Stage.ACKNOWLEDGEMENT])
def test_afterwards_it_goes_on(stage: Stage) -> None:
    machine = until(stage)
    assert machine.withdraw() == []
    assert machine.stage is stage


def test_of_hand_overs_that_an_earlier_gate_had_begun_who_has_a_descriptor_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MPS waits for those, and answers no one meanwhile."""
    marks = {1: Mark.HELD, 2: Mark.PASSED, 3: Mark.PASSING, 4: Mark.PASSED}
    held = {number: SimpleNamespace(number=number, mark=mark, attempt=0) for number, mark in marks.items()}
    announced = lambda loop, store, sock, name: SimpleNamespace(  # noqa: E731
        told=handovers.Told.ALL, name=name, make_sure=lambda: None
    )
    monkeypatch.setattr(handovers, "Announcement", announced)
    one: Any = SimpleNamespace(
        lane=SimpleNamespace(loop=SimpleNamespace(time=lambda: 0.0)), store=None, orphans=None, name="gpu",
        _holding=held, _queue=SimpleNamespace(take=lambda *_: None), _cut=deque(), _go_on=lambda: None,
    )  # fmt: skip
    daemons: Any = [(DaemonName(number, 1, 1001, 100, False), None) for number in marks]
    handovers.Instance.resume(one, daemons, {})
    assert [connection.number for connection, _ in one._cut] == [2, 4, 3, 1]


@pytest.mark.parametrize("ends", [True, False])
def test_a_client_that_is_being_killed_is_not_one_that_lives(ends: bool) -> None:
    """It hangs up a moment before its process has ended. A user whose clients live though they failed owes double."""
    alive, later, told = [True], list[tuple[float, Any]](), list[bool]()
    connection: Any = SimpleNamespace(number=1)
    one: Any = SimpleNamespace(
        _processes=SimpleNamespace(lives=lambda _: alive[0]), current=None, _queue=SimpleNamespace(free=lambda _: None),
        lane=SimpleNamespace(loop=SimpleNamespace(
            call_later=lambda seconds, what: later.append((seconds, what)), call_soon=lambda _: None,
        ), pump=None), _normal=False, _applied=lambda: None, _go_on=lambda: None,
        _failed=lambda handing, outcome, lives: told.append(lives),
    )  # fmt: skip
    one.over = partial(handovers.Instance.over, one)
    handing: Any = SimpleNamespace(
        connection=connection, machine=SimpleNamespace(plan=SimpleNamespace(set_limits=False, priority=False))
    )
    one.over(handing, ClientFailed(Stage.ACKNOWLEDGEMENT, "it has left", lost=True))
    assert told == []
    ((seconds, again),) = later
    assert seconds == handovers.DYING
    alive[0] = not ends
    again()
    assert told == [not ends]
