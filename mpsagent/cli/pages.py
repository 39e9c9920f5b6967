"""The pages that are asked for again and again. Without click, and with late imports."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from mpsagent.cli import ask, client
from mpsagent.cli.ask import UNHEALTHY, Json


def status(path: str, as_json: bool) -> None:
    from mpsagent.cli import answer_text

    body = ask.show(path, "/v1/status", as_json, lambda body: answer_text.status(body, ask.paint(), ask.now()))
    if not body["health"]["ok"]:
        sys.exit(UNHEALTHY)


def probe(path: str, as_json: bool) -> None:
    sys.exit(ask.probe(path, as_json))


def top(path: str, as_json: bool, every: float = 2.0) -> None:
    from mpsagent.cli import top as cli_top

    cli_top.top(path, every, as_json)


def servers(path: str, as_json: bool) -> None:
    from mpsagent.cli import answer_text

    def text(body: Json) -> list[str]:
        return answer_text.servers(body["servers"], ask.now(), ask.width())

    ask.show(path, "/v1/servers", as_json, text)


def clients(path: str, as_json: bool) -> None:
    from mpsagent.cli import answer_text

    def text(body: Json) -> list[str]:
        return answer_text.clients(ask.command_lines(body["clients"]), ask.width())

    ask.show(path, "/v1/clients", as_json, text)


def queue(path: str, as_json: bool) -> None:
    from mpsagent.cli import answer_text

    def text(body: Json) -> list[str]:
        me = os.getuid()
        own = answer_text.own_place(body["queue"], me, ask.now()) if me != 0 else []
        if me != 0 and all(one["uid"] != me for one in body["queue"]):
            explained: Json = {}
            with suppress(client.Refused, client.Unreachable):
                explained = client.ask(path, f"/v1/policy/explain?user={me}")[0]
            own = answer_text.none_waits(explained)
        return [*own, *answer_text.queue(body["queue"], ask.now(), ask.width())]

    ask.show(path, "/v1/queue", as_json, text)


PAGES: dict[str, Callable[[str, bool], None]] = {
    "status": status, "probe": probe, "top": top, "servers": servers, "clients": clients, "queue": queue,
}  # fmt: skip
