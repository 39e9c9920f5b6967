#!/usr/bin/env python3
"""A hostile day: plays recordings 11 and 12, and the attacks that docs/security.md names, against agent and gate,
beside honest users. Does what a user's own program does reach others?

    hostile.py [--sim] [--only NAMES] [--ways NAMES] [--part NAME] [--lanes N] [--pairs N] [--seconds 520] [--out DIR]
               [--limits TEXT]

    environment  values of CUDA_MPS_PINNED_DEVICE_MEM_LIMIT that take the memory limit away (recording 11)
    H1           a relay of the user's own; H1-turns: its work goes on in the turns of others, or past its own
    H2           a false acknowledgement; H2-silent: none; H2-loop: 20 processes again and again
    H3           20 processes that meet their server and say 807, again and again
    H4           one process with all the contexts that a server has
    H5           daemon and agent are killed together
    H6           a server is stopped, then its daemon killed
The other names are those of the functions below; docs/security.md names them where it names tests, and what is not
played is listed at the end, because no honest user can be beside it: a start, a parser, a page. NAMES with commas, also
NAME:WAY; of ways: own, shared (turns), together, apart. `--limits`: more keys of [limits], ";" between them. `--part`:
attacks (no time is measured), time (nothing else), short (attacks that are over in seconds), all.

Each attack in each way has an MPS with agent and gate of its own; LANES of them at once (8 on a GPU, half as many while
time is measured). Honest users work beside it; a table tells what it cost them. It judges by what MPS gives and by the
agent's pages, and knows nothing of how they come about. As root, with a GPU or --sim; mpsagent importable. hostile.md,
hostile.json and hostile-logs.txt go to DIR ($OUT), after each row; then a few lines are printed, else the table. No
setting of the GPU is touched, and nothing that was started here is left.

Then the time of honest users is measured, where the attack takes no turn (a turn is the policy's to bound): the same
jobs beside the attack, and at another MPS while it goes on, so that processor and GPU have the same to do. 5 pairs, up
to 12 (--pairs) while it is not clear whether it is more than a tenth. Two figures, and between what each lies by 15 of
16. First what a user may cost others: seconds from coming to the gate until the server says ACTIVE, as a part of the
jobs' time, on the average; the driver has no part in it, the processor only where none is free. Then how much longer
whole jobs take, the median of the pairs. Who takes MPS up again and again (H2-loop, H2-silent) costs few much, by
chance: there it is judged how long MPS was held up in all, against a tenth of the time and one hand-over. 20 s of it
come before, because a user may hold MPS up for 16 s first. An attack that is moved from one MPS to the other for each
pair would save up there what it may take.

NVIDIA's driver takes its own time where several make contexts at once. What it needs for a process that was killed, for
a server's start and for a context that its server calls ACTIVE, beyond what that takes alone, is no time of mpsagent's,
and is named in the row.

Held is: honest users lose no work but by MPS's own fault on one server for all (their loss is in the table all the
same), have exactly their limits, wait no longer than the policy gives, stand still for a tenth of their time at most,
and do not lose more than a tenth for certain. Exit status: 0 all held, 1 not, 2 it could not begin.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns.begin import facts, parser, place
from campaigns.followed import Followed
from campaigns.gate_place import TOLERANCE, cell, first
from campaigns.modes_place import serves
from mpsagent.core.turns import TAKE_UP
from mpsagent.linux.processes import stopped
from mpsagent.mps.units import multiprocessors_for_percent
from tests.agent.forgery import Forger
from tests.conformance import rig as rigs
from tests.policies import SCOPES
from tests.scenes.stage import A, Agent, B, C, Client, D, E, Json, Machine, Stage, seconds_of
from tests.setuid import become as become_uid
from tests.setuid import setuid_python

ATTACKERS = Path(__file__).with_name("attackers.py")
PERCENT, LIMIT = 20, 2048
"""Of every user: percent of the threads, MiB of memory."""
AFTER, GRACE, TERMINATE, KILL = 4.0, 1.0, 5.0, 2.0
TURN = AFTER + GRACE + TERMINATE + KILL
"""Seconds after which the next user has the GPU, whatever the last one does."""
PATIENCE = 5.0
"""Seconds that one who says nothing may cost others, once."""
START = 3.0
"""Seconds for what begins or is seen at once."""
HANG = 3.0
"""Seconds after which what MPS does not answer is a hang."""
TENTH = 0.1
"""Of their time honest users may lose."""
SUBORDINATE = 300_000
"""The first of many uids of one person."""
POLICY = f"""
[limits]
active_threads = '{PERCENT}%'
memory_limit = "{LIMIT}M"
{{limits}}
[user.{A}]
{{alice}}
{{users}}
[turn]
{{switch}}
[timeouts]
control_daemon = "{HANG:g}s"
fault_recovery = "2s"
sigkill_delay = "{KILL:g}s"
"""
SWITCH = f'time_limit = "{AFTER:g}s"\ngrace = "{GRACE:g}s"'
WAYS = {
    "own": ("own", ""),
    "shared": ("shared", ""),
    "together": ("own", 'sharing = "one-server"'),
    "apart": ("own", 'sharing = "per-user"'),
}
TURNS, AT_ONCE = ("own", "shared"), ("together", "apart")
STEP = re.compile(r"\] step \d+ at ([\d.]+)")
ERROR = re.compile(r"CUDA_ERROR_\w+")


@dataclass
class Row:
    """What came of an attack in a way of sharing. `waited`: seconds of the honest who waited, `bound` what the policy
    gives for that; `stood`: which part of their time they stood still at most; `lost`: whose work ended in an error,
    who was refused; `excused`: the same by MPS's own fault on one server for all; `limits`: who had others than are
    right."""

    attack: str
    way: str
    held: bool | None = None
    said: list[str] = field(default_factory=list)
    broke: list[str] = field(default_factory=list)
    waited: list[float | None] = field(default_factory=list)
    bound: float | None = None
    stood: float = 0.0
    lost: list[str] = field(default_factory=list)
    excused: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    pairs: list[float] = field(default_factory=list)
    slower: float | None = None
    """By which part their jobs took longer beside it."""
    time: str = "-"
    seconds: float = 0.0
    off: bool = False
    """It broke off."""
    logs: str = ""

    @property
    def word(self) -> str:
        return {None: "not played", True: "held", False: "BROKE"}[self.held]

    def cells(self) -> list[str]:
        lost = [*self.lost, *(f"{one} (MPS's own)" for one in self.excused)]
        waited = ", ".join("never" if one is None else f"{one:.1f}" for one in self.waited)
        return [self.attack, self.way, self.word, "; ".join([*self.broke, *self.said]),
                waited + (f" (bound {self.bound:g})" if self.bound is not None else ""),
                f"{100 * self.stood:.0f} %", self.time, "; ".join(lost) or "none",
                "; ".join(self.limits) or "exact"]  # fmt: skip


class Watch:
    """The agent's pages, a few times a second: what they say of a process, and since when."""

    def __init__(self, agent: Callable[[], Agent | None]) -> None:
        self._agent = agent
        self.problems: dict[str, float] = {}
        """Each problem's text, and when it was first read."""
        self.events: list[tuple[float, Json]] = []
        self.pids: dict[int, float] = {}
        """Processes in the list of clients, and since when."""
        self.states: list[tuple[float, dict[int, str]]] = []
        self.queue: list[str] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ending.set()
        self._thread.join(10)

    def _run(self) -> None:
        cursor, of = 0, None
        while not self._ending.wait(0.25):
            agent = self._agent()
            if agent is None:
                continue
            if agent is not of:
                cursor, of = 0, agent
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                api = agent.api
                now = time.monotonic()
                for problem in api.problems():
                    self.problems.setdefault(problem, now)
                rows = api.get("/v1/clients")["clients"]
                for one in rows:
                    self.pids.setdefault(one["pid"], now)
                self.states.append((now, {one["pid"]: one["state"] for one in rows}))
                self.queue += [one["why"] for one in api.get("/v1/queue")["queue"] if one["why"] not in self.queue]
                answer = api.get(f"/v1/events?cursor={cursor}&limit=1000")
                self.events += [(now, one) for one in answer["events"]]
                cursor = answer["cursor"]

    def accused(self, pid: int) -> float | None:
        """When a problem of the agent first named this process."""
        return min((at for text, at in self.problems.items() if re.search(rf"\b{pid}\b", text)), default=None)

    def told(self, pid: int, what: str) -> list[tuple[float, str]]:
        """Events of a kind like `what` that name this process."""
        return [(at, str(one["kind"])) for at, one in self.events
                if re.search(what, str(one["kind"])) and re.search(rf"\b{pid}\b", json.dumps(one))]  # fmt: skip


