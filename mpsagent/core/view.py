"""What a rule may look at: the state, and what follows from it for policy and limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from mpsagent.core.inputs import Peer
from mpsagent.core.model import CLIENTS_PER_SERVER, Attachment, Client, Held, Key, Server, State, Status
from mpsagent.core.rule import Reason
from mpsagent.mps.limits import Limits
from mpsagent.policy import apart
from mpsagent.policy.identity import Identity
from mpsagent.policy.policy import Policy, Rules
from mpsagent.policy.shares import Share
from mpsagent.wire.link import Admissions

SHARED_UID = 0
"""The user of a multi-user server, and what its log says for everyone (recording 08, G8)."""

OF_ALL = 0.75
"""The part of a shared server's places that one user may have unless the policy says otherwise."""


UNCONFIRMED = 600.0
"""Seconds for which unconfirmed limits of an absent user are reported. A client that is refused for them leaves at
once, and its user's mark would be gone before an administrator or a regular look at the node sees it."""

T = TypeVar("T")
_NONE = Attachment(0.0)
MOST_REMEMBERED = 1000
"""Answers that are kept, and processes whose shares are."""


@dataclass(frozen=True, slots=True)
class Ending:
    """A client that is being ended. ``hook``: the policy's program runs first. ``blocks``: ``terminate_client`` has
    been sent for it and not been answered, so the control daemon waits for it. ``signalled``: it is past that. ``at``:
    when its present step began. ``reason``: why."""

    pid: int
    blocks: bool
    signalled: bool
    at: float = 0.0
    reason: str = ""
    hook: bool = False


Phase = Literal["idle", "open", "contested", "warned", "late", "pausing", "ending", "shut"]
"""Where a turn stands: the table in :mod:`mpsagent.core.turns` has what becomes of it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The user with the GPU. ``contested``: since when another user waits for it; ``warned``, ``ending``: when the end
    of the turn was announced and begun; ``began``: since when its user works; ``tried``: since when the gate has tried
    to hand its next process over; ``unpausable``: processes (pid, start) that did not stop when they were to be paused;
    ``no_room``: why they cannot be for the next user; ``ends``: when the policy takes the GPU from it, as things are;
    ``over``: by when it is over then, whatever its processes do."""

    uid: int
    since: float
    contested: float | None = None
    warned: float | None = None
    ending: float | None = None
    began: float | None = None
    tried: float | None = None
    unpausable: frozenset[tuple[int, int]] = frozenset()
    phase: Phase = "open"
    no_room: str | None = None
    ends: float | None = None
    over: float | None = None

    @property
    def let_in(self) -> bool:
        """Its user may pass the gate."""
        return self.phase not in ("pausing", "ending", "shut")

    @property
    def reached(self) -> Phase:
        """The phase of a turn that goes on, by how far it has come."""
        return "open" if self.contested is None else "contested" if self.warned is None else "warned"

    def deadlines(self, rules: Rules) -> tuple[float, float] | None:
        """When the user is warned and when the turn ends; None while it is not contested or may last for ever."""
        if self.contested is None or rules.switch_exempt or rules.switch_after is None:
            return None
        warn = self.contested + rules.switch_after
        return warn, max(warn, self.warned or warn) + rules.switch_grace


