"""What people and programs see stays as it is: some seventy states, each a file beside this one.

What changes on purpose is changed there in the same commit, with the reason: `make golden`.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from mpsagent.api import shapes
from mpsagent.api.received import there_now
from tests.net.machine import seen, words_of_metrics
from tests.net.states import STATES, WIRED, idle

HERE = Path(__file__).parent


def told(name: str) -> dict[str, str]:
    """The files of a state, by name."""
    machine, who = STATES[name]()
    found = {f"seen/{name}.txt": seen(machine, who, whole=name == "idle")}
    if name in WIRED:
        found[f"link/{name}.txt"] = "".join(f"{one}\n" for one in machine.one.wire)
    return found


def metrics() -> dict[str, str]:
    return {"seen/metrics.txt": words_of_metrics(idle()[0])}


def everything() -> dict[str, str]:
    found = metrics()
    for name in STATES:
        found |= told(name)
    return found


@pytest.mark.parametrize("name", STATES)
def test_what_is_seen_stays(name: str) -> None:
    for file, text in told(name).items():
        assert text == (HERE / file).read_text(), f"tests/net/{file}; if that is meant: make golden"


def test_metrics_keep_their_names() -> None:
    for file, text in metrics().items():
        assert text == (HERE / file).read_text(), f"tests/net/{file}; if that is meant: make golden"


def test_there_is_no_file_of_a_state_that_is_gone() -> None:
    names = {f"{one.parent.name}/{one.name}" for one in HERE.glob("*/*.txt")}
    assert names == {"seen/metrics.txt", *(f"seen/{one}.txt" for one in STATES), *(f"link/{one}.txt" for one in WIRED)}


@pytest.mark.parametrize("name", STATES)
def test_what_is_open_on_record_is_there(name: str) -> None:
    """Or it would be said to have ended while nobody looked."""
    machine, _ = STATES[name]()
    if all(one.view.synced and one.view.user is None for one in machine.page.instances):
        assert set(machine.history.sessions.open) <= there_now(machine.page)


@pytest.mark.parametrize("name", STATES)
def test_every_page_has_its_shape(name: str) -> None:
    """The OpenAPI document is made of the shapes: no page has a key without one, or lacks a key."""
    machine, _ = STATES[name]()
    backend = machine.backend
    events = [backend.event(row) for row in machine.history.rows]
    for shape, page in (
        (shapes.StatusShape, backend.status()),
        (shapes.ServersShape, {"servers": list(backend.servers())}),
        (shapes.ClientsShape, {"clients": list(backend.clients())}),
        (shapes.QueueShape, {"queue": list(backend.queue())}),
        (shapes.LeasesShape, {"leases": list(backend.leases())}),
        (shapes.EventsShape, {"events": events, "cursor": machine.history.last}),
    ):
        body = json.loads(json.dumps(page))
        assert TypeAdapter(shape).validate_python(body) == body


def test_a_cgroup_without_a_section_is_explained_as_the_user() -> None:
    backend = idle()[0].backend
    alone, there = (asyncio.run(backend.explain("alice", cgroup)) for cgroup in (None, "/nowhere"))
    assert list(there.keys() - alone.keys()) == ["cgroup"]
    assert there["cgroup"]
