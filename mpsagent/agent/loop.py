"""The agent: bytes of the logs become events, events state, state decisions, decisions actions, actions outcomes.

One asyncio loop, one thread. What may block for long sits in threads or processes of the hands. The way from a line in
control.log to the front-end has no await on it: a waiting client has to be armed for within 55 ms.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import structlog

from mpsagent.agent import gpus, opening
from mpsagent.agent.adoption import Claim, claim
from mpsagent.agent.bypass import Bypass
from mpsagent.agent.catch_up import foreign
from mpsagent.agent.clock import SteadyClock
from mpsagent.agent.performer import Performer, mps_environment
from mpsagent.agent.policies import keep_fixed, last_good, read
from mpsagent.agent.records import Sparingly, event_record
from mpsagent.agent.rounds import Rounds
from mpsagent.agent.senses import People, Processes, wanted_processes
from mpsagent.agent.settings import Settings
from mpsagent.agent.troubles import Troubles, note_troubles
from mpsagent.core import actions as act
from mpsagent.core.decide import Memory, decide, note
from mpsagent.core.model import State
from mpsagent.core.reduce import apply, apply_all
from mpsagent.core.world import Drain, World
from mpsagent.mps import events as ev
from mpsagent.mps.limits import Device
from mpsagent.mps.loglines import LogParser
from mpsagent.policy.policy import Policy, PolicyError
from mpsagent.system import pipedir
from mpsagent.system.control import ControlSupervisor
from mpsagent.system.frontend import FrontEnd
from mpsagent.system.history import History
from mpsagent.system.logfiles import Chunk, LogFollower, Position, at_position
from mpsagent.system.names import Names

TICK = 1.0
"""Seconds between two rounds."""
KEPT_PARSERS = 4
MOST_PENDING = 256
"""Actions under way at most; more than that are a fault of ours, and said to be one."""
MANY = 50
"""Events at once that are written down only after what they call for has been begun."""
UNKNOWN_A_MINUTE = 30
"""Unknown lines on record; users can provoke them without end, and the record of everything else must outlive that."""
GPU_WAIT = 3.0
"""Seconds for which the start waits for the GPUs to be known when no agent has found them before."""
FORGET = 600.0
"""Seconds until a mistake of ours that has not come again is no trouble any more."""

log = structlog.get_logger("mpsagent")


class Agent:
    """One instance of MPS under one policy. Everything public here is for the faces; times are those of ``clock``."""

    def __init__(self, settings: Settings, history: History, names: Names) -> None:
        self.settings = settings
        self.history = history
        self.inherited = history.newest
        """Number of the last record of the agent before."""
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
        self.bypass = Bypass()
        self.followers: dict[str, LogFollower] = {}
        self.unreachable_since: float | None = None
        self.door_open = False
        self.supervisor: ControlSupervisor
        self.performer: Performer
        self._front_end: FrontEnd
        self._claim = Claim()
        self._parsers: dict[tuple[str, int], LogParser] = {}
        """By log and inode: after a rename the old file may go on beside the new one."""
        self._at_start: dict[str, tuple[int, int]] = {}
        """Where the followers took over from the catching up: their first bytes go on with a line that is known."""
        self._rounds = Rounds(self)
        self._closing = ExitStack()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending = 0
        self.parked_uid = 65534
        self._loading = asyncio.Lock()
        self._unknown = Sparingly(UNKNOWN_A_MINUTE)
        self.stopping = False

    @property
    def socket_path(self) -> str:
        """Of the control daemon."""
        return f"{self.policy.pipe_directory}/control"

    # --- start and stop -----------------------------------------------------------------------------------------------

    async def start(self, make_supervisor: Callable[[Policy, Callable[[int], None]], ControlSupervisor]) -> None:
        """Read the policy, take over or prepare, read the logs. Returns when the agent is at work. Raises AlreadyLocked
        when another agent is."""
        asyncio.get_running_loop().set_exception_handler(self._loop_failed)
        await self.load_policy(first=True)
        policy = self.policy
        claim(policy, self._claim)
        self._closing.callback(self._claim.close)
        self._front_end = FrontEnd(policy.control_program, mps_environment(policy))
        self._closing.callback(self._front_end.close)
        self.supervisor = make_supervisor(policy, self._control_gone)
        self._closing.callback(self.supervisor.close)
        self.performer = Performer(
            policy, self._front_end, self.supervisor, self.processes, self.clock, self._claim, self._told,
            opening.files_for_systemd(self),
        )  # fmt: skip
        self._closing.callback(self.performer.close)
        self.performer.known_servers = lambda: {s.pid: s.uid for s in self.state.servers.values()}
        self.performer.known_clients = lambda server: [c.pid for c in self.state.clients_of(server) if c.contexts - {0}]
        self.use_devices(gpus.remembered(self.settings, policy.devices))
        looking = self.spawn(opening.find_devices(self))
        await opening.find_parked_user(self)
        await opening.adopt(self)
        for name, (position, parser) in (await opening.read_logs(self)).items():
            await self._follow(name, position, parser)
        await opening.meet_people(self)
        if not self.devices:
            await asyncio.wait({looking}, timeout=GPU_WAIT)
        self.ready = True
        self.spawn(self._tick())
        self._rounds.survey()
        self.decide_now()

    async def _follow(self, name: str, position: Position | None, parser: LogParser) -> None:
        """From where the log was read to, with the parser that knows how its last line began."""
        if position is not None:
            self._parsers[name, position.inode] = parser
            self._at_start[name] = (position.inode, position.offset)
        follower = self.followers[name] = LogFollower(
            f"{self.policy.log_directory}/{name}.log",
            lambda chunk: self._read(name, chunk),
            on_problem=lambda text: self._log_problem(name, text),
            first=None if position is None else at_position(position),
        )
        await follower.start()

    async def end(self) -> None:
        """Let go of everything. MPS runs on, unless the policy says otherwise (``agent.on_stop``)."""
        if self.ready and self.policy.on_stop == "quit" and self.supervisor.running is not None:
            timeout = max(1, round(self.policy.stop_timeout))
            quit_it = act.QuitControl(timeout=timeout, reason="the agent is being stopped", rule="agent.on_stop")
            outcome = await self.performer.perform(quit_it)
            self.record("control.quit", outcome.at, ok=outcome.ok, text=outcome.text)
        self.stopping = True
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for follower in self.followers.values():
            follower.close()
        self.processes.close()
        self.people.close()
        self._closing.close()
        self.history.close()

    def use_devices(self, found: tuple[Device, ...]) -> None:
        if found != self.devices:
            self.devices = found
            self.performer.devices = found
            self._again()

    async def load_policy(self, *, first: bool = False) -> tuple[PolicyError, ...]:
        """Read the policy files. A bad policy never replaces a good one, also when the agent is started again;
        where there was none the defaults stand in for it."""
        async with self._loading:
            policy, errors = await read(self.settings)
            good = await last_good(self.settings) if first and (policy is None or errors) else None
        now = self.clock.now()
        self.policy_errors = errors
        if policy is None or errors:
            kept = "the defaults are in force" if first and good is None else "the policy from before stays in force"
            self.policy = good or self.policy
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
            self._rounds.survey()
            self.decide_now()
        return ()

    # --- what comes in ------------------------------------------------------------------------------------------------

    def _read(self, name: str, chunk: Chunk) -> None:
        parser = self._parsers.get((name, chunk.inode))
        if parser is None or (chunk.fresh and self._at_start.pop(name, None) != (chunk.inode, chunk.offset)):
            parser = LogParser("control" if name == "control" else "server")
            for old in [key for key in self._parsers if key[0] == name][:-KEPT_PARSERS]:
                del self._parsers[old]
            self._parsers[name, chunk.inode] = parser
        events = parser.feed(chunk.data, self.clock.shift())
        if name == "control" and events:
            self.performer.heard(events[-1].at)
        self._take(events)

    def _take(self, events: Sequence[ev.Event], *, written: bool = True) -> None:
        """New facts. Deciding comes before writing them down: a waiting client is being armed for."""
        if any(foreign(event, self.socket_path) for event in events):
            events = [event for event in events if not foreign(event, self.socket_path)]
            what = "another control daemon, with another pipe directory, writes into the same log files"
            do = f"give it a log directory of its own; {self.policy.log_directory} is this instance's"
            now = self.clock.now()
            self.troubles.set("other daemon", what, now, do, until=now + FORGET)
        before = self.state
        try:
            self.state = apply_all(before, list(events))
        except Exception as error:
            self.failed("a fact could not be taken in", error)
            for event in events:
                with suppress(Exception):
                    self.state = apply(self.state, event)
        if self.ready and self.state is not before:
            self.decide_now()
        if not written:
            return
        if len(events) > MANY:  # behind the actions that have just been begun
            asyncio.get_running_loop().call_soon(self._write_down, events)
        else:
            self._write_down(events)

    def _told(self, facts: list[ev.Event]) -> None:
        """What an answer of MPS brought; the action's own record says it."""
        self._take(facts, written=False)

    def _write_down(self, events: Sequence[ev.Event]) -> None:
        for event in events:
            self.counts[type(event).__name__] += 1
            if isinstance(event, ev.ServerReady):
                self.last_switch = event.at
            if isinstance(event, ev.Unknown) and not self._unknown.may(self.clock.now()):
                continue
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
        self.door_open, self.unreachable_since = False, None
        self._take([ev.ControlGone(now, pid)])
        self._again()

    def _log_problem(self, name: str, text: str | None) -> None:
        do = "what happens in MPS is not seen until it can be read"
        self.troubles.set(f"{name}.log", text, self.clock.now(), do)

    async def _tick(self) -> None:
        while not self.stopping:
            await asyncio.sleep(TICK)
            try:
                changed = self._rounds.once()
                unheard = (self.performer.silent_since, self.performer.turned_away_since) != (None, None)
                if unheard and self._front_end.busy_since is None:
                    self.spawn(self._listen())
                self._note_troubles()
            except Exception as error:
                self.failed("looking around failed", error)
                changed = True
            if changed:
                self.decide_now()

    def idle_matters(self) -> list[int]:
        """Clients whose idleness somebody's ``idle_timeout`` counts just now."""
        if not self.state.waiting:
            return []
        world = self.world()
        return [c.pid for c in self.state.clients.values()
                if c.uid is not None and world.rules(c.uid).idle_timeout is not None]  # fmt: skip

    async def _listen(self) -> None:
        await self.performer.listen()
        await self.performer.see_who_is_there()
        self._again()

    # --- deciding -----------------------------------------------------------------------------------------------------

    def world(self) -> World:
        running = self.supervisor.running
        control = running.process if running is not None else None
        wanted = wanted_processes(self.state, self.memory)
        return World(
            state=self.state,
            policy=self.policy,
            devices=self.devices or gpus.UNKNOWN,
            identities=self.people.known,
            processes=self.processes.follow(wanted, control),
            control_alive=running is not None,
            door_open=self.door_open,
            silent_since=self.performer.silent_since,
            unreachable_since=self.unreachable_since,
            parked_uid=self.parked_uid,
            drain=self.drain,
        )

    def _again(self) -> None:
        """Decide soon: something outside the state has changed."""
        if self.ready and not self.stopping:
            asyncio.get_running_loop().call_soon(self.decide_now)

    def decide_now(self) -> None:
        """Whatever goes wrong here, it is tried again: an agent that no longer decides protects nobody."""
        if self.stopping or not self.ready:
            return
        try:
            deadline = self._decide()
        except Exception as error:
            self.failed("deciding failed", error)
            deadline = self.clock.now() + TICK
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            delay = max(0.0, deadline - self.clock.now()) + 0.001
            self._timer = asyncio.get_running_loop().call_later(delay, self.decide_now)

    def _decide(self) -> float | None:
        now = self.clock.now()
        uids = {w.uid for w in self.state.waiting} | {s.uid for s in self.state.servers.values() if s.uid}
        self.people.meet(uids)
        self.people.keep(uids)
        world = self.world()
        floor = world.floor()
        changed, self.performer.floor = floor != self.performer.floor, floor
        decision = decide(world, self.memory, now)
        self.memory = decision.memory
        for action in decision.actions:
            self.dispatch(action, now)
        if changed:
            self._rounds.will()
        return decision.deadline

    def dispatch(self, action: act.Action, now: float) -> None:
        self.counts[type(action).__name__] += 1
        if isinstance(action, act.Report):
            self.record(action.kind, now, **self._fields(action))
            return
        if self._pending >= MOST_PENDING:
            what = f"{MOST_PENDING} actions are under way; {type(action).__name__} was dropped"
            self.troubles.set("actions", what, now, "please report it with the journal", until=now + FORGET)
            self.memory = note(self.memory, act.Outcome(now, action, False, "too many actions are under way"))
            return
        self._pending += 1
        self.spawn(self._perform(action))

    async def _perform(self, action: act.Action) -> None:
        number = None
        try:
            if not isinstance(action, act.SetDefaults):  # else first the deed: its window is short
                number = self._begin(action)
            outcome = await self.performer.perform(action)
            if number is None:
                number = self._begin(action)
        finally:
            self._pending -= 1
        self.memory = note(self.memory, outcome)
        self.record("action.done", outcome.at, action=type(action).__name__, begun=number, ok=outcome.ok,
                     text=outcome.text, **self._fields(action))  # fmt: skip
        if isinstance(action, act.OpenDoor | act.StartControl) and outcome.ok:
            self.door_open = pipedir.is_open(self.policy.pipe_directory)
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

    # --- on record ----------------------------------------------------------------------------------------------------

    def record(self, kind: str, at: float, **fields: object) -> int:
        """Into the journal and the history; returns its number there. Never raises."""
        try:
            log.info(kind, **fields)
            return self.history.append(kind, at, **fields)
        except Exception as error:  # a field that cannot be written must not stop what it is about
            self.troubles.set("records", f"{kind} could not be written down: {error!r}", at, "", until=at + FORGET)
            return 0

    def failed(self, what: str, error: BaseException) -> None:
        """A mistake of ours: on record and among the troubles; the agent goes on. ``what``: one of few texts."""
        now = self.clock.now()
        last = traceback.extract_tb(error.__traceback__)[-1:]
        where = ", ".join(f"{frame.filename}:{frame.lineno}" for frame in last)
        text = f"{what}: {error!r} at {where}"
        do = "please report it with the journal; if it does not go away: systemctl restart mpsagent"
        if self.troubles.set(f"agent: {what}", f"internal error, {text}", now, do, until=now + FORGET):
            self.record("agent.error", now, text=text)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Have it done aside; what goes wrong is reported."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed("a task failed", error)

    def _loop_failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.failed("a callback failed", error or RuntimeError(str(context.get("message"))[:300]))
