"""Where a value of the policy stands, and how a mistake in it is told."""

from __future__ import annotations

from typing import Any, NamedTuple

Path = tuple[str, ...]
"""A key as its parts: ``("user", "alice", "turn", "time_limit")``."""


class PolicyError(NamedTuple):
    """One mistake or one warning. ``line`` 0: the file as a whole; ``key`` empty: not about one key."""

    file: str
    line: int
    key: str
    problem: str
    hint: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.key + ': ' if self.key else ''}{self.problem}{'; ' + self.hint if self.hint else ''}"


class Origin(NamedTuple):
    """Where a value was written. ``file`` is empty and ``line`` 0 for a built-in default."""

    key: str
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.key}" if self.file else f"{self.key} (built-in default)"

    @property
    def place(self) -> str:
        """The key with its file and line, as a reason names it."""
        return f"{self.key}, {self.file}:{self.line}" if self.file else f"{self.key}, built-in default"

    def wrong(self, problem: str, hint: str) -> PolicyError:
        return PolicyError(self.file, self.line, self.key, problem, hint)


class Setting(NamedTuple):
    """A value that a file gives, and where."""

    value: Any
    origin: Origin


def key_text(path: Path) -> str:
    """A key as one writes it in TOML: names with dots and other signs in quotes."""
    return ".".join(part if part and all(c.isalnum() or c in "-_" for c in part) else f'"{part}"' for part in path)


def printable(text: str) -> str:
    """A text without anything that could upset a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
