"""The ladder: how one client is ended without hurting another.

``terminate_client`` first; a signal to a client with a kernel in flight is a fault for all its neighbours (recording
03, Q5). MPS answers before the GPU has finished the graph or the kernels that it is working on. If the process exits
before that, by a signal or by itself, all its neighbours are lost (recording 16). So the agent holds the files of the
GPU that the client has open, from before the request until ``SETTLE`` seconds after the answer. Then SIGTERM,
``sigkill_delay``, SIGKILL. Where it cannot hold them, SIGTERM waits for ``SETTLE``, which helps programs that do not
exit by themselves. Nothing is held when all clients of the server are being ended.

For a client with a sticky error, and when its server has gone, there is nothing left to protect and
``terminate_client`` would block the daemon (recording 03, Q4): the ladder starts at SIGTERM.

One client at a time is asked: the daemon is single-threaded and a stopped client blocks it until it dies, so a second
request would not be heard, and a signal after a request that was not heard is a signal first.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

from mpsagent.core import actions as act
from mpsagent.core.inputs import Begun
from mpsagent.core.model import Status
from mpsagent.core.rule import Decision, EndClient, Section
from mpsagent.core.unenforced import enforced
from mpsagent.core.view import Ending, View

GIVE_UP = 30.0
"""Seconds after SIGKILL until a process that still exists is reported as unkillable (stuck in the driver)."""
TERMINATE = 5.0
"""Seconds in which MPS has to answer `terminate_client`. It answers after 8 ms, and never for a stopped client."""
SETTLE = 10.0
"""Seconds from MPS's answer to ``terminate_client`` in which the client's work leaves the GPU. On busy H100s, where one
launch of a graph took 1.3 s, the neighbours were lost in 2 of 3 ends with 1 s. With 10 s they were lost in 4 of 54 ends
of PyTorch programs, for which no longer wait helps, and in 0 of 310 others (recording 17)."""
ASK_AGAIN = 1.0
"""Seconds until a ``terminate_client`` that could not be delivered is tried again."""


class Rung(IntEnum):
    HOOK = 0
    TERMINATE = 1
    SETTLE = 2
    SIGTERM = 3
    SIGKILL = 4
    UNKILLABLE = 5


@dataclass(frozen=True, slots=True)
class Climb:
    """One client on its way out. ``at``: when the present rung was reached; ``asked``: its action has been sent."""

    pid: int
    start: int
    uid: int
    reason: str
    rule: str
    rung: Rung
    at: float
    kill_grace: float
    deadline: float
    hook: str | None = None
    hook_deadline: float = 0.0
    section: Section = "order"
    asked: bool = False
    server: int | None = None
    """Which server ``terminate_client`` was sent to."""
    again_at: float | None = None
    """``terminate_client`` was not delivered: when to try again."""
    blocks: bool = False
    """``terminate_client`` has been sent and not been answered: the daemon waits for this client."""
    protect: bool = False
    """Other clients of the server continued to work when it was sent."""

    def to(self, rung: Rung, at: float) -> Climb:
        return replace(self, rung=rung, at=at, asked=False)


@dataclass(frozen=True, slots=True)
class Memory:
    climbs: Mapping[int, Climb] = field(default_factory=dict)


def ending(memory: Memory) -> Mapping[int, Ending]:
    """For the other rules: who is on the way out."""
    return {
        pid: Ending(
            pid, c.blocks and c.rung < Rung.UNKILLABLE, c.rung > Rung.TERMINATE, c.at, c.reason, c.rung is Rung.HOOK
        )
        for pid, c in memory.climbs.items()
    }


def take(view: View, memory: Memory, request: EndClient, now: float) -> Memory:
    """Put a client on the ladder. One that is on it already stays where it is, unless it now may be signalled, or its
    hook is no longer waited for. A process that has ended, or is another one than was meant, is not put on it."""
    if not view.is_alive(request.pid, request.start) or view.state.clients[request.pid].uid != request.uid:
        return memory
    rules, policy, known = view.rules(request.uid), view.policy, memory.climbs.get(request.pid)
    if known is not None and known.start == request.start:
        if request.signals_only and known.rung < Rung.SETTLE:
            return _with(memory, known.to(Rung.SIGTERM, now))
        if not request.hook and known.rung is Rung.HOOK:
            return _with(memory, known.to(Rung.TERMINATE, now))
        return memory
    program = rules.before_end_hook if request.hook and not request.signals_only else None
    rung = Rung.SIGTERM if request.signals_only else Rung.TERMINATE
    climb = Climb(
        pid=request.pid,
        start=request.start,
        uid=request.uid,
        reason=request.reason,
        rule=request.rule,
        section=request.section,
        rung=Rung.HOOK if program else rung,
        at=now,
        kill_grace=rules.kill_grace,
        deadline=TERMINATE,
        hook=program,
        hook_deadline=policy.hook_deadline,
    )
    return _with(memory, climb)


def _with(memory: Memory, climb: Climb) -> Memory:
    return Memory({**memory.climbs, climb.pid: climb})


def begun(memory: Memory) -> Iterator[Begun]:
    """Yield the facts about each client on the ladder that the next agent needs. ``asked`` has a meaning only together
    with the rung: on the first one the hook was started, and a request that was not delivered was not asked."""
    for climb in memory.climbs.values():
        was_asked = climb.rung > Rung.TERMINATE or (climb.asked and climb.again_at is None)
        step = "hook" if climb.rung is Rung.HOOK else "asked" if was_asked else "terminate"
        yield Begun(climb.pid, climb.start, climb.uid, climb.reason, climb.rule, step, climb.at)


def resume(view: View, memory: Memory, one: Begun, section: Section, now: float) -> Memory:
    """Put a client on the ladder that an earlier agent had begun to end. A hook is started again, with the rest of its
    deadline. MPS is asked unless the earlier agent had asked it: a second request would block the daemon (X8). The time
    of the answer is not known, so ``SETTLE`` begins now."""
    request = EndClient(
        pid=one.pid, start=one.start, uid=one.uid, reason=one.reason, rule=one.rule, section=section,
        hook=one.step == "hook",
    )  # fmt: skip
    taken = take(view, memory, request, now)
    climb = taken.climbs.get(one.pid)
    if climb is None or climb is memory.climbs.get(one.pid):
        return taken
    if one.step == "asked":
        return _with(taken, climb.to(Rung.SETTLE, now))
    since = min(now, one.at)
    if climb.rung is Rung.HOOK:
        return _with(taken, replace(climb, hook_deadline=max(0.0, since + climb.hook_deadline - now)))
    return _with(taken, replace(climb, at=since))


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    todo: list[act.Action] = []
    climbs: dict[int, Climb] = {}
    wakes: list[float] = []
    alive = {pid: c for pid, c in memory.climbs.items() if view.is_alive(pid, c.start)}
    busy = any(c.blocks and c.rung < Rung.UNKILLABLE for c in alive.values())
    leaving = frozenset(pid for pid, c in alive.items() if c.rung >= Rung.TERMINATE)
    for pid, climb in alive.items():
        if not _wanted(view, climb):
            continue
        climb, made, at = _step(view, climb, now, busy, leaving)
        busy = busy or climb.blocks
        todo += made
        climbs[pid] = climb
        if at is not None:
            wakes.append(at)
    return Decision(Memory(climbs), tuple(todo), wake=min(wakes, default=None))


def _wanted(view: View, climb: Climb) -> bool:
    """False when the client has left its server by itself before it was asked, or when its rule is enforced no more."""
    if not enforced(view, climb.uid, climb.section):
        return False
    client = view.state.clients[climb.pid]
    asked = climb.rung is Rung.TERMINATE and climb.asked
    if climb.rung > Rung.TERMINATE or asked or client.detached is None:
        return True
    return client.outcome != "ok"  # its server ended under it: the process is a leftover


def _may_ask(view: View, climb: Climb, now: float) -> tuple[bool | None, int | None]:
    """Whether ``terminate_client`` can be sent now, and to which server; None when there is nothing to protect and
    signals come first. That a client has no context, or its server a fault, is not taken from a log alone."""
    state, client = view.state, view.state.clients[climb.pid]
    server, known = view.works_on(client, climb.at)
    if server is None:
        over = known or not view.control_alive or now >= climb.at + climb.deadline
        return (None if over else False), None
    alone = all(other.pid == climb.pid for other in state.working_on(server))
    if server.status is Status.FAULT:  # the request would block the daemon (recording 03, Q4)
        return (None if server.fault_confirmed and (alone or climb.pid in server.sticky) else False), server.pid
    if state.control is not None and state.control.quitting is not None:  # nothing is heard
        return (None if alone else False), server.pid
    return True, server.pid


def _step(
    view: View, climb: Climb, now: float, busy: bool, leaving: frozenset[int]
) -> tuple[Climb, list[act.Action], float | None]:
    """One client's next step: at most one action, and when to look again."""
    if climb.rung is Rung.HOOK:
        if climb.asked and now < climb.at + climb.hook_deadline:
            return climb, [], climb.at + climb.hook_deadline
        if not climb.asked:
            return replace(climb, asked=True), [_hook(climb)], climb.at + climb.hook_deadline
        climb = climb.to(Rung.TERMINATE, now)
    if climb.rung is Rung.TERMINATE:
        climb, made, at = _terminate(view, climb, now, busy, leaving)
        if climb.rung is Rung.TERMINATE:
            return climb, made, at
    if climb.rung is Rung.SETTLE:
        if now < climb.at + SETTLE and _neighbours(view, leaving):
            return climb, [], climb.at + SETTLE
        climb = climb.to(Rung.SIGTERM, now)
    if climb.rung is Rung.SIGTERM:
        # A stopped process cannot act on SIGTERM, and the daemon may be waiting for it.
        own = view.state.clients[climb.pid].frozen is None  # one that is frozen is just being thawed
        grace = 0.0 if own and climb.pid in view.state.stopped else climb.kill_grace
        if climb.asked and now < climb.at + grace:
            return climb, [], climb.at + grace
        if not climb.asked:
            return replace(climb, asked=True, at=now), [_signal(climb, signal.SIGTERM)], now + climb.kill_grace
        climb = climb.to(Rung.SIGKILL, now)
    if climb.rung is Rung.SIGKILL:
        if climb.asked and now < climb.at + GIVE_UP:
            return climb, [], climb.at + GIVE_UP
        if not climb.asked:
            return replace(climb, asked=True, at=now), [_signal(climb, signal.SIGKILL)], now + GIVE_UP
        climb = climb.to(Rung.UNKILLABLE, now)
    if climb.asked:
        return climb, [], None
    return replace(climb, asked=True), [_unkillable(climb)], None


