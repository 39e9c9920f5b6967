"""The model of MPS held against NVIDIA's programs, step by step: the scenarios of tests/conformance, played in a world
and compared with what real MPS did (tests/conformance/real, or --raw FILE: a transcript made just now).

    python -m tests.world.steps [NAMES] [--raw FILE] [--sim FILE] [--differences] [--show]

Compared are the front-end's answers, both logs and what each client printed, as `make conformance` does for the
simulator; --sim FILE adds the simulator's transcript (`tests/conformance/run.py --backend sim --out DIR`). A table says
for each scene how many steps (lines) there are and how many differ, beyond what real MPS itself does one way or another
(tests/conformance/allowances.py); "not played": real MPS has not played it yet. Scenes that need what no world has
(files that are moved, a socket in the daemon's place, two daemons) are named and left out. Exit status 1 when a step
differs.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mpsagent_sim import gpu, limits, texts
from mpsagent_sim.delays import Delays
from tests.conformance import (
    compare,
    questions,
    questions_ending,
    questions_handovers,
    questions_starting,
    questions_waiting,
    recorded_commands,
    recorded_faults,
    recorded_limits,
    recorded_recovery,
    report,
    scenarios,
)
from tests.conformance.rig import SLOW_CLIENT, Reply, Rig
from tests.world import mps
from tests.world.kernel import File, Kernel, Process, Socket
from tests.world.mps import CLIENT, CREDENTIALS, DESCRIPTOR, FRONT_END, GREETING, End, Steps, is_context, word
from tests.world.people import Client, Life
from tests.world.world import DEVICE

BASE = "/scene"
MODULES = (questions, questions_ending, questions_handovers, questions_starting, questions_waiting, recorded_commands,
           recorded_faults, recorded_limits, recorded_recovery)  # fmt: skip
LEFT_OUT = {
    **dict.fromkeys(("S0", "S1", "S3", "S4", "R10", "X10", "R8", "R9", "R11"), "files, options or two daemons"),
    **dict.fromkeys(("X14", "X17", "X29"), "a socket in the daemon's place, or a peer that says nothing"),
    **dict.fromkeys(("M1", "M2", "M3", "W2"), "two GPUs"),
    **dict.fromkeys(("Q7", "X19"), "modes of the pipe directory"),
    **dict.fromkeys(("X28",), "a descriptor 0 of the daemon that it has closed"),
}
ERRORS = {
    "805": "MPS_CONNECTION_FAILED", "806": "MPS_RPC_FAILURE", "807": "MPS_SERVER_NOT_READY",
    "808": "MPS_MAX_CLIENTS_REACHED", "700": "ILLEGAL_ADDRESS", "terminated": "MPS_CLIENT_TERMINATED",
}  # fmt: skip


class Scene:
    """What the models of MPS and of people ask of a world."""

    def __init__(self, seed: str) -> None:
        self.kernel = Kernel(seed, 0.0)
        self.chance = self.kernel.chance
        self.delays = Delays(1.0, seed)
        self.uses: dict[int, tuple[str, int]] = {}
        self.device, self.public = DEVICE, f"{BASE}/pipe"
        nothing = SimpleNamespace(knocks=_nothing, given=_nothing, works=_nothing, arrived=_nothing, context=_nothing,
                                  takes=_nothing, asked=_nothing, to_end=_nothing, harmed=_nothing)  # fmt: skip
        self.judges = nothing


def _nothing(*_: object) -> None: ...


class Program(Client):
    """tests/conformance/cuda_client.py: it prints what it finds."""

    def __init__(self, rig: WorldRig, process: Process, public: str, words: Sequence[str]) -> None:
        super().__init__(rig.world, Life(process, process.uid, 0.0))  # type: ignore[arg-type]
        self.public = public
        words = [one for one in words if one != "--ignore-term"] if (ignores := "--ignore-term" in words) else words
        process.ignores = {15} if ignores else set()
        self.mode, *numbers = words
        self.numbers = [*map(float, numbers), 0.0, 0.0]
        self.printed: list[str] = []
        self.sms, self.limit, self.inside = gpu.MULTIPROCESSORS, None, False
        self.made: list[End] = []

    def say(self, text: str) -> None:
        stamp = self.kernel.now - self.process.start / 100
        self.printed.append(f"[{stamp:8.3f} pid {self.process.pid} uid {self.process.uid}] {text}")

    def run(self) -> Steps:
        yield [], self.kernel.now + self.world.chance.uniform(0.02, 0.03)
        return (yield from self.main())

    @property
    def error(self) -> str:
        return f"CUDA_ERROR_{ERRORS[self.life.error]}" if self.life.error else "CUDA_SUCCESS"

    def main(self) -> Steps:
        probe = yield from self.connect()
        greeting = None if probe is None else (yield from probe.hear())
        if probe is not None:
            probe.close()
        self.inside = greeting is not None
        channel = None
        if self.inside:
            channel = self.channel = yield from self.meet(0)
            answer = None if channel is None else (yield from channel.hear())
            if answer is None or not answer.data.startswith(b"OK"):
                self.life.error = self.life.error or "806"
        self.say(f"cuInit {self.error}")
        if self.life.error:
            return 10
        if self.mode == "init":
            yield [], self.kernel.now + self.numbers[0]
        elif (status := (yield from self.context(1))) or self.mode == "query":
            return (yield from self.leave(channel, status))
        else:
            status = yield from getattr(self, self.mode)(*self.numbers[:2])
            return (yield from self.leave(channel, status))
        return (yield from self.leave(channel, 0))

    def leave(self, channel: End | None, status: int) -> Steps:
        for one in self.made:
            one.close()
        if channel is not None:
            yield [], self.kernel.now + 0.015
            channel.close()
            yield [], self.kernel.now + 0.011
        return status

    def context(self, number: int) -> Steps:
        yield [], self.kernel.now + 0.011
        if self.inside:
            context = yield from self.meet(number)
            answer = None if context is None else (yield from context.hear())
            if not is_context(answer):
                said = "806" if answer is None else answer.data.decode().split()[-1]
                self.life.error = self.life.error or said
            else:
                self.made.append(context)
                percentage, memory, wait = self.granted(answer.data)
                own = limits.percentage(self.process.environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "")) or 100.0
                self.sms = gpu.multiprocessors(min(own, percentage))
                asked = limits.client_limits(self.process.environment.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", ""),
                                             [DEVICE.uuid])  # fmt: skip
                given = [] if asked is None else [one for one in (int(memory), asked.get(0)) if one]
                self.limit = min(given) if given else None
                yield [], self.kernel.now + wait
        if number > 1:
            yield [], self.kernel.now + 0.066
            return 12 if self.life.error else 0
        if not self.life.error:
            yield [], self.kernel.now + 0.066
            self.use(0)
        self.say(f"ctx {self.error}")
        if self.life.error:
            return 12
        self.say(f"devices 1 using {DEVICE.uuid[:12]}")
        self.say(f"sms {self.sms} meminfo CUDA_SUCCESS free {self.free()} MiB total {gpu.TOTAL} MiB")
        return 0

    def use(self, allocated: int) -> None:
        self.allocated = allocated
        kind = "mps" if self.inside else "bypass"
        if self.process.pid not in self.world.uses:
            self.process.on_end.append(lambda process: self.world.uses.pop(process.pid, None))
        self.world.uses[self.process.pid] = kind, gpu.usage(self.sms, allocated) if self.inside else 518 + allocated

    def free(self) -> int:
        others = [size for pid, (_, size) in self.world.uses.items() if pid != self.process.pid]
        servers = sum(kind == "server" for kind, _ in self.world.uses.values())
        if not self.inside:
            return max(0, gpu.TOTAL - gpu.BYPASS_OVERHEAD - sum(others) - self.allocated)
        return gpu.free(self.sms, self.limit, self.allocated, sum(others) - gpu.SERVER_USAGE * min(servers, 1))

    # --- modes

    def alloc(self, size: float, seconds: float) -> Steps:
        enough = size <= self.free()
        self.say(f"cuMemAlloc {size:.0f} MiB: {'CUDA_SUCCESS' if enough else 'CUDA_ERROR_OUT_OF_MEMORY'}")
        yield [], self.kernel.now + int(seconds)
        return 0 if enough else 13

    def sleep(self, seconds: float, _: float) -> Steps:
        end, last, count = self.kernel.now + seconds, "CUDA_SUCCESS", 0
        self.use(64)
        while self.kernel.now < end:
            if self.error != last:
                last = self.error
                self.say(f"work now {last}")
            count += 1
            yield from self.idle(min(end, self.kernel.now + 0.05))
        self.say(f"done {count} iterations, last {last}")
        return 14 if self.life.error else 0

    def idle(self, until: float) -> Steps:
        """Also after an error time passes."""
        yield from self.wait(self.made, until)
        if self.kernel.now < until:
            yield [], until

    def spin(self, seconds: float, _: float) -> Steps:
        begun = self.kernel.now
        self.say("launch cudaSuccess")
        if self.made:
            self.made[0].say(b"KERNEL")
        if (yield from self.wait(self.made, begun + seconds)) and self.made:
            self.made[0].say(b"IDLE")
        self.say(f"sync {self.error} after {self.kernel.now - begun:.3f} s")
        return 16 if self.life.error else 0

    def oob(self, seconds: float, _: float) -> Steps:
        yield from self.wait(self.made, self.kernel.now + seconds)
        self.say(f"oob launch {'cudaSuccess' if not self.life.error else self.error}")
        if not self.life.error:
            self.made[0].say(b"FAULT")
            yield from self.wait(self.made, self.kernel.now + 60.0)
        self.say(f"oob sync {self.error}")
        return 17 if self.life.error else 0

    def two(self, seconds: float, _: float) -> Steps:
        status = yield from self.context(2)
        self.say(f"second ctx {self.error}")
        yield from self.idle(self.kernel.now + seconds)
        return status


class Started:
    """A client as scenarios ask of it: a Popen and what it has printed."""

    def __init__(self, program: Program) -> None:
        self.program, self.process = program, self
        self.pid = program.process.pid
        self.reaped = False

    def poll(self) -> int | None:
        self.reaped = self.reaped or self.program.process.ended
        return self.program.process.status if self.reaped else None

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def read(self) -> str:
        return "".join(f"{line}\n" for line in self.program.printed)


class FrontEnd:
    """One run of nvidia-cuda-mps-control with commands: ``text`` is its standard input; None: it stays open."""

    def __init__(self, rig: WorldRig, pipe: str, uid: int, text: str | None) -> None:
        self.kernel, self.pipe = rig.world.kernel, pipe
        self.process = self.kernel.spawn("nvidia-cuda-mps-control", uid, uid, self.kernel.init)
        self.lines = [] if text is None else text.split("\n")
        self.open = text is None
        self.text = text or ""
        self.since = self.kernel.now
        self.out, self.err = "", ""
        self.rc: int | None = None
        self.process.on_end.append(self._ended)
        self.kernel.program(self.process, self.run())

    def _ended(self, process: Process) -> None:
        self.rc = process.status

    def run(self) -> Steps:
        yield [], self.kernel.now + 0.004
        end = None
        for name in ("control_privileged", "control") if not self.process.uid else ("control",):
            made = End(self.process, Socket(self.kernel))
            try:
                self.kernel.connect(self.process, f"{self.pipe}/{name}", made.file)
            except OSError:
                made.close()
                continue
            if (yield from made.hear()) is not None:
                end = made
                break
            made.close()
        if end is None:
            self.err = texts.NO_DAEMON
            return 1
        if not end.say(CREDENTIALS, who=(self.process.pid, self.process.uid, self.process.gid)):
            self.err = texts.NO_AUTHENTICATION
            return 1
        end.say(FRONT_END)
        answers, status, quits = "", None, False
        while True:
            while self.lines:
                line = self.lines.pop(0)
                if not line and not self.open and not self.lines:
                    break
                quits = line.startswith("quit")
                end.say((len(line) + 2).to_bytes(8, "little"))
                end.say(line.encode() + b"\n\0")
            if not self.open:
                end.say(bytes(8))
            message = yield from end.hear(self.kernel.now + 0.001 if self.open else None)
            while message is not None and status is None:
                kind, text = message.data[:4], message.data[4:]
                if kind == word(0):
                    answers += text.decode() + "\n"
                elif kind == word(1):
                    status = int.from_bytes(text[:4], "little")
                    break
                message = yield from end.hear(self.kernel.now if self.open else None)
            if status is not None or end.over or not self.open:
                break
        if status is None:
            if self.process.pid % 2 and not quits:
                return 0
            self.err = texts.CANNOT_SEND
            return 1
        self.out = answers
        return status


class Followed:
    """A log: as tests.conformance.processes.Log, in the model's files."""

    def __init__(self, kernel: Kernel, path: str, label: str) -> None:
        self.kernel, self.path, self.label = kernel, path, label
        self.drained = self.seen = 0
        self.lines: list[str] = []

    def refresh(self) -> None:
        node = self.kernel.nodes.get(self.path)
        self.lines = [] if node is None else node.data.decode().split("\n")[:-1]

    def reopen_if_replaced(self) -> None: ...

    close = reopen_if_replaced


