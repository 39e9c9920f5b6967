"""What users and their clients make of the GPUs, from NVML's counters: all parts together are what the GPU used."""

from __future__ import annotations

import pytest

from mpsagent.core import inputs as inp
from mpsagent.core import transitions as tr
from mpsagent.core import use
from mpsagent.mps.work import Work
from tests.core.harness import ALICE, BOB, CAROL, DAVE, H200, PATIENT, Stage
from tests.core.test_pause import PAUSE
from tests.core.test_pause import started as paused
from tests.core.test_together import started as together
from tests.core.toy import Proc

IDLE_WATTS, WATTS = 100.0, 500.0


class Meter:
    """A GPU's counters, and looks at them each second at which someone came or went, else after 15 s."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.seconds = self.busy = self.energy = 0.0
        self.look()

    def look(self) -> None:
        work = {H200.uuid: Work(self.seconds, self.busy, self.energy)}
        self.stage.feed(inp.Worked(self.stage.now, work))

    def run(self, seconds: float, busy: float = 0.0) -> None:
        """So long, so busy."""
        self.stage.run(seconds)
        self.seconds += seconds
        self.busy += seconds * busy
        self.energy += seconds * (IDLE_WATTS + (WATTS - IDLE_WATTS) * busy)
        self.look()


def of_users(stage: Stage) -> dict[int, tuple[float, float, float]]:
    """Seconds, utilisation and energy of each user, on record and not yet."""
    assert stage.core is not None
    told = [one for one in (*stage.told, *use.owed(stage.core.state, stage.now)) if isinstance(one, tr.ClientUsed)]
    found = {}
    for uid in {one.uid for one in told}:
        mine = [one for one in told if one.uid == uid]
        seconds = sum(one.seconds for one in mine)
        found[uid] = seconds, sum(one.busy for one in mine) / (seconds or 1), sum(one.energy for one in mine)
    return found


def recent(stage: Stage, proc: Proc) -> float | None:
    assert stage.core is not None
    return stage.core.state.clients[proc.pid].use.utilization


def shared(stage: Stage) -> set[bool]:
    assert stage.core is not None
    return {one.use.shared for one in stage.core.state.clients.values()}


def test_in_turns_the_gpu_is_the_users_whose_turn_it_is() -> None:
    """Alice computes with two processes at 80 %, bob has the GPU and does nothing: each gets what was used in the own
    turn, and both together what the GPU used."""
    stage = Stage(PATIENT, shared=True).up()
    meter = Meter(stage)
    first, second = stage.client(ALICE), stage.client(ALICE)
    meter.run(1)
    for _ in range(4):
        meter.run(15, 0.8)
    bob = stage.client(BOB)
    stage.ends(first)
    meter.run(1, 0.8)
    assert recent(stage, second) == pytest.approx(0.8)
    stage.ends(second)
    meter.run(1)
    meter.run(30)
    stage.ends(bob)
    meter.run(1)
    (seconds, utilization, energy), (idle_for, idle, little) = (of_users(stage)[uid] for uid in (ALICE, BOB))
    assert seconds == pytest.approx(62, abs=1.5)
    assert utilization == pytest.approx(0.8, abs=0.02)
    assert idle_for == pytest.approx(31, abs=1.5)
    assert idle == 0.0
    assert little == pytest.approx(31 * IDLE_WATTS, rel=0.05)
    assert energy + little == pytest.approx(meter.energy, rel=0.02)


def test_a_process_that_ends_between_two_looks_gets_what_it_used_until_then() -> None:
    """On record once, with the word that it is over; nobody else gets it."""
    stage = Stage(PATIENT, shared=True).up()
    meter = Meter(stage)
    alice = stage.client(ALICE)
    meter.run(1)
    stage.run(0)
    stage.after(9, lambda: stage.ends(alice))
    meter.run(10, 0.5)
    (told,) = [one for one in stage.told if isinstance(one, tr.ClientUsed)]
    assert (told.pid, told.over, told.shared) == (alice.pid, True, False)
    assert told.energy == pytest.approx(9 * 300 + 100, rel=0.05)
    meter.run(10, 0.5)
    assert len([one for one in stage.told if isinstance(one, tr.ClientUsed)]) == 1


def test_an_hour_of_an_idle_gpu_is_not_the_next_users() -> None:
    """The look before lies far back: only the part of the time in which the user was there counts."""
    stage = Stage(PATIENT, shared=True).up()
    meter = Meter(stage)
    stage.after(3600, lambda: stage.client(ALICE))
    meter.run(3601)
    (_, _, energy) = of_users(stage)[ALICE]
    assert energy == pytest.approx(IDLE_WATTS, rel=0.25)


def test_together_utilisation_is_that_of_all_and_energy_is_divided() -> None:
    stage = together(PATIENT)
    meter = Meter(stage)
    procs = [stage.client(ALICE), stage.client(ALICE), stage.client(BOB)]
    meter.run(1)
    for _ in range(4):
        meter.run(15, 0.6)
    assert [recent(stage, one) for one in procs] == [pytest.approx(0.6)] * 3
    assert shared(stage) == {True}
    found = of_users(stage)
    assert found[ALICE][1] == pytest.approx(found[BOB][1], rel=0.01)
    assert found[ALICE][2] == pytest.approx(2 * found[BOB][2], rel=0.05)
    assert found[ALICE][2] + found[BOB][2] == pytest.approx(meter.energy, rel=0.02)


def test_alone_on_a_server_for_all_it_is_the_of_user() -> None:
    stage = together(PATIENT)
    meter = Meter(stage)
    stage.client(ALICE)
    meter.run(5, 0.6)
    assert shared(stage) == {False}


def test_apart_utilisation_is_that_of_all_and_energy_is_divided_among_the_users() -> None:
    """However many processes each of them has; alone it is the user's own."""
    stage = Stage(PATIENT + '[instance.gpu]\nsharing = "per-user"\n', together=True)
    stage.start_agent()
    stage.run(1)
    alice = stage.client(ALICE)
    stage.run(5)
    meter = Meter(stage)
    meter.run(10, 0.8)
    assert shared(stage) == {False}
    alone = of_users(stage)[ALICE][2]
    for uid in (BOB, BOB, CAROL, DAVE):
        stage.client(uid)
    meter.run(1)
    before = of_users(stage)[ALICE][2]
    assert before > alone
    meter.run(10, 0.2)
    assert recent(stage, alice) == pytest.approx(0.2)
    assert shared(stage) == {True}
    assert of_users(stage)[ALICE][2] - before == pytest.approx(10 * 180 / 4, rel=0.01)
    assert stage.core is not None
    owed = use.owed(stage.core.state, stage.now)
    assert {(one.uid, one.daemon) for one in owed} == {(uid, uid) for uid in (ALICE, BOB, CAROL, DAVE)}, (
        "on record there"
    )


