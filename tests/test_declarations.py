"""A transition, an action and a message are declared once. Codec, sentence and record follow the declaration."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

import pytest

from mpsagent.api import database, metrics
from mpsagent.core import actions, sentences, sessions, transitions
from mpsagent.mps.limits import Limits
from mpsagent.system import journal
from mpsagent.wire import codec, link
from mpsagent.wire.value import Value

VALUES: Mapping[Any, Any] = {
    int: 5, float: 2.5, str: "text", bool: True, Limits: Limits(20.0, {0: 1}), tuple[int, ...]: (1,),
    tuple[str, ...]: ("a",), dict[str, object]: {"pid": 5}, link.FromAgent: link.Refuse(3, "why"),
}  # fmt: skip
DECODERS = {link.FromGate: link.decode_from_gate, link.FromAgent: link.decode_from_agent}
FAMILIES: tuple[type[Value], ...] = (transitions.Transition, actions.Action, link.FromGate, link.FromAgent)


def example(cls: type[Any]) -> Any:
    """Return a value of the class, with a value of the declared type in each field that needs one."""
    hints = typing.get_type_hints(cls)
    found = {}
    for one in fields(cls):
        if one.default is MISSING and one.default_factory is MISSING:
            parts = [part for part in typing.get_args(hints[one.name]) if part is not type(None)]
            found[one.name] = VALUES[parts[0] if isinstance(hints[one.name], types.UnionType) else hints[one.name]]
    return cls(**found)


def of(family: type[Any]) -> list[Any]:
    found = [example(one) for one in family.__subclasses__()]
    assert len(found) > 5, family
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_has_a_type_that_can_be_checked(family: type[Value]) -> None:
    for cls in family.__subclasses__():
        assert Any not in typing.get_type_hints(cls).values(), cls


@pytest.mark.parametrize("family", [transitions.Transition, link.FromGate, link.FromAgent])
def test_no_two_classes_have_one_kind(family: type[Any]) -> None:
    kinds = [one.kind for one in family.__subclasses__()]
    assert all(kinds)
    assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize("one", of(transitions.Transition), ids=lambda one: one.kind)
def test_a_transition_is_told_and_stored_as_it_is_declared(one: transitions.Transition) -> None:
    record = {"seq": 1, "at": one.at, "kind": one.kind, **transitions.transition_fields(one)}
    told, plain = sentences.sentence(record), sentences.sentence({**record, "kind": "of a later version"})
    assert told == one.sentence(sentences.Words(record, lambda uid: None)) != plain
    row = database.row(record)
    assert database.record(row) == json.loads(json.dumps(record))
    assert (row.uid, row.pid) == (record.get("uid"), record.get("pid"))


@pytest.mark.parametrize("one", of(actions.Action), ids=lambda one: type(one).__name__)
def test_an_action_is_told_as_it_is_declared(one: actions.Action) -> None:
    name, record = type(one).__name__, {"kind": "action.done", "ok": True, **actions.action_fields(one)}
    phrase = one.sentence(sentences.Words(record, lambda uid: None))
    assert bool(phrase) is not isinstance(one, actions.TellGate | actions.Report), "these two are no records"
    assert sentences.sentence({**record, "action": name}).startswith(phrase or name)


@pytest.mark.parametrize("family", DECODERS)
def test_a_message_arrives_as_it_is_declared(family: type[Any]) -> None:
    for one in of(family):
        assert DECODERS[family](codec.encode(one)) == one


def test_tables_name_only_kinds_and_actions_that_exist() -> None:
    """A kind that is renamed would be counted nowhere and have no text in the journal's catalog."""
    alone = {"control.unsafe", "directory.taken", "agent.error", "client.unkillable"}  # of the log alone
    assert set(sessions._RULES) <= sentences.KINDS
    assert {*journal.MESSAGE_IDS, *journal._GRAVE} <= sentences.KINDS | alone
    assert set(journal.ACTION_IDS) <= set(sentences.PHRASES)
    assert set(metrics._COUNTERS) - {"limits.mismatch"} <= sentences.KINDS
