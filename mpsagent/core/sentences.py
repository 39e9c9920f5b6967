"""Records as sentences: what happened, to whom, why, and what came of it. Pure; for the API, the command line and logs.

A record is what the history keeps: ``kind`` and its fields. Texts of others (process names, MPS's answers) are passed
on as they are: who prints them makes them safe.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping
from typing import Any

from mpsagent.mps.units import duration_text, limits_words
from mpsagent.policy import apart

Record = Mapping[str, Any]
Names = Callable[[int], str | None]
"""The name of a uid, None where it is not known."""
_USER = re.compile(r"\b(?:user|uid) (\d{1,10})\b", re.ASCII)
_USERS = re.compile(r"\busers: (\d[\d, ]*)", re.ASCII)
_OWN = frozenset({"cursor", "seq", "at", "kind", "sentence", "user", "rule", "policy", "enforce", "start", "begun"})


def sentence(record: Record, names: Names = lambda uid: None) -> str:
    """One line, never empty. A record of a later version, or one with fields that are missing, is told plainly."""
    kind = str(record.get("kind", ""))
    try:
        if kind in ("action", "action.done", "action.failed"):
            return _where(record) + _action(record, names)
        rule = _SENTENCES.get(kind)
        if rule is not None:
            return _where(record) + rule(_Words(record, names))
    except (LookupError, TypeError, ValueError, AttributeError):
        pass
    return _plain(record, names)


def _where(record: Record) -> str:
    """The instance, where there are several."""
    name = record.get("instance")
    return "" if name is None or record.get("kind") == "user.moved" else f"{name}: "


def worth_telling(record: Record) -> bool:
    """Return whether events and the journal show a record. They show an action once, with its result. A question to the
    control daemon and a line on a terminal are too frequent. Sessions have the usage of a client."""
    kind, action = record.get("kind"), record.get("action")
    if kind == "action.done" and action == "Reconcile":
        return not record.get("ok")
    return kind not in ("action", "client.used") and action != "Tell"


def _job(words: _Words, else_: str = "") -> str:
    """Which job a record is about, for a lease that has its name; otherwise ``else_``."""
    name = words.record.get("job")
    if name is None:
        return else_
    return f"job {name}" if else_ else f" of job {name}"


class _Words:
    """A record's parts in words."""

    def __init__(self, record: Record, names: Names) -> None:
        self.record, self.names = record, names

    def __getitem__(self, key: str) -> Any:
        return self.record[key]

    def get(self, key: str) -> Any:
        return self.record.get(key)

    def user(self, key: str = "uid") -> str:
        return _user(self.record.get(key), self.names)

    def of_user(self) -> str:
        """`` of alice``, or nothing where the record has no user."""
        return "" if self.record.get("uid") is None else f" of {self.user()}"

    def text(self, key: str = "reason") -> str:
        return named(str(self.record.get(key, "")), self.names)

    def span(self, key: str) -> str:
        return duration_text(float(self.record[key]))


def named(text: str, names: Names) -> str:
    """``user 1001`` and ``users: 1001, 1002`` with their names, where these are known."""

    def one(match: re.Match[str]) -> str:
        return names(int(match[1])) or ("root" if int(match[1]) == 0 else match[0])

    def several(match: re.Match[str]) -> str:
        return "users: " + ", ".join(names(int(uid)) or uid for uid in re.findall(r"\d+", match[1]))

    return _USERS.sub(several, _USER.sub(one, text))


def _user(uid: Any, names: Names) -> str:
    if not isinstance(uid, int):
        return "an unknown user"
    return names(uid) or ("root" if uid == 0 else f"user {uid}")


# --- what happened ----------------------------------------------------------------------------------------------------


def _client_ended(w: _Words) -> str:
    how = {
        "faulted": ", with a sticky error",
        "ended": ", terminated by mpsagent",
        "lost": ": its server exited first",
    }.get(str(w.get("outcome")), "")
    return f"client {w['pid']}{w.of_user()} ended after {w.span('seconds')}{how}"


def _client_used(w: _Words) -> str:
    busy = f" {w['busy'] / w['seconds']:.0%} of {w.span('seconds')}" if w["seconds"] else ""
    whose = " (all clients of that server)" if w["shared"] and busy else ""
    told = f"client {w['pid']}{w.of_user()}{_job(w)} used the GPU{busy}{whose}"
    return f"{told}, {w['energy'] / 1000:.3g} kJ"


