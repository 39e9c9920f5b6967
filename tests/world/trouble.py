"""Days with more in them than honest clients and sudden deaths: policies that pause, end and bound; hostile people;
servers that stand still, clocks that step, a name service that is down, a reload, a reinstall.

    python -m tests.world.trouble [--day hostile] [--first 1] [--seeds 100] [--seconds 60] [--go-on]
    python -m tests.world.trouble --seed 7

To write another day: a function in ``DAYS`` that draws a plan; a person is a generator (``people.Client``), a fault
is a word that ``Troubled.strike`` knows, a judge looks every half a second (``Watchful.look``).
"""

from __future__ import annotations

import argparse
import errno
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from mpsagent.core import inputs as inp
from mpsagent.core.reduce import reduce
from mpsagent.mps.work import Work
from mpsagent.system import names as real_names
from mpsagent.wire import link
from mpsagent_sim import limits as simulated
from tests.policies import WAYS
from tests.world import orders
from tests.world.judges import Broken, Judges
from tests.world.kernel import BOOT, BUFFER, PIDS, File, Process, Socket
from tests.world.mps import CLIENT, CREDENTIALS, DESCRIPTOR, ClientOf, Daemon, End, ServerProcess
from tests.world.people import Client, Life, Steps
from tests.world.plans import LIMITS
from tests.world.shown import sessions
from tests.world.world import Coming, Fault, Plan, World

SERVED = 45.0
"""Seconds in which a user is served who may be, whatever a hostile one does (a hand-over that comes to nothing takes
7 s, a few of them in a row)."""
SOON = 4.0
"""The same where it is only told a word."""
CALM = 60.0
"""Seconds after a fault in which nobody is promised a time."""
OVERLAP = 2.0
"""Seconds in which two users may be seen at work while one is frozen or let go."""
SLACK, IDLE_LATE = 1.5, 40.0
"""Seconds by which an idle client may be ended early, as it began to be idle between two looks, or late: two looks at
the GPUs, 15 s each, and its end."""
NOTHING = 40.0
"""Seconds for which nothing works while somebody waits, whatever has died."""
FOUND = 8.0
"""The same where a process came through another one: it is found, asked about twice, and ended gently."""


@dataclass(frozen=True)
class Guest(Coming):
    """``kind``: which of ``PEOPLE``."""

    kind: str = "honest"


@dataclass(frozen=True)
class Day(Plan):
    """``general``: what stands in [limits]; ``more``: further sections; ``waits``: how long a user who may be served
    waits at most, where that is said; ``stands``: how long a paused user stands; ``after``: when a turn may be ended
    at the earliest; ``clients``: max_clients; ``doubts``: users whose limits MPS does not take; ``by_name``: limits are
    users' by name, which the name service says."""

    name: str = ""
    well: bool = False
    general: str = ""
    more: str = ""
    then: str = ""
    """The sections after a reload."""
    waits: float | None = None
    stands: float | None = None
    after: float | None = None
    clients: int | None = None
    overlap: float = OVERLAP
    doubts: tuple[float, ...] = ()
    by_name: bool = False
    ranked: frozenset[int] = frozenset()
    """Users who come before all others."""
    over: float | None = None
    """When all clients leave, at the latest."""
    calm: float = CALM
    """Seconds after a fault in which nobody is promised a time."""
    idle: float | None = None
    """How long a user's clients may be idle while others wait."""
    quiet: bool = False
    """What waits is judged by ``waits`` alone: the GPU may be idle for a moment."""
    buffer: int = BUFFER
    """Bytes that a socket takes."""

    @property
    def policy(self) -> str:
        return self.text(self.more)

    def text(self, more: str) -> str:
        text = f"{more}\n[instance.default]\n{WAYS[self.way]}"
        text += f'[limits]\nactive_threads = "10%"\nmemory_limit = "1G"\n{self.general}\n'
        text += '[timeouts]\ncontrol_daemon = "10s"\nserver = "20s"\nsigkill_delay = "2s"\n'
        for uid, (threads, memory) in self.limits.items():
            who = f"u{uid}" if self.by_name else uid
            text += f'[user.{who}]\nactive_threads = "{threads:g}%"\nmemory_limit = "{memory >> 10}G"\n'
            text += "queue_priority = 5\n" if uid in self.ranked else ""
        return text


# --- people ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class GuestLife(Life):
    kind: str = "honest"
    inside: bool = False
    """It has a channel at a server."""


class Liar(Client):
    """Takes its descriptor, acknowledges it, and never says a word to its server."""

    def live(self) -> Steps:
        for _ in range(self.contexts):
            control = yield from self.connect()
            server = None if control is None else (yield from self.introduce(control))
            if control is None or server is None:
                return
            yield from self.acknowledge(control, 0)
            yield [], self.kernel.now + self.life.work
            control.close()
            server.close()


class Eight(Client):
    """Says after each hand-over that its server is in FAULT."""

    def live(self) -> Steps:
        until = self.kernel.now + self.life.work
        while self.kernel.now < until:
            control = yield from self.connect()
            server = None if control is None else (yield from self.introduce(control))
            if control is None or server is None:
                return
            if (yield from self.greet(server, 0)) is None:
                return
            yield from self.acknowledge(control, 807)
            yield [], self.kernel.now + 0.01
            control.close()
            server.close()
            yield [], self.kernel.now + 0.02


class Relayed(Client):
    """Comes by the connections of another process of its user's, which is who the gate sees."""

    front: Process

    def run(self) -> Steps:
        self.front = self.kernel.spawn("relay", self.life.uid, self.life.uid, self.kernel.init)
        self.kernel.program(self.front, self.stay())
        return (yield from super().run())

    def stay(self) -> Steps:
        while self.process.alive:
            yield [], self.kernel.now + 0.5

    def connect(self) -> Generator[tuple[list[File], float | None], None, End | None]:
        mine, self.process = self.process, self.front
        try:
            return (yield from super().connect())
        finally:
            self.process = mine

    def introduce(self, control: End) -> Generator[tuple[list[File], float | None], None, End | None]:
        if (yield from control.hear()) is None:
            return None
        front = self.front
        control.say(CREDENTIALS, who=(front.pid, front.uid, front.gid))
        control.say(CLIENT)
        if self.life.knocked is None:
            self.life.knocked = self.kernel.now
        answer = yield from control.hear()
        if answer is None or answer.data != DESCRIPTOR or len(answer.files) != 1:
            return None
        file = answer.files[0]
        assert isinstance(file, Socket)
        server = End(self.life.process, file)
        file.drop()
        return server


