"""The policy in force: who may use what, for how long, and where each value was written.

For one user every key is looked up on its own: the user's section (by name, then by uid), then the user's groups in the
order in which the file names them, then everybody's, then the built-in default. A memory limit is looked up for each
device. Built by ``policy_file.load``; nothing here reads a file or depends on a parser.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from mpsagent.mps import units
from mpsagent.mps.limits import Device, Limits
from mpsagent.policy import values
from mpsagent.policy.identity import Identity

Path = tuple[str, ...]
"""A key as its parts: ``("user", "alice", "switch", "after")``."""
REMEMBERED = 1024
"""Users whose rules are kept; then they are looked up anew."""
REMEMBERED_FLOORS = 16


class Origin(NamedTuple):
    """Where a value was written. ``file`` is empty and ``line`` 0 for a built-in default."""

    key: str
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.key}" if self.file else f"{self.key} (built-in default)"


class PolicyError(NamedTuple):
    """One mistake in a policy. ``line`` 0: the file as a whole; ``key`` empty: not about one key."""

    file: str
    line: int
    key: str
    problem: str
    hint: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.key + ': ' if self.key else ''}{self.problem}{'; ' + self.hint if self.hint else ''}"


class Setting(NamedTuple):
    """A value that a file gives, and where."""

    value: Any
    origin: Origin


def key_text(path: Path) -> str:
    """A key as one writes it in TOML: names with dots and other signs in quotes."""
    return ".".join(part if part and all(c.isalnum() or c in "-_" for c in part) else f'"{part}"' for part in path)


@dataclass(frozen=True, slots=True)
class Rules:
    """What applies to one user. Times in seconds; None: no such limit, or never.

    ``switch_after``: how long the user may keep the GPU once somebody else waits. ``enforce_*`` False: only report.
    """

    who: Identity
    threads: values.Threads = 100.0
    memory: tuple[Setting, ...] = ()
    """Memory tables that apply, nearest first; the first one that speaks about a device counts for it."""
    max_clients: int | None = None
    max_runtime: float | None = None
    idle_timeout: float | None = None
    switch_after: float | None = 1800.0
    switch_grace: float = 30.0
    switch_action: Literal["terminate", "quit", "none"] = "terminate"
    switch_exempt: bool = False
    kill_grace: float = 5.0
    before_end_hook: str | None = None
    enforce_limits: bool = True
    enforce_switch: bool = True
    enforce_hang: bool = True
    weights: float = 0.0
    origins: Mapping[str, Origin] = field(default_factory=dict)

    def limits(self, devices: Sequence[Device]) -> Limits:
        """The limits of each of the user's client processes."""
        memory = {}
        for device in devices:
            found = self._memory_on(device)
            size = values.bytes_of(found.value, device) if found is not None else None
            if size is not None:
                memory[device.ordinal] = size
        return Limits(values.percent_of(self.threads, devices, self.weights), memory)

    def origin(self, name: str) -> Origin:
        """Where a value comes from, by its name as a file has it: ``threads``, ``switch.after``, ``enforce.limits``.

        ``memory`` may differ by device; this is the nearest one, ``explain`` has all.
        """
        return self.origins.get(name) or _default_origin(name)

    def explain(self, devices: Sequence[Device]) -> dict[str, Any]:
        """Every value with where it comes from, ready for JSON. ``threads.value`` is None while it depends on devices
        that are not known."""
        limits = self.limits(devices)
        known = bool(devices) or not isinstance(self.threads, values.Multiprocessors)
        counts = {str(d.ordinal): units.multiprocessors_for_percent(limits.threads, d.multiprocessors) for d in devices}
        memory: dict[str, Any] = {}
        for device in devices:
            found = self._memory_on(device)
            memory[str(device.ordinal)] = {
                "value": limits.memory.get(device.ordinal),
                "from": (found.origin if found is not None else _default_origin("memory"))._asdict(),
            }
        answer: dict[str, Any] = {
            "user": self.who.name if self.who.name is not None else str(self.who.uid),
            "uid": self.who.uid,
            "groups": list(self.who.groups),
            "threads": {
                "value": limits.threads if known else None,
                "written": values.written(self.threads),
                "multiprocessors": counts,
                "from": self.origin("threads")._asdict(),
            },
            "memory": {
                "value": {ordinal: entry["value"] for ordinal, entry in memory.items()},
                "written": _memory_written(self.memory),
                "devices": memory,
                "from": self.origin("memory")._asdict(),
            },
        }
        for name, attribute in _PLAIN.items():
            answer[name] = {"value": getattr(self, attribute), "from": self.origin(name)._asdict()}
        return answer

    def _memory_on(self, device: Device) -> Setting | None:
        for setting in self.memory:
            key = values.for_device(setting.value, device)
            if key is not None:
                value: Setting = setting.value[key]
                return value
        return None


