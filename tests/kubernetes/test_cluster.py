"""The node's condition and events, up to a server that checks them."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from mpsagent_kubernetes.cluster import Node, send
from mpsagent_kubernetes.node_agent import Health

BROKEN = Health(False, "control daemon 815 hangs")


def test_a_condition_each_time_and_an_event_when_it_changes() -> None:
    sent: list[tuple[str, str, str, dict[str, Any]]] = []
    node = Node("gpu-1", lambda *words: sent.append(words))
    for at, health in ((100.0, Health(True)), (130.0, Health(True)), (160.0, BROKEN), (190.0, BROKEN),
                       (220.0, Health(None, "no answer")), (250.0, Health(True))):  # fmt: skip
        node.say(health, at)
    patches = [body["status"]["conditions"][0] for method, _, _, body in sent if method == "PATCH"]
    assert [(one["type"], one["status"], one["reason"], one["lastTransitionTime"][-3:-1]) for one in patches] == [
        ("MPSProblem", "False", "MPSHealthy", "40"),
        ("MPSProblem", "False", "MPSHealthy", "40"),
        ("MPSProblem", "True", "MPSUnhealthy", "40"),
        ("MPSProblem", "True", "MPSUnhealthy", "40"),
        ("MPSProblem", "Unknown", "AgentUnreachable", "40"),
        ("MPSProblem", "False", "MPSHealthy", "10"),
    ]
    events = [body for method, _, _, body in sent if method == "POST"]
    assert [(one["type"], one["reason"], one["message"]) for one in events] == [
        ("Warning", "MPSUnhealthy", "control daemon 815 hangs"),
        ("Warning", "AgentUnreachable", "no answer"),
        ("Normal", "MPSHealthy", "mpsagent is healthy"),
    ]
    assert len({one["metadata"]["name"] for one in events}) == 3


def test_an_event_that_could_not_be_sent_is_sent_with_the_next_condition() -> None:
    sent: list[str] = []

    def refuse(*_: Any) -> None:
        raise OSError("no route to host")

    node = Node("gpu-1", refuse)
    with pytest.raises(OSError, match="no route"):
        node.say(BROKEN, 100)
    node._send = lambda method, *_: sent.append(method)
    node.say(BROKEN, 130)
    node.say(BROKEN, 160)
    assert sent == ["PATCH", "POST", "PATCH"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_what_the_api_server_is_sent(tmp_path: Path) -> None:
    """Over TLS, with the account's token, checked against the cluster's certificate; a refusal is an error in words."""
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=cluster", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "ca.crt")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    (tmp_path / "token").write_text("secret\n")
    heard: list[tuple[str, str, str, str, Any]] = []

    class Server(BaseHTTPRequestHandler):
        def do_PATCH(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            heard.append((self.command, self.path, self.headers["Authorization"], self.headers["Content-Type"], body))
            self.send_response(200 if len(heard) == 1 else 403)
            self.end_headers()
            self.wfile.write(b"forbidden by RBAC")

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Server)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca.crt", tmp_path / "key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        words = ("127.0.0.1", server.server_port, tmp_path, "PATCH", "/api/v1/nodes/gpu-1/status", "application/x")
        send(*words, {"status": 1})
        assert heard == [("PATCH", "/api/v1/nodes/gpu-1/status", "Bearer secret", "application/x", {"status": 1})]
        with pytest.raises(OSError, match=r"403 forbidden by RBAC"):
            send(*words, {})
    finally:
        server.shutdown()
        server.server_close()
