"""The four promises of README, judged by the output of the programs, its times, and their exit statuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from demo.show import Show
from demo.stage import Client
from mpsagent.mps.units import parse_bytes
from mpsagent_sim import gpu

CHANGE_LIMIT = 2.0
"""Seconds from the last exit of the user who has the GPU until the next user is served. MPS alone: up to 3.9 s, growing
with the time held (recording 02, R3); a change takes about 0.5 s."""
BLOCK_LIMIT = 2.0
"""Seconds for a client during silent connections and open front-ends. MPS alone: without end."""


@dataclass
class Facts:
    """What the scenes observed. ``limits``: percent of the multiprocessors and memory as in the policy, by uid; times
    in seconds. ``wait_limit``: time_limit, grace, and two seconds. ``answers``: the reason and the seconds until the
    latest time that waiting users saw. ``allowance`` is added to every limit, for a busy
    machine. ``ended``: clients that the agent had to end, ``undisturbed``: those that had to finish their work."""

    limits: Mapping[int, tuple[float, str]]
    wait_limit: float
    clients: list[Client] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    blocks: list[float] = field(default_factory=list)
    ended: list[Client] = field(default_factory=list)
    undisturbed: list[Client] = field(default_factory=list)
    outages: list[tuple[str, float, float]] = field(default_factory=list)
    allowance: float = 0.0
    answers: list[tuple[str, float | None]] = field(default_factory=list)

    def changed(self, first: Client, second: Client, since: float = 0.0) -> None:
        """``second``'s user waited while ``first`` was the last client of the user who had the GPU. ``since``: when
        there was an agent again."""
        assert first.ended is not None
        self.changes.append((second.served() or float("inf")) - max(first.ended, since))

    def turn(self, patient: Client) -> None:
        self.turns.append(patient.waited())

    def blocked(self, client: Client) -> None:
        """Note a client that came during connections which block MPS."""
        self.blocks.append(client.waited())

    def removed(self, client: Client, neighbours: Sequence[Client]) -> None:
        self.ended.append(client)
        self.undisturbed += neighbours

    def outage(self, what: str, seconds: float, limit: float) -> None:
        """``limit``: what the policy allows until a client is served again; a second is added for being served."""
        self.outages.append((what, seconds, limit + 1.0 + self.allowance))


def judge_default(neighbours: Sequence[Client], faulty: Client, show: Show, *, at_once: bool) -> bool:
    """Show and return whether the default kept its promise. ``at_once``: all programs had a CUDA context at the same
    time. ``neighbours``: the programs of the other users, which had to exit with status 0 after ``faulty`` failed."""
    harmed = [one for one in neighbours if one.process.returncode != 0 or one.outside()]
    failed = faulty.process.returncode != 0
    kept = at_once and failed and bool(neighbours) and not harmed
    for what, wrong in (("a user waited for another one", not at_once), ("the fault did not occur", not failed)):
        if wrong:
            show.plain(f"     {what}", "bad")
    for one in harmed:
        show.plain(f"     program {one.pid} of uid {one.uid} was harmed: {one.lines[-1:]}", "bad")
    word, style = ("kept", "good") if kept else ("BROKEN", "bad")
    show.plain(f"Without a policy no user waits, and a fault harms no other user: {word}", style)
    return kept


Verdict = tuple[bool | None, list[str]]
TITLES = (
    "Every program has exactly its user's limits",
    "A waiting user can see why, and until when",
    "If mpsagent terminates a program, no other loses its work",
    "mpsagent recovers from a fault, a hang or a crash",
)
"""The promises in the words of README."""


def judge(facts: Facts, events: list[dict[str, Any]], show: Show, *, took: float, left: list[int]) -> bool:
    """Print the summary and return whether all promises were kept. ``events`` are counted only."""
    verdicts = [_limits(facts), _waits(facts), _neighbours(facts), _ends(facts, left)]
    show.title(f"\nThe four promises, judged by the programs' output in {took:.0f} s (MPS and the GPU were simulated)")
    for number, (title, (kept, texts)) in enumerate(zip(TITLES, verdicts, strict=True), 1):
        word = "not shown" if kept is None else "kept" if kept else "BROKEN"
        show.plain(f"{number}. {title}: {word}", "good" if kept else "warn" if kept is None else "bad")
        for text in texts:
            show.plain(f"     {text}")
    show.plain(f"{len(events)} events of the agent were followed.")
    return all(kept is not False for kept, _ in verdicts)


def entitled(percent: float, memory: str) -> tuple[int, int]:
    """Multiprocessors and MiB that a client sees with these limits, by the simulator's own arithmetic."""
    total = gpu.TOTAL << 20
    size = int(total * float(memory[:-1]) / 100) if memory.endswith("%") else parse_bytes(memory)
    count = gpu.multiprocessors(percent)
    return count, gpu.free(count, size >> 20, 0, 0)


