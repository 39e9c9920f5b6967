"""Days with people beside the programs of users: an administrator who drains, resumes, restarts, ends clients and
replaces gate and agent at once; users' front-ends that are left open or ask without end; and a machine on which disks
are full, read-only or torn, threads (names, files) take their time, and the api dies. Played as trouble.py says:
`python -m tests.world.administrator --day batch`."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tests.world import trouble
from tests.world.kernel import Process
from tests.world.mps import CREDENTIALS, FRONT_END, Daemon, word
from tests.world.orders import ANSWERED, AT_ONCE, Order, flood, give, unrecorded, wrong
from tests.world.people import Client, Life, Steps
from tests.world.plans import LIMITS
from tests.world.trouble import SERVED, Day, Guest, GuestLife
from tests.world.world import LOOK, OWN, Coming, Fault

UNDER_WAY = 7.0
"""Seconds for which a hand-over that was under way at a drain's answer may go on."""
STANDS = 5.0
"""Seconds in which processes of a paused user go on in a drain."""
ENDS = 15.0
"""Seconds in which a client that was ordered to end has ended."""
SLOWS = frozenset({"agent", "gate", "api", "disk", "stopped", "clock", "names", "reinstall"})
"""Faults that an answer may wait for, or with which a record may go."""
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


class Impatient(Client):
    """Leaves when it has waited for as long as it wants to work."""

    def run(self) -> Steps:
        self.kernel.after(self.life.work, self.leave)
        return (yield from super().run())

    def leave(self) -> None:
        if self.life.waits:
            self.kernel.signal(self.process, 9)


trouble.PEOPLE = {**trouble.PEOPLE, "asking": Asking, "changing": Changing, "impatient": Impatient}
trouble.HOSTILE = trouble.HOSTILE | {"asking", "changing"}


@dataclass(frozen=True)
class Job(Guest):
    """A batch system gives it a lease of ``share`` (threads, GiB) for ``span`` seconds and starts it then; for all of
    its user, or for what descends from its step."""

    share: tuple[float, int] = (0.0, 0)
    span: float = 0.0
    all_of_user: bool = False


STARTS = 0.5
"""Seconds that a hand-over may take in which a server starts: with the limits that held before."""


@dataclass(eq=False)
class Lease:
    order: Order
    job: Job
    step: Process
    ended: Order | None = None

    def counts(self, life: Life, at: float, doubtful: bool) -> bool | None:
        """For who was let in then; None: it is not certain. ``doubtful``: somebody had died or was away."""
        if life.uid != self.job.uid if self.job.all_of_user else life.process.parent is not self.step:
            return False
        if at < self.order.at:
            return False
        before = max(life.knocked or at, at - STARTS)
        given = self.order.heard is not None and self.order.heard <= before and self.order.answer.get("in_force")
        over = float("inf") if self.ended is None else self.ended.at
        if given and at < min(self.order.at + self.job.span, over) - 0.5:  # the time begins before the answer
            return True
        return False if at > min((self.order.heard or at) + self.job.span, over) + 2.0 and not doubtful else None


