"""`mpsagent-cli timeline`: the sessions and events of a time as a list or a picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpsagent.cli import ask, options
from mpsagent.cli.ask import Json, iso

if TYPE_CHECKING:
    from mpsagent_tools.timeline_rows import Picture

PAGE, MOST = 1000, 200_000
"""Sessions or events that are asked for at a time, and in all."""

_out = click.Path(dir_okay=False, path_type=Path)


def pictures(command: Any) -> Any:
    """The options of a verb that draws."""
    svg = click.option("--svg", type=_out, metavar="FILE", help="Write the picture to FILE; - is standard output.")
    return svg(options.json(command))


@click.command()
@click.option("--since", callback=options.moment, default="1d", show_default=True, metavar="TIME",
              help='Start at this time: "2h" for two hours ago, 2026-11-22, "2026-11-22 08:00".')  # fmt: skip
@click.option("--until", callback=options.moment, metavar="TIME", help="End at this time.  [default: now]")
@pictures
@click.pass_obj
def timeline(path: str, since: float, until: float | None, svg: Path | None, as_json: bool) -> None:
    """Show when each user had the GPU.

    With waiting times, pauses, faults, terminations, limits and leases, as a list or a picture.
    """
    from mpsagent_tools import timeline_rows

    now = ask.now().timestamp()
    end = now if until is None else min(until, now)
    if since >= end:
        raise click.UsageError("--since is not before --until")
    sessions = Reader(path, "sessions", since, until)
    events = Reader(path, "events", since, until, timeline_rows.KINDS)
    picture = timeline_rows.picture(sessions.rows(), events.rows(), since, end, clock)
    note = sessions.note or events.note
    if svg is None and not as_json:
        click.echo("\n".join(page(picture, ask.width())))
    draw(picture, svg, as_json)
    if note:
        click.echo(f"mpsagent-cli: {note}", err=True)


def page(picture: Picture, width: int) -> list[str]:
    """A line for each entry of a user."""
    from mpsagent.cli import tables, wording
    from mpsagent_tools import timeline_svg

    found = sorted(
        (one.start, row.label, one.text)
        for row in timeline_svg.rows(picture) for one in row.entries if one.kind != "alone"  # that one says itself
    )  # fmt: skip
    told = ((at, text if text.startswith(who) else f"{who}: {text}") for at, who, text in found)
    rows = [[clock(at), wording.safe(text, 1000)] for at, text in told]
    return tables.table(["AT", "WHAT"], rows, width, below=True) if rows else ["no user had a GPU"]


def draw(picture: Picture, svg: Path | None, as_json: bool) -> None:
    from mpsagent_tools import timeline_svg

    there = datetime.fromtimestamp(picture.start).astimezone()
    offset = there.utcoffset()
    assert offset is not None
    if svg is not None:
        _write(svg, timeline_svg.svg(picture, clock, there.strftime("%Z (UTC%z)"), offset.total_seconds()))
    if as_json:
        click.echo(json.dumps(picture, default=_parts))


class Reader:
    """Pages of ``what`` (events or sessions), oldest first."""

    def __init__(self, path: str, what: str, since: float, until: float | None, kind: str = "") -> None:
        self._path, self._what, self._cursor = path, what, 0
        self._query = {"since": iso(since), "until": iso(until), "kind": kind or None, "limit": PAGE}
        self.note = ""

    def rows(self) -> Iterator[Json]:
        for _ in range(MOST // PAGE):
            body = ask.asked(self._path, ask.target(f"/v1/{self._what}", {**self._query, "cursor": self._cursor}))[0]
            yield from body[self._what]
            if len(body[self._what]) < PAGE:
                return
            self._cursor = body["cursor"]
        self.note = f"only the first {MOST} {self._what} are in it; ask for a shorter time"


def _parts(one: Any) -> Json:
    """A row, a span, a mark (asdict would spoil the counts)."""
    return {part.name: getattr(one, part.name) for part in fields(one)}


def clock(at: float) -> str:
    """A time as people here read it."""
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
