"""To which instance a user's clients go, where there are several. Pure.

A user stays where the user's clients work or wait: a program whose processes wait for each other must never be split.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mpsagent.core.view import View
from mpsagent.policy.identity import Identity
from mpsagent.policy.policy import Policy

Placement = Literal["fixed", "least-loaded", "by-directory"]
NOWHERE = "the policy has no instance for this user: none names the user or a group of the user's"


@dataclass(frozen=True, slots=True)
class Place:
    """An instance as placement sees it. ``there``: users who work or wait there; ``admitted``: users whom the gate
    admits there, who may all have left; ``clients``: processes that work or wait; ``memory``: the limits of those at
    work, as a share of the GPUs' memory; ``able``: it serves, or will soon; ``exclusive``: the section of an instance
    that serves one GPU in EXCLUSIVE_PROCESS mode."""

    name: str
    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    there: frozenset[int] = frozenset()
    admitted: frozenset[int] = frozenset()
    clients: int = 0
    memory: float = 0.0
    able: bool = True
    exclusive: str = ""

    @property
    def for_all(self) -> bool:
        """No user is named: whoever no other instance names."""
        return not (self.users or self.groups)


def needs_names(places: Sequence[Place]) -> bool:
    """Whether a uid alone does not say where a user goes."""
    return any(not one.for_all for one in places)


def stays(uid: int, places: Sequence[Place]) -> str | None:
    """Where this user works, waits or is admitted already."""
    return next((one.name for one in places if uid in one.there or uid in one.admitted), None)


def place(who: Identity, places: Sequence[Place], how: Placement) -> str | None:
    """The instance for a user who is nowhere yet; None: there is none for this user."""
    candidates = _choice(who, places, how)
    candidates = [one for one in candidates if one.able] or candidates
    least = min(candidates, key=_load, default=None)
    return None if least is None else least.name


def _load(one: Place) -> tuple[bool, int, int, float]:
    """Return how little a further user would get there. On a GPU in EXCLUSIVE_PROCESS mode a second user waits."""
    return bool(one.exclusive and one.there), len(one.there), one.clients, one.memory


def open_to(who: Identity, places: Sequence[Place]) -> list[str]:
    """The instances that this user may ask for, where each has a directory of its own."""
    return [one.name for one in _candidates(who, places)]


def free(who: Identity, places: Sequence[Place], how: Placement) -> str | None:
    """An instance where no user works or waits, for one who waits elsewhere: no GPU is idle while a user waits for
    another one."""
    choice = _choice(who, places, how)
    return next((one.name for one in choice if one.able and not one.there), None) if len(choice) > 1 else None


def _choice(who: Identity, places: Sequence[Place], how: Placement) -> list[Place]:
    """The instances among which the load decides. The GPUs of one section that are all in EXCLUSIVE_PROCESS mode were
    not divided by the policy, so its users are spread over them even if the policy fixes users to sections."""
    candidates = _candidates(who, places)
    if how == "least-loaded" or not candidates:
        return candidates
    first = candidates[0]
    return [one for one in candidates if first.exclusive and one.exclusive == first.exclusive] or [first]


def _candidates(who: Identity, places: Sequence[Place]) -> list[Place]:
    """Those that name the user, else those that name a group of the user's, else those for all; in the policy's
    order."""
    mine = {str(who.uid), *([who.name] if who.name is not None else [])}
    named = [one for one in places if not mine.isdisjoint(one.users)]
    grouped = [one for one in places if not set(who.groups).isdisjoint(one.groups)]
    return named or grouped or [one for one in places if one.for_all]


def named(policy: Policy) -> Place:
    """An instance by its policy alone: whom it is for."""
    return Place(policy.instance, policy.only_users, policy.only_groups, exclusive=policy.exclusive)


def place_of(
    policy: Policy, view: View, told: Mapping[int, Collection[tuple[int, int]]] = {}, *, lost: bool = False
) -> Place:
    """Return an instance as a place, from its policy and its state. ``told``: processes (pid, start) by user that the
    gate has reported already, and the state may not have yet. ``lost``: one of its GPUs is lost."""
    state = view.state
    processes = {(c.pid, c.peer.start): c.uid for c in state.clients.values()}
    processes |= {(held.peer.pid, held.peer.start): held.peer.uid for held in state.held.values()}
    processes |= {process: uid for uid, ones in told.items() for process in ones}
    total = sum(device.memory for device in state.devices)
    taken = sum(
        device.memory if client.limits is None else client.limits.memory.get(device.ordinal, device.memory)
        for client in state.clients.values() for device in state.devices
    )  # fmt: skip
    return replace(
        named(policy), there=frozenset(processes.values()), admitted=view.admitted, clients=len(processes),
        memory=taken / total if total else 0.0, able=view.given_up is None and state.drain is None and not lost,
    )  # fmt: skip
