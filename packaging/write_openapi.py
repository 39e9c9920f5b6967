"""Writes mpsagent/api/openapi.json from the shapes (`make openapi`); a test says when it is out of date."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from mpsagent import __version__
from mpsagent.api import shapes
from mpsagent.api.calls import ROUTES
from mpsagent.api.http import PROBLEM
from mpsagent.api.query import PARAMETERS

TARGET = Path(__file__).resolve().parent.parent / "mpsagent" / "api" / "openapi.json"
Json = dict[str, Any]
_REF = "#/components/schemas/{model}"


def document() -> Json:
    """Return the OpenAPI 3.1 document. A schema has the name of its shape without ``Shape``."""
    schemas: Json = {}
    paths: Json = {}
    for route in ROUTES:
        if isinstance(route.shape, str):
            answers: Json = {"200": {"description": route.shape}}
        else:
            answers = {"200": _content("answer", _schema(route.shape, schemas))}
        if route.path == "/healthz":
            answers["503"] = _content("not healthy", _schema(route.shape, schemas))
        paths[route.path] = {
            "get": {
                "operationId": _name("get", route.path),
                "summary": route.about,
                "parameters": list(map(_parameter, route.parameters)),
                "responses": answers | _errors(schemas),
            }
        }
    found: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "mpsagent",
            "version": __version__,
            "description": "HTTP on the Unix socket /run/mpsagent/mpsagent.sock, for reading; orders go to the agent.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://mpsagent", "description": "by the socket; any host name will do"}],
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": dict(sorted(schemas.items(), key=lambda one: one[0].removesuffix("Shape")))},
    }
    renamed: Json = json.loads(re.sub(r"\b([A-Z]\w*)Shape\b", r"\1", json.dumps(found)))
    return renamed


def _schema(shape: type | None, schemas: Json) -> Json:
    if shape is None:
        return {"type": "object"}
    schema = TypeAdapter(shape).json_schema(ref_template=_REF, mode="serialization")
    schemas.update(schema.pop("$defs", {}))
    schemas[shape.__name__] = schema
    return {"$ref": _REF.format(model=shape.__name__)}


def _name(method: str, path: str) -> str:
    return "_".join([method, *(part for part in path.removesuffix(".json").split("/") if part not in ("", "v1"))])


def _parameter(name: str) -> Json:
    one = PARAMETERS[name.rstrip("!")]
    return {
        "name": name.rstrip("!"), "in": "query", "required": name.endswith("!"), "schema": one.schema,
        "description": one.about,
    }  # fmt: skip


def _content(about: str, schema: Json) -> Json:
    return {"description": about, "content": {"application/json": {"schema": schema}}}


def _errors(schemas: Json) -> Json:
    schema = _schema(shapes.ErrorShape, schemas)
    about = "a problem detail (RFC 9457): what is wrong, where, and what to do"
    return {"default": {"description": about, "content": {PROBLEM: {"schema": schema}}}}


def text() -> str:
    return json.dumps(document(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
