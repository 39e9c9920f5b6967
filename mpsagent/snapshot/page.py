"""Messages from the agent to the api: pages, which have the state of all instances, and records of events.

The agent, which runs as root, pickles them for a process without rights. It unpickles nothing itself.
"""

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
"""Messages of the api, each with a number: it has the records up to this one, it shows this page, poll the GPUs."""


class InstancePage(NamedTuple):
    """An instance of MPS.

    ``checked``: for each server, True if it started with its first client's limits. ``memory``: bytes for each pid.
    ``devices_known``: False if the GPUs in the state are only assumed. ``waiting``: waiting users and the reasons.
    """

    name: str
    view: View
    checked: Mapping[int, bool]
    devices_known: bool
    memory: Mapping[int, int]
    outside: Sequence[Outsider]
    environment: Mapping[str, str]
    waiting: Sequence[Waiting] = ()


class Page(NamedTuple):
    """The state of all instances.

    ``offset``: difference between the agent's clock and the monotonic clock, which all processes share. ``moved``:
    seconds by which the wall clock was set since the previous agent. ``single``: there is only one instance, and
    records do not name it. ``places``: the instances to which users may be assigned.
    """

    pid: int
    started: float
    offset: float
    moved: float
    instances: Sequence[InstancePage]
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
"""The record's number in this run of the agent, its kind, its time, and its fields as JSON."""


class Frame(NamedTuple):
    """A message to the api.

    ``run``: identifies the run of the agent. ``number``: the current page's number, even if it could not be made.
    ``page``: None if nothing has changed. ``found``: for each instance, events that the agent found in logs at its
    start, which may already be recorded. ``looked``: number of the last finished poll of the GPUs. ``lost``: number of
    lost records.
    """

    version: str
    run: float
    number: int
    looked: int
    lost: int
    records: Sequence[Record]
    found: Sequence[tuple[str, Transition]]
    page: Page | None


_policies: dict[int, tuple[Policy, bytes]] = {}
"""Policies as bytes, by the identity of the object."""
POLICIES = 256


def as_bytes(frame: Frame) -> bytes:
    """Return a frame as bytes. A policy is most of a page and rarely changes, so it is pickled separately, once."""
    out = io.BytesIO()
    writer = pickle.Pickler(out, protocol=5)
    writer.dispatch_table = copyreg.dispatch_table | {Policy: lambda policy: (policy_of, (_written(policy),))}
    writer.dump(frame)
    return out.getvalue()


def _written(policy: Policy) -> bytes:
    if id(policy) not in _policies:
        if len(_policies) >= POLICIES:
            _policies.clear()
        _policies[id(policy)] = policy, pickle.dumps(replace(policy), protocol=5)  # without its cache for users
    return _policies[id(policy)][1]


def policy_of(data: bytes) -> Policy:
    """Stand for the function with which the api reads a policy: the agent unpickles nothing."""
    raise NotImplementedError