class Sleeper(Client):
    """Computes without asking its server anything, and notices nothing meanwhile."""

    def wait(self, contexts: list[End], until: float) -> Generator[tuple[list[File], float | None], None, bool]:
        yield [], self.kernel.now + self.life.work
        return (yield from super().wait(contexts, until))


class Returning(Client):
    """Leaves its server and lives on, and comes again about when the gate is told to forget it."""

    def live(self) -> Steps:
        life, kernel = self.life, self.kernel
        yield [], kernel.now + self.world.chance.uniform(0.0, 0.02)
        for _ in range(12):
            channel = yield from self.meet(0)
            if channel is None or (yield from channel.hear()) is None:
                return
            yield [], kernel.now + 0.011
            context = yield from self.meet(1)
            if context is None or (yield from context.hear()) is None:
                return
            yield [], kernel.now + self.world.chance.uniform(0.05, 0.4)
            context.close()
            yield [], kernel.now + 0.015
            life.inside = False  # type: ignore[attr-defined]
            channel.close()
            yield (
                [],
                kernel.now + self.world.chance.choice((0.49, 0.495, 0.5, 0.505)) + self.world.chance.uniform(0.0, 0.01),
            )


class Becoming(Client):
    """Connects as one user and is another's at some time after that: root that becomes a user, a program that was only
    lent its user and is root again, or one that executes a setuid program. That one keeps the descriptors it has and
    says nothing; a context goes with the program that made it."""

    STAGES = ("connected", "held", "given", "at work")

    def __init__(self, world: Troubled, life: Life, contexts: int = 1) -> None:
        super().__init__(world, life, contexts)
        chance = world.chance
        self.stage, self.program = chance.choice(self.STAGES), bool(life.uid) and chance.random() < 0.5
        self.to = chance.choice([uid for uid in (0, 65534, *sorted(LIMITS)[:2]) if uid != life.uid])

    def becomes(self) -> None:
        if self.process.alive and self.process.uid == self.life.uid:
            how = "executes a program of" if self.program else "is now of"
            self.world.tell(f"client {self.process.pid} of user {self.life.uid} {how} user {self.to} ({self.stage})")
            self.process.become(self.to, program=self.program)

    def connect(self) -> Generator[tuple[list[File], float | None], None, End | None]:
        if self.process.uid != self.life.uid:
            self.life.users.add(self.process.uid)
        return (yield from super().connect())

    def introduce(self, control: End) -> Generator[tuple[list[File], float | None], None, End | None]:
        if self.stage == "connected":
            self.becomes()
        elif self.stage == "held":
            self.kernel.after(self.world.chance.choice((0.0005, 0.005, 0.05, 1.0)), self.becomes)
        server = yield from super().introduce(control)
        if server is not None and self.life.given is None:  # a program of another user's may never come to its server
            self.life.given = self.kernel.now
        if self.stage == "given":
            self.becomes()
        if self.program and self.process.uid != self.life.uid and self.stage != "connected":
            yield [], self.kernel.now + self.life.work
        return server

    def work(self, contexts: list[End]) -> Steps:
        if self.stage == "at work":
            yield [], self.kernel.now + self.world.chance.uniform(0.0, 0.5)
            self.becomes()
            if self.program:
                assert self.channel is not None
                self.life.over = self.kernel.now
                for one in (*contexts, self.channel):
                    one.close()
                yield [], self.kernel.now + self.life.work
                return
        yield from super().work(contexts)


class Crowding(Client):
    """Leaves after a while, served or not."""

    def run(self) -> Steps:
        self.kernel.after(self.life.work, self.kernel.signal, self.process, 9)
        return (yield from super().run())


class Idle(Client):
    """Makes its contexts and computes nothing."""

    def work(self, contexts: list[End]) -> Steps:
        life, busy = self.life, self.process.busy
        if (yield from self.wait(contexts, self.kernel.now + life.work)):
            life.done = True
        self.process.busy = busy


PEOPLE: Mapping[str, type[Client]] = {
    "honest": Client, "liar": Liar, "807": Eight, "relayed": Relayed, "flood": Client, "sleeper": Sleeper,
    "returning": Returning, "doubted": Client, "becoming": Becoming, "unseen": Client,
    "idle": Idle, "crowding": Crowding,
}  # fmt: skip
STEADY = frozenset({"honest", "sleeper", "returning", "idle"})
"""Those who are promised to be served."""
HOSTILE = frozenset({"liar", "807", "relayed", "flood", "becoming", "unseen", "crowding"})


def honest(life: Life) -> bool:
    return isinstance(life, GuestLife) and life.kind in STEADY


# --- judges ----------------------------------------------------------------------------------------------------------


