"""What a person may ask of a running agent, by way of the API."""

from __future__ import annotations

from typing import Any

from mpsagent.agent.host import Agent
from mpsagent.core import inputs as inp


def end_client(agent: Agent, pid: int, *, at_once: bool, dry_run: bool, by: int) -> dict[str, Any]:
    """Put a client on the ladder; ``dry_run``: only say what would be done."""
    client = agent.state.clients.get(pid)
    found: dict[str, Any] = {"pid": pid, "dry_run": dry_run, "ok": False}
    if client is None:
        return {**found, "why": "no such client has passed the gate"}
    policy, server = agent.policy, agent.state.server_of(pid)
    steps = [f"terminate_client {server.pid if server is not None else 'SERVER'} {pid}, "
             f"at most {policy.hang_terminate:g} s", "SIGTERM"]  # fmt: skip
    steps.append(f"after {policy.kill_grace:g} s SIGKILL")
    if policy.before_end is not None and not at_once:
        steps.insert(0, f"hook {policy.before_end}, at most {policy.hook_deadline:g} s")
    found |= {"ok": True, "uid": client.uid, "server": None if server is None else server.pid, "steps": steps}
    if not dry_run:
        now = agent.clock.now()
        agent.record("client.end_ordered", now, pid=pid, uid=client.uid, start=client.peer.start, by=by)
        agent.take([inp.EndClient(now, pid, by, at_once)])
    return found


def drain(agent: Agent, timeout: float | None, by: int) -> float | None:
    """Maintenance: admit nothing new. Returns when running work is ended, if ever."""
    now = agent.clock.now()
    until = None if timeout is None else now + timeout
    agent.store.put("drain", {"since": now, "until": until})
    agent.record("drain.ordered", now, by=by, timeout=timeout)
    agent.take([inp.DrainOrdered(now, now, until)])
    return until


def resume(agent: Agent, by: int) -> None:
    """The end of a drain: who waits is let in at once."""
    now = agent.clock.now()
    agent.store.put("drain", None)
    if agent.state.drain is not None:
        agent.record("drain.resumed", now, by=by)
    agent.take([inp.DrainResumed(now)])


def restart(agent: Agent, by: int) -> None:
    """Start the control daemon anew, also out of the failed state; a running one is asked to quit first."""
    now = agent.clock.now()
    agent.record("control.restart_ordered", now, by=by)
    agent.take([inp.RestartOrdered(now, by)])
