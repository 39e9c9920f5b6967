"""The policy in force: who may use what, for how long, and where each value was written.

For one user every key is looked up on its own: the user's section (by name, then by uid), then the user's groups in the
order in which the file names them, then everybody's, then the built-in default. A memory limit is looked up for each
device. Built by ``files.load``; nothing here reads a file or depends on a parser. Names, defaults and scopes of the
attributes are those of the rows in `keys`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from mpsagent.mps import units
from mpsagent.mps.limits import Device, Limits, Total
from mpsagent.policy import values
from mpsagent.policy.identity import Identity
from mpsagent.policy.keys import ATTRIBUTES_OF_CGROUPS, KEYS, Key, Scope, default
from mpsagent.policy.origins import Origin as Origin
from mpsagent.policy.origins import Path as Path
from mpsagent.policy.origins import Setting as Setting
from mpsagent.policy.origins import key_text as key_text
from mpsagent.policy.shares import Share, named

REMEMBERED = 10_000
"""Users whose rules are kept: more than the gate holds, for they are asked for all of them at every event."""
REMEMBERED_DEVICES = 16
"""Sets of devices whose fail-safe limits are kept."""

IN_RULES: dict[str, Key] = {key.shown: key for key in KEYS if key.in_rules}
"""What Rules have, by the names that `origin` and `explain` use."""


REPORTING: dict[str, Any] = {
    one.field: one.default
    for one in KEYS
    if one.section == "instance" and one.name in ("sharing", "max_users", "compute_mode", "on_outside_mps")
}
"""Settings of each instance while nothing is enforced: every user is admitted at once, and no program fails because of
the compute mode."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What applies to one user, by the words of `keys`. Times in seconds; None: no such limit, or never."""

    who: Identity
    access: Literal["allow", "deny"] = default("limits", "access")
    threads: values.Threads = default("limits", "active_threads")  # noqa: RUF009  (a frozen value)
    memory: tuple[Setting, ...] = default("limits", "memory_limit")
    """Memory tables that apply, nearest first; the first one that speaks about a device counts for it."""
    max_clients: int | None = default("limits", "max_clients")
    max_contexts: int | None = default("limits", "max_contexts")
    total_threads: values.TotalThreads | None = None
    total_memory: values.Memory | None = None
    priority: int = default("limits", "queue_priority")
    client_priority: Literal["normal", "below-normal"] = default("limits", "client_priority")
    over_limits: Literal["report", "terminate-memory", "terminate"] = default("limits", "on_limit_exceeded")
    terminal: bool = default("limits", "notify_terminal")
    max_runtime: float | None = default("limits", "max_runtime")
    idle_timeout: float | None = default("limits", "idle_timeout")
    idle_by: str = default("limits", "idle_metric")
    switch_after: float | None = default("turn", "time_limit")
    switch_grace: float = default("turn", "grace")
    switch_action: Literal["terminate", "restart-mps", "pause", "none"] = default("turn", "on_expiry")
    switch_slice: float = default("turn", "pause_slice")
    switch_warning_signal: str = default("turn", "warning_signal")
    switch_exempt: bool = default("turn", "never_preempt")
    kill_grace: float = default("timeouts", "sigkill_delay")
    before_end_hook: str | None = default("hooks", "pre_terminate")
    mode: Literal["enforce", "report"] = default("", "mode")
    weights: float = 0.0
    origins: Mapping[str, Origin] = field(default_factory=dict)

    @property
    def enforce(self) -> bool:
        """Return False if rules about this user are only reported."""
        return self.mode == "enforce"

    @property
    def has_to_leave(self) -> bool:
        """The GPU is taken from this user at some time while others wait."""
        enforced = self.enforce and self.forced_end != "none" and not self.switch_exempt
        return enforced and self.switch_after is not None

    @property
    def forced_end(self) -> Literal["terminate", "restart-mps", "none"]:
        """What happens at the end of a turn that does not end in a pause."""
        return "terminate" if self.switch_action == "pause" else self.switch_action

    def limits(self, devices: Sequence[Device]) -> Limits:
        """The limits of each of the user's client processes."""
        memory = {}
        for device in devices:
            found = self._memory_on(device)
            size = values.bytes_of(found.value, device) if found is not None else None
            if size is not None:
                memory[device.ordinal] = size
        lower = self.client_priority == "below-normal"
        return Limits(values.percent_of(self.threads, devices, self.weights), memory, lower)

    def total(self, devices: Sequence[Device]) -> Total | None:
        """What all of the user's client processes may use together; None: there is no such bound."""
        return values.total(self.total_threads, self.total_memory, self.threads, devices)

    def limits_within(self, share: Share, devices: Sequence[Device]) -> Limits:
        """The limits of a client process with a share of its own. It may be less than the user's processes get, and is
        not more than the share's total; more than theirs only where the user has a total, and up to that."""
        own, total = self.limits(devices), self.total(devices) or Total()
        most = own.threads if total.threads is None else total.threads
        asked = most if share.threads is None else values.percent_of(share.threads, devices, self.weights)
        threads = own.threads if share.threads is None else min(asked, most)
        memory = dict(own.memory)
        for device in devices:
            key = values.for_device(share.memory or {}, device)
            if key is None or share.memory is None:
                continue
            sizes = [values.bytes_of(share.memory[key], device)]
            sizes.append(total.memory.get(device.ordinal, own.memory.get(device.ordinal)))
            known = [size for size in sizes if size is not None]
            if known:
                memory[device.ordinal] = min(known)
        return (share.total(devices) or Total()).cap(replace(own, threads=threads, memory=memory))

    def key(self, name: str) -> str:
        """A value's place, as a policy has it."""
        return self.origin(name).key

    def place(self, name: str) -> str:
        """The key of a value with its file and line."""
        return self.origin(name).place

    def origin(self, name: str) -> Origin:
        """Where a value comes from, by its name as a file has it. ``memory_limit``: the nearest one."""
        return self.origins.get(name) or _default_origin(name)

    def explain(self, devices: Sequence[Device]) -> dict[str, Any]:
        """Every value with where it comes from, ready for JSON. ``active_threads`` is None while it depends on devices
        that are not known."""
        answer: dict[str, Any] = {
            "user": self.who.name if self.who.name is not None else str(self.who.uid),
            "uid": self.who.uid,
            "groups": list(self.who.groups),
        }
        limits = self.limits(devices)
        for name, key in IN_RULES.items():
            if name == "active_threads":
                told = self._explain_threads(limits, devices)
            elif name == "memory_limit":
                told = self._explain_memory(limits, devices)
            else:
                told = {"value": values.written(getattr(self, key.in_rules))}
            answer[name] = {**told, "from": self.origin(name)._asdict()}
        return answer

    def _explain_threads(self, limits: Limits, devices: Sequence[Device]) -> dict[str, Any]:
        known = bool(devices) or not isinstance(self.threads, values.Multiprocessors)
        counts = {str(d.ordinal): units.multiprocessors_for_percent(limits.threads, d.multiprocessors) for d in devices}
        return {
            "value": limits.threads if known else None,
            "written": values.written(self.threads),
            "multiprocessors": counts,
        }

    def _explain_memory(self, limits: Limits, devices: Sequence[Device]) -> dict[str, Any]:
        by_device: dict[str, Any] = {}
        for device in devices:
            found = self._memory_on(device)
            origin = found.origin if found is not None else _default_origin("memory_limit")
            by_device[str(device.ordinal)] = {"value": limits.memory.get(device.ordinal), "from": origin._asdict()}
        return {
            "value": {ordinal: entry["value"] for ordinal, entry in by_device.items()},
            "written": _memory_written(self.memory),
            "devices": by_device,
        }

    def _memory_on(self, device: Device) -> Setting | None:
        for setting in self.memory:
            key = values.for_device(setting.value, device)
            if key is not None:
                value: Setting = setting.value[key]
                return value
        return None