class Play:
    """An attack on its stage."""

    def __init__(self, stage: Stage, row: Row, options: argparse.Namespace) -> None:
        self.stage, self.row, self.options = stage, row, options
        self.sim = stage.backend.name == "sim"
        self.slack = options.slack
        self.watch = Watch(lambda: stage.agents[-1] if stage.agents else None)
        self.since = time.monotonic()
        self.turns = row.way in TURNS
        self.alone = (0.0, 0.0)
        self.right: tuple[int, int] = (multiprocessors_for_percent(PERCENT, stage.machine.multiprocessors), 0)
        self.writers: list[int] = []
        self.honest: list[Client] = []
        self.arrived: list[Client] = []
        self._resting = threading.Event()
        self._loops: list[threading.Thread] = []

    # what the attack needs

    def begin(self, alice: str = "", switch: str = SWITCH, users: str = "", limits: str = "") -> None:
        """Agent and gate at work, and what an honest client sees there."""
        server, extra = WAYS[self.row.way]
        more = self.options.limits.replace(";", "\n") + "\n" + limits
        self.stage.policy(
            POLICY.format(alice=alice, switch=switch, limits=more, users=users),
            extra=f'server_scope = "{SCOPES[server]}"\n{extra}',
        )
        agent = self.stage.start_agent()
        self.stage.answering(agent)
        self.stage.until(lambda: serves(agent) and (self.stage.rig.pipe / "control").exists(), "the instance serves")
        for pid in (agent.pid, agent.api.status()["gate"]["pid"]):  # as their units do
            os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) - 10)
        one = self.stage.client(D)
        if one.ended(60) != 0 or (seen := one.seen()) is None or seen[0] != self.right[0]:
            raise AssertionError(f"an honest client alone is not served as the policy says: {one.text()}")
        self.right = seen
        if not self.sim:
            until(lambda: False, 0.6)
            self.alone = self.driver(one, time.monotonic())[1:]
        self.since = time.monotonic()

    @property
    def agent(self) -> Agent:
        return self.stage.agents[-1]

    def hostile(self, uid: int, *words: object) -> rigs.Started:
        """attackers.py as this user; it ends with its standard input."""
        program = self.stage.place / "attackers.py"
        if not program.exists():
            program.write_bytes(ATTACKERS.read_bytes())
            program.chmod(0o644)
        reader, writer = os.pipe()
        self.writers.append(writer)
        command = [rigs.other_users_python(uid), "-S", "-E", str(program), *map(str, words)]
        started = self.stage.rig.run(command, uid=uid or None, stdin_from=reader)
        os.close(reader)
        return started

    @property
    def socket(self) -> Path:
        return self.stage.rig.pipe / "control"

    def mind(self, uid: int, seconds: float = 120, **environment: str) -> Client:
        """Honest work that prints its steps."""
        one = self.stage.client(uid, "mind", seconds, **environment)
        self.honest.append(one)
        return one

    def arrives(self, uid: int, bound: float, timeout: float | None = None) -> Client:
        """An honest client that waits to be served; how long that takes is judged."""
        one = self.stage.client(uid)
        self.arrived.append(one)
        at = first(one, timeout or max(30.0, bound + 10 + self.slack))
        waited = None if at is None else at - one.started.since
        self.row.waited.append(None if waited is None else round(waited, 2))
        self.row.bound = max(bound, self.row.bound or 0.0)
        if at is None:
            self.lose(one, "was not served")
        elif waited is not None and waited > bound:
            killed, start, context = (0.0, 0.0, 0.0) if self.sim else self.driver(one, at)
            usual = self.alone
            took = killed + max(0.0, start - usual[0]) + max(0.0, context - usual[1])
            if took > 0.1:
                self.say(f"of {waited:.1f} s the driver took {took:.1f}: {killed:.1f} to end who was killed, "
                         f"{start:.1f} for a server's start (alone {usual[0]:.1f}), "
                         f"{context:.1f} for a context (alone {usual[1]:.1f})")  # fmt: skip
            if waited - took > bound:
                self.stood(waited - took - bound, time.monotonic() - self.since)
            if waited - took > bound + self.slack:
                self.broke(f"an honest client waited {waited:.1f} s, not {bound:g}")
        self.exact(one)
        return one

    def driver(self, one: Client, served: float) -> tuple[float, float, float]:
        """What MPS, agent and kernel say that the driver took until ``served``, while this client waited: to end
        clients that were sent SIGKILL, to start servers, from ACTIVE to its first result."""
        until(lambda: False, 0.6)  # the last events
        wall = time.time() - time.monotonic()
        came = one.started.since + wall
        spans = {"killed": 0.0, "start": 0.0}
        begun: dict[tuple[str, object], float] = {}
        for _, event in self.watch.events:
            when, pid, kind = seconds_of(event), event.get("pid"), event["kind"]
            if kind == "action" and str(event["sentence"]).startswith("sent SIGKILL"):
                begun.setdefault(("killed", pid), when)
            elif kind == "server.starting":
                begun["start", pid] = when
            elif kind in ("client.ended", "server.ready"):
                what = "killed" if kind == "client.ended" else "start"
                if (since := begun.pop((what, pid), None)) is not None and when > came and since < served + wall:
                    spans[what] += min(when, served + wall) - max(since, came)
        active = served
        for log in self.stage.rig.log.glob("**/server.log"):
            for line in log.read_text(errors="replace").splitlines():
                if f"client {{PID: {one.pid}, Context ID: 1}} is ACTIVE" in line and (stamp := STAMP.match(line)):
                    active = datetime.fromisoformat(f"{stamp[1]}+00:00").timestamp() - wall
        return spans["killed"], spans["start"], max(0.0, served - active)

    def exact(self, one: Client) -> None:
        got = one.seen()
        if got is not None and (got[0] != self.right[0] or abs(got[1] - self.right[1]) > TOLERANCE):
            self.row.limits.append(f"user {one.uid}: {got}, not {self.right}")

    def lose(self, one: Client, what: str, excused: bool = False) -> None:
        error = (ERROR.findall(one.text()) or [""])[-1]
        (self.row.excused if excused else self.row.lost).append(f"user {one.uid} {what} {error}".strip())

    def stood(self, seconds: float, of: float) -> None:
        """So long somebody honest did nothing that was due."""
        self.row.stood = max(self.row.stood, seconds / max(of, 1.0))
        if seconds > TENTH * of + self.slack:
            self.broke(f"an honest user stood still for {seconds:.1f} of {of:.1f} s")

    def broke(self, text: str) -> None:
        self.row.broke.append(text)

    def say(self, text: str) -> None:
        self.row.said.append(text)

    def kept_working(self, excused: bool = False) -> None:
        """Whoever works honestly still does, all the time, with the right limits. `excused`: MPS itself ends work."""
        for one in self.honest:
            self.exact(one)
            if one.rc is not None or ERROR.search(one.text()):
                self.lose(one, "lost its work", excused)
            elif at := steps(one):
                gaps = [b - a for a, b in pairwise([*at, time.monotonic()])]
                usual = statistics.median(gaps)
                self.stood(sum(gap - usual for gap in gaps if gap > 3 * usual), sum(gaps))

    def beside(self, attack: Callable[[], Any], patience: float = 0.0) -> Any:
        """An attack that takes no GPU away: honest users work, and others come."""
        if not self.turns:
            self.mind(B).working()
        found = attack()
        time.sleep(0.5)
        for uid in (C, D):
            self.arrives(uid, START + patience).ended(10)
        self.kept_working()
        return found

    def again(self, every: float, what: Callable[[], Any]) -> None:
        """Again and again, until `rest`."""

        def loop() -> None:
            while not self._resting.wait(every):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    what()

        self._loops.append(threading.Thread(target=loop, daemon=True))
        self._loops[-1].start()

    def rest(self) -> None:
        """The attack ends: its loops, its programs, alice's clients."""
        self._resting.set()
        for thread in self._loops:
            thread.join(10)
        self._resting.clear()
        self._loops.clear()
        for writer in self.writers:
            with contextlib.suppress(OSError):
                os.close(writer)
        self.writers.clear()
        for started in list(self.stage.rig.clients.values()):
            if started.uid == A and started.process.poll() is None:
                rigs.send_signal(started.process.pid, signal.SIGKILL)
                rigs.exited(started.process, 10)

    def jobs(self) -> tuple[float, list[int]]:
        """Seconds that honest jobs take, each from its start to its end, and their processes."""
        others = [] if self.turns else [self.stage.client(B, "work", 60)]
        since, spent = time.monotonic(), 0.0
        pids = []
        for uid in (C, D):
            one = self.stage.client(uid, "work", 10)
            pids.append(one.pid)
            self._done(one)
            spent += time.monotonic() - one.started.since
        for one in others:
            pids.append(one.pid)
            self._done(one)
            spent += time.monotonic() - since
        return spent, pids

    def _done(self, one: Client) -> None:
        if one.ended(20 + self.slack) != 0:
            self.lose(one, "lost its job" if one.rc is not None else "was not served")
            one.kill()
        self.exact(one)

    def refused(self, started: rigs.Started, wanted: int, worked: str = r"\bWORKED\b|worked") -> None:
        """This many attempts of an attacker were made, and none came to anything."""
        until(lambda: started.read().count("\n") >= wanted, 15 + self.slack)
        text = started.read()
        lines = text.splitlines()
        if len(lines) < wanted:
            self.broke(f"only {len(lines)} of {wanted} attempts were made: {text[-200:]}")
        for line in lines:
            if re.search(worked, line):
                self.broke(line[:200])

    def kill(self, what: str) -> list[int]:
        """SIGKILL at the agent, or at every control daemon."""
        if what == "agent":
            found = [self.stage.agents[-1].pid]
        else:
            found = [one.pid for one in self.stage.rig.ours() if rigs.CONTROL in one.arguments]
        for pid in found:
            rigs.send_signal(pid, signal.SIGKILL)
        return found

    def end(self) -> None:
        self.watch.end()
        self.rest()


