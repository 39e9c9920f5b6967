"""Worlds of all kinds, many at a time, each process with its own seeds; a failure is a file, and it goes on.

`pairs` are those of the heart: every pair of deaths of one client, `turns` those of a change of turn. What has been
played is a line in pairs-*.txt, and is left out the next time, if it was this code.
"""

from __future__ import annotations

import hashlib
import signal
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.world import administrator, habits, heart, trouble
from tests.world.kernel import BOOT
from tests.world.plans import draw, fails, hour, shrunk
from tests.world.plans import played as lasted
from tests.world.world import World

ROOT = Path(__file__).parents[2]
KINDS: dict[str, tuple[Callable[[int, tuple[str, ...]], Any], Callable[[Any], World]]] = {
    "minute": (draw, World),
    "hour": (hour, World),
    "trouble": (lambda seed, _: trouble.draw(seed), trouble.Troubled),
    "orders": (lambda seed, _: administrator.draw(seed), administrator.Administered),
    "habits": (lambda seed, _: habits.draw(seed), habits.Lived),
}
"""How a plan is drawn, and in which world it is played."""
SHARES = {"minute": 1.0, "hour": 2.0, "trouble": 1.0, "orders": 1.0, "habits": 1.0}
"""Of the time."""
PAIRS = {
    "pairs": (("one client", "shared"),),
    "turns": (("a change of turn", "shared"), ("a change of turn", "own")),
}
"""By turns."""
STUCK = 60.0
"""Processor seconds after which a world is given up."""
SHRINKING = 60.0


class Stuck(KeyboardInterrupt):
    """No task keeps it to itself."""


class First(NamedTuple):
    """A first death of the heart; behind it ``skip`` steps have been played before."""

    scene: str
    way: str
    number: int
    plan: Any
    skip: int


class Row(NamedTuple):
    """Of a first death: how many deaths behind it were played, of how many that each leave something else, before how
    many steps, and how many were broken."""

    played: int
    differ: int
    steps: int
    broken: int


