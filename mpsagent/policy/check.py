"""What stands in the tables of one file: every value by its path, and every mistake with words for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpsagent.mps import units
from mpsagent.policy import parse
from mpsagent.policy.keys import NAMED, Key
from mpsagent.policy.kinds import THREADS, TOTAL_THREADS
from mpsagent.policy.origins import Path, key_text, printable
from mpsagent.policy.tables import PLAIN, ROOT, TURN, Table

MOST_ERRORS = 100
"""Mistakes that are told of one file; more of them are counted."""


class Mistake(NamedTuple):
    path: Path
    problem: str
    hint: str


@dataclass(slots=True)
class Checked:
    """``values`` in the order of the file; ``named``: every [user.NAME], [group.NAME] and [instance.NAME]."""

    values: list[tuple[Path, Any]] = field(default_factory=list)
    named: list[Path] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)
    more: int = 0

    def wrong(self, path: Path, problem: str, hint: str) -> None:
        if len(self.mistakes) < MOST_ERRORS:
            self.mistakes.append(Mistake(path, problem, hint))
        else:
            self.more += 1

    def full(self) -> bool:
        return len(self.mistakes) >= MOST_ERRORS


def check(tables: Mapping[str, Any]) -> Checked:
    """Never raises, whatever TOML gave. Takes time linear in the size of the file."""
    found = Checked()
    _walk(ROOT, tables, (), found)
    return found


def shown_path(path: Path) -> Path:
    """A path as an error may show it: printable, and bounded."""
    return tuple(printable(part if len(part) <= parse.SHOWN else part[: parse.SHOWN - 1] + "…") for part in path)


def _walk(table: Table, written: Mapping[str, Any], path: Path, found: Checked) -> None:
    for name, value in written.items():
        here = (*path, name)
        key = table.keys.get(name)
        if key is not None:
            try:
                found.values.append((here, key.kind.parse(value)))
            except parse.Wrong as error:
                for fault in error.faults:
                    found.wrong((*here, fault.key) if fault.key else here, fault.problem, fault.hint)
            continue
        below = table.below(name)
        if below is None:
            kind = "section" if isinstance(value, dict) and not path else "key"
            problem = f"this {kind} no longer exists" if name in table.removed else f"unknown {kind}"
            found.wrong(here, problem, "" if found.full() else _meant(table, here, value))
            continue
        if table.each is not None:
            try:
                table.name(name)
            except parse.Wrong as error:
                found.wrong(here, error.faults[0].problem, error.faults[0].hint)
            else:
                found.named.append(here)
        if isinstance(value, dict):
            _walk(below, value, here, found)
        else:
            found.wrong(here, f"{parse.shown(value)} is not a section", _section_hint(table, here))


def _section_hint(table: Table, path: Path) -> str:
    if table.each is not None and path[-1] in table.each.keys:
        return f"say whose: [{path[0]}.NAME] with {printable(path[-1])} below it"
    title = _title(path[0]) if len(path) == 1 else key_text(shown_path(path))
    return f"write [{title}] and its keys below"


def _title(section: str) -> str:
    return f"{section}.NAME" if section in NAMED else section


def _meant(table: Table, path: Path, value: object) -> str:
    """What an unknown key was most likely meant to be."""
    name = path[-1]
    if name in table.removed:
        return table.removed[name]
    if name in table.old:
        return f'it is called "{table.old[name]}" now{_value_now(table.keys.get(table.old[name]), value)}'
    if name in ("enforce", "mode"):
        return 'write mode = "report" at the top of the file, in [user.NAME] or in [group.NAME]'
    near = units.nearest(name[: parse.SHOWN], [*table.known, *table.old])
    begun = [one for one in table.known if len(name) >= 3 and one.startswith(name)]
    if begun:
        near = begun[0]
    if near is not None:
        return f'did you mean "{table.old.get(near, near)}"?'
    if table.title == "user.NAME":
        if name in TURN.keys:
            return f"write turn.{name}"
        if isinstance(value, dict):
            owner = key_text(shown_path(path[:2]))
            if name == "limits":
                return f"its keys stand in [{owner}] itself"
            if name in ROOT.tables:
                return f"[{_title(name)}] stands by itself, not within [{owner}]"
            return f"a name with a dot needs quotes: [{key_text(shown_path(_dotted(path, value)))}]"
    if not path[:-1] and name in ("users", "groups"):
        return f"write [{name[:-1]}.NAME]"
    if path[:-1] and isinstance(value, dict) and name in ROOT.tables:
        return f"[{_title(name)}] stands by itself, not within [{key_text(shown_path(path[:-1]))}]"
    if path[0] == "cgroup" and len(path) == 3 and name in ROOT.tables["limits"].keys:
        return "only [limits], [user.NAME] and [group.NAME] have it: write it for the users"
    homes = [f"[{other.title}]" for other in PLAIN if name in other.keys and name not in ROOT.keys]
    if homes:
        return f"it belongs in {' or '.join(homes)}"
    return "possible here: " + ", ".join(table.known)


def _value_now(key: Key | None, value: object) -> str:
    """Return ``: write KEY = VALUE`` if a value of the old key is written in another way today."""
    if key is None:
        return ""
    if key.kind in (THREADS, TOTAL_THREADS):  # a number was a percentage, and is a number of multiprocessors today
        if isinstance(value, int | float) and value is not True and 0 < value <= 100:
            return f': write {key.name} = "{value:g}%"'
        sms = value.get("sms") if isinstance(value, dict) else None
        return f": write {key.name} = {parse.shown(sms)}" if isinstance(sms, int) else ""
    word = parse.new_word(value, key.kind.schema.get("enum", ()))
    return "" if word is None else f': write {key.name} = "{word}"'


def _dotted(path: Path, value: Mapping[str, Any]) -> Path:
    """The section whose name was written without quotes: [user.jane.m.doe] means user."jane.m.doe"."""
    parts = list(path[1:])
    while len(value) == 1 and len(parts) < 8:
        ((name, inner),) = value.items()
        if not isinstance(inner, dict) or name == "turn":
            break
        parts.append(name)
        value = inner
    return path[0], ".".join(parts)
