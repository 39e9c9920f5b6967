"""A part of gate.py, only where it is named: what two users make of the GPU, as sessions, `report` and the metrics tell
it, beside what NVML and nvidia-smi say in the same seconds. In turns, apart and together, then what looking costs; with
--quick apart and together alone."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from campaigns.gate_cost import in_words, shares_of
from campaigns.gate_place import Here, Out
from mpsagent.system import devices
from tests.conformance import rig as rigs
from tests.scenes.stage import A, Agent, B, Stage, seconds_of

EVERY = 0.2
CLOSE = 0.05
"""How far figures may be from NVML's own."""
WORK = 20.0
COST = 20.0
WAYS = {"turns": 'server_scope = "all"', "apart": 'sharing = "per-user"', "together": 'sharing = "one-server"'}
Moment = tuple[float, float, float, dict[int, float]]
"""When, utilisation, joules so far, and utilisation by process."""


def use(here: Here, out: Out) -> None:
    length = 12.0 if here.sim else WORK
    meter = simulated(here.backend) if here.sim else real(out)
    rows = out.table(
        "What two users make of the GPU", "way", "user", "the client says", "session", "report", "metrics", "NVML",
        "nvidia-smi", "session kJ", "report kJ", "metrics kJ", "NVML kJ", "nvidia-smi kJ", "most memory MiB", "shared",
    )  # fmt: skip
    with Watch(meter) as watch, Smi(here.base / "smi") as smi:
        for way, extra in list(WAYS.items())[here.quick :]:
            stage = here.stage()
            stage.policy("", extra=extra)
            agent = stage.start_agent()
            stage.answering(agent)
            if way != "apart":
                stage.open(agent)
            played(out, (watch, smi), stage, agent, way, length, rows)
            stage.end()
    if not here.quick:
        cost(here, out)


def played(
    out: Out, meters: tuple[Watch, Smi], stage: Stage, agent: Agent, way: str, length: float, rows: list[list[object]]
) -> None:
    watch, smi = meters
    parts = {A: 0.8, B: 0.1} if way == "turns" else {A: 0.5, B: 0.2}
    first = stage.client(A, "duty", parts[A], length)
    first.known()
    second = stage.client(B, "duty", parts[B], length)
    gauges: dict[int, list[float]] = {A: [], B: []}
    servers: dict[int, int] = {}
    while first.rc is None or second.rc is None:
        time.sleep(1.0)
        for uid, value in series(agent, "mpsagent_utilization_ratio").items():
            gauges.setdefault(uid, []).append(value)
        for one in agent.api.get("/v1/clients")["clients"]:
            if one["server"] is not None:
                servers[one["uid"]] = one["server"]
    stage.until(lambda: len(told(agent)) == 2, "both sessions tell what was used", 20)
    sessions, energies = told(agent), series(agent, "mpsagent_energy_joules_total")
    report = {row["uid"]: row for row in agent.api.get("/v1/report?by=user")["rows"]}
    out.raw[way] = {"sessions": sessions, "report": report, "metrics": energies, "gauges": gauges, "servers": servers}
    times = [seconds_of({"at": one[edge]}) for one in sessions.values() for edge in ("began", "ended")]
    whole = watch.between(min(times), max(times))
    for client, uid in ((first, A), (second, B)):
        session, row = sessions[uid], report[uid]
        begun, ended = (seconds_of({"at": session[name]}) for name in ("began", "ended"))
        ratio, joules, each = watch.between(begun, ended)
        other, other_joules = smi.between(begun, ended)
        out.say(f"{way}, {uid}: NVML charges the user's server with {each.get(servers.get(uid, 0), 0.0):.3f}")
        found = re.search(r"busy ([\d.]+) of ([\d.]+) s", client.text())
        itself = float(found[1]) / float(found[2]) if found else None
        seen = gauges[uid][1:-1] or [0.0]
        rows.append([
            way, uid, itself, session.get("utilization"), row["utilization"], sum(seen) / len(seen), ratio, other,
            session["energy"] / 1000, row["energy"] / 1000, energies.get(uid, 0.0) / 1000,
            joules / 1000, other_joules / 1000, (session.get("memory") or 0) >> 20, row["shared"],
        ])  # fmt: skip
        out.check(client.rc == 0, f"{way}: client of {uid} ended with {client.rc}")
        out.check(abs(row["utilization"] - ratio) <= CLOSE, f"{way}, {uid}: {row['utilization']:.3f}, NVML {ratio:.3f}")
        out.check(row["shared"] == (way != "turns"), f"{way}, {uid}: shared is {row['shared']}")
        if way == "turns":
            near(out, f"{way}, {uid}: energy", row["energy"], joules)
    near(out, f"{way}: energy of both", sum(row["energy"] for row in report.values()), whole[1])
    out.say(f"{way}: energy of both {sum(row['energy'] for row in report.values()):.0f} J, NVML {whole[1]:.0f} J")
    text = stage.cli(agent, "report")[1].strip()
    out.say(f"{way}, mpsagent-cli report:\n{text}")


def near(out: Out, what: str, ours: float, theirs: float) -> None:
    out.check(abs(ours - theirs) <= CLOSE * theirs, f"{what}: {ours:.0f} J, NVML {theirs:.0f} J")


def told(agent: Agent) -> dict[int, dict[str, Any]]:
    found = agent.api.get("/v1/sessions?kind=client")["sessions"]
    return {one["uid"]: one for one in found if one["ended"] and "energy" in one}


def series(agent: Agent, name: str) -> dict[int, float]:
    """Values by uid. Users of a stage have no names."""
    text = agent.api.text("/metrics")
    found = re.findall(rf'^{name}{{[^}}]*user="(\d+)"[^}}]*}} (\S+)$', text, re.MULTILINE)
    return {int(uid): float(value) for uid, value in found}


