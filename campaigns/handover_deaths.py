#!/usr/bin/env python3
"""Deaths in the middle of hand-overs, with mpsagent's own gate in front of a real MPS: does a server get stuck?

    handover_deaths.py [--out DIR] [--seconds 90] [--only clients,gate,both | --only bare] [--sim | --libraries DIR]

Root and a GPU with a driver that knows --multiuser-server. A tiny agent admits everyone with limits. Clients are killed
at random, most of them in the few milliseconds of their hand-over; the gate is killed while clients come and go; both
at once. Counted are servers that are not heard of again, clients that were refused, ran outside MPS or had other
limits, and work beside all this that was lost. Prints `ANSWER name: ...` lines and writes everything to
DIR/handover-deaths.txt ($OUT if that is set). Nothing that it started is left behind. Exit status 0: nothing was wrong.

Bare Python 3.11: what the gate's program needs beside the standard library is left out (`--keep`, `--gate`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns.begin import parser, place
from campaigns.rendezvous_bench import Bench, Daemon, Output, bench_of
from mpsagent.gate import keeper
from mpsagent.gate.loop import Gate, Options
from mpsagent.gate.store import inherited
from mpsagent.mps.limits import Limits
from mpsagent.wire import codec, link

A, B = 20001, 20002
GIB = 1 << 30
LIMITS = {A: Limits(60, {0: 20 * GIB}), B: Limits(20, {0: 4 * GIB})}
SLACK = 256
"""MiB by which two clients with the same limit may see different free memory."""
FORMS = {"multi-user": ("--multiuser-server",), "own server": ()}
KILLED_CLIENTS, KILLED_GATES, KILLED_BOTH = 100, 50, 20
AT_ONCE = 4
PATIENCE = 8.0


# --- the gate without its command line --------------------------------------------------------------------------------


def keep(public: Path, hidden: Path, state: Path, address: Path) -> int:
    """What `mpsagent-gate keep` does."""
    keeper.raise_file_limit()
    keeper.check_state_directory(state)
    keeper.LONGEST_PAUSE = 0.05  # deaths are many here, and systemd starts it again at once too
    command = [sys.executable, str(Path(__file__).resolve()), "--gate", str(hidden), str(state), str(address)]
    return keeper.Keeper(command, public, state).run()


def gate(hidden: Path, state: Path, address: Path) -> None:
    """What `mpsagent-gate run` does."""
    keeper.raise_file_limit()
    loop = asyncio.new_event_loop()
    made = Gate(loop, Options(daemon=hidden, state=state, link=address), inherited())
    loop.run_forever()
    del made


# --- the agent --------------------------------------------------------------------------------------------------------


class Agent:
    """Admits everyone, connects again whenever the gate dies, and remembers what it is told."""

    def __init__(self, address: Path) -> None:
        self.address = address
        self.passed: list[link.Passed] = []
        self.failed: list[link.Failed] = []
        self.handing: dict[int, list[float]] = {}
        self.story: list[str] = []
        self.changed = threading.Condition()
        self.ending = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        users = {uid: link.User(uid, "all", limits) for uid, limits in LIMITS.items()}
        table = link.Admissions(number=1, open=True, room=1000, fail_safe=Limits(10), devices=(0,), users=users)
        while not self.ending:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(0.5)
                sock.connect(str(self.address))
                sock.send(codec.encode(table))
                while not self.ending:
                    with contextlib.suppress(TimeoutError):
                        data, ancillary, _, _ = sock.recvmsg(codec.LONGEST_PACKET, 256)
                        for _, _, content in ancillary:
                            os.close(int.from_bytes(content[:4], "little"))
                        if not data:
                            break
                        self._hear(link.decode_from_gate(data))
            time.sleep(0.002)

    def _hear(self, message: link.FromGate) -> None:
        with self.changed:
            if isinstance(message, link.Passed):
                self.passed.append(message)
                self.story.append(f"{clock()} process {message.pid} passed, status {message.status}")
            elif isinstance(message, link.Failed):
                self.failed.append(message)
                self.story.append(f"{clock()} process {message.pid} failed at {message.stage}: {message.why}")
            elif isinstance(message, link.Handing):
                self.handing.setdefault(message.pid, []).append(time.monotonic())
            self.changed.notify_all()

    def await_handing(self, pid: int, count: int, seconds: float) -> bool:
        """The hand-over of this process's connection with that number has begun."""
        end = time.monotonic() + seconds
        with self.changed:
            while len(self.handing.get(pid, ())) < count:
                left = end - time.monotonic()
                if left <= 0 or not self.changed.wait(left):
                    return False
        return True


