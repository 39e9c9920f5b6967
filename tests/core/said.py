"""What the gate says of a process, for tests that have it as a Peer."""

from __future__ import annotations

from mpsagent.core.inputs import GateSaid, Peer
from mpsagent.mps.limits import Limits
from mpsagent.wire import link


def knocked(at: float, connection: int, peer: Peer, since: float) -> GateSaid[link.Knock]:
    return GateSaid(at, link.Knock(connection, *peer[:4], since, *peer[4:7]), lineage=peer.lineage)


def known(
    at: float,
    peer: Peer,
    since: float,
    limits: Limits | None,
    connections: int = 1,
    most: Limits | None = None,
    *,
    counts: bool = True,
) -> GateSaid[link.Known]:
    """``most`` None: the limits of the last hand-over are the most that it was given."""
    most = limits if most is None else most
    what = link.Known(*peer[:4], since, limits, peer.cgroup, connections, most=most, counts=counts)
    return GateSaid(at, what, peer.command)


def passed(
    at: float, connection: int, peer: Peer, limits: Limits, fail_safe: bool, seconds: float, status: int = 0
) -> GateSaid[link.Passed]:
    return GateSaid(
        at, link.Passed(connection, peer.pid, peer.uid, peer.start, limits, seconds, at, fail_safe, status=status)
    )
