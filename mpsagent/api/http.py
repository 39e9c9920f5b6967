"""What of HTTP is the same for all requests: JSON and problem details (RFC 9457)."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import hdrs, web

from mpsagent.snapshot.problem import Problem

PROBLEM = "application/problem+json"


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