def steps(one: Client) -> list[float]:
    """When it did a step of its work."""
    return [float(at) for at in STEP.findall(one.text())]


def until(true: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


# --- recording 11 -----------------------------------------------------------------------------------------------------

VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
VALUES = ("x", "7=4G", "0=1G,1=1G", "GPU-00000000-0000-0000-0000-000000000000=1G", "0=1G,7=1G", "inside")
TOO_MUCH = 3000
ENOUGH_TIME = 10.0
"""Seconds over its limit after which a client is ended."""


def environment(play: Play) -> None:
    """alice's clients lift their limits and take twice as much; another client of hers, and bob, keep to theirs."""
    play.begin(switch='time_limit = "2m"\ngrace = "1s"')
    stage, turns = play.stage, play.turns
    full = stage.client(A, "alloc", play.right[1] - 4, 90)
    play.honest.append(full)
    if not turns:
        play.mind(B)
    attackers: dict[str, Client] = {}
    program = stage.place / "attackers.py"
    program.write_bytes(ATTACKERS.read_bytes())
    program.chmod(0o644)
    for value in VALUES:
        if value == "inside":
            python = rigs.other_users_python(A)
            command = [python, "-S", "-E", str(program), "inside", f"{VARIABLE}=x", stage.backend.client[-1],
                       "alloc", str(TOO_MUCH), "60"]  # fmt: skip
            started = stage.rig.run(command, uid=A, env=stage.rig.environment())
            attackers[value] = Client(stage, stage.rig._client(started, A, ("inside",), None), A)
        else:
            attackers[value] = stage.client(A, "alloc", TOO_MUCH, 60, **{VARIABLE: value})
    taken: dict[str, float] = {}
    for value, one in attackers.items():
        if one.saw(r"cuMemAlloc .*: CUDA", 20 + play.slack) and "MiB: CUDA_SUCCESS" in one.text():
            taken[value] = time.monotonic()
        else:
            play.say(f"{value}: limit held" if "OUT_OF_MEMORY" in one.text() else f"{value}: {one.text()[-80:]!r}")
    last = max(taken.values(), default=time.monotonic())
    ladder = TERMINATE + KILL + START
    until(lambda: all(attackers[value].rc is not None for value in taken), last - time.monotonic() + START
          + ENOUGH_TIME + ladder + play.slack)  # fmt: skip
    ended = {value: time.monotonic() for value in taken if attackers[value].rc is not None}
    for value, at in taken.items():
        pid = attackers[value].pid
        told = [one for one in play.watch.told(pid, "memory|limit|over|lift") if one[0] >= at - 1]
        kinds = sorted({kind for _, kind in told})
        # a page names the first few, an event each
        times = [when for when, _ in told] + [when for when in [play.watch.accused(pid)] if when is not None]
        if not times or not play.watch.problems:
            play.broke(f"{value}: not named (events {kinds}, healthy: {not play.watch.problems})")
        elif min(times) - at > START + play.slack:
            play.broke(f"{value}: named after {min(times) - at:.1f} s")
        else:
            play.say(f"{value}: named after {max(0.0, min(times) - at):.1f} s, events {kinds}")
        if value not in ended:
            play.broke(f"{value}: not ended")
    if taken and not ended:
        play.say(f"none of {len(taken)} ended within {time.monotonic() - last:.0f} s")
    elif taken:
        play.say(f"{len(ended)} of {len(taken)} ended, within {max(ended.values()) - last:.1f} s")
    for one in play.honest:
        if play.watch.accused(one.pid) is not None:
            play.broke(f"an honest client of user {one.uid} is named")
    play.kept_working()
    if turns:
        for one in (full, *attackers.values()):
            one.kill()
    play.arrives(C, START)


# --- recording 12 -----------------------------------------------------------------------------------------------------


def relayed(play: Play) -> tuple[rigs.Started, dict[str, str]]:
    """alice's relay, and the environment of her clients behind it."""
    directory = play.stage.place / "hers"
    directory.mkdir(mode=0o755, exist_ok=True)
    (directory / "control").unlink(missing_ok=True)
    os.chown(directory, A, A)
    relay = play.hostile(A, "relay", play.socket, directory)
    until(lambda: "ready" in relay.read(), 10)
    return relay, {"CUDA_MPS_PIPE_DIRECTORY": str(directory)}


def relay_past_the_count(play: Play) -> None:
    """Four of alice's clients come through her relay, one each two seconds; she may have one."""
    play.begin(alice="max_clients = 1")
    neighbour = None if play.turns else play.mind(B)
    relay, through = relayed(play)
    hers = []
    for _ in range(4):
        hers.append(play.stage.client(A, "mind", 60, **through))
        time.sleep(2.0)
    until(lambda: False, START + play.slack / 4)
    now = time.monotonic()
    working = [one for one in hers if one.rc is None and (found := steps(one)) and now - found[-1] < 1.0]
    shown = [one for one in hers if one.pid in play.watch.pids]
    play.say(
        f"{len(working)} of 4 at work, {len(shown)} shown, the relay shown: {relay.process.pid in play.watch.pids}"
    )
    if len(working) > 1:
        play.broke(f"{len(working)} clients of alice at work, she may have 1")
    if any(one not in shown for one in working):
        play.broke("not shown: " + ", ".join(str(one.pid) for one in working if one not in shown))
    another = play.stage.client(A)
    if first(another, 2.0) is not None and working:
        play.broke("one more of hers is served, without the relay")
    if neighbour is not None and neighbour.working():
        play.kept_working()
    play.arrives(C, TURN if play.turns else START)


def relay_past_the_turn(play: Play) -> None:
    """alice's work goes through her relay; bob comes."""
    pause = play.row.way == "shared"
    play.begin(switch='on_expiry = "pause"\npause_slice = "3s"' if pause else SWITCH)
    _, through = relayed(play)
    hers = play.stage.client(A, "mind", 120, **through)
    hers.working()
    time.sleep(1.0)
    if not pause:
        bob = play.arrives(B, TURN)
        bob.ended(10)
        play.say(f"alice's program behind the relay: rc {hers.rc}")
        return
    bob = play.mind(B)
    at = first(bob, 30 + play.slack)
    play.row.waited.append(None if at is None else round(at - bob.started.since, 2))
    play.row.bound = 3 + START
    if at is None:
        play.lose(bob, "was not served")
        return
    time.sleep(16)
    both = overlap(steps(hers), steps(bob))
    play.say(f"{both:.1f} s of 16 in which both work; {len(steps(hers))} and {len(steps(bob))} steps")
    if both > 1.0 + play.slack / 2:
        play.broke(f"alice works for {both:.1f} s in bob's turns")
    if at - bob.started.since > 3 + START + play.slack:
        play.broke(f"bob waited {at - bob.started.since:.1f} s")
    play.exact(bob)


def overlap(one: Sequence[float], other: Sequence[float], gap: float = 0.6) -> float:
    """Seconds in which both do steps."""

    def spans(times: Sequence[float]) -> list[tuple[float, float]]:
        found: list[tuple[float, float]] = []
        for at in times:
            if found and at - found[-1][1] < gap:
                found[-1] = (found[-1][0], at)
            else:
                found.append((at, at))
        return found

    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in spans(one) for b in spans(other))


