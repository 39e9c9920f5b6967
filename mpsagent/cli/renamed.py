"""New names of verbs and options from before version 1.0. An old name is wrong usage whose message has the new one."""

from __future__ import annotations

import re
from typing import Any

import click

VERBS = {"restart": "restart-mps", "client": "terminate", "lease end": "lease delete"}
_SHARE = ", with a percent sign: '25%'"  # a number of percent before, and of multiprocessors today
OPTIONS = {
    "--deadline": ("--timeout", ""),
    "--wait-at-most": ("--timeout", ""),
    "--threads": ("--active-threads", _SHARE),
    "--sms": ("--active-threads", ""),
    "--memory": ("--memory-limit", ""),
    "--total-threads": ("--total-active-threads", _SHARE),
    "--total-memory": ("--total-memory-limit", ""),
}
"""The new name of each option, and how its value differs."""


class Verbs(click.Group):
    """A group whose message about an old verb or option, also one of a group in it, has the new name."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            if error.ctx is not None and (new := _new_name(error.ctx, error.message)):
                raise click.UsageError(f"{error.message} {new}", error.ctx) from None
            raise


def _new_name(ctx: click.Context, message: str) -> str:
    """Return a sentence with the new name of an unknown verb or option, or nothing."""
    found = re.match(r"No such (command|option)[: ']*(-*\w[\w-]*)", message)  # the same in each version of click
    if found is None:
        return ""
    if found[1] == "command":
        new, value = VERBS.get(" ".join([*ctx.command_path.split()[1:], found[2]]), ""), ""
    else:
        new, value = OPTIONS.get(found[2], ("", ""))
        new = new if any(new in one.opts for one in ctx.command.params) else ""
    return f"It is called {new!r} now{value}." if new else ""
