"""The engine of one control daemon: its state, the rules about it, and what these remember.

No clock, no I/O, every time an argument. :mod:`mpsagent.core.coordinator` is above it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any

from mpsagent.core import actions as act
from mpsagent.core import (
    admission,
    confirmation,
    faults,
    hangs,
    ladder,
    limits,
    notices,
    quitting,
    relayed,
    starts,
    stopped_handovers,
)
from mpsagent.core import inputs as inp
from mpsagent.core.model import State
from mpsagent.core.rule import Decision
from mpsagent.core.view import View

RETRY = 1.0
"""Seconds until a rule in which a mistake showed is asked again."""
Mistake = tuple[str, Exception]
"""A rule or reducer that failed, and its exception."""
Named = tuple[tuple[str, Any], ...]
"""Rules with their names."""


@dataclass(frozen=True, slots=True)
class Memories:
    """The memory of each rule about a control daemon."""

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


class RuleRunner:
    """Asks rules, each with its memory in ``memories``. A mistake in one keeps no other from deciding, and is not made
    without end."""

    def __init__(self, memories: Any, mistakes: list[Mistake]) -> None:
        self.memories = memories
        self.mistakes = mistakes
        self._retry: dict[str, float] = {}
        """The time when a rule with a mistake is asked again."""

    def ask(self, rules: Named, view: Callable[[], View], now: float) -> list[Decision[object]]:
        """Each sees what those before it have decided."""
        return [self._ask(name, rule, view, now) for name, rule in rules]

    def _ask(self, name: str, rule: Any, view: Callable[[], View], now: float) -> Decision[object]:
        memory, retry = getattr(self.memories, name), self._retry.get(name)
        if retry is not None and now < retry:
            return Decision(memory, wake=retry)
        try:
            decision: Decision[object] = rule.decide(view(), memory, now)
        except Exception as error:
            self.mistakes.append((name, error))
            self._retry[name] = now + RETRY
            return Decision(memory, wake=now + RETRY)
        self._retry.pop(name, None)
        self.remember(name, decision.memory)
        return decision

    def remember(self, name: str, memory: Any) -> None:
        known = getattr(self.memories, name)
        if known is not memory and known != memory:
            self.memories = replace(self.memories, **{name: memory})

    def note(self, rules: Named, done: act.Done) -> None:
        """Tell the rules how an action has ended."""
        for name, rule in rules:
            try:
                if hasattr(rule, "note"):
                    self.remember(name, rule.note(getattr(self.memories, name), done))
            except Exception as error:
                self.mistakes.append((name, error))


class Engine(RuleRunner):
    """Decides for one control daemon."""

    memories: Memories

    def __init__(self, state: State, memories: Memories, mistakes: list[Mistake]) -> None:
        super().__init__(memories, mistakes)
        self.state = state
        self.wake: float | None = None
        """When to decide again at the latest."""
        self._saw = self._viewed = (state, memories, View(state))
        self._decided: list[Decision[object]] = []
        self._settled: tuple[State, Memories, View] | None = None
        """What the rules saw and remembered when they decided nothing more."""
        self._view: View | None = None
        self._remembered: dict[Any, Any] = {}
        """What views have worked out."""

    def view(self, above: View) -> View:
        """Return what the rules see. ``above``: what they see of the coordinator."""
        seen, mine = (self.state, self.memories, above), self.memories
        if self._view is None or not all(map(is_, seen, self._viewed)):
            own, failed = self.state.user is not None, mine.hangs.failed
            self._viewed, self._view = (
                seen,
                replace(
                    above,
                    state=self.state,
                    ending=ladder.ending(mine.ladder),
                    sent=None if mine.admission.sent is None else (mine.admission.number, mine.admission.sent),
                    given_up="the control daemon does not start or stay up" if failed else mine.starts.given_up,
                    pause_until=mine.starts.until,
                    retiring=mine.quitting.asked is not None,
                    users=frozenset() if own else above.users,
                    failing=frozenset([self.state.user] if failed else []),
                    unmade={} if own else above.unmade,
                    remembered=self._remembered,
                ),
            )
        return self._view

    def rests(self, above: View, now: float) -> bool:
        """Return whether the rules have decided all that there is to decide, and see what they saw then."""
        seen = self.state, self.memories, above
        due = self.wake is not None and now >= self.wake
        if due or self._settled is None or self._settled[1] is not self.memories:
            return False
        if not all(map(is_, seen, self._settled)):
            if self._settled != seen:
                return False
            self._settled = seen
        return True

    def decide(self, above: View, now: float) -> list[Decision[object]]:
        """Ask all rules but the ladder."""
        self._saw = self.state, self.memories, above
        self._decided = self.ask(RULES, lambda: self.view(above), now)
        return self._decided

    def climb(self, above: View, now: float) -> list[Decision[object]]:
        """Ask the ladder, which comes last and takes up what the rules ask for."""
        last = self.ask(LADDER, lambda: self.view(above), now)
        decided = self._decided + last
        self.wake = min((one.wake for one in decided if one.wake is not None), default=None)
        done = self.memories is self._saw[1] and not any(one.actions or one.requests for one in decided)
        self._settled = self._saw if done else None
        return last

    def noted(self, done: act.Done) -> None:
        """Tell the rules how an action of this control daemon has ended."""
        self.note((*RULES, *LADDER), done)

    def restart(self, event: inp.RestartOrdered) -> list[act.Action]:
        """A running daemon is asked to quit; the next one is started when it has gone."""
        old = self.memories.hangs
        under_way = hangs.Memory(start_asked=old.start_asked, up_since=old.up_since, queried_at=old.queried_at)
        self.remember("hangs", under_way)
        self.remember("starts", starts.Memory())
        control = self.state.control
        if control is None or not control.proven or control.quitting is not None:
            return []
        timeout = max(1, round(self.state.policy.kill_grace))
        reason = f"restart ordered by user {event.by}"
        return [act.QuitControl(timeout=timeout, reason=reason, rule="order", daemon=self.state.user)]


RULES: Named = (
    ("faults", faults),
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
"""Admission comes after those that decide who may come."""
LADDER: Named = (("ladder", ladder),)
