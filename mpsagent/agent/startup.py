"""How the agent starts: a daemon that runs already, what the logs say, which GPUs there are."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING

from mpsagent.agent import gpus
from mpsagent.agent.catch_up import OVERLAP, Caught, catch_up, not_yet_written
from mpsagent.agent.executor import control_runs, mps_environment
from mpsagent.agent.recorder import log
from mpsagent.core.transitions import transition_fields
from mpsagent.mps.loglines import LogParser
from mpsagent.system import control_search
from mpsagent.system.control import ProblemKind, Running
from mpsagent.system.logfiles import Position
from mpsagent.system.processes import parent

if TYPE_CHECKING:
    from mpsagent.agent.host import Agent

HOPELESS = {
    "control daemon", "control daemon failed", "front-end", "directories", "gate directory", "public directory taken",
}  # fmt: skip
"""Topics of conditions that a person has to see to before users can be let in."""
GPU_AGAIN = 30.0
"""Seconds until a driver that does not answer is asked again."""


async def adopt(agent: Agent) -> None:
    """Take over our own control daemon that runs already, and name the daemons of others."""
    await end_orphans(agent)
    found = await agent.supervisor.adopt()
    now = agent.clock.now()
    if isinstance(found, Running):
        agent.up_since = now
        agent.absorb([control_runs(found, agent.where, now)])
        agent.record("control.adopted", now, pid=found.pid, how=found.how)
        agent.conditions.set("adopted", _differs(agent, found), now, "when no client works: mpsagent-cli restart")
    elif found.kind is ProblemKind.UNSAFE:
        agent.conditions.set("control daemon", found.text, now, do=" && ".join(found.commands))
        agent.record("control.unsafe", now, text=found.text, commands=list(found.commands))


async def end_orphans(agent: Agent) -> None:
    for pid in await control_search.end_orphans(agent.where.hidden, agent.policy.control_program):
        log.warning("server", text=f"server {pid} has outlived its control daemon: killed")


def _differs(agent: Agent, found: Running) -> str | None:
    """What of the policy's instance the daemon was not started with: it takes hold when that is started again."""
    policy, wrong = agent.policy, []
    if os.path.realpath(found.log_directory) != os.path.realpath(agent.where.log):
        wrong.append(f"writes its logs to {found.log_directory}, not to {agent.where.log}, so faults are not seen")
    if (found.devices or "") != ",".join(policy.devices):
        meant = ", ".join(policy.devices) or "all GPUs"
        wrong.append(f"serves {found.devices or 'all GPUs'}, and the policy says {meant}")
    return f"control daemon {found.pid}, which runs already, {'; it '.join(wrong)}" if wrong else None


async def read_logs(agent: Agent) -> dict[str, tuple[Position | None, LogParser]]:
    """The state from the logs, and what happened while no agent was there. Returns, for each log, how far it has been
    read and by which parser."""
    directory = agent.policy.log_directory
    control, server = LogParser("control", UTC), LogParser("server", UTC)
    caught = Caught([], None, None)
    if agent.supervisor.running is not None:
        control.daemon = agent.supervisor.running.pid
        control.ours = server.ours = child_of(control.daemon)
        caught = await asyncio.to_thread(
            catch_up, f"{directory}/control.log", f"{directory}/server.log", control, server, agent.socket_path
        )
        if caught.passed_over:
            log.warning("logs", text=f"{caught.passed_over} bytes of the logs were not read: rotate them (logrotate)")
        now = agent.clock.now()  # lines from before the wall clock was set back are of the future
        happened = agent.absorb([one if one.at <= now else one._replace(at=now) for one in caught.events])
        old = agent.history.since(0, agent.inherited)
        since = float(str(old[-1]["at"])) - OVERLAP if old else agent.started
        fresh = [one for one in happened if one.at > since]
        for one in not_yet_written(fresh, old) if old else ():
            agent.counts["missed"] += 1
            agent.record(one.kind, one.at, **transition_fields(one))
    else:
        caught = caught._replace(control=_end(f"{directory}/control.log"), server=_end(f"{directory}/server.log"))
    return {"server": (caught.server, server), "control": (caught.control, control)}


def child_of(daemon: int) -> Callable[[int], bool]:
    """Whether a server is this daemon's, as the kernel says. One that has gone already may have been: what its log says
    is a hint in any case."""
    return lambda pid: parent(pid) in (None, daemon)


def _end(path: str) -> Position | None:
    """Where a log ends now: no daemon runs, so what it says is over."""
    with suppress(OSError):
        status = Path(path).stat()
        return Position(status.st_ino, status.st_size)
    return None


def at_work(agent: Agent) -> bool:
    """Who comes now is served or held: the control daemon runs, and the gate has its admissions."""
    view = agent.core.view()
    gate = view.state.gate
    if gate is None or not gate.synced or view.sent is None or gate.applied < view.sent[0]:
        return False
    return view.control_alive or view.state.drain is not None or not view.wanted


def hopeless(agent: Agent) -> bool:
    """It will not get there without a person's help."""
    return not HOPELESS.isdisjoint([*agent.conditions.topics(), *agent.node.conditions.topics()])


async def find_devices(agent: Agent) -> None:
    """Ask for the GPUs, again and again until there is an answer."""
    while not agent.stopping:
        found = await gpus.find(agent.settings, mps_environment(agent.policy, agent.where), agent.policy.devices)
        now = agent.clock.now()
        if not isinstance(found, str):
            agent.conditions.set("devices", None, now)
            gpus.remember(agent.settings, agent.policy.devices, found)
            agent.use_devices(found)
            return
        lesser = "those found last are taken" if agent.devices else "clients get less than their policy until then"
        do = f"see nvidia-smi; memory limits and multiprocessors are counted by the GPUs, {lesser}"
        agent.conditions.set("devices", found, now, do)
        await asyncio.sleep(GPU_AGAIN)
