"""What the last agent had begun and the logs do not tell: a drain, and clients on the ladder. Its records do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from signal import Signals
from typing import Any

from mpsagent.core.ladder import Climb, Rung, Section
from mpsagent.core.model import State
from mpsagent.core.world import Drain
from mpsagent.policy.identity import Identity
from mpsagent.policy.policy import Policy, Rules
from mpsagent.system.processes import Process

Record = Mapping[str, Any]
_ENDED = {Signals.SIGTERM: Rung.SIGTERM, Signals.SIGKILL: Rung.SIGKILL}


def drain_of(records: Iterable[Record]) -> Drain | None:
    """The drain that was ordered last and not taken back."""
    found: Drain | None = None
    for record in records:
        if record["kind"] == "drain.ordered":
            timeout, at = record.get("timeout"), float(record["at"])
            found = Drain(at, None if timeout is None else at + float(timeout))
        elif record["kind"] == "drain.resumed":
            found = None
    return found


def climbs_of(records: Iterable[Record], state: State, policy: Policy, now: float) -> dict[int, Climb]:
    """The ladders that were begun for processes that still live. What had been sent is not sent again: a client that
    MPS has been asked to terminate goes on at SIGTERM (asked twice, the daemon would hang; conformance scenario X8)."""
    found: dict[int, Climb] = {}
    for record in records:
        begun = _begun(record, state)
        if begun is None:
            continue
        pid, uid, start, rung = begun
        process = Process.open(pid, uid, start)
        if process is None:
            found.pop(pid, None)
            continue
        rules = policy.rules(Identity(uid))
        reason, rule = str(record.get("reason", "")), str(record.get("rule", "order"))
        asked = record.get("action") == "SignalClient"  # it was sent
        at = min(now, float(record["at"])) if asked else now
        found[pid] = _climb(process, state, reason, rule, rung, at, asked, policy, rules)
        process.close()
    return found


def _begun(record: Record, state: State) -> tuple[int, int, int | None, Rung] | None:
    """pid, uid, start (None: not written down) and the rung that is to come; None: no step of a ladder."""
    if record["kind"] not in ("action", "client.end_ordered") or record.get("enforce") is False:
        return None
    pid = record.get("pid")
    if not isinstance(pid, int):
        return None
    if record.get("action") == "SignalClient":
        uid, start, number = record.get("uid"), record.get("start"), record.get("signal")
        if isinstance(uid, int) and isinstance(start, int) and number in _ENDED:
            return pid, uid, start, _ENDED[Signals(number)]
        return None
    if record["kind"] != "client.end_ordered" and record.get("action") != "TerminateClient":
        return None
    client, start = state.clients.get(pid), record.get("start")
    if isinstance(start, int) and isinstance(uid := record.get("uid"), int):
        # Also one that has left its server since: its GPU work has been ended, the process lives on.
        left = client is None or client.uid != uid or client.terminated
        return pid, uid, start, Rung.SIGTERM if left else Rung.TERMINATE
    # Without its start only the client that MPS lists now can be meant, and only since it has been there.
    if client is None or client.uid is None or float(record["at"]) < client.since:
        return None
    return pid, client.uid, None, Rung.SIGTERM if client.terminated else Rung.TERMINATE


def _climb(
    process: Process,
    state: State,
    reason: str,
    rule: str,
    rung: Rung,
    at: float,
    asked: bool,
    policy: Policy,
    rules: Rules,
) -> Climb:
    client = state.clients.get(process.pid)
    return Climb(
        pid=process.pid,
        start=process.started,
        uid=process.uid,
        server=client.server if client is not None else 0,
        reason=reason or f"ordered by {rule}",
        rule=rule,
        rung=rung,
        at=at,
        asked=asked,
        kill_grace=rules.kill_grace,
        deadline=policy.hang_terminate,
        section=_section(rule),
    )


def _section(rule: str) -> Section:
    words = rule.split(".")
    return "hang" if words[0] == "hang" else "switch" if "switch" in words else "order" if rule == "order" else "limits"
