"""The agent in its unit, through everything that happens to a service: CUDA work must not notice any of it."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from tests.booted.gate import GATE, PUBLIC, SOCKETS, gate_pid
from tests.booted.machine import Machine
from tests.booted.service import (
    ALICE,
    BOB,
    CLIENT,
    MULTIPROCESSORS,
    Worker,
    agent_pid,
    api,
    assert_served_exactly,
    enable,
    multiprocessors,
    ready,
    until,
    until_it_computes,
)

NAMES = ["control", "control_privileged"]


def servers(node: Machine) -> list[object]:
    """What of the servers must not change: the processes and what they were started with."""
    return [[one[key] for key in ("pid", "uid", "started", "limits")] for one in api(node, "/v1/servers")["servers"]]


def test_enabled_it_serves_each_user_by_the_policy(running: Machine) -> None:
    """The main job, as packaged: limits from the first client on, and the journal tells each user's story."""
    assert_served_exactly(running, ALICE)
    assert_served_exactly(running, BOB)
    told = ("-u", "mpsagent", f"MPS_UID={BOB}")
    until("a story", lambda: (story := running.journal(*told)) and "-- No entries --" not in story)
    status = running.show("mpsagent.service", "StatusText", "NRestarts")
    assert status["StatusText"]
    assert status["NRestarts"] == "0"
    assert running.systemctl("is-system-running", check=False) == "running", running.systemctl("--failed")


def test_its_sandbox_lets_it_do_all_that_it_does(running: Machine) -> None:
    """And administrators have a socket of their own."""
    said = running.journal("-u", "mpsagent", "-u", "mpsagent-gate").splitlines()
    words = ("Permission denied", "Operation not permitted", "no socket for administrators")
    assert not [line for line in said if any(word in line for word in words)]
    assert running.path("/run/mpsagent/mpsagent-admin.sock").is_socket()


def test_reload_takes_a_good_policy_and_refuses_a_bad_one(running: Machine) -> None:
    """A typing mistake must neither lift the limits nor go unnoticed."""
    digest = api(running, "/v1/policy")["digest"]
    text = '[user."2002"]\nactive_threads = "30%"\n[agent]\ncdi_file = "/etc/cdi/mpsagent.json"\n'
    running.write("/etc/mpsagent/policy.d/20-new.toml", text)
    running.systemctl("reload", "mpsagent.service")
    good = api(running, "/v1/policy")["digest"]
    assert '"mpsagent/mps"' in running.path("/etc/cdi/mpsagent.json").read_text(), "the unit may write there"
    assert good != digest

    running.write("/etc/mpsagent/policy.d/20-new.toml", '[user."2002"]\nthreds = 90\nmemory_limit = "lots"\n')
    refused = running.run("systemctl", "reload", "mpsagent.service", check=False)
    assert refused.returncode != 0
    policy = api(running, "/v1/policy")
    assert policy["digest"] == good
    assert len(policy["errors"]) == 2
    assert running.run("mpsagent-cli", "status", check=False).returncode == 1
    until("the journal has it", lambda: "threds" in running.journal("-u", "mpsagent"))
    assert running.systemctl("is-active", "mpsagent.service") == "active"
    assert multiprocessors(running.run(CLIENT, "query", user=BOB).stdout) == MULTIPROCESSORS * 30 // 200 * 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP", "restart"])
def test_cuda_work_does_not_notice_that_the_agent_went(running: Machine, how: str) -> None:
    """Killed, stuck or restarted: clients work on, requests wait instead of being refused, the state is as before."""
    worker = Worker(running, ALICE)
    before, pid = servers(running), agent_pid(running)
    if how == "restart":
        running.systemctl("--no-block", "restart", "mpsagent.service")
    else:
        running.run("kill", f"-{how}", pid)
    assert api(running, "/healthz", patience=90) is not None, "a request during the restart waits for the new agent"
    until("a new agent", lambda: agent_pid(running) not in ("0", pid))
    until("the state is as before", lambda: servers(running) == before)
    assert [client["uid"] for client in api(running, "/v1/clients")["clients"]] == [int(ALICE)]
    worker.finish()
    assert_served_exactly(running, BOB)
    until("ready for users", lambda: ready(running))


def test_a_change_of_target_ends_no_cuda_work(running: Machine) -> None:
    """As an administrator does who wants to be rid of a desktop: what no target wants is stopped then."""
    worker = Worker(running, ALICE)
    daemon = running.show("mpsagent-control@default.service", "InvocationID", "ActiveState")
    running.systemctl("isolate", "multi-user.target")
    until("nothing is being stopped", lambda: "No jobs" in running.systemctl("list-jobs"))
    assert running.show("mpsagent-control@default.service", "InvocationID", "ActiveState") == daemon
    worker.finish()