def _neighbours(view: View, leaving: frozenset[int]) -> bool:
    """Return whether clients are at work that are not being ended."""
    return any(one.detached is None and pid not in leaving for pid, one in view.state.clients.items())


def _terminate(
    view: View, climb: Climb, now: float, busy: bool, leaving: frozenset[int]
) -> tuple[Climb, list[act.Action], float | None]:
    """Ask MPS to end the client, and move it on when that is done. ``leaving``: all that are being ended."""
    terminated = view.state.clients[climb.pid].terminated
    if terminated is not None and not climb.blocks:  # asked a second time, the daemon would wait until it exits
        return climb.to(Rung.SETTLE, terminated), [], None
    may, server = _may_ask(view, climb, now)
    if may is None:
        return climb.to(Rung.SIGTERM, now), [], None
    # The executor reports the outcome at the deadline; timeouts.control_daemon on top of it is for one that does not.
    given_up = climb.at + climb.deadline + view.policy.hang_control
    if climb.asked and not climb.blocks and climb.again_at is not None:
        over = climb.at + climb.deadline
        if now >= over:
            return climb.to(Rung.SIGTERM, now), [], None
        if now < climb.again_at:
            return climb, [], min(over, climb.again_at)
    elif climb.asked and now < given_up:
        return climb, [], given_up
    if climb.asked and climb.blocks:
        return climb.to(Rung.SIGTERM, now), [], None
    if busy or not may or server is None:
        wake = climb.at + climb.deadline
        return climb, [], wake if server is None and wake > now else None
    at = climb.at if climb.asked else now
    climb = replace(climb, asked=True, blocks=True, at=at, again_at=None, server=server)
    climb = replace(climb, protect=_neighbours(view, leaving))
    return climb, [_request(climb, server)], max(given_up, now + climb.deadline)