class WorldRig(Rig):
    """A rig in a world: to wait is to let virtual time pass."""

    def __init__(self, name: str) -> None:
        self.world = Scene(name)
        self.kernel = self.world.kernel
        self.backend = SimpleNamespace(name="world")  # type: ignore[assignment]
        self.base, self.pipe, self.log = Path(BASE), Path(f"{BASE}/pipe"), Path(f"{BASE}/log")
        self.transcript: list[str] = []
        self.since, self.echo = self.kernel.now, None
        self.clients: dict[str, Any] = {}
        self.others: list[Any] = []
        self.logs: dict[str, Any] = {}
        for path in (BASE, f"{BASE}/pipe", f"{BASE}/log"):
            self.kernel.make(path, 0o40755, 0, 0)
        for key in ("control", "server"):
            self.logs[key] = Followed(self.kernel, f"{BASE}/log/{key}.log", f"{key}.log")

    # --- time

    def until(self, done: Any, seconds: float) -> bool:
        end = self.kernel.now + seconds
        while not done():
            events = self.kernel.events
            if not events or events[0][0] > end:
                self.kernel.run(end)
                return bool(done())
            self.kernel.run(events[0][0])
        return True

    def pause(self, seconds: float) -> None:
        self.kernel.run(self.kernel.now + seconds)

    def note(self, text: str) -> None:
        stamp = f"[{self.kernel.now - self.since:8.3f}] "
        self.transcript += (stamp + text).split("\n")

    # --- the control program

    def start(
        self, *arguments: str, env: dict[str, str] | None = None, where: str = "", timeout: float = 20.0
    ) -> Reply:
        if where:
            raise NotImplementedError("a second daemon")
        running = any(one.name == "nvidia-cuda-mps-control" and one.alive and one.environment.get("DAEMON")
                      for one in self.kernel.processes.values())  # fmt: skip
        reply = Reply(1, "", texts.ALREADY_RUNNING, 0.0) if running else Reply(0, "", "", 0.05)
        if not running:
            process = self.kernel.spawn("nvidia-cuda-mps-control", 0, 0, self.kernel.init)
            process.command = ["nvidia-cuda-mps-control", *arguments]
            process.environment = {"DAEMON": "1", **(env or {})}
            daemon = mps.Daemon(self.world, process, f"{BASE}/pipe", f"{BASE}/log",  # type: ignore[arg-type]
                                "--multiuser-server" in arguments)  # fmt: skip
            self.kernel.program(process, daemon.run())
            self.until(lambda: daemon.up, 5)
        extra = f" with {env!r}" if env else ""
        self.note(f"start {arguments!r}{extra} rc={reply.rc} out={reply.out!r} err={reply.err!r}")
        if reply.rc == 0:
            self.wait_log("CUDA MPS Control binary version", 2, quiet=True)
        self.drain()
        return reply

    def begin(self, command: str, *, uid: int | None = None, where: str = "") -> Any:
        return FrontEnd(self, f"{BASE}/pipe{where}", uid or 0, command + "\n")

    def finish(self, started: Any, timeout: float = 10.0, *, quiet: bool = False, where: str = "") -> Reply:
        done = self.until(lambda: started.rc is not None, max(0.0, started.since + timeout - self.kernel.now))
        seconds, uid, text = self.kernel.now - started.since, started.process.uid, started.text.removesuffix("\n")
        who = f"ctl as {uid}" if uid else "ctl"
        if not done:
            self.kernel.signal(started.process, 9)
            if not quiet:
                self.note(f"{who}> {text!r} TIMEOUT after {timeout:g}s out=None")
            return Reply(None, "", "", seconds)
        reply = Reply(started.rc, started.out, started.err, seconds)
        if not quiet:
            shown = f"rc={reply.rc} {seconds * 1000:.1f}ms out={reply.out!r} err={reply.err!r}"
            self.note(f"{who}> {text!r} {shown}")
        return reply

    # --- clients

    def spawn(self, uid: int, mode: str, *arguments: float | str, env: dict[str, str] | None = None) -> str:
        process = self.kernel.spawn("python", uid, uid, self.kernel.init)
        process.environment = dict(env or {})
        public = process.environment.get("CUDA_MPS_PIPE_DIRECTORY", f"{BASE}/pipe")
        program = Program(self, process, public, [mode, *map(str, arguments)])
        self.kernel.program(process, program.run())
        name = f"c{len(self.clients) + 1}"
        self.clients[name] = Started(program)
        self.note(f"spawn {name} pid {process.pid} uid {uid} {(mode, *arguments)!r} {env or ''}")
        return name

    def pid(self, target: str | int) -> int:
        return target if isinstance(target, int) else self.clients[target].pid

    def wait(self, name: str, timeout: float = SLOW_CLIENT) -> int | None:
        program = self.clients[name].program
        self.exited(self.clients[name], timeout)
        rc = self.clients[name].poll()
        self.note(f"{name} pid {program.process.pid} rc={rc} output:")
        for line in program.printed:
            self.note(f"   {name}| {line}")
        return rc

    def wait_output(self, name: str, pattern: str, timeout: float = SLOW_CLIENT) -> bool:
        program = self.clients[name].program

        def printed() -> bool:
            return any(re.search(pattern, line) for line in program.printed)

        self.until(lambda: printed() or program.process.ended, timeout)
        if not printed():
            self.note(f"WAIT-TIMEOUT {name} never printed {pattern!r}")
        return printed()

    def signal(self, target: Any, number: Any, who: str = "") -> bool:
        process = self.clients[target].program.process if isinstance(target, str) else self.kernel.processes.get(target)
        sent = process is not None and not (isinstance(target, str) and self.clients[target].reaped)
        if process is not None and process.alive:
            self.kernel.signal(process, int(number))
        label = target if isinstance(target, str) else f"{who} {target}".strip()
        self.note(f"signal {number.name} {label}{'' if sent else ' (gone)'}")
        return sent

    # --- logs

    def wait_log(self, pattern: str, timeout: float, *, log: str = "control", quiet: bool = False) -> Any:
        followed, found = self.logs[log], list[Any]()

        def there() -> bool:
            followed.refresh()
            for number in range(followed.seen, len(followed.lines)):
                if match := re.search(pattern, followed.lines[number]):
                    followed.seen = number + 1
                    found.append(match)
                    return True
            return False

        if not self.until(there, timeout) and not quiet:
            self.note(f"WAIT-TIMEOUT {log}.log has no {pattern!r}")
        return found[0] if found else None

    def server(self, timeout: float = 5.0, where: str = "") -> int:
        followed, found = self.logs["control"], [0]

        def ready() -> bool:
            followed.refresh()
            up = [m[1] for line in followed.lines if (m := re.search(r"NEW SERVER (\d+): Ready", line))]
            started = [m[1] for line in followed.lines if (m := re.search(r"Starting new server (\d+) for", line))]
            found[0] = int(started[-1]) if started else 0
            return bool(started) and started[-1] in up

        if not self.until(ready, timeout):
            self.note("WAIT-TIMEOUT no server became Ready")
        return found[0]

    def exited(self, started: Started, timeout: float) -> bool:
        return self.until(lambda: started.poll() is not None, timeout)

    def ours(self) -> list[Any]:
        return [one for one in self.kernel.processes.values() if one.alive and one is not self.kernel.init]

    def ps(self) -> None:
        for one in sorted(self.ours(), key=lambda one: one.pid):
            parent = one.parent.pid if one.parent is not None else 1
            state = "T" if one.stopped else "S"
            self.note(f"   ps| {one.pid:5} {parent:5} {one.uid:5} {state} {_shown(one)}")

    def session(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("what no world has")

    foreground = control = ls = run = spawn_renamed = session

    def relay(self) -> Any:
        return Relay(self)

    def end(self) -> list[str]:
        self.drain()
        for one in self.ours():
            one.alive = False
            if one.body is not None:
                one.body.clear()
        return []


def _shown(one: Process) -> str:
    if one.name == "python":
        return "python3 cuda_client.py"
    return " ".join(one.command)


class Relay:
    """tests.conformance.questions_handovers.Relay in a world."""

    def __init__(self, rig: WorldRig) -> None:
        self.rig, self.kernel = rig, rig.kernel
        self.directory = f"{BASE}/relay"
        self.kernel.make(self.directory, 0o40755, 0, 0)
        self.process = self.kernel.spawn("relay", 0, 0, self.kernel.init)
        listener = self.kernel.listen(self.process, f"{self.directory}/control", 0o666, 64)
        listener.credentials = True
        self.process.install(listener)
        self.listener = listener
        self.stop: tuple[int, str] | None = None
        self.held: tuple[int, str] | None = None
        self.count = 0
        self.kernel.program(self.process, self.run())

    def at(self, number: int, step: str) -> None:
        self.stop = number, step

    def wait(self, seconds: float = 10.0) -> bool:
        return self.rig.until(lambda: self.held is not None, seconds)

    def go(self) -> None:
        self.stop = self.held = None

    def close(self) -> None:
        self.kernel.signal(self.process, 9)

    def hold(self, step: str) -> Steps:
        if self.stop == (self.count, step):
            self.held = self.stop
            while self.held is not None:
                yield [], self.kernel.now + 0.001

    def run(self) -> Steps:
        while True:
            yield [self.listener], None
            while self.listener.queue:
                yield from self.serve(End(self.process, self.listener.queue.popleft()))

    def serve(self, client: End) -> Generator[tuple[list[File], float | None], None, None]:
        client.say(GREETING)
        said = yield from client.hear()
        if said is None or said.data != CREDENTIALS:
            client.close()
            return
        kind = yield from client.hear()
        if kind is None or kind.data != CLIENT:
            client.close()
            return
        self.count += 1
        yield from self.hold("said")
        daemon = End(self.process, Socket(self.kernel))
        self.kernel.connect(self.process, f"{BASE}/pipe/control", daemon.file)
        yield from daemon.hear()
        daemon.say(CREDENTIALS, who=said.credentials)
        daemon.say(CLIENT)
        yield from self.hold("asked")
        answer = yield from daemon.hear()
        if answer is not None and answer.data == DESCRIPTOR:
            yield from self.hold("answered")
            client.say(answer.data, answer.files)
            for file in answer.files:
                file.drop()
            yield from self.hold("given")
            status = yield from client.hear()
            yield from self.hold("acknowledged")
            if status is not None:
                daemon.say(status.data)
        daemon.close()
        client.close()


# --- the table -------------------------------------------------------------------------------------------------------


def play(name: str) -> str | None:
    """Its raw transcript; None: it asks for what no world has."""
    rig = WorldRig(name)
    clock = SimpleNamespace(monotonic=lambda: rig.kernel.now, sleep=rig.pause)
    stand_ins: dict[str, Any] = {"time": clock, "exited": rig.exited}
    before = [(vars(module), key, vars(module)[key]) for module in MODULES for key in stand_ins if key in vars(module)]
    for names, key, _ in before:
        names[key] = stand_ins[key]
    try:
        scenarios.play(scenarios.ALL[name], rig)
    except NotImplementedError:
        return None
    finally:
        for names, key, value in before:
            names[key] = value
        rig.end()
    return "\n".join(rig.transcript) + "\n"


def as_here(raw: Path) -> str:
    """With the GPU and the directory of a world."""
    text = raw.read_text(errors="replace")
    for name in set(re.findall(r"(?:on device \d+ \(|Device )(NVIDIA [\w ]+?)(?:\)| \(uuid)", text)):
        text = text.replace(name, gpu.NAME)
    text = re.sub(r"free (\d+) MiB total (\d+) MiB", lambda one: _scaled(int(one[1]), int(one[2])), text)
    return re.sub(r"'/tmp/[^']*/relay'", f"'{BASE}/relay'", text)


def _scaled(free: int, total: int) -> str:
    most = free > 0.95 * total
    return f"free {gpu.TOTAL - (total - free) if most else free} MiB total {gpu.TOTAL} MiB"


def steps(section: Any) -> int:
    return sum(map(len, section.streams().values()))


def row(name: str, played: report.Played, found: report.References) -> tuple[str, bool, list[str]]:
    """How it compares, whether well, and what differs."""
    results = [one for one in report.judge(played, found) if one.against]
    if not results:
        return "", True, []
    worst = max(results, key=lambda one: compare.rank(one.verdict))
    count = 0 if worst.good else worst.verdict.size
    return f"{count} differ" if count else "equal", not count, [] if worst.good else list(worst.verdict.differences)


def main() -> int:
    words = argparse.ArgumentParser("tests.world.steps", description=__doc__)
    words.add_argument("names", nargs="*")
    words.add_argument("--raw", type=Path, help="of real MPS, instead of the kept transcripts")
    words.add_argument("--sim", type=Path, help="of the simulator, for a column of its own")
    words.add_argument("--differences", action="store_true", help="print them")
    words.add_argument("--show", action="store_true", help="print what was played")
    asked = words.parse_args()
    found = report.references()
    if asked.raw:
        found.real = {name: [("real now", whole)] for name, whole in report.wholes(as_here(asked.raw)).items()}
    simulated = report.played(as_here(asked.sim)) if asked.sim else {}
    total, equal, well, left = 0, 0, True, []
    print(f"{'scene':5} {'steps':>5}  {'world':18} {'simulator':18}")
    for name in asked.names or scenarios.ALL:
        raw = None if name in LEFT_OUT else play(name)
        if raw is None:
            left.append(name)
            continue
        if asked.show:
            print(raw)
        ours = report.played(raw)[name]
        said, good, differences = row(name, ours, found)
        sim = row(name, simulated[name], found)[0] if name in simulated else ""
        print(
            f"{name:5} {steps(ours.whole):5}  {said or 'not played':18} {sim:18} {scenarios.ALL[name].title}",
            flush=True,
        )
        if asked.differences:
            print("".join(f"       {line}\n" for line in differences), end="")
        total, equal, well = total + bool(said), equal + (bool(said) and good), well and good
    print(f"{equal} of {total} scenes that real MPS has played are equal in every step; left out: {' '.join(left)}")
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
