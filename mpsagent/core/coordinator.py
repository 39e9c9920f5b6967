"""The coordinator: ``receive(input, now) -> Step`` and ``deadline()``.

It has an engine for each control daemon, and decides what is about users and not about one daemon: turns, pauses,
totals, who gets a daemon. The running agent, what-if replay, the start-up and the tests drive this one object: no
clock, no I/O, every time an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any, Literal, NamedTuple, TypeVar

from mpsagent.core import actions as act
from mpsagent.core import admission, caps, ladder, own_daemons, pause, turn_memory, turns, unenforced
from mpsagent.core import inputs as inp
from mpsagent.core import transitions as tr
from mpsagent.core.changes import T, of_daemon, without
from mpsagent.core.engine import Engine, Memories, Mistake, RuleRunner
from mpsagent.core.model import SHARED, Client, Key, State
from mpsagent.core.reduce import OF_ALL, kind_of, not_handed, reduce, reduce_each
from mpsagent.core.rule import Decision, EndClient, Section, of_turns
from mpsagent.core.transitions import Transition
from mpsagent.core.view import View
from mpsagent.policy import apart
from mpsagent.wire import link

Where = Key | Literal["all"]
"""A control daemon, or all of them."""
V = TypeVar("V")
PASSES = 8
"""More than one decision ever sets off in a row."""
UNSETTLED = 0.1
"""Seconds until it is decided again, should that ever not be enough."""
_NONE = State()
"""In the place of a state, for what an engine sees of the coordinator."""


class Step(NamedTuple):
    """Actions to do now, and transitions. ``mistakes``: rules and reducers that failed, each with its exception; the
    others have still done their part."""

    actions: tuple[act.Action, ...]
    transitions: tuple[Transition, ...]
    mistakes: tuple[Mistake, ...] = ()


@dataclass(frozen=True, slots=True)
class OfUsers:
    """The memory of each rule about users."""

    turns: turn_memory.Memory = field(default_factory=turn_memory.Memory)
    pause: pause.Memory = field(default_factory=pause.Memory)
    caps: caps.Memory = field(default_factory=caps.Memory)
    unenforced: unenforced.Memory = field(default_factory=unenforced.Memory)
    users: own_daemons.Memory = field(default_factory=own_daemons.Memory)


class Core(RuleRunner):
    """The coordinator of an instance of MPS under one policy."""

    memories: OfUsers

    def __init__(self, state: State | None = None) -> None:
        super().__init__(OfUsers(), [])
        self.engines: dict[Key, Engine] = {None: Engine(state or State(), Memories(), self.mistakes)}
        """By user whose own control daemon it is; None: that of all users, which is always there."""
        self._whole: State | None = None
        """The state of several engines in one."""
        self._wake: float | None = None
        self._at_rest = False
        """Nothing is left to be decided before ``_wake``, unless something changes."""
        self._viewed: list[object] = []
        """What the view is of."""
        self._view = self._above = View(_NONE)
        self._remembered: dict[Any, Any] = {}
        """What views have worked out."""
        self._number = 0
        """Of the last table of a daemon that has gone: one that comes again continues behind it."""

    @property
    def state(self) -> State:
        """All clients, connections and servers of the instance. What is of one control daemon is that of all users."""
        return self.engines[None].state if self._whole is None else self._whole

    def receive(self, event: inp.Input | act.Done, now: float) -> Step:
        """Take one input in, and decide."""
        return self.receive_all((event,), now)

    def receive_all(self, events: Sequence[inp.Input | act.Done], now: float) -> Step:
        """Take several inputs of one moment in, and decide once."""
        happened: list[Transition] = []
        actions: list[act.Action] = []
        before = self._known()
        for event in events:
            if isinstance(event, inp.ProcessEnded):  # its end may be heard of before MPS's answer that it is over
                for engine in self.engines.values():
                    if (asked := ladder.unanswered(engine.memories.ladder, event.pid)) is not None:
                        self._reduce(act.Done(event.at, asked, True))
            happened += self._reduce(event)
            self._applied(event)
            actions += self._person(event, now)
            if isinstance(event, act.Done):
                self._note(event)
        # most log lines change nothing
        if self._at_rest and self._same(before) and not self.mistakes and (self._wake is None or now < self._wake):
            return Step(tuple(actions), tuple(happened))
        step = self.tick(now)
        return step._replace(actions=(*actions, *step.actions), transitions=(*happened, *step.transitions))

    def absorb(self, events: Sequence[inp.Input]) -> list[Transition]:
        """Take in what happened earlier, without deciding anything: for the start."""
        happened: list[Transition] = []
        for event in events:
            happened += self._reduce(event)
        self._at_rest = False
        return happened

    def tick(self, now: float) -> Step:
        """Decide because of the time."""
        actions: list[act.Action] = []
        happened: list[Transition] = []
        self._at_rest = False
        for lease in self.state.leases:
            if now >= lease.until:
                happened += self._reduce(inp.LeaseEndOrdered(now, lease.number))
        for _ in range(PASSES):
            before = self._memories()
            made, told = self._pass(now)
            actions += made
            happened += told
            if not made and all(map(is_, before, self._memories())):
                self._at_rest = True
                break
        else:
            self._wake = now + UNSETTLED if self._wake is None else min(self._wake, now + UNSETTLED)
        mistakes = tuple(self.mistakes)
        self.mistakes.clear()
        return Step(tuple(actions), tuple(happened), mistakes)

    def deadline(self) -> float | None:
        """When :meth:`tick` has to be called at the latest; None: only an input can change anything."""
        return self._wake

    # --- what is known ------------------------------------------------------------------------------------------------

    def _memories(self) -> list[object]:
        return [self.memories, *(engine.memories for engine in self.engines.values())]

    def _known(self) -> list[object]:
        return [self.state, *self._memories()]

    def _same(self, before: list[object]) -> bool:
        now = self._known()
        return len(now) == len(before) and all(map(is_, now, before))

    def view(self, daemon: Where = "all") -> View:
        """Return what the rules see of one control daemon or of all; for answers and the api too."""
        if not self._same(self._viewed):
            self._viewed, (self._above, self._view) = self._known(), self._views()
        if daemon == "all" or len(self.engines) == 1:
            return self._view
        return self.engines[daemon].view(self._above)

    def _views(self) -> tuple[View, View]:
        """Return what engines see of the coordinator, and what its own rules see."""
        m, engines = self.memories, self.engines
        asked = m.turns.shutdown
        above = View(
            _NONE,
            turn=m.turns.turn,
            served=m.turns.served,
            suspended=m.turns.suspended,
            in_the_way=None if asked is None else (asked.server, asked.since),
            turn_waits=m.turns.waits,
            users=frozenset(key for key in engines if key is not None) | m.users.making | m.users.going,
            unmade={uid: why for uid, (_, why) in m.users.failed.items()},
        )
        tables = [one.memories.admission.sent for one in engines.values()]
        climbing = [one.memories.ladder for one in engines.values() if one.memories.ladder.climbs]
        everything = replace(
            engines[None].view(above),
            state=self.state,
            ending={pid: one for each in climbing for pid, one in ladder.ending(each).items()},
            starting=frozenset(key for key, one in engines.items() if one.memories.hangs.start_asked),
            failing=frozenset(key for key, one in engines.items() if one.memories.hangs.failed),
            admitted=frozenset().union(*(table.users for table in tables if table is not None)),
            daemons={key: one.state for key, one in engines.items()},
            remembered=self._remembered,
        )
        if own_daemons.short(everything):
            above, everything = replace(above, short=True), replace(everything, short=True)
        return (self._above if above == self._above else above), everything

    # --- inputs -------------------------------------------------------------------------------------------------------

    def _reduce(self, event: inp.Input | act.Done) -> list[Transition]:
        """Take one input in. A mistake in what is made of one keeps no other from being taken in."""
        key, what = (event.daemon, event.what) if isinstance(event, inp.Of) else (self._whose(event), event)
        try:
            match event:
                case inp.DaemonOpened():
                    return self._open(event)
                case inp.DaemonClosed():
                    return self._close(event)
            if not isinstance(event, inp.Of) and len(self.engines) > 1 and kind_of(event) in OF_ALL:
                return self._spread(event)
            if (engine := self.engines.get(key)) is None:
                return []
            after, happened = reduce(engine.state, what)
            self._became(engine, after)
            return [of_daemon(one, key) for one in happened]
        except Exception as error:
            name = f"reduce({getattr(kind_of(what), '__name__', kind_of(what))})"
            if all(name != known for known, _ in self.mistakes):
                self.mistakes.append((name, error))
            return []

    def _whose(self, event: inp.Input | act.Done) -> Key:
        """Return the control daemon that an input is about which does not name it."""
        match event:
            case inp.ProcessEnded() if event.pid in self.state.clients:
                return self.state.clients[event.pid].daemon
            case act.Done():
                return event.action.daemon
        return None

    def _became(self, engine: Engine, after: State) -> None:
        """Take in what has become of one control daemon, and tell the others what is of all."""
        whole, before, engine.state = self.state, engine.state, after
        if after is before or len(self.engines) == 1:
            return
        if told := _shared(before, after):
            for other in self.engines.values():
                if other is not engine:
                    other.state = replace(other.state, **told)
        for pid in (after.clients.keys() - before.clients.keys()) & whole.clients.keys():  # it is a client here now
            other = self.engines[whole.clients[pid].daemon]
            if other is not engine:
                other.state = replace(other.state, clients=without(other.state.clients, pid))
        self._whole = replace(
            self.engines[None].state,
            clients=_merged(whole.clients, before.clients, after.clients),
            servers=_merged(whole.servers, before.servers, after.servers),
            held=whole.held if after.held is before.held else whole.held.merged(before.held, after.held),
        )

    def _spread(self, event: inp.Input | act.Done) -> list[Transition]:
        """Take in what is about no single one of several control daemons."""
        before = self.state
        after, happened = reduce(before, event)
        self._whole, told = after, _shared(before, after)
        clients = _by_daemon(after.clients) if after.clients is not before.clients else None
        for key, engine in self.engines.items():
            mine = engine.state
            state = after if key is None else reduce_each(mine, event)
            parts: dict[str, Any] = {} if key is None else dict(told)
            parts["clients"] = mine.clients if clients is None else clients.get(key, {})
            parts["held"], parts["servers"] = mine.held, mine.servers
            if after.held is not before.held:
                parts["held"] = after.held.without_users(self.engines) if key is None else after.held.only(key)
            if after.servers is not before.servers:
                parts["servers"] = {pid: after.servers[pid] for pid in mine.servers if pid in after.servers}
            changed = {name: one for name, one in parts.items() if one is not getattr(state, name)}
            engine.state = replace(state, **changed) if changed else state
        return [of_daemon(one, self._key(getattr(one, "uid", None))) for one in happened]

    def _key(self, uid: int | None) -> Key:
        """Return the control daemon of a user's clients."""
        return uid if uid in self.engines else None

    def _open(self, event: inp.DaemonOpened) -> list[Transition]:
        """A user has a control daemon of its own. It knows which lines its user was told before."""
        if event.uid in self.engines:
            return []
        first, whole = self.engines[None], self.state
        shared = {name: getattr(whole, name) for name in SHARED}
        state = State(**shared, user=event.uid, held=whole.held.only(event.uid), drain=first.state.drain)
        memories = Memories(admission=admission.Memory(self._number), notices=first.memories.notices)
        self.engines[event.uid] = Engine(state, memories, self.mistakes)
        first.state = replace(first.state, held=first.state.held.without_users([event.uid]))
        self._whole = whole
        return self._moved(event.uid, event.at, None, event.uid)

    def _close(self, event: inp.DaemonClosed) -> list[Transition]:
        """A user's own control daemon has gone. What the user has waiting waits at that of all users."""
        if (gone := self.engines.pop(event.uid, None)) is None:
            return []
        self._number = max(self._number, gone.memories.admission.number)
        first, whole = self.engines[None], self.state
        left = {pid: replace(one, daemon=None) for pid, one in gone.state.clients.items()}
        held = whole.held.without_users(self.engines)
        first.state = replace(first.state, held=held, clients={**first.state.clients, **left})
        servers = {pid: one for pid, one in whole.servers.items() if pid not in gone.state.servers}
        whole = replace(whole, clients={**whole.clients, **left}, servers=servers)
        self._whole = None if len(self.engines) == 1 else whole
        return [of_daemon(one, event.uid) for one in self._moved(event.uid, event.at, event.uid, None)]

    def _moved(self, uid: int, at: float, before: Key, to: Key) -> list[Transition]:
        if all(held.of_client for held in self.state.held.line(uid)):
            return []
        instance = self.state.policy.instance
        return [tr.UserMoved(at, uid, apart.daemon_name(instance, before), apart.daemon_name(instance, to))]

    def _applied(self, event: inp.Input | act.Done) -> None:
        key, what = (event.daemon, event.what) if isinstance(event, inp.Of) else (None, event)
        if not isinstance(what, inp.GateSaid) or not isinstance(what.what, link.Applied) or key not in self.engines:
            return
        engine = self.engines[key]
        memory = engine.memories.admission
        if memory.sent is not None and what.what.number == memory.number:
            admitted = frozenset(memory.sent.users if memory.sent.open else ())
            self._became(engine, not_handed(engine.state, admitted))

    def _note(self, done: act.Done) -> None:
        self.note(_RULES, done)
        if (engine := self.engines.get(done.action.daemon)) is not None:
            engine.noted(done)

    # --- one pass -----------------------------------------------------------------------------------------------------

    def _pass(self, now: float) -> tuple[list[act.Action], list[Transition]]:
        """Every rule once: those about users, then those about each control daemon in which something has changed. The
        ladder comes last and takes up what the others ask for."""
        actions: list[act.Action] = []
        happened: list[Transition] = []
        requests: list[EndClient] = []
        wakes: list[float] = []

        def take(decisions: Sequence[Decision[object]], key: Where) -> None:
            for one in decisions:
                actions.extend(self._named(each, key) for each in one.actions)
                happened.extend(self._named(each, key) for each in one.transitions)
                requests.extend(one.requests)

        decided = self.ask(_RULES, self.view, now)
        take(decided, "all")
        wakes += [one.wake for one in decided if one.wake is not None]
        self.view()
        above, awake = self._above, list[tuple[Key, Engine]]()
        for key, engine in self.engines.items():
            if not engine.rests(above, now):
                awake.append((key, engine))
                take(engine.decide(above, now), key)
        for closed in [one for one in actions if isinstance(one, act.CloseDaemon)]:
            happened += self._reduce(inp.DaemonClosed(now, closed.uid))
        for request in requests:
            actions += self._take(request, now)
        self.view()
        for key, engine in awake:
            if key in self.engines:
                take(engine.climb(self._above, now), key)
        wakes += [one.wake for one in self.engines.values() if one.wake is not None]
        wakes += [lease.until for lease in self.state.leases]
        self._wake = min(wakes, default=None)
        return actions, happened

    def _named(self, one: T, key: Where) -> T:
        """Name the control daemon that it is about."""
        return of_daemon(one, self._key(getattr(one, "uid", None)) if key == "all" else key)

    def _take(self, wanted: EndClient | inp.Begun, now: float) -> tuple[act.Action, ...]:
        """Put a client on the ladder of its control daemon, or return the report of an end that is not enforced."""
        client = self.state.clients.get(wanted.pid)
        key = None if client is None else client.daemon
        try:
            engine, view = self.engines[key], self.view(key)
            memory = engine.memories.ladder
            if isinstance(wanted, inp.Begun):
                memory = ladder.resume(view, memory, wanted, _section(wanted.rule), now)
            elif unenforced.enforced(view, wanted.uid, wanted.section):
                memory = ladder.take(view, memory, wanted, now)
            else:
                reported, reports = unenforced.take(self.view(), self.memories.unenforced, wanted)
                self.remember("unenforced", reported)
                return tuple(self._named(one, key) for one in reports)
            engine.remember("ladder", memory)
        except Exception as error:
            self.mistakes.append(("ladder", error))
        return ()

    # --- orders -------------------------------------------------------------------------------------------------------

    def _person(self, event: inp.Input | act.Done, now: float) -> list[act.Action]:
        if isinstance(event, inp.EndOrdered):
            self._end_client(event, now)
        elif isinstance(event, inp.Resumed):
            for begun in event.ending:
                self._take(begun, now)
        elif isinstance(event, inp.RestartOrdered):
            return [action for engine in self.engines.values() for action in engine.restart(event)]
        elif isinstance(event, inp.Of) and isinstance(event.what, inp.RestartOrdered) and event.daemon in self.engines:
            return self.engines[event.daemon].restart(event.what)
        return []

    def _end_client(self, event: inp.EndOrdered, now: float) -> None:
        client = self.state.clients.get(event.pid)
        if client is not None:
            reason = f"ordered by user {event.by}"
            self._take(EndClient.of(client, reason, "order", "order", hook=not event.at_once), now)


def _shared(before: State, after: State) -> dict[str, Any]:
    """Return what has changed of what all control daemons have in common."""
    return {name: new for name in SHARED if (new := getattr(after, name)) is not getattr(before, name)}


def _by_daemon(clients: Mapping[int, Client]) -> dict[Key, dict[int, Client]]:
    found: dict[Key, dict[int, Client]] = {}
    for pid, one in clients.items():
        found.setdefault(one.daemon, {})[pid] = one
    return found


def _merged(whole: Mapping[int, V], before: Mapping[int, V], after: Mapping[int, V]) -> Mapping[int, V]:
    """Return the whole with what has become of a part of it."""
    if after is before:
        return whole
    return {**{key: one for key, one in whole.items() if key not in before}, **after}


def _section(rule: str) -> Section:
    if rule.startswith("timeouts."):
        return "timeouts"
    if of_turns(rule):
        return "turn"
    return "order" if rule in ("order", "drain") else "limits"


_RULES = (("turns", turns), ("pause", pause), ("caps", caps), ("users", own_daemons))
