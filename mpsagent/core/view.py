"""What a rule may look at: the state, and what follows from it for policy and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpsagent.core.actions import Admissions
from mpsagent.core.model import Attachment, Client, Server, State, Status
from mpsagent.mps.limits import Limits
from mpsagent.policy.identity import Identity
from mpsagent.policy.policy import Policy, Rules

SHARED_UID = 0
"""The user of a multi-user server, and what its log says for everyone (recording 08, G8)."""


_NONE = Attachment(0.0)


@dataclass(frozen=True, slots=True)
class Ending:
    """A client that is being ended. ``blocks``: ``terminate_client`` has been sent for it and not been answered, so the
    control daemon waits for it. ``signalled``: it is past that. ``at``: when its present step began."""

    pid: int
    blocks: bool
    signalled: bool
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """Who has the GPU. ``contested``: since when another user waits for it; ``warned``, ``ending``: when the end of
    the turn was announced and begun."""

    uid: int
    since: float
    contested: float | None = None
    warned: float | None = None
    ending: float | None = None

    def deadlines(self, rules: Rules) -> tuple[float, float] | None:
        """When the user is warned and when the turn ends; None while it is not contested or may last for ever."""
        if self.contested is None or rules.switch_exempt or rules.switch_after is None:
            return None
        warn = self.contested + rules.switch_after
        return warn, max(warn, self.warned or warn) + rules.switch_grace


@dataclass(frozen=True, slots=True)
class View:
    """``ending``: the clients on their way out; ``turn``: who has the GPU; ``closing``: its user is to be shut out;
    ``served``: when each user's last turn ended; ``sent``: the admissions that the gate was told last, and their
    number; ``given_up``: why the agent no longer tries to start the control daemon or its servers; ``pause_until``:
    until when servers that did not start are not tried."""

    state: State
    ending: Mapping[int, Ending] = field(default_factory=dict)
    turn: Turn | None = None
    closing: bool = False
    served: Mapping[int, float] = field(default_factory=dict)
    sent: tuple[int, Admissions] | None = None
    given_up: str | None = None
    pause_until: float | None = None
    _found: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)
    """What was asked before: the rules ask for the queue several times in a row."""

    @property
    def policy(self) -> Policy:
        return self.state.policy

    @property
    def control_alive(self) -> bool:
        return self.state.control is not None and self.state.control.proven

    @property
    def shared(self) -> bool:
        """One multi-user server for all: as the control daemon was started, which a changed policy does not change."""
        control = self.state.control
        return self.policy.server == "shared" if control is None else control.multiuser

    @property
    def synced(self) -> bool:
        """The gate has told all that it holds."""
        return self.state.gate is not None and self.state.gate.synced

    def rules(self, uid: int) -> Rules:
        """The rules for a uid. While the name service has not answered, a uid has no name and no groups."""
        return self.policy.rules(self.state.identities.get(uid, Identity(uid)))

    @property
    def limits_enforced(self) -> bool:
        """Whether limits are enforced for any user. If for none, the daemon's defaults are left alone."""
        settings = self.policy.settings
        everybody = settings.get(("limits", "enforce"))
        if not self.policy.enforce or everybody is None or everybody.value:
            return self.policy.enforce
        return any(
            path[0] in ("user", "group") and path[2:] == ("enforce",) and setting.value
            for path, setting in settings.items()
        )

    def fail_safe(self) -> Limits:
        """The strictest limits of the policy: what a client gets when its own cannot be known or confirmed."""
        return self.policy.strictest(self.state.devices) if self.limits_enforced else Limits()

    def limits(self, uid: int) -> Limits:
        """The limits of a user's clients; the fail-safe ones for a user whose name is not known yet."""
        if uid not in self.state.identities:
            return self.fail_safe()
        rules = self.rules(uid)
        return rules.limits(self.state.devices) if rules.enforce_limits else Limits()

    def denied(self, uid: int) -> bool:
        """Whether the policy keeps a user out. Not before the name service has said who that is."""
        return uid in self.state.identities and self.rules(uid).access == "deny"

    def waiting(self) -> tuple[int, ...]:
        """Users in the queue whom the policy lets in, next one first, without whose turn it is. Who had a turn since he
        came is behind all who have waited for its end."""
        found = self._found.get("waiting")
        if found is None:
            holder = None if self.turn is None else self.turn.uid
            users = [uid for uid in self.state.held.users() if uid != holder and not self.denied(uid)]
            if any(uid in self.served for uid in users):
                users.sort(key=self._since)
            found = self._found["waiting"] = tuple(users)
        return found

    def _since(self, uid: int) -> float:
        first = self.state.held.first(uid)
        assert first is not None
        return max(first.since, self.served.get(uid, first.since))

    def others(self) -> tuple[int, ...]:
        """Users who want the GPU beside the one whose turn it is: those in the queue, and those with clients at work
        (who were let in before this agent came)."""
        holder = None if self.turn is None else self.turn.uid
        return (*self.waiting(), *(uid for uid in self.state.users() if uid != holder))

    def contested(self) -> float | None:
        """Since when another user has wanted the GPU; None while none does."""
        holder = None if self.turn is None else self.turn.uid
        since = [self._since(uid) for uid in self.waiting()[:1]]
        since += [client.since for client in self.state.clients.values() if client.uid != holder]
        return min(since, default=None)

    def faulted(self, now: float) -> tuple[bool, float | None]:
        """Whether a server refuses who is handed over to it, or may still do so, and until when that is not known: in
        the end the log is believed that says that a fault is over."""
        until = [s.mended + self.policy.hang_control for s in self.state.servers.values() if s.mended is not None]
        doubtful = [at for at in until if now < at]
        fault = any(server.status is Status.FAULT for server in self.state.servers.values())
        return fault or bool(doubtful), min(doubtful, default=None)

    def shut_out(self, uid: int) -> bool:
        """No process of this user can pass the gate: a table without the user is in force there."""
        if self.sent is None or not self.settled:
            return False
        table = self.sent[1]
        return not (table.open and any(one.uid == uid for one in table.users))

    @property
    def settled(self) -> bool:
        """The table that the gate was told last is in force."""
        gate = self.state.gate
        return gate is not None and self.sent is not None and gate.applied >= self.sent[0]

    def let_in(self, uid: int) -> bool:
        """The gate lets this user in now, and has said so."""
        if self.sent is None or not self.settled:
            return False
        table = self.sent[1]
        return table.open and any(one.uid == uid and not one.known_only for one in table.users)

    def works_on(self, client: Client, since: float) -> tuple[Server | None, bool]:
        """The server where a client has a context, and whether that is known. A line is enough to say that it works
        there; that it works nowhere MPS must have said itself, after ``since``."""
        state = self.state
        if client.detached is not None:
            return None, True
        candidates = state.candidates(client)
        if client.said_left is None and len(candidates) == 1:
            (server,) = candidates
            if server.attached.get(client.pid, _NONE).contexts - {0}:
                return server, True
        if state.listed_at is None or state.listed_at < since:
            return None, False
        for server in candidates:
            if server.listed_at is None or server.listed_at < since:
                return None, False
            if client.pid in server.listed:
                return server, True
        return None, True

    def is_alive(self, pid: int, start: int) -> bool:
        client = self.state.clients.get(pid)
        return client is not None and client.peer.start == start


def same_limits(left: Limits, right: Limits) -> bool:
    """Equal as MPS takes them: percentages to one decimal, memory to one MiB."""
    if left == right:
        return True
    if abs(left.threads - right.threads) >= 0.05 or set(left.memory) != set(right.memory):
        return False
    return all(size >> 20 == right.memory[device] >> 20 for device, size in left.memory.items())


def limits_text(limits: Limits) -> str:
    """``20 % of threads, memory 2048 MiB on device 0``, for reasons and reports."""
    parts = [f"{limits.threads:.1f} % of threads"]
    parts += [f"{size >> 20} MiB on device {device}" for device, size in sorted(limits.memory.items())]
    return ", ".join(parts)
