"""Containers by the names of their cgroups, as the engines make them."""

from __future__ import annotations

import pytest

from mpsagent.policy.containers import Container, container

ID = "3f" * 32
POD = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"
BURSTABLE = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD.replace('-', '_')}.slice"


@pytest.mark.parametrize(
    ("cgroup", "found"),
    [
        (f"/machine.slice/libpod-{ID}.scope", Container("podman", ID)),
        (f"/machine.slice/libpod-{ID}.scope/container", Container("podman", ID)),
        (f"/libpod_parent/libpod-{ID}", Container("podman", ID)),
        (f"/user.slice/user-7.slice/user@7.service/user.slice/libpod-{ID}.scope", Container("podman", ID)),
        (f"/system.slice/docker-{ID}.scope", Container("docker", ID)),
        (f"/docker/{ID}", Container("docker", ID)),
        (f"/system.slice/nerdctl-{ID}.scope", Container("containerd", ID)),
        (f"{BURSTABLE}/cri-containerd-{ID}.scope", Container("containerd", ID, POD)),
        (f"{BURSTABLE}/crio-{ID}.scope", Container("cri-o", ID, POD)),
        (f"/kubepods/besteffort/pod{POD}/{ID}", Container(None, ID, POD)),
        (f"/kubepods/pod{POD}/{ID}", Container(None, ID, POD)),
        (f"/docker/{ID}/kubepods/pod{POD}/{ID[::-1]}", Container(None, ID[::-1], POD)),  # a node that is a container
    ],
)
def test_engines(cgroup: str, found: Container) -> None:
    assert container(cgroup) == found


@pytest.mark.parametrize(
    "cgroup",
    [
        None, "", "/", "/slurm/uid_1001/job_17", "/system.slice/docker.service", "/user.slice/user-1001.slice",
        f"/machine.slice/libpod-conmon-{ID}.scope", f"/system.slice/my-docker-{ID}.scope", f"/docker/{ID}x",
        "/docker-.scope", f"/docker-{ID.upper()}.scope",
    ],
)  # fmt: skip
def test_what_is_no_container(cgroup: str | None) -> None:
    assert container(cgroup) is None
