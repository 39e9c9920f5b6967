"""Everything a decision may look at: what MPS says, what the kernel says, who people are and what the policy says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpsagent.core.model import Client, Server, State, Status
from mpsagent.mps.limits import Device, Limits
from mpsagent.policy.identity import Identity
from mpsagent.policy.policy import Policy, Rules


@dataclass(frozen=True, slots=True)
class Process:
    """A live process as the kernel knows it. ``start``: its start time, which tells it from a later process with the
    same pid; ``cpu_idle_since``: when it last used CPU time, if that is known."""

    uid: int
    start: int = 0
    stopped: bool = False
    cpu_idle_since: float | None = None


@dataclass(frozen=True, slots=True)
class Drain:
    """Maintenance: no new user is served. ``until`` None: running work may take as long as it wants."""

    since: float
    until: float | None


@dataclass(frozen=True, slots=True)
class World:
    """``processes`` holds the live ones among clients, waiting clients, servers and the control daemon: a pid that is
    missing there has ended. ``control_alive`` is the kernel's word on the control daemon; ``door_open`` the mode of the
    pipe directory; ``silent_since`` when the oldest command was sent that the daemon has still not answered;
    ``unreachable_since`` when its socket was found missing."""

    state: State
    policy: Policy
    devices: tuple[Device, ...] = ()
    identities: Mapping[int, Identity] = field(default_factory=dict)
    processes: Mapping[int, Process] = field(default_factory=dict)
    control_alive: bool = True
    door_open: bool = True
    silent_since: float | None = None
    unreachable_since: float | None = None
    parked_uid: int = 65534
    drain: Drain | None = None
    rules_cache: dict[int, Rules] = field(default_factory=dict)
    """The caller keeps it between calls and empties it when the policy or an identity changes."""

    def rules(self, uid: int) -> Rules:
        """The rules for a uid. While the name service has not answered, a uid has no name and no groups."""
        found = self.rules_cache.get(uid)
        if found is None:
            found = self.policy.rules(self.identities.get(uid, Identity(uid)))
            self.rules_cache[uid] = found
        return found

    @property
    def limits_enforced(self) -> bool:
        """Whether anybody's limits are enforced. If nobody's are, the daemon's defaults are left alone."""
        settings = self.policy.settings
        everybody = settings.get(("limits", "enforce"))
        if not self.policy.enforce or everybody is None or everybody.value:
            return self.policy.enforce
        return any(
            path[0] in ("user", "group") and path[2:] == ("enforce",) and setting.value
            for path, setting in settings.items()
        )

    def floor(self) -> Limits:
        """The strictest limits in the policy: what a server gets that nobody armed for."""
        return self.policy.strictest(self.devices) if self.limits_enforced else Limits()

    def limits(self, uid: int) -> Limits:
        """The limits of a user's clients; the floor for somebody whose name is not known yet."""
        if uid == self.parked_uid or uid not in self.identities:
            return self.floor()
        rules = self.rules(uid)
        return rules.limits(self.devices) if rules.enforce_limits else Limits()

    def alive(self, pid: int) -> bool:
        return pid in self.processes

    def holder(self) -> Server | None:
        """The server whose user has the GPU now: not the parked one and not one that is leaving."""
        server = self.state.holder()
        if server is None or server.uid == self.parked_uid or server.status is Status.SHUTTING_DOWN:
            return None
        return server

    def others_waiting(self, server: Server) -> tuple[int, ...]:
        """Users who wait while this server holds the GPU. A client that has died in the pending list still gets its
        server, but nobody's turn ends for it."""
        live = (w.uid for w in self.state.waiting if not w.gone)
        return tuple(uid for uid in dict.fromkeys(live) if uid != server.uid)

    def clients(self, server: Server) -> tuple[Client, ...]:
        return self.state.clients_of(server.pid)


def same_limits(left: Limits, right: Limits) -> bool:
    """Equal as MPS takes them: percentages to one decimal, memory to one MiB."""
    if left == right:
        return True
    if abs(left.threads - right.threads) >= 0.05 or set(left.memory) != set(right.memory):
        return False
    return all(size >> 20 == right.memory[device] >> 20 for device, size in left.memory.items())


def exceeds(given: Limits, wanted: Limits) -> bool:
    """True when ``given`` lets a client use more than ``wanted`` of anything."""
    if given.threads >= wanted.threads + 0.05:
        return True
    return any(device not in given.memory or given.memory[device] >> 20 > size >> 20
               for device, size in wanted.memory.items())  # fmt: skip


def limits_text(limits: Limits) -> str:
    """``20 % of threads, memory 2048 MiB on device 0``, for reasons and reports."""
    parts = [f"{limits.threads:.1f} % of threads"]
    parts += [f"{size >> 20} MiB on device {device}" for device, size in sorted(limits.memory.items())]
    return ", ".join(parts)
