"""The pages that are asked for again and again. Without click, and with late imports. Their words are for `--help`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from mpsagent.cli import ask, client
from mpsagent.cli.ask import UNHEALTHY, Json


def status(path: str, as_json: bool) -> None:
    """Show the users of the GPU, waiting users and problems."""
    from mpsagent.cli import answer_text

    body = ask.show(path, "/v1/status", as_json, lambda body: answer_text.status(body, ask.paint(), ask.now()))
    if not body["health"]["ok"]:
        sys.exit(UNHEALTHY)


def probe(path: str, as_json: bool) -> None:
    """Check within 2 seconds whether MPS and mpsagent are healthy.

    It answers even if mpsagent hangs. For health checks, prologs and readiness.
    Exit status: 0 healthy, 1 something needs attention, 3 mpsagent does not answer, 4 healthy and draining.
    """
    sys.exit(ask.probe(path, as_json))


def top(path: str, as_json: bool, every: float = 2.0) -> None:
    """Live on a terminal; into a pipe one page with all rows; as JSON the answers that a page is made of."""
    if as_json:
        import json

        answers = [ask.asked(path, f"/v1/{name}")[0] for name in ("status", "clients")]
        print(json.dumps({"status": answers[0], "clients": answers[1]["clients"]}))
    elif sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM") != "dumb":
        from mpsagent.cli import top_screen

        top_screen.show(path, every)
    else:
        from mpsagent.cli.top_page import TopView, page

        status = ask.asked(path, "/v1/status")[0]
        clients = ask.command_lines(ask.asked(path, "/v1/clients")[0]["clients"])
        print("\n".join(line.text for line in page(status, clients, TopView(), ask.now(), ask.width())))


def servers(path: str, as_json: bool) -> None:
    """List MPS servers, their users and limits."""
    from mpsagent.cli.answer_text import servers

    ask.show(path, "/v1/servers", as_json, lambda body: servers(body["servers"], ask.now(), ask.width()))


def clients(path: str, as_json: bool) -> None:
    """List processes that use MPS or wait for it."""
    from mpsagent.cli.answer_text import clients

    ask.show(path, "/v1/clients", as_json, lambda body: clients(ask.command_lines(body["clients"]), ask.width()))


def queue(path: str, as_json: bool) -> None:
    """List waiting users in order, with reason and latest time.

    The policy guarantees the latest time. For a user other than root the first line is that user's
    position.
    """
    from mpsagent.cli import answer_text

    def text(body: Json) -> list[str]:
        me = os.getuid()
        if not body["queue"] and not client.ask(path, "/v1/status")[0]["gate"]["synced"]:
            what = "the queue is not known, because the gate is not connected; waiting users keep their places"
            return [f"{what} (mpsagent-cli status)"]
        own = answer_text.own_place(body["queue"], me, ask.now()) if me != 0 else []
        if me != 0 and all(one["uid"] != me for one in body["queue"]):
            explained: Json = {}
            with suppress(client.RequestRefused, client.Unreachable):
                explained = client.ask(path, f"/v1/policy/explain?user={me}")[0]
            own = answer_text.none_waits(explained)
        return [*own, *answer_text.queue(body["queue"], ask.now(), ask.width())]

    ask.show(path, "/v1/queue", as_json, text)


PAGES: dict[str, Callable[[str, bool], None]] = {
    "status": status, "probe": probe, "top": top, "servers": servers, "clients": clients, "queue": queue,
}  # fmt: skip
