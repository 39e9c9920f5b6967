"""Part of modes.py: two GPUs. Who is placed where, a fault on one of them, and the same with one instance for both."""

from __future__ import annotations

import random
import re
import time
from collections import Counter

from campaigns.gate_place import Out
from campaigns.modes_place import Lane, all_end, at_work, shuffled
from tests.scenes.stage import Agent, Client, Stage

EIGHT = tuple(range(20001, 20009))
OTHER_EIGHT = tuple(range(20011, 20019))
UNEVEN = (1, 2, 3, 4, 6, 7, 8, 9)
"""Clients of each user: 40 together, as eight users with five each."""
POLICY = (
    '[limits]\nactive_threads = "10%"\nmemory_limit = "1G"\n[timeouts]\nfault_recovery = "2s"\nsigkill_delay = "1s"\n'
)
SECOND = """sharing = "one-server"
[instance.second]
devices = ["{uuid}"]
sharing = "one-server"
pipe_directory = "{pipe}"
log_directory = "{log}/second"
control_daemon_path = "{control}"
[agent]
placement = "least-loaded"
"""


def placement(here: Lane, out: Out) -> None:
    if len(here.gpus) < 2:
        out.wrong("two GPUs are needed: --gpu 0,1")
        return
    loads = out.table(
        "Clients of eight users, in random order", *("instances", "clients", "of each user", "clients on each GPU"),
        *("users on each GPU", "busiest to idlest", "users on both"),
    )  # fmt: skip
    faults = out.table(
        "An illegal access on the first GPU, four users with two clients each on either", "instances",
        *("hit there", "hit on the other GPU", "new clients of the first GPU: first result after (s)", "of the other"),
        "refused",
    )  # fmt: skip
    two = here.stage()
    extra = SECOND.format(uuid=here.gpus[1], pipe=two.rig.pipe, log=two.rig.log, control=here.backend.control)
    agent = here.agent(two, POLICY, extra)
    ratios = [
        _load(here, out, loads, two, "one for each GPU, least-loaded", EIGHT, (5,) * 8),
        _load(here, out, loads, two, "one for each GPU, least-loaded", OTHER_EIGHT, UNEVEN),
    ]
    apart = _fault(out, faults, two, agent, "one for each GPU", {})
    out.check(apart[1] == 0, f"{apart[1]} clients on the other GPU were hit")
    two.end()
    one = here.stage()
    agent = here.agent(one, POLICY, 'sharing = "one-server"\n', here.gpus[:2])
    _load(here, out, loads, one, "one for both GPUs", EIGHT, (5,) * 8)
    devices = {uid: str(number // 4) for number, uid in enumerate(EIGHT)}
    both = _fault(out, faults, one, agent, "one for both GPUs", devices)
    out.say(
        f"40 clients of 8 users: busiest to idlest GPU {ratios[0]} with 5 each, {ratios[1]} with 1 to 9 each; an "
        f"illegal access on one GPU: {apart[0]} hit there, {apart[1]} on the other, whose new clients had their first "
        f"result after {apart[2]} s; with one instance for both {both[1]} on the other, and {both[2]} s"
    )


def gpu_of(client: Client) -> str:
    """The beginning of its GPU's UUID, as it says itself."""
    found = re.search(r" using (GPU-[0-9a-f]+)", client.text())
    return found[1] if found else "none"


def _load(
    here: Lane, out: Out, rows: list[list[object]], stage: Stage, what: str, uids: tuple[int, ...],
    numbers: tuple[int, ...],
) -> str:  # fmt: skip
    """All 40 at work at the same time; the ratio of the busiest GPU to the idlest."""
    asked = dict(zip(uids, numbers, strict=True))
    order = shuffled(random.Random(4), [uid for uid, number in asked.items() for _ in range(number)])
    if here.quick:
        order = order[: len(order) // 2]
    crowd = []
    for uid in order:
        crowd.append(stage.client(uid, "sleep", 600))
        time.sleep(0.1)
    there = at_work(stage, crowd)
    clients = Counter(gpu_of(one) for one in there)
    users = {uuid: {one.uid for one in there if gpu_of(one) == uuid} for uuid in clients}
    loads = sorted((clients[uuid] for uuid in clients), reverse=True) + [0] * (2 - len(clients))
    both = sum(sum(uid in found for found in users.values()) > 1 for uid in asked)
    ratio = f"{loads[0] / loads[1]:.2f}" if loads[1] else f"{loads[0]} to 0"
    of_each = "5" if len(set(numbers)) == 1 else ", ".join(map(str, numbers))
    spread = " and ".join(str(len(found)) for found in users.values())
    rows.append([what, len(order), of_each, " and ".join(map(str, loads)), spread, ratio, both])
    out.check(len(there) == len(order), f"{len(there)} of {len(order)} clients had contexts at the same time")
    out.check(both == 0, f"{both} users had clients on both GPUs")
    all_end(crowd)
    for one in crowd:
        out.check(one.rc == 0, f"{what}: rc {one.rc}: {one.text()[-200:]}")
    return ratio


def _fault(
    out: Out, rows: list[list[object]], stage: Stage, agent: Agent, what: str, devices: dict[int, str]
) -> tuple[int, int, str]:
    """Clients hit on the first GPU and on the other one, and when new ones of the other had their first result."""

    def client(uid: int, *mode: float | str) -> Client:
        return stage.client(uid, *(str(one) for one in mode), **({"DEV": devices[uid]} if devices else {}))

    crowd = []
    for number in range(2):
        for uid in EIGHT:  # one after the other, so that the users are spread before their second clients come
            crowd.append(client(uid, "sleep", 600))
            if not number:
                crowd[-1].working()
    at_work(stage, crowd)
    guilty = crowd[0]
    here = gpu_of(guilty)
    mark = agent.mark()
    culprit = client(guilty.uid, "oob", 0.1)
    agent.wait("server.fault", since=mark)
    home = {one.uid: gpu_of(one) == here for one in crowd}
    # Those who ignore what has happened are ended by the policy after 2 s, and so long the server takes nobody.
    new = [client(uid) for uid in EIGHT]
    took = firsts(new)
    culprit.ended()
    mine = [one for one in crowd if home[one.uid]]
    others = [one for one in crowd if not home[one.uid]]
    all_end([one for one in crowd if one.rc is None])
    hit = [sum("work now" in one.text() or one.rc not in (0,) for one in some) for some in (mine, others)]
    spans = [
        _span([seconds for uid, seconds in took.items() if home[uid] is there]) for there in (True, False)
    ]  # fmt: skip
    for one in new:
        one.ended()
    refused = sum(one.rc != 0 for one in new)
    rows.append([what, f"{hit[0]} of {len(mine)}", f"{hit[1]} of {len(others)}", *spans, refused])
    out.check(len(mine) == len(others) == len(EIGHT), f"{what}: {len(mine)} and {len(others)} clients on the GPUs")
    out.check(hit[0] == len(mine), f"{what}: the fault hit {hit[0]} of {len(mine)} on its GPU")
    out.check(not refused, f"{what}: {refused} new clients were not served: {[one.text() for one in new if one.rc]}")
    return hit[0], hit[1], spans[1]


def firsts(clients: list[Client]) -> dict[int, float]:
    """Seconds from its start to its first result, of each user's client that has one."""
    took: dict[int, float] = {}
    end = time.monotonic() + 60
    while len(took) < len(clients) and time.monotonic() < end:
        for one in clients:
            if one.uid not in took and "] sms " in one.text():
                took[one.uid] = time.monotonic() - one.started.since
        time.sleep(0.005)
    return took


def _span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}" if values else "none"
