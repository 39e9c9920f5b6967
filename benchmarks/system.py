"""What only a service has: restarts under a stream of requests, in a booted systemd.

Needs root and namespaces, like tests/system; elsewhere nothing is measured, and the reason is said.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.figure import Figure
from tests.booted.machine import Machine, booted, why_not
from tests.booted.package import build
from tests.booted.service import api, enable, install


@contextmanager
def service(policy: str = "") -> Iterator[Machine]:
    """Booted, installed, enabled. ``policy``: what it has besides the users' limits."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place, booted(Path(place) / "machine") as node:
        install(node, build())
        if policy:
            node.write("/etc/mpsagent/policy.d/20-bench.toml", policy)
        enable(node)
        yield node


def possible() -> bool:
    if reason := why_not():
        print(f"  a systemd cannot be booted here: {reason}", file=sys.stderr)
    return not reason


def as_a_service(quick: bool) -> list[Figure]:
    if not possible():
        return []
    with service() as node:
        return _restarts(node, 2 if quick else 5)


def _restarts(node: Machine, count: int) -> list[Figure]:
    """Requests of four threads during `systemctl restart`: how long the slowest waits, and how many are refused."""
    end, took, refused = threading.Event(), list[float](), list[str]()

    def ask() -> None:
        while not end.is_set():
            since = time.monotonic()
            try:
                api(node, "/v1/status", again=0)
                took.append(time.monotonic() - since)
            except Exception as error:  # whatever it is, a request was not answered
                refused.append(repr(error))
            time.sleep(0.02)

    asking = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    for thread in asking:
        thread.start()
    time.sleep(1)
    usual = sorted(took)[len(took) // 2]
    for _ in range(count):
        node.systemctl("restart", "mpsagent.service")
        time.sleep(0.3)
    end.set()
    for thread in asking:
        thread.join(60)
    return [
        Figure(f"API: longest wait in {count} restarts of the agent", f"{max(took):.2f} s", "at most 1.5 s",
               max(took) <= 1.5, f"without a restart: {usual * 1000:.0f} ms; {len(took)} requests"),
        Figure(f"API: requests not answered in {count} restarts", str(len(refused)), "none", not refused,
               refused[0][:80] if refused else ""),
    ]  # fmt: skip
