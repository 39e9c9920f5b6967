"""What a log says against a client or a server is asked of MPS before it is acted on.

Lines can be forged and can be late. So these are only hints until MPS's own answer (``get_server_list``,
``get_server_status``, ``get_client_list``) confirms them: that there is a server; that a process works there that did
not pass the gate; that a client has left its server while its process lives on, which would move a turn; that a server
is in FAULT, after which signals come first, or in none any more; that the control daemon quits, so that all users are
held; and on which server a client works that is to be ended and that no line names. One question serves for all, and it
is asked rarely: MPS writes it into the log that is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mpsagent.core import actions as act
from mpsagent.core.model import NAMED_FOR, Client, Status
from mpsagent.core.rule import Decision
from mpsagent.core.view import View

RULE = "MPS confirms what a log says before mpsagent acts on it"
LEFT_FOR = 0.5
"""Seconds from the line that a client has left until it is asked about: most processes end with that."""
FAULT_FOR = 0.15
"""Seconds from the line of a fault until it is asked about: an answer must not be older than the fault."""
SERVER_FOR = 2.0
"""Seconds from a server's first line until it is asked about; a start takes 0.06 to 0.6."""
STRANGER_FOR = 0.05
"""Seconds from the line of a context whose process did not pass the gate until it is asked about: what the gate tells
comes by another way than the log. Once MPS has listed it, it is asked again at once."""
STRANGER, LISTED = "process", "listed process"
QUIT_FOR = 1.1
"""Seconds from the line of a ``quit`` until it is asked about; an answer is believed from a second after it."""
AGAIN, AGAIN_MOST = 0.3, 5.0
"""Seconds until a question that settled nothing is asked again, doubling."""
UNANSWERED = 30.0
"""Seconds until a question is given up of which nothing was heard at all."""

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Memory:
    """``asked``: for each doubt, how often MPS was asked and when last; ``since``: when the question was sent that is
    not answered yet; ``strangers``: when processes that did not pass the gate may be asked about next."""

    asked: Mapping[Key, tuple[int, float]] = field(default_factory=dict)
    since: float | None = None
    strangers: float = float("-inf")


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    doubts = _doubts(view, memory, now)
    asked = {key: times for key, times in memory.asked.items() if key in doubts}
    if asked != memory.asked:
        memory = replace(memory, asked=asked)
    if not doubts:
        return Decision(memory)
    if memory.since is not None and now < memory.since + UNANSWERED:
        return Decision(memory, wake=memory.since + UNANSWERED)
    times = {key: _due(asked.get(key), first) for key, (first, _) in doubts.items()}
    due = [key for key, at in times.items() if at <= now]
    if not due:
        return Decision(memory, wake=min(times.values()))
    servers = tuple(sorted({server for key in due for server in doubts[key][1]}))
    what = ", ".join(f"{kind} {pid}" for kind, pid in sorted(due)[:5])
    ask = act.Reconcile(servers=servers, reason=f"confirm what a log says: {what}", rule=RULE)
    fresh = {**asked, **{key: (asked.get(key, (0, now))[0] + 1, now) for key in due}}
    strangers = now + AGAIN if any(kind == STRANGER for kind, _ in due) else memory.strangers
    return Decision(Memory(fresh, now, strangers), (ask,), wake=now + UNANSWERED)


def _due(asked: tuple[int, float] | None, first: float) -> float:
    return first if asked is None else asked[1] + min(AGAIN_MOST, AGAIN * 2.0 ** (asked[0] - 1))


def _doubts(view: View, memory: Memory, now: float) -> dict[Key, tuple[float, tuple[int, ...]]]:
    """Each with the time when it is to be asked about and the servers that it concerns."""
    state = view.state
    if not view.control_alive or state.control is None:
        return {}
    if state.control.quitting is not None:  # one that quits does not answer
        return {("quit of control daemon", state.control.pid): (state.control.quitting + QUIT_FOR, ())}
    found: dict[Key, tuple[float, tuple[int, ...]]] = {}
    for server in state.servers.values():
        if server.status is Status.FAULT and not server.fault_confirmed:
            found["FAULT of server", server.pid] = ((server.fault_since or now) + FAULT_FOR, (server.pid,))
        elif server.mended is not None:
            found["end of the FAULT of server", server.pid] = (server.mended, (server.pid,))
        elif not server.confirmed:  # one that does not exist would stand in the way of the next user
            found["server", server.pid] = (server.started + SERVER_FOR, ())
    if view.unlisted and state.gate is not None and now < state.gate.since + view.policy.hang_control:
        found["servers of control daemon", state.control.pid] = (now, tuple(state.servers))
    for server in state.servers.values():
        for pid in state.strangers(server):
            one = server.attached[pid]
            at = one.since + STRANGER_FOR if one.ended is None else one.ended[0] + LEFT_FOR
            if one.seen is None:
                found[STRANGER, pid] = (max(at, memory.strangers), (server.pid,))
            else:
                found[LISTED, pid] = (one.seen.at, (server.pid,))
    for client in state.clients.values():
        leaving = view.ending.get(client.pid)
        if leaving is not None and not leaving.blocks and not leaving.signalled:
            if not view.works_on(client, leaving.at)[1]:
                found["end of client", client.pid] = (leaving.at, _servers(view, client))
        elif client.said_left is not None and client.detached is None:
            found["leaving of client", client.pid] = (client.said_left + LEFT_FOR, _servers(view, client))
        elif client.detached is None and state.carries(client, client.since + NAMED_FOR):
            found["client", client.pid] = (client.since + NAMED_FOR, _servers(view, client))
    return found


def _servers(view: View, client: Client) -> tuple[int, ...]:
    return tuple(one.pid for one in view.state.candidates(client))


def note(memory: Memory, done: act.Done) -> Memory:
    if isinstance(done.action, act.Reconcile) and done.action.rule == RULE:
        return replace(memory, since=None)
    return memory
