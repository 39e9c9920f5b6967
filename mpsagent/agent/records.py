"""What of an event goes into the history: flat fields that a person or a program can read."""

from __future__ import annotations

from mpsagent.core.model import State
from mpsagent.mps import events as ev

_KINDS: dict[type, str] = {
    ev.ControlStarted: "control.started",
    ev.ControlExited: "control.exited",
    ev.QuitIssued: "control.quitting",
    ev.ClientQueued: "client.waiting",
    ev.ServerStarting: "server.starting",
    ev.ServerReady: "server.ready",
    ev.ServerExited: "server.exited",
    ev.ShutdownForced: "server.forced",
    ev.ClientDisconnected: "client.disconnected",
    ev.FaultStarted: "server.fault",
    ev.FaultClient: "client.sticky",
    ev.ContextDestroyed: "server.context_destroyed",
    ev.TerminationAsked: "client.termination_asked",
    ev.ClientRefused: "client.refused",
    ev.ClientsFull: "server.full",
    ev.Unknown: "log.unknown",
}


def event_record(event: ev.Event, state: State) -> tuple[str, dict[str, object]] | None:
    """Kind and fields of an event worth keeping; None for what is said at every connection."""
    if isinstance(event, ev.ContextConnected):
        if event.context:
            return None
        return "client.connected", _with_uid({"pid": event.pid, "server": event.server}, state)
    kind = _KINDS.get(type(event))
    if kind is None:
        return None
    found: dict[str, object] = {name: value for name, value in event._asdict().items() if name != "at"}
    return kind, _with_uid(found, state)


def _with_uid(found: dict[str, object], state: State) -> dict[str, object]:
    """The user, where the line itself does not say it."""
    if "uid" in found:
        return found
    server = found.get("server", found.get("pid"))
    known = state.servers.get(server) if isinstance(server, int) else None
    if known is not None and known.uid is not None:
        found["uid"] = known.uid
    return found


class Sparingly:
    """At most so many a minute."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._since, self._said = float("-inf"), 0

    def may(self, now: float) -> bool:
        if now >= self._since + 60.0:
            self._since, self._said = now, 0
        self._said += 1
        return self._said <= self._most