class Watchful(Judges):
    """Beside what holds on every day: what these policies say."""

    world: Troubled

    def __post_init__(self) -> None:
        super().__post_init__()
        self._both: float | None = None
        self._nothing: float | None = None
        self._stood: dict[Life, float] = {}
        self._server: dict[int, Process] = {}
        self._free: dict[int, float] = {}
        """Since when none of a user's works while one waits."""

    @property
    def day(self) -> Day:
        return self.world.plan

    def calm(self) -> bool:
        return all(self.world.kernel.now - at > self.day.calm for at, _ in self.faults)

    def works(self, life: Life) -> None:
        doubted = self.day.doubts and life.limits is not None
        if life.limits != self.day.limits_of(life.uid) and not doubted and not self.forgotten(life):
            self.fail(f"client {life.process.pid} of user {life.uid} has {life.limits}, and the policy says "
                      f"{self.day.limits_of(life.uid)}")  # fmt: skip

    def given(self, life: Life) -> None:
        """Who came first is first; not where the policy puts users before others, one comes again and again, or it is
        not known who came."""
        names = self.world.down is not None and self.world.kernel.now - self.world.down < CALM
        if not self.day.ranked and self.day.name != "hostile" and not names:
            super().given(life)

    def ended(self, life: Life) -> None:
        assert isinstance(life, GuestLife)
        life.inside = False
        if life.error == "terminated" and self.day.idle is not None:
            self._idle_end(life, self.day.idle)
        if life.kind != "honest" and not (life.kind == "sleeper" and life.error is None):
            return
        if life.error == "terminated" and self.day.after is not None:
            now = self.world.kernel.now
            others = [one for one in self.lives if one.waits and one.uid != life.uid and one.knocked is not None]
            latest = now - self.day.after + 0.3
            if others and all(one.knocked is not None and one.knocked > latest for one in others):
                self.fail(f"client {life.process.pid} of user {life.uid} was ended {self.day.after:g} s too early")
            return
        lost = any(kind == "reinstall" and self.world.kernel.now - at < SERVED for at, kind in self.faults)
        if not (lost and life.error == "805"):  # who waits at a gate that is taken away
            super().ended(life)

    def _idle_end(self, life: Life, bound: float) -> None:
        """Who is ended was idle for as long as the policy says, as all at work of its user's, while another waited."""
        now, what = self.world.kernel.now, f"client {life.process.pid} of user {life.uid} was ended for being idle"
        mine = [one for one in self.lives if one.uid == life.uid and (one is life or one.works)]
        if not all(isinstance(one, GuestLife) and one.kind == "idle" for one in mine):
            self.fail(f"{what}, and {mine} work")
        if any(one.worked is None or now - one.worked < bound - SLACK for one in mine):
            self.fail(f"{what}, and that is less than {bound:g} s")
        if not any(one.uid != life.uid and one.knocked is not None and (one.given is None or one.given > now - 1.0)
                   for one in self.lives if one.process.alive):  # fmt: skip
            self.fail(f"{what}, and no other user waits")

    def _idle_holds(self, now: float, bound: float) -> None:
        """A user whose clients are all idle makes way for another one."""
        if not self.calm():
            return
        at_work = [one for one in self.lives if one.works]
        waiting = [one for one in self.lives if one.waits and one.uid not in {it.uid for it in at_work}]
        if at_work and waiting and all(isinstance(one, GuestLife) and one.kind == "idle" for one in at_work):
            busy = [one.over or 0.0 for one in self.lives if getattr(one, "kind", "") != "idle"]
            first = min(one.knocked or now for one in waiting)
            since = max(first, *busy, *(one.worked or now for one in at_work))
            if now - since > bound + IDLE_LATE:
                pids = [one.process.pid for one in at_work]
                self.fail(f"clients {pids} are idle for {now - since:.0f} s while {waiting[0].process.pid} waits")

    def look(self) -> None:
        if not self.day.quiet:
            super().look()
        now, day = self.world.kernel.now, self.day
        if day.idle is not None:
            self._idle_holds(now, day.idle)
        at_work = [one for one in self.lives if one.works and not one.process.stopped and self.served(one)]
        self._nothing_at_work(now, at_work)
        if day.turns and at_work and not set.intersection(*(one.whose for one in at_work)):
            self._both = now if self._both is None else self._both
            if now - self._both > day.overlap:
                who = ", ".join(f"{one.process.pid} of user {one.uid}" for one in at_work)
                self.fail(f"for {now - self._both:.1f} s at work at once: {who}")
        else:
            self._both = None
        self._bounds(now, day, at_work)

    def _nothing_at_work(self, now: float, at_work: list[Life]) -> None:
        """Also where a client does not notice that its server has gone."""
        waiting = [one for one in self.lives if one.waits and honest(one) and not one.process.stopped]
        if self.day.quiet or at_work or not waiting:
            self._nothing = None
            return
        self._nothing = now if self._nothing is None else self._nothing
        if now - self._nothing > NOTHING:
            self.fail(f"nothing has been at work for {now - self._nothing:.0f} s while {waiting[0].process.pid} waits")

    def arrived(self, server: ServerProcess, pid: int, client: ClientOf) -> None:
        self._server[pid] = server.process
        for life in self.lives:
            if life.process.pid == pid and life.process.alive:
                life.inside = True  # type: ignore[attr-defined]

    def _bounds(self, now: float, day: Day, at_work: list[Life]) -> None:
        if day.clients is not None:
            counts = Counter(one.uid for one in self.lives if getattr(one, "inside", False) and one.process.alive)
            for uid, count in counts.items():
                if count > day.clients and self.calm():
                    self.fail(f"user {uid} has {count} clients at work, and the policy says {day.clients}")
        working = {one.uid for one in at_work}
        waiting = {one.uid: one for one in self.lives if one.waits and not one.process.stopped and honest(one)}
        for uid in [one for one in self._free if one in working or one not in waiting]:
            del self._free[uid]
        for uid in waiting.keys() - working:
            since = max([self._free.setdefault(uid, now), *(at for at, _ in self.faults)])
            if day.waits is not None and now - since > day.waits and self.calm():
                self.fail(f"client {waiting[uid].process.pid} of user {uid} waits for {now - since:.0f} s")
        for one in self.lives:
            if one.works and one.process.stopped:
                self._stood.setdefault(one, now)
                if day.stands is not None and now - self._stood[one] > day.stands and self.calm():
                    self.fail(f"client {one.process.pid} of user {one.uid} stands for {now - self._stood[one]:.0f} s")
            else:
                self._stood.pop(one, None)

    def at_the_end(self) -> None:
        kernel = self.world.kernel
        for life in self.lives:
            if not honest(life):
                kernel.signal(life.process, 9)
        for process in self.world.stopped:
            kernel.signal(process, 18)
        kernel.run(kernel.now + 20.0)
        super().at_the_end()
        self._unseen()
        if self.day.idle is not None and not self.faults:
            ends = [one.why for one in sessions(self.world.received.history.since(0, 10_000)) if one.kind == "client"
                    and one.outcome == "ended"]  # fmt: skip
            ended = sum(one.error == "terminated" for one in self.lives)
            if len(ends) != ended or not all("idle" in str(one) for one in ends):
                self.fail(f"{ended} clients were ended for being idle, and on record is: {ends}")
        for one in self.world.kernel.processes.values():
            if one.name == "nvidia-cuda-mps-server" and one.alive and one.parent is self.world.kernel.init:
                self.fail(f"server {one.pid} is left without its control daemon{', stopped' if one.stopped else ''}")

    def _unseen(self) -> None:
        """Whose process cannot be seen is refused, and that is on record and in the status."""
        unseen, world = [one for one in self.lives if one.process.hidden], self.world
        for life in unseen:
            if life.given is not None or (life.error != "805" and not self.faults):
                self.fail(f"client {life.process.pid} of user {life.uid}, which cannot be seen, sees {life.error}")
        if unseen and not self.faults and world.shown is not None:
            told = [one["uid"] for one in world.received.history.since(0, 10_000)
                    if one["kind"] == "client.refused" and "pid namespace" in str(one["why"])]  # fmt: skip
            if sorted(told) != sorted(one.uid for one in unseen):
                self.fail(f"of the users of those who cannot be seen only these are on record: {told}")
            if not any("cannot see" in str(one) for one in world.shown.status()["not_guaranteed"]):
                self.fail("the status does not say that somebody cannot be seen")


# --- the world -------------------------------------------------------------------------------------------------------


class _Limits:
    """As MPS reads them, but for some percentages: these it takes for another."""

    def __init__(self, doubts: tuple[float, ...]) -> None:
        self._doubts = doubts

    def __getattr__(self, name: str) -> Any:
        return getattr(simulated, name)

    def percentage(self, text: str) -> float | None:
        found = simulated.percentage(text)
        return 99.9 if found in self._doubts else found


