"""Who is held, who is known, and which connection is handed over next under the admissions. Pure: time is given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from mpsagent.gate.counts import Counts
from mpsagent.gate.pacing import NEW_CLIENTS, Account, Rates
from mpsagent.gate.places import KnownProcess as KnownProcess
from mpsagent.gate.places import Places
from mpsagent.gate.places import Process as Process
from mpsagent.mps.limits import Limits
from mpsagent.wire.link import Admissions, Job, User

MOST_HELD = 8192
MOST_HELD_OF_A_USER = 1024
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 2.0
OWES_FROM, OWES = 1.0, Rates(rate=1 / 9, burst=0.0)
"""Seconds for which a client may take MPS up with its hand-over and fail; beyond it its user waits so many times as
long before the next one, where others could be handed over. So one user has a tenth of MPS's time for it at most. For
one that lives twice as long each time, until ``FORGIVEN`` seconds have passed without one."""
SLOW_FROM, SLOW = 0.05, Rates(rate=0.1, burst=5.0)
"""The same for clients that meet their server and take long for it, or are lost sooner: a user may take up 5 seconds
before. A whole hand-over takes 1.2 to 1.5 ms on an H100 (handover-deaths.txt), and 28 ms at most in 99 of 100 cases on
two cores beside other work (bench.md)."""
ALONE = Rates(rate=0.1, burst=16.0)
"""While no other user is there: a user who comes would meet one of them each time, for 5 s (make hostile). The burst is
two hand-overs of 8 s: so many are lost to a server that hangs, which is no user's fault, until it is killed."""
LONGEST_OWED = FORGIVEN = 600.0
MOST_REMEMBERED = 1024
MOST_LEFT = 512
"""Living processes that have left their server, whose instance is remembered: each takes a descriptor here and in the
store."""
LOOK_BEHIND = 16
"""How many connections of one user are looked at behind one that pauses after a failure."""


@dataclass(slots=True)
class Held:
    """A CUDA connection that waits. ``connection`` grows with the time of arrival. ``not_before``: it pauses after a
    failed hand-over until then; ``pause`` is the last pause's length. ``instance``: where it waits, None: nowhere yet;
    ``busy``: it is being handed over there; ``asked``: the instance that alone may serve it (apart, as its user's),
    because it came in that one's own directory, or because its process has passed there. ``never``: it is not a
    client's, waits in no line, and is never handed over."""

    connection: int
    pid: int
    uid: int
    gid: int
    start: int
    since: float
    not_before: float = 0.0
    pause: float = 0.0
    instance: str | None = ""
    busy: bool = False
    asked: str | None = None
    never: bool = False

    @property
    def process(self) -> Process:
        return (self.pid, self.start)

    def may_wait(self, instance: str | None) -> bool:
        return self.asked is None or instance in (self.asked, f"{self.asked}-u{self.uid}")

    def failed(self, now: float) -> None:
        """It keeps its place and is tried again after a pause that doubles."""
        self.pause = min(LONGEST_PAUSE, self.pause * 2 or FIRST_PAUSE)
        self.not_before = now + self.pause


@dataclass(slots=True)
class _Line:
    """One user's connections in order of arrival: those of known processes apart, because they go first."""

    kin: dict[int, Held] = field(default_factory=dict)
    new: dict[int, Held] = field(default_factory=dict)