def _left(w: _Words) -> str:
    who, waited = f"process {w['pid']}{w.of_user()}", w.span("waited")
    if w.get("lost"):  # systemd before 254 refuses who waits at a gate that is stopped
        return f"{who} lost its place after {waited}: the gate was stopped, or the process left"
    return f"{who} left the queue after {waited}"


def _connected(w: _Words) -> str:
    strict = " (fallback limits)" if w.get("fail_safe") else ""
    words = limits_words(w.get("limits")).replace(" %", " % of threads", 1)
    given = "its limits are not known" if w.get("limits") is None else f"limits: {words}"
    waited = f" after {w.span('waited')}" if w["waited"] >= 0.005 else ""
    if w.get("unseen"):
        through = "it did not pass the gate: it came through another process, or started before the gate"
        return f"process {w['pid']}{w.of_user()} is at work, {given}; {through}"
    return f"process {w['pid']}{w.of_user()} was admitted{waited}, {given}{strict}"


def _handover_failed(w: _Words) -> str:
    then = "it can no longer be served" if w["lost"] else "it waits and is tried again"
    return f"process {w['pid']}{w.of_user()} was not handed over ({w['stage']}: {w['why']}); {then}"


def _turn_began(w: _Words) -> str:
    gap = "" if w.get("gap") is None else f", {w.span('gap')} after the user before"
    return f"the GPU goes to {w.user()}{gap}"


def _turn_ended(w: _Words) -> str:
    why = "" if w.get("why") is None else f" ({w['why']})"
    return f"the turn of {w.user()} {'expired' if w['forced'] else 'ended'} after {w.span('seconds')}{why}"


def _user_paused(w: _Words) -> str:
    one = w["clients"] == 1
    what = (
        "its process is frozen and keeps its memory"
        if one
        else f"its {w['clients']} processes are frozen and keep their memory"
    )
    return f"{w.user()} is paused: {what} until its next turn"


def _quitting(w: _Words) -> str:
    until = "when its last client has gone" if w.get("timeout") is None else f"within {w['timeout']} s"
    return f"the control daemon has accepted a quit and ends {until}"


def _server_ended(w: _Words) -> str:
    status = w.get("status")
    return f"server {w['pid']}{w.of_user()} has ended{f' with status {status}' if status else ''}"


def _start_failed(w: _Words) -> str:
    count = "" if w["count"] == 1 else f" ({w['count']} in a row)"
    return f"server {w['pid']} did not start{count}: {w.text() or 'MPS gives no reason'}"


def _fault_over(w: _Words) -> str:
    if w["recovered"]:
        return f"server {w['server']} recovered from its fault after {w.span('seconds')}"
    return f"server {w['server']} ended {w.span('seconds')} after its fault"


def _rejected(w: _Words) -> str:
    errors = w["errors"]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    kept, first = w.get("kept") or "the one before stays in force", w.get("first") or errors[0]
    return f"the policy was rejected; {kept}: {first}{more}"


def _bypass_ended(w: _Words) -> str:
    name = {15: "SIGTERM", 9: "SIGKILL"}.get(w["signal"], "a signal")
    how = f"is sent {name}" if w.get("enforce") else f"would be sent {name}; the policy does not enforce this"
    failed = f": {w['text']}" if w.get("text") else ""
    return f"process {w['pid']}{w.of_user()} {how}, because it uses the GPU outside MPS{failed}"


def _bypass(w: _Words) -> str:
    why = f": {w['reason']}" if w.get("reason") else ""
    return f"process {w['pid']}{w.of_user()} uses the GPU outside MPS, without limits{why}"


def _restart(w: _Words) -> str:
    timeout = w.get("timeout")
    until = "" if timeout is None else f"; clients get {duration_text(float(timeout))} to end by themselves"
    return f"{w.user('by')} ordered a restart of the control daemon{until}"


