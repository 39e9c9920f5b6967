"""Whether a user who comes finds room beside users who are paused: these keep their memory and their contexts."""

from __future__ import annotations

from collections.abc import Iterable

from mpsagent.core.inputs import Peer
from mpsagent.core.model import CLIENTS_PER_SERVER, State
from mpsagent.core.view import Turn, View
from mpsagent.mps.limits import Device
from mpsagent.mps.units import limit_text


def misfit(view: View, uid: int) -> str | None:
    """Why the processes of ``uid`` that wait have no room beside all clients there are; None when they have, or when
    nothing is known against it. A user with clients has room: what they have, they keep."""
    state = view.state
    if state.clients_of_user(uid):
        return None
    waiting = {held.process: held.peer for held in state.held.line(uid)}
    most, rules = CLIENTS_PER_SERVER if view.sent is None else view.sent[1].room, view.rules(uid)
    wanted = min(len(waiting), rules.max_clients or len(waiting))
    taken = sum(view.contexts().values())
    if taken + wanted > most:
        return f"the server has room for {most} contexts, and {wanted} more come to {taken}"
    for device in state.devices:
        used, needed = _used(state, device), _needed(view, uid, waiting.values(), wanted, device)
        if needed is not None and used + needed > device.memory:
            there = limit_text(used - used % (1 << 20) or 1 << 20)
            return (
                f"{there} of {limit_text(device.memory)} on device {device.ordinal} are in use, and user {uid} may use "
                f"{limit_text(needed)}"
            )
    return None


def no_room(view: View, turn: Turn) -> str | None:
    """Why a user whom the policy would pause cannot be paused for who comes next."""
    return misfit(view, view.waiting()[0]) if view.waiting() and view.may_pause(turn.uid) else None


def pausable(view: View, turn: Turn) -> bool:
    """The present turn can end in a pause."""
    return not turn.unpausable and view.may_pause(turn.uid) and no_room(view, turn) is None


def deadlines(view: View, turn: Turn) -> tuple[float, float] | None:
    """When the user of a turn is warned and when the turn ends; None while it is not contested or may last for ever.
    One that ends in a pause costs its user nothing, so there is no warning."""
    rules = view.rules(turn.uid)
    if turn.contested is None or not pausable(view, turn):
        return turn.deadlines(rules)
    end = max(turn.contested, (turn.since if turn.began is None else turn.began) + rules.switch_slice)
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


def unlimited(view: View, uid: int) -> bool:
    """It is not known before how much memory a user will use."""
    state, peer = view.state, next((held.peer for held in view.state.held.line(uid)), Peer(0, uid, 0, 0))
    return any(_needed(view, uid, [peer], 1, device) is None for device in state.devices)


def _used(state: State, device: Device) -> int:
    """What NVML says; of a client that it does not name, its limit, if that is known."""
    seen = sum(sizes.get(device.uuid, 0) for sizes in state.memory.values())
    unseen = (client for client in state.clients.values() if client.pid not in state.memory)
    return seen + sum(one.limits.memory.get(device.ordinal, 0) for one in unseen if one.limits is not None)


def _needed(view: View, uid: int, peers: Iterable[Peer], most: int, device: Device) -> int | None:
    """By the user's limits; None where there is none."""
    sizes = [view.limits_of(peer).memory.get(device.ordinal) for peer in peers]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return None
    rules = view.rules(uid)
    total = rules.total(view.state.devices) if rules.enforce_limits else None
    bound = None if total is None else total.memory.get(device.ordinal)
    needed = sum(sorted(known)[-most:])
    return needed if bound is None else min(needed, bound)
