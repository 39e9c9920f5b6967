"""What may happen, drawn from a seed; and how a plan that fails is cut down to what is needed."""

from __future__ import annotations

import random
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
    preempt, parent = chance.choice((0.0, 0.02, 0.1)), chance.random() < 0.15
    if parent and faults and chance.random() < 0.3:
        what, call = chance.choice((("stop", 0), ("kill", 0), ("kill", chance.randint(1, 60))))
        thrown.insert(0, Fault(2 + chance.uniform(0, span), "parent", what, call))
    return Plan(seed, way, tuple(sorted(comings, key=lambda one: one.at)), tuple(thrown[:faults]), LIMITS,
                preempt=preempt, parent=parent)  # fmt: skip


def hour(seed: int, ways: tuple[str, ...] = WAYS, faults: int = 6, *, hostile: bool = True) -> Plan:
    """A plan of an hour: users come in crowds, most faults are near one of them, and in between it is quiet."""
    chance = random.Random(f"hour {seed}")
    way, comings, thrown = chance.choice(ways), list[Coming](), list[Fault]()
    bad = chance.choice(USERS) if hostile and chance.random() < 0.2 else None
    crowds = [2 + chance.uniform(0, 3500) for _ in range(chance.randint(4, 12))]
    for begins in crowds:
        span, longest = chance.choice((0.01, 1.0, 10.0)), chance.choice((0.3, 3.0, 30.0, 120.0))
        for _ in range(chance.randint(1, 8)):
            uid = chance.choice(USERS)
            kind = chance.choice(HOSTILE) if uid == bad and chance.random() < 0.5 else "honest"
            work = round(chance.uniform(0.05, min(longest, 10.0) if uid == bad else longest), 3)
            at = round(begins + chance.uniform(0, span), 4)
            comings.append(Coming(at, uid, work, chance.choice((1, 1, 1, 2, 3)), kind))
    for _ in range(chance.randint(0, faults)):
        who = chance.choice((*PARTIES, "clock"))
        at = chance.choice(crowds) + chance.choice((-1.0, 0.0, 0.0, 0.0, 10.0)) + chance.uniform(0, 10)
        call = chance.randint(1, CALLS[who]) if who in CALLS and chance.random() < 0.7 else 0
        thrown.append(Fault(round(max(2.0, at), 4), who, "stop" if chance.random() < 0.25 else "kill", call))
    comings.sort(key=lambda one: one.at)
    return Plan(seed, way, tuple(comings), tuple(thrown), LIMITS, preempt=chance.choice((0.0, 0.02)))  # fmt: skip


def fails(plan: Plan, make: Callable[[Any], World] = World) -> tuple[str, World] | None:
    """Why, and the world in which it did."""
    world = make(plan)
    try:
        world.play()
    except Broken as broken:
        return str(broken), world
    finally:
        played.append(world.kernel.now - BOOT)
    return None


played: deque[float] = deque(maxlen=1)
"""Virtual seconds of the last world."""


def kind(why: str) -> str:
    """The failure without what differs from one world to another."""
    return re.sub(r"\d+(\.\d+)?", "N", why)[:60]


def shrunk(
    plan: Plan,
    why: str,
    say: Callable[[str], None] = lambda _: None,
    make: Callable[[Any], World] = World,
    until: float = float("inf"),
) -> Plan:
    """A smaller plan that fails in the same way; ``until``: no longer than to this moment (time.monotonic)."""
    wanted, smaller = kind(why), True

    def still(other: Plan) -> bool:
        found = fails(other, make) if time.monotonic() < until else None
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
