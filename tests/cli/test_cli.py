"""``mpsagent-cli`` as people run it: the real program, its output and its exit status."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mpsagent import __version__
from mpsagent.cli import pages, wording
from mpsagent.cli.verbs import cli
from tests.api.stand_in import Served
from tests.cli.program import PROGRAM, on_terminal, run


def test_a_verb_is_imported_when_it_is_asked_for(served: Served) -> None:
    """A status is typed again and again and waits for none of the others; they are all there when they are wanted."""
    code = """
import sys
from mpsagent.cli.verbs import cli
cli(["--socket", sys.argv[1], "status"], standalone_mode=False)
print(*(name for name in sys.modules if name.startswith("mpsagent.cli.")), file=sys.stderr)
print(*(one.name for group in (cli, cli.commands["policy"]) for one in group.commands.values()), file=sys.stderr)
print(*(name for group in (cli, cli.commands["policy"]) for name in group.commands), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, served.path], capture_output=True, text=True, check=True, timeout=60
    )
    modules, theirs, listed = (line.split() for line in done.stderr.splitlines())
    others = {"advise", "bench", "lease", "metrics", "report", "timeline", "top"}
    assert not others & {name.rpartition(".")[2] for name in modules}
    assert theirs == listed
    assert {"advise", "bench", "lease", "metrics", "report", "timeline"} <= set(listed)


