"""``/metrics``: the status as Prometheus text. A page of lines needs no client library."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]
Sample = tuple[dict[str, object], float]


def text(status: Json, clients: list[Json], connections: int, dropped: int) -> str:
    """The exposition format, version 0.0.4."""
    servers: list[Json] = status["servers"]
    waiting: list[Json] = status["waiting"]
    by_user: dict[str, int] = {}
    for client in clients:
        if client["state"] != "waiting":
            key = str(client["uid"])
            by_user[key] = by_user.get(key, 0) + 1
    control = status["control"]
    families: list[tuple[str, str, str, Iterable[Sample]]] = [
        ("info", "gauge", "Version of the agent.", [({"version": status["agent"]["version"]}, 1)]),
        ("uptime_seconds", "gauge", "Age of the agent.", [({}, status["agent"]["uptime"])]),
        ("healthy", "gauge", "1 when nothing needs a person.", [({}, status["health"]["ok"])]),
        ("problems", "gauge", "Reasons for not being healthy.", [({}, len(status["health"]["problems"]))]),
        ("control_up", "gauge", "1 when the MPS control daemon runs.", [({}, bool(control and control["running"]))]),
        (
            "server_info",
            "gauge",
            "MPS servers and their status.",
            [({"pid": s["pid"], "uid": s["uid"], "status": s["status"]}, 1) for s in servers],
        ),
        ("clients", "gauge", "Connected clients by uid.", [({"uid": uid}, n) for uid, n in by_user.items()]),
        (
            "waiting_seconds",
            "gauge",
            "How long a user has been waiting for the GPU.",
            [({"uid": w["uid"]}, w["seconds"]) for w in waiting],
        ),
        ("waiting_users", "gauge", "Users waiting for the GPU.", [({}, len(waiting))]),
        (
            "limits_drifted",
            "gauge",
            "Servers whose limits are not the policy's.",
            [({}, len(status["limits"]["drifted"]))],
        ),
        ("unknown_lines_total", "counter", "Log lines no rule knows.", [({}, status["unknown_lines"])]),
        ("events_total", "counter", "Events on record.", [({}, status["history"]["newest"])]),
        ("draining", "gauge", "1 while no new user is served.", [({}, status["drain"]["draining"])]),
        ("policy_errors", "gauge", "Errors in the policy files.", [({}, len(status["policy"]["errors"]))]),
        ("api_connections", "gauge", "Connections to the socket.", [({}, connections)]),
        ("api_dropped_total", "counter", "Connections dropped for being slow.", [({}, dropped)]),
    ]
    lines: list[str] = []
    for name, kind, about, samples in families:
        lines += [f"# HELP mpsagent_{name} {about}", f"# TYPE mpsagent_{name} {kind}"]
        lines += [f"mpsagent_{name}{_labels(labels)} {_number(value)}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: dict[str, object]) -> str:
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items()) + "}" if labels else ""


def _escaped(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    """Exact: a counter must not lose its last digits."""
    return repr(float(value)) if value != int(value) else str(int(value))
