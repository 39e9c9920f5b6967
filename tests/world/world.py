"""A node in one number: the real gate and the real agent on models of everything outside, from a seed.

``Plan`` says what happens; it is made of the seed and nothing else, can be cut down, and is played to the byte.
"""

from __future__ import annotations

import asyncio
import random
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from mpsagent.agent.node import Node
from mpsagent.agent.orders import Orders
from mpsagent.agent.settings import Settings
from mpsagent.api.history import History
from mpsagent.api.instances import Everything
from mpsagent.api.metrics import Metrics
from mpsagent.api.received import Received
from mpsagent.gate import keeper, service
from mpsagent.gate.loop import Gate, Options
from mpsagent.linux.peers import Credentials
from mpsagent.mps.gpus import ComputeProcess, Gpu
from mpsagent.mps.limits import Device
from mpsagent.mps.work import Work
from mpsagent.policy.identity import Identity
from mpsagent.system.control_child import ControlChild
from mpsagent.system.freezer import Freezer
from mpsagent.system.gate_units import GateState, GateUnits
from mpsagent.system.names import Names
from mpsagent.system.spawn import Ended
from mpsagent.system.store import Store
from mpsagent_sim import texts
from mpsagent_sim.delays import Delays
from tests.policies import WAYS
from tests.world import doors, mps
from tests.world.judges import Broken, Judges
from tests.world.kernel import File, Kernel, Notices, Opened, Process, Socket
from tests.world.loop import Loop
from tests.world.people import KINDS, Life
from tests.world.shown import Shown
from tests.world.streams import serve

PUBLIC, RUN, STATE, LOGS = "/tmp/nvidia-mps", "/run/mpsagent", "/var/lib/mpsagent", "/var/log/nvidia-mps"
UNITS = Path(__file__).parents[2] / "systemd"
HIDDEN = f"{RUN}/instances/default/pipe"
NOTIFY = "/run/systemd/notify"
ORDERS = ((f"{RUN}/mpsagent-orders.sock", 0o666), (f"{RUN}/mpsagent-admin.sock", 0o660))
"""The agent's sockets for everybody's orders and for administrators'."""
DEVICE = Device(0, "GPU-513e171f-4520-0894-ba89-06b9f5c1d7b8", "NVIDIA H200", 143155 << 20, 132)
API = 990
"""The user of the api."""
OWN = "/srv/mps"
"""Pipe directory of a control daemon that an administrator has started beside ours."""
LOOK = 0.25
TAKES_OVER = 1.0
"""Seconds in which a gate that its parent process has started may not have taken over yet: both have died then."""
WATCHDOG = 12.0
"""Seconds until systemd kills a gate that stands still: WatchdogSec= and TimeoutAbortSec= of its unit."""


@dataclass(frozen=True)
class Coming:
    """A client comes: when, whose, for how long it computes, with how many contexts, and what it is (people.KINDS)."""

    at: float
    uid: int
    work: float
    contexts: int = 1
    kind: str = "honest"


ROLES = {"mpsagent-gate": "gate", "mpsagent-gate keep": "parent", "mpsagent": "agent", "mpsagent-api": "api",
         "nvidia-cuda-mps-control": "daemon", "nvidia-cuda-mps-server": "server", "python": "client"}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """``who`` dies (or is stopped for a while) at a time, or, with ``call``, just before what it does as that many-th
    thing after it."""

    at: float
    who: str
    what: str = "kill"
    call: int = 0


