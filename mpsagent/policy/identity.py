"""Who a uid is: the value alone. `system.names` looks it up."""

from __future__ import annotations

from typing import NamedTuple


class Identity(NamedTuple):
    """``name`` is None for a uid without an entry; ``groups`` in the order of the name service, primary first."""

    uid: int
    name: str | None = None
    groups: tuple[str, ...] = ()