def test_of_a_users_control_daemon_that_was_killed_no_failed_unit_is_left(running: Machine) -> None:
    """The machine was said to be degraded until that user came again."""
    running.write("/etc/mpsagent/policy.d/20-way.toml", '[instance.default]\nsharing = "per-user"\n')
    running.systemctl("reload", "mpsagent.service")
    worker = running.start(CLIENT, "sleep", "600", user=ALICE)
    until_it_computes(worker)
    running.systemctl("kill", "--signal", "KILL", f"mpsagent-control@default-u{ALICE}.service")
    place = running.path("/run/mpsagent/instances")
    until("her lane has gone", lambda: [one.name for one in place.iterdir()] == ["default"])
    assert running.systemctl("is-system-running", check=False) == "running", running.systemctl("--failed")
    worker.kill()


@pytest.mark.parametrize("end", ["KILL", "ABRT"])
def test_an_agent_that_starts_again_after_its_end_does_not_open_the_gate(running: Machine, end: str) -> None:
    """From systemd 254 on OnFailure= fires at every restart, unless the unit says otherwise, and the next user was
    handed over into another's turn."""
    gate = gate_pid(running)
    for _ in range(3):
        pid = agent_pid(running)
        running.run("kill", f"-{end}", pid)
        until("a new agent", lambda pid=pid: agent_pid(running) not in ("0", pid))  # type: ignore[misc]
        until("ready for users", lambda: ready(running))
    assert gate_pid(running) == gate
    opened = running.show("mpsagent-open.service", "ExecMainStartTimestampMonotonic")
    assert opened == {"ExecMainStartTimestampMonotonic": "0"}
    assert_served_exactly(running, BOB)


