"""The bytes at the control socket (recording 08 and NVIDIA's programs of 470, 535 and 550), and a peer's handshake."""

from __future__ import annotations

import pytest

from mpsagent.gate.handshake import Handshake, Mark
from mpsagent.linux.peers import Credentials
from mpsagent.mps import rendezvous
from mpsagent.mps.rendezvous import Answer, Exit, Kind
from mpsagent.mps.session import FrontEndSession, How

PEER = Credentials(574, 1101, 1101)


def test_a_command_goes_out_as_nvidias_front_end_sends_it() -> None:
    length, text = rendezvous.command_messages("get_server_list")
    assert length == bytes([17, 0, 0, 0, 0, 0, 0, 0])
    assert text == b"get_server_list\n\0"


@pytest.mark.parametrize("text", ["a\nquit", "a\0b", "a\x1b[2J", "é", "x" * 1025])
def test_nothing_that_would_harm_the_daemon_is_made_into_a_message(text: str) -> None:
    with pytest.raises(ValueError):
        rendezvous.command_messages(text)


@pytest.mark.parametrize(
    ("data", "command"),
    [
        (b"ps\n\0", "ps"),
        (b"ps", "ps"),
        (b"ps\nquit\n\0", "ps"),
        (b"ps\r\n", "ps"),
        (b"\n\0", ""),
        (b"\xff\xfe", None),
        (b"a\x1bb", None),
        (b"x" * 1024 + b"\n\0", "x" * 1024),
        (b"x" * 1025, None),
        (b"x" * 4137, None),
    ],
)
def test_a_command_of_a_front_end_is_its_first_line_and_nothing_else(data: bytes, command: str | None) -> None:
    assert rendezvous.clean_command(data) == command


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\0\0\0\x00100.0", Answer("100.0")),
        (b"\0\0\0\0", Answer("")),
        (b"\1\0\0\0\0\0\0\0", Exit(0)),
        (b"\1\0\0\0\1\0\0\0", Exit(1)),
        (b"\1\0\0\0", Exit(0)),
        (b"\2\0\0\0x", None),
        (b"\0\0", None),
    ],
)
def test_answers_of_the_daemon(data: bytes, said: Answer | Exit | None) -> None:
    assert rendezvous.decode_answer(data) == said


def test_an_answer_is_cut_to_what_a_front_end_can_read() -> None:
    assert len(rendezvous.answer_message("x" * 10_000)) == 4 + 4096


@pytest.mark.parametrize(("data", "kind"), [(b"\2\0\0\0", Kind.CLIENT), (b"\4\0\0\0", Kind.FRONT_END)])
def test_a_peer_that_keeps_to_the_protocol(data: bytes, kind: Kind) -> None:
    machine = Handshake(PEER)
    assert not machine.expects_kind()
    assert machine.message(b"OUTBCRED\0", PEER) is None
    assert machine.expects_kind()
    assert machine.message(data, PEER) is kind


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([(b"\2\0\0\0", PEER)], "credentials were expected"),
        ([(b"OUTBCRED", PEER)], "credentials were expected"),
        ([(b"OUTBCRED\0", None)], "no credentials"),
        ([(b"OUTBCRED\0", Credentials(574, 0, 0))], "user 0"),
        ([(b"OUTBCRED\0", Credentials(575, 1101, 1101))], "process 575"),
    ],
)
def test_any_other_peer_is_refused(messages: list[tuple[bytes, Credentials | None]], why: str) -> None:
    machine = Handshake(PEER)
    *before, last = messages
    for data, who in before:
        assert machine.message(data, who) is None
    said = machine.message(*last)
    assert isinstance(said, str)
    assert why in said


@pytest.mark.parametrize(
    ("data", "kind", "mark"),
    [
        (b"\3\0\0\0", Kind.DEBUGGER, Mark.DEBUGGED),
        (b"\1\0\0\0", Kind.UNKNOWN, Mark.UNKNOWN),
        (b"\5\0\0\0", Kind.UNKNOWN, Mark.UNKNOWN),
        (b"\2\0\0\0\0", Kind.UNKNOWN, Mark.UNKNOWN),
        (b"OUTBCRED\0", Kind.UNKNOWN, Mark.UNKNOWN),
    ],
)
def test_after_its_credentials_no_peer_is_refused(data: bytes, kind: Kind, mark: Mark) -> None:
    """Its driver would take that for no MPS. The mark survives the gate."""
    machine = Handshake(PEER)
    assert machine.mark(data) is None
    assert machine.message(b"OUTBCRED\0", PEER) is None
    assert machine.mark(data) is mark
    assert machine.message(data, PEER) is kind


def test_after_a_restart_the_credentials_may_have_been_read_already() -> None:
    assert Handshake(PEER, restored=True).message(b"\2\0\0\0", PEER) is Kind.CLIENT
    machine = Handshake(PEER, restored=True)
    assert machine.message(b"OUTBCRED\0", PEER) is None
    assert machine.message(b"\2\0\0\0", PEER) is Kind.CLIENT


def test_a_session_says_all_it_has_to_say_at_once() -> None:
    session = FrontEndSession(["get_server_list"])
    assert session.message(b"OUTBHELL\0") == [
        b"OUTBCRED\0",
        b"\4\0\0\0",
        bytes([17, 0, 0, 0, 0, 0, 0, 0]),
        b"get_server_list\n\0",
        bytes(8),
    ]
    assert session.message(b"\0\0\0\x00123") == []
    assert session.how is None
    session.message(b"\1\0\0\0\1\0\0\0")
    assert (session.how, session.answers, session.status) == (How.DONE, ["123"], 1)
    session.closed()
    assert session.how is How.DONE


@pytest.mark.parametrize(
    ("messages", "how"),
    [
        ([], How.TURNED_AWAY),
        ([b"OUTBHELL\0"], How.TURNED_AWAY),
        ([b"OUTBHELL\0", b"\0\0\0\x00100.0"], How.CUT),
        ([b"OUTBHELO\0"], How.UNKNOWN),
    ],
)
def test_how_a_session_ends_when_the_daemon_closes(messages: list[bytes], how: How) -> None:
    session = FrontEndSession(["ps"])
    for message in messages:
        session.message(message)
    session.closed()
    assert session.how is how


def test_a_daemon_that_talks_without_end_fills_no_memory() -> None:
    session = FrontEndSession(["ps"])
    session.message(b"OUTBHELL\0")
    for _ in range(10_000):
        session.message(b"\0\0\0\0x")
    assert len(session.answers) == 4096
