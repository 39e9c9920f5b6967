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


def _read_all(fd: int) -> bytes:
    data = b""
    while chunk := os.read(fd, 65536):
        data += chunk
    return data


def commands(pipe: str, batch: bytes = b"") -> int:
    """All of standard input (or the one command given) is one session; its answers are printed at its end."""
    if not os.path.exists(f"{pipe}/control"):
        return _fail(texts.NO_DAEMON)
    batch = batch or _read_all(0)
    try:
        connection = wire.connect(pipe)
    except OSError:
        return _fail(texts.NO_DAEMON)
    answer = b""
    try:
        wire.send_all(connection, b"UI\n" + batch + (b"" if batch.endswith(b"\n") or not batch else b"\n"))
        connection.shutdown(_socket.SHUT_WR)
        while chunk := connection.recv(wire.MESSAGE):
            answer += chunk
    except OSError:
        pass
    _, _, answer = answer.partition(b"\n")  # the greeting
    accepted, _, answer = answer.partition(b"\n")
    if accepted != b"+" or not answer.endswith(b"\x04"):
        return _fail(texts.CANNOT_SEND)
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