class Administered(trouble.Troubled):
    """``ordered``: clients that were ordered to end, and when that was answered."""

    def __init__(self, plan: Day) -> None:
        super().__init__(plan)
        self.judges = Overseeing(self)
        self.ordered: dict[Life, float] = {}
        self.leases: list[Lease] = []
        self.beside: GuestLife | None = None
        """Who works at a control daemon of an administrator's own, started beside ours."""

    def comes(self, coming: Coming) -> None:
        if not isinstance(coming, Job):
            super().comes(coming)
            return
        kernel = self.kernel
        step = kernel.spawn("slurmstepd", 0, 0, kernel.init)
        kernel.program(step, _stays(kernel.now + coming.work + 300.0))
        whose = {"uid": coming.uid} if coming.all_of_user else {"pid": step.pid}
        threads, size = coming.share
        body = {
            "order": "lease",
            **whose,
            "active_threads": f"{threads:g}%",
            "memory_limit": f"{size}G",
            "until": f"{coming.span:g}s",
        }

        def given(order: Order) -> None:
            if order.lost:  # as a batch system does
                self.goes_on = max(self.goes_on, kernel.now + 2.0)
                kernel.after(1.0, lambda: self.leases.append(Lease(give(self, body, 0, given), coming, step)))
                return
            self.tell(f"a lease of {threads:g} % and {size}G for a job of user {coming.uid}: {order.status}")
            life = self.starts(coming, step)
            if coming.span > 100:
                life.process.on_end.append(lambda _: self.end_lease(order))

        self.leases.append(Lease(give(self, body, 0, given), coming, step))

    def end_lease(self, order: Order) -> None:
        if order.status == 200:
            ended = give(self, {"order": "delete-lease", "number": order.answer["id"]})
            next(one for one in self.leases if one.order is order).ended = ended

    def starts_daemon(self) -> None:
        """Another control daemon of root's, in a directory of its own, and a client there."""
        kernel = self.kernel
        for path in ("/srv", OWN, f"{OWN}/log"):
            if path not in kernel.nodes:
                kernel.make(path, 0o40755, 0, 0)
        self.tell("an administrator starts another control daemon")
        process = kernel.spawn("nvidia-cuda-mps-control", 0, 0, kernel.init)
        process.command = ["nvidia-cuda-mps-control", "-d"]
        process.environment = {"CUDA_MPS_PIPE_DIRECTORY": OWN, "CUDA_MPS_LOG_DIRECTORY": f"{OWN}/log"}
        kernel.program(process, Daemon(self, process, OWN, f"{OWN}/log", False).run())
        client = kernel.spawn("other", 2100, 2100, kernel.init)
        self.beside = GuestLife(client, 2100, 20.0)
        program = Client(self, self.beside)
        program.public = OWN
        kernel.after(1.0, kernel.program, client, program.run())

    def throw(self, fault: Fault) -> None:
        what, kernel = fault.what, self.kernel
        if what in ("full", "read-only", "torn", "slow"):
            self.tell(f"the disk is {what}" if what != "slow" else "threads take their time")
            self.judges.faults.append((kernel.now, "disk"))
            kernel.disk = what
            kernel.after(float(fault.call), self.mend)
        elif what == "drain":
            at = kernel.now
            self.order("a drain", {"order": "drain"}, lambda: self.is_drained(at), again=fault)
        elif what == "resume":
            self.drained, self.resumed = None, self.kernel.now
            self.order("resume", {"order": "resume"}, again=fault)
            self.judges.faults.append((kernel.now, "order"))
        elif what == "restart":
            self.judges.faults.append((kernel.now, "daemon"))
            self.order("a restart", {"order": "restart-mps", "timeout": float(fault.call) or None})
        elif what == "terminate":
            there = [one for one in self.judges.lives if one.works and one.honest and one not in self.ordered]
            if there:
                life = there[self.chance.randrange(len(there))]
                pid = life.process.pid
                body = {"order": "terminate", "pid": pid, "now": bool(fault.call)}
                end = lambda: self.ordered.setdefault(life, kernel.now)  # noqa: E731
                self.order(f"the end of client {pid}", body, end, self.chance.choice((0, life.uid)))
        elif what == "flood":
            self.tell(f"user {fault.call} floods the agent with orders")
            flood(self, fault.call, 25.0)
        elif what == "another daemon":
            self.starts_daemon()
        elif what == "slow api":
            self.judges.faults.append((kernel.now, "api"))
            self.tell("the api is slow")
            for one in self.who("api"):
                one.slow = self.chance.uniform(0.05, 1.5)
                kernel.after(float(fault.call), setattr, one, "slow", 0.0)
            kernel.after(float(fault.call), lambda: self.judges.faults.append((kernel.now, "api")))
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

    def is_drained(self, asked: float) -> None:
        if not any(one.what == "resume" and one.at > asked for one in self.orders):
            self.drained = self.kernel.now

    def order(
        self,
        text: str,
        body: dict[str, object],
        then: Callable[[], object] = lambda: None,
        by: int = 0,
        again: Fault | None = None,
    ) -> None:
        """``again``: what an administrator does once more if there is no answer, unless another order has come."""

        def over(order: Order) -> None:
            self.tell(f"{text} is {'lost with the agent' if order.lost else f'answered with {order.status}'}")
            if order.status == 200:
                then()
            elif order.lost and again is not None:
                self.kernel.after(1.0, once_more, order, again)

        def once_more(order: Order, fault: Fault) -> None:
            if not any(one.at > order.at for one in self.orders if one.what in ("drain", "resume")):
                self.throw(fault)

        self.tell(f"{text} is ordered by {by}")
        give(self, body, by, over)