@dataclass(frozen=True)
class Plan:
    """What happens in a world. ``limits`` by user: active thread percentage and MiB."""

    seed: int
    way: str
    comings: tuple[Coming, ...]
    faults: tuple[Fault, ...] = ()
    limits: Mapping[int, tuple[float, int]] = field(default_factory=dict)
    ends: bool = False
    """The policy ends turns while others wait."""
    preempt: float = 0.02
    until: float = 3600.0
    rest: float = 15.0
    """Seconds for which it is watched after the last has ended."""
    well: bool = True
    """Where nothing is thrown in, nothing is amiss."""
    parent: bool = False
    """The gate's own parent process keeps it, as on machines without systemd."""

    def limits_of(self, uid: int) -> tuple[float, int]:
        return self.limits.get(uid, (10.0, 1024))

    @property
    def turns(self) -> bool:
        return self.way in ("own", "shared")

    @property
    def policy(self) -> str:
        text = f'[instance.default]\n{WAYS[self.way]}[limits]\nactive_threads = "10%"\nmemory_limit = "1G"\n'
        text += '[timeouts]\ncontrol_daemon = "10s"\nserver = "20s"\nsigkill_delay = "2s"\n'
        for uid, (threads, memory) in self.limits.items():
            text += f'[user.{uid}]\nactive_threads = "{threads:g}%"\nmemory_limit = "{memory >> 10}G"\n'
        return text


class Systemd:
    """Starts gate and agent again, keeps the gate's descriptors, runs what is to run after the agent's end: as the
    agent's unit file says, under systemd 254 or newer."""

    def __init__(self, world: World) -> None:
        self.world, self.kernel = world, world.kernel
        unit = (UNITS / "mpsagent.service").read_text().splitlines()
        told = dict(line.partition("=")[::2] for line in unit if line[:1].isupper())
        self.opens = told.get("OnFailure") == "mpsagent-open.service" and told.get("RestartMode") != "direct"
        """At each end of the agent by a signal: mpsagent-open.service."""
        self.open = False
        """That runs: the gate serves without an agent."""
        self.away = 0.0
        """Until then somebody has stopped the agent; ``gone``: the gate as well."""
        self.gone = 0.0
        self.process = self.kernel.init
        self.stored: dict[str, File] = {}
        self.notify = Socket(self.kernel, datagrams=True)
        self.notify.credentials = True
        self.process.install(self.notify)
        self.kernel.make("/run/systemd", 0o40755, 0, 0)
        self.kernel.make(NOTIFY, 0o140777, 0, 0).listener = self.notify
        self.listeners = []
        self.kernel.make(PUBLIC, 0o40755, 0, 0)
        for name, mode in (("control", 0o666), ("control_privileged", 0o755)):
            listener = self.kernel.listen(self.process, f"{PUBLIC}/{name}", mode, 4096)
            self.process.install(listener)
            self.listeners.append((name, listener))
        self.orders = [self.kernel.listen(self.process, path, mode, 128) for path, mode in ORDERS]
        for listener in self.orders:
            self.process.install(listener)
        self.pages = self.kernel.listen(self.process, f"{RUN}/pages.sock", 0o600, 8)
        self.process.install(self.pages)
        self.kernel.program(self.process, self.run())

    @property
    def alone(self) -> bool:
        """Nobody keeps the gate's descriptors."""
        return False

    def run(self) -> mps.Steps:
        while True:
            yield [self.notify], None
            self.hear()

    def hear(self) -> None:
        while self.notify.messages:
            message = self.notify.next()
            fields = dict(line.partition("=")[::2] for line in message.data.decode().splitlines())
            name, gate = fields.get("FDNAME", ""), self.world.gate
            if gate is not None and message.credentials[0] == gate.process.pid:
                if "FDSTORE" in fields and message.files:
                    self.drop(name)
                    self.stored[name] = message.files[0].take()
                elif "FDSTOREREMOVE" in fields:
                    self.drop(name)
            for file in message.files:
                file.drop()

    def drop(self, name: str) -> None:
        if name in self.stored:
            self.stored.pop(name).drop()

    def start_gate(self) -> None:
        self.hear()
        process = self.gate([*self.listeners, *self.stored.items()], NOTIFY)
        process.on_end.append(lambda _: self.after("gate", max(0.02, self.gone - self.kernel.now), self.start_gate))

    def gate(self, given: list[tuple[str, File]], notify: str, parent: Process | None = None) -> Process:
        process = self.kernel.spawn("mpsagent-gate", 0, 0, parent or self.process)
        process.environment = {"NOTIFY_SOCKET": notify}
        fds = [(name, process.install(file)) for name, file in given]
        self.world.gate = Program(self.world, process)
        self.world.gate.loop.call_soon(self.world.run_gate, fds)
        return process

    def open_gate(self, yes: bool) -> None:
        """mpsagent-open.service is started, or stopped as the agent has started: the gate is another one each time."""
        if self.open is not yes:
            self.open = yes
            self.world.tell("the gate is opened with the fallback limits" if yes else "the gate hears the agent again")
            for one in self.world.who("gate"):
                self.kernel.signal(one, 15)

    def start_api(self) -> None:
        process = self.kernel.spawn("mpsagent-api", API, API, self.process)
        self.world.api = Program(self.world, process)
        self.world.api.loop.call_soon(self.world.run_api, process.install(self.pages))
        process.on_end.append(lambda _: self.after("api", 0.1, self.start_api))

    def start_agent(self) -> None:
        process = self.kernel.spawn("mpsagent", 0, 0, self.process)
        process.environment = {"PATH": "/usr/bin"}
        self.world.agent = Program(self.world, process)
        self.world.agent.loop.call_soon(self.world.run_agent, [process.install(one) for one in self.orders])
        process.on_end.append(lambda _: self.after_agent())

    def after_agent(self) -> None:
        process = self.kernel.spawn("mpsagent-open", 0, 0, self.process)
        loop = Program(self.world, process).loop

        def thaw() -> None:
            Freezer(f"{RUN}/instances/default/frozen").thaw_all()
            doors.os._exit(0)

        loop.call_soon(thaw)
        if self.opens and not self.away > self.kernel.now:
            self.open_gate(True)
        self.after("agent", max(0.25, self.away - self.kernel.now), self.start_agent)

    def after(self, who: str, pause: float, start: Any) -> None:
        """A process needs its time to start, and Python more."""
        self.world.tell(f"systemd starts the {who} again")
        self.kernel.after(pause + self.world.chance.uniform(0.08, 0.4), start)


