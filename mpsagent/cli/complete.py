"""What a shell offers on TAB: clients, servers, users, instances and leases that there are now.

Without an agent, or when it takes too long, nothing is offered and nothing said: the line is still being typed. What is
offered stands in a shell's command line, so it is plain words; what is told beside it is safe for a terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

PATIENCE = 1.0
"""Seconds for the agent's answer."""
MOST = 200
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}", re.ASCII)
_Said = tuple[object, str]
"""A word, and what it is."""


def clients(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Processes that passed the gate: who can be ended."""
    rows = (one for one in _rows(ctx, "clients") if one.get("state") != "waiting")
    return _offered(((one.get("pid"), _process(one)) for one in rows), incomplete)


def processes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Also who waits."""
    return _offered(((one.get("pid"), _process(one)) for one in _rows(ctx, "clients")), incomplete)


def users(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Who has to do with MPS now. The name service is not asked for all that it knows."""
    return _offered(((one.get("user") or one.get("uid"), _user(one)) for one in _rows(ctx, "clients")), incomplete)


def instances(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _offered(((one.get("name"), "an instance of MPS") for one in _rows(ctx, "instances", "status")), incomplete)


def servers(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _offered(((one.get("pid"), _server(one)) for one in _rows(ctx, "servers")), incomplete)


def leases(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """By number."""
    return _offered(((one.get("id"), _lease(one)) for one in _rows(ctx, "leases")), incomplete)


def _process(one: Any) -> str:
    return f"{_user(one)} {one.get('state')}: {one.get('command') or 'no name'}"


def _user(one: Any) -> str:
    return f"user {one.get('uid')}" if one.get("user") is None else f"{one['user']} ({one.get('uid')})"


def _server(one: Any) -> str:
    return f"{'all users' if one.get('shared') else _user(one)} {one.get('status')}: {one.get('clients')} clients"


def _lease(one: Any) -> str:
    return str(one.get("name") or one.get("cgroup") or one.get("user") or f"process {one.get('pid')}")


def _rows(ctx: click.Context, key: str, of: str | None = None) -> Iterator[Any]:
    from mpsagent.cli import client

    path = ctx.find_root().params.get("path") or client.DEFAULT_SOCKET
    try:
        answer, _ = client.ask(path, f"/v1/{of or key}", timeout=PATIENCE)
    except (client.Unreachable, client.Refused):
        return
    found = answer.get(key) if isinstance(answer, dict) else None
    yield from (one for one in found or () if isinstance(one, dict))


def _offered(found: Iterable[_Said], incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from mpsagent.cli.wording import safe

    said: dict[str, str] = {}
    for value, about in found:
        word = str(value)
        if word.startswith(incomplete) and _PLAIN.fullmatch(word) and len(said) < MOST:
            said.setdefault(word, safe(about, 60).replace(",", ";"))  # click's script for fish divides at commas
    return [CompletionItem(word, help=about) for word, about in said.items()]
