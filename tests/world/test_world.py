"""A few fixed seeds of each way of sharing, with faults; and that a seed is one world."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from mpsagent.agent.host import Agent
from tests.world import doors, heart, many, test_tenth
from tests.world.heart import BEGIN, calm, enumerate_all
from tests.world.kernel import BOOT, Body, File, Kernel, Killed
from tests.world.plans import LIMITS, WAYS, draw, fails
from tests.world.world import HIDDEN, LOGS, Coming, Fault, Plan, World


@pytest.mark.parametrize("way", WAYS)
def test_every_promise_holds_in_a_few_worlds(way: str) -> None:
    for seed in range(1, 4):
        found = fails(draw(seed, (way,)))
        assert found is None, f"seed {seed}: {found[0]}"


def test_whoever_dies_in_a_change_of_turn_nobody_is_stuck() -> None:
    """One death of forty; test_heart.py has all."""
    for way in ("own", "shared"):
        played, broken = enumerate_all("a change of turn", way, every=40)
        assert broken == []
        assert played > 15


def played(seed: int) -> str:
    """Everything that happened in a world, in one number."""
    world = World(draw(seed))
    world.play()
    text = "\n".join([*world.story, str(world.kernel.chance.random())])
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_seed_is_the_same_world_to_the_byte_in_another_interpreter() -> None:
    code = "from tests.world.test_world import played; print(played(103))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == played(103)


LEADS_OUTSIDE = {
    "_thread",
    "grp",
    "os",
    "pwd",
    "resource",
    "select",
    "shutil",
    "signal",
    "socket",
    "subprocess",
    "time",
}
PROGRAMS = {"mpsagent.linux.threads", "mpsagent.agent.gate_keeper"}
"""What starts threads and programs there is replaced as a whole."""


def test_no_name_leads_to_the_machine_that_runs_the_test() -> None:
    """On one with NVIDIA's driver a world asked NVIDIA's program what it can do: shutil.which had no stand-in."""
    world = World(draw(1))
    with world.doors():
        led = {f"{module}: {value.__name__}" for module, one in sys.modules.items()
               if module.split(".")[0] == "mpsagent" and module.split(".")[1:2] and module.split(".")[1] in doors.REAL
               and module not in PROGRAMS
               for value in vars(one).values()
               if isinstance(value, ModuleType) and value.__name__ in LEADS_OUTSIDE}  # fmt: skip
    assert led == set()


BOTH_WAYS = """
import contextlib
import hashlib
from tests.world import heart
from tests.world.judges import Judges
from tests.world.plans import fails

def told(self):
    text = "".join([*self.world.story, str(self.world.kernel.chance.random())])
    self.fail(hashlib.sha256(text.encode()).hexdigest())

first = list(heart.deaths(heart.calm("one client", "shared")))[0]
Judges.at_the_end = told
differ, steps, left, _ = heart.branches(first, 10_000)
assert steps > differ > 200 and left is None
before = heart.Branching._called

def until(self, process, what):
    if self.count == 200:
        self.until = 0.0
    before(self, process, what)

heart.Branching._called = until
_, _, left, [(itself, _), *found] = heart.branches(first, 180)
assert left == 200 and itself == first and len(found) == 20, (left, len(found))
for plan, why in found:
    assert fails(plan)[0] == why, plan
