"""Tables that fit the terminal: long names are cut, columns move together, and the last column is cut or goes on below.
Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

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
    right: Collection[int] = (),
    below: bool = False,
) -> list[str]:
    """Columns two spaces apart, the last not padded. ``names``: the columns that may be cut where all are wider than
    ``width``; ``right``: those that are numbers; ``below``: the last column goes on below instead
    of being cut."""
    cells = [*([head] if head is not None else []), *rows]
    widths = [max(map(width_of, column)) for column in zip(*cells, strict=True)]
    *before, last = widths
    end_right = len(before) in right
    wanted = last if end_right else min(last, ROOM)
    for column in names:
        over = sum(before) + 2 * len(before) + wanted - width
        before[column] = max(min(LEAST, before[column]), before[column] - max(0, over))
    gap = 1 if sum(before) + 2 * len(before) + wanted > width else 2
    indent = sum(before) + gap * len(before)
    lines: list[str] = []
    for row in cells:
        parts = [
            padded(cut(cell, size), size, column in right)
            for column, (cell, size) in enumerate(zip(row, before, strict=False))
        ]
        start = "".join(part + " " * gap for part in parts)
        end = padded(row[-1], last, True) if end_right else row[-1]
        lines += _flowing(start, end, width) if below and width_of(end) > width - indent else [cut(start + end, width)]
    return [line.rstrip() for line in lines]


def _flowing(start: str, text: str, width: int) -> list[str]:
    """Beside what comes before it, or below all of it where too little room is left."""
    from textwrap import wrap

    before = width_of(start)
    if width - before >= ROOM:
        first, *rest = wrap(text, width - before, break_on_hyphens=False)
        return [start + first, *(" " * before + part for part in rest)]
    return [cut(start.rstrip(), width), *wrap(text, max(ROOM, width), initial_indent="   ", subsequent_indent="   ",
                                              break_on_hyphens=False)]  # fmt: skip


def cut(text: str, width: int) -> str:
    if width_of(text) <= width:
        return text
    room = width - 1
    for end, one in enumerate(text):
        room -= width_of(one)
        if room < 0:
            return text[:end] + "…"
    return text


def padded(text: str, width: int, right: bool = False) -> str:
    room = " " * (width - width_of(text))
    return room + text if right else text + room


def width_of(text: str) -> int:
    """Columns of a terminal that it takes: wide signs (Chinese, Japanese, Korean, emoji) two, combining ones none."""
    if text.isascii():
        return len(text)
    from unicodedata import category, east_asian_width

    return sum(0 if category(one) in ("Mn", "Me") else 2 if east_asian_width(one) in "WF" else 1 for one in text)
