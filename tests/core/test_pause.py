"""Users who are paused at the end of a turn, and go on where they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core import pause_room
from mpsagent.core import transitions as tr
from tests.core.harness import ALICE, BOB, CAROL, DAVE, GIB, USERS, Stage
from tests.core.toy import Proc

PAUSE = """
[limits]
active_threads = '50%'
memory_limit = "10G"
[turn]
on_expiry = "pause"
pause_slice = "20s"
time_limit = "1m"
grace = "5s"
"""
TERMINATE = PAUSE.replace('"pause"', '"terminate"')


def started(text: str = PAUSE) -> Stage:
    return Stage(text, pausing=True).up()


def frozen(stage: Stage) -> set[int]:
    return {proc.uid for proc in stage.procs.values() if proc.frozen}


def sampled(stage: Stage, seconds: float, step: float = 0.1) -> Iterator[set[int]]:
    """Who works, every so often."""
    for _ in range(round(seconds / step)):
        stage.run(step)
        yield stage.at_work()


# --- slices -----------------------------------------------------------------------------------------------------------


def test_two_users_have_half_each_and_nobody_is_ended() -> None:
    """10 minutes in slices of 20 s; the hand-over itself takes milliseconds."""
    stage = started()
    mine = [stage.client(ALICE), stage.client(ALICE), stage.client(BOB)]
    share = dict.fromkeys(USERS, 0)
    nobody = 0
    for working in sampled(stage, 600, 0.25):
        assert len(working) <= 1
        nobody += not working
        for uid in working:
            share[uid] += 1
    assert all(stage.procs.get(proc.pid) is proc for proc in mine)
    assert not stage.actions(act.TerminateClient, act.SignalClient, act.QuitControl)
    for uid in (ALICE, BOB):
        assert share[uid] == pytest.approx(1200, rel=0.05)
    assert nobody < 12
    turns = [one for one in stage.told if isinstance(one, tr.TurnEnded)]
    assert [one.uid for one in turns[:4]] == [ALICE, BOB, ALICE, BOB]
    assert all(one.seconds == pytest.approx(20, abs=0.5) for one in turns)


# --- where a pause is not possible ------------------------------------------------------------------------------------


def test_memory_that_does_not_fit_both_is_seen_and_the_turn_ends_otherwise() -> None:
    """100 of 140 GiB in use, and bob may use 60: alice is warned, and ended after `after` and `grace`."""
    stage = started(PAUSE + '[user.bob]\nmemory_limit = "60G"\n')
    alice = stage.client(ALICE)
    stage.run(25)
    stage.feed(inp.MemorySeen(stage.now, {alice.pid: {"GPU-0": 100 * GIB}}))
    bob = stage.client(BOB)
    stage.run(30)
    assert not stage.actions(act.Freeze)
    assert stage.core is not None
    assert "100G of 140G" in (pause_room.misfit(stage.core.view(), BOB) or "")
    stage.run(40)
    assert stage.working(bob)
    assert {a.pid for a in stage.actions(act.TerminateClient) if isinstance(a, act.TerminateClient)} == {alice.pid}
    assert stage.served[bob.pid] - stage.came[bob.pid] < 66 + 5


def test_what_nvml_does_not_say_is_counted_by_the_limits() -> None:
    stage = started(PAUSE.replace('"10G"', '"80G"'))
    stage.client(ALICE)
    stage.run(25)
    stage.client(BOB)
    stage.run(5)
    assert not stage.actions(act.Freeze)
    stage = started(PAUSE.replace('memory_limit = "10G"', ""))
    stage.client(ALICE)
    stage.run(25)
    bob = stage.client(BOB)
    assert stage.core is not None
    stage.run(0.01)
    assert pause_room.unlimited(stage.core.view(), BOB)
    stage.run(5)
    assert stage.working(bob), "nothing is known against it"


def test_a_user_who_finds_no_room_beside_paused_ones_waits_for_their_turns_to_end() -> None:
    """alice and carol take turns; bob, who needs all, gets the GPU after `after` and `grace` of each."""
    stage = started(PAUSE + '[user.bob]\nmemory_limit = "135G"\n')
    stage.client(ALICE)
    stage.client(CAROL)
    stage.run(30)
    assert len(frozen(stage)) == 1
    bob = stage.client(BOB)
    stage.run(2 * 65 + 20 + 20)
    assert stage.working(bob)
    assert not stage.procs.keys() - {bob.pid}


# --- nobody is left frozen --------------------------------------------------------------------------------------------


def paused(text: str = PAUSE) -> tuple[Stage, Proc, Proc]:
    """alice stands, and bob works."""
    stage = started(text)
    alice = stage.client(ALICE)
    stage.run(25)
    bob = stage.client(BOB)
    stage.run(2)
    assert frozen(stage) == {ALICE}
    assert stage.at_work() == {BOB}
    return stage, alice, bob


def test_an_order_to_end_thaws_the_client_first() -> None:
    """A stopped one cannot answer, and its unanswered end is a fault for its neighbours (X13)."""
    stage, alice, bob = paused()
    stage.feed(inp.EndOrdered(stage.now, alice.pid, 0, True))
    stage.run(3)
    assert alice.pid not in stage.procs
    assert stage.working(bob)
    assert not stage.mps.hurt
    kinds = [type(one) for one in stage.actions(act.Thaw, act.TerminateClient, act.SignalClient)]
    assert kinds[:2] in ([act.TerminateClient, act.Thaw], [act.Thaw, act.TerminateClient])


def test_a_drain_thaws_everybody_and_they_take_turns_again_after_it() -> None:
    stage, _, _ = paused()
    stage.feed(inp.DrainOrdered(stage.now, stage.now, None))
    stage.run(0.5)
    assert frozen(stage) == set()
    stage.run(60)
    assert stage.at_work() == {ALICE, BOB}
    stage.feed(inp.DrainResumed(stage.now))
    stage.run(0.5)
    assert len(stage.at_work()) == 1
    assert len(frozen(stage)) == 1


@pytest.mark.parametrize("text", [PAUSE + "[user.alice]\nturn.never_preempt = true\n", "mode = 'report'\n" + PAUSE])
def test_another_policy_thaws_whom_it_does_not_pause(text: str) -> None:
    stage, _, _ = paused()
    stage.reload(text)
    stage.run(0.5)
    assert ALICE not in frozen(stage)


@pytest.mark.parametrize("action", ["terminate", "none"])
def test_who_is_paused_when_the_policy_ends_turns_otherwise_goes_on_with_the_next_turn(action: str) -> None:
    """They went on at once, and three users worked together until each one's turn was over."""
    stage = started()
    procs = [stage.client(uid) for uid in (ALICE, BOB, CAROL)]
    stage.run(50)
    stage.reload(PAUSE.replace('"pause"', f'"{action}"'))
    for working in sampled(stage, 300):
        assert len(working) <= 1, "two users at work"
        if action == "none" and len(working) == 1 and stage.now > 1100:
            stage.ends(next(proc for proc in procs if proc.uid in working and proc.pid in stage.procs))
    assert stage.turns() == [ALICE, BOB, CAROL, ALICE, BOB]


