"""`mpsagent-cli policy diff`: the real program asks a real agent what a reload would change, and for whom."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from mpsagent.agent.policy_diff import OTHERS, differences
from mpsagent.mps.limits import Device
from mpsagent.policy.identity import Identity
from tests.agent.stage import A, B, Stage
from tests.policies import policy

PROGRAM = str(Path(sys.executable).with_name("mpsagent-cli"))
OLD = (
    f'[limits]\nactive_threads = "20%"\nmemory_limit = "2G"\n[user.{A}]\nactive_threads = "60%"\n[timeouts]\n'
    'control_daemon = "5s"\n'
)
NEW = (
    f'[limits]\nactive_threads = "30%"\nmemory_limit = "2048M"\n[user.{A}]\nactive_threads = "60%"\nmax_clients = 2\n'
    '[user.root]\naccess = "deny"\n[group.daemon]\nmemory_limit = "25%"\n[timeouts]\ncontrol_daemon = "6s"\n'
)


def diff(stage: Stage, *words: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "MPSAGENT_SOCKET": str(stage.place / "agent.sock")}
    command = [PROGRAM, "policy", "diff", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_what_a_reload_would_change_is_said_before_it_does(stage: Stage) -> None:
    """For users with sections, for who is at work, for groups, for all others, and for the agent; nothing is changed by
    asking, and what was said is what comes."""
    agent = stage.with_agent(OLD)
    assert (diff(stage).returncode, diff(stage).stdout.count("changes nothing")) == (0, 1)
    client = stage.client(B, "sleep", 600)
    client.working()
    remembered = (stage.place / "state" / "last-policy.json").read_bytes()
    path = stage.policy(NEW, extra='devices = ["GPU-1"]')
    done = diff(stage)
    assert (done.returncode, done.stderr) == (1, "")
    lines = [" ".join(line.split()).replace(str(path), "policy.toml") for line in done.stdout.splitlines()]
    assert lines == [
        f"user {B}",
        "active_threads 20% -> 30% policy.toml:2",
        f"user {A}",
        "max_clients - -> 2 policy.toml:6",
        "root",
        "access allow -> deny policy.toml:8",
        "active_threads 20% -> 30% policy.toml:2",
        "members of daemon",
        "active_threads 20% -> 30% policy.toml:2",
        "memory_limit 2G -> 25% policy.toml:10",
        "all other users",
        "active_threads 20% -> 30% policy.toml:2",
        "mpsagent itself",
        'timeouts.control_daemon "5s" -> "6s"',
        'instance.devices [] -> ["GPU-1"] when mpsagent is restarted',
        "",
        "A CUDA context keeps its limits. The next one gets the new limits.",
        "To apply it: mpsagent-cli reload",
        "",
        "To apply the settings with that note: systemctl restart mpsagent (no CUDA work is lost)",
    ]
    assert agent.api.get(f"/v1/policy/explain?user={B}")["active_threads"]["value"] == 20.0
    assert (stage.place / "state" / "last-policy.json").read_bytes() == remembered
    body = json.loads(diff(stage, "--json").stdout)
    assert agent.api.order("reload")[0] == 200
    for one in body["users"]:
        if one["uid"] is not None:
            now = agent.api.get(f"/v1/policy/explain?user={one['uid']}")
            assert [now[change["key"]]["value"] for change in one["changes"]] == [
                change["after"]["value"] for change in one["changes"]
            ]
    (left,) = json.loads(diff(stage, "--json").stdout)["settings"]
    assert left == {"key": "instance.devices", "before": "[]", "after": '["GPU-1"]', "restart": True}
    stage.policy("[limits]\nactive_threads = '500%'\n")
    done = diff(stage)  # as a reload says it; the exit status tells it from a difference
    assert (done.returncode, done.stdout, "limits.active_threads" in done.stderr) == (2, "", True)


def test_an_instance_with_a_new_name_is_a_change_until_a_restart(stage: Stage) -> None:
    """ "A reload changes nothing" was the answer while `status` said that the change waits for a restart."""
    agent = stage.with_agent(OLD)
    path = stage.policy(OLD)
    path.write_text(path.read_text().replace("[instance.scene]", "[instance.renamed]"))
    for _ in range(2):
        done = diff(stage)
        assert "instances scene -> renamed when mpsagent is restarted" in " ".join(done.stdout.split())
        assert (done.returncode, "To apply it: systemctl restart mpsagent" in done.stdout) == (1, True)
        assert agent.api.order("reload")[1]["later"] == "instance changed: takes effect when mpsagent is restarted"


def test_only_what_comes_to_something_else_is_a_change() -> None:
    """Another way to write the same, a line that has moved, an entry that says what held anyway."""
    devices = [Device(0, "GPU-0", "H200", 140 << 30, 132)]
    users = [Identity(1001, "alice", ("students",))]
    old = policy('[limits]\nmemory_limit = "2G"\nactive_threads = "50%"\n')
    new = policy(
        '# moved\n[user.alice]\nactive_threads = "50%"\n[limits]\nactive_threads = 66\nmemory_limit = "2048M"\n'
    )
    assert differences(old, new, users, devices) == {"same": True, "digest": new.digest, "users": [], "settings": []}
    found = differences(
        old, policy('mode = "report"\n[limits]\nmemory_limit = "2G"\nactive_threads = "50%"\n'), users, devices
    )
    assert [(one["who"], [change["key"] for change in one["changes"]]) for one in found["users"]] == [
        ("alice", ["mode"]),
        ("all other users", ["mode"]),
    ]
    assert found["users"][1]["uid"] is None
    assert OTHERS not in [one["uid"] for one in found["users"]]
