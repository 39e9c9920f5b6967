"""Reading the policy: the one to start with, a new one while the agent runs, and what of it can take hold then."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mpsagent.agent.settings import Settings
from mpsagent.linux import atomic_file
from mpsagent.linux.threads import in_thread
from mpsagent.policy.files import load
from mpsagent.policy.origins import Origin, PolicyError, Setting
from mpsagent.policy.policy import Policy
from mpsagent.system.policy_files import Texts, read_policy
from mpsagent.system.unit_places import UnitPlaces, places
from mpsagent.system.unsupported import unsupported

LAST = "last-policy.json"
FIXED = ("pipe_directory", "log_directory", "control_daemon_path", "devices", "instance")
"""Settings of the instance that its running daemon was started with."""
FILES = 10.0
"""Seconds for the policy's files."""


class Start(NamedTuple):
    """``kept``: what is in force instead of the files, in words; empty when the policy is that of the files."""

    policy: Policy
    errors: tuple[PolicyError, ...]
    kept: str


class Loaded(NamedTuple):
    """``policy``: what is in force after a reload; ``later``: what of it waits for the agent's next start."""

    policy: Policy
    errors: tuple[PolicyError, ...]
    later: str | None


async def start(settings: Settings) -> Start:
    """The policy to begin with. A file that is missing or wrong must not mean everything for everybody: the last good
    policy stays in force, and where there was none, no one is admitted."""
    policy, errors = await read(settings)
    if policy is not None:
        return Start(policy, (), "")
    last = await last_good(settings)
    if last is not None:
        return Start(last, errors, "the last good policy stays in force")
    return Start(await closed(settings), errors, "there is no earlier policy, so no one is admitted")


async def _texts(settings: Settings, deadline: float) -> tuple[Texts, list[PolicyError]]:
    """Of the files; a file system that hangs costs a thread and the deadline."""
    try:
        return await in_thread(read_policy, Path(settings.policy), deadline=deadline)
    except TimeoutError:
        problem, hint = f"could not be read within {deadline:g} s", "see whether its file system answers, then reload"
        return [], [PolicyError(settings.policy, 0, "", problem, hint)]


async def read(settings: Settings, *, remember: bool = True) -> tuple[Policy | None, tuple[PolicyError, ...]]:
    """The policy of the files, or None and everything that is wrong with them. A good one is remembered."""
    texts, unread = await _texts(settings, FILES)
    try:  # aside: a large one takes longer than a waiting client can wait
        policy, mistakes = await in_thread(load, texts, deadline=30.0)
        if policy is not None:
            mistakes += await unsupported(policy)
        if policy is not None and not unread and not mistakes and remember and settings.state_directory is not None:
            with suppress(TimeoutError):  # of a slow disk; the policy is as good all the same
                await in_thread(_remember, settings.state_directory, texts, deadline=5.0)
    except Exception as error:
        return None, (*unread, PolicyError(settings.policy, 0, "", f"cannot be taken in: {error!r}", ""))
    errors = (*unread, *mistakes)
    return (None if errors else policy), errors


async def last_good(settings: Settings) -> Policy | None:
    """The policy that was in force before the agent was started, or None."""
    with suppress(Exception):
        path = Path(settings.state_directory or "/nonexistent", LAST)
        text = await in_thread(path.read_bytes, deadline=5.0)
        texts = [(name, one) for name, one in json.loads(text)]
        if texts:  # none at all would be the defaults, for everybody
            return (await in_thread(load, texts, deadline=30.0))[0]
    return None


async def closed(settings: Settings) -> Policy:
    """A policy that admits no one, at the places that the files give all the same: elsewhere clients would run outside
    MPS, and the units of gate and control daemon are there too."""
    where = UnitPlaces()
    with suppress(Exception):
        where = places([text for _, text in (await _texts(settings, 5.0))[0]])
    access = Setting("deny", Origin("limits.access", settings.policy, 0))
    return Policy(
        {("limits", "access"): access}, instance=where.instance, pipe_directory=where.public, log_directory=where.log,
        control_daemon_path=where.control,
    )  # fmt: skip


def _remember(directory: str, texts: Texts) -> None:
    """Readable by root alone, as the directory is."""
    with suppress(OSError):
        atomic_file.write(Path(directory, LAST), json.dumps(texts))


def keep_fixed(old: Policy, new: Policy) -> tuple[Policy, str | None]:
    """The new policy with the old instance, and a sentence about what waits for a restart."""
    changed = [name for name in FIXED if getattr(old, name) != getattr(new, name)]
    if not changed:
        return new, None
    kept = {name: getattr(old, name) for name in changed}
    return replace(new, **kept), f"{', '.join(changed)} changed: takes effect when mpsagent is restarted"
