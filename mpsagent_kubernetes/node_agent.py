"""The plugin's requests to the agent on its node."""

from __future__ import annotations

import json
from typing import NamedTuple

from mpsagent.cli import client
from mpsagent_kubernetes.shares import Json

DEADLINE = 5.0


class Health(NamedTuple):
    """The agent's health. ``well``: None without an answer. ``words``: the problem."""

    well: bool | None
    words: str = ""


class NodeAgent:
    """The agent. All methods except ``health`` raise ``client.Unreachable`` and ``client.Refused``."""

    def __init__(self, socket: str) -> None:
        self._socket = socket

    def health(self) -> Health:
        try:
            status, raw = client.request(self._socket, "/healthz", DEADLINE)
            body = json.loads(raw)
            if status in (200, 503) and isinstance(body.get("ok"), bool):
                return Health(body["ok"], "; ".join(map(str, body.get("problems", ()))))
        except client.Unreachable as error:
            return Health(None, str(error))
        except (ValueError, AttributeError):
            pass
        return Health(None, "mpsagent does not answer")

    def leases(self) -> list[Json]:
        answer, _ = client.ask(self._socket, "/v1/leases", DEADLINE)
        return list(answer["leases"])

    def give(self, lease: Json) -> None:
        client.order(self._socket, "lease", lease, DEADLINE)

    def end(self, number: int) -> None:
        try:
            client.order(self._socket, "delete-lease", {"number": number}, DEADLINE)
        except client.RequestRefused as refused:
            if refused.status != 404:  # it was over just now
                raise