def clock() -> str:
    """The time as MPS writes it into its logs."""
    now = time.time()
    return time.strftime("%H:%M:%S", time.localtime(now)) + f".{int(now * 1e6) % 1000000:06d}"


# --- one daemon behind one gate ---------------------------------------------------------------------------------------


class Stage:
    """``bare``: without a gate; what MPS itself does when clients are killed in their start."""

    def __init__(self, bench: Bench, form: str, *, bare: bool = False) -> None:
        self.bench, self.form, self.bare = bench, form, bare
        self.daemon = Daemon(bench, *FORMS[form])
        state, address = bench.base / f"state{bench.files}", bench.base / f"link{bench.files}"
        words = [str(self.daemon.public), str(self.daemon.pipe), str(state), str(address)]
        command = [sys.executable, str(Path(__file__).resolve()), "--keep", *words]
        if bare:
            self.daemon.public = self.daemon.pipe
            command = ["/bin/sleep", "600"]
        self.keeper = Output(bench, command, bench.environment(self.daemon.pipe), None)
        self.agent = Agent(address)
        self.users = (A, B) if FORMS[form] else (A,)
        self.expected: dict[int, tuple[int, int]] = {}
        self.wrong: Counter[str] = Counter()
        self.restarts = 0
        self.stuck = 0
        self.losses = 0
        self._await_gate()
        for uid in self.users:
            client = self.client(uid, "query")
            client.ended(20)
            seen = client.seen()
            if seen is None or "mps no" in client.text():
                raise RuntimeError(f"no client of user {uid} is served: {client.short()}; gate: {self.keeper.short()}")
            self.expected[uid] = seen
        bench.say(f"   {form}: a client without any deaths sees {self.expected}")
        self.mourned: list[int] = []
        self.new_worker()
        self.first_servers = self.started_servers()

    def _await_gate(self) -> None:
        """Whoever comes before it listens runs outside MPS."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(5)
                sock.connect(str(self.daemon.public / "control"))
                if sock.recv(64):
                    return
            time.sleep(0.01)
        raise RuntimeError(f"the gate does not greet: {self.keeper.short()}")

    def client(self, uid: int, *words: object) -> Output:
        return self.bench.client(self.daemon, uid, *words)

    def gate_pid(self) -> int:
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{self.keeper.pid}/task/{self.keeper.pid}/children").read_text().split()
            return int(children[0]) if children else 0
        return 0

    def kill_gate(self) -> bool:
        pid = self.gate_pid()
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.restarts += 1
                return True
        return False

    def started_servers(self) -> list[int]:
        text = (self.daemon.log / "control.log").read_text(errors="replace")
        return [int(pid) for pid in re.findall(r"Starting new server (\d+) for", text)]

    def judge(self, client: Output, uid: int, seconds: float = PATIENCE) -> str:
        """What became of a client that nobody killed."""
        rc = client.ended(seconds)
        seen, wanted = client.seen(), self.expected[uid]
        text = client.text()
        if rc is None:
            client.kill()
            verdict = "no answer"
        elif seen is None:
            verdict = "refused: " + (re.findall(r"CUDA_ERROR_\w+", text) or [f"rc {rc}"])[-1]
        elif "mps no" in text:
            verdict = "outside MPS"
        elif seen[0] != wanted[0] or abs(seen[1] - wanted[1]) > SLACK:
            verdict = f"other limits: {seen} instead of {wanted}"
        else:
            verdict = "exact"
        if verdict != "exact":
            self.wrong[verdict.partition(":")[0]] += 1
            self.bench.say(f"   {self.form}: user {uid}: {verdict}: {client.short()[-200:]}")
        return verdict

    def alive(self, when: str) -> bool:
        """Whether MPS answers and serves; a stuck server is killed, so that the rest can go on."""
        said = self.daemon.ctl("get_server_list", timeout=4.0)
        probe = self.judge(self.client(A, "query"), A)
        if self.post_mortem():
            self.losses += 1
        if "no answer" not in said and probe != "no answer":
            return True
        self.stuck += 1
        self.bench.say(f"ANSWER {self.form}: STUCK {when}: get_server_list {said!r}, next client {probe}")
        self.daemon.show(skip="Accepting connection|NEW UI|UI closed|Cmd:", most=30)
        for pid in self.started_servers():
            with contextlib.suppress(OSError):
                if "mps-server" in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode():
                    os.kill(pid, signal.SIGKILL)
        time.sleep(1.0)
        again = self.judge(self.client(A, "query"), A, 15)
        self.bench.say(f"   after its server was killed: {again}")
        self.new_worker()
        self.mourned = self.started_servers()[:-1]
        return False

    def new_worker(self) -> None:
        self.worker = self.client(A, "sleep", 600)
        self.worker.said(r"\] sms ", 20)

    def kill(self, client: Output) -> None:
        self.agent.story.append(f"{clock()} process {client.pid} is killed")
        client.kill()

    def post_mortem(self) -> bool:
        """Whether a server has gone that should have stayed, or work was lost; with what the logs say of it."""
        gone = [pid for pid in self.started_servers()[:-1] if pid not in self.mourned]
        self.mourned += gone
        lost = "work now CUDA_ERROR" in self.worker.text() or self.worker.process.poll() is not None
        if not gone and not lost:
            return False
        self.bench.say(f"   {self.form}: servers {gone} have gone; the worker: {self.worker.short()[-150:]}")
        for name, most in (("control", 60), ("server", 120)):
            for line in (self.daemon.log / f"{name}.log").read_text(errors="replace").splitlines()[-most:]:
                self.bench.say(f"      {name}.log| {line}")
        for line in self.agent.story[-80:]:
            self.bench.say(f"      story| {line}")
        self.new_worker()
        return True

    def report(self, name: str, got: Counter[str], began: float) -> None:
        agent = self.agent
        rescued = sum(1 for one in agent.failed if one.stage == "acknowledgement" and one.lost)
        doubtful = [one.why for one in agent.failed if "wait for ever" in one.why]
        seconds = sorted(one.seconds for one in agent.passed) or [0.0]
        errors = [line for line in self.keeper.text().splitlines() if "is started again" not in line]
        failed = dict(Counter(one.stage for one in agent.failed))
        servers = len(self.started_servers()) - len(self.first_servers)
        middle, longest = seconds[len(seconds) // 2] * 1000, seconds[-1] * 1000
        self.bench.say(
            f"ANSWER {self.form}, {name}: {dict(got)}; stuck servers {self.stuck}, wrong {dict(self.wrong)}, "
            f"work beside it lost {self.losses} times, servers started {servers}, gate killed {self.restarts}, "
            f"hand-overs {len(agent.passed)} (p50 {middle:.1f} ms, max {longest:.0f} ms), "
            f"lost in their hand-over {rescued}, rescues in doubt {len(doubtful)}, failed {failed}, "
            f"gate's own errors {errors[-3:]}; {time.monotonic() - began:.1f} s"
        )
        for why in sorted({one.why for one in agent.failed}):
            self.bench.say(f"   {self.form}: failed: {why} ({sum(1 for one in agent.failed if one.why == why)})")
        self.stuck, self.losses, self.wrong, self.restarts = 0, 0, Counter(), 0
        self.first_servers = self.started_servers()
        agent.failed.clear()
        agent.passed.clear()

    def end(self) -> None:
        self.agent.ending = True
        self.keeper.kill(signal.SIGTERM)
        self.keeper.ended(3)


# --- deaths -----------------------------------------------------------------------------------------------------------


def victims(stage: Stage, chance: random.Random, count: int, until: float) -> Iterator[str]:
    """Clients that are killed, some at a time; when each was."""
    lock, left = threading.Lock(), [count]
    got: list[str] = []

    def one() -> str:
        with lock:
            uid, way, number = chance.choice(stage.users), chance.random(), chance.choice((1, 1, 2))
            pause = chance.uniform(0, 0.003) if way < 0.5 else chance.uniform(0, 0.03)
            from_start = chance.uniform(0, 0.03) if way > 0.9 else chance.uniform(0, 0.15)
        client = stage.client(uid, "query")
        if way < 0.8 and not stage.bare:
            if not stage.agent.await_handing(client.pid, number, PATIENCE):
                client.kill()
                client.ended(5)
                return "never handed over"
            time.sleep(pause)
        else:
            time.sleep(from_start * (1.5 if stage.bare else 1.0))
        ended = client.process.poll() is not None
        stage.kill(client)
        client.ended(5)
        if ended:
            return "had ended"
        return "killed before cuInit" if "cuInit" not in client.text() else "killed after cuInit"

    def some() -> None:
        while time.monotonic() < until:
            with lock:
                if left[0] <= 0:
                    return
                left[0] -= 1
            found = one()
            with lock:
                got.append(found)

    threads = [threading.Thread(target=some, daemon=True) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield from got


def clients_die(stage: Stage, chance: random.Random, until: float) -> Counter[str]:
    got: Counter[str] = Counter()
    for _ in range(5):
        if time.monotonic() < until:
            got.update(victims(stage, chance, KILLED_CLIENTS // 5, until))
            stage.alive("after clients were killed")
    return got


def gates_die(stage: Stage, chance: random.Random, until: float) -> Counter[str]:
    """Four clients a second come and go."""
    got: Counter[str] = Counter()
    running: list[tuple[Output, int]] = []
    began, started = time.monotonic(), 0
    while stage.restarts < KILLED_GATES and time.monotonic() < until:
        if started < (time.monotonic() - began) * 4:
            uid = chance.choice(stage.users)
            running.append((stage.client(uid, "query"), uid))
            started += 1
            if chance.random() < 0.7:  # most kills fall into a hand-over
                stage.agent.await_handing(running[-1][0].pid, chance.choice((1, 2)), 0.3)
                time.sleep(chance.uniform(0, 0.003))
                stage.kill_gate()
        else:
            time.sleep(chance.uniform(0, 0.02))
            if chance.random() < 0.05:
                stage.kill_gate()
    for client, uid in running:
        got[stage.judge(client, uid).partition(":")[0]] += 1
    stage.alive("after the gate was killed")
    return got


def both_die(stage: Stage, chance: random.Random, until: float) -> Counter[str]:
    got: Counter[str] = Counter()
    for _ in range(KILLED_BOTH):
        if time.monotonic() > until:
            break
        client = stage.client(chance.choice(stage.users), "query")
        if not stage.agent.await_handing(client.pid, chance.choice((1, 1, 2)), 3.0):
            got["never handed over"] += 1
        time.sleep(chance.uniform(0, 0.003))
        gate_first = chance.random() < 0.5
        if gate_first:
            stage.kill_gate()
        stage.kill(client)
        if not gate_first:
            stage.kill_gate()
        client.ended(5)
        got["killed with the gate"] += 1
    stage.alive("after gate and clients were killed")
    return got


BARE = "bare"
PARTS: dict[str, tuple[Callable[[Stage, random.Random, float], Counter[str]], float]] = {
    "clients": (clients_die, 0.40),
    "gate": (gates_die, 0.40),
    "both": (both_die, 0.20),
    BARE: (clients_die, 0.20),
}


def main() -> int:
    if sys.argv[1:2] == ["--keep"]:
        public, hidden, state, address = map(Path, sys.argv[2:6])
        return keep(public, hidden, state, address)
    if sys.argv[1:2] == ["--gate"]:
        hidden, state, address = map(Path, sys.argv[2:5])
        gate(hidden, state, address)
        return 0
    arguments = parser(__doc__, 85.0)
    arguments.add_argument("--form", default="", help="multi-user or own")
    arguments.add_argument("--seed", type=int, default=8)
    arguments.add_argument("--libraries", default="", help="LD_LIBRARY_PATH of the daemon and the clients")
    options = arguments.parse_args()
    wrong = 0
    forms = [form for form in FORMS if form.startswith(options.form)]
    parts = [name for name in PARTS if (name in options.only if options.only else name != BARE)]
    with place(options.sim) as (backend, _, _):
        bench = bench_of(options, backend, "handover-deaths")
        bench.extra["SAY_MPS"] = "1"
        try:
            for number, form in enumerate(forms):
                bench.say(f"==== {form}")
                end = bench.began + options.seconds * (number + 1) / len(forms)
                stage = None
                try:
                    stage = Stage(bench, form, bare=parts == [BARE])
                    room = end - time.monotonic() - 2
                    whole = sum(PARTS[name][1] for name in parts)
                    until = time.monotonic()
                    for name in parts:
                        part, share = PARTS[name]
                        began = time.monotonic()
                        until = max(until, began) + room * share / whole
                        got = part(stage, random.Random(options.seed), until)
                        wrong += stage.stuck + stage.losses + stage.wrong.total()
                        stage.report(name, got, began)
                except Exception:
                    wrong += 1
                    bench.say(f"ANSWER {form}: broken off: {traceback.format_exc()}")
                    if stage is not None:
                        bench.say(f"   gate: {stage.keeper.short()[-2000:]}")
                        stage.daemon.show(most=60)
                finally:
                    if stage is not None:
                        stage.end()
                    bench.between()
            bench.say(f"ANSWER all: {wrong} things were wrong")
        finally:
            bench.end()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
