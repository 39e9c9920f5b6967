"""What the agent wants done, as values. Each carries its reason (for the person on call) and the rule it follows
(a policy key such as ``user.alice.switch.after``, or the name of a built-in promise). Nothing here does anything.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from mpsagent.mps.limits import Limits
from mpsagent.wire import link


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Base of all actions. ``enforce`` False: report what would be done, do nothing."""

    reason: str
    rule: str
    enforce: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAdmissions(Action):
    """Tell the gate. ``number`` comes back as ``applied`` when it is in force."""

    number: int
    admissions: link.Admissions


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseConnection(Action):
    """Turn a held connection away: the client gets CUDA_ERROR_MPS_CONNECTION_FAILED (recording 08, G7)."""

    connection: int
    pid: int
    uid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseClient(Action):
    """A client has left its server while its process lives on: what it asks next is a new admission. Not where it has
    passed more often than ``connections``; None: in any case."""

    pid: int
    start: int
    uid: int
    connections: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CountClient(Action):
    """Tell the gate of a client of MPS that it has not seen: it is known from now on, and counts for its user."""

    pid: int
    start: int
    uid: int
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutdownServer(Action):
    """``shutdown_server S [-f]``."""

    server: int
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminateClient(Action):
    """``terminate_client S P``: the first rung of the ladder. Blocks the daemon while the client does not answer.
    ``start`` tells the process from a later one with its pid, for an agent that takes the ladder up."""

    server: int
    pid: int
    uid: int
    start: int
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalClient(Action):
    """A signal to a client process, sent through its pidfd and only if it is still ``uid``'s and started at ``start``
    (field 22 of /proc/PID/stat)."""

    pid: int
    start: int
    uid: int
    signal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell(Action):
    """One line, its reason, on the terminal of a process, if it has one, written as its user."""

    pid: int
    start: int
    uid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze(Action):
    """Stop a client process until :class:`Thaw`. Done when the kernel says that it stands."""

    pid: int
    start: int
    uid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Thaw(Action):
    """Let a frozen client process go on; one that its owner had stopped before stays stopped."""

    pid: int
    start: int
    uid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalHeld(Action):
    """A signal to the process whose connection is just being handed over, through the pidfd that the gate took."""

    connection: int
    pid: int
    start: int
    uid: int
    signal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillServer(Action):
    """SIGKILL of a server that does not answer (recording 06, V3)."""

    server: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(Action):
    """SIGCONT to a server or control daemon that has been stopped: the gentlest way out of a hang."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuitControl(Action):
    """``quit -t N``; ``timeout`` in seconds."""

    timeout: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillControl(Action):
    """SIGKILL of a control daemon that does not answer; its servers exit with it (recording 06, V4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartControl(Action):
    """Start the control daemon in its hidden directory. ``threads``: the fail-safe percentage, which is its default
    from its first moment (recording 07, W1). ``multiuser``: one server for all users."""

    threads: float
    multiuser: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconcile(Action):
    """Compare the state with ``get_server_list``, and with the status of ``servers``. It writes five lines and two for
    each server into the log that is read: rare."""

    servers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHook(Action):
    """Run a program before a forced end; ``subject`` is its JSON input, ``deadline`` in seconds."""

    program: str
    subject: dict[str, object]
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Action):
    """Only a record: ``kind`` is its name in the event stream."""

    kind: str
    uid: int | None = None
    server: int | None = None
    pid: int | None = None


ToGate = SetAdmissions | RefuseConnection | ReleaseClient | CountClient
"""What is told to the gate at once."""


def to_gate(action: ToGate, instance: str) -> link.FromAgent:
    """The message that carries an action of this instance to the gate."""
    match action:
        case SetAdmissions():
            return replace(action.admissions, number=action.number, instance=instance)
        case RefuseConnection():
            return link.Refuse(action.connection, action.reason)
        case ReleaseClient():
            return link.Release(action.pid, action.start, action.connections)
        case CountClient():
            return link.Found(action.pid, action.uid, action.start, action.limits, instance)


@dataclass(frozen=True, slots=True)
class Done:
    """How an action ended. ``ok`` False with ``text`` saying what MPS or the kernel answered."""

    at: float
    action: Action
    ok: bool
    text: str = ""


def action_fields(action: Action) -> dict[str, object]:
    """An action's own fields, JSON-able."""
    found: dict[str, object] = {}
    for one in fields(action):
        value = getattr(action, one.name)
        if value is None or one.name == "kind":
            continue
        found[one.name] = _plain(value)
    return found


def _plain(value: object) -> object:
    if isinstance(value, Limits):
        return value.as_json()
    if isinstance(value, link.Admissions):
        return {"open": value.open, "users": list(value.users)}
    return list(value) if isinstance(value, tuple) else value
