"""Whose work a restart would cost, on the command line: said, and asked for."""

from __future__ import annotations

import json
import sys

import click

from mpsagent.cli import ask, wording
from mpsagent.cli.ask import USAGE


def may_lose(path: str, instance: str | None, *, dry_run: bool, as_json: bool) -> bool:
    """Whether to go on. Ends the program where no person can be asked, or the answer is no."""
    found = ask.asked(path, "/v1/clients")[0]["clients"]
    working = [one for one in found if one["state"] != "waiting" and instance in (None, one.get("instance"))]
    users = sorted({wording.user(one) for one in working})
    what = f"{wording.many(len(working), 'client')} of {', '.join(users)}" if working else "no client"
    if dry_run:
        click.echo(json.dumps({"clients": working}) if as_json else f"{what} would lose work")
        return False
    if working and not sys.stdin.isatty():
        click.echo(f"mpsagent-cli: {what} would lose work; say --yes, or use drain first", err=True)
        sys.exit(USAGE)
    if working and not click.confirm(f"{what} will lose work. Restart MPS?"):
        sys.exit(USAGE)
    return True
