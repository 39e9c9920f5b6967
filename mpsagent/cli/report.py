"""`mpsagent-cli report`: who had what."""

from __future__ import annotations

import sys
from datetime import date, datetime, timedelta

import click

from mpsagent.cli import ask, options, tables, wording
from mpsagent.cli.ask import Json

SUMS = ("gpu", "waited", "longest", "clients", "left", "refused", "faults", "forced", "turns", "paused")
USED = ("counted", "busy", "energy", "memory_used", "shared")
SECONDS = frozenset({"gpu", "waited", "longest", "paused", "counted", "busy"})
SHARED = "*: of all users together, who were at work on one server"
OF_JOBS = ("user", "threads", "memory", "gpu", "waited", "clients", "faults", "ended")
OF_USE = ("gpu", "util", "energy", "waited", "clients", "faults")
"""Where NVML has said what was used."""
"""What a page has room for; CSV and JSON have the rest, too."""


@click.command()
@click.option("--by", type=click.Choice(["user", "group", "day", "job"]), default="user", show_default=True,
              help="A line for each of these.")  # fmt: skip
@click.option("--job", metavar="NAME", help="Only this job, by the name of its lease.")
@click.option("--since", callback=options.moment, metavar="TIME", help='First day ("7d", 2026-11-01); 30 days in all.')
@click.option("--until", callback=options.moment, metavar="TIME", help="Last day; today.")
@click.option("--csv", "as_csv", is_flag=True, help="Comma-separated values; times in seconds.")
@options.json
@click.pass_obj
def report(
    path: str, by: str, job: str | None, since: float | None, until: float | None, as_csv: bool, as_json: bool
) -> None:
    """Who had what: time with the GPU, waiting, clients, faults.

    GPU is the time with a client at work, however many. WAITED is that of all processes together, LONGEST the
    longest wait of one. LEFT went away while they waited; FORCED were ended by mpsagent. PAUSED is the
    time in which their processes stood for others, and no time with the GPU. Days are the node's.
    UTIL is the GPU's utilisation meanwhile, ENERGY what it used, USED the most memory of one process. Jobs are those
    that had a lease with a name; THREADS and MEMORY are the most that one of their clients had. What a page has
    no room for is in --csv and --json. ENDED is how the last client of a job did: finished by itself (or by a signal of
    others), fault, order (somebody asked for it), turn, or the policy's key that ended it, such as max_runtime.
    """
    last = _day(until) or ask.now().date()
    first = _day(since) or last - timedelta(days=29)
    query = {"by": by if job is None else "job", "job": job, "first": first, "last": last}
    if as_csv and not as_json:
        _write_csv(ask.asked(path, ask.target("/v1/report", query))[0])
    else:
        ask.show(path, ask.target("/v1/report", query), as_json, lambda body: table(body, ask.width()))


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
        return (
            f"{hours:.3g} Wh"
            if hours < 1000
            else f"{hours / 1000:.3g} kWh"
            if hours < 1e6
            else f"{hours / 1000:.0f} kWh"
        )
    if name == "used":
        return wording.size(row["memory_used"] or None)
    return duration_text(row[name]) if name in SECONDS else f"{row[name]:g}"


def _write_csv(body: Json) -> None:
    """With the columns of the JSON, in its units."""
    import csv

    names: tuple[str, ...] = {"user": ("uid", "user"), "group": ("group", "users"), "day": ("day",),
                              "job": ("job", "uid", "user", "threads", "memory", "ended")}[body["by"]]  # fmt: skip
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
