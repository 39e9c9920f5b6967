"""The report: sums of users and groups, from those of uids. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpsagent.policy.identity import Identity

Row = dict[str, Any]


def of_groups(rows: Iterable[Mapping[str, Any]], who: Iterable[Identity], named: Sequence[str]) -> list[Row]:
    """Each user in one group: the first of those ``named`` by the policy that the user is in, else the user's first.
    None for users whose groups are not known."""
    found: dict[str | None, Row] = {}
    for row, one in zip(rows, who, strict=True):
        group = next((name for name in named if name in one.groups), one.groups[0] if one.groups else None)
        sums = _sums(row)
        total = found.setdefault(group, {"group": group, "users": 0, **dict.fromkeys(sums, 0)})
        total["users"] += 1
        for name, value in sums.items():
            total[name] = max(total[name], value) if name == "longest" else total[name] + value
    return sorted(found.values(), key=lambda row: str(row["group"]))


def _sums(row: Mapping[str, Any]) -> Row:
    return {name: value for name, value in row.items() if name not in ("uid", "job")}
