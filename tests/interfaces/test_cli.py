"""``mpsagent-cli`` as people run it: the real program, its output and its exit status."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mpsagent.interfaces import cli_text, views
from mpsagent.mps.limits import Limits
from tests.interfaces.stand_in import START, USER, Served, StandIn, serve

PROGRAM = str(Path(sys.executable).with_name("mpsagent-cli"))


@pytest.fixture
def served() -> Iterator[Served]:
    with serve() as one:
        yield one


def run(served: Served | None, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", **environ}
    if served is not None:
        env["MPSAGENT_SOCKET"] = str(served.path)
    return subprocess.run([PROGRAM, *words], env=env, capture_output=True, text=True, timeout=60)


def test_exit_0_when_all_is_well(served: Served) -> None:
    """And the first line says so."""
    done = run(served, "status")
    assert (done.returncode, done.stderr) == (0, "")
    first, *rest = done.stdout.splitlines()
    assert first == "● mpsagent 0.0-test: healthy, up 40.0s"
    assert any("alice, server 500 ACTIVE, 1 client, 20 %, 1G (verified)" in line for line in rest)
    assert any("bob for 30.0s (2 clients), turn in 29m20s at most" in line for line in rest)


def test_exit_1_when_something_needs_a_person(served: Served) -> None:
    """The problem comes second, directly under the name, with what to do."""
    served.backend.troubles = (views.Trouble("the control daemon is silent", START, "mpsagent-cli restart"),)
    done = run(served, "status")
    assert done.returncode == 1
    assert done.stdout.splitlines()[1].startswith("  ! the control daemon is silent (since 2026-11-21")
    assert done.stdout.splitlines()[2] == "      mpsagent-cli restart"


def test_exit_1_when_limits_have_drifted(served: Served) -> None:
    """A server that did not start with its user's limits is not fine, even when all else is."""
    served.backend.wanted = {USER: Limits(10.0)}
    done = run(served, "status")
    assert done.returncode == 1
    assert "server 500 does not have its policy's limits" in done.stdout


def test_exit_2_for_wrong_usage_and_refusals(served: Served) -> None:
    """Unknown words, unknown users and processes, bad values: the text names the cause."""
    assert run(served, "stauts").returncode == 2
    assert run(served, "client", "terminate", "0").returncode == 2
    done = run(served, "policy", "explain", "not-there")
    assert (done.returncode, "there is no such user" in done.stderr) == (2, True)
    done = run(served, "client", "terminate", "777")
    assert (done.returncode, "process 777 is not a client" in done.stderr) == (2, True)
    done = run(served, "drain", "--timeout", "soon")
    assert (done.returncode, '"soon" is not a duration' in done.stderr) == (2, True)


@pytest.mark.parametrize(
    "words",
    [["status"], ["clients"], ["servers"], ["queue"], ["events"], ["events", "-f"], ["policy", "show"], ["env"],
     ["policy", "explain", "x"], ["client", "terminate", "1"], ["drain"], ["resume"], ["restart"], ["reload"]],
)  # fmt: skip
def test_exit_3_when_the_agent_cannot_be_reached(words: list[str], tmp_path: Path) -> None:
    """No socket, a dead socket: one line that says so, no traceback."""
    done = run(None, "--socket", str(tmp_path / "none.sock"), *words)
    assert (done.returncode, done.stdout) == (3, "")
    assert "cannot reach mpsagent" in done.stderr
    assert "Traceback" not in done.stderr


def test_exit_3_when_something_else_answers(tmp_path: Path) -> None:
    """A socket that talks nonsense, and one that hangs up."""
    import socket
    import threading

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
     (["policy", "show"], "digest"), (["policy", "explain", "alice"], "threads"), (["resume"], "ok"),
     (["restart"], "ok"), (["drain"], "ok"), (["client", "terminate", "501"], "pid"),
     (["env"], "CUDA_MPS_PIPE_DIRECTORY"),
     (["events"], "cursor")],
)  # fmt: skip
def test_every_verb_has_json(served: Served, words: list[str], key: str) -> None:
    """For scripts: one JSON value on stdout, whatever the verb."""
    served.backend.happen("one")
    done = run(served, *words, "--json")
    assert done.returncode == 0, done
    assert key in json.loads(done.stdout)


def test_terminate_passes_its_options_on(served: Served) -> None:
    """--now and --dry-run change what is done to somebody's process; they must arrive."""
    assert run(served, "client", "terminate", "501", "--now", "--dry-run").returncode == 0
    assert served.backend.asked == [("terminate", 501, True, True, os.getuid())]


def test_a_reload_that_fails_is_not_fine(served: Served) -> None:
    """The old policy stays and the exit status says that the new one did not take."""
    done = run(served, "reload")
    assert (done.returncode, "policy.toml:1: no" in done.stdout) == (1, True)