def test_a_control_daemon_that_is_stopped_by_hand_stops_and_is_started_again(running: Machine) -> None:
    """The stop failed with "Job canceled", because the agent started it meanwhile. A stopped gate has its command."""
    unit = "mpsagent-control@default.service"
    before = running.show(unit, "MainPID")["MainPID"]
    done = running.run("systemctl", "stop", unit, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    until("another one", lambda: running.show(unit, "MainPID")["MainPID"] not in ("0", before))
    until("ready for users", lambda: ready(running))
    assert_served_exactly(running, BOB)
    running.systemctl("stop", "mpsagent-gate.service", "mpsagent-gate.socket")
    until(
        "it is said",
        lambda: "systemctl start mpsagent-gate" in running.run("mpsagent-cli", "status", check=False).stdout,
    )


def test_stopping_the_agent_leaves_mps_running(running: Machine) -> None:
    """Maintenance of the agent is not maintenance of the GPU; a new agent takes over what it finds."""
    worker = Worker(running, ALICE)
    before = servers(running)
    running.systemctl("stop", "mpsagent.socket", "mpsagent.service")
    until("it is said", lambda: running.run("mpsagent-cli", "status", check=False).returncode == 1)
    assert running.run("mpsagent-cli", "resume", check=False).returncode == 3
    running.systemctl("start", "mpsagent.socket", "mpsagent.service")
    until("the state is as before", lambda: servers(running) == before)
    worker.finish()
    assert_served_exactly(running, BOB)


@pytest.mark.timeout(600)
def test_a_public_directory_that_was_removed_comes_back_and_one_that_was_stopped_does_not(running: Machine) -> None:
    """`rm -r /tmp/*`: who started after it would run outside MPS. `systemctl stop` is an order."""
    worker = Worker(running, ALICE)
    running.run("rm", "-rf", PUBLIC)
    public = running.path(PUBLIC)
    until("made again", lambda: public.is_dir() and sorted(os.listdir(public)) == NAMES)
    worker.finish()
    assert_served_exactly(running, BOB)
    running.path(f"{PUBLIC}/control").unlink()
    until("made again", running.path(f"{PUBLIC}/control").exists)
    assert_served_exactly(running, ALICE)
    until("nothing to complain of", lambda: not api(running, "/healthz")["problems"])

    running.systemctl("stop", *SOCKETS)
    until("said", lambda: f"{SOCKETS[0]} is stopped" in str(api(running, "/healthz")["problems"]))
    time.sleep(6)
    assert running.systemctl("is-active", SOCKETS[0], check=False) == "inactive"
    running.systemctl("start", GATE)
    assert_served_exactly(running, BOB)
    until("nothing to complain of", lambda: not api(running, "/healthz")["problems"])

    # The other one alone costs no promise and is said. What is advised brings it back; its start alone would fail.
    def of_root() -> list[str]:
        return [
            one["do"] for one in api(running, "/v1/status")["not_guaranteed"] if "control_privileged" in one["what"]
        ]

    assert not of_root()
    running.systemctl("stop", SOCKETS[1])
    until("said", of_root)
    assert not api(running, "/healthz")["problems"]
    running.run("sh", "-c", of_root()[0])
    until("nothing to say", lambda: not of_root())
    assert running.systemctl("is-active", *SOCKETS) == "active\nactive"


@pytest.mark.timeout(600)
def test_a_socket_for_orders_that_was_stopped_masked_or_removed_is_said_with_what_brings_it_back(
    running: Machine,
) -> None:
    """What is advised does, with CUDA work going on."""
    worker = Worker(running, ALICE)
    admin, orders = "mpsagent-admin.socket", "/run/mpsagent/mpsagent-orders.sock"

    def delayed() -> str:
        doubts = api(running, "/v1/status")["not_guaranteed"]
        return next((one["do"] for one in doubts if "where users can delay them" in one["what"]), "")

    def mended(do: str) -> None:
        running.run("sh", "-c", do)
        until("nothing to say", lambda: not delayed() and ready(running))
        assert running.systemctl("is-active", admin, "mpsagent.socket") == "active\nactive"
        assert running.run("mpsagent-cli", "resume").returncode == 0

    assert not delayed()
    running.systemctl("stop", admin)
    until("said", delayed)
    assert "unmask" not in delayed()
    assert ready(running), "that users can delay root's orders breaks no promise yet"
    assert running.run("mpsagent-cli", "resume").returncode == 0, "they come by the other one"
    mended(delayed())
    running.systemctl("mask", "--now", admin)
    running.systemctl("restart", "mpsagent.service")
    until("said", delayed)  # the file is there, and the agent was not given what listens
    said = " ".join(running.run("mpsagent-cli", "doctor", check=False).stdout.split())
    assert f"{admin} is masked" in said
    mended(delayed())
    running.path(orders).unlink()
    until("said", lambda: not ready(running))
    health = api(running, "/v1/status")["health"]["problems"]
    assert [one["what"] for one in health] == [f"{orders} has gone: users cannot end their own clients"]
    mended(health[0]["do"])
    worker.finish()


@pytest.mark.timeout(600)
def test_the_gate_takes_the_place_of_a_daemon_that_was_started_by_hand_when_that_has_gone(running: Machine) -> None:
    running.systemctl("stop", *SOCKETS)
    running.run("nvidia-cuda-mps-control", "-d")
    assert running.run("systemctl", "start", GATE, check=False).returncode != 0
    until("said", lambda: "control daemon" in str(api(running, "/healthz")["problems"]))
    assert running.systemctl("is-active", SOCKETS[0], check=False) == "failed"
    running.run("nvidia-cuda-mps-control", text="quit\n")
    until("its place is taken", lambda: running.systemctl("is-active", SOCKETS[0], check=False) == "active")
    assert_served_exactly(running, BOB)


def test_an_upgrade_keeps_the_policy_and_disturbs_nobody(running: Machine, package: Path) -> None:
    """`apt upgrade` in the middle of the day."""
    running.path("/etc/mpsagent/policy.toml").open("a").write("\n# mine\n")
    newer = running.path("/root/newer")
    running.run("dpkg-deb", "-R", "/root/mpsagent.deb", "/root/newer")
    control = newer / "DEBIAN/control"
    control.write_text(re.sub(r"(?m)^Version: .*$", "Version: 99.0", control.read_text()))
    for version in newer.glob("usr/lib/mpsagent/lib/*/mpsagent/__init__.py"):
        version.write_text('"""Newer."""\n\n__version__ = "99.0"\n')
    running.run("dpkg-deb", "-Znone", "--build", "/root/newer", "/root/newer.deb")

    worker = Worker(running, ALICE)
    before = servers(running)
    assert api(running, "/v1/status")["agent"]["version"] != "99.0"
    running.run("dpkg", "--install", "/root/newer.deb")
    assert api(running, "/v1/status")["agent"]["version"] == "99.0"
    until("the state is as before", lambda: servers(running) == before)
    assert running.path("/etc/mpsagent/policy.toml").read_text().endswith("# mine\n")
    worker.finish()
    assert_served_exactly(running, BOB)


def test_after_a_reboot_all_is_as_before(running: Machine) -> None:
    """Enabled means enabled; /run and /tmp are empty then, and limits hold from the first client all the same."""
    assert_served_exactly(running, ALICE)
    newest = api(running, "/v1/events?limit=1")
    running.reboot()
    until("ready for users", lambda: ready(running))
    assert_served_exactly(running, BOB)
    assert_served_exactly(running, ALICE)
    assert newest
    assert running.systemctl("is-system-running", check=False) == "running", running.systemctl("--failed")


def test_purge_of_a_running_agent_ends_all_and_leaves_nothing(running: Machine) -> None:
    """The last thing that is done with it has to work as well as the first."""
    assert_served_exactly(running, ALICE)
    running.run("mkdir", "-p", "/etc/cdi")
    running.write("/etc/cdi/gpu.json", '{"kind": "nvidia.com/gpu"}\n')
    running.write("/etc/mpsagent/policy.d/20-cdi.toml", '[agent]\ncdi_file = "/etc/cdi/mps.json"\n')
    running.systemctl("reload", "mpsagent")
    until("containers are told of the gate", running.path("/etc/cdi/mps.json").exists)
    assert "is ended, with the CUDA work" in running.run("dpkg", "--purge", "mpsagent").stderr
    assert os.listdir(running.path("/etc/cdi")) == ["gpu.json"]
    assert running.run("pgrep", "-f", "nvidia-cuda-mps|mpsagent run", check=False).returncode == 1
    for place in ("/etc/mpsagent", "/var/lib/mpsagent", "/run/mpsagent", "/var/log/nvidia-mps", "/usr/lib/mpsagent"):
        assert not running.path(place).exists(), place


@pytest.mark.timeout(600)
def test_removed_and_installed_again_it_takes_over_who_works(running: Machine) -> None:
    """The gate that knew them has gone with the package; the control daemon and their work have not."""
    worker = Worker(running, ALICE)

    def known() -> list[tuple[object, ...]]:
        rows = api(running, "/v1/clients")["clients"]
        return [(one["uid"], one["limits"], one["since"], one["unseen"]) for one in rows]

    until("the client is known", lambda: [one[0] for one in known()] == [int(ALICE)])
    before = known()
    said = running.run("dpkg", "--remove", "mpsagent").stderr
    assert "Programs that start now run without limits" in said
    assert "  systemctl stop mpsagent-control@default.service" in said.splitlines()
    running.run("dpkg", "--install", "/root/mpsagent.deb")
    running.systemctl("enable", "--now", "mpsagent.socket", "mpsagent.service")
    until("the client is known", lambda: [one[0] for one in known()] == [int(ALICE)])
    assert known() == before, "with the limits that it has, and not those of another user"
    waiting = running.start(CLIENT, "query", user=BOB)
    until("the next one waits", lambda: api(running, "/v1/queue")["queue"])
    worker.finish()
    said = waiting.communicate(timeout=60)[0]
    assert multiprocessors(said) == MULTIPROCESSORS * 20 // 200 * 2
    events = api(running, "/v1/events?limit=1000")["events"]
    ended = [event["outcome"] for event in events if event["kind"] == "client.ended" and event["uid"] == int(ALICE)]
    assert ended == ["ok"], "once, when it ended"
    orders = [event for event in events if event.get("action") == "ShutdownServer"]
    assert len(orders) <= 3, "it was told to shut down every few seconds"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["SIGKILL", "restart"])
