"""What of a new policy can take hold while the agent runs."""

from __future__ import annotations

from dataclasses import replace

from mpsagent.decisions.policy import Policy

FIXED = ("pipe_directory", "log_directory", "control_program", "devices", "parked_user", "instance")
"""Settings of the instance that its running daemon was started with."""


def keep_fixed(old: Policy, new: Policy) -> tuple[Policy, str | None]:
    """The new policy with the old instance, and a sentence about what waits for a restart."""
    changed = [name for name in FIXED if getattr(old, name) != getattr(new, name)]
    if not changed:
        return new, None
    kept = {name: getattr(old, name) for name in changed}
    return replace(new, **kept), f"{', '.join(changed)} changed: takes hold when the agent is started again"
