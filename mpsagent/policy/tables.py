"""The tables of a policy file as a tree, made of the rows of `keys`: what may stand where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from mpsagent.policy import parse
from mpsagent.policy.keys import NAMED, OF_CGROUPS, OLD_KEYS, OLD_SECTIONS, REMOVED_KEYS, SECTIONS, Key, key, keys_of


@dataclass(frozen=True, slots=True)
class Table:
    """One table: its keys, the tables below it by their own names, and those below it by names that people choose
    (``each``, whose names ``name`` checks)."""

    title: str
    words: str
    keys: Mapping[str, Key] = field(default_factory=dict)
    tables: Mapping[str, Table] = field(default_factory=dict)
    each: Table | None = None
    old: Mapping[str, str] = field(default_factory=dict)
    """New names by those from before version 1.0."""
    removed: Mapping[str, str] = field(default_factory=dict)
    """Hints by the names of keys that no longer exist."""
    name: Callable[[object], str] = parse.name

    @property
    def known(self) -> list[str]:
        return sorted([*self.keys, *self.tables])

    def below(self, name: str) -> Table | None:
        return self.each if self.each is not None else self.tables.get(name)


def _plain(section: str, title: str) -> Table:
    return Table(
        title, SECTIONS[section], {key.name: key for key in keys_of(section)}, old=OLD_KEYS.get(section, {}),
        removed=REMOVED_KEYS.get(section, {}),
    )  # fmt: skip


def _root() -> Table:
    tables = {name: _plain(name, name) for name in SECTIONS if name not in NAMED}
    who = Table(
        "user.NAME",
        "the keys of [limits], and turn.time_limit and so on",
        {**tables["limits"].keys, "mode": key("", "mode")},
        {"turn": tables["turn"]},
        old={**OLD_KEYS["limits"], **OLD_KEYS[""], "switch": "turn"},
    )
    rows = {name: tables["limits"].keys[name] for name in OF_CGROUPS}
    rows = {name: replace(one, words=one.words.replace("one user", "the cgroup")) for name, one in rows.items()}
    share = Table(
        "cgroup.PATTERN", "limits of each client process there, and of all together", rows, old=OLD_KEYS["limits"]
    )
    instance = replace(
        _plain("instance", "instance.NAME"),
        tables={name: tables[name] for name in ("limits", "turn")},
        old={**OLD_KEYS["instance"], "switch": "turn"},
    )
    named = {
        "cgroup": Table("cgroup", SECTIONS["cgroup"], each=share, name=parse.cgroup),
        "user": Table("user", SECTIONS["user"], each=who, name=parse.user),
        "group": Table("group", SECTIONS["group"], each=who),
        "instance": Table("instance", SECTIONS["instance"], each=instance, name=parse.instance),
    }
    keys = {key.name: key for key in keys_of("")}
    return Table(
        "",
        "A policy of mpsagent.",
        keys,
        {**tables, **named},
        old={**OLD_KEYS[""], **OLD_SECTIONS},
        removed=REMOVED_KEYS[""],
    )


ROOT = _root()
TURN = ROOT.tables["turn"]
PLAIN: tuple[Table, ...] = tuple(
    table.each if name == "instance" and table.each is not None else table
    for name, table in ROOT.tables.items()
    if name not in ("user", "group", "cgroup")
)
"""Each table with keys of its own, once."""
