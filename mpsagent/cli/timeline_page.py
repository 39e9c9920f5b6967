"""A timeline as one page that needs nothing else: the picture, and the same in tables for who cannot see it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from importlib import resources

from mpsagent.cli import timeline_svg
from mpsagent.cli.timeline_rows import Picture
from mpsagent.mps.units import duration_text

MOST = 5000
"""Entries of the table; the newest."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Nothing from outside, and no script."""


def page(picture: Picture, host: str, clock: Callable[[float], str], zone: str, offset: float, note: str = "") -> str:
    """HTML. ``note``: what a reader has to know of what is missing."""
    drawn = timeline_svg.svg(picture, clock, zone, offset, alone=False)
    kinds = {one.kind for row in timeline_svg.rows(picture) for one in row.entries}
    legend = "".join(
        f"<li>{timeline_svg.key(kind)} {escape(words)}</li>"
        for kind, words in timeline_svg.WORDS.items()
        if kind in kinds
    )
    title = f"GPU timeline of {host}"
    if picture.grain:
        note = f"Breaks of less than {duration_text(picture.grain)} are not drawn; the sums are exact. {note}"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<style>
{timeline_svg.style()}{_file("timeline_page.css")}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p>From {clock(picture.start)} until {clock(picture.end)}, times of {escape(zone)}. {escape(note)}</p>
<div id="plot" class="scroll" tabindex="0" role="region" aria-label="Timeline. The tables below say the same.">
{drawn}
</div>
<ul class="legend" aria-label="Legend">{legend}</ul>
{_users(picture)}
{_entries(picture, clock)}
</main>
</body>
</html>
"""


def _file(name: str) -> str:
    return resources.files("mpsagent.cli").joinpath(name).read_text(encoding="utf-8")


def _users(picture: Picture) -> str:
    heads = ("With the GPU", "Waited", "Paused", "Clients", "Ended by mpsagent", "Faults", "Refused")
    lines = [
        "<h2>Users</h2>", '<div class="scroll"><table><thead><tr><th scope="col">User</th>',
        *(f'<th scope="col" class="number">{one}</th>' for one in heads), "</tr></thead><tbody>",
    ]  # fmt: skip
    for row in picture.users:
        cells = [
            duration_text(row.gpu),
            duration_text(row.waited),
            duration_text(row.paused),
            row.clients,
            row.counts["forced"],
            row.counts["fault"],
            row.counts["refused"],
        ]
        cells_html = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        lines.append(f'<tr><th scope="row">{escape(row.label)}</th>{cells_html}</tr>')
    return "".join([*lines, "</tbody></table></div>"])


def entries(picture: Picture) -> list[tuple[float, str, str, str]]:
    """When, who, what and in words, in the order of time."""
    return sorted(
        (one.start, row.label, one.kind, one.text) for row in timeline_svg.rows(picture) for one in row.entries
    )


def _entries(picture: Picture, clock: Callable[[float], str]) -> str:
    found = entries(picture)
    left = f", the newest {MOST} of {len(found)}" if len(found) > MOST else ""
    lines = [
        f'<h2>All entries</h2><div class="scroll long" tabindex="0" role="region" aria-label="All entries"><table>'
        f"<caption>In the order of time{left}</caption>"
        '<thead><tr><th scope="col">When</th><th scope="col">Who</th><th scope="col">What</th>'
        '<th scope="col">In words</th></tr></thead><tbody>'
    ]
    for at, label, kind, text in found[-MOST:]:
        words = (clock(at), label, timeline_svg.WORDS[kind], text)
        lines.append(f"<tr>{''.join(f'<td>{escape(one)}</td>' for one in words)}</tr>")
    return "".join([*lines, "</tbody></table></div>"])
