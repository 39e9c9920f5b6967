"""A control daemon for each user: when it starts, when it ends, and that the section has none."""

from __future__ import annotations

import pytest

from mpsagent.agent.conditions import Conditions, note_conditions
from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core import quitting
from mpsagent.core import transitions as tr
from mpsagent.core.quitting import LOST
from mpsagent.core.sentences import sentence
from mpsagent.core.waiting import waiting
from mpsagent.snapshot.condition import problems
from tests.core.harness import ALICE, BOB, CAROL, POLICY, TOGETHER, Stage

APART = '[instance.gpu]\nsharing = "per-user"\ndaemon_idle_timeout = "60s"\n'
DENY = '[user.carol]\naccess = "deny"\n'


def of_alice(more: str = "") -> Stage:
    """Each user has a control daemon of her own; alice is to come."""
    stage = Stage(POLICY + APART + more, together=True)
    stage.start_agent()
    stage.run(5)
    return stage


def alive(stage: Stage, uid: int) -> bool:
    assert stage.core is not None
    return uid in stage.core.engines and stage.core.view(uid).control_alive


def quits(stage: Stage) -> list[float]:
    return stage.times(act.QuitControl)


def test_it_starts_when_its_user_comes_and_gives_exactly_the_limits() -> None:
    stage = of_alice()
    assert not stage.actions(act.StartControl)
    one, other = stage.client(ALICE), stage.client(ALICE)
    stage.run(2)
    assert len(stage.actions(act.StartControl)) == 1
    assert stage.working(one)
    assert stage.working(other)
    assert stage.given(one) == [stage.limits(ALICE)] * 2
    stage.run(10_000)
    assert not quits(stage)
    assert stage.turns() == []


def test_it_ends_when_its_user_has_had_no_client_for_so_long_and_starts_again() -> None:
    stage = of_alice()
    one = stage.client(ALICE)
    stage.run(2)
    stage.ends(one)
    ended = stage.now
    stage.run(200)
    (at,) = quits(stage)
    assert at == pytest.approx(ended + 60, abs=1)
    assert not alive(stage, ALICE)
    assert len(stage.actions(act.StartControl)) == 1
    again = stage.client(ALICE)
    stage.run(2)
    assert stage.working(again)


@pytest.mark.parametrize("early", [0.2, 0.05, 0.005, 0.002, 0.001, 0.0, -0.001, -0.002, -0.005, -0.05])
def test_who_comes_while_it_ends_is_held_and_served(early: float) -> None:
    """By the old one or by the next, but never refused or lost."""
    stage = of_alice()
    one = stage.client(ALICE)
    stage.run(2)
    stage.ends(one)
    stage.run(60 - early)
    late = stage.client(ALICE)
    stage.run(30)
    assert stage.working(late)
    assert stage.given(late) == [stage.limits(ALICE)] * 2


def test_who_is_denied_gets_no_daemon_and_is_refused() -> None:
    stage = of_alice(DENY)
    alice, carol = stage.client(ALICE), stage.client(CAROL)
    stage.run(2)
    assert stage.working(alice)
    assert stage.refused == [CAROL]
    assert not stage.working(carol)
    assert set(stage.daemons) == {None, ALICE}
    assert [one.daemon for one in stage.actions(act.StartControl)] == [ALICE]


def test_users_work_at_once_and_a_lane_that_has_ended_is_taken_away() -> None:
    stage = of_alice()
    alice, bob = stage.client(ALICE), stage.client(BOB)
    stage.run(2)
    assert stage.at_work() == {ALICE, BOB}
    stage.ends(alice)
    stage.run(70)
    assert set(stage.daemons) == {None, BOB}
    assert stage.working(bob)
    again = stage.client(ALICE)
    stage.run(2)
    assert stage.working(again)
    assert stage.given(again) == [stage.limits(ALICE)] * 2