class Parent(Systemd):
    """The gate's parent process in systemd's place: the real one, but for how it waits, forks and reaps."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.opens = False

    def start_gate(self) -> None:
        process = self.kernel.spawn("mpsagent-gate keep", 0, 0, self.process)
        process.command = ["mpsagent-gate", "keep"]
        process.on_end.append(lambda _: self.stored.clear())
        self.kernel.program(process, self.keep(process))
        self.parent = process

    def run_by_agent(self, *_: Any, **__: Any) -> Any:
        """subprocess.Popen, as the agent starts another parent process when parent and gate have gone."""
        self.world.tell("the agent starts the gate's parent process")
        self.start_gate()
        parent = self.parent
        return SimpleNamespace(pid=parent.pid, poll=lambda: parent.status if parent.ended else None)

    @property
    def alone(self) -> bool:
        return not self.parent.alive

    def keep(self, process: Process) -> mps.Steps:
        ended, kernel = Notices(self.kernel), self.kernel
        kept = _Keeper(["gate"], doors.Path(PUBLIC), doors.Path(RUN))  # type: ignore[arg-type]
        kept.gate = None
        pause, start_at, started = keeper.FIRST_PAUSE, 0.0, 0.0

        def has_ended(_: Process) -> None:
            ended.touched = True
            ended.changed()

        while True:
            if not kept._child and kernel.now >= start_at:
                started = kernel.now
                kept._listen()
                kept._kept.forget_the_dead()
                given = [*((name, sock.fileno()) for name, sock in kept._sockets), *kept._kept.items()]
                kept.gate = self.gate([(name, process.file(fd)) for name, fd in given], f"{RUN}/notify",
                                      process)  # fmt: skip
                kept._child = kept.gate.pid
                kept.gate.on_end.append(has_ended)
            yield [process.file(kept._notify.fileno()), ended], kernel.now + keeper.LOOK if kept._child else start_at
            ended.touched = False
            kept._look()
            kept._listen()
            if kept._reap() is not None:
                lived = kernel.now - started >= keeper.LIVED
                pause = keeper.FIRST_PAUSE if lived else min(keeper.LONGEST_PAUSE, pause * 2)
                start_at = kernel.now + (0.0 if lived else pause)
                self.world.tell("the gate's parent starts it again")
            self.stored = {name: process.file(fd) for name, fd in kept._kept.items()}


class _Keeper(keeper.Keeper):
    gate: Process | None

    def _reap(self) -> int | None:
        if self.gate is None or not self.gate.ended:
            return None
        self._listen()  # what it stored last
        self._child, self.gate = 0, None
        return 9


class Program:
    """A real program as a process."""

    def __init__(self, world: World, process: Process) -> None:
        self.process = process
        self.loop = Loop(process)
        self.loop.set_exception_handler(lambda _, context: world.mistake(process, context))


class _Telling:
    """What the agent writes into the journal: its sentences are the world's story."""

    def __init__(self, world: World) -> None:
        self._world = world

    def info(self, kind: str, **fields: Any) -> None:
        if not self._world.kernel.current.alive:
            return  # what it would do at its end is not done
        self._world.tell(str(fields.get("sentence") or f"{kind} {fields}"))
        if kind == "agent.error":
            self._world.failed(str(fields.get("text")))

    warning = error = info