def _stays(until: float) -> Steps:
    yield [], until


class Overseeing(trouble.Watchful):
    world: Administered

    def __post_init__(self) -> None:
        super().__post_init__()
        self.had: Counter[int] = Counter()
        """Seconds in which the GPU was a user's, and somebody else's turn was wanted."""

    def works(self, life: Life) -> None:
        leases, at = self.world.leases, life.given or 0.0
        if life is self.world.beside or not leases:
            if life is not self.world.beside:
                super().works(life)
            return
        doubtful = any(-5.0 < at - when < 60.0 for when, _ in self.faults)
        allowed, policy = [], self.day.limits[life.uid]
        for one in reversed(leases):
            counts = one.counts(life, at, doubtful)
            if counts is not False:
                allowed.append((min(policy[0], one.job.share[0]), min(policy[1], one.job.share[1] << 10)))
            if counts:
                break
        else:
            allowed.append(policy)
        if life.limits not in allowed and not self.forgotten(life):
            self.fail(f"client {life.process.pid} of user {life.uid} has {life.limits}, and its lease or policy says "
                      f"{' or '.join(map(str, allowed))}")  # fmt: skip

    def given(self, life: Life) -> None:
        since = self.world.drained
        if life is self.world.beside:
            return
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
        slow = max(
            [self.stopped, min(self.world.systemd.gone, now), *(at for at, kind in self.faults if kind in SLOWS)]
        )
        for what in wrong(self.world, slow, AT_ONCE if self.day.name == "flood" else ANSWERED):
            self.fail(what)
        for life, since in self.world.ordered.items():
            last = max([since, min(self.world.systemd.gone, now), *(at for at, _ in self.faults)])
            if life.process.alive and now - last > ENDS:
                self.fail(f"client {life.process.pid} of user {life.uid} was ordered to end {now - since:.0f} s ago")
        if self.day.name == "standing" and self.world.drained is not None and now - self.world.drained > STANDS:
            for one in self.lives:
                if one.works and one.process.stopped:
                    self.fail(f"client {one.process.pid} of user {one.uid} stands in a drain")
        wanted = {one.uid for one in self.lives if one.process.alive and one.knocked is not None}
        at_work = {one.uid for one in self.lives if one.works and not one.process.stopped}
        if len(wanted) == len(self.day.limits) and len(at_work) == 1:
            self.had.update(dict.fromkeys(at_work, LOOK))

    def at_the_end(self) -> None:
        super().at_the_end()
        if not any(kind in SLOWS for _, kind in self.faults):
            for what in unrecorded(self.world):
                self.fail(what)
        beside = self.world.beside
        if beside is not None and (beside.limits != (100.0, 0) or not beside.done):
            self.fail(f"who works at another control daemon had {beside.limits}, and saw {beside.error}")
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
        at, what = (
            chance.uniform(3, 50),
            chance.choice(("drain", "restart", "terminate", "terminate", "upgrade", "reload")),
        )
        faults.append(
            Fault(at, "agent", what, chance.choice((0, 2, 10)) if what == "restart" else chance.randint(0, 1))
        )
        if what == "drain":
            faults.append(Fault(at + chance.uniform(0.01, 25), "agent", "resume"))
    if chance.random() < 0.4:
        faults.append(Fault(chance.uniform(3, 60), chance.choice(("gate", "agent", "daemon")), "kill", 0))
    if chance.random() < 0.2:
        faults.append(Fault(chance.uniform(3, 20), "machine", "another daemon"))
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
    what, at = chance.choice(("full", "read-only", "torn", "slow", "slow", "slow api")), chance.uniform(3, 30)
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
    pause = f'[turn]\non_expiry = "pause"\npause_slice = "{slice_}s"\ntime_limit = "1h"\n'
    return Day(seed, "shared", tuple(comings), (), {uid: LIMITS[uid] for uid in users}, name="shares", more=pause,
               after=float(slice_), over=900.0, quiet=True, preempt=0.0)  # fmt: skip