def test_a_change_to_all_together_thaws_everybody() -> None:
    stage, alice, bob = paused()
    stage.together = True
    stage.reload(PAUSE + '[instance.gpu]\nsharing = "one-server"\n')
    stage.run(0.5)
    assert frozen(stage) == set()
    assert stage.working(alice)
    assert stage.working(bob)
    stage.together = False
    stage.reload(PAUSE + '[instance.gpu]\nserver_scope = "all"\n')
    stage.run(0.5)
    assert len(frozen(stage)) == 1, "one of them has the first turn"


def test_a_daemon_that_dies_leaves_nobody_frozen() -> None:
    stage, alice, _ = paused()
    stage.crash_control()
    stage.run(0.5)
    assert not alice.frozen


def test_the_gate_away_and_nobody_at_work_leaves_nobody_frozen() -> None:
    stage, alice, bob = paused()
    stage.cut_link()
    stage.run(5)
    assert alice.frozen, "bob works on"
    stage.ends(bob)
    stage.run(0.5)
    assert not alice.frozen
    stage.connect()
    stage.run(1)
    assert stage.at_work() == {ALICE}


def test_a_name_that_is_forgotten_thaws() -> None:
    """While it is not known which rules are a user's, none of them is paused."""
    stage, alice, _ = paused(PAUSE + "[user.carol]\nactive_threads = '10%'\n")
    stage.know(BOB, CAROL)
    stage.run(0.5)
    assert not alice.frozen


def test_one_that_its_owner_resumes_is_frozen_again_a_few_times_and_then_ended() -> None:
    stage, alice, bob = paused(PAUSE + '[user.bob]\nturn.pause_slice = "10m"\n')
    for _ in range(4):
        stage.owner_resumes(alice)
        stage.run(4)
        assert alice.frozen
    stage.owner_resumes(alice)
    stage.run(10)
    assert alice.pid not in stage.procs
    assert stage.working(bob)
    assert len([one for one in stage.told if isinstance(one, tr.ClientResumed)]) == 5
    assert len(stage.reports("client.not_frozen")) == 1
    assert not stage.mps.hurt


