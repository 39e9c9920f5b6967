"""``--watch``: a page again and again in the same place, on a real terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.api.stand_in import START, Served, StandIn, held, serve
from tests.cli.program import PROGRAM


@pytest.fixture
def served() -> Iterator[Served]:
    with serve() as one:
        yield one


class Terminal:
    """A program on a terminal of 80 columns and 24 lines."""

    def __init__(self, path: Path, *words: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TERM": "xterm", "NO_COLOR": "1", "TZ": "UTC"}
        self.process = subprocess.Popen(
            [PROGRAM, "--socket", str(path), *words], env=env, stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.text = ""

    def until(self, true: Callable[[str], bool]) -> str:
        """What has come, when it is so."""
        end = time.monotonic() + 60
        while not true(self.text):
            assert time.monotonic() < end, self.text
            if select.select([self.master], [], [], 0.1)[0]:
                self.text += os.read(self.master, 65536).decode()
        return self.text

    def end(self) -> int:
        """Ctrl-C; its exit status. Read on meanwhile: a full terminal would hold it up."""
        self.process.send_signal(signal.SIGINT)
        end = time.monotonic() + 60
        while self.process.poll() is None:
            assert time.monotonic() < end
            with suppress(OSError):
                if select.select([self.master], [], [], 0.1)[0]:
                    os.read(self.master, 65536)
        os.close(self.master)
        return self.process.returncode


@pytest.mark.parametrize("verb", ["status", "clients", "servers", "queue"])
def test_watching_shows_it_again_in_the_same_place(served: Served, verb: str) -> None:
    """Until Ctrl-C, which is how it is meant to end; no line is wider than the terminal."""
    terminal = Terminal(served.path, verb, "--watch", "0.1")
    text = terminal.until(lambda text: text.count("\x1b[H") > 2)
    assert terminal.end() == 0
    first, second = (frame.split("\x1b[J")[0].split("\r\n") for frame in text.split("\x1b[H")[1:3])
    assert first[1:] == second[1:]
    assert max(len(line.removesuffix("\x1b[K")) for line in first) <= 80


def test_watching_goes_on_when_the_agent_comes_back(tmp_path: Path) -> None:
    """And says meanwhile that it is away. More than the screen holds is counted, not scrolled."""
    path, backend = tmp_path / "mpsagent.sock", StandIn()
    terminal = Terminal(path, "queue", "--watch", "0.1")
    terminal.until(lambda text: "cannot reach mpsagent" in text)
    line = backend.state.held
    for n in range(10, 60):
        line = line.put(held(n, 700 + n, 30000 + n, START + n))
    backend.state = replace(backend.state, held=line)
    with serve(backend, path=path):
        text = terminal.until(lambda text: "more lines" in text)
    assert text.rpartition("\x1b[H")[2].count("\n") < 24
    assert terminal.end() == 0


def test_watching_for_programs_is_one_json_a_line(served: Served) -> None:
    """For jq."""
    with subprocess.Popen(
        [PROGRAM, "--socket", str(served.path), "queue", "--json", "--watch", "0.1"], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        bodies = [json.loads(child.stdout.readline()) for _ in range(2)]
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 0
    assert [len(body["queue"]) for body in bodies] == [2, 2]