@dataclass(frozen=True, slots=True)
class View:
    """``ending``: the clients on their way out; ``turn``: who has the GPU;
    ``served``: when each user's last turn ended; ``suspended``: users who are paused, and since when;
    ``sent``: the admissions that the gate was told last, and their number;
    ``in_the_way``: the server that is asked to make way for the next user, and since when; ``given_up``: why the agent
    no longer tries to start the control daemon or its servers; ``pause_until``: until when servers that did not start
    are not tried; ``retiring``: the control daemon was told to quit, because nothing works there;
    ``turn_waits``: why the next turn does not begin yet; ``users``: those who have control daemons of their own;
    ``starting``: those that are being started, ``failing``: those that do not start; ``unmade``: why a user's own could
    not be made; ``short``: a user waits for one, and there is no place; ``admitted``: whom the gate's
    tables name, of all control daemons; ``daemons``: the state of each one, where this is the view of all."""

    state: State
    ending: Mapping[int, Ending] = field(default_factory=dict)
    turn: Turn | None = None
    served: Mapping[int, float] = field(default_factory=dict)
    suspended: Mapping[int, float] = field(default_factory=dict)
    sent: tuple[int, Admissions] | None = None
    in_the_way: tuple[int, float] | None = None
    given_up: str | None = None
    pause_until: float | None = None
    retiring: bool = False
    turn_waits: Reason | None = None
    users: frozenset[int] = frozenset()
    starting: frozenset[Key] = frozenset()
    failing: frozenset[Key] = frozenset()
    unmade: Mapping[int, str] = field(default_factory=dict)
    short: bool = False
    admitted: frozenset[int] = frozenset()
    daemons: Mapping[Key, State] = field(default_factory=dict)
    remembered: dict[tuple[str, Key], tuple[tuple[object, ...], Any]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """What was asked before, of this view or an earlier one, by name and daemon: its inputs, and the answer."""

    def once(self, name: str, of: tuple[object, ...], make: Callable[[], T]) -> T:
        """Made anew only where something has changed of what it is made ``of``, which most inputs leave as it is."""
        key = name, self.state.user
        known = self.remembered.get(key)
        if known is None or known[0] != of:
            if len(self.remembered) >= MOST_REMEMBERED:
                self.remembered.clear()
            known = self.remembered[key] = of, make()
        found: T = known[1]
        return found

    @property
    def policy(self) -> Policy:
        return self.state.policy

    @property
    def control_alive(self) -> bool:
        return self.state.control is not None and self.state.control.proven

    @property
    def mps_stopped(self) -> bool:
        """A process of MPS's is stopped that is no user's: the control daemon, or the server for all users."""
        control = set() if self.state.control is None else {self.state.control.pid}
        return not self.state.stopped.isdisjoint(control | (self.state.servers.keys() if self.shared else set()))

    @property
    def shared(self) -> bool:
        """One multi-user server for all: as the control daemon was started, which a changed policy does not change."""
        control = self.state.control
        return self.multiuser if control is None else control.multiuser

    @property
    def multiuser(self) -> bool:
        """The control daemon is to have one server for all users."""
        return self.user is None and self.policy.multiuser

    @property
    def user(self) -> int | None:
        """The user whose own control daemon is seen here, None for that of all users."""
        return self.state.user

    @property
    def together(self) -> bool:
        """All users at once. Not while a control daemon runs that was started for turns with servers of their own.
        Where a user has a control daemon alone it is the same: no user waits for another."""
        return self.user is not None or self.outgoing or (self.policy.sharing == "one-server" and self.shared)

    @property
    def each(self) -> bool:
        """Each user has a control daemon, and this is that of all; so it is until the last of these has gone."""
        return self.user is None and (self.policy.sharing == "per-user" or bool(self.users))

    @property
    def leaving(self) -> bool:
        """The policy does not want this user to have a control daemon any more."""
        return self.user is not None and self.policy.sharing != "per-user"

    @property
    def elsewhere(self) -> bool:
        """Who is held here waits for a control daemon of the user's own."""
        return self.each and not self.control_alive

    @property
    def outgoing(self) -> bool:
        """The policy wants a control daemon for each user, and that of all users still runs: users who work there keep
        it, and no other user waits for them."""
        return self.user is None and self.policy.sharing == "per-user" and self.control_alive

    def keeps(self, uid: int) -> bool:
        """Return whether a user works on the outgoing control daemon, or may still be handed over to it."""
        if any(client.daemon is None for client in self.state.clients_of_user(uid)):
            return True
        return any(held.handing is not None for held in self.state.held.line(uid)) or not self.shut_out(uid)

    @property
    def form(self) -> str:
        """What the policy wants users to have, in words."""
        if self.each:
            return "a control daemon for each user"
        return "one server for all users" if self.policy.multiuser else "a server for each turn"

    @property
    def sharing(self) -> str:
        """How users share now: a changed policy may wait for clients at work."""
        if self.user is not None or self.elsewhere or self.outgoing:
            return "per-user"
        return "one-server" if self.together else "turns"

    @property
    def wanted(self) -> bool:
        """A control daemon is to run here."""
        mine = bool(self.state.held) or self.user in self.failing
        return not self.each and (self.user is None or (mine and not self.leaving))

    @property
    def unlisted(self) -> bool:
        """The control daemon was there before the gate, and has not said since then who works there: where mpsagent was
        installed again, the gate knows no process."""
        gate, control, servers = self.state.gate, self.state.control, self.state.servers.values()
        if gate is None or control is None or not control.proven or control.started >= gate.since:
            return False
        listed = [self.state.listed_at, *(one.listed_at for one in servers if one.started < gate.since)]
        return any(at is None or at < gate.since for at in listed)

    @property
    def outdated(self) -> bool:
        """The policy wants another form of server than the running control daemon was started with."""
        control = self.state.control
        if control is None or not control.proven:
            return False
        return self.each or self.leaving or control.asked_multiuser != self.multiuser

    @property
    def synced(self) -> bool:
        """The gate has told all that it holds."""
        return self.state.gate is not None and self.state.gate.synced

    def identified(self, uid: int) -> bool:
        """Whether it is known what the policy says of a user: the name service has answered, or names do not matter.
        Until then its rules are not its own, so it is neither let in nor ended by them."""
        return uid in self.state.identities or self.policy.by_uid

    def rules(self, uid: int) -> Rules:
        """The rules for a uid. While the name service has not answered, a uid has no name and no groups."""
        return self.policy.rules(self.state.identities.get(uid) or Identity(uid))

    @property
    def limits_enforced(self) -> bool:
        """Whether limits are enforced for any user. If for none, the daemon's defaults are left alone."""
        return self.policy.enforce

    @property
    def name(self) -> str:
        """Name of the control daemon in the gate, records and directories."""
        return apart.daemon_name(self.policy.instance, self.user)

    def instance_rule(self, name: str) -> str:
        """A key of the instance, as a file has it."""
        return f"instance.{self.policy.instance}.{name}"

    def fail_safe(self) -> Limits:
        """The fallback limits of the policy: what a client gets when its own cannot be known or confirmed."""
        if not self.limits_enforced:
            return Limits()
        least = self.policy.fail_safe(self.state.devices)
        for lease in self.state.leases:
            least = lease.share.lower(least, self.state.devices)
        return least

    def limits(self, uid: int) -> Limits:
        """The limits of a user's clients; the fail-safe ones are shown for a user who is not identified yet."""
        if not self.identified(uid):
            return self.fail_safe()
        rules = self.rules(uid)
        return rules.limits(self.state.devices) if rules.enforce else Limits()

    @property
    def shares(self) -> bool:
        """Processes of one user may have different limits, so the gate is told each one's."""
        return bool(self.policy.cgroups or self.state.leases) and self.limits_enforced

    def share(self, peer: Peer) -> Share | None:
        """What its job gives a process: by a lease, the last one first, or by the policy."""
        shares = self.once("shares", (self.policy, self.state.leases), dict[object, Share | None])
        key = peer.uid, peer.cgroup, peer.lineage
        if key not in shares:
            if len(shares) >= MOST_REMEMBERED:
                shares.clear()
            lease = self.state.lease(peer)
            shares[key] = self.policy.share(peer.cgroup) if lease is None else lease.share
        return shares[key]

    def _enforced(self, peer: Peer) -> Share | None:
        share = self.share(peer)
        if share is None or not self.identified(peer.uid) or not self.rules(peer.uid).enforce:
            return None
        return share

    def limits_of(self, peer: Peer) -> Limits:
        """The limits of one process."""
        share = self._enforced(peer)
        if share is None:
            return self.limits(peer.uid)
        return self.rules(peer.uid).limits_within(share, self.state.devices)

    def job(self, peer: Peer) -> Share | None:
        """What bounds this process together with the others of its job, under what bounds its user."""
        share = self.share(peer)
        if share is None or not share.bounds:
            return None
        return share if not self.identified(peer.uid) or self.rules(peer.uid).enforce else None

    def bounds(self, peer: Peer) -> Iterator[tuple[str, Rules | Share, tuple[Client, ...]]]:
        """Yield the bounds of a process together with others: its user's rules, and its job's share, with the clients
        that take a part of it."""
        mine = tuple(one for one in self.state.clients_of_user(peer.uid) if one.counts)
        yield f"user {peer.uid}", self.rules(peer.uid), mine
        if (share := self.job(peer)) is not None:
            yield share.whose, share, self.clients_of_job(share.job)

    def clients_of_job(self, job: str) -> tuple[Client, ...]:
        """Return the clients that take a part of this job's share."""
        return tuple(one for one in self.jobs().get(job, ()) if one.counts)

    def jobs(self) -> Mapping[str, tuple[Client, ...]]:
        """The clients of each job that is bounded."""
        if not (self.policy.cgroups or self.state.leases):
            return {}
        of = self.policy, self.state.leases, self.state.identities, self.state.clients
        return self.once("jobs", of, self._in_jobs)

    def _in_jobs(self) -> dict[str, tuple[Client, ...]]:
        found: dict[str, tuple[Client, ...]] = {}
        for one in self.state.clients.values():
            if (share := self.job(one.peer)) is not None:
                found[share.job] = (*found.get(share.job, ()), one)
        return found

    def unconfirmed(self, now: float) -> dict[int, str]:
        """Return by uid why MPS does not confirm limits: of present users, and of users who left a short time ago."""
        present = {*self.state.users(), *self.state.held.users()}
        each = self.state.unconfirmed.items()
        return {uid: why for uid, (at, why) in each if uid in present or now < at + UNCONFIRMED}

    def denied(self, uid: int) -> bool:
        """Whether the policy keeps a user out. Not before the name service has said who that is."""
        if not self.policy.denies or not self.identified(uid):
            return False
        rules = self.rules(uid)
        return rules.access == "deny" and rules.enforce

    def denial(self, uid: int) -> str:
        """Return why the policy keeps this user out."""
        return f'access = "deny" in the policy for user {uid} ({self.rules(uid).place("access")})'

    def welcome(self, uids: Iterable[int]) -> list[int]:
        """Those of them who are known and whom the policy lets in."""
        known, all_known, denies = self.state.identities, self.policy.by_uid, self.policy.denies
        found = (uid for uid in uids if (all_known or uid in known) and not (denies and self.denied(uid)))
        return [uid for uid in found if self.ever_fits(uid)]

    def ever_fits(self, uid: int) -> bool:
        """Return False if no waiting process of a user without clients fits into the user's total."""
        rules, line = self.rules(uid), self.state.held.line(uid)
        total = rules.total(self.state.devices) if rules.enforce else None
        if total is None or not line or self.state.clients_of_user(uid):
            return True
        return any(total.fits((), self.limits_of(held.peer)) for held in line)

    def never(self) -> tuple[Held, ...]:
        """Return the connections of this control daemon's users that are never handed over."""
        here = self.user
        return tuple(
            one for one in self.state.never.values() if (one.uid not in self.users if here is None else one.uid == here)
        )

    def waiting(self) -> tuple[int, ...]:
        """Users in the queue, or paused, who are known and whom the policy lets in, next one first, without whose turn
        it is. By arrival, and who had a turn since he came is behind all who have waited for its end; or by rank."""
        return () if self.together and not self.full else self._wanting()[0]  # together no user waits for another

    def _wanting(self) -> tuple[tuple[int, ...], float]:
        """Who wants the GPU beside the user whose turn it is, in their order, and since when the first has waited."""
        state, holder, ranked = self.state, None if self.turn is None else self.turn.uid, self.ranked
        of = (state.held.order, state.identities, self.policy, self.suspended, self.served, holder, ranked,
              state.leases, state.devices, state.clients)  # fmt: skip
        return self.once("wanting", of, lambda: self._in_order(holder, ranked))

    def _in_order(self, holder: int | None, ranked: bool) -> tuple[tuple[int, ...], float]:
        """Return the users by priority and arrival, and the first arrival. No user has two turns while another one
        waits for the first, so each other user overtakes a waiting user once at most."""
        served, since = self.served, {uid: at for at, _, uid in self.state.held.order}
        since |= {uid: max(at, since[uid]) for uid, at in served.items() if uid in since}  # only since the last turn
        since |= self.suspended
        users = [uid for uid in self.welcome(since) if uid != holder]
        oldest = min((since[uid] for uid in users), default=float("inf"))

        def place(uid: int) -> tuple[bool, float, float]:
            behind = since[uid] > oldest and served.get(uid, oldest) > oldest
            return behind, -self.rules(uid).priority, since[uid]

        users.sort(key=place if ranked else since.__getitem__)
        return tuple(users), oldest

    def contexts(self) -> dict[int, int]:
        """Places of the server that each user has, as its log says: a client that has no context yet has one, too."""
        return self.once("contexts", (self.state.clients, self.state.servers), self._counted)

    def _counted(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for client in self.state.clients.values():
            server = self.state.server_of(client.pid)
            one = _NONE if server is None else server.attached[client.pid]
            most = one.places if client.unseen else max(1, client.connections - 1)
            found[client.uid] = found.get(client.uid, 0) + (min(one.places, most) if client.counts else 0)
        return found

    @property
    def room(self) -> int:
        """Contexts that a server takes on a device."""
        return min((server.max_clients for server in self.state.servers.values()), default=CLIENTS_PER_SERVER)

    def most_contexts(self, rules: Rules) -> int | None:
        """Contexts that a user may have at a time. Where users share a server no user can take all places (recording
        12, H4)."""
        if rules.max_contexts is not None or not self.shared or self.user is not None:
            return rules.max_contexts
        return int(self.room * OF_ALL)

    @property
    def full(self) -> bool:
        """No further context fits on the server."""
        return self.sent is not None and sum(self.contexts().values()) >= self.sent[1].room

    @property
    def ranked(self) -> bool:
        """The order of users is not that of arrival. Together it is: there are no turns."""
        return self.policy.prioritised and not self.together

    def others(self) -> tuple[int, ...]:
        """Users who want the GPU beside the one whose turn it is: those in the queue or paused, and those with clients
        at work (who were let in before this agent came)."""
        away = {*self.suspended, None if self.turn is None else self.turn.uid}
        return (*self.waiting(), *(uid for uid in self.state.users() if uid not in away))

    def contested(self) -> float | None:
        """Since when another user has wanted the GPU; None while none does."""
        away = {*self.suspended, None if self.turn is None else self.turn.uid}
        since = [self._wanting()[1]] if self.waiting() else []
        since += [client.since for client in self.state.clients.values() if client.uid not in away]
        return min(since, default=None)

    def may_pause(self, uid: int) -> bool:
        """The user's processes may be paused: by the policy, and as things are."""
        return self.rules(uid).switch_action == "pause" and self.may_stand(uid)

    def may_stand(self, uid: int) -> bool:
        """The processes of a paused user may go on standing, also where a policy has come that ends turns otherwise:
        else all who are paused would work at once. Not in a drain, because everybody's work is to end; nor while a
        fault is to end: a server keeps its fault while a client of it is stopped (X13, recording 08, G17)."""
        rules, control = self.rules(uid), self.state.control
        return (
            rules.enforce and not rules.switch_exempt
            and self.sharing == "turns" and self.shared and not self.outdated
            and self.identified(uid) and not self.denied(uid)
            and control is not None and control.proven and control.quitting is None
            and self.given_up is None and self.state.drain is None
            and not any(server.status is Status.FAULT for server in self.state.servers.values())
        )  # fmt: skip

    def faulted(self, now: float) -> tuple[bool, float | None]:
        """Whether a server refuses who is handed over to it, or may still do so, and until when that is not known: in
        the end the log is believed that says that a fault is over."""
        until = [s.mended + self.policy.hang_control for s in self.state.servers.values() if s.mended is not None]
        doubtful = [at for at in until if now < at]
        fault = any(server.status is Status.FAULT for server in self.state.servers.values())
        return fault or bool(doubtful), min(doubtful, default=None)

    def ends_soon(self, uid: int) -> bool:
        """Return whether the end of this user's turn is announced and certain. A process that was admitted now would be
        ended with it."""
        rules = self.rules(uid)
        announced = self.turn is not None and self.turn.uid == uid and self.turn.phase == "warned"
        return announced and rules.enforce and rules.forced_end != "none"

    def shut_out(self, uid: int) -> bool:
        """No process of this user can pass the gate: a table without the user is in force there."""
        if self.sent is None or not self.settled:
            return False
        table = self.sent[1]
        return not (table.open and uid in table.users)

    @property
    def settled(self) -> bool:
        """The table that the gate was told last is in force."""
        gate = self.state.gate
        return gate is not None and self.sent is not None and self.state.applied >= self.sent[0]

    @property
    def closed(self) -> bool:
        """The gate lets no new client in, and has said so."""
        if self.sent is None or not self.synced or not self.settled:
            return False
        table = self.sent[1]
        return not table.open or all(one.admit == "known" for one in table.users.values())

    def let_in(self, uid: int) -> bool:
        """The gate lets this user in now, and has said so."""
        if self.sent is None or not self.settled:
            return False
        table = self.sent[1]
        user = table.users.get(uid)
        return table.open and user is not None and user.admit == "all"

    @property
    def passed_untouched(self) -> bool:
        """With a handshake that is not known the gate knows no clients: then the logs are all there is."""
        if self.state.gate is None or self.state.known_handshake is not False:
            return False
        return any(server.attached for server in self.state.servers.values())

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

    def server_text(self, server: Server) -> str:
        """``server 20 of user 1001``, as far as it is known whose it is; for reasons."""
        if self.shared:
            return f"server {server.pid} of all users"
        return f"server {server.pid}" if server.uid is None else f"server {server.pid} of user {server.uid}"

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