def no_word_to_the_server(play: Play, way: str) -> None:
    """alice takes her descriptor; the server never hears of her. Twice: it may cost others the gate's patience once."""
    play.begin()
    turns = play.turns
    if not turns:
        for uid in (B, C):
            play.mind(uid).working()
    bound = TURN + PATIENCE if turns else PATIENCE + START
    for number in range(2):
        attack = play.hostile(A, way, play.socket, 1)
        until(lambda attack=attack: "descriptor" in attack.read() or "refused" in attack.read(), 20)  # type: ignore[misc]
        play.arrives(D, bound if not number or turns else START + PATIENCE / 2).ended(10)
        attack.process.kill()
    play.kept_working()


def false_acknowledgement(play: Play) -> None:
    no_word_to_the_server(play, "acknowledge")


def silence(play: Play) -> None:
    no_word_to_the_server(play, "silent")


def liars(play: Play, way: str) -> rigs.Started:
    return play.hostile(A, way, play.socket, 20, 1.0)


def loop_of_many(play: Play, way: str) -> None:
    """20 processes of alice, again and again. In turns each of the others waits for the end of hers."""
    play.begin()
    if play.turns:
        liars(play, way)
        time.sleep(1.0)
        for uid in (B, C):
            play.arrives(uid, TAKE_UP + PATIENCE + START).ended(10)
        return
    play.beside(lambda: liars(play, way), PATIENCE)


def loop_of_false_words(play: Play) -> None:
    loop_of_many(play, "acknowledge")


def loop_of_errors(play: Play) -> None:
    loop_of_many(play, "error")


def all_contexts(play: Play) -> None:
    """One process makes 60 contexts, then others come."""
    play.begin(alice='max_clients = 1\nmemory_limit = "40G"')
    if not play.turns:
        play.mind(B).working()
    greedy = play.stage.client(A, "contexts", 60, 60)
    made = as_many_as_come(play, greedy)
    found = re.search(r"made (\d+) contexts, last (\w+)", greedy.text())
    rows = play.stage.agents[-1].api.get("/v1/clients")["clients"]
    shown = [row["contexts"] for row in rows if row["pid"] == greedy.pid]
    play.say(
        f"alice: made {found[1]}, then {found[2]}" if made and found else f"alice waits, shown with {shown} contexts"
    )
    with followed(play, greedy):
        for uid in (C, D):
            one = play.arrives(uid, TURN + START if play.turns else START + PATIENCE)
            if ERROR.search(one.text()):
                play.broke(f"user {uid} was refused: {ERROR.findall(one.text())[-1]}")
    if play.watch.queue:
        play.say(f"queue: {play.watch.queue[-1]}")
    play.kept_working()


def as_many_as_come(play: Play, greedy: Client) -> bool:
    """It has said how many contexts it made, or has waited for one more for 5 s."""
    end = time.monotonic() + 30 + play.slack
    before, since = -1, time.monotonic()
    while (now := time.monotonic()) < end and now < since + 5 + play.slack:
        if greedy.saw(r"\] made \d+ contexts", 0.5):
            return True
        rows = play.agent.api.get("/v1/clients")["clients"]
        if (shown := sum(row["contexts"] or 0 for row in rows if row["pid"] == greedy.pid)) != before:
            before, since = shown, now
    return False


@contextlib.contextmanager
def followed(play: Play, hers: Client) -> Iterator[None]:
    """Who made the next user wait: mpsagent, MPS or the driver? In the logs what each said, with its time."""
    since, at = time.monotonic(), time.time()

    def whom() -> dict[str, int]:
        parts = {one.pid: one.arguments for one in play.stage.rig.ours()}
        found = {f"server {pid}": pid for pid, words in parts.items() if "mps-server" in words}
        return {"alice": hers.pid, **found}

    kernel = Followed(whom)
    try:
        yield
    finally:
        until(lambda: False, 0.6)  # the last events
        kernel.end()
        lines = [(when - since, f"kernel: {text}") for when, text in kernel.lines]
        for _, one in play.watch.events:
            if (when := seconds_of(one) - at) > -1 and not one["kind"].startswith("client.used"):
                lines.append(
                    (when, f"agent: {one['sentence']}{'' if one.get('ok', True) else ', ' + str(one['text'])}")
                )
        lines += [(one.started.since - since, f"user {one.uid} starts {one.pid}") for one in play.arrived]
        play.stage.rig.drain()
        for log in play.stage.rig.logs.values():
            for line in log.lines:
                if TOLD.search(line) and (stamp := STAMP.match(line)):
                    when = datetime.fromisoformat(f"{stamp[1]}+00:00").timestamp() - at
                    if when > -1:
                        lines.append((when, f"{log.label}: {line[stamp.end() :]}"))
        lines.sort(key=lambda one: one[0])
        play.row.logs += "".join(f"{when:8.3f} {text}\n" for when, text in lines)
        gone = {name: round(when - since, 1) for name, when in kernel.gone.items()}
        stuck = {name: round(seconds, 1) for name, seconds in kernel.stuck.items() if seconds > 0.1}
        ending = next((when for when, text in lines if "agent: the turn of user" in text), None)
        play.say(
            f"turn over after {'-' if ending is None else f'{ending:.1f}'} s, gone after {gone}, in the driver {stuck}"
        )


STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3})")
TOLD = re.compile(r"SERVER|Server \d+ (with|exited|has)|NEW CLIENT|[Ss]hut|Cmd:terminate|exiting|FAULT|Worker")


def killed_together(play: Play) -> None:
    """The daemon and the agent die at once; a program of alice's lives on, and bob comes."""
    play.begin()
    careless = play.stage.client(A, "mind", 120, 1)
    careless.working()
    play.kill("daemon")
    play.kill("agent")
    agent = play.stage.agents.pop()
    rigs.exited(agent.started.process, 10)
    time.sleep(0.3)
    play.stage.start_agent()
    bound = TURN + START if play.turns else 2 * START
    play.arrives(B, bound, 60)
    play.say(f"alice's program lives: {careless.rc is None}")


def stopped_server(play: Play) -> None:
    """A server is stopped, then its daemon killed: it is to end, and others are to be served."""
    play.begin()
    one = play.stage.client(A, "sleep", 120)
    one.working()
    servers = [row["pid"] for row in play.stage.agents[-1].api.status()["servers"]]
    for pid in servers:
        rigs.send_signal(pid, signal.SIGSTOP)
    play.kill("daemon")
    play.arrives(B, TURN + START, 60)
    gone = until(lambda: not any(stopped(pid) for pid in servers), 10 + play.slack)
    play.say(f"servers {'have gone' if gone else 'still stand'}")
    if not gone:
        play.broke("the stopped server keeps its memory")
    one.kill()


# --- what docs/security.md names beside the recordings ----------------------------------------------------------------


def touch(play: Play) -> None:
    """bob's program at the files, sockets and processes of agent, gate, MPS and alice."""
    play.begin()
    hers = play.stage.client(A, "mind", 60)
    hers.working()
    stage, status = play.stage, play.agent.api.status()
    mine = stage.place / "mine"
    mine.touch()
    os.chown(mine, B, B)
    pids = {f"process {one.pid}": one.pid for one in stage.rig.ours() if one.uid != B} | {
        "the gate": status["gate"]["pid"]
    }
    place = {
        "public": str(stage.rig.pipe), "log": str(stage.rig.log), "run": str(stage.place / "run"),
        "hidden": [str(one) for one in stage.place.glob("run/instances/*/pipe")],
        "logs": [str(one) for one in stage.rig.log.glob("**/*.log")], "mine": str(mine),
        "state": str(stage.place / "state"),
        "administrators": str(play.agent.api.path.with_name("agent-admin.sock")), "pids": pids,
    }  # fmt: skip
    attack = play.hostile(B, "touch", json.dumps(place))
    until(lambda: attack.read().endswith("\n"), 20)
    tried = json.loads(attack.read() or "{}")
    play.say(f"{len(tried)} attempts")
    if len(tried) < 50:
        play.broke("it could not try")
    for name, how in tried.items():
        if how != "refused":
            play.broke(f"{name}: {how}")
    play.arrives(C, TURN if play.turns else START)


