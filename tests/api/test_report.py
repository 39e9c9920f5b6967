"""`history` and `report`: who had what, in a table, as CSV and JSON; what is asked is passed on as it was meant."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mpsagent.api import instances
from mpsagent.api.database import Query
from mpsagent.cli import report as cli_report
from mpsagent.cli.verbs import cli
from mpsagent.policy.identity import Identity
from tests.api.history_files import row, write
from tests.api.stand_in import Served, StandIn, serve

ROW = {
    "gpu": 3661.0, "waited": 90.5, "longest": 60.0, "clients": 4, "left": 1, "refused": 0, "faults": 1, "forced": 2,
    "turns": 3, "counted": 0.0, "busy": 0.0, "energy": 0.0, "memory_used": 0, "shared": False, "utilization": None,
}  # fmt: skip
USED = {"counted": 1000.0, "busy": 850.0, "energy": 5.4e5, "memory_used": 3 << 30, "utilization": 0.85}


class Kept(StandIn):
    """With rows for a report."""

    rows: tuple[dict[str, Any], ...] = ()

    async def report(self, by: str, first: str, last: str, job: str | None = None) -> Any:
        self.asked.append(("report", by, job))
        return {"by": by, "first": first, "last": last, "rows": list(self.rows)}


class Slow(StandIn):
    """With a year of more sessions than the question's 5 s are enough for."""

    async def report(self, by: str, first: str, last: str, job: str | None = None) -> Any:
        raise TimeoutError


@pytest.fixture
def served() -> Iterator[Served]:
    with serve(Kept()) as one:
        yield one


