"""`mpsagent-cli timeline`: the sessions and events of a time as a page or a picture."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from mpsagent.cli import ask
from mpsagent.cli.ask import Json, iso, moment
from mpsagent.cli.report import target

PAGE, MOST = 1000, 200_000
"""Sessions or events that are asked for at a time, and in all."""


@click.command()
@click.option("--since", callback=moment, default="1d", show_default=True, metavar="TIME",
              help='"2h" for two hours ago, 2026-11-22, "2026-11-22 08:00".')  # fmt: skip
@click.option("--until", callback=moment, metavar="TIME", help="Before this time; now.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="A page that needs nothing else; - for standard output.")  # fmt: skip
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="The picture alone.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs: what is drawn.")
@click.pass_obj
def timeline(
    path: str, since: float, until: float | None, html: Path | None, svg: Path | None, as_json: bool
) -> None:  # fmt: skip
    """Draw who had the GPU when.

    Alone or together, who waited, pauses, faults, forced ends, limits, leases. The page has tables for who
    cannot see it.
    """
    from mpsagent.cli import timeline_page, timeline_svg
    from mpsagent.cli import timeline_rows as story
    from mpsagent.cli.progress import Progress

    if html is None and svg is None and not as_json:
        raise click.UsageError("give --html FILE, --svg FILE or --json")
    now = ask.now().timestamp()
    end = now if until is None else min(until, now)
    if since >= end:
        raise click.UsageError("--since is not before --until")
    sessions = Reader(path, "sessions", since, until)
    events = Reader(path, "events", since, until, story.KINDS)
    with Progress("reading sessions"):
        picture = story.picture(sessions.rows(), events.rows(), since, end, _clock)
    offset = datetime.fromtimestamp(since).astimezone().utcoffset()
    assert offset is not None
    east = offset.total_seconds()
    zone = datetime.fromtimestamp(since).astimezone().strftime("%Z (UTC%z)")
    note = sessions.note or events.note
    if html is not None:
        host = os.uname().nodename
        _write(html, timeline_page.page(picture, host, _clock, zone, east, note))
    if svg is not None:
        _write(svg, timeline_svg.svg(picture, _clock, zone, east, alone=True))
    if as_json:
        click.echo(json.dumps(picture, default=_parts))
    if note:
        click.echo(f"mpsagent-cli: {note}", err=True)


class Reader:
    """Pages of ``what`` (events or sessions), oldest first."""

    def __init__(self, path: str, what: str, since: float, until: float | None, kind: str = "") -> None:
        self._path, self._what, self._cursor = path, what, 0
        self._query = {"since": iso(since), "until": iso(until), "kind": kind or None, "limit": PAGE}
        self.note = ""

    def rows(self) -> Iterator[Json]:
        for _ in range(MOST // PAGE):
            body = ask.asked(self._path, target(f"/v1/{self._what}", {**self._query, "cursor": self._cursor}))[0]
            yield from body[self._what]
            if len(body[self._what]) < PAGE:
                return
            self._cursor = body["cursor"]
        self.note = f"only the first {MOST} {self._what} are in it; ask for a shorter time"


def _parts(one: Any) -> Json:
    """A row, a span, a mark (asdict would spoil the counts)."""
    return {part.name: getattr(one, part.name) for part in fields(one)}


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        click.echo(text)
        return
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        click.echo(f"mpsagent-cli: {path}: {error.strerror}", err=True)
        sys.exit(ask.USAGE)
