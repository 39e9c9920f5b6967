"""Days with the habits of users, administrators and machines that a short life does not show.

Programs make further contexts after gate or agent have died, and their memory grows. Reloads lower and raise limits.
Jobs have leases and cgroups. Hooks and warnings precede an end, and the agent is killed meanwhile. Gate and agent are
removed and installed again. The name service is slow. Launchers make no context. Programs start just after another one
was killed. `python -m tests.world.habits --day kept` plays one of these days.

The judges know what the policy allows at each moment: the limits of every context, the reasons to end a client. Unknown
limits may be shown as unknown, and no end may follow from them.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from signal import SIGKILL, SIGTERM
from typing import Any

from mpsagent.policy.identity import Identity
from mpsagent.system.spawn import Ended
from tests.world import doors, trouble
from tests.world.administrator import Administered, Job, Overseeing
from tests.world.judges import SETTLES, Judges
from tests.world.kernel import EPOCH, Notices, Process
from tests.world.mps import End, is_context
from tests.world.orders import Order, give
from tests.world.people import Client, Life, Steps
from tests.world.plans import LIMITS
from tests.world.shown import sessions
from tests.world.trouble import Day, Guest, GuestLife
from tests.world.world import STATE, Fault, _Telling

WARNING = 10
"""SIGUSR1."""
HOOK = 6.0
"""Seconds that the hook before an end may take."""
AFTER_DEATHS = (0.0, 0.001, 0.01, 0.1, 0.5, 2.0, 6.0)
"""Seconds after a death of gate or agent in which a program makes a further context."""
APPLIED = 3.0
"""Seconds until a reload that was answered holds for each hand-over, without deaths; ``DOUBTFUL`` with them."""
DOUBTFUL = 25.0
ALLOWANCE = 128
"""MiB beyond its limit from which a client may be ended for it, after ``BEYOND`` seconds."""
BEYOND, ENDED_BEYOND = 8.0, 40.0
PROMPT = 6.0
"""Seconds after a slow name service has become quick in which users may still be shown by number."""
ANSWERS = 4.5
"""Seconds that MPS had at least to end a client before it is signalled all the same: `ladder.TERMINATE` is 5 s."""
WRITTEN = 0.015
"""Seconds until a warning is in the state file. If the agent is killed before that, the next agent knows nothing of the
warning and sends it again: a client without a warning would lose its work."""
LAST = 1.0
"""Seconds before a turn's end in which no client of its user is admitted."""
RANKS = 20.0
"""Seconds in which all processes of a launcher are at work."""
LEFT = 0.05
"""Seconds after a client's death in a kernel from which on no client comes to its server before its fault is known."""
NOTICED = 0.3
"""Seconds in which a server notices it."""
Limits = tuple[float, int]


# --- plans and people ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comes(Guest):
    """``cgroup``: of a section of the policy; ``ranks``: of a launcher."""

    cgroup: int = 0
    ranks: int = 0


@dataclass(frozen=True)
class Habit(Day):
    """``runtime``: max_runtime by user; ``grace``: between warning and end; ``hook``: before an end; ``cgroups``:
    limits of sections, by number; ``late``: seconds that the name service takes after the agent's start;
    ``arrivals``: others start just after a client is killed."""

    runtime: tuple[tuple[int, float], ...] = ()
    grace: float = 0.0
    hook: bool = False
    cgroups: tuple[tuple[int, Limits], ...] = ()
    late: float = 0.0
    arrivals: bool = False
    enforced: bool = True

    def text(self, more: str) -> str:
        text = super().text(more)
        for uid, seconds in self.runtime:
            head = f"[user.{f'u{uid}' if self.by_name else uid}]\n"
            text = text.replace(head, f'{head}max_runtime = "{seconds:g}s"\n')
        for number, (threads, memory) in self.cgroups:
            name = f"/user.slice/user-{number}.slice"
            text += f'[cgroup."{name}"]\nactive_threads = "{threads:g}%"\nmemory_limit = "{memory}M"\n'
        text += f'[hooks]\npre_terminate = "/usr/sbin/save"\ntimeout = "{HOOK:g}s"\n' if self.hook else ""
        return text if self.enforced else f"mode = 'report'\n{text}"


@dataclass(slots=True, eq=False)
class Habits(GuestLife):
    """``had``: the limits of each hand-over; ``beyond``: since when it uses too much memory; ``asked_at``: since when
    MPS is asked to end it; ``why``: why it may be ended; ``reason``: the same when its last hook began; ``hooks``: when
    each run of its hook began and ended."""

    coming: Guest | None = None
    had: list[Limits] = field(default_factory=list)
    beyond: float | None = None
    asked_at: float | None = None
    signalled: float | None = None
    why: str = ""
    warnings: list[float] = field(default_factory=list)
    hooks: list[list[float]] = field(default_factory=list)
    ranks: list[Habits] = field(default_factory=list)
    in_kernel: bool = False
    killed: bool = False
    reason: str = ""


