"""The API beside a real agent, asked by its own OpenAPI document, rightly and wrongly; and the agent's orders: no
fault, no growth."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.agent.stage import A, Stage
from tests.api.openapi_fuzz import Fuzz

REQUESTS = int(os.environ.get("MPSAGENT_FUZZ_REQUESTS", "3000"))
SEED = int(os.environ.get("MPSAGENT_FUZZ_SEED", "1"))
LEAK = 100
"""Bytes of each request that may stay, beside what is bounded."""
BOUNDED = 16 << 20
"""What the history's and Python's own stores may take."""


def memory(pid: int) -> int:
    """Resident bytes."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(3600 if REQUESTS > 10_000 else 600)
def test_no_request_is_a_fault_of_ours_and_nothing_stays(stage: Stage) -> None:
    """While a client works and another waits, so that the answers have something in them."""
    agent = stage.with_agent("[limits]\nactive_threads = '50%'\n")
    client = stage.client(A, "sleep", 3600)
    client.working()
    fuzz, api = Fuzz(stage.place / "agent.sock", SEED), stage.api(agent)
    fuzz.run(REQUESTS // 10)
    files, before = len(os.listdir(f"/proc/{api}/fd")), memory(api)
    fuzz.run(REQUESTS - REQUESTS // 10)
    grown = memory(api) - before
    print(f"{sum(fuzz.statuses.values())} requests, {dict(fuzz.statuses)}, grown by {grown} bytes, {fuzz.called}")
    assert grown < BOUNDED + LEAK * REQUESTS
    assert len(os.listdir(f"/proc/{api}/fd")) < files + 20
    assert fuzz.statuses[200] > REQUESTS / 5
    assert {400, 404, 405} <= set(fuzz.statuses)
    assert "fault in mpsagent" not in agent.log()
    assert agent.api.ask("/v1/status")[0] == 200


_VALUES = [
    None, True, False, 0, -1, 1 << 70, 10**400, -(10**4000), 1e308, 1e-320, -0.0, float("inf"), float("nan"), "", "x",
    "\0", "\ud800", "é\n\u202e", "9" * 400 + "s", "9" * 300 + "G", "1e400s", "2h", "1G", "1e999%", "２h", "infs",
    "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "/user.slice", "/" + "a" * 5000, "../..", 7, 50,
]  # fmt: skip
_BYTES = [
    b"[" * 16000, b'{"a":' * 3000, b'"' * 9, b'{"threads":' + b"9" * 16000 + b"}", b'{"threads":1e' + b"9" * 900 + b"}",
    b"\xef\xbb\xbf{}",
    "{}".encode("utf-16"), "{}".encode("utf-32"), b'{"uid":1,"uid":{}}', b"-", b"NaN", b"\xed\xa0\x80",
    b'"\\ud800"', b'{"threads":' + b"[" * 900 + b"]" * 900 + b"}", b"\0" * 16000,
]  # fmt: skip
_NAMES = ["sms", "clients", "0", "1", "-1", "9" * 50, "", "\ud800", "²", "x"]
_LEASE = {"uid": 20001, "active_threads": "20%", "until": "2h", "memory_limit": "1G"}
_KEYS = [
    "now",
    "dry_run",
    "timeout",
    "instance",
    "force",
    "uid",
    "cgroup",
    "pid",
    "active_threads",
    "memory_limit",
    "until",
    "name",
]
_ORDERS = ["drain", "resume", "restart-mps", "reload", "terminate", "delete-lease", "extend-turn", "diff", "nothing"]


def _value(draw: random.Random, depth: int = 0) -> Any:
    if depth > 4 or draw.random() < 0.75:
        return draw.choice(_VALUES)
    if draw.random() < 0.5:
        return [_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {draw.choice(_NAMES): _value(draw, depth + 1) for _ in range(draw.randrange(4))}


def _message(draw: random.Random, order: str) -> bytes:
    if draw.random() < 0.15:
        return draw.choice([*_BYTES, draw.randbytes(draw.randrange(300))])
    some = {key: _value(draw) for key in draw.sample(_KEYS, draw.randrange(1, 6))}
    some["order"] = order
    if order == "lease":
        some = {"order": order} | _LEASE | {draw.choice([*_LEASE, "cgroup", "pid", "name"]): _value(draw)}
    raw = bytearray(json.dumps(some).encode())
    if draw.random() < 0.3:
        for _ in range(3):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
    return bytes(raw[:16000])


def test_no_order_of_roots_is_a_fault_of_ours(stage: Stage) -> None:
    """What is accepted can be shown and ended."""
    agent = stage.with_agent("[limits]\nactive_threads = '50%'\n")
    draw = random.Random(SEED)
    found: dict[int, int] = {}
    leases: list[int] = []
    for number in range(REQUESTS // 2):
        orders = _ORDERS if number % 25 == 0 else [one for one in _ORDERS if one not in ("drain", "restart-mps")]
        order = draw.choice([*["lease"] * 6, *orders])
        message = _message(draw, order)
        status, got = agent.api.say(message)
        found[status] = found.get(status, 0) + 1
        assert status < 500, f"{message[:300]!r}: {got}"
        if status == 200 and "in_force" in got:
            leases.append(got["id"])
            assert got["id"] in [one["id"] for one in agent.api.get("/v1/leases")["leases"]]
            assert agent.api.order("delete-lease", number=got["id"])[0] == 200
    assert len(leases) > 10, found
    assert found[400] > REQUESTS / 4, found
    assert "fault in mpsagent" not in agent.log()
    assert "Traceback" not in agent.log()
