"""How the agent starts: its directories, the gate, a daemon that runs already, what the logs say, which GPUs there are."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from datetime import UTC
from typing import TYPE_CHECKING, Any

from mpsagent.agent import gpus
from mpsagent.agent.catch_up import OVERLAP, Caught, catch_up, not_yet_written
from mpsagent.agent.executor import control_runs, mps_environment
from mpsagent.core import inputs as inp
from mpsagent.core.transitions import transition_fields
from mpsagent.mps.loglines import LogParser
from mpsagent.system import directories
from mpsagent.system.control import ProblemKind, Running
from mpsagent.system.logfiles import Position
from mpsagent.system.user_environment import write_user_environment

if TYPE_CHECKING:
    from mpsagent.agent.host import Agent

HOPELESS = {"control daemon", "control daemon failed", "front-end", "gate directory"}
"""Topics of conditions that a person has to see to before users can be let in."""
GPU_AGAIN = 30.0
"""Seconds until a driver that does not answer is asked again."""


async def start_gate(agent: Agent) -> None:
    """Without systemd: a keeper of our own, which outlives the agent as the control daemon does. One that runs already
    is left alone."""
    if agent.settings.supervise == "systemd":
        what = write_user_environment(agent.policy.pipe_directory)
        agent.conditions.set("user environment", what, agent.clock.now(), "set pipe_directory in [instance.NAME]")
        return
    now = agent.clock.now()
    if directories.listener_of(agent.settings.gate_link) is not None:
        return
    try:
        directories.prepare_hidden(agent.where)
    except (directories.DirectoryRefused, OSError) as error:
        agent.conditions.set("gate directory", str(error), now)
        return
    arguments = [sys.executable, "-P", "-m", "mpsagent.gate.main", "keep", *gate_arguments(agent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    log = os.open(
        f"{agent.settings.run_directory}/gate.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
    )
    try:
        process = await asyncio.create_subprocess_exec(
            *arguments,
            env=environment,
            start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    finally:
        os.close(log)
    agent.spawn(_keeper(agent, process))


def gate_arguments(agent: Agent) -> list[str]:
    return [
        "--public", agent.policy.pipe_directory,
        "--daemon", agent.where.hidden,
        "--link", agent.settings.gate_link,
        "--state", agent.settings.run_directory,
    ]  # fmt: skip


async def _keeper(agent: Agent, process: asyncio.subprocess.Process) -> None:
    """It should not end while the agent runs."""
    await process.wait()
    now = agent.clock.now()
    what = f"the gate's keeper has ended with status {process.returncode}; see {agent.settings.run_directory}/gate.log"
    agent.conditions.set("gate keeper", what, now, "who comes now runs outside MPS; it is started again")
    agent.record("gate.keeper_ended", now, status=process.returncode)
    await asyncio.sleep(1.0)
    if not agent.stopping:
        await start_gate(agent)


async def adopt(agent: Agent) -> None:
    """Take over our own control daemon that runs already, and name the daemons of others."""
    found = await agent.supervisor.adopt()
    now = agent.clock.now()
    if isinstance(found, Running):
        agent.absorb([control_runs(found, agent.where, now)])
        agent.record("control.adopted", now, pid=found.pid, how=found.how)
    elif found.kind is ProblemKind.UNSAFE:
        agent.conditions.set("control daemon", found.text, now, do=" && ".join(found.commands))
        agent.record("control.unsafe", now, text=found.text, commands=list(found.commands))


async def read_logs(agent: Agent) -> dict[str, tuple[Position | None, LogParser]]:
    """The state from the logs, and what happened while no agent was there. Returns, for each log, how far it has been
    read and by which parser."""
    directory = agent.policy.log_directory
    control, server = LogParser("control", UTC), LogParser("server", UTC)
    caught = Caught([], None, None)
    if agent.supervisor.running is not None:
        caught = await asyncio.to_thread(
            catch_up, f"{directory}/control.log", f"{directory}/server.log", control, server, agent.socket_path
        )
        happened = agent.absorb(caught.events)
        old = agent.history.since(0, agent.inherited)
        since = float(str(old[-1]["at"])) - OVERLAP if old else agent.started
        fresh = [one for one in happened if one.at > since]
        for one in not_yet_written(fresh, old) if old else ():
            agent.counts["missed"] += 1
            agent.record(one.kind, one.at, **transition_fields(one))
    else:
        caught = caught._replace(control=_end(f"{directory}/control.log"), server=_end(f"{directory}/server.log"))
    return {"server": (caught.server, server), "control": (caught.control, control)}


def _end(path: str) -> Position | None:
    """Where a log ends now: no daemon runs, so what it says is over."""
    with suppress(OSError):
        status = os.stat(path)
        return Position(status.st_ino, status.st_size)
    return None


def take_up(agent: Agent, kept: dict[str, Any]) -> None:
    """What was ordered and begun before this agent."""
    now, drain = agent.clock.now(), kept.get("drain")
    with suppress(KeyError, TypeError, ValueError):
        if drain is not None:
            until = drain["until"]
            agent.absorb([inp.DrainOrdered(now, float(drain["since"]), None if until is None else float(until))])


def ending(kept: dict[str, Any], now: float) -> inp.Resumed:
    """The clients that an earlier agent had begun to end; told once the gate has said who lives."""
    found = []
    for row in kept.get("ending") or ():
        with suppress(ValueError, TypeError):
            pid, start, uid, reason, rule, asked = row
            found.append((int(pid), int(start), int(uid), str(reason), str(rule), bool(asked)))
    return inp.Resumed(now, tuple(found[:1000]))


def at_work(agent: Agent) -> bool:
    """Who comes now is served or held: the control daemon runs, and the gate has its admissions."""
    view = agent.core.view()
    gate = view.state.gate
    if gate is None or not gate.synced or view.sent is None or gate.applied < view.sent[0]:
        return False
    return view.control_alive or view.state.drain is not None


def hopeless(agent: Agent) -> bool:
    """It will not get there without a person's help."""
    return not HOPELESS.isdisjoint(agent.conditions.topics())


async def find_devices(agent: Agent) -> None:
    """Ask for the GPUs, again and again until there is an answer."""
    while not agent.stopping:
        found = await gpus.find(agent.settings, mps_environment(agent.policy, agent.where))
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
