"""What is not as it should be, with a sentence for the person on call; ``status`` shows it, exit codes follow it."""

from __future__ import annotations

from dataclasses import dataclass

from mpsagent.agent.performer import Performer
from mpsagent.core.decide import Memory


@dataclass(frozen=True, slots=True)
class Trouble:
    """``what`` is wrong, ``since`` when (seconds since the epoch), what to ``do``; ``until``: when it is forgotten."""

    what: str
    since: float
    do: str = ""
    until: float | None = None


class Troubles:
    """One trouble a topic (``policy``, ``front-end``, ``control.log`` …); a new text keeps the time of the first."""

    def __init__(self) -> None:
        self._by_topic: dict[str, Trouble] = {}

    def set(self, topic: str, what: str | None, now: float, do: str = "", *, until: float | None = None) -> bool:
        """Set or, with None, clear a topic. ``until``: for what was a single event and whose end nobody will notice.
        True when that changed anything."""
        known = self._by_topic.get(topic)
        if what is None:
            return self._by_topic.pop(topic, None) is not None
        self._by_topic[topic] = Trouble(what, known.since if known else now, do, until)
        return known is None or (known.what, known.do) != (what, do)

    def expire(self, now: float) -> None:
        for topic, trouble in list(self._by_topic.items()):
            if trouble.until is not None and now >= trouble.until:
                del self._by_topic[topic]

    def all(self) -> tuple[Trouble, ...]:
        return tuple(sorted(self._by_topic.values(), key=lambda trouble: trouble.since))

    def topics(self) -> tuple[str, ...]:
        return tuple(self._by_topic)


def note_troubles(
    troubles: Troubles, performer: Performer, memory: Memory, history: str | None, running: bool, now: float
) -> None:
    """What the agent's own parts say about their health. ``running``: there is a control daemon."""
    troubles.set("front-end", performer.front_end_trouble, now, "is the NVIDIA driver installed?")
    troubles.set("front-end left open", performer.left_open, now, "end it: until then no limit can be set")
    drifted = ", ".join(str(pid) for pid in sorted(memory.limits.drifted))
    troubles.set(
        "limits",
        f"server {drifted} started with other limits than its user's policy" if drifted else None,
        now,
        "its later clients are right; end its present ones if that matters (mpsagent-cli client terminate PID)",
    )
    heard = running and performer.turned_away_since is None
    refused = memory.limits.failures if memory.limits.refused is not None and heard else 0
    unset = f"the default limits cannot be set: {refused} times in a row the daemon did not confirm them"
    known = "servers that start meanwhile have the limits that were set last; see mpsagent-cli events"
    troubles.set("defaults", unset if refused >= 2 else None, now, known)
    silent = "the control daemon does not answer" if performer.silent_since is not None else None
    troubles.set("control daemon silent", silent, now, "the agent resumes or kills what hangs after hang.control")
    failed = "the control daemon does not stay up; the agent has given up" if memory.hangs.failed else None
    troubles.set("control daemon failed", failed, now, "look at control.log, then run mpsagent-cli restart")
    troubles.set("history", history, now, "records are kept in memory only")
    if running:
        troubles.set("control daemon", None, now)