def test_no_more_users_than_may_be_apart_have_one_at_a_time() -> None:
    stage = of_alice("max_users = 1\n")
    alice, bob = stage.client(ALICE), stage.client(BOB)
    stage.run(2)
    assert stage.working(alice)
    assert not stage.working(bob)
    assert stage.core is not None
    (why,) = (one.why for one in waiting(stage.core.view(None), stage.now))
    assert (why.word, "max_users = 1" in why.text) == ("daemon", True)
    stage.ends(alice)
    stage.run(1)
    assert stage.working(bob)
    stage.ends(bob)
    stage.run(5)
    assert alive(stage, BOB)
    again = stage.client(ALICE)
    stage.run(1)
    assert stage.working(again), "the place of a user who uses nothing was kept for that user"


def failing(stage: Stage) -> None:
    """The control daemon of alice does not start; she has waited until that was given up."""
    stage.start_fails = True
    stage.client(ALICE)
    stage.run(200)
    assert stage.refused == [ALICE]


def test_a_daemon_that_does_not_start_is_not_forgotten_with_who_was_refused_and_starts_when_it_can() -> None:
    stage = of_alice()
    failing(stage)
    stage.client(ALICE)
    stage.run(1)
    assert stage.refused == [ALICE] * 2, "who comes then waits two minutes anew"
    assert stage.core is not None
    assert stage.core.view(ALICE).given_up
    stage.start_fails = False
    stage.run(61)
    assert stage.core.view(ALICE).given_up is None
    alice = stage.client(ALICE)
    stage.run(1)
    assert stage.working(alice)
    stage.ends(alice)
    stage.run(70)
    assert set(stage.daemons) == {None}


def test_a_daemon_that_does_not_start_takes_no_place_from_another_user() -> None:
    stage = of_alice("max_users = 1\n")
    failing(stage)
    stage.start_fails = False
    bob = stage.client(BOB)
    stage.run(1)
    assert stage.working(bob)


def test_who_waits_is_told_why_there_is_no_control_daemon() -> None:
    stage = of_alice()
    stage.open_fails = "No space left on device"
    alice = stage.client(ALICE)
    stage.run(12)
    assert stage.core is not None
    (why,) = (one.why.text for one in waiting(stage.core.view(None), stage.now))
    assert why == "this user's own control daemon cannot be started: No space left on device"
    assert len(stage.actions(act.OpenDaemon)) == 3
    stage.open_fails = ""
    stage.run(6)
    assert stage.working(alice)


def test_a_hang_of_one_users_daemon_is_no_other_users() -> None:
    stage = of_alice()
    alice, bob = stage.client(ALICE), stage.client(BOB)
    stage.run(2)
    stage.daemons[ALICE].stopped = stage.daemons[ALICE].never_resumes = True
    stage.run(120)
    assert {one.daemon for one in stage.actions(act.KillControl)} == {ALICE}
    assert stage.working(bob)
    assert not stage.working(alice)
    late = stage.client(ALICE)
    stage.run(5)
    assert stage.working(late)


def test_an_agent_that_comes_anew_finds_users_where_they_were() -> None:
    stage = of_alice()
    alice, bob = stage.client(ALICE), stage.client(BOB)
    stage.run(2)
    stage.kill_agent()
    stage.run(1)
    stage.start_agent()
    stage.run(5)
    assert stage.at_work() == {ALICE, BOB}
    assert stage.core is not None
    assert {pid: one.daemon for pid, one in stage.core.state.clients.items()} == {alice.pid: ALICE, bob.pid: BOB}
    assert not stage.actions(act.KillControl, act.QuitControl)
    assert len(stage.actions(act.StartControl)) == 2


def test_who_outlives_daemon_and_agent_keeps_no_place_from_another_user() -> None:
    stage = of_alice("max_users = 1\n")
    alice, bob = stage.client(ALICE, stays=True), stage.client(BOB)
    stage.run(2)
    assert stage.working(alice)
    stage.kill_agent()
    stage.crash_control(ALICE)
    stage.run(1)
    stage.start_agent()
    stage.run(3)
    assert stage.working(bob)
    assert stage.procs.get(alice.pid) is alice