class Slip(Exception):
    """A mistake of the product's, thrown in."""


class Troubled(World):
    plan: Day

    def __init__(self, plan: Day) -> None:
        super().__init__(plan)
        self.judges = Watchful(self)
        self.kernel.buffer = plan.buffer
        self.kernel.pids = max(PIDS, 200 + 3 * len(plan.comings))
        self.counted = BOOT, 0.0
        """When the GPU's work was counted last, and how many seconds it had worked."""
        self.down: float | None = None
        """Until when the name service was."""
        self.silent = False
        self.stopped: list[Process] = []
        self.listening = 0
        """After so many messages to the agent a client dies."""
        self.telling = 0
        """After so many files that the gate opens a job ends: it tells an agent of each process that it knows."""
        self.slips = False
        """The next hand-over that the agent hears of finds a mistake of its own."""

    def comes(self, coming: Coming) -> None:
        assert isinstance(coming, Guest)
        if self.plan.over is not None and not self.judges.lives:
            self.kernel.at(BOOT + self.plan.over, self.everybody_leaves)
        self.starts(coming, self.kernel.init)

    def starts(self, coming: Coming, parent: Process) -> GuestLife:
        process = self.kernel.spawn("python", coming.uid, coming.uid, parent)
        if coming.kind == "unseen":
            self.kernel.hide(process)
        life = GuestLife(process, coming.uid, coming.work, honest=coming.kind not in HOSTILE, kind=coming.kind)
        self.judges.lives.append(life)
        client = PEOPLE[coming.kind](self, life, coming.contexts)
        process.on_end.append(lambda _: self.judges.gone(life))
        self.kernel.program(process, client.run())
        self.tell(f"client {process.pid} ({coming.kind}) of user {coming.uid} comes, {coming.work:.1f} s of work")
        return life

    def start_daemon(self, before: Process) -> None:
        """An administrator starts another one in its place."""
        self.tell("somebody starts the control daemon")
        self.judges.faults.append((self.kernel.now, "daemon"))
        process = self.kernel.spawn(before.name, 0, 0, self.kernel.init)
        process.command, process.environment = before.command, dict(before.environment)
        pipe, logs = process.environment["CUDA_MPS_PIPE_DIRECTORY"], process.environment["CUDA_MPS_LOG_DIRECTORY"]
        daemon = Daemon(self, process, pipe, logs, "--multiuser-server" in process.command)
        self.kernel.program(process, daemon.run())

    def everybody_leaves(self) -> None:
        for one in self.who("client"):
            self.kernel.signal(one, 9)

    def _called(self, process: Process, what: str) -> None:
        if self.listening and what == "receive" and process.name == "mpsagent":
            self.listening -= 1
            if not self.listening:
                for one in self.who("client")[:1]:
                    super().strike(one, Fault(0.0, "client"))
        if self.telling and what == "open" and process.name == "mpsagent-gate":
            self.telling -= 1
            if not self.telling:
                self.job_ends()
        super()._called(process, what)

    def job_ends(self) -> None:
        """All processes of a user are killed, at nearly the same time."""
        there = sorted(self.who("client"), key=lambda one: one.pid)
        if there:
            hung = {one.uid for one in self.judges.lives if not one.honest}
            uid = self.chance.choice(sorted(hung if self.plan.buffer < BUFFER else {one.uid for one in there}))
            for one in self.who("agent") if self.plan.buffer < BUFFER else ():
                super().strike(one, Fault(0.0, "agent", "stop"))
            self.judges.faults.append((self.kernel.now, "client"))
            self.tell(f"all processes of user {uid} are killed")
            for one in there:
                if one.uid == uid:
                    self.kernel.after(self.chance.uniform(0.0, 0.003), self.kernel.signal, one, 9)

    def strike(self, process: Process, fault: Fault) -> None:
        if fault.what == "resume":
            self.kernel.signal(process, 18)
            return
        if not fault.what.startswith("stop"):
            super().strike(process, fault)
            return
        self.judges.faults.append((self.kernel.now, "stopped"))
        self.tell(f"{process} is stopped")
        self.kernel.signal(process, 19)
        self.stopped.append(process)
        if fault.what == "stop and kill its daemon":
            for one in self.who("daemon"):
                super().strike(one, Fault(fault.at, "daemon"))

    def throw(self, fault: Fault) -> None:
        if fault.what == "clock":
            self.judges.faults.append((self.kernel.now, "clock"))
            self.kernel.wall += fault.call
            self.tell(f"the wall clock is set by {fault.call} s")
        elif fault.what == "names":
            self.silent = not self.silent
            self.down = float("inf") if self.silent else self.kernel.now
            self.tell(f"the name service is {'down' if self.silent else 'back'}")
        elif fault.what == "reload":
            self.tell("the policy is another one, and read again")
            self.kernel.nodes["/etc/mpsagent/policy.toml"].data[:] = self.plan.text(self.plan.then).encode()
            orders.give(self, {"order": "reload"})
        elif fault.what == "while the gate tells":
            for one in self.who("agent"):
                self.strike(one, Fault(fault.at, "agent"))
            self.listening = fault.call
        elif fault.what == "a job ends":
            for one in self.who("agent"):
                self.strike(one, Fault(fault.at, "agent"))
            self.telling = fault.call
        elif fault.what == "away":
            for one in self.who("agent"):
                World.strike(self, one, fault)
        elif fault.what == "started by hand":
            for one in self.who("daemon"):
                self.strike(one, Fault(fault.at, "daemon"))
                self.kernel.after(fault.call, self.start_daemon, one)
        elif fault.what == "slip":
            self.slips = True
            for one in self.who("agent"):
                super().strike(one, Fault(fault.at, "agent", "stop"))
        elif fault.what == "together":
            for who in fault.who.split("+"):
                for one in self.who(who)[:1]:
                    self.strike(one, Fault(fault.at, who))
        elif fault.what == "reinstall":
            self.tell("the package is taken away and installed again")
            self.judges.faults.append((self.kernel.now, "reinstall"))
            for name in list(self.systemd.stored):
                self.systemd.drop(name)
            for who in ("gate", "agent"):
                for one in self.who(who)[:1]:
                    self.strike(one, Fault(fault.at, who))
            for name in list(self.systemd.stored):
                self.systemd.drop(name)
        else:
            super().throw(fault)

    def others(self) -> dict[tuple[str, str], Any]:
        found = super().others()
        found["mpsagent.core.coordinator", "reduce"] = self.reduce
        if self.plan.idle is not None:
            self.look_at_work()
            found["mpsagent.system.devices", "simulated_work"] = self.work
        if self.plan.doubts:
            found["mpsagent_sim.control_daemon", "limits"] = _Limits(self.plan.doubts)
        if self.plan.by_name:
            del found["mpsagent.system.names", "identity_of"]
            found |= self.name_service()
        return found

    def work(self, _file: str) -> dict[str, Work]:
        """The GPU works while one works that is not idle."""
        now, (at, busy) = self.kernel.now, self.counted
        at_work = any(one.works and getattr(one, "kind", "") != "idle" for one in self.judges.lives)
        self.counted = now, busy + (now - at) * at_work
        return {self.device.uuid: Work(now, self.counted[1], 300 * now)}

    def look_at_work(self) -> None:
        self.work("")
        self.kernel.after(0.1, self.look_at_work)

    def reduce(self, state: Any, event: Any) -> Any:
        """With a mistake in it for one message, which the agent can do without."""
        if self.slips and isinstance(event, inp.GateSaid) and isinstance(event.what, link.Handing):
            self.slips = False
            self.judges.faults.append((self.kernel.now, "agent"))
            self.tell(f"the agent fails on what it is told: {event.what}")
            raise Slip
        return reduce(state, event)

    def failed(self, what: str) -> None:
        if "Slip()" not in what:
            super().failed(what)

    def name_service(self) -> dict[tuple[str, str], Any]:
        """One service, as glibc and Python see it."""
        real_names._heard.clear()
        real_names._silent.clear()

        def getpwuid(uid: int) -> Any:
            if self.silent:
                raise KeyError(uid)
            return SimpleNamespace(pw_name=f"u{uid}", pw_gid=uid, pw_uid=uid)

        def ask(*_: Any) -> int:
            return -1 if self.silent else 1

        def group(gid: int) -> Any:
            raise KeyError(gid)

        def file(path: Any, *_: Any, **__: Any) -> Any:
            import io

            return io.StringIO("passwd: ldap\ngroup: ldap\n")

        function = SimpleNamespace(_nss_ldap_getpwuid_r=ask, _nss_ldap_getgrgid_r=ask)
        real = real_names.ctypes
        ctypes = SimpleNamespace(
            CDLL=lambda _: function, create_string_buffer=real.create_string_buffer, c_int=real.c_int,
            c_uint=real.c_uint, c_size_t=real.c_size_t, byref=real.byref,
        )  # fmt: skip
        module = "mpsagent.system.names"
        return {
            (module, "ctypes"): ctypes, (module, "pwd"): SimpleNamespace(getpwuid=getpwuid),
            (module, "grp"): SimpleNamespace(getgrgid=group), (module, "open"): file,
            (module, "os"): SimpleNamespace(getgrouplist=lambda _name, gid: [gid]), (module, "errno"): errno,
        }  # fmt: skip


