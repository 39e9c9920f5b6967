"""Part of gate.py: two users train in slices, and nobody is ended. Losses against an undisturbed run, shares of the
time, memory while they stand; the agent is killed while it waits, freezes and has frozen.

PAUSE_STEPS: steps of each training (its time is about that of all steps together); PAUSE_SLICE: seconds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

from mpsagent.system.processes import stopped
from tests.gpu.gate_place import Here, Out
from tests.scenes.stage import REPOSITORY, A, Agent, B, Stage

UIDS = (A, B)
POLICY = '[limits]\nmemory = "10G"\n[switch]\naction = "pause"\nslice = "{slice:g}s"\n'
PATIENCE = 600.0


def pause(here: Here, out: Out) -> None:
    slice_, steps = (1.0, 300) if here.sim or here.quick else (20.0, 300_000)
    slice_, steps = float(os.environ.get("PAUSE_SLICE", slice_)), int(os.environ.get("PAUSE_STEPS", steps))
    stage = here.stage()
    agent = stage.with_agent(POLICY.format(slice=slice_), server="shared")
    alone = trained(here, stage, [A], steps)[0]
    begun = time.time()
    both = trained(here, stage, UIDS, steps)
    rows = out.table(
        "Two users train in slices", "user", "losses equal to the undisturbed run", "turns", "share of the time"
    )
    had, turns = shares(agent, begun)
    for uid, losses in zip(UIDS, both, strict=True):
        good = out.check(losses == alone, f"the losses of {uid} differ from those of the undisturbed run")
        good = "not computed by the simulator" if here.sim else good
        rows.append([uid, good, turns[uid], round(had[uid] / max(1e-9, sum(had.values())), 3)])
    out.check(min(turns.values()) > 1, "there were no slices: PAUSE_STEPS is too small")
    off = abs(had[A] / max(1e-9, sum(had.values())) - 0.5)
    out.check(here.sim or off <= 0.05, f"shares are {off:.3f} off half")
    ended = [one for one in agent.news() if one.get("action") in ("TerminateClient", "SignalClient")]
    out.check(not ended, f"clients were ended: {ended[:3]}")
    deaths(here, out, stage, agent)


def start(here: Here, stage: Stage, uid: int, steps: int) -> subprocess.Popen[bytes]:
    if here.sim:  # a simulated client with kernels of 10 ms, whose losses are none
        command = [*here.backend.client, "work", str(steps)]
    else:
        command = [here.python_with(uid, "torch"), "-s", here.program("gate_train.py"), str(steps)]
    environment = here.environment(stage, uid, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    found = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             user=uid, group=uid, extra_groups=[], cwd="/", env=environment)  # fmt: skip
    here.peers.append(found)
    return found


def trained(here: Here, stage: Stage, uids: tuple[int, ...] | list[int], steps: int) -> list[list[float]]:
    """The losses of each user's training, all begun together."""
    running = [start(here, stage, uid, steps) for uid in uids]
    texts = [one.communicate(timeout=PATIENCE)[0].decode(errors="replace") for one in running]
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
        stage.policy(POLICY.format(slice=600.0 if phase == "waiting" else 2.0), extra='server = "shared"')
        agent = stage.start_agent()
        stage.answering(agent)
        stage.open(agent)
        ours = [start(here, stage, uid, 10**9) for uid in UIDS]
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