def _request(climb: Climb, server: int) -> act.TerminateClient:
    return act.TerminateClient(
        server=server, pid=climb.pid, uid=climb.uid, start=climb.start, deadline=climb.deadline,
        reason=climb.reason, rule=climb.rule, protect=climb.protect,
    )  # fmt: skip


def unanswered(memory: Memory, pid: int) -> act.TerminateClient | None:
    """What MPS was asked about this process, and has not answered."""
    climb = memory.climbs.get(pid)
    return None if climb is None or not climb.blocks or climb.server is None else _request(climb, climb.server)


def _signal(climb: Climb, number: signal.Signals) -> act.SignalClient:
    why = f"{climb.reason}; {number.name} to client {climb.pid} of user {climb.uid}"
    return act.SignalClient(
        pid=climb.pid, start=climb.start, uid=climb.uid, signal=int(number), reason=why, rule=climb.rule
    )


def _hook(climb: Climb) -> act.RunHook:
    subject: dict[str, object] = {
        "pid": climb.pid,
        "uid": climb.uid,
        "server": climb.server,
        "reason": climb.reason,
        "rule": climb.rule,
    }
    return act.RunHook(
        program=climb.hook or "", subject=subject, deadline=climb.hook_deadline, reason=climb.reason, rule=climb.rule
    )


def _unkillable(climb: Climb) -> act.Report:
    reason = (
        f"client {climb.pid} of user {climb.uid} is still there {GIVE_UP:.0f} s after SIGKILL: it hangs in the kernel; "
        "look at dmesg for NVRM messages"
    )
    return act.Report(
        kind="client.unkillable", reason=reason, rule=climb.rule, uid=climb.uid, pid=climb.pid, server=climb.server
    )


def note(memory: Memory, done: act.Done) -> Memory:
    """Move a client on when its ``terminate_client`` was answered or is over its deadline, or its hook has ended."""
    action = done.action
    if isinstance(action, act.TerminateClient):
        climb = memory.climbs.get(action.pid)
        if climb is None or not climb.blocks:
            return memory
        if done.ok or done.at >= climb.at + climb.deadline:
            moved = replace(climb, blocks=not done.ok)
            following = Rung.SETTLE if done.ok and not done.held else Rung.SIGTERM
            moved = moved.to(following, done.at) if climb.rung is Rung.TERMINATE else moved
        else:
            moved = replace(climb, blocks=False, again_at=done.at + ASK_AGAIN)
        return _with(memory, moved)
    if isinstance(action, act.RunHook):
        pid = action.subject.get("pid")
        climb = memory.climbs.get(pid) if isinstance(pid, int) else None
        if climb is None or climb.rung is not Rung.HOOK:
            return memory
        return _with(memory, climb.to(Rung.TERMINATE, done.at))
    return memory
