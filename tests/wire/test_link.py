"""What agent and gate say to each other survives the way; anything else is an error and nothing worse."""

from __future__ import annotations

import hashlib
import json
import typing
import zlib
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsagent.mps.limits import Limits, Total
from mpsagent.wire import codec, link
from mpsagent.wire.codec import LinkError
from mpsagent.wire.link import Admissions, User

LIMITS = Limits(20.0, {0: 5 << 30, 1: 1 << 30})

FROM_GATE: list[link.FromGate] = [
    link.Hello(12, 1.5),
    link.Knock(5, 6, 7, 8, 9, 10.5, "/user.slice", 4026531836, "python3"),
    link.Knock(5, 6, 7, 8, 9, 10.5, None, None, ""),
    link.Known(6, 7, 8, 9, 10.5, LIMITS, None, 3),
    link.Known(6, 7, 8, 9, 10.5, None),
    link.Synced(),
    link.Left(5),
    link.Handing(5, 6, 7, 8.5),
    link.Passed(5, 6, 7, 8, LIMITS, 0.25, 9.5, True, False),
    link.Failed(5, 6, 7, "why", "answer", True),
    link.Unconfirmed(7, LIMITS, "why"),
    link.FrontEnd(5, 0, "quit", 1.5),
    link.HandshakeSeen(True, "4f55", 77),
    link.Refused(5, 6, 7, "why"),
]
FROM_AGENT: list[link.FromAgent] = [
    Admissions(),
    Admissions(
        3,
        True,
        48,
        Limits(5.0, below_normal=True),
        (0, 1),
        False,
        {7: User(7, "all", LIMITS), 8: User(8, "known", LIMITS, 3)},
        User(0, "all", LIMITS),
        True,
    ),
    link.Refuse(5, "why"),
    link.Release(5, 6),
]


@pytest.mark.parametrize("message", FROM_GATE, ids=lambda message: message.kind)
def test_the_gates_messages(message: link.FromGate) -> None:
    assert link.decode_from_gate(codec.encode(message)) == message


@pytest.mark.parametrize("message", FROM_AGENT, ids=lambda message: message.kind)
def test_the_agents_messages(message: link.FromAgent) -> None:
    assert link.decode_from_agent(codec.encode(message)) == message


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


def test_a_packet_that_unpacks_to_more_than_may_be_is_an_error() -> None:
    for data in (zlib.compress(b" " * 100_000_000), zlib.compress(b"{}")[:-1], b"x", b"xyz"):
        with pytest.raises(LinkError):
            link.decode_from_agent(data)


def test_another_link_has_another_version() -> None:
    """A peer passes over what it does not know: an older gate would do half of what its agent says."""
    shapes = [*typing.get_args(link.FromGate), *typing.get_args(link.FromAgent), User, link.Named, Limits, Total]
    said = [(one.__name__, [(part.name, part.type) for part in fields(one)]) for one in shapes]
    mark = hashlib.sha256(repr(sorted(said)).encode()).hexdigest()[:12]
    assert (link.VERSION, mark) == (2, "c6b8bd46e593"), "give it the next version, and this mark"


def test_more_users_than_fit_are_an_error_of_the_sender() -> None:
    users = {uid: User(uid, "all", LIMITS, 12) for uid in range(60_000, 70_000)}
    with pytest.raises(LinkError, match="longer than"):
        codec.encode(Admissions(users=users))