def _moved(w: _Words) -> str:
    before, to = str(w["before"]), str(w["instance"])
    if apart.users(before, [to]):
        return f"{w.user()} waits for a control daemon of the user's own, {to}"
    if apart.users(to, [before]):
        return f"{w.user()} waits at instance {to}: control daemon {before} has ended"
    return f"{w.user()} waits at instance {to}, which is idle, no longer at {before}"


def _drain(w: _Words) -> str:
    timeout = w.get("timeout")
    until = "" if timeout is None else f"; clients still at work after {duration_text(float(timeout))} are ended"
    return f"{w.user('by')} ordered a drain: no new client is admitted{until}"


_SENTENCES: dict[str, Callable[[_Words], str]] = {
    "control.started": lambda w: f"control daemon {w['pid']} runs",
    "control.ended": lambda w: f"control daemon {w['pid']} has ended",
    "control.quitting": _quitting,
    "control.adopted": lambda w: f"control daemon {w['pid']} was running already and was adopted",
    "control.restart_ordered": _restart,
    "server.starting": lambda w: f"server {w['pid']}{w.of_user()} is starting",
    "server.ready": lambda w: f"server {w['pid']}{w.of_user()} is ready",
    "server.ended": _server_ended,
    "server.start_failed": _start_failed,
    "server.full": lambda w: f"server {w['server']} is full ({w['limit']} clients)",
    "server.fault": lambda w: (
        f"server {w['server']}{w.of_user()} is in FAULT and takes no new clients: mpsagent recovers it, and waiting "
        "users keep their places"
    ),
    "server.fault_over": _fault_over,
    "client.waiting": lambda w: f"process {w['pid']}{w.of_user()} waits at the gate",
    "client.held": lambda w: f"process {w['pid']}{w.of_user()} is held until it exits: {w.text('why')}",
    "client.left": _left,
    "client.connected": _connected,
    "client.ended": _client_ended,
    "client.used": _client_used,
    "client.refused": lambda w: f"process {w['pid']}{w.of_user()} was refused: {w.text('why')}",
    "client.handover_failed": _handover_failed,
    "client.sticky": lambda w: (
        f"client {w['pid']}{w.of_user()}, on server {w['server']}, lost its CUDA context in a fault and has to exit"
    ),
    "client.end_ordered": lambda w: f"{w.user('by')} ordered the termination of client {w['pid']}{w.of_user()}",
    "turn.began": _turn_began,
    "turn.ended": _turn_ended,
    "user.paused": _user_paused,
    "user.resumed": lambda w: f"{w.user()} continues after a pause of {w.span('seconds')}",
    "client.resumed": lambda w: (
        f"client {w['pid']}{w.of_user()} was resumed by another while it is paused; it is frozen again"
    ),
    "gate.connected": lambda w: f"the gate (process {w['pid']}) is connected",
    "gate.lost": lambda w: "the connection to the gate is lost: the gate keeps its last admission list",
    "gate.handshake_unknown": lambda w: (
        f"the control daemon's greeting is not known ({w['greeting']}): clients are passed on unchanged"
    ),
    "limits.unconfirmed": lambda w: f"MPS did not confirm the limits of {w.user()}: {w['why']}",
    "front_end": lambda w: (
        f"{w.user()} (process {w['pid']}) {'was not allowed to tell' if w.get('refused') else 'told'} the control "
        f"daemon: {w['command']}"
    ),
    "log.unknown": lambda w: f"mpsagent does not know a line of {w['source']}.log: {w['text']}",
    "user.moved": _moved,
    "user.flood": lambda w: (
        f"{w.user()} comes, leaves or asks so often that only {w['most']} such events a minute are recorded"
    ),
    "journal.left_out": lambda w: (
        f"{w['count']} lines about {w.user() if 'uid' in w.record else '%s other users' % w['users']} were left out of "
        "the journal in the last hour, because it takes a bounded number for each user: mpsagent-cli events shows all"
    ),
    "policy.loaded": lambda w: (
        f"the policy was loaded from {', '.join(w['files']) or 'the defaults'} ({str(w['digest'])[:12]})"
    ),
    "policy.rejected": _rejected,
    "outside_mps": _bypass,
    "client.unlimited": lambda w: f"beyond its limits: {w.text()}",
    "client.environment": lambda w: f"its limits may not hold: {w.text()}",
    "outside_mps.warned": lambda w: (
        f"process {w['pid']}{w.of_user()} uses the GPU outside MPS and is ended in "
        f"{duration_text(max(0.0, w['ends'] - w['at']))}"
    ),
    "outside_mps.ended": _bypass_ended,
    "drain.ordered": _drain,
    "lease.given": lambda w: f"{w.user('by')} gave {_job(w, 'a job')} a share of its own (lease {w['number']})",
    "lease.ended": lambda w: (
        f"lease {w['number']}{_job(w)} is over"
        if w.get("by") is None
        else f"{w.user('by')} ended lease {w['number']}{_job(w)}"
    ),
    "drain.resumed": lambda w: f"{w.user('by')} ended the drain",
    "turn.extended": lambda w: (
        f"{w.user('by')} extended the turn of {w.user()}: it does not end within "
        f"{duration_text(max(0.0, w['until'] - w['at']))}"
    ),
}
KINDS = frozenset(_SENTENCES) | {"action", "action.done", "action.failed"}
"""Of the events that people read."""


