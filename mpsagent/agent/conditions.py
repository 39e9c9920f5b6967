"""Which conditions hold, by what the engine's state says. ``status`` shows them, exit codes follow them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpsagent.core import pause_room, quitting
from mpsagent.core.coordinator import Core
from mpsagent.core.full_server import kept_out
from mpsagent.core.model import Key, Status
from mpsagent.core.view import View
from mpsagent.mps.units import duration_text
from mpsagent.snapshot.condition import Condition


class Conditions:
    """Conditions, one for each topic (``policy``, ``gate``, ``control.log`` …). A new text keeps the first one's
    time."""

    def __init__(self) -> None:
        self._by_topic: dict[str, Condition] = {}

    def set(
        self, topic: str, what: str | None, now: float, do: str = "", *, until: float | None = None, sure: bool = True
    ) -> bool:
        """Set or, with None, clear a topic. ``until``: for what was a single event and whose end will not be noticed.
        True when that changed anything."""
        known = self._by_topic.get(topic)
        if what is None:
            return self._by_topic.pop(topic, None) is not None
        since, bad = known.since if known else now, "problem" if sure else "not sure"
        self._by_topic[topic] = Condition(what, since, do, bad, until)  # type: ignore[arg-type]
        return known is None or (known.what, known.do) != (what, do)

    def expire(self, now: float) -> None:
        for topic, condition in list(self._by_topic.items()):
            if condition.until is not None and now >= condition.until:
                del self._by_topic[topic]

    def all(self) -> tuple[Condition, ...]:
        return tuple(self._by_topic.values())

    def topics(self) -> tuple[str, ...]:
        return tuple(self._by_topic)


NAME_WAIT = 2.0
"""Seconds in which a name service may answer with a user's name; after that it is a condition."""
MOST_NAMED = 5
FILES = 16384
"""Descriptors that agent and gate need each: for held connections (8192 at most), clients, logs and pipes, with
room."""


def note_files(conditions: Conditions, who: str, files: int | None, now: float) -> str | None:
    """A limit of open files that is too low (None: not known): whatever needs one more fails, with a message of its
    own. Returns what is wrong."""
    few = files is not None and files < FILES
    what = f"{who} may open only {files} files; for as many clients as may come it needs {FILES}" if few else None
    conditions.set(f"files of {who}", what, now, "raise LimitNOFILE= in its unit, or ulimit -n; then start it again")
    return what


WAIT_SLACK = 5.0
"""Seconds beyond the policy's own times until a wait counts as too long."""


def note_conditions(conditions: Conditions, core: Core, now: float) -> None:
    """Note the health of an instance, and of the lane of all users, from the engine's state."""
    note_daemon(conditions, core, None, now)
    state, view = core.state, core.view()
    users = ", ".join([f"user {uid}: {why}" for uid, why in view.unconfirmed(now).items()][:5])
    what = f"MPS does not confirm limits, so the fallback limits are used ({users})" if users else None
    conditions.set("limits unconfirmed", what, now, "mpsagent-cli policy explain USER shows the limits of the policy")
    do = "getent passwd UID has to answer; until then their new programs wait, and no rule terminates their clients"
    conditions.set("names", _unidentified(view, now), now, do)
    do = "no action needed; to change it now, terminate those clients (mpsagent-cli clients)"
    conditions.set("sharing", quitting.old_way(view), now, do, sure=_out_of_turn(view))
    count = "1 client was" if state.unseen == 1 else f"{state.unseen} clients were"
    what = f"{count} refused, because mpsagent cannot see their processes" if state.unseen else None
    do = "mpsagent-cli events --kind client.refused; run mpsagent in the host's pid namespace (hostPID, --pid=host)"
    conditions.set("pid namespace", what, now, do, sure=False)
    gate = state.gate
    what = None
    if gate is not None and gate.pid in state.stopped:
        what = f"the gate (process {gate.pid}) is stopped: new clients wait, and none is handed over"
    do = "kill -CONT that process; systemd restarts it within 12 s"
    conditions.set("gate stopped", what, now, do)
    out = kept_out(view)
    what = None
    if out is not None and out.client is None and now > out.since + WAIT_SLACK:
        what = f"user {out.uid} waits without a bound: other users have all places of the server"
    do = "set turn.time_limit, or terminate clients (mpsagent-cli clients)"
    conditions.set("full server", what, now, do)
    for topic, what in _policy(view):
        conditions.set(topic, what, now, sure=False)