def cost(here: Here, out: Out) -> None:
    """Eight clients at work with a memory limit, and nothing else that opens a GPU."""
    stage = here.stage()
    stage.with_agent('[limits]\nmemory_limit = "4G"\n', server="shared")
    clients = [stage.client(A, "duty", 0.1, COST + 60) for _ in range(8)]
    for client in clients:
        client.known()
    time.sleep(3.0)
    took, shares = shares_of(stage, lambda: time.sleep(COST))
    out.say(f"while 8 clients work for {took:.0f} s mpsagent uses {in_words(shares)}, aim 0.25 %")
    out.raw["cost"] = shares


# --- what NVML says itself --------------------------------------------------------------------------------------------


class Watch:
    """Asks the meter all the time."""

    def __init__(self, meter: Callable[[], Moment]) -> None:
        self._meter, self._over = meter, threading.Event()
        self.moments: list[Moment] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._over.wait(EVERY):
            self.moments.append(self._meter())

    def between(self, begin: float, end: float) -> tuple[float, float, dict[int, float]]:
        """Mean utilisation, joules, and mean utilisation by process."""
        mine = [one for one in self.moments if begin <= one[0] <= end]
        if len(mine) < 2:
            return 0.0, 0.0, {}
        span = (end - begin) / (mine[-1][0] - mine[0][0])  # the edges lie between two moments
        said = [one[3] for one in mine if one[3]]  # NVML has nothing new of processes at most moments
        each = {pid: sum(one.get(pid, 0.0) for one in said) / len(said) for pid in {pid for one in said for pid in one}}
        busy = sum(one[1] * (one[0] - before[0]) for before, one in itertools.pairwise(mine))
        return busy / (mine[-1][0] - mine[0][0]), (mine[-1][2] - mine[0][2]) * span, each


def simulated(backend: rigs.Backend) -> Callable[[], Moment]:
    file = str(Path(backend.control).with_name("devices.json"))
    before = [0.0, 0.0]

    def meter() -> Moment:
        work = next(iter(devices.simulated_work(file).values()))
        span = work.seconds - before[0] or 1.0
        ratio = (work.busy - before[1]) / span  # a kernel counts when it has ended
        before[:] = work.seconds, work.busy
        return time.time(), ratio, work.energy, {}

    meter()
    return meter


def real(out: Out) -> Callable[[], Moment]:
    import pynvml as nvml

    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    what_nvml_can(out, nvml, handle)
    latest = 0

    def meter() -> Moment:
        nonlocal latest
        each: dict[int, float] = {}
        with contextlib.suppress(nvml.NVMLError):
            rows = [one for one in nvml.nvmlDeviceGetProcessUtilization(handle, latest) if one.timeStamp > latest]
            out.raw.setdefault("process samples", []).extend(
                [round(time.time(), 3), one.pid, one.timeStamp, one.smUtil] for one in rows
            )
            latest = max([latest, *(one.timeStamp for one in rows)])
            each = {one.pid: one.smUtil / 100 for one in rows}
        energy = nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
        return time.time(), nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100, energy, each

    return meter


def what_nvml_can(out: Out, nvml: Any, handle: Any) -> None:
    """What the helper's questions give here, and how long each takes."""
    questions: dict[str, Callable[[], Any]] = {
        "utilisation": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "energy, mJ": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle),
        "samples": lambda: samples_of(nvml, handle),
        "processes' utilisation": lambda: len(nvml.nvmlDeviceGetProcessUtilization(handle, 0)),
        "processes": lambda: len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
        "clients of MPS": lambda: len(nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)),
    }
    for what, ask in questions.items():
        since = time.perf_counter()
        try:
            found = ask()
        except nvml.NVMLError as error:
            found = f"NVML says: {error}"
        out.say(f"NVML, {what}: {found}, {1e3 * (time.perf_counter() - since):.2f} ms")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        text = subprocess.run(["nvidia-smi", "-q", "-d", "UTILIZATION,POWER"], capture_output=True, timeout=20).stdout
        out.raw["nvidia-smi -q"] = text.decode(errors="replace").splitlines()[:80]


def samples_of(nvml: Any, handle: Any) -> str:
    found = nvml.nvmlDeviceGetSamples(handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, 0)[1]
    if not found:
        return "none"
    stamps = [one.timeStamp / 1e6 for one in found]
    old = time.time() - stamps[-1]
    return f"{len(found)} of {stamps[-1] - stamps[0]:.2f} s, the last {old:.2f} s old"


class Smi:
    """nvidia-smi's own words, twice a second: utilisation and watts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Smi:
        command = ["nvidia-smi", "--id=0", "--query-gpu=utilization.gpu,power.draw", "--format=csv,noheader,nounits",
                   "--loop-ms=500"]  # fmt: skip
        stamped = 'while read -r line; do echo "$EPOCHREALTIME, $line"; done'
        with contextlib.suppress(OSError), self._path.open("wb") as file:
            self._process = subprocess.Popen(["bash", "-c", f"{' '.join(command)} | {stamped}"], stdout=file,
                                             stderr=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def between(self, begin: float, end: float) -> tuple[float, float]:
        """Mean utilisation, and joules."""
        found = []
        with contextlib.suppress(OSError):
            for line in self._path.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    at, percent, watts = map(float, line.split(","))
                    found += [(percent / 100, watts)] if begin <= at <= end else []
        count = len(found) or 1
        return sum(one for one, _ in found) / count, (end - begin) * sum(one for _, one in found) / count