@pytest.mark.parametrize("way", ["turns", "one-server"])
def test_another_way_of_sharing_takes_hold_when_the_clients_have_ended(way: str) -> None:
    stage = of_alice()
    alice = stage.client(ALICE)
    stage.run(2)
    stage.reload(POLICY + f'[instance.gpu]\nsharing = "{way}"\n')
    stage.run(0.1)
    bob, again = stage.client(BOB), stage.client(ALICE)
    stage.run(20)
    assert stage.working(alice)
    assert stage.at_work() == {ALICE}
    assert not stage.daemons[None].control
    assert stage.core is not None
    reasons = [one.why for lane in stage.core.engines for one in waiting(stage.core.view(lane), stage.now)]
    assert {why.word for why in reasons} == {"daemon"}
    stage.ends(alice)
    stage.run(5)
    assert set(stage.daemons) == {None}
    assert stage.working(again) or stage.working(bob)
    assert stage.core.view().sharing == way
    moved = [one for one in stage.happened(tr.UserMoved) if one.uid == ALICE]  # type: ignore[attr-defined]
    assert [sentence({"kind": one.kind, **tr.transition_fields(one)}, {ALICE: "alice"}.get) for one in moved] == [
        "alice waits for a control daemon of the user's own, gpu-u1001",
        "alice waits at instance gpu: control daemon gpu-u1001 has ended",
    ]


def test_a_policy_that_comes_back_before_they_have_ended_lets_them_in() -> None:
    stage = of_alice()
    stage.client(ALICE)
    stage.run(2)
    stage.reload(POLICY + TOGETHER)
    stage.run(0.1)
    bob, again = stage.client(BOB), stage.client(ALICE)
    stage.run(5)
    assert stage.at_work() == {ALICE}
    stage.reload(POLICY + APART)
    stage.run(5)
    assert stage.working(again)
    assert stage.working(bob)


def test_the_old_way_holds_until_nothing_works_and_then_the_daemon_ends() -> None:
    stage = Stage(POLICY).up()
    alice = stage.client(ALICE)
    stage.run(2)
    assert stage.working(alice)
    stage.reload(POLICY + APART)
    stage.run(5)
    assert stage.working(alice)
    assert not quits(stage)
    bob, again = stage.client(BOB), stage.client(ALICE)
    stage.run(5)
    assert all(stage.working(one) for one in (alice, bob, again)), "bob waited for alice, without end"
    assert stage.core is not None
    said = quitting.old_way(stage.core.view())
    assert said is not None
    assert said.endswith("2 processes from before it still on the control daemon of all users; no user waits for them")
    stage.ends(alice)
    stage.ends(again)
    stage.run(20)
    assert len(quits(stage)) == 1
    assert stage.working(bob)  # on a daemon of his own
    assert stage.core is not None
    assert not stage.core.view().control_alive
    assert stage.core.view().sharing == "per-user"


@pytest.mark.parametrize(
    "before", ['sharing = "turns"\n', 'sharing = "turns"\nserver_scope = "all"\n', 'sharing = "one-server"\n']
)
def test_reports_alone_let_all_users_work_from_the_reload_on(before: str) -> None:
    """`mode = 'report'` in the middle of the day: bob waited for alice, whose turn had no end any more."""
    way = f"[instance.gpu]\n{before}"
    stage = Stage(POLICY + way, shared='"all"' in way, together="one-server" in way).up()
    alice = stage.client(ALICE)
    stage.run(2)
    waits = stage.client(BOB)
    stage.run(1)
    stage.reload(f"mode = 'report'\n{POLICY}{way}")
    stage.together = stage.overlaps = True
    stage.run(5)
    carol = stage.client(CAROL)
    stage.run(5)
    assert all(stage.working(one) for one in (alice, waits, carol))
    stage.run(7200)
    assert all(stage.working(one) for one in (alice, waits, carol))
    assert not stage.actions(act.TerminateClient, act.SignalClient)


