"""What mpsagent cannot promise at the moment, in plain words for an administrator. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from mpsagent.core.model import user_text
from mpsagent.core.pause_room import unlimited
from mpsagent.core.view import View

MOST_NAMED = 5
_NOT_KNOWN: Mapping[str, str] = {}


def not_guaranteed(view: View, devices_known: bool = True, modes: Mapping[str, str] = _NOT_KNOWN) -> list[str]:
    """One sentence for each promise that does not hold now, and is no condition that says so; empty when all of them
    hold. ``modes``: compute modes by UUID, of the GPUs where it is known."""
    found = [*_policy(view), *_gate(view), *_limits(view), *_pauses(view), *_modes(view, modes)]
    if not devices_known and view.limits_enforced:
        found.append("the GPUs are not known yet: shares of them are counted on small ones, so clients may get less")
    return found


def _policy(view: View) -> list[str]:
    """What the policy itself says is only to be reported."""
    policy, found = view.policy, []
    if not policy.enforce:
        return ["nothing is enforced: the policy says enforce = false, so rules are only reported"]
    off = {path for path, setting in policy.settings.items() if path[-1] == "enforce" and not setting.value}
    if ("limits", "enforce") in off:
        found.append("limits are not enforced: [limits] enforce = false")
    if ("switch", "enforce") in off:
        found.append("turns do not end: [switch] enforce = false")
    if not policy.enforce_hang:
        found.append("hangs and faults are only reported: [hang] enforce = false")
    single = sorted({f"{path[0]} {path[1]}" for path in off if path[0] in ("user", "group")})
    if single:
        found.append(f"the policy is not enforced for {_some(single)}")
    return found


def _gate(view: View) -> list[str]:
    state, found = view.state, []
    if state.gate is None:
        found.append("the gate is not connected: it goes on as it was told last, and who waits is not known here")
    elif view.sent is not None and state.gate.synced and state.gate.applied < view.sent[0]:
        found.append("the gate has not confirmed yet whom it lets in")
    if state.unseen:
        count = "1 client was" if state.unseen == 1 else f"{state.unseen} clients were"
        found.append(
            f"{count} refused, whose processes mpsagent cannot see: run it in the host's pid namespace (hostPID, "
            f"--pid=host)"
        )
    return found


def _limits(view: View) -> list[str]:
    state, found = view.state, []
    strict = [f"{client.pid} ({user_text(state, client.uid)})" for client in state.clients.values() if client.fail_safe]
    if strict:
        found.append(f"clients with the fail-safe limits instead of their own: {_some(strict)}")
    unseen = [f"{client.pid} ({user_text(state, client.uid)})" for client in state.clients.values() if client.unseen]
    if unseen:
        found.append(
            f"clients that came through another process and were not seen by the gate: {_some(unseen)}; they count, "
            "pause and end with their user, but nobody could hold them before they worked"
        )
    if any(server.unnamed for server in state.servers.values()):
        found.append(
            "server.log does not name its clients (a driver before 580): a client counts as at work until its process "
            "ends"
        )
    outside = sum(1 for s in state.servers.values() for pid in s.attached if pid not in state.clients)
    handing = sum(1 for held in state.held.values() if held.handing is not None)
    if outside > handing:
        count = "1 process is" if outside == 1 else f"{outside} processes are"
        found.append(f"{count} served by MPS without having passed the gate; their limits are not known")
    return found


def _pauses(view: View) -> list[str]:
    """Whose memory is not limited may find too little beside that of paused users."""
    if not view.suspended:
        return []
    present = [] if view.turn is None else [view.turn.uid]
    free = [user_text(view.state, uid) for uid in (*present, *view.waiting()[:MOST_NAMED]) if unlimited(view, uid)]
    if not free:
        return []
    return [f"whether their memory fits beside that of paused users is not known (no memory limit): {_some(free)}"]


def _modes(view: View, modes: Mapping[str, str]) -> list[str]:
    """Who cannot reach the gate runs outside MPS, and only one compute mode prevents that."""
    ours = [device for device in view.state.devices if device.uuid in modes]
    found = []
    shut = [str(device.ordinal) for device in ours if modes[device.uuid] == "prohibited"]
    if shut:
        found.append(f"the compute mode is PROHIBITED on GPU {_some(shut)}: no program can use it")
    open_ones = [device for device in ours if modes[device.uuid] not in ("exclusive-process", "prohibited")]
    if open_ones:
        where = "" if len(open_ones) == len(ours) else f" on GPU {_some([str(one.ordinal) for one in open_ones])}"
        found.append(
            f"the compute mode is not EXCLUSIVE_PROCESS{where}: a program that does not find the gate runs beside MPS, "
            "without limits"
        )
    return found


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
