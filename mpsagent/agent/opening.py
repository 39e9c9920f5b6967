"""How the agent starts: who is there, what runs already, what the logs say, which GPUs there are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from mpsagent.agent import gpus
from mpsagent.agent.adoption import started_at, take_over
from mpsagent.agent.catch_up import OVERLAP, catch_up, not_yet_written, settled
from mpsagent.agent.performer import mps_environment
from mpsagent.agent.resume import climbs_of, drain_of
from mpsagent.mps.limits import Limits
from mpsagent.mps.loglines import LogParser
from mpsagent.system import pipedir
from mpsagent.system.control import Running, TroubleKind
from mpsagent.system.floor_file import FloorFile
from mpsagent.system.logfiles import Position
from mpsagent.system.user_environment import write_user_environment

if TYPE_CHECKING:
    from mpsagent.agent.loop import Agent

HOPELESS = {"control daemon", "control daemon failed", "front-end"}
"""Topics of troubles that somebody has to see to before users can be let in."""
MEETING = 0.25
"""Seconds for the names of those who work or wait when the agent starts; they take a few milliseconds."""
GPU_AGAIN = 30.0
"""Seconds until a driver that does not answer is asked again."""


def files_for_systemd(agent: Agent) -> FloorFile | None:
    """Under systemd: tell users' processes where the pipe directory is, and return the file for the unit's end."""
    if agent.settings.supervise != "systemd":
        return None
    what = write_user_environment(agent.policy.pipe_directory)
    agent.troubles.set("user environment", what, agent.clock.now(), "set pipe_directory in [instance.NAME]")
    return FloorFile(agent.policy.instance)


async def find_parked_user(agent: Agent) -> None:
    with suppress(TimeoutError):
        uid = await agent.names.uid_of(agent.policy.parked_user)
        if uid is not None:
            agent.parked_uid = uid
            return
    what = f"there is no user {agent.policy.parked_user} for the parked server; uid {agent.parked_uid} is used"
    agent.troubles.set("parked user", what, agent.clock.now(), "set agent.parked_user")


async def adopt(agent: Agent) -> None:
    """Take over a control daemon that runs already, or say why not."""
    found = await take_over(agent.supervisor, agent.policy)
    now = agent.clock.now()
    if isinstance(found, Running):
        agent.door_open = pipedir.is_open(agent.policy.pipe_directory)
        agent.record("control.adopted", now, pid=found.pid, how=found.how)
    elif found.kind is TroubleKind.UNSAFE:
        agent.troubles.set("control daemon", found.text, now, do=" && ".join(found.commands))
        agent.record("control.unsafe", now, text=found.text, commands=list(found.commands))


async def read_logs(agent: Agent) -> dict[str, tuple[Position | None, LogParser]]:
    """The state from the logs, what happened while no agent was there, and what the last one had begun. Returns, for
    each log, how far it has been read and by which parser."""
    directory, now = agent.policy.log_directory, agent.clock.now()
    control, server = LogParser("control"), LogParser("server")
    last = agent.inherited
    old = [record for record in agent.history.since(0, last) if int(str(record["seq"])) <= last]
    since = _at(old[-1]) - OVERLAP if old else agent.started
    caught = await asyncio.to_thread(
        catch_up, f"{directory}/control.log", f"{directory}/server.log", control, server, since, agent.socket_path
    )
    running = agent.supervisor.running
    about = None if running is None else (running.pid, started_at(running.process))
    agent.state = settled(caught.state, about, agent.socket_path, now)
    agent.last_switch = caught.last_ready
    for one in not_yet_written(caught.records, old) if old else ():
        agent.counts["missed"] += 1
        agent.record(one.kind, one.at, **one.fields)
    agent.drain = drain_of(old)
    climbs = climbs_of(old, agent.state, agent.policy, now)
    agent.memory = replace(agent.memory, ladder=replace(agent.memory.ladder, climbs=climbs))
    return {"server": (caught.server, server), "control": (caught.control, control)}


def at_work(agent: Agent) -> bool:
    """Nobody who comes now runs outside MPS or gets more than the policy: the control daemon runs, its defaults are
    confirmed, the door is open, and there is a server for which the first one has to wait."""
    if agent.supervisor.running is None or not agent.door_open:
        return False
    if agent.world().floor() == Limits():
        return True
    return agent.memory.limits.known is not None and bool(agent.state.servers or agent.state.waiting)


def hopeless(agent: Agent) -> bool:
    """It will not get there without somebody's help."""
    return not HOPELESS.isdisjoint(agent.troubles.topics())


def _at(record: Mapping[str, object]) -> float:
    return float(str(record["at"]))


async def meet_people(agent: Agent) -> None:
    """Know the names of those who have to do with MPS now before the first decision: without a name it is the floor's
    limits. The name service may hang, so not for long."""
    uids = {w.uid for w in agent.state.waiting} | {s.uid for s in agent.state.servers.values() if s.uid}
    agent.people.meet(uids)
    with suppress(TimeoutError):
        async with asyncio.timeout(MEETING):
            while not uids <= agent.people.known.keys():
                await asyncio.sleep(0.002)
                agent.people.meet(uids)


async def find_devices(agent: Agent) -> None:
    """Ask for the GPUs, again and again until there is an answer."""
    while not agent.stopping:
        found = await gpus.find(agent.settings, mps_environment(agent.policy))
        now = agent.clock.now()
        if not isinstance(found, str):
            agent.troubles.set("devices", None, now)
            gpus.remember(agent.settings, agent.policy.devices, found)
            agent.use_devices(found)
            return
        lesser = "those found last are taken" if agent.devices else "clients get less than their policy until then"
        do = f"see nvidia-smi; memory limits and multiprocessors are counted by the GPUs, {lesser}"
        agent.troubles.set("devices", found, now, do)
        await asyncio.sleep(GPU_AGAIN)
