"""The program nvidia-cuda-mps-control: options, and one batch of commands from standard input to the daemon.

Kept to a handful of built-in modules: one run should cost no more than the start of the interpreter.
"""

# pathlib and contextlib cost more than everything else in the start of a front-end or client
# ruff: noqa: PTH110

import _socket
import os
import sys

from mpsagent.sim import texts, wire


def _fail(text: str) -> int:
    os.write(2, text.encode())
    return 1


def commands(pipe: str, batch: bytes = b"") -> int:
    """All of standard input (or the one command given) is one session; its answers are printed at its end. It lasts as
    long as the input does, and keeps all other front-ends out (X25 and X27 of the real runs)."""
    if not os.path.exists(f"{pipe}/control"):
        return _fail(texts.NO_DAEMON)
    try:
        connection = wire.connect(pipe)
    except OSError:
        return _fail(texts.NO_DAEMON)
    answer = said = b""
    try:
        wire.send_all(connection, b"UI\n")
        said = batch
        while chunk := b"" if batch else os.read(0, 65536):
            wire.send_all(connection, chunk)
            said = chunk
        if batch or not said.endswith(b"\n"):
            wire.send_all(connection, batch + b"\n" if batch or said else b"")
        connection.shutdown(_socket.SHUT_WR)
        while chunk := connection.recv(wire.MESSAGE):
            answer += chunk
    except OSError:
        pass
    _, _, answer = answer.partition(b"\n")  # the greeting
    accepted, _, answer = answer.partition(b"\n")
    if accepted != b"+" or not answer.endswith(b"\x04"):
        # whether one that is turned away has sent before it notices is chance (X27: 4 of 8)
        return 0 if os.getpid() % 2 and not said.startswith(b"quit") else _fail(texts.CANNOT_SEND)
    os.write(1, answer[:-1])
    return 0


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
        from mpsagent.sim import control_daemon

        return control_daemon.main(foreground="f" in options, multiuser="M" in options)
    return commands(wire.directories()[0], " ".join(words).encode())