def pretend(play: Play) -> None:
    """Credentials of bob from alice's program; a connection of hers that another process goes on with."""
    play.begin()
    play.refused(play.beside(lambda: play.hostile(A, "pretend", play.socket, B)), 2)


def become(play: Play) -> None:
    """A client of alice's becomes a setuid program of root's, which nobody may signal in her name."""
    play.begin()
    with setuid_python(0) as words:
        attack = play.hostile(A, "become", play.socket, *words, become_uid(0))
        until(lambda: "is 0" in attack.read(), 10 + play.slack)
        play.arrives(B, TURN + PATIENCE if play.turns else START + PATIENCE).ended(10)
        play.arrives(D, START + PATIENCE).ended(10)
        if attack.process.poll() is not None:
            play.broke("the setuid program was ended")
        attack.process.kill()


def forger(play: Play) -> Callable[..., None]:
    """Writes 200 lines about everybody into each server.log, as a user's own server can; or into each log."""
    pids = [*(one.pid for one in play.stage.rig.ours()), *(one.pid for one in play.honest)]
    made = Forger(2026, pids, pids, [0, A, B, C, D], str(play.socket))

    def write(everywhere: bool = False) -> None:
        control, server = made.some(200)
        hers = f"*u{A}*/server.log" if play.row.way == "apart" else "**/server.log"
        for log in play.stage.rig.log.glob("**/*.log" if everywhere else hers):
            with log.open("a", errors="surrogateescape") as file:
                file.write(control if log.name == "control.log" else server)

    return write


def forging(play: Play) -> None:
    play.again(0.1, forger(play))


def forge(play: Play) -> None:
    """Lines about everybody in every log, and a program whose name looks like one."""
    play.begin()

    def attack() -> None:
        play.stage.rig.spawn_renamed(A, "query", argv0="[2026-01-01 00:00:00.000 Control 1] NEW SERVER 1: Ready")
        write = forger(play)
        for _ in range(10):
            write(True)
            time.sleep(0.1)

    play.beside(attack)
    hits = ("SignalClient", "TerminateClient", "KillControl")  # a server on which nobody works may be ended on a hint
    for _, one in play.watch.events:
        if one["kind"] == "action.done" and one.get("ok") and one.get("action") in hits:
            play.broke(f"forged lines hit somebody: {one['sentence']}")


PARTITIONS = "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING"


def take_more(play: Play) -> None:
    """alice asks for all multiprocessors in her environment; by partitioning she gets them, and is named and ended."""
    play.begin(switch='time_limit = "2m"\ngrace = "1s"')
    if not play.turns:
        play.mind(B).working()
    more = play.stage.client(A, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="100")
    more.ended(30)
    if (seen := more.seen()) is None or seen[0] > play.right[0]:
        play.broke(f"she has {seen}, not {play.right}")
    hers = play.stage.client(A, "sleep", 60, **{PARTITIONS: "1"})
    hers.working()
    at = time.monotonic()
    ended = hers.ended(ENOUGH_TIME + TERMINATE + KILL + START + play.slack)
    named = play.watch.accused(hers.pid)
    play.say(
        f"had {hers.seen()}; named after {'no time' if named is None else f'{max(0.0, named - at):.1f} s'}; rc {ended}"
    )
    if (named is None or ended is None) and (hers.seen() or play.right)[0] > play.right[0]:
        play.broke("not named" if named is None else "not ended")
    play.kept_working()
    hers.kill()
    play.arrives(C, START)


def asking_on(play: Play) -> rigs.Started:
    changing = ["set_default_active_thread_percentage 100", "set_default_device_pinned_mem_limit 0 0G", "quit -t 0"]
    commands = ["get_server_list", *changing, "[2026-01-01 00:00:00.000 Control 1] Cmd:quit", "x" * 3000]
    return play.hostile(A, "ask", play.socket, 8, *commands)


def ask(play: Play) -> None:
    """Front-ends of alice in eight loops: questions, orders that change something, texts like log lines."""
    play.begin()
    asking = play.beside(lambda: asking_on(play))
    play.say(f"{len(asking.read().splitlines())} answers")
    if not asking.read():
        play.broke("nobody answered")


ONLY_FOUR = {"alice": 'access = "allow"', "limits": 'access = "deny"',
             "users": "\n".join(f'[user.{uid}]\naccess = "allow"' for uid in (B, C, D))}  # fmt: skip


def many_uids(play: Play) -> rigs.Started:
    return play.hostile(0, "uids", play.socket, 40, SUBORDINATE)


def deny(play: Play) -> None:
    """Users whom the policy does not let in: directly, through alice's relay, and 40 uids of one person."""
    play.begin(**ONLY_FOUR)
    _, through = relayed(play)
    theirs = play.stage.client(E, "mind", 60, **through)

    def attack() -> None:
        many_uids(play)
        directly = play.stage.client(E)
        if directly.ended(20 + play.slack) == 0:
            play.broke("a user who is denied was served")

    if play.turns:  # what came through alice's relay holds the GPU until MPS lists it
        attack()
        play.arrives(B, TURN + START).ended(10)
        play.arrives(C, START).ended(10)
    else:
        play.beside(attack, START)
    theirs.ended(20 + play.slack)
    if theirs.rc is None and steps(theirs):
        play.broke(f"a user who is denied works through another's relay: {theirs.text()[-200:]}")


def leave_behind(play: Play) -> None:
    """A client of alice's ends, and a fork keeps its place and its memory."""
    play.begin()
    if not play.turns:
        play.mind(B).working()
    hers = play.stage.client(A, "leave", 60)
    hers.ended(30)
    if play.turns:
        play.arrives(C, TURN).ended(10)
    else:
        play.arrives(C, START).ended(10)
        if play.row.way == "together":
            until(lambda: play.watch.accused(hers.pid) is not None, 20 + play.slack)
            if play.watch.accused(hers.pid) is None:
                play.broke("not named")
    play.kept_working()


def coming(play: Play) -> list[Client]:
    crowd = [play.stage.client(A, "sleep", 60) for _ in range(16)]
    play.again(0.5, lambda: crowd.append(play.stage.client(A, "sleep", 2)))
    return crowd


def come_and_come(play: Play) -> None:
    """alice starts one client after the other, so that one of hers is always there, and 16 at once; she may have 4."""
    play.begin(alice="max_clients = 4")
    crowd = coming(play)
    if play.turns:
        for uid in (B, C):
            play.arrives(uid, TURN + START).ended(10)
    else:
        play.beside(lambda: None)
    play.rest()
    most = max((sum(one.pid in states and states[one.pid] == "running" for one in crowd)
                for _, states in play.watch.states), default=0)  # fmt: skip
    play.say(f"at most {most} of {len(crowd)} at work")
    if most > 4:
        play.broke(f"{most} clients of alice at work, she may have 4")


def cling(play: Play) -> None:
    """One client of alice's ignores SIGTERM, another is stopped, and a third waits behind them."""
    play.begin(alice="max_clients = 2")
    if not play.turns:
        play.mind(B).working()
    deaf = play.stage.client(A, "mind", 120, "--ignore-term")
    still = play.stage.client(A, "sleep", 120)
    for one in (deaf, still):
        one.working()
    still.signal(signal.SIGSTOP)
    play.stage.client(A, "sleep", 120)
    for uid in (C, D):
        play.arrives(uid, TURN + START if play.turns else START).ended(10)
    play.kept_working()


def outside(play: Play) -> None:
    """A program of alice's does not look for MPS."""
    play.begin()
    hers: list[Client] = []

    def attack() -> None:
        hers.append(play.stage.client(A, "mind", 60, CUDA_MPS_PIPE_DIRECTORY="/nonexistent"))
        hers[0].working()

    play.beside(attack)
    until(lambda: play.watch.accused(hers[0].pid) is not None, 5 + play.slack)
    if play.watch.accused(hers[0].pid) is None:
        play.broke("not named")


