"""Nothing hangs indefinitely: the control daemon and its servers are resumed, killed, started again.

The daemon is single-threaded and blocks on its servers: a stopped server makes it answer nothing, and SIGKILL of that
server frees it at once (recording 06, V3). A stopped daemon is beyond help from inside; its servers exit with it and a
new one starts over the stale files (recording 06, V4). Each hang has a deadline in the policy. A process that
has merely been stopped is resumed first: no work is lost by that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mpsagent.core import actions as act
from mpsagent.core.model import Server, Status
from mpsagent.core.rule import Decision
from mpsagent.core.view import Turn, View

PROMISE = "promise 4: a fault, a hang or a crash ends by itself"
NEXT_STEP = 2.0
"""Seconds from one step of a way out to the next."""
IDLE_EXIT = 3.0
"""Seconds that a server without a client gets to exit; it takes 60 to 100 ms. One that was started for a client that
has died meanwhile never does, and the daemon answers nothing until it is killed (conformance scenario X1)."""
EXIT = 15.0
"""Seconds that any other server gets to exit, unless `timeouts.server` is less."""
HANDOVER = 8.0
"""Seconds in which the gate ends a hand-over that goes no further because its client says nothing (5), and finishes the
handshake for it (2.1). MPS answers no one meanwhile, and no server is to be killed for that."""
QUERY_EVERY = 120.0
"""Seconds between two queries while nothing happens: each one writes into the log that is read."""
BACKOFF_MOST = 60.0
STABLE_AFTER = 60.0
GIVE_UP_AFTER = 8
"""Starts in a row that did not last ``STABLE_AFTER`` seconds, until waiting users are refused. The next ones are
``BACKOFF_MOST`` seconds apart: the cause may have been a full disk or a driver that was being installed."""


@dataclass(frozen=True, slots=True)
class Memory:
    """``attempts``: starts in a row; ``steps``: way out by what hangs (a pid, or 0 for a silent daemon): the step taken
    last and when."""

    attempts: int = 0
    start_asked: bool = False
    retry_at: float = float("-inf")
    up_since: float | None = None
    failed: bool = False
    steps: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    queried_at: float | None = None
    meant: bool = False
    """True if its end was asked for: a `quit`, the agent's included, is not a crash."""
    stopped: Mapping[int, float] = field(default_factory=dict)
    """By pid of the control daemon and its servers: since when a process is seen stopped. Their silence would be
    noticed only when the agent asks something; who waits in a list or comes to such a server asks nothing."""


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    if not view.control_alive:
        memory, todo, wake = _start(view, memory, now)
        return Decision(memory, tuple(todo), wake=wake)
    if memory.up_since is None:
        memory = replace(memory, up_since=now, start_asked=False, failed=False)
    control = view.state.control
    meant = control is not None and control.quitting is not None
    if meant != memory.meant:
        memory = replace(memory, meant=meant)
    wakes: list[float] = []
    if memory.attempts:
        stable = (memory.up_since or now) + STABLE_AFTER
        if now >= stable:
            memory = replace(memory, attempts=0)
        else:
            wakes.append(stable)
    stopped = {pid: memory.stopped.get(pid, now) for pid in _stopped(view)}
    if stopped != memory.stopped:
        memory = replace(memory, stopped=stopped)
    suspects = _suspects(view, memory)
    memory, todo, at = _ways_out(view, memory, suspects, now)
    if at is not None:
        wakes.append(at)
    memory, asked, at = _query(view, memory, now)
    if at is not None:
        wakes.append(at)
    return Decision(memory, (*todo, *asked), wake=min(wakes, default=None))


# --- a control daemon that does not run -------------------------------------------------------------------------------


def _start(view: View, memory: Memory, now: float) -> tuple[Memory, list[act.Action], float | None]:
    if memory.up_since is not None:  # it ran until just now
        attempts = memory.attempts if now - memory.up_since < STABLE_AFTER and not memory.meant else 0
        memory = Memory(attempts=attempts, retry_at=now + _wait(attempts))
    if view.each and not memory.start_asked:  # it is no longer wanted here, so no user is refused for it
        return Memory(), [], None
    if view.state.drain is not None or memory.start_asked or not view.wanted:
        return memory, [], None
    todo: list[act.Action] = []
    if memory.attempts >= GIVE_UP_AFTER and not memory.failed:
        reason = (
            f"the control daemon did not start or stay up in {memory.attempts} tries: users who wait are refused, and "
            "the agent tries again once a minute; look at mpsagent-cli events and control.log"
        )
        memory, todo = replace(memory, failed=True), [act.Report(kind="control.failed", reason=reason, rule=PROMISE)]
    if now < memory.retry_at:
        return memory, todo, memory.retry_at
    threads = view.fail_safe().threads
    start = act.StartControl(
        threads=threads, multiuser=view.multiuser, reason="no control daemon is running", rule=PROMISE
    )
    return replace(memory, start_asked=True, attempts=memory.attempts + 1), [*todo, start], None


