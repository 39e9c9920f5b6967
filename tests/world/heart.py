"""The heart, exhaustively: one client, or one change of turn, and every death of every party at every step of it:
`python -m tests.world.heart`. With `--pairs` every pair of deaths: each death, and each other one at every step of
every party from there on, those of who is started again among them. `--every 12`: of the deaths, and of what follows
each, one of so many. `python -m tests.world --jobs 14 --kind pairs` plays all pairs, on all cores, and goes on where
it was.

A step is whatever others can notice of a party: for gate and agent a system call with an effect, for a model a turn
between two waits. Nothing else happens by chance in these worlds, so the list is complete for the one order in which
they run. A death leaves the same as the one before the step before, and is not played again, where that step was in the
same turn of its party and changed nothing that outlives it: nothing was there, a file was opened or closed.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import time
from asyncio import events
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from tests.world.judges import Broken
from tests.world.kernel import Process
from tests.world.plans import LIMITS, PARTIES, WAYS, fails
from tests.world.world import ROLES, Coming, Fault, Plan, World

BEGIN = 2.0
SCENES = {
    "one client": (Coming(BEGIN, 2001, 0.3),),
    "one client with two contexts": (Coming(BEGIN, 2001, 0.3, 2),),
    "a change of turn": (Coming(BEGIN, 2001, 0.3), Coming(BEGIN + 0.1, 2002, 0.3)),
}


def calm(scene: str, way: str) -> Plan:
    return Plan(1, way, SCENES[scene], limits=LIMITS, preempt=0.0, rest=3.0)


class Counted(World):
    """``noted``: what each party had done when the first client came, and at each death."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.noted: list[Counter[str]] = []
        self.turns: dict[str, int] = {}
        """In which turn of the kernel each party's last step was."""
        self.same: set[tuple[str, int]] = set()
        """Steps of parties before which a death leaves the same as before the step before."""
        self.kernel.after(BEGIN, lambda: self.noted.append(Counter(self.did)))

    def _called(self, process: Process, what: str) -> None:
        party, turn = ROLES.get(process.name, ""), self.kernel.turn
        if self.turns.get(party) == turn and not self.kernel.left:
            self.same.add((party, self.did[party] + 1))
        self.turns[party] = turn
        super()._called(process, what)

    def strike(self, process: Process, fault: Fault) -> None:
        self.noted.append(Counter(self.did))
        super().strike(process, fault)


def deaths(plan: Plan) -> Iterator[Plan]:
    """The plan with one death more: of each party, at each of its steps behind what has been thrown in already, until
    nothing happens any more."""
    world = Counted(plan)
    try:
        world.play()
    except Broken:
        return  # it is told as what it is: one death less
    begun, last = world.noted[0], world.noted[-1]
    for party in PARTIES:
        for step in range(last[party] - begun[party] + 1, world.did[party] - begun[party] + 1):
            if (party, begun[party] + step) not in world.same:
                yield replace(plan, faults=(*plan.faults, Fault(BEGIN, party, "kill", step)))