def run(served: Served, *words: str) -> str:
    done = CliRunner().invoke(cli, ["--socket", str(served.path), *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_report_that_takes_too_long_says_what_to_do() -> None:
    """A year with 1,000,000 sessions takes longer than that, however often it is tried again."""
    with serve(Slow()) as served:
        done = CliRunner().invoke(cli, ["--socket", str(served.path), "report"])
    assert (done.exit_code, "ask for a shorter time" in done.output) == (3, True), done.output


def test_the_table_has_the_largest_share_first_in_80_columns(served: Served) -> None:
    """Whoever asks wants to know who had most."""
    served.backend.rows = (  # type: ignore[attr-defined]
        {"uid": 1000, "user": "alice", **ROW, "gpu": 5.0}, {"uid": 1001, "user": None, **ROW},
    )  # fmt: skip
    head, first, second = run(served, "report").splitlines()
    assert head.split() == "USER GPU WAITED LONGEST CLIENTS LEFT REFUSED FAULTS FORCED TURNS".split()
    assert first.split() == ["user", "1001", "1h01m", "1m30s", "1m00s", "4", "1", "0", "1", "2", "3"]
    assert second.startswith("alice")
    assert max(map(len, (head, first, second))) <= 80


def test_csv_and_json_have_the_seconds(served: Served) -> None:
    """For a spreadsheet, which takes a name that begins with = for a formula."""
    served.backend.rows = ({"uid": 1000, "user": "=cmd()", **ROW},)  # type: ignore[attr-defined]
    [row] = csv.DictReader(io.StringIO(run(served, "report", "--csv")))
    assert (row["uid"], row["user"], row["gpu_seconds"], row["clients"]) == ("1000", "'=cmd()", "3661.0", "4")
    body = json.loads(run(served, "report", "--json", "--since", "2026-01-02", "--until", "2026-01-05"))
    assert (body["first"], body["last"], body["rows"][0]["gpu"]) == ("2026-01-02", "2026-01-05", 3661.0)


def test_a_job_has_its_user_and_limits(served: Served) -> None:
    """In 80 columns; what has no room there is in the CSV."""
    job = {
        "job": "slurm-17",
        "uid": 1000,
        "user": "alice",
        **ROW,
        "threads": 30.0,
        "memory": 0,
        "ended": "idle_timeout",
    }
    served.backend.rows = (job, {**job, "job": "slurm-18", "gpu": 1e4, "memory": 4 << 30})  # type: ignore[attr-defined]
    head, first, second = run(served, "report", "--by", "job").splitlines()
    assert head.split() == "JOB USER THREADS MEMORY GPU WAITED CLIENTS FAULTS ENDED".split()
    assert first.split() == ["slurm-18", "alice", "30", "4G", "2h46m", "1m30s", "4", "1", "idle_timeout"]
    assert second.split()[:4] == ["slurm-17", "alice", "30", "-"]
    assert max(map(len, (head, first, second))) <= 80
    rows = csv.DictReader(io.StringIO(run(served, "report", "--job", "slurm-17", "--csv")))
    columns = "job", "uid", "threads", "waited_seconds", "left", "ended"
    assert [tuple(row[name] for name in columns) for row in rows] == [
        ("slurm-17", "1000", "30.0", "90.5", "1", "idle_timeout"),
        ("slurm-18", "1000", "30.0", "90.5", "1", "idle_timeout"),
    ]  # fmt: skip
    assert served.backend.asked[-2:] == [("report", "job", None), ("report", "job", "slurm-17")]


def test_what_was_used_is_in_the_table(served: Served) -> None:
    """In 80 columns, also with long names; what is that of several users is marked."""
    rows = ({"uid": 1000, "user": "a" * 17, **ROW, **USED}, {"uid": 1001, "user": "bob", **ROW, "gpu": 1.0})
    served.backend.rows = rows  # type: ignore[attr-defined]
    head, first, second = run(served, "report").splitlines()
    assert head.split() == "USER GPU UTIL ENERGY WAITED CLIENTS FAULTS FORCED USED".split()
    assert (first.split()[1:5], first.split()[-2:]) == (["1h01m", "85%", "150", "Wh"], ["3.0", "GiB"])
    assert (second.split()[2:5], second.split()[-1]) == (["-", "0", "Wh"], "-")
    assert max(map(len, (head, first))) <= 80
    served.backend.rows = ({**rows[0], "shared": True, "energy": 7.2e6},)  # type: ignore[attr-defined]
    _, first, note = run(served, "report").splitlines()
    assert ("85%*" in first, "2 kWh" in first, note[:2]) == (True, True, "*:")
    [row] = csv.DictReader(io.StringIO(run(served, "report", "--csv")))
    assert (row["busy_seconds"], row["energy"], row["utilization"]) == ("850.0", "7200000.0", "0.85")


def test_groups_and_pauses_are_in_table_csv_and_json(served: Served) -> None:
    """There is a column for pauses where there were any; who is in no group that is known is not hidden."""
    rows = (
        {"group": "students", "users": 3, **ROW, "paused": 120.0},
        {"group": None, "users": 1, **ROW, "gpu": 1.0, "paused": 0.0},
    )
    served.backend.rows = rows  # type: ignore[attr-defined]
    head, first, second = run(served, "report", "--by", "group").splitlines()
    assert (head.split()[0], head.split()[-1], first.split()[0], first.split()[-1]) == (
        "GROUP", "PAUSED", "students", "2m00s",
    )  # fmt: skip
    assert second.startswith("not known")
    found = list(csv.DictReader(io.StringIO(run(served, "report", "--by", "group", "--csv"))))
    assert [(one["group"], one["users"], one["paused_seconds"]) for one in found] == [
        ("students", "3", "120.0"), ("", "1", "0.0"),
    ]  # fmt: skip
    assert json.loads(run(served, "report", "--by", "group", "--json"))["rows"] == list(rows)
    served.backend.rows = rows[1:]  # type: ignore[attr-defined]
    assert "PAUSED" not in run(served, "report", "--by", "group")


def test_nothing_is_said_as_nothing(served: Served) -> None:
    """An empty table looks like a mistake."""
    assert "no user had a GPU" in run(served, "report")
    assert run(served, "events", "alice") == "nothing on record\n"


def test_history_asks_what_was_meant(served: Served) -> None:
    """Times are the caller's local ones."""
    run(served, "events", "alice", "--pid", "5", "--kind", "client.", "--since", "2026-11-22 08:00", "-n", "7")
    since = time.mktime((2026, 11, 22, 8, 0, 0, 0, 0, -1))
    assert served.backend.asked[-1] == ("find", "alice", Query(None, 7, None, 5, "client.", since, None))
    run(served, "events", "--since", "2h")
    assert abs(served.backend.asked[-1][2].since - (time.time() - 7200)) < 60


@pytest.mark.parametrize("words", [["--since", "yesterday"], ["--until", "99999-01-01"], ["--pid", "0"]])
def test_what_is_no_time_is_said(served: Served, words: list[str]) -> None:
    """A wrong question has no answer that looks like one."""
    assert CliRunner().invoke(cli, ["--socket", str(served.path), "events", *words]).exit_code == 2


@pytest.mark.parametrize(
    "target",
    [
        "/v1/events?since=x",
        "/v1/events?follow=1&pid=5",
        "/v1/report?by=x",
        "/v1/report?by=user&job=x",
        "/v1/report?first=1",
        "/v1/events?pid=-1",
    ],
)
def test_a_wrong_question_is_400(served: Served, target: str) -> None:
    """And says which part."""
    from mpsagent.cli import client

    status, raw = client.request(str(served.path), target)
    assert status == 400
    assert json.loads(raw)["where"] in target


def test_users_are_counted_in_one_group_each() -> None:
    """The first that the policy has a section for, else the user's own; the longest wait is not a sum."""
    rows = [{"uid": uid, **ROW, "paused": 0.0} for uid in (1, 2, 3, 4)]
    who = [Identity(1, "a", ("a", "lab")), Identity(2, "b", ("lab", "x")), Identity(3, "c", ("c",)), Identity(4)]
    found = instances.of_groups(rows, who, ["x", "lab"])
    assert [(one["group"], one["users"], one["gpu"], one["longest"]) for one in found] == [
        (None, 1, 3661.0, 60.0), ("c", 1, 3661.0, 60.0), ("lab", 1, 3661.0, 60.0), ("x", 1, 3661.0, 60.0),
    ]  # fmt: skip
    assert instances.of_groups(rows, who, ["lab"])[-1]["gpu"] == 2 * 3661.0


def test_the_sums_have_the_names_of_the_database(tmp_path: Path) -> None:
    """From the file to the table."""
    from mpsagent.api import database

    file = database.Database(tmp_path / "history.db")
    write(file, row(1, 5.0, "turn.began", uid=os.getuid()))
    file.close()
    day = database.local_day(5.0)[0]
    rows = database.report(tmp_path / "history.db", day, day, "uid", 5.0)
    body = {"by": "user", "first": day, "last": day, "rows": [{**one, "user": "me"} for one in rows]}
    assert cli_report.table(body)[1].split()[-1] == "1"


def test_reports_of_several_nodes_are_added_up(tmp_path: Path) -> None:
    """Sums, and the most of what is no sum; a file that is no report is named."""
    job = {"job": "slurm-17", "uid": 1000, "user": "alice", **ROW, "paused": 1.5, "threads": 20.0, "memory": 4 << 30}
    job["ended"] = "fault"
    other = {**job, "longest": 70.0, "gpu": 1.0, "threads": 10.0, "memory": 8 << 30, "ended": "finished"}
    report = {"by": "job", "first": "2026-11-01", "last": "2026-11-02"}
    files = [str(tmp_path / name) for name in ("a.json", "b.json", "c.json")]
    Path(files[0]).write_text(json.dumps({**report, "rows": [job, {**job, "job": "slurm-18"}]}))
    Path(files[1]).write_text(json.dumps({**report, "last": "2026-11-03", "rows": [other]}))
    whole = json.loads(CliRunner().invoke(cli, ["report", "--json", "--merge", *files[:2]]).output)
    assert (whole["by"], whole["first"], whole["last"]) == ("job", "2026-11-01", "2026-11-03")
    first, second = whole["rows"]
    assert first == {
        **job, "gpu": 3662.0, "waited": 181.0, "longest": 70.0, "clients": 8, "left": 2, "faults": 2, "forced": 4,
        "turns": 6, "paused": 3.0, "memory": 8 << 30,
    }  # fmt: skip
    assert second == {**job, "job": "slurm-18"}
    assert "slurm-17" in CliRunner().invoke(cli, ["report", "--merge", *files[:2]]).output
    Path(files[2]).write_text(json.dumps({**report, "by": "user", "rows": []}))
    for words in (["--merge", *files], [files[0]], ["--merge"]):
        assert CliRunner().invoke(cli, ["report", *words]).exit_code == 2
    assert "given twice" in CliRunner().invoke(cli, ["report", "--merge", files[0], files[0]]).output
    odd = {"gpu": "1", "user": {}, "uid": [], "job": 5, "longest": float("nan"), "faults": 10**4000}
    rows = [{**job, name: value} for name, value in odd.items()]
    rows += [{name: value for name, value in job.items() if name != one} for one in ("threads", "user", "gpu")]
    wrong: list[dict[str, object]] = [{**report, "rows": [row]} for row in rows]
    wrong += [{**report, "first": 1, "last": 2, "rows": []}, {**report, "by": [], "rows": []}]
    for text in ("", "[]", '{"rows": [1]}', "[" * 100_000, *map(json.dumps, wrong)):
        Path(files[2]).write_text(text)
        done = CliRunner().invoke(cli, ["report", "--merge", files[2]])
        assert (done.exit_code, "c.json has no report" in done.output) == (2, True)