class Worker(Client):
    """Computes with memory that grows to its limit, and makes a further context now and then. It saves its work when it
    is warned, and goes on."""

    world: Lived
    life: Habits
    most = (0.3, 1.0)

    def __init__(self, world: Lived, life: Habits, contexts: int = 1) -> None:
        super().__init__(world, life, contexts)
        self.bell = Notices(self.kernel)
        self.part = world.chance.uniform(*self.most)
        self.every = world.chance.choice((3.0, 20.0, 1000.0))
        self.meeting = False

    def rings(self) -> None:
        """It makes a context as soon as it can."""
        self.bell.touched = True
        self.bell.changed()

    def work(self, contexts: list[End]) -> Steps:
        life, kernel, chance = self.life, self.kernel, self.world.chance
        until, again = kernel.now + life.work, kernel.now + chance.expovariate(1 / self.every)
        while kernel.now < until:
            self.grow()
            self.says(contexts, b"KERNEL" if not life.in_kernel else b"IDLE")
            pause = min(until, again, kernel.now + chance.uniform(0.2, 3.0))
            if not (yield from self.wait(contexts, pause)):
                break
            if self.bell.touched or kernel.now >= again:
                self.bell.touched, again = False, kernel.now + chance.expovariate(1 / self.every)
                self.says(contexts, b"IDLE")
                if not (yield from self.further(contexts)):
                    break
        else:
            life.done = True
        self.says(contexts, b"IDLE")

    def says(self, contexts: list[End], what: bytes) -> None:
        self.life.in_kernel = what == b"KERNEL"
        contexts[0].say(what)

    def grow(self) -> None:
        life = self.life
        (kind, size), most = self.world.uses[self.process.pid], (life.limits or (0.0, 0))[1]
        goal = int((most or 8192) * self.part)
        self.world.uses[self.process.pid] = kind, max(size, min(goal, size + max(64, goal // 6)))

    def wait(self, contexts: list[End], until: float) -> Any:
        """It is woken by its bell, too."""
        life = self.life
        while self.kernel.now < until and not self.bell.touched:
            yield [*(one.file for one in contexts), self.bell], until
            self.hear(contexts)
            if life.error is not None:
                return False
        self.process.busy += 0.5
        return True

    def hear(self, contexts: list[End]) -> None:
        life = self.life
        for one in contexts:
            one.file.reset = False
            while one.file.messages:
                said = one.file.next().data
                if said == b"TERMINATE":
                    one.say(b"TERMINATED")
                    life.asked, life.error = True, life.error or "terminated"
                elif said == b"STICKY":
                    life.error = life.error or "700"
            if one.over:
                life.error = life.error or "806"

    def greet(self, server: End, number: int) -> Any:
        self.meeting = True
        found = yield from super().greet(server, number)
        self.meeting = False
        return found

    def further(self, contexts: list[End]) -> Any:
        """Another context; of four the second is given up. It hears its server meanwhile."""
        number = 1 + max([len(contexts), *range(len(contexts))])
        steps = self.meet(number + 1)
        made = None
        try:
            files, until = next(steps)
            while True:
                yield [*files, *(one.file for one in contexts)], until
                self.hear(contexts)
                if self.life.error is not None and not self.meeting:
                    steps.close()
                    return False
                if any(one.readable() for one in files) or (until is not None and self.kernel.now >= until):
                    files, until = steps.send(None)
        except StopIteration as end:
            made = end.value
        if made is None or self.life.error is not None:
            return False
        answer = yield from made.hear()
        if not is_context(answer):
            self.life.error = self.life.error or "806"
            return False
        contexts.append(made)
        if len(contexts) > 3:
            contexts.pop(1).close()
        return self.life.error is None


class Greedy(Worker):
    """Uses more memory than its limit, which its environment has lifted."""

    most = (1.4, 2.0)

    def grow(self) -> None:
        super().grow()
        life, (_, size) = self.life, self.world.uses[self.process.pid]
        if life.beyond is None and life.limits is not None and 0 < life.limits[1] + ALLOWANCE < size:
            life.beyond = self.kernel.now


class Clinging(Worker):
    """Keeps its contexts for a while after an error, as a notebook does."""

    def work(self, contexts: list[End]) -> Steps:
        yield from super().work(contexts)
        if self.life.error == "700":
            yield [], self.kernel.now + self.world.chance.uniform(0.0, 10.0)


class Launcher(Client):
    """Asks CUDA for its devices and makes no context; its processes do. It ends after them."""

    world: Lived
    life: Habits

    def live(self) -> Steps:
        probe = yield from self.connect()
        if probe is None or (yield from probe.hear()) is None:
            self.life.error = "805"
            return
        probe.close()
        self.channel = yield from self.meet(0)
        if self.channel is None or (yield from self.channel.hear()) is None:
            self.life.error = self.life.error or "806"
            return
        coming = self.life.coming
        assert isinstance(coming, Comes)
        rank = replace(coming, kind="worker", ranks=0)
        for _ in range(coming.ranks):
            self.life.ranks.append(self.world.starts(rank, self.process))
        while any(one.process.alive for one in self.life.ranks):
            yield [], self.kernel.now + 0.25
        self.life.over, self.life.done = self.kernel.now, True
        self.channel.close()
        yield [], self.kernel.now + 0.01


trouble.PEOPLE = {**trouble.PEOPLE, "worker": Worker, "greedy": Greedy, "clinging": Clinging, "launcher": Launcher}
trouble.HOSTILE = trouble.HOSTILE | {"greedy"}
trouble.STEADY = trouble.STEADY | {"worker", "clinging", "launcher"}


# --- the world -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class InForce:
    """A policy's limits, since when they may hold, and the order that was answered."""

    at: float
    limits: dict[int, Limits]
    order: Order | None = None


class Lived(Administered):
    plan: Habit

    def __init__(self, plan: Habit) -> None:
        super().__init__(plan)
        self.judges = Living(self)
        self.policies = [InForce(0.0, dict(plan.limits))]
        self.workers: dict[Life, Worker] = {}
        self.slow_names = 0.0
        """Until then the name service is slow."""
        self.removed: list[tuple[float, bool]] = []
        """When gate and agent were removed, and whether the state file was kept."""

    # --- people

    def starts(self, coming: Any, parent: Process) -> Habits:
        kernel = self.kernel
        process = kernel.spawn("python", coming.uid, coming.uid, parent)
        process.slice = getattr(coming, "cgroup", 0) or coming.uid
        kind = coming.kind if coming.kind != "honest" or not isinstance(coming, Job) else "worker"
        life = Habits(process, coming.uid, coming.work, honest=kind not in trouble.HOSTILE, kind=kind, coming=coming)
        process.handlers[WARNING] = lambda: life.warnings.append(kernel.now)
        self.judges.lives.append(life)
        client = trouble.PEOPLE[kind](self, life, coming.contexts)
        if isinstance(client, Worker):
            self.workers[life] = client
        process.on_end.append(lambda _: self.judges.gone(life))
        kernel.program(process, client.run())
        self.tell(f"client {process.pid} ({kind}) of user {coming.uid} comes, {coming.work:.1f} s of work")
        return life

    def strike(self, process: Process, fault: Fault) -> None:
        life = next((one for one in self.judges.lives if one.process is process), None)
        if life is not None and life.in_kernel and fault.what == "kill":
            life.killed = True
            self.judges.killed.append((self.kernel.now, self.judges.server(process.pid)))
        super().strike(process, fault)
        if fault.who in ("gate", "agent"):
            self.ring()
        elif self.plan.arrivals and life is not None:
            for _ in range(self.chance.randint(1, 3)):
                uid = self.chance.choice((process.uid, self.chance.choice(sorted(self.plan.limits))))
                self.kernel.after(
                    self.chance.uniform(0.0, self.chance.choice((0.2, 1.0))),
                    self.comes,
                    Comes(0.0, uid, 2.0, kind="worker"),
                )

    def ring(self) -> None:
        """Some programs make a context soon after a death."""
        for life, one in self.workers.items():
            if life.process.alive and self.chance.random() < 0.5:
                self.kernel.after(self.chance.choice(AFTER_DEATHS) * self.chance.uniform(0.5, 1.5), one.rings)

    # --- what happens

    def throw(self, fault: Fault) -> None:
        if fault.what == "limits":
            self.reloads(fault.call)
        elif fault.what == "removed":
            self.removes(fault.call % 100, kept=fault.call < 100)
        else:
            super().throw(fault)

    def reloads(self, percent: int) -> None:
        """The policy has other limits from now on: so many percent of the first ones; with 0 it enforces nothing."""
        limits = {uid: (threads, max(1024, memory * percent // 100 >> 10 << 10)) for uid, (threads, memory)
                  in self.plan.limits.items()}  # fmt: skip
        plan = replace(self.plan, limits=limits if percent else self.plan.limits, enforced=percent > 0)
        one = InForce(self.kernel.now, limits if percent else dict.fromkeys(limits, (100.0, 0)))
        self.policies.append(one)
        self.kernel.nodes["/etc/mpsagent/policy.toml"].data[:] = plan.policy.encode()
        self.tell(f"the policy has {percent} % of the memory" if percent else "the policy enforces nothing")

        def answered(order: Order) -> None:
            if order.lost:
                self.kernel.after(1.0, again)

        def again() -> None:
            one.order = give(self, {"order": "reload"}, 0, answered)

        again()

    def removes(self, seconds: int, *, kept: bool) -> None:
        """Gate and agent are stopped for a while: systemd keeps no descriptor of a unit that was stopped."""
        if self.kernel.now < self.systemd.gone:
            return  # they are not there yet
        self.tell(f"gate and agent are removed for {seconds} s, the state file {'stays' if kept else 'goes'}")
        self.removed.append((self.kernel.now, kept))
        systemd = self.systemd
        systemd.away = self.kernel.now + seconds
        systemd.gone = self.kernel.now + seconds
        for who in ("agent", "gate"):
            for one in self.who(who):
                self.judges.faults.append((self.kernel.now, who))
                self.kernel.signal(one, 15)
                self.kernel.signal(one, 9)
        for name in list(systemd.stored):
            systemd.drop(name)
        if not kept and f"{STATE}/state.json" in self.kernel.nodes:
            self.kernel.remove(f"{STATE}/state.json")
        self.ring()
        self.kernel.after(seconds, lambda: self.judges.faults.append((self.kernel.now, "agent")))

    def run_agent(self, orders: list[int]) -> None:
        late = self.plan.late * self.chance.random()
        self.slow_names = self.kernel.now + late
        super().run_agent(orders)

    def others(self) -> dict[tuple[str, str], Any]:
        found = super().others()
        found["mpsagent.agent.executor", "run_hook"] = self.hook
        found["mpsagent.agent.journaling", "log"] = _Named(self)
        for key in [one for one in found if one[0] == "mpsagent.system.names"]:
            del found[key]
        found["mpsagent.system.names", "identity_of"] = lambda uid: Identity(uid, f"u{uid}")
        if self.plan.late:
            found["mpsagent.system.names", "in_thread"] = self.name
        return found

    async def name(
        self, function: Callable[..., Any], *arguments: object, deadline: float, slots: object = None
    ) -> Any:
        await asyncio.sleep(max(0.0, self.slow_names - self.kernel.now))
        return await doors.in_thread(function, *arguments, deadline=deadline, slots=slots)

    async def hook(self, program: str, subject: dict[str, Any], *, deadline: float) -> Ended:
        """Saves the work of a client, in time or not; the agent may be killed meanwhile."""
        run = [self.kernel.now, float("inf")]
        for life in self.judges.lives:
            if life.process.pid == subject.get("pid") and life.process.alive:
                life.hooks.append(run)
                life.reason = next(self.judges.reasons(life), "")
        takes = deadline * self.chance.uniform(0.1, 1.2)
        if self.chance.random() < 0.4:
            for one in self.who("agent"):
                self.kernel.after(takes * self.chance.random(), self.strike, one, Fault(0.0, "agent"))
        await asyncio.sleep(min(takes, deadline))
        run[1] = self.kernel.now
        return Ended(0)


class _Named(_Telling):
    """The agent's sentences name users."""

    _world: Lived

    def info(self, kind: str, **fields: Any) -> None:
        super().info(kind, **fields)
        if self._world.kernel.current.alive:
            self._world.judges.reads(str(fields.get("sentence") or ""))

    warning = error = info


# --- judges ----------------------------------------------------------------------------------------------------------


class Living(Overseeing):
    world: Lived
    lives: list[Habits]  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._read: tuple[Any, int] = (None, 0)
        self._last = 0.0
        self._looked = 0.0
        self.killed: list[tuple[float, Process | None]] = []
        """When a client was killed in a kernel, and its server."""

    def server(self, pid: int) -> Process | None:
        return self._server.get(pid)

    def life(self, pid: int) -> Habits | None:
        return next((one for one in reversed(self.lives) if one.process.pid == pid), None)

    @property
    def now(self) -> float:
        return self.world.kernel.now

    @property
    def forgot(self) -> bool:
        """The state file was lost, too: the history ends clients until MPS has listed them (a known limit)."""
        return not all(kept for _, kept in self.world.removed)

    def near(self, seconds: float, *kinds: str) -> bool:
        return any(self.now - at < seconds for at, kind in self.faults if not kinds or kind in kinds)

    # --- limits

    def works(self, life: Life) -> None:
        assert isinstance(life, Habits)
        if life.limits is not None:
            self._limits(life, life.limits, "")

    def context(self, pid: int, limits: Limits) -> None:
        life = self.life(pid)
        if life is not None:
            self._limits(life, limits, f" at its context {len(life.had)}" if life.had else "")

    def _limits(self, life: Habits, limits: Limits, where: str) -> None:
        """The policy in force at the hand-over, lowered by the cgroup or the lease; a process keeps what it had."""
        allowed = [one for policy in self._policies(life.uid) for one in self._lowered(life, policy)]
        allowed += life.had[:1]
        if limits not in allowed and not self.forgotten(life):
            what = " or ".join(map(str, dict.fromkeys(allowed)))
            self.fail(f"client {life.process.pid} of user {life.uid} has {limits}{where}, and the policy says {what}")
        life.had.append(limits)

    def _policies(self, uid: int) -> Iterator[Limits]:
        """Those that may be in force."""
        for one in reversed(self.world.policies):
            yield one.limits[uid]
            order = one.order
            if order is None or order.heard is None:
                continue
            doubtful = any(order.at - 1.0 < at < order.heard + APPLIED for at, _ in self.faults)
            if self.now > order.heard + (DOUBTFUL if doubtful else APPLIED):
                return

    def _lowered(self, life: Habits, policy: Limits) -> Iterator[Limits]:
        coming, shares = life.coming, dict(self.world.plan.cgroups)
        if policy == (100.0, 0):
            yield policy
            return
        doubtful = any(-5.0 < self.now - at < 60.0 for at, _ in self.faults)
        since = life.given or self.now
        lost = any(not kept and at > since for at, kept in self.world.removed)
        for one in reversed(self.world.leases):
            counts = one.counts(life, since, doubtful)
            # no process knows the limits of its first context: the next one gets those of today
            if counts is not False or (lost and one.counts(life, self.now, doubtful) is not False):
                yield min(policy[0], one.job.share[0]), min(policy[1], one.job.share[1] << 10)
            if counts and all(kept for _, kept in self.world.removed):
                return
        share = shares.get(getattr(coming, "cgroup", 0), policy)
        yield min(policy[0], share[0]), min(policy[1], share[1])

    def limits_of(self, life: Life) -> list[Limits | None]:
        """Unknown limits are shown as unknown where gate and agent were removed."""
        assert isinstance(life, Habits)
        return [life.limits, *life.had, *([None] if self.world.removed else [])]

    def given(self, life: Life) -> None:
        since = self.world.drained
        if since is not None and self.now - since > 7.0 and life.honest:
            self.fail(f"client {life.process.pid} of user {life.uid} is let in in a drain")

    # --- ends

    def to_end(self, pid: int) -> None:
        life = self.life(pid)
        if life is not None:
            self._ends(life)
            life.asked_at = life.asked_at or self.now

    def signalled(self, process: Process, number: int) -> None:
        super().signalled(process, number)
        life = next((one for one in self.lives if one.process is process), None)
        if life is None:
            return
        last = life.warnings[-1] if life.warnings else float("-inf")
        unwritten = any(kind == "agent" and last <= at < last + WRITTEN for at, kind in self.faults)
        again = self.now - last < self.world.plan.grace and not unwritten
        if number == WARNING and again and last >= self.world.resumed:  # a drain puts the end off
            self.fail(f"client {process.pid} is warned twice within {self.now - last:.1f} s")
        if number in (9, 15):
            self._ends(life)
            life.signalled = life.signalled or self.now

    def _ends(self, life: Habits) -> None:
        """A client that works is ended by a rule of the policy, behind its hook and its warning."""
        if life.why or life.error is not None or life.over is not None or not self.served(life):
            return
        begun = bool(life.hooks) and self.now - life.hooks[-1][0] < 2 * SETTLES  # goes on after a reinstallation
        life.why = next(self.reasons(life), life.reason if begun else "")
        what = f"client {life.process.pid} of user {life.uid}"
        if not life.why:
            used, limits = self.world.uses.get(life.process.pid, ("", 0))[1], life.limits
            self.fail(f"{what} is ended, uses {used} MiB of {limits}, and no rule applies")
            return
        if self.world.plan.hook and life.works and life.why != "order":
            first = min((began for began, _ in life.hooks), default=None)
            if first is None:
                self.fail(f"{what} is ended without its hook")
            elif self.now < first + HOOK - 0.1 and not any(over <= self.now for _, over in life.hooks):
                self.fail(f"{what} is ended {self.now - first:.1f} s after its hook began, which has not ended")
        if life.why == "turn" and life.worked is not None:
            self._turn_ends(life, what, self.now - (life.given or 0.0), self.world.plan.grace)

    def _turn_ends(self, life: Habits, what: str, worked: float, grace: float) -> None:
        begun = any(one.why == "turn" and one.uid == life.uid and self.now - (one.asked_at or 0.0) < SETTLES
                    for one in self.lives if one is not life)  # fmt: skip
        latest = grace + (SETTLES if begun or self.near(SETTLES, "agent", "gate") else 2.0 + HOOK)
        warned = any(grace - 0.5 < self.now - at < latest for at in life.warnings)
        if worked > grace + 1.0 and not warned:
            self.fail(f"{what} is ended at its turn's end, and was warned at {life.warnings}")
        if worked < LAST and not self.near(SETTLES):
            self.fail(f"{what} was admitted {worked:.2f} s before its turn's end")

    def reasons(self, life: Habits) -> Iterator[str]:
        plan, now = self.world.plan, self.now
        if any(one.what == "terminate" and one.body.get("pid") == life.process.pid for one in self.world.orders):
            yield "order"
        if life.limits == (0.0, 0):
            yield "on_limit_exceeded"  # its server was killed as it came: MPS has forgotten its limits
        if any(now - (life.given or now) > seconds - 0.5 for uid, seconds in plan.runtime if uid == life.uid):
            yield "max_runtime"
        if life.beyond is not None and now - life.beyond > BEYOND:
            yield "on_limit_exceeded"
        if plan.turns and plan.after is not None:
            latest = now - plan.after + 0.5
            others = (one for one in self.lives if one.uid != life.uid and one.knocked is not None)
            if any((one.knocked or now) < latest and (one.waits or (one.given or one.left or 0.0) > now - plan.after)
                   for one in others):  # fmt: skip
                yield "turn"

    def harmed(self, culprit: int, pids: set[int]) -> None:
        """No neighbour loses its work by an end of ours, where MPS could be asked. A client that somebody else kills in
        that moment is not ended by us."""
        life = self.life(culprit)
        if life is None or life.signalled is None or life.killed or not pids - {culprit}:
            return
        if self.near(SETTLES, "daemon", "server", "stopped"):
            return
        if life.asked_at is None or (life.error is None and life.signalled - life.asked_at < ANSWERS):
            asked = "MPS was not asked" if life.asked_at is None else f"MPS was asked at {life.asked_at - 1000:.2f}"
            who = ", ".join(map(str, sorted(pids - {culprit})))
            self.fail(f"clients {who} lose their work by the end of client {culprit}: {asked}")

    def ended(self, life: Life) -> None:
        assert isinstance(life, Habits)
        life.inside = False
        if not life.honest or life.error == "terminated" or life.why:
            return
        if any(self.now - at < SETTLES for at, _ in self.world.removed):
            return
        Judges.ended(self, life)
        given = life.given or 0.0
        for at, server in self.killed:
            late = self.near(SETTLES, "gate", "agent", "daemon", "server", "stopped")
            if life.error and at + LEFT < given < at + NOTICED and server is self.server(life.process.pid) and not late:
                self.fail(
                    f"client {life.process.pid} is admitted {given - at:.2f} s after another one's death, and lost"
                )

    # --- what people read

    def reads(self, text: str) -> None:
        """A user whom the name service knows is shown by name."""
        world = self.world
        found = re.search(r"\b(user|uid) (\d+)\b", text)
        late = world.plan.late and self.now < world.slow_names + PROMPT
        if found is not None and int(found[2]) in LIMITS and not late and not world.silent:
            self.fail(f"a user is shown by number: {text[:160]}")

    def look(self) -> None:
        super().look()
        world = self.world
        if world.shown is None or world.received.page is None:
            return
        if world.received is not self._read[0]:
            self._read = world.received, 0
        for record in world.received.history.since(self._read[1], 10_000):
            self._read = world.received, int(record["seq"])  # type: ignore[call-overload]
            self._record(record)
        for life in self.lives:
            beyond = life.process.alive and self.now - (life.beyond or self.now) > ENDED_BEYOND
            if beyond and not self.near(ENDED_BEYOND) and not self._unknown():
                self.fail(f"client {life.process.pid} is beyond its limit for {self.now - life.beyond:.0f} s")
            self._ranks(life)
        if self.now > self._looked + 5.0 and world.received.old is None:
            self._looked = self.now
            for text in _texts([world.shown.status(), *world.shown.queue()]):
                self.reads(text)

    def _unknown(self) -> bool:
        return bool(self.world.removed) or len(self.world.policies) > 1

    def _ranks(self, life: Habits) -> None:
        """A launcher without a context takes no share of its processes'."""
        waits = [one for one in life.ranks if one.waits and self.now - (one.knocked or self.now) > RANKS]
        if waits and not self.near(RANKS):
            others = [one for one in self.lives if one.works and one.uid == life.uid and one not in life.ranks]
            if not others and not (
                self.world.plan.turns and any(one.works for one in self.lives if one.uid != life.uid)
            ):
                self.fail(
                    f"process {waits[0].process.pid} of launcher {life.process.pid} waits, and no other has its place"
                )

    def _record(self, record: dict[str, object]) -> None:
        at, kind, pid = float(record["at"]) - EPOCH, record["kind"], record.get("pid")  # type: ignore[arg-type]
        unseen = any(0.0 <= at - (begun - 1000.0) < SETTLES for begun, _ in self.world.removed)  # found in a log later
        early = kind in ("client.waiting", "client.connected") and self.near(SETTLES)
        if at < self._last - 1.0 and not early and not unseen:
            self.fail(f"on record behind {self._last:.2f}: {kind} at {at:.2f}")
        self._last = max(self._last, at)
        life = self.life(pid) if isinstance(pid, int) else None
        if life is None:
            return
        if kind == "client.ended" and life.works and self.served(life) and life.error is None and not self.forgot:
            self.fail(f"client {pid} of user {life.uid} works, and is on record as ended")
        if kind == "bypass" and life.given is not None and life.process.alive:
            self.fail(f"client {pid} of user {life.uid} is on record as outside MPS")

    def at_the_end(self) -> None:
        super().at_the_end()
        records = self.world.received.history.since(0, 100_000)
        if len(records) >= 10_000:
            return
        counted = Counter((one.pid, one.uid) for one in sessions(records) if one.kind == "client" and one.passed)
        lives = Counter((one.process.pid, one.uid) for one in self.lives if one.knocked is not None)
        for (pid, uid), count in counted.items():
            if (
                count > lives[pid, uid]
                and uid in self.world.plan.limits
                and not (self._comes_again(pid) or self.forgot)
            ):
                self.fail(f"process {pid} of user {uid} is counted {count} times")
        found = {(one.pid, one.uid): one for one in sessions(records) if one.kind == "client"}
        for life in self.lives:
            one = found.get((life.process.pid, life.uid))
            if one is None or lives[one.pid, one.uid or 0] > 1 or self.world.removed or life.worked is None:
                continue
            if life.error == "700" and one.outcome == "ok":
                self.fail(f"client {one.pid} ended with an error of its server, and is on record as ok")
            signalled = life.process.status in (-SIGTERM, -SIGKILL)  # its work was done, and it had not left yet
            if life.warnings and life.done and not life.why and not signalled and one.outcome == "ended":
                self.fail(f"client {one.pid} was warned, ended by itself, and is on record as ended")

    def _comes_again(self, pid: int) -> bool:
        """It leaves its server and comes again; or its server ended between its channel and its first context, while
        the gate held it: then it has left, and is let in once more."""
        return any(
            one.kind == "returning"
            or any(
                kind in ("daemon", "server") and (one.given or at) < at < (one.worked or one.left or self.now)
                for at, kind in self.faults
            )
            for one in self.lives if one.process.pid == pid
        )  # fmt: skip


def _texts(what: Any) -> Iterator[str]:
    if isinstance(what, str):
        yield what
    elif isinstance(what, dict):
        for one in what.values():
            yield from _texts(one)
    elif isinstance(what, list | tuple):
        for one in what:
            yield from _texts(one)


# --- days ------------------------------------------------------------------------------------------------------------

WAYS = ("own", "shared", "together", "apart")


def _workers(chance: random.Random, users: list[int], count: int, longest: float = 60.0) -> list[Guest]:
    return [Comes(2 + chance.uniform(0, 25), chance.choice(users), chance.uniform(2, longest), kind="worker")
            for _ in range(count)]  # fmt: skip


def _deaths(chance: random.Random, count: int, who: tuple[str, ...] = ("gate", "agent")) -> list[Fault]:
    found = []
    for _ in range(count):
        one = chance.choice(who)
        call = chance.randint(1, 120) if chance.random() < 0.4 else 0
        found.append(Fault(chance.uniform(4, 45), one, "kill", call))
        if chance.random() < 0.4:  # and the other one soon after
            found.append(Fault(found[-1].at + chance.choice((0.0, 0.05, 1.0)) * chance.random(), chance.choice(who)))
    return found


def _day(chance: random.Random, seed: int, name: str, way: str, comings: list[Any], faults: list[Fault],
         **more: Any) -> Habit:  # fmt: skip
    given = {"ends": True, "quiet": True, "waits": None, "calm": 0.0, "until": 400.0, "limits": LIMITS,
             "late": chance.choice((0.0, 0.0, 0.3, 8.0)),
        "by_name": chance.random() < 0.7, "preempt": chance.choice((0.0, 0.02)), **more}  # fmt: skip
    return Habit(seed, way, tuple(comings), tuple(sorted(faults, key=lambda one: one.at)), name=name, **given)


def kept(chance: random.Random, seed: int) -> Habit:
    """Further contexts and growing memory around deaths and reloads that lower and raise limits."""
    users = chance.sample(sorted(LIMITS), chance.randint(1, 3))
    comings = _workers(chance, users, chance.randint(2, 8))
    comings += [Comes(2 + chance.uniform(0, 20), chance.choice(users), 60.0, kind="greedy")] * chance.choice((0, 0, 1))
    faults = _deaths(chance, chance.randint(1, 3), ("gate", "agent", "agent", "gate", "daemon"))
    faults += [Fault(chance.uniform(4, 40), "agent", "limits", chance.choice((50, 60, 80, 150)))
               for _ in range(chance.randint(0, 2))]  # fmt: skip
    return _day(chance, seed, "kept", chance.choice(WAYS), comings, faults)


def trial(chance: random.Random, seed: int) -> Habit:
    """The policy enforces nothing from some time on."""
    first, *users = chance.sample(sorted(LIMITS), chance.randint(2, 4))
    at = chance.uniform(6, 12)
    faults = [Fault(at, "agent", "limits", 0), Fault(at + chance.uniform(3.5, 8), chance.choice(("gate", "agent")))]
    comings = [Comes(2.0, first, chance.choice((1.0, 60.0)), kind="worker")]
    comings += [Comes(at + chance.choice((0, 8)) + chance.uniform(0, 20), one, 3.0, kind="worker") for one in users]
    return _day(chance, seed, "trial", chance.choice(("together", "apart")), comings, faults, late=0.0)


def shares(chance: random.Random, seed: int) -> Habit:
    """Leases and sections for cgroups, without totals."""
    users = chance.sample(sorted(LIMITS), chance.randint(1, 3))
    groups = tuple(
        (3000 + place, (float(chance.choice((10, 15, 90))), 1024 * chance.randint(1, 3))) for place in (1, 2)
    )
    comings: list[Any] = _workers(chance, users, chance.randint(0, 3))
    comings += [Comes(2 + chance.uniform(0, 20), chance.choice(users), chance.uniform(5, 60), kind="worker",
                      cgroup=chance.choice(groups)[0]) for _ in range(chance.randint(0, 3))]  # fmt: skip
    for _ in range(chance.randint(1, 3)):
        share = (float(chance.choice((10, 15, 90))), chance.randint(1, 3))
        comings.append(Job(2 + chance.uniform(0, 20), chance.choice(users), chance.uniform(5, 60), share=share,
                           span=chance.choice((15.0, 500.0)), all_of_user=chance.random() < 0.2))  # fmt: skip
    return _day(chance, seed, "shares", chance.choice(WAYS), comings, _deaths(chance, chance.randint(1, 3)),
                cgroups=groups)  # fmt: skip


def removed(chance: random.Random, seed: int) -> Habit:
    """Gate and agent are removed and installed again while users work."""
    users = chance.sample(sorted(LIMITS), chance.randint(1, 3))
    comings = [Comes(2 + chance.uniform(0, 10), chance.choice(users), chance.uniform(10, 90), kind="worker")
               for _ in range(chance.randint(1, 6))]  # fmt: skip
    faults = [Fault(chance.uniform(14, 40), "agent", "removed", chance.choice((0, 1, 5, 20, 100, 105)))
              for _ in range(chance.choice((1, 1, 2)))]  # fmt: skip
    faults += _deaths(chance, chance.choice((0, 0, 1)))
    return _day(chance, seed, "removed", chance.choice(WAYS), comings, faults)


def endings(chance: random.Random, seed: int) -> Habit:
    """Clients with a time limit are ended beside others, behind a hook, while the agent dies."""
    users = chance.sample(sorted(LIMITS), chance.randint(2, 4))
    comings = [Comes(2 + chance.uniform(0, 15), chance.choice(users), chance.uniform(10, 60), kind=chance.choice(
        ("worker", "worker", "worker", "clinging"))) for _ in range(chance.randint(3, 8))]  # fmt: skip
    runtime = tuple((uid, chance.choice((6.0, 12.0))) for uid in users[: chance.choice((1, 2))])
    faults = _deaths(chance, chance.choice((0, 1, 2)), ("agent", "agent", "gate", "client"))
    faults += [Fault(chance.uniform(6, 30), "agent", "terminate", chance.randint(0, 1))] * chance.randint(0, 1)
    return _day(chance, seed, "endings", chance.choice(("together", "together", "apart")), comings, faults,
                runtime=runtime, hook=chance.random() < 0.7)  # fmt: skip


def warned(chance: random.Random, seed: int) -> Habit:
    """Turns that end with a warning, while the agent dies, users give up waiting, and reloads change the turn."""
    users = chance.sample(sorted(LIMITS), chance.randint(2, 3))
    after, grace = chance.choice((6, 10)), chance.choice((2, 5))
    comings = _workers(chance, users, chance.randint(3, 8), 40.0)
    comings += [Comes(4 + chance.uniform(0, 40), chance.choice(users), chance.uniform(after, after + grace), 1,
                      kind="impatient") for _ in range(chance.randint(0, 4))]  # fmt: skip
    faults = _deaths(chance, chance.choice((0, 0, 1, 2)), ("agent", "agent", "gate"))
    text = f'[turn]\ntime_limit = "{after}s"\ngrace = "{grace}s"\non_expiry = "terminate"\nwarning_signal = "SIGUSR1"\n'
    if chance.random() < 0.4:
        at = chance.uniform(12, 30)
        faults += [Fault(at, "agent", "drain"), Fault(at + chance.uniform(1, 30), "agent", "resume")]
    return _day(chance, seed, "warned", chance.choice(("own", "shared")), comings, faults, grace=float(grace),
                more=text, after=float(after + grace), hook=chance.random() < 0.3)  # fmt: skip


def launchers(chance: random.Random, seed: int) -> Habit:
    """Launchers that make no context, with exactly the places that their processes need."""
    users, ranks = chance.sample(sorted(LIMITS), chance.randint(1, 2)), chance.randint(1, 3)
    comings = [Comes(2 + 20 * place + chance.uniform(0, 5), uid, chance.uniform(5, 20), kind="launcher", ranks=ranks)
               for place, uid in enumerate(users)]  # fmt: skip
    limits = dict.fromkeys(users, (20.0, 2048))
    general = chance.choice(
        (f"max_clients = {ranks}", f'total_active_threads = "{20 * ranks}%"', f'total_memory_limit = "{2 * ranks}G"')
    )
    faults = _deaths(chance, chance.choice((0, 0, 1)))
    return _day(chance, seed, "launchers", chance.choice(WAYS), comings, faults, general=general, limits=limits)


def arrivals(chance: random.Random, seed: int) -> Habit:
    """Clients are killed in the middle of their work, and others start in the next second."""
    users = chance.sample(sorted(LIMITS), chance.randint(1, 3))
    comings = _workers(chance, users, chance.randint(2, 6), 30.0)
    faults = [Fault(chance.uniform(5, 30), "client") for _ in range(chance.randint(1, 3))]
    faults += _deaths(chance, chance.choice((0, 0, 1)))
    return _day(chance, seed, "arrivals", chance.choice(WAYS), comings, faults, arrivals=True)


def crossing(chance: random.Random, seed: int) -> Habit:
    """Processes that leave their server and come again, one of each user at a time, while the gate dies."""
    users = chance.sample(sorted(LIMITS), chance.randint(2, 3))
    comings = [Comes(2 + chance.uniform(0, 4), uid, 5.0, kind="returning") for uid in users for _ in range(2)]
    comings += [Comes(2 + chance.uniform(0, 12), uid, chance.uniform(0.2, 2), kind="worker") for uid in users
                for _ in range(2)]  # fmt: skip
    faults = [Fault(chance.uniform(3, 14), "gate") for _ in range(chance.randint(2, 6))]
    return _day(chance, seed, "crossing", "together", comings, faults, general="max_clients = 1", clients=1,
                calm=-1.0, late=0.0, until=300.0, preempt=chance.choice((0.02, 0.1)))  # fmt: skip


def mixed(chance: random.Random, seed: int) -> Habit:
    """Two of these on one day."""
    one, other = (day(chance, seed) for day in chance.sample((kept, shares, removed, endings, warned, arrivals), 2))
    if other.grace:
        one, other = other, one
    return replace(
        one, name="mixed", comings=(*one.comings, *other.comings), hook=one.hook or other.hook,
        faults=tuple(sorted((*one.faults, *other.faults), key=lambda fault: fault.at)),
        runtime=one.runtime or other.runtime, cgroups=one.cgroups or other.cgroups,
        arrivals=one.arrivals or other.arrivals,
    )  # fmt: skip


DAYS = {"kept": kept, "trial": trial, "shares": shares, "removed": removed, "endings": endings, "warned": warned,
        "launchers": launchers, "arrivals": arrivals, "crossing": crossing, "mixed": mixed}  # fmt: skip


def draw(seed: int, days: tuple[str, ...] = tuple(DAYS)) -> Habit:
    name = sorted(days)[seed % len(days)]
    return DAYS[name](random.Random(f"{name} {seed}"), seed)


if __name__ == "__main__":
    sys.exit(trouble.main(tuple(DAYS), draw, Lived))  # type: ignore[arg-type]
