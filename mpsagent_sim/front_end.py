"""The program nvidia-cuda-mps-control: options, and one batch of commands from standard input to the daemon.

Kept to a handful of built-in modules: one run should cost no more than the start of the interpreter.
"""

import _socket
import os
import select
import sys

from mpsagent_sim import rendezvous, texts, wire

_PACKET = 4 + 4096  # the rest of a longer answer is lost
_LINE = 4000  # longer lines are cut


def _fail(text: str) -> int:
    os.write(2, text.encode())
    return 1


def _connect(pipe: str) -> _socket.socket | None:
    """Return a connection to the privileged socket if this user may write to it, otherwise to the other one; None if
    no daemon greets."""
    for name in ("control_privileged", "control"):
        try:
            connection = rendezvous.connect(f"{pipe}/{name}")
        except OSError:
            continue
        if rendezvous.greeted(connection):
            return connection
        connection.close()
    return None


class _Session:
    """A session. Each line of the input is a command, and the answers are printed at the end. It lasts until the end of
    the input, and the daemon rejects all other front-ends meanwhile (X25 and X27 of the real runs)."""

    def __init__(self, connection: _socket.socket) -> None:
        self.connection = connection
        self.input = b""
        self.answers = b""
        self.status: int | None = None
        self.ended = False
        self.quitting = False

    def command(self, line: bytes) -> None:
        self.quitting = line.startswith(b"quit")
        text = line[:_LINE] + b"\n\0"
        # even to a daemon that has exited: its answers can still be read
        rendezvous.send(self.connection, len(text).to_bytes(8, "little"))
        rendezvous.send(self.connection, text)

    def hear(self) -> None:
        message = rendezvous.receive(self.connection, _PACKET)
        message.close()
        kind, text = message.data[:4], message.data[4:]
        if kind == b"\0\0\0\0":
            self.answers += text + b"\n"
        elif kind == b"\1\0\0\0":
            self.status = int.from_bytes(text[:4], "little")
        self.ended = self.ended or not message.data or self.status is not None

    def listen(self, reading: bool) -> bool:
        """Answers that have come, and whether there is input to read. Both are waited for."""
        poll = select.poll()
        poll.register(self.connection.fileno(), select.POLLIN)
        if reading:
            poll.register(0, select.POLLIN)
        ready = {fd for fd, _ in poll.poll()}
        if self.connection.fileno() in ready:
            self.hear()
        return 0 in ready

    def run(self, command: bytes) -> None:
        """The one command given, or all of standard input."""
        if command:
            self.command(command)
        while not command and not self.ended:
            if not self.listen(reading=True):
                continue
            chunk = os.read(0, 65536)
            *lines, self.input = (self.input + chunk).split(b"\n")
            for line in [*lines, self.input] if not chunk and self.input else lines:
                self.command(line)
            if not chunk:
                break
        rendezvous.send(self.connection, bytes(8))
        while not self.ended:
            self.listen(reading=False)


def commands(pipe: str, command: bytes = b"") -> int:
    """All of standard input, or the one command given. Exit status 0 when all was sent, whatever the answers."""
    connection = _connect(pipe)
    if connection is None:
        return _fail(texts.NO_DAEMON)
    if not rendezvous.send_credentials(connection, rendezvous.CREDENTIALS):
        return _fail(texts.NO_AUTHENTICATION)
    rendezvous.send(connection, rendezvous.FRONT_END)
    session = _Session(connection)
    session.run(command)
    if session.status is None:
        # whether one that is turned away has sent before it notices is chance (X27: 4 of 8)
        return 0 if os.getpid() % 2 and not session.quitting else _fail(texts.CANNOT_SEND)
    os.write(1, session.answers)
    return session.status


def main() -> int:
    options = set()
    words = sys.argv[1:]
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word in ("-h", "--help"):
            os.write(1, texts.HELP.encode())
            return 0
        if word in ("-v", "--version"):
            os.write(1, texts.VERSION.encode())
            return 0
        names = {
            "--daemon": "d",
            "--forground": "f",
            "--foreground": "f",
            "--multiuser-server": "M",
            "--ready-devices": "q",
        }
        options |= {names[word]} if word in names else set(word[1:])
    if options & {"d", "f"}:
        from mpsagent_sim import linux_host

        return linux_host.main(foreground="f" in options, multiuser="M" in options)
    return commands(wire.directories()[0], " ".join(words).encode())
