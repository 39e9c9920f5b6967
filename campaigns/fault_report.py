"""What came out of fault_trial.py: the rounds, a table, a plot."""

from __future__ import annotations

import io
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MODES = ("own", "shared", "together", "apart")
TITLES = {
    (True, "own"): "turns, server own", (True, "shared"): "turns, server shared", (True, "together"): "together",
    (True, "apart"): "apart", (False, "own"): "bare, one user's server at a time",
    (False, "shared"): "bare, one server for all users", (False, "together"): "bare, one server for all users",
    (False, "apart"): "bare, a daemon for each user",
}  # fmt: skip
PUBLISHED = 6.0
"""Of 100 faults so many left a client asleep that had to be restarted by hand, others have published."""


@dataclass
class Round:
    """One moment in which clients faulted. Fates: works, ended, ended by a signal, leftover."""

    mode: str
    agent: bool
    gpu: int
    careless: bool
    at: float = 0.0
    injected: int = 0
    late: int = 0
    """Illegal accesses that were launched when a client had been told of an error: not counted as injected."""
    until_told: float | None = None
    """Seconds from the first launch to the first error anywhere."""
    faulty: dict[str, int] = field(default_factory=dict)
    beside: dict[str, str] = field(default_factory=dict)
    served: dict[str, float | None] = field(default_factory=dict)
    """Seconds from the fault to the first result of the next client of the same user and of another."""
    refused: dict[str, int] = field(default_factory=dict)
    by_hand: int = 0
    problems: list[str] = field(default_factory=list)

    def leftovers(self, careless: bool) -> int:
        found = [kind for kind, fate in self.beside.items() if fate == "leftover" and (kind == "careless") == careless]
        return len(found) + (0 if careless else self.faulty.get("leftover", 0))


def times(values: Sequence[float]) -> str:
    if not values:
        return "-"
    ranked = sorted(values)
    return f"{statistics.median(ranked):.2f} ({ranked[0]:.2f} to {ranked[-1]:.2f})"


def hit(rounds: Sequence[Round], kinds: Sequence[str]) -> str:
    fates = Counter(one.beside[kind] for one in rounds for kind in kinds if kind in one.beside)
    return f"{fates.total() - fates['works']} of {fates.total()}" if fates else "none at work"


def served(rounds: Sequence[Round], who: str) -> list[float]:
    return [value for one in rounds if (value := one.served.get(who)) is not None]


def asleep(rounds: Sequence[Round]) -> int:
    """Rounds that left a client asleep."""
    return sum(bool(one.leftovers(True) + one.leftovers(False)) for one in rounds)


HEAD = (
    "", "faults", "rounds", "hit: same user", "hit: other users", "leftovers: careful", "careless",
    "rounds with a leftover", "next client refused", "served after (s): same user", "other user",
)  # fmt: skip


def row(title: str, rounds: Sequence[Round]) -> list[str]:
    injected = sum(one.injected for one in rounds)
    careful, careless = (sum(one.leftovers(kind) for one in rounds) for kind in (False, True))
    return [
        title, str(injected), str(len(rounds)), hit(rounds, ("careful", "careless")), hit(rounds, ("other",)),
        str(careful), f"{careless} of {sum('careless' in one.beside for one in rounds)}",
        f"{asleep(rounds)} of {len(rounds)}",
        str(sum(sum(one.refused.values()) for one in rounds)),
        times(served(rounds, "same")), times(served(rounds, "other")),
    ]  # fmt: skip


def groups(rounds: Sequence[Round]) -> list[tuple[str, list[Round]]]:
    found = []
    for agent in (True, False):
        for mode in MODES:
            if some := [one for one in rounds if (one.agent, one.mode) == (agent, mode)]:
                found.append((TITLES[agent, mode], some))
    return found


def table(rounds: Sequence[Round]) -> list[str]:
    lines = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    rows = [row(title, some) for title, some in groups(rounds)]
    for agent, title in ((True, "**with the agent**"), (False, "**without it**")):
        if some := [one for one in rounds if one.agent == agent]:
            rows.append(row(title, some))
    return [*lines, *(f"| {' | '.join(cells)} |" for cells in rows)]


