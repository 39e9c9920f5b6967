"""Instances with ``sharing = "per-user"``: each user gets one of the section. Pure.

The section's own has no control daemon. Those of its users are named after it and the uid: ``gpu0-u1001``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mpsagent.policy.policy import Policy

LONGEST = 47
"""Characters in such a section's name: with a uid of ten the path of a lane's sockets has 107, and no more fit."""
_NAME = re.compile(r"(.+)-u(0|[1-9][0-9]{0,9})")


def daemon_name(section: str, user: int | None) -> str:
    """The name of a user's lane; that of all users has the section's."""
    return section if user is None else f"{section}-u{user}"


def section_of(instance: str, user: int | None) -> str:
    """Return the section of an instance: its own name, unless it is the lane of this user."""
    return instance if user is None else instance.removesuffix(f"-u{user}")


def split(instance: str) -> tuple[str, int] | None:
    """The section and the uid in such a name; None: it is no such name."""
    found = _NAME.fullmatch(instance)
    return None if found is None else (found[1], int(found[2]))


def users(section: str, names: Iterable[str]) -> list[int]:
    """The users who have instances of this section, by these names."""
    return [one[1] for one in map(split, names) if one is not None and one[0] == section]


def log_directory(policy: Policy, uid: int) -> str:
    """The logs of a user's control daemon have a directory of their own below the section's."""
    return f"{policy.log_directory}/u{uid}"
