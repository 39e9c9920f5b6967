"""Reading the policy, and what of a new one can take hold while the agent runs."""

from __future__ import annotations

from dataclasses import replace

from mpsagent.agent.settings import Settings
from mpsagent.decisions.policy import Policy, PolicyError
from mpsagent.decisions.policy_file import load
from mpsagent.hands.policy_files import read_policy_files
from mpsagent.hands.threads import in_thread

FIXED = ("pipe_directory", "log_directory", "control_program", "devices", "parked_user", "instance")
"""Settings of the instance that its running daemon was started with."""


async def read(settings: Settings) -> tuple[Policy | None, tuple[PolicyError, ...]]:
    """The policy of the files, or everything that is wrong with them."""
    texts, unread = await read_policy_files(settings.policy, settings.policy_directory)
    try:  # aside: a large one takes longer than a waiting client can wait
        policy, mistakes = await in_thread(load, texts, deadline=30.0)
    except Exception as error:
        return None, (*unread, PolicyError(settings.policy, 0, "", f"cannot be taken in: {error!r}", ""))
    return policy, (*unread, *mistakes)


def keep_fixed(old: Policy, new: Policy) -> tuple[Policy, str | None]:
    """The new policy with the old instance, and a sentence about what waits for a restart."""
    changed = [name for name in FIXED if getattr(old, name) != getattr(new, name)]
    if not changed:
        return new, None
    kept = {name: getattr(old, name) for name in changed}
    return replace(new, **kept), f"{', '.join(changed)} changed: takes hold when the agent is started again"
