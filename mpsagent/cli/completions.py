"""What completion offers for users, processes, instances and kinds of events: what the agent knows at this moment."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import click

from mpsagent.cli import client

Complete = Callable[[click.Context, click.Parameter, str], list[str]]
PATIENCE = 2.0
"""Seconds for an answer, while a person waits for TAB."""


def of(page: str, rows: str, *fields: str) -> Complete:
    """Return the completion with one field of each row of a page, the first that the row has."""

    def complete(ctx: click.Context, _: click.Parameter, begun: str) -> list[str]:
        path, found = str(ctx.find_root().params["path"]), set[str]()
        with suppress(client.RequestRefused, client.Unreachable):
            for row in client.ask(path, page, PATIENCE)[0][rows]:
                found.add(str(next((row[field] for field in fields if row.get(field) is not None), "")))
        return sorted(one for one in found if one and one.startswith(begun))

    return complete


users = of("/v1/clients", "clients", "user", "uid")
pids = of("/v1/clients", "clients", "pid")
instances = of("/v1/status", "instances", "name")
leases = of("/v1/leases", "leases", "id")
jobs = of("/v1/leases", "leases", "name")


def kinds(ctx: click.Context, param: click.Parameter, begun: str) -> list[str]:
    from mpsagent.core.sentences import KINDS

    return sorted(kind for kind in KINDS if kind.startswith(begun))
