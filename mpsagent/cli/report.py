"""`mpsagent-cli report`: who had what."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import date, datetime, timedelta
from pathlib import Path

import click

from mpsagent.api.sums import SUMS, USED, add
from mpsagent.cli import ask, options, tables, wording
from mpsagent.cli.ask import Json

FIRST: dict[str, tuple[str, ...]] = {
    "user": ("uid", "user"), "group": ("group", "users"), "day": ("day",),
    "job": ("job", "uid", "user", "threads", "memory", "ended"),
}  # fmt: skip
"""What a row has besides."""
NAMES = ("job", "group", "day", "user")
SECONDS = frozenset({"gpu", "waited", "longest", "paused", "counted", "busy"})
SHARED = "*: of all users together, who were at work on one server"
OF_JOBS = ("user", "threads", "memory", "gpu", "waited", "clients", "faults", "ended")
OF_USE = ("gpu", "util", "energy", "waited", "clients", "faults")
"""What a page has room for, of jobs, and where NVML has said what was used; CSV and JSON have the rest, too."""


@click.command()
@click.option("--by", type=click.Choice(["user", "group", "day", "job"]), default="user", show_default=True,
              help="Add up by user, group, day or job.")  # fmt: skip
@click.option("--job", metavar="NAME", help="Report only this job, by the name of its lease.")
@click.option(
    "--since",
    callback=options.moment,
    metavar="TIME",
    help='Set the first day ("7d", 2026-11-01).  [default: 30 days ago]',
)
@click.option("--until", callback=options.moment, metavar="TIME", help="Set the last day.  [default: today]")
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values, with times in seconds.")
@click.option("--merge", is_flag=True, help="Add up FILES, which `report --json` has written on several nodes.")
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@options.json
@click.pass_obj
def report(
    path: str, by: str, job: str | None, since: float | None, until: float | None, as_csv: bool, merge: bool,
    files: tuple[Path, ...], as_json: bool,
) -> None:  # fmt: skip
    """Report GPU time, waiting and faults by user, day or job.

    GPU is the time in which the user had a client at work. WAITED is the waiting time of all processes, LONGEST the
    longest wait of one process. LEFT are processes that disconnected while they waited, FORCED were terminated by
    mpsagent. PAUSED is the time in which processes were frozen for other users. Days are local days of the node. UTIL
    is the GPU's utilisation in that time, ENERGY its energy, USED the most memory of one process. Jobs are leases
    with a name. THREADS and MEMORY are the largest limits of one client. --csv and --json have every column. ENDED is
    the end of the job's last client: finished (or a signal of others), fault, order (an administrator or user), turn,
    or the policy's key, such as max_runtime.
    """
    if merge != bool(files):
        raise click.UsageError("--merge and FILES go together: report --merge a.json b.json")
    last = _day(until) or ask.now().date()
    first = _day(since) or last - timedelta(days=29)
    query = {"by": by if job is None else "job", "job": job, "first": first, "last": last}
    if as_json and not merge:
        ask.show(path, ask.target("/v1/report", query), True, lambda body: [])
        return
    body = merged(files) if merge else ask.asked(path, ask.target("/v1/report", query))[0]
    if as_json:
        click.echo(json.dumps(body))
    elif as_csv:
        _write_csv(body)
    else:
        click.echo("\n".join(table(body, ask.width())))


def merged(files: Sequence[Path]) -> Json:
    """Times and counts of several nodes are added up; of the longest wait, of limits and of a group's users the most
    counts, as users may be on several nodes. The same user has the same uid on all of them."""
    bodies = [_read(file) for file in files]
    by, rows = bodies[0]["by"], dict[tuple[object, ...], Json]()
    if any(one["by"] != by for one in bodies):
        raise click.UsageError("the reports have different rows: write all with the same --by")
    if len({file.resolve() for file in files}) < len(files):
        raise click.UsageError("a file is given twice, and would count twice")
    for row in (row for one in bodies for row in one["rows"]):
        whose = tuple(row[name] for name in FIRST[by] if name in (*NAMES, "uid"))
        if (total := rows.setdefault(whose, row)) is not row:
            unlimited = 0 in (total.get("memory"), row.get("memory"))
            add(total, row, (*SUMS, *USED, *{"users", "threads", "memory"}.intersection(FIRST[by])))
            if unlimited:
                total["memory"] = 0
            if total.get("ended") == "finished":
                total["ended"] = row["ended"]
    for row in rows.values():
        row["utilization"] = row["busy"] / row["counted"] if row["counted"] else None
    first, last = min(one["first"] for one in bodies), max(one["last"] for one in bodies)
    return {"by": by, "first": first, "last": last, "rows": [rows[one] for one in sorted(rows, key=str)]}


def _read(file: Path) -> Json:
    """A report that anybody may have written."""
    try:
        body: Json = json.loads(file.read_bytes())
        fields = (*FIRST[body["by"]], *SUMS, *USED)
        if date.fromisoformat(body["first"]) <= date.fromisoformat(body["last"]) and all(
            isinstance(row[name], str | None) if name in (*NAMES, "ended")
            else isinstance(row[name], int | float) and 0 <= row[name] < 2.0**63
            for row in body["rows"] for name in fields
        ):  # fmt: skip
            return body
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise click.UsageError(f"{file} has no report: write it with mpsagent-cli report --json")


def table(body: Json, width: int = tables.WIDE) -> list[str]:
    """For people: the largest share first, days in order."""
    by, rows = body["by"], body["rows"]
    if not rows:
        return [f"no {'job' if by == 'job' else 'user'} had a GPU from {body['first']} to {body['last']}"]
    if by != "day":
        rows = sorted(rows, key=lambda row: -row["gpu"])
    paused = any(row.get("paused") for row in rows)  # else there is no column for it: a page has little room
    columns: tuple[str, ...] = OF_JOBS if by == "job" else SUMS if paused else SUMS[:-1]
    if any(row["counted"] for row in rows):
        columns = (*OF_USE, "forced", "paused" if paused else "used")
        if by == "job":
            columns = ("user", *OF_USE, columns[-1], "ended")
    lines = [[name.upper() for name in (by, *columns)]]
    lines += [[_who(row, by), *(_value(name, row) for name in columns)] for row in rows]
    names = {"job": (1, 0), "day": ()}.get(by, (0,))
    numbers = set(range(1, len(columns) + 1)) - {*names}
    found = tables.table(None, lines, width, names=names, right=numbers)
    return [*found, SHARED] if any(row["shared"] for row in rows) else found


def _who(row: Json, by: str) -> str:
    if by == "user":
        return wording.user(row)
    return wording.safe(row[by] or "not known")


def _value(name: str, row: Json) -> str:
    from mpsagent.mps.units import duration_text, limit_text

    if name == "user":
        return wording.user(row)
    if name == "ended":
        return wording.safe(row.get("ended", "not known"))
    if name == "memory":
        return limit_text(row[name]) if row[name] else "-"
    if name == "util":
        return wording.utilization(row)
    if name == "energy":
        hours = row[name] / 3600
        if hours < 1000:
            return f"{hours:.3g} Wh"
        return f"{hours / 1000:.3g} kWh" if hours < 1e6 else f"{hours / 1000:.0f} kWh"
    if name == "used":
        return wording.size(row["memory_used"] or None)
    return duration_text(row[name]) if name in SECONDS else f"{row[name]:g}"


def _write_csv(body: Json) -> None:
    """With the columns of the JSON, in its units."""
    import csv

    names = FIRST[body["by"]]
    columns = (*SUMS, *USED, "utilization")
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([*names, *(f"{name}_seconds" if name in SECONDS else name for name in columns)])
    for row in body["rows"]:
        writer.writerow([_cell(row.get(name, 0)) for name in (*names, *columns)])


def _cell(value: object) -> object:
    """A name that a spreadsheet would take for a formula is one no more."""
    if isinstance(value, str) and value[:1] in "=+-@\t":
        return "'" + value
    return round(value, 3) if isinstance(value, float) else value


def _day(at: float | None) -> date | None:
    return None if at is None else datetime.fromtimestamp(at).date()
