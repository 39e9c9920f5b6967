"""The node in the cluster: a condition with the health of mpsagent, and an event when it changes."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mpsagent_kubernetes.node_agent import Health

CONDITION = "MPSProblem"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DEADLINE = 10.0
LONGEST = 900
"""Letters of a message; an event takes 1,024."""
Send = Callable[[str, str, str, dict[str, Any]], None]
"""Method, path, type of the content, body. Raises OSError."""


def condition(health: Health, now: float, since: float) -> dict[str, Any]:
    """``status`` True: there is a problem."""
    status = {True: "False", False: "True", None: "Unknown"}[health.well]
    return {
        "type": CONDITION,
        "status": status,
        "reason": {True: "MPSHealthy", False: "MPSUnhealthy", None: "AgentUnreachable"}[health.well],
        "message": health.words[:LONGEST] or "mpsagent is healthy",
        "lastHeartbeatTime": _time(now),
        "lastTransitionTime": _time(since),
    }


def event(node: str, said: dict[str, Any], now: float) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{node}.mps-{int(now * 1e6):x}", "namespace": "default"},
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node},
        "reason": said["reason"],
        "message": said["message"],
        "type": "Normal" if said["status"] == "False" else "Warning",
        "source": {"component": "mpsagent", "host": node},
        "firstTimestamp": _time(now),
        "lastTimestamp": _time(now),
        "count": 1,
    }


class Node:
    """The node's condition and events. A report that fails is sent again the next time."""

    def __init__(self, name: str, send: Send) -> None:
        self._name, self._send = name, send
        self._said: dict[str, Any] | None = None
        self._since = 0.0
        self._untold: dict[str, Any] | None = None

    def say(self, health: Health, now: float) -> None:
        """Report the condition, and a change of it as an event. A healthy start is not an event. Raises OSError."""
        said = condition(health, now, self._since)
        before = None if self._said is None else self._said["status"]
        if said["status"] != before:
            self._since = now
            said["lastTransitionTime"] = _time(now)
            if before is not None or said["status"] != "False":
                self._untold = event(self._name, said, now)
        self._said = said
        patch = {"status": {"conditions": [said]}}
        self._send("PATCH", f"/api/v1/nodes/{self._name}/status", "application/strategic-merge-patch+json", patch)
        if self._untold is not None:
            self._send("POST", "/api/v1/namespaces/default/events", "application/json", self._untold)
            self._untold = None


def in_cluster() -> Send | None:
    """To the API server, as this pod's account; None where there is none."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (ACCOUNT / "token").exists():
        return None
    return lambda *words: send(host, int(port), ACCOUNT, *words)


def send(host: str, port: int, account: Path, method: str, path: str, kind: str, body: dict[str, Any]) -> None:
    """Raises OSError. The token is read each time, because it is changed every hour."""
    context = ssl.create_default_context(cafile=str(account / "ca.crt"))
    connection = http.client.HTTPSConnection(host, port, timeout=DEADLINE, context=context)
    try:
        headers = {"Authorization": f"Bearer {(account / 'token').read_text().strip()}", "Content-Type": kind}
        connection.request(method, path, json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read(4096).decode("utf-8", "replace")
    except http.client.HTTPException as error:
        raise OSError(f"{host}: {error!r}") from None
    finally:
        connection.close()
    if answer.status >= 300:
        raise OSError(f"{method} {path}: {answer.status} {text[:300]}")


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
