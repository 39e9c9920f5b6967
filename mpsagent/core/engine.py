"""The engine: ``receive(input, now) -> Step`` and ``deadline()``.

It alone holds the state, the rules' memories and what was ordered. The running agent, what-if replay, the start-up and
the tests drive this one object: no clock, no I/O, every time an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mpsagent.core import actions as act
from mpsagent.core import (
    admission,
    caps,
    confirmation,
    faults,
    hangs,
    ladder,
    limits,
    notices,
    pause,
    quitting,
    relayed,
    starts,
    stopped_handovers,
    turn_memory,
    turns,
    usage,
)
from mpsagent.core import inputs as inp
from mpsagent.core.model import State
from mpsagent.core.reduce import not_handed, reduce
from mpsagent.core.rule import Decision, EndClient, Section
from mpsagent.core.transitions import Transition
from mpsagent.core.view import View
from mpsagent.wire import link

PASSES = 8
"""More than one decision ever sets off in a row."""


UNSETTLED = 0.1
"""Seconds until it is decided again, should that ever not be enough."""
RETRY = 1.0
"""Seconds until a rule in which a mistake showed is asked again."""


class Step(NamedTuple):
    """What is to be done now, and what happened. ``mistakes``: rules and reducers that failed, each with its exception;
    the others have done their part all the same."""

    actions: tuple[act.Action, ...]
    transitions: tuple[Transition, ...]
    mistakes: tuple[tuple[str, Exception], ...] = ()


@dataclass(frozen=True, slots=True)
class Memories:
    """One for each rule."""

    usage: usage.Memory = field(default_factory=usage.Memory)
    turns: turn_memory.Memory = field(default_factory=turn_memory.Memory)
    pause: pause.Memory = field(default_factory=pause.Memory)
    faults: faults.Memory = field(default_factory=faults.Memory)
    hangs: hangs.Memory = field(default_factory=hangs.Memory)
    handovers: stopped_handovers.Memory = field(default_factory=stopped_handovers.Memory)
    starts: starts.Memory = field(default_factory=starts.Memory)
    caps: caps.Memory = field(default_factory=caps.Memory)
    relayed: relayed.Memory = field(default_factory=relayed.Memory)
    quitting: quitting.Memory = field(default_factory=quitting.Memory)
    limits: limits.Memory = field(default_factory=limits.Memory)
    notices: notices.Memory = field(default_factory=notices.Memory)
    admission: admission.Memory = field(default_factory=admission.Memory)
    ladder: ladder.Memory = field(default_factory=ladder.Memory)
    doubts: confirmation.Memory = field(default_factory=confirmation.Memory)


class Core:
    """One instance of MPS under one policy."""

    def __init__(self, state: State | None = None) -> None:
        self.state = state or State()
        self.memories = Memories()
        self._wake: float | None = None
        self._at_rest = False
        """Nothing is left to be decided before ``_wake``, unless something changes."""
        self._view: tuple[State, Memories, View] | None = None
        self._retry: dict[str, float] = {}
        """By rule in which a mistake showed: when it is asked again."""
        self._mistakes: list[tuple[str, Exception]] = []

    def receive(self, event: inp.Input | act.Done, now: float) -> Step:
        """Take one input in, and decide."""
        return self.receive_all((event,), now)

    def receive_all(self, events: Sequence[inp.Input | act.Done], now: float) -> Step:
        """Several inputs of one moment: decided upon together."""
        happened: list[Transition] = []
        actions: list[act.Action] = []
        before = self.state, self.memories
        for event in events:
            happened += self._reduce(event)
            if isinstance(event, inp.GateSaid) and isinstance(event.what, link.Applied):
                self._applied(event.what)
            actions += self._person(event, now)
            if isinstance(event, act.Done):
                self._note(event)
        same = self.state is before[0] and self.memories is before[1]
        if (
            same and self._at_rest and not self._mistakes and (self._wake is None or now < self._wake)
        ):  # most log lines are of this kind
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
            what = f"reduce({type(event.what if isinstance(event, inp.GateSaid) else event).__name__})"
            if all(what != name for name, _ in self._mistakes):
                self._mistakes.append((what, error))
            return []
        return told

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

    def view(self) -> View:
        """What the rules see now; for answers and views too."""
        m = self.memories
        if self._view is not None and self._view[0] is self.state and self._view[1] is m:
            return self._view[2]
        before = None if self._view is None else self._view[0]
        same = before is not None and before.leases is self.state.leases and before.policy is self.state.policy
        sent = None if m.admission.sent is None else (m.admission.number, m.admission.sent)
        asked = m.turns.shutdown
        failed = "the control daemon does not start or stay up" if m.hangs.failed else None
        view = View(
            state=self.state,
            ending=ladder.ending(m.ladder),
            turn=m.turns.turn,
            served=m.turns.served,
            suspended=m.turns.suspended,
            spent=m.usage.spent,
            sent=sent,
            in_the_way=None if asked is None else (asked.server, asked.since),
            given_up=failed or m.starts.given_up,
            pause_until=m.starts.until,
            retiring=m.quitting.asked is not None,
            turn_waits=m.turns.waits,
            remembered=self._view[2].remembered if same and self._view is not None else {},
        )
        self._view = self.state, m, view
        return view

    # --- one pass -----------------------------------------------------------------------------------------------------

    def _pass(self, now: float) -> tuple[list[act.Action], list[Transition]]:
        """Every rule once. The ladder comes last and takes up what the others ask for; admission after those that
        decide who may come."""
        actions: list[act.Action] = []
        happened: list[Transition] = []
        requests: list[EndClient] = []
        wakes: list[float] = []

        def use(decision: Decision[object]) -> None:
            actions.extend(decision.actions)
            happened.extend(decision.transitions)
            requests.extend(decision.requests)
            if decision.wake is not None:
                wakes.append(decision.wake)

        for name, rule in _RULES:
            use(self._ask(name, rule, now))
        for request in requests:
            self._take(request, now)
        use(self._ask("ladder", ladder, now))
        wakes += [lease.until for lease in self.state.leases]
        self._wake = min(wakes, default=None)
        return actions, happened

    def _ask(self, name: str, rule: Any, now: float) -> Decision[object]:
        """One rule. A mistake in it keeps no other from deciding, and is not made without end."""
        memory, retry = getattr(self.memories, name), self._retry.get(name)
        if retry is not None and now < retry:
            return Decision(memory, wake=retry)
        try:
            decision: Decision[object] = rule.decide(self.view(), memory, now)
        except Exception as error:
            self._mistakes.append((name, error))
            self._retry[name] = now + RETRY
            return Decision(memory, wake=now + RETRY)
        self._retry.pop(name, None)
        self._remember(name, decision.memory)
        return decision

    def _take(self, request: EndClient, now: float) -> None:
        """The ladder takes up a request."""
        try:
            self._remember("ladder", ladder.take(self.view(), self.memories.ladder, request, now))
        except Exception as error:
            self._mistakes.append(("ladder", error))

    def _remember(self, name: str, memory: Any) -> None:
        known = getattr(self.memories, name)
        if known is not memory and known != memory:
            self.memories = replace(self.memories, **{name: memory})

    def _note(self, done: act.Done) -> None:
        noting = [(name, rule.note) for name, rule in (*_RULES, ("ladder", ladder)) if hasattr(rule, "note")]
        for name, note in noting:
            try:
                self._remember(name, note(getattr(self.memories, name), done))
            except Exception as error:
                self._mistakes.append((name, error))

    def _applied(self, event: link.Applied) -> None:
        memory = self.memories.admission
        if memory.sent is not None and event.number == memory.number:
            self.state = not_handed(self.state, frozenset(memory.sent.users if memory.sent.open else ()))

    # --- orders -------------------------------------------------------------------------------------------------------

    def _person(self, event: inp.Input | act.Done, now: float) -> list[act.Action]:
        if isinstance(event, inp.EndOrdered):
            self._end_client(event, now)
        elif isinstance(event, inp.Resumed):
            for pid, start, uid, reason, rule, asked in event.ending:
                section = _section(rule)
                again = EndClient(
                    pid=pid, start=start, uid=uid, reason=reason, rule=rule, section=section, signals_only=asked
                )
                self._take(again, now)
        elif isinstance(event, inp.RestartOrdered):
            return self._restart(event)
        return []

    def _end_client(self, event: inp.EndOrdered, now: float) -> None:
        client = self.state.clients.get(event.pid)
        if client is not None:
            reason = f"ordered by uid {event.by}"
            self._take(EndClient.of(client, reason, "order", "order", hook=not event.at_once), now)

    def _restart(self, event: inp.RestartOrdered) -> list[act.Action]:
        """A running daemon is asked to quit; the next one is started when it has gone."""
        old = self.memories.hangs
        self._remember("hangs", hangs.Memory(up_since=old.up_since, queried_at=old.queried_at))
        self._remember("starts", starts.Memory())
        control = self.state.control
        if control is None or not control.proven or control.quitting is not None:
            return []
        timeout = max(1, round(self.state.policy.kill_grace))
        return [act.QuitControl(timeout=timeout, reason=f"restart ordered by uid {event.by}", rule="order")]


def _section(rule: str) -> Section:
    words = rule.split(".")
    return (
        "hang"
        if words[0] == "hang"
        else "switch"
        if "switch" in words
        else "order"
        if rule in ("order", "drain")
        else "limits"
    )


_RULES = (
    ("usage", usage),
    ("turns", turns),
    ("pause", pause),
    ("faults", faults),
    ("caps", caps),
    ("relayed", relayed),
    ("quitting", quitting),
    ("handovers", stopped_handovers),
    ("hangs", hangs),
    ("starts", starts),
    ("limits", limits),
    ("notices", notices),
    ("admission", admission),
    ("doubts", confirmation),
)
