"""The figures as a picture (SVG, PNG) and as one page of HTML that needs nothing else. matplotlib draws."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from mpsagent_bench.results import Row

# Apart in print, and for eyes that do not tell red from green: a mark for each mode, colours by Okabe and Ito.
_LINES = {"off": ("#000000", "s"), "turns": ("#0072B2", "o"), "one-server": ("#D55E00", "^"),
          "per-user": ("#009E73", "D"), "node": ("#CC79A7", "v")}  # fmt: skip


def drawn(found: Sequence[Row], units: dict[str, str], title: str, form: str) -> bytes:
    """``form``: svg or png. A field for each workload: throughput by number of processes, a line for each mode. Raises
    ImportError when matplotlib is not installed."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.figure.workload for row in found))
    wide = min(3, len(names)) or 1
    high = -(-len(names) // wide) or 1
    figure = Figure(figsize=(4.2 * wide, 3.2 * high + 0.6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    fields = figure.subplots(high, wide, squeeze=False).flat
    for field, name in zip(fields, names, strict=False):
        for mode, (colour, mark) in _LINES.items():
            points = [(r.figure.processes, r.figure.throughput) for r in found
                      if (r.figure.mode, r.figure.workload) == (mode, name) and not r.figure.problem]  # fmt: skip
            if points:
                field.plot(
                    *zip(*points, strict=True), color=colour, marker=mark, label=mode, linewidth=1.2, markersize=5
                )
        field.set(title=name, xlabel="processes", ylabel=f"{units[name]}/s", xscale="log", ylim=(0, None))
        counts = sorted({r.figure.processes for r in found})
        field.set_xticks(counts, [str(count) for count in counts])
        field.minorticks_off()
        field.grid(alpha=0.3)
    for empty in list(figure.axes)[len(names) :]:
        empty.set_visible(False)
    if names and figure.axes[0].lines:
        figure.axes[0].legend(fontsize=8)
    written = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None} if form == "svg" else {}
    figure.savefig(written, format=form, dpi=150, metadata=metadata)
    return written.getvalue()


def page(found: Sequence[Row], units: dict[str, str], title: str) -> bytes:
    """Without matplotlib the table alone."""
    cells = "MODE WORKLOAD PROCESSES USERS STEPS/S P50&nbsp;ms P99&nbsp;ms TIMES&nbsp;OFF TIMES&nbsp;ONE".split()
    body = []
    for row in found:
        one = row.figure
        values = [one.mode, one.workload, one.processes, one.users]
        if one.problem:
            body.append(_row([*values]).replace("</tr>", f'<td colspan="5">{html.escape(one.problem)}</td></tr>'))
            continue
        numbers = (one.throughput, one.p50, one.p99, row.against_off, row.against_one)
        body.append(_row([*values, *("-" if value is None else f"{value:.2f}" for value in numbers)]))
    picture = ""
    with suppress(ImportError):
        picture = "<svg" + drawn(found, units, title, "svg").decode().partition("<svg")[2]
    whole = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>'
        "body{font:15px/1.4 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem}svg{max-width:100%;"
        "height:auto;background:#fff}table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.2rem"
        " .7rem;border-bottom:1px solid #8886;text-align:right}:is(td,th):nth-child(-n+2){text-align:left}"
        "@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}}@media print{body{margin:0}}</style></head>"
        f"<body><h1>{html.escape(title)}</h1>{picture}<table><thead><tr>"
        + "".join(f'<th scope="col">{cell}</th>' for cell in cells)
        + f"</tr></thead><tbody>{''.join(body)}</tbody></table></body></html>\n"
    )
    return whole.encode()


def _row(values: Sequence[object]) -> str:
    return "<tr>" + "".join(f"<td>{html.escape(str(value))}</td>" for value in values) + "</tr>"
