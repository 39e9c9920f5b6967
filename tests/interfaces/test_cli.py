"""``mpsagent-cli`` as people run it: the real program, its output and its exit status."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mpsagent.interfaces import cli_text, views
from mpsagent.policy.identity import Identity
from tests.interfaces.stand_in import ADMIN, OTHER, START, USER, Served, StandIn, serve, until

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
    """And the first line says so; below it who has the GPU until when, and who waits why."""
    done = run(served, "status")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "● mpsagent 0.0-test: healthy, up 40.0s"
    page = cli_text.status(served.backend.status(), cli_text.plain, datetime(2026, 11, 21, 12, tzinfo=UTC))
    assert page == [
        "● mpsagent 0.0-test: healthy, up 40.0s",
        "  GPU      NVIDIA H200 (140 GiB, 132 multiprocessors)",
        "  MPS      of CUDA 13.0, control daemon 400 since 2026-11-20 23:59:00, a server",
        "           for each turn",
        "  in use   by alice since 00:00:00, 1 process, 20 %, 1G each; until 00:31:10 at",
        "           the latest, then its clients are ended",
        "  waiting  bob since 00:00:10 (30.0s), 2 processes: it is the turn of alice;",
        "           served by 00:31:10 at the latest",
        "           carol since 00:00:20 (20.0s), 1 process: it is the turn of alice;",
        "           served by 01:02:10 at the latest",
        "  change   00:00:00 from carol to alice, 0.10s apart",
        "  policy   " + served.backend.state.policy.digest[:12] + ", loaded 00:00:00",
    ]


def test_times_are_those_of_this_machine(served: Served) -> None:
    """An administrator compares with a clock on the wall."""
    assert "05:45:00, 1 process" in run(served, "status", TZ="Asia/Kathmandu").stdout
    assert "00:00:00, 1 process" in run(served, "status", TZ="UTC").stdout


def test_status_fits_into_80_columns_whatever_is_in_it(served: Served) -> None:
    """Long names, many problems, many users."""
    backend = served.backend
    backend.conditions = (views.Condition("the control daemon is silent and " * 8, START, "do " * 60),)
    backend.state = replace(
        backend.state,
        identities={uid: Identity(uid, "a-user-with-a-very-long-name-" + "x" * 30) for uid in (USER, OTHER, ADMIN)},
        unconfirmed={USER: "MPS printed 19G for 20389M " * 5},
    )
    done = run(served, "status", TZ="UTC")
    assert done.returncode == 1
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_exit_1_when_something_needs_a_person(served: Served) -> None:
    """The problem comes second, directly under the name, with what to do."""
    served.backend.conditions = (views.Condition("the control daemon is silent", START, "mpsagent-cli restart"),)
    done = run(served, "status", TZ="UTC")
    assert done.returncode == 1
    assert done.stdout.splitlines()[1].startswith("  ! the control daemon is silent (since ")
    assert done.stdout.splitlines()[2] == "      mpsagent-cli restart"


def test_exit_1_when_limits_have_drifted(served: Served) -> None:
    """A server that did not start with its first client's limits is not fine, even when all else is."""
    served.backend.checked = {500: False}
    done = run(served, "status")
    assert done.returncode == 1
    assert "server 500 started with other limits than its first client's" in done.stdout


def test_what_is_not_guaranteed_stands_in_the_status(served: Served) -> None:
    """Not a fault that needs a person, so the exit status is 0."""
    gate = served.backend.state.gate
    assert gate is not None
    served.backend.state = replace(served.backend.state, gate=replace(gate, known_handshake=False))
    done = run(served, "status")
    assert done.returncode == 0
    assert "not sure the control daemon's greeting is not known" in done.stdout


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
     ["policy", "explain", "x"], ["client", "terminate", "1"], ["drain"], ["resume"], ["restart"], ["reload"],
     ["restart", "--yes"]],
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
     (["restart", "--yes"], "ok"), (["drain"], "ok"), (["client", "terminate", "501"], "pid"),
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
    """--now and --dry-run change what is done to a user's process; they must arrive."""
    assert run(served, "client", "terminate", "501", "--now", "--dry-run").returncode == 0
    assert served.backend.asked == [("terminate", 501, True, True, os.getuid())]


