"""What a reload would change, and for whom: two policies compared user by user. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mpsagent.mps.limits import Device
from mpsagent.policy.identity import Identity
from mpsagent.policy.keys import KEYS, Key, Scope
from mpsagent.policy.origins import key_text
from mpsagent.policy.policy import IN_RULES, Policy

OTHERS = 0xFFFFFFFE
"""A uid that no section names, for all users who are not compared on their own."""


def named_users(policies: Iterable[Policy]) -> list[str]:
    """Names and uids that have a section of their own, in the order of the files."""
    return list(dict.fromkeys(path[1] for one in policies for path in one.settings if path[0] == "user"))


def differences(
    old: Policy, new: Policy, users: Sequence[Identity], devices: Sequence[Device], later: Sequence[str] = ()
) -> dict[str, Any]:
    """``users``: those with sections of their own, and those who have to do with MPS now. ``later``: attributes of the
    policy that only take hold when the agent is started again."""
    groups = dict.fromkeys([*old.groups, *new.groups])
    subjects = [
        *((_user(who), who) for who in users),
        *((f"members of {group}", Identity(OTHERS, None, (group,))) for group in groups),
        ("all other users", Identity(OTHERS)),
    ]
    found = [(name, who.uid, _for(old, new, who, devices)) for name, who in subjects]
    changed: list[dict[str, Any]] = [
        {"who": name, "uid": None if uid == OTHERS else uid, "changes": changes}
        for name, uid, changes in found
        if changes
    ]
    settings = [_setting(old, new, key, later) for key in KEYS if _differs(old, new, key)]
    return {"same": not changed and not settings, "digest": new.digest or None, "users": changed, "settings": settings}


def _user(who: Identity) -> str:
    return who.name if who.name is not None else f"user {who.uid}"


def _for(old: Policy, new: Policy, who: Identity, devices: Sequence[Device]) -> list[dict[str, Any]]:
    before, after = old.rules(who).explain(devices), new.rules(who).explain(devices)
    return [
        {"key": name, "before": _told(before[name]), "after": _told(after[name]), "where": _where(after[name]["from"])}
        for name in IN_RULES
        if _effect(before[name]) != _effect(after[name])
    ]


def _effect(one: dict[str, Any]) -> object:
    """What a value comes to; as it was written where that is not known."""
    value = one["value"]
    return one.get("written") if value is None or value == {} else value


def _told(one: dict[str, Any]) -> dict[str, Any]:
    return {"value": one["value"], "written": one.get("written", one["value"])}


def _where(origin: dict[str, Any]) -> str:
    return f"{origin['file']}:{origin['line']}" if origin["file"] else "built-in default"


def _differs(old: Policy, new: Policy, key: Key) -> bool:
    """Return whether a setting that is not a user's differs."""
    if key.scope is Scope.USER or key.in_rules:
        return False
    return bool(getattr(old, key.field) != getattr(new, key.field))


def _setting(old: Policy, new: Policy, key: Key, later: Sequence[str]) -> dict[str, Any]:
    before, after = (_text(key, getattr(one, key.field)) for one in (old, new))
    return {"key": key_text(key.path), "before": before, "after": after, "restart": key.field in later}


def _text(key: Key, value: object) -> str:
    """As a file would have it."""
    return key.absent if value is None and key.absent else key.kind.written(value)
