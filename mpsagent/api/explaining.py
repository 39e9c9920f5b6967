"""What applies to a user at an instance, where each value comes from, and what goes on for the user now. Pure."""

from __future__ import annotations

from mpsagent.api import views
from mpsagent.api.views import Json
from mpsagent.core.inputs import Peer
from mpsagent.core.words import Names
from mpsagent.mps.units import limits_words
from mpsagent.policy import values
from mpsagent.policy.identity import Identity
from mpsagent.policy.keys import ATTRIBUTES_OF_CGROUPS
from mpsagent.policy.sharing import words
from mpsagent.snapshot.page import InstancePage


def explained(one: InstancePage, who: Identity, cgroup: str | None, names: Names, now: float) -> Json:
    view = one.view
    turn = view.turn is not None and view.turn.uid == who.uid
    return {
        **view.policy.rules(who).explain(view.state.devices if one.devices_known else ()),
        **({} if cgroup is None else _there(one, who, cgroup)),
        "sharing": {view.policy.sharing: words(view.policy)},
        "now": {
            "clients": len(view.state.clients_of_user(who.uid)),
            "waiting": next((row for row in views.queue(one, names, now) if row["uid"] == who.uid), None),
            "turn": views.turn(view, {}, names, now) if turn else None,
        },
    }


def _there(one: InstancePage, who: Identity, cgroup: str) -> Json:
    """What a process of this user gets in a cgroup, alone and together with the others there."""
    view = one.view
    share = view.share(Peer(0, who.uid, 0, 0, cgroup))
    if share is None:
        return {"cgroup": "as the user: no section and no lease is for it"}
    place = share.source if share.origin is None else share.origin._asdict()
    given = {name: getattr(share, attribute) for name, attribute in ATTRIBUTES_OF_CGROUPS.items()}
    limits = view.policy.rules(who).limits_within(share, view.state.devices)
    each = {"cgroup": f"each process of {share.whose} has {limits_words(limits.as_json())}"}
    return each | {
        f"cgroup.{name}": {"value": values.written(value), "from": place} for name, value in given.items()
        if value is not None
    }  # fmt: skip
