"""One row for each key: typed attributes, tables and words must be those of the rows, and of no other list."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest

import mpsagent
from mpsagent.policy import parse
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.policy.keys import KEYS, NAMED, SECTIONS, Key, Scope
from mpsagent.policy.policy import IN_RULES, Policy, Rules
from mpsagent.policy.tables import ROOT

OF_THE_POLICY_ITSELF = {
    "settings",
    "sources",
    "digest",
    "instance",
    "user",
    "users",
    "groups",
    "denies",
    "weights",
    "named",
    "by_uid",
    "prioritised",
    "exclusive",
}
OF_THE_RULES_THEMSELVES = {"who", "weights", "origins"}


def named(one: Key) -> str:
    return ".".join(one.path)


def test_every_attribute_is_that_of_a_row() -> None:
    """An attribute that no key sets would be a setting that no one can change, and the other way round."""
    policy = {one.name for one in fields(Policy) if not one.name.startswith("_")} - OF_THE_POLICY_ITSELF
    assert policy == {one.field for one in KEYS if one.scope is not Scope.USER} | {"enforce"}
    rules = {one.name for one in fields(Rules)} - OF_THE_RULES_THEMSELVES
    assert rules == {one.in_rules for one in KEYS if one.in_rules}


@pytest.mark.parametrize("one", KEYS, ids=named)
def test_each_default_is_that_of_its_row(one: Key) -> None:
    """In the dataclasses, in a policy without files, and in its words."""
    policy, _ = load([])
    assert policy is not None
    for made in (policy, Policy()):
        if one.scope is not Scope.USER:
            assert getattr(made, one.field) == one.default
        if one.in_rules:
            assert getattr(made.rules(Identity(7)), one.in_rules) == one.default
            assert one.shown in made.rules(Identity(7)).explain([])
    assert one.default_text().strip("`")


@pytest.mark.parametrize("one", [one for one in KEYS if not one.absent], ids=named)
def test_each_default_can_be_written(one: Key) -> None:
    """What the reference shows as the default is a value that the parser takes, and it means the default."""
    place = {"": "", "instance": "[instance.default]\n"}.get(one.section, f"[{one.section}]\n")
    policy, errors = load([("x.toml", f"{place}{one.name} = {one.kind.written(one.default)}\n")])
    assert policy is not None, errors
    (setting,) = policy.settings.values()
    assert setting.value == one.default


def test_no_two_rows_have_one_name() -> None:
    """The second would never be seen."""
    assert len({(one.section, one.name) for one in KEYS}) == len(KEYS)
    assert len({one.shown for one in KEYS if one.in_rules}) == len(IN_RULES)
    assert {one.section for one in KEYS} | {"user", "group", "cgroup"} == {"", *SECTIONS}


def test_a_key_for_users_may_stand_with_users_and_groups_and_no_other_may() -> None:
    """The scope of a row and the place in the tables are one statement."""
    who = ROOT.tables["user"].each
    assert who is ROOT.tables["group"].each
    assert who is not None
    inside = {one.path for one in (*who.keys.values(), *who.tables["turn"].keys.values())}
    assert inside == {one.path for one in KEYS if one.scope is Scope.USER}
    assert {"user", "group", "cgroup", "instance"} == set(NAMED)


def test_each_row_has_words() -> None:
    """They are all that the reference, the schema and the manual say about it."""
    for one in KEYS:
        assert one.words, one.path
        assert "|" not in one.words + "".join(one.kind.forms), "it would end a cell of the table"


@pytest.mark.parametrize("one", KEYS, ids=named)
def test_no_parser_raises_anything_but_wrong(one: Key) -> None:
    """The one exception that the check expects."""
    for value in (None, [], {}, [{}], {"a": {"b": 1}}, "", "\x00", 10**400, float("inf"), object(), b"x"):
        with suppress(parse.Wrong):
            one.kind.parse(value)


def test_every_key_is_read_by_something() -> None:
    """One was not: `front_end = "refuse"` refused nothing."""
    root = Path(mpsagent.__file__).parents[1]
    text = "\n".join(path.read_text() for path in root.glob("mpsagent*/**/*.py") if path.name != "keys.py")
    read = {*re.findall(r"\.(\w+)", text), *re.findall(r'"(\w+\.\w+)"', text)}
    assert [key.path for key in KEYS if not {key.rules or key.field, ".".join(key.path)} & read] == []
