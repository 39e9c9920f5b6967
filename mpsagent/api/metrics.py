"""``/metrics``: what there is now, from the status, and what has happened since the agent's start, from transitions.

With several instances of MPS, what is an instance's has its name as the label ``mps_instance`` (``instance`` is
Prometheus's own). Users are called by their names, or their uids where these have none.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mpsagent.core import transitions as tr
from mpsagent.core.model import Client

disable_created_metrics()  # type: ignore[no-untyped-call]  # a gauge beside each counter that no one asks for
Json = dict[str, Any]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
INSTANCE = "mps_instance"
MOST_USERS = 500
"""Users with series of their own. A user may come with thousands of uids: all others are ``other``."""
WAITS = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 1800, 3600, 7200, 14400, 43200, 86400)
MOMENTS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
MOST_ENDING = 1000
MOST_USED = 500
"""Users and their jobs with series of their own of what they use; those that were at work last."""
_POD = re.compile(r"pod:([^/:]*)/([^/:]*):[0-9a-f-]{32,36}", re.ASCII)

_COUNTERS: dict[str, tuple[str, str]] = {
    tr.FaultBegan.kind: ("faults", "Faults of MPS servers."),
    tr.ClientRefused.kind: ("refusals", "Clients that were refused with a CUDA error."),
    tr.ClientLeft.kind: ("clients_left", "Processes that went away while they waited."),
    tr.HandoverFailed.kind: ("handover_failures", "Hand-overs that failed."),
    tr.ControlStarted.kind: ("control_starts", "Starts of the MPS control daemon."),
    tr.ServerReady.kind: ("server_starts", "MPS servers that got ready."),
    tr.ServerStartFailed.kind: ("server_start_failures", "MPS servers that did not start."),
    tr.TurnBegan.kind: ("turns", "Turns that began."),
    "client.unlimited": ("clients_over_limits", "Clients that were found beyond their limits."),
    "limits.mismatch": ("limit_mismatches", "Servers that started with other limits than their first client's."),
}
"""Records that are only counted: the name without ``_total``."""


class Job(NamedTuple):
    """Whose use it is: of a user, and of the job (a lease's name) for which the process was let in."""

    instance: str
    uid: int | None
    job: str | None


class Metrics:
    """``name_of``: a user's name, where it is known. One for the whole agent."""

    def __init__(self, name_of: Callable[[int], str | None] = lambda uid: None) -> None:
        self._name_of = name_of
        self._users: dict[int, str] = {}
        self._status: Json = {}
        self._api: Sequence[int] = (0, 0, 0)
        self._registry = CollectorRegistry()
        self._registry.register(self)  # all that it asks for is collect()
        ProcessCollector("mpsagent", registry=self._registry)  # node_exporter has its own without the prefix
        self._counters = {kind: self._counter(name, about) for kind, (name, about) in _COUNTERS.items()}
        self._ends = self._counter("client_ends", "Clients that have ended, by outcome.", "outcome")
        self._forced = self._counter("forced_ends", "Clients that mpsagent has ended, by the rule.", "rule")
        self._changes = self._counter("user_changes", "Times when the GPU went from one user to another.")
        self._gates = Counter(
            "mpsagent_gate_restarts", "Starts of a gate in the place of an earlier one.", registry=self._registry
        )
        self._waits = self._histogram("wait_seconds", "How long clients that were served had waited.", WAITS)
        self._handovers = self._histogram("handover_seconds", "How long MPS took to take a client over.", MOMENTS)
        self._gaps = self._histogram("user_change_gap_seconds", "How long no user had the GPU at a change.", MOMENTS)
        self._gate: int | None = None
        self._had: dict[str, int] = {}
        self._ending: dict[tuple[str, int], tuple[str, str]] = {}
        """By client: the last action that ends it, and its rule."""
        self._busy: dict[tuple[str, int], float] = {}
        self._time: dict[tuple[str, str], float] = {}
        self._energy: dict[Job, list[float]] = {}
        """Joules that are on record, and the most that was ever shown."""
        self._now: dict[str, dict[Job, tuple[float | None, float]]] = {}
        """Of who is at work: utilisation, and joules that are not on record yet."""

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"mpsagent_{name}", about, (INSTANCE, *labels), registry=self._registry)

    def _histogram(self, name: str, about: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"mpsagent_{name}", about, (INSTANCE,), registry=self._registry, buckets=buckets)

    def instance(self, name: str) -> None:
        """Its series are there from the start, with 0: an increase from nothing to 1 is none for Prometheus."""
        for one in (*self._counters.values(), self._changes, self._waits, self._handovers, self._gaps):
            one.labels(name)

    # --- what happens -------------------------------------------------------------------------------------------------

    def hear(self, instance: str, record: Mapping[str, Any]) -> None:
        """A record, as it is written down."""
        kind, pid = record["kind"], record.get("pid")
        if kind in self._counters:
            self._counters[kind].labels(instance).inc()
        match kind:
            case "action" if record.get("action") in ("TerminateClient", "SignalClient"):
                if len(self._ending) >= MOST_ENDING:
                    del self._ending[next(iter(self._ending))]
                self._ending[instance, int(record["pid"])] = record["action"], str(record["rule"])
            case "action.failed" if record.get("action") == "TerminateClient":
                if self._ending.get((instance, int(record["pid"])), ("",))[0] == "TerminateClient":  # else: signalled
                    del self._ending[instance, int(record["pid"])]
            case tr.ClientConnected.kind:
                self._waits.labels(instance).observe(record["waited"])
                if record.get("handover") is not None:
                    self._handovers.labels(instance).observe(record["handover"])
            case tr.ClientEnded.kind:
                self._ends.labels(instance, record["outcome"]).inc()
                ending = self._ending.pop((instance, int(record["pid"])), None)
                if ending is not None:
                    self._forced.labels(instance, ending[1]).inc()
            case tr.ClientUsed.kind:
                self._used(Job(instance, record["uid"], record.get("job")))[0] += record["energy"]
            case tr.TurnBegan.kind:
                before = self._had.get(instance)
                if before is not None and before != record["uid"]:
                    self._changes.labels(instance).inc()
                    if record.get("gap") is not None:
                        self._gaps.labels(instance).observe(record["gap"])
                self._had[instance] = record["uid"]
            case tr.GateConnected.kind:
                if self._gate not in (None, pid):
                    self._gates.inc()
                self._gate = pid
            case _:
                pass

    def work(self, instance: str, users: Iterable[int]) -> None:
        """The time of who is at work is counted until now, and from now on that of these users."""
        now = time.monotonic()
        for (where, uid), since in list(self._busy.items()):
            if where == instance:
                key = (instance, self._user(uid))
                self._time[key] = self._time.get(key, 0.0) + now - since
                del self._busy[where, uid]
        for uid in users:
            self._busy[instance, uid] = now
            self._time.setdefault((instance, self._user(uid)), 0.0)

    def use(self, instance: str, clients: Iterable[Client]) -> None:
        """What who is at work makes of the GPU."""
        found = self._now[instance] = {}
        for one in clients:
            job, use = Job(instance, one.uid, one.job), one.use
            ratio, energy = found.get(job, (None, 0.0))
            if use.utilization is not None:
                ratio = max(use.utilization, ratio or 0.0)
            found[job] = ratio, energy + use.energy

    def _used(self, job: Job) -> list[float]:
        if job not in self._energy and len(self._energy) >= MOST_USED:
            idle = (one for one in self._energy if one.uid is not None and one not in self._now.get(one.instance, {}))
            gone = next(idle, None)
            if gone is None:
                return self._energy.setdefault(Job(job.instance, None, None), [0.0, 0.0])
            del self._energy[gone]
        found = self._energy[job] = self._energy.pop(job, [0.0, 0.0])
        return found

    def _of_job(self, job: Job) -> dict[str, str]:
        pod = _POD.fullmatch(job.job or "")
        user = "other" if job.uid is None else self._user(job.uid)
        of_pod = ("", pod[2], pod[1]) if pod else (job.job or "", "", "")
        return {INSTANCE: job.instance, "user": user, **dict(zip(("job", "pod", "namespace"), of_pod, strict=True))}

    def _user(self, uid: int) -> str:
        """Its label. What it once was it stays, so that its series go on."""
        found = self._users.get(uid)
        if found is None:
            found = "other" if len(self._users) >= MOST_USERS else self._name_of(uid) or str(uid)
            if found != "other":
                self._users[uid] = found
        return found

    # --- what there is ------------------------------------------------------------------------------------------------

    def text(self, status: Json, connections: int, dropped: int, turned_away: int) -> bytes:
        """The exposition format, version 0.0.4."""
        self._status, self._api = status, (connections, dropped, turned_away)
        for name, _ in self._instances():
            self.instance(name)
            self.work(name, (uid for (there, uid) in list(self._busy) if there == name))
        return bytes(generate_latest(self._registry))

    def _instances(self) -> list[tuple[str, Json]]:
        return [(one["name"], one) for one in self._status["instances"]]

    def collect(self) -> Iterable[Metric]:
        """For the library: it asks at each scrape."""
        if not self._status:
            return
        status, (connections, dropped, turned_away) = self._status, self._api
        gate, health = status["gate"], status["health"]
        version = {"version": status["agent"]["version"]}
        yield _gauge("build_info", "Version of the agent.", [(version, 1)])
        yield _gauge("healthy", "1 when healthy: no problem needs a person.", [({}, health["ok"])])
        yield _gauge("problems", "Reasons for not being healthy.", [({}, len(health["problems"]))])
        yield _gauge("gate_up", "1 when the gate is connected.", [({}, gate["connected"])])
        known = gate["handshake"] is not False
        yield _gauge("gate_handshake_known", "0 when the control daemon's greeting is not known.", [({}, known)])
        yield _gauge("policy_errors", "Errors in the policy files.", [({}, len(status["policy"]["errors"]))])
        yield _gauge("api_connections", "Connections to the socket.", [({}, connections)])
        yield _counter("events", "Events on record.", [({}, status["history"]["newest"])])
        yield _counter("api_dropped", "Connections dropped for being slow.", [({}, dropped)])
        yield _counter("api_refused", "Connections refused for being too many.", [({}, turned_away)])
        pages = self._instances()
        for (name, about), read in _OF_INSTANCE.items():
            family = _counter if name in ("unknown_lines", "foreign_lines") else _gauge
            yield family(name, about, [({INSTANCE: which}, read(page)) for which, page in pages])
        for (name, about), rows in _OF_USERS.items():
            samples = [(self._labels(which, row), value) for which, page in pages for row, value in rows(page)]
            yield _gauge(name, about, _summed(samples))
        for (name, about), said in _OF_DEVICES.items():
            samples = [
                ({INSTANCE: which, "uuid": gpu["uuid"]}, value)
                for which, page in pages for gpu in page["devices"] if (value := said(gpu)) is not None
            ]  # fmt: skip
            family = _counter if name.endswith("xids") else _gauge
            yield family(name, about, samples)
        about = "Time in which a user had a client at work."
        spent = [({INSTANCE: which, "user": user}, value) for (which, user), value in self._time.items()]
        yield _counter("gpu_seconds", about, spent)
        now = {job: one for found in self._now.values() for job, one in found.items()}
        about = "GPU utilisation by a user's or job's server; with one-server and per-user that of all."
        ratios: dict[tuple[str, ...], Sample] = {}
        for job, (ratio, _) in now.items():
            if ratio is not None and len(ratios) < MOST_USED:
                labels = self._of_job(job)
                ratios[tuple(labels.values())] = labels, ratio
        yield _gauge("utilization_ratio", about, ratios.values())
        for job, (_, energy) in now.items():
            used = self._used(job)
            used[1] = max(used[1], used[0] + energy)
        about = "Energy that the GPU used for a user or job; with one-server and per-user divided by time at work."
        used_so_far = [(self._of_job(job), max(one)) for job, one in self._energy.items()]
        yield _counter("energy_joules", about, _summed(used_so_far))

    def _labels(self, instance: str, row: Mapping[str, Any]) -> dict[str, str]:
        rest = {key: str(value) for key, value in row.items() if key != "uid"}
        user = {"user": "" if row["uid"] is None else self._user(int(row["uid"]))} if "uid" in row else {}
        return {INSTANCE: instance, **user, **rest}


