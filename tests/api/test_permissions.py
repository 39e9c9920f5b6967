"""Who may do what, proved with processes of real users: the kernel says who asks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest

from mpsagent.api.connections import Bounds
from mpsagent.cli import client
from mpsagent.linux import listen
from tests.api import permissions
from tests.api.stand_in import ADMIN, OTHER, USER, Served, serve

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.getuid() != 0, reason="needs root to become other users"),
]
_PYTHON = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
# The child needs nothing of ours: another user may not be able to read this checkout.
_ASK = """
import socket, sys
kind, path, message = sys.argv[1:4]
sock = socket.socket(socket.AF_UNIX, getattr(socket, kind)); sock.settimeout(60); sock.connect(path)
sock.sendall(message.encode())
data = sock.recv(1 << 20)
while kind == "SOCK_STREAM" and (part := sock.recv(65536)): data += part
sys.stdout.write(data.decode())
"""


def _said(uid: int, *words: str) -> bytes:
    done = subprocess.run(
        [_PYTHON, "-c", _ASK, *words], user=uid, group=uid, extra_groups=[], cwd="/", env={}, capture_output=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def ask(served: Served, uid: int, target: str) -> tuple[int, Any]:
    said = _said(uid, "SOCK_STREAM", str(served.path), f"GET {target} HTTP/1.0\r\nHost: m\r\n\r\n")
    head, _, raw = said.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(raw) if b"json" in head else raw


def order(served: Served, uid: int, name: str, /, **body: Any) -> tuple[int, Any]:
    path = str(listen.orders_path(served.path))
    said = json.loads(_said(uid, "SOCK_SEQPACKET", path, json.dumps({"order": name, **body})))
    return said["status"], said["answer"]


def test_the_table_in_the_docs_is_what_everyone_may_do() -> None:
    """Each call and each verb as root, as an administrator, as a client's owner and as a stranger."""
    assert set(permissions.VERBS) | permissions.WITHOUT_AGENT == set(permissions.verbs())
    present = permissions.PAGE.read_text(encoding="utf-8")
    assert permissions.text(present) == present, "docs/api.md: python -m tests.api.permissions"


@pytest.mark.parametrize("path", ["/v1/status", "/v1/servers", "/v1/clients", "/v1/queue", "/v1/policy", "/v1/events"])
def test_everyone_may_read(served: Served, path: str) -> None:
    """Who waits wants to know for whom."""
    assert ask(served, OTHER, path)[0] == 200


@pytest.mark.parametrize("path", ["drain", "resume", "restart-mps", "reload"])
def test_only_root_and_the_admin_group_may_act(served: Served, path: str) -> None:
    """A user is told why not, and nothing is done; an administrator's uid reaches the backend."""
    status, body = order(served, USER, path)
    assert (status, "Permission denied: alice may not" in body["detail"]) == (403, True)
    assert served.backend.asked == []
    assert order(served, ADMIN, path)[0] == 200
    assert order(served, 0, path)[0] == 200
    assert [one[-1] for one in served.backend.asked] == [ADMIN, 0]


def test_the_policy_files_are_compared_for_administrators_only(served: Served) -> None:
    """They may hold what is not in force yet, and what other users may not read."""
    assert order(served, USER, "diff")[0] == 403
    assert order(served, ADMIN, "diff")[0] == 200


def test_a_user_may_end_own_clients_and_no_others(served: Served) -> None:
    """501 is a client of USER."""
    assert order(served, OTHER, "terminate", pid=501)[0] == 403
    assert served.backend.asked == []
    assert order(served, USER, "terminate", pid=501, dry_run=True)[0] == 200
    assert order(served, ADMIN, "terminate", pid=501, now=True)[0] == 200
    assert served.backend.asked == [
        ("terminate", 501, False, True, USER),
        ("terminate", 501, True, False, ADMIN),
    ]


def test_who_waits_at_the_gate_is_not_a_client(served: Served) -> None:
    """600 has no context: there is nothing to end that its user could not end. `clients` lists it, so that is said."""
    status, body = order(served, OTHER, "terminate", pid=600)
    assert (status, body["detail"]) == (
        404,
        "process 600 waits at the gate: it is not a client yet",
    )
    assert "kill 600" in body["hint"]
    status, body = order(served, OTHER, "terminate", pid=999)
    assert (status, body["detail"]) == (404, "process 999 is not a client of MPS")


def test_a_uid_above_two_thousand_million_is_the_same_uid(served: Served) -> None:
    """The kernel's uids have no sign; in an answer one was negative."""
    status, body = order(served, 3_000_000_000, "drain")
    assert (status, "user 3000000000 may not" in body["detail"]) == (403, True)


def test_one_users_connections_do_not_lock_out_another_user_or_root() -> None:
    """One's own bound is one's own."""
    with serve(bounds=Bounds(connections_per_uid=3, header_time=30)) as served:
        held = [_hold(served, uid, 3) for uid in (USER, OTHER)]
        try:
            status, body = ask(served, USER, "/healthz")
            assert (status, f"uid {USER} has 3" in body["where"]) == (429, True)
            assert ask(served, ADMIN, "/healthz")[0] == 200
            assert ask(served, 0, "/healthz")[0] == 200
        finally:
            for one in held:
                _let_go(one)


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


_FLOOD = """
import socket, sys
print("on", flush=True)
held = []
while True:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); sock.setblocking(False)
    try:
        sock.connect(sys.argv[1]); held.append(sock)
    except OSError: sock.close()
    if len(held) > 200: held.pop(0).close()
"""


def test_users_who_order_in_a_loop_delay_none_of_roots(served: Served) -> None:
    """They connect and say nothing, so that each takes its place for as long as it may; root has a socket apart."""
    path = str(listen.orders_path(served.path))
    floods = [
        subprocess.Popen(
            [_PYTHON, "-c", _FLOOD, path], user=uid, group=uid, extra_groups=[], cwd="/", env={}, stdout=subprocess.PIPE
        )
        for uid in range(20011, 20015)
    ]
    try:
        for one in floods:
            assert one.stdout is not None
            assert one.stdout.readline() == b"on\n"
        for number in range(20):
            client.order(str(served.path), "drain", {"timeout": number}, 60)
        assert [one[1] for one in served.backend.asked] == [float(number) for number in range(20)]
        assert all(one.poll() is None for one in floods), "a flood that stops proves nothing"
    finally:
        for one in floods:
            one.kill()
            one.communicate()
