"""Requests by the OpenAPI document: as it allows them, and wrong in each way that a schema can be broken.

Every answer is held against the document: its status, its form, and the schema of its body.
"""

from __future__ import annotations

import json
import random
import socket
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jsonschema import Draft202012Validator

Json = Any
_JUNK = [
    None,
    True,
    False,
    0,
    -1,
    1 << 70,
    1e308,
    -0.0,
    "",
    "x",
    "10m",
    "0s",
    "\0",
    "é\n",
    "'; --",
    "9" * 400,
    [],
    {},
    [[]],
]
_KEYS = ["k", "é", "x" * 129, "", '"quoted"', "a b"]


class Fuzz:
    def __init__(self, path: Path, seed: int) -> None:
        self._path = path
        self._random = random.Random(seed)
        self._sock: socket.socket | None = None
        self._rest = b""
        self.document: Json = json.loads(self._ask(b"GET", "/openapi.json", b"", {})[2])
        self._operations = [(p, m) for p, found in self.document["paths"].items() for m in found]
        self._valid: dict[int, bool] = {}
        self.statuses: Counter[int] = Counter()
        self.called: Counter[str] = Counter()

    def run(self, count: int) -> None:
        for _ in range(count):
            self.one()

    def one(self) -> None:
        draw = self._random
        path, method = draw.choice(self._operations)
        operation = self.document["paths"][path][method]
        right = draw.random() < 0.5
        target, headers = path, {}
        query = []
        for parameter in operation.get("parameters", []):
            name, place = parameter["name"], parameter["in"]
            if not parameter["required"] and draw.random() < 0.4:
                continue
            value = self._value(parameter["schema"]) if right or draw.random() < 0.5 else draw.choice(_JUNK)
            if name == "follow" and str(value).lower() in ("", "1", "true"):
                value = 0  # a stream has no end to wait for
            if place == "path":
                target = target.replace("{%s}" % name, quote(str(value), safe=""))
            elif place == "query":
                query.append((name, str(value)))
            else:
                headers[name] = draw.choice(_KEYS) if not right else str(value)
        if not right and draw.random() < 0.2:
            query.append((draw.choice(["x", "limit", "%00", "cursor"]), draw.choice(["", "1", "é", "x" * 3000])))
        body = b"" if draw.random() < 0.9 else b"{}"
        if not right and draw.random() < 0.05:
            method = draw.choice(["put", "delete", "head", "options", "get", "post", "patch", "x"])
        if query:
            target += "?" + urlencode(query)
        status, head, got = self._ask(method.upper().encode(), target, body, headers)
        self.statuses[status] += 1
        self.called[f"{method} {path}"] += 1
        self._check(path, method, status, head, got, f"{method} {target} {headers} {body[:200]!r}")

    def _value(self, schema: Json) -> Json:
        draw = self._random
        kind = schema["type"] if isinstance(schema["type"], str) else draw.choice(schema["type"])
        if "enum" in schema:
            return draw.choice(schema["enum"])
        if kind == "integer":
            least, most = schema.get("minimum", 0), schema.get("maximum", 1 << 31)
            return draw.choice([least, most, draw.randint(least, most), draw.randint(least, min(most, least + 1000))])
        if kind == "number":
            return draw.choice([schema.get("minimum", 0), schema.get("maximum", 100), draw.uniform(0, 100)])
        if kind == "boolean":
            return draw.random() < 0.5
        if kind == "null":
            return None
        if kind == "object":
            return {draw.choice(["sms", "0", "x"]): draw.choice([1, 30, "1G"])}
        if "examples" in schema:
            return draw.choice([one for one in schema["examples"] if isinstance(one, str)])
        length = draw.choice([schema.get("minLength", 1), 8, schema.get("maxLength", 40)])
        return "".join(draw.choice("abcdefghijklmnop0123456789-_.") for _ in range(length))

    # --- the answer

    def _check(self, path: str, method: str, status: int, head: bytes, got: bytes, what: str) -> None:
        answers = self.document["paths"][path].get(method, {}).get("responses", {})
        known = answers.get(str(status))
        if method == "head":
            assert got == b"", what
            return
        assert status < 500 or known is not None, f"{what}: {status} {got[:500]!r}"
        assert b"\r\nserver:" not in head.lower(), what
        if status == 304:
            assert got == b"", what
            return
        described = known or self.document["paths"]["/v1/status"]["get"]["responses"]["default"]
        for form, content in described.get("content", {}).items():
            assert form.encode() in head, f"{what}: {head!r}"
            self._fits(content["schema"], got, what)

    def _fits(self, schema: Json, got: bytes, what: str) -> None:
        """Equal bodies are looked at once."""
        key = hash((json.dumps(schema), got))
        if key in self._valid:
            return
        whole = {**schema, "components": self.document["components"]}
        wrong = [one.message for one in Draft202012Validator(whole).iter_errors(json.loads(got))]
        assert not wrong, f"{what}: {wrong[:3]} in {got[:1000]!r}"
        if len(self._valid) > 10_000:
            self._valid.clear()
        self._valid[key] = True

    # --- the socket

    def _ask(self, method: bytes, target: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes, bytes]:
        lines = [f"{name}: {value}".encode() for name, value in headers.items()]
        head = b"\r\n".join([method + b" " + target.encode() + b" HTTP/1.1", b"Host: m", *lines])
        request = head + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        for attempt in (1, 2):
            try:
                return self._exchange(request, method)
            except ConnectionError:  # an idle connection, or one after an error, may have been closed
                self._close()
                if attempt == 2:
                    raise
        raise AssertionError

    def _exchange(self, request: bytes, method: bytes) -> tuple[int, bytes, bytes]:
        if self._sock is None:
            self._sock = socket.socket(socket.AF_UNIX)
            self._sock.settimeout(60)
            self._sock.connect(str(self._path))
            self._rest = b""
        self._sock.sendall(request)
        while b"\r\n\r\n" not in self._rest:
            self._more()
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        status = int(head.split()[1])
        length = 0 if method == b"HEAD" or status == 304 else int(fields.get(b"content-length", b"0"))
        while len(self._rest) < length:
            self._more()
        body, self._rest = self._rest[:length], self._rest[length:]
        if fields.get(b"connection") == b"close":
            self._close()
        return status, head, body

    def _more(self) -> None:
        assert self._sock is not None
        part = self._sock.recv(262144)
        if not part:
            raise ConnectionResetError("closed")
        self._rest += part

    def _close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
