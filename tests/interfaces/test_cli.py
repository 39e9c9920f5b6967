"""``mpsagent-cli`` as people run it: the real program, its output and its exit status."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mpsagent.core.model import Drain
from mpsagent.core.view import Turn
from mpsagent.interfaces import cli_orders, cli_policy, cli_text, cli_words, views
from mpsagent.interfaces.backend import Problem
from mpsagent.interfaces.cli import cli
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from tests.interfaces.stand_in import ADMIN, OTHER, START, USER, Served, StandIn, held, serve, until
from tests.interfaces.test_cli_policy import read_on_terminal

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


def test_a_verb_is_imported_when_it_is_asked_for(served: Served) -> None:
    """A status is typed again and again and waits for none of the others; they are all there when they are wanted."""
    code = """
import sys
from mpsagent.interfaces.cli import cli
cli(["--socket", sys.argv[1], "status"], standalone_mode=False)
print(*(name for name in sys.modules if name.startswith("mpsagent.interfaces.")), file=sys.stderr)
print(*(one.name for group in (cli, cli.commands["policy"]) for one in group.commands.values()), file=sys.stderr)
print(*(name for group in (cli, cli.commands["policy"]) for name in group.commands), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, served.path], capture_output=True, text=True, check=True, timeout=60
    )
    modules, theirs, listed = (line.split() for line in done.stderr.splitlines())
    others = {"cli_advise", "cli_bench", "cli_lease", "cli_metrics", "cli_report", "cli_timeline", "cli_top"}
    assert not others & {name.rpartition(".")[2] for name in modules}
    assert theirs == listed
    assert {"advise", "bench", "history", "lease", "metrics", "report", "timeline"} <= set(listed)


