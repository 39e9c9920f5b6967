"""What the agent wants done, as values. Each carries its reason (for the person on call) and the rule it follows
(a policy key such as ``user.alice.turn.time_limit``, or the name of a built-in promise). Nothing here does anything.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, fields

from mpsagent.core.words import Described, Words
from mpsagent.wire import link
from mpsagent.wire.value import Value


class Action(Value, Described):
    """Base of all actions. ``enforce`` False: report what would be done, do nothing. ``daemon``: the user whose control
    daemon it is about, None: that of all."""

    _: KW_ONLY
    reason: str
    rule: str
    enforce: bool = True
    daemon: int | None = None


class TellGate(Action):
    """Done at once: who waits at the gate waits for this. A table's number comes back as ``applied``."""

    message: link.FromAgent


class OpenDaemon(Action):
    """Make a control daemon for this user: its directories, and what may run and be written there already."""

    template = "made the directories of a control daemon{uid:of}"
    uid: int


class CloseDaemon(Action):
    """Nothing runs there: take its directories away."""

    template = "removed the directories of the control daemon{uid:of}"
    uid: int


class ShutdownServer(Action):
    """``shutdown_server S [-f]``."""

    template = "asked server {server} to shut down{force: by force|}"
    server: int
    force: bool = False


class TerminateClient(Action):
    """``terminate_client S P``: the first rung of the ladder. Blocks the daemon while the client does not answer.
    ``start`` tells the process from a later one with its pid, for an agent that takes the ladder up. ``protect``: other
    clients of the server continue to work, so the files of the GPU that this one has open are held meanwhile."""

    template = "asked MPS to terminate client {pid}{uid:of}"
    server: int
    pid: int
    uid: int
    start: int
    deadline: float
    protect: bool = False


class SignalClient(Action):
    """A signal to a client process, sent through its pidfd and only if it is still ``uid``'s and started at ``start``
    (field 22 of /proc/PID/stat)."""

    template = "sent {signal:signal} to client {pid}{uid:of}"
    pid: int
    start: int
    uid: int
    signal: int


class WarnClient(Action):
    """The policy's signal that announces the end of a turn, sent as :class:`SignalClient` is, and only to a process
    that handles it. It ends no client."""

    pid: int
    start: int
    uid: int
    signal: int

    @classmethod
    def sentence(cls, words: Words) -> str:
        if words.get("text"):
            return words("did not warn client {pid}{uid:of}, whose program does not handle {signal:signal}")
        return words("warned client {pid}{uid:of} by {signal:signal}")


class Tell(Action):
    """One line, its reason, on the terminal of a process, if it has one, written as its user. ``files``: without a
    terminal into the file or pipe that is its standard error."""

    template = "told process {pid}{uid:of}, if it has a terminal{files: or output of a job|}"
    pid: int
    start: int
    uid: int
    files: bool = False


class Freeze(Action):
    """Stop a client process until :class:`Thaw`. Done when the kernel says that it is stopped."""

    template = "froze client {pid}{uid:of}"
    pid: int
    start: int
    uid: int


class Thaw(Action):
    """Let a frozen client process go on; one that its owner had stopped before stays stopped."""

    template = "thawed client {pid}{uid:of}"
    pid: int
    start: int
    uid: int


class SignalHeld(Action):
    """A signal to the process whose connection is just being handed over, through the pidfd that the gate took."""

    template = "sent {signal:signal} to process {pid}{uid:of} at its hand-over"
    connection: int
    pid: int
    start: int
    uid: int
    signal: int


class KillServer(Action):
    """SIGKILL of a server that does not answer (recording 06, V3)."""

    template = "killed server {server}"
    server: int


class Resume(Action):
    """SIGCONT to a server or control daemon that has been stopped: the gentlest way out of a hang."""

    template = "resumed the stopped process {pid}"
    pid: int


class QuitControl(Action):
    """``quit -t N``; ``timeout`` in seconds."""

    template = "asked the control daemon to quit within {timeout} s"
    timeout: int


class KillControl(Action):
    """SIGKILL of a control daemon that does not answer; its servers exit with it (recording 06, V4)."""

    template = "killed the control daemon"


class StartControl(Action):
    """Start the control daemon in its hidden directory. ``threads``: the fail-safe percentage, which is its default
    from its first moment (recording 07, W1). ``multiuser``: one server for all users."""

    template = "started the control daemon"
    threads: float
    multiuser: bool


class Reconcile(Action):
    """Compare the state with ``get_server_list``, and with the status of ``servers``. It writes five lines and two for
    each server into the log that is read: rare."""

    template = "asked the control daemon for its servers"
    servers: tuple[int, ...] = ()


class RunHook(Action):
    """Run a program before a forced end; ``subject`` is its JSON input, ``deadline`` in seconds."""

    template = "ran the hook {program}"
    program: str
    subject: dict[str, object]
    deadline: float


class Report(Action):
    """Only a record: ``kind`` is its name in the event stream."""

    kind: str
    uid: int | None = None
    server: int | None = None
    pid: int | None = None


class Done(Value):
    """How an action ended. ``ok`` False with ``text`` saying what MPS or the kernel answered. ``held``: the files of
    the GPU that a client had open are held, so its process may exit at once. ``took``: seconds for which MPS was asked
    to terminate a client, in which it answers nobody."""

    at: float
    action: Action
    ok: bool
    text: str = ""
    held: bool = False
    took: float = 0.0


def action_fields(action: Action) -> dict[str, object]:
    """An action's own fields, JSON-able."""
    found: dict[str, object] = {}
    for one in fields(action):
        value = getattr(action, one.name)
        if value is None or one.name in ("kind", "daemon"):
            continue
        found[one.name] = list(value) if isinstance(value, tuple) else value
    return found
