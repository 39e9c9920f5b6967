"""Days with people beside the programs of users: an administrator who drains, resumes, restarts, ends clients and
replaces gate and agent at once; users' front-ends that are left open or ask without end; and a machine on which disks
are full, read-only or torn, threads (names, files) take their time, and the api dies."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from mpsagent.agent.acting import Acting
from mpsagent.agent.problem import Problem
from tests.world import trouble
from tests.world.mps import CREDENTIALS, FRONT_END, word
from tests.world.people import Client, Life, Steps
from tests.world.plans import LIMITS
from tests.world.trouble import SERVED, Day, Guest
from tests.world.world import LOOK, Fault

UNDER_WAY = 7.0
"""Seconds for which a hand-over that was under way at a drain's answer may go on."""
ENDS = 15.0
"""Seconds in which a client that was ordered to end has ended."""
ANSWER = 20.0
"""Seconds in which a front-end is answered, or told that it is not."""


class Asking(Client):
    """A user's front-end: asks as often as its work has tenths of a second, and stays open then."""

    asked = "get_default_active_thread_percentage"

    def live(self) -> Steps:
        until = self.kernel.now + self.life.work
        control = yield from self.connect()
        if control is None or (yield from control.hear(until)) is None:
            return
        control.say(CREDENTIALS, who=(self.process.pid, self.process.uid, self.process.gid))
        control.say(FRONT_END)
        for number in range(max(1, int(10 * self.life.work))):
            begun = self.kernel.now
            text = self.asked.encode() + b"\n\0"
            if not (control.say(len(text).to_bytes(8, "little")) and control.say(text)):
                return
            answer = yield from control.hear(begun + ANSWER)
            if answer is None and not control.over and number == 0 and self.alone():
                self.world.judges.fail(
                    f"front-end {self.process.pid} of user {self.life.uid} hears nothing for {ANSWER:g} s"
                )
                return
            if answer is None or answer.data[:4] == word(1):
                return
        yield [control.file], until
        control.close()

    def alone(self) -> bool:
        """No fault, no order and no stopped process explains the silence."""
        return not self.world.judges.faults


class Changing(Asking):
    """One that tries to change something."""

    asked = "set_default_active_thread_percentage 100"


trouble.PEOPLE = {**trouble.PEOPLE, "asking": Asking, "changing": Changing}
trouble.HOSTILE = trouble.HOSTILE | {"asking", "changing"}


class Administered(trouble.Troubled):
    """``ordered``: clients that were ordered to end, and when that was answered."""

    def __init__(self, plan: Day) -> None:
        super().__init__(plan)
        self.judges = Overseeing(self)
        self.ordered: dict[Life, float] = {}

    def throw(self, fault: Fault) -> None:
        what, kernel = fault.what, self.kernel
        if what in ("full", "read-only", "torn", "slow"):
            self.tell(f"the disk is {what}" if what != "slow" else "threads take their time")
            self.judges.faults.append((kernel.now, "disk"))
            kernel.disk = what
            kernel.after(float(fault.call), self.mend)
        elif what == "drain":
            self.order("a drain", lambda acting: acting.drain(None, 0), self.is_drained)
        elif what == "resume":
            self.drained = None
            self.order("resume", lambda acting: acting.resume(0))
            self.judges.faults.append((kernel.now, "order"))
        elif what == "restart":
            self.judges.faults.append((kernel.now, "daemon"))
            self.order("a restart", lambda acting: acting.restart(float(fault.call) or None, 0))
        elif what == "terminate":
            there = [one for one in self.judges.lives if one.works and one.honest and one not in self.ordered]
            if there:
                life = there[self.chance.randrange(len(there))]
                pid = life.process.pid
                end = lambda acting: acting.terminate(pid, now=bool(fault.call), dry_run=False, by=0)  # noqa: E731
                self.order(f"the end of client {pid}", end, lambda: self.ordered.setdefault(life, kernel.now))
        elif what == "upgrade":
            self.tell("gate and agent are replaced by another build")
            for who in ("agent", "gate"):
                for one in self.who(who):
                    self.judges.faults.append((kernel.now, who))
                    kernel.signal(one, 15)
        else:
            super().throw(fault)

    def mend(self) -> None:
        self.tell("the disk is well")
        self.kernel.disk = ""
        self.judges.faults.append((self.kernel.now, "disk"))

    def is_drained(self) -> None:
        self.drained = self.kernel.now

    def order(self, text: str, ask: Callable[[Acting], Any], then: Callable[[], object] = lambda: None) -> None:
        agent, node = self.agent, self.node
        if agent is None or node is None or not agent.process.alive or not node.agents:
            return

        async def ordered() -> None:
            try:
                await ask(Acting(node))
            except Problem as problem:
                self.tell(f"{text} is refused: {problem}")
                return
            self.tell(f"{text} is answered")
            then()

        self.tell(f"{text} is ordered")
        agent.loop.call_soon(lambda: agent.loop.create_task(ordered()))


