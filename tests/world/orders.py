"""Orders as people give them: a process of theirs that connects to the agent's socket, says one message and hears one
answer. What became of each is in its :class:`Order`, which the judges read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.world.kernel import Socket
from tests.world.mps import End, Steps
from tests.world.world import ORDERS

if TYPE_CHECKING:
    from tests.world.world import World

ANSWERED = 15.0
"""Seconds in which an order is answered: the name service may take 5, the gate 5, disk and api 1 each."""
AT_ONCE = 2.5
"""The same of root's beside a flood of users' orders, where nothing else is slow."""
KINDS = {
    "terminate": "client.end_ordered", "drain": "drain.ordered", "restart-mps": "control.restart_ordered",
    "reload": "policy.loaded", "lease": "lease.given", "delete-lease": "lease.ended",
}  # fmt: skip
"""The record of each order that was carried out."""
ADMINISTRATORS = frozenset({"drain", "resume", "restart-mps", "reload", "lease", "delete-lease"})
FOR_NOTHING = (
    b"{", b"[]", b"x" * 20_000, b'{"order": "drain"}', b'{"order": "resume"}', b'{"order": "restart-mps"}',
    b'{"order": "reload"}', b'{"order": "terminate", "pid": 1}', b'{"order": "terminate-each", "mine": true}',
    b'{"order": "lease", "uid": 2001, "active_threads": "100%", "until": "1h"}',
    b'{"order": "delete-lease", "number": 1}', b"",
)  # fmt: skip
"""What a user may ask as often as there is time; the last one is said never."""


@dataclass(eq=False)
class Order:
    """``at``: when it was asked; ``heard``: when it was answered; ``lost``: the agent went without an answer."""

    uid: int
    body: dict[str, Any]
    at: float
    heard: float | None = None
    status: int | None = None
    answer: dict[str, Any] = field(default_factory=dict)
    lost: bool = False

    @property
    def what(self) -> str:
        return str(self.body["order"])


def give(world: World, body: dict[str, Any], uid: int = 0, then: Callable[[Order], object] = lambda _: None) -> Order:
    """``then`` hears of its end."""
    order = Order(uid, body, world.kernel.now)
    world.orders.append(order)
    process = world.kernel.spawn("mpsagent-cli", uid, uid, world.kernel.init)

    def steps() -> Steps:
        end = End(process, Socket(world.kernel))
        world.kernel.connect(process, ORDERS[0 if uid else 1][0], end.file)
        end.say(json.dumps(body).encode())
        message = yield from end.hear()
        if message is None:
            order.lost = True
        else:
            said = json.loads(message.data)
            order.heard, order.status, order.answer = world.kernel.now, said["status"], said["answer"]
        then(order)
        end.close()

    world.kernel.program(process, steps())
    return order


def flood(world: World, uid: int, seconds: float) -> None:
    """Many connections of a user at a time, as fast as they are answered."""
    until = world.kernel.now + seconds
    for _ in range(12):
        process = world.kernel.spawn("mpsagent-cli", uid, uid, world.kernel.init)
        world.kernel.program(process, _again_and_again(world, process, until))


def _again_and_again(world: World, process: Any, until: float) -> Steps:
    kernel = world.kernel
    while kernel.now < until:
        end = End(process, Socket(kernel))
        try:
            kernel.connect(process, ORDERS[0][0], end.file)
        except BlockingIOError:
            end.close()
            yield [], kernel.now + 0.005
            continue
        if said := kernel.chance.choice(FOR_NOTHING):
            end.say(said)
        yield from end.hear(until)
        end.close()
        yield [], kernel.now + 0.01


def wrong(world: World, since: float, bound: float) -> Iterator[str]:
    """``since``: the last fault that can have held up an answer."""
    now = world.kernel.now
    for one in world.orders:
        what = f"the order {one.body} of user {one.uid}"
        if one.status is None and not one.lost and now - max(one.at, since) > bound:
            yield f"{what} is not answered after {now - one.at:.1f} s"
        if one.status == 500 or (one.status == 429 and not one.uid):
            yield f"{what} fails: {one.answer}"
        if one.status == 200 and one.uid and one.what in ADMINISTRATORS:
            yield f"{what} is carried out, and only an administrator may order that"


def unrecorded(world: World) -> Iterator[str]:
    """Orders that were carried out and that the history does not have, by who gave them."""
    had = [(one["kind"], one.get("by")) for one in world.received.history.since(0, 10_000)]
    for one in world.orders:
        kind = KINDS.get(one.what)
        if one.status != 200 or kind is None or one.body.get("dry_run"):
            continue
        who = None if kind == "policy.loaded" else one.uid
        if (kind, who) not in had:
            yield f"the order {one.body} of user {one.uid} was carried out and is not on record"
        else:
            had.remove((kind, who))
