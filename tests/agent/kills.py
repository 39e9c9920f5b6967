"""SIGKILL at random moments under load: `python -m tests.agent.kills 200` kills the agent and the gate 200 times each,
the control daemon and servers 50 times each, and prints figures and a verdict.

Meanwhile clients of several users come and go. What must hold: of those who wait none is refused, none runs outside MPS
and the order is kept; who works is disturbed only by the end of the own server or daemon; limits are exact; nothing is
on record or done twice; and the pictures that the API gives are equal before and after a restart.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from mpsagent.mps.units import multiprocessors_for_percent
from tests.agent.stage import USERS, Agent, Client, Stage, StageError
from tests.conformance import rig as rigs
from tests.scenes.stage import backend_of

SHARES = dict(zip(USERS[:4], ((10, 1), (20, 2), (30, 3), (45, 6)), strict=True))
POLICY = (  # a user by name: the limits of everyone else then rest on the name service's answers, too
    '[user.daemon]\nthreads = 5\nmemory = "512M"\n[limits]\nthreads = 10\nmemory = "1G"\n'
    '[hang]\ncontrol = "10s"\nserver_ready = "20s"\nkill_grace = "2s"\n'
    + "".join(f'[user.{uid}]\nthreads = {share}\nmemory = "{size}G"\n' for uid, (share, size) in SHARES.items())
)
CHANGING = {"seconds", "waited", "uptime", "turn_seconds", "command", "cgroup", "gid"}
REUSED = 20.0
"""Seconds after which a pid may be another process's: a long run goes round all pids a few times."""
LOST = ("CUDA_ERROR_MPS_RPC_FAILURE", "CUDA_ERROR_MPS_SERVER_NOT_READY", "CUDA_ERROR_MPS_CONNECTION_FAILED")
"""What a client whose server or daemon is killed may see."""


class Load:
    """Clients of random users, one after another in a few threads; each is judged."""

    def __init__(self, stage: Stage, seed: int, threads: int) -> None:
        self.stage, self.random = stage, random.Random(seed)
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self.hard: list[float] = []
        """When a server or daemon was killed: who was at work or being handed over then may have lost it."""
        self.stopping, self.paused = threading.Event(), threading.Event()
        self._busy = threading.Semaphore(threads)
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
            self.judge(self.stage.client(uid, *mode), uid)

    def judge(self, client: Client, uid: int) -> None:
        since = time.monotonic()
        self.counts["clients"] += 1
        if client.ended(60) is None:
            lost = any(word in client.text() for word in LOST) and any(at >= since for at in self.hard)
            client.kill()
            if not lost:
                self.problems.append(f"client {client.pid} of {uid} hangs: {client.text()!r}")
            self.counts["lost"] += lost
            return
        share, size = SHARES[uid]
        right, seen = multiprocessors_for_percent(share, self.stage.machine.multiprocessors), client.seen()
        hit = any(since - 1.0 <= at for at in self.hard)
        if seen is not None and (seen[0] != right or seen[1] >= size << 10):
            self.problems.append(f"client {client.pid} of {uid} has wrong limits: {seen}, not {right} and {size} GiB")
        elif client.rc == 0 and seen is not None:
            self.counts["exact"] += 1
        elif hit:
            self.counts["lost"] += 1
        else:
            self.problems.append(f"client {client.pid} of {uid} was disturbed: rc {client.rc} {client.text()!r}")

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
    """Clients and who waits, as the API shows them. (The time of a hand-over is the gate's when the agent comes later,
    and some milliseconds earlier than its own.)"""
    clients, queue = (_plain(agent.api.get(f"/v1/{name}")[name]) for name in ("clients", "queue"))
    for one in clients:
        del one["memory"]  # what a client uses just now; the GPUs are asked now and then
        if one["state"] != "waiting":
            del one["since"]
    for one in queue:
        del one["turn"]
    return [clients, queue]