@lru_cache
def _default_origin(name: str) -> Origin:
    key = IN_RULES.get(name)
    return Origin(name if key is None else key_text(key.path))


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
    """A valid policy. ``settings``: every value that a file gives, by its path, in the order of the files; ``digest``
    names the texts it was made of, ``sources`` their files, ``named`` the sections of users, groups and instances. What
    the other attributes mean is in `keys`; times in seconds. What an instance has is that of the first one here:
    :mod:`mpsagent.policy.instances` makes a policy for each.
    """

    settings: Mapping[Path, Setting] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    digest: str = ""

    enforce: bool = True
    """False with ``mode = "report"`` at the top: nothing is enforced, whatever a section says."""
    on_stop: Literal["leave", "quit"] = default("agent", "on_stop")
    admin_group: str = default("agent", "admin_group")
    cdi_file: str | None = default("agent", "cdi_file")
    placement: Literal["fixed", "least-loaded", "by-directory"] = default("agent", "placement")

    instance: str = "default"
    sharing: Literal["turns", "one-server", "per-user"] = default("instance", "sharing")
    apart_users: int = default("instance", "max_users")
    apart_idle_timeout: float = default("instance", "daemon_idle_timeout")
    server: Literal["user", "all"] = default("instance", "server_scope")
    pipe_directory: str = default("instance", "pipe_directory")
    log_directory: str = default("instance", "log_directory")
    log_size: int = default("instance", "log_size")
    devices: tuple[str, ...] = default("instance", "devices")
    only_users: tuple[str, ...] = default("instance", "users")
    only_groups: tuple[str, ...] = default("instance", "groups")
    compute_mode: Literal["unchanged", "default", "exclusive-process"] = default("instance", "compute_mode")
    bypass: Literal["report", "terminate"] = default("instance", "on_outside_mps")
    bypass_grace: float = default("instance", "outside_mps_grace")
    bypass_exempt: tuple[str, ...] = default("instance", "outside_mps_exempt")
    control_daemon_path: str = default("instance", "control_daemon_path")
    exclusive: str = ""
    """The section of an instance that serves one GPU in EXCLUSIVE_PROCESS mode, where users take turns because of that;
    else empty."""

    hang_control: float = default("timeouts", "control_daemon")
    hang_server: float = default("timeouts", "server")
    hang_fault: float = default("timeouts", "fault_recovery")
    kill_grace: float = default("timeouts", "sigkill_delay")

    before_end: str | None = default("hooks", "pre_terminate")
    hook_deadline: float = default("hooks", "timeout")

    history_keep: float = default("history", "retention")

    users: frozenset[str] = frozenset()
    groups: tuple[str, ...] = ()
    denies: bool = True
    """Some section may refuse a user (``access = "deny"``)."""
    prioritised: bool = False
    """Some user or group has another ``queue_priority`` than everybody."""
    by_uid: bool = True
    """The uid alone says what applies to a user: no section is for a name or a group."""
    weights: float = 0.0
    named: Mapping[Path, Origin] = field(default_factory=dict)
    _remembered: dict[Identity, Rules] = field(default_factory=dict, init=False, repr=False, compare=False)
    _by_sections: dict[tuple[Path, ...], Rules] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The same for all users to whom the same sections apply: thousands may come to whom none does."""
    _fail_safes: dict[tuple[Device, ...], Limits] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def terminal(self) -> bool:
        """Some user is told on terminals."""
        every = self.settings.get(("limits", "notify_terminal"))
        return every is None or any(path[-1] == "notify_terminal" and one.value for path, one in self.settings.items())

    @property
    def multiuser(self) -> bool:
        """The control daemon runs one server for all users (``--multiuser-server``)."""
        return self.sharing == "one-server" or (self.sharing == "turns" and self.server == "all")

    def rules(self, who: Identity) -> Rules:
        """What applies to a user (remembered: it is asked for at every event)."""
        found = self._remembered.get(who)
        if found is None:
            if len(self._remembered) >= REMEMBERED:
                self._remembered.clear()
                self._by_sections.clear()
            levels = tuple(self._levels(who))
            known = self._by_sections.get(levels) or self._by_sections.setdefault(levels, self._resolve(who, levels))
            found = self._remembered[who] = known if known.who == who else replace(known, who=who)
        return found

    def fail_safe(self, devices: Sequence[Device]) -> Limits:
        """The least of everything that the policy gives anyone, for a client whose own limits cannot be confirmed.
        Remembered: it goes through the whole policy."""
        wanted = tuple(devices)
        found = self._fail_safes.get(wanted)
        if found is None:
            if len(self._fail_safes) >= REMEMBERED_DEVICES:
                self._fail_safes.clear()
            found = self._fail_safes[wanted] = self._least(wanted)
        return found

    def _least(self, devices: Sequence[Device]) -> Limits:
        threads, memory, below_normal = 100.0, dict[int, int](), False
        for path, setting in self.settings.items():
            if path[-1] in ("active_threads", "total_active_threads"):  # a process of a cgroup may have its total alone
                threads = min(threads, values.percent_of(setting.value, devices, self.weights))
            elif path[-1] in ("memory_limit", "total_memory_limit"):
                for device in devices:
                    whole = {values.ALL_DEVICES: setting}
                    table: Mapping[str, Any] = setting.value if path[-1] == "memory_limit" else whole
                    key = values.for_device(table, device)
                    size = None if key is None else values.bytes_of(table[key].value, device)
                    if size is not None:
                        memory[device.ordinal] = min(size, memory.get(device.ordinal, size))
            elif path[-1] == "client_priority":
                below_normal = below_normal or setting.value == "below-normal"
        return Limits(threads, memory, below_normal)

    def origin(self, key: str) -> Origin:
        """Where a setting of the agent comes from, by its key: ``instance.gpu0.devices``."""
        for path, setting in self.settings.items():
            if key_text(path) == key:
                return setting.origin
        return Origin(key)

    def sections(self) -> dict[str, Any]:
        """Everything that the files give, by key, with its place; ready for JSON."""
        answer: dict[str, Any] = {}
        for path, setting in self.settings.items():
            value = setting.value
            if path[-1] == "memory_limit":
                value = _memory_written((setting,))
            answer[key_text(path)] = {"value": values.written(value), "from": setting.origin._asdict()}
        return answer

    @property
    def cgroups(self) -> tuple[Path, ...]:
        """The sections of cgroups, in the order of the files."""
        return tuple(path for path in self.named if path[0] == "cgroup")

    def share(self, cgroup: str | None) -> Share | None:
        """What the first section that names this cgroup says."""
        for path in self.cgroups if cgroup is not None else ():
            if (job := named(path[1], cgroup or "")) is not None:
                given = {
                    attribute: self.settings[*path, name].value
                    for name, attribute in ATTRIBUTES_OF_CGROUPS.items()
                    if (*path, name) in self.settings
                }
                if "memory" in given:
                    given["memory"] = {device: one.value for device, one in given["memory"].items()}
                return Share(key_text(path), job=job, origin=self.named[path], **given)
        return None

    def section(self, *paths: Path) -> Rules:
        """What applies to a user whom only these sections name (an empty path: none), beside the sections for all."""
        users_first = sorted((path for path in paths if path), key=lambda path: path[0] != "user")
        return self._resolve(Identity(-1), users_first)

    def _resolve(self, who: Identity, levels: Sequence[Path]) -> Rules:
        given: dict[str, Any] = {}
        origins: dict[str, Origin] = {}
        for name, key in IN_RULES.items():
            found = self._lookup([*_places(key, levels), key.path])
            if key.name == "mode" and not self.enforce:
                found = self._lookup([key.path])
            if found:
                memory = name == "memory_limit"
                given[key.in_rules] = tuple(found) if memory else found[0].value
                origins[name] = _nearest(found[0]) if memory else found[0].origin
        return Rules(who=who, weights=self.weights, origins=origins, **given)

    def _levels(self, who: Identity) -> Iterator[Path]:
        yield from (("user", name) for name in (who.name or "", str(who.uid)) if name in self.users)
        yield from (("group", group) for group in self.groups if group in who.groups)

    def _lookup(self, paths: Sequence[Path]) -> list[Setting]:
        return [self.settings[path] for path in paths if path in self.settings]


def _places(key: Key, levels: Sequence[Path]) -> list[Path]:
    """Where a key may stand for one user, nearest first."""
    if key.scope is not Scope.USER:
        return []
    inner = key.path if key.section == "turn" else (key.name,)
    return [(*level, *inner) for level in levels]


def _nearest(memory: Setting) -> Origin:
    """The origin of a memory table: its own, or that of the first of its entries."""
    first: Setting = next(iter(memory.value.values()))
    return first.origin


def build(
    settings: Mapping[Path, Setting], named: Mapping[Path, Origin], sources: Sequence[str], digest: str
) -> Policy:
    """A Policy from checked settings, in the order in which the files give them."""
    given: dict[str, Any] = {}
    for key in KEYS:
        if key.scope is Scope.AGENT and key.path in settings:
            given[key.field] = settings[key.path].value
    for _, name in [path for path in named if path[0] == "instance"][:1]:
        given |= {"instance": name, **of_instance(settings, name)}
    given["enforce"] = enforced(settings)
    weights = weights_of(settings)
    users = frozenset(path[1] for path in settings if path[0] == "user")
    groups = tuple(dict.fromkeys(path[1] for path in settings if path[0] == "group"))
    denies = any(path[-1] == "access" and one.value == "deny" for path, one in settings.items())
    by_uid = not groups and all(name.isdecimal() for name in users)
    prioritised = any(path[0] in ("user", "group") and path[-1] == "queue_priority" for path in settings)
    return Policy(
        settings, tuple(sources), digest, users=users, groups=groups, denies=denies, prioritised=prioritised,
        by_uid=by_uid, weights=weights, named=named, **given,
    )  # fmt: skip


def of_instance(settings: Mapping[Path, Setting], name: str) -> dict[str, Any]:
    """What the section of an instance gives, by the attributes of Policy."""
    rows = [key for key in KEYS if key.scope is Scope.INSTANCE]
    found = {key.field: settings.get(("instance", name, key.name)) for key in rows}
    given = {field: one.value for field, one in found.items() if one is not None}
    return given if enforced(settings) else {**given, **REPORTING}


def enforced(settings: Mapping[Path, Setting]) -> bool:
    """Return whether the policy is enforced at all."""
    mode = settings.get(("mode",))
    return mode is None or mode.value == "enforce"


def weights_of(settings: Mapping[Path, Setting]) -> float:
    return sum(s.value.weight for s in settings.values() if isinstance(s.value, values.Weight))
