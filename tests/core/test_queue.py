"""Parts of the queue: those of some users, and those of all others."""

from __future__ import annotations

from mpsagent.core.inputs import Peer
from mpsagent.core.model import Held
from mpsagent.core.queue import Queue


def test_the_connections_of_some_users_are_left_out() -> None:
    """A lane of one user has them. The lane of all users is among the lanes as None, and no connection is its own."""
    queue = Queue()
    for number, uid in ((1, 1001), (2, 1002), (3, 1001)):
        queue = queue.put(Held(number, Peer(uid, uid, uid, 10 * uid), float(number)))
    assert [one.connection for one in queue.without_users({None, 1001, 1003}).values()] == [2]
    assert queue.without_users({None, 1003}) is queue
    assert queue.without_users(()) is queue
