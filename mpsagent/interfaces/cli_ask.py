"""What all verbs of the command line share: asking the agent, showing the answer, exit statuses.

Exit status: 0 fine, 1 unhealthy or drifted, 2 usage or configuration, 3 the agent cannot be reached.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import click

from mpsagent.interfaces import client

FINE, UNHEALTHY, USAGE, UNREACHABLE = 0, 1, 2, 3
Json = dict[str, Any]


def asked(path: str, method: str, target: str, body: Any = None, timeout: float = 15.0) -> tuple[Json, bytes]:
    try:
        return client.ask(path, method, target, body, timeout)
    except client.Unreachable as gone:
        unreachable(gone)
    except client.Refused as refused:
        refused_and_exit(refused)
    raise AssertionError  # both have exited


def show(path: str, target: str, as_json: bool, text: Callable[[Json], list[str]]) -> Json:
    body, raw = asked(path, "GET", target)
    click.echo(raw.decode().rstrip("\n") if as_json else "\n".join(text(body)))
    return body


def act(path: str, target: str, body: Any, as_json: bool) -> None:
    from mpsagent.interfaces import cli_text

    answer, raw = asked(path, "POST", target, body, timeout=120.0)
    click.echo(raw.decode().rstrip("\n") if as_json else "\n".join(cli_text.tree(answer)))
    if answer.get("ok") is False:
        sys.exit(UNHEALTHY)


def unreachable(gone: client.Unreachable) -> None:
    click.echo(f"mpsagent-cli: {gone}", err=True)
    click.echo("  see: systemctl status mpsagent", err=True)
    sys.exit(UNREACHABLE)


def refused_and_exit(refused: client.Refused) -> None:
    complain(refused.error or {"what": f"status {refused.status}"})
    sys.exit(UNREACHABLE if refused.status in (429, 503) else UNHEALTHY if refused.status >= 500 else USAGE)


def complain(error: Json) -> None:
    from mpsagent.interfaces.cli_text import safe

    where = f" ({safe(error['where'])})" if error.get("where") else ""
    click.echo(f"mpsagent-cli: {safe(error.get('what', 'refused'), 400)}{where}", err=True)
    if error.get("hint"):
        click.echo(f"  {safe(error['hint'], 400)}", err=True)


def now() -> datetime:
    return datetime.now().astimezone()


def width() -> int:
    """Columns of the terminal; a pipe takes more."""
    from shutil import get_terminal_size

    return get_terminal_size((160, 24)).columns if sys.stdout.isatty() else 1000


def paint() -> Callable[[str, str], str]:
    from mpsagent.interfaces import cli_text

    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return cli_text.painted if coloured else cli_text.plain