def test_the_files_of_a_client_that_is_being_ended_are_held_beyond_the_end_of_the_agent(
    node: Machine, how: str
) -> None:
    """Else its neighbours would be lost on a busy GPU. systemd waits for the process that holds them before it starts
    the agent again, for 15 s at most."""
    node.write("/etc/mpsagent/policy.d/09-way.toml", '[instance.default]\nsharing = "one-server"\n')
    enable(node)
    neighbour, victim = (node.start(CLIENT, "train", "600", user=user) for user in (ALICE, BOB))
    for one in (neighbour, victim):
        until_it_computes(one)
    (pid,) = [one["pid"] for one in api(node, "/v1/clients")["clients"] if one["uid"] == int(BOB)]
    node.run("mpsagent-cli", "terminate", str(pid))
    before = agent_pid(node)
    assert holder(node), "its files cannot be held"
    if how == "restart":
        node.systemctl("--no-block", "restart", "mpsagent.service")
    else:
        node.run("kill", "-SIGKILL", before)
    time.sleep(1)
    assert holder(node), "it was killed with the agent"
    until("a new agent", lambda: agent_pid(node) not in ("0", before))
    until("nothing is held any more", lambda: not holder(node))
    assert [one["uid"] for one in api(node, "/v1/clients")["clients"]] == [int(ALICE)]
    assert neighbour.poll() is None


def holder(node: Machine) -> str:
    """The process that holds files of the GPU."""
    return node.run("pgrep", "-x", "sleep", check=False).stdout