@pytest.mark.parametrize("verb", [*pages.PAGES, "status --json", "queue --json"])
def test_a_page_needs_no_click(served: Served, verb: str) -> None:
    """Its import is half of the time that a status takes; what is shown is the same."""
    code = "import sys; from mpsagent.cli.main import main; main()"
    words = [sys.executable, "-X", "importtime", "-c", code, *verb.split()]
    env = {**os.environ, "MPSAGENT_SOCKET": str(served.path)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert ("json" in loaded, "click" in loaded) == (True, False)
    told = run(served, "--socket", str(served.path), *verb.split())  # the first line of `top` has the time
    assert (done.returncode, done.stdout.splitlines()[1:]) == (told.returncode, told.stdout.splitlines()[1:])


def test_whoever_has_seen_enough_is_no_mistake(served: Served) -> None:
    """`mpsagent-cli status | head -1` ends without a word."""
    read, write = os.pipe()
    os.close(read)
    env = {**os.environ, "MPSAGENT_SOCKET": str(served.path)}
    done = subprocess.run([PROGRAM, "status"], env=env, stdout=write, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_page_of_top_into_a_pipe_loads_nothing_for_a_terminal(served: Served) -> None:
    """It starts as fast as a status then, which is what `watch` and scripts call."""
    code = """
import sys
from mpsagent.cli.verbs import cli
cli(["--socket", sys.argv[1], "top"], standalone_mode=False)
print(*sys.modules, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, served.path], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith(f"mpsagent {__version__}, ")
    of_a_terminal = {"curses", "mpsagent.cli.top_screen", "mpsagent.cli.answer_text"}
    assert not of_a_terminal & set(done.stderr.split())


def test_exit_statuses_tell_wrong_usage_from_what_is_not_there(served: Served) -> None:
    """Unknown words, unknown users and processes, bad values: the text names the cause."""
    assert run(served, "stauts").returncode == 2
    assert run(served, "terminate", "0").returncode == 2
    done = run(served, "policy", "explain", "not-there")
    assert (done.returncode, "there is no user 'not-there'" in done.stderr) == (6, True)
    for words in ("turn extend not-there 1h", "lease add --uid not-there --max-clients 1 --until 1h"):
        done = run(served, *words.split())
        assert (done.returncode, "there is no user 'not-there'" in done.stderr) == (6, True), words
        done = run(served, *words.split(), "--json")
        assert (done.returncode, "there is no user" in json.loads(done.stdout)["error"]["detail"]) == (6, True), words
    done = run(served, "terminate", "777")
    assert (done.returncode, "process 777 is not a client" in done.stderr) == (6, True)
    done = run(served, "drain", "--timeout", "soon")
    assert (done.returncode, '"soon" is not a duration' in done.stderr) == (2, True)


@pytest.mark.parametrize(
    "words",
    [["status"], ["clients"], ["servers"], ["queue"], ["events"], ["events", "-f"], ["policy", "show"], ["env"],
     ["policy", "explain", "x"], ["terminate", "1"], ["drain"], ["resume"], ["restart-mps"], ["reload"],
     ["restart-mps", "--yes"]],
)  # fmt: skip
def test_exit_3_when_the_agent_cannot_be_reached(words: list[str], tmp_path: Path) -> None:
    """No socket, a dead socket: one line that says so, no traceback."""
    done = run(None, "--socket", str(tmp_path / "none.sock"), *words)
    assert (done.returncode, done.stdout) == (3, "")
    assert "cannot reach mpsagent" in done.stderr
    assert "Traceback" not in done.stderr


def test_exit_3_when_something_else_answers(tmp_path: Path) -> None:
    """A socket that talks nonsense, and one that hangs up."""
    for text in (b"hello\n", b"", b"HTTP/1.1 200 OK\r\n\r\nnot json"):
        path = tmp_path / f"s{len(text)}"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen()

            def reply(server: socket.socket = server, text: bytes = text) -> None:
                sock, _ = server.accept()
                with sock:
                    sock.recv(65536)
                    sock.sendall(text)

            thread = threading.Thread(target=reply)
            thread.start()
            done = run(None, "--socket", str(path), "status")
            thread.join()
        assert done.returncode == 3, done
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "key"),
    [(["status"], "holder"), (["clients"], "clients"), (["servers"], "servers"), (["queue"], "queue"),
     (["policy", "show"], "digest"), (["policy", "explain", "alice"], "active_threads"), (["resume"], "ok"),
     (["restart-mps", "--yes"], "ok"), (["drain"], "ok"), (["terminate", "501"], "pid"),
     (["env"], "CUDA_MPS_PIPE_DIRECTORY"),
     (["events"], "cursor")],
)  # fmt: skip
def test_every_verb_has_json(served: Served, words: list[str], key: str) -> None:
    """For scripts: one JSON value on stdout, whatever the verb."""
    served.backend.happen("one")
    done = run(served, *words, "--json")
    assert done.returncode == 0, done
    assert key in json.loads(done.stdout)


def verbs(group: Any = cli, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All, also those to come."""
    for name, command in group.commands.items():
        yield (*before, name), command
        yield from verbs(command, (*before, name)) if hasattr(command, "commands") else ()


def test_no_verb_is_without_json() -> None:
    """But those whose output is a program for a shell, or a program's own."""
    without = [
        words for words, command in verbs()
        if not hasattr(command, "commands") and "--json" not in [name for one in command.params for name in one.opts]
    ]  # fmt: skip
    assert without == [("run",), ("completion",)]
    assert "Each verb except run and completion has --json" in " ".join((cli.help or "").split())


def test_what_people_see_live_or_drawn_is_for_programs_too(served: Served) -> None:
    for verb, keys in (
        ("top", {"status", "clients"}),
        ("timeline", {"start", "end", "gpus", "users", "node", "grain"}),
    ):
        done = CliRunner().invoke(cli, ["--socket", str(served.path), verb, "--json"])
        assert (done.exit_code, done.stderr) == (0, ""), done.exception
        assert json.loads(done.stdout).keys() == keys


@pytest.mark.parametrize(
    ("words", "now"),
    [
        ("restart", "It is called 'restart-mps' now."),
        ("client terminate 5", "It is called 'terminate' now."),
        ("lease end 5", "It is called 'lease delete' now."),
        ("terminate 5 --deadline 2s", "It is called '--timeout' now."),
        ("drain --deadline 2s", "It is called '--timeout' now."),
        ("run --wait-at-most 2s true", "It is called '--timeout' now."),
        ("run --sms true", ""),
        ("lease add --sms 5 --until 1h", "It is called '--active-threads' now."),
        ("lease add --threads 5", "It is called '--active-threads' now, with a percent sign: '25%'."),
        ("lease add --total-threads 5", "It is called '--total-active-threads' now, with a percent sign: '25%'."),
        ("lease add --memory 5G", "It is called '--memory-limit' now."),
        ("lease add --total-memory 5G", "It is called '--total-memory-limit' now."),
        ("status --threads 5", ""),
    ],
)
def test_an_old_verb_or_option_has_its_new_name(words: str, now: str) -> None:
    """Some had a wrong guess in its place, and `run` took an unknown option for the program."""
    done = run(None, *words.split())
    assert (done.returncode, "No such" in done.stderr) == (2, True), done
    assert "It is called" not in done.stderr if not now else now in done.stderr
    assert not now or "Did you mean" not in done.stderr
    done = run(None, *words.split(), "--json")
    assert now in json.loads(done.stdout)["error"]["detail"]


def test_hostile_names_do_not_reach_the_terminal(served: Served) -> None:
    """A process may call itself anything: escape sequences, carriage returns, text that runs backwards."""
    client = served.backend.state.clients[501]
    hostile = client.peer._replace(command="python \x1b]0;owned\x07\x1b[2J\r\n\u202egnp.exe \x9b31m")
    served.backend.state = replace(served.backend.state, clients={501: replace(client, peer=hostile)})
    served.backend.happen("client", text="\x1b[31mred\x1b[0m", command="a\nb")
    for words in (["clients"], ["events"]):
        out = run(served, *words).stdout
        assert "python" in out or "red" in out
        assert not [c for c in out if not c.isprintable() and c != "\n"], ascii(out)
    assert len(run(served, "clients").stdout.splitlines()) == 5, "a line break in a name makes no line"


def test_colours_only_on_a_terminal(served: Served) -> None:
    """And not there either when NO_COLOR is set."""
    assert "\x1b" not in run(served, "status").stdout
    for no_color, coloured in (("", True), ("1", False)):
        command = [PROGRAM, "--socket", str(served.path), "status"]
        status, out = on_terminal(command, NO_COLOR=no_color)
        assert status == 0
        assert (b"\x1b[32m" in out) is coloured


def test_policy_check_reports_every_mistake_with_exit_2(tmp_path: Path) -> None:
    """No agent needed; a good file is 0, an unreadable one 2."""
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text('[limits]\nactive_threads = "50%"\nmemory_limit = "4G"\n')
    bad.write_text("[limits]\nactive_threads = '500%'\n[user.alice]\nthread = 20\n")
    assert run(None, "policy", "check", str(good)).returncode == 0
    done = run(None, "policy", "check", str(bad))
    assert done.returncode == 2
    assert f"{bad}:2: limits.active_threads:" in done.stdout
    assert f"{bad}:4: user.alice.thread: unknown key" in done.stdout
    assert done.stdout.splitlines()[-1] == "2 mistakes"
    body = json.loads(run(None, "policy", "check", str(bad), "--json").stdout)
    assert [(one["line"], one["key"]) for one in body["errors"]] == [
        (2, "limits.active_threads"),
        (4, "user.alice.thread"),
    ]
    assert run(None, "policy", "check", str(tmp_path / "none.toml")).returncode == 2


def test_a_status_imports_nothing_heavy() -> None:
    """Start-up time is what keeps people from writing their own: this list must not grow by accident."""
    code = (
        "import sys\nfrom mpsagent.cli import answer_text, ask, client, event_lines, main\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules} & "
        "{'asyncio', 'aiohttp', 'pydantic', 'structlog', 'http', 'email', 'ssl', 'tomli', 'subprocess'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_for_each_shell(shell: str) -> None:
    """The packages ship what this prints."""
    done = run(None, "completion", shell)
    assert done.returncode == 0
    assert "_MPSAGENT_CLI_COMPLETE" in done.stdout


def test_safe_text_is_cut_and_escaped() -> None:
    """The one function between hostile text and a terminal."""
    assert wording.safe("a\x1b[0mb\n\u202e") == "a\\x1b[0mb\\n\\u202e"
    assert wording.safe("x" * 300) == "x" * 200 + "…"
    assert wording.safe("grün 火") == "grün 火"


@pytest.mark.parametrize("group", [[], ["policy"], ["lease"], ["turn"]])
def test_help_is_not_cut_off(group: list[str]) -> None:
    """In 80 columns each verb says in its line what it is for."""
    lines = run(None, *group, "--help", COLUMNS="80").stdout.splitlines()
    assert lines
    assert [line for line in lines if line.endswith("...") and "[ARGS]" not in line] == []


def test_no_help_is_wider_than_80_columns() -> None:
    """Of any verb."""
    found = list(verbs())
    assert len(found) > 30
    for words, _ in found:
        text = CliRunner().invoke(cli, [*words, "--help"], prog_name="mpsagent-cli", terminal_width=80).stdout
        lines = [line for line in text.splitlines() if not line.startswith("Usage:")]
        assert [line for line in lines if len(line) > 80 or line.endswith("...")] == [], words
