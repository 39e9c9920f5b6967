"""The four promises, judged by what was observed: what clients printed and when, how they ended, the agent's events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from demo.show import Show
from demo.stage import Client
from mpsagent.sim import gpu

CHANGE_LIMIT = 2.0
"""Seconds from the holder's last exit until the next user is served. MPS alone: up to 3.9 s, growing with the time held
(recording 02, R3); a change takes about 0.5 s."""


@dataclass
class Facts:
    """What the scenes observed. ``limits``: percent of the multiprocessors and GiB by uid; times in seconds."""

    limits: Mapping[int, tuple[float, int]]
    wait_limit: float
    clients: list[Client] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    ended: list[Client] = field(default_factory=list)
    neighbours: list[Client] = field(default_factory=list)
    troubles: list[tuple[str, float, float]] = field(default_factory=list)

    def changed(self, first: Client, second: Client) -> None:
        """``second``'s user waited while ``first`` was the holder's last client."""
        assert first.ended is not None
        self.changes.append((second.served() or float("inf")) - first.ended)

    def turn(self, patient: Client) -> None:
        self.turns.append((patient.served() or float("inf")) - patient.began)

    def removed(self, client: Client, neighbours: Sequence[Client]) -> None:
        self.ended.append(client)
        self.neighbours += neighbours

    def trouble(self, what: str, seconds: float, limit: float) -> None:
        """``limit``: what the policy allows until somebody is served again; a second is added for being served."""
        self.troubles.append((what, seconds, limit + 1.0))


def judge(facts: Facts, events: list[dict[str, Any]], show: Show, *, took: float, left: list[int]) -> bool:
    """Prints the summary; True when all promises were kept."""
    verdicts = [_limits(facts, events), _waits(facts, events), _ladder(facts), _troubles(facts, left)]
    titles = (
        "No client ever gets more than its policy",
        "The GPU is never idle while somebody waits, and nobody waits longer than the policy says",
        "Ending one client never hurts another",
        "A fault, a hang or a crash ends by itself",
    )
    show.title(f"\nThe four promises, as observed in {took:.0f} s (MPS and the GPU were simulated)")
    for number, (title, (kept, texts)) in enumerate(zip(titles, verdicts, strict=True), 1):
        word = "not shown" if kept is None else "kept" if kept else "BROKEN"
        show.plain(f"{number}. {title}: {word}", "good" if kept else "warn" if kept is None else "bad")
        for text in texts:
            show.plain(f"     {text}")
    return all(kept is not False for kept, _ in verdicts)


def _limits(facts: Facts, events: list[dict[str, Any]]) -> tuple[bool | None, list[str]]:
    served, over, under = 0, [], 0
    for client in facts.clients:
        found = client.limits()
        if found is None:
            continue
        served += 1
        percent, gibibytes = facts.limits[client.uid if client.uid in facts.limits else next(iter(facts.limits))]
        sms, free = found
        if sms > gpu.multiprocessors(percent) or free > gibibytes * 1024:
            over.append(f"client {client.pid} of uid {client.uid}: {sms} multiprocessors, {free} MiB")
        elif sms < gpu.multiprocessors(percent):
            under += 1
    verified = sum(event["kind"] == "limits.verified" for event in events)
    mismatched = sum(event["kind"] == "limits.mismatch" for event in events)
    texts = [
        f"{served} clients were served: {len(over)} over their user's limits, {served - len(over) - under} exactly on "
        f"them, {under} below",
        f"{verified} servers proved by their own log, {mismatched} with other limits than the policy's",
        *over,
    ]
    return (served > 0 and not over), texts


def _waits(facts: Facts, events: list[dict[str, Any]]) -> tuple[bool | None, list[str]]:
    if not facts.changes and not facts.turns:
        return None, ["nobody had to wait: without root all users are one"]
    kept = all(gap <= CHANGE_LIMIT for gap in facts.changes) and all(wait <= facts.wait_limit for wait in facts.turns)
    queued = {event["pid"]: _at(event) for event in events if event["kind"] == "client.waiting"}
    waits = [_at(e) - queued[e["pid"]] for e in events if e["kind"] == "client.connected" and e["pid"] in queued]
    return kept, [
        f"served at most {max(facts.changes, default=0):.2f} s after the holder's last client had ended (limit here "
        f"{CHANGE_LIMIT:g} s), {len(facts.changes)} times",
        f"against a user who never stops: served after {max(facts.turns, default=0):.2f} s (limit here "
        f"{facts.wait_limit:g} s: after + grace + 2 s), {len(facts.turns)} times",
        f"{len(queued)} clients had to wait, {len(waits)} were served, at most {max(waits, default=0):.2f} s later",
    ]


def _at(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["at"]).timestamp()


def _ladder(facts: Facts) -> tuple[bool | None, list[str]]:
    harmed = [client for client in facts.neighbours if client.process.returncode != 0]
    texts = [
        f"{len(facts.ended)} stopped client with a kernel in flight was ended; of {len(facts.neighbours)} neighbours "
        f"at work {len(facts.neighbours) - len(harmed)} finished undisturbed"
    ]
    texts += [f"neighbour {client.pid}: {client.lines[-1:]}" for client in harmed]
    return (bool(facts.neighbours) and not harmed), texts


def _troubles(facts: Facts, left: list[int]) -> tuple[bool | None, list[str]]:
    texts = [
        f"{what}: served again after {took:.2f} s (limit here {limit:g} s)" for what, took, limit in facts.troubles
    ]
    texts.append(f"processes left behind at the end: {len(left)}")
    return bool(facts.troubles) and all(took <= limit for _, took, limit in facts.troubles) and not left, texts