class Overseeing(trouble.Watchful):
    world: Administered

    def __post_init__(self) -> None:
        super().__post_init__()
        self.had: Counter[int] = Counter()
        """Seconds in which the GPU was a user's, and somebody else's turn was wanted."""

    def given(self, life: Life) -> None:
        since = self.world.drained
        if since is not None and (late := self.world.kernel.now - since) > UNDER_WAY and life.honest:
            what = f"{late:.1f} s after a drain was answered"
            self.fail(f"client {life.process.pid} of user {life.uid} is let in {what}")
        if not any(one.what in ("restart", "drain") for one in self.day.faults):
            super().given(life)  # whose turn such an order has ended is behind all others, though they came later

    def look(self) -> None:
        if self.world.drained is not None:
            self._free.clear()
            self._nothing = self._idle_since = None
        super().look()
        now = self.world.kernel.now
        for life, since in self.world.ordered.items():
            if life.process.alive and now - since > ENDS and all(now - at > ENDS for at, _ in self.faults):
                self.fail(f"client {life.process.pid} of user {life.uid} was ordered to end {now - since:.0f} s ago")
        wanted = {one.uid for one in self.lives if one.process.alive and one.knocked is not None}
        at_work = {one.uid for one in self.lives if one.works and not one.process.stopped}
        if len(wanted) == len(self.day.limits) and len(at_work) == 1:
            self.had.update(dict.fromkeys(at_work, LOOK))

    def at_the_end(self) -> None:
        super().at_the_end()
        if self.day.name == "shares":
            self._fair()

    def _fair(self) -> None:
        """The page of reference: while all want it, users of one priority have the same time, to a slice and a tenth; a
        user who comes before all others has at least as much as each of them."""
        total = sum(self.had.values())
        same = [self.had[uid] for uid in self.day.limits if uid not in self.day.ranked]
        slack = 2 * (self.day.after or 0.0) + 0.1 * total / len(self.day.limits)
        if max(same) - min(same) > slack:
            self.fail(
                f"of {total:.0f} s users had {dict(sorted(self.had.items()))}, which is not the same to {slack:.0f} s"
            )
        for uid in self.day.ranked:
            if self.had[uid] + slack < max(same):
                self.fail(f"of {total:.0f} s user {uid}, who comes before all others, had {self.had[uid]:.0f}")


def orders(chance: random.Random, seed: int) -> Day:
    """Drains, restarts, ends of clients and upgrades among users who come and go, with front-ends beside them."""
    users = chance.sample(sorted(LIMITS), chance.randint(2, 4))
    way = chance.choice(("own", "shared", "together", "apart"))
    longest = chance.choice((1, 1, 60))
    comings = [Guest(2 + chance.uniform(0, 60), chance.choice(users), longest * chance.uniform(0.2, 1),
                     chance.choice((1, 1, 2))) for _ in range(chance.randint(4, 20))]  # fmt: skip
    comings += [Guest(2 + chance.uniform(0, 40), chance.choice(users), chance.choice((0.1, 0.5, 2.0, 30.0)), 1,
                      chance.choice(("asking", "changing"))) for _ in range(chance.choice((0, 0, 1, 3)))]  # fmt: skip
    faults = []
    for _ in range(chance.randint(1, 3)):
        at, what = chance.uniform(3, 50), chance.choice(("drain", "restart", "terminate", "terminate", "upgrade"))
        faults.append(
            Fault(at, "agent", what, chance.choice((0, 2, 10)) if what == "restart" else chance.randint(0, 1))
        )
        if what == "drain":
            faults.append(Fault(at + chance.uniform(0.01, 25), "agent", "resume"))
    if chance.random() < 0.4:
        faults.append(Fault(chance.uniform(3, 60), chance.choice(("gate", "agent", "daemon")), "kill", 0))
    turns = way in ("own", "shared")
    bound = 40.0 + SERVED + 25.0 * len(users) if longest == 1 or not turns else None  # turns last as long as work does
    return Day(seed, way, tuple(comings), tuple(sorted(faults, key=lambda one: one.at)), LIMITS, ends=True,
               name="orders", quiet=True, waits=bound, calm=0.0, preempt=chance.choice((0.0, 0.02)),
               until=400.0)  # fmt: skip


def ailing(chance: random.Random, seed: int) -> Day:
    """A disk that is full, read-only, or torn by a death in the middle of a write; threads that take seconds; an api
    that dies. CUDA work goes on."""
    users = chance.sample(sorted(LIMITS), chance.randint(1, 4))
    comings = [Guest(2 + chance.uniform(0, 60), chance.choice(users), chance.uniform(0.2, 8)) for _ in range(12)]
    what, at = chance.choice(("full", "read-only", "torn", "slow", "slow")), chance.uniform(3, 30)
    faults = [Fault(at, "disk", what, chance.choice((2, 10, 30)))]
    faults += [Fault(at + chance.uniform(0, 10), chance.choice(("agent", "gate", "api", "api", "client")), "kill")
               for _ in range(chance.randint(0, 2))]  # fmt: skip
    way = chance.choice(("own", "shared", "together", "apart"))
    return Day(seed, way, tuple(comings), tuple(faults), LIMITS, name="ailing", quiet=True, calm=0.0,
               waits=60.0 + SERVED, preempt=chance.choice((0.0, 0.02)), until=400.0)  # fmt: skip


def shares(chance: random.Random, seed: int) -> Day:
    """A quarter of an hour in which all want the GPU all the time: who has how much of it?"""
    users = chance.sample(sorted(LIMITS), chance.randint(2, 4))
    slice_ = chance.choice((4, 10))
    comings = [Guest(2.0 + 0.1 * place, uid, 3000.0) for place, uid in enumerate(users)]
    queue = 'queue = "fair"\n' if chance.random() < 0.6 else ""
    pause = f'[switch]\naction = "pause"\nslice = "{slice_}s"\nafter = "1h"\n'
    return Day(seed, "shared", tuple(comings), (), {uid: LIMITS[uid] for uid in users}, name="shares", more=pause,
               instance=queue, after=float(slice_), over=900.0, quiet=True, preempt=0.0)  # fmt: skip


DAYS = {"orders": orders, "ailing": ailing, "shares": shares}


def draw(seed: int) -> Day:
    name = sorted(DAYS)[seed % len(DAYS)]
    if name == "shares" and seed // len(DAYS) % 4:  # it takes as long as several others
        name = "orders"
    return DAYS[name](random.Random(f"{name} {seed}"), seed)
