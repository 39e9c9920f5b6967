"""Scenario by scenario: what of real MPS the simulator reproduces, and everything that still differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.conformance import allowances, compare, rules
from tests.conformance.normalise import Section, sections

HERE = Path(__file__).resolve().parent
REAL = HERE / "real"
RECORDINGS = HERE.parent / "data" / "recordings"

# Races by design: real MPS differs from run to run here, so only kinds of lines are compared.
RACES = {
    "Q1": "the defaults are set while the server starts: some clients get them, some the last user's",
    "Q9": "only latencies were recorded",
    "R13": "64 clients at once come in any order",
    "X20": "who knocks first while a server exits is a race of the clients' own starts",
    "X21": "who knocks first while a server exits is a race of the clients' own starts",
}


def by_scenario(text: str) -> dict[str, list[Section]]:
    """Scenario -> its parts, the recorded one last."""
    found: dict[str, list[Section]] = {}
    for section in sections(text):
        found.setdefault(section.name, []).append(section)
    return found


def wholes(text: str) -> dict[str, Section]:
    """Scenario -> all of it, of those that reached their end."""
    return {section.name: section for section in sections(text, whole=True)}


@dataclass
class References:
    """What real MPS did: kept transcripts of these scenarios, and the recordings."""

    real: dict[str, list[tuple[str, Section]]] = field(default_factory=dict)  # scenario -> (where from, all of it)
    recorded: dict[str, tuple[str, Section]] = field(default_factory=dict)
    known: dict[str, set[str]] = field(default_factory=dict)


def references(real: Path = REAL, recordings: Path = RECORDINGS) -> References:
    found = References()
    for path in sorted(real.glob("*/raw*.txt")):
        for name, whole in wholes(path.read_text(errors="replace")).items():
            found.real.setdefault(name, []).append((path.parent.name, whole))
            _learn(found.known, whole)
    for path in sorted(recordings.glob("*.txt")):
        for section in sections(path.read_text(errors="replace"), one_run=True):
            found.recorded[section.name] = (path.name, section)
            _learn(found.known, section)
    return found


def _learn(known: dict[str, set[str]], section: Section) -> None:
    for stream, lines in compare.of_kind(section).items():
        known.setdefault(stream, set()).update(lines)


@dataclass(frozen=True)
class Played:
    """One scenario as it was played: all of it, and its parts, the recorded one last."""

    whole: Section
    parts: Sequence[Section]


def played(text: str) -> dict[str, Played]:
    """What a transcript holds, scenario by scenario. One that was broken off has no whole and is left out."""
    parts = by_scenario(text)
    return {name: Played(whole, parts[name]) for name, whole in wholes(text).items()}


@dataclass(frozen=True)
class Result:
    name: str
    title: str
    against: str  # "real DATE-DRIVER", "recording 01-…" or "" when there is nothing to compare with
    verdict: compare.Verdict
    allowed: tuple[str, ...] = ()  # names of the allowances without which it would differ

    @property
    def level(self) -> str:
        return f"allowed: {', '.join(self.allowed)}" if self.allowed and self.good else self.verdict.level

    @property
    def good(self) -> bool:
        return self.verdict.level != compare.DIFFERS


def _allow(name: str, against: str, verdict: compare.Verdict) -> tuple[compare.Verdict, tuple[str, ...]]:
    """The verdict without what may differ, and which allowances that took."""
    left, used = allowances.named(name, against, verdict.differences)
    if not used:
        return verdict, ()
    differs = any(line[:1] in ("-", "+") for line in left)
    return compare.Verdict(compare.DIFFERS if differs else compare.ORDER, tuple(left)), tuple(used)


def judge(one: Played, found: References) -> list[Result]:
    """One scenario against every yardstick that there is for it."""
    name, title = one.whole.name, one.whole.title
    results = []
    if kept := found.real.get(name):
        where = "real " + ", ".join(sorted({where for where, _ in kept}))
        verdicts = []
        for _, theirs in kept:
            if name in RACES:
                verdict = compare.with_recording(theirs, [one.whole], found.known)
            else:
                verdict = compare.with_real(theirs, one.whole)
            verdicts.append(_allow(name, where, verdict))
        # Real MPS was played several times and is not the same each time: the nearest counts.
        verdict, used = min(verdicts, key=lambda each: (*compare.rank(each[0]), len(each[1])))
        results.append(Result(name, title, where, verdict, used))
    if name in found.recorded:
        number, section = found.recorded[name]
        where = f"recording {number[:2]}"
        verdict = compare.with_recording(section, one.parts, found.known)
        results.append(Result(name, title, where, *_allow(name, where, verdict)))
    return results or [Result(name, title, "", compare.Verdict(compare.SAME))]


def report(scenarios: Mapping[str, Played], found: References) -> tuple[list[str], bool]:
    """The lines to print, and whether nothing differs beyond what is allowed."""
    lines: list[str] = []
    counts: dict[str, dict[str, int]] = {}
    good = True
    for name, one in scenarios.items():
        for problem in rules.broken(one.whole.logs.get("control", [])):
            good = False
            lines.append(f"{name:4} order of service: {problem}")
        for result in judge(one, found):
            if not result.against:
                lines.append(f"{name:4} no real transcript yet  {result.title}")
                continue
            race = " (kinds of lines only)" if name in RACES else ""
            yardstick = counts.setdefault(result.against.split()[0], {})
            level = result.level.split(":")[0]
            yardstick[level] = yardstick.get(level, 0) + 1
            good &= result.good
            lines.append(f"{name:4} {result.against:14} {result.level}{race}  {result.title}")
            if not result.good:
                lines += [f"       {line}" for line in result.verdict.differences]
    missing = sorted(set(found.recorded) - set(scenarios))
    lines.append("")
    lines += [
        f"against {yardstick}: " + ", ".join(f"{number} {level}" for level, number in sorted(levels.items()))
        for yardstick, levels in counts.items()
    ]
    if not good:
        lines.append(
            "- is only in real MPS, + only in the simulator, ~ in both, in another place (threads overtake each other)"
        )
    if missing:
        lines.append(f"recorded but not played: {' '.join(missing)}")
    return lines, good
