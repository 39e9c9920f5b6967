"""Completions in real shells: what is typed, and what TAB makes of it."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click
import pytest

from mpsagent.cli import completions
from tests.api.stand_in import Served, StandIn, serve
from tests.cli.program import PROGRAM

START_UP = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(mpsagent-cli completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -U compinit; compinit -D -u; eval "$(mpsagent-cli completion zsh)"'),
}
PROMPT = "typed-here> "


@pytest.fixture
def served() -> Iterator[Served]:
    with serve(StandIn()) as one:
        yield one


def environment(served: Served, home: Path) -> dict[str, str]:
    return {
        "PATH": f"{Path(PROGRAM).parent}:/usr/bin:/bin", "HOME": str(home), "MPSAGENT_SOCKET": str(served.path),
        "TERM": "dumb", "LC_ALL": "C.UTF-8", "PS1": PROMPT, "PROMPT": PROMPT, "INPUTRC": "/dev/null",
    }  # fmt: skip


class Keyboard:
    """A shell at a terminal."""

    def __init__(self, words: list[str], env: dict[str, str]) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execvpe(words[0], words, env)
        self.seen = ""

    def types(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def shows(self, text: str) -> None:
        """Waits until it has come since this was asked last."""
        end = time.monotonic() + 60
        while text not in self.seen:
            assert time.monotonic() < end, f"no {text!r} in {self.seen!r}"
            if select.select([self._fd], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self._fd, 65536).decode(errors="replace")
                except OSError:
                    raise AssertionError(f"the shell has ended: {self.seen!r}") from None
        self.seen = self.seen.partition(text)[2]

    def close(self) -> None:
        os.close(self._fd)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@contextmanager
def keyboard(shell: str, served: Served, home: Path) -> Iterator[Keyboard]:
    words, set_up = START_UP[shell]
    keys = Keyboard(words, environment(served, home))
    try:
        keys.shows(PROMPT)
        keys.types(f"{set_up}; echo set-u''p\n")
        keys.shows("set-up")
        keys.shows(PROMPT)
        yield keys
    finally:
        keys.close()


@pytest.mark.parametrize("shell", START_UP)
def test_tab_completes_verbs_and_options(shell: str, served: Served, tmp_path: Path) -> None:
    """A verb and an option, typed in part."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    with keyboard(shell, served, tmp_path) as keys:
        keys.types("mpsagent-cli termi\t50\t --dry\t\n")
        keys.shows("Client 501 of alice at server 500 would be ended")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("turn extend", "alice"), ("lease add --uid", "alice"), ("lease add --pid", "501"),
        ("terminate", "501"), ("terminate --job", "job-7"), ("lease delete", "1"), ("lease delete --name", "job-7"),
        ("drain --instance", "default"), ("replay --instance", "default"),
    ],
)  # fmt: skip
def test_users_processes_instances_and_jobs_are_offered(words: str, offered: str, served: Served) -> None:
    """What the agent knows at this moment."""
    served.backend.given.append({"id": 1, "name": "job-7"})
    line = f"mpsagent-cli {words} "
    env = {
        "MPSAGENT_SOCKET": str(served.path), "_MPSAGENT_CLI_COMPLETE": "bash_complete", "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split())),
    }  # fmt: skip
    done = subprocess.run([PROGRAM], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert f"plain,{offered}" in done.stdout.splitlines()


def test_the_rows_of_a_page_are_completed_and_no_agent_is_no_error(served: Served, tmp_path: Path) -> None:
    def of(path: Path) -> click.Context:
        context = click.Context(click.Command("x"))
        context.params = {"path": str(path)}
        return context

    option = click.Option(["--user"])
    assert completions.users(of(served.path), option, "") == ["alice", "bob", "carol"]
    assert completions.users(of(served.path), option, "al") == ["alice"]
    assert completions.users(of(served.path), option, "x") == []
    assert completions.users(of(tmp_path / "none"), option, "") == []
