"""What agent and api say to each other: a page is the present state of all instances, a frame has one and records of
what happened. It is pickled by root for a process without rights; the agent unpickles nothing."""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from mpsagent.core.outside import Outsider
from mpsagent.core.placement import Place
from mpsagent.core.transitions import Transition
from mpsagent.core.view import View
from mpsagent.core.waiting import Waiting
from mpsagent.mps.gpus import GpusSeen
from mpsagent.policy.identity import Identity
from mpsagent.policy.policy import Policy
from mpsagent.snapshot.condition import Condition

LENGTH, SAID = struct.Struct(">I"), struct.Struct(">cQ")
HAS, SHOWS, LOOK = b"h", b"s", b"l"
"""What the api says, with a number: it has the records up to it, shows this page, wants the GPUs looked at."""


class Instance(NamedTuple):
    """One instance of MPS. ``checked``: by server, whether it started with its first client's limits; ``memory``:
    bytes by pid; ``devices_known`` False: the state's GPUs are only assumed; ``waiting``: who waits, and why."""

    name: str
    view: View
    checked: Mapping[int, bool]
    devices_known: bool
    memory: Mapping[int, int]
    outside: Sequence[Outsider]
    environment: Mapping[str, str]
    waiting: Sequence[Waiting] = ()


class Page(NamedTuple):
    """The state of all instances. ``offset``: of the agent's clock from the monotonic one, which all processes share;
    ``moved``: by what the wall clock was set since the agent before; ``single``: there is one instance, and records do
    not name it; ``places``: where users may be placed."""

    pid: int
    started: float
    offset: float
    moved: float
    instances: Sequence[Instance]
    conditions: Sequence[Condition]
    policy: Policy
    policy_loaded: float | None
    policy_errors: Sequence[str]
    environment: Mapping[str, str]
    names: Mapping[int, Identity]
    single: bool
    first: str
    places: Sequence[Place]
    gpus: GpusSeen


Record = tuple[int, str, float, str]
"""Its number in this run of the agent, kind, time, fields as JSON."""


class Frame(NamedTuple):
    """``run``: which agent; ``number``: of the page that holds, also of one that could not be made; ``found``: what its
    start found in the logs, which may be on record already, by instance; ``page`` None: nothing has changed;
    ``looked``: the last look at the GPUs that is done; ``lost``: records in all."""

    version: str
    run: float
    number: int
    looked: int
    lost: int
    records: Sequence[Record]
    found: Sequence[tuple[str, Transition]]
    page: Page | None


_policies: dict[int, tuple[Policy, bytes]] = {}
"""As they are written, by their identity."""
POLICIES = 256


def as_bytes(frame: Frame) -> bytes:
    """A frame as bytes. A policy in it is bytes of its own, made once: it is most of a page, and seldom another one."""
    out = io.BytesIO()
    writer = pickle.Pickler(out, protocol=5)
    writer.dispatch_table = copyreg.dispatch_table | {Policy: lambda policy: (policy_of, (_written(policy),))}
    writer.dump(frame)
    return out.getvalue()


def _written(policy: Policy) -> bytes:
    if id(policy) not in _policies:
        if len(_policies) >= POLICIES:
            _policies.clear()
        _policies[id(policy)] = policy, pickle.dumps(replace(policy), protocol=5)  # without what it remembers of users
    return _policies[id(policy)][1]


def policy_of(data: bytes) -> Policy:
    """In the place of the class with which the api reads a policy: the agent unpickles nothing."""
    raise NotImplementedError