def test_a_page_of_top_into_a_pipe_loads_nothing_for_a_terminal(served: Served) -> None:
    """It starts as fast as a status then, which is what `watch` and scripts call."""
    code = """
import sys
from mpsagent.interfaces.cli import cli
cli(["--socket", sys.argv[1], "top"], standalone_mode=False)
print(*sys.modules, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, served.path], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith("mpsagent 0.0-test, ")
    of_a_terminal = {"curses", "mpsagent.interfaces.top_screen", "mpsagent.interfaces.cli_text"}
    assert not of_a_terminal & set(done.stderr.split())


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


def test_who_is_to_be_ended_for_computing_outside_mps_is_named(served: Served) -> None:
    """It stood in the API only."""
    one = {"pid": 77, "uid": 1002, "user": "bob", "ends": "2026-11-21T00:05:00+00:00"}
    body = {**served.backend.status(), "outside": [one, {**one, "pid": 78, "ends": None}]}
    page = cli_text.status(body, cli_text.plain, datetime(2026, 11, 21, 12, tzinfo=UTC))
    assert "  outside  process 77 of bob, outside MPS, is due to be ended at 00:05:00" in page
    assert not [line for line in page if "process 78" in line]


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


def test_status_fits_on_one_screen_whatever_is_in_it(served: Served) -> None:
    """Many problems, many users, many doubts: what is too much is counted, and where the rest is to be seen is said."""
    backend = served.backend
    backend.conditions = tuple(
        views.Condition(
            f"problem {number} of the control daemon, said in many words: " + "it hangs " * 20, START, "do " * 60
        )
        for number in range(6)
    )
    line = backend.state.held
    for number in range(10, 40):
        line = line.put(held(number, 700 + number, 30000 + number, START + number))
    policy, _ = load(
        [("p", "enforce = true\n[limits]\nenforce = false\n[switch]\nenforce = false\n[hang]\nenforce = false")]
    )
    assert policy is not None
    backend.state = replace(
        backend.state, held=line, policy=policy, unconfirmed={USER: "printed 19G", OTHER: "no answer"}
    )
    lines = run(served, "status", TZ="UTC").stdout.splitlines()
    assert len(lines) <= cli_text.SCREEN
    assert max(map(len, lines)) <= 80
    assert any("problems more (mpsagent-cli doctor)" in one for one in lines)
    assert any("users more (mpsagent-cli queue)" in one for one in lines)
    assert any("more (mpsagent-cli doctor)" in one for one in lines[-8:])
    assert lines[0].startswith("● mpsagent 0.0-test: 6 problems")


def test_a_drain_says_what_ends_when(served: Served) -> None:
    """Seen: "until 17:53:53: nothing new is let in" of a drain that lasts until a resume, two seconds after that time,
    and "for as long as it wants" of a user whose clients it was about to end."""

    def page(deadline: float | None, *, restart: bool, at: int) -> str:
        backend = served.backend
        backend.turn = Turn(USER, START)
        backend.state = replace(backend.state, drain=Drain(START, deadline, restart))
        lines = cli_text.status(backend.status(), cli_text.plain, datetime(2026, 11, 21, 0, 0, at, tzinfo=UTC))
        return " ".join(" ".join(lines).split())

    for restart, end in ((False, "mpsagent-cli resume"), (True, "MPS has been started again")):
        text = page(START + 30, restart=restart, at=10)
        assert f"since 00:00:00, until {end}: nothing new is let in; what still runs at 00:00:30 is ended" in text
        assert "each; until 00:00:30 at the latest, then its clients are ended" in text
    assert "until mpsagent-cli resume: nothing new is let in in use" in page(START + 30, restart=False, at=40)
    assert "for as long as it wants" not in page(START + 30, restart=False, at=10)
    assert "until 00:00:30" not in page(None, restart=False, at=10)


def test_users_at_once_are_shown_each(served: Served) -> None:
    """Where users do not take turns: who they are, since when, with how many processes and how much memory."""
    backend = served.backend
    one = backend.state.clients[501]
    more = {
        pid: replace(one, peer=one.peer._replace(pid=pid, uid=uid, start=pid), since=START + pid - 501)
        for pid, uid in ((501, USER), (502, OTHER), (503, OTHER))
    }
    backend.state, backend.turn = replace(backend.state, clients=more), None
    backend.memory = {501: 1 << 30, 502: 3 << 30, 503: 1 << 29}
    lines = run(served, "status", TZ="UTC").stdout.splitlines()
    found = next(number for number, line in enumerate(lines) if line.startswith("  in use"))
    assert [" ".join(line.split()).replace("2026-11-21 ", "") for line in lines[found : found + 2]] == [
        "in use by alice since 00:00:00, 1 process with 1.0 GiB",
        "by bob since 00:00:01, 2 processes with 3.5 GiB",
    ]


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
     ["restart", "--yes"], ["server", "shutdown", "500"]],
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
     (["policy", "show"], "digest"), (["policy", "explain", "alice"], "threads"), (["resume"], "ok"),
     (["restart", "--yes"], "ok"), (["drain"], "ok"), (["client", "terminate", "501"], "pid"),
     (["server", "shutdown", "--yes"], "clients"),
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
    """But the one whose output is a program for a shell."""
    without = [
        words for words, command in verbs()
        if not hasattr(command, "commands") and "--json" not in [name for one in command.params for name in one.opts]
    ]  # fmt: skip
    assert without == [("completion",)]


def test_what_people_see_live_or_drawn_is_for_programs_too(served: Served) -> None:
    for verb, keys in (
        ("top", {"status", "clients"}),
        ("timeline", {"start", "end", "gpus", "users", "node", "grain"}),
    ):
        done = CliRunner().invoke(cli, ["--socket", str(served.path), verb, "--json"])
        assert (done.exit_code, done.stderr) == (0, ""), done.exception
        assert json.loads(done.stdout).keys() == keys


def test_terminate_passes_its_options_on(served: Served) -> None:
    """--now and --dry-run change what is done to a user's process; they must arrive."""
    done = run(served, "client", "terminate", "501", "--now", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert served.backend.asked == [("terminate", 501, True, True, os.getuid())]
    assert done.stdout.splitlines() == [
        "Client 501 of alice at server 500 would be ended, until it has gone:",
        "  1. terminate_client 500 501, at most 5 s",
        "  2. SIGTERM",
        "  3. after 5 s SIGKILL",
    ]
    done = run(served, "client", "terminate", "501", "--no-wait")
    assert done.stdout.startswith("Client 501 of alice at server 500 is being ended, until it has gone:\n")


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
    done = run(served, "restart", "--yes", "--timeout", "10m")
    assert (done.returncode, done.stderr) == (0, "")
    said = ["control daemon 400 has ended", "started the control daemon: no control daemon is running"]
    assert [line[21:] for line in done.stdout.splitlines()] == said
    assert run(served, "restart", "--yes", "--timeout", "10").returncode == 2, "ten what?"
    served.backend.state = replace(served.backend.state, clients={})
    assert run(served, "restart").returncode == 0
    assert [one[:2] for one in served.backend.asked] == [("restart", 600.0), ("restart", None)]


def test_who_may_not_restart_is_not_asked_first(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asked whether alice's work may be lost, and refused when the answer was yes."""

    async def refuses(timeout: float | None, by: int, instance: str | None, *, dry_run: bool) -> None:
        raise Problem(403, "uid 1 may not restart MPS", "/v1/restart")

    monkeypatch.setattr(served.backend, "restart", refuses)
    for words in (["restart"], ["restart", "--dry-run"]):  # nor is it said what a restart would cost
        done = run(served, *words)
        assert (done.returncode, "may not restart" in done.stderr, "lose work" in done.stderr) == (2, True, False)
        assert done.stdout == "", "seen: of an instance that is not there, and in a drain, no client would lose work"


def test_a_resume_says_whether_there_was_a_drain(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for drained, said in ((True, "Who waits is let in.\n"), (False, "There was no drain: nothing has changed.\n")):

        async def resume(by: int, instance: str | None, drained: bool = drained) -> dict[str, bool]:
            return {"draining": False, "drained": drained}

        monkeypatch.setattr(served.backend, "resume", resume)
        assert run(served, "resume").stdout == said


def test_events_begin_at_a_cursor_or_at_a_time(served: Served) -> None:
    """As history and timeline take it; `events --since 1h` said only that this is no number."""
    for _ in range(5):
        served.backend.happen("x")
    assert len(run(served, "events", "--since", "3").stdout.splitlines()) == 2
    assert served.backend.asked == []
    before = time.time()
    assert len(run(served, "events", "--since", "1h").stdout.splitlines()) == 5
    ((word, _, query),) = served.backend.asked
    assert (word, query.limit) == ("find", 1000)
    assert before - 3601 < query.since < time.time() - 3599
    done = run(served, "events", "--since", "yesterday")
    assert (done.returncode, 'write "2d" for two days ago' in done.stderr) == (2, True)
    words = [PROGRAM, "--socket", str(served.path), "events", "-f", "--json", "--since", "2026-11-20"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as followed:
        assert followed.stdout is not None
        try:
            assert [json.loads(followed.stdout.readline())["cursor"] for _ in range(5)] == [1, 2, 3, 4, 5]
            served.backend.happen("y")
            assert json.loads(followed.stdout.readline())["kind"] == "y"
        finally:
            followed.terminate()


def test_a_restart_that_fails_is_not_fine(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said "restarting: yes" where MPS was not even installed."""

    async def fails(timeout: float | None, by: int, instance: str | None, *, dry_run: bool) -> dict[str, bool]:
        action = {"action": "StartControl", "reason": "no control daemon is running"}
        begun = served.backend.happen("action", **action)
        served.backend.happen("action.failed", **action, begun=begun, ok=False, text="it is not installed")
        return {"restarting": True}

    monkeypatch.setattr(served.backend, "restart", fails)
    done = run(served, "restart", "--yes")
    assert done.returncode == 1
    assert "this FAILED: it is not installed" in " ".join(done.stdout.split())


def test_a_shutdown_says_whose_work_it_costs_and_what_became_of_it(served: Served) -> None:
    """Without a pid it is the only server; in a script it needs --yes; while no client is at work it needs nothing."""
    done = run(served, "server", "shutdown", "--dry-run")
    assert done.stdout.splitlines() == [
        "Server 500 with 1 client of alice would be ended, until it has gone:",
        "  1. who comes waits at the gate until it has gone",
        "  2. after 5.00s who still works there is ended, one by one",
        "  3. shutdown_server 500",
        "  4. after 15.0s shutdown_server 500 -f",
        "  5. after 15.0s SIGKILL",
    ]
    done = run(served, "server", "shutdown")
    assert (done.returncode, "1 client of alice would lose work" in done.stderr) == (2, True)
    assert served.backend.asked == []
    done = run(served, "server", "shutdown", "500", "--yes", "--timeout", "10m")
    assert (done.returncode, done.stderr) == (0, "")
    said = ["told server 500 to shut down: it is to end, as root ordered", "server 500 of alice has ended"]
    assert [line[21:] for line in done.stdout.splitlines()] == said
    assert run(served, "server", "shutdown", "--yes", "--force").returncode == 0
    assert [one[1:4] for one in served.backend.asked] == [(500, 600.0, False), (500, None, True)]
    served.backend.state = replace(served.backend.state, clients={})
    assert run(served, "server", "shutdown").returncode == 0


def test_a_shutdown_names_the_server_that_is_not_there(served: Served) -> None:
    for words, said in (
        (["7"], "process 7 is not a server of MPS"),
        (["--instance", "left"], "no server runs at instance 'left'"),
        (["--timeout", "10"], "is not a duration"),
        (["--force", "--timeout", "1m"], "by force nobody is waited for"),
    ):
        done = run(served, "server", "shutdown", *words)
        assert (done.returncode, said in done.stderr) == (2, True), done
    state = served.backend.state
    servers = {**state.servers, 510: replace(state.servers[500], pid=510)}
    served.backend.state = replace(state, servers=servers)
    done = run(served, "server", "shutdown", "--yes")
    assert (done.returncode, "which one? 2 servers run: 500, 510" in done.stderr) == (2, True)
    assert served.backend.asked == []


def test_a_reload_that_fails_is_not_fine(served: Served) -> None:
    """The old policy stays and the exit status says that the new one did not take."""
    done = run(served, "reload")
    assert (done.returncode, "policy.toml:1: no" in done.stdout) == (1, True)


@pytest.mark.parametrize("good", [True, False])
def test_what_a_reload_says_fits_on_a_terminal(served: Served, monkeypatch: pytest.MonkeyPatch, good: bool) -> None:
    """Seen: a mistake with its hint in 228 columns, and a warning in 208. Into a pipe each is one line."""
    what = f"/etc/mpsagent/policy.toml:16: instance.right.pipe_directory: has another one; {'write the same one ' * 8}"

    async def reload(by: int) -> dict[str, object]:
        if not good:
            raise Problem(400, f"the policy has a mistake: {what}", "policy", "the old one is in force " * 4)
        return {"digest": "604a46bf269d", "files": ["p.toml"], "later": None, "warnings": [what]}

    monkeypatch.setattr(served.backend, "reload", reload)
    done = run(served, "reload")
    whole = (done.stdout or done.stderr).splitlines()
    lines = read_on_terminal("--socket", str(served.path), "reload")
    assert max(map(len, lines)) <= 80 < max(map(len, whole))
    assert " ".join(" ".join(lines).split()) == " ".join(" ".join(whole).split())
    assert len(whole) == 2


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
        ("docker", "--env 'CUDA_MPS_PIPE_DIRECTORY=/tmp/my mps' --volume '/tmp/my mps:/tmp/my mps'\n"),
        ("json", '{"CUDA_MPS_PIPE_DIRECTORY": "/tmp/my mps"}\n'),
    ],
)
def test_env_for_each_reader(served: Served, form: str, text: str) -> None:
    """A shell needs quotes, slurmd must not get any."""
    state = served.backend.state
    served.backend.state = replace(state, policy=replace(state.policy, pipe_directory="/tmp/my mps"))
    assert run(served, "env", "--format", form).stdout == text


def test_a_program_that_gives_way(served: Served) -> None:
    """Of its user's own will, so not in the device of all containers."""
    given = json.loads(run(served, "env", "--give-way", "--json").stdout)
    assert given == {**json.loads(run(served, "env", "--json").stdout), "CUDA_MPS_CLIENT_PRIORITY": "1"}
    assert "export CUDA_MPS_CLIENT_PRIORITY=1" in run(served, "env", "--give-way").stdout.splitlines()
    assert run(served, "env", "--give-way", "--format", "cdi").returncode == 2


def test_env_as_a_container_device(served: Served) -> None:
    """What podman, docker and containerd read from /etc/cdi; tests/agent/test_containers.py gives it to podman."""
    spec = json.loads(run(served, "env", "--format", "cdi").stdout)
    assert (spec["cdiVersion"], spec["kind"]) == ("0.3.0", "mpsagent/mps")
    (device,) = spec["devices"]
    (mount,) = device["containerEdits"]["mounts"]
    assert device["name"] == "all"
    assert device["containerEdits"]["env"] == ["CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps"]
    assert (mount["hostPath"], mount["containerPath"]) == ("/tmp/nvidia-mps", "/tmp/nvidia-mps")
    assert "ro" in mount["options"]


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
    assert cli_words.safe("a\x1b[0mb\n\u202e") == "a\\x1b[0mb\\n\\u202e"
    assert cli_words.safe("x" * 300) == "x" * 200 + "…"
    assert cli_words.safe("grün 火") == "grün 火"


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
    happen("action.failed", **action, begun=begun, ok=False, text="no such process")
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
    assert every == ["turn.began", "action", "action.failed", "action"], "programs get all of them"


def test_questions_to_the_daemon_do_not_hide_what_happened(served: Served) -> None:
    """Seen: a user had waited for some minutes, and `events` printed nothing: its 20 were all such questions."""
    served.backend.kept, happen = 5000, served.backend.happen
    for number in range(25):
        happen("turn.began", uid=OTHER, gap=number)
    for _ in range(600):
        begun = happen("action", action="Reconcile", reason="compare")
        happen("action.done", action="Reconcile", reason="compare", begun=begun, ok=True, text="")
    lines = run(served, "events").stdout.splitlines()
    assert (len(lines), "5.00s after" in lines[0], "24.0s after" in lines[-1]) == (20, True, True)
    lines = run(served, "events", "-n", "3").stdout.splitlines()
    assert (len(lines), "24.0s after" in lines[-1]) == (3, True)
    assert len(run(served, "events", "-n", "100").stdout.splitlines()) == 25
    words = [PROGRAM, "--socket", str(served.path), "events", "-f", "-n", "1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as followed:
        assert followed.stdout is not None
        try:
            assert "24.0s after" in followed.stdout.readline()
            happen("turn.began", uid=OTHER, gap=99)
            assert "1m39s after" in followed.stdout.readline()
        finally:
            followed.terminate()


@pytest.mark.parametrize("group", [[], ["policy"], ["client"]])
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


# --- for programs that look after the node


@pytest.mark.parametrize(
    ("conditions", "status", "first"),
    [((), 0, "healthy"), ((views.Condition("the control daemon is silent", START, "wait"),), 1, "the control daemon")],
)
def test_a_probe_says_whether_all_is_well(
    served: Served, conditions: tuple[views.Condition, ...], status: int, first: str
) -> None:
    """Its exit status is what HealthCheckProgram, a prolog or a readiness probe looks at."""
    served.backend.conditions = conditions
    done = run(served, "probe")
    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout.startswith(first)
    body = json.loads(run(served, "probe", "--json").stdout)
    assert body == {"ok": status == 0, "problems": [one.what for one in conditions]}


@pytest.mark.parametrize("how", ["silent", "drips", "full"])
def test_a_probe_ends_though_the_agent_hangs(how: str, tmp_path: Path) -> None:
    """One that accepts and says nothing, one that says a byte now and then for ever, one whose backlog is full: a probe
    that hangs with what it probes says nothing. (Without a deadline for all of it this test runs into its own.)"""
    path, over, waiting = tmp_path / "hangs", threading.Event(), []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(0)

        def drip() -> None:
            sock, _ = server.accept()
            with sock, suppress(OSError):
                while not over.wait(0.05):
                    sock.sendall(b"H")

        thread = threading.Thread(target=drip)
        if how == "drips":
            thread.start()
        if how == "full":
            waiting = [socket.socket(socket.AF_UNIX) for _ in range(2)]
            for one in waiting:
                one.setblocking(False)
                with suppress(BlockingIOError):
                    one.connect(str(path))
        done = run(None, "--socket", str(path), "probe")
        over.set()
        if how == "drips":
            thread.join()
        for one in waiting:
            one.close()
    assert done.returncode == 3, done
    assert len(done.stdout.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_a_probe_without_an_agent(tmp_path: Path) -> None:
    """Not healthy; programs get JSON here too."""
    done = run(None, "--socket", str(tmp_path / "none"), "probe", "--json")
    assert (done.returncode, json.loads(done.stdout)["ok"]) == (3, False)


# --- again and again


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


# --- a plain user


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: to be another user")
@pytest.mark.parametrize(
    ("uid", "text"),
    [
        (OTHER, ["You are number 1 of 2, with 2 processes, since 00:00:10 (30.0s): it is the turn of",
                 "alice; served by 00:31:10 at the latest."]),
        (ADMIN, ["You are number 2 of 2, with 1 process, since 00:00:20 (20.0s): it is the turn of alice;",
                 "served by 01:02:10 at the latest."]),
        (USER, ["No process of yours waits."]),
    ],
)  # fmt: skip
def test_a_user_is_told_first_where_that_user_stands(served: Served, uid: int, text: list[str]) -> None:
    """Place, why, and the latest time; then the queue."""
    as_user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    reading = [
        "--inh-caps=+dac_read_search",
        "--ambient-caps=+dac_read_search",
    ]  # of a checkout that only root may read
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TZ": "UTC", "MPSAGENT_SOCKET": str(served.path)}
    done = subprocess.run(
        [*as_user, *reading, PROGRAM, "queue"], env=env, capture_output=True, text=True, check=True, timeout=60
    )
    own, _, rest = done.stdout.partition("\n\n")
    assert " ".join(own.split()).replace("2026-11-21 ", "") == " ".join(text)
    assert max(map(len, own.splitlines())) <= 80
    assert rest.splitlines()[0].split() == ["#", "USER", "PROCESSES", "WAITING", "SERVED", "BY", "WHY"]


def test_why_is_not_cut_off(served: Served) -> None:
    """A narrow terminal hid the end of the reason, which is the part that matters."""
    found = served.backend.queue()
    rows = [{**one, "why": "MPS's servers do not start: Driver initialization failed with: 100"} for one in found]
    lines = cli_text.queue(rows, datetime(2026, 11, 21, 12, tzinfo=UTC), 80)
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()).count("Driver initialization failed with: 100") == 2


def test_the_command_line_is_shown_to_who_may_see_it(served: Served) -> None:
    """The agent knows the name of the program alone, and a node is full of `python`. What is no longer that process,
    or another's, is shown by that name."""
    with subprocess.Popen(["/bin/sleep", "61"]) as child:
        peer = served.backend.state.clients[501].peer._replace(pid=child.pid, uid=os.getuid(), command="sleep")
        for command, uid, shown in (("sleep", os.getuid(), "sleep 61"), ("train", os.getuid(), "train"),
                                    ("sleep", OTHER, "sleep")):  # fmt: skip
            client = replace(served.backend.state.clients[501], peer=peer._replace(command=command, uid=uid))
            served.backend.state = replace(served.backend.state, clients={501: client})
            row = run(served, "clients").stdout.splitlines()[1]
            assert row[row.index("G  ") + 3 :] == shown
        child.kill()


def test_the_policy_is_shown_as_a_table() -> None:
    """A line for each key, with its place; it was seven lines for each."""
    policy, errors = load([("/etc/p.toml", '[limits]\nthreads = 20\nmemory = "2G"\n[switch]\nafter = "10m"\n')])
    assert policy is not None, errors
    body = {
        "digest": policy.digest,
        "loaded": None,
        "files": ["/etc/p.toml"],
        "errors": [],
        "sections": policy.sections(),
    }
    assert cli_policy.shown(body, datetime(2026, 11, 21, tzinfo=UTC)) == [
        f"{policy.digest[:12]}, from /etc/p.toml",
        "",
        "KEY             VALUE   FROM",
        "limits.threads  20 %    /etc/p.toml:2",
        "limits.memory   2G      /etc/p.toml:3",
        "switch.after    10m00s  /etc/p.toml:5",
    ]


def test_orders_are_answered_in_words_and_local_time() -> None:
    """Seen: "deadline: 2026-11-22T00:21:09.594+00:00" after `drain`."""
    now = datetime(2026, 11, 22, 1, tzinfo=timezone(timedelta(hours=1)))
    for answer, text in (
        ({"draining": True, "deadline": "2026-11-22T00:21:09.594+00:00"},
         "Nothing new is let in. What still runs at 01:21:09 is ended."),
        ({"draining": True, "deadline": None},
         "Nothing new is let in, until mpsagent-cli resume. What runs ends by itself."),
        ({"draining": False}, "Who waits is let in."),
        ({"digest": "604a46bf269d0815", "files": ["/etc/mpsagent/policy.toml"]},
         "The policy is in force: 604a46bf269d, from /etc/mpsagent/policy.toml"),
        ({"of": "a later version"}, "of: a later version"),
    ):  # fmt: skip
        assert cli_orders.answered(answer, now) == [text]


def test_a_reload_says_what_is_surely_not_meant() -> None:
    """Seen: with a misspelt group it said "in force" and no more, and that group's users were refused."""
    what = 'p.toml:8: group.studends: there is no group studends here; did you mean "students"?'
    answer = {"digest": "604a46bf269d0815", "files": ["p.toml"], "warnings": [what]}
    now = datetime(2026, 11, 22, 1, tzinfo=UTC)
    assert cli_orders.answered(answer, now)[1:] == [f"warning: {what}"]


def test_a_reload_says_what_is_not_in_force_yet() -> None:
    """Seen: "in force" and no more, after the name of the instance and its directory had been changed."""
    what = "pipe_directory, instance changed: takes hold when the agent is started again"
    answer = {"digest": "604a46bf269d0815", "files": ["p.toml"], "later": what, "warnings": []}
    now = datetime(2026, 11, 22, 1, tzinfo=UTC)
    assert cli_orders.answered(answer, now)[1:] == [f"not yet: {what}"]


def test_memory_of_clients(served: Served) -> None:
    """Of each process, and of all that have the GPU; what is not known is no zero."""
    served.backend.memory = {501: 570 << 20}
    rows = run(served, "clients").stdout.splitlines()
    column = rows[0].index("MEMORY")
    assert rows[1][column:].startswith("570 MiB  ")
    assert rows[2][column:].startswith("-  ")
    assert "1 process with 570 MiB, 20 %, 1G each" in " ".join(run(served, "status").stdout.split())
    served.backend.memory = {501: 21 << 30}
    assert "with 21.0 GiB" in run(served, "status").stdout
