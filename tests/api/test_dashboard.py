"""The Grafana dashboard against Grafana's own schema: the classes of its Foundation SDK, which are generated from it.

Their reader passes over what it does not know and takes any value; so what it has read is written again and compared,
and each value is held against its type.
"""

from __future__ import annotations

import copy
import enum
import json
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import prometheus, stat, timeseries
from grafana_foundation_sdk.models.dashboard import Dashboard

BOARD = Path(__file__).parents[2] / "packaging" / "prometheus" / "mpsagent-dashboard.json"
register_default_plugins()


def mistakes(board: Any) -> list[str]:
    """Every key that the schema does not have, every value that is not of its type."""
    read = Dashboard.from_json(board)
    return [*lost(board, json.loads(JSONEncoder().encode(read)), ""), *wrong(read, Dashboard, "")]


def lost(ours: Any, theirs: Any, where: str) -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from lost(value, theirs[key], f"{where}/{key}") if key in theirs else [f"{where}/{key}: unknown"]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from lost(one, other, f"{where}/{number}")
    elif ours != theirs:
        yield f"{where}: {ours!r} was read as {theirs!r}"


def wrong(value: Any, hint: Any, where: str) -> Iterator[str]:
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if hasattr(type(value), "from_json"):  # a class of theirs, where the hint may be a protocol of its kind
        for name, one in typing.get_type_hints(type(value)).items():
            yield from wrong(getattr(value, name), one, f"{where}/{name}")
    elif origin in (typing.Union, types.UnionType):
        found = [list(wrong(value, one, where)) for one in of if value is None or one is not type(None)]
        if all(found):
            yield from found[0]
    elif origin is typing.Literal:
        if value not in of:
            yield f"{where}: {value!r} is none of {of}"
    elif origin is list:
        for number, one in enumerate(value) if isinstance(value, list) else ():
            yield from wrong(one, of[0], f"{where}/{number}")
        if not isinstance(value, list):
            yield f"{where}: {value!r} is no list"
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        if value not in [one.value for one in hint]:
            yield f"{where}: {value!r} is none of {[one.value for one in hint]}"
    elif hint in (str, int, float, bool, type(None)):
        kinds = (int, float) if hint is float else hint
        if not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool):
            yield f"{where}: {value!r} is no {hint.__name__}"


def test_the_dashboard_is_valid() -> None:
    """Options of each panel and each query too: they are read as those of that panel and of Prometheus."""
    board = json.loads(BOARD.read_text())
    assert mistakes(board) == []
    panels = Dashboard.from_json(board).panels
    assert panels
    for panel in panels:
        assert isinstance(panel.options, stat.Options | timeseries.Options), panel.title
        assert panel.targets
        assert all(isinstance(one, prometheus.Dataquery) for one in panel.targets)


def planted(change: Callable[[Any], object]) -> list[str]:
    board = copy.deepcopy(json.loads(BOARD.read_text()))
    change(board)
    return mistakes(board)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda board: board.update(refesh="30s"), "/refesh: unknown"),
        (lambda board: board.update(schemaVersion="38"), "/schema_version: '38'"),
        (lambda board: board["panels"][0]["options"].update(colorMode="colour"), "/panels/0"),
        (lambda board: board["panels"][0]["gridPos"].update(x="0"), "/panels/0"),
        (lambda board: board["panels"][1]["targets"][0].update(query="up"), "/panels/1/targets/0/query: unknown"),
        (lambda board: board["templating"]["list"][1].update(hide=9), "/templating/list"),
    ],
)
def test_a_mistake_in_it_would_be_found(change: Callable[[Any], object], where: str) -> None:
    assert [one for one in planted(change) if one.startswith(where)]
