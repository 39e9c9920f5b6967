"""NVIDIA's front-end and libcuda at a socket of ours: what a gate must say to them, and what they make of it."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpsagent.mps import rendezvous as rv
from tests.nvidia.daemon import LIMIT, SO_PASSCRED, USER, client, front_end, result
from tests.nvidia.fetch import Driver
from tests.nvidia.page import saw

OUTSIDE, REFUSED = 100, 805
"""What ``cuInit`` returns: NO_DEVICE, as without MPS there is no GPU here, and MPS_CONNECTION_FAILED."""

Conversation = Callable[[socket.socket, int], None]


@contextmanager
def listening(path: Path, conversation: Conversation, mode: int = 0o666) -> Iterator[list[bytes]]:
    """A socket at which each connection is served by ``conversation(connection, how many before it)``. Yields the
    messages that were received. The directory has nothing but such sockets."""
    received: list[bytes] = []

    class Recorded(socket.socket):
        def recv(self, size: int, flags: int = 0) -> bytes:
            received.append(super().recv(size, flags))
            return received[-1]

    def serve() -> None:
        number = 0
        while True:
            try:
                accepted = listener.accept()[0]
            except OSError:
                return
            accepted.settimeout(LIMIT)
            connection = Recorded(fileno=accepted.detach())
            connection.settimeout(LIMIT)
            with connection:
                try:
                    conversation(connection, number)
                except (BrokenPipeError, ConnectionResetError):
                    received.append(b"<lost>")
            number += 1

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, SO_PASSCRED, 1)
        listener.bind(str(path))
        path.chmod(mode)
        listener.listen(8)
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield received
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(LIMIT)
            path.unlink()


def session(*answers: bytes) -> Conversation:
    """Greets, hears all commands to their end, gives these answers."""

    def talk(connection: socket.socket, number: int) -> None:
        connection.send(rv.HELLO)
        while connection.recv(4200) not in (rv.END, b""):
            pass
        for answer in answers:
            connection.send(answer)

    return talk


def hears(messages: int) -> Conversation:
    """Greets, hears so many messages, closes."""

    def talk(connection: socket.socket, number: int) -> None:
        connection.send(rv.HELLO)
        for _ in range(messages):
            if not connection.recv(4200):
                return

    return talk


def closes(connection: socket.socket, number: int) -> None:
    """Closes before the greeting."""


USERS = pytest.mark.parametrize("uid", [0, pytest.param(USER, marks=pytest.mark.root)], ids=["root", "user"])


@pytest.mark.root
def test_what_the_front_end_sends(nvidia: Driver, place: Path) -> None:
    """Root goes to control_privileged, others to control; nothing else is looked for in the directory."""
    answers = session(rv.answer_message("100.0"), rv.exit_message(0))
    for uid, name in ((0, "control_privileged"), (USER, "control")):
        with (
            listening(place / "control_privileged", answers, 0o755) as at_privileged,
            listening(place / "control", answers) as at_control,
        ):
            done = front_end(nvidia, place, "get_server_list\nno newline", uid)
        assert (done.returncode, done.stdout, done.stderr) == (0, "100.0\n", "")
        heard = {"control_privileged": at_privileged, "control": at_control}
        assert heard.pop(name) == [
            rv.CREDENTIALS,
            rv.kind_bytes(rv.Kind.FRONT_END),
            *rv.command_messages("get_server_list"),
            (11).to_bytes(8, "little"),
            b"no newline\0",
            rv.END,
        ]
        assert list(heard.values()) == [[]]


@USERS
def test_refusing_a_front_end_in_words(nvidia: Driver, place: Path, uid: int) -> None:
    """Answers, then the end with an exit status: that is what it prints and returns."""
    refusal = session(rv.answer_message("refused: not your server"), rv.exit_message(1))
    with listening(place / "control", refusal):
        done = front_end(nvidia, place, "quit\n", uid)
    assert (done.returncode, done.stdout, done.stderr) == (1, "refused: not your server\n", "")


@USERS
def test_the_end_may_come_first(nvidia: Driver, place: Path, uid: int) -> None:
    def talk(connection: socket.socket, number: int) -> None:
        connection.send(rv.HELLO)
        connection.recv(64)
        connection.recv(64)
        connection.send(rv.exit_message(3))
        while connection.recv(4200):
            pass

    with listening(place / "control", talk):
        done = front_end(nvidia, place, "get_server_list\n" * 20, uid)
    assert done.returncode in (1, 3), "3, or 1 when it has found the connection closed while it still sent"


@USERS
def test_no_greeting_is_no_daemon(nvidia: Driver, place: Path, uid: int) -> None:
    with listening(place / "control", closes):
        done = front_end(nvidia, place, "get_server_list\n", uid)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "Cannot find MPS control daemon process\n")


@pytest.mark.parametrize("messages", [0, 1, 2, 4])
@USERS
def test_closing_later_is_no_refusal(nvidia: Driver, place: Path, uid: int, messages: int) -> None:
    """Whether it finds the connection closed when it sends or when it receives is chance, and so are its exit status
    and its words: a gate must end every session in the proper way."""
    with listening(place / "control", hears(messages)):
        done = front_end(nvidia, place, "get_server_list\n", uid)
    assert done.stdout == ""
    assert done.returncode in (0, 1)
    assert done.stderr in (
        "",
        "Cannot authenticate or connect to MPS control daemon process\n",
        "Cannot send command to MPS control daemon process\n",
    )


def test_an_answer_as_long_as_can_be(nvidia: Driver, place: Path) -> None:
    with listening(place / "control", session(rv.answer_message("z" * 5000), rv.exit_message(0))):
        done = front_end(nvidia, place, "ps\n")
    assert re.match(r"z{4096}[^z]*\n$", done.stdout), done.stdout


@USERS
def test_a_client_is_refused_after_its_credentials(nvidia: Driver, place: Path, uid: int) -> None:
    """It needs nothing in the directory but ``control``, and whose that is does not matter to it."""
    with listening(place / "control", hears(2)) as received:
        assert result(client(nvidia, place, uid)) == REFUSED
    assert received == [b"", rv.CREDENTIALS, rv.kind_bytes(rv.Kind.CLIENT)], "a probe, then in earnest"
    saw(nvidia, "libcuda and front-end: a directory with nothing but the sockets", "enough")


@pytest.mark.root
def test_a_socket_of_another_user(nvidia: Driver, place: Path) -> None:
    """A client believes any socket: the public directory must be root's alone."""
    import os

    with listening(place / "control", hears(2)):
        os.chown(place / "control", USER + 1, USER + 1)
        assert result(client(nvidia, place, USER)) == REFUSED
    saw(nvidia, "libcuda: a socket that is not root's", "believed")


