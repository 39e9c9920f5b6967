"""The front-end's protocol, spoken to NVIDIA's daemons of three drivers with mpsagent's own messages."""

from __future__ import annotations

import select
import socket
from collections import deque
from contextlib import suppress
from pathlib import Path

import pytest

from mpsagent.mps import rendezvous as rv
from tests.nvidia import abilities
from tests.nvidia.daemon import USER, Daemon, Session
from tests.nvidia.page import saw
from tests.waiting import until

pytestmark = pytest.mark.root

PERCENTAGE = "get_default_active_thread_percentage"


@pytest.fixture
def able(daemon: Daemon) -> frozenset[str]:
    return abilities.able(daemon.driver.version)


def greeted(daemon: Daemon, seconds: float) -> bool:
    """Whether the daemon greets a new connection within so long."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(daemon.control))
        return bool(select.select([connection], [], [], seconds)[0])


def stands_still(daemon: Daemon, session: Session, messages: deque[bytes]) -> bool:
    """Asks as long as there is room: answers that nobody reads fill the daemon's buffer, and then questions ours.
    `messages`: those of a question, the next one first; the daemon ends a session whose messages come out of order."""
    session.socket.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            session.socket.send(messages[0])
            messages.rotate(-1)
    return not greeted(daemon, 0.5)


def test_each_command_is_answered_at_once(daemon: Daemon) -> None:
    with daemon.session() as session:
        assert session.greeting == rv.HELLO
        for _ in range(3):
            session.send(PERCENTAGE)
            assert rv.decode_answer(session.receive()) == rv.Answer("100.0")
        assert session.finish() == rv.Exit(0)
        assert session.receive() == b"", "the daemon closes after the end"


def test_answers_of_each_command(daemon: Daemon, able: frozenset[str]) -> None:
    """None, one or three answers: their end is not told, so a question with a known answer is sent behind."""
    gone = "Server 99999 not found"

    def unknown(name: str) -> list[str]:
        return [f'Unknown command "{name}"']

    expected = {
        "get_server_list": [],
        "set_default_active_thread_percentage 12.75": ["12.8"],
        "set_default_active_thread_percentage 101": ["12.8"],
        "set_default_active_thread_percentage 0": ["12.8"],
        "get_client_list 99999": [gone],
        "get_active_thread_percentage 99999": [gone],
        "set_active_thread_percentage 99999 20": [gone],
        "shutdown_server 99999": [gone],
        "start_server": ["A user id (UID) is required to start a new server"],
        "": unknown(""),
        "get_server_status 99999": [gone] if "server_status" in able else unknown("get_server_status"),
        "ps": ["Server not found"] if "processes" in able else unknown("ps"),
        "lspart": unknown("lspart"),
        "device_query": unknown("device_query"),
    }
    if "memory_limits" in able:
        expected |= {
            "get_default_device_pinned_mem_limit 0": [],
            "set_default_device_pinned_mem_limit 0 20389M": [],
            "get_default_device_pinned_mem_limit 0 ": ["19G"],
            "set_default_device_pinned_mem_limit 0 700M": [],
            "get_default_device_pinned_mem_limit 0  ": ["700M"],
            "set_default_device_pinned_mem_limit 0 0G": [],
            "get_default_device_pinned_mem_limit 0   ": [],
            "set_device_pinned_mem_limit 99999 0 1G": [gone],
            "get_device_pinned_mem_limit 99999 0": [gone],
        }
    else:
        for name in ("set_default_device_pinned_mem_limit", "get_default_device_pinned_mem_limit"):
            expected[f"{name} 0 1G"] = unknown(name)
    expected["terminate_client 99999 1"] = (
        [gone, gone + "!", "1"] if "terminate_client" in able else unknown("terminate_client")
    )
    expected["get_default_client_priority"] = (
        ["0"] if "client_priority" in able else unknown("get_default_client_priority")
    )
    with daemon.session() as session:
        assert {command: session.ask(command) for command in expected} == expected


def test_users_rights(daemon: Daemon, able: frozenset[str]) -> None:
    """470 and 535 let every user set the defaults; only a gate in front of them can refuse it."""
    refused = f"Insufficient privileges for UID {USER}"
    with daemon.session(USER) as session:
        assert session.ask(PERCENTAGE) == ["100.0"]
        answers = session.ask("set_default_active_thread_percentage 33")
        if "defaults_protected" in able:
            assert answers[0].startswith(refused)
        else:
            assert answers == ["33.0"]
        if "memory_limits" in able:
            answers = session.ask("set_default_device_pinned_mem_limit 0 1G")
            assert [answer.startswith(refused) for answer in answers] == [True] * ("defaults_protected" in able)
            assert session.ask("get_default_device_pinned_mem_limit 0") == (
                [] if "defaults_protected" in able else ["1G"]
            )
        assert session.ask(f"start_server -uid {USER + 1}")[0].startswith(refused)
        for command in ("quit", "quit -t 1", "quit -f"):
            assert session.ask(command) == ["Not enough privilege to execute quit command"]
        assert session.finish() == rv.Exit(0), "a refusal is exit status 0"
    assert daemon.alive
    saw(daemon.driver, "`quit`, `quit -t`, `quit -f` by a user", "refused in words")


def test_root_sets_at_the_privileged_socket(daemon: Daemon, able: frozenset[str]) -> None:
    with daemon.session(socket_name="control") as session:
        answers = session.ask("set_default_active_thread_percentage 44")
        assert answers == ["44.0"] or (
            ("defaults_protected" in able) and answers[0].startswith("Insufficient privileges for UID 0")
        )
    with daemon.session(socket_name="control_privileged") as session:
        assert session.ask("set_default_active_thread_percentage 45") == ["45.0"]
    words = "works" if answers == ["44.0"] else "refused"
    saw(daemon.driver, "root sets the defaults at `control` instead of `control_privileged`", words)


def test_a_users_credentials_at_the_privileged_socket(daemon: Daemon) -> None:
    with Session(daemon.privileged, USER, kind=None) as session:
        assert session.receive() == b""
    said = "Unable to accept priviliged connection from other user"
    until(lambda: said in daemon.lines(), "it does not say why")
    saw(daemon.driver, "a user's credentials at `control_privileged`", "closed")


def test_a_second_session_is_turned_away_until_the_first_closes(daemon: Daemon) -> None:
    first = daemon.session()
    assert first.ask(PERCENTAGE) == ["100.0"]
    with daemon.session() as second:
        assert second.greeting == rv.HELLO
        assert second.receive() == b""
    assert first.ask(PERCENTAGE) == ["100.0"], "the first is not disturbed"
    saw(daemon.driver, "second front-end while one is connected", "closed after it has said what it is")
    first.socket.close()

    def served() -> bool:
        with daemon.session() as third:
            try:
                third.send(PERCENTAGE)
            except BrokenPipeError:
                return False
            return third.receive() != b""

    # It may take the next connection before it has seen that this one has closed.
    until(served, "the place of a session that was closed without its end stays taken")


def test_a_session_after_the_end_of_another_is_never_turned_away(daemon: Daemon) -> None:
    for _ in range(50):
        with daemon.session() as session:
            assert session.ask(PERCENTAGE) == ["100.0"]
            session.finish()
            assert session.receive() == b""


def test_an_open_session_does_not_hold_clients_up(daemon: Daemon) -> None:
    with daemon.session() as session:
        assert session.ask(PERCENTAGE) == ["100.0"]
        with Session(daemon.control, USER, rv.Kind.CLIENT) as waiting:
            assert waiting.receive() == b"", "dropped, as no server starts without a GPU"
        assert session.ask(PERCENTAGE) == ["100.0"]


@pytest.mark.parametrize("half", ["silence", "no kind", "length without text", "answers unread"])
def test_what_is_half_said_stops_the_daemon(daemon: Daemon, half: str) -> None:
    """Why the gate says everything at once, with deadlines, and lets no one else near the daemon."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        if half == "silence":
            silent.connect(str(daemon.control))
            assert silent.recv(64) == rv.HELLO
            assert not greeted(daemon, 1.0)
        elif half == "no kind":
            with Session(daemon.control, kind=None):
                assert not greeted(daemon, 1.0)
        elif half == "answers unread":
            with daemon.session() as session:
                question = deque(rv.command_messages(PERCENTAGE))
                until(lambda: stands_still(daemon, session, question), "unread answers do not stop it")
        else:
            with daemon.session() as session:
                session.socket.send(rv.command_messages(PERCENTAGE)[0])
                until(lambda: not greeted(daemon, 0.5), "a length alone does not stop it")
    until(lambda: greeted(daemon, 1.0), "it goes on when the connection closes")
    words = "no one else is greeted until it closes"
    if half in ("silence", "no kind"):
        saw(daemon.driver, "a connection that says nothing", words)
    else:
        saw(daemon.driver, "a front-end that sends a length and no text, or reads no answers", words)


