"""The engine: ``receive(input, now) -> Step`` and ``deadline()``.

It alone holds the state, the rules' memories and what was ordered. The running agent, what-if replay, the start-up and
the tests drive this one object: no clock, no I/O, every time an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from mpsagent.core import actions as act
from mpsagent.core import (
    admission,
    caps,
    confirmation,
    faults,
    hangs,
    ladder,
    lanes,
    limits,
    notices,
    pause,
    quitting,
    relayed,
    starts,
    stopped_handovers,
    turn_memory,
    turns,
    unenforced,
)
from mpsagent.core import inputs as inp
from mpsagent.core.changes import T, of_lane
from mpsagent.core.model import Key, State
from mpsagent.core.reduce import not_handed, reduce
from mpsagent.core.rule import Decision, EndClient, Section, of_turns
from mpsagent.core.transitions import Transition
from mpsagent.core.view import View
from mpsagent.wire import link

Where = Key | Literal["all"]
"""A lane, or all of them."""
_ALL: tuple[Where, ...] = ("all",)

PASSES = 8
"""More than one decision ever sets off in a row."""


UNSETTLED = 0.1
"""Seconds until it is decided again, should that ever not be enough."""
RETRY = 1.0
"""Seconds until a rule in which a mistake showed is asked again."""


class Step(NamedTuple):
    """Actions to do now, and transitions. ``mistakes``: rules and reducers that failed, each with its exception; the
    others have still done their part."""

    actions: tuple[act.Action, ...]
    transitions: tuple[Transition, ...]
    mistakes: tuple[tuple[str, Exception], ...] = ()


@dataclass(frozen=True, slots=True)
class OfLane:
    """The memory of the rules about one control daemon."""

    faults: faults.Memory = field(default_factory=faults.Memory)
    relayed: relayed.Memory = field(default_factory=relayed.Memory)
    quitting: quitting.Memory = field(default_factory=quitting.Memory)
    handovers: stopped_handovers.Memory = field(default_factory=stopped_handovers.Memory)
    hangs: hangs.Memory = field(default_factory=hangs.Memory)
    starts: starts.Memory = field(default_factory=starts.Memory)
    limits: limits.Memory = field(default_factory=limits.Memory)
    notices: notices.Memory = field(default_factory=notices.Memory)
    admission: admission.Memory = field(default_factory=admission.Memory)
    doubts: confirmation.Memory = field(default_factory=confirmation.Memory)
    ladder: ladder.Memory = field(default_factory=ladder.Memory)


@dataclass(frozen=True, slots=True)
class Memories:
    """The memory of the rules about users, and of the rules about control daemons for each lane."""

    turns: turn_memory.Memory = field(default_factory=turn_memory.Memory)
    pause: pause.Memory = field(default_factory=pause.Memory)
    caps: caps.Memory = field(default_factory=caps.Memory)
    unenforced: unenforced.Memory = field(default_factory=unenforced.Memory)
    users: lanes.Memory = field(default_factory=lanes.Memory)
    lanes: Mapping[Key, OfLane] = field(default_factory=lambda: {None: OfLane()})


class Core:
    """The engine of an instance of MPS under one policy."""

    def __init__(self, state: State | None = None) -> None:
        self.state = state or State()
        self.memories = Memories()
        self._wake: float | None = None
        self._at_rest = False
        """Nothing is left to be decided before ``_wake``, unless something changes."""
        self._views: dict[Where, View] = {}
        self._viewed: tuple[State, Memories] | None = None
        """What these views are of."""
        self._remembered: dict[Any, Any] = {}
        """What they have answered."""
        self._parts: tuple[State, Mapping[Key, State]] | None = None
        self._retry: dict[tuple[str, Where], float] = {}
        """The time when a rule with a mistake is asked again, by rule and lane."""
        self._mistakes: list[tuple[str, Exception]] = []
        self._settled: dict[Key, tuple[View, OfLane, float | None]] = {}
        """By lane, of several: what its rules saw and remembered when they decided nothing more, and until when."""
        self._number = 0
        """Of the last table of a lane that has gone: one that comes again goes on behind it."""

    def receive(self, event: inp.Input | act.Done, now: float) -> Step:
        """Take one input in, and decide."""
        return self.receive_all((event,), now)

    def receive_all(self, events: Sequence[inp.Input | act.Done], now: float) -> Step:
        """Several inputs of one moment: decided upon together."""
        happened: list[Transition] = []
        actions: list[act.Action] = []
        before = self.state, self.memories
        for event in events:
            if isinstance(event, inp.ProcessEnded):  # its end may be heard of before MPS's answer that it is over
                for of_lane in self.memories.lanes.values():
                    if (asked := ladder.unanswered(of_lane.ladder, event.pid)) is not None:
                        self._reduce(act.Done(event.at, asked, True))
            happened += self._reduce(event)
            lane, said = (event.lane, event.what) if isinstance(event, inp.Of) else (None, event)
            if isinstance(said, inp.GateSaid) and isinstance(said.what, link.Applied) and lane in self.state.lanes:
                self._applied(said.what, lane)
            actions += self._person(event, now)
            if isinstance(event, act.Done):
                self._note(event)
        same = self.state is before[0] and self.memories is before[1]  # most log lines are of this kind
        if same and self._at_rest and not self._mistakes and (self._wake is None or now < self._wake):
            return Step(tuple(actions), tuple(happened))
        step = self.tick(now)
        return step._replace(actions=(*actions, *step.actions), transitions=(*happened, *step.transitions))

    def absorb(self, events: Sequence[inp.Input]) -> list[Transition]:
        """Take in what happened earlier, without deciding anything: for the start."""
        happened: list[Transition] = []
        for event in events:
            happened += self._reduce(event)
        self._at_rest = False
        return happened

    def _reduce(self, event: inp.Input | act.Done) -> list[Transition]:
        """A mistake in what is made of one input keeps no other from being taken in."""
        try:
            self.state, told = reduce(self.state, event)
        except Exception as error:
            said = event.what if isinstance(event, inp.Of) else event
            what = f"reduce({type(said.what if isinstance(said, inp.GateSaid) else said).__name__})"
            if all(what != name for name, _ in self._mistakes):
                self._mistakes.append((what, error))
            return []
        if self.state.lanes.keys() != self.memories.lanes.keys():
            self._follow_lanes()
        return told

    def _follow_lanes(self) -> None:
        """A lane that is new remembers what its user was told before, one that has gone is forgotten."""
        known = self.memories.lanes
        gone = [one.admission.number for lane, one in known.items() if lane not in self.state.lanes]
        self._number = max([self._number, *gone])
        fresh = OfLane(admission=admission.Memory(self._number), notices=known[None].notices)
        self.memories = replace(self.memories, lanes={lane: known.get(lane, fresh) for lane in self.state.lanes})
        self._settled = {lane: one for lane, one in self._settled.items() if lane in self.state.lanes}
        self._retry = {one: at for one, at in self._retry.items() if one[1] == "all" or one[1] in self.state.lanes}

    def tick(self, now: float) -> Step:
        """Decide because of the time."""
        actions: list[act.Action] = []
        happened: list[Transition] = []
        self._at_rest = False
        for lease in self.state.leases:
            if now >= lease.until:
                happened += self._reduce(inp.LeaseEnded(now, lease.number))
        for _ in range(PASSES):
            before = self.memories
            made, told = self._pass(now)
            actions += made
            happened += told
            if not made and self.memories is before:
                self._at_rest = True
                break
        else:
            self._wake = now + UNSETTLED if self._wake is None else min(self._wake, now + UNSETTLED)
        mistakes, self._mistakes = tuple(self._mistakes), []
        return Step(tuple(actions), tuple(happened), mistakes)

    def deadline(self) -> float | None:
        """When :meth:`tick` has to be called at the latest; None: only an input can change anything."""
        return self._wake

    def view(self, lane: Where = "all") -> View:
        """What the rules see now, of one lane or of all; for answers and views too."""
        state, m = self.state, self.memories
        if self._viewed is None or self._viewed[0] is not state or self._viewed[1] is not m:
            self._viewed, self._views = (state, m), {"all": self._view(state)}
        everything = self._views["all"]
        if lane == "all" or len(state.lanes) == 1:
            return everything
        if lane not in self._views:
            if self._parts is None or self._parts[0] is not state:
                self._parts = state, state.parts()
            mine = m.lanes[lane]
            self._views[lane] = replace(
                everything, state=self._parts[1][lane], ending=ladder.ending(mine.ladder), starting=frozenset(),
                admitted=frozenset(), users=everything.users if lane is None else frozenset(), **_of_daemon(mine),
            )  # fmt: skip
        return self._views[lane]

    def _view(self, state: State) -> View:
        m = self.memories
        asked = m.turns.shutdown
        tables = [one.admission.sent for one in m.lanes.values() if one.admission.sent is not None]
        view = View(
            state=state,
            ending={pid: one for each in m.lanes.values() for pid, one in ladder.ending(each.ladder).items()},
            turn=m.turns.turn,
            served=m.turns.served,
            suspended=m.turns.suspended,
            in_the_way=None if asked is None else (asked.server, asked.since),
            turn_waits=m.turns.waits,
            users=frozenset(one for one in m.lanes if one is not None) | m.users.making | m.users.going,
            starting=frozenset(one for one, mine in m.lanes.items() if mine.hangs.start_asked),
            failing=frozenset(one for one, mine in m.lanes.items() if mine.hangs.failed),
            unmade={uid: why for uid, (_, why) in m.users.failed.items()},
            admitted=frozenset().union(*(table.users for table in tables)),
            remembered=self._remembered,
            **_of_daemon(m.lanes[None]),
        )
        return replace(view, short=True) if lanes.short(view) else view

    # --- one pass -----------------------------------------------------------------------------------------------------

    def _pass(self, now: float) -> tuple[list[act.Action], list[Transition]]:
        """Every rule once, those about a control daemon for each lane. The ladder comes last and takes up what the
        others ask for; admission after those that decide who may come."""
        actions: list[act.Action] = []
        happened: list[Transition] = []
        requests: list[EndClient] = []
        wakes: list[float] = []

        lanes = [lane for lane in self.state.lanes if not self._rests(lane, now, wakes)]
        seen = {lane: (self.view(lane), self.memories.lanes[lane]) for lane in lanes}
        of_lanes: dict[Key, list[float | None]] = {lane: [] for lane in lanes}

        def ask(name: str, rule: Any) -> None:
            for where in [one for one in lanes if one in self.state.lanes] if name in _OF_LANES else _ALL:
                decision = self._ask(name, rule, now, where)
                actions.extend(self._of_where(one, where) for one in decision.actions)
                happened.extend(self._of_where(one, where) for one in decision.transitions)
                requests.extend(decision.requests)
                if decision.wake is not None:
                    wakes.append(decision.wake)
                if where != "all":
                    of_lanes[where].append(float("-inf") if decision.actions or decision.requests else decision.wake)

        for name, rule in _RULES:
            ask(name, rule)
        for one in actions:
            if isinstance(one, act.CloseLane):
                happened += self._reduce(inp.LaneClosed(now, one.uid))
        for request in requests:
            actions += self._take(request, now)
        ask("ladder", ladder)
        for lane, (view, memory) in seen.items() if len(self.state.lanes) > 1 else ():
            if lane in self.memories.lanes and self.memories.lanes[lane] is memory:
                until = min((at for at in of_lanes[lane] if at is not None), default=None)
                self._settled[lane] = view, memory, until
        wakes += [lease.until for lease in self.state.leases]
        self._wake = min(wakes, default=None)
        return actions, happened

    def _rests(self, lane: Key, now: float, wakes: list[float]) -> bool:
        """Its rules have decided all that there is to decide, and see what they saw then."""
        view, memory, until = self._settled.get(lane, (None, None, None))
        if memory is not self.memories.lanes[lane] or (until is not None and now >= until) or view != self.view(lane):
            return False
        if until is not None:
            wakes.append(until)
        return True

    def _of_where(self, one: T, where: Where) -> T:
        """Said to be of the lane that it is about."""
        return of_lane(one, self.state.lane_of(getattr(one, "uid", None)) if where == "all" else where)

    def _ask(self, name: str, rule: Any, now: float, lane: Where) -> Decision[object]:
        """One rule. A mistake in it keeps no other from deciding, and is not made without end."""
        memory, retry = getattr(self._of(lane), name), self._retry.get((name, lane))
        if retry is not None and now < retry:
            return Decision(memory, wake=retry)
        try:
            decision: Decision[object] = rule.decide(self.view(lane), memory, now)
        except Exception as error:
            self._mistakes.append((name, error))
            self._retry[name, lane] = now + RETRY
            return Decision(memory, wake=now + RETRY)
        self._retry.pop((name, lane), None)
        self._remember(name, decision.memory, lane)
        return decision

    def _take(self, wanted: EndClient | inp.Begun, now: float) -> tuple[act.Action, ...]:
        """Put a client on the ladder of its lane, or return the report of an end that is not enforced."""
        client = self.state.clients.get(wanted.pid)
        lane = None if client is None else client.lane
        try:
            view, memory = self.view(lane), self._of(lane).ladder
            if isinstance(wanted, inp.Begun):
                memory = ladder.resume(view, memory, wanted, _section(wanted.rule), now)
            elif unenforced.enforced(view, wanted.uid, wanted.section):
                memory = ladder.take(view, memory, wanted, now)
            else:
                reported, reports = unenforced.take(self.view(), self.memories.unenforced, wanted)
                self._remember("unenforced", reported, "all")
                return tuple(self._of_where(one, lane) for one in reports)
            self._remember("ladder", memory, lane)
        except Exception as error:
            self._mistakes.append(("ladder", error))
        return ()

    def _of(self, lane: Where) -> Any:
        return self.memories if lane == "all" else self.memories.lanes[lane]

    def _remember(self, name: str, memory: Any, lane: Where) -> None:
        before = self._of(lane)
        known = getattr(before, name)
        if known is memory or known == memory:
            return
        after = replace(before, **{name: memory})
        self.memories = after if lane == "all" else replace(self.memories, lanes={**self.memories.lanes, lane: after})

    def _note(self, done: act.Done) -> None:
        lane = done.action.lane
        for name, rule in (*_RULES, ("ladder", ladder)):
            where: Where = lane if name in _OF_LANES else "all"
            if not hasattr(rule, "note") or (where != "all" and where not in self.memories.lanes):
                continue
            try:
                self._remember(name, rule.note(getattr(self._of(where), name), done), where)
            except Exception as error:
                self._mistakes.append((name, error))

    def _applied(self, event: link.Applied, lane: Key) -> None:
        memory = self.memories.lanes[lane].admission
        if memory.sent is not None and event.number == memory.number:
            part = self.state.of(lane)
            fresh = not_handed(part, frozenset(memory.sent.users if memory.sent.open else ()))
            self.state = self.state.merged(part, fresh)

    # --- orders -------------------------------------------------------------------------------------------------------

    def _person(self, event: inp.Input | act.Done, now: float) -> list[act.Action]:
        if isinstance(event, inp.EndOrdered):
            self._end_client(event, now)
        elif isinstance(event, inp.Resumed):
            for begun in event.ending:
                self._take(begun, now)
        elif isinstance(event, inp.RestartOrdered):
            return [one for lane in self.state.lanes for one in self._restart(event, lane)]
        elif isinstance(event, inp.Of) and isinstance(event.what, inp.RestartOrdered):
            return self._restart(event.what, event.lane) if event.lane in self.state.lanes else []
        return []

    def _end_client(self, event: inp.EndOrdered, now: float) -> None:
        client = self.state.clients.get(event.pid)
        if client is not None:
            reason = f"ordered by user {event.by}"
            self._take(EndClient.of(client, reason, "order", "order", hook=not event.at_once), now)

    def _restart(self, event: inp.RestartOrdered, lane: Key) -> list[act.Action]:
        """A running daemon is asked to quit; the next one is started when it has gone."""
        old = self.memories.lanes[lane].hangs
        under_way = hangs.Memory(start_asked=old.start_asked, up_since=old.up_since, queried_at=old.queried_at)
        self._remember("hangs", under_way, lane)
        self._remember("starts", starts.Memory(), lane)
        control = self.state.lanes[lane].control
        if control is None or not control.proven or control.quitting is not None:
            return []
        timeout = max(1, round(self.state.policy.kill_grace))
        reason = f"restart ordered by user {event.by}"
        return [act.QuitControl(timeout=timeout, reason=reason, rule="order", lane=lane)]


def _of_daemon(memory: OfLane) -> dict[str, Any]:
    """What a view has of the rules about its control daemon."""
    sent = None if memory.admission.sent is None else (memory.admission.number, memory.admission.sent)
    failed = "the control daemon does not start or stay up" if memory.hangs.failed else None
    return {
        "sent": sent, "given_up": failed or memory.starts.given_up, "pause_until": memory.starts.until,
        "retiring": memory.quitting.asked is not None,
    }  # fmt: skip


def _section(rule: str) -> Section:
    if rule.startswith("timeouts."):
        return "timeouts"
    if of_turns(rule):
        return "turn"
    return "order" if rule in ("order", "drain") else "limits"


_RULES = (
    ("turns", turns),
    ("pause", pause),
    ("faults", faults),
    ("caps", caps),
    ("relayed", relayed),
    ("quitting", quitting),
    ("users", lanes),
    ("handovers", stopped_handovers),
    ("hangs", hangs),
    ("starts", starts),
    ("limits", limits),
    ("notices", notices),
    ("admission", admission),
    ("doubts", confirmation),
)
_OF_LANES = frozenset(one.name for one in fields(OfLane))
