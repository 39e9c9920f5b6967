"""What comes again and again in a log is there once, however often it came: the back-off, a repeated question. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

LONGEST_REPEAT = 14  # lines of a block that may repeat: two commands with their answers
TRIED = re.compile(r"^(Try shutting down server (\S+), backoff is) (enabled|disabled)$")
AGAIN = re.compile(r"^(Control will try shutting down server (\S+) again in at most) (\d+)ms$")


def backed_off(lines: Sequence[str]) -> list[str]:
    """Of the back-off only its beginning, that it doubles, and its end."""
    kept: list[str] = []
    last: dict[str, int] = {}
    told: set[str] = set()
    position = 0
    while position < len(lines):
        prefix, _, text = lines[position].partition(": ")
        tried = TRIED.match(text)
        if tried and position + 2 < len(lines):
            busy = lines[position + 1].partition(": ")[2]
            again = AGAIN.match(lines[position + 2].partition(": ")[2])
            if again and busy.endswith("Server will not shutdown."):
                doubled = int(again[3]) == 2 * last.get(tried[2], 0)
                last[tried[2]] = int(again[3])
                position += 3
                if not doubled:
                    kept += [f"{prefix}: {text}", f"{prefix}: Server {tried[2]} is busy", f"{prefix}: {again[0]}"]
                    told.discard(tried[2])
                elif tried[2] not in told:
                    told.add(tried[2])
                    kept.append(f"{prefix}: (back-off of {tried[2]} goes on, {tried[3]}, doubling)")
                continue
        kept.append(lines[position])
        position += 1
    return _shutdown_refusals(kept)


def _shutdown_refusals(lines: Sequence[str]) -> list[str]:
    """server.log's side of the back-off, once per server and stretch."""
    kept: list[str] = []
    told: set[str] = set()
    for number, line in enumerate(lines):
        prefix, _, text = line.partition(": ")
        following = lines[number + 1].partition(": ")[2] if number + 1 < len(lines) else ""
        refusal = "Server was unable to shutdown due to"
        if text.startswith(refusal):
            if prefix not in told:
                kept.append(f"{prefix}: {refusal} active clients")
            told.add(prefix)
        elif text == "Server has been notified to shutdown" and following.startswith(refusal) and prefix in told:
            continue
        else:
            kept.append(line)
    return kept


def squeeze(lines: Sequence[str]) -> list[str]:
    """Questions that repeat at once, and connections that were given up in a row, are there once."""
    result = list(lines)
    for size in range(1, LONGEST_REPEAT + 1):
        position = 0
        while position + 2 * size <= len(result):
            block = result[position : position + size]
            asked = any("Cmd:" in line or "Unable to accept" in line for line in block)
            if asked and block == result[position + size : position + 2 * size]:
                del result[position : position + size]
            else:
                position += 1
    return result