def batch(chance: random.Random, seed: int) -> Day:
    """Jobs with leases beside programs without, while agent or gate die."""
    users, way = (
        chance.sample(sorted(LIMITS), chance.randint(1, 3)),
        chance.choice(("own", "shared", "together", "apart")),
    )
    comings: list[Guest] = [Guest(2 + chance.uniform(0, 40), chance.choice(users), chance.uniform(0.2, 5))
                            for _ in range(chance.randint(0, 8))]  # fmt: skip
    for _ in range(chance.randint(2, 8)):
        share = (float(chance.choice((10, 15, 25, 90))), chance.randint(1, 8))
        at, uid, span = 2 + chance.uniform(0, 40), chance.choice(users), chance.choice((5.0, 15.0, 500.0))
        comings.append(Job(at, uid, chance.uniform(0.2, 8), chance.choice((1, 2)), share=share, span=span,
                           all_of_user=chance.random() < 0.3))  # fmt: skip
    faults = [Fault(chance.uniform(3, 45), chance.choice(("gate", "agent", "daemon")), "kill")
              for _ in range(chance.choice((0, 0, 1, 2)))]  # fmt: skip
    return Day(seed, way, tuple(comings), tuple(faults), LIMITS, name="batch", quiet=True, calm=0.0,
               waits=60.0 + SERVED, preempt=chance.choice((0.0, 0.02)), until=600.0)  # fmt: skip


def flooded(chance: random.Random, seed: int) -> Day:
    """A user, or two, give the agent orders without end; root's are answered as usual, and clients served."""
    bad, *users = chance.sample(sorted(LIMITS), chance.randint(2, 4))
    comings = [Guest(2 + chance.uniform(0, 25), chance.choice(users), chance.uniform(0.2, 5)) for _ in range(12)]
    faults = [Fault(3.0 + place, "user", "flood", uid) for place, uid in enumerate((bad, 2999)[: chance.randint(1, 2)])]
    faults += [Fault(chance.uniform(4, 28), "agent", chance.choice(("terminate", "terminate", "reload")))
               for _ in range(6)]  # fmt: skip
    return Day(seed, chance.choice(("own", "shared", "together")), tuple(comings), tuple(faults), LIMITS, ends=True,
               name="flood", quiet=True, calm=0.0, waits=60.0 + SERVED, preempt=0.0, until=400.0)  # fmt: skip


def standing(chance: random.Random, seed: int) -> Day:
    """A drain while users are paused: all work is to end, so theirs goes on."""
    users = chance.sample(sorted(LIMITS), chance.randint(2, 3))
    comings = [Guest(2.0 + place, uid, chance.uniform(20, 50)) for place, uid in enumerate(users)]
    at = chance.uniform(10, 30)
    faults = Fault(at, "agent", "drain"), Fault(at + chance.uniform(8, 25), "agent", "resume")
    pause = '[turn]\non_expiry = "pause"\npause_slice = "4s"\ntime_limit = "1h"\n'
    return Day(seed, "shared", tuple(comings), faults, LIMITS, name="standing", more=pause, quiet=True, calm=0.0,
               overlap=60.0, preempt=chance.choice((0.0, 0.02)), until=400.0)  # fmt: skip


def recalled(chance: random.Random, seed: int) -> Day:
    """Who waits leaves while the others are being paused, which a hand-over holds up; then another one comes."""
    first, leaves, last = chance.sample(sorted(LIMITS), 3)
    comings = [Guest(2.0, first, 80.0), Guest(4.0, leaves, chance.uniform(2.5, 5.5), 1, "impatient"),
               Guest(chance.uniform(5.0, 5.9), first, 5.0, 1, "liar"), Guest(20.0, last, 1.0)]  # fmt: skip
    pause = '[turn]\non_expiry = "pause"\npause_slice = "4s"\ntime_limit = "1h"\n'
    return Day(seed, "shared", tuple(comings), (), LIMITS, name="recalled", more=pause, quiet=True, calm=0.0,
               waits=15.0, overlap=8.0, preempt=chance.choice((0.0, 0.02)), until=400.0)  # fmt: skip


DAYS = {
    "orders": orders,
    "ailing": ailing,
    "shares": shares,
    "batch": batch,
    "flood": flooded,
    "standing": standing,
    "recalled": recalled,
}


def draw(seed: int, days: tuple[str, ...] = tuple(DAYS)) -> Day:
    name = sorted(days)[seed % len(days)]
    if name == "shares" and len(days) > 1 and seed // len(days) % 4:  # it takes as long as several others
        name = "orders"
    return DAYS[name](random.Random(f"{name} {seed}"), seed)


if __name__ == "__main__":
    sys.exit(trouble.main(tuple(DAYS), draw, Administered))  # type: ignore[arg-type]