FOUR_UIDS = (A, *range(SUBORDINATE, SUBORDINATE + 3))


def knocking(play: Play) -> None:
    for uid in FOUR_UIDS:
        play.hostile(uid, "knock", play.socket, 500)


def knock(play: Play) -> None:
    """Connections of alice and of 3 uids of hers that say nothing, half of it, too much or garbage, without end."""
    play.begin()
    play.beside(lambda: knocking(play))


def stop_the_server(play: Play) -> None:
    """alice stops, and kills, the server on which she works: where it is root's she may not."""
    play.begin()
    if not play.turns:
        play.mind(B).working()
    play.stage.client(A, "mind", 120).working()
    rows = play.agent.api.get("/v1/servers")["servers"]
    hers = [row["pid"] for row in rows if play.row.way != "apart" or row["uid"] == A]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        attack = play.hostile(A, "signal", int(number), *hers)
        until(lambda attack=attack: attack.read().count("\n") >= len(hers), 10)  # type: ignore[misc]
        play.say(f"{number.name}: {attack.read().split()[1:2]}")
        play.arrives(C if number == signal.SIGSTOP else D, TURN + 2 * HANG + START if play.turns else START).ended(10)
    play.kept_working()


def fault(play: Play) -> None:
    """A kernel of alice's fails, and another client of hers lives on with its error."""
    _faulty(play, "oob", 2)


def killed_in_a_kernel(play: Play) -> None:
    """A client of alice's is killed with a kernel in flight, which is a fault for all on its server."""
    _faulty(play, "spin", 60)


def _faulty(play: Play, mode: str, seconds: float) -> None:
    play.begin()
    if not play.turns:
        play.mind(B).working()
    careless = play.stage.client(A, "mind", 120, 1)
    careless.working()
    hers = play.stage.client(A, mode, seconds)
    if not hers.saw("launch", 30):
        play.broke(f"it could not begin: {hers.text()[-200:]}")
    if mode == "spin":
        time.sleep(0.5)
        hers.signal(signal.SIGKILL)
    bound = 2.0 + TERMINATE + KILL + START  # timeouts.fault_recovery
    play.arrives(C, TURN + bound if play.turns else bound).ended(10)
    play.arrives(D, START).ended(10)
    play.kept_working(excused=play.row.way == "together")


def reading(play: Play) -> None:
    for uid in FOUR_UIDS:
        play.hostile(uid, "read", play.agent.api.path, 40)


def read(play: Play) -> None:
    """Readers of the API: 4 uids with 40 connections each, requests without end whose answers they do not read."""
    play.begin()
    play.beside(lambda: reading(play))
    for name in ("drain", "resume"):
        if (status := play.agent.api.order(name)[0]) != 200:
            play.broke(f"root's {name} was answered with {status}")


def ordering(play: Play, victim: int) -> list[rigs.Started]:
    path = play.agent.api.path.with_name("agent-orders.sock")
    texts = [json.dumps({"order": "terminate", "pid": victim}), '{"order": "drain"}', '{"order": "reload"}', "x" * 5000]
    return [play.hostile(A, "order", path, 2, text) for text in texts]


def order(play: Play) -> None:
    """Orders in a loop that are for administrators, and one that ends bob's work."""
    play.begin()
    victim = play.mind(B) if not play.turns else play.stage.client(B, "mind", 60)
    victim.working()
    attacks = ordering(play, victim.pid)
    until(lambda: all(one.read() for one in attacks[:3]), 15 + play.slack)
    for one in attacks:
        if '"status": 200' in one.read() or '"status":200' in one.read():
            play.broke(f"an order of alice's was carried out: {one.read()[:200]}")
    play.say(next((one.read().splitlines()[0][:80] for one in attacks if one.read()), "no answer"))
    play.arrives(C, TURN if play.turns else START).ended(10)
    if not play.turns:
        play.kept_working()


def to_the_api(play: Play, number: signal.Signals) -> None:
    for one in play.stage.rig.ours():
        if b"mpsagent.api.main" in Path(f"/proc/{one.pid}/cmdline").read_bytes():
            rigs.send_signal(one.pid, number)


def api_killed(play: Play) -> None:
    """The api is stopped, and killed again and again."""
    play.begin()

    def attack() -> None:
        for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP):
            to_the_api(play, number)
            time.sleep(0.5)

    play.beside(attack)


NAMED = (touch, pretend, become, forge, take_more, ask, deny, leave_behind, come_and_come, cling, outside, knock,
         stop_the_server, fault, killed_in_a_kernel, read, order, api_killed)  # fmt: skip
ATTACKS: dict[str, Callable[[Play], None]] = {
    "environment": environment,
    "H1": relay_past_the_count,
    "H1-turns": relay_past_the_turn,
    "H2": false_acknowledgement,
    "H2-silent": silence,
    "H2-loop": loop_of_false_words,
    "H3": loop_of_errors,
    "H4": all_contexts,
    "H5": killed_together,
    "H6": stopped_server,
    **{one.__name__: one for one in NAMED},
}
SHORT = (
    "environment",
    "H1",
    "H1-turns",
    "H2",
    "H2-silent",
    "H5",
    "H6",
    "touch",
    "pretend",
    "become",
    "forge",
    "take_more",
    "ask",
    "deny",
    "leave_behind",
    "outside",
    "fault",
    "order",
)


# --- what it costs others ---------------------------------------------------------------------------------------------

PAIRS = 5
ATTACKS_PART = 0.55
"""Of the seconds there are, at most, before the time of honest users is measured."""


@dataclass(frozen=True)
class Load:
    """An attack that goes on until `Play.rest`; `policy`: what it needs. In turns only where it takes none. `before`:
    seconds of it before anything is measured, in which it may cost others more (docs/security.md)."""

    begin: Callable[[Play], Any]
    ways: tuple[str, ...] = tuple(WAYS)
    policy: dict[str, str] = field(default_factory=dict)
    before: float = 0.0


def through_a_relay(play: Play) -> None:
    _, through = relayed(play)
    for _ in range(4):
        play.stage.client(A, "mind", 60, **through)


def lifting(play: Play) -> None:
    for value in ("x", "0=1G,7=1G"):
        play.stage.client(A, "alloc", TOO_MUCH, 60, **{VARIABLE: value})


def clinging(play: Play) -> None:
    play.stage.client(A, "mind", 60, "--ignore-term")
    still = play.stage.client(A, "sleep", 60)
    still.working()
    still.signal(signal.SIGSTOP)
    play.stage.client(A, "sleep", 60)


def stopping(play: Play) -> None:
    play.stage.client(A, "mind", 60).working()

    def stop() -> None:
        rows = play.agent.api.get("/v1/servers")["servers"]
        hers = [row["pid"] for row in rows if play.row.way != "apart" or row["uid"] == A]
        play.hostile(A, "signal", int(signal.SIGSTOP), *hers)

    stop()
    play.again(1.0, stop)


def killing(play: Play) -> None:
    def kill() -> None:
        one = play.stage.client(A, "spin", 60)
        one.saw("launch", 5)
        one.kill()

    play.again(0.5, kill)


LOADS: dict[str, Load] = {
    "H2-loop": Load(lambda play: liars(play, "acknowledge"), AT_ONCE, before=20.0),
    "H2-silent": Load(lambda play: liars(play, "silent"), AT_ONCE, before=20.0),
    "H3": Load(lambda play: liars(play, "error"), AT_ONCE),
    "come_and_come": Load(coming, AT_ONCE, {"alice": "max_clients = 4"}),
    "knock": Load(knocking),
    "H4": Load(
        lambda play: play.stage.client(A, "contexts", 60, 60),
        AT_ONCE,
        {"alice": 'max_clients = 1\nmemory_limit = "40G"'},
    ),
    "forge": Load(forging, ("own", "apart")),
    "ask": Load(asking_on),
    "order": Load(lambda play: ordering(play, play.agent.pid)),
    "read": Load(reading),
    "deny": Load(many_uids, policy=ONLY_FOUR),
    "api_killed": Load(lambda play: play.again(0.5, lambda: to_the_api(play, signal.SIGKILL))),
    "killed_in_a_kernel": Load(killing, ("apart",)),
    "fault": Load(lambda play: play.again(0.5, lambda: play.stage.client(A, "oob", 0)), ("apart",)),
    "stop_the_server": Load(stopping, AT_ONCE),
    "leave_behind": Load(lambda play: play.again(1.0, lambda: play.stage.client(A, "leave", 2)), AT_ONCE),
    "H1": Load(through_a_relay, AT_ONCE, {"alice": "max_clients = 1"}),
    "environment": Load(lifting, AT_ONCE),
    "take_more": Load(lambda play: play.stage.client(A, "sleep", 60, **{PARTITIONS: "1"}), AT_ONCE),
    "cling": Load(clinging, AT_ONCE, {"alice": "max_clients = 2"}),
    "outside": Load(lambda play: play.stage.client(A, "mind", 60, CUDA_MPS_PIPE_DIRECTORY="/nonexistent")),
    "pretend": Load(lambda play: play.again(0.3, lambda: play.hostile(A, "pretend", play.socket, B))),
}
"""Of the others H2 and become are H2-silent once, touch asks the kernel alone, and H5 and H6 are no user's to do."""