# --- what the agent did -----------------------------------------------------------------------------------------------


def _signal_name(number: Any) -> str:
    try:
        return signal.Signals(int(number)).name
    except ValueError:
        return f"signal {number}"


_PHRASES: dict[str, Callable[[_Words], str]] = {
    "ShutdownServer": lambda w: f"asked server {w['server']} to shut down{' by force' if w.get('force') else ''}",
    "TerminateClient": lambda w: f"asked MPS to terminate client {w['pid']}{w.of_user()}",
    "SignalClient": lambda w: f"sent {_signal_name(w['signal'])} to client {w['pid']}{w.of_user()}",
    "WarnClient": lambda w: (
        f"warned client {w['pid']}{w.of_user()} by {_signal_name(w['signal'])}"
        if not w.text("text")
        else f"did not warn client {w['pid']}{w.of_user()}, whose program does not handle {_signal_name(w['signal'])}"
    ),
    "Tell": lambda w: (
        f"told process {w['pid']}{w.of_user()}, if it has a terminal{' or output of a job' * bool(w.get('files'))}"
    ),
    "Freeze": lambda w: f"froze client {w['pid']}{w.of_user()}",
    "Thaw": lambda w: f"thawed client {w['pid']}{w.of_user()}",
    "SignalHeld": lambda w: f"sent {_signal_name(w['signal'])} to process {w['pid']}{w.of_user()} at its hand-over",
    "KillServer": lambda w: f"killed server {w['server']}",
    "Resume": lambda w: f"resumed the stopped process {w['pid']}",
    "QuitControl": lambda w: f"asked the control daemon to quit within {w['timeout']} s",
    "KillControl": lambda w: "killed the control daemon",
    "StartControl": lambda w: "started the control daemon",
    "Reconcile": lambda w: "asked the control daemon for its servers",
    "OpenLane": lambda w: f"made the directories of a control daemon{w.of_user()}",
    "CloseLane": lambda w: f"removed the directories of the control daemon{w.of_user()}",
    "RunHook": lambda w: f"ran the hook {w['program']}",
}


def _action(record: Record, names: Names) -> str:
    w = _Words(record, names)
    name = str(record.get("action") or "an action")
    phrase = _PHRASES[name](w) if name in _PHRASES else name
    if record.get("enforce") is False:
        phrase = f"report mode, would have {phrase}"
    reason = w.text()
    if name in ("SignalClient", "SignalHeld", "WarnClient"):
        reason = reason.rpartition("; ")[0] or reason  # it says itself which signal to whom
    text = f"{phrase}: {reason}" if reason else phrase
    if record.get("kind") == "action":
        return f"{text} (begun)"
    answer = w.text("text").strip()
    if record.get("ok") is False:
        return f"{text}; it failed{f': {answer}' if answer else ''}"
    return text


def _plain(record: Record, names: Names) -> str:
    """A kind that no rule knows: its reason or text, then the other fields."""
    w = _Words(record, names)
    said = w.text("reason") or w.text("text")
    if said:
        return _where(record) + said
    rest = ", ".join(
        f"{key} {value}" for key, value in record.items() if key not in _OWN and value not in (None, "", [], {})
    )
    return f"{record.get('kind') or 'an event'}{f': {rest}' if rest else ''}"