def test_one_that_its_owner_had_stopped_stays_stopped() -> None:
    stage = started()
    alice = stage.client(ALICE)
    stage.run(25)
    alice.stopped = stage.overlaps = True  # there, it counts as at work
    stage.run(2)
    bob = stage.client(BOB)
    stage.run(2)
    assert stage.working(bob)
    assert not alice.frozen
    stage.ends(bob)
    stage.run(2)
    assert alice.stopped


# --- the agent dies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0.0, 0.002, 0.0035, 0.005, 0.01, 0.5, 20.003])
@pytest.mark.parametrize("thaws", [False, True])
def test_an_agent_that_dies_in_any_phase_leaves_nobody_frozen(delay: float, thaws: bool) -> None:
    """The next one goes on; where none comes back, the unit thaws."""
    stage = started()
    procs = [stage.client(ALICE), stage.client(ALICE)]
    stage.run(25)
    procs.append(stage.client(BOB))
    stage.run(delay)
    stage.kill_agent()
    stage.overlaps = thaws
    if thaws:
        stage.thaw()
        assert frozen(stage) == set()
    stage.run(1)
    stage.start_agent()
    for number, working in enumerate(sampled(stage, 45, 0.25)):
        assert len(working) <= 1 or number < 5
    assert all(stage.working(proc) for proc in procs)
    for proc in procs:
        if proc.uid == BOB:
            stage.ends(proc)
    stage.run(1)
    assert frozen(stage) == set()


# --- nobody starves, and a slice is a slice ---------------------------------------------------------------------------


RANKS = "".join(f"[user.{name}]\nqueue_priority = 5\n" for name in ("bob", "carol", "dave"))


def test_a_paused_user_has_turns_beside_users_who_come_and_go() -> None:
    """Three users come before her by rank, each with one short job after the other: each is before her once, not
    again and again. That they had had their turns was forgotten while none of their connections was held."""
    stage = started(PAUSE + RANKS)
    stage.client(ALICE)
    stage.run(300)
    before, job = len(stage.turns()), stage.client(BOB)
    for number in range(1, 150):
        stage.run(4)
        last, job = job, stage.client((BOB, CAROL, DAVE)[number % 3])
        stage.run(4)
        stage.ends(last)
    turns = stage.turns()[before:]
    assert turns.count(ALICE) > 20, {uid: turns.count(uid) for uid in USERS}


@pytest.mark.parametrize("text", [PAUSE, TERMINATE.replace('"1m"', '"15s"')], ids=["pause", "terminate"])
def test_a_turn_ends_at_its_time_also_between_two_processes_of_its_user(text: str) -> None:
    """Her next process waits at the gate, which paces her. Nothing else happens, and so nobody looked at the clock."""
    stage = started(text + "[user.alice]\nmax_clients = 1\n")
    first = stage.client(ALICE)
    stage.run(0.5)
    stage.client(ALICE)
    bob = stage.client(BOB)
    stage.run(16.5)
    waits = next(number for number, proc in stage.gate.held.items() if proc.uid == ALICE)
    stage.gate.queue.get(waits).not_before = stage.now + 60  # type: ignore[union-attr]
    stage.ends(first)
    stage.run(2.5)
    # the end of a turn that cannot be paused is announced by now, and no new process of hers is admitted
    assert stage.turns() == ([ALICE] if text == PAUSE else [ALICE, BOB])
    stage.run(1.5)
    assert stage.working(bob)


@pytest.mark.parametrize(
    ("bound", "processes"),
    [
        ("", 60),
        ("max_contexts = 10", 60),
        ("max_clients = 4", 60),
        ("active_threads = '5%'\ntotal_active_threads = '20%'", 60),
        ('memory_limit = "10G"\ntotal_memory_limit = "40G"', 60),
        ('memory_limit = "10G"\nactive_threads = "5%"\ntotal_active_threads = "20%"', 20),
    ],
)
def test_a_user_is_paused_for_one_of_whose_processes_few_can_come_in_at_once(bound: str, processes: int) -> None:
    """Room is needed for as many as the gate lets in, not for as many as wait: one array job ended everybody."""
    stage = started(PAUSE.replace('"10G"', '"1G"') + f"[user.bob]\n{bound}\n")
    mine = [stage.client(ALICE), stage.client(ALICE)]
    stage.run(25)
    theirs = [stage.client(BOB) for _ in range(processes)]
    stage.run(10)
    assert all(one.pid in stage.procs and one.frozen for one in mine)
    assert stage.at_work() == {BOB}
    stage.run(400)
    assert all(one.pid in stage.procs for one in [*mine, *theirs])
    assert not stage.actions(act.TerminateClient, act.SignalClient)