def drawn(plan: Plan, pairs: bool, every: int, first: int = 0) -> Iterator[Plan]:
    for number, one in enumerate(deaths(plan)):
        if number % every == first % every:
            yield from drawn(one, False, every, number // every) if pairs else [one]


def enumerate_all(scene: str, way: str, every: int = 1, *, pairs: bool = False) -> tuple[int, list[str]]:
    """How many deaths, or pairs of them, were played, and those that broke a promise."""
    played, broken = 0, []
    for plan in drawn(calm(scene, way), pairs, every):
        played += 1
        found = fails(plan)
        if found is not None:
            who = ", then ".join(f"{one.who} before its step {one.call}" for one in plan.faults)
            broken.append(f"{scene}, {way}, {who}: {found[0]}")
    return played, broken


class Branching(Counted):
    """Behind the plan's death: before each step of a party a copy of this process (fork) plays on with that party dead.
    What came before is played once for all of them, and each is the world of a plan with both deaths, to the byte."""

    def __init__(self, plan: Plan, skip: int, until: float) -> None:
        super().__init__(plan)
        self.skip, self.until = skip, until
        self.count = 0
        """Deaths behind the death, of which each leaves something else."""
        self.steps = 0
        """All of them."""
        self.done: int | None = None
        """After so many steps there was no more time."""
        self.copy: int | None = None
        """In a copy: where it says how it ended."""
        self.broken: list[tuple[Fault, str]] = []

    def _called(self, process: Process, what: str) -> None:
        super()._called(process, what)
        party = ROLES.get(process.name, "")
        if self.copy is not None or len(self.noted) < 2 or not process.alive or party not in PARTIES:
            return
        self.steps += 1
        if (party, self.did[party]) in self.same:
            return
        self.count += 1
        if self.count <= self.skip or self.done is not None:
            return
        if time.monotonic() > self.until:
            self.done = self.count - 1
            return
        fault = Fault(BEGIN, party, "kill", self.did[party] - self.noted[0][party])
        ours, theirs = os.pipe()
        running = events._get_running_loop()
        child = os.fork()
        if child == 0:
            events._set_running_loop(running)  # asyncio forgets it in another process
            os.close(ours)
            self.copy = theirs
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, COPY)
            self.tell(f"(before {what})")
            self.strike(process, fault)
            return
        os.close(theirs)
        said = b""
        while part := os.read(ours, 65536):
            said += part
        os.close(ours)
        if (status := os.waitpid(child, 0)[1]) or said != WELL:
            self.broken.append((fault, said.decode() or f"wait status {status} after {COPY:.0f} s at most"))


WELL = b"well"
COPY = 60.0
"""Processor seconds after which a copy is stuck: its signal ends it."""


class Behind(NamedTuple):
    """A death: ``differ`` deaths that each leave something else, before ``steps`` steps; ``done``: how many were played
    where time ran out; and what was broken by one."""

    differ: int
    steps: int
    done: int | None
    broken: list[tuple[Plan, str]]


def branches(plan: Plan, skip: int = 0, until: float = float("inf")) -> Behind:
    """The deaths behind a plan's one. The first ``skip`` of them were played before."""
    gc.collect()
    gc.freeze()  # copies share what is not touched
    gc.disable()
    world, why = Branching(plan, skip, until), b"it did not end"
    try:
        world.play()
        why = WELL
    except Broken as error:
        why = str(error).encode()
    except Exception as error:  # of the models
        why = f"{type(error).__name__}: {error}".encode()
    finally:
        if world.copy is not None:
            os.write(world.copy, why)
            os._exit(0)
    gc.enable()
    broken = [(replace(plan, faults=(*plan.faults, fault)), how) for fault, how in world.broken]
    return Behind(world.count, world.steps, world.done, broken if why == WELL else [(plan, why.decode()), *broken])


def main() -> int:
    words = argparse.ArgumentParser("tests.world.heart", description=__doc__)
    words.add_argument("--pairs", action="store_true")
    words.add_argument("--every", type=int, default=1)
    words.add_argument("--scene", choices=SCENES, action="append")
    words.add_argument("--way", choices=WAYS, action="append")
    asked = words.parse_args()
    stuck = 0
    for scene in asked.scene or SCENES:
        for way in asked.way or WAYS:
            begun = time.process_time()
            played, broken = enumerate_all(scene, way, asked.every, pairs=asked.pairs)
            stuck += len(broken)
            what = f"{played} {'pairs of deaths' if asked.pairs else 'deaths'}"
            print(f"{scene}, {way}: {what}, {len(broken)} broken, {time.process_time() - begun:.0f} s", flush=True)
            print("".join(f"    {one[:400]}\n" for one in broken), end="", flush=True)
    return int(stuck > 0)


if __name__ == "__main__":
    sys.exit(main())