# Name of a value, as `origin` takes it -> attribute of Rules.
_PLAIN = {
    "max_clients": "max_clients",
    "max_runtime": "max_runtime",
    "idle_timeout": "idle_timeout",
    "switch.after": "switch_after",
    "switch.grace": "switch_grace",
    "switch.action": "switch_action",
    "switch.exempt": "switch_exempt",
    "kill_grace": "kill_grace",
    "before_end": "before_end_hook",
    "enforce.limits": "enforce_limits",
    "enforce.switch": "enforce_switch",
    "enforce.hang": "enforce_hang",
}
_OF_SECTION = {"kill_grace": "hang", "before_end": "hooks"}
LIMITS_KEYS = ("threads", "memory", "max_clients", "max_runtime", "idle_timeout")
SWITCH_KEYS = ("after", "grace", "action", "exempt")


def _default_origin(name: str) -> Origin:
    if name.startswith("enforce."):
        return Origin("enforce")
    return Origin(name if "." in name else f"{_OF_SECTION.get(name, 'limits')}.{name}")


def _memory_written(tables: Sequence[Setting]) -> object:
    if not tables:
        return None
    table = {
        key: units.limit_text(one.value) if isinstance(one.value, int) else values.written(one.value)
        for key, one in tables[0].value.items()
    }
    return table.get(values.ALL_DEVICES, table) if len(table) == 1 else table


@dataclass(frozen=True, slots=True)
class Policy:
    """A valid policy. ``settings``: every value that a file gives, by its path, in the order of the files.

    Times in seconds. ``devices``: UUIDs that the control daemon shall see (empty: all). ``compute_mode`` is read and
    verified, never set. ``digest`` names the texts it was made of, ``sources`` their files.
    """

    settings: Mapping[Path, Setting] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    digest: str = ""

    enforce: bool = True
    """False: nothing is enforced, whatever a section says."""
    enforce_hang: bool = True
    on_stop: Literal["leave", "quit"] = "leave"
    stop_timeout: float = 30.0
    admin_group: str = "mpsagent-admin"
    parked_user: str = "nobody"

    instance: str = "default"
    pipe_directory: str = "/tmp/nvidia-mps"
    log_directory: str = "/var/log/nvidia-mps"
    devices: tuple[str, ...] = ()
    compute_mode: str | None = None
    control_program: str = "nvidia-cuda-mps-control"

    hang_control: float = 10.0
    hang_server: float = 30.0
    hang_server_ready: float = 30.0
    hang_fault: float = 15.0
    hang_exit: float = 15.0
    hang_quit: float = 10.0
    hang_terminate: float = 5.0
    kill_grace: float = 5.0

    before_end: str | None = None
    hook_deadline: float = 5.0

    groups: tuple[str, ...] = ()
    weights: float = 0.0
    _remembered: dict[Identity, Rules] = field(default_factory=dict, repr=False, compare=False)
    _floors: dict[tuple[Device, ...], Limits] = field(default_factory=dict, repr=False, compare=False)

    def rules(self, who: Identity) -> Rules:
        """What applies to a user (remembered: it is asked for at every event)."""
        found = self._remembered.get(who)
        if found is None:
            if len(self._remembered) >= REMEMBERED:
                self._remembered.clear()
            found = self._remembered[who] = self._resolve(who)
        return found

    def strictest(self, devices: Sequence[Device]) -> Limits:
        """The floor: the least threads and, on each device, the least memory that the policy gives to anybody
        (remembered: it goes through the whole policy)."""
        wanted = tuple(devices)
        found = self._floors.get(wanted)
        if found is None:
            if len(self._floors) >= REMEMBERED_FLOORS:
                self._floors.clear()
            found = self._floors[wanted] = self._strictest(wanted)
        return found

    def _strictest(self, devices: Sequence[Device]) -> Limits:
        threads, memory = 100.0, dict[int, int]()
        for path, setting in self.settings.items():
            if path[-1] == "threads":
                threads = min(threads, values.percent_of(setting.value, devices, self.weights))
            elif path[-1] == "memory":
                for device in devices:
                    key = values.for_device(setting.value, device)
                    size = None if key is None else values.bytes_of(setting.value[key].value, device)
                    if size is not None:
                        memory[device.ordinal] = min(size, memory.get(device.ordinal, size))
        return Limits(threads, memory)

    def origin(self, key: str) -> Origin:
        """Where a setting of the agent comes from, by its key: ``hang.control``, ``instance.gpu0.devices``."""
        for path, setting in self.settings.items():
            if key_text(path) == key:
                return setting.origin
        return Origin(key)

    def sections(self) -> dict[str, Any]:
        """Everything that the files give, by key, with its place; ready for JSON."""
        answer: dict[str, Any] = {}
        for path, setting in self.settings.items():
            value = setting.value
            if path[-1] == "memory":
                value = _memory_written((setting,))
            answer[key_text(path)] = {"value": values.written(value), "from": setting.origin._asdict()}
        return answer

    def _resolve(self, who: Identity) -> Rules:
        levels = list(self._levels(who))
        given: dict[str, Any] = {}
        origins: dict[str, Origin] = {}

        def take(name: str, attribute: str, setting: Setting | None) -> None:
            if setting is not None:
                given[attribute], origins[name] = setting.value, setting.origin

        for key in LIMITS_KEYS:
            found = self._lookup([*((*level, key) for level in levels), ("limits", key)])
            if key == "memory":
                if found:
                    given[key], origins[key] = tuple(found), _nearest(found[0])
            else:
                take(key, key, found[0] if found else None)
        for key in SWITCH_KEYS:
            found = self._lookup([*((*level, "switch", key) for level in levels), ("switch", key)])
            take(f"switch.{key}", f"switch_{key}", found[0] if found else None)
        take("kill_grace", "kill_grace", self.settings.get(("hang", "kill_grace")))
        take("before_end", "before_end_hook", self.settings.get(("hooks", "before_end")))
        for what in ("limits", "switch", "hang"):
            take(f"enforce.{what}", f"enforce_{what}", self._enforced(what, levels))
        return Rules(who=who, weights=self.weights, origins=origins, **given)

    def _levels(self, who: Identity) -> Iterator[Path]:
        if who.name is not None:
            yield ("user", who.name)
        yield ("user", str(who.uid))
        for group in self.groups:
            if group in who.groups:
                yield ("group", group)

    def _lookup(self, paths: Sequence[Path]) -> list[Setting]:
        return [self.settings[path] for path in paths if path in self.settings]

    def _enforced(self, what: str, levels: Sequence[Path]) -> Setting | None:
        for master in MASTER:
            setting = self.settings.get(master)
            if setting is not None and not setting.value:
                return setting
        paths: list[Path] = []
        for level in levels:
            paths += [(*level, "switch", "enforce")] if what == "switch" else []
            paths.append((*level, "enforce"))
        return next(iter(self._lookup([*paths, (what, "enforce")])), None)