# --- days ------------------------------------------------------------------------------------------------------------


def paused(chance: random.Random, seed: int) -> Day:
    """Long work that is paused beside users who come and go, and now and then a policy that pauses no longer."""
    if chance.random() < 0.4:
        return _starving(chance, seed)
    users = chance.sample(sorted(LIMITS), chance.randint(2, 4))
    comings = [Guest(2 + chance.uniform(0, 2), uid, chance.uniform(15, 40)) for uid in users[: chance.randint(1, 2)]]
    span, at = chance.choice((30.0, 90.0)), 3.0
    while at < span and len(comings) < 90:
        comings.append(Guest(round(at, 3), chance.choice(users[-2:]), chance.uniform(0.05, 1.5)))
        at += chance.expovariate(1 / chance.choice((0.5, 2.0)))
    slice_, ends = chance.choice((1, 2, 4)), chance.choice((False, True))
    pause = f'[turn]\non_expiry = "pause"\npause_slice = "{slice_}s"\ntime_limit = "never"'
    faults = (Fault(chance.uniform(4, 30), "agent", "reload"),) if chance.random() < 0.5 else ()
    if faults:
        return _reloaded(chance, seed, comings, slice_)
    return Day(seed, "shared", tuple(comings), (), LIMITS, name="paused", general=pause, ends=ends,
               stands=20.0 + 12 * slice_ * len(users), waits=len(users) * (slice_ + 1.0) + 10.0,
               preempt=chance.choice((0.0, 0.02)))  # fmt: skip


def overtaken(chance: random.Random, seed: int) -> Day:
    """Three users who come before all others, by turns and each when the one before is about to end: there is always
    one who waits, seldom two. A paused user may be overtaken once by each of them."""
    first, *others = chance.sample(sorted(LIMITS), 4)
    every = chance.choice((2.0, 4.0))
    work = every * chance.uniform(0.95, 1.1) - 0.2
    comings = [Guest(2.0, first, 400.0)]
    comings += [Guest(6 + every * job + chance.uniform(0, 0.2), others[job % 3], work) for job in range(45)]
    pause = '[turn]\non_expiry = "pause"\npause_slice = "3s"\ntime_limit = "1h"\n'
    return Day(seed, "shared", tuple(comings), (), LIMITS, name="overtaken", more=pause, ranked=frozenset(others),
               stands=6 * every + 15.0, over=8.0 + every * 45, preempt=0.0)  # fmt: skip


def away(chance: random.Random, seed: int) -> Day:
    """Somebody stops the agent for two minutes, and for users that it knew the gate goes on by its last table: also
    after a fault, which ends then when the last client has noticed it (who asks for a further context does not), and
    after the control daemon has died, when somebody has started another one."""
    bad, *users = chance.sample(sorted(LIMITS), chance.randint(3, 4))
    comings = [Guest(2.0, uid, 4.0) for uid in users]
    faults = [Fault(chance.uniform(3, 4), "agent", "away", 120)]
    if chance.random() < 0.5:
        dies, span, count = chance.uniform(4.1, 8.0), chance.choice((6, 9, 12)), chance.randint(2, 5)
        faults.append(Fault(dies, "daemon", "started by hand", span))
        comings += [Guest(dies + chance.uniform(0.1, span), chance.choice(users), 1.0) for _ in range(count)]
    else:
        span, kinds = chance.choice((4.0, 12.0)), ("honest", "honest", "sleeper")
        comings += [Guest(2.1 + chance.uniform(0, span), chance.choice(users), chance.uniform(0.3, 6), 1,
                          chance.choice(kinds)) for _ in range(chance.randint(4, 20))]  # fmt: skip
        comings.append(Guest(2.0, bad, 60.0, kind="807"))
        faults += [Fault(4 + chance.uniform(0, span), "client") for _ in range(chance.randint(1, 4))]
    return Day(seed, "together", tuple(comings), tuple(faults), LIMITS, name="away", waits=15.0, calm=0.0,
               quiet=True, preempt=chance.choice((0.0, 0.1)), until=150.0)  # fmt: skip


