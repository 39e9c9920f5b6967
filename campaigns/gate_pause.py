"""Part of gate.py: two users train in slices, and nobody is ended. Losses against an undisturbed run, shares of the
time, memory while they stand; the agent is killed while it waits, freezes and has frozen.

PAUSE_SLICE: seconds of a slice; PAUSE_SECONDS: of the trainings beside each other. PAUSE_REFERENCE: a file with what
gate_train.py said on another GPU of this machine without MPS, waited for; without it the undisturbed run is made first.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

from campaigns.gate_place import Here, Out
from mpsagent.linux.processes import stopped
from tests.scenes.stage import REPOSITORY, A, Agent, B, Stage

UIDS = (A, B)
POLICY = '[limits]\nmemory_limit = "10G"\n[turn]\non_expiry = "pause"\npause_slice = "{slice:g}s"\n'
PATIENCE = 120.0


def pause(here: Here, out: Out) -> None:
    slice_, length = (1.0, 20.0) if here.sim or here.quick else (20.0, 400.0)
    slice_, length = float(os.environ.get("PAUSE_SLICE", slice_)), float(os.environ.get("PAUSE_SECONDS", length))
    stage = here.stage()
    agent = stage.with_agent(POLICY.format(slice=slice_), server="shared")
    alone = [] if "PAUSE_REFERENCE" in os.environ else trained(here, stage, [A], length * 0.6)[0]
    begun = time.time()
    both = trained(here, stage, UIDS, length)
    if "PAUSE_REFERENCE" in os.environ:
        stage.until(lambda: reference() is not None, "the undisturbed run has ended", 120)
        alone = reference() or []
    rows = out.table(
        "Two users train in slices", "user", "steps", "of these compared with the undisturbed run", "losses equal",
        "turns", "share of the time",
    )  # fmt: skip
    out.say(f"slices of {slice_:g} s, {length:g} s in all; the undisturbed run made {100 * len(alone)} steps")
    had, turns = shares(agent, begun)
    for uid, losses in zip(UIDS, both, strict=True):
        common = min(len(losses), len(alone))
        good = out.check(
            here.sim or (common > 10 and losses[:common] == alone[:common]),
            f"the losses of {uid} differ from those of the undisturbed run, or are too few: {common}",
        )
        good = "not computed by the simulator" if here.sim else good
        share = round(had[uid] / max(1e-9, sum(had.values())), 3)
        rows.append([uid, 100 * len(losses), 100 * common, good, turns[uid], share])
    out.check(min(turns.values()) > 1, "there were no slices: PAUSE_SECONDS is too small")
    off = abs(had[A] / max(1e-9, sum(had.values())) - 0.5)
    out.check(here.sim or off <= 0.05, f"shares are {off:.3f} off half")
    ended = [one for one in agent.news() if one.get("action") in ("TerminateClient", "SignalClient")]
    out.check(not ended, f"clients were ended: {ended[:3]}")
    deaths(here, out, stage, agent)


def reference() -> list[float] | None:
    """What the undisturbed run lost, once it has said so."""
    with contextlib.suppress(OSError):
        for line in Path(os.environ["PAUSE_REFERENCE"]).read_text().splitlines():
            if line.startswith("LOSSES "):
                return list(json.loads(line.removeprefix("LOSSES ")))
    return None


def start(here: Here, stage: Stage, uid: int, length: float) -> subprocess.Popen[bytes]:
    if here.sim:  # a simulated client with kernels of 10 ms, whose losses are none
        command = [*here.backend.client, "work", str(int(length * 30))]
    else:
        command = [here.python_with(uid, "torch"), "-s", here.program("gate_train.py"), str(10**9), str(length)]
    environment = here.environment(stage, uid, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    found = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             user=uid, group=uid, extra_groups=[], cwd="/", env=environment)  # fmt: skip
    here.peers.append(found)
    return found


def trained(here: Here, stage: Stage, uids: tuple[int, ...] | list[int], length: float) -> list[list[float]]:
    """The losses of each user's training, all begun together, after about so many seconds."""
    running = [start(here, stage, uid, length) for uid in uids]
    texts = [one.communicate(timeout=length + PATIENCE)[0].decode(errors="replace") for one in running]
    if here.sim and not any(one.returncode for one in running):
        return [[] for _ in uids]
    found = [line.removeprefix("LOSSES ") for text in texts for line in text.splitlines() if line.startswith("LOSSES ")]
    if len(found) < len(uids):
        raise ValueError(f"a training did not end: {texts}")
    return [json.loads(line) for line in found]


def shares(agent: Agent, since: float) -> tuple[dict[int, float], dict[int, int]]:
    """Seconds and number of the turns of each user, while both had work: from the first pause to the last."""
    paused = [one for one in agent.found("user.paused") if seconds(one) >= since]
    times = list(map(seconds, paused)) or [0.0]
    ended = [one for one in agent.found("turn.ended") if min(times) + 0.1 < seconds(one) <= max(times) + 0.1]
    had = {uid: sum(one["seconds"] for one in ended if one["uid"] == uid) for uid in UIDS}
    return had, {uid: sum(one["uid"] == uid for one in ended) for uid in UIDS}


def seconds(event: dict[str, object]) -> float:
    from tests.scenes.stage import seconds_of

    return seconds_of(event)


def deaths(here: Here, out: Out, stage: Stage, agent: Agent) -> None:
    """Killed in each phase: nobody is left standing, and the next agent goes on."""
    rows = out.table("The agent is killed", "phase", "files", "standing before", "standing after the unit's thaw")
    stage.stop_agent(agent)
    for phase in ("waiting", "freezing", "frozen"):
        stage.policy(POLICY.format(slice=600.0 if phase == "waiting" else 2.0), extra='server_scope = "all"')
        agent = stage.again()
        ours = [start(here, stage, uid, 10**6) for uid in UIDS]
        pids = [one.pid for one in ours]
        stage.until(lambda: len(agent.api.status()["waiting"]) or any(map(stopped, pids)), "both have come")  # noqa: B023
        if phase == "freezing":
            stage.until(lambda: list(stage.place.glob("run/instances/*/frozen/*")), "one is frozen", every=0.001)
        if phase == "frozen":
            stage.until(lambda: any(map(stopped, pids)), "one stands")  # noqa: B023
        stage.stop_agent(agent, signal.SIGKILL)
        files = len(list(stage.place.glob("run/instances/*/frozen/*")))
        before = sum(map(stopped, pids))
        environment = {**os.environ, "MPSAGENT_RUN": str(stage.place / "run")}
        subprocess.run([REPOSITORY / "systemd" / "mpsagent-open", "thaw"], check=True, env=environment, timeout=60)
        after = sum(map(stopped, pids))
        rows.append([phase, files, before, after])
        out.check(after == 0, f"{phase}: {after} processes were left standing")
        for one in ours:
            one.kill()
            one.wait()