"""


def test_a_copy_that_lets_a_second_party_die_is_the_world_of_both_deaths_to_the_byte() -> None:
    """In an interpreter of its own: the worlds are forked."""
    subprocess.run([sys.executable, "-c", BOTH_WAYS], check=True, timeout=120)


def test_pairs_that_were_played_are_left_out_the_next_time_and_only_with_the_same_code(tmp_path: Path) -> None:
    scenes = many.PAIRS["pairs"]
    every = many.firsts({}, scenes)
    assert {(one.scene, one.way) for one in every} == {("one client", "shared")}
    one, other = every[0], every[1]
    rows = [(many.code(), one, 0, 7, 9), (many.code(), one, 7, 9, 9), (many.code(), other, 0, 3, 9)]
    rows += [("another", every[2], 0, 9, 9)]
    (tmp_path / "pairs-1-0.txt").write_text(
        "".join(f"{code}|{first.scene}|{first.way}|{first.number}|{skip}|{reached}|{differ}|20|0\n"
                for code, first, skip, reached, differ in rows)
    )  # fmt: skip
    left = many.firsts(many.played_before(tmp_path), scenes)
    assert len(left) == len(every) - 1
    assert left[:2] == [other._replace(skip=3), every[2]]
    said = many.sums(many.played_before(tmp_path), *scenes[0])
    assert said.startswith("one client, shared: 12 pairs of deaths played, all that leave something else behind 1 of")


def test_a_death_that_is_left_out_leaves_the_same_as_the_one_before() -> None:
    """But for chance: of 82 six have a sentence more or less, as the agent starts a moment sooner or later."""
    calm_one = calm("one client", "shared")
    world = heart.Counted(calm_one)
    world.play()
    begun = world.noted[0]

    def story(party: str, step: int) -> list[str]:
        played = World(replace(calm_one, faults=(Fault(BEGIN, party, "kill", step - begun[party]),)))
        played.play()
        said = (line[10:].strip() for line in played.story)
        return sorted(re.sub(r"[0-9.]+", "N", line) for line in said if not line.startswith("(before"))

    left_out = sorted((party, step) for party, step in world.same if step > begun[party])
    assert len(left_out) > 60
    others = [one for one in left_out[::3] if story(*one) != story(one[0], one[1] - 1)]
    assert len(others) <= len(left_out) / 15, others


def test_a_status_that_shows_who_has_ended_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpsagent.agent.clients.ClientProcesses.lose", lambda self, process: self.forget(process.pid))
    found = fails(draw(1, ("shared",), faults=0, hostile=False))
    assert found is not None


def test_a_gate_that_is_killed_loses_nobody_but_whom_it_has_accepted_that_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Accepted, and systemd is not told of it yet: a window of two system calls, once for each connection."""
    monkeypatch.setattr("tests.world.judges.LOST", 0.0)
    plan = calm("one client", "shared")
    lost = []
    for step in range(1, 41):
        found = fails(replace(plan, faults=(Fault(BEGIN, "gate", "kill", step),)))
        if found is not None:
            assert "refused" in found[0]
            lost.append(next(line for line in found[1].story if "(before" in line).split("before ")[1])
    assert lost == ["send)", "send)"]  # its probe, and the connection of its channel


def test_who_is_first_while_the_server_for_all_is_stopped_stays_first() -> None:
    """No user stops it: 10 s in vain are not its user's (minute 840004459)."""
    comings = Coming(2.0, 2001, 1.5), Coming(2.5, 2002, 2.0), Coming(3.0, 2003, 2.0)
    stopped = 0
    for seed in range(1, 15):
        world = World(Plan(seed, "shared", comings, (Fault(3.6, "server", "stop", 1),), LIMITS))
        world.play()
        if any("is stopped for 15 s" in line for line in world.story):
            stopped += 1
            first, second, third = sorted(world.judges.lives, key=lambda one: one.given or 0.0)
            assert [one.uid for one in (first, second, third)] == [2001, 2002, 2003]
    assert stopped > 1


@pytest.mark.parametrize("way", WAYS)
def test_the_gates_own_parent_starts_it_again_with_all_that_it_had(way: str) -> None:
    """Where there is no systemd; also the public sockets, when somebody has removed them."""
    comings = tuple(Coming(2.0 + place / 2 + (place > 7), 2001 + place % 3, 1.0, 2) for place in range(20))
    kill, stop = Fault(5.0, "gate", "kill", 40), Fault(9.1, "parent", "stop")
    faults = Fault(3.0, "gate"), kill, Fault(6.0, "gate", "sockets"), stop, Fault(9.2, "gate")
    world = World(Plan(1, way, comings, faults, LIMITS, parent=True))
    world.play()
    assert sum("the gate's parent starts it again" in line for line in world.story) == 4


@pytest.mark.parametrize("way", WAYS)
def test_a_gate_whose_parent_has_died_goes_on_and_when_it_has_gone_too_both_are_started_again(way: str) -> None:
    """Who waits loses its place only with the gate."""
    comings = tuple(Coming(2.0 + place / 2, 2001 + place % 3, 1.0, 2) for place in range(20))
    alone = World(Plan(1, way, comings, (Fault(5.0, "parent"),), LIMITS, parent=True))
    alone.play()
    assert all(one.done for one in alone.judges.lives)
    again = World(Plan(1, way, comings, (Fault(5.0, "parent"), Fault(7.0, "gate")), LIMITS, parent=True))
    again.play()
    begun = next(index for index, line in enumerate(again.story) if "the agent starts the gate's parent" in line)
    assert any("is connected" in line for line in again.story[begun:])
    assert sum(one.done for one in again.judges.lives[-6:]) == 6