def test_terminate_says_what_became_of_it(served: Served) -> None:
    """Each step as it comes, one line for an action and its outcome, until the client has ended."""
    done = []
    served.backend.happen("client.ended", pid=501, uid=USER, outcome="ok", seconds=1.0, waited=0.0)  # another, earlier
    waits = threading.Thread(target=lambda: done.append(run(served, "client", "terminate", "501")))
    waits.start()
    until(lambda: bool(served.backend.asked))
    action = {"action": "TerminateClient", "pid": 501, "uid": USER, "server": 500, "reason": f"ordered by uid {ADMIN}"}
    begun = served.backend.happen("action", **action)
    served.backend.happen("client.ended", pid=999, uid=USER, outcome="ok", seconds=1.0, waited=0.0)
    served.backend.happen("action.done", **action, begun=begun, ok=True, text="")
    served.backend.happen("client.ended", pid=501, uid=USER, outcome="ended", seconds=39.5, waited=1.0)
    waits.join(30)
    assert done[0].returncode == 0, done
    assert [line[21:] for line in done[0].stdout.splitlines()] == [
        "asked MPS to end client 501 of alice: ordered by carol",
        "client 501 of alice ended after 39.5s, ended by mpsagent",
    ]


def test_a_restart_says_whose_work_it_costs(served: Served) -> None:
    """In a script it needs --yes; while no client is at work it needs nothing."""
    done = run(served, "restart", "--dry-run")
    assert (done.returncode, done.stdout) == (0, "1 client of alice would lose work\n")
    done = run(served, "restart")
    assert (done.returncode, "1 client of alice would lose work" in done.stderr) == (2, True)
    assert served.backend.asked == []
    assert run(served, "restart", "--yes").returncode == 0
    served.backend.state = replace(served.backend.state, clients={})
    assert run(served, "restart").returncode == 0
    assert [one[0] for one in served.backend.asked] == ["restart", "restart"]


def test_a_reload_that_fails_is_not_fine(served: Served) -> None:
    """The old policy stays and the exit status says that the new one did not take."""
    done = run(served, "reload")
    assert (done.returncode, "policy.toml:1: no" in done.stdout) == (1, True)


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
    state = served.backend.state
    served.backend.state = replace(state, policy=replace(state.policy, pipe_directory="/tmp/my mps"))
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
        "import sys\nfrom mpsagent.interfaces import cli, cli_ask, cli_events, cli_text, client\n"
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
    for verb, column in (("servers", "STATUS"), ("clients", "STATE"), ("queue", "WHY")):
        head, *rows = run(served, verb).stdout.splitlines()
        place = head.index(column)
        assert rows
        assert all(row[place - 1] == " " and row[place] != " " for row in rows), verb


def test_clients_and_queue_say_what_and_why(served: Served) -> None:
    """The command of each process, as the gate saw it; why each user is held, and until when at the latest."""
    out = run(served, "clients").stdout
    assert "python train.py" in out
    assert "python job-602.py" in out
    assert len(out.splitlines()) == 5
    rows = run(served, "queue", TZ="UTC").stdout.splitlines()
    assert rows[1].split(maxsplit=6)[:4] == ["1", "bob", "2", "30.0s"]
    assert rows[1].endswith("it is the turn of alice")


def test_events_are_sentences_of_at_most_100_columns(served: Served) -> None:
    """One line for an action and its outcome; names where they are known; an action without outcome is not hidden."""
    happen = served.backend.happen
    happen("turn.began", uid=OTHER, gap=0.104)
    action = {"action": "SignalClient", "pid": 501, "uid": USER, "start": 1, "signal": 15, "rule": "switch.after",
              "reason": f"the turn of user {USER} is over; SIGTERM to client 501 of user {USER}"}  # fmt: skip
    begun = happen("action", **action)
    happen("action.done", **action, begun=begun, ok=False, text="no such process")
    happen("action", action="KillServer", server=500, reason="it hangs " * 20)
    lines = run(served, "events", TZ="UTC").stdout.splitlines()
    assert lines[:2] == [
        "2026-11-21 00:00:01  the GPU goes to bob, 0.10s after the user before",
        "2026-11-21 00:00:03  sent SIGTERM to client 501 of alice: the turn of alice is over; this FAILED: no",
    ]
    assert lines[3].startswith("2026-11-21 00:00:04  killed server 500: it hangs it hangs")
    assert lines[-1].endswith("(begun)")
    assert max(map(len, lines)) <= 100
    every = [json.loads(line)["kind"] for line in run(served, "events", "--json").stdout.splitlines()]
    assert every == ["turn.began", "action", "action.done", "action"], "programs get all of them"
