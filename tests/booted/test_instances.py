"""Two instances as units: a control daemon for each GPU, one gate, and users' environment, all inside the sandboxes."""

from __future__ import annotations

import os

from mpsagent.mps.units import multiprocessors_for_percent
from tests.booted.machine import Machine
from tests.booted.service import (
    ALICE,
    BOB,
    CLIENT,
    MULTIPROCESSORS,
    SHARES,
    SIMULATED,
    api,
    enable,
    enough,
    multiprocessors,
    until,
    until_it_computes,
)

SEVERAL = """
[agent]
placement = "least-loaded"
[instance.gpu]
devices = ["each"]
"""


def test_each_gpu_has_a_unit_and_one_gate_serves_both(node: Machine) -> None:
    node.run("mpsagent-sim", "install", SIMULATED, "--gpus", "2")
    node.write("/etc/mpsagent/policy.d/20-several.toml", SEVERAL)
    enable(node)
    pages = {one["name"]: one for one in api(node, "/v1/status")["instances"]}
    assert list(pages) == ["gpu0", "gpu1"]
    for name, page in pages.items():
        shown = node.show(f"mpsagent-control@{name}.service", "MainPID", "ActiveState")
        assert shown == {"MainPID": str(page["control"]["pid"]), "ActiveState": "active"}
        assert page["log_directory"] == f"/var/log/nvidia-mps/{name}"
        assert node.path(f"/var/log/nvidia-mps/{name}/control.log").exists()
    working = [node.start(CLIENT, "sleep", "600", user=user) for user in (ALICE, BOB)]
    said = {user: until_it_computes(process) for user, process in zip((ALICE, BOB), working, strict=True)}
    until("both work", lambda: len(rows(node)) == 2)
    assert {row["instance"] for row in rows(node)} == {"gpu0", "gpu1"}
    assert node.path("/run/mpsagent/user.env").read_text() == (
        "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps\nCUDA_VISIBLE_DEVICES=0\n"
    )
    # one control daemon dies: its user is hit, the other one is not
    hit = next(row for row in rows(node) if row["instance"] == "gpu0")
    node.run("kill", "-KILL", str(pages["gpu0"]["control"]["pid"]))
    until("another daemon", lambda: daemon(node, "gpu0") not in (None, pages["gpu0"]["control"]["pid"]))
    assert daemon(node, "gpu1") == pages["gpu1"]["control"]["pid"]
    for user, process in zip((ALICE, BOB), working, strict=True):
        assert multiprocessors(said[user]) == multiprocessors_for_percent(SHARES[user], MULTIPROCESSORS)
        enough(node, user)
        process.wait(60)
        if user != str(hit["uid"]):
            assert process.returncode == 0, said[user] + (process.stdout.read() if process.stdout else "")
    assert os.path.lexists(node.path("/run/mpsagent/instances/gpu1/pipe/control"))


def rows(node: Machine) -> list[dict[str, object]]:
    return [row for row in api(node, "/v1/clients")["clients"] if row["state"] == "running"]


def daemon(node: Machine, name: str) -> object:
    found = next(one["control"] for one in api(node, "/v1/status")["instances"] if one["name"] == name)
    return found["pid"] if found and found["running"] else None
