"""Who a uid is. Looked up by a hand that may block; here only the value."""

from __future__ import annotations

from typing import NamedTuple


class Identity(NamedTuple):
    """``name`` is None for a uid without an entry; ``groups`` in the order of the name service, primary first."""

    uid: int
    name: str | None = None
    groups: tuple[str, ...] = ()