def _wait(attempts: int) -> float:
    """Return the seconds from the last start in a row of ``attempts``, or its daemon's end, to the next start."""
    return min(2.0 ** (attempts - 1), BACKOFF_MOST) if attempts else 0.0


# --- what hangs, since when, and for how long it may ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Suspect:
    """``key``: pid of what is killed first (a server), 0 for the control daemon itself. ``idle``: no client is there,
    so none can lose anything. ``said``: only a log says so, and MPS is asked before anything is done."""

    key: int
    due: float
    what: str
    rule: str
    server: int | None
    idle: bool = False
    said: bool = False


def _idle(view: View) -> bool:
    """No client can be at work, on whichever server: whose a server is only a log says, which may be forged."""
    return view.synced and all(one.detached is not None for one in view.state.clients.values())


def _suspects(view: View, memory: Memory) -> list[_Suspect]:
    policy, state = view.policy, view.state
    found: list[_Suspect] = []
    busy = any(one.blocks for one in view.ending.values())
    for server in state.servers.values():
        if server.stuck_since is not None:  # it serves no client any more, and the daemon hangs on it (X1, X15)
            what = f"{view.server_text(server)} waits for ever for a client that died"
            idle = _idle(view)
            due = server.stuck_since + (0.0 if idle else policy.hang_control)
            found.append(_Suspect(server.pid, due, what, "timeouts.server", server.pid, idle=idle, said=True))
        elif server.status is Status.INITIALIZING:
            busy = True
            what = f"{view.server_text(server)} does not become Ready"
            due = server.started + policy.hang_server
            found.append(_Suspect(server.pid, due, what, "timeouts.server", server.pid, said=True))
        else:
            since = server.stop_tried if server.stopping_since is None else server.stopping_since
            if since is not None:
                busy = True
                what = f"{view.server_text(server)} does not exit"
                idle = _idle(view) and not state.held.handing
                due = since + min(IDLE_EXIT if idle else EXIT, policy.hang_server)
                found.append(_Suspect(server.pid, due, what, "timeouts.server", server.pid, idle=idle, said=True))
            elif server.pid in memory.stopped:
                # Nothing else tells: clients that come for it hang, and the control daemon with him (recording 06, V3).
                busy = True
                what = f"{view.server_text(server)} has been stopped (SIGSTOP): its new clients hang"
                due = memory.stopped[server.pid] + min(policy.hang_server, policy.hang_control)
                found.append(_Suspect(server.pid, due, what, "timeouts.server", server.pid))
            elif view.in_the_way is not None and view.in_the_way[0] == server.pid:
                # It is not shut down, whatever the reason: the command fails, or MPS says that it still works.
                by = _makes_way_by(view, server, view.in_the_way[1])
                what = f"{view.server_text(server)} does not end, and the next user waits"
                if by is not None:
                    found.append(_Suspect(server.pid, by, what, "timeouts.server", server.pid, said=True))
    control = state.control
    if control is not None and control.quit_by is not None:
        what = f"`quit` of control daemon {control.pid} does not end"
        found.append(
            _Suspect(0, control.quit_by + policy.hang_control, what, "timeouts.control_daemon", None, said=True)
        )
    elif control is not None and control.quitting is not None:
        # A `quit` without a time waits for the clients; once they have gone it has nothing to wait for.
        servers = state.servers.values()
        free = [s.idle_since for s in servers]
        # Where the log does not say that a client has left, it works until its process ends.
        working = any(c.said_left is None for s in servers for c in state.working_on(s))
        if None not in free and not working:
            last = max([control.quitting, *(at for at in free if at is not None)])
            what = f"`quit` of control daemon {control.pid} does not end though no client works"
            found.append(_Suspect(0, last + policy.hang_control, what, "timeouts.control_daemon", None, said=True))
    elif control is not None and control.pid in memory.stopped:
        since = memory.stopped[control.pid]
        since = since if view.state.silent_since is None else min(since, view.state.silent_since)
        what = f"control daemon {control.pid} has been stopped"
        found.append(_Suspect(0, since + policy.hang_control, what, "timeouts.control_daemon", None))
    elif view.state.silent_since is not None and not busy and not _gate_stands(view):
        what = "the control daemon does not answer"
        holder = max(state.servers.values(), key=lambda one: one.started, default=None)
        patience = max(policy.hang_control, HANDOVER) if state.held.handing else policy.hang_control
        if any(server.mended is not None for server in state.servers.values()):
            # After a fault it makes its context anew, as one that starts: 14 s on an H200 (disorder-apart-434.txt).
            patience = max(patience, policy.hang_server)
        killed = None if holder is None else holder.pid
        found.append(_Suspect(0, view.state.silent_since + patience, what, "timeouts.control_daemon", killed))
    return found


