"""A turn is in one of eight phases: each is walked with all that may happen to it, and what comes of it stands here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mpsagent.core import inputs as inp
from mpsagent.core import turns
from mpsagent.core.queue import Queue
from mpsagent.core.turn_memory import Memory, Moment
from mpsagent.core.turns import PHASES, TAKE_UP
from mpsagent.core.view import Turn, View
from tests.api.stand_in import START, USER, busy_state
from tests.core.harness import ALICE, BOB, CAROL, NAMES, POLICY, USERS, Stage
from tests.core.test_pause import PAUSE

NONE = POLICY.replace("[turn]", '[turn]\non_expiry = "none"')
UNENDING = POLICY.replace('"10s"', '"never"')
LAG = 0.4
"""Seconds between agent and gate each way, so that a user who is shut out is so for a while."""


def stage_of(text: str = POLICY, *, others: bool = True, seconds: float = 1.0, **how: bool) -> Stage:
    """alice has the GPU, and bob has come that long ago."""
    stage = Stage(text, shared="slice" not in text, pausing="slice" in text).up()
    stage.client(ALICE, **how)
    stage.run(25 if "slice" in text else 3)
    if others:
        stage.client(BOB)
        stage.run(seconds)
    return stage


def idle() -> Stage:
    stage = stage_of(others=False)
    ends(stage)
    stage.run(1)
    return stage


def shut() -> Stage:
    stage = stage_of()
    stage.lag = LAG
    ends(stage)
    stage.run(0.65)
    return stage


WAYS: dict[str, Callable[[], Stage]] = {
    "idle": idle,
    "open": lambda: stage_of(others=False),
    "contested": stage_of,
    "warned": lambda: stage_of(seconds=11),
    "late": lambda: stage_of(NONE, seconds=16),
    "pausing": lambda: stage_of(PAUSE, freezes=False),
    "ending": lambda: stage_of(seconds=16, stubborn=True),
    "shut": shut,
}


def ends(stage: Stage) -> None:
    for proc in [one for one in stage.procs.values() if one.uid == ALICE]:
        stage.ends(proc)


def lets_go(stage: Stage) -> None:
    for proc in [one for one in stage.procs.values() if one.uid == ALICE]:
        stage.detaches(proc)


def other_goes(stage: Stage) -> None:
    for proc in [one for one in stage.procs.values() if one.uid == BOB]:
        stage.ends(proc)


def starts_anew(stage: Stage) -> None:
    core = stage.core
    stage.kill_agent()
    stage.run(0.1)
    stage.start_agent()
    assert stage.core is not core


def fault(stage: Stage) -> None:
    for server in stage.mps.servers.values():
        stage.mps.fault(server)


EVENTS: dict[str, Callable[[Stage], object]] = {
    "nothing": lambda stage: None,
    "its process ends": ends,
    "its process lets go": lets_go,
    "its next one comes": lambda stage: stage.client(ALICE),
    "another user comes": lambda stage: stage.client(CAROL),
    "the other goes": other_goes,
    "time": lambda stage: stage.run(11),
    "drain": lambda stage: stage.feed(inp.DrainOrdered(stage.now, stage.now, None)),
    "its name is unknown": lambda stage: stage.know(BOB, CAROL),
    "policy: no end": lambda stage: stage.reload(UNENDING),
    "policy: none": lambda stage: stage.reload(NONE),
    "policy: pause": lambda stage: stage.reload(PAUSE),
    "fault": fault,
    "daemon crashes": lambda stage: stage.crash_control(),
    "gate away": lambda stage: stage.cut_link(),
    "agent anew": starts_anew,
}
TABLE = """
                    idle        open        contested   warned      late        pausing     ending      shut
