"""What all verbs of the command line share: asking the agent, showing the answer, exit statuses.

Exit status: 0 fine, 1 unhealthy, 2 usage or configuration, 3 the agent cannot be reached.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NoReturn, TextIO

import click

from mpsagent.cli import client

FINE, UNHEALTHY, USAGE, UNREACHABLE = 0, 1, 2, 3
PROBE = 1.0
"""Seconds that a probe waits for the agent: with its own start, on a busy machine too, it takes less than two."""
Json = dict[str, Any]
Text = Callable[[Json], list[str]]


class Whole(click.IntRange):
    """click calls it "integer range", also where it says what is wrong with a word."""

    name = "number"


class Number(click.FloatRange):
    """The same."""

    name = "number"


def moment(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """A time in words of people, as seconds since the epoch."""
    from mpsagent.mps.units import parse_duration

    if value is None:
        return None
    try:
        return now().timestamp() - parse_duration(value)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(value).timestamp()
    except (ValueError, OverflowError, OSError):
        hint = 'write "2d" for two days ago, 2026-11-22 or "2026-11-22 08:00"'
        raise click.BadParameter(f"{value!r} is no time: {hint}", ctx, param) from None


def iso(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def asked(path: str, target: str) -> tuple[Json, bytes]:
    return _answered(lambda: client.ask(path, target, 15.0))


def ordered(path: str, order: str, body: Any = None) -> tuple[Json, bytes]:
    """An order is the agent's own business, also while nothing can be read."""
    return _answered(lambda: client.order(path, order, body, 120.0))


def newest(path: str) -> int | None:
    """The cursor from which to watch what becomes of an order; None: nothing can be read."""
    try:
        return int(client.ask(path, "/v1/status", 15.0)[0]["history"]["newest"])
    except (client.Unreachable, client.Refused):
        return None


def _answered(ask: Callable[[], tuple[Json, bytes]]) -> tuple[Json, bytes]:
    try:
        return ask()
    except client.Unreachable as gone:
        unreachable(gone)
    except client.Refused as refused:
        refused_and_exit(refused)
    raise AssertionError  # both have exited


def show(path: str, target: str, as_json: bool, text: Text, every: float | None = None) -> Json:
    """``every``: again and again, so many seconds apart, for ever."""
    if every is not None:
        _watch(path, target, as_json, text, every)
    body, raw = asked(path, target)
    click.echo(raw.decode().rstrip("\n") if as_json else "\n".join(text(body)))
    return body


def probe(path: str, as_json: bool) -> int:
    """Say whether all is well, or that there is no answer; the exit status."""
    import json

    problems, status = ["mpsagent does not say how it is"], UNREACHABLE
    try:
        code, raw = client.request(path, "/healthz", PROBE)
        body = json.loads(raw)
        if code in (200, 503) and isinstance(body.get("problems"), list):
            problems, status = [str(one) for one in body["problems"]], FINE if body["ok"] else UNHEALTHY
        elif "detail" in body:
            problems = [str(body["detail"])]
    except client.Unreachable as gone:
        problems = [str(gone)]
    except (ValueError, AttributeError, KeyError, TypeError):
        pass
    if as_json:
        click.echo(json.dumps({"ok": status == FINE, "problems": problems}))
    else:
        from mpsagent.cli.wording import safe

        click.echo("\n".join(safe(one, 400) for one in problems) or "healthy")
    return status


def _watch(path: str, target: str, as_json: bool, text: Text, every: float) -> NoReturn:
    """On a terminal each answer takes the place of the one before. An agent that is away is said, and asked again."""
    on_screen = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    try:
        while True:
            head = [f"{now():%H:%M:%S}, every {every:g} s until Ctrl-C", ""]
            try:
                body, raw = client.ask(path, target)
            except (client.Unreachable, client.Refused) as error:
                click.echo(_frame([*head, f"mpsagent-cli: {error}"], on_screen), nl=False, err=as_json)
            else:
                page = raw.decode() if as_json else _frame([*head, *text(body)], on_screen)
                click.echo(page, nl=False)
            time.sleep(every)
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(FINE)


