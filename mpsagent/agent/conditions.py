"""What is not as it should be, with a sentence for the person on call; ``status`` shows it, exit codes follow it."""

from __future__ import annotations

from dataclasses import dataclass

from mpsagent.core.engine import Core
from mpsagent.core.view import View


@dataclass(frozen=True, slots=True)
class Condition:
    """``what`` is wrong, ``since`` when (seconds since the epoch), what to ``do``; ``until``: when it is forgotten."""

    what: str
    since: float
    do: str = ""
    until: float | None = None


class Conditions:
    """One condition a topic (``policy``, ``gate``, ``control.log`` …); a new text keeps the time of the first."""

    def __init__(self) -> None:
        self._by_topic: dict[str, Condition] = {}

    def set(self, topic: str, what: str | None, now: float, do: str = "", *, until: float | None = None) -> bool:
        """Set or, with None, clear a topic. ``until``: for what was a single event and whose end will not be noticed.
        True when that changed anything."""
        known = self._by_topic.get(topic)
        if what is None:
            return self._by_topic.pop(topic, None) is not None
        self._by_topic[topic] = Condition(what, known.since if known else now, do, until)
        return known is None or (known.what, known.do) != (what, do)

    def expire(self, now: float) -> None:
        for topic, condition in list(self._by_topic.items()):
            if condition.until is not None and now >= condition.until:
                del self._by_topic[topic]

    def all(self) -> tuple[Condition, ...]:
        return tuple(sorted(self._by_topic.values(), key=lambda condition: condition.since))

    def topics(self) -> tuple[str, ...]:
        return tuple(self._by_topic)


WAIT_SLACK = 5.0
"""Seconds beyond what the policy allows until a wait is said to be too long."""


def note_conditions(conditions: Conditions, core: Core, now: float) -> None:
    """What the engine's state says about health."""
    view = core.view()
    state, memories = view.state, core.memories
    silent = "the control daemon does not answer" if state.silent_since is not None else None
    conditions.set("control daemon silent", silent, now, "the agent resumes or kills what hangs after hang.control")
    failed = "the control daemon does not stay up; the agent has given up" if memories.hangs.failed else None
    conditions.set("control daemon failed", failed, now, "look at control.log, then run mpsagent-cli restart")
    failure = state.start_failure
    starting = None
    if failure is not None and failure.count:
        said = failure.reason or "no reason given"
        starting = f"MPS's servers do not start ({failure.count} times in a row): {said}"
    conditions.set("servers", starting, now, "look at server.log and nvidia-smi; who waits is held, then refused")
    differs = ", ".join(str(pid) for pid in sorted(memories.limits.differs))
    what = f"server {differs} started with other limits than its client was handed over with" if differs else None
    conditions.set("limits", what, now, "see mpsagent-cli events; was the daemon changed by hand?")
    users = ", ".join(f"user {uid}: {why}" for uid, why in list(state.unconfirmed.items())[:5])
    what = f"MPS does not confirm limits, so the fail-safe ones are given ({users})" if users else None
    conditions.set("limits unconfirmed", what, now, "mpsagent-cli policy explain USER shows what was to be set")
    gate = state.gate
    unknown = "the control daemon greets in a way that is not known" if gate and gate.known_handshake is False else None
    conditions.set("handshake", unknown, now, "connections are passed on untouched, with the fail-safe limits for all")
    conditions.set("waiting", _too_long(view, now), now, "see mpsagent-cli queue")


def _too_long(view: View, now: float) -> str | None:
    """A user who waits longer than the policy says while nothing explains it: never healthy."""
    waiting = view.waiting()
    if not waiting or view.state.drain is not None or view.given_up is not None:
        return None
    uid = waiting[0]
    since = min(h.since for h in view.state.held_of(uid))
    turn = view.turn
    if turn is not None:
        rules = view.rules(turn.uid)
        times = turn.deadlines(rules)
        if times is None or rules.switch_action == "none" or not rules.enforce_switch:
            return None if turn.contested is not None or now < since + WAIT_SLACK else _stuck(uid, now - since)
        late = times[1] + rules.kill_grace + view.policy.hang_terminate + WAIT_SLACK
        return _stuck(uid, now - since) if now > late else None
    return _stuck(uid, now - since) if now > since + WAIT_SLACK else None


def _stuck(uid: int, seconds: float) -> str:
    return f"user {uid} has waited {seconds:.0f} s, longer than the policy says"
