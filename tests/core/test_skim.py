"""Skimming a log must give the state that reading every line gives, and leave the parser where it would be."""

from __future__ import annotations

import pytest

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
