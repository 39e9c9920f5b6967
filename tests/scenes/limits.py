"""Promise 1: no client ever gets more than its policy, and not less, the first one of a server included.

Users change at random, the holder busy, idle or without a server; each client says how many multiprocessors and how
much memory it was given. The same changes without the agent show what happens then.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from mpsagent.mps.units import multiprocessors_for_percent
from tests.conformance import rig as rigs
from tests.scenes.stage import USERS, Agent, Client, Result, Scene, Stage

# Percent and MiB. At most 45 %: a context's overhead counts against the memory limit and grows with the percentage.
# Sizes that MPS prints rounded are among them (recording 08, G14), and one below 1 GiB.
SHARES = dict(zip(USERS, ((10, 1000), (20, 2048), (30, 3333), (35, 20389), (45, 6144)), strict=True))
OVERHEAD = 300
"""MiB of its limit that a client may find taken by its own context."""
POLICY = '[limits]\nactive_threads = "25%"\nmemory_limit = "2G"\n' + "".join(
    f'[user.{uid}]\nactive_threads = "{percent}%"\nmemory_limit = "{mib}M"\n' for uid, (percent, mib) in SHARES.items()
)
SEED = 20


@dataclass
class Seen:
    """One client: who, whether the first of its server, how the change came about, what it got and what is right."""

    uid: int
    first: bool
    how: str
    multiprocessors: int
    free: int
    right: int
    limit: int

    @property
    def over(self) -> bool:
        return self.multiprocessors > self.right or self.free >= self.limit

    @property
    def exact(self) -> bool:
        return self.multiprocessors == self.right and self.limit - OVERHEAD <= self.free < self.limit

    def row(self) -> list[object]:
        return [self.uid, self.first, self.how, self.multiprocessors, self.right, self.free, self.limit]


class Changes:
    """Changes of user at random, the same for the same seed, with an agent or without one."""

    def __init__(self, stage: Stage, agent: Agent | None, seed: int = SEED) -> None:
        self.stage, self.agent = stage, agent
        self.random = random.Random(seed)
        self.holder: int | None = None
        self.changes = 0
        self.seen: list[Seen] = []
        self.lost: list[str] = []
        self.hows: Counter[str] = Counter()

    def play(self, count: int) -> None:
        while self.changes < count:
            how = self.random.choice(("idle", "busy", "queue", "empty", "rush"))
            if self.holder is None and how != "rush":
                how = "empty"
            users = self.random.sample([uid for uid in USERS if uid != self.holder], 2)
            getattr(self, f"_{how}")(users)

    # One change each, `queue` and `rush` two

    def _idle(self, users: list[int]) -> None:
        """The holder's server is there and has no client."""
        self._turn(users[0], "idle", [])

    def _empty(self, users: list[int]) -> None:
        """Nobody has a server: a user has shut it down."""
        if self.holder is not None:
            server = self.stage.rig.server(60)
            self.stage.rig.ctl(f"shutdown_server {server}")
            self.stage.rig.wait_log(f"Server {server} exited", 60)
            self.holder = None
        self._turn(users[0], "empty", [])

    def _busy(self, users: list[int]) -> None:
        """The holder works while the next user arrives."""
        self._turn(users[0], "busy", [self._worker()])

    def _queue(self, users: list[int]) -> None:
        """The holder works while two users arrive."""
        worker = self._worker()
        first = self._start(users[0], self.random.randint(1, 3))
        time.sleep(0.15)  # so that MPS sees them in this order
        second = self._start(users[1], self.random.randint(1, 2))
        worker.ended()
        self._judge(users[0], "queue", first)
        self._judge(users[1], "queue", second)

    def _rush(self, users: list[int]) -> None:
        """Two users at the same moment."""
        clients = [self._start(uid, 1) for uid in users]
        for uid, started in zip(users, clients, strict=True):
            self._judge(uid, "rush", started)
        self.holder = self._owner()

    def _owner(self) -> int | None:
        """Whose client was handed over last; without an agent, whose server started last."""
        if self.agent is not None:
            turns = self.agent.found("turn.began")
            return int(turns[-1]["uid"]) if turns else None
        self.stage.rig.drain()
        found = [match[1] for line in self.stage.rig.logs["control"].lines
                 if (match := re.search(r"Starting new server \d+ for user (\d+)", line))]  # fmt: skip
        return int(found[-1]) if found and int(found[-1]) in USERS else None

    def _worker(self) -> Client:
        assert self.holder is not None
        worker = self.stage.client(self.holder, "sleep", self.random.choice((0.5, 0.9)))
        worker.working()
        self._see(worker, first=False, how="later")
        return worker

    def _turn(self, uid: int, how: str, before: list[Client]) -> None:
        started = self._start(uid, self.random.randint(1, 3))
        for client in before:
            client.ended()
        self._judge(uid, how, started)

    def _start(self, uid: int, number: int) -> list[Client]:
        return [self.stage.client(uid, *(("query",) if number == 1 else ("sleep", 0.3))) for _ in range(number)]

    def _judge(self, uid: int, how: str, clients: list[Client]) -> None:
        self.changes += 1
        self.hows[how] += 1
        self.holder = uid
        for client in clients:
            client.ended()
            self._see(client, first=True, how=how)

    def _see(self, client: Client, *, first: bool, how: str) -> None:
        got = client.seen()
        percent, mib = SHARES[client.uid]
        right = multiprocessors_for_percent(percent, self.stage.machine.multiprocessors)
        if got is None:
            self.lost.append(f"{client.name} of {client.uid} ({how}): rc {client.rc} {client.text()!r}")
            self.stage.say(f"LOST {self.lost[-1]}")
            return
        seen = Seen(client.uid, first, how, got[0], got[1], right, mib)
        self.seen.append(seen)
        word = "exact" if seen.exact else "OVER" if seen.over else "under"
        self.stage.say(f"{word:5} {how:6} user {client.uid} {got[0]} of {right} multiprocessors, {got[1]} MiB free")

    # What came out

    def figures(self) -> dict[str, object]:
        firsts = [seen for seen in self.seen if seen.first]
        return {
            "changes of user": self.changes,
            "by situation": dict(sorted(self.hows.items())),
            "first clients": len(firsts),
            "exact": sum(seen.exact for seen in firsts),
            "over": sum(seen.over for seen in firsts),
            "under": sum(not seen.over and not seen.exact for seen in firsts),
            "later clients": len(self.seen) - len(firsts),
            "later over": sum(seen.over for seen in self.seen if not seen.first),
            "not served": len(self.lost),
        }

    def raw(self) -> list[object]:
        return [*(seen.row() for seen in self.seen), *self.lost]

    def good(self) -> bool:
        return bool(self.seen) and all(seen.exact for seen in self.seen) and not self.lost


