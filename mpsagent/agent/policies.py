"""Reading the policy, and what of a new one can take hold while the agent runs."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mpsagent.agent.settings import Settings
from mpsagent.policy.files import load
from mpsagent.policy.policy import Policy, PolicyError
from mpsagent.system.policy_files import Texts, read_policy_files
from mpsagent.system.threads import in_thread

LAST = "last-policy.json"
FIXED = ("pipe_directory", "log_directory", "control_program", "devices", "parked_user", "instance")
"""Settings of the instance that its running daemon was started with."""


async def read(settings: Settings) -> tuple[Policy | None, tuple[PolicyError, ...]]:
    """The policy of the files, or everything that is wrong with them. A good one is remembered."""
    texts, unread = await read_policy_files(settings.policy, settings.policy_directory)
    try:  # aside: a large one takes longer than a waiting client can wait
        policy, mistakes = await in_thread(load, texts, deadline=30.0)
        if policy is not None and not unread and not mistakes and settings.state_directory is not None:
            await in_thread(_remember, settings.state_directory, texts, deadline=5.0)
    except Exception as error:
        return None, (*unread, PolicyError(settings.policy, 0, "", f"cannot be taken in: {error!r}", ""))
    return policy, (*unread, *mistakes)


async def last_good(settings: Settings) -> Policy | None:
    """The policy that was in force before the agent was started: a mistake in the file must not lift the limits of
    everybody when the agent is started again."""
    with suppress(Exception):
        path = Path(settings.state_directory or "/nonexistent", LAST)
        text = await in_thread(path.read_bytes, deadline=5.0)
        policy, mistakes = await in_thread(load, [(name, one) for name, one in json.loads(text)], deadline=30.0)
        return None if mistakes else policy
    return None


def _remember(directory: str, texts: Texts) -> None:
    """Readable by root alone, as the directory is."""
    path = Path(directory, LAST)
    fresh = path.with_suffix(".new")
    with suppress(OSError):
        fresh.write_text(json.dumps(texts))
        fresh.replace(path)


def keep_fixed(old: Policy, new: Policy) -> tuple[Policy, str | None]:
    """The new policy with the old instance, and a sentence about what waits for a restart."""
    changed = [name for name in FIXED if getattr(old, name) != getattr(new, name)]
    if not changed:
        return new, None
    kept = {name: getattr(old, name) for name in changed}
    return replace(new, **kept), f"{', '.join(changed)} changed: takes hold when the agent is started again"