def _frame(lines: list[str], on_screen: bool) -> str:
    """Over the one before, without a flicker; what does not fit on the screen is counted."""
    from shutil import get_terminal_size

    if not on_screen:
        return "\n".join([*lines, "", ""])
    most = max(2, get_terminal_size().lines - 1)
    if len(lines) > most:
        lines = [*lines[: most - 1], f"… {len(lines) - most + 1} more lines"]
    return "\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J"


def act(path: str, order: str, body: Any, as_json: bool) -> None:
    from mpsagent.cli import order_text
    from mpsagent.cli.progress import Progress

    with Progress("waiting for mpsagent"):
        answer, raw = ordered(path, order, body)
    if as_json:
        click.echo(raw.decode().rstrip("\n"))
    else:
        for line in order_text.answered(answer, now()):
            say(line)
    if answer.get("ok") is False:
        sys.exit(UNHEALTHY)


def unreachable(gone: client.Unreachable) -> None:
    click.echo(f"mpsagent-cli: {gone}", err=True)
    click.echo("  see: systemctl status mpsagent; start it: systemctl enable --now mpsagent", err=True)
    sys.exit(UNREACHABLE)


def refused_and_exit(refused: client.Refused) -> None:
    complain(refused.error or {"detail": f"status {refused.status}"})
    sys.exit(UNREACHABLE if refused.status in (429, 503) else UNHEALTHY if refused.status >= 500 else USAGE)


_PLAIN = {"pid", "user", "policy", "server", "lease", "drain", "timeout", "instance", "after", "cursor"}
"""Places of a mistake that its words name anyhow."""


def complain(error: Json) -> None:
    from mpsagent.cli.wording import safe

    where = f" ({safe(error['where'])})" if error.get("where") and str(error["where"]) not in _PLAIN else ""
    say(f"mpsagent-cli: {safe(error.get('detail', 'refused'), 400)}{where}", err=True)
    if error.get("hint"):
        say(f"  {safe(error['hint'], 400)}", err=True)


def say(line: str, indent: str = "  ", *, err: bool = False) -> None:
    """As wide as the terminal is; whole into a pipe, where an editor or grep reads it."""
    from textwrap import wrap

    most = width(sys.stderr if err else sys.stdout)
    parts = wrap(line, most, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    click.echo("\n".join(parts) if len(line) > most else line, err=err)


def span(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Seconds of an option like "10m"."""
    from mpsagent.mps.units import parse_duration

    try:
        return None if value is None else parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


MOST_COMMAND = 160
"""Letters of a command line: `python -c` has a whole program, and a pipe cuts nothing."""


def command_lines(found: list[Json]) -> list[Json]:
    """Clients with their whole command line instead of the name that the agent knows, as far as who asks may see it."""
    return [{**one, "command": _command_line(one) or one["command"]} for one in found]


def _command_line(one: Json) -> str:
    """Of the process with this pid, if it is still that user's with that name, and of our pid namespace. The program
    without its directory, which would leave no room for the rest."""
    try:
        place = f"/proc/{one['pid']}"
        with open(f"{place}/comm", "rb", 0) as name, open(f"{place}/cmdline", "rb", 0) as words:
            if os.fstat(name.fileno()).st_uid != one["uid"] or name.read(64).decode().strip() != one["command"]:
                return ""
            program, _, rest = words.read(4096).decode(errors="replace").partition("\0")
            text = f"{program.rpartition('/')[2]} {rest.replace(chr(0), ' ')}".strip()
            return text if len(text) <= MOST_COMMAND else text[:MOST_COMMAND] + "…"
    except (OSError, UnicodeDecodeError):
        return ""


def now() -> datetime:
    return datetime.now().astimezone()


def width(file: TextIO | None = None) -> int:
    """Columns of the terminal that standard output (or ``file``) is; a pipe takes more."""
    if not (file or sys.stdout).isatty():
        return 1000
    from shutil import get_terminal_size

    return get_terminal_size((160, 24)).columns


def paint() -> Callable[[str, str], str]:
    from mpsagent.cli import answers

    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return answers.painted if coloured else answers.plain
