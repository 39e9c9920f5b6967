"""``mpsagent-cli events``: as sentences and for programs, followed across restarts of the agent."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

from tests.api.stand_in import OTHER, USER, Served, StandIn, serve
from tests.cli.program import PROGRAM, run


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


def test_events_are_in_the_order_of_time(served: Served) -> None:
    """A later agent writes down what happened before it started: 19:35:16 stood before 19:35:15."""
    for kind in ("first", "third", "second"):
        served.backend.happen(kind)
    served.backend.history.rows[2]["at"] -= 1.5
    for words in ([], ["--since", "1h"], ["--since", "0"]):
        lines = run(served, "events", *words).stdout.splitlines()
        assert [word for line in lines for word in ("first", "second", "third") if word in line] == [
            "first", "second", "third",
        ]  # fmt: skip
    told = [json.loads(line)["kind"] for line in run(served, "events", "--since", "0", "--json").stdout.splitlines()]
    assert told == ["first", "third", "second"], "for programs by cursor"


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
    served.backend.history.most = 5
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
    assert "the events between are lost" in errors


def test_events_are_sentences_of_at_most_100_columns(served: Served) -> None:
    """One line for an action and its outcome; names where they are known; an action without outcome is not hidden."""
    happen = served.backend.happen
    happen("turn.began", uid=OTHER, gap=0.104)
    action = {"action": "SignalClient", "pid": 501, "uid": USER, "start": 1, "signal": 15, "rule": "turn.time_limit",
              "reason": f"the turn of user {USER} is over; SIGTERM to client 501 of user {USER}"}  # fmt: skip
    begun = happen("action", **action)
    happen("action.failed", **action, begun=begun, ok=False, text="no such process")
    happen("action", action="KillServer", server=500, reason="it hangs " * 20)
    lines = run(served, "events", TZ="UTC").stdout.splitlines()
    assert lines[:2] == [
        "2026-11-21 00:00:01  the GPU goes to bob, 0.10s after the user before",
        "2026-11-21 00:00:03  sent SIGTERM to client 501 of alice: the turn of alice is over; it failed: no",
    ]
    assert lines[3].startswith("2026-11-21 00:00:04  killed server 500: it hangs it hangs")
    assert lines[-1].endswith("(begun)")
    assert max(map(len, lines)) <= 100
    every = [json.loads(line)["kind"] for line in run(served, "events", "--json").stdout.splitlines()]
    assert every == ["turn.began", "action", "action.failed", "action"], "programs get all of them"


def test_questions_to_the_daemon_do_not_hide_what_happened(served: Served) -> None:
    """Seen: a user had waited for some minutes, and `events` printed nothing: its 20 were all such questions."""
    served.backend.history.most, happen = 5000, served.backend.happen
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
