"""Writes mpsagent/api/openapi.json from the shapes (`make openapi`); a test says when it is out of date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from mpsagent import __version__
from mpsagent.api import shapes
from mpsagent.api.http import PROBLEM

TARGET = Path(__file__).resolve().parent.parent / "mpsagent" / "api" / "openapi.json"
Json = dict[str, Any]
_REF = "#/components/schemas/{model}"
_READ: dict[str, tuple[str, type | None]] = {
    "/healthz": ("200 when everything is as it should be, otherwise 503", shapes.Healthz),
    "/v1/status": ("Everything that matters on one page", shapes.Status),
    "/v1/servers": ("MPS servers", shapes.Servers),
    "/v1/clients": ("Clients of servers, and waiting ones", shapes.Clients),
    "/v1/queue": ("Waiting users in the order of being served", shapes.Queue),
    "/v1/leases": ("Shares that were given to jobs", shapes.Leases),
    "/v1/policy": ("The policy in force", None),
    "/v1/policy/explain": ("What applies to a user, where it comes from, what would happen now", None),
    "/v1/events": ("Events after a cursor; with follow=1 a stream of lines (application/x-ndjson)", shapes.Events),
    "/v1/sessions": ("Who worked and waited when: processes, turns, pauses and faults", shapes.Sessions),
    "/v1/report": ("What users had on some days: time with the GPU, waiting, clients, faults", shapes.Report),
}
_Parameter = tuple[str, str, Json, str]
"""Name, where it is (``query!``: it has to be), schema, description."""
_TIME: Json = {"type": "string", "format": "date-time", "examples": ["2026-11-22T08:00:00Z"]}
_DAY: Json = {"type": "string", "format": "date", "examples": ["2026-11-01"]}
_FILTERS: list[_Parameter] = [
    ("user", "query", {"type": "string", "minLength": 1, "maxLength": 256}, "only of this user: name or uid"),
    ("pid", "query", {"type": "integer", "minimum": 1, "maximum": 1 << 31}, "only of this process"),
    ("kind", "query", {"type": "string"}, "only kinds that begin so: client.ended; several with commas"),
    ("since", "query", _TIME, "not before this time"),
    ("until", "query", _TIME, "before this time"),
]
_CURSOR: list[_Parameter] = [
    ("cursor", "query", {"type": "integer", "minimum": 0}, "what comes after this one; without it the newest"),
    ("limit", "query", {"type": "integer", "minimum": 1, "maximum": 1000}, "at most this many (100)"),
]
_PARAMETERS: dict[str, list[_Parameter]] = {
    "/v1/policy/explain": [
        ("user", "query!", {"type": "string", "minLength": 1, "maxLength": 256}, "name or uid"),
        ("cgroup", "query", {"type": "string", "maxLength": 4096}, "the path of a cgroup: what holds there, too"),
    ],
    "/v1/events": [
        *_CURSOR,
        ("follow", "query", {"type": "integer", "enum": [0, 1]}, "1: go on with what comes; without those below"),
        *_FILTERS,
    ],
    "/v1/sessions": [*_CURSOR, *_FILTERS],
    "/v1/report": [
        ("by", "query", {"type": "string", "enum": ["user", "group", "day", "job"]}, "of whom each row is (user)"),
        ("job", "query", {"type": "string", "maxLength": 100}, "only of the job with this name; with by=job"),
        ("first", "query", _DAY, "first day; 30 days in all"),
        ("last", "query", _DAY, "last day (today)"),
    ],
}


def document() -> Json:
    """The OpenAPI 3.1 document."""
    schemas: Json = {}
    paths: Json = {
        "/metrics": {
            "get": {
                "operationId": "get_metrics",
                "summary": "Prometheus metrics",
                "responses": {"200": {"description": "text format 0.0.4"}} | _errors(schemas),
            }
        },
        "/openapi.json": {
            "get": {
                "operationId": "get_openapi",
                "summary": "This document",
                "responses": {"200": {"description": "OpenAPI 3.1"}} | _errors(schemas),
            }
        },
    }
    for path, (summary, shape) in _READ.items():
        answers = {"200": _content("answer", _schema(shape, schemas))}
        if path == "/healthz":
            answers["503"] = _content("not healthy", _schema(shape, schemas))
        paths[path] = {
            "get": {
                "operationId": _name("get", path),
                "summary": summary,
                "parameters": [_parameter(one) for one in _PARAMETERS.get(path, [])],
                "responses": answers | _errors(schemas),
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mpsagent",
            "version": __version__,
            "description": "HTTP on the Unix socket /run/mpsagent/mpsagent.sock, for reading; orders go to the agent.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://mpsagent", "description": "by the socket; any host name will do"}],
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


def _name(method: str, path: str) -> str:
    return "_".join([method, *(part for part in path.split("/") if part not in ("", "v1", "{pid}"))])


def _parameter(one: _Parameter) -> Json:
    name, place, schema, about = one
    return {
        "name": name, "in": place.rstrip("!"), "required": place.endswith("!"), "schema": schema, "description": about,
    }  # fmt: skip


def _content(about: str, schema: Json) -> Json:
    return {"description": about, "content": {"application/json": {"schema": schema}}}


def _errors(schemas: Json) -> Json:
    schema = _schema(shapes.Error, schemas)
    about = "a problem detail (RFC 9457): what is wrong, where, and what to do"
    return {"default": {"description": about, "content": {PROBLEM: {"schema": schema}}}}


def text() -> str:
    return json.dumps(document(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