Sample = tuple[Mapping[str, str], float]

_OF_INSTANCE: dict[tuple[str, str], Callable[[Json], float]] = {
    ("not_guaranteed", "What mpsagent cannot promise now (not sure)."): lambda page: len(page["not_guaranteed"]),
    ("control_up", "1 when the MPS control daemon runs."): lambda page: _runs(page),
    ("waiting_users", "Users waiting for the GPU."): lambda page: page["waiting_users"],
    ("waiting_processes", "Processes held at the gate."): lambda page: page["waiting_processes"],
    ("outside_processes", "Processes on the GPUs outside MPS."): lambda page: page["outside_processes"],
    ("draining", "1 while a drain is on: no new client is admitted."): lambda page: page["drain"]["draining"],
    ("limits_drifted", "Servers with other than their first client's limits."): lambda page: _count(page, "drifted"),
    ("limits_unconfirmed", "Users whose limits MPS did not confirm."): lambda page: _count(page, "unconfirmed"),
    ("clients_fail_safe", "Clients with the fallback limits."): lambda page: _count(page, "fail_safe"),
    ("unknown_lines", "Log lines of MPS that mpsagent does not know."): lambda page: page["unknown_lines"],
    ("foreign_lines", "Log lines about processes that did not pass the gate."): lambda page: page["foreign_lines"],
}  # fmt: skip
_OF_DEVICES: dict[tuple[str, str], Callable[[Json], float | None]] = {
    ("gpu_up", "0 when NVML says that a GPU is lost."): lambda gpu: None if gpu["seen"] is None else not gpu["problem"],
    ("gpu_memory_used_bytes", "Device memory in use, by all processes."): lambda gpu: gpu["memory_used"],
    ("gpu_utilization_ratio", "Part of the time in which a kernel ran."): lambda gpu: gpu["utilization"],
    ("gpu_power_watts", "Power drawn."): lambda gpu: gpu["power"],
    ("gpu_temperature_celsius", "Temperature."): lambda gpu: gpu["temperature"],
    ("gpu_xids", "Xid errors that the driver has reported."): lambda gpu: gpu["xids_seen"],
}  # fmt: skip
"""What NVML says, by device; nothing where it does not."""
_OF_USERS: dict[tuple[str, str], Callable[[Json], list[tuple[Mapping[str, Any], float]]]] = {
    ("servers", "MPS servers by user and status."): lambda page: [
        ({"uid": one["uid"], "status": one["status"]}, 1) for one in page["servers"]
    ],
    ("clients", "Processes that passed the gate."): lambda page: [
        ({"uid": uid}, count) for uid, count in page["clients_by_uid"].items()
    ],
    ("client_memory_bytes", "Device memory of a user's clients, as far as it is known."): lambda page: [
        ({"uid": one["uid"]}, one["memory"]) for one in page["users"] if one["memory"] is not None
    ],
    ("turn_info", "Whose turn it is."): lambda page: [({"uid": page["turn"]["uid"]}, 1)] if page["turn"] else [],
    ("user_waiting_seconds", "How long a user has been waiting for the GPU, and why."): lambda page: [
        ({"uid": one["uid"], "reason": one["reason"]}, one["seconds"]) for one in page["waiting"]
    ],
}


def _runs(page: Json) -> bool:
    """An instance apart has none of its own: its users' come and go."""
    control = page["control"]
    return page["mode"]["sharing"] == "per-user" or (control is not None and bool(control["running"]))


def _count(page: Json, what: str) -> int:
    return len(page["limits"][what])


def _summed(samples: Iterable[Sample]) -> list[Sample]:
    """One of each set of labels: users without a series of their own are together."""
    found: dict[tuple[tuple[str, str], ...], float] = {}
    for labels, value in samples:
        key = tuple(labels.items())
        found[key] = found.get(key, 0.0) + value
    return [(dict(key), value) for key, value in found.items()]


def _gauge(name: str, about: str, samples: Iterable[Sample]) -> Metric:
    return _filled(GaugeMetricFamily(f"mpsagent_{name}", about), "", samples)


def _counter(name: str, about: str, samples: Iterable[Sample]) -> Metric:
    return _filled(CounterMetricFamily(f"mpsagent_{name}", about), "_total", samples)


def _filled(family: Metric, suffix: str, samples: Iterable[Sample]) -> Metric:
    for labels, value in samples:
        family.add_sample(family.name + suffix, dict(labels), float(value))
    return family
