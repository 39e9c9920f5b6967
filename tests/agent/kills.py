"""SIGKILL of the agent at random moments under load: `python -m tests.agent.kills 200` prints figures and a verdict.

While one agent after another is killed, clients of several users come and go, and some are ended by order. What must
hold: no client over its limits, none disturbed, nothing ended twice, the history without a gap, and the same state
after a restart as before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

from mpsagent.mps.units import multiprocessors_for_percent
from tests.conformance import rig as rigs
from tests.scenes.stage import USERS, Agent, Stage, StageError, backend_of

SHARES = dict(zip(USERS[:4], ((10, 1), (20, 2), (30, 3), (45, 6)), strict=True))
POLICY = (
    '[limits]\nthreads = 10\nmemory = "1G"\n[switch]\nafter = "1s"\ngrace = "1s"\naction = "none"\n'
    '[hang]\nkill_grace = "2s"\n'
    + "".join(f'[user.{uid}]\nthreads = {share}\nmemory = "{size}G"\n' for uid, (share, size) in SHARES.items())
)
CHANGING = {"seconds", "waited", "uptime", "since", "turn", "turn_seconds"}


class Load:
    """Clients of random users, one after another in a few threads; each is judged."""

    def __init__(self, stage: Stage, seed: int, threads: int = 2) -> None:
        self.stage, self.random = stage, random.Random(seed)
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self.stopping = threading.Event()
        self.paused = threading.Event()
        self._threads = [threading.Thread(target=self._play, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _play(self) -> None:
        while not self.stopping.is_set():
            if self.paused.is_set():
                time.sleep(0.02)
                continue
            uid = self.random.choice(list(SHARES))
            mode = self.random.choice((("query",), ("sleep", 0.2), ("sleep", 0.5)))
            client = self.stage.client(uid, *mode)
            if client.ended(60) is None:
                self.problems.append(f"client {client.pid} of {uid} hangs: {client.text()!r}")
                client.kill()
                continue
            self.judge(uid, client.pid, client.rc, client.seen(), client.text())

    def judge(self, uid: int, pid: int, rc: int | None, seen: tuple[int, int] | None, text: str) -> None:
        share, size = SHARES[uid]
        right = multiprocessors_for_percent(share, self.stage.machine.multiprocessors)
        self.counts["clients"] += 1
        if rc != 0 or seen is None:
            self.problems.append(f"client {pid} of {uid} was disturbed: rc {rc} {text!r}")
        elif seen[0] > right or seen[1] >= size << 10:
            self.problems.append(f"client {pid} of {uid} is over its limits: {seen}, not {right} and {size} GiB")
            self.counts["over"] += 1
        else:
            self.counts["exact" if seen[0] == right else "less"] += 1

    def end(self) -> None:
        self.stopping.set()
        for thread in self._threads:
            thread.join(90)


def _plain(value: Any) -> Any:
    """Without what changes by itself."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items() if key not in CHANGING}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def picture(agent: Agent) -> Any:
    """Servers, clients and who waits, as the API shows them."""
    return [_plain(agent.api.get(f"/v1/{name}")[name]) for name in ("servers", "clients", "queue")]


