"""What the agent would have done, and when, had it watched the replayed log under a policy. Pure but for who a uid is.

The decisions are the agent's own. The log goes on as it went, though: nothing that would have been done changes it. So
each wish is told once for each situation (until a server or a daemon starts or ends, or somebody new waits), a client
that would have been ended counts as gone, and every command as carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpsagent.core import actions as act
from mpsagent.core.decide import Memory, decide, note
from mpsagent.core.model import State
from mpsagent.core.reduce import apply
from mpsagent.core.world import Process, World
from mpsagent.interfaces.views import iso
from mpsagent.mps import events as ev
from mpsagent.mps.limits import Device
from mpsagent.policy.identity import Identity
from mpsagent.policy.policy import Policy

Json = dict[str, Any]
_NEW_SITUATION = (ev.ControlStarted, ev.ControlExited, ev.ServerStarting, ev.ServerExited, ev.ClientQueued)
_UNTOLD = (act.Reconcile, act.OpenDoor)
"""Queries, and what an agent does once that was there from the start."""
_MOST_DEADLINES = 1000
"""Deadlines that are followed between two lines; a longer silence is not waited through."""

_MOST_ROUNDS = 20


class Would:
    """A fold like the story. ``feed`` events in the order of time, then ``finish``."""

    def __init__(
        self, policy: Policy, who: Callable[[int], Identity], devices: Sequence[Device], parked_uid: int
    ) -> None:
        self._policy, self._who, self._devices, self._parked = policy, who, tuple(devices), parked_uid
        self._state, self._memory = State(), Memory()
        self._identities: dict[int, Identity] = {}
        self._deadline: float | None = None
        self._now = float("-inf")
        self._changed = False
        self._gone: set[int] = set()
        self._told: set[tuple[object, ...]] = set()
        self._actions: list[Json] = []

    def feed(self, event: ev.Event) -> None:
        if event.at > self._now:  # lines of one moment are read at once, and decided upon together
            self._settle()
            self._wait_until(event.at)
            self._now = event.at
        before, self._state = self._state, apply(self._state, event)
        if isinstance(event, _NEW_SITUATION):
            self._told.clear()
        if isinstance(event, ev.ClientQueued | ev.ClientAdmitted):
            self._gone.discard(event.pid)
        self._changed = self._changed or self._state is not before

    def finish(self) -> list[Json]:
        """Every action with its time, in the order of time."""
        self._settle()
        return self._actions

    def _settle(self) -> None:
        if self._changed:
            self._changed = False
            self._decide()

    def _wait_until(self, at: float) -> None:
        """Decide at each deadline before ``at``."""
        for _ in range(_MOST_DEADLINES):
            if self._deadline is None or self._deadline >= at:
                return
            self._now = max(self._now, self._deadline)
            self._decide()

    def _decide(self) -> None:
        """Decide, count everything as done, and look again at what follows from that."""
        for _ in range(_MOST_ROUNDS):
            decision = decide(self._world(), self._memory, self._now)
            self._memory, self._deadline = decision.memory, decision.deadline
            for action in decision.actions:
                self._memory = note(self._memory, act.Outcome(self._now, action, ok=True, text="assumed"))
                if isinstance(action, act.TerminateClient | act.SignalClient):
                    self._gone.add(action.pid)
                self._tell(action)
            if not decision.actions:
                break
        if self._deadline is not None:
            self._deadline = max(self._deadline, self._now + 0.001)

    def _tell(self, action: act.Action) -> None:
        if isinstance(action, _UNTOLD):
            return
        fields = act.action_fields(action)
        kind = action.kind if isinstance(action, act.Report) else type(action).__name__
        key = (kind, *(repr(fields.get(name)) for name in ("pid", "server", "uid", "limits", "force", "signal")))
        if key not in self._told:
            self._told.add(key)
            self._actions.append({"at": iso(self._now), "action": kind, **fields})

    def _world(self) -> World:
        state = self._state
        control = state.control
        for client in state.clients.values():
            self._know(client.uid)
        for waiting in state.waiting:
            self._know(waiting.uid)
        for server in state.servers.values():
            self._know(server.uid)
        return World(
            state=state,
            policy=self._policy,
            devices=self._devices,
            identities=self._identities,
            processes=self._processes(),
            control_alive=control is None or control.exited is None,
            parked_uid=self._parked,
        )

    def _know(self, uid: int | None) -> None:
        if uid is not None and uid not in self._identities:
            self._identities[uid] = self._who(uid)

    def _processes(self) -> Mapping[int, Process]:
        """Who lives, as far as the log tells."""
        state = self._state
        found = {one.pid: Process(one.uid) for one in state.waiting}
        for server in state.servers.values():
            found[server.pid] = Process(server.uid or 0)
        for client in state.clients.values():
            server_uid = state.servers[client.server].uid if client.server in state.servers else None
            found[client.pid] = Process(client.uid if client.uid is not None else server_uid or 0)
        if state.control is not None and state.control.exited is None:
            found[state.control.pid] = Process(0)
        return {pid: process for pid, process in found.items() if pid not in self._gone}
