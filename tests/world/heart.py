"""The heart, exhaustively: one client, or one change of turn, and every death of every party at every step of it.

A step is whatever others can notice of a party: for gate and agent a system call with an effect, for a model a turn
between two waits. Nothing else happens by chance in these worlds, so the list is complete for the one order in which
they run: `python -m tests.world.heart`.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from tests.world.plans import LIMITS, PARTIES, fails
from tests.world.world import Coming, Fault, Plan, World

BEGIN = 2.0
SCENES = {
    "one client": (Coming(BEGIN, 2001, 0.3),),
    "one client with two contexts": (Coming(BEGIN, 2001, 0.3, 2),),
    "a change of turn": (Coming(BEGIN, 2001, 0.3), Coming(BEGIN + 0.1, 2002, 0.3)),
}


def calm(scene: str, way: str) -> Plan:
    return Plan(1, way, SCENES[scene], limits=LIMITS, preempt=0.0, rest=3.0)


def steps(plan: Plan) -> Counter[str]:
    """How many steps each party takes from the first client's coming until nothing happens any more."""
    counted: list[Counter[str]] = []
    world = World(plan)
    world.kernel.after(BEGIN, lambda: counted.append(Counter(world.did)))
    world.play()
    return Counter({party: world.did[party] - counted[0][party] for party in PARTIES})


def deaths(scene: str, way: str) -> Iterator[Plan]:
    """A plan for each death of each party."""
    plan = calm(scene, way)
    for party, count in steps(plan).items():
        for step in range(1, count + 1):
            yield replace(plan, faults=(Fault(BEGIN, party, "kill", step),))


def enumerate_all(scene: str, way: str, every: int = 1) -> tuple[int, list[str]]:
    """How many deaths were played, and those that broke a promise. ``every``: one of so many."""
    played, broken = 0, []
    for number, plan in enumerate(deaths(scene, way)):
        if number % every == 0:
            played += 1
            found = fails(plan)
            if found is not None:
                broken.append(f"{scene}, {way}, {plan.faults[0].who} before its step {plan.faults[0].call}: {found[0]}")
    return played, broken


def main() -> int:
    stuck = 0
    for scene in SCENES:
        for way in ("own", "shared", "together", "apart"):
            begun = time.process_time()
            played, broken = enumerate_all(scene, way)
            stuck += len(broken)
            print(
                f"{scene}, {way}: {played} deaths, {len(broken)} broken, {time.process_time() - begun:.0f} s",
                flush=True,
            )
            print("".join(f"    {one[:400]}\n" for one in broken), end="", flush=True)
    return int(stuck > 0)


if __name__ == "__main__":
    sys.exit(main())
