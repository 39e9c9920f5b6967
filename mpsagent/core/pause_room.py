"""Whether a user who comes finds room beside users who are paused: these keep their memory and their contexts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from mpsagent.core.inputs import Peer
from mpsagent.core.ladder import SETTLE, TERMINATE
from mpsagent.core.model import CLIENTS_PER_SERVER, State
from mpsagent.core.view import Turn, View
from mpsagent.mps.limits import Device, Limits, Total
from mpsagent.mps.units import limit_text


def misfit(view: View, uid: int) -> str | None:
    """Why the processes of ``uid`` that wait have no room beside all clients there are; None when they have, or when
    nothing is known against it. A user with clients has room: what they have, they keep."""
    state = view.state
    if state.clients_of_user(uid):
        return None
    most = CLIENTS_PER_SERVER if view.sent is None else view.sent[1].room
    coming = list(islice(_coming(view, uid), most + 1))
    taken, wanted = sum(view.contexts().values()), len(coming)
    if taken + wanted > most:
        return f"the server has room for {most} contexts, and {wanted} more come to {taken}"
    for device in state.devices:
        used, needed = _used(state, device), _needed(coming, device)
        if needed is not None and used + needed > device.memory:
            there = limit_text(used - used % (1 << 20) or 1 << 20)
            return (
                f"{there} of {limit_text(device.memory)} on device {device.ordinal} are in use, and user {uid} may use "
                f"{limit_text(needed)}"
            )
    return None


def _coming(view: View, uid: int) -> Iterator[Limits]:
    """Yield the limits of each waiting process that the gate admits at a time; the user has no client yet."""
    rules, devices, seen = view.rules(uid), view.state.devices, set[tuple[int, int]]()
    bound = rules.enforce
    most = min((one for one in (rules.max_clients, view.most_contexts(rules)) if one and bound), default=None)
    total = (rules.total(devices) if bound else None) or Total()
    admitted, jobs = list[Limits](), dict[str, list[Limits]]()
    for held in view.state.held.line(uid):
        if most is not None and len(admitted) >= most:
            return
        its, share = view.limits_of(held.peer), view.job(held.peer)
        if held.process in seen or not total.fits(admitted, its):
            continue
        if share is not None:
            there = (one.limits or view.limits_of(one.peer) for one in view.clients_of_job(share.job))
            job = jobs.setdefault(share.job, list(there))
            full = share.max_clients is not None and len(job) >= share.max_clients
            if full or not (share.total(devices) or Total()).fits(job, its):
                continue
            job.append(its)
        seen.add(held.process)
        admitted.append(its)
        yield its


def no_room(view: View, turn: Turn) -> str | None:
    """Why a user whom the policy would pause cannot be paused for who comes next."""
    return misfit(view, view.waiting()[0]) if view.waiting() and view.may_pause(turn.uid) else None


def pausable(view: View, turn: Turn) -> bool:
    """The present turn can end in a pause."""
    odd = any(view.is_alive(pid, start) for pid, start in turn.unpausable)
    return not odd and view.may_pause(turn.uid) and no_room(view, turn) is None


def deadlines(view: View, turn: Turn) -> tuple[float, float] | None:
    """When the user of a turn is warned and when the turn ends; None while it is not contested or may last for ever.
    One that ends in a pause costs its user nothing, so there is no warning."""
    rules, until = view.rules(turn.uid), view.state.extended.get(turn.uid, -math.inf)
    if turn.contested is None or not pausable(view, turn):
        times = turn.deadlines(rules)
        return None if times is None else (max(times[0], until - rules.switch_grace), max(times[1], until))
    began = turn.since if turn.began is None else turn.began
    end = max(turn.contested, began + rules.switch_slice, until)
    return end, end


def ends(view: View, turn: Turn) -> float | None:
    """When the policy takes the GPU from the user of a turn; None: it does not, as things are."""
    times = deadlines(view, turn)
    taken = view.state.drain is None and (pausable(view, turn) or view.rules(turn.uid).has_to_leave)
    return times[1] if times is not None and taken else None


def has_to_leave(view: View, uid: int) -> bool:
    """Whether the policy takes the GPU from this user at some time while others wait. In a drain it does not."""
    return view.state.drain is None and (view.may_pause(uid) or view.rules(uid).has_to_leave)


def longest(view: View, uid: int) -> float | None:
    """How long this user may keep the GPU while others wait; None: the policy says no time."""
    if not has_to_leave(view, uid):
        return None
    rules = view.rules(uid)
    return rules.switch_slice if view.may_pause(uid) else (rules.switch_after or 0.0) + rules.switch_grace


def leaving(view: View, uid: int) -> float:
    """Return the seconds in which the processes of a user have gone, whatever they do, after the end of a turn."""
    policy, rules = view.policy, view.rules(uid)
    hook = policy.hook_deadline if rules.before_end_hook else 0.0
    settle = SETTLE if view.suspended else 0.0  # their work on the server is protected; else all of its clients leave
    return hook + TERMINATE + settle + rules.kill_grace


def unlimited(view: View, uid: int) -> bool:
    """It is not known before how much memory a user will use."""
    state, peer = view.state, next((held.peer for held in view.state.held.line(uid)), Peer(0, uid, 0, 0))
    return any(_needed([view.limits_of(peer)], device) is None for device in state.devices)


def _used(state: State, device: Device) -> int:
    """Return the memory in use by NVML; for a client that NVML does not list, its limit, if that is known."""
    seen = sum(sizes.get(device.uuid, 0) for sizes in state.memory.values())
    unseen = (client for client in state.clients.values() if client.pid not in state.memory and client.counts)
    return seen + sum(one.limits.memory.get(device.ordinal, 0) for one in unseen if one.limits is not None)


def _needed(coming: Sequence[Limits], device: Device) -> int | None:
    """Return the bytes that processes with these limits may use; None if one of them has no limit there."""
    sizes = [limits.memory.get(device.ordinal) for limits in coming]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