class _Known(Names):
    """The api's. The judges ask it outside its loop, where an answer that is old is not renewed."""

    def known(self, uid: int) -> Identity | None:
        entry = self._known.get(uid)
        return super().known(uid) if asyncio._get_running_loop() or entry is None else entry[1]


async def _no_admin(_uid: int) -> bool:
    """Nobody is in the admin group."""
    return False


class _Silent:
    """What the api writes into its journal it has from records, which the agent has told already."""

    @staticmethod
    def info(*_: Any, **__: Any) -> None: ...

    warning = info


class World:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.kernel = Kernel(plan.seed, plan.preempt)
        self.chance = self.kernel.chance
        self.delays = Delays(1.0, str(plan.seed))
        self.delays.busy_from = random.Random(f"busy {plan.seed}").choice((1, 2, 4))
        self.judges = Judges(self)
        self.sees = Shown(self)
        self.device, self.public = DEVICE, PUBLIC
        self.uses: dict[int, tuple[str, int]] = {}
        """Who computes on the GPU, with how many MiB, by pid."""
        self.held: dict[int, float] = {}
        """By pid: until when the files of the GPU that a client had open are held."""
        self.story: list[str] = []
        self.mistakes: list[str] = []
        self.gate: Program | None = None
        self.agent: Program | None = None
        self.api: Program | None = None
        self.shown: Everything | None = None
        """What people read."""
        self.node: Node | None = None
        self.drained: float | None = None
        """Since when a drain is on that was answered."""
        self.resumed = float("-inf")
        """When a drain was ended last."""
        self.orders: list[Any] = []
        """orders.Order of everybody."""
        self.armed: list[tuple[int, Fault]] = []
        self.goes_on = 0.0
        """Until then a process is stopped, or an order that was lost is given again."""
        self.did: Counter[str] = Counter()
        """How many things each role has done that others can notice."""
        self.kernel.called = self._called
        self.kernel.sends = lambda process, number: self.judges.signalled(process, number)

    def tell(self, text: str) -> None:
        self.story.append(f"{self.kernel.now - 1000:10.4f}  {text}")

    def mistake(self, process: Process, context: dict[str, Any]) -> None:
        error = context.get("exception")
        lines = traceback.format_exception(error) if isinstance(error, BaseException) else [str(context)]
        self.failed(f"{process}: {''.join(lines)[-3000:]}")

    def failed(self, what: str) -> None:
        self.mistakes.append(what)

    # --- the programs

    def run_gate(self, given: list[tuple[str, int]]) -> None:
        assert self.gate is not None
        loop = self.gate.loop
        daemon, state = doors.Path(HIDDEN), doors.Path(RUN)
        options = Options(daemon=daemon, state=state, link=doors.Path(f"{RUN}/gate.sock"))
        if self.systemd.open:
            options = Options(daemon=daemon, state=state, admissions=service.everybody(state, None, daemon))
        Gate(loop, options, given)

    def run_api(self, pages: int) -> None:
        assert self.api is not None
        metered = Metrics(lambda uid: received.name(uid))
        received = Received(History(None), _Known(), metered)
        self.shown = Everything(received)
        self.metered = metered
        self.received = received

        async def each(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await received.listen(reader, writer)

        serve(self.api.loop, pages, each)

    def run_agent(self, orders: list[int]) -> None:
        assert self.agent is not None
        store = Store(f"{STATE}/state.json")
        how: Any = "child" if self.plan.parent else "systemd"
        settings = Settings(supervise=how, devices_file="/dev/gpus.json")
        self.node = Node(settings, Names(), store)
        self.agent.loop.create_task(self.start(self.node, orders))

    async def start(self, agent: Node, given: list[int]) -> None:
        await agent.start(
            lambda policy, where, gone: ControlChild(where.hidden, gone, program="nvidia-cuda-mps-control")
        )
        self.systemd.open_gate(False)
        orders = Orders(agent.acting, _no_admin, lambda error: self.failed(f"an order failed: {error!r}"))
        for fd in given:
            orders.listen(doors.SocketObject(fileno=fd))  # type: ignore[arg-type]

    async def run_program(self, argv: Sequence[str], environment: Mapping[str, str], **_: Any) -> Ended:
        await asyncio.sleep(self.chance.uniform(0.002, 0.02))
        process = self.kernel.spawn("nvidia-cuda-mps-control", 0, 0, self.kernel.init)
        process.command = ["nvidia-cuda-mps-control", *argv[1:]]
        process.environment = dict(environment)
        daemon = mps.Daemon(self, process, environment["CUDA_MPS_PIPE_DIRECTORY"],
                            environment.get("CUDA_MPS_LOG_DIRECTORY", LOGS), "--multiuser-server" in argv)  # fmt: skip
        self.kernel.program(process, daemon.run())
        begun = self.kernel.now
        while process.alive and not daemon.up:
            await asyncio.sleep(0.001 if self.kernel.now < begun + 0.2 else 0.02)  # it may be stopped for seconds
        return Ended(0 if daemon.up else 1, "" if daemon.up else texts.ALREADY_RUNNING)

    # --- what else stands at the doors

    def others(self) -> dict[tuple[str, str], Any]:
        world = self

        class Bus:
            def both(self) -> GateState:
                return GateState("active", "active", f"{PUBLIC}/control", (f"MPSAGENT_HIDDEN={HIDDEN}",))

            def reload(self) -> None: ...

            start = restart = reload

        def processes(_file: str) -> tuple[ComputeProcess, ...]:
            return tuple(ComputeProcess(pid, DEVICE.uuid, kind == "mps", size << 20)
                         for pid, (kind, size) in world.uses.items())  # fmt: skip

        def work(_file: str) -> dict[str, Work]:
            now = world.kernel.now
            return {DEVICE.uuid: Work(now, now / 2, 300 * now)}

        def looked(_file: str) -> tuple[Gpu, ...]:
            return (Gpu(0, DEVICE.uuid, DEVICE.name, memory=DEVICE.memory, used=0, mode="default"),)

        def collapse(fd: int, _mode: int, length: int) -> int:
            file = doors.kernel.current.file(fd)
            assert isinstance(file, Opened)
            del file.node.data[:length]
            return 0

        class Hold(NamedTuple):
            pid: int

            def end_after(self, seconds: float) -> None:
                world.held[self.pid] = world.kernel.now + seconds

        class GpuFiles:
            def __init__(self, directory: str) -> None: ...

            def hold(self, process: Any, seconds: float) -> Hold:
                world.held[process.pid] = world.kernel.now + seconds
                return Hold(process.pid)

        telling = _Telling(self)
        return {
            ("mpsagent.agent.host", "GpuFiles"): GpuFiles,
            ("mpsagent.linux.peers", "peers_have_pidfds"): lambda: True,
            ("mpsagent.linux.backoff", "fraction"): lambda: 0.0,
            ("mpsagent.gate.loop", "say"): lambda text: world.gate_says(text),
            ("mpsagent.gate.keeper", "say"): lambda text: world.gate_says(text),
            ("mpsagent.gate.handovers", "OURSELVES"): Credentials(1, 0, 0),
            ("mpsagent.agent.gate_keeper", "GateUnits"): lambda: GateUnits(Bus()),
            ("mpsagent.agent.gate_keeper", "write_user_environment"): lambda _: None,
            ("mpsagent.agent.gate_keeper", "subprocess"): SimpleNamespace(
                Popen=lambda *_, **__: world.systemd.run_by_agent(), DEVNULL=-3
            ),
            ("mpsagent.agent.journaling", "log"): telling,
            ("mpsagent.agent.recorder", "log"): telling,
            ("mpsagent.agent.node", "log"): telling,
            ("mpsagent.agent.host", "log"): telling,
            ("mpsagent.agent.lane", "log"): telling,
            ("mpsagent.agent.placing", "open_files"): lambda _: 65_536,
            ("mpsagent.api.received", "log"): _Silent,
            ("mpsagent.system.devices", "from_file"): lambda _: (DEVICE,),
            ("mpsagent.system.devices", "simulated_processes"): processes,
            ("mpsagent.system.devices", "simulated_work"): work,
            ("mpsagent.system.devices", "simulated_gpus"): looked,
            ("mpsagent.system.names", "identity_of"): lambda uid: Identity(uid, f"u{uid}"),
            ("mpsagent.system.control", "find_program"): lambda program, _: program,
            ("mpsagent.system.control_child", "run_program"): self.run_program,
            ("mpsagent.system.store", "threading"): doors._NoThreads,
            ("mpsagent.system.log_heads", "_fallocate"): collapse,
        }

    def gate_says(self, text: str) -> None:
        self.tell(f"gate: {text}")

    # --- what happens

    def comes(self, coming: Coming) -> None:
        process = self.kernel.spawn("python", coming.uid, coming.uid, self.kernel.init)
        life = Life(process, coming.uid, coming.work, honest=coming.kind == "honest")
        self.judges.lives.append(life)
        client = KINDS[coming.kind](self, life, coming.contexts)
        process.on_end.append(lambda _: self.judges.gone(life))
        self.kernel.program(process, client.run())
        kind = "" if life.honest else f", which is {coming.kind}"
        self.tell(f"client {process.pid} of user {coming.uid} starts, for {coming.work:.1f} s of work{kind}")

    def who(self, role: str) -> list[Process]:
        return [one for one in self.kernel.processes.values()
                if ROLES.get(one.name) == role and one.alive and OWN not in one.environment.values()]  # fmt: skip

    def throw(self, fault: Fault) -> None:
        if fault.who == "clock":
            by = self.chance.choice((-3600.0, -2.0, 2.0, 3600.0))
            self.kernel.wall += by
            self.tell(f"the wall clock is set by {by:g} s")
            return
        if fault.call:
            self.armed.append((self.did[fault.who] + fault.call, fault))
            return
        found = self.who(fault.who)
        if found:
            self.strike(found[self.chance.randrange(len(found))], fault)

    def strike(self, process: Process, fault: Fault) -> None:
        faults, now = self.judges.faults, self.kernel.now
        faults.append((now, fault.who))
        if fault.what == "kill":
            self.tell(f"{process} is killed")
            starts = fault.who == "parent" and any(kind == "gate" and now - at < TAKES_OVER for at, kind in faults)
            if starts or (fault.who == "gate" and self.systemd.alone):
                faults.append((now, "reinstall"))
            self.kernel.signal(process, 9)
        elif fault.what == "sockets":
            self.tell("somebody removes the public sockets")
            for name in keeper.PUBLIC_NAMES:
                if f"{PUBLIC}/{name}" in self.kernel.nodes:
                    self.kernel.remove(f"{PUBLIC}/{name}")
        elif fault.what == "away":
            seconds = fault.call or self.chance.choice((5, 40, 90))
            self.tell(f"somebody stops the {fault.who}, for {seconds} s")
            self.systemd.away = self.kernel.now + seconds
            self.kernel.signal(process, 9)
        else:
            seconds = self.chance.choice((0.05, 0.5, 3.0, 15.0))
            self.tell(f"{process} is stopped for {seconds:g} s")
            self.judges.stops.append((self.kernel.now, seconds))
            self.goes_on = max(self.goes_on, self.kernel.now + seconds)
            self.kernel.signal(process, 19)
            self.kernel.after(seconds, self.kernel.signal, process, 18)
            if fault.who == "client":  # while no agent resumes it, the gate says the rest of its handshake in its place
                self.kernel.after(seconds, lambda: faults.append((self.kernel.now, "client")))
            if fault.who == "gate" and seconds > WATCHDOG and not self.plan.parent:
                self.kernel.after(WATCHDOG, self.kernel.signal, process, 9)

    def _called(self, process: Process, what: str) -> None:
        role = ROLES.get(process.name, "")
        self.did[role] += 1
        for one in self.armed:
            if one[1].who == role and self.did[role] >= one[0]:
                self.armed.remove(one)
                self.tell(f"(before {what})")
                self.strike(process, one[1])
                return

    def advance(self, until: float) -> None:
        """Raises Broken; never in the middle of the product's code."""
        while self.kernel.now < until:
            self.kernel.run(min(until, self.kernel.now + LOOK))
            self.judges.look()
            self.judges.work()
            self.sees.look()
            if self.mistakes:
                self.judges.fail(f"an error of the product's own: {self.mistakes[0]}")
            if self.judges.broken is not None:
                raise Broken(self.judges.broken)

    @contextmanager
    def doors(self) -> Iterator[None]:
        with doors.opened(self.kernel, self.others()):
            yield

    def play(self) -> None:
        """Raises Broken."""
        asyncio.set_event_loop(None)  # else a world would be another one where no loop has run before
        kernel = self.kernel
        for path in (RUN, STATE, "/etc/mpsagent", LOGS, f"{RUN}/instances"):
            if path not in kernel.nodes:
                kernel.make(path, 0o40755, 0, 0)
        kernel.make("/etc/mpsagent/policy.toml", 0o100644, 0, 0).data[:] = self.plan.policy.encode()
        with self.doors():
            self.systemd = (Parent if self.plan.parent else Systemd)(self)
            self.systemd.start_api()
            self.systemd.start_gate()
            kernel.after(0.2, self.systemd.start_agent)
            for coming in self.plan.comings:
                kernel.after(coming.at, self.comes, coming)
            for fault in self.plan.faults:
                kernel.after(fault.at, self.throw, fault)
            try:
                self.run()
            finally:
                for process in list(kernel.processes.values()):
                    kernel.current = process
                    process.alive = False
                    if process.body is not None:
                        process.body.clear()

    def _more_to_come(self) -> bool:
        """A job starts behind an order, which is given again if it was lost with the agent."""
        return self.kernel.now <= self.goes_on or any(one.heard is None and not one.lost for one in self.orders)

    def run(self) -> None:
        kernel, plan = self.kernel, self.plan
        self.advance(kernel.now + max([0.0, *(one.at for one in (*plan.comings, *plan.faults))]))
        over = kernel.now + plan.until
        while (self._more_to_come() or any(one.process.alive for one in self.judges.lives)) and kernel.now < over:
            self.advance(kernel.now + 1.0)
        self.advance(kernel.now + plan.rest)
        while self.judges.faults and kernel.now < (last := self.judges.faults[-1][0] + plan.rest):
            self.advance(last)
        self.advance(max(kernel.now, self.systemd.away + plan.rest, self.goes_on + plan.rest))
        self.judges.at_the_end()
        self.sees.at_the_end()
        self.advance(kernel.now + LOOK)
