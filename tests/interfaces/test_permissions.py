"""Who may do what, proved with processes of real users: the kernel says who asks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from mpsagent.interfaces.peers import Bounds
from tests.interfaces import permissions
from tests.interfaces.stand_in import ADMIN, OTHER, USER, Served, StandIn, serve

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.getuid() != 0, reason="needs root to become other users"),
]
_PYTHON = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
# The child needs nothing of ours: another user may not be able to read this checkout.
_ASK = """
import socket, sys
path, method, target, body = sys.argv[1:5]
sock = socket.socket(socket.AF_UNIX); sock.settimeout(60); sock.connect(path)
head = f"{method} {target} HTTP/1.0\\r\\nHost: m\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
sock.sendall((head + body).encode())
data = b""
while part := sock.recv(65536): data += part
sys.stdout.write(data.decode())
"""


@pytest.fixture
def served() -> Iterator[Served]:
    with serve() as one:
        yield one


def ask(served: Served, uid: int, method: str, target: str, body: str = "") -> tuple[int, Any]:
    done = subprocess.run(
        [_PYTHON, "-c", _ASK, str(served.path), method, target, body],
        user=uid, group=uid, extra_groups=[], cwd="/", env={}, capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    head, _, raw = done.stdout.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(raw) if b"json" in head else raw


def test_the_table_in_the_docs_is_what_everyone_may_do() -> None:
    """Each call and each verb as root, as an administrator, as a client's owner and as a stranger."""
    assert set(permissions.VERBS) | permissions.WITHOUT_AGENT == set(permissions.verbs())
    present = permissions.PAGE.read_text(encoding="utf-8")
    assert permissions.text(present) == present, "docs/api.md: python -m tests.interfaces.permissions"


@pytest.mark.parametrize("path", ["/v1/status", "/v1/servers", "/v1/clients", "/v1/queue", "/v1/policy", "/v1/events"])
def test_everyone_may_read(served: Served, path: str) -> None:
    """Who waits wants to know for whom."""
    assert ask(served, OTHER, "GET", path)[0] == 200


@pytest.mark.parametrize("path", ["drain", "resume", "restart", "reload"])
def test_only_root_and_the_admin_group_may_act(served: Served, path: str) -> None:
    """A user is told why not, and nothing is done; an administrator's uid reaches the backend."""
    status, body = ask(served, USER, "POST", f"/v1/{path}")
    assert (status, f"uid {USER} may not" in body["detail"]) == (403, True)
    assert served.backend.asked == []
    assert ask(served, ADMIN, "POST", f"/v1/{path}")[0] == 200
    assert ask(served, 0, "POST", f"/v1/{path}")[0] == 200
    assert [one[-1] for one in served.backend.asked] == [ADMIN, 0]


def test_the_policy_files_are_compared_for_administrators_only(served: Served) -> None:
    """They may hold what is not in force yet, and what other users may not read."""
    assert ask(served, USER, "GET", "/v1/policy/diff")[0] == 403
    assert ask(served, ADMIN, "GET", "/v1/policy/diff")[0] == 200


def test_a_user_may_end_own_clients_and_no_others(served: Served) -> None:
    """501 is a client of USER."""
    assert ask(served, OTHER, "POST", "/v1/clients/501/terminate")[0] == 403
    assert served.backend.asked == []
    assert ask(served, USER, "POST", "/v1/clients/501/terminate", '{"dry_run":true}')[0] == 200
    assert ask(served, ADMIN, "POST", "/v1/clients/501/terminate", '{"now":true}')[0] == 200
    assert served.backend.asked == [
        ("terminate", 501, False, True, USER),
        ("terminate", 501, True, False, ADMIN),
    ]


def test_who_waits_at_the_gate_is_not_a_client(served: Served) -> None:
    """600 has no context: there is nothing to end that its user could not end. `clients` lists it, so that is said."""
    status, body = ask(served, OTHER, "POST", "/v1/clients/600/terminate")
    assert (status, body["detail"]) == (404, "process 600 waits at the gate: it is no client yet, and nothing runs")
    assert "kill 600" in body["hint"]
    status, body = ask(served, OTHER, "POST", "/v1/clients/999/terminate")
    assert (status, body["detail"]) == (404, "process 999 is not a client of MPS")


def test_a_uid_above_two_thousand_million_is_the_same_uid(served: Served) -> None:
    """The kernel's uids have no sign; in an answer one was negative."""
    status, body = ask(served, 3_000_000_000, "POST", "/v1/drain")
    assert (status, "uid 3000000000 may not" in body["detail"]) == (403, True)


def test_one_users_connections_do_not_lock_out_another_user_or_root() -> None:
    """Who has the most places gives one up for who has fewer; one's own bound is one's own."""
    with serve(bounds=Bounds(connections=6, connections_per_uid=3, header_time=30)) as served:
        held = [_hold(served, uid, 3) for uid in (USER, OTHER)]
        try:
            status, body = ask(served, USER, "GET", "/healthz")
            assert (status, f"uid {USER} has 3" in body["where"]) == (429, True)
            assert ask(served, ADMIN, "GET", "/healthz")[0] == 200
            assert ask(served, 0, "GET", "/healthz")[0] == 200
        finally:
            for one in held:
                _let_go(one)


def test_many_users_with_few_places_each_are_refused_at_the_bound() -> None:
    """As many as there are places, each with one: no user has more than the next one, so the next one is told."""
    with serve(bounds=Bounds(connections=3, header_time=30)) as served:
        held = [_hold(served, USER + 100 + number, 1) for number in range(3)]
        try:
            assert ask(served, USER, "GET", "/healthz")[0] == 503
            assert ask(served, 0, "GET", "/healthz")[0] == 200
            _let_go(held.pop())
            assert _soon(served, USER) == 200
        finally:
            for one in held:
                _let_go(one)


class Starved(StandIn):
    """Each answer takes long, and no work: as where other programs have the processor."""

    def _waits(self, answer: Any) -> Any:
        time.sleep(0.8)
        return answer

    def status(self) -> Any:
        return self._waits(super().status())

    def servers(self) -> Any:
        yield from self._waits(super().servers())

    def policy(self) -> Any:
        return self._waits(super().policy())


@pytest.mark.parametrize("path", ["/v1/status", "/metrics", "/v1/servers", "/v1/policy"])
def test_a_busy_machine_puts_no_user_into_debt(path: str) -> None:
    """Charged by the clock, a user who had asked once was turned away for the next 16 s: "closed the connection"."""
    with serve(Starved()) as served:
        assert [ask(served, USER, "GET", path)[0] for _ in range(2)] == [200, 200]


_HOLD = """
import socket, sys
held = []
for _ in range(int(sys.argv[2])):
    sock = socket.socket(socket.AF_UNIX); sock.settimeout(60); sock.connect(sys.argv[1])
    sock.sendall(b"GET /v1/events?follow=1 HTTP/1.1\\r\\nHost: m\\r\\n\\r\\n")
    assert sock.recv(100).startswith(b"HTTP/1.1 200"); held.append(sock)
print("held", flush=True)
sys.stdin.read()
"""


def _hold(served: Served, uid: int, count: int) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [_PYTHON, "-c", _HOLD, str(served.path), str(count)],
        user=uid, group=uid, extra_groups=[], cwd="/", env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def _let_go(child: subprocess.Popen[str]) -> None:
    with suppress(subprocess.TimeoutExpired):
        child.communicate("", timeout=60)


def _soon(served: Served, uid: int) -> int:
    status = 0
    for _ in range(50):
        status = ask(served, uid, "GET", "/healthz")[0]
        if status == 200:
            break
    return status