def test_hostile_names_do_not_reach_the_terminal(served: Served) -> None:
    """A process may call itself anything: escape sequences, carriage returns, text that runs backwards."""
    served.backend.commands = {501: "python \x1b]0;owned\x07\x1b[2J\r\n\u202egnp.exe \x9b31m"}
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
        master, slave = pty.openpty()
        env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TERM": "xterm", "NO_COLOR": no_color}
        child = subprocess.Popen([PROGRAM, "--socket", str(served.path), "status"], env=env, stdout=slave, stderr=slave)
        os.close(slave)
        out = b""
        try:
            while data := os.read(master, 65536):
                out += data
        except OSError:  # EIO: the child has closed its end
            pass
        assert child.wait(20) == 0
        os.close(master)
        assert (b"\x1b[32m" in out) is coloured


def test_events_follow_survives_a_restart_of_the_agent(tmp_path: Path) -> None:
    """The reader takes up where it was: nothing twice, nothing left out."""
    backend, path = StandIn(), tmp_path / "mpsagent.sock"
    backend.happen("first")
    with serve(backend, path=path):
        child = subprocess.Popen(
            [PROGRAM, "--socket", str(path), "events", "-f", "--json"], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        try:
            assert json.loads(child.stdout.readline())["kind"] == "first"
        except BaseException:
            child.kill()
            raise
    backend.happen("while away")
    try:
        with serve(backend, path=path):
            assert json.loads(child.stdout.readline())["kind"] == "while away"
            backend.happen("after")
            assert json.loads(child.stdout.readline())["kind"] == "after"
    finally:
        child.terminate()
        child.communicate(timeout=20)


def test_events_follow_ends_quietly(served: Served) -> None:
    """Ctrl-C is how it is meant to end; so is a closed pipe (`| head`)."""
    import signal

    child = subprocess.Popen(
        [PROGRAM, "--socket", str(served.path), "events", "-f"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    served.backend.happen("one")
    assert child.stdout is not None
    assert "one" in child.stdout.readline()
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=20)
    assert (child.returncode, errors) == (0, "")


def test_events_say_what_was_lost(served: Served) -> None:
    """A cursor that is too old: the complaint, exit 2; with -f it goes on from what is kept."""
    served.backend.kept = 5
    for _ in range(20):
        served.backend.happen("x")
    done = run(served, "events", "--since", "2")
    assert (done.returncode, "go on with cursor=15" in done.stderr) == (2, True)
    child = subprocess.Popen(
        [PROGRAM, "--socket", str(served.path), "events", "-f", "--since", "2", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    assert json.loads(child.stdout.readline())["cursor"] == 16
    child.terminate()
    _, errors = child.communicate(timeout=20)
    assert "what was between is lost" in errors


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("shell", "export CUDA_MPS_PIPE_DIRECTORY='/tmp/my mps'\n"),
        ("slurm", "export CUDA_MPS_PIPE_DIRECTORY=/tmp/my mps\n"),
        ("docker", "--ipc=host --env 'CUDA_MPS_PIPE_DIRECTORY=/tmp/my mps' --volume '/tmp/my mps:/tmp/my mps'\n"),
        ("json", '{"CUDA_MPS_PIPE_DIRECTORY": "/tmp/my mps"}\n'),
    ],
)
def test_env_for_each_reader(served: Served, form: str, text: str) -> None:
    """A shell needs quotes, slurmd must not get any."""
    about = served.backend.about
    served.backend.about = lambda: replace(about(), pipe_directory="/tmp/my mps")  # type: ignore[method-assign]
    assert run(served, "env", "--format", form).stdout == text


def test_policy_check_reports_every_mistake_with_exit_2(tmp_path: Path) -> None:
    """No agent needed; a good file is 0, an unreadable one 2."""
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text('[limits]\nthreads = 50\nmemory = "4G"\n')
    bad.write_text("[limits]\nthreads = 500\n[user.alice]\nthread = 20\n")
    assert run(None, "policy", "check", str(good)).returncode == 0
    done = run(None, "policy", "check", str(bad))
    assert done.returncode == 2
    assert f"{bad}:2: limits.threads:" in done.stdout
    assert f"{bad}:4: user.alice.thread: unknown key" in done.stdout
    assert done.stdout.splitlines()[-1] == "2 mistakes"
    body = json.loads(run(None, "policy", "check", str(bad), "--json").stdout)
    assert [(one["line"], one["key"]) for one in body["errors"]] == [(2, "limits.threads"), (4, "user.alice.thread")]
    assert run(None, "policy", "check", str(tmp_path / "none.toml")).returncode == 2


def test_a_status_imports_nothing_heavy() -> None:
    """Start-up time is what keeps people from writing their own: this list must not grow by accident."""
    code = (
        "import sys\nfrom mpsagent.interfaces import cli, cli_text, client\n"
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
    assert cli_text.safe("a\x1b[0mb\n\u202e") == "a\\x1b[0mb\\n\\u202e"
    assert cli_text.safe("x" * 300) == "x" * 200 + "…"
    assert cli_text.safe("grün 火") == "grün 火"


def test_the_servers_clients_and_queue_tables_are_aligned(served: Served) -> None:
    """Columns start where their heads start."""
    for verb, column in (("servers", "STATUS"), ("clients", "STATE"), ("queue", "WAITING")):
        head, *rows = run(served, verb).stdout.splitlines()
        place = head.index(column)
        assert rows
        assert all(row[place - 1] == " " and row[place] != " " for row in rows), verb