def run(jobs: int, first: int, seconds: float, shares: Mapping[str, float], ways: tuple[str, ...], out: Path,
        before: Sequence[Path] = ()) -> int:  # fmt: skip
    """Exit status 1 when a world failed."""
    out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    count, hours, failed, spent = Counter[str](), Counter[str](), list[str](), Counter[str]()
    asked_pairs = [scene for kind, scenes in PAIRS.items() if kind in shares for scene in scenes]
    done_before = played_before(out, *before) if asked_pairs else {}
    todo = {kind: firsts(done_before, scenes) for kind, scenes in PAIRS.items() if kind in shares}
    with ProcessPoolExecutor(jobs) as pool:
        asked = [pool.submit(work, first + job, jobs, begun + seconds, dict(shares), ways,
                             {kind: left[job::jobs] for kind, left in todo.items()}, out / f"pairs-{first}-{job}.txt")
                 for job in range(jobs)]  # fmt: skip
        for done in asked:
            found = done.result()
            count, hours, failed, spent = count + found[0], hours + found[1], failed + found[2], spent + found[3]
    each = "; ".join(f"{name}: {count[name]}, {hours[name]:.1f} node-hours, {spent[name]:.0f} s of processors"
                     for name in shares if name in KINDS)  # fmt: skip
    lines = [*sorted(failed), f"{count.total()} worlds from seed {first} at {commit()} ({each}), {hours.total():.1f} "
             f"node-hours in {time.monotonic() - begun:.0f} s, {len(failed)} failed"]  # fmt: skip
    lines += [sums(played_before(out, *before), *scene) for scene in asked_pairs]
    (out / f"summary-{first}.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return int(bool(failed))


def work(
    seed: int, step: int, end: float, shares: dict[str, float], ways: tuple[str, ...], todo: dict[str, list[First]],
    pairs: Path,
) -> tuple[Counter[str], Counter[str], list[str], Counter[str]]:  # fmt: skip
    """Every ``step``-th seed, and these pairs: how many worlds of each kind, their hours, a line for each that failed,
    and the processor seconds of each kind."""
    signal.signal(signal.SIGPROF, give_up)
    count, hours, failed, used = Counter[str](), Counter[str](), list[str](), Counter[str]()
    spent = dict.fromkeys(shares, 0.0)
    while (begun := time.monotonic()) < end:
        for kind in [kind for kind, left in todo.items() if not left]:
            spent.pop(kind, None)
        if not spent:
            break
        kind, before = min(spent, key=lambda name: spent[name] / shares[name]), time.process_time()
        if kind in todo:
            failed += pair(todo[kind].pop(0), end, pairs)
        else:
            draws, make = KINDS[kind]
            plan = draws(seed, ways)
            found = played(plan, make)
            count[kind] += 1
            hours[kind] += lasted[-1] / 3600
            if found is not None:
                text = told(kind, seed, plan, found, min(end, time.monotonic() + SHRINKING))
                failed.append(text.splitlines()[0][:300])
                print(failed[-1], flush=True)
                (pairs.parent / f"{kind}-{seed}.txt").write_text(text)
            seed += step
        spent[kind] += time.monotonic() - begun
        used[kind] += time.process_time() - before  # type: ignore[assignment]
    return count, hours, failed, used


# --- pairs of deaths


def firsts(done: Mapping[tuple[str, str, int], Row], scenes: Sequence[tuple[str, str]]) -> list[First]:
    """What is left of them, in an order in which any part is spread over the whole."""
    lists = []
    for scene, way in scenes:
        plans = list(heart.deaths(heart.calm(scene, way)))
        left = []
        for number in sorted(range(len(plans)), key=lambda number: number * 0.618034 % 1):
            row = done.get((scene, way, number), Row(0, -1, 0, 0))
            if row.played != row.differ:
                left.append(First(scene, way, number, plans[number], row.played))
        lists.append(left)
    return [one for at in range(max(map(len, lists))) for left in lists for one in left[at : at + 1]]


def pair(first: First, end: float, pairs: Path) -> list[str]:
    """Every second death behind one. A line says what was played: the code, the first death, how many, of how many
    before how many steps, how many were broken."""
    scene, way, number, plan, skip = first
    count, steps, done, broken = heart.branches(plan, skip, end)
    reached = count if done is None else done
    with pairs.open("a") as file:
        file.write(f"{code()}|{scene}|{way}|{number}|{skip}|{reached}|{count}|{steps}|{len(broken)}\n")
    lines = []
    for worse, why in broken:
        who = ", then ".join(f"{one.who} before its step {one.call}" for one in worse.faults)
        lines.append(f"pair ({scene}, {way}: {who}) at {commit()}: {why}"[:300])
        print(lines[-1], flush=True)
        found = played(worse, World)
        story = found[1].story[-200:] if found is not None else ["played again it is well"]
        name = "-".join(f"{one.who}-{one.call}" for one in worse.faults)
        (pairs.parent / f"pair-{scene.replace(' ', '-')}-{way}-{name}.txt").write_text(
            "\n".join([lines[-1], str(worse), "", *story, ""])
        )
    return lines


def played_before(*directories: Path) -> dict[tuple[str, str, int], Row]:
    """With this code, by first death."""
    found: dict[tuple[str, str, int], Row] = {}
    for directory in directories:
        for path in sorted(directory.glob("**/pairs-*.txt")):
            for line in path.read_text().splitlines():
                version, scene, way, number, _, reached, count, steps, broken = line.split("|")
                if version == code():
                    key = scene, way, int(number)
                    before = found.get(key, Row(0, 0, 0, 0))
                    worse = before.broken + int(broken)
                    found[key] = Row(max(before.played, int(reached)), int(count), int(steps), worse)
    return found


def sums(done: Mapping[tuple[str, str, int], Row], scene: str, way: str) -> str:
    rows = [row for key, row in done.items() if key[:2] == (scene, way)]
    whole = [row for row in rows if row.played == row.differ]
    total = len(list(heart.deaths(heart.calm(scene, way))))
    return (f"{scene}, {way}: {sum(row.played for row in rows)} pairs of deaths played, all that leave something else "
            f"behind {len(whole)} of {total} first deaths ({sum(row.steps for row in whole)} steps of parties), "
            f"{sum(row.broken for row in rows)} broken (code {code()})")  # fmt: skip


@cache
def code() -> str:
    """Of what a world runs: with another one a step has another number."""
    paths = sorted(path for folder in ("mpsagent", "tests/world") for path in (ROOT / folder).rglob("*.py"))
    told = hashlib.sha256()
    for path in paths:
        told.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return told.hexdigest()[:10]


def give_up(*_: object) -> None:
    raise Stuck


def played(plan: Any, make: Callable[[Any], World]) -> tuple[str, World] | None:
    made: list[World] = []

    def making(plan: Any) -> World:
        made[:] = [make(plan)]
        return made[0]

    signal.setitimer(signal.ITIMER_PROF, STUCK)
    try:
        return fails(plan, making)
    except Exception as error:  # of the models: a failure of this seed, too
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}", made[0]
    except Stuck:
        return f"it is at {made[0].kernel.now - BOOT:.3f} s after {STUCK:.0f} s of a processor", made[0]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


@cache
def commit() -> str:
    """With a + where the files are not those of it. A copy of the tree may have a file that says it."""
    if (ROOT / "commit").exists():
        return (ROOT / "commit").read_text().strip()
    asked = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or f"code {code()}"


def told(kind: str, seed: int, plan: Any, found: tuple[str, World], until: float) -> str:
    make = KINDS[kind][1]
    head = f"{kind} {seed} ({plan.way}) at {commit()}: {found[0]}"
    again = f"python -m tests.world --kind {kind} --seed {seed}"
    story = ["as it was:", *found[1].story[-200:]]
    if "s of a processor" not in found[0] and "Error at" not in found[0]:
        plan = shrunk(plan, found[0], make=make, until=until)
        found = fails(plan, make) or found
        story = ["cut down:", str(plan), *found[1].story[-200:], "", *story]
    return "\n".join([head, again, "", *story, ""])
