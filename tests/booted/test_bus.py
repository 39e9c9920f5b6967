"""What the agent asks of systemd over D-Bus, against a real one: the control daemon's unit and the gate's units."""

from __future__ import annotations

import json
from typing import Any

from tests.booted.gate import GATE, SOCKETS
from tests.booted.machine import Machine

HEAD = """
import asyncio, json, subprocess, sys
sys.path.insert(0, "/usr/lib/mpsagent/lib/python%d.%d" % sys.version_info[:2])
from mpsagent.system.control import ControlProblem
from mpsagent.system.control_unit import ControlUnit
from mpsagent.system.directories import directories, prepare_hidden, prepare_log
from mpsagent.system.gate_units import GateUnits

def of(policy_place="/tmp/nvidia-mps", instance="default"):
    return directories(instance, policy_place, "/var/log/nvidia-mps")

where = of()
prepare_hidden(where)
prepare_log(where.log)
environment = {"CUDA_MPS_LOG_DIRECTORY": where.log, "PATH": "/usr/bin:/bin"}

async def start(program="nvidia-cuda-mps-control", **options):
    control = ControlUnit("default", where.hidden, lambda pid: None, program=program)
    found = await control.start(environment, 20, **options)
    if isinstance(found, ControlProblem):
        return [found.kind.name, found.text]
    said = ["RUNNING", found.how, found.multiuser, found.threads]
    again = await ControlUnit("default", where.hidden, lambda pid: None, program=program).adopt()
    subprocess.run(["systemctl", "stop", control.unit], check=True)
    return [*said, again.pid == found.pid, again.how]
"""


def inside(node: Machine, script: str) -> Any:
    """What a coroutine ``main`` of the script returns, run as root in the machine."""
    node.write("/opt/script.py", HEAD + script + "\nprint(json.dumps(asyncio.run(main())))\n")
    return json.loads(node.run("/usr/bin/python3", "-I", "/opt/script.py").stdout)


def test_the_control_daemons_unit_is_started_adopted_stopped_and_its_failures_understood(node: Machine) -> None:
    """With the exit status, which only systemd knows: without it the reason is in another unit's journal."""
    for status in (244, 1, 3):
        node.write(f"/opt/{status}/nvidia-cuda-mps-control", f"#!/bin/sh\nexit {status}\n", 0o755)
    found = inside(
        node,
        """
async def main():
    return [
        await start(),
        await start(multiuser=True),
        await start("/opt/244/nvidia-cuda-mps-control"),
        await start("/opt/1/nvidia-cuda-mps-control", multiuser=True),
        await start("/opt/3/nvidia-cuda-mps-control"),
        await start("/opt/nothing/nvidia-cuda-mps-control"),
    ]
""",
    )
    unit = "mpsagent-control@default.service"
    good = ["RUNNING", f"started as {unit}", False, "20.0", True, f"its unit {unit}"]
    assert found[:2] == [good, [*good[:2], True, *good[3:]]]
    assert [kind for kind, _ in found[2:]] == ["FAILED", "UNSUPPORTED", "FAILED", "MISSING"]
    assert "libcuda.so.1" in found[2][1]
    assert "status 3" in found[4][1]


def test_a_start_that_waits_for_another_unit_has_not_failed(node: Machine) -> None:
    """At boot the unit comes after nvidia-persistenced, and on a busy node systemd answers long before it begins: until
    then the unit is `inactive`, without a reason."""
    node.write(
        "/etc/systemd/system/nvidia-persistenced.service",
        "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=sh -c 'until [ -e /run/go ]; do sleep 0.05; done'\n",
    )
    node.systemctl("daemon-reload")
    node.systemctl("start", "--no-block", "nvidia-persistenced.service")
    found = inside(
        node,
        """
from pathlib import Path
from mpsagent.system.control_unit import SystemBus

async def main():
    starting = asyncio.ensure_future(start())
    while not starting.done() and not SystemBus().state("mpsagent-control@default.service").job:
        await asyncio.sleep(0.01)
    await asyncio.wait([starting], timeout=0.3)
    early = starting.done()
    Path("/run/go").touch()
    return [early, (await starting)[0]]
""",
    )
    assert found == [False, "RUNNING"]


def test_the_gates_units_are_started_and_follow_the_policy(node: Machine) -> None:
    """Also after the reason why they did not start has gone: a directory of a user's."""
    node.run("rm", "-rf", "/tmp/nvidia-mps")
    node.run("mkdir", "/tmp/nvidia-mps", user="2001")
    assert node.run("systemctl", "start", GATE, check=False).returncode != 0
    refused = inside(node, "async def main(): return await GateUnits().ensure(where)")
    assert f"{SOCKETS[0]}: failed" in refused
    assert f"journalctl -b -u {SOCKETS[0]}" in refused
    node.run("rm", "-r", "/tmp/nvidia-mps")
    assert inside(node, "async def main(): return await GateUnits().ensure(where)") is None
    before = node.show(GATE, "MainPID")
    assert inside(node, "async def main(): return await GateUnits().ensure(where)") is None
    assert node.show(GATE, "MainPID") == before, "what runs as it should is left alone"
    node.write("/etc/mpsagent/policy.d/20.toml", '[instance.gpu0]\npipe_directory = "/run/here"\n')
    script = 'async def main(): return await GateUnits().ensure(of("/run/{}", "gpu0"))'
    assert inside(node, script.format("here")) is None
    assert [node.systemctl("is-active", unit) for unit in (*SOCKETS, GATE)] == ["active"] * 3
    assert sorted(path.name for path in node.path("/run/here").iterdir()) == ["control", "control_privileged"]
    assert "drop-in" in inside(node, script.format("elsewhere"))
