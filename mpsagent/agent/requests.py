"""What a person may ask of a running agent, by way of the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpsagent.agent import saved
from mpsagent.agent.host import Agent
from mpsagent.agent.lease_body import Asked
from mpsagent.agent.node import Node
from mpsagent.core import inputs as inp
from mpsagent.core.model import Client, State
from mpsagent.policy.shares import Lease, Share, matches
from mpsagent.system.processes import lineage

MOST_LEASES = 1000


class Those(NamedTuple):
    """Clients: of one user, if `uid` is given, and of a job, in a cgroup or below the process `below`, if that is."""

    uid: int | None = None
    job: str | None = None
    cgroup: str | None = None
    below: int | None = None


def end_clients(agent: Agent, clients: Sequence[Client], *, at_once: bool, by: int) -> None:
    """Put clients on the ladder."""
    now = agent.clock.now()
    for one in clients:
        agent.record("client.end_ordered", now, pid=one.pid, uid=one.uid, start=one.peer.start, by=by)
    agent.take([inp.EndClient(now, one.pid, by, at_once) for one in clients])


def those_of(those: Those, clients: Sequence[Client]) -> list[Client]:
    """Those who are to be ended. Who has left its server, and lives on, is none: nothing of it can hurt a neighbour.
    Reads /proc."""
    found = [
        one for one in clients
        if one.detached is None and those.uid in (None, one.uid) and those.job in (None, one.job)
        and (those.cgroup is None or (one.peer.cgroup is not None and matches(those.cgroup, one.peer.cgroup)))
    ]  # fmt: skip
    if those.below is None:
        return found
    lines = [(one, lineage(one.pid)) for one in found]
    return [one for one, line in lines if line[:1] == ((one.pid, one.peer.start),) and those.below in dict(line)]


def ending(state: State, pid: int, *, at_once: bool, dry_run: bool) -> dict[str, Any]:
    """How a client is ended, step by step."""
    client = state.clients.get(pid)
    found: dict[str, Any] = {"pid": pid, "dry_run": dry_run, "ok": False}
    if client is None:
        return {**found, "why": "no such client has passed the gate"}
    policy, server = state.policy, state.server_of(pid)
    steps = [f"terminate_client {server.pid if server is not None else 'SERVER'} {pid}, "
             f"at most {policy.hang_terminate:g} s", "SIGTERM"]  # fmt: skip
    steps.append(f"after {policy.kill_grace:g} s SIGKILL")
    if policy.before_end is not None and not at_once:
        steps.insert(0, f"hook {policy.before_end}, at most {policy.hook_deadline:g} s")
    return {
        **found, "ok": True, "uid": client.uid, "server": None if server is None else server.pid, "steps": steps,
    }  # fmt: skip


def drain(agent: Agent, timeout: float | None, by: int) -> float | None:
    """Maintenance: admit nothing new. Returns when running work is ended, if ever."""
    agent.record("drain.ordered", agent.clock.now(), by=by, timeout=timeout)
    return _drain(agent, timeout, restart=False)


def _drain(agent: Agent, timeout: float | None, *, restart: bool) -> float | None:
    now = agent.clock.now()
    until = None if timeout is None else now + timeout
    agent.take([inp.DrainOrdered(now, now, until, restart)])
    since = now if agent.state.drain is None else agent.state.drain.since
    agent.store.put("drain", {"since": since, "until": until, "restart": restart})
    return until


def resume(agent: Agent, by: int) -> bool:
    """The end of a drain: who waits is let in at once. Whether there was one."""
    now, drained = agent.clock.now(), agent.state.drain is not None
    agent.store.put("drain", None)
    if drained:
        agent.record("drain.resumed", now, by=by)
    agent.take([inp.DrainResumed(now)])
    return drained


def give_lease(node: Node, asked: Asked, by: int) -> Lease | str:
    """A share for a job, in place of an earlier one of that name; why not, in words."""
    now, process, given = node.clock.now(), None, node.agents[0].state.leases
    earlier = [one for one in given if asked.name is not None and one.name == asked.name]
    if len(given) - len(earlier) >= MOST_LEASES:
        return f"there are {MOST_LEASES} leases already"
    if asked.pid is not None:
        line = lineage(asked.pid)
        if not line:
            return f"there is no process {asked.pid}"
        process = line[0]
    number = int(node.store.get(saved.LEASE, 0)) + 1
    source = f"lease {number}"
    share = Share(source, **asked.share, job=asked.name or source)
    until = now + asked.seconds if asked.seconds is not None else (asked.until or 0.0) + node.clock.shift()
    lease = Lease(number, share, now, until, by, asked.uid, asked.cgroup, process, asked.name)
    node.store.put(saved.LEASE, number)
    ended = [inp.LeaseEnded(now, one.number, by) for one in earlier]
    for one in node.agents:  # the job may be placed at any instance
        one.take([*ended, inp.LeaseGiven(now, lease)])
        one.store.put("leases", saved.lease_rows(one.core))
    return lease


def end_lease(node: Node, number: int, by: int) -> bool:
    if all(one.number != number for one in node.agents[0].state.leases):
        return False
    for one in node.agents:
        one.take([inp.LeaseEnded(one.clock.now(), number, by)])
        one.store.put("leases", saved.lease_rows(one.core))
    return True


def restart(agent: Agent, timeout: float | None, by: int, *, dry_run: bool) -> bool:
    """Start the control daemon anew, also out of the failed state; a running one is asked to quit first, when its
    clients have ended or after ``timeout`` seconds. False in a drain: nothing is started then, and who works would lose
    it for nothing. ``dry_run``: only say that."""
    drained = agent.state.drain
    if drained is not None and not drained.restart:
        return False
    if dry_run:
        return True
    now = agent.clock.now()
    agent.record("control.restart_ordered", now, by=by, timeout=timeout)
    if timeout is not None and agent.view().control_alive:
        _drain(agent, timeout, restart=True)
    else:
        agent.take([inp.RestartOrdered(now, by)])
    return True
