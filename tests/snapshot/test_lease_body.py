"""A lease as it is shown."""

from __future__ import annotations

from mpsagent.core.model import State
from mpsagent.core.view import View
from mpsagent.policy.identity import Identity
from mpsagent.policy.shares import Lease, Share
from mpsagent.snapshot.lease_body import shown


def test_a_lease_without_a_user_is_not_roots() -> None:
    view = View(State(identities={0: Identity(0, "root"), 7: Identity(7, "alice")}))
    users = [shown(Lease(1, Share("order"), 0.0, 9.0, 0, uid=uid), view)["user"] for uid in (None, 0, 7, 8)]
    assert users == [None, "root", "alice", None]
