"""Which lines of the core and the gate a few worlds execute: `python -m tests.world.executed [SEEDS]`, by file."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from tests.world import plans, trouble
from tests.world.mutator import FOLDERS

Lines = dict[str, set[int]]


def executed(root: Path, seeds: int = 6) -> Lines:
    """In worlds of this tree, from seed 1: so many plans, and a day of each kind."""
    folders = tuple(f"{root / name}/" for name in FOLDERS)
    found: Lines = {}

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            found[frame.f_code.co_filename].add(frame.f_lineno)
        return line

    def call(frame: FrameType, _event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(folders):
            return None
        found.setdefault(name, set())
        return line

    sys.settrace(call)
    try:
        for seed in range(1, seeds + 1):
            plans.fails(plans.draw(seed))
        for name in trouble.DAYS:
            if name != "crowd":  # it takes as long as ten others
                trouble.fails(trouble.draw(1, (name,)))
    finally:
        sys.settrace(None)
    return {str(Path(name).relative_to(root)): lines for name, lines in found.items()}


def read(path: Path) -> Lines:
    """What was said before."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {name: set(map(int, lines)) for name, *lines in rows}


if __name__ == "__main__":
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    for name, lines in sorted(executed(Path(__file__).parents[2], seeds).items()):
        print(name, *sorted(lines))
