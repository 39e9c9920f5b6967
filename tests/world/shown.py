"""What people are shown agrees with the world: `status`, `clients`, `queue` and `servers`, and at the end each
process's session. The real api makes them of the agent's pages and records; here they are held against processes and
people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from signal import SIGTERM
from typing import TYPE_CHECKING, Any

from mpsagent.core.sessions import Session, Sessions
from tests.world.judges import HELD_UP
from tests.world.people import Life

if TYPE_CHECKING:
    from tests.world.world import World

STALE, TROUBLED = 2.0, 25.0
"""Seconds for which something else may be shown than what is so: as long as logs, MPS and the agent take to tell; and
within ``AFTER`` seconds of a fault, while gate or agent come back or a silent daemon is waited for."""
AFTER = 30.0
EVERY = 1.0
"""Seconds between two looks: it is as much work as the rest of a quiet world."""
FEW = 12
"""Clients at work with which no server is full, as each has at most ``CONTEXTS``."""
CONTEXTS = 3
FULL, UNHEARD = 40, 2
"""Contexts of a server, of at most 48, that are surely on record; so many may have gone, unheard by the agent."""
NEAR = 0.3
"""Seconds by which a time on record may differ from the one seen from outside."""
What = tuple[Any, ...]


class Shown:
    """``wrong``: since when it has been so; ``stood``: how all was when that was found."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._wrong: dict[What, float] = {}
        self._looked = 0.0
        self._stood: tuple[Any, ...] | None = None

    def look(self) -> None:
        world, now = self.world, self.world.kernel.now
        if now < self._looked + EVERY:
            return
        self._looked = now
        if world.shown is None or world.received.page is None or world.received.old is not None:
            self._stood, self._wrong = None, {}  # nobody is told that this is so now
            return
        stands = self._stands()
        if stands != self._stood:
            self._stood, found = stands, dict.fromkeys(self._all())
            self._wrong = {what: self._wrong.get(what, now) for what in found}
        faults = world.judges.faults
        bound = TROUBLED if any(now - at < AFTER for at, _ in faults) or now - world.judges.stopped < AFTER else STALE
        bound += HELD_UP * sum(not one.honest for one in world.judges.lives)  # a hand-over of theirs takes that long
        for what, since in self._wrong.items():
            if now - since > bound:
                world.judges.fail(f"for {now - since:.1f} s the status has said otherwise: {' '.join(map(str, what))}")
                return

    def _stands(self) -> tuple[Any, ...]:
        """All that the answers and what they are held against are made of, but for spans of time, which nobody judges:
        while it is the same nothing else can be found."""
        world, judges = self.world, self.world.judges
        processes = [(one.pid, one.uid, one.alive, one.stopped) for one in world.kernel.processes.values()]
        lives = [(one.waits, one.works, one.error, one.limits, judges.served(one)) for one in judges.lives
                 if one.process.alive]  # fmt: skip
        return world.received, world.received.page, world.drained, world.gate, len(judges.faults), processes, lives

    def _all(self) -> Iterator[What]:
        world = self.world
        assert world.shown is not None
        status = world.shown.status()
        yield from self._clients(list(world.shown.clients()))
        yield from self._servers(status)
        if world.plan.turns:
            yield from self._turn(status)
        yield from self._reasons()
        yield from self._health(status)

    # --- now

    def _clients(self, rows: list[Any]) -> Iterator[What]:
        processes = self.world.kernel.processes
        came = {one.process: one.whose for one in self.world.judges.lives if one.process.alive}
        for row in rows:
            process = processes.get(row["pid"])
            if process is None or not process.alive or row["uid"] not in came.get(process, {process.uid}):
                yield "process", row["pid"], "of user", row["uid"], "is", row["state"], "and has ended"
        of = {(row["pid"], row["uid"]): row for row in rows}
        for life in self.world.judges.lives:
            one = of.get((life.process.pid, life.uid))
            if life.process.stopped or not life.process.alive:
                continue
            if life.waits and life.honest and (one is None or one["state"] != "waiting"):
                yield "client", life.process.pid, "waits, and is", "not shown" if one is None else one["state"]
            served = self.world.judges.served(life) and not self._known_to_nobody
            if life.works and life.honest and life.error is None and served:
                if one is None or one["state"] not in ("running", "ending", "paused", "sticky"):
                    yield "client", life.process.pid, "works, and is", "not shown" if one is None else one["state"]
                elif not (
                    life.limits is None
                    or any(_same(one["limits"], each) for each in self.world.judges.limits_of(life))
                    or self.world.judges.forgotten(life)
                ):
                    yield "client", life.process.pid, "has", life.limits, "and is shown with", str(one["limits"])

    @property
    def _known_to_nobody(self) -> bool:
        """Who works: with the descriptors in systemd's store that has gone."""
        return any(kind == "reinstall" for _, kind in self.world.judges.faults)

    def _servers(self, status: Any) -> Iterator[What]:
        world = self.world
        there = {one.pid for one in world.who("server")}
        shown = {one["pid"] for one in world.shown.servers()} if world.shown is not None else set()
        for pid in sorted(there ^ shown):
            yield "server", pid, *(("runs, and is not shown",) if pid in there else ("has ended, and is shown",))
        control = status["control"]
        if control is not None and control["pid"] not in {one.pid for one in world.who("daemon")}:
            yield "control daemon", control["pid"], "has ended"
        if control is not None and world.plan.way != "apart" and not status["gate"]["handshake"]:
            yield "control daemon", control["pid"], "runs, and the gate has not heard its greeting"
        gate = world.gate
        if gate is not None and gate.process.alive and status["gate"]["pid"] != gate.process.pid:
            yield "the gate is", gate.process.pid, "and not", status["gate"]["pid"]

    def _turn(self, status: Any) -> Iterator[What]:
        lives = self.world.judges.lives
        at_work = {one.uid for one in lives if one.works and not one.process.stopped and self.world.judges.served(one)}
        if len(at_work) != 1 or any(one.works and one.users for one in lives):
            return
        (uid,), turn = at_work, status["turn"]
        if turn is None or turn["uid"] != uid:
            yield "the turn is user", None if turn is None else turn["uid"], "while user", uid, "works"
        assert self.world.shown is not None
        rows = {one["uid"]: one for one in self.world.shown.queue()}
        for other in {one.uid for one in lives if one.waits and not one.process.stopped} - at_work:
            one = rows.get(other)
            if one is None:
                yield "user", other, "waits, and is not in the queue"
            elif one["reason"] == "turn" and not {f"u{uid}", f"{uid}"} & set(one["why"].replace(",", " ").split()):
                yield "user", other, "waits for user", uid, "and is told:", one["why"]

    def _health(self, status: Any) -> Iterator[What]:
        lives = self.world.judges.lives
        if self.world.plan.well and not self.world.judges.faults and all(one.honest for one in lives):
            for one in status["health"]["problems"]:
                if "has waited" not in one["what"]:
                    yield "nothing is amiss, and the status says:", one["what"]

    def _reasons(self) -> Iterator[What]:
        """Who waits is told why, and it is what holds them."""
        world, plan = self.world, self.world.plan
        assert world.shown is not None
        policy, contexts = plan.policy + getattr(plan, "then", ""), sum(one.works for one in world.judges.lives)
        could = {
            "drain": world.drained is not None, "denied": "deny" in policy, "max_clients": "max_clients" in policy,
            "max_contexts": "max_contexts" in policy, "total": "total_" in policy, "paused": "pause" in policy,
            "turn": plan.turns, "daemon": plan.way == "apart",
            "full": contexts > FEW or any(one.contexts > CONTEXTS for one in plan.comings),
            "name": getattr(plan, "by_name", False),
        }  # fmt: skip
        for row in world.shown.queue():
            uid, reason = row["uid"], row["reason"]
            if not row["why"]:
                yield "user", uid, "waits, and is not told why"
            elif "own turn" in row["why"]:  # it is ending, and when the next one comes is not known yet
                continue
            elif reason == "turn" and row["turn_seconds"] is None and getattr(plan, "name", "") == "ends":
                yield "user", uid, "waits for a turn that the policy ends, and is not told when"
            elif not could.get(reason, True):
                yield "user", uid, "is told", reason, "which cannot be:", row["why"]
            elif world.drained is not None and reason not in ("drain", "handover", "paused", "control", "gate"):
                yield "user", uid, "waits in a drain, and is told", reason

    # --- in the end

    def at_the_end(self) -> None:
        """Nothing is left of anybody; and where nothing was thrown in, each process's session is what was seen."""
        world, judges = self.world, self.world.judges
        if world.shown is None or world.received.page is None:
            judges.fail("the api has never heard of the agent")
            return
        status = world.shown.status()
        for what in ("clients", "waiting_processes"):
            if status[what]:
                judges.fail(f"everything is over, and the status counts {status[what]} {what}")
        self._nearly_full()
        if not judges.faults and all(fault.who != "clock" for fault in world.plan.faults):
            self._sessions()

    def _nearly_full(self) -> None:
        """Each server that came near its 48 contexts is on record with as many as it had."""
        judges, said = self.world.judges, dict[Any, int]()
        for one in self.world.received.history.since(0, 10_000):
            if one["kind"] == "clients.nearly_full":
                said[one["server"]] = count = int(str(one["reason"]).split(" has ")[1].split()[0])
                if count > judges.most.get(one["server"], 0) + UNHEARD:
                    judges.fail(f"on record: {one['reason']}; it had {judges.most.get(one['server'], 0)}")
        unsaid = [pid for pid, most in judges.most.items() if most >= FULL and pid not in said]
        if unsaid and not judges.faults:
            judges.fail(f"server {unsaid[0]} had {judges.most[unsaid[0]]} contexts, which is not on record")

    def _sessions(self) -> None:
        judges, wall = self.world.judges, self.world.kernel.wall
        records = self.world.received.history.since(0, 10_000)
        found = sessions(records)
        if len(found) > 3000:  # the first ones may be forgotten
            return
        verified = {one.get("server") for one in records if one["kind"] == "limits.verified"}
        if self.world.plan.well and (unsaid := {one for one, honest in judges.servers.items() if honest} - verified):
            judges.fail(f"that server {min(unsaid)} started with its first client's limits is not on record")
        clients = [one for one in found if one.kind == "client"]
        open_ones = [one for one in found if one.ended is None and one.kind != "turn"]
        if open_ones:
            judges.fail(f"everything is over, and this session is open: {open_ones[0]}")
        knocked = [one for one in judges.lives if one.knocked is not None]
        for life in knocked:
            assert life.knocked is not None
            mine = [one for one in clients if (one.pid, one.uid) == (life.process.pid, life.uid)
                    and abs(one.came - wall - life.knocked) < NEAR]  # fmt: skip
            what = f"client {life.process.pid} of user {life.uid}"
            if not mine and not life.honest:
                continue  # it may have come by another process
            if not mine:
                judges.fail(f"{what} came and is not on record")
            elif getattr(life, "kind", "honest") == "honest" and life.honest:
                self._session(what, life, mine[0], wall)
        known = self.world.plan.well and all(one.kind == "honest" for one in self.world.plan.comings)
        if known and len(clients) != len(knocked):
            judges.fail(f"{len(knocked)} processes came, and {len(clients)} are on record")
        turns = sorted((one for one in found if one.kind == "turn"), key=lambda one: one.came)
        for before, after in pairwise(turns):
            if before.ended is None or before.ended > after.came + 0.001:
                judges.fail(f"two turns at once on record: {before} and {after}")
        used = Counter(one.uid for one in turns)
        came = {one.uid for one in judges.lives if one.knocked is not None}  # it may leave as its turn begins
        worked = {one.uid for one in judges.lives if one.given is not None}
        liars = {uid for one in judges.lives if not one.honest for uid in one.whose}
        if self.world.plan.turns and not worked - liars <= used.keys() <= came | liars:
            judges.fail(f"turns are on record of users {sorted(map(str, used))}, and others worked")

    def _session(self, what: str, life: Life, one: Session, wall: float) -> None:
        fail, over = self.world.judges.fail, life.left or life.process.kernel.now
        if (one.passed is None) != (life.given is None):
            fail(f"{what} was{' ' if life.given else ' not '}handed over, and its session says: {one}")
            return
        if life.given is not None and one.passed is not None:
            latest = life.given if life.worked is None else life.worked
            if not life.given - NEAR < one.passed - wall < latest + NEAR:
                fail(f"{what} was handed over at {life.given:.2f}, and its session says {one.passed - wall:.2f}")
            wanted = {"ended"} if life.error == "terminated" else {"ok"}
            others = [one for one in self.world.judges.lives if one is not life and life.uid in (one.uid, *one.whose)]
            if life.error == "terminated" and any(
                other.error == "terminated" or other.process.status == -SIGTERM for other in others
            ):
                wanted |= {"faulted"}  # they were ended together, and the exit of the other one was a fault
            if life.process.status == -SIGTERM:  # it had done its work, and was ended before it had left
                wanted |= {"ok", "ended"}
            if one.outcome not in wanted and life.error in (None, "terminated"):
                how = "was ended" if life.error else "has done its work"
                fail(f"{what} {how}, and its session says: {one.outcome}")
            if life.error == "terminated" and not one.why:
                fail(f"{what} was ended, and its session does not say why")
        if one.ended is not None and abs(one.ended - wall - over) > NEAR:
            fail(f"{what} ended at {over:.2f}, and its session says {one.ended - wall:.2f}")


def sessions(records: list[dict[str, object]]) -> list[Session]:
    """All, as the history makes them of its records. Where there is a single instance records of clients name none, and
    it has what was open."""
    kept, made = Sessions(), dict[int, Session]()
    for record in records:
        if str(record["kind"]).startswith("client.") and "instance" not in record:
            kept.place(None)
        for one in kept.take(record):
            made[id(one)] = one
    return list(made.values())


def _same(shown: Any, limits: tuple[float, int] | None) -> bool:
    if limits is None:
        return shown is None
    return (
        shown is not None
        and shown["threads"] == limits[0]
        and [*shown["memory"].values()] == ([limits[1] << 20] if limits[1] else [])
    )