@pytest.mark.parametrize("bound", ["max_clients = 4", 'total_memory_limit = "40G"'])
def test_a_user_is_paused_for_a_job_of_whose_processes_few_can_come_in_at_once(bound: str) -> None:
    """With 10G each, only the job's bound leaves room for them on the GPU."""
    stage = started(f'{PAUSE}[cgroup."/job"]\n{bound}\n')
    mine = stage.client(ALICE)
    stage.run(25)
    for _ in range(60):
        stage.client(BOB, cgroup="/job")
    stage.run(400)
    assert mine.pid in stage.procs
    assert stage.actions(act.Freeze)
    assert not stage.actions(act.TerminateClient, act.SignalClient)


def test_memory_beside_a_paused_user_is_that_of_the_processes_that_can_come_in() -> None:
    """Of two jobs of 60G each one alone is let in, by the user's total, and fits beside 70G; both do not."""
    text = PAUSE.replace('"10G"', '"60G"\ntotal_memory_limit = "60G"')
    stage = started(text)
    alice = stage.client(ALICE)
    stage.run(25)
    stage.feed(inp.MemorySeen(stage.now, {alice.pid: {"GPU-0": 70 * GIB}}))
    for _ in range(2):
        stage.client(BOB)
    stage.run(1)
    assert frozen(stage) == {ALICE}


def test_the_end_of_a_turn_that_would_be_a_pause_is_put_off_in_a_fault() -> None:
    """No process can be paused then. The user is not warned, and not ended, for what the fault alone prevents."""
    text = PAUSE.replace('pause_slice = "20s"', 'pause_slice = "5s"').replace('time_limit = "1m"', 'time_limit = "6s"')
    stage = started(text.replace('grace = "5s"', 'grace = "2s"'))
    alice = stage.client(ALICE)
    stage.run(2)
    stage.client(BOB)
    stage.run(1)
    stage.mps.fault(next(iter(stage.mps.servers.values())))
    stage.run(13)
    assert alice.pid in stage.procs
    assert not stage.reports("turn.warning")
    assert not stage.reports("turn.ending")


def test_who_worked_beside_the_holder_and_is_paused_has_its_old_place_in_the_queue() -> None:
    """In a drain all who are paused go on. After it alice, whose last turn was later than carol's, is behind carol."""
    stage = started()
    for uid in (ALICE, BOB, CAROL):
        stage.client(uid)
        stage.run(1)
    stage.run(82)  # slices of 20 s: alice, bob, carol, alice, and now bob
    assert stage.at_work() == {BOB}
    stage.overlaps = True
    stage.feed(inp.DrainOrdered(stage.now, stage.now, None))
    stage.run(3)
    assert stage.at_work() == {ALICE, BOB, CAROL}
    stage.feed(inp.DrainResumed(stage.now))
    stage.run(1)
    assert stage.core is not None
    assert stage.core.view().waiting() == (CAROL, ALICE)


def test_a_paused_user_is_not_ended_as_idle_for_a_third_one() -> None:
    """Its processes cannot work, and hold nothing that another user waits for."""
    stage = started(PAUSE + '[user.alice]\nidle_timeout = "10s"\n')
    alice = stage.client(ALICE)
    stage.run(25)
    stage.client(BOB)
    stage.client(CAROL)
    stage.run(1)
    stage.cpu_idle = {alice.pid: stage.now - 60}
    stage.run(10)
    assert frozen(stage) == {ALICE}
    assert not stage.actions(act.TerminateClient, act.SignalClient)


def test_a_turn_can_pause_again_when_the_process_that_did_not_stop_has_gone() -> None:
    """The mark stayed for the whole turn: alice was ended, hours later, for a process that was not there any more."""
    stage = started()
    alice, odd = stage.client(ALICE), stage.client(ALICE, freezes=False)
    stage.run(25)
    stage.client(BOB)
    stage.run(15)
    assert stage.reports("turn.not_paused")
    stage.ends(odd)
    stage.run(200)
    assert alice.pid in stage.procs
    assert not stage.actions(act.TerminateClient, act.SignalClient)
    assert alice.pid in {one.pid for one in stage.actions(act.Freeze)}