def test_unknown_kinds_cost_the_daemon_a_descriptor(daemon: Daemon) -> None:
    """Why the gate passes only kinds on that it knows."""

    def descriptors() -> int:
        """Counted when it has greeted a further connection: all before it are dealt with by then."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(str(daemon.control))
            assert connection.recv(64) == rv.HELLO
            return len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))

    before = descriptors()
    for _ in range(5):
        with Session(daemon.control, kind=None) as session:
            session.send_as(b"\x07\0\0\0")
    assert descriptors() == before + 5
    until(lambda: daemon.lines().count("Unknown type of connection") == 5, "it does not say so")
    for kind in (rv.Kind.FRONT_END, rv.Kind.DEBUGGER, rv.Kind.SERVER):
        with Session(daemon.control, kind=kind):
            pass
    assert descriptors() == before + 5
    saw(daemon.driver, "a connection of an unknown kind", "never closed by the daemon")


def test_a_long_text_ends_the_daemon(daemon: Daemon) -> None:
    """Why mpsagent never sends one, and its gate lets none through. The longest that it lets through does no harm."""
    with daemon.session() as session:
        name = "x" * rv.LONGEST_COMMAND
        assert session.ask(name) == [f'Unknown command "{name}"']
    with pytest.raises(ValueError):
        rv.command_messages("x" * (rv.LONGEST_COMMAND + 1))
    with daemon.session() as session:
        text = b"x" * 4500
        session.socket.send(len(text).to_bytes(8, "little"))
        session.socket.send(text)
        assert session.receive() == b""
    until(lambda: not daemon.alive, "the daemon lives: the limit of 1,024 may be lifted")
    saw(daemon.driver, "a command of more than 4,096 bytes", "the daemon ends (SIGSEGV)")


def test_a_line_break_in_a_text_writes_a_line_into_the_log(daemon: Daemon) -> None:
    """Why mpsagent cuts texts: the second line has no head, or one that the sender has chosen."""
    forged = "[2026-11-21 19:35:17.073 Control     1] NEW SERVER 1: Ready"
    with daemon.session(USER) as session:
        text = f"{PERCENTAGE}\n{forged}\n\0".encode()
        session.socket.send(len(text).to_bytes(8, "little"))
        session.socket.send(text)
        assert rv.decode_answer(session.receive()) == rv.Answer("100.0")
    until(lambda: forged in daemon.text().splitlines(), "the line break was not written")
    saw(daemon.driver, "a line break in a command", "a line of the sender's own in control.log")
    with pytest.raises(ValueError):
        rv.command_messages(f"{PERCENTAGE}\n{forged}")


@pytest.mark.parametrize("command", ["quit", "quit -t 2"])
def test_quit_has_no_answer_but_the_end(daemon: Daemon, command: str) -> None:
    with daemon.session() as session:
        session.send(command)
        assert rv.decode_answer(session.receive()) == rv.Exit(0)
    until(lambda: not daemon.alive, "it did not quit")
    assert ("quit command issued with timeout of 2" in daemon.lines()) is (
        command != "quit" and ("quit_timeout" in abilities.able(daemon.driver.version))
    )


def test_quit_says_1_after_a_server_has_failed(daemon: Daemon) -> None:
    with Session(daemon.control, USER, rv.Kind.CLIENT) as waiting:
        assert waiting.receive() == b""
    with daemon.session() as session:
        session.send("quit")
        end = rv.decode_answer(session.receive())
    assert isinstance(end, rv.Exit)
    saw(daemon.driver, "`quit` after a server has failed", f"exit status {end.status}")


def test_the_client_is_who_root_says(daemon: Daemon) -> None:
    """Root passes a client's credentials on, pid and all: the daemon's log names the client."""
    import subprocess

    with subprocess.Popen(["/bin/sleep", "60"], user=USER, group=USER) as other:
        try:
            with Session(daemon.control, USER, rv.Kind.CLIENT, pid=other.pid) as waiting:
                assert waiting.receive() == b""
        finally:
            other.kill()
    said = f"NEW CLIENT {other.pid} from user {USER}: Server is not ready, push client to pending list"
    until(lambda: said in daemon.lines(), "it is taken for another")
    saw(daemon.driver, "root passes a client's credentials on", "control.log names the client's pid and user")
