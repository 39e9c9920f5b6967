"""What people order and the machine is found to have, into the state: policy, devices, names, drains, turns, leases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mpsagent.core import inputs as inp
from mpsagent.core import transitions as tr
from mpsagent.core.changes import Out
from mpsagent.core.model import Drain, State


def _policy(state: State, event: inp.PolicyChanged, out: Out) -> State:
    return replace(state, policy=event.policy)


def _devices(state: State, event: inp.DevicesFound, out: Out) -> State:
    return state if state.devices == event.devices else replace(state, devices=event.devices)


def _people(state: State, event: inp.PeopleKnown, out: Out) -> State:
    return replace(state, identities=dict(event.identities))


def _extended(state: State, event: inp.TurnExtended, out: Out) -> State:
    kept = {uid: until for uid, until in state.extended.items() if until > event.at}
    return replace(state, extended={**kept, event.uid: event.until})


def _lease_given(state: State, event: inp.LeaseOrdered, out: Out) -> State:
    lease = event.lease
    pid = None if lease.process is None else lease.process[0]
    out.append(tr.LeaseGiven(event.at, lease.number, lease.by, lease.until, lease.uid, lease.cgroup, pid, lease.name))
    return replace(state, leases=(*state.leases, event.lease))


def _lease_ended(state: State, event: inp.LeaseEndOrdered, out: Out) -> State:
    ended = next((one for one in state.leases if one.number == event.number), None)
    if ended is None:
        return state
    out.append(tr.LeaseEnded(event.at, event.number, event.by, ended.name))
    return replace(state, leases=tuple(one for one in state.leases if one is not ended))


# --- in each control daemon -------------------------------------------------------------------------------------------


def _drain(state: State, event: inp.DrainOrdered) -> State:
    """Ordered again, it is the same drain with another time. One for a restart is over where no daemon runs."""
    if event.restart and (state.control is None or not state.control.proven):
        return state
    since = event.since if state.drain is None else state.drain.since
    return replace(state, drain=Drain(since, event.until, event.restart, event.by))


def _resumed(state: State, event: inp.DrainResumed) -> State:
    return replace(state, drain=None)


def _restart(state: State, event: inp.RestartOrdered) -> State:
    return replace(state, start_failure=None)


RULES: dict[type, Callable[[State, Any, Out], State]] = {
    inp.PolicyChanged: _policy,
    inp.DevicesFound: _devices,
    inp.PeopleKnown: _people,
    inp.TurnExtended: _extended,
    inp.LeaseOrdered: _lease_given,
    inp.LeaseEndOrdered: _lease_ended,
}

EACH: dict[object, Callable[[State, Any], State]] = {
    inp.DrainOrdered: _drain,
    inp.DrainResumed: _resumed,
    inp.RestartOrdered: _restart,
}
