"""What mpsagent would have done, and when, had it watched the replayed log under a policy. Pure but for who a uid is.

The decisions are those of the running agent's engine. The log goes on as it went, though: nothing that would have been
done changes it. So each wish is told once for each situation (until a server or a daemon starts or ends, or another
client waits), a client that would have been ended counts as gone, and every action as carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpsagent.api.views import iso
from mpsagent.cli.log_as_gate import LogAsGate
from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core.engine import Core, Step
from mpsagent.core.sentences import sentence
from mpsagent.mps import events as ev
from mpsagent.mps.events import Line
from mpsagent.mps.limits import Device
from mpsagent.policy.identity import Identity
from mpsagent.policy.policy import Policy
from mpsagent.wire import link

Json = dict[str, Any]
_NEW_SITUATION = (ev.ControlStarted, ev.ControlExited, ev.ServerStarting, ev.ServerExited, ev.ClientQueued)
_UNTOLD = (act.Reconcile, act.StartControl, act.ReleaseClient)
"""Queries and bookkeeping; and the log's own daemon runs when it runs."""
_MOST_DEADLINES = 1000
"""Deadlines that are followed between two lines; a longer silence is not waited through."""
_MOST_ROUNDS = 20
_KEPT_NAMES = 256


class Would:
    """A fold like the story. ``feed`` events in the order of time, then ``finish``."""

    def __init__(self, policy: Policy, who: Callable[[int], Identity], devices: Sequence[Device]) -> None:
        self._policy, self._who, self._devices = policy, who, tuple(devices)
        self._core, self._gate = Core(), LogAsGate()
        self._identities: dict[int, Identity] = {}
        self._now: float | None = None
        self._batch: list[inp.Input | act.Done] = []
        self._told: set[tuple[object, ...]] = set()
        self._actions: list[Json] = []

    def feed(self, event: Line) -> None:
        if self._now is None:
            self._begin(event.at)
        elif event.at > self._now:  # lines of one moment are read at once, and decided upon together
            self._settle()
            self._wait_until(event.at)
            self._now = event.at
        if event.what in _NEW_SITUATION:
            self._told.clear()
        self._batch += self._gate.before(event)
        self._batch.append(event)
        self._batch += self._gate.after(event)

    def finish(self) -> list[Json]:
        """Every action with its time, in the order of time."""
        self._settle()
        return self._actions

    def _begin(self, at: float) -> None:
        self._now = at
        self._batch = [
            inp.PolicyChanged(at, self._policy),
            inp.DevicesFound(at, self._devices),
            inp.GateSaid(at, link.Hello(0, 1000.0)),
            inp.GateSaid(at, link.Synced()),
        ]

    def _settle(self) -> None:
        """Decide upon what this moment brought, count everything as done, and look again at what follows."""
        batch, self._batch = self._batch, []
        if batch:
            self._take(batch)

    def _take(self, events: list[inp.Input | act.Done]) -> None:
        for _ in range(_MOST_ROUNDS):
            events += self._meet()
            events = self._follow(self._core.receive_all(events, self._clock()))
            events += self._gate.hand_over(self._clock())
            if not events:
                return

    def _wait_until(self, at: float) -> None:
        """Decide at each deadline before ``at``."""
        for _ in range(_MOST_DEADLINES):
            deadline = self._core.deadline()
            if deadline is None or deadline >= at:
                return
            self._now = max(self._clock() + 0.001, deadline)
            if self._now >= at:
                return
            follows = self._follow(self._core.tick(self._now))
            if follows:
                self._take(follows)

    def _clock(self) -> float:
        return 0.0 if self._now is None else self._now

    def _meet(self) -> list[inp.Input | act.Done]:
        """Who the users are whom the engine does not know."""
        users = self._gate.users
        new = users - self._identities.keys()
        if not new:
            return []
        if len(self._identities) > _KEPT_NAMES:
            self._identities = {uid: one for uid, one in self._identities.items() if uid in users}
        self._identities |= {uid: self._who(uid) for uid in sorted(new)}
        return [inp.PeopleKnown(self._clock(), self._identities)]

    def _follow(self, step: Step) -> list[inp.Input | act.Done]:
        """What comes of the actions, were they carried out."""
        for _, mistake in step.mistakes:
            raise mistake
        now = self._clock()
        found: list[inp.Input | act.Done] = []
        for action in step.actions:
            self._tell(action)
            if isinstance(action, act.Report):
                continue
            found.append(act.Done(now, action, ok=True, text="assumed"))
            if not action.enforce:
                continue
            if isinstance(action, act.SetAdmissions):
                self._gate.table = action.admissions
                found.append(inp.GateSaid(now, link.Applied(action.number)))
            elif isinstance(action, act.Reconcile):
                found += self._answers(action)
            elif isinstance(action, act.TerminateClient | act.SignalClient | act.RefuseConnection):
                found += self._gate.gone(now, action.pid, by_us=True)
        return found

    def _answers(self, action: act.Reconcile) -> list[inp.Input]:
        """What MPS would have answered: what its log says."""
        now, servers = self._clock(), self._core.state.servers
        listed = {one.pid: one.uid or 0 for one in servers.values()}
        found: list[inp.Input] = [inp.ServersListed(now, listed, frozenset(servers))]
        for one in (servers[pid] for pid in action.servers if pid in servers):
            working = frozenset(pid for pid, attached in one.attached.items() if attached.contexts - {0})
            found += [inp.ServerStatusSeen(now, one.pid, str(one.status)), inp.ClientsListed(now, one.pid, working)]
        return found

    def _tell(self, action: act.Action) -> None:
        if isinstance(action, _UNTOLD):
            return
        fields = act.action_fields(action)
        kind = action.kind if isinstance(action, act.Report) else type(action).__name__
        key = (kind, *(repr(fields.get(name)) for name in ("pid", "server", "uid", "admissions", "force", "signal")))
        if key in self._told:
            return
        self._told.add(key)
        record = (
            {"kind": kind} if isinstance(action, act.Report) else {"kind": "action.done", "action": kind, "ok": True}
        )
        text = sentence({**fields, **record}, self._name)
        self._actions.append({"at": iso(self._clock()), "action": kind, "sentence": text, **fields})

    def _name(self, uid: int) -> str | None:
        known = self._identities.get(uid)
        return None if known is None else known.name