def test_the_agent_holds_no_process_of_those_who_were_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate did not say that it had closed what the agent refused, and the agent kept a pidfd of each: a user who is
    denied could use up its descriptors. The judge of descriptors found it."""
    monkeypatch.setattr(test_tenth, "BEFORE", 1.0)
    monkeypatch.setattr(test_tenth, "MEASURED", 2.0)
    test_tenth.played("own", test_tenth.ATTACKS["processes of a user who is denied"])


@pytest.mark.parametrize("seed", [13, 111])
def test_a_server_that_is_stopped_as_it_meets_a_client_and_killed_later_costs_no_limit_and_no_time(seed: int) -> None:
    """Hour 780000723. The gate looked for 0.1 s whether it ended: the client's next context had no memory limit (seed
    111), or MPS waited for one that was killed meanwhile (13)."""
    comings = (
        Coming(2.0, 2001, 0.2, 3),
        Coming(5.0, 2004, 13.5, 3),
        Coming(7.7, 2002, 3.6, 2),
        Coming(12.4, 2001, 11.48, 3),
    )
    stops = ((4.9, 2 + seed % 9), (10.6, 1 + seed % 7), (15.0, 1 + seed % 5))
    faults = tuple(Fault(at, "server", "stop", call) for at, call in stops)
    plan = Plan(seed, "together", comings, faults, LIMITS, preempt=0.0, until=300.0, well=True)
    assert fails(plan) is None


@pytest.mark.parametrize("step", [8, 9])
def test_a_second_context_that_is_not_handed_over_does_not_make_the_gate_forget_the_lost_start(step: int) -> None:
    """Minute 820002542. Its server is stopped as it meets the client, and the control daemon dies while limits are set
    for the next context: that came to another server without a memory limit."""
    faults = Fault(1.9, "server", "stop", step), Fault(2.18, "daemon")
    plan = Plan(1, "shared", (Coming(2.0, 2001, 0.2, 2),), faults, LIMITS, preempt=0.0, until=300.0)
    assert fails(plan) is None


def test_a_client_that_is_killed_while_its_server_waits_for_another_one_harms_who_comes_next() -> None:
    """Minute 820006249: the judge had forgotten the death. Only some are killed with a kernel in flight."""
    comings = Coming(2.0, 2001, 6.0), Coming(3.0, 2001, 4.0, 1, "silent"), Coming(4.5, 2001, 3.0)
    for seed in range(1, 9):
        assert fails(Plan(seed, "shared", comings, (Fault(4.0, "client"),), LIMITS, preempt=0.0)) is None


def test_each_control_daemon_that_dies_soon_is_started_again_after_twice_the_pause() -> None:
    """Minute 820004251: the judge had no place for a third one."""
    comings = Coming(2.0, 2001, 9.0), Coming(2.9, 2002, 1.0)
    deaths = Fault(3.0, "daemon"), Fault(4.1, "daemon"), Fault(6.2, "daemon")
    assert fails(Plan(1, "shared", comings, deaths, LIMITS, preempt=0.0)) is None


def test_an_agent_that_looks_again_without_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wake_at = Agent._wake_at
    monkeypatch.setattr(Agent, "_wake_at", lambda self, _: wake_at(self, self.clock.now()))
    found = fails(calm("one client", "shared"))
    assert found is not None
    assert "in a second for nothing" in found[0]


def test_who_is_killed_within_another_one_s_system_call_closes_nothing_of_it() -> None:
    """Nor is anything told of what it would do at its end."""
    kernel = Kernel(1, 0.0)
    one, other = (kernel.spawn(name, 0, 0, kernel.init) for name in ("one", "other"))
    for process in (one, other):
        process.install(File(kernel))

    class Closing(Body):
        def clear(self) -> None:
            with contextlib.suppress(Killed):
                doors.os.close(3)

    other.body = Closing()
    with doors.opened(kernel, {}):
        one.do(lambda: one.alive and other.do(lambda: kernel.exit(other)) and None)
    assert 3 in one.fds


def test_a_second_gate_remembers_who_lost_its_server_in_a_hand_over_that_it_has_taken_up() -> None:
    """It counted such a hand-over as a further one of a process that the first gate had known, and the client had no
    memory limit on its next server (20 of 94,826 pairs of deaths)."""
    calm_one, second = calm("one client", "shared"), []
    for plan in heart.deaths(calm_one):
        if plan.faults[0].who == "gate" and plan.faults[0].call > 60:
            world = World(plan)
            world.play()
            given, (died, _) = world.judges.lives[0].given, world.judges.faults[0]
            if given is None or given < died + 0.05:
                break
            second.append((plan, given - BOOT))
    for plan, given in second[-4:]:
        for later in (0.0002, 0.002):
            both = replace(plan, faults=(*plan.faults, Fault(given + later, "daemon")))
            found = fails(both)
            assert found is None, f"{both.faults}: {found[0]}"


def test_a_second_control_daemon_in_the_same_directory_ends() -> None:
    """As NVIDIA's does (recording 02, R8). The first one serves on."""
    world, started = World(calm("one client", "shared")), []

    async def another() -> None:
        directories = {"CUDA_MPS_PIPE_DIRECTORY": HIDDEN, "CUDA_MPS_LOG_DIRECTORY": LOGS}
        started.append(await world.run_program(["nvidia-cuda-mps-control", "-d"], directories))

    world.kernel.after(1.0, lambda: world.agent and world.agent.loop.create_task(another()))
    world.play()
    assert started == [(1, "An instance of this daemon is already running\n", "", None)]
    assert all(one.done for one in world.judges.lives)
