"""What only a service has: a restart under a stream of requests, and a start beside a busy daemon, in a booted systemd.

Needs root and namespaces, like tests/system; elsewhere nothing is measured, and the reason is said.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from benchmarks.figure import Figure
from tests.booted.machine import Machine, booted, why_not
from tests.booted.package import build
from tests.booted.service import ALICE, CLIENT, api, enable, install

LOG = "/var/log/nvidia-mps/control.log"
CLIENTS = 48


@contextmanager
def service() -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(dir="/tmp") as place, booted(Path(place) / "machine") as node:
        install(node, build())
        enable(node)
        yield node


def as_a_service(quick: bool) -> list[Figure]:
    reason = why_not()
    if reason:
        print(f"  a systemd cannot be booted here: {reason}", file=sys.stderr)
        return []
    with service() as node:
        return [*_restarts(node, 2 if quick else 5), _start(node, 20_000_000 if quick else 100_000_000)]


def _restarts(node: Machine, count: int) -> list[Figure]:
    """Requests of four threads during `systemctl restart`: how long the slowest waits, and how many are refused."""
    end, took, refused = threading.Event(), list[float](), list[str]()

    def ask() -> None:
        while not end.is_set():
            since = time.monotonic()
            try:
                api(node, "/v1/status", again=0)
                took.append(time.monotonic() - since)
            except Exception as error:  # whatever it is, somebody's request was not answered
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


def _start(node: Machine, size: int) -> Figure:
    """`systemctl start`, which returns at READY: a daemon to adopt, clients at work, a long log."""
    small = min(_started(node) for _ in range(3))
    clients = [node.start(CLIENT, "sleep", "600", user=ALICE) for _ in range(CLIENTS)]
    deadline = time.monotonic() + 60
    while len(api(node, "/v1/clients")["clients"]) < CLIENTS and time.monotonic() < deadline:
        time.sleep(0.2)
    pid = node.path("/tmp/nvidia-mps/nvidia-cuda-mps-control.pid").read_text().strip()
    head = f"[{datetime.now():%Y-%m-%d %H:%M:%S}.000 Control {pid:>5}] "
    poll = ("Accepting connection...", "NEW UI", "Cmd:get_server_list", "4242", "UI closed")
    block = "".join(f"{head}{line}\n" for line in poll * 1000).encode()
    with node.path(LOG).open("ab") as log:
        for _ in range(size // len(block) + 1):
            log.write(block)
    big = min(_started(node) for _ in range(3))
    seen = len(api(node, "/v1/clients")["clients"])
    for client in clients:
        client.kill()
        client.wait(10)
    what = f"systemctl start to READY, {CLIENTS} clients, {size // 1_000_000} MB of control.log (polled), best of 3"
    against = f"without them: {small:.2f} s, {big / small:.1f} times; clients found: {seen}"
    return Figure(what, f"{big:.2f} s", "under 1 s", big < 1, against)


def _started(node: Machine) -> float:
    node.systemctl("stop", "mpsagent.service")
    since = time.monotonic()
    node.systemctl("start", "mpsagent.service")
    return time.monotonic() - since
