"""The JSON of what a reload of the policy would change; see :mod:`mpsagent.api.shapes`."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict


class PolicyChange(TypedDict):
    """``before``, ``after``: the value, and how it was written. ``where``: the file and line that say so."""

    key: str
    before: dict[str, Any]
    after: dict[str, Any]
    where: str


class UserChanges(TypedDict):
    """``who``: a user, the members of a group, or all others. ``uid``: null where it is not one user."""

    who: str
    uid: int | None
    changes: list[PolicyChange]


class SettingChange(TypedDict):
    """A setting that is not a user's, as a file would have it. ``restart``: it takes hold when the agent is started
    again."""

    key: str
    before: str
    after: str
    restart: bool


class PolicyDiff(TypedDict):
    """What a reload would change. ``digest``: of the files."""

    same: bool
    digest: str | None
    users: list[UserChanges]
    settings: list[SettingChange]