def note_daemon(conditions: Conditions, core: Core, lane: Key, now: float) -> None:
    """Note the health of one control daemon from the engine's state."""
    view, memories = core.view(lane), core.engines[lane].memories
    state = view.state
    pid = "" if state.control is None else f" (pid {state.control.pid})"
    silent = f"the control daemon{pid} does not answer" if state.silent_since is not None else None
    what_then = "mpsagent resumes or kills it after timeouts.control_daemon; no action needed"
    if not state.policy.enforce:
        what_then = 'hangs are only reported (mode = "report"); mpsagent-cli restart-mps'
    conditions.set("control daemon silent", silent, now, what_then)
    failed = (
        "the control daemon does not start or keep running; waiting users are refused"
        if memories.hangs.failed
        else None
    )
    do = (
        f"see mpsagent-cli events, and control.log in {state.policy.log_directory}; mpsagent tries again every minute, "
        "mpsagent-cli restart-mps tries now"
    )
    conditions.set("control daemon failed", failed, now, do)
    failure = state.start_failure
    starting = None
    if failure is not None and failure.count and not view.elsewhere:
        said = failure.reason or "no reason given"
        often = "" if failure.count == 1 else f" ({failure.count} times in a row)"
        starting = f"MPS's servers do not start{often}: {said}"
    conditions.set(
        "servers",
        starting,
        now,
        f"see server.log in {state.policy.log_directory} and nvidia-smi; waiting clients are held, then refused",
    )
    differs = ", ".join(str(pid) for pid in sorted(memories.limits.differs))
    what = f"server {differs} started with other limits than its first client's" if differs else None
    conditions.set(
        "limits",
        what,
        now,
        "the next client gets the right limits; if it repeats: mpsagent-cli events --kind front_end",
    )
    what, do = None, "terminate the remaining processes of that user (ps -u USER)"
    kept = [(pid, uid, server) for server in state.servers.values() for pid, uid in state.kept_open(server).items()]
    if kept:
        who = ", ".join(f"client {pid} of uid {uid} on server {server.pid}" for pid, uid, server in kept[:MOST_NAMED])
        what = f"an exited client keeps its place and memory, because another process holds its files open: {who}"
    conditions.set("kept open", what, now, do)
    do = "end those processes" if state.policy.enforce else "hangs are only reported (mode = 'report'); end them"
    conditions.set("fault", _lasting_fault(view, now), now, f"{do}: until then all clients of that server are held")
    gate = state.gate
    do = "make room there; a gate that starts now without the agent holds all clients"
    conditions.set("gate's table", state.unkept or None if gate else None, now, do)
    what = "this driver's MPS protocol is not known"
    do = "use driver 470 to 580; until then all users run with the fallback limits, without turns"
    conditions.set("handshake", what if gate and state.known_handshake is False else None, now, do)
    do = "see mpsagent-cli queue; if it lasts: mpsagent-cli restart-mps, and report it with mpsagent-cli doctor --json"
    conditions.set("waiting", _too_long(view, core.memories.turns.left, now), now, do)
    for topic, what in (*_gate(view), *_limits(view)):
        conditions.set(topic, what, now, sure=False)


FAULT_SLACK = 15.0
"""Seconds beyond `timeouts.fault_recovery` and `sigkill_delay` until a FAULT counts as lasting: a server without such
clients is asked and shut down by force within 6 s, and reports itself well again some seconds later."""


def _lasting_fault(view: View, now: float) -> str | None:
    """Return which server has been in FAULT for longer than the policy allows, and the clients that keep it there."""
    policy, clients = view.policy, view.state.clients
    for server in view.state.servers.values():
        if server.status is not Status.FAULT or server.fault_since is None:
            continue
        there = [clients[pid] for pid in server.sticky if pid in clients]
        grace = max([policy.kill_grace, *(view.rules(one.uid).kill_grace for one in there)])
        if now <= server.fault_since + policy.hang_fault + grace + FAULT_SLACK:
            continue
        who = some([f"client {one.pid} of uid {one.uid}" for one in there])
        why = f"clients with an error have not exited: {who}" if there else "no client with an error is known"
        return f"server {server.pid} has been in FAULT for {duration_text(now - server.fault_since)}; {why}"
    return None


def _unidentified(view: View, now: float) -> str | None:
    """Users who are held, or whose clients are not ended, because it is not known which rules are theirs."""
    state = view.state
    came = {client.uid: client.since for client in state.clients.values()}
    came |= {uid: first.since for uid in state.held.users() if (first := state.held.first(uid)) is not None}
    linked = now if state.gate is None else state.gate.since
    late = [uid for uid, at in came.items() if not view.identified(uid) and now >= max(at, linked) + NAME_WAIT]
    if not late:
        return None
    who = some([f"uid {uid}" for uid in late])
    return f"the name service does not identify {who}, so their rules are not known"


