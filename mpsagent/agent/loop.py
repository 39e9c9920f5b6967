"""The agent: bytes of the logs become events, events state, state decisions, decisions actions, actions outcomes.

One asyncio loop, one thread. What may block for long sits in threads or processes of the hands. The way from a line in
control.log to the front-end has no await on it: a waiting client has to be armed for within 55 ms.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import structlog

from mpsagent.agent.catch_up import catch_up
from mpsagent.agent.clock import SteadyClock
from mpsagent.agent.performer import Performer, mps_environment
from mpsagent.agent.policies import keep_fixed
from mpsagent.agent.records import event_record
from mpsagent.agent.senses import People, Processes, wanted_processes
from mpsagent.agent.settings import Settings
from mpsagent.agent.troubles import Troubles, note_troubles
from mpsagent.decisions import actions as act
from mpsagent.decisions.decide import Memory, decide, note
from mpsagent.decisions.policy import Policy, PolicyError
from mpsagent.decisions.policy_file import load
from mpsagent.decisions.world import Drain, World
from mpsagent.facts import events as ev
from mpsagent.facts.logparse import LogParser
from mpsagent.facts.model import Device, State
from mpsagent.facts.reduce import apply, apply_all
from mpsagent.hands import devices as gpus
from mpsagent.hands import pipedir
from mpsagent.hands.control import ControlSupervisor, Running, TroubleKind
from mpsagent.hands.frontend import FrontEnd
from mpsagent.hands.history import History
from mpsagent.hands.logfiles import Chunk, LogFollower, at_position
from mpsagent.hands.names import Names
from mpsagent.hands.policy_files import read_policy_files

TICK = 1.0
"""Seconds between two looks at what announces itself by nothing: stopped processes, the mode of the pipe directory."""
KEPT_PARSERS = 4
MOST_PENDING = 256
"""Actions under way at most; more than that are a fault of ours, and said to be one."""

log = structlog.get_logger("mpsagent")


class Agent:
    """One instance of MPS under one policy. Everything public here is for the faces; times are those of ``clock``."""

    def __init__(self, settings: Settings, history: History, names: Names) -> None:
        self.settings = settings
        self.history = history
        self.clock = SteadyClock()
        self.started = self.clock.now()
        self.state = State()
        self.memory = Memory()
        self.policy = Policy()
        self.policy_errors: tuple[PolicyError, ...] = ()
        self.policy_loaded: float | None = None
        self.devices: tuple[Device, ...] = ()
        self.drain: Drain | None = None
        self.troubles = Troubles()
        self.counts: Counter[str] = Counter()
        self.last_switch: float | None = None
        self.ready = False
        self.names = names
        self.people = People(names, self._again)
        self.processes = Processes(self._gone)
        self.supervisor: ControlSupervisor
        self.performer: Performer
        self._front_end: FrontEnd
        self._parsers: dict[tuple[str, int], LogParser] = {}
        """By log and inode: after a rename the old file may go on beside the new one."""
        self.at_start: dict[str, tuple[int, int] | None] = {}
        """Where the followers took over from the catching up: their first bytes go on with a line that is known."""
        self._followers: list[LogFollower] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending = 0
        self._door_open = False
        self._parked_uid = 65534
        self._stopping = False

    # --- start and stop -----------------------------------------------------------------------------------------------

    async def start(self, make_supervisor: Callable[[Policy, Callable[[int], None]], ControlSupervisor]) -> None:
        """Read the policy, take over or prepare, read the logs. Returns when the agent is at work."""
        await self.load_policy(first=True)
        policy = self.policy
        self._front_end = FrontEnd(policy.control_program, mps_environment(policy))
        self.supervisor = make_supervisor(policy, self._control_gone)
        self.performer = Performer(policy, self._front_end, self.supervisor, self.processes, self.clock, self._take)
        self.performer.known_servers = lambda: {s.pid: s.uid for s in self.state.servers.values()}
        self.performer.known_clients = lambda server: [c.pid for c in self.state.clients_of(server) if c.contexts - {0}]
        await self._find_parked_user()
        await self._find_devices()
        await self._adopt()
        await self._read_logs()
        self.ready = True
        self._spawn(self._tick())
        self.decide_now()

    async def end(self) -> None:
        """Let go of everything. MPS runs on, unless the policy says otherwise (``agent.on_stop``)."""
        if self.ready and self.policy.on_stop == "quit" and self.supervisor.running is not None:
            timeout = max(1, round(self.policy.stop_timeout))
            quit_it = act.QuitControl(timeout=timeout, reason="the agent is being stopped", rule="agent.on_stop")
            outcome = await self.performer.perform(quit_it)
            self.record("control.quit", outcome.at, ok=outcome.ok, text=outcome.text)
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for follower in self._followers:
            follower.close()
        self._front_end.close()
        self.supervisor.close()
        self.processes.close()
        self.people.close()
        self.history.close()

    async def _find_parked_user(self) -> None:
        with suppress(TimeoutError):
            uid = await self.names.uid_of(self.policy.parked_user)
            if uid is not None:
                self._parked_uid = uid
                return
        what = f"there is no user {self.policy.parked_user} for the parked server; uid {self._parked_uid} is used"
        self.troubles.set("parked user", what, self.clock.now(), "set agent.parked_user")

    async def _adopt(self) -> None:
        """Take over a control daemon that runs already, or prepare the directories for a new one."""
        found = await self.supervisor.adopt()
        now = self.clock.now()
        if isinstance(found, Running):
            self._door_open = pipedir.is_open(self.policy.pipe_directory)
            self.record("control.adopted", now, pid=found.pid, how=found.how)
            return
        if found.kind is TroubleKind.UNSAFE:
            self.troubles.set("control daemon", found.text, now, do=" && ".join(found.commands))
            self.record("control.unsafe", now, text=found.text, commands=list(found.commands))

    async def _read_logs(self) -> None:
        directory = self.policy.log_directory
        paths = {name: f"{directory}/{name}.log" for name in ("control", "server")}
        parsers = {"control": LogParser("control"), "server": LogParser("server")}
        last = self.history.since(self.history.newest - 1, 1)
        since = float(last[0]["at"]) if last else self.started  # type: ignore[arg-type]
        caught = await asyncio.to_thread(
            catch_up, paths["control"], paths["server"], parsers["control"], parsers["server"], since
        )
        self.state = caught.state
        for name, position in (("server", caught.server), ("control", caught.control)):
            if position is not None:
                self._parsers[name, position.inode] = parsers[name]
        for event in caught.missed:
            self._write_down(event)
        running = self.supervisor.running
        control = self.state.control
        if control is not None and (running is None or running.pid != control.pid):
            self.state = apply(self.state, ev.ControlGone(self.clock.now()))
            self.at_start[name] = None if position is None else (position.inode, position.offset)
        for name, position in (("server", caught.server), ("control", caught.control)):
            follower = LogFollower(
                paths[name],
                lambda chunk, name=name: self._read(name, chunk),  # type: ignore[misc]
                on_problem=lambda text, name=name: self._log_problem(name, text),  # type: ignore[misc]
                first=None if position is None else at_position(position),
            )
            self._followers.append(follower)
            await follower.start()

    async def _find_devices(self) -> None:
        """Ask NVML, again and again until it answers; without devices only percentages can be held."""
        found = await self._devices()
        now = self.clock.now()
        if isinstance(found, str):
            self.troubles.set("devices", found, now, "memory limits and multiprocessors need them; see nvidia-smi")
            if not self._stopping:
                asyncio.get_running_loop().call_later(30.0, lambda: self._spawn(self._find_devices()))
            return
        self.troubles.set("devices", None, now)
        self.devices = found
        self.performer.devices = found
        self._again()

    async def _devices(self) -> tuple[Device, ...] | str:
        if self.settings.devices_file is None:
            return await gpus.probe(mps_environment(self.policy))
        try:
            return gpus.from_file(self.settings.devices_file)
        except (OSError, ValueError) as error:
            return f"{self.settings.devices_file}: {error}"

    # --- policy -------------------------------------------------------------------------------------------------------

    async def load_policy(self, *, first: bool = False) -> tuple[PolicyError, ...]:
        """Read the policy files. A bad policy never replaces a good one; at the start the defaults stand in for it."""
        texts, unread = await read_policy_files(self.settings.policy, self.settings.policy_directory)
        policy, mistakes = load(texts)
        errors = (*unread, *mistakes)
        now = self.clock.now()
        self.policy_errors = errors
        if policy is None or errors:
            kept = "the defaults are in force" if first else "the policy from before stays in force"
            what = f"{errors[0]} ({len(errors)} mistakes; {kept})"
            self.troubles.set("policy", what, now, "mpsagent-cli policy check")
            self.record("policy.rejected", now, errors=[str(error) for error in errors[:20]], kept=kept)
            return errors
        self.troubles.set("policy", None, now)
        if not first:
            policy, left = keep_fixed(self.policy, policy)
            self.troubles.set("restart", left, now, "systemctl restart mpsagent")
        self.policy, self.policy_loaded = policy, now
        self.record("policy.loaded", now, digest=policy.digest, files=list(policy.sources))
        if not first:
            self.performer.policy = policy
            self.people.refresh()
            self.decide_now()
        return ()

    # --- what comes in ------------------------------------------------------------------------------------------------

    def _read(self, name: str, chunk: Chunk) -> None:
        parser = self._parsers.get((name, chunk.inode))
        known = self.at_start.get(name)
        if parser is None or (chunk.fresh and known != (chunk.inode, chunk.offset)):
            parser = LogParser("control" if name == "control" else "server")
            for old in [key for key in self._parsers if key[0] == name][:-KEPT_PARSERS]:
                del self._parsers[old]
            self._parsers[name, chunk.inode] = parser
        events = parser.feed(chunk.data, self.clock.shift())
        if name == "control" and events:
            self.performer.heard(events[-1].at)
        self._take(events)

    def _take(self, events: Sequence[ev.Event]) -> None:
        """New facts. Deciding comes before writing them down: a waiting client is being armed for."""
        before = self.state
        self.state = apply_all(before, list(events))
        for event in events:
            if isinstance(event, ev.ClientQueued):
                self.people.meet((event.uid,))
        if self.ready and self.state is not before:
            self.decide_now()
        for event in events:
            self._write_down(event)

    def _write_down(self, event: ev.Event) -> None:
        self.counts[type(event).__name__] += 1
        if isinstance(event, ev.ServerReady):
            self.last_switch = event.at
        record = event_record(event, self.state)
        if record is not None:
            kind, fields = record
            self.record(kind, event.at, **fields)

    def _gone(self, pid: int) -> None:
        self.processes.gone(pid)
        self._take([ev.ProcessGone(self.clock.now(), pid)])
        self._again()

    def _control_gone(self, pid: int) -> None:
        now = self.clock.now()
        self.record("control.gone", now, pid=pid)
        self._door_open = False
        self._take([ev.ControlGone(now)])
        self._again()

    def _log_problem(self, name: str, text: str | None) -> None:
        do = "what happens in MPS is not seen until it can be read"
        self.troubles.set(f"{name}.log", text, self.clock.now(), do)

    async def _tick(self) -> None:
        while not self._stopping:
            await asyncio.sleep(TICK)
            running = self.supervisor.running
            control = running.process if running is not None else None
            pids = [*self.state.servers, *([control.pid] if control is not None else [])]
            changed = self.processes.look(pids, control, self._idle_matters(), self.clock.now())
            door = running is not None and pipedir.is_open(self.policy.pipe_directory)
            if door != self._door_open:
                self._door_open, changed = door, True
            if self.performer.silent_since is not None and self._front_end.busy_since is None:
                self._spawn(self._listen())
            self._note_troubles()
            if changed:
                self.decide_now()

    def _idle_matters(self) -> list[int]:
        """Clients whose idleness somebody's ``idle_timeout`` counts just now."""
        if not self.state.waiting:
            return []
        world = self.world()
        return [c.pid for c in self.state.clients.values()
                if c.uid is not None and world.rules(c.uid).idle_timeout is not None]  # fmt: skip

    async def _listen(self) -> None:
        await self.performer.listen()
        self._again()

    # --- deciding -----------------------------------------------------------------------------------------------------

    def world(self) -> World:
        running = self.supervisor.running
        control = running.process if running is not None else None
        wanted = wanted_processes(self.state, self.memory)
        return World(
            state=self.state,
            policy=self.policy,
            devices=self.devices,
            identities=self.people.known,
            processes=self.processes.follow(wanted, control),
            control_alive=running is not None,
            door_open=self._door_open,
            silent_since=self.performer.silent_since,
            parked_uid=self._parked_uid,
            drain=self.drain,
        )

    def _again(self) -> None:
        """Decide soon: something outside the state has changed."""
        if self.ready and not self._stopping:
            asyncio.get_running_loop().call_soon(self.decide_now)

    def decide_now(self) -> None:
        if self._stopping or not self.ready:
            return
        now = self.clock.now()
        self.people.meet({w.uid for w in self.state.waiting} | {s.uid for s in self.state.servers.values() if s.uid})
        world = self.world()
        self.performer.floor = world.floor()
        decision = decide(world, self.memory, now)
        self.memory = decision.memory
        for action in decision.actions:
            self.dispatch(action, now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if decision.deadline is not None:
            delay = max(0.0, decision.deadline - now) + 0.001
            self._timer = asyncio.get_running_loop().call_later(delay, self.decide_now)

    def dispatch(self, action: act.Action, now: float) -> None:
        self.counts[type(action).__name__] += 1
        if isinstance(action, act.Report):
            self.record(action.kind, now, **self._fields(action))
            return
        if self._pending >= MOST_PENDING:
            self.troubles.set(
                "actions", f"{MOST_PENDING} actions are under way; {type(action).__name__} was dropped", now
            )
            self.memory = note(self.memory, act.Outcome(now, action, False, "too many actions are under way"))
            return
        self._pending += 1
        self._spawn(self._perform(action))

    async def _perform(self, action: act.Action) -> None:
        performing = self.performer.perform(action)
        number = None
        try:
            if isinstance(action, act.SetDefaults):  # first the deed: its window is short
                outcome = await performing
                number = self._begin(action)
            else:
                number = self._begin(action)
                outcome = await performing
        finally:
            self._pending -= 1
        self.record("action.done", outcome.at, action=type(action).__name__, begun=number, ok=outcome.ok,
                     text=outcome.text, **self._fields(action))  # fmt: skip
        if isinstance(action, act.OpenDoor | act.StartControl) and outcome.ok:
            self._door_open = pipedir.is_open(self.policy.pipe_directory)
        self.memory = note(self.memory, outcome)
        self._note_troubles()
        self.decide_now()

    def _fields(self, action: act.Action) -> dict[str, object]:
        """An action as it is written down: with the line of the policy that it follows."""
        origin = self.policy.origin(action.rule)
        found = act.action_fields(action)
        return {**found, "policy": f"{origin.file}:{origin.line}"} if origin.file else found

    def _begin(self, action: act.Action) -> int:
        return self.record("action", self.clock.now(), action=type(action).__name__, **self._fields(action))

    def _note_troubles(self) -> None:
        running = self.supervisor.running is not None
        note_troubles(self.troubles, self.performer, self.memory, self.history.problem, running, self.clock.now())

    def record(self, kind: str, at: float, **fields: object) -> int:
        log.info(kind, **fields)
        return self.history.append(kind, at, **fields)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the agent failed", error=repr(error))
            self.troubles.set(
                "agent", f"internal error: {error!r}", self.clock.now(), "please report it with the journal"
            )
