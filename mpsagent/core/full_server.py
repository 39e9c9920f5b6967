"""Users whom a full server of all users keeps out: without turns, its places become free only when clients exit.

If a file of the policy sets ``turn.time_limit``, it bounds the wait: the oldest client of the user with most places is
terminated when that client has run, and a user without any place has waited, for this time. A user who is alone may use
all places that a user may have.
"""

from __future__ import annotations

from typing import NamedTuple

from mpsagent.core.bounds import bound, use_of
from mpsagent.core.model import Client
from mpsagent.core.pause_room import has_to_leave
from mpsagent.core.view import View


class KeptOut(NamedTuple):
    """The user without a place who has waited longest, since ``since``. ``client``: the one that is terminated for this
    user at the time ``due``; both are None if the policy ends no client there."""

    uid: int
    since: float
    client: Client | None
    due: float | None


def kept_out(view: View) -> KeptOut | None:
    """Return the user whom a full server keeps out; None if there is no such user."""
    one_server = view.user is None and view.together and view.shared and view.policy.sharing == "one-server"
    if not one_server or not view.full or view.state.drain is not None:
        return None
    contexts, use, held = view.contexts(), use_of(view), view.state.held
    waits = {uid: held.line(uid) for uid in view.waiting() if not contexts.get(uid)}
    first = {
        uid: min(one.since for one in line)
        for uid, line in waits.items()
        if line and (why := bound(view, uid, line, use)) is not None and why.word == "full"
    }
    if not first:
        return None
    uid, since = min(first.items(), key=lambda one: (one[1], one[0]))
    for holder in sorted(contexts, key=lambda one: (-contexts[one], one)):
        clients = [one for one in view.state.clients_of_user(holder) if one.counts]
        rules = view.rules(holder)
        # the default limit of a turn terminates no program where there are no turns
        limited = bool(rules.origin("turn.time_limit").file)
        if clients and rules.switch_after is not None and limited and has_to_leave(view, holder):
            oldest = min(clients, key=lambda one: (one.since, one.pid))
            return KeptOut(uid, since, oldest, max(since, oldest.since) + rules.switch_after)
    return KeptOut(uid, since, None, None)
