"""``mpsagent-cli`` where standard streams are closed or full, and on terminals that can do little."""

from __future__ import annotations

import subprocess

import pytest

from tests.api.stand_in import Served
from tests.cli.program import PROGRAM, on_terminal, run

ENV = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}


def by_a_shell(served: Served, words: str) -> subprocess.CompletedProcess[str]:
    env = {**ENV, "MPSAGENT_SOCKET": str(served.path)}
    command = ["/bin/sh", "-c", f'"{PROGRAM}" {words}']
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("words", ["status", "clients", "queue", "events", "top", "policy explain alice"])
def test_a_closed_output_is_as_good_as_none(served: Served, words: str) -> None:
    """It was a traceback: a terminal's width was asked of what is not there."""
    done = by_a_shell(served, f"{words} >&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_who_cannot_be_asked_is_not(served: Served) -> None:
    """A closed input is no terminal."""
    done = by_a_shell(served, "restart-mps <&-")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "say --yes" in done.stderr


def test_errors_may_be_closed_too(served: Served) -> None:
    """The connection to the agent must not become the stream for errors, or the other way round."""
    done = by_a_shell(served, "terminate 777 2>&-")
    assert (done.returncode, done.stdout) == (6, "")
    assert by_a_shell(served, "status <&- 2>&-").stdout.startswith("● mpsagent")


@pytest.mark.parametrize("words", ["status", "clients --json", "env", "--help", "completion bash"])
def test_a_full_disk_is_said(served: Served, words: str) -> None:
    """In a line: what was not written, and why."""
    done = by_a_shell(served, f"{words} >/dev/full")
    assert (done.returncode, done.stderr) == (
        2, "mpsagent-cli: the output cannot be written: No space left on device\n",
    )  # fmt: skip


@pytest.mark.parametrize("path", ["", "/", "."])
def test_a_socket_without_a_name_is_said(path: str) -> None:
    done = run(None, "--socket", path, "status")
    assert (done.returncode, "cannot reach mpsagent" in done.stderr) == (3, True)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", ["policy explain", "events", "events --kind", "report --job"])
def test_bytes_that_are_no_text_are_asked_for_as_they_are(served: Served, words: str) -> None:
    """It was a traceback; whether there is such a name the agent knows."""
    done = by_a_shell(served, f"{words} $(printf '\\377')")
    assert "Traceback" not in done.stderr


def test_a_word_that_is_no_number_is_called_so(served: Served) -> None:
    """It was "not a valid integer range"."""
    for words in (["terminate", "train"], ["events", "-n", "x"], ["lease", "delete", "x"]):
        done = run(served, *words)
        assert (done.returncode, "is not a valid number" in done.stderr) == (2, True), done.stderr


def test_a_span_without_a_unit_is_not_asked_for_in_seconds(served: Served) -> None:
    """It said: "5" is not a duration; seconds, or a text like "10m"."""
    done = run(served, "drain", "--timeout", "5")
    assert done.returncode == 2
    assert 'write it like "30s"' in done.stderr
    assert "\n  seconds" not in done.stderr


def top(served: Served, **env: str) -> tuple[int, bytes]:
    """Exit status, and all that was written; it is left by `q` as soon as it says how."""
    words = [PROGRAM, "--socket", str(served.path), "top"]
    return on_terminal(words, typed=True, quit_at=b"q quit", **{**ENV, **env})


def test_top_writes_one_page_where_a_terminal_can_do_nothing(served: Served) -> None:
    """In an editor's shell."""
    status, out = top(served, TERM="dumb")
    assert status == 0
    assert b"train.py" in out
    assert b"\x1b" not in out


def test_top_that_cannot_draw_says_what_can_be_had(served: Served) -> None:
    status, out = top(served, TERM="nonsense")
    assert status == 1
    assert b"TERM is nonsense; one page: mpsagent-cli top | cat" in out


def test_top_leaves_the_ground_of_a_terminal_as_it_is_without_colours(served: Served) -> None:
    """It painted white on black, on light terminals too."""
    status, out = top(served, TERM="xterm", NO_COLOR="1")
    assert (status, b"train.py" in out) == (0, True)
    assert not [code for code in (b"\x1b[37m", b"\x1b[40m", b"\x1b[31") if code in out]
