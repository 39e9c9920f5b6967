"""What a person may order of a running agent, by way of the API."""

from __future__ import annotations

from typing import Any

from mpsagent.agent.loop import Agent
from mpsagent.core import actions as act
from mpsagent.core import decide
from mpsagent.core.world import Drain


def end_client(agent: Agent, pid: int, *, at_once: bool, dry_run: bool, by: int) -> dict[str, Any]:
    """Put a client on the ladder; ``dry_run``: only say what would be done."""
    client = agent.state.clients.get(pid)
    found: dict[str, Any] = {"pid": pid, "dry_run": dry_run, "ok": False}
    if client is None or client.uid is None:
        return {**found, "why": "MPS lists no such client"}
    policy = agent.policy
    steps = [f"terminate_client {client.server} {pid}, at most {policy.hang_terminate:g} s", "SIGTERM"]
    steps.append(f"after {policy.kill_grace:g} s SIGKILL")
    if policy.before_end is not None and not at_once:
        steps.insert(0, f"hook {policy.before_end}, at most {policy.hook_deadline:g} s")
    found |= {"ok": True, "uid": client.uid, "server": client.server, "steps": steps}
    if not dry_run:
        now = agent.clock.now()
        process = agent.processes.get(pid)
        start = process.started if process is not None else None
        agent.record("client.end_ordered", now, pid=pid, uid=client.uid, start=start, by=by)
        agent.memory = decide.end_client(
            agent.world(), agent.memory, pid, now,
            reason=f"ordered by uid {by}", rule="order", at_once=at_once,
        )  # fmt: skip
        agent.decide_now()
    return found


def drain(agent: Agent, timeout: float | None, by: int) -> float | None:
    """Maintenance: serve no new user. Returns when running work is ended, if ever."""
    now = agent.clock.now()
    agent.drain = Drain(now, None if timeout is None else now + timeout)
    agent.record("drain.ordered", now, by=by, timeout=timeout)
    agent.decide_now()
    return agent.drain.until


def resume(agent: Agent, by: int) -> None:
    if agent.drain is not None:
        agent.drain = None
        agent.record("drain.resumed", agent.clock.now(), by=by)
        agent.decide_now()


def restart(agent: Agent, by: int) -> None:
    """Start the control daemon again, also out of the failed state; a running one is asked to quit first."""
    now = agent.clock.now()
    agent.record("control.restart_ordered", now, by=by)
    agent.memory = decide.start_again(agent.memory)
    if agent.unreachable_since is not None:  # nobody could tell it to quit
        reason = f"restart ordered by uid {by}; its socket has gone, so it cannot be asked"
        agent.dispatch(act.KillControl(reason=reason, rule="order"), now)
    elif agent.supervisor.running is not None:
        timeout = max(1, round(agent.policy.kill_grace))
        agent.dispatch(act.QuitControl(timeout=timeout, reason=f"restart ordered by uid {by}", rule="order"), now)
    agent.decide_now()
