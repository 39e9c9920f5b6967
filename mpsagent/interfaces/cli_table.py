"""Tables that fit the terminal: long names are cut, columns move together, and the last column is cut or goes on below.
Pure."""

from __future__ import annotations

from collections.abc import Iterable

LEAST = 10
"""Columns that are left of a name."""
ROOM = 20
"""Columns that the last one gets before names are cut for it."""
WIDE = 1000
"""A pipe's width: nothing is cut for a program."""


def table(
    head: list[str] | None,
    rows: Iterable[list[str]],
    width: int = WIDE,
    *,
    names: tuple[int, ...] = (),
    right: bool = False,
    below: bool = False,
) -> list[str]:
    """Columns two spaces apart, the last not padded. ``names``: the columns that may be cut where all are wider than
    ``width``; ``right``: all but the first and ``names`` are numbers; ``below``: the last column goes on below instead
    of being cut."""
    cells = [*([head] if head is not None else []), *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    *before, last = widths
    wanted = last if right else min(last, ROOM)
    for column in names:
        over = sum(before) + 2 * len(before) + wanted - width
        before[column] = max(min(LEAST, before[column]), before[column] - max(0, over))
    gap = 1 if sum(before) + 2 * len(before) + wanted > width else 2
    indent = sum(before) + gap * len(before)
    lines: list[str] = []
    for row in cells:
        parts = [
            cut(cell, size).rjust(size) if right and column not in (0, *names) else cut(cell, size).ljust(size)
            for column, (cell, size) in enumerate(zip(row, before, strict=False))
        ]
        start = "".join(part + " " * gap for part in parts)
        end = row[-1].rjust(last) if right else row[-1]
        lines += _flowing(start, end, width) if below and len(end) > width - indent else [cut(start + end, width)]
    return [line.rstrip() for line in lines]


def _flowing(start: str, text: str, width: int) -> list[str]:
    """Beside what comes before it, or below all of it where too little room is left."""
    from textwrap import wrap

    if width - len(start) >= ROOM:
        first, *rest = wrap(text, width - len(start), break_on_hyphens=False)
        return [start + first, *(" " * len(start) + part for part in rest)]
    return [cut(start.rstrip(), width), *wrap(text, max(ROOM, width), initial_indent="   ", subsequent_indent="   ",
                                              break_on_hyphens=False)]  # fmt: skip


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"