def time_beside(play: Play, elsewhere: Play) -> None:
    """How much longer do jobs take beside the attack than at another MPS while it goes on?"""
    load = LOADS[play.row.attack]
    for one in (play, elsewhere):
        one.begin(**load.policy)
    for one in (play, elsewhere):
        one.jobs()  # each user's first client starts a server
    if load.before:
        load.begin(play)
        time.sleep(load.before)
        play.rest()
    row, begun = play.row, time.monotonic()
    found: dict[bool, list[Jobs]] = {True: [], False: []}
    spans: list[tuple[float, float]] = []
    least = play.options.pairs if load.before else PAIRS
    while len(row.pairs) < least or (len(row.pairs) < play.options.pairs and unclear(row.pairs, found)):
        attack = load.begin(play)
        time.sleep(0.5)
        pair = {}
        for here in (True, False) if len(row.pairs) % 2 else (False, True):
            pair[here] = (play if here else elsewhere).jobs()
        play.rest()
        if load.before:
            spans += taken(attack.read(), time.monotonic())
        for here, (seconds, pids) in pair.items():
            found[here].append(Jobs(seconds, *at_the_gate(play if here else elsewhere, pids)))
        row.pairs.append(pair[True][0] / pair[False][0])
    seconds = time.monotonic() - begun
    row.slower = statistics.median(row.pairs) - 1
    low, high = (one - 1 for one in between(row.pairs))
    less, loss, more = lost(found)
    (took, held, ahead), (before, usual, _) = (
        tuple(statistics.fmean(getattr(one, name) for one in found[here]) for name in ("took", "held", "ahead"))
        for here in (True, False)
    )
    shown = word(less, more)
    if load.before and row.way == "together":
        held_up, most = together(spans), max((end - since for since, end in spans), default=0.0)
        bound = TENTH * seconds + most
        shown = (
            f"{word(held_up, held_up, bound)}, MPS was held up for {held_up:.1f} of {seconds:.0f} s (bound {bound:.1f})"
        )
        if held_up > bound:
            play.broke(f"a user held MPS up for {held_up:.1f} s, not {bound:.1f}")
    row.time = (f"{shown}: {100 * loss:+.0f} % ({100 * less:+.0f} to {100 * more:+.0f}) at the gate and at MPS; "
                f"{word(low, high)}: {100 * row.slower:+.0f} % ({100 * low:+.0f} to {100 * high:+.0f}) of jobs "
                f"({held:.2f} s, {usual:.2f}; {took:.2f}, {before:.2f}; {ahead:.0f} ahead; "
                f"{len(row.pairs)} pairs)")  # fmt: skip
    if less > TENTH:
        play.broke(f"honest jobs wait {100 * loss:.0f} % of their time longer at the gate and at MPS")
    if low > TENTH:
        play.broke(f"honest jobs take {100 * row.slower:.0f} % longer")


def word(low: float, high: float, bound: float = TENTH) -> str:
    return "within a tenth" if high <= bound else "more than a tenth" if low > bound else "unclear"


def taken(text: str, until: float) -> list[tuple[float, float]]:
    """From when to when attackers.py had a client with a descriptor that MPS may wait for."""
    ended = {pid: float(at) for pid, at in re.findall(r"(\d+) ended at ([\d.]+)", text)}
    return [(float(at), ended.get(pid, until)) for pid, at in re.findall(r"(\d+) has its descriptor at ([\d.]+)", text)]


