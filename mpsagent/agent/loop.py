"""The agent: bytes of the logs become events, events state, state decisions, decisions actions, actions outcomes.

One asyncio loop, one thread. What may block for long sits in threads or processes of the hands. The way from a line in
control.log to the front-end has no await on it: a waiting client has to be armed for within 55 ms.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from mpsagent.agent.catch_up import catch_up
from mpsagent.agent.clock import SteadyClock
from mpsagent.agent.performer import Performer, mps_environment
from mpsagent.agent.records import action_fields, event_record
from mpsagent.agent.senses import People, Processes, wanted_processes
from mpsagent.agent.settings import Settings
from mpsagent.agent.troubles import Troubles
from mpsagent.decisions import actions as act
from mpsagent.decisions.decide import Memory, decide, end_client, note, start_again
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
        self._parsers = {"control": LogParser("control"), "server": LogParser("server")}
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
        await self._find_parked_user()
        await self._find_devices()
        await self._adopt()
        await self._read_logs()
        self.ready = True
        self._spawn(self._tick())
        self._decide()

    async def end(self) -> None:
        """Let go of everything. MPS runs on, unless the policy says otherwise (``agent.on_stop``)."""
        if self.ready and self.policy.on_stop == "quit" and self.supervisor.running is not None:
            timeout = max(1, round(self.policy.stop_timeout))
            quit_it = act.QuitControl(timeout=timeout, reason="the agent is being stopped", rule="agent.on_stop")
            outcome = await self.performer.perform(quit_it)
            self._record("control.quit", outcome.at, ok=outcome.ok, text=outcome.text)
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
            self._record("control.adopted", now, pid=found.pid, how=found.how)
            return
        if found.kind is TroubleKind.UNSAFE:
            self.troubles.set("control daemon", found.text, now, do=" && ".join(found.commands))
            self._record("control.unsafe", now, text=found.text, commands=list(found.commands))

    async def _read_logs(self) -> None:
        directory = self.policy.log_directory
        paths = {name: f"{directory}/{name}.log" for name in ("control", "server")}
        caught = await asyncio.to_thread(
            catch_up, paths["control"], paths["server"], self._parsers["control"], self._parsers["server"]
        )
        self.state = caught.state
        running = self.supervisor.running
        control = self.state.control
        if control is not None and (running is None or running.pid != control.pid):
            self.state = apply(self.state, ev.ControlGone(self.clock.now()))
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
        directory = self.settings.policy_directory
        texts, unread = await read_policy_files(
            Path(self.settings.policy), None if directory is None else Path(directory)
        )
        now = self.clock.now()
        policy, mistakes = load(texts)
        errors = (*unread, *mistakes)
        self.policy_errors = errors
        if policy is None or errors:
            kept = "the defaults are in force" if first else "the policy from before stays in force"
            self.troubles.set(
                "policy", f"{errors[0]} ({len(errors)} mistakes; {kept})", now, "mpsagent-cli policy check"
            )
            self._record("policy.rejected", now, errors=[str(error) for error in errors[:20]], kept=kept)
            return self.policy_errors
        self.troubles.set("policy", None, now)
        if not first and (problem := self._needs_restart(policy)):
            self.troubles.set("restart", problem, now, "systemctl restart mpsagent")
        self.policy, self.policy_loaded = policy, now
        self._record("policy.loaded", now, digest=policy.digest, files=list(policy.sources))
        if not first:
            self.performer.policy = dataclasses.replace(
                policy, pipe_directory=self.performer.policy.pipe_directory,
                log_directory=self.performer.policy.log_directory,
            )  # fmt: skip
            self.people.refresh()
            self._decide()
        return ()

    def _needs_restart(self, new: Policy) -> str | None:
        """What of a new policy cannot take hold while the agent runs."""
        old = self.performer.policy
        names = ("pipe_directory", "log_directory", "control_program", "devices", "parked_user")
        changed = [name for name in names if getattr(old, name) != getattr(new, name)]
        return f"{', '.join(changed)} changed: takes hold when the agent is started again" if changed else None

    # --- what comes in ------------------------------------------------------------------------------------------------

    def _read(self, name: str, chunk: Chunk) -> None:
        events = self._parsers[name].feed(chunk.data, self.clock.shift())
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
            self._decide()
        for event in events:
            self._write_down(event)

    def _write_down(self, event: ev.Event) -> None:
        self.counts[type(event).__name__] += 1
        if isinstance(event, ev.ServerReady):
            self.last_switch = event.at
        record = event_record(event, self.state)
        if record is not None:
            kind, fields = record
            self._record(kind, event.at, **fields)

    def _gone(self, pid: int) -> None:
        self.processes.gone(pid)
        self._take([ev.ProcessGone(self.clock.now(), pid)])
        self._again()

    def _control_gone(self, pid: int) -> None:
        now = self.clock.now()
        self._record("control.gone", now, pid=pid)
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
                self._decide()

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

    # --- by order of a person -----------------------------------------------------------------------------------------

    def end_client(self, pid: int, *, at_once: bool, dry_run: bool, by: int) -> dict[str, Any]:
        """Put a client on the ladder; ``dry_run``: only say what would be done."""
        client = self.state.clients.get(pid)
        found: dict[str, Any] = {"pid": pid, "dry_run": dry_run, "accepted": False}
        if client is None or client.uid is None:
            return {**found, "why": "MPS lists no such client"}
        policy = self.policy
        steps = [f"terminate_client {client.server} {pid}, at most {policy.hang_terminate:g} s", "SIGTERM"]
        steps.append(f"after {policy.kill_grace:g} s SIGKILL")
        if policy.before_end is not None and not at_once:
            steps.insert(0, f"hook {policy.before_end}, at most {policy.hook_deadline:g} s")
        found |= {"accepted": True, "uid": client.uid, "server": client.server, "steps": steps}
        if not dry_run:
            now = self.clock.now()
            self._record("client.end_ordered", now, pid=pid, uid=client.uid, by=by)
            self.memory = end_client(
                self.world(), self.memory, pid, now,
                reason=f"ordered by uid {by}", rule="order", at_once=at_once,
            )  # fmt: skip
            self._decide()
        return found

    def begin_drain(self, timeout: float | None, by: int) -> float | None:
        """Maintenance: serve no new user. Returns when running work is ended, if ever."""
        now = self.clock.now()
        self.drain = Drain(now, None if timeout is None else now + timeout)
        self._record("drain.ordered", now, by=by, timeout=timeout)
        self._decide()
        return self.drain.until

    def end_drain(self, by: int) -> None:
        if self.drain is not None:
            self.drain = None
            self._record("drain.resumed", self.clock.now(), by=by)
            self._decide()

    def restart(self, by: int) -> None:
        """Start the control daemon again, also out of the failed state; a running one is asked to quit first."""
        now = self.clock.now()
        self._record("control.restart_ordered", now, by=by)
        self.memory = start_again(self.memory)
        if self.supervisor.running is not None:
            timeout = max(1, round(self.policy.kill_grace))
            self._dispatch(act.QuitControl(timeout=timeout, reason=f"restart ordered by uid {by}", rule="order"), now)
        self._decide()

    def one_line(self) -> str:
        """The state in a line, for ``systemctl status``."""
        troubles = self.troubles.all()
        holder = self.world().holder()
        who = "nobody holds the GPU"
        if holder is not None:
            name = self.people.known[holder.uid].name if holder.uid in self.people.known else None
            who = f"{name or holder.uid} holds the GPU with {len(self.state.clients_of(holder.pid))} clients"
        wait = f", {len(self.state.next_users())} users wait" if self.state.waiting else ""
        return f"{troubles[0].what} ({len(troubles)} problems); {who}{wait}" if troubles else f"{who}{wait}"

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
            asyncio.get_running_loop().call_soon(self._decide)

    def _decide(self) -> None:
        if self._stopping or not self.ready:
            return
        now = self.clock.now()
        self.people.meet({w.uid for w in self.state.waiting} | {s.uid for s in self.state.servers.values() if s.uid})
        world = self.world()
        self.performer.floor = world.floor()
        decision = decide(world, self.memory, now)
        self.memory = decision.memory
        for action in decision.actions:
            self._dispatch(action, now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if decision.deadline is not None:
            delay = max(0.0, decision.deadline - now) + 0.001
            self._timer = asyncio.get_running_loop().call_later(delay, self._decide)

    def _dispatch(self, action: act.Action, now: float) -> None:
        self.counts[type(action).__name__] += 1
        if isinstance(action, act.Report):
            self._record(action.kind, now, **action_fields(action))
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
        self._record("action.done", outcome.at, action=type(action).__name__, begun=number, ok=outcome.ok,
                     text=outcome.text, **action_fields(action))  # fmt: skip
        if isinstance(action, act.OpenDoor | act.StartControl) and outcome.ok:
            self._door_open = pipedir.is_open(self.policy.pipe_directory)
        self.memory = note(self.memory, outcome)
        self._note_troubles()
        self._decide()

    def _begin(self, action: act.Action) -> int:
        return self._record("action", self.clock.now(), action=type(action).__name__, **action_fields(action))

    def _note_troubles(self) -> None:
        now = self.clock.now()
        self.troubles.set("front-end", self.performer.front_end_trouble, now, "is the NVIDIA driver installed?")
        drifted = ", ".join(str(pid) for pid in sorted(self.memory.limits.drifted))
        self.troubles.set(
            "limits",
            f"server {drifted} started with other limits than its user's policy" if drifted else None,
            now,
            "its later clients are right; end its present ones if that matters (mpsagent-cli client terminate PID)",
        )
        silent = self.performer.silent_since
        self.troubles.set(
            "control daemon silent",
            None if silent is None else "the control daemon does not answer",
            now,
            "the agent resumes or kills what hangs after hang.control",
        )
        self.troubles.set(
            "control daemon failed",
            "the control daemon does not stay up; the agent has given up" if self.memory.hangs.failed else None,
            now,
            "look at control.log, then run mpsagent-cli restart",
        )
        self.troubles.set("history", self.history.problem, now, "records are kept in memory only")
        if self.supervisor.running is not None:
            self.troubles.set("control daemon", None, now)

    def _record(self, kind: str, at: float, **fields: object) -> int:
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