def limits_on(server: str) -> Callable[[Stage, int], Result]:
    def limits(stage: Stage, count: int) -> Result:
        """With the agent: each client has exactly its policy's limits."""
        agent = stage.with_agent(POLICY, server=server)
        changes = Changes(stage, agent)
        changes.play(count)
        figures = changes.figures()
        figures["handed over with the fail-safe limits"] = len(agent.found("client.connected", fail_safe=True))
        verdict = f"{figures['exact']} of {figures['first clients']} first clients exact, {figures['over']} over"
        return Result(figures, changes.good() and changes.changes >= count, verdict, changes.raw())

    return limits


def comes_again(stage: Stage, count: int) -> Result:
    """The holder's idle server exits for another user, and the holder comes again, at every moment of that exit."""
    agent = stage.with_agent(POLICY)
    changes = Changes(stage, agent)
    holder, other = USERS[0], USERS[4]
    for number in range(count):
        changes._judge(holder, "before", [stage.client(holder)])
        waiting = stage.client(other)
        time.sleep(0.03 + number * 7 % 40 / 1000)
        again = stage.client(holder)
        changes._judge(other, "other", [waiting])
        changes._judge(holder, "again", [again])
    figures = changes.figures()
    exact = sum(seen.exact for seen in changes.seen)
    return Result(figures, changes.good(), f"{exact} of {len(changes.seen)} clients exact", changes.raw())


