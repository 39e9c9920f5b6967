"""What an agent remembers beyond its own life: a drain, whose turn it is, who is being ended. Pure.

The rows are JSON. What an earlier agent has kept is held against what the gate says now: a process is told by pid and
start time, and a turn only goes on for a user who still has clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mpsagent.core import inputs as inp
from mpsagent.core.engine import Core
from mpsagent.core.ladder import Rung
from mpsagent.core.turns import Memory
from mpsagent.core.view import Turn

MOST = 1000
"""Clients that are being ended; a server has 48."""


def ending_rows(core: Core) -> list[list[Any]]:
    """Who is being ended, so that the next agent goes on with it and asks MPS nothing twice."""
    climbs = core.memories.ladder.climbs
    return [[c.pid, c.start, c.uid, c.reason, c.rule, c.asked or c.rung > Rung.TERMINATE] for c in climbs.values()]


def turn_row(core: Core) -> list[Any] | None:
    """Whose turn it is and how far it has come, so that a warning is given once and a grace does not begin anew."""
    turn = core.memories.turns.turn
    return None if turn is None else [turn.uid, turn.since, turn.contested, turn.warned, turn.ending]


def served_rows(core: Core) -> list[list[Any]]:
    """Who had a turn and waits again: behind those who came meanwhile."""
    return [[uid, at] for uid, at in core.memories.turns.served.items()]


def drain(kept: Mapping[str, Any], now: float) -> list[inp.Input]:
    """Maintenance goes on: an upgrade in the middle of it must not let users back in."""
    with suppress(KeyError, TypeError, ValueError):
        row = kept["drain"]
        until = row["until"]
        return [inp.DrainOrdered(now, float(row["since"]), None if until is None else float(until))]
    return []


def ending(kept: Mapping[str, Any], now: float) -> inp.Resumed:
    """To be told once the gate has said who lives."""
    found = []
    rows = kept.get("ending")
    for row in rows[:MOST] if isinstance(rows, list) else ():
        with suppress(ValueError, TypeError):
            pid, start, uid, reason, rule, asked = row
            found.append((int(pid), int(start), int(uid), str(reason), str(rule), bool(asked)))
    return inp.Resumed(now, tuple(found))


def take_up_turn(core: Core, kept: Mapping[str, Any], told: Iterable[inp.Input]) -> None:
    """Before the engine decides for the first time: the turn goes on where the earlier agent was with it, when its user
    has a client among what the gate has ``told``."""
    with suppress(ValueError, TypeError, KeyError):
        served = {int(uid): float(at) for uid, at in kept["served"][:MOST]}
        core.memories = replace(core.memories, turns=Memory(served=served))
    with suppress(ValueError, TypeError, KeyError):
        uid, since, contested, warned, end = kept["turn"]
        turn = Turn(int(uid), float(since), *(None if at is None else float(at) for at in (contested, warned, end)))
        if any(isinstance(one, inp.Known) and one.peer.uid == turn.uid for one in told):
            core.memories = replace(core.memories, turns=replace(core.memories.turns, turn=turn))