def test_the_probe_decides_whether_a_client_stays_outside(nvidia: Driver, place: Path) -> None:
    with listening(place / "control", closes):
        assert result(client(nvidia, place)) == OUTSIDE
    saw(nvidia, "libcuda: closed before the greeting of its first connection", "runs outside MPS")

    def only_the_probe(connection: socket.socket, number: int) -> None:
        if number == 0:
            connection.send(rv.HELLO)
            connection.recv(64)

    with listening(place / "control", only_the_probe):
        assert result(client(nvidia, place)) == REFUSED, "greeted once, it does not go on outside MPS"
    saw(nvidia, "libcuda: closed at any later point", f"error {REFUSED} (MPS_CONNECTION_FAILED)")
    assert result(client(nvidia, place)) == OUTSIDE, "no socket at all"


def test_a_held_client_waits(nvidia: Driver, place: Path) -> None:
    release = threading.Event()
    held = threading.Event()

    def hold(connection: socket.socket, number: int) -> None:
        connection.send(rv.HELLO)
        if connection.recv(64) == rv.CREDENTIALS:
            connection.recv(64)
            held.set()
            release.wait(LIMIT)

    with listening(place / "control", hold):
        waiting = client(nvidia, place)
        assert held.wait(LIMIT)
        assert waiting.poll() is None
        release.set()
        assert result(waiting) == REFUSED


@pytest.mark.parametrize("greeting", [b"OUTBHELX\0", b"OUTBHELL\0v3"], ids=["other letters", "longer"])
def test_another_greeting(nvidia: Driver, place: Path, greeting: bytes) -> None:
    """Nine bytes of any text are taken for the greeting; more are not, and the client goes on outside MPS."""

    def talk(connection: socket.socket, number: int) -> None:
        connection.send(greeting)
        if connection.recv(64):
            connection.recv(64)

    with listening(place / "control", talk):
        assert result(client(nvidia, place)) == (REFUSED if len(greeting) == 9 else OUTSIDE)
