"""Shares and leases as values."""

from __future__ import annotations

from typing import Any

import pytest

from mpsagent.snapshot.lease_body import NAME
from mpsagent.snapshot.lease_body import asked as checked
from mpsagent_kubernetes.shares import LASTING, Pod, Shares, has_lease, is_uid, lease, ours, renewed

UID = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"
POD = Pod("default", "train", UID, f"/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice", 3)
NOW = 1_800_000_000.0


def given(**changed: Any) -> dict[str, Any]:
    """A lease as the API lists it."""
    return {
        "id": 7, "name": lease(POD, Shares())["name"], "cgroup": POD.cgroup, "active_threads": "30%",
        "memory_limit": {"": "30%"},
        "total_active_threads": "60%", "total_memory_limit": "60%", "max_clients": None,
        "until": "2027-02-14T08:00:00.000+00:00", **changed,
    }  # fmt: skip


@pytest.mark.parametrize(("count", "shares", "percent"), [(100, 30, 30.0), (10, 3, 30.0), (7, 2, 28.5), (3, 3, 100.0)])
def test_shares_are_percent_rounded_down(count: int, shares: int, percent: float) -> None:
    assert Shares(count).percent(shares) == percent
    assert len(set(Shares(count).devices)) == count


@pytest.mark.parametrize(
    "pod",
    [
        POD,
        Pod("n" * 63, "x" * 30 + "." + "y" * 222, UID, POD.cgroup, 1),
        Pod("kube-system", "static-node-1", "0f343b0931126a20f133d67c2b018a3b", POD.cgroup, 100),
    ],
)
def test_the_api_takes_the_lease(pod: Pod) -> None:
    """With names as long as Kubernetes allows, and the uid of a static pod."""
    for shares in (Shares(), Shares(100, memory=False)):
        body = lease(pod, shares)
        assert NAME.fullmatch(body["name"])
        assert checked(body, NOW).seconds == LASTING
        assert has_lease(pod, [{"name": body["name"]}])
        assert ("memory_limit" in body) is shares.memory


@pytest.mark.parametrize(("processes", "each"), [(1, 30.0), (4, 7.5), (7, 4.2)])
def test_a_pod_has_its_shares_in_total_and_each_process_an_equal_part(processes: int, each: float) -> None:
    body = lease(POD, Shares(10, processes=processes))
    assert (body["active_threads"], body["total_active_threads"]) == (f"{each:g}%", "30%")
    assert (body["memory_limit"], body["total_memory_limit"]) == (f"{each:g}%", "30%")


def test_leases_of_others_are_not_ours() -> None:
    mine = given()
    others = [given(name=name) for name in (None, "", "slurm-17", f"pod:x:{UID}x", UID)]
    assert ours([*others, mine]) == [mine]
    assert not has_lease(POD, others)


def test_a_lease_is_renewed_with_what_it_was_given_when_half_of_it_is_over() -> None:
    from datetime import UTC, datetime

    until = NOW + LASTING
    one = given(until=datetime.fromtimestamp(until, UTC).isoformat())
    assert renewed(one, NOW) is None
    assert renewed(one, until - LASTING / 2 - 1) is None
    longer = renewed(one, until - LASTING / 2 + 1)
    given_before = {
        "active_threads": "30%",
        "memory_limit": "30%",
        "total_active_threads": "60%",
        "total_memory_limit": "60%",
    }
    assert longer == lease(POD, Shares(10)) | given_before
    assert "memory_limit" not in (renewed(given(memory_limit=None), until) or {"memory_limit": 1})


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (UID, True),
        ("0f343b0931126a20f133d67c2b018a3b", True),
        ("x" + UID[1:], False),
        ("../../etc", False),
        ("", False),
    ],
)
def test_uids(text: str, right: bool) -> None:
    assert is_uid(text) is right