class Kills:
    """``counts``: how many of each kind; ``starts``: seconds from an agent's start to its first answer."""

    def __init__(self, stage: Stage, seed: int, threads: int = 3) -> None:
        self.stage, self.random = stage, random.Random(seed + 1)
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self.starts: list[float] = []
        self.agent = stage.with_agent(POLICY)
        self.load = Load(stage, seed, threads)

    def play(self, agents: int, gates: int, daemons: int, servers: int) -> None:
        kinds = ["agent"] * agents + ["gate"] * gates + ["daemon"] * daemons + ["server"] * servers
        kinds += ["picture"] * max(1, agents // 10)
        self.random.shuffle(kinds)
        try:
            for kind in kinds:
                time.sleep(self.random.uniform(0.02, 0.8))
                getattr(self, f"_{kind}")()
                self.counts[kind] += 1
        finally:
            self.load.paused.clear()
            self.load.end()
        self.stage.until(lambda: not self.stage.waits_for(self.agent), "ready in the end")

    def _agent(self) -> None:
        self.stage.killed(self.agent)
        since = time.monotonic()
        self.agent = self.stage.again(ready=False)
        self.starts.append(time.monotonic() - since)

    def _gate(self) -> None:
        pid = self.agent.api.status()["gate"]["pid"]
        if pid is not None:
            rigs.send_signal(pid, signal.SIGKILL)
            self.stage.until(lambda: self.agent.api.status()["gate"]["pid"] not in (None, pid), "another gate")

    def _daemon(self) -> None:
        control = self.agent.api.status()["control"]
        if control is not None:
            self.load.hard.append(time.monotonic())
            rigs.send_signal(control["pid"], signal.SIGKILL)
            self.stage.until(
                lambda: (self.agent.api.status()["control"] or control)["pid"] != control["pid"], "another daemon"
            )
            self.load.hard.append(time.monotonic())

    def _server(self) -> None:
        servers = self.agent.api.status()["servers"]
        if servers:
            self.load.hard.append(time.monotonic())
            rigs.send_signal(servers[0]["pid"], signal.SIGKILL)
            time.sleep(0.5)
            self.load.hard.append(time.monotonic())

    def _picture(self) -> None:
        """With one at work and two waiting, what is known after a restart is what was known before, in that order."""
        self.load.paused.set()
        self.stage.until(lambda: not any(picture(self.agent)), "all is quiet")
        users = self.random.sample(list(SHARES), 3)
        clients = [self.stage.client(users[0], "sleep", 600)]
        clients[0].working()
        for uid in users[1:]:
            clients.append(self.stage.client(uid, "query"))
            self.stage.waiting(clients[-1])
        before = picture(self.agent)
        self._agent()
        try:  # for a moment names are not known, or the logs not read
            self.stage.until(lambda: picture(self.agent) == before, "what was known before is known again")
        except StageError:
            after = picture(self.agent)
            self.problems.append(f"the state differs: {json.dumps(before)} and {json.dumps(after)}")
        clients[0].kill()
        for client, uid in zip(clients[1:], users[1:], strict=True):
            self.load.judge(client, uid)
        self.load.paused.clear()

    def verdict(self) -> list[str]:
        """Everything that is wrong."""
        problems = [*self.problems, *self.load.problems]
        records = self.stage.records()
        numbers = [record["seq"] for record in records]
        if numbers != list(range(1, len(numbers) + 1)):
            problems.append("the history's numbers have a gap")
        for kind, name in (("client.connected", "pid"), ("client.ended", "pid"), ("client.waiting", "connection")):
            last: dict[tuple[int, int], float] = {}
            for record in (one for one in records if one["kind"] == kind):
                who = (record[name], record["pid"])
                if record["at"] - last.get(who, 0.0) < REUSED:
                    problems.append(f"{kind} of {who} is on record twice: {last[who]:.3f}, {record['at']:.3f}")
                last[who] = record["at"]
        signals = Counter(
            (r["pid"], r["start"], r["signal"])
            for r in records if r["kind"] == "action" and r["action"] == "SignalClient"
        )  # fmt: skip
        problems += [f"signal {who[2]} was sent {n} times to {who[0]}" for who, n in signals.items() if n > 1]
        problems += [json.dumps(r) for r in records if r["kind"] in ("agent.error", "client.refused")]
        self.counts.update(self.load.counts)
        self.counts["records"] = len(records)
        return problems


def play(stage: Stage, agents: int, gates: int, daemons: int, servers: int, seed: int = 7) -> Kills:
    kills = Kills(stage, seed)
    kills.play(agents, gates, daemons, servers)
    return kills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=200, help="of agent and gate; a quarter of the others")
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="mpsk", dir="/tmp"))
    place.chmod(0o755)
    with backend_of("sim", place / "b") as (backend, machine), Stage(backend, place / "s", machine) as stage:
        kills = play(stage, given.count, given.count, given.count // 4, given.count // 4, given.seed)
        problems = kills.verdict()
        print(dict(kills.counts))
        starts = sorted(kills.starts)
        print(f"from start to answer: median {starts[len(starts) // 2]:.2f} s, most {starts[-1]:.2f} s")
        for problem in problems:
            print("-", problem[:6000])
        print("kept" if not problems else f"BROKEN: {len(problems)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