nothing             idle        open        contested   warned      late        pausing     ending      shut
its process ends    idle        idle        bob:open    bob:open    bob:open    bob:open    bob:open    shut
its process lets go idle        open        contested   warned      late        pausing     ending      shut
its next one comes  open        open        contested   warned      late        pausing     ending      contested
another user comes  carol:open  contested   contested   warned      late        pausing     ending      shut
the other goes      idle        open        open        open        open        open        ending      idle
time                idle        open        warned      bob:open    late        contested   bob:open    bob:open
drain               -           open        contested   contested   contested   contested   ending      shut
its name is unknown idle        open        contested   warned      late        pausing     ending      shut
policy: no end      idle        open        contested   contested   contested   contested   ending      shut
policy: none        idle        open        contested   warned      late        contested   ending      shut
policy: pause       idle        open        contested   contested   contested   pausing     ending      shut
fault               idle        open        contested   warned      late        contested   ending      shut
daemon crashes      idle        open        contested   warned      late        contested   ending      shut
gate away           idle        open        contested   warned      late        pausing     ending      shut
agent anew          -           open        contested   warned      warned      pausing     warned      bob:idle
"""


def seen(stage: Stage) -> str:
    assert stage.core is not None
    turn = stage.core.memories.turns.turn
    if turn is None:
        return "-"
    return turn.phase if turn.uid == ALICE else f"{NAMES[turn.uid]}:{turn.phase}"


def played(phase: str, event: str) -> Stage:
    stage = WAYS[phase]()
    assert seen(stage) == phase
    stage.overlaps = True  # a daemon or an agent that is new does not know who is paused
    EVENTS[event](stage)
    stage.run(0.2 + 0.75 * stage.lag)
    return stage


def test_each_phase_has_a_way_to_it() -> None:
    assert WAYS.keys() == PHASES.keys()


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("phase", WAYS)
def test_what_becomes_of_a_phase(phase: str, event: str) -> None:
    """And whoever waits has the GPU in the end, when what was in the way is no more."""
    rows = {row[:20].strip(): row[20:].split() for row in TABLE.strip("\n").splitlines()}
    expected = rows[event][rows[""].index(phase)]
    stage = played(phase, event)
    assert seen(stage) == expected
    stage.know(*USERS)
    stage.reload(PAUSE if stage.pausing else POLICY)
    if not stage.link:
        stage.connect()
    stage.feed(inp.DrainResumed(stage.now))
    waits = [proc for proc in stage.procs.values() if proc.uid != ALICE]
    stage.run(300)
    assert all(proc.pid in stage.served for proc in waits if proc.pid in stage.procs)


@pytest.mark.parametrize("hang_server", [TAKE_UP - 5, TAKE_UP + 5])
def test_an_open_turn_that_nobody_has_taken_up_is_looked_at_when_the_first_of_its_times_comes(
    hang_server: float,
) -> None:
    """Nothing else may happen until then: a user whose hand-overs fail has the GPU for ``TAKE_UP`` at most."""
    now = START + 40
    since = now - 1
    state = busy_state()
    view = View(replace(state, policy=replace(state.policy, hang_server=hang_server)), turn=Turn(USER, since))

    def look(turn: Turn | None, at: float) -> tuple[float | None, Turn]:
        moment = Moment(view, Memory(turn=turn), at)
        return turns._open(moment), moment.turn

    wake, turn = look(view.turn, now)
    assert (wake, turn.phase, turn.tried) == (min(since + hang_server, now + TAKE_UP), "open", now)
    late = now + TAKE_UP - 0.5
    wake, later = look(turn, late)
    contested = late >= since + hang_server
    assert (later.phase, later.tried) == ("contested" if contested else "open", now)
    assert (wake, later.contested) == (
        min(since + hang_server, now + TAKE_UP),
        since + hang_server if contested else None,
    )
    wake, last = look(turn, now + TAKE_UP)
    assert (wake, last.phase) == (None, "shut")
    taken = replace(turn, began=now)
    assert look(taken, now)[1].contested == max(now, START + 10)
    assert look(replace(taken, tried=None), now)[1].tried is None


def test_a_turn_that_its_user_has_left_begins_anew_with_the_next_process() -> None:
    """Its old times would shorten the next use of the GPU, or end it without an announcement."""
    view = View(replace(busy_state(), clients={}, held=Queue()), turn=Turn(USER, START))
    old = replace(Turn(USER, START), contested=START + 1, warned=START + 2, began=START + 3, tried=START + 4)
    moment = Moment(view, Memory(turn=old), START + 40)
    assert turns._present(moment) is None
    assert moment.turn == Turn(USER, START, phase="idle")
