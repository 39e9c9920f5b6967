"""What is not as it should be, with a sentence for the person on call; ``status`` shows it, exit codes follow it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trouble:
    """``what`` is wrong, ``since`` when (seconds since the epoch), and what to ``do``."""

    what: str
    since: float
    do: str = ""


class Troubles:
    """One trouble a topic (``policy``, ``front-end``, ``control.log`` …); a new text keeps the time of the first."""

    def __init__(self) -> None:
        self._by_topic: dict[str, Trouble] = {}

    def set(self, topic: str, what: str | None, now: float, do: str = "") -> bool:
        """Set or, with None, clear a topic. True when that changed anything."""
        known = self._by_topic.get(topic)
        if what is None:
            return self._by_topic.pop(topic, None) is not None
        if known is not None and (known.what, known.do) == (what, do):
            return False
        self._by_topic[topic] = Trouble(what, known.since if known else now, do)
        return True

    def all(self) -> tuple[Trouble, ...]:
        return tuple(sorted(self._by_topic.values(), key=lambda trouble: trouble.since))

    def topics(self) -> tuple[str, ...]:
        return tuple(self._by_topic)