MASTER: tuple[Path, ...] = (("enforce",), ("agent", "enforce"))


def _nearest(memory: Setting) -> Origin:
    """The origin of a memory table: its own, or that of the first of its entries."""
    first: Setting = next(iter(memory.value.values()))
    return first.origin


# Attribute of Policy -> the key that sets it.
_AGENT = {
    "on_stop": ("agent", "on_stop"),
    "stop_timeout": ("agent", "stop_timeout"),
    "admin_group": ("agent", "admin_group"),
    "parked_user": ("agent", "parked_user"),
    "enforce_hang": ("hang", "enforce"),
    "hang_control": ("hang", "control"),
    "hang_server": ("hang", "server"),
    "hang_server_ready": ("hang", "server_ready"),
    "hang_fault": ("hang", "fault"),
    "hang_exit": ("hang", "exit"),
    "hang_quit": ("hang", "quit"),
    "hang_terminate": ("hang", "terminate"),
    "kill_grace": ("hang", "kill_grace"),
    "before_end": ("hooks", "before_end"),
    "hook_deadline": ("hooks", "deadline"),
}


def build(settings: Mapping[Path, Setting], sources: Sequence[str], digest: str) -> Policy:
    """A Policy from checked settings, in the order in which the files give them."""
    given: dict[str, Any] = {name: settings[path].value for name, path in _AGENT.items() if path in settings}
    if "hang_server" in given:  # one deadline for a server that is silent, unless its start has its own
        given.setdefault("hang_server_ready", given["hang_server"])
    for path, setting in settings.items():
        if path[0] == "instance":
            given["instance"] = path[1]
            given[path[2]] = setting.value
    enforce = all(settings[path].value for path in MASTER if path in settings)
    given["enforce"] = enforce
    given["enforce_hang"] = enforce and given.get("enforce_hang", True)
    weights = sum(s.value.weight for p, s in settings.items() if isinstance(s.value, values.Weight))
    groups = tuple(dict.fromkeys(path[1] for path in settings if path[0] == "group"))
    known = {one.name for one in fields(Policy)}
    assert given.keys() <= known, given.keys() - known
    return Policy(settings, tuple(sources), digest, groups=groups, weights=weights, **given)
