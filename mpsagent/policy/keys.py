"""Every key of the policy language, one row each.

From these rows come the checks, the JSON Schema, the defaults, the attributes of `Rules` and `Policy`, what `explain`
shows, and the reference in docs/policy.md with the manual page. A new key is a new row, and a typed attribute.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from mpsagent.policy import kinds, parse, values
from mpsagent.policy.kinds import FLAG, Kind
from mpsagent.policy.origins import Path


class Scope(Enum):
    """For whom a key holds, and so where it may stand."""

    USER = "in its own section for everybody, and in a user's or a group's"
    INSTANCE = "for one control daemon"
    AGENT = "for the agent"


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    ``default`` is what holds where no file gives a value; ``absent`` are its words where it cannot be written (no
    limit). ``attribute``: of Rules for a USER key, of Policy for any other (empty: the name). ``rules``: the attribute
    of Rules that has it as well. ``label``: its name in `origin` and `explain` (empty: the name).
    """

    section: str
    name: str
    kind: Kind
    scope: Scope
    words: str
    default: Any = None
    absent: str = ""
    attribute: str = ""
    rules: str = ""
    label: str = ""

    @property
    def path(self) -> Path:
        """Where it stands for everybody. In an instance's section the name of the instance comes between."""
        return (self.section, self.name) if self.section else (self.name,)

    @property
    def field(self) -> str:
        return self.attribute or self.name

    @property
    def in_rules(self) -> str:
        """The attribute of Rules that holds it, or an empty text."""
        return self.field if self.scope is Scope.USER else self.rules

    @property
    def shown(self) -> str:
        return self.label or self.name

    def default_text(self) -> str:
        """The default as a file would have it, or in words."""
        return self.absent or f"`{self.kind.written(self.default)}`"


DAY = 86400.0
LONG = 10 * parse.YEAR
_WHO, _OF, _ALL = Scope.USER, Scope.INSTANCE, Scope.AGENT


MODE = kinds.choice(
    {
        "enforce": "rules are enforced",
        "report": "nothing is limited, refused or terminated; mpsagent reports what it would have done",
    }
)


def _timeout(name: str, attribute: str, words: str, default: float) -> Key:
    """Return a row of [timeouts]."""
    return Key("timeouts", name, kinds.duration(0.1, DAY), _ALL, words, default, attribute=attribute)


