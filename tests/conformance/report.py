"""Scenario by scenario: what of real MPS the simulator reproduces, and everything that still differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.conformance import compare
from tests.conformance.normalise import Section, sections

HERE = Path(__file__).resolve().parent
REAL = HERE / "real"
RECORDINGS = HERE.parent / "data" / "recordings"

# Races by design: real MPS differs from run to run here, so kinds of lines are compared and differences only shown.
RACES = {
    "Q1": "the defaults are set while the server starts: some clients get them, some the last user's",
    "Q9": "only latencies were recorded",
    "R13": "64 clients at once come in any order",
}


def by_scenario(text: str) -> dict[str, list[Section]]:
    """Scenario -> its parts, the recorded one last."""
    found: dict[str, list[Section]] = {}
    for section in sections(text):
        found.setdefault(section.name, []).append(section)
    return found


@dataclass
class References:
    """What real MPS did: kept transcripts of these scenarios, and the recordings."""

    real: dict[str, list[tuple[str, list[Section]]]] = field(default_factory=dict)  # scenario -> (where from, parts)
    recorded: dict[str, tuple[str, Section]] = field(default_factory=dict)
    known: dict[str, set[str]] = field(default_factory=dict)


def references(real: Path = REAL, recordings: Path = RECORDINGS) -> References:
    found = References()
    for path in sorted(real.glob("*/raw*.txt")):
        for name, parts in by_scenario(path.read_text(errors="replace")).items():
            found.real.setdefault(name, []).append((path.parent.name, parts))
            for part in parts:
                _learn(found.known, part)
    for path in sorted(recordings.glob("*.txt")):
        for section in sections(path.read_text(errors="replace"), one_run=True):
            found.recorded[section.name] = (path.name, section)
            _learn(found.known, section)
    return found


def _learn(known: dict[str, set[str]], section: Section) -> None:
    for stream, lines in compare.of_kind(section).items():
        known.setdefault(stream, set()).update(lines)


@dataclass(frozen=True)
class Result:
    name: str
    title: str
    against: str  # "real DATE-DRIVER", "recording 01-…" or "" when there is nothing to compare with
    verdict: compare.Verdict


def judge(parts: Sequence[Section], found: References) -> list[Result]:
    """One scenario against every yardstick that there is for it."""
    name, title = parts[-1].name, parts[-1].title
    results = []
    if kept := found.real.get(name):
        verdicts = []
        for _, theirs in kept:
            pairs = zip(theirs, parts, strict=False)
            if name in RACES:
                verdicts.append(compare.with_recording(theirs[-1], parts, found.known))
            else:
                verdicts.append(compare.worst([compare.with_real(real, ours) for real, ours in pairs]))
        where = ", ".join(sorted({where for where, _ in kept}))
        results.append(Result(name, title, f"real {where}", compare.best(verdicts)))
    if name in found.recorded:
        where, section = found.recorded[name]
        verdict = compare.with_recording(section, parts, found.known)
        results.append(Result(name, title, f"recording {where[:2]}", verdict))
    return results or [Result(name, title, "", compare.Verdict(compare.SAME))]


def report(played: Mapping[str, Sequence[Section]], found: References) -> tuple[list[str], bool]:
    """The lines to print, and whether everything agrees (a race by design aside)."""
    lines: list[str] = []
    counts: dict[str, dict[str, int]] = {}
    good = True
    for name, parts in played.items():
        for result in judge(parts, found):
            if not result.against:
                lines.append(f"{name:4} no real transcript yet  {result.title}")
                continue
            race = name in RACES
            level = f"{result.verdict.level} ({RACES[name]})" if race else result.verdict.level
            yardstick = counts.setdefault(result.against.split()[0], {})
            yardstick[result.verdict.level] = yardstick.get(result.verdict.level, 0) + 1
            good &= race or result.verdict.level != compare.DIFFERS
            lines.append(f"{name:4} {result.against:14} {level}  {result.title}")
            lines += [f"       {line}" for line in result.verdict.differences]
    missing = sorted(set(found.recorded) - set(played))
    lines.append("")
    lines += [
        f"against {yardstick}: " + ", ".join(f"{number} {level}" for level, number in sorted(levels.items()))
        for yardstick, levels in counts.items()
    ]
    lines.append(
        "- is only in real MPS, + only in the simulator, ~ in both, in another place (threads overtake each other)"
    )
    if missing:
        lines.append(f"recorded but not played: {' '.join(missing)}")
    return lines, good
