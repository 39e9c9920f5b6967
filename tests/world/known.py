"""Does the world find what is known? Each mistake that was made once, put back into a copy of the tree, and the world
played there until it fails: `python -m tests.world.known [NUMBER ...] [--seeds 500] [--seconds 60]`. Where a patch
names a day of trouble it is played on that day.

`--mutations 10 --draw 7` takes ten small mistakes by chance instead, in lines of mpsagent/core, gate and linux that
worlds execute (`python -m tests.world.executed`; `--lines FILE`: what that has said before). Of one that is not found
it is said whether a test of the core and the gate notices it: where none does, a person has to see whether it changes
anything. `--tests` plays those tests and not the world. The status is 0 when all are found.
"""

from __future__ import annotations

import argparse
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from tests.world import administrator, executed, habits, mutator, trouble

ROOT = Path(__file__).parents[2]
MISTAKES = Path(__file__).parent / "mistakes"
PURE = ("tests/core", "tests/gate/test_queue.py", "tests/gate/test_places.py", "tests/gate/test_handover.py",
        "tests/gate/test_lane.py", "tests/gate/test_limits.py", "tests/gate/test_handshake_rescue.py",
        "tests/gate/test_pacing.py", "tests/gate/test_store.py", "tests/agent/test_saved.py")  # fmt: skip
LEFT_OUT = (".git", ".venv", "build", "dist", "data", "__pycache__", ".hypothesis", ".pytest_cache", ".mypy_cache",
            ".ruff_cache", "measured")  # fmt: skip


class Result(NamedTuple):
    found: bool
    tried: str
    seconds: float
    why: str


def patches() -> list[Path]:
    return sorted(MISTAKES.glob("*.patch"))


def breaks(patch: Path) -> str:
    """What it breaks: its first line."""
    return patch.read_text().partition("\n")[0]


def day(patch: Path) -> str | None:
    """Of trouble, the one that fits it best: a line "Day: NAME" behind that."""
    found = re.search(r"^Day: (\w+)$", patch.read_text().partition("--- a/")[0], re.MULTILINE)
    return found[1] if found else None


def applies(patch: Path, tree: Path = ROOT, *, check: bool = True) -> str:
    """Puts it into a tree, or only says whether it could be put there: empty, or why not."""
    how = ["--check"] if check else []
    done = subprocess.run(
        ["git", "apply", "--unidiff-zero", *how, str(patch)], cwd=tree, capture_output=True, text=True, check=False
    )
    return done.stderr if done.returncode else ""


def copy(where: Path) -> Path:
    """The tree as it is now, without what no world needs."""
    tree = where / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    (tree / "tests" / "data").symlink_to(ROOT / "tests" / "data")
    return tree


WORLDS = ("tests.world", "tests.world.trouble", "tests.world.administrator", "tests.world.habits")
"""The worlds, each for a part of the time."""
days: list[str] = []
"""Of trouble: these only; empty: all."""


def fitting() -> tuple[str, ...]:
    """The worlds that have the days that are played."""
    where = {WORLDS[1]: trouble.DAYS, WORLDS[2]: administrator.DAYS, WORLDS[3]: habits.DAYS}
    return tuple(world for world, names in where.items() if set(days) & set(names)) or WORLDS


AT_A_TIME = 13
"""Seeds of one world before some of the other one: a day of each kind."""
STUCK = 300
"""Processor seconds after which a world that goes on, in a loop without end, is killed."""


def play(tree: Path, seeds: int, seconds: float, first: int, worlds: Sequence[str]) -> Result:
    """Plays worlds there, for so many seconds of processor time. A seed that fails in the tree as it is proves
    nothing."""
    begun, tried = _spent(), 0
    next_one, last = dict.fromkeys(worlds, first), first + seeds - 1
    while _spent() < begun + seconds and any(number <= last for number in next_one.values()):
        for world, number in list(next_one.items()):
            count = min(AT_A_TIME, last - number + 1)
            left = max(1, int(begun + seconds - _spent()))
            how = ["--first", str(number), "--seeds", str(count), "--seconds", str(10 * left), "--no-shrink"]
            if count <= 0 or _spent() >= begun + seconds:
                continue
            done = _world(tree, world, how)
            if done.returncode == -signal.SIGKILL:
                return Result(True, f"{tried + count} seeds", _spent() - begun, f"{world} {number}: it stands still")
            said = re.search(r"^seed (\d+) .*?: (.*)", done.stdout, re.MULTILINE)
            if said is None:
                played = re.search(r"^(\d+) worlds", done.stdout, re.MULTILINE)
                if played is None:
                    return Result(False, f"{tried} seeds", _spent() - begun, f"{world} fails: {done.stderr[-200:]}")
                tried, next_one[world] = tried + int(played[1]), number + max(1, int(played[1]))
                continue
            tried, next_one[world] = tried + int(said[1]) - number + 1, int(said[1]) + 1
            if "the world has no" in done.stdout:  # what the mistake asks of it is not modelled
                continue
            if _world(ROOT, world, ["--first", said[1], "--seeds", "1", "--no-shrink"]).returncode == 0:
                return Result(True, f"{tried} seeds", _spent() - begun, f"{world} {said[1]}: {said[2]}")
    return Result(False, f"{tried} seeds", _spent() - begun, "")


