"""The plugin's loop: what the agent says of its health is in the node's condition at once, and an event when it
changes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("grpc", reason="no grpcio (pip install 'mpsagent[kubernetes]')")

from mpsagent.cli.client import Unreachable
from mpsagent_kubernetes import main
from mpsagent_kubernetes.cluster import Node
from mpsagent_kubernetes.node_agent import Health

SEEN = [Health(True), Health(True), Health(False, "control daemon 815 hangs"), Health(None, "no answer"), Health(True)]


class Looks(threading.Event):
    """Asked to stop when every health has been seen; nobody waits in between."""

    def __init__(self) -> None:
        super().__init__()
        self.left = list(SEEN)

    def health(self) -> Health:
        return self.left.pop(0)

    def wait(self, timeout: float | None = None) -> bool:
        if not self.left:
            self.set()
        return self.is_set()


class Plugin:
    def tell(self, *, healthy: bool) -> None:
        pass

    def settle(self) -> None:
        raise Unreachable("the agent does not answer")


class Kubelet:
    def look(self) -> None:
        raise OSError("no kubelet.sock")


def test_health_becomes_condition_and_events_also_without_a_kubelet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "CONDITION", float("inf"))  # said when it changes, however slow this machine is
    sent: list[tuple[str, str]] = []

    def send(method: str, path: str, kind: str, body: dict[str, Any]) -> None:
        said = body["status"]["conditions"][0] if method == "PATCH" else body
        sent.append((method, said["reason"]))

    looks: Any = Looks()
    plugin: Any = Plugin()
    kubelet: Any = Kubelet()
    main._run(looks, looks, plugin, kubelet, Node("gpu-1", send), patience=30)
    assert sent == [
        ("PATCH", "MPSHealthy"),
        ("PATCH", "MPSUnhealthy"),
        ("POST", "MPSUnhealthy"),
        ("PATCH", "AgentUnreachable"),
        ("POST", "AgentUnreachable"),
        ("PATCH", "MPSHealthy"),
        ("POST", "MPSHealthy"),
    ]
