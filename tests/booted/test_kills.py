"""Agent and gate are killed again and again under load: the hardest that an OOM killer or a bug can do."""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
from collections import Counter
from datetime import datetime
from typing import Any

import pytest

from tests.booted.gate import GATE
from tests.booted.machine import Machine
from tests.booted.service import (
    ALICE,
    BOB,
    CLIENT,
    MULTIPROCESSORS,
    SHARES,
    api,
    multiprocessors,
    ready,
    until,
)

# MPSAGENT_KILLS=200 is the figure to show, in some six minutes; not a part of `make test`.
KILLS = int(os.environ.get("MPSAGENT_KILLS", "0"))


class Load:
    """A user who starts one client after the other, and keeps what each of them said."""

    def __init__(self, node: Machine, user: str, end: threading.Event) -> None:
        self.user = user
        self.said: list[tuple[int, str]] = []
        self._node, self._end = node, end
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._end.is_set():
            done = self._node.run(CLIENT, "work", str(random.randint(5, 40)), user=self.user, check=False)
            self.said.append((done.returncode, done.stdout + done.stderr))
            time.sleep(random.uniform(0, 0.3))

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive(), f"a client of {self.user} never ended"


def history(node: Machine) -> list[dict[str, Any]]:
    """All that was recorded, from the first to the last."""
    events: list[dict[str, Any]] = []
    cursor = 0
    while True:
        page = api(node, f"/v1/events?cursor={cursor}&limit=1000")
        if not page["events"]:
            return events
        events += page["events"]
        cursor = page["cursor"]


def around(node: Machine, pid: str) -> str:
    """What control.log and the journal say of the seconds around a client's coming."""
    log = node.path("/var/log/nvidia-mps/control.log").read_text().splitlines()
    came = next((line[1:24] for line in log if f"NEW CLIENT {pid} from" in line), None)
    if came is None:
        return f"client {pid} never came"
    at = datetime.fromisoformat(came).timestamp()
    journal = json.loads("[" + ",".join(node.journal("-o", "json").splitlines()) + "]")
    found = [(float(one["__REALTIME_TIMESTAMP"]) / 1e6, f"journal {one['MESSAGE']}") for one in journal]
    stamped = [line for line in log if line.startswith("[2")]
    found += [(datetime.fromisoformat(line[1:24]).timestamp(), f"control {line[25:]}") for line in stamped]
    return "\n".join(f"{when - at:+.4f} {text[:230]}" for when, text in sorted(found) if -2 < when - at < 1)


def victims(node: Machine, what: str) -> list[str]:
    """Which process is killed this time."""
    unit = {"agent": "mpsagent.service", "gate": GATE, "both": random.choice(["mpsagent.service", GATE])}[what]
    return [pid for pid in (node.show(unit, "MainPID")["MainPID"],) if pid != "0"]


@pytest.mark.skipif(not KILLS, reason="asked for with MPSAGENT_KILLS=200")
@pytest.mark.timeout(60 + 10 * KILLS)
@pytest.mark.parametrize("what", ["agent", "gate", "both"])
def test_killed_at_random_moments_it_loses_nothing_and_harms_no_one(running: Machine, what: str) -> None:
    """No client over its limits, none under, none disturbed, no request refused, nothing done twice."""
    end = threading.Event()
    loads = [Load(running, ALICE, end), Load(running, BOB, end)]
    try:
        for _ in range(KILLS):
            time.sleep(random.uniform(0, 1.5))
            for pid in victims(running, what):
                running.run("kill", "-KILL", pid, check=False)
            assert api(running, "/v1/servers")["servers"] is not None, "a request waits for the next agent"
    finally:
        end.set()
        for load in loads:
            load.join()
    until("ready for users", lambda: ready(running))

    pids = Counter[int]()
    problems, wrong = [], []
    for load in loads:
        assert len(load.said) >= KILLS / 4, "there was no load to speak of"
        for status, said in load.said:
            found = re.search(r" pid (\d+) ", said)
            assert found, said
            pids[int(found[1])] += 1
            if status != 0:
                problems.append(
                    f"a client of {load.user} was disturbed ({status}):\n{said}\n{around(running, found[1])}"
                )
            elif multiprocessors(said) != MULTIPROCESSORS * SHARES[load.user] // 200 * 2:
                wrong.append(f"a client of {load.user} has not its limits:\n{said}\n{around(running, found[1])}")

    events = history(running)
    cursors = [event["cursor"] for event in events]
    if cursors != list(range(cursors[0], cursors[0] + len(cursors))):
        problems.append("the record has a gap")
    connected = Counter(event["pid"] for event in events if event["kind"] == "client.connected")
    if connected - pids:
        problems.append(f"twice in the record: {connected - pids}")
    unseen = pids - connected  # served by the gate, and gone before there was an agent to hear of it
    ends = [event for event in events if event["kind"].startswith("action") and "terminate" in str(event)]
    problems += [f"a client was to be ended without need: {end}" for end in ends]
    figures = (
        f"{KILLS} kills, {sum(pids.values())} clients, {unseen.total()} unseen, {len(wrong)} with wrong limits, "
        f"{len(problems)} other problems"
    )
    print(figures)
    assert not wrong + problems, "\n\n".join([figures, *problems, *wrong])