def jobs(chance: random.Random, seed: int) -> Day:
    """Many processes at work, some that hang before they have met their server, and all of one user's end while the
    gate tells another agent of them."""
    one, other, *hung = chance.sample(sorted(LIMITS), 6)
    comings = [Guest(2 + chance.uniform(0, 3), uid, 50.0) for uid in (one, other) for _ in range(34)]
    comings += [Guest(6.0 + place, uid, 80.0, kind="liar") for uid in hung for place in range(2)]
    faults = (Fault(chance.uniform(20, 24), "agent", "a job ends", chance.randint(1, 30)),)
    return Day(seed, "apart", tuple(comings), faults, LIMITS, name="jobs", preempt=0.2, over=70.0)


def told(chance: random.Random, seed: int) -> Day:
    """Sockets take little, and the agent is stopped while the gate tells it of each process: those of one user, which
    no server has named, end before their pidfds are sent."""
    bad, *users = chance.sample(sorted(LIMITS), 4)
    comings = [Guest(2 + chance.uniform(0, 3), uid, 60.0) for uid in users for _ in range(10)]
    comings += [Guest(12.0 + chance.uniform(0, 0.1), bad, 80.0, kind="liar") for _ in range(4)]
    faults = (Fault(chance.uniform(36, 40), "agent", "a job ends", chance.randint(20, 34)),)
    return Day(seed, "apart", tuple(comings), faults, LIMITS, name="told", preempt=0.05, over=90.0, buffer=16_384)


def slips(chance: random.Random, seed: int) -> Day:
    """A mistake in what the agent makes of one message costs nothing of what came together with it."""
    users = chance.sample(sorted(LIMITS), chance.randint(2, 4))
    comings = [Guest(2 + chance.uniform(0, 20), chance.choice(users), chance.uniform(0.05, 3), chance.choice((1, 2)))
               for _ in range(30)]  # fmt: skip
    faults = tuple(Fault(chance.uniform(3, 20), "agent", "slip") for _ in range(chance.randint(1, 3)))
    return Day(seed, chance.choice(("own", "shared", "together")), tuple(comings), faults, LIMITS, name="slips")


def _starving(chance: random.Random, seed: int) -> Day:
    """Three users who come before all others, each with one short job after the other."""
    first, *others = chance.sample(sorted(LIMITS), 4)
    every, slice_ = chance.choice((2, 4)), chance.choice((2, 4, 8))
    comings = [Guest(2.0, first, 400.0)]
    comings += [Guest(6 + every * job + chance.uniform(0, 0.5), others[job % 3], every * 1.9) for job in range(60)]
    pause = f'[turn]\non_expiry = "pause"\npause_slice = "{slice_}s"\ntime_limit = "1h"\n'
    return Day(seed, "shared", tuple(comings), (), LIMITS, name="paused", more=pause, ranked=frozenset(others),
               stands=10.0 * slice_ + 40.0, over=8.0 + every * 60, preempt=0.0)  # fmt: skip


def _reloaded(chance: random.Random, seed: int, comings: list[Guest], slice_: int) -> Day:
    pause = (
        f'[group.x]\nactive_threads = "10%"\n[turn]\non_expiry = "pause"\npause_slice = "{slice_}s"\n'
        'time_limit = "1h"\n'
    )
    ends = '[group.x]\nactive_threads = "10%"\n[turn]\non_expiry = "terminate"\ntime_limit = "1h"\n'
    return Day(seed, "shared", tuple(comings), (Fault(chance.uniform(5, 20), "agent", "reload"),), LIMITS,
               name="paused", more=pause, then=ends, preempt=chance.choice((0.0, 0.02)))  # fmt: skip


def ends(chance: random.Random, seed: int) -> Day:
    """Turns that end by time, while the wall clock is set and clients are stopped."""
    users = chance.sample(sorted(LIMITS), chance.randint(2, 4))
    after = chance.choice((6, 12))
    comings = [Guest(2 + chance.uniform(0, 30), chance.choice(users), chance.uniform(2, 40), chance.choice((1, 2)))
               for _ in range(chance.randint(3, 10))]  # fmt: skip
    faults = [Fault(chance.uniform(2, 30), "agent", "clock", chance.choice((-10800, -60, 60, 10800)))
              for _ in range(chance.choice((0, 1, 1, 2)))]  # fmt: skip
    faults += [Fault(chance.uniform(4, 30), "client", "stop") for _ in range(chance.choice((0, 0, 1)))]
    text = f'[turn]\ntime_limit = "{after}s"\ngrace = "1s"\non_expiry = "terminate"\n'
    return Day(seed, chance.choice(("own", "shared")), tuple(comings), tuple(faults), LIMITS, ends=True, name="ends",
               more=text, after=after + 1.0, waits=len(users) * (after + 20.0) + SERVED)  # fmt: skip


def bounded(chance: random.Random, seed: int) -> Day:
    """Each process is ended after a while, stopped or not, beside others' on the same server."""
    comings = [Guest(2 + chance.uniform(0, 10), chance.choice(sorted(LIMITS)), chance.uniform(2, 30))
               for _ in range(chance.randint(3, 8))]  # fmt: skip
    faults = tuple(Fault(chance.uniform(4, 14), "client", "stop") for _ in range(chance.randint(1, 3)))
    return Day(seed, "together", tuple(comings), faults, LIMITS, ends=True, name="bounded", waits=15.0,
               general=f'max_runtime = "{chance.choice((4, 8))}s"', preempt=chance.choice((0.0, 0.02)))  # fmt: skip


def crowd(chance: random.Random, seed: int) -> Day:
    """Many users with many processes each, one of whom may work at a time, each process with a share of its own."""
    limits = {3001 + place: (5.0, 1024) for place in range(18)}
    *crowding, late = limits
    comings = [Guest(2 + place / 10 + chance.uniform(0, 2), uid, 60.0)
               for uid in crowding for place in range(9)]  # fmt: skip
    comings += [Guest(8 + chance.uniform(0, 5), late, 1.0)]
    text = '[cgroup."/user.slice/*"]\nactive_threads = "5%"\n'
    return Day(seed, "together", tuple(comings), (), limits, name="crowd", more=text, general="max_clients = 1",
               clients=1, waits=20.0, preempt=0.0, over=45.0)  # fmt: skip