def _gate_stands(view: View) -> bool:
    """It is stopped in the middle of a hand-over, and MPS waits for it; no one would be let in by a server's end."""
    gate = view.state.gate
    return gate is not None and gate.pid in view.state.stopped and bool(view.state.held.handing)


def _makes_way_by(view: View, server: Server, asked: float) -> float | None:
    """Until when a server may refuse to shut down; None: for as long as it wants. Processes that are at work there
    never passed the gate, or they would have the turn: they get as long as one."""
    due = asked + min(EXIT, view.policy.hang_server)
    if not server.attached or server.uid is None:
        return due
    times = Turn(server.uid, asked, contested=asked).deadlines(view.rules(server.uid))
    return None if times is None else max(due, times[1])


def _stopped(view: View) -> list[int]:
    """Of the control daemon and its servers, those whose process has been stopped."""
    pids = [*view.state.servers, *([view.state.control.pid] if view.state.control else [])]
    return [pid for pid in pids if pid in view.state.stopped]


def _ways_out(
    view: View, memory: Memory, suspects: list[_Suspect], now: float
) -> tuple[Memory, list[act.Action], float | None]:
    """Return a step for each hang that is over its deadline: resume the process, kill the server, kill the daemon."""
    keys = {s.key for s in suspects}
    steps = {key: step for key, step in memory.steps.items() if key in keys}
    todo: list[act.Action] = []
    wakes: list[float] = []
    for suspect in suspects:
        step, at = steps.get(suspect.key, (0, float("-inf")))
        if suspect.due > at:  # another hang than the one for which steps were taken
            step = 0
        due = max(suspect.due, at + NEXT_STEP)
        if now < due:
            wakes.append(due)
            continue
        ways = _ladder_of(view, suspect)
        if step < len(ways):
            todo.append(ways[step])
            steps[suspect.key] = (step + 1, now)
            wakes.append(now + NEXT_STEP)
        elif view.policy.enforce:  # the last step once more, slowly: the process may hang in the kernel
            todo.append(ways[-1])
            steps[suspect.key] = (step, now + 30.0)
            wakes.append(now + 30.0 + NEXT_STEP)
    if steps != memory.steps:
        memory = replace(memory, steps=steps)
    return memory, todo, min(wakes, default=None)


def _ladder_of(view: View, suspect: _Suspect) -> list[act.Action]:
    """What only a log says is asked first: an answer of MPS that says otherwise is the end of it. Before the control
    daemon is killed because its server's end was not heard of, it is asked for its servers once more."""
    enforce = view.policy.enforce
    ways: list[act.Action] = []
    pids = [suspect.server] if suspect.server is not None and not suspect.idle else []
    control = view.state.control
    if control is not None and suspect.server is None:
        pids.append(control.pid)
    servers = () if suspect.server is None else (suspect.server,)
    ask = act.Reconcile(servers=servers, reason=f"{suspect.what}: ask MPS first", rule=suspect.rule)
    if suspect.said and not suspect.idle:
        ways.append(ask)
    # Always there, so that a step keeps its number: SIGCONT to what is not stopped does nothing.
    for pid in pids:
        ways.append(act.Resume(pid=pid, reason=f"{suspect.what}: SIGCONT to {pid}", rule=suspect.rule, enforce=enforce))
    if suspect.server is not None:
        why = f"{suspect.what}: SIGKILL to server {suspect.server}"
        ways.append(act.KillServer(server=suspect.server, reason=why, rule=suspect.rule, enforce=enforce))
        ways.append(replace(ask, servers=()))
    why = f"{suspect.what}: SIGKILL to the control daemon, then a new one"
    ways.append(act.KillControl(reason=why, rule=suspect.rule, enforce=enforce))
    return ways


# --- asking, rarely ---------------------------------------------------------------------------------------------------


def _query(view: View, memory: Memory, now: float) -> tuple[Memory, list[act.Action], float | None]:
    """Ask the daemon for its servers: rarely while all is quiet, sooner while a client waits in vain."""
    state = view.state
    if state.control is None or state.control.quitting is not None:
        return memory, [], None
    starts = any(one.status is Status.INITIALIZING for one in state.servers.values())
    if state.silent_since is not None or starts:
        return memory, [], None
    every = max(view.policy.hang_control, 5.0) if state.held else QUERY_EVERY
    due = float("-inf") if memory.queried_at is None else memory.queried_at + every
    if now < due:
        return memory, [], due
    ask = act.Reconcile(servers=(), reason="compare its answer with what the agent knows", rule=PROMISE)
    return replace(memory, queried_at=now), [ask], now + every


def note(memory: Memory, done: act.Done) -> Memory:
    if isinstance(done.action, act.StartControl):
        # Also when it was started: the kernel's word that it runs may come a moment later, or it may be gone already.
        return replace(memory, start_asked=False, retry_at=done.at + _wait(memory.attempts))
    return memory
