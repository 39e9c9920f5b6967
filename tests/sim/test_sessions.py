"""Front-ends at the sockets, packet by packet (recording 08, G4; NVIDIA's programs of 470, 535 and 550)."""

from __future__ import annotations

import re
import socket

import pytest

from tests.sim import relay
from tests.sim.conftest import A, Mps, messages

FRONT_END = b"\4\0\0\0"
ANSWER = bytes(4)
END = bytes(8)


def ask(session: socket.socket, text: bytes) -> None:
    relay.say(session, len(text).to_bytes(8, "little"))
    relay.say(session, text)


def test_commands_and_answers_byte_for_byte(mps: Mps) -> None:
    """Each command is answered at once, by no, one or more packets; the end has the exit status."""
    mps.start()
    with relay.introduced(mps.pipe / "control_privileged", FRONT_END) as session:
        for text in (b"get_default_active_thread_percentage" + end for end in (b"\n\0", b"\n", b"\0", b"")):
            ask(session, text)
            assert relay.packet(session)[0] == ANSWER + b"100.0"
        ask(session, b"get_server_list\n\0")
        ask(session, b"foo\n\0")
        assert relay.packet(session)[0] == ANSWER + b'Unknown command "foo"'
        ask(session, b"terminate_client 99999 1\n\0")
        said = [relay.packet(session)[0][4:] for _ in range(3)]
        assert said == [b"Server 99999 not found", b"Server 99999 not found!", b"1"]
        relay.say(session, END)
        assert relay.packet(session)[0] == b"\1\0\0\0\0\0\0\0"
        assert relay.packet(session)[0] == b""
    assert messages(mps.log("control.log"))[-1] == "UI closed"


def test_the_front_ends_part_byte_for_byte(mps: Mps) -> None:
    """Root goes to control_privileged, and to control where that fails; others go to control."""
    seen: list[bytes] = []

    def serve(session: socket.socket) -> None:
        relay.say(session, b"OUTBHELL\0")
        seen.clear()
        while not seen or seen[-1] != END:
            seen.append(relay.packet(session)[0])
        relay.say(session, ANSWER + b"one\ntwo")
        relay.say(session, b"\2\0\0\0never seen")
        relay.say(session, ANSWER)
        relay.say(session, b"\1\0\0\0\3\0\0\0")

    command = b"get_server_list\n\0"
    with relay.listening(mps.pipe / "control", serve):
        for uid in (0, A):
            assert mps.run("get_server_list", uid) == (3, "one\ntwo\n\n", "")
            assert seen == [b"OUTBCRED\0", FRONT_END, len(command).to_bytes(8, "little"), command, END]
    with relay.listening(mps.pipe / "control_privileged", serve):
        (mps.pipe / "control_privileged").chmod(0o755)
        assert mps.run("get_server_list")[0] == 3
        assert mps.run("get_server_list", A) == (1, "", "Cannot find MPS control daemon process\n")


def test_what_the_front_end_says_when_it_is_refused(mps: Mps) -> None:
    """Closed before the greeting, and after the credentials."""
    with relay.listening(mps.pipe / "control", lambda session: None):
        assert mps.run("ps") == (1, "", "Cannot find MPS control daemon process\n")
    (mps.pipe / "control").unlink()

    def serve(session: socket.socket) -> None:
        relay.say(session, b"OUTBHELL\0")
        relay.packet(session)

    with relay.listening(mps.pipe / "control", serve):
        seen = {mps.run("quit") for _ in range(4)}
    assert seen == {(1, "", "Cannot send command to MPS control daemon process\n")}


def test_a_daemon_that_ends_before_all_was_said_to_it_has_answered(mps: Mps) -> None:
    """The status of a `quit` was lost where the daemon had gone before the front-end said its end."""

    def serve(session: socket.socket) -> None:
        relay.say(session, b"OUTBHELL\0")
        for _ in range(4):
            relay.packet(session)
        relay.say(session, b"\1\0\0\0\3\0\0\0")

    with relay.listening(mps.pipe / "control", serve):  # which takes only some of the commands, then closes
        assert mps.run("quit\n" * 5000) == (3, "", "")


def test_a_second_session_is_taken_and_closed(mps: Mps) -> None:
    """X25, X27: greeting, credentials and kind are taken, then it is closed; the first one is not disturbed."""
    mps.start()
    with relay.introduced(mps.pipe / "control_privileged", FRONT_END) as first:
        ask(first, b"get_default_active_thread_percentage\n\0")
        relay.packet(first)
        with relay.introduced(mps.pipe / "control_privileged", FRONT_END) as second:
            assert relay.packet(second)[0] == b""
        ask(first, b"get_default_active_thread_percentage\n\0")
        assert relay.packet(first)[0] == ANSWER + b"100.0"
    mps.saw("control.log", "UI closed")
    assert mps.ctl("get_default_active_thread_percentage") == "100.0\n"


def test_rights_go_by_the_socket(mps: Mps) -> None:
    """550: root's session at `control` may not change anything, a user's at control_privileged is closed."""
    mps.start()
    with relay.introduced(mps.pipe / "control", FRONT_END) as session:
        ask(session, b"set_default_active_thread_percentage 10\n\0")
        assert relay.packet(session)[0].startswith(ANSWER + b"Insufficient privileges for UID 0.")
    mps.saw("control.log", "UI closed")
    with relay.connect(mps.pipe / "control_privileged") as session:
        relay.packet(session)
        user = mps.client(A, "sleep", "600", CUDA_MPS_PIPE_DIRECTORY="/nonexistent")
        relay.say(session, b"OUTBCRED\0", (user.pid, A, A))
        assert relay.packet(session)[0] == b""
    mps.saw("control.log", "Unable to accept priviliged connection from other user")
    assert mps.ctl("get_default_active_thread_percentage") == "100.0\n"


@pytest.mark.parametrize(
    "packets",
    [
        [b"\5" + bytes(7) + b"get_server_list"],
        [(9).to_bytes(8, "little"), b"get_server_list\n\0"],
        [(99).to_bytes(8, "little"), b"get_server_list\n\0"],
        [b"1234"],
    ],
)
def test_broken_framing_ends_the_session(mps: Mps, packets: list[bytes]) -> None:
    """470 to 550: as if it had said its end."""
    mps.start()
    with relay.introduced(mps.pipe / "control_privileged", FRONT_END) as session:
        for packet in packets:
            relay.say(session, packet)
        assert relay.packet(session)[0] == b"\1\0\0\0\0\0\0\0"
    assert "Cmd:" not in mps.log("control.log")


def test_a_newline_in_a_command_writes_lines_of_its_own_into_the_log(mps: Mps) -> None:
    """470 to 550: the first line is run, all are written, without a head."""
    mps.start()
    with relay.introduced(mps.pipe / "control", FRONT_END) as session:
        ask(session, b"get_default_active_thread_percentage\n[2026-01-01 00:00:00.000 Control     1] NEW UI\n\0")
        assert relay.packet(session)[0] == ANSWER + b"100.0"
    assert re.search(r"(?m)^\[2026-01-01 00:00:00.000 Control     1\] NEW UI$", mps.log("control.log"))


def test_a_long_text_kills_the_daemon(mps: Mps) -> None:
    """470 to 550: the length is believed. Any user can do that."""
    mps.start()
    with relay.introduced(mps.pipe / "control", FRONT_END) as session:
        relay.say(session, (5000).to_bytes(8, "little"))
        assert relay.packet(session)[0] == b""
    assert mps.run("ps") == (1, "", "Cannot find MPS control daemon process\n")
