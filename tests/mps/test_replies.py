"""Commands and answers of the control daemon, with the texts of the recordings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsagent.mps import commands as replies
from mpsagent.mps.commands import Refusal, RefusalKind


@given(st.text())
def test_no_answer_makes_it_raise(out: str) -> None:
    """Garbage from a broken front-end is a sentence, not an exception."""
    replies.parse_status(out)
    replies.parse_server_list(out)
    replies.parse_client_list(out)
    replies.parse_terminate(out)
    replies.refusal(out)


def test_the_commands_are_those_of_the_recordings() -> None:
    """Word for word."""
    assert replies.shutdown_server(565) == ["shutdown_server 565"]
    assert replies.shutdown_server(565, force=True) == ["shutdown_server 565 -f"]
    assert replies.terminate_client(565, 606) == ["terminate_client 565 606"]
    assert replies.quit_command(5) == ["quit -t 5"]
    assert replies.quit_command() == ["quit"]
    assert replies.server_status(565) == ["get_server_status 565"]


INSUFFICIENT = (
    "Insufficient privileges for UID 1001. Control deamon settings can only be modified by the user who started it or "
    "by the root user.\n"
)


@pytest.mark.parametrize(
    ("out", "kind", "server"),
    [
        ("Server 99999 not found\n", RefusalKind.NO_SUCH_SERVER, 99999),
        ("Server 99999 not found\nServer 99999 not found!\n1\n", RefusalKind.NO_SUCH_SERVER, 99999),
        ("Server not found\n", RefusalKind.NO_SERVER, None),
        ('100.0\nUnknown command "foo"\n', RefusalKind.UNKNOWN_COMMAND, None),
        ('Unknown command ""\n', RefusalKind.UNKNOWN_COMMAND, None),
        (INSUFFICIENT, RefusalKind.NOT_PRIVILEGED, None),
        ("Not enough privilege to execute quit command\n", RefusalKind.NOT_PRIVILEGED, None),
        ("A user id (UID) is required to start a new server\n", RefusalKind.UID_MISSING, None),
    ],
)
def test_every_refusal_of_the_recordings_is_recognised(out: str, kind: RefusalKind, server: int | None) -> None:
    """The exit status is 0 in each of these cases."""
    found = replies.refusal(out)
    assert found is not None
    assert (found.kind, found.server) == (kind, server)


@pytest.mark.parametrize("out", ["", "565\n", "ACTIVE\n", "100.0\n10G\n", "0\n"])
def test_answers_are_no_refusals(out: str) -> None:
    assert replies.refusal(out) is None


def test_lists_and_states_are_read() -> None:
    """As recorded, empty ones included."""
    assert replies.parse_server_list("565\n") == (565,)
    assert replies.parse_server_list("") == ()
    assert replies.parse_client_list("763\n778\n") == (763, 778)
    assert replies.parse_client_list("Server 565 not found\n") == ()
    assert replies.parse_status("FAULT\n") == "FAULT"
    assert replies.parse_status("Server 99999 not found\n") is None
    assert replies.parse_status("") is None


def test_termination_is_known_by_its_last_line() -> None:
    """``0`` is success; ``1``, a refusal and silence are not."""
    assert replies.parse_terminate("0\n") is None
    assert replies.parse_terminate("1\n") == Refusal(RefusalKind.NOT_TERMINATED, "1")
    assert replies.parse_terminate("") == Refusal(RefusalKind.NOT_TERMINATED, "no answer")
    found = replies.parse_terminate("Server 99999 not found\nServer 99999 not found!\n1\n")
    assert found is not None
    assert found.kind is RefusalKind.NO_SUCH_SERVER


def test_only_a_batch_that_was_heard_ends_with_the_proof() -> None:
    """A front-end that was turned away may end well and print nothing (scenario X27)."""
    assert replies.proven("") is None
    assert replies.proven("\n") is None
    assert replies.proven("100.0\n") == ""
    assert replies.proven("4242\n12.8\n") == "4242\n"
    assert replies.proven("Server 7 not found\n50.0\n") == "Server 7 not found\n"
    assert replies.proven("Server 7 not found\n") is None
    assert replies.proven("\0\x07garbage 50.0") is None