class Queue:
    """Order of arrival inside a user and among admitted users; known processes before new ones, their users by turns.
    Each instance has its own lines; a process is known in one of them, and its connections wait there, also when it
    has left its server: its CUDA goes on with the GPUs that it saw there."""

    def __init__(self, most: int = MOST_HELD, most_of_a_user: int = MOST_HELD_OF_A_USER) -> None:
        self.most = most
        self.most_of_a_user = most_of_a_user
        self._held: dict[int, Held] = {}
        self._lines: dict[str | None, dict[int, _Line]] = {}
        self._of: dict[Process, set[int]] = {}
        self._held_of = Counts()
        self._known: dict[Process, KnownProcess] = {}
        self._left: dict[Process, KnownProcess] = {}
        """Who was known and has left its server, and lives."""
        self._left_of = Counts()
        self._own: dict[Process, str] = {}
        """Processes that were, or are being, handed over with limits of their own, and their jobs."""
        self._owes, self._slow, self._alone = Account(OWES), Account(SLOW), Account(ALONE)
        self._lived: dict[int, int] = {}
        """By user, how often a client was lost so that lived."""
        self._rests: dict[tuple[str, int], tuple[float, float]] = {}
        """By instance and user: until when none of this user's is handed over there, and how long that is in all."""
        self.slowed: dict[tuple[str, int], float] = {}
        """By instance and user, until when the user's debt of time delays the connection that :meth:`choose` found. The
        caller that reports it moves it to ``told``."""
        self.told: dict[tuple[str, int], float] = {}
        self._new = Account(NEW_CLIENTS)
        self._places: dict[str, Places] = {}
        self.contexts_from = 0.0
        """When the next one may be that of a known process, which is a context, in whichever instance."""
        self._rounds: dict[int, int] = {}
        """By user, when a known process's connection was handed over last, in hand-overs; the latest last."""

    def __len__(self) -> int:
        return len(self._held)

    def get(self, connection: int) -> Held | None:
        return self._held.get(connection)

    def full_for(self, uid: int) -> str | None:
        """Why one more connection of this user cannot be held; None when it can."""
        if len(self._held) >= self.most:
            return f"{self.most} connections of all users wait already: start it again later"
        if self._held_of[uid] >= self.most_of_a_user:
            return f"{self.most_of_a_user} connections of user {uid} wait already: end some of their programs"
        return None

    def crowding_out(self, uid: int) -> Iterator[int]:
        """When all places are taken: the connections, newest first, of the user who has most of them, if those are at
        least two more than this user's. One user may come with many uids (subordinate ids)."""
        if len(self._held) >= self.most:
            most = self._held_of.most()
            if most is not None and self._held_of[most] > self._held_of[uid] + 1:
                yield from (one.connection for one in reversed(list(self._held.values())) if one.uid == most)

    def add(self, held: Held) -> None:
        """Arrival order is by ``connection``; one from an earlier gate may be older than the last."""
        self._held[held.connection] = held
        self._held_of.add(held.uid)
        self._enter(held)
        self._of.setdefault(held.process, set()).add(held.connection)

    def remove(self, connection: int) -> Held | None:
        held = self._held.pop(connection, None)
        if held is None:
            return None
        self._leave(held)
        self._held_of.remove(held.uid)
        siblings = self._of[held.process]
        siblings.discard(connection)
        if not siblings:
            del self._of[held.process]
            if held.process not in self._known:
                self._own.pop(held.process, None)
        return held

    # --- known processes ---

    def known(self) -> Iterator[KnownProcess]:
        return iter(list(self._known.values()))

    def known_process(self, process: Process) -> KnownProcess | None:
        return self._known.get(process)

    def passed(self, process: Process) -> KnownProcess | None:
        """Who is known, or has left its server."""
        return self._known.get(process) or self._left.get(process)

    def know(self, known: KnownProcess) -> None:
        """One that is not known yet."""
        self._forget_left(known.process)
        self.places(known.instance).know(known)
        self._known[known.process] = known
        self._sort(known.process)

    def leave(self, known: KnownProcess) -> Process | None:
        """It has left its server: it is known no more, and waits where it was. Returns who is forgotten for it: where
        too many are remembered, the oldest of the user who has most of them."""
        process = known.process
        self.forget(process)
        self._left[process] = known
        self._left_of.add(known.uid)
        for connection in self._of.get(process, ()):
            self._held[connection].asked = known.section
        if len(self._left) <= MOST_LEFT:
            return None
        most = self._left_of.most()
        return next(one.process for one in self._left.values() if one.uid == most)

    def left(self, process: Process) -> KnownProcess | None:
        """Who has left its server and is remembered."""
        return self._left.get(process)

    def _forget_left(self, process: Process) -> None:
        known = self._left.pop(process, None)
        if known is not None:
            self._left_of.remove(known.uid)

    def forget(self, process: Process) -> None:
        self._forget_left(process)
        known = self._known.pop(process, None)
        self._own.pop(process, None)
        if known is not None:
            self.places(known.instance).forget(known)
            self._sort(process)

    def waits_for_context(self, process: Process) -> bool:
        """Return whether a connection of this process is held or being handed over."""
        return any(not self._held[one].never for one in self._of.get(process, ()))

    def places(self, instance: str) -> Places:
        return self._places.setdefault(instance, Places())

    def drop(self, instance: str) -> None:
        """It is not there any more, and no process is known there."""
        self._places.pop(instance, None)

    def known_in(self, instance: str) -> int:
        """How many processes are known there."""
        return len(self.places(instance))

    def instance_of(self, uid: int) -> str | None:
        """Where this user has known processes; None: nowhere."""
        return next((name for name, places in self._places.items() if places.of_user[uid]), None)

    def is_own(self, process: Process) -> bool:
        """Return whether it was, or is being, handed over with its own limits instead of its user's limits."""
        return process in self._own

    def keep_own(self, process: Process) -> None:
        """Note that an earlier gate hands or handed it over with its own limits, or that the agent says so. Its job, if
        that is bounded, is in the table."""
        self._own[process] = ""

    # --- which instance ---

    def place(self, uid: int, instance: str | None) -> None:
        """This user's connections wait there from now on, but for those of known processes, those that are being
        handed over, and those that have asked for another one."""
        for other in [one for one, lines in self._lines.items() if one != instance and uid in lines]:
            for held in [one for one in self._lines[other][uid].new.values() if not one.busy]:
                if held.may_wait(instance):
                    self._put(held, instance)

    def give_up(self, instance: str) -> None:
        """It is not there any more: who has asked for the one that it belonged to waits there."""
        for held in [one for one in self._held.values() if one.instance == instance and one.asked is not None]:
            if not held.busy and held.process not in self._known:
                self._put(held, held.asked)

    def ask(self, connection: int, asked: str | None, instance: str | None) -> None:
        """It has asked for this instance, or (None) for none; it waits in ``instance`` then."""
        held = self._held[connection]
        if held.process in self._left:
            return
        held.asked = asked
        if not held.busy and not (held.process in self._known or (asked is None and held.instance is not None)):
            self._put(held, instance)

    def _put(self, held: Held, instance: str | None) -> None:
        self._leave(held)
        held.instance = instance
        self._enter(held)

    def take(self, connection: int, instance: str, now: float) -> None:
        """It is being handed over there, and stays until :meth:`free`."""
        held = self._held[connection]
        if held.process not in self._known:
            self._new.charge(held.uid, 1, now)
        else:
            last = next(reversed(self._rounds.values()), 0)
            self._rounds.pop(held.uid, None)
            self._rounds[held.uid] = last + 1
            if len(self._rounds) > MOST_REMEMBERED:
                del self._rounds[next(iter(self._rounds))]
        self._leave(held)
        held.instance, held.busy = instance, True
        self._enter(held)

    def free(self, connection: int) -> None:
        """It waits as all others do."""
        held = self._held.get(connection)
        if held is not None:
            self._leave(held)
            held.busy = False
            self._enter(held)

    def users_in(self, instance: str | None) -> list[int]:
        """Who waits there."""
        return list(self._lines.get(instance, ()))

    def _sort(self, process: Process) -> None:
        """The other connections of a process that became known, or is not known any more."""
        for connection in self._of.get(process, ()):
            held = self._held[connection]
            self._leave(held)
            self._enter(held)

    def _leave(self, held: Held) -> None:
        if held.never:
            return
        lines = self._lines[held.instance]
        line = lines[held.uid]
        line.kin.pop(held.connection, None)
        line.new.pop(held.connection, None)
        if not line.kin and not line.new:
            del lines[held.uid]
            if not lines:
                del self._lines[held.instance]

    def _enter(self, held: Held) -> None:
        if held.never:
            return
        known = self._known.get(held.process)
        if known is not None and not held.busy:
            held.instance = known.instance
        line = self._lines.setdefault(held.instance, {}).setdefault(held.uid, _Line())
        self._insert(line.new if known is None else line.kin, held)

    @staticmethod
    def _insert(line: dict[int, Held], held: Held) -> None:
        late = bool(line) and next(reversed(line)) > held.connection
        line[held.connection] = held
        if late:
            in_order = sorted(line.items())
            line.clear()
            line.update(in_order)

    # --- who is next ---

    def took(self, uid: int, seconds: float, now: float, *, lost: bool = True, lives: bool = False) -> None:
        """A hand-over of this user has taken so long, while MPS answered no one. ``lost``: its client has not met its
        server; ``lives``: and could have."""
        long = seconds >= OWES_FROM
        if lost or long:
            self._alone.charge(uid, seconds, now)
        if not (lost and long):
            if lost or seconds >= SLOW_FROM:
                self._slow.charge(uid, seconds, now)
            return
        if len(self._lived) >= MOST_REMEMBERED:
            self._lived = {one: count for one, count in self._lived.items() if self._owes.free_from(one) > now}
        lived = self._lived.get(uid, 0) if self._owes.free_from(uid) + FORGIVEN > now else 0
        self._owes.charge(uid, seconds * (2**lived if lives else 1), now, longest=LONGEST_OWED)
        self._lived[uid] = min(9, lived + lives)

    def held_up(self, uid: int, seconds: float, now: float) -> None:
        """Charge a user whose clients have held other users' clients up, as the agent reports."""
        self._slow.charge(uid, seconds, now, longest=LONGEST_OWED)

    def _owed_until(self, uid: int, several: bool) -> float:
        if not several:
            return self._alone.free_from(uid)
        return max(self._slow.free_from(uid), self._owes.free_from(uid))

    def newly_slowed(self, instance: str, now: float) -> list[tuple[int, float]]:
        """Users whom :meth:`choose` has passed over there for what they owe, and until when; each once."""
        found = [(uid, until) for (where, uid), until in self.slowed.items() if where == instance]
        news = [(uid, until) for uid, until in found if self.told.get((instance, uid)) != until]
        if len(self.told) >= MOST_REMEMBERED:
            self.told = {one: until for one, until in self.told.items() if until > now}
        self.told |= {(instance, uid): until for uid, until in news}
        self.slowed.clear()
        return news

    def rest(self, instance: str, uid: int, now: float, first: float, longest: float) -> None:
        """None of this user's is handed over there for a while, twice as long each time until :meth:`rested`."""
        if len(self._rests) >= MOST_REMEMBERED:
            self._rests = {one: rest for one, rest in self._rests.items() if rest[0] > now}
        before = self._rests.get((instance, uid), (0.0, 0.0))[1]
        pause = min(longest, before * 2 or first)
        self._rests[instance, uid] = (now + pause, pause)

    def rested(self, instance: str, uid: int) -> None:
        """What this user has rested for there is no more."""
        self._rests.pop((instance, uid), None)

    def resting(self, instance: str) -> list[int]:
        return [uid for where, uid in self._rests if where == instance]

    def choose(self, now: float, admissions: Admissions) -> tuple[Held | None, float | None, bool]:
        """The connection to hand over now, in the instance that these admissions are for; else when one that only
        pauses may be tried again, and whether one waits for a place."""
        instance = admissions.instance
        lines = self._lines.get(instance, {})
        if not admissions.open or not lines:
            return None, None, False
        places = self.places(instance)
        if places.doubtful:
            return None, None, True
        several = len(admissions.users) > 1 or admissions.others is not None
        # Another user's client would wait in MPS for the end of all who work there, and hold up their next processes.
        alone = admissions.others is not None and not admissions.parallel and len(places) > 0
        wake: float | None = None
        best: tuple[int, int, Held] | None = None
        short = False
        full = places.taken() >= admissions.room
        users = lines.keys() if admissions.others is not None else lines.keys() & admissions.users.keys()
        for known in (True, False):
            for uid in users:
                user, mine = admissions.user(uid), lines[uid].kin if known else lines[uid].new
                if user is None or not mine or not (known or self._admits(user, uid, instance)):
                    continue
                if alone and not places.of_user[uid]:
                    continue
                owed = self._owed_until(uid, several)
                if best is not None and not known and owed <= now and next(iter(mine)) > best[1]:
                    continue  # it came later
                paced = self.contexts_from if known else max(self._new.free_from(uid), self._new.all_free_from())
                at = max(now, paced, self._rests.get((instance, uid), (0.0, 0.0))[0], owed)
                if full or (user.max_contexts is not None and places.taken(uid) >= user.max_contexts):
                    mine = {n: one for n, one in mine.items() if known and places.keeps_one(one.process)}
                    short = True
                of_it = self._counting(mine, user, admissions) if known else self._named(mine, user, admissions)
                found, later = _first(of_it, at)
                if found is not None and not known:
                    wanted = self.limits_for(found, user, admissions)
                    found = found if self._fits(found, wanted, user, user, admissions) else None
                if found is not None and at > now:
                    found, later = None, at
                    if owed > now:
                        self.slowed[instance, uid] = owed
                if found is not None:
                    # a process may bring a thousand contexts, each a tenth of a second (recording 12, H4)
                    place = (self._rounds.get(uid, 0) if known else 0, found.connection, found)
                    best = place if best is None else min(best, place)
                if later is not None and (wake is None or later < wake):
                    wake = later
            if best is not None:
                return best[2], None, False
        return None, wake, short

    def beyond(self, admissions: Admissions) -> Iterator[Held]:
        """A connection of each user whose processes have all the contexts that it may have and want more: its client
        is to be told so. Held, a process that has others' places would wait for those who wait for it."""
        places = self.places(admissions.instance)
        for uid, line in self._lines.get(admissions.instance, {}).items():
            user = admissions.user(uid)
            if user is not None and user.max_contexts is not None:
                most, first = user.max_contexts, dict[Process, Held]()
                for one in line.kin.values():  # if a process's oldest connection is not beyond it, none is
                    first.setdefault(one.process, one)
                yield from islice((one for one in first.values() if places.beyond(one.process, most, one.since)), 1)

    def _admits(self, user: User, uid: int, instance: str) -> bool:
        """Return whether a new process of this user may pass."""
        if user.admit != "all":
            return False
        return user.max_clients is None or self.places(instance).counted[uid] < user.max_clients

    def _counting(self, line: dict[int, Held], user: User, admissions: Admissions) -> Iterator[Held]:
        """Yield connections of known processes: all of a counted process; of another process, if its user and its job
        have room for it."""
        full: set[Process] = set()
        for held in line.values():
            if not self._known[held.process].counts and held.process not in full:
                wanted = self.limits_for(held, user, admissions)
                its_job = admissions.jobs.get(self._job(held.process, admissions))
                if not all(self._fits(held, wanted, user, whose, admissions) for whose in (user, its_job)):
                    full.add(held.process)
            if held.process not in full:
                yield held

    def _named(self, line: dict[int, Held], user: User, admissions: Admissions) -> Iterable[Held]:
        """New ones whose limits are known here and whose jobs have room: no job keeps its user's others waiting."""
        if not user.named:
            return line.values()
        its, jobs = admissions.processes, admissions.jobs
        named = ((held, its[held.process]) for held in line.values() if held.process in its)
        return (held for held, one in named if self._fits(held, one.limits, user, jobs.get(one.job), admissions))

    def _job(self, process: Process, admissions: Admissions) -> str:
        named = admissions.processes.get(process)
        return self._own.get(process, "") if named is None else named.job

    def _fits(self, held: Held, wanted: Limits, user: User, whose: User | Job | None, admissions: Admissions) -> bool:
        """Whether its user, or its job, has room for it beside its other processes. A process whose limits are not
        known counts with the most that a process of this user may have."""
        if whose is None or (whose.total is None and whose.max_clients is None):
            return True
        others = (one for one in self.places(admissions.instance) if one.process != held.process and one.counts)
        if isinstance(whose, Job):
            used = [one.limits or user.limits for one in others if self._job(one.process, admissions) == whose.name]
        else:
            used = [one.limits or user.limits for one in others if one.uid == held.uid]
        if whose.max_clients is not None and len(used) >= whose.max_clients:
            return False
        return whose.total is None or whose.total.fits(used, wanted)

    def limits_for(self, held: Held, user: User, admissions: Admissions) -> Limits:
        """What it is handed over with: its own limits, or its user's. A process that works already keeps what it has
        where that were limits of its own, or where more would not fit. If that is not known, it gets what a new one
        gets."""
        known, named = self._known.get(held.process), admissions.processes.get(held.process)
        wanted = user.limits if named is None else named.limits
        if known is None or known.limits is None:
            if user.named:
                self._own[held.process] = self._job(held.process, admissions)
            return wanted
        if user.total is None and held.process not in self._own:
            return wanted
        fits = held.process not in self._own and self._fits(held, wanted, user, user, admissions)
        return wanted if fits else known.limits


def _first(line: Iterable[Held], now: float) -> tuple[Held | None, float | None]:
    """The first one that does not pause, and when the first of those that do may be tried."""
    wake: float | None = None
    for count, held in enumerate(line):
        if held.not_before <= now:
            return held, None
        if wake is None or held.not_before < wake:
            wake = held.not_before
        if count >= LOOK_BEHIND:
            break
    return None, wake
