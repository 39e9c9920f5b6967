"""``mpsagent-cli top``: who uses the GPU and who waits: live on a terminal, one page into a pipe.

What only a terminal needs is imported for one.
"""

from __future__ import annotations

import os
import sys

from mpsagent.cli import ask
from mpsagent.cli.top_page import View, page


def top(path: str, every: float, as_json: bool) -> None:
    """Live on a terminal; into a pipe one page with all rows; as JSON the answers that a page is made of."""
    if as_json:
        import json

        answers = [ask.asked(path, f"/v1/{name}")[0] for name in ("status", "clients")]
        print(json.dumps({"status": answers[0], "clients": answers[1]["clients"]}))
    elif sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM") != "dumb":
        _live(path, every)
    else:
        status = ask.asked(path, "/v1/status")[0]
        clients = ask.command_lines(ask.asked(path, "/v1/clients")[0]["clients"])
        print("\n".join(line.text for line in page(status, clients, View(), ask.now(), ask.width())))


def _live(path: str, every: float) -> None:
    import curses

    from mpsagent.cli import top_screen

    try:
        top_screen.show(path, every)
    except curses.error as error:
        term = os.environ.get("TERM") or "not set"
        text = f"this terminal cannot do it ({error}); TERM is {term}; one page: mpsagent-cli top | cat"
        print(f"Error: {text}", file=sys.stderr)
        sys.exit(ask.UNHEALTHY)
