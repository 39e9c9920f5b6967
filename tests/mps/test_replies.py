"""Commands and answers of the control daemon, with the texts of the recordings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsagent.mps import commands as replies


@given(st.text())
def test_no_answer_makes_it_raise(out: str) -> None:
    """Garbage from a broken front-end is a sentence, not an exception."""
    replies.parse_status(out)
    replies.pids(out)
    replies.not_terminated(out)
    replies.refusal(out)


def test_the_commands_are_those_of_the_recordings() -> None:
    """Word for word."""
    assert replies.shutdown_server(565) == ["shutdown_server 565"]
    assert replies.shutdown_server(565, force=True) == ["shutdown_server 565 -f"]
    assert replies.terminate_client(565, 606) == ["terminate_client 565 606"]
    assert replies.quit_command(5) == ["quit -t 5"]
    assert replies.server_status(565) == ["get_server_status 565"]


INSUFFICIENT = (
    "Insufficient privileges for UID 1001. Control deamon settings can only be modified by the user who started it or "
    "by the root user.\n"
)


@pytest.mark.parametrize(
    "out",
    [
        "Server 99999 not found\n",
        "Server 99999 not found\nServer 99999 not found!\n1\n",
        "Server not found\n",
        'Unknown command "foo"\n100.0\n',
        'Unknown command ""\n',
        INSUFFICIENT,
        "Not enough privilege to execute quit command\n",
        "A user id (UID) is required to start a new server\n",
    ],
)
def test_every_refusal_of_the_recordings_is_recognised(out: str) -> None:
    """The exit status is 0 in each of these cases."""
    assert replies.refusal(out) == replies.refusal(f"100.0\n{out}") == out.partition("\n")[0]


@pytest.mark.parametrize("out", ["", "565\n", "ACTIVE\n", "100.0\n10G\n", "0\n"])
def test_answers_are_no_refusals(out: str) -> None:
    assert replies.refusal(out) is None


def test_lists_and_states_are_read() -> None:
    """As recorded, empty ones included."""
    assert replies.pids("565\n") == (565,)
    assert replies.pids("") == ()
    assert replies.pids("763\n778\n") == (763, 778)
    assert replies.pids("Server 565 not found\n") == ()
    assert replies.parse_status("FAULT\n") == "FAULT"
    assert replies.parse_status("Server 99999 not found\n") is None
    assert replies.parse_status("") is None


def test_termination_is_known_by_its_last_line() -> None:
    """``0`` is success; ``1``, a refusal and silence are not."""
    assert replies.not_terminated("0\n") is None
    assert replies.not_terminated("1\n") == "MPS answered with CUDA error 1"
    assert (
        replies.not_terminated("201\n") == "MPS has no context of this client to end (CUDA error 201); no action needed"
    )
    assert replies.not_terminated("") == "no answer"
    refused = "Server 99999 not found"
    assert replies.not_terminated(f"{refused}\n{refused}!\n1\n") == refused


def test_only_a_batch_that_was_heard_ends_with_the_proof() -> None:
    """A front-end that was turned away may end well and print nothing (scenario X27)."""
    assert replies.proven("") is None
    assert replies.proven("\n") is None
    assert replies.proven("100.0\n") == ""
    assert replies.proven("4242\n12.8\n") == "4242\n"
    assert replies.proven("Server 7 not found\n50.0\n") == "Server 7 not found\n"
    assert replies.proven("Server 7 not found\n") is None
    assert replies.proven("\0\x07garbage 50.0") is None
