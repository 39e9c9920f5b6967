"""What agent and gate say to each other survives the way; anything else is an error and nothing worse."""

from __future__ import annotations

import hashlib
import json
import random
import types
import typing
import zlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core.coordinator import Core
from mpsagent.mps.limits import Device, Limits, Total
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.policy.shares import Lease, Share
from mpsagent.wire import codec, link
from mpsagent.wire.codec import LinkError
from mpsagent.wire.link import Admissions, User

LIMITS = Limits(20.0, {0: 5 << 30, 1: 1 << 30})


_COUNT = st.integers(0, (1 << 63) - 1)
_NAME = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
_MEMORY = st.dictionaries(st.integers(0, 9999), _COUNT, max_size=4)
_LIMITS = st.builds(Limits, st.floats(0.1, 100), _MEMORY, st.booleans())
_TOTAL = st.builds(Total, st.none() | st.floats(0, 100), _MEMORY)
_ROWS = {
    link.User: st.builds(
        User, _COUNT, st.sampled_from(["all", "known"]), _LIMITS, st.none() | _COUNT,
        st.none() | _TOTAL, st.booleans(), st.none() | _COUNT,
    ),
    link.Named: st.builds(link.Named, _COUNT, _COUNT, _LIMITS, st.text(max_size=20)),
    link.Job: st.builds(link.Job, st.text(max_size=20), st.none() | _COUNT, st.none() | _TOTAL),
}  # fmt: skip
_VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: _COUNT, float: st.floats(-1e299, 1e299), bool: st.booleans(), str: st.text(max_size=20), Limits: _LIMITS,
    tuple[int, ...]: st.lists(_COUNT, max_size=3).map(tuple), tuple[str, ...]: st.lists(_NAME, max_size=3).map(tuple),
    **_ROWS,
}  # fmt: skip


def _values(hint: Any, name: str) -> st.SearchStrategy[Any]:
    if name in ("instance", "asked"):
        return st.just("") | _NAME
    if isinstance(hint, types.UnionType):
        return st.none() | _values(typing.get_args(hint)[0], name)
    if typing.get_origin(hint) is Mapping:
        return st.lists(_ROWS[typing.get_args(hint)[1]], max_size=3).map(lambda rows: {one.key: one for one in rows})
    return _VALUES[hint]


def _messages(base: type[link.FromGate] | type[link.FromAgent]) -> st.SearchStrategy[Any]:
    """Any that can be said, each field by its declared type."""
    return st.one_of(
        st.builds(cls, **{one: _values(hint, one) for one, hint in typing.get_type_hints(cls).items() if one != "kind"})
        for cls in base.__subclasses__()
    )


_DECODERS = {"gate": link.decode_from_gate, "agent": link.decode_from_agent}
_SAID = st.one_of(
    st.tuples(st.just("gate"), _messages(link.FromGate)), st.tuples(st.just("agent"), _messages(link.FromAgent))
)


@given(_SAID)
def test_every_message_arrives_as_it_was_sent(said: tuple[str, Any]) -> None:
    who, message = said
    assert _DECODERS[who](codec.encode(message)) == message


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@settings(max_examples=500)
@given(_SAID, _JSON, st.data())
def test_a_message_with_anything_in_a_place_of_it_is_right_or_an_error(
    said: tuple[str, Any], other: Any, data: st.DataObject
) -> None:
    """What is taken in can be said again: nothing of another type or beyond the bounds has come through."""
    who, message = said
    content = json.loads(codec.encode(message))
    place, key = content, data.draw(st.sampled_from(sorted(content)))
    while isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[key] = other
    try:
        taken = _DECODERS[who](json.dumps(content).encode())
    except LinkError:
        return
    assert _DECODERS[who](codec.encode(taken)) == taken


def test_the_directions_are_not_mixed_up() -> None:
    with pytest.raises(LinkError, match="unknown kind"):
        link.decode_from_gate(codec.encode(link.Release(5, 6)))
    with pytest.raises(LinkError, match="unknown kind"):
        link.decode_from_agent(codec.encode(link.Left(5)))