def returning(chance: random.Random, seed: int) -> Day:
    """Processes that leave their server and come again, one at a time of each user."""
    users = chance.sample(sorted(LIMITS), chance.randint(1, 2))
    comings = [Guest(2 + chance.uniform(0, 4), uid, 5.0, kind="returning") for uid in users for _ in range(2)]
    comings += [Guest(2 + chance.uniform(0, 8), uid, chance.uniform(0.2, 2)) for uid in users for _ in range(4)]
    return Day(seed, "together", tuple(comings), (), LIMITS, name="returning", general="max_clients = 1", clients=1,
               preempt=chance.choice((0.02, 0.1)), until=300.0)  # fmt: skip


def hostile(chance: random.Random, seed: int) -> Day:
    """One hostile user beside honest ones."""
    kind = chance.choice(("807", "flood", "liar", "relayed"))  # without who administrator.py adds: a seed is one world
    way = "shared" if kind == "relayed" else chance.choice(("together", "together", "shared"))
    users = chance.sample(sorted(LIMITS), chance.randint(2, 4))
    bad, *good = users
    if kind == "flood":
        guests = [Guest(2 + chance.uniform(0, 3), bad, 60.0, 60, kind) for _ in range(chance.choice((1, 2)))]
    elif kind == "liar":
        guests = [
            Guest(2 + chance.uniform(0, 9), bad, chance.uniform(1, 60), 3, kind) for _ in range(chance.randint(1, 3))
        ]
    else:
        guests = [
            Guest(2 + chance.uniform(0, 3), bad, chance.uniform(5, 40), 1, kind) for _ in range(chance.randint(1, 3))
        ]
    guests += [Guest(2 + chance.uniform(0, 20), chance.choice(good), chance.uniform(0.2, 6), chance.choice((1, 2)))
               for _ in range(chance.randint(2, 10))]  # fmt: skip
    text = '[turn]\ntime_limit = "4s"\ngrace = "1s"\n' if way == "shared" else ""
    bound = SOON if kind == "807" else SERVED
    bound = bound if way == "together" else len(users) * 30.0 + SERVED
    return Day(seed, way, tuple(guests), (), LIMITS, ends=way == "shared", name="hostile", quiet=True, more=text,
               waits=bound, after=5.0 if way == "shared" else None, overlap=FOUND, until=400.0)  # fmt: skip


def setuid(chance: random.Random, seed: int) -> Day:
    """Processes that are another user's after they have connected, beside honest ones: also of the user who they become
    and root's."""
    way = chance.choice(("own", "shared", "together", "apart"))
    bad, *good = chance.choice(((0, *sorted(LIMITS)[:3]), chance.sample(sorted(LIMITS), 4)))
    guests = [Guest(2 + chance.uniform(0, 10), bad, chance.uniform(0.5, 30), chance.choice((1, 1, 2)), "becoming")
              for _ in range(chance.randint(1, 3))]  # fmt: skip
    guests += [Guest(2 + chance.uniform(0, 20), chance.choice(good), chance.uniform(0.2, 6), chance.choice((1, 2)))
               for _ in range(chance.randint(2, 10))]  # fmt: skip
    turns = way in ("own", "shared")
    text = '[turn]\ntime_limit = "4s"\ngrace = "1s"\n' if turns else ""
    limits = {**LIMITS, 0: (10.0, 1024), 65534: (80.0, 8192)}
    faults = [Fault(chance.uniform(3, 12), chance.choice(("gate", "agent")))
              for _ in range(chance.choice((0, 0, 1, 2)))]  # fmt: skip
    return Day(seed, way, tuple(guests), tuple(faults), limits, ends=turns, name="setuid", quiet=True, more=text,
               waits=4 * 30.0 + SERVED if turns else SERVED, after=5.0 if turns else None, overlap=FOUND,
               preempt=chance.choice((0.0, 0.02)), until=400.0)  # fmt: skip


def unseen(chance: random.Random, seed: int) -> Day:
    """Clients of a container, of which only the users are known, beside honest ones of the same users."""
    way, users = chance.choice(("own", "shared", "together", "apart")), chance.sample(sorted(LIMITS), 3)
    guests = [Guest(2 + chance.uniform(0, 10), chance.choice(users), chance.uniform(0.2, 3),
                    kind=chance.choice(("honest", "unseen"))) for _ in range(chance.randint(4, 20))]  # fmt: skip
    faults = [Fault(chance.uniform(3, 12), chance.choice(("gate", "agent")))
              for _ in range(chance.choice((0, 0, 1)))]  # fmt: skip
    return Day(seed, way, tuple(guests), tuple(faults), LIMITS, name="unseen", waits=SERVED,
               preempt=chance.choice((0.0, 0.02)))  # fmt: skip


def idle(chance: random.Random, seed: int) -> Day:
    """Clients that compute nothing, of one user or several, while another user waits, one of their own, or nobody."""
    holds, waits, *more = chance.sample(sorted(LIMITS), chance.randint(2, 3))
    bound = chance.choice((5, 20, 45))
    comings = [Guest(2.0, holds, chance.uniform(10, 150), chance.choice((1, 2)), "idle"),
               Guest(chance.uniform(3, 6), holds, 2.0, kind=chance.choice(("honest", "idle")))]  # fmt: skip
    comings += [Guest(chance.choice((4.0, 20.0, 60.0)) + chance.uniform(0, 10), chance.choice((holds, waits, *more)),
                      chance.uniform(0.2, 30), kind=chance.choice(("honest", "honest", "idle")))
                for _ in range(chance.randint(1, 6))]  # fmt: skip
    general = f'idle_timeout = "{bound}s"\nidle_metric = "{chance.choice(("cpu", "gpu"))}"\n'
    general += chance.choice(("", "max_clients = 1\n"))
    faults = [Fault(chance.uniform(3, 30), chance.choice(("agent", "gate")))] if chance.random() < 0.2 else []
    return Day(seed, chance.choice(("own", "shared")), tuple(comings), tuple(faults), LIMITS, ends=True, name="idle",
               general=general, idle=float(bound), clients=1 if "max" in general else None, quiet=True,
               preempt=chance.choice((0.0, 0.02)), until=900.0)  # fmt: skip


def uids(chance: random.Random, seed: int) -> Day:
    """One person with many hundred uids: a client of each waits, and all of them leave. Who works goes on, and who came
    before them has the GPU next."""
    first, second, third = chance.sample(sorted(LIMITS), 3)
    comings = [Guest(2.0, first, 9.0), Guest(3.0, second, 1.0), Guest(12.0, third, 1.0)]
    at, all_in = chance.uniform(3.5, 5.0), chance.choice((0.02, 0.5))
    comings += [Guest(at + chance.uniform(0, all_in), 10_000 + place, chance.uniform(2.0, 2.1), kind="crowding")
                for place in range(chance.randint(200, 400))]  # fmt: skip
    return Day(seed, chance.choice(("own", "shared")), tuple(comings), (), LIMITS, name="uids", waits=12.0,
               preempt=0.0)  # fmt: skip