KEYS: tuple[Key, ...] = (
    Key("", "mode", MODE, _WHO, "whether rules are enforced or only reported", "enforce"),
    # --- what a user may have
    Key(
        "limits", "access",
        kinds.choice({"allow": "clients are admitted", "deny": "clients are refused, with an error of CUDA's"}),
        _WHO, "who may use MPS at all", "allow",
    ),
    Key(
        "limits", "active_threads", kinds.THREADS, _WHO, "share of the multiprocessors of each client process",
        values.Percent(100.0),
        attribute="threads",
    ),
    Key(
        "limits", "memory_limit", kinds.MEMORY, _WHO, "device memory of each client process", (), "no limit",
        attribute="memory",
    ),
    Key(
        "limits", "max_clients", kinds.whole(1, 1000), _WHO, "client processes of one user at a time", None, "no limit",
    ),
    Key(
        "limits", "max_contexts", kinds.whole(1, 1000), _WHO,
        "CUDA contexts of one user at a time on a server and device; what is beyond waits, or gets "
        "error 808 in a process that has some", None,
        "three quarters of what a server takes, where users share it",
    ),
    Key(
        "limits", "total_active_threads", kinds.TOTAL_THREADS, _WHO,
        "share of the multiprocessors of all client processes of one user together", None, "no limit",
        attribute="total_threads",
    ),
    Key(
        "limits", "total_memory_limit", kinds.TOTAL_MEMORY, _WHO,
        "memory on each device of all client processes of one user together", None, "no limit",
        attribute="total_memory",
    ),
    Key(
        "limits", "queue_priority", kinds.whole(0, 100), _WHO,
        "the waiting user with the largest number gets the next turn; of several, the one who has waited longest", 0,
        attribute="priority",
    ),
    Key(
        "limits", "client_priority",
        kinds.choice({
            "normal": "as MPS has it",
            "below-normal": "while kernels of others wait on the same server, those come first; a program may take "
            "the normal one back with CUDA_MPS_CLIENT_PRIORITY=0",
        }),
        _WHO, "MPS's own priority, of each client process", "normal",
    ),
    Key(
        "limits", "on_limit_exceeded",
        kinds.choice({
            "report": "it is reported",
            "terminate-memory": "it is reported; one that uses too much memory is ended, gently first, when it has "
            "done so for 10 s in sum",
            "terminate": "either is reported, and ended so",
        }),
        _WHO, "what becomes of a client that MPS does not hold to its limits: it uses more memory than it was given, "
        "or asks for partitioning by context in its environment", "terminate-memory",
        attribute="over_limits",
    ),
    Key(
        "limits", "max_runtime", kinds.duration(1, LONG, never=True), _WHO,
        "a client process is ended after this time",
    ),
    Key(
        "limits", "idle_timeout", kinds.duration(1, LONG, never=True), _WHO,
        "a user's clients that were idle for this long are ended if another user waits for their place",
    ),
    Key(
        "limits", "idle_metric",
        kinds.choice({
            "cpu": "none of them used CPU time",
            "gpu": "the GPU's utilisation was below 1 %",
        }),
        _WHO, "what idle means for `idle_timeout`", "cpu", attribute="idle_by",
    ),
    Key(
        "limits", "notify_terminal", FLAG, _WHO,
        "`true`: a process gets one line on its terminal, or in a job of Slurm in the file or pipe that is its "
        "standard error, when it has waited for 10 s, when it is served, when it is refused, and before its turn ends",
        True, attribute="terminal",
    ),
    # --- turns
    Key(
        "turn", "time_limit", kinds.duration(0, LONG, never=True), _WHO,
        "how long a user may keep the GPU once another user waits", 1800.0,
        attribute="switch_after", label="turn.time_limit",
    ),
    Key(
        "turn", "grace", kinds.duration(0, DAY), _WHO, "time between the warning and the action", 30.0,
        attribute="switch_grace", label="turn.grace",
    ),
    Key(
        "turn", "on_expiry",
        kinds.choice({
            "terminate": "each client is ended, gently first",
            "restart-mps": "the control daemon is restarted with `quit -t`, which ends the work of all users on it",
            "pause": 'its processes are frozen, keep their memory, and go on when it is their turn again; needs '
            '`server_scope = "all"`; if that is not possible, `"terminate"` after `time_limit` and `grace`',
            "none": "only the warning",
        }),
        _WHO, "what happens at the end of a turn", "terminate", attribute="switch_action", label="turn.on_expiry",
    ),
    Key(
        "turn", "pause_slice", kinds.duration(1, DAY), _WHO,
        'with `on_expiry = "pause"`: how long a turn lasts while another user waits', 30.0,
        attribute="switch_slice", label="turn.pause_slice",
    ),
    Key(
        "turn", "warning_signal",
        kinds.choice(dict.fromkeys(("none", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGTERM"), "")), _WHO,
        "sent with the warning to the clients of the user whose turn ends, if they handle it",
        "none", attribute="switch_warning_signal", label="turn.warning_signal",
    ),
    Key(
        "turn", "never_preempt", FLAG, _WHO, "`true`: the GPU is never taken from this user", False,
        attribute="switch_exempt", label="turn.never_preempt",
    ),
    # --- how long each part of MPS may stay silent
    _timeout("control_daemon", "hang_control", "the control daemon answers a command, and exits after `quit`", 10.0),
    _timeout(
        "server", "hang_server",
        "a server becomes ready, at its start and after a fault; it exits after its shutdown, in at most 15 s",
        30.0,
    ),
    _timeout("fault_recovery", "hang_fault", "after a fault, clients with a sticky error exit by themselves", 15.0),
    Key(
        "timeouts", "sigkill_delay", kinds.duration(0, DAY), _ALL, "a process exits after SIGTERM, before SIGKILL", 5.0,
        attribute="kill_grace", rules="kill_grace", label="timeouts.sigkill_delay",
    ),
    # --- the control daemon
    Key("instance", "devices", kinds.DEVICES, _OF, "the GPUs that it serves (empty: all)", ()),
    Key(
        "instance", "sharing",
        kinds.choice(
            {
                "turns": "one user at a time; the others wait at the gate",
                "one-server": "all users at once on one server for all, each client with its own limits; a fault of "
                "one ends the clients of all; driver 580 and later",
                "per-user": "all users at once, each on a control daemon and a server of the user's own, which run "
                "while the user has clients; faults stay with their user",
            },
        ),
        _OF, "how users share its GPUs; with `mode = \"report\"` at the top `per-user`", "per-user",
    ),
    Key(
        "instance", "max_users", kinds.whole(1, 128), _OF,
        'with `sharing = "per-user"`: users with a control daemon at a time; others are held', 64,
        attribute="apart_users",
    ),
    Key(
        "instance", "daemon_idle_timeout", kinds.duration(1, LONG), _OF,
        'with `sharing = "per-user"`: the control daemon of a user who has had no client for so long ends; at once '
        "while others wait for its place", 60.0, attribute="apart_idle_timeout",
    ),
    Key(
        "instance", "users", kinds.NAMES, _OF,
        "users who work here, and nowhere else (with several instances)", (), "users whom no instance names",
        attribute="only_users",
    ),
    Key(
        "instance", "groups", kinds.NAMES, _OF, "groups whose members work here, and nowhere else", (),
        "users whom no instance names", attribute="only_groups",
    ),
    Key(
        "instance", "server_scope",
        kinds.choice({
            "user": "a server for each turn, which runs as its user",
            "all": "one server for all users that stays; driver 580 and later",
        }),
        _OF, "which MPS servers it runs while users take turns", "user", attribute="server",
    ),
    Key(
        "instance", "compute_mode",
        kinds.choice({
            "unchanged": "it stays as it is, and is not compared",
            "default": "programs outside MPS run beside it",
            "exclusive-process": "programs outside MPS fail",
        }),
        _OF, "the GPUs' compute mode while the control daemon runs; set by its unit (systemd), verified by the agent",
        "unchanged",
    ),
    Key(
        "instance", "on_outside_mps",
        kinds.choice({
            "report": "it is reported",
            "terminate": "it is warned of, then gets SIGTERM, and SIGKILL after `timeouts.sigkill_delay`",
        }),
        _OF, "what happens to a process that computes on its GPUs outside MPS", "report", attribute="bypass",
    ),
    Key(
        "instance", "outside_mps_grace", kinds.duration(1, DAY), _OF,
        'with `on_outside_mps = "terminate"`: how long such a process may run after the warning', 60.0,
        attribute="bypass_grace",
    ),
    Key(
        "instance", "outside_mps_exempt", kinds.NAMES, _OF,
        "users whose processes outside MPS are never ended: monitoring, for instance (root's never are)", (),
        attribute="bypass_exempt",
    ),
    # A Unix socket's path has at most 107 bytes, and "/control_privileged" comes behind this one.
    Key(
        "instance", "pipe_directory", kinds.directory(88, "absolute path of at most 88 bytes"), _OF,
        "the public directory, where clients look for MPS: CUDA_MPS_PIPE_DIRECTORY of users' programs",
        "/tmp/nvidia-mps",
    ),
    Key(
        "instance", "log_directory", kinds.directory(1024), _OF,
        "where control.log and server.log are; with several instances each has a directory NAME below the default",
        "/var/log/nvidia-mps",
    ),
    Key(
        "instance", "log_size", kinds.SIZE, _OF,
        "how much of the disk these two logs of a control daemon may take; the oldest lines go first", 1 << 30,
    ),
    Key(
        "instance", "control_daemon_path", kinds.text(parse.program, "absolute path, or a name on PATH"), _OF,
        "NVIDIA's control daemon", "nvidia-cuda-mps-control",
    ),
    # --- the agent itself
    Key(
        "agent", "placement",
        kinds.choice({
            "fixed": "the first instance that names the user, a group of the user's, or neither users nor groups",
            "least-loaded": "of those the one with the fewest users and clients; users with clients stay there",
            "by-directory": "the one in whose directory the program looks for MPS: each has its own",
        }),
        _ALL, "which instance a user's clients go to, where there are several", "fixed",
    ),
    Key(
        "agent", "on_stop",
        kinds.choice({
            "leave": "MPS goes on",
            "quit": "MPS is stopped as well, with `quit -t` and `timeouts.sigkill_delay`",
        }), _ALL,
        "what happens when the agent is stopped", "leave",
    ),
    Key(
        "agent", "admin_group", kinds.text(parse.name, "name of a group"), _ALL,
        "its members may do with mpsagent-cli what root may do", "mpsagent-admin",
    ),
    Key(
        "agent", "cdi_file", kinds.path(1024), _ALL,
        "the file that tells container engines of the gate (docs/jobs.md), for instance "
        '`"/etc/cdi/mpsagent.json"`', None, "none",
    ),
    # --- what happened
    Key(
        "history", "retention", kinds.duration(3600, LONG), _ALL,
        "how long what happened is kept, in a file of at most 1 GiB",
        400 * DAY, attribute="history_keep",
    ),
    # --- programs of the administrator's
    Key(
        "hooks", "pre_terminate", kinds.path(1024), _ALL,
        "a program that is run before a client is ended by force, with JSON on its stdin", None, "none",
        attribute="before_end", rules="before_end_hook", label="hooks.pre_terminate",
    ),
    Key(
        "hooks", "timeout", kinds.duration(0.1, 600), _ALL, "how long it may take", 5.0, attribute="hook_deadline",
    ),
)  # fmt: skip

SECTIONS: dict[str, str] = {
    "limits": "what one client process may use, and what one user may do",
    "user": "one user, by name or uid",
    "group": "one group, by name",
    "cgroup": "the processes of a cgroup, systemd unit or slice",
    "turn": "when the GPU goes to the next user",
    "timeouts": "how long each part of MPS may stay silent",
    "instance": "one control daemon; `[instance.NAME.limits]` and `[instance.NAME.turn]` hold there for everybody",
    "agent": "the agent itself",
    "history": "what is kept of what happened",
    "hooks": "programs of yours",
}
"""The sections in the order of the reference, with their words."""
OLD_SECTIONS = {"switch": "turn", "hang": "timeouts"}
OLD_KEYS: dict[str, dict[str, str]] = {
    "": {"enforce": "mode"},
    "limits": {
        "threads": "active_threads", "memory": "memory_limit", "total_threads": "total_active_threads",
        "total_memory": "total_memory_limit", "priority": "queue_priority", "over_limits": "on_limit_exceeded",
        "idle_by": "idle_metric", "terminal": "notify_terminal",
    },
    "turn": {
        "after": "time_limit", "action": "on_expiry", "slice": "pause_slice",
        "exempt": "never_preempt",
    },
    "timeouts": {
        "control": "control_daemon", "fault": "fault_recovery", "kill_grace": "sigkill_delay",
    },
    "instance": {
        "apart_users": "max_users", "apart_idle_timeout": "daemon_idle_timeout", "server": "server_scope",
        "bypass": "on_outside_mps", "bypass_grace": "outside_mps_grace",
        "bypass_exempt": "outside_mps_exempt", "control_program": "control_daemon_path",
    },
    "history": {"keep": "retention"},
    "hooks": {"before_end": "pre_terminate", "deadline": "timeout"},
}  # fmt: skip
"""Names from before version 1.0 by section. They are mistakes, and the hint has the new name."""
_IN_ORDER = "remove it: users wait in the order of arrival, and a higher queue_priority goes first"
_SERVER = "remove it: `server` is the time for a server's start, and for its exit, which has at most 15 s"
_QUIT = "remove it: `control_daemon` is the time for `quit`, too"
_FALLBACK = 'remove it: a turn that cannot pause ends after `time_limit`, and never with time_limit = "never"'
_STOP = "remove it: clients have `timeouts.sigkill_delay` to exit"
_SIZE = "remove it: the file takes at most 1 GiB, and `retention` says how long records are kept"
_WARNING = "remove it: `turn.warning_signal` warns programs, and `mpsagent-cli events --follow` shows each warning"
_TERMINATE = "remove it: a client that `terminate_client` has not ended after 5 s is sent SIGTERM"
REMOVED_KEYS: dict[str, dict[str, str]] = {
    "agent": {"stop_timeout": _STOP},
    "history": {"size": _SIZE, "max_size": _SIZE},
    "hooks": {"warning": _WARNING, "turn_warning": _WARNING},
    "turn": {"otherwise": _FALLBACK, "pause_fallback": _FALLBACK},
    "": {
        "kubernetes": "remove it: give mpsagent-kubernetes the options --shares, --share-memory, --processes-per-pod",
    },
    "timeouts": {
        "server_ready": _SERVER,
        "server_start": _SERVER,
        "exit": _SERVER,
        "server_exit": _SERVER,
        "quit": _QUIT,
        "control_daemon_quit": _QUIT,
        "terminate": _TERMINATE,
        "client_terminate": _TERMINATE,
    },
    "instance": {"queue": _IN_ORDER, "queue_order": _IN_ORDER},
}
"""Keys from before version 1.0 that no other key replaces, by section. They are mistakes, and the hint has what holds
now."""
NAMED = frozenset({"user", "group", "cgroup", "instance"})
"""Sections that are written with a name: [user.alice]."""
OF_CGROUPS = ("active_threads", "memory_limit", "total_active_threads", "total_memory_limit", "max_clients")
"""The keys of [limits] that stand in [cgroup.PATTERN]."""


def keys_of(section: str) -> tuple[Key, ...]:
    return tuple(key for key in KEYS if key.section == section)


def key(section: str, name: str) -> Key:
    """Raises KeyError for a key that has no row."""
    for one in KEYS:
        if (one.section, one.name) == (section, name):
            return one
    raise KeyError(f"{section}.{name}")


def default(section: str, name: str) -> Any:
    return key(section, name).default


ATTRIBUTES_OF_CGROUPS: dict[str, str] = {name: key("limits", name).field for name in OF_CGROUPS}
"""The attribute of a share for each key of [cgroup.PATTERN]."""