class Kills:
    def __init__(self, stage: Stage, seed: int) -> None:
        self.stage, self.random = stage, random.Random(seed + 1)
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self.starts: list[float] = []
        self.agent = stage.with_agent(POLICY)
        self.load = Load(stage, seed)

    def play(self, count: int) -> None:
        try:
            for number in range(count):
                time.sleep(self.random.uniform(0.02, 1.2))
                kind = ("plain", "ladder", "plain", "picture")[number % 4]
                getattr(self, f"_{kind}")()
                self.counts["kills"] += 1
        finally:
            self.load.paused.clear()
            self.load.end()
        time.sleep(1)
        self.stage.answering(self.agent)

    def _restart(self) -> None:
        rigs.send_signal(self.agent.pid, signal.SIGKILL)
        rigs.exited(self.agent.started.process, 10)
        self.stage.agents.remove(self.agent)
        since = time.monotonic()
        self.agent = self.stage.start_agent()
        self.stage.answering(self.agent)
        self.starts.append(time.monotonic() - since)

    def _plain(self) -> None:
        self._restart()

    def _ladder(self) -> None:
        """A client is being ended when the agent is killed: the next one takes it up, and asks MPS nothing twice."""
        uid = self.random.choice(list(SHARES))
        client = self.stage.client(uid, "sleep", 30)
        if not client.working():
            raise StageError(f"the client to be ended has no context: {client.text()}")
        end = time.monotonic() + 10
        while time.monotonic() < end:  # its line in the log may come a moment later
            with contextlib.suppress(OSError):
                status, _ = self.agent.api.ask("POST", f"/v1/clients/{client.pid}/terminate", {})
                if status == 200:
                    break
            time.sleep(0.02)
        time.sleep(self.random.uniform(0, 0.3))
        self._restart()
        if client.ended(20) is None:
            self.problems.append(f"client {client.pid} was to be ended and still runs")
            client.kill()
        self.counts["ladders"] += 1

    def _picture(self) -> None:
        """With somebody at work and somebody waiting, the state after a restart is that of before."""
        self.load.paused.set()
        a, b = self.random.sample(list(SHARES), 2)
        one = self.stage.client(a, "sleep", 6)
        one.working()
        two = self.stage.client(b, "query")
        two.queued()
        quiet = time.monotonic() + 15
        before = None
        while time.monotonic() < quiet:
            seen = picture(self.agent)
            if seen == before and len(seen[1]) == 2:
                break
            before = seen
            time.sleep(0.25)
        else:
            self.counts["no quiet"] += 1
        self._restart()
        after = picture(self.agent)
        if one.rc is None and before != after:
            self.problems.append(f"the state differs: {json.dumps(before)} and {json.dumps(after)}")
        self.counts["pictures"] += one.rc is None
        for client, uid in ((one, a), (two, b)):
            client.ended(60)
            self.load.judge(uid, client.pid, client.rc, client.seen(), client.text())
        self.load.paused.clear()

    def verdict(self) -> list[str]:
        """Everything that is wrong; for who got more also what happened around it."""
        self.stage.rig.drain()
        control = self.stage.rig.logs["control"].lines
        problems = [*self.problems, *self.load.problems]
        asked = Counter(m[1] for line in control if (m := re.search(r"Cmd:terminate_client \d+ (\d+)", line)))
        problems += [f"terminate_client was sent {n} times for {pid}" for pid, n in asked.items() if n > 1]
        self.counts["terminated"] = len(asked)
        records = [
            json.loads(line)
            for path in sorted((self.stage.place / "state").glob("history.jsonl*"), reverse=True)
            for line in path.read_text().splitlines()
        ]
        numbers = [record["seq"] for record in records]
        if numbers != list(range(1, len(numbers) + 1)):
            problems.append("the history's numbers have a gap")
        signals = Counter(
            (r["pid"], r["start"], r["signal"])
            for r in records if r["kind"] == "action" and r["action"] == "SignalClient"
        )  # fmt: skip
        problems += [f"signal {who[2]} was sent {n} times to {who[0]}" for who, n in signals.items() if n > 1]
        ready = [
            (int(m[2]), datetime.fromisoformat(m[1]).timestamp()) for line in control
            if (m := re.match(r"\[(\S+ \S+) Control +\d+\] NEW SERVER (\d+): Ready", line))
        ]  # fmt: skip
        known = Counter((r["pid"], round(r["at"], 3)) for r in records if r["kind"] == "server.ready")
        wrong = [(pid, at, known[pid, round(at, 3)]) for pid, at in ready if known[pid, round(at, 3)] != 1]
        problems += [f"server {pid}'s Ready at {at} is {n} times in the history" for pid, at, n in wrong]
        if len(ready) != sum(known.values()):
            problems.append(f"{len(ready)} servers became Ready, {sum(known.values())} are in the history")
        for text in self.load.problems:
            if m := re.match(r"client (\d+) of \d+ is over", text):
                problems += around(int(m[1]), control, records)
        self.counts.update(self.load.counts)
        self.counts["records"], self.counts["servers"] = len(records), len(ready)
        problems += [str(r) for r in records if r["kind"] == "agent.error"]
        return problems


def around(pid: int, control: list[str], records: list[dict[str, Any]]) -> list[str]:
    """Log lines and records of the seconds around a client's coming, in order of time."""
    stamps = [(datetime.fromisoformat(line[1:24]).timestamp(), line) for line in control if line[:1] == "["]
    came = next((at for at, line in stamps if f"NEW CLIENT {pid} from" in line), None)
    if came is None:
        return []
    near = [(at, f"log    {line[12:160]}") for at, line in stamps if came - 2.5 < at < came + 1.5]
    near += [(r["at"], f"record {json.dumps(r)[:200]}") for r in records if came - 2.5 < r["at"] < came + 1.5]
    return [f"  {at - came:+.3f} {text}" for at, text in sorted(near)]


def play(stage: Stage, count: int, seed: int = 7) -> Kills:
    kills = Kills(stage, seed)
    kills.play(count)
    return kills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=200)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="mpsk", dir="/tmp"))
    with backend_of("sim", place) as (backend, machine), Stage(backend, place / "stage", machine) as stage:
        kills = play(stage, given.count, given.seed)
        problems = kills.verdict()
        print(dict(kills.counts))
        starts = sorted(kills.starts)
        print(f"from start to answer: median {starts[len(starts) // 2]:.2f} s, most {starts[-1]:.2f} s")
        for problem in problems:
            print("-", problem[:3000])
        print("kept" if not problems else f"BROKEN: {len(problems)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
