"""What the agent wants done, as values. Each carries its reason (for the person on call) and the rule it follows
(a policy key such as ``user.alice.switch.after``, or the name of a built-in promise). Nothing here does anything.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from mpsagent.mps.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Base of all actions. ``enforce`` False: report what would be done, do nothing."""

    reason: str
    rule: str
    enforce: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SetDefaults(Action):
    """Set the limits that the next server starts with, and read them back. ``uid`` None: the floor."""

    limits: Limits
    uid: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetServerLimits(Action):
    """Change a running server's limits; they reach contexts created later (recording 02, R2)."""

    server: int
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class StartServer(Action):
    """``start_server -uid``: the parked server."""

    uid: int


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
class KillServer(Action):
    """SIGKILL of a server that does not answer (recording 06, V3). ``before_ready``: of one that is only starting; it
    is left alone if that would cost somebody else his connection (scenario X28)."""

    server: int
    before_ready: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(Action):
    """SIGCONT to a server or control daemon that somebody has stopped: the gentlest way out of a hang."""

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
    """Start the control daemon: directories, door shut, floor in its environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDoor(Action):
    """Give the pipe directory mode 0755: from now on users' clients can reach the control socket."""


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


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an action ended. ``ok`` False with ``text`` saying what MPS or the kernel answered; ``heard`` False: the
    control daemon turned us away and has changed nothing."""

    at: float
    action: Action
    ok: bool
    text: str = ""
    heard: bool = True


def action_fields(action: Action) -> dict[str, object]:
    """An action's own fields, JSON-able."""
    found: dict[str, object] = {}
    for field in fields(action):
        value = getattr(action, field.name)
        if value is None or field.name == "kind":
            continue
        found[field.name] = _plain(value)
    return found


def _plain(value: object) -> object:
    if isinstance(value, Limits):
        return {"threads": value.threads, "memory": {str(device): size for device, size in value.memory.items()}}
    return list(value) if isinstance(value, tuple) else value
