"""Completions in real shells: what is typed, and what TAB makes of it."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpsagent.cli.main import cli
from mpsagent.policy.identity import Identity
from tests.api.stand_in import USER, Served, StandIn, serve
from tests.cli.program import PROGRAM, run

START_UP = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(mpsagent-cli completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -U compinit; compinit -D -u; eval "$(mpsagent-cli completion zsh)"'),
}
PROMPT = "typed-here> "
PATIENT = str(Path(__file__).with_name("patient"))


class Several(StandIn):
    """With two instances."""

    def status(self) -> Any:
        return {**super().status(), "instances": [{"name": "left"}, {"name": "right"}]}

    async def explain(self, user: str, cgroup: str | None = None) -> Any:
        self.asked.append(("explain", user))
        return await super().explain(user)


@pytest.fixture
def served() -> Iterator[Served]:
    with serve(Several()) as one:
        yield one


def environment(served: Served, home: Path) -> dict[str, str]:
    return {
        "PATH": f"{Path(PROGRAM).parent}:/usr/bin:/bin", "HOME": str(home), "MPSAGENT_SOCKET": str(served.path),
        "TERM": "dumb", "LC_ALL": "C.UTF-8", "PS1": PROMPT, "PROMPT": PROMPT, "INPUTRC": "/dev/null",
        "PYTHONPATH": PATIENT,
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
def test_tab_completes_what_there_is_now(shell: str, served: Served, tmp_path: Path) -> None:
    """A verb, a client, a user and an instance: each word is typed in part, and the agent is asked for the whole."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    with keyboard(shell, served, tmp_path) as keys:
        keys.types("mpsagent-cli client term\t5\t--dry-run\n")
        keys.shows("Client 501 of alice at server 500 would be ended")
        keys.shows(PROMPT)
        keys.types("mpsagent-cli policy explain al\t\n")
        keys.shows("alice (uid ")
        keys.shows(PROMPT)
        keys.types("mpsagent-cli drain --instance ri\t\n")
        keys.shows("ok: yes")
    assert [one for one in served.backend.asked if one[0] in ("explain", "drain")] == [
        ("explain", "alice"), ("drain", None, os.getuid(), "right"),
    ]  # fmt: skip


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
def test_fish_offers_them_with_what_they_are(served: Served, tmp_path: Path) -> None:
    """Who waits can not be ended, and is on record."""

    def offered(line: str) -> list[str]:
        typed = f'mpsagent-cli completion fish | source; complete -C "mpsagent-cli {line}"'
        words = ["fish", "--no-config", "-c", typed]
        env = environment(served, tmp_path)
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()

    assert offered("client terminate ") == ["501\talice (20001) running: python train.py"]
    assert offered("server shutdown ") == ["500\talice (20001) ACTIVE: 1 clients"]
    assert [one.split("\t")[0] for one in offered("history --pid 6")] == ["600", "601", "602"]
    assert {one.split("\t")[0] for one in offered("policy explain ")} == {"alice", "bob", "carol"}
    assert {one.split("\t")[0] for one in offered("resume --instance ")} == {"left", "right"}


def complete(served: Served | None, *words: str) -> list[str]:
    """As bash asks for the word after these."""
    line = {"COMP_WORDS": " ".join(["mpsagent-cli", *words]), "COMP_CWORD": str(len(words) + 1), "PYTHONPATH": PATIENT}
    done = run(served, _MPSAGENT_CLI_COMPLETE="bash_complete", **line)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_nothing_that_a_shell_would_obey_is_offered(served: Served) -> None:
    """Names come from a name service and from users."""
    state = served.backend.state
    evil = Identity(USER, "$(reboot)")
    peer = state.clients[501].peer._replace(command="a\nplain,7\x1b[2J")
    served.backend.state = replace(
        state, identities={USER: evil}, clients={501: replace(state.clients[501], peer=peer)}
    )
    assert sorted(complete(served, "policy", "explain")) == ["plain,20002", "plain,20003"]
    assert complete(served, "client", "terminate") == ["plain,501"]
    assert served.failures == []


def test_without_an_agent_nothing_is_offered_and_nothing_said() -> None:
    assert complete(None, "--socket", "/nowhere/at-all", "client", "terminate") == [""]


def test_every_pid_user_and_instance_is_completed() -> None:
    """Also of verbs to come."""

    def parameters(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from parameters(command, f"{before}{name} ")
            else:
                yield from ((f"{before}{name} {one.name}", one) for one in command.params)

    live = re.compile(r"(?<!lease add )\b(pid|user|instance|number)$")
    wanted = {name: one for name, one in parameters(cli) if live.search(name)}
    assert len(wanted) >= 8
    assert [name for name, one in wanted.items() if one._custom_shell_complete is None] == []
