"""A change of user: from the last exit of A to B's first finished query, B having come half a second after A."""

from __future__ import annotations

import statistics
import time

from benchmarks.figure import Figure
from benchmarks.place import ALICE, BOB, stage
from demo.stage import Client, Stage

WITHIN = {"shared": 0.05, "own": 0.25}
"""Seconds that a change of user may take longer than a client's own start."""


def gaps(quick: bool) -> list[Figure]:
    """With both server forms and without the product, in the same seconds."""
    held, rounds = ((1,), 1) if quick else ((3, 6, 10), 2)
    found = []
    with stage(server="shared") as shared, stage() as own, stage() as bare:
        for node in (shared, own):
            node.start_agent()
            node.open()
        bare.start_control()
        nodes = {"shared": shared, "own": own, "bare": bare}
        for seconds in held:
            gone: dict[str, list[float]] = {name: [] for name in nodes}
            alone = []
            for _ in range(rounds):
                alone.append(_alone(shared))
                pairs = {}
                for name, node in nodes.items():  # begun apart, so that their changes do not meet
                    pairs[name] = _contest(node, seconds)
                for name, (first, second) in pairs.items():
                    second.wait(120)
                    gone[name].append((second.ended or 0) - (first.ended or 0))
            middle = {name: statistics.median(values) for name, values in gone.items()}
            now = statistics.median(alone)
            for name, within in WITHIN.items():
                found.append(
                    Figure(f'change of user, server = "{name}", after A worked {seconds} s, median of {rounds}',
                           f"{middle[name]:.2f} s", f"within {within} s of a client's own start",
                           middle[name] - now <= within,
                           f"a client's own start: {now:.2f} s; bare MPS: {middle['bare']:.2f} s, "
                           f"{middle['bare'] / middle[name]:.1f} times")
                )  # fmt: skip
    return found


def _contest(node: Stage, seconds: int) -> tuple[Client, Client]:
    first = node.client(ALICE, "sleep", str(seconds))
    first.saw("^ctx")
    time.sleep(0.5)
    return first, node.client(BOB, "query")


def _alone(node: Stage) -> float:
    """No other client is there, and the server runs."""
    node.client(BOB, "query").wait()
    time.sleep(0.3)
    second = node.client(BOB, "query")
    second.wait()
    return (second.ended or 0) - second.began
