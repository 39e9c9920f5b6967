"""The page of ``mpsagent-cli replay``: the story of a pair of logs, and what mpsagent would have done. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from mpsagent.cli.tables import WIDE, table
from mpsagent.cli.wording import limits, many, safe
from mpsagent.mps.units import duration_text

Json = dict[str, Any]
UNNAMED = (
    "This log does not name all clients (a driver before 580, or a control daemon in a container). Who was let in is\n"
    "known, and not for how long; so it cannot be told either what mpsagent would have done."
)


def page(body: Json, now: datetime, width: int = WIDE) -> list[str]:
    """Times with their date and milliseconds: a log may be of any day."""

    def at(text: object) -> str:
        if not text:
            return "-"
        return datetime.fromisoformat(str(text)).astimezone(now.tzinfo).isoformat(" ", "milliseconds")[:23]

    counts: dict[str, int] = {}
    for one in body["clients"]:
        counts[one["outcome"]] = counts.get(one["outcome"], 0) + 1
    summary = ", ".join(f"{number} {safe(outcome)}" for outcome, number in sorted(counts.items())) or "none"
    longest = max((one["wait_seconds"] for one in body["clients"]), default=0.0)
    lines = [
        f"{many(len(body['servers']), 'server')}; clients: {summary}; longest wait {duration_text(longest)}; "
        f"{many(len(body['faults']), 'fault')}, {len(body['refused'])} refused, "
        f"{many(body['unknown_lines'], 'unknown line')}",
        "",
    ]
    rows = [
        [
            str(one["pid"]),
            "?" if one["uid"] is None else str(one["uid"]),
            at(one["started"]),
            at(one["exited"]) + (" (forced)" if one["forced"] else ""),
            limits(one["limits"]),
            str(one["faults"]),
        ]
        for one in body["servers"]
    ]
    lines += [*table(["SERVER", "UID", "STARTED", "EXITED", "LIMITS", "FAULTS"], rows, width), ""]
    rows = [
        [
            "?" if one["pid"] is None else str(one["pid"]),
            "?" if one["uid"] is None else str(one["uid"]),
            "-" if one["server"] is None else str(one["server"]),
            at(one["queued"] or one["connected"]),
            duration_text(one["wait_seconds"]),
            safe(one["outcome"]),
        ]
        for one in body["clients"]
    ]
    lines += table(["CLIENT", "UID", "SERVER", "ARRIVED", "WAITED", "OUTCOME"], rows, width)
    if not body["clients_named"]:
        lines += ["", UNNAMED]
    if body.get("would") is not None:
        rows = [[at(one["at"]), safe(one["sentence"], 400)] for one in body["would"]]
        lines += ["", *table(["AT", "MPSAGENT WOULD HAVE DONE THIS"], rows, width, below=True)]
    return lines
