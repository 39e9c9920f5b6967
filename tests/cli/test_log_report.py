"""What was not understood, to be sent to strangers: short, and nobody can be recognised in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mpsagent.cli.log_report import LONGEST, MOST_KINDS, LogReport, page
from mpsagent.mps import events as ev
from tests import recordings

PROGRAM = Path(sys.executable).with_name("mpsagent-cli")
HEAD = "[2026-11-20 23:56:21.865 Server   471] "


def report(*texts: str, names: tuple[str, ...] = ()) -> list[tuple[int, str]]:
    found = LogReport(names)
    for text in texts:
        found.feed(ev.Unknown(1.0, "server", text))
    return [(one["count"], one["text"]) for one in found.finish()["kinds"]]


def test_lines_that_differ_in_who_and_where_only_are_one() -> None:
    assert report(
        "Client {PID: 4711, Context ID: 1} of alice sleeps on node17.example.org at /home/alice/run.py",
        "Client {PID: 42, Context ID: 0} of Bob sleeps on node4 at /scratch/x",
        names=("alice", "bob"),
    ) == [(2, "Client {PID: N, Context ID: N} of NAME sleeps on N at PATH")]


def test_what_could_name_a_person_is_taken_out() -> None:
    for secret, text in {
        "carol": "job of carol@example.org ends",
        "payroll": 'Cannot run "payroll model" now',
        "fbf1": "Device GPU-fbf1c2d3-1234-5678-9abc-def012345678 is odd",
        "2026": "[2026-11-20 23:56:21.865 Strange   471] hello",
        "\x1b": "ping \x1b[31m red",
        "10.": "peer 10.1.2.3:443 has gone",
    }.items():
        ((_, shown),) = report(text)
        assert secret not in shown


@given(st.lists(st.text(max_size=400), max_size=80))
def test_it_is_short_whatever_the_log_has(texts: list[str]) -> None:
    found = report(*texts)
    assert len(found) <= MOST_KINDS
    assert all(
        len(text) <= LONGEST and text.isprintable() and not any(c.isdecimal() for c in text) for _, text in found
    )


def test_others_are_counted() -> None:
    found = LogReport()
    for number in range(100):
        found.feed(ev.Unknown(1.0, "server", "x" * (number + 1)))
    body = found.finish()
    assert page(body, "0.1.0")[-1].split() == [str(100 - MOST_KINDS), "others"]


def test_the_command(tmp_path: Path) -> None:
    """On real logs with three strange lines; versions are read from the logs themselves."""
    logs = recordings.logs("02", "R4")
    (tmp_path / "control.log").write_bytes(logs.control)
    strange = "".join(f"{HEAD}Server {n} does something new\n" for n in (1, 2)) + "no head at all\n"
    (tmp_path / "server.log").write_bytes(logs.server + strange.encode())
    words = [PROGRAM, "report-logs", tmp_path / "control.log", tmp_path / "server.log"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second, *kinds = done.stdout.splitlines()
    assert "MPS binary version" in first
    assert second.startswith("3 of ")
    assert sorted(line.split(maxsplit=1) for line in kinds) == [
        ["1", "no head at all"], ["2", "Server N does something new"],
    ]  # fmt: skip
    body = json.loads(subprocess.run([*words, "--json"], capture_output=True, text=True, timeout=60).stdout)
    assert (body["unknown"], body["driver"]) == (3, "580")
    missing = subprocess.run([PROGRAM, "report-logs", tmp_path / "none"], capture_output=True, text=True, timeout=60)
    assert missing.returncode == 2
