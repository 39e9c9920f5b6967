"""Every key of the policy language, one row each.

From these rows come the checks, the JSON Schema, the defaults, the attributes of `Rules` and `Policy`, what `explain`
shows, and the reference in docs/policy.md with the manual page. A new key is a new row, and a typed attribute.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from mpsagent.policy import kinds, parse
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
_REPORT = "`false`: only report what would be done"
_WHO, _OF, _ALL = Scope.USER, Scope.INSTANCE, Scope.AGENT


def _deadline(name: str, words: str, default: float | None, absent: str = "", low: float = 0.1) -> Key:
    """A row of [hang]."""
    return Key("hang", name, kinds.duration(low, DAY), _ALL, words, default, absent, attribute=f"hang_{name}")


KEYS: tuple[Key, ...] = (
    Key("", "enforce", FLAG, _ALL, "`false`: nothing is enforced, only reported", True),
    # --- what a user may have
    Key(
        "limits", "access",
        kinds.choice({"allow": "clients are admitted", "deny": "clients are refused, with an error of CUDA's"}),
        _WHO, "who may use MPS at all", "allow",
    ),
    Key("limits", "threads", kinds.THREADS, _WHO, "share of the multiprocessors of each client process", 100.0),
    Key("limits", "memory", kinds.MEMORY, _WHO, "device memory of each client process", (), "no limit"),
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
        "limits", "total_threads", kinds.TOTAL_THREADS, _WHO,
        "share of the multiprocessors of all client processes of one user together", None, "no limit",
    ),
    Key(
        "limits", "total_memory", kinds.TOTAL_MEMORY, _WHO,
        "memory on each device of all client processes of one user together", None, "no limit",
    ),
    Key(
        "limits", "priority", kinds.whole(0, 100), _WHO,
        "whose turn is next: of the users who wait, one with the largest number", 0,
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
        "limits", "over_limits",
        kinds.choice({
            "report": "it is reported",
            "memory": "it is reported; one that uses too much memory is ended, gently first, when it has done so for "
            "10 s in sum",
            "terminate": "either is reported, and ended so",
        }),
        _WHO, "what becomes of a client that MPS does not hold to its limits: it uses more memory than it was given, "
        "or asks for partitioning by context in its environment", "memory",
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
        "limits", "idle_by",
        kinds.choice({
            "cpu": "none of them used CPU time",
            "gpu": "the GPU's utilisation was below 1 %",
        }),
        _WHO, "what idle means for `idle_timeout`", "cpu",
    ),
    Key(
        "limits", "terminal", FLAG, _WHO,
        "`true`: a process that waits for more than 10 s is told so on its terminal, when it is served, and before its "
        "turn ends: one line each", False,
    ),
    Key("limits", "enforce", FLAG, _WHO, _REPORT, True, attribute="enforce_limits", label="enforce.limits"),
    # --- turns
    Key(
        "switch", "after", kinds.duration(0, LONG, never=True), _WHO,
        "how long a user may keep the GPU once another user waits", 1800.0,
        attribute="switch_after", label="switch.after",
    ),
    Key(
        "switch", "grace", kinds.duration(0, DAY), _WHO, "time between the warning and the action", 30.0,
        attribute="switch_grace", label="switch.grace",
    ),
    Key(
        "switch", "action",
        kinds.choice({
            "terminate": "each client is ended, gently first",
            "quit": "the control daemon is restarted",
            "pause": 'its processes are frozen, keep their memory, and go on when it is their turn again; needs '
            '`server = "shared"`',
            "none": "only the warning",
        }),
        _WHO, "what happens at the end of a turn", "terminate", attribute="switch_action", label="switch.action",
    ),
    Key(
        "switch", "slice", kinds.duration(1, DAY), _WHO,
        'with `action = "pause"`: how long a turn lasts while another user waits', 30.0,
        attribute="switch_slice", label="switch.slice",
    ),
    Key(
        "switch", "otherwise",
        kinds.choice({"terminate": "each client is ended, gently first", "none": "only the warning"}),
        _WHO, 'with `action = "pause"`: what happens after `after` and `grace` where a pause is not possible',
        "terminate", attribute="switch_otherwise", label="switch.otherwise",
    ),
    Key(
        "switch", "warning_signal",
        kinds.choice(dict.fromkeys(("none", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGTERM"), "")), _WHO,
        "sent with the warning to the clients of the user whose turn ends, if they handle it",
        "none", attribute="switch_warning_signal", label="switch.warning_signal",
    ),
    Key(
        "switch", "exempt", FLAG, _WHO, "`true`: the GPU is never taken from this user", False,
        attribute="switch_exempt", label="switch.exempt",
    ),
    Key("switch", "enforce", FLAG, _WHO, _REPORT, True, attribute="enforce_switch", label="enforce.switch"),
    # --- how long each part of MPS may stay silent
    _deadline("control", "the control daemon answers a command", 10.0),
    _deadline("server", "a server answers", 30.0),
    _deadline("server_ready", "a server gets ready, at its start and after a fault", 30.0, "as `server`"),
    _deadline("fault", "after a fault, clients with a sticky error leave by themselves", 15.0),
    _deadline("exit", "a server exits after its shutdown", 15.0),
    _deadline("quit", "`quit` returns", 10.0),
    _deadline("terminate", "`terminate_client` succeeds", 5.0),
    Key(
        "hang", "kill_grace", kinds.duration(0, DAY), _ALL, "a process ends after SIGTERM, before SIGKILL", 5.0,
        rules="kill_grace",
    ),
    Key("hang", "enforce", FLAG, _WHO, _REPORT, True, attribute="enforce_hang", label="enforce.hang"),
    # --- the control daemon
    Key("instance", "devices", kinds.DEVICES, _OF, "the GPUs that it serves (empty: all)", ()),
    Key(
        "instance", "sharing",
        kinds.choice(
            {
                "turns": "one user at a time; the others wait at the gate",
                "together": "all users at once on one server for all, each client with its own limits; a fault of one "
                "ends the clients of all; driver 580 and later",
                "apart": "all users at once, each on a control daemon and a server of the user's own, which run while "
                "the user has clients; faults stay with their user",
            },
        ),
        _OF, "how users share its GPUs; with `enforce = false` at the top `apart`", "apart",
    ),
    Key(
        "instance", "apart_users", kinds.whole(1, 128), _OF,
        'with `sharing = "apart"`: users with a control daemon at a time; others are held', 64,
    ),
    Key(
        "instance", "apart_idle_timeout", kinds.duration(1, LONG), _OF,
        'with `sharing = "apart"`: the control daemon of a user who has had no client for so long ends; at once while '
        "others wait for its place", 60.0,
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
        "instance", "server",
        kinds.choice({
            "own": "a server for each turn, which runs as its user",
            "shared": "one server for all users that stays; driver 580 and later",
        }),
        _OF, "which MPS servers it runs while users take turns", "own",
    ),
    Key(
        "instance", "queue",
        kinds.choice({
            "arrival": "who came first",
            "fair": "who has had the least GPU time in the last day",
        }),
        _OF, "whose turn is next, of the users with the same `priority`", "arrival",
    ),
    Key(
        "instance", "compute_mode",
        kinds.choice({
            "leave": "it stays as it is, and is not compared",
            "default": "programs outside MPS run beside it",
            "exclusive-process": "programs outside MPS fail",
        }),
        _OF, "the GPUs' compute mode while the control daemon runs; set by its unit (systemd), verified by the agent",
        "leave",
    ),
    Key(
        "instance", "bypass",
        kinds.choice({
            "report": "it is reported",
            "terminate": "it is warned of, then gets SIGTERM, and SIGKILL after `hang.kill_grace`",
        }),
        _OF, "what becomes of a process that computes on its GPUs outside MPS", "report",
    ),
    Key(
        "instance", "bypass_grace", kinds.duration(1, DAY), _OF,
        'with `bypass = "terminate"`: how long such a process may go on after the warning', 60.0,
    ),
    Key(
        "instance", "bypass_exempt", kinds.NAMES, _OF,
        "users whose processes outside MPS are never ended: monitoring, for instance (root's never are)", (),
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
        "instance", "control_program", kinds.text(parse.program, "absolute path, or a name on PATH"), _OF,
        "NVIDIA's control daemon", "nvidia-cuda-mps-control",
    ),
    # --- the agent itself
    Key("agent", "enforce", FLAG, _ALL, "as `enforce` at the top", True),
    Key(
        "agent", "placement",
        kinds.choice({
            "fixed": "the first instance that names the user, a group of the user's, or neither users nor groups",
            "least-loaded": "of those the one with the fewest users and clients; users with clients stay there",
            "own": "the one in whose directory the program looks for MPS: each has its own",
        }),
        _ALL, "which instance a user's clients go to, where there are several", "fixed",
    ),
    Key(
        "agent", "on_stop", kinds.choice({"leave": "MPS goes on", "quit": "MPS is stopped as well"}), _ALL,
        "what happens when the agent is stopped", "leave",
    ),
    Key(
        "agent", "stop_timeout", kinds.duration(0, DAY), _ALL,
        'with `on_stop = "quit"`: how long clients may take to end', 30.0,
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
        "history", "keep", kinds.duration(3600, LONG), _ALL, "how long what happened is kept",
        400 * DAY, attribute="history_keep",
    ),
    Key(
        "history", "size", kinds.SIZE, _ALL, "how large its file may get; the oldest records go first, then sessions",
        1 << 30, attribute="history_size",
    ),
    # --- pods
    Key(
        "kubernetes", "shares", kinds.whole(1, 1000), _ALL,
        "into how many shares the GPU is divided: the most `nvidia.com/mps-share` that pods have together", 100,
        attribute="kubernetes_shares",
    ),
    Key(
        "kubernetes", "share_memory", FLAG, _ALL,
        "`true`: a share is as much of the memory as of the threads; `false`: the user's limit of memory counts", True,
    ),
    Key(
        "kubernetes", "processes", kinds.whole(1, 48), _ALL,
        "how many processes of a pod have its shares together, each an equal part; the next one waits", 1,
        attribute="kubernetes_processes",
    ),
    # --- programs of the administrator's
    Key(
        "hooks", "before_end", kinds.path(1024), _ALL,
        "a program that is run before a client is ended by force, with JSON on its stdin", None, "none",
        rules="before_end_hook",
    ),
    Key(
        "hooks", "warning", kinds.path(1024), _ALL,
        "a program that is run with the warning before a turn's end, with JSON on its stdin", None, "none",
        attribute="warning_hook",
    ),
    Key(
        "hooks", "deadline", kinds.duration(0.1, 600), _ALL, "how long it may take", 5.0, attribute="hook_deadline",
    ),
)  # fmt: skip

SECTIONS: dict[str, str] = {
    "limits": "what one client process may use, and what one user may do",
    "user": "one user, by name or uid",
    "group": "one group, by name",
    "cgroup": "the processes of a cgroup, systemd unit or slice",
    "switch": "when the GPU goes to the next user",
    "hang": "how long each part of MPS may stay silent",
    "instance": "one control daemon; `[instance.NAME.limits]` and `[instance.NAME.switch]` hold there for everybody",
    "agent": "the agent itself",
    "history": "what is kept of what happened",
    "kubernetes": "what pods may ask for",
    "hooks": "programs of yours",
}
"""The sections in the order of the reference, with their words."""
NAMED = frozenset({"user", "group", "cgroup", "instance"})
"""Sections that are written with a name: [user.alice]."""
OF_CGROUPS = ("threads", "memory", "total_threads", "total_memory", "max_clients")
"""The keys of [limits] that stand in [cgroup.PATTERN]."""

MASTER: tuple[Path, ...] = (("enforce",), ("agent", "enforce"))
"""False in one of these: nothing is enforced, whatever a section says."""


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
