"""Who computes on our GPUs outside MPS, and why that may be: what NVML lists, held against who passed the gate."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from mpsagent.policy.identity import Identity
from mpsagent.policy.policy import Policy

NVIDIAS_DIRECTORY = "/tmp/nvidia-mps"
"""Where a CUDA program looks for MPS when its environment says nothing."""


class Sighting(NamedTuple):
    """A process with a context on a GPU, by NVML; ``start`` and ``uid`` by the kernel. ``mps``: it is a client of some
    control daemon; ``display``: it draws there as well; ``memory`` in bytes, None: not known."""

    pid: int
    start: int
    uid: int
    device: str
    memory: int | None
    mps: bool = False
    display: bool = False


class Facts(NamedTuple):
    """What a process itself shows. ``began``: seconds since the epoch; ``directory``: its CUDA_MPS_PIPE_DIRECTORY,
    empty when it has none, None when its environment cannot be read; ``reaches``: the public socket is there for it."""

    command: str = ""
    began: float | None = None
    directory: str | None = None
    reaches: bool | None = None


class Ending(NamedTuple):
    """A process that is to be ended, from its warning on: ``due``: when it is asked to (SIGTERM); ``asked``: when that
    was; ``killed``: SIGKILL was sent too."""

    due: float
    asked: float | None = None
    killed: bool = False


class Outsider(NamedTuple):
    """A process outside MPS. ``since``: when it was seen first; ``why``: the likely reason."""

    seen: Sighting
    facts: Facts
    since: float
    why: str
    ending: Ending | None = None


def outside(
    listed: Iterable[Sighting], ours: Collection[str], inside: Mapping[int, int | None]
) -> tuple[Sighting, ...]:
    """Return the processes on our devices that are not ``inside``: by pid, with the start time if known. A client of
    MPS without memory is left out: NVML lists it on every GPU until it has a context on one."""
    found: dict[int, Sighting] = {}
    for one in listed:
        passed = one.pid in inside and inside[one.pid] in (None, one.start)
        if one.device in ours and not passed and not (one.mps and one.memory == 0):
            found.setdefault(one.pid, one)
    return tuple(found.values())


def reason(one: Sighting, facts: Facts, public: str, since: float | None) -> str:
    """Why a process is outside, as far as it shows, in words that follow "because". ``since``: when the gate's socket
    was made."""
    elsewhere = facts.directory and facts.directory.rstrip("/") != public.rstrip("/")
    where = f" (its CUDA_MPS_PIPE_DIRECTORY is {facts.directory[:100]})" if facts.directory and elsewhere else ""
    if one.mps:
        return f"it uses another MPS control daemon{where}"
    if elsewhere:
        return f"its CUDA_MPS_PIPE_DIRECTORY is {(facts.directory or '')[:100]}"
    if facts.reaches is False:
        return f"{public}/control cannot be reached from it (a container without it?)"
    if facts.directory == "" and public.rstrip("/") != NVIDIAS_DIRECTORY:
        return f"it has no CUDA_MPS_PIPE_DIRECTORY, and MPS is not in {NVIDIAS_DIRECTORY}"
    if since is not None and facts.began is not None and facts.began < since:
        return "it started before mpsagent's sockets were there"
    return "the reason is not known"


def may_have_passed(one: Sighting, facts: Facts, public: str, since: int | None) -> bool:
    """Return whether a client of MPS may have passed the gate although no record names it: it started before the agent,
    which found no records of an earlier agent, and it looks for MPS in the public directory. Its server was lost.
    ``since``: start time of that agent in clock ticks since boot, None: records were found."""
    if since is None or not one.mps or one.start >= since:
        return False
    directory = NVIDIAS_DIRECTORY if facts.directory == "" else facts.directory
    return directory is None or directory.rstrip("/") == public.rstrip("/")


def spared(one: Sighting, policy: Policy, who: Identity | None) -> str | None:
    """Why a process is not ended, whatever the policy says of others; None: it may be. ``who``: its user, None: not
    known yet."""
    if one.uid == 0:
        return "it is a process of root"
    if one.display:
        return "it draws on a screen as well"
    if one.mps:
        return "another control daemon serves it, whose other clients its end would hurt"
    if policy.bypass_exempt and who is None:
        return "the name service has not said who its user is"
    if who is not None and not {str(who.uid), who.name}.isdisjoint(policy.bypass_exempt):
        return "the policy exempts its user"
    return None


def ended(one: Outsider, policy: Policy, who: Identity | None, now: float) -> tuple[Ending | None, int | None]:
    """How far the end of a process is that NVML has just listed, and the signal that is due: none at first,
    SIGTERM after ``outside_mps_grace``, SIGKILL after ``timeouts.sigkill_delay``."""
    if policy.bypass != "terminate" or spared(one.seen, policy, who) is not None:
        return None, None
    ending = one.ending
    if ending is None:
        return Ending(now + policy.bypass_grace), None
    if ending.asked is None:
        return (ending._replace(asked=now), signal.SIGTERM) if now >= ending.due else (ending, None)
    if not ending.killed and now >= ending.asked + policy.kill_grace:
        return ending._replace(killed=True), signal.SIGKILL
    return ending, None


def next_step(one: Outsider, policy: Policy) -> float | None:
    """When something is due for it; None: nothing."""
    if one.ending is None or one.ending.killed:
        return None
    return one.ending.due if one.ending.asked is None else one.ending.asked + policy.kill_grace