def _spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _world(tree: Path, world: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    words = [*words, *(word for day in days if world in WORLDS[1:] for word in ("--day", day))]
    command = ["prlimit", f"--cpu={STUCK}", sys.executable, "-m", world, *words]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)


def tests(tree: Path) -> Result:
    """Plays the tests of the core and the gate there, until one fails."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "120", *PURE]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    counts = re.findall(r"(\d+) (?:passed|failed|error)", done.stdout)
    return Result(done.returncode != 0, f"{sum(map(int, counts))} tests", time.monotonic() - begun,
                  failed[1] if failed else "")  # fmt: skip


def mutations(tree: Path, count: int, seed: int, lines: executed.Lines) -> Iterator[mutator.Mutation]:
    """The tree has the mutation for as long as the caller looks at it."""
    for one in islice(mutator.drawn(ROOT, seed, lines), count):
        path = tree / one.file
        before = path.read_text()
        path.write_text(one.text)
        yield one
        path.write_text(before)


def main() -> int:
    words = argparse.ArgumentParser("tests.world.known", description=__doc__)
    words.add_argument("numbers", nargs="*", type=int, help="these mistakes only")
    words.add_argument("--seeds", type=int, default=500)
    words.add_argument("--seconds", type=float, default=60.0)
    words.add_argument("--first", type=int, default=1)
    words.add_argument("--world", choices=WORLDS, action="append", help="only this one")
    words.add_argument("--day", action="append", default=[], help="of trouble: this one only")
    words.add_argument("--tests", action="store_true")
    words.add_argument("--mutations", type=int, default=0)
    words.add_argument("--draw", type=int, default=7)
    words.add_argument("--lines", type=Path)
    words.add_argument("--quick", action="store_true", help="without those tests")
    asked = words.parse_args()
    days.extend(asked.day)
    worlds = asked.world or fitting()
    found: list[bool] = []

    def row(name: str, result: Result) -> None:
        found.append(result.found)
        said = "found" if result.found else "not found"
        print(f"{name} | {said} | {result.tried} | {result.seconds:.1f} s | {result.why[:140]}", flush=True)

    with tempfile.TemporaryDirectory() as directory:
        if asked.mutations:
            tree = copy(Path(directory))
            lines = executed.executed(ROOT) if asked.lines is None else executed.read(asked.lines)
            for number, one in enumerate(mutations(tree, asked.mutations, asked.draw, lines), 1):
                if asked.numbers and number not in asked.numbers:
                    continue
                result = play(tree, asked.seeds, asked.seconds, asked.first, worlds)
                row(f"{number} | {one}", result)
                if not result.found and not asked.quick:
                    noticed = tests(tree)
                    print(
                        f"    a test notices it: {noticed.why}" if noticed.found else "    no test notices it",
                        flush=True,
                    )
        else:
            for patch in patches():
                if asked.numbers and int(patch.name[:2]) not in asked.numbers:
                    continue
                tree = copy(Path(directory))
                why_not = applies(patch, tree, check=False)
                if why_not:
                    row(patch.stem, Result(False, "0 seeds", 0.0, f"does not apply: {why_not}"))
                else:
                    days[:] = asked.day or ([best] if (best := day(patch)) else [])
                    fit = asked.world or fitting()
                    result = tests(tree) if asked.tests else play(tree, asked.seeds, asked.seconds, asked.first, fit)
                    row(patch.stem, result)
                shutil.rmtree(tree)
    print(f"{sum(found)} of {len(found)} found")
    return int(not all(found))


if __name__ == "__main__":
    sys.exit(main())
