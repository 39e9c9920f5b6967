"""Values of options: numbers, times and spans as people write them."""

from __future__ import annotations

import pwd
from datetime import datetime

import click

from mpsagent.cli.ask import NOT_FOUND, now
from mpsagent.mps.units import parse_duration

json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class Whole(click.IntRange):
    """click calls it "integer range", also where it says what is wrong with a word."""

    name = "number"


class Number(click.FloatRange):
    """The same."""

    name = "number"


class NotFound(click.ClickException):
    """A name that does not exist."""

    exit_code = NOT_FOUND


class UserArgument(click.ParamType[int]):
    """A uid, or the name of a user of this machine."""

    name = "user"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        if text.isascii() and text.isdecimal():
            return int(text)
        try:
            return pwd.getpwnam(text).pw_uid
        except (KeyError, ValueError):
            raise NotFound(f"there is no user {text!r}; see getent passwd") from None


def moment(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """A time in words of people, as seconds since the epoch."""
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


def span(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Seconds of an option like "10m"."""
    try:
        return None if value is None else parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
