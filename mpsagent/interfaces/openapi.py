"""Writes openapi.json from the shapes: ``python -m mpsagent.interfaces.openapi > mpsagent/interfaces/openapi.json``.

The result is kept in the package (a test compares), so that the agent need not build it while it has work to do.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic import TypeAdapter

from mpsagent import __version__
from mpsagent.interfaces import shapes

Json = dict[str, Any]
_REF = "#/components/schemas/{model}"
_READ: dict[str, tuple[str, type | None]] = {
    "/healthz": ("200 when everything is as it should be, otherwise 503", shapes.Healthz),
    "/v1/status": ("Everything that matters on one page", shapes.Status),
    "/v1/servers": ("MPS servers", shapes.Servers),
    "/v1/clients": ("Clients of servers, and waiting ones", shapes.Clients),
    "/v1/queue": ("Waiting users in the order of being served", shapes.Queue),
    "/v1/policy": ("The policy in force", None),
    "/v1/policy/explain": ("What applies to a user, where it comes from, what would happen now", None),
    "/v1/events": ("Events after a cursor; with follow=1 a stream of lines (application/x-ndjson)", shapes.Events),
}
_PARAMETERS: dict[str, list[tuple[str, str, str]]] = {
    "/v1/policy/explain": [("user", "string", "name or uid")],
    "/v1/events": [
        ("cursor", "integer", "events after this one; without it the newest"),
        ("limit", "integer", "at most this many (1 to 1000; 100)"),
        ("follow", "boolean", "go on with what comes"),
    ],
}
_ACT: dict[str, tuple[str, Json]] = {
    "/v1/clients/{pid}/terminate": (
        "End one client by the ladder (root, admin group, or the client's own user)",
        {"now": {"type": "boolean"}, "dry_run": {"type": "boolean"}},
    ),
    "/v1/drain": (
        "Serve no new user; after the timeout end what runs",
        {"timeout": {"type": ["number", "string", "null"], "examples": ["10m", 600]}},
    ),
    "/v1/resume": ("End a drain", {}),
    "/v1/restart": ("Start the control daemon again, also out of the failed state", {}),
    "/v1/reload": ("Read the policy again", {}),
}


def document() -> Json:
    """The OpenAPI 3.1 document."""
    schemas: Json = {}
    paths: Json = {
        "/metrics": {
            "get": {"summary": "Prometheus metrics", "responses": {"200": {"description": "text format 0.0.4"}}}
        },
        "/openapi.json": {"get": {"summary": "This document", "responses": {"200": {"description": "OpenAPI 3.1"}}}},
    }
    for path, (summary, shape) in _READ.items():
        parameters = [
            {"name": n, "in": "query", "required": n == "user", "schema": {"type": kind}, "description": about}
            for n, kind, about in _PARAMETERS.get(path, [])
        ]
        answers = {"200": _content("answer", _schema(shape, schemas))}
        if path == "/healthz":
            answers["503"] = _content("not healthy", _schema(shape, schemas))
        paths[path] = {"get": {"summary": summary, "parameters": parameters, "responses": answers | _errors(schemas)}}
    for path, (summary, body) in _ACT.items():
        schema = {"type": "object", "properties": body, "additionalProperties": False}
        operation: Json = {
            "summary": summary,
            "requestBody": {"required": False, "content": {"application/json": {"schema": schema}}},
            "responses": {"200": _content("done, or begun", {"type": "object"})} | _errors(schemas),
        }
        if "{pid}" in path:
            operation["parameters"] = [{"name": "pid", "in": "path", "required": True, "schema": {"type": "integer"}}]
        paths[path] = {"post": operation}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mpsagent",
            "version": __version__,
            "description": "HTTP on the Unix socket /run/mpsagent/mpsagent.sock. Who calls is what the kernel says.",
        },
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": dict(sorted(schemas.items()))},
    }


def _schema(shape: type | None, schemas: Json) -> Json:
    if shape is None:
        return {"type": "object"}
    schema = TypeAdapter(shape).json_schema(ref_template=_REF, mode="serialization")
    schemas.update(schema.pop("$defs", {}))
    schemas[shape.__name__] = schema
    return {"$ref": _REF.format(model=shape.__name__)}


def _plain(summary: str, about: str) -> Json:
    return {"summary": summary, "responses": {"200": {"description": about}}}


def _content(about: str, schema: Json) -> Json:
    return {"description": about, "content": {"application/json": {"schema": schema}}}


def _errors(schemas: Json) -> Json:
    return {"default": _content("what is wrong, where, and what to do", _schema(shapes.Error, schemas))}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(document(), indent=1) + "\n")