def machine(chance: random.Random, seed: int) -> Day:
    """Several die at once, a server stands still, the package is installed again, the name service is away."""
    way = chance.choice(("own", "shared", "together"))
    users = chance.sample(sorted(LIMITS), chance.randint(1, 3))
    kinds = ("honest", "honest", "sleeper")
    comings = [Guest(2 + chance.uniform(0, 20), chance.choice(users), chance.uniform(0.5, 90), 1, chance.choice(kinds))
               for _ in range(chance.randint(2, 8))]  # fmt: skip
    comings.append(Guest(chance.uniform(60, 80), users[0], 1.0))
    faults = [chance.choice((
        Fault(chance.uniform(4, 25), "server", "stop and kill its daemon"),
        Fault(chance.uniform(4, 25), "daemon+agent", "together"),
        Fault(chance.uniform(4, 25), "agent", "while the gate tells", chance.randint(1, 12)),
        Fault(chance.uniform(4, 25), "agent", "reinstall"),
    ))]  # fmt: skip
    if faults[0].what == "reinstall":
        return _reinstalled(chance, seed, faults[0])
    return Day(seed, way, tuple(comings), tuple(faults), LIMITS, name="machine",
               preempt=chance.choice((0.0, 0.02, 0.1)), until=600.0)  # fmt: skip


def _reinstalled(chance: random.Random, seed: int, fault: Fault) -> Day:
    """Who works is known to MPS alone then."""
    one, other = chance.sample(sorted(LIMITS), 2)
    way = chance.choice(("own", "own", "shared"))
    comings = (Guest(2.0, one, 200.0), Guest(fault.at + chance.uniform(1, 5), other, 1.0))
    text = '[turn]\ntime_limit = "5s"\ngrace = "1s"\non_expiry = "terminate"\n'
    return Day(seed, way, comings, (fault,), LIMITS, name="machine", more=text, ends=True, waits=SERVED, overlap=0.0,
               preempt=0.0)  # fmt: skip


def name_service(chance: random.Random, seed: int) -> Day:
    """It is down for a while, in which users come and the policy is read again."""
    users = chance.sample(sorted(LIMITS), chance.randint(1, 3))
    comings = [Guest(2 + chance.uniform(0, 60), chance.choice(users), chance.uniform(0.2, 3)) for _ in range(9)]
    comings.append(Guest(2.0, users[0], 1.0))  # by which it is known that there is one
    down = chance.uniform(5, 20)
    faults = [Fault(down, "agent", "names"), Fault(down + chance.uniform(1, 30), "agent", "reload"),
              Fault(down + 40, "agent", "names")]  # fmt: skip
    return Day(seed, chance.choice(("shared", "together")), tuple(comings), tuple(faults), LIMITS, name="names",
               quiet=True, by_name=True)  # fmt: skip


def doubtful(chance: random.Random, seed: int) -> Day:
    """MPS takes neither one user's limits nor the fallback limits."""
    users = chance.sample(sorted(LIMITS), 3)
    bad, *good = users
    comings = [Guest(2 + chance.uniform(0, 3), bad, 1.0, kind="doubted") for _ in range(chance.randint(1, 4))]
    comings += [Guest(3 + chance.uniform(0, 60), chance.choice(good), 1.0) for _ in range(20)]
    return Day(seed, "together", tuple(comings), (), LIMITS, name="doubtful", quiet=True,
               doubts=(LIMITS[bad][0], 10.0), waits=6.0, preempt=0.0, until=100.0)  # fmt: skip


DAYS: Mapping[str, Callable[[random.Random, int], Day]] = {
    "paused": paused, "ends": ends, "crowd": crowd, "returning": returning, "hostile": hostile, "machine": machine,
    "names": name_service, "doubtful": doubtful, "overtaken": overtaken, "away": away, "jobs": jobs, "slips": slips,
    "bounded": bounded, "told": told, "setuid": setuid,
    "unseen": unseen, "idle": idle, "uids": uids,
}  # fmt: skip
_DAYS = tuple(DAYS)
Draws = Callable[[int, tuple[str, ...]], Day]


def draw(seed: int, days: tuple[str, ...] = _DAYS) -> Day:
    chance, name = random.Random(f"trouble {seed}"), days[seed % len(days)]
    if name == "crowd" and days == _DAYS and seed // len(days) % 4:  # it takes as long as ten others
        name = "machine"
    return DAYS[name](chance, seed)


def fails(day: Day, make: Callable[[Day], Troubled] | None = None) -> tuple[str, Troubled] | None:
    world = (make or Troubled)(day)
    try:
        world.play()
    except Broken as broken:
        return str(broken), world
    return None


def played(first: int, seeds: int, seconds: float, days: tuple[str, ...], draws: Draws = draw,
           make: Callable[[Day], Troubled] | None = None) -> Iterator[tuple[int, Day, Any, float]]:  # fmt: skip
    begun = time.monotonic()
    for seed in range(first, first + seeds):
        if time.monotonic() - begun > seconds:
            return
        day = draws(seed, days)
        found = fails(day, make)
        yield seed, day, found, 0.0 if found is None else found[1].kernel.now - BOOT


def main(names: tuple[str, ...] = _DAYS, draws: Draws = draw, make: Callable[[Day], Troubled] | None = None) -> int:
    words = argparse.ArgumentParser("tests.world.trouble", description=__doc__)
    words.add_argument("--seed", type=int)
    words.add_argument("--first", type=int, default=1)
    words.add_argument("--seeds", type=int, default=1_000_000)
    words.add_argument("--seconds", type=float, default=60.0)
    words.add_argument("--day", choices=names, action="append")
    words.add_argument("--go-on", action="store_true")
    words.add_argument("--no-shrink", action="store_true")
    asked = words.parse_args()
    days = tuple(asked.day or names)
    if asked.seed is not None:
        asked.first, asked.seeds, asked.go_on = asked.seed, 1, False
    begun, count, failed = time.monotonic(), 0, 0
    for seed, day, found, _ in played(asked.first, asked.seeds, asked.seconds, days, draws, make):
        count += 1
        if found is not None:
            failed += 1
            if asked.seed is not None:
                print("\n".join(found[1].story))
            print(f"seed {seed} ({day.name}, {day.way}): {found[0].splitlines()[0][:200]}", flush=True)
            if asked.seed is not None and "\n" in found[0]:
                print(found[0])
            if not asked.go_on:
                return 1
    print(f"{count} worlds from seed {asked.first} in {time.monotonic() - begun:.0f} s, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