def drawn(rounds: Sequence[Round], title: str, form: str) -> bytes:
    """Leftovers, and the time to service, with the agent and without. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    found = groups(rounds)
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    figure.suptitle(title, fontsize=11)
    left, right = figure.subplots(1, 2)
    places = list(range(len(found)))[::-1]
    with_agent = [some[0].agent for _, some in found]
    colours = ["#0072B2" if agent else "#D55E00" for agent in with_agent]
    shares = [100 * asleep(some) / len(some) for _, some in found]
    left.barh(places, shares, color=colours, height=0.6)
    left.axvline(PUBLISHED, color="#777777", linestyle="--", linewidth=1)
    left.text(PUBLISHED, -0.52, " published", color="#555555", fontsize=8)
    for place, value, (_, some) in zip(places, shares, found, strict=True):
        left.text(value, place, f" {asleep(some)} of {len(some)}", va="center", fontsize=8)
    left.set_yticks(places, [name for name, _ in found], fontsize=9)
    left.set(xlabel="faults that left a client asleep, of 100", xlim=(0, 1.35 * max([PUBLISHED, *shares])))
    for place, colour, (_, some) in zip(places, colours, found, strict=True):
        for who, shift, mark in (("same", 0.15, "o"), ("other", -0.15, "^")):
            values = served(some, who)
            right.plot(values, [place + shift] * len(values), mark, color=colour, alpha=0.4, markersize=4,
                       linestyle="none")  # fmt: skip
    right.set_yticks(places, [""] * len(found))
    right.set_xlabel("seconds from the fault to the next client's first result")
    if any(one.served.get(who) for one in rounds for who in ("same", "other")):
        right.set_xscale("log")
    right.plot([], [], "o", color="#777777", label="same user")
    right.plot([], [], "^", color="#777777", label="another user")
    right.legend(fontsize=8)
    right.xaxis.set_major_formatter("{x:g}")
    right.xaxis.set_minor_formatter("{x:g}")
    right.tick_params(which="both", labelsize=8)
    for one in (left, right):
        one.set_ylim(-0.6, len(found) - 0.4)
        one.grid(alpha=0.3)
    written = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None} if form == "svg" else {}
    figure.savefig(written, format=form, dpi=150, metadata=metadata)
    return written.getvalue()


def write(out: Path | None, about: dict[str, Any], rounds: Sequence[Round], problems: list[str], wanted: int) -> int:
    """Says what came out, writes it to `out`, and returns the exit status. `wanted`: faults with the agent."""
    ours = [one for one in rounds if one.agent]
    leftovers = sum(one.leftovers(True) + one.leftovers(False) for one in ours)
    refused = sum(sum(one.refused.values()) for one in ours)
    injected = sum(one.injected for one in ours)
    wrong = [text for one in ours for text in one.problems]
    good = not leftovers and not refused and not wrong and injected >= wanted
    lines = table(rounds)
    told = [one.until_told for one in rounds if one.until_told is not None]
    notes = [
        f"with the agent {injected} of {wanted} faults, {leftovers} leftovers, {refused} refused: "
        f"{'good' if good else 'NOT GOOD'}",
        f"illegal accesses launched after the first error of a client, not counted: {sum(one.late for one in rounds)}",
        f"from launch to the first error (s): {times(told)}",
        f"ended by hand: {sum(one.by_hand for one in rounds)}; rounds whose next client was never served: "
        f"{sum(any(value is None for value in one.served.values()) for one in rounds)}",
    ]
    print("\n".join([*lines, *(f"ANSWER fault trial: {note}" for note in notes)]))
    print("\n".join(f"PROBLEM {text[:1500]}" for text in [*problems, *wrong][:12]), flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        head = ["# Faults beside working clients", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
        tail = [
            "",
            *(f"- {note}" for note in notes),
            *(f"- PROBLEM: {' '.join(text.split())[:400]}" for text in problems),
        ]
        (out / "fault-trial.md").write_text("\n".join([*head, *lines, *tail]) + "\n")
        body = {"about": about, "problems": [*problems, *wrong], "rounds": [asdict(one) for one in rounds]}
        (out / "fault-trial.json").write_text(json.dumps(body, indent=1))
        place = about.get("driver") or about.get("MPS", "")
        title = f"Faults beside working clients, {about.get('device 0', '')}, {place}"
        for form in ("svg", "png"):
            try:
                (out / f"fault-trial.{form}").write_bytes(drawn(rounds, title, form))
            except ImportError as error:
                print(f"no picture: {error}")
                break
    return 0 if good else 1