def test_a_snapshot_is_json_that_a_person_can_write() -> None:
    text = json.dumps(
        {
            "kind": "admissions",
            "number": 1,
            "open": True,
            "room": 48,
            "fail_safe": {"threads": 10, "memory": {"0": 1 << 30}},
            "devices": [0],
            "users": [{"uid": 1101, "admit": "all", "limits": {"threads": 60}, "max_clients": None}],
            "from": "a newer agent",
        }
    )
    message = link.decode_from_agent(text.encode())
    assert isinstance(message, Admissions)
    assert message.users == {1101: User(1101, "all", Limits(60.0))}
    assert message.user(1102) is None


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"kind": 5},
        {"kind": "refuse"},
        {"kind": "refuse", "connection": -1, "why": "x"},
        {"kind": "refuse", "connection": True, "why": "x"},
        {"kind": "refuse", "connection": 1 << 64, "why": "x"},
        {"kind": "refuse", "connection": 1, "why": "x" * 5000},
        {"kind": "release", "pid": 1.5, "start": 1},
        {"kind": "admissions", "users": {}},
        {"kind": "admissions", "open": 1},
        {"kind": "admissions", "fail_safe": {"threads": 0}},
        {"kind": "admissions", "fail_safe": {"threads": 101}},
        {"kind": "admissions", "fail_safe": {"threads": "5"}},
        {"kind": "admissions", "fail_safe": {"threads": 10**400}},
        {"kind": "admissions", "fail_safe": {}},
        {"kind": "admissions", "fail_safe": {"threads": 5, "memory": {"x": 1}}},
        {"kind": "admissions", "fail_safe": {"threads": 5, "memory": {"0": -1}}},
        {"kind": "admissions", "fail_safe": {"threads": 5, "memory": []}},
        {"kind": "admissions", "users": [{"uid": 1, "admit": "some", "limits": {"threads": 5}}]},
        {"kind": "admissions", "users": [{"uid": 1, "admit": "all"}]},
        {"kind": "admissions", "users": [5]},
        {"kind": "admissions", "devices": [str(number) for number in range(3)]},
        {"kind": "admissions", "devices": list(range(65))},
    ],
)
def test_what_is_not_a_message_is_an_error(content: Any) -> None:
    with pytest.raises(LinkError):
        link.decode_from_agent(json.dumps(content).encode())


@given(st.binary(max_size=200) | st.recursive(st.none() | st.text() | st.integers() | st.floats(), st.lists).map(str))
def test_garbage_is_an_error_and_nothing_else(data: bytes | str) -> None:
    with pytest.raises(LinkError):
        link.decode_from_agent(data if isinstance(data, bytes) else data.encode("utf-8", "replace"))


def test_deep_and_long_packets_are_errors() -> None:
    for data in (b"[" * 100_000, b" " * (codec.LONGEST_PACKET + 1)):
        with pytest.raises(LinkError):
            link.decode_from_agent(data)


def test_a_thousand_users_fit() -> None:
    users = {uid: User(uid, "all", LIMITS, 12) for uid in range(60_000, 61_000)}
    data = codec.encode(Admissions(users=users))
    assert link.decode_from_agent(data) == Admissions(users=users)


def test_a_table_for_16_devices_and_128_users_fits() -> None:
    """Each with limits, a total and a process of its own. It was longer than a packet, and never told again."""
    memory = [{device: (uid * 16 + device) << 20 for device in range(16)} for uid in range(1, 129)]
    users = {
        uid: User(uid, "all", Limits(20.0, memory[uid - 1]), 12, Total(60.0, memory[uid - 1]), True)
        for uid in range(1, 129)
    }
    processes = {(pid, 7): link.Named(pid, 7, Limits(20.0, memory[pid - 1])) for pid in range(1, 129)}
    table = Admissions(users=users, processes=processes, devices=tuple(range(16)))
    data = codec.encode(table)
    assert len(data) <= codec.LONGEST_PACKET
    assert link.decode_from_agent(data) == table