def test_who_comes_while_it_ends_is_told_that_it_ends() -> None:
    """It said that he is admitted next, and nobody was."""
    stage = of_alice()
    one = stage.client(ALICE)
    stage.run(2)
    stage.ends(one)
    while not quits(stage):
        stage.run(0.0005)
    assert stage.core is not None
    stage.client(ALICE)
    stage.run(0.0012)
    view = stage.core.view(ALICE)
    assert view.state.control is not None
    assert view.state.control.quitting is None
    (why,) = (one.why for one in waiting(view, stage.now))
    assert why.text == "MPS is stopping and starts again; you keep your place"


@pytest.mark.parametrize(("places", "ended"), [(16, False), (1, True)], ids=["room", "no room"])
def test_an_idle_user_is_ended_only_when_another_user_needs_its_place(places: int, ended: bool) -> None:
    """Another user waits 0.2 s for a control daemon of its own, and nobody needs the place of the idle one."""
    idle = POLICY.replace("[limits]", '[limits]\nidle_timeout = "60s"')
    stage = Stage(f"{idle}{APART}max_users = {places}\n", together=True)
    stage.start_agent()
    stage.run(5)
    alice = stage.client(ALICE)
    stage.run(2)
    stage.cpu_idle = {alice.pid: stage.now}
    stage.run(120)
    bob = stage.client(BOB)
    stage.feed(inp.ProcessesSeen(stage.now, frozenset(), {alice.pid: 120.0}))
    stage.run(10)
    assert (alice.pid not in stage.procs) is ended
    assert stage.working(bob)


def test_a_quit_that_was_not_heard_of_again_is_sent_again() -> None:
    """Its front-end was lost. Everybody would be held for a control daemon that is not ending."""
    stage = Stage(f'{POLICY}[instance.gpu]\nsharing = "turns"\nserver_scope = "user"\n').up()
    carry_out, lost = stage._do, list[act.QuitControl]()

    def loses(action: act.Action) -> None:
        if isinstance(action, act.QuitControl) and not lost:
            lost.append(action)
        else:
            carry_out(action)

    stage._do = loses  # type: ignore[method-assign]
    stage.feed(inp.DrainOrdered(stage.now, stage.now, None))
    stage.run(LOST + 5)
    assert len(quits(stage)) == 2
    assert not stage.mps.control
    stage.feed(inp.DrainResumed(stage.now))
    alice = stage.client(ALICE)
    stage.run(5)
    assert stage.working(alice)


def test_servers_for_all_that_did_not_start_refuse_nobody_once_each_user_has_a_control_daemon() -> None:
    stage = Stage(f'{POLICY}[instance.gpu]\nsharing = "one-server"\nserver_scope = "all"\n', together=True).up()
    stage.mps.can_start = False
    bob = stage.client(BOB)
    stage.run(600)
    assert stage.core is not None
    assert stage.reports("server.given_up")
    assert bob.pid in stage.gate.turned_away
    stage.reload(POLICY + APART)
    stage.run(5)
    refused = len(stage.refused)
    alice = stage.client(ALICE)
    stage.run(5)
    assert stage.working(alice)
    assert len(stage.refused) == refused
    conditions = Conditions()
    note_conditions(conditions, stage.core, stage.now)
    assert problems(conditions.all()) == []


def test_a_control_daemon_for_all_that_failed_refuses_nobody_once_each_user_has_one() -> None:
    """The policy was changed because of it, and all users were refused all the same, until the agent's next start."""
    stage = Stage(f'{POLICY}[instance.gpu]\nsharing = "turns"\nserver_scope = "user"\n', together=True)
    stage.start_fails = True
    stage.start_agent()
    stage.run(300)
    assert stage.reports("control.failed")
    stage.start_fails = False
    stage.reload(POLICY + APART)
    alice = stage.client(ALICE)
    stage.run(5)
    assert stage.refused == []
    assert stage.working(alice)