def test_who_is_paused_uses_nothing() -> None:
    """Frozen processes hold memory and do nothing: the GPU is the other user's."""
    stage = paused(PAUSE)
    meter = Meter(stage)
    alice, bob = stage.client(ALICE), stage.client(BOB)
    for _ in range(25):
        meter.run(1, 0.5)
    assert stage.core is not None
    assert stage.core.state.clients[alice.pid].frozen is not None
    before = of_users(stage)
    for _ in range(10):
        meter.run(1, 0.5)
    after = of_users(stage)
    assert after[ALICE] == pytest.approx(before[ALICE])
    assert after[BOB][2] - before[BOB][2] == pytest.approx(10 * 300, rel=0.02)
    assert recent(stage, bob) == pytest.approx(0.5)


def test_what_a_long_client_uses_is_on_record_each_hour() -> None:
    """Else an agent that is killed would lose days of it. Nothing is told twice."""
    stage = Stage(PATIENT, shared=True).up()
    meter = Meter(stage)
    stage.client(ALICE)
    meter.run(1)
    for _ in range(2 * 240 + 4):
        meter.run(15, 0.5)
    told = [one for one in stage.told if isinstance(one, tr.ClientUsed)]
    assert [one.over for one in told] == [False, False]
    seconds, utilization, energy = of_users(stage)[ALICE]
    assert seconds == pytest.approx(meter.seconds, rel=0.01)
    assert utilization == pytest.approx(0.5, abs=0.01)
    assert energy == pytest.approx(meter.energy, rel=0.01)


def test_without_counters_nothing_is_kept_of_who_has_ended() -> None:
    """A machine whose NVML says nothing: the state does not grow."""
    stage = Stage(PATIENT, shared=True).up()
    for _ in range(5):
        proc = stage.client(ALICE)
        stage.run(1)
        stage.feed(inp.Worked(stage.now, {}))
        stage.ends(proc)
        stage.run(1)
    assert stage.core is not None
    assert stage.core.state.parted == ()
    assert of_users(stage) == {}


def test_a_look_from_before_a_process_ended_counts_until_then() -> None:
    """Instances that ask within a second get one answer, which may be older than the end of a process."""
    stage = Stage(PATIENT, shared=True).up()
    meter = Meter(stage)
    alice = stage.client(ALICE)
    meter.run(1)
    work = {H200.uuid: Work(11.0, 5.0, meter.energy + 3000.0)}
    stage.run(10)
    at = stage.now
    stage.run(0.5)
    stage.ends(alice)
    stage.run(0.1)
    stage.feed(inp.Worked(at, work))
    assert not [one for one in stage.told if isinstance(one, tr.ClientUsed)]
    stage.feed(inp.Worked(stage.now, work))
    (told,) = [one for one in stage.told if isinstance(one, tr.ClientUsed)]
    assert told.energy == pytest.approx(3100, rel=0.02)


IDLE_BY_GPU = PATIENT.replace("[limits]", '[limits]\nidle_timeout = "60s"\nidle_metric = "gpu"')


def test_who_holds_an_idle_gpu_is_ended_where_the_policy_goes_by_that() -> None:
    """A program that waits in a loop uses its processor and not the GPU. A look has to have said so at the end."""
    stage = Stage(IDLE_BY_GPU, shared=True).up()
    meter = Meter(stage)
    alice = stage.client(ALICE)
    meter.run(15)
    bob = stage.client(BOB)
    for _ in range(3):
        meter.run(15, 0.005)
    stage.run(14)
    assert stage.working(alice)
    meter.run(1)
    stage.run(10)
    assert stage.working(bob)
    (told,) = [one for one in stage.told if isinstance(one, tr.TurnEnded)]
    assert told.uid == ALICE


@pytest.mark.parametrize("busy", [0.02, None])
def test_who_uses_the_gpu_a_little_or_in_a_way_that_is_not_known_is_not_idle(busy: float | None) -> None:
    stage = Stage(IDLE_BY_GPU, shared=True).up()
    meter = Meter(stage)
    alice = stage.client(ALICE)
    stage.run(1)
    stage.client(BOB)
    stage.cpu_idle = {alice.pid: stage.now}
    for _ in range(30):
        meter.run(15, busy or 0.0)
        if busy is None:
            meter.seconds = 0.0
    assert stage.working(alice)
