"""A timeline as SVG. Each drawn element has a text (``title``). Pure."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from importlib import resources

from mpsagent.mps.units import duration_text
from mpsagent_tools.timeline_rows import Mark, Picture, Row, Span

WIDTH, SIDE, ROW, TOP = 1200, 10, 48, 26
"""Pixels: the width, the margin left and right, the height of a row, the height of the axis."""
_WORK, _WAIT, _PAUSE = (20, 14), (36, 7), (23, 8)
"""Offset in a row, and height. A pause is drawn inside the work, so that both are visible."""
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)
_TICKS = 10
SHAPES = {
    "forced": "M-5,-5L5,5M5,-5L-5,5",
    "faulted": "M0,-6L6,5H-6Z",
    "turn": "M-5,-7H5M0,-7V7M-5,7H5",
    "refused": "M-5,0A5,5 0 1 0 5,0A5,5 0 1 0 -5,0M-3.5,-3.5L3.5,3.5",
    "limits": "M-5,-5H5V5H-5Z",
    "lease": "M-5,-6V6M-5,-6H5L2,-2L5,2H-5",
    "control": "M0,-6L6,0L0,6L-6,0Z",
    "policy": "M-4,-6H4V6H-4Z",
    "outside": "M0,-6V6M-6,0H6",
}
"""Marks differ in shape, not in colour alone."""
WORDS = {
    "alone": "has the GPU alone", "together": "several users at once", "work": "at work", "wait": "waits at the gate",
    "pause": "paused until its next turn",
    "fault": "in a fault", "faulted": "ended in a fault", "forced": "ended by mpsagent",
    "turn": "turn ended by the policy", "refused": "refused", "limits": "limits not confirmed",
    "lease": "lease of a job", "control": "control daemon, drain", "policy": "policy", "outside": "outside MPS",
}  # fmt: skip


def rows(picture: Picture) -> list[Row]:
    return [*picture.gpus, *picture.users, *([picture.node] if picture.node.marks else [])]


def svg(picture: Picture, clock: Callable[[float], str], zone: str, offset: float) -> str:
    """``zone``, ``offset``: of the times at the axis, in words and as seconds east of UTC."""
    shown = rows(picture)
    height = TOP + ROW * len(shown) + 56
    span = max(picture.end - picture.start, 1.0)

    def x(at: float) -> float:
        return round(SIDE + (at - picture.start) / span * (WIDTH - 2 * SIDE), 2)

    title = f"Who had the GPU from {clock(picture.start)} until {clock(picture.end)}"
    about = "; ".join(
        f"{row.label}: {len(row.spans)} spans, {len(row.marks)} marks" for row in [*picture.users, picture.node]
    )
    if picture.grain:
        about += f". Breaks of less than {duration_text(picture.grain)} are not drawn"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="timeline" role="img" aria-labelledby="t d" '
        f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        f'<title id="t">{escape(title)}</title><desc id="d">{escape(about)}. Times of {escape(zone)}.</desc>',
    ]
    style = resources.files("mpsagent_tools").joinpath("timeline.css").read_text(encoding="utf-8")
    lines.append(f"<style>{style}</style>")
    lines.append(
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" class="hatch-ground"/><rect width="3" height="6" class="hatch-line"/>'
        '</pattern><pattern id="bars" width="5" height="8" patternUnits="userSpaceOnUse">'
        '<rect width="5" height="8" class="bars-ground"/><rect width="2" height="8" class="bars-line"/>'
        "</pattern></defs>"
    )
    lines.append(f'<rect class="ground" width="100%" height="{height}"/><g class="axis">')
    for at, text in _ticks(picture.start, picture.end, offset):
        lines.append(f'<g class="tick"><line x1="{x(at)}" x2="{x(at)}" y1="{TOP - 4}" y2="{height}"/>')
        lines.append(f'<text x="{x(at)}" y="{TOP - 10}">{text}</text></g>')
    lines.append("</g>")
    for number, row in enumerate(shown):
        top = TOP + ROW * number
        lines.append(f'<g class="row"><line class="edge" x1="0" x2="100%" y1="{top}" y2="{top}"/>')
        lines.append(f'<text class="label" x="{SIDE}" y="{top + 15}">{escape(row.label)}</text>')
        lines += [_span(one, x, top) for one in row.spans]
        lines += [_mark(one, x, top) for one in row.marks]
        lines.append("</g>")
    lines.append(_legend(height - 36, {one.kind for row in shown for one in row.entries}))
    lines.append("</svg>")
    return "\n".join(lines)


def _span(one: Span, x: Callable[[float], float], top: int) -> str:
    place, high = {"wait": _WAIT, "pause": _PAUSE}.get(one.kind, _WORK)
    if one.kind == "fault":
        place, high = place - 3, high + 6
    width = max(1.0, round(x(one.end) - x(one.start), 2))
    return (
        f'<rect class="{one.kind}" x="{x(one.start)}" '
        f'y="{top + place}" width="{width}" height="{high}"><title>{escape(one.text)}</title></rect>'
    )


def _mark(one: Mark, x: Callable[[float], float], top: int) -> str:
    place, high = _WAIT if one.kind == "turn" else _WORK  # at the end of a turn there is often the end of a client
    y = top + place + high / 2
    return (
        f'<g class="mark {one.kind}" transform="translate({x(one.start)},{y})">'
        f'<title>{escape(one.text)}</title><circle r="9" class="touch"/><path d="{SHAPES[one.kind]}"/></g>'
    )


def _legend(y: int, kinds: set[str]) -> str:
    parts, at = [], SIDE + 8
    for kind in [one for one in WORDS if one in kinds]:
        if at + 20 + 7 * len(WORDS[kind]) > WIDTH:
            at, y = SIDE + 8, y + 20
        if kind in SHAPES:
            shape = f'<path class="mark {kind}" transform="translate({at},{y})" d="{SHAPES[kind]}"/>'
        else:
            shape = f'<rect class="{kind}" x="{at - 7}" y="{y - 5}" width="14" height="10"/>'
        parts.append(f'{shape}<text class="label" x="{at + 12}" y="{y + 4}">{WORDS[kind]}</text>')
        at += 30 + 7 * len(WORDS[kind])
    return "".join(parts)


def _ticks(start: float, end: float, offset: float) -> list[tuple[float, str]]:
    """At whole times of the node's zone."""
    span = max(end - start, 1.0)
    step = next((one for one in _STEPS if span / one <= _TICKS), _STEPS[-1] * max(1, round(span / _STEPS[-1] / _TICKS)))
    at = ((start + offset) // step + 1) * step - offset
    found = []
    while at < end:
        found.append((at, _tick_text(at + offset, step)))
        at += step
    return found


def _tick_text(at: float, step: float) -> str:
    from datetime import UTC, datetime

    moment = datetime.fromtimestamp(at, UTC)
    if step >= 86400 or at % 86400 == 0:
        return f"{moment:%m-%d}"
    return f"{moment:%H:%M:%S}" if step < 60 else f"{moment:%H:%M}"