def together(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in one of these, or in more."""
    seconds, until = 0.0, 0.0
    for since, end in sorted(spans):
        seconds += max(0.0, end - max(since, until))
        until = max(until, end)
    return seconds


@dataclass(frozen=True)
class Jobs:
    """Seconds of some jobs, and of these at the gate and at MPS; how many of other users were let in between their
    coming and their being let in."""

    took: float
    held: float
    ahead: int


def between(pairs: Sequence[float]) -> tuple[float, float]:
    """The median of all pairs that there could be lies between these, whatever its distribution, by 15 of 16 or more:
    it does not when so few lie on one side of it as a coin shows once in 32 times."""
    found, aside, chance = sorted(pairs), 0, 0.5 ** len(pairs)
    below = chance
    while below <= 1 / 32:
        aside += 1
        chance *= (len(found) - aside + 1) / aside
        below += chance
    return found[max(aside - 1, 0)], found[-max(aside, 1)]


def lost(found: dict[bool, list[Jobs]]) -> tuple[float, float, float]:
    """Which part of their time jobs lost at the gate and at MPS on the average, and between what it lies by 15 of 16
    (Student's t). Not the median: who takes MPS up now and then costs few much."""
    usual = statistics.fmean(one.took for one in found[False])
    losses = [(one.held - other.held) / usual for one, other in zip(found[True], found[False], strict=True)]
    mean, free = statistics.fmean(losses), len(losses) - 1
    z = statistics.NormalDist().inv_cdf(31 / 32)
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    error = t * statistics.stdev(losses) / len(losses) ** 0.5
    return mean - error, mean, mean + error


def unclear(pairs: Sequence[float], found: dict[bool, list[Jobs]]) -> bool:
    low, high = between(pairs)
    least, _, most = lost(found)
    return "unclear" in (word(low - 1, high - 1), word(least, most))


def at_the_gate(play: Play, pids: Sequence[int]) -> tuple[float, int]:
    """Seconds from their coming to the gate until their servers called them ACTIVE, together; how many went ahead."""
    rows: list[Json] = []

    def all_shown() -> bool:
        with contextlib.suppress(OSError, ValueError, KeyError):
            found = play.agent.api.get("/v1/sessions?kind=client&limit=1000")["sessions"]
            rows[:] = [one for one in found if one["began"]]
        return {one["pid"] for one in rows} >= set(pids)

    if not until(all_shown, 10 + play.slack) and not play.row.lost:
        raise AssertionError("the api does not show who was served")
    active: dict[int, float] = {}
    for log in play.stage.rig.log.glob("**/server.log"):
        for line in log.read_text(errors="replace").splitlines():
            if (one := ACTIVE.search(line)) and (stamp := STAMP.match(line)):
                active.setdefault(int(one[1]), datetime.fromisoformat(f"{stamp[1]}+00:00").timestamp())
    ours = [one for one in rows if one["pid"] in pids and (one["pid"] in active or not play.row.lost)]
    ahead = sum(one["came"] < other["began"] < one["began"] and other["uid"] != one["uid"]
                for one in ours for other in rows if other not in ours)  # fmt: skip
    return sum(active[one["pid"]] - datetime.fromisoformat(one["came"]).timestamp() for one in ours), ahead


ACTIVE = re.compile(r"client \{PID: (\d+), Context ID: 1\} is ACTIVE")


# --- the campaign -----------------------------------------------------------------------------------------------------


class Campaign:
    def __init__(self, options: argparse.Namespace, backend: rigs.Backend, machine: Machine, base: Path) -> None:
        self.options, self.backend, self.machine, self.base = options, backend, machine, base
        self.about = facts(backend, machine)
        self.end = time.monotonic() + options.seconds
        self.until_time = time.monotonic() + ATTACKS_PART * options.seconds
        names = [*(one.__name__ for one in NAMED), *ATTACKS]  # the recordings' have been played on a GPU most often
        wanted = [(name, way) for name in dict.fromkeys(names) for way in (TURNS if name == "H1-turns" else WAYS)]
        self.left = [
            Row(name, way)
            for name, way in wanted
            if {name, f"{name}:{way}"} & set(options.only or ATTACKS) and way in (options.ways or WAYS)
        ]
        ways = options.ways or ("together", "own", "shared", "apart")
        timed = [row for way in ways for name in LOADS for row in self.left
                 if (row.attack, row.way) == (name, way) and way in LOADS[name].ways]  # fmt: skip
        self.timed = timed if options.part in ("all", "time") else []
        if options.part == "time":
            self.left = []
        self.wanted = [*self.left, *self.timed]
        self.rows: list[Row] = []
        self.stages: list[Stage] = []
        self.behind: list[str] = []
        self.lock = threading.Lock()

    def play(self) -> None:
        """All rows, in lanes; then what they cost, in fewer; the time that is left bounds it."""
        self._side_by_side(
            self.left, self.options.lanes, self._attack, self.until_time if self.timed else self.end - 25
        )
        self._side_by_side(self.timed, (self.options.lanes + 1) // 2, self._time, self.end - 20)
        self.rows += [row for number, row in enumerate(self.wanted) if row not in (*self.rows, *self.wanted[:number])]

    def _side_by_side(self, left: list[Row], count: int, what: Callable[[Row], None], end: float) -> None:
        """None is begun after ``end``."""

        def work() -> None:
            while left and time.monotonic() < end:
                with self.lock:
                    row = left.pop(0)
                    if row not in self.rows:
                        self.rows.append(row)
                since = time.monotonic()
                what(row)
                row.held = None if row.off else not row.broke and not row.lost and not row.limits
                row.seconds = round(row.seconds + time.monotonic() - since, 1)
                if self.options.out is None:
                    print(f"ANSWER {' | '.join(cell(one) for one in row.cells())}"[:1200], flush=True)
                self.write()

        lanes = [threading.Thread(target=work, daemon=True) for _ in range(count)]
        for number, lane in enumerate(lanes):
            time.sleep(0.5 * (number > 0))
            lane.start()
        while any(lane.is_alive() for lane in lanes) and time.monotonic() < self.end:
            time.sleep(0.1)
        if any(lane.is_alive() for lane in lanes):
            for stage in list(self.stages):  # who is still at it breaks off
                self._clear(stage)
            for lane in lanes:
                lane.join(15)

    def _attack(self, row: Row) -> None:
        with self._played(row) as (play,):
            ATTACKS[row.attack](play)

    def _time(self, row: Row) -> None:
        with self._played(row, 2) as (play, elsewhere):
            time_beside(play, elsewhere)

    @contextlib.contextmanager
    def _played(self, row: Row, count: int = 1) -> Iterator[list[Play]]:
        """So many stages of this row's way of sharing."""
        echo = (lambda text: print(f"{row.attack} {row.way}: {text}", flush=True)) if self.options.verbose else None
        plays = []
        before = [*row.broke], [*row.lost], [*row.limits]
        for _ in range(count):
            with self.lock:
                stage = Stage(self.backend, self.base / f"s{len(self.stages)}", self.machine,
                              quick=self.backend.name == "sim", echo=echo)  # fmt: skip
                self.stages.append(stage)
            plays.append(Play(stage, row, self.options))
        try:
            yield plays
        except Exception as error:
            if time.monotonic() > self.end:
                row.said.append("no time was left")
                row.broke, row.lost, row.limits = before  # the end of the stage was no attack
            else:
                row.said.append(f"broken off: {type(error).__name__}: {str(error)[:300]}")
            row.off = row.held is None or time.monotonic() < self.end
            row.logs += traceback.format_exc()[-3000:]
        finally:
            for play in plays:
                play.end()
                if row.broke or row.lost or row.limits or row.off:
                    with contextlib.suppress(Exception):
                        row.logs += play.stage.last_words()[-12000:]
                self._clear(play.stage)

    def _clear(self, stage: Stage) -> None:
        with contextlib.suppress(Exception):
            stage.end()
        self.behind += [one for one in stage.left if one not in self.behind]

    def markdown(self) -> str:
        head = [
            "attack",
            "sharing",
            "outcome",
            "what was seen",
            "honest: waited (s)",
            "stood still",
            "time lost (beside it, elsewhere)",
            "work lost",
            "limits",
        ]
        lines = ["# Hostile users", "", *(f"- {key}: {value}" for key, value in self.about.items()), ""]
        lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        lines += [f"| {' | '.join(cell(one) for one in row.cells())} |" for row in self.ordered()]
        if not self.options.only and not self.options.ways:
            lines += [
                "",
                "docs/security.md names beside these, each with its test:",
                *(f"- {one}" for one in not_played()),
            ]
        return "\n".join([*lines, *(f"- LEFT BEHIND: {one}" for one in self.behind)]) + "\n"

    def short(self) -> str:
        """A line for each attack that held everywhere; one for each row of the others."""
        lines = []
        for name in dict.fromkeys(row.attack for row in self.ordered()):
            rows = [row for row in self.ordered() if row.attack == name]
            times = [f"{row.way} {row.time.partition(' of jobs')[0]}" for row in rows if row.slower is not None]
            held = ", ".join(row.way for row in rows if row.held)
            waited = [one for row in rows if row.held for one in row.waited if one is not None]
            most = f", waited {max(waited):g} s at most" if waited else ""
            lines.append("; ".join([f"{name}: held {held or 'nowhere'}{most}", *times])[:300])
            lines += [
                f"  {row.word} {row.way}: {'; '.join([*row.broke, *row.said])}"[:300] for row in rows if not row.held
            ]
            lines += [f"  {row.way}: {'; '.join(row.said)}"[:300] for row in rows if name == "H4" and row.held]
        counts = {word: sum(row.word == word for row in self.rows) for word in ("held", "BROKE", "not played")}
        return "\n".join([*lines, str(counts), *(f"LEFT BEHIND: {one}" for one in self.behind)])

    def ordered(self) -> list[Row]:
        names = list(ATTACKS)
        return sorted(self.rows, key=lambda row: (names.index(row.attack), list(WAYS).index(row.way)))

    def write(self) -> None:
        out, about = self.options.out, self.about
        if out is None:
            return
        out.mkdir(parents=True, exist_ok=True)
        (out / "hostile.md").write_text(self.markdown())
        rows = [{**{key: value for key, value in asdict(row).items() if key != "logs"}, "outcome": row.word}
                for row in self.ordered()]  # fmt: skip
        found: dict[str, Any] = {"about": about, "rows": rows, "left behind": self.behind}
        (out / "hostile.json").write_text(json.dumps(found, indent=1, default=str))
        logs = "".join(f"##### {row.attack} {row.way}\n{row.logs}\n" for row in self.ordered() if row.logs)
        (out / "hostile-logs.txt").write_text(logs)


def not_played() -> list[str]:
    """Attacks of docs/security.md that are not played here."""
    text = (ATTACKERS.parents[1] / "docs" / "security.md").read_text()
    rows = [one for one in text.split("\n## Attack by attack\n")[1].splitlines() if one.startswith("| ")]
    return [one.split(" | ")[0][2:] for one in rows if "tests/" in one and "hostile.py::" not in one]


def main() -> int:
    arguments = parser(__doc__, 520.0)
    arguments.add_argument("--ways", type=lambda text: text.split(","), default=[])
    arguments.add_argument("--lanes", type=int, default=0)
    arguments.add_argument(
        "--slack", type=float, default=-1.0, help="seconds that a busy machine may add to each bound"
    )
    arguments.add_argument("--part", choices=("all", "attacks", "time", "short"), default="all")
    arguments.add_argument("--limits", default='on_limit_exceeded = "terminate"', help="more keys of [limits]")
    arguments.add_argument("--pairs", type=int, default=12, help="at most, while it is not clear what they show")
    options = arguments.parse_args()
    if unknown := {one.partition(":")[0] for one in options.only} - set(ATTACKS) | set(options.ways) - set(WAYS):
        arguments.error(f"not known: {', '.join(sorted(unknown))}")
    options.only = options.only or (list(SHORT) if options.part == "short" else [])
    options.lanes = options.lanes or (1 if options.sim else 8)
    options.slack = options.slack if options.slack >= 0 else (4.0 if options.sim else 0.0)
    with place(options.sim) as (backend, machine, base):
        campaign = Campaign(options, backend, machine, base)
        try:
            campaign.play()
        finally:
            for stage in campaign.stages:
                campaign._clear(stage)
            print(campaign.markdown() if options.out is None else campaign.short())
            campaign.write()
    return 0 if all(row.held for row in campaign.rows) and not campaign.behind else 1


if __name__ == "__main__":
    sys.exit(main())