@pytest.mark.parametrize("count", [1, 16, 32, 64])
def test_the_largest_table_that_the_agent_makes_fits(count: int) -> None:
    """For more than 16 devices it was told never, and tried again each 0.2 s."""
    devices = tuple(Device(number, f"GPU-{number}", "NVIDIA A", 80 << 30, 108) for number in range(count))
    users, jobs = range(1, 201), 3
    made = random.Random(1)
    text = '[limits]\nactive_threads = "1%"\nmemory_limit = "1G"\ntotal_memory_limit = "70G"\nmax_clients = 40\n'
    for uid in users:
        text += f"[user.{uid}.memory_limit]\n"
        text += "".join(f'{number} = "{made.randint(9000, 60000)}M"\n' for number in range(count))
    policy, errors = load([("policy.toml", f'{text}[instance.gpu]\nsharing = "one-server"\nserver_scope = "all"\n')])
    assert policy is not None, errors
    core = Core()
    events: list[inp.Input] = [
        inp.PolicyChanged(1.0, policy), inp.DevicesFound(1.0, devices),
        inp.PeopleKnown(1.0, {uid: Identity(uid, f"user{uid}") for uid in users}),
        inp.ControlRuns(1.0, 40, 1.0, "/s", True),
    ]  # fmt: skip
    for uid in users:
        memory = {str(number): made.randint(2000, 9000) << 20 for number in range(count)}
        share = Share(f"lease {uid}", memory=memory, total_memory=40 << 30, max_clients=9, job=f"lease {uid}")
        lease = Lease(uid, share, 1.0, 1e6, 0, uid)
        events.append(inp.LeaseOrdered(1.0, lease))
    core.absorb(events)
    said: list[inp.Input] = [inp.GateSaid(2.0, link.Hello(60, 1.0))]
    for uid in users:
        for number in range(jobs):
            peer = inp.Peer(uid * 10 + number, uid, uid, 7)
            said.append(inp.GateSaid(2.0, link.Knock(uid * 10 + number, *peer[:4], 2.0)))
    step = core.receive_all([*said, inp.GateSaid(2.0, link.Synced())], 2.0)
    (table,) = [one.message for one in step.actions if isinstance(one, act.TellGate)]
    assert isinstance(table, Admissions)
    assert len(table.users) > 30
    assert len(table.processes) > 30
    assert len(codec.encode(table)) <= codec.LONGEST_PACKET


def test_a_packet_that_unpacks_to_more_than_may_be_is_an_error() -> None:
    for data in (zlib.compress(b" " * 100_000_000), zlib.compress(b"{}")[:-1], b"x", b"xyz"):
        with pytest.raises(LinkError):
            link.decode_from_agent(data)


def test_another_link_has_another_version() -> None:
    """A peer passes over what it does not know: an older gate would do half of what its agent says."""
    rows = [User, link.Named, link.Job, Limits, Total]
    shapes = [*link.FromGate.__subclasses__(), *link.FromAgent.__subclasses__(), *rows]
    said = [(one.__name__, [(part.name, part.type) for part in fields(one)]) for one in shapes]
    mark = hashlib.sha256(repr(sorted(said)).encode()).hexdigest()[:12]
    assert (link.VERSION, mark) == (11, "8a33ea0e8727"), "give it the next version, and this mark"


def test_more_users_than_fit_are_an_error_of_the_sender() -> None:
    users = {uid: User(uid, "all", LIMITS, 12) for uid in range(60_000, 70_000)}
    with pytest.raises(LinkError, match="longer than"):
        codec.encode(Admissions(users=users))


def test_rows_of_a_table_are_found_by_user_and_by_job() -> None:
    """The keys are not sent: each row has its own."""
    table = Admissions(users={7: User(7, "all", Limits())}, jobs={name: link.Job(name, 2) for name in ("a", "b")})
    assert link.decode_from_agent(codec.encode(table)) == table