def administrator(stage: Stage, count: int) -> Result:
    """Root sets other limits by hand, as defaults and for the running server, in between and at once with clients:
    what is handed over is the policy's all the same."""
    agent = stage.with_agent(POLICY, server="shared")
    changes = Changes(stage, agent)
    loud = "\n".join(
        ["set_default_active_thread_percentage 100", "set_default_device_pinned_mem_limit 0 100G", "get_server_list"]
    )
    for number in range(count):
        stage.rig.ctl(loud, quiet=True)
        for server in stage.rig.ctl("get_server_list", quiet=True).out.split():
            stage.rig.ctl(f"set_active_thread_percentage {server} 100\nset_device_pinned_mem_limit {server} 0 100G")
        by_hand = stage.rig.begin(loud)
        uid = USERS[number % len(USERS)]
        changes._judge(uid, "by hand", [stage.client(uid)])
        stage.rig.finish(by_hand, quiet=True)
    found = agent.found("front_end")
    figures = changes.figures() | {"changes by hand on record": len(found)}
    exact = sum(seen.exact for seen in changes.seen)
    good = changes.good() and bool(found)
    return Result(figures, good, f"{exact} of {len(changes.seen)} clients exact", changes.raw())


class Reaction(threading.Thread):
    """What a plain script does: wait for a server to be Ready, then set that server's limits (recording 02, R2)."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(daemon=True)
        self._rig = stage.rig
        self._log = rigs.Log(stage.rig.log / "control.log", "control.log")
        self._over = threading.Event()
        self.took: list[float] = []

    def run(self) -> None:
        users: dict[str, int] = {}
        done = 0
        while not self._over.wait(0.0005):
            self._log.refresh()
            lines, done = self._log.lines[done:], len(self._log.lines)
            for line in lines:
                if match := re.search(r"Starting new server (\d+) for user (\d+)", line):
                    users[match[1]] = int(match[2])
                elif (match := re.search(r"NEW SERVER (\d+): Ready", line)) and users.get(match[1]) in SHARES:
                    self._set(match[1], *SHARES[users[match[1]]])
        self._log.close()

    def _set(self, server: str, percent: int, mib: int) -> None:
        since = time.monotonic()
        commands = (
            f"set_active_thread_percentage {server} {percent}\nset_device_pinned_mem_limit {server} 0 {mib}M\n"
            f"set_default_active_thread_percentage {percent}\nset_default_device_pinned_mem_limit 0 {mib}M"
        )
        self._rig.ctl(commands, quiet=True)
        self.took.append(time.monotonic() - since)

    def end(self) -> None:
        self._over.set()
        self.join(15)


def escape(stage: Stage, count: int) -> Result:
    """The control experiment: the same changes, limits set when a server is Ready. First clients escape."""
    stage.without_agent()
    reaction = Reaction(stage)
    reaction.start()
    changes = Changes(stage, None)
    try:
        changes.play(count)
    finally:
        reaction.end()
    return _escaped(changes, "limits set as soon as a server is Ready")


def unset(stage: Stage, count: int) -> Result:
    """The control experiment: nobody sets anything."""
    stage.without_agent()
    changes = Changes(stage, None)
    changes.play(count)
    return _escaped(changes, "no limits set")


def _escaped(changes: Changes, how: str) -> Result:
    figures = changes.figures()
    verdict = f"{how}: {figures['over']} of {figures['first clients']} first clients got more than their policy"
    return Result(figures, bool(figures["over"]), verdict, changes.raw())


SCENES = (
    Scene("limits", "Each client has its policy's limits, a server for each turn", limits_on("own"), 50, 6, 100),
    Scene("limits-shared", "Each client has its policy's limits, one server", limits_on("shared"), 50, 6, 60),
    Scene("limits-again", "The holder comes again while its server exits for another", comes_again, 60, 6, 60),
    Scene("limits-by-hand", "Root sets other limits by hand", administrator, 30, 6, 20),
    Scene("limits-reacting", "Control: limits set once a server is Ready", escape, 20, 3, 40),
    Scene("limits-unset", "Control: no limits set", unset, 10, 2, 20),
)