def _out_of_turn(view: View) -> bool:
    """A client came in another user's turn, not before it: no old way of sharing explains that."""
    turn, clients = view.turn, view.state.clients.values()
    if turn is None:
        return False
    return any(c.since > turn.since + WAIT_SLACK for c in clients if c.uid not in (turn.uid, *view.suspended))


def _too_long(view: View, left: float | None, now: float) -> str | None:
    """A user who waits longer than the policy allows while nothing explains it: never healthy. A hand-over explains it
    for as long as its server may take to start. ``left``: when the last turn ended."""
    waiting = view.waiting()
    if view.elsewhere:
        return None
    held = view.state.held
    late = view.policy.hang_server + view.policy.hang_control
    begun = {at + late: held[one] for one in held.handing if (at := held[one].handing) is not None}
    if view.together:
        long = next((one for due, one in begun.items() if now > due + WAIT_SLACK), None)
        return None if long is None else _stuck(long.uid, now - long.since)
    if not waiting or view.state.drain is not None or view.given_up is not None:
        return None
    uid = waiting[0]
    since = view.suspended.get(uid) or min(h.since for h in held.line(uid))
    if view.turn is None:
        due: float | None = max((since, left or since, *begun))
    else:
        due = max((since, *begun)) if view.turn.contested is None else view.turn.over
    return None if due is None or now <= due + WAIT_SLACK else _stuck(uid, now - since)


def _stuck(uid: int, seconds: float) -> str:
    return f"user {uid} has waited {seconds:.0f} s, longer than the policy allows"


# --- what cannot be promised ------------------------------------------------------------------------------------------

Unsure = Iterator[tuple[str, str | None]]
"""Topics, each with what cannot be promised, or None."""


def _policy(view: View) -> Unsure:
    """Yield the topics that the policy itself only reports."""
    policy = view.policy
    off = [path for path, one in policy.settings.items() if path[-1] == "mode" and one.value == "report"]
    single = sorted({f"{path[0]} {path[1]}" for path in off if len(path) == 3})
    nothing = 'report mode (mode = "report"): no limit is set and no program is terminated'
    yield "enforce", None if policy.enforce else nothing
    for topic, so, what in (("user enforce", bool(single), f"the policy is not enforced for {some(single)}"),):
        yield topic, what if so and policy.enforce else None


def _gate(view: View) -> Unsure:
    gate, what = view.state.gate, None
    if gate is None:
        what = "the gate is not connected: it keeps its last admission list, and the queue is not known"
        what += " (systemctl status mpsagent-gate)"
    elif view.sent is not None and gate.synced and not view.settled:
        what = "the gate is applying a new admission list"
    yield "gate table", what


def _limits(view: View) -> Unsure:
    state = view.state
    strict = [f"{one.pid} (user {one.uid})" for one in state.clients.values() if one.fail_safe]
    unseen = [f"{one.pid} (user {one.uid})" for one in state.clients.values() if one.unseen]
    what = (
        "clients with the fallback limits, because MPS did not confirm their own or they came while mpsagent was away "
        f"(restart these programs): {some(strict)}"
        if strict
        else None
    )
    yield "fail-safe", what
    unknown = [f"{one.pid} (user {one.uid})" for one in state.clients.values() if one.limits is None]
    what = f"clients with unknown limits, which are not enforced: {some(unknown)}" if unknown else None
    yield "limits unknown", what
    through = "clients that did not pass the gate, because they came through another process or started before the gate"
    then = "limits and turns apply, but the gate could not make them wait"
    yield "unseen", f"{through}: {some(unseen)}; {then}" if unseen else None
    unnamed = "server.log does not name its clients (a driver before 580)"
    what = f"{unnamed}: a client counts as at work until its process ends; no action needed"
    yield "unnamed", what if any(one.unnamed for one in state.servers.values()) else None
    outside = [str(pid) for s in state.servers.values() for pid in s.attached if pid not in state.clients]
    handing = sum(1 for held in state.held.values() if held.handing is not None)
    count = "1 process is" if len(outside) == 1 else f"{len(outside)} processes are"
    what = f"{count} served by MPS without passing the gate, with unknown limits: {some(outside)}"
    yield "past the gate", what if len(outside) > handing else None
    # whose memory is not limited may find too little beside that of paused users
    present = [] if view.turn is None else [view.turn.uid]
    users = (*present, *view.waiting()[:MOST_NAMED]) if view.suspended else ()
    free = [f"user {uid}" for uid in users if pause_room.unlimited(view, uid)]
    what = f"users without memory_limit, whose memory may not fit in addition to that of paused users: {some(free)}"
    yield "memory beside paused", what if free else None


def some(names: Sequence[str], between: str = ", ") -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return between.join(names[:MOST_NAMED]) + more
