"""The judges: what must hold, told from outside. They know the policy that was written, the people, the GPU and the
faults that were thrown in, and nothing of the code.

Each judge is a method that hears of something, or is asked at each look, and says what is wrong in a sentence.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.world.people import Life

if TYPE_CHECKING:
    from tests.world.kernel import Process
    from tests.world.loop import Loop
    from tests.world.mps import ClientOf, ServerProcess
    from tests.world.world import World

IDLE = 1.0
"""Seconds for which the GPU may be idle while a user waits: a server's end and another one's start take 0.4."""
IDLE_KILLED, IDLE_STOPPED = 3.0, 12.0
"""The same, in addition, after a death (another daemon is started, the gate comes back, a handshake is finished for one
who has gone) and after a process was stopped (a silent daemon has `timeouts.control_daemon` to answer)."""
IN_A_ROW = 70.0
"""Seconds from one death of a control daemon to the next within which the pause before a new one doubles: 1, 2, 4 s.
``IDLE_KILLED`` has room for two."""
HELD_UP = 6.0
"""The same for each hostile client, which can take MPS up: the gate gives it 5 to meet its server."""
SETTLES = 30.0
"""Seconds after a fault in which what it broke is whole again."""
HARM = 1.5
"""Seconds for which a client may still be led to a server or daemon that has died, or is in FAULT."""
TOGETHER = 0.01
"""Seconds in which those who come count as having come together."""
TAKES_TURN = 1.0
"""Seconds after the end of a user's last client in which the turn may still be that user's."""
SPAN, TURNS = 5, 700
"""So many looks take a second, in which gate and agent turn their loops at most so often without a system call, and
once for each thing that anybody hears: 810 times while two front-ends asked as fast as they could."""
LOST = 0.005
"""Seconds after a connection was accepted in which a gate that is killed loses it: systemd has not been told of it.
Two system calls, in which others may run. As long a client takes to read its descriptor."""


class Broken(Exception):
    """A promise is broken; the text says which, and how."""


@dataclass
class Judges:
    world: World

    def __post_init__(self) -> None:
        self.lives: list[Life] = []
        self.broken: str | None = None
        self._idle_since: float | None = None
        self.faults: list[tuple[float, str]] = []
        """When, and to whom something was done."""
        self.servers: dict[int, bool] = {}
        """Those that a client has met, and whether the first one was honest."""
        self._server: dict[int, Process] = {}
        """By client, where it came last."""
        self.most: dict[int, int] = {}
        """By server, the most contexts that it had."""
        self.stops: list[tuple[float, float]] = []
        """When a process was stopped, and for how long."""
        self._turns: dict[Loop, deque[tuple[int, int]]] = {}

    @property
    def stopped(self) -> float:
        """When a process was stopped last."""
        return max((at for at, _ in self.stops), default=float("-inf"))

    def fail(self, what: str) -> None:
        """Heard at the next look: in the middle of the product's code nothing is raised."""
        if self.broken is None:
            self.broken = what
            self.world.tell(f"BROKEN: {what}")

    # --- what they hear

    def knocks(self, life: Life) -> None: ...

    def asked(self, pid: int, uid: int) -> None:
        """MPS hears of a client: it is of the user who has connected, whatever it has become since."""
        process = self.world.kernel.processes.get(pid)
        for life in self.lives:
            if life.process is process and uid != life.uid and uid not in life.users:
                self.fail(f"client {pid} of user {life.uid} is announced to MPS as user {uid}'s")

    def signalled(self, process: Process, number: int) -> None:
        """Root's signals reach everybody; who has become another user's is not stopped or ended in the first one's
        name."""
        for life in self.lives:
            if life.process is process and number not in (0, 18) and life.is_anothers:
                what = f"is user {process.uid}'s now, and gets signal {number}"
                self.fail(f"client {process.pid} of user {life.uid} {what}")

    def served(self, life: Life) -> bool:
        """Its server lives, although it may not notice when not, and MPS serves it: a process that is another user's by
        now gets no signal, so it may live on for a while after MPS has terminated it."""
        if life.error == "terminated" and life.is_anothers:
            return False
        server = self._server.get(life.process.pid)
        return server is not None and server.alive

    def arrived(self, server: ServerProcess, pid: int, client: ClientOf) -> None:
        """A client has its channel."""
        self._server[pid] = server.process
        who = server.process.pid
        self.servers.setdefault(who, any(one.process.pid == pid and one.honest for one in self.lives))

    def context(self, pid: int, limits: tuple[float, int]) -> None:
        """A client has a context, and its server had these limits at the hand-over."""

    def to_end(self, pid: int) -> None:
        """MPS is asked to end a client."""

    def harmed(self, culprit: int, pids: set[int]) -> None:
        """A process has died with a kernel in flight, and these clients have the fault."""

    def limits_of(self, life: Life) -> list[tuple[float, int] | None]:
        """Return the limits that a client may be shown with."""
        return [life.limits]

    def takes(self, server: int, places: int) -> None:
        self.most[server] = max(places, self.most.get(server, 0))

    def works(self, life: Life) -> None:
        """A client has its first context: its limits are what the policy says, and nobody else's turn is broken."""
        policy = self.world.plan.limits_of(life.uid)
        if life.limits != policy and not self.forgotten(life):
            least = min((one[0] for one in self.world.plan.limits.values()), default=10.0), 0
            self.fail(f"client {life.process.pid} of user {life.uid} has {life.limits}, and the policy says {policy}"
                      f" (the strictest: {least})")  # fmt: skip
        if self.world.plan.turns and self.served(
            life
        ):  # one that was stopped may not know yet that its server has died
            others = [one for one in self.lives if one.works and one.uid != life.uid and not one.process.stopped
                      and self.served(one)]  # fmt: skip
            if others:
                who = ", ".join(f"{one.process.pid} of user {one.uid}" for one in others)
                self.fail(f"client {life.process.pid} of user {life.uid} works while {who} does")

    def forgotten(self, life: Life) -> bool:
        """A known limit: its server was killed while it started, and the gate that knew of it as well: it may have died
        before the client had read what it had sent."""
        since = {kind for at, kind in self.faults if at >= (life.given or 0.0) - LOST * (kind == "gate")}
        return life.limits == (0.0, 0) and "gate" in since and bool(since & {"server", "daemon"})

    def given(self, life: Life) -> None:
        """A client has its first descriptor: a turn goes to the user whose first waiting client came first."""
        if not self.world.plan.turns or any(who in ("gate", "agent") for _, who in self.faults):
            return  # while no agent runs the gate goes on by its last table
        if self.world.kernel.now - self.stopped < SETTLES:
            return  # a hand-over that is held up holds on to its user's turn
        if any(life.uid in one.whose and not one.honest for one in self.lives):
            return  # a turn lasts as long as MPS is taken up by one of its user's
        if any(one.error == "terminated" and one.is_anothers for one in self.lives):
            return  # MPS may wait for its answer, as no signal ends it: a turn whose clients wait 10 s in vain is over
        mine = [one for one in self.lives if one.uid == life.uid and one is not life]
        now = self.world.kernel.now
        if any(now - one.over < TAKES_TURN if one.over is not None else one.given is not None for one in mine):
            return  # its turn has begun already
        if self._goes_on(life, mine):
            return
        came = min(one.came for one in [life, *mine] if one is life or one.waits)
        for one in self.lives:
            if any(one.uid in it.whose and it.given is not None and (it.left or now) > one.came for it in self.lives):
                continue  # it came in a turn of its user's own, and is behind those who have waited for its end
            if one.waits and one.uid != life.uid and one.came < came - TOGETHER and not one.process.stopped:
                what = f"came {came - one.came:.2f} s after user {one.uid}"
                self.fail(f"user {life.uid} has the turn, and {what}")

    def _goes_on(self, life: Life, mine: list[Life]) -> bool:
        """It came before the last of its user's ended, by a daemon's death or not, and nobody else has been let in
        since: a turn that has one waiting goes on, for 10 s in vain."""
        ended = [one for one in mine if one.given is not None and one.over is not None]
        last = max((one.over if one.left is None else one.left for one in ended), default=0.0)  # of its process
        others = (one.given for one in self.lives if one.uid != life.uid and one.given is not None)
        return (life.knocked or 0) <= last and all(at <= last for at in others)

    def gone(self, life: Life) -> None:
        """Its process has ended."""
        life.left = self.world.kernel.now
        self.ended(life)

    def ended(self, life: Life) -> None:
        """A client has ended, by itself or not: nobody is refused, and nobody loses work but by a fault of MPS."""
        if not life.honest:
            return
        if life.error is None or life.error == "terminated":
            if life.error == "terminated" and not self.world.plan.ends:
                self.fail(f"client {life.process.pid} of user {life.uid} was ended, and the policy ends none")
            return
        accepted = float("-inf") if life.socket is None else life.socket.accepted
        if any(kind == "gate" and 0 <= at - accepted < LOST for at, kind in self.faults):
            return
        if any(kind == "reinstall" and self.world.kernel.now - at < SETTLES for at, kind in self.faults):
            return  # a gate without its parent process: who waits is refused when it dies
        if life.given is None:
            self.fail(f"client {life.process.pid} of user {life.uid} was refused ({life.error}) while it waited")
        begun = (life.given or 0) - HARM
        faults = (at for at, kind in self.faults if kind in ("daemon", "server", "client"))
        if not any(self.harms_until(at) >= begun for at in faults) and not self.turn_is_over(life):
            self.fail(f"client {life.process.pid} of user {life.uid} sees error {life.error}, and MPS had no fault")

    def turn_is_over(self, life: Life) -> bool:
        """All clients of its user are being ended, one after the other: the first one's end may be a fault for it."""
        now, after = self.world.kernel.now, getattr(self.world.plan, "after", None)
        mine = (one for one in self.lives if one.uid == life.uid and one.error == "terminated")
        waiting = (one for one in self.lives if one.uid != life.uid and one.waits and one.knocked is not None)
        return (
            after is not None
            and any(one.left is not None and now - one.left < HARM for one in mine)
            and any(now - one.knocked > after - HARM for one in waiting)
        )

    def harms_until(self, at: float) -> float:
        """A server that waits for a hostile client reacts to what happened in that time, or just before, when that one
        has gone and the gate has finished its handshake. A gate that is stopped leads a client to what has died when it
        goes on."""
        for begin, seconds in self.stops:
            if (begin, "gate") in self.faults and begin - HARM <= at <= begin + seconds:
                at = begin + seconds + HARM
        hostile = [one for one in self.lives if not one.honest and one.given is not None]
        for one in sorted(hostile, key=lambda one: one.given or 0.0):
            given = one.given or 0.0
            if given <= at + HARM:
                at = max(at, min(given + HELD_UP, (one.over or self.world.kernel.now) + HARM))
        return at

    def restarts(self) -> float:
        """Seconds beyond ``IDLE_KILLED`` that it takes when more than two control daemons have died in a row."""
        in_a_row, last = 0, self.world.kernel.now
        for at, kind in reversed(self.faults):
            if kind == "daemon" and last - at < IN_A_ROW:
                in_a_row, last = in_a_row + 1, at
        return sum(2.0 ** (number - 1) + IDLE for number in range(3, in_a_row + 1))

    # --- at each look

    def work(self) -> None:
        """Who has nothing to do does little. A rule that asks to be asked again at once has the agent turn its loop a
        thousand times a second, without a system call."""
        for program in (self.world.agent, self.world.gate):
            if program is None:
                continue
            turns = self._turns.setdefault(program.loop, deque(maxlen=SPAN))
            turns.append((program.loop.turns, self.world.kernel.happened))
            (before, heard), (after, last) = turns[0], turns[-1]
            if len(turns) == SPAN and after - before > TURNS + last - heard:
                self.fail(f"{program.process} has turned its loop {after - before} times in a second for nothing,"
                          f" while {last - heard} things were heard")  # fmt: skip

    def look(self) -> None:
        now = self.world.kernel.now
        living = [one for one in self.lives if one.process.alive]
        waiting = [one for one in living if one.waits and not one.process.stopped]
        if waiting:
            hostile = {one.uid for one in self.lives if not one.honest}  # what these take up is first their own time
            waiting = [one for one in waiting if one.uid not in hostile]
        if waiting and all(one.given is None for one in living):
            since = self._idle_since = now if self._idle_since is None else self._idle_since
            bound = IDLE + IDLE_KILLED * any(now - at < SETTLES for at, _ in self.faults)
            bound += sum(max(IDLE_STOPPED, seconds) for at, seconds in self.stops if now - at - seconds < SETTLES)
            lies = [one for one in self.lives if not one.honest and (one.over is None or now - one.over < SETTLES)]
            bound += HELD_UP * len(lies) + self.restarts()
            if now - since > bound:
                who = ", ".join(f"{one.process.pid} of user {one.uid}" for one in waiting[:4])
                self.fail(f"the GPU has been idle for {now - since:.1f} s while {who} waits")
        else:
            self._idle_since = None

    def at_the_end(self) -> None:
        """Everything is over and nobody came for a while: nothing is frozen, nothing is left."""
        for one in self.lives:
            if one.process.alive:
                what = "is stopped" if one.process.stopped else "waits" if one.waits else "goes on"
                self.fail(f"client {one.process.pid} of user {one.uid} {what} at the end")
        gate, agent = self.world.gate, self.world.agent
        if gate is None or agent is None or not gate.process.alive or not agent.process.alive:
            self.fail("the gate or the agent does not run at the end")
            return
        left = [name for name in self.world.systemd.stored if name]
        if left:
            self.fail(f"{len(left)} descriptors are left in systemd's store: {left[:4]}")
        for program, bound in ((gate, 16), (agent, 44)):
            if len(program.process.fds) > bound:
                self.fail(f"{program.process} has {len(program.process.fds)} descriptors open at the end")