def _limits(facts: Facts) -> Verdict:
    served, wrong = 0, []
    for client in facts.clients:
        found = client.limits()
        if found is None:
            continue
        served += 1
        due = entitled(*facts.limits[client.uid])
        if found != due or client.outside():
            where = " outside MPS" if client.outside() else ""
            wrong.append(f"client {client.pid} of uid {client.uid}{where}: {_words(*found)} instead of {_words(*due)}")
    return served > 0 and not wrong, [
        f"{served} clients were served: {served - len(wrong)} saw exactly their user's limits, {len(wrong)} others",
        *wrong,
    ]


def _words(sms: int, free: int) -> str:
    return f"{sms} multiprocessors, {free} MiB"


def _waits(facts: Facts) -> Verdict:
    if not facts.changes and not facts.turns:
        return None, ["there were no turns: without root all users are one"]
    change, block, wait_limit = (limit + facts.allowance for limit in (CHANGE_LIMIT, BLOCK_LIMIT, facts.wait_limit))
    complete = [why for why, latest in facts.answers if why and latest is not None]
    kept = (
        0 < len(facts.answers) == len(complete)
        and all(gap <= change for gap in facts.changes)
        and all(wait <= wait_limit for wait in facts.turns)
        and all(wait <= block for wait in facts.blocks)
    )
    return kept, [
        f"the queue had a reason and a latest time for {len(complete)} of {len(facts.answers)} waiting users",
        f"served at most {max(facts.changes, default=0):.2f} s after the last client of the user before had ended "
        f"(limit here {change:g} s), {len(facts.changes)} times",
        f"against a user who never stops: served after {max(facts.turns, default=0):.2f} s (limit here "
        f"{wait_limit:g} s: time_limit + grace + {2 + facts.allowance:g} s), {len(facts.turns)} times",
        f"during silent connections and an open front-end: served after {max(facts.blocks, default=0):.2f} s (limit "
        f"here {block:g} s), {len(facts.blocks)} times",
    ]


def _neighbours(facts: Facts) -> Verdict:
    harmed = [client for client in facts.undisturbed if client.process.returncode != 0]
    texts = [
        f"{len(facts.ended)} stopped program was terminated during a kernel, and gate and agent were killed: "
        f"{len(facts.undisturbed) - len(harmed)} of {len(facts.undisturbed)} other programs at work finished"
    ]
    texts += [f"client {client.pid}: {client.lines[-1:]}" for client in harmed]
    return bool(facts.undisturbed) and not harmed, texts


def _ends(facts: Facts, left: list[int]) -> Verdict:
    refused = [f"client {client.pid} of uid {client.uid}: {error}" for client in facts.clients
               if (error := client.error()) is not None]  # fmt: skip
    texts = [f"{what}: served after {took:.2f} s (limit here {limit:g} s)" for what, took, limit in facts.outages]
    texts.append(f"clients refused: {len(refused)} of {len(facts.clients)}; processes left behind: {len(left)}")
    in_time = bool(facts.outages) and all(took <= limit for _, took, limit in facts.outages)
    return in_time and not refused and not left, [*texts, *refused]
