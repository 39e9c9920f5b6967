"""What may happen, drawn from a seed; and how a plan that fails is cut down to what is needed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

from tests.world.judges import Broken
from tests.world.kernel import BOOT
from tests.world.world import Coming, Fault, Plan, World

WAYS = ("own", "shared", "together", "apart")
USERS = (2001, 2002, 2003, 2004, 2005, 2006)
LIMITS = {2001: (20.0, 2048), 2002: (30.0, 3072), 2003: (40.0, 4096), 2004: (50.0, 5120), 2005: (60.0, 6144),
          2006: (70.0, 7168)}  # fmt: skip
HOSTILE = ("liar", "early", "doubter", "silent", "mute")
PARTIES = ("gate", "agent", "client", "daemon", "server")

CALLS = {"gate": 200, "agent": 100, "client": 40, "daemon": 60, "server": 20}
"""How far behind its time a death may be, in things that its party does."""


def draw(seed: int, ways: tuple[str, ...] = WAYS, faults: int = 3, *, hostile: bool = True) -> Plan:
    """A plan of a minute or two."""
    chance = random.Random(f"plan {seed}")
    users = chance.sample(USERS, chance.randint(1, len(USERS)))
    way, span = chance.choice(ways), chance.choice((3.0, 10.0, 40.0))
    longest = chance.choice((0.3, 2.0, 8.0))
    comings = [
        Coming(round(2 + chance.uniform(0, span), 4), chance.choice(users), round(chance.uniform(0.05, longest), 3),
               chance.choice((1, 1, 1, 2, 3)))
        for _ in range(chance.randint(1, 16))
    ]  # fmt: skip
    if hostile and chance.random() < 0.3:
        comings = [replace(one, kind=chance.choice(HOSTILE)) if chance.random() < 0.3 else one for one in comings]
    thrown = []
    for _ in range(chance.choice((0, 1, 1, 2, 3)) if faults else 0):
        who = chance.choice((*PARTIES, "clock"))
        call = chance.randint(1, CALLS[who]) if who in CALLS and chance.random() < 0.7 else 0
        what = "stop" if chance.random() < 0.25 else "kill"
        thrown.append(Fault(round(2 + chance.uniform(0, span), 4), who, what, call))
    return Plan(seed, way, tuple(sorted(comings, key=lambda one: one.at)), tuple(thrown[:faults]), LIMITS,
                preempt=chance.choice((0.0, 0.02, 0.1)))  # fmt: skip


def fails(plan: Plan) -> tuple[str, World] | None:
    """Why, and the world in which it did."""
    world = World(plan)
    try:
        world.play()
    except Broken as broken:
        return str(broken), world
    finally:
        played.append(world.kernel.now - BOOT)
    return None


played: list[float] = []
"""Virtual seconds of each world."""


def kind(why: str) -> str:
    """The failure without what differs from one world to another."""
    return re.sub(r"\d+(\.\d+)?", "N", why)[:60]


def shrunk(plan: Plan, why: str, say: Callable[[str], None] = lambda _: None) -> Plan:
    """A smaller plan that fails in the same way."""
    wanted, smaller = kind(why), True

    def still(other: Plan) -> bool:
        found = fails(other)
        return found is not None and kind(found[0]) == wanted

    while smaller:
        smaller = False
        for name in ("faults", "comings"):
            for one in getattr(plan, name):
                left = tuple(other for other in getattr(plan, name) if other is not one)
                other = replace(plan, **{name: left})
                if (left or name == "faults") and still(other):
                    plan, smaller = other, True
        calm = replace(plan, preempt=0.0)
        if plan.preempt and still(calm):
            plan, smaller = calm, True
    say(f"{len(plan.comings)} clients and {len(plan.faults)} faults are needed")
    return plan
