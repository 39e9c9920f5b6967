"""Skimming a log must give the state that reading every line gives, and leave the parser where it would be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpsagent.core.model import State
from mpsagent.core.reduce import reduce
from mpsagent.mps import events as ev
from mpsagent.mps.loglines import LogParser
from mpsagent.mps.skim import Skimmer
from tests import recordings

HEAD = b"[2026-11-21 00:00:00.000 Control   471] "
AFTER = b"4242\n[2026-11-21 00:00:09.000 Control   471] UI closed\n"
"""What a follower reads next: the rest of an answer that was being written."""


def apply_all(state: State, events: list[ev.Line]) -> State:
    for event in events:
        state = reduce(state, event)[0]
    return state


def read(data: bytes) -> tuple[State, LogParser]:
    parser = LogParser("control")
    return apply_all(State(), parser.feed(data)), parser


def skim(pieces: list[bytes]) -> tuple[State, LogParser]:
    parser, skimmer, state = LogParser("control"), Skimmer(), State()
    for piece in pieces:
        state = apply_all(state, parser.feed(skimmer.take(piece)))
    return apply_all(state, parser.feed(skimmer.end())), parser


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def same(data: bytes, size: int) -> None:
    whole, first = read(data)
    short, second = skim(cut(data, size))
    assert short == whole
    assert apply_all(short, second.feed(AFTER)) == apply_all(whole, first.feed(AFTER))


@pytest.mark.parametrize("name", recordings.names())
@pytest.mark.parametrize("size", [97, 1 << 18])
def test_every_recorded_log_gives_the_same_state(name: str, size: int) -> None:
    """Not only at its end: also where an answer is half written."""
    for logs in recordings.sections(name).values():
        same(logs.control, size)
        for end in range(0, len(logs.control), max(1, len(logs.control) // 25)):
            same(logs.control[:end], size)


MESSAGES = [
    "Accepting connection...", "NEW UI", "UI closed", "User did not send valid credentials",
    "Cmd:get_server_list", "Cmd:get_server_status 5", "Cmd:set_default_active_thread_percentage 10", "Cmd:ps",
    "Cmd: ps", "Cmd:quit", "Cmd:quit -t 5", "Cmd:foo", "Cmd:get_ps", "4242", "100.0", "ACTIVE", "1G", "", "set_x",
    "Server 5 not found", "NEW CLIENT 7 from user 1001: Server already exists",
    "NEW CLIENT 7 from user 1002: Server already exists", "NEW CLIENT 8 from user 1001: Server already exists",
    "NEW CLIENT 7 from user 1001: Server is not ready, push client to pending list",
    "NEW CLIENT 8 from user 1002: Server is not ready, push client to pending list",
    "Starting new server 5 for user 1001", "NEW SERVER 5: Ready", "Server 5 exited with status 0",
    "Try shutting down server 5, backoff is disabled", "quit command issued with timeout of 5",
    "Starting control daemon using socket /tmp/nvidia-mps/control", "Exit with status 0", "something new",
]  # fmt: skip
HEADS = ["[2026-11-21 00:00:0{second}.000 Control   471] "] * 12 + [
    "[2026-11-22 00:00:0{second}.000 Control 99471] ", "", "[2026-11-21 00:00:0{second}.000 Server   472] "
]  # fmt: skip


@st.composite
def polls(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Whole sessions of a front-end, one after another."""
    said = draw(
        st.lists(st.sampled_from([one for one in MESSAGES if one[:7] in ("Cmd:get", "Cmd:set", "4242", "ACTIVE")]))
    )
    head = draw(st.sampled_from(HEADS))
    return [(head, one) for one in ("Accepting connection...", "NEW UI", *said, "UI closed")] * draw(st.integers(1, 3))


@st.composite
def logs(draw: st.DrawFn) -> bytes:
    """Any lines in any order: forged ones, answers without an end, other daemons."""
    head = HEAD.decode()
    start = f"{head}Starting control daemon using socket s\n"
    if draw(st.booleans()):  # else hardly any admission would be to a known server
        start += f"{head}Starting new server 5 for user 1001\n{head}NEW SERVER 5: Ready\n"
    line = st.tuples(st.sampled_from(HEADS), st.sampled_from(MESSAGES))
    parts = draw(st.lists(st.one_of(line.map(lambda one: [one]), polls()), max_size=60))
    lines = [one for part in parts for one in part]
    rest = draw(st.sampled_from(["", "[2026-11-21 00:00:09.000 Control   471] NEW U", "4"]))
    text = "".join(head.format(second=min(9, at // 7)) + message + "\n" for at, (head, message) in enumerate(lines))
    return (start + text + rest).encode()


@settings(max_examples=100, deadline=None)
@given(logs(), st.integers(1, 300))
def test_any_lines_in_any_order_give_the_same_state(data: bytes, size: int) -> None:
    same(data, size)


def test_polling_is_left_out() -> None:
    """The point of it: with nothing else in it, next to nothing is left of a polled log."""
    said = [b"Accepting connection...", b"NEW UI", b"Cmd:get_server_list", b"4242", b"UI closed"]
    poll = b"".join(HEAD + message + b"\n" for message in said)
    skimmer = Skimmer()
    assert sum(len(skimmer.take(piece)) for piece in cut(poll * 5000, 1 << 16)) == 0


def test_short_clients_are_left_out() -> None:
    """A day of them is read within a second only so: who came and was admitted is told by the gate."""
    short = b"".join(
        b"%bNEW CLIENT %d from user 1001: Server already exists\n" % (HEAD, 1000 + n // 2) for n in range(10_000)
    )
    skimmer = Skimmer()
    assert sum(len(skimmer.take(piece)) for piece in cut(short, 1 << 10)) == 0
