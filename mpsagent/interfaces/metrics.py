"""``/metrics``: the status as Prometheus text. A page of lines needs no client library."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]
Sample = tuple[dict[str, object], float]


def text(status: Json, connections: int, dropped: int, turned_away: int) -> str:
    """The exposition format, version 0.0.4."""
    servers: list[Json] = status["servers"]
    waiting: list[Json] = status["waiting"]
    control, gate, turn, limits = status["control"], status["gate"], status["turn"], status["limits"]
    families: list[tuple[str, str, str, Iterable[Sample]]] = [
        ("info", "gauge", "Version of the agent.", [({"version": status["agent"]["version"]}, 1)]),
        ("uptime_seconds", "gauge", "Age of the agent.", [({}, status["agent"]["uptime"])]),
        ("healthy", "gauge", "1 when nothing needs a person.", [({}, status["health"]["ok"])]),
        ("problems", "gauge", "Reasons for not being healthy.", [({}, len(status["health"]["problems"]))]),
        ("not_guaranteed", "gauge", "Promises that do not hold now.", [({}, len(status["not_guaranteed"]))]),
        ("control_up", "gauge", "1 when the MPS control daemon runs.", [({}, bool(control and control["running"]))]),
        ("gate_up", "gauge", "1 when the gate is connected.", [({}, gate["connected"])]),
        (
            "gate_handshake_known",
            "gauge",
            "0 when the control daemon's greeting is not known.",
            [({}, gate["handshake"] is not False)],
        ),
        (
            "server_info",
            "gauge",
            "MPS servers and their status.",
            [({"pid": s["pid"], "uid": s["uid"], "status": s["status"]}, 1) for s in servers],
        ),
        (
            "clients",
            "gauge",
            "Processes that passed the gate, by uid.",
            [({"uid": uid}, n) for uid, n in status["clients_by_uid"].items()],
        ),
        ("turn_info", "gauge", "Whose turn it is.", [] if turn is None else [({"uid": turn["uid"]}, 1)]),
        (
            "waiting_seconds",
            "gauge",
            "How long a user has been waiting for the GPU, and why.",
            [({"uid": w["uid"], "reason": w["reason"]}, w["seconds"]) for w in waiting],
        ),
        ("waiting_users", "gauge", "Users waiting for the GPU.", [({}, status["waiting_users"])]),
        ("waiting_processes", "gauge", "Processes held at the gate.", [({}, status["waiting_processes"])]),
        (
            "limits_drifted",
            "gauge",
            "Servers that started with other limits than their first client's.",
            [({}, len(limits["drifted"]))],
        ),
        ("limits_unconfirmed", "gauge", "Users whose limits MPS did not confirm.", [({}, len(limits["unconfirmed"]))]),
        ("clients_fail_safe", "gauge", "Clients with the fail-safe limits.", [({}, len(limits["fail_safe"]))]),
        ("unknown_lines_total", "counter", "Log lines no rule knows.", [({}, status["unknown_lines"])]),
        (
            "foreign_lines_total",
            "counter",
            "Log lines about processes that did not pass the gate.",
            [({}, status["foreign_lines"])],
        ),
        ("events_total", "counter", "Events on record.", [({}, status["history"]["newest"])]),
        ("draining", "gauge", "1 while nothing new is let in.", [({}, status["drain"]["draining"])]),
        ("policy_errors", "gauge", "Errors in the policy files.", [({}, len(status["policy"]["errors"]))]),
        ("api_connections", "gauge", "Connections to the socket.", [({}, connections)]),
        ("api_dropped_total", "counter", "Connections dropped for being slow.", [({}, dropped)]),
        ("api_refused_total", "counter", "Connections refused for being too many.", [({}, turned_away)]),
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
