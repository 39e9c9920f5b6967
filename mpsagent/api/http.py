"""What of HTTP is the same for all requests: JSON and problem details (RFC 9457), pages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from aiohttp import hdrs, web

from mpsagent.agent.problem import Problem
from mpsagent.api.query import number

PROBLEM = "application/problem+json"
MOST = 1000
"""Entries of a page."""


def line(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


def json_answer(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=line(body), status=status, content_type="application/json")


def problem_answer(problem: Problem) -> web.Response:
    return web.Response(body=line(problem.body()), status=problem.status, content_type=PROBLEM)


def aiohttp_problem(request: web.Request, error: web.HTTPException) -> web.Response:
    """aiohttp's own errors (no such path, wrong method, body too long) in our form."""
    hint = {
        404: "GET /openapi.json lists what there is",
        405: "HTTP is for reading; orders go to the agent's own sockets: mpsagent-cli, or docs/api.md",
    }.get(error.status, "")
    answer = problem_answer(Problem(error.status, error.reason, request.path[:200], hint))
    if "Allow" in error.headers:
        answer.headers["Allow"] = error.headers["Allow"]
    return answer


async def unannounced(request: web.Request, answer: web.StreamResponse) -> None:
    """aiohttp says its version and Python's in each answer, which clients do not need."""
    answer.headers.pop(hdrs.SERVER, None)


class Page:
    """At most ``limit`` of the items after the one that ``after`` names, in their own order. When they have been read,
    ``next`` is the ``after`` of the next page, None when there is none. Raises Problem(410) when that item is not there
    any more: then what was before it and after it cannot be told apart."""

    def __init__(self, items: Iterable[Mapping[str, Any]], key: str, asked: dict[str, str]) -> None:
        self._items, self._key, self._after = items, key, asked.get("after")
        self._limit = number(asked, "limit", 1, MOST)
        self.next: str | None = None

    def _name(self, item: Mapping[str, Any]) -> str:
        """A user, and a process too, may be in the lists of several instances."""
        return f"{item[self._key]}@{item['instance']}" if "instance" in item else str(item[self._key])

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        begun, left = self._after is None, self._limit
        last: str | None = None
        for item in self._items:
            if not begun:
                begun = self._name(item) == self._after
            elif left == 0:
                self.next = last
                return
            else:
                last = self._name(item)
                left = None if left is None else left - 1
                yield item
        if not begun:
            what = f"{str(self._after)[:60]!r} is not in the list any more"
            raise Problem(410, what, "after", "the list has changed: read it from its beginning")
