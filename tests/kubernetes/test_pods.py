"""Which pod is in which cgroup: by the kubelet's directories of logs and the cgroups' names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpsagent_kubernetes.pods import Pods, Unknown

OLD, NEW = "1b4e28ba-2fa1-11d2-883f-0016d3cca427", "2b4e28ba-2fa1-11d2-883f-0016d3cca427"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    (tmp_path / "cgroup").mkdir()
    (tmp_path / "cgroup/cgroup.procs").touch()
    return tmp_path


def pods(place: Path) -> Pods:
    return Pods(place / "logs", place / "cgroup")


def made(place: Path, cgroup: str) -> str:
    (place / "cgroup" / cgroup.lstrip("/")).mkdir(parents=True, exist_ok=True)
    return cgroup


@pytest.mark.parametrize(
    "cgroup",
    [
        f"/kubepods.slice/kubepods-pod{NEW.replace('-', '_')}.slice",
        f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{NEW.replace('-', '_')}.slice",
        f"/kubepods/pod{NEW}",
        f"/kubepods/besteffort/pod{NEW}",
        f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod"
        f"{NEW.replace('-', '_')}.slice",
    ],
)
def test_where_kubelets_put_pods(place: Path, cgroup: str) -> None:
    made(place, cgroup)
    (place / f"logs/default_train_{NEW}").mkdir()
    found = pods(place).pod("default", "train", 3)
    assert (found.uid, found.cgroup, found.shares) == (NEW, cgroup, 3)


def test_of_two_with_one_name_it_is_the_later_that_runs(place: Path) -> None:
    """A pod that was deleted and made again: logs of the earlier one stay for a while."""
    for uid in (OLD, NEW):
        (place / f"logs/default_train-0_{uid}").mkdir()
    (place / f"logs/default_train-0-1_{OLD}").mkdir()
    os.utime(place / f"logs/default_train-0_{OLD}")
    made(place, f"/kubepods/pod{NEW}")
    assert pods(place).pod("default", "train-0", 1).uid == NEW
    (place / f"logs/default_train-0_{OLD}/main").mkdir()
    made(place, f"/kubepods/pod{OLD}")
    assert pods(place).pod("default", "train-0", 1).uid == OLD, "the directory that changed last"


def test_what_is_missing_is_said(place: Path) -> None:
    with pytest.raises(Unknown, match="no default_train_UID in"):
        pods(place).pod("default", "train", 1)
    (place / f"logs/default_train_{NEW}").mkdir()
    with pytest.raises(Unknown, match=f"no cgroup of {NEW} below"):
        pods(place).pod("default", "train", 1)
    (place / "logs/default_train_nonsense").mkdir()
    with pytest.raises(Unknown, match=f"no cgroup of {NEW} below"):
        pods(place).pod("default", "train", 1)


@pytest.mark.root
def test_a_cgroup_that_a_user_has_made_is_no_pods(place: Path) -> None:
    (place / f"logs/default_train_{NEW}").mkdir()
    os.chown(place / "cgroup" / made(place, f"/user.slice/pod{NEW}").lstrip("/"), 1101, 1101)
    with pytest.raises(Unknown):
        pods(place).pod("default", "train", 1)


def test_a_pod_has_gone_when_its_cgroup_has(place: Path) -> None:
    """And not when the whole hierarchy is not there: that would end every lease."""
    one = pods(place)
    cgroup = made(place, f"/kubepods/pod{NEW}")
    assert not one.gone(cgroup)
    assert one.gone(f"/kubepods/pod{OLD}")
    (place / "cgroup/cgroup.procs").unlink()
    assert not one.gone(f"/kubepods/pod{OLD}")
