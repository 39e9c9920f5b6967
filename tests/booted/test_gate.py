"""The gate's units: who waits goes on waiting, whatever ends, and the public directory is nobody else's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from mpsagent.mps.units import multiprocessors_for_percent
from tests.booted.gate import (
    CONTROL,
    GATE,
    HIDDEN,
    LOG,
    PUBLIC,
    SOCKETS,
    admit,
    gate_pid,
    held,
    start_daemon,
    start_gate,
    waiting_client,
)
from tests.booted.machine import Machine
from tests.booted.service import (
    ALICE,
    BOB,
    CLIENT,
    MULTIPROCESSORS,
    Worker,
    api,
    enough,
    multiprocessors,
    ready,
    until,
    until_it_computes,
)


def command(node: Machine) -> list[str]:
    """The gate's command line; empty while it starts anew."""
    try:
        return node.path(f"/proc/{gate_pid(node)}/cmdline").read_bytes().decode().split("\0")
    except FileNotFoundError:
        return []


def stored(node: Machine) -> int:
    """Descriptors in systemd's store."""
    return int(node.show(GATE, "NFileDescriptorStore")["NFileDescriptorStore"])


def assert_served(client: subprocess.Popen[str], percent: float) -> None:
    """It gets exactly this share, and has not noticed anything."""
    text = client.communicate(timeout=60)[0]
    assert client.returncode == 0, text
    assert multiprocessors(text) == multiprocessors_for_percent(percent, MULTIPROCESSORS), text


def test_who_waits_goes_on_waiting_through_every_end_of_the_gate(node: Machine) -> None:
    """Killed at once and again, restarted, stopped for good and started by the next client: none is refused, none runs
    outside MPS, the order stays."""
    start_gate(node)
    start_daemon(node)
    clients = [waiting_client(node, user) for user in (ALICE, BOB, ALICE)]
    order = [int(ALICE), int(BOB), int(ALICE)]
    assert held(node) == order
    for _ in range(5):
        pid = gate_pid(node)
        node.run("kill", "-KILL", pid)
        until("a new gate", lambda pid=pid: gate_pid(node) not in ("0", pid))  # type: ignore[misc]
        until("it listens", lambda: node.systemctl("is-active", GATE, check=False) == "active")
        assert held(node) == order
    node.systemctl("restart", GATE)
    assert held(node) == order
    assert all(client.poll() is None for client in clients)
    assert stored(node) >= len(clients)
    admit(node, u2001=60, u2002=20)
    for client, share in zip(clients, (60, 20, 60), strict=True):
        assert_served(client, share)
    until("nothing is left in the store", lambda: stored(node) == 0)


def test_a_gate_that_dies_again_and_again_does_not_cost_the_socket(node: Machine) -> None:
    """systemd gives up on a socket whose service fails too often, unless it is told not to: then everyone would run
    outside MPS."""
    start_gate(node)
    client = waiting_client(node, BOB)
    for _ in range(40):
        node.systemctl("kill", "--signal=KILL", GATE, check=False)
    node.systemctl("start", GATE)
    assert [node.systemctl("is-active", unit) for unit in SOCKETS] == ["active", "active"]
    start_daemon(node)
    admit(node, u2002=20)
    assert_served(client, 20)


def test_a_gate_that_hangs_is_replaced(node: Machine) -> None:
    """Stopped by a signal or stuck: the watchdog hears nothing, and who waits is served by the next one."""
    node.write("/etc/systemd/system/mpsagent-gate.service.d/quick.conf", "[Service]\nWatchdogSec=2\n")
    node.systemctl("daemon-reload")
    start_gate(node)
    start_daemon(node)
    client = waiting_client(node, BOB)
    pid = gate_pid(node)
    node.run("kill", "-STOP", pid)
    until("a new gate", lambda: gate_pid(node) not in ("0", pid))
    until("it listens", lambda: node.systemctl("is-active", GATE, check=False) == "active")
    admit(node, u2002=20)
    assert_served(client, 20)


def test_without_the_agent_it_goes_on_with_what_it_was_told_last(node: Machine) -> None:
    """Also a gate that is new: the last admissions are in a file that only root can write."""
    start_gate(node)
    start_daemon(node)
    admit(node, u2002=20)
    node.run("kill", "-KILL", gate_pid(node))
    assert multiprocessors(node.run(CLIENT, "query", user=BOB).stdout) == MULTIPROCESSORS * 20 // 200 * 2
    waiting_client(node, ALICE).kill()
    assert node.path("/run/mpsagent/admissions.json").stat().st_mode & 0o777 == 0o600


def test_a_users_program_cannot_go_around_the_gate(node: Machine) -> None:
    """The daemon's own directory is closed to users, and open to their servers."""
    start_gate(node)
    start_daemon(node)
    admit(node, u2002=20)
    around = {"CUDA_MPS_PIPE_DIRECTORY": HIDDEN}
    assert node.run("ls", HIDDEN, user=BOB, check=False).returncode != 0
    text = node.run(CLIENT, "query", user=BOB, environment=around, check=False).stdout
    assert "sms 132" in text, "it runs outside MPS, as with any directory where nothing listens"
    control = node.path(f"{LOG}/control.log").read_text()
    assert "NEW CLIENT" not in control
    assert multiprocessors(node.run(CLIENT, "query", user=BOB).stdout) == MULTIPROCESSORS * 20 // 200 * 2


def test_an_upgrade_under_way_refuses_nobody(node: Machine) -> None:
    """The package restarts gate and agent; sockets, store and control daemon stay."""
    start_gate(node)
    start_daemon(node)
    clients = [waiting_client(node, user) for user in (ALICE, BOB)]
    gate, daemon = gate_pid(node), node.show(CONTROL, "MainPID")["MainPID"]
    newer = node.path("/root/newer")
    node.run("dpkg-deb", "-R", "/root/mpsagent.deb", "/root/newer")
    control = newer / "DEBIAN/control"
    control.write_text(re.sub(r"(?m)^Version: .*$", "Version: 99.0", control.read_text()))
    node.run("dpkg-deb", "-Znone", "--build", "/root/newer", "/root/newer.deb")
    node.run("dpkg", "--install", "/root/newer.deb")
    until("a new gate", lambda: gate_pid(node) not in ("0", gate))
    assert node.show(CONTROL, "MainPID")["MainPID"] == daemon
    assert held(node) == [int(ALICE), int(BOB)]
    admit(node, u2001=60, u2002=20)
    for client, share in zip(clients, (60, 20), strict=True):
        assert_served(client, share)


def test_a_directory_that_a_user_has_taken_is_refused_at_once_and_taken_back_by_a_boot(node: Machine) -> None:
    """In sticky /tmp whoever comes first owns the name; all clients would talk to him."""
    node.run("rm", "-rf", PUBLIC)
    node.run("mkdir", PUBLIC, user=BOB)
    assert node.run("systemctl", "start", GATE, check=False).returncode != 0
    assert node.systemctl("is-active", SOCKETS[0], check=False) == "failed"
    said = node.journal("-u", SOCKETS[0])
    assert f"{PUBLIC} belongs to uid {BOB}" in said
    assert f"rm -r {PUBLIC}" in said
    # The next boot finds it in a /tmp that is kept, as on many machines.
    node.run("touch", f"{PUBLIC}/control", user=BOB)
    node.run("systemd-tmpfiles", "--create", "mpsagent.conf")
    start_gate(node)
    found = node.path(PUBLIC).stat()
    assert (found.st_uid, found.st_mode & 0o777) == (0, 0o755)
    assert sorted(path.name for path in node.path(PUBLIC).iterdir()) == ["control", "control_privileged"]
    assert node.path(f"{PUBLIC}/control").stat().st_uid == 0


def test_a_daemon_that_was_started_by_hand_is_left_alone_and_said(node: Machine) -> None:
    """With people's work on it; its place is taken when it has ended."""
    node.run("nvidia-cuda-mps-control", "-d")
    worker = node.start(CLIENT, "sleep", "600", user=BOB)
    before = until_it_computes(worker)
    assert node.run("systemctl", "start", GATE, check=False).returncode != 0
    said = node.journal("-u", SOCKETS[0])
    pid = node.path(f"{PUBLIC}/nvidia-cuda-mps-control.pid").read_text().strip()
    assert f"{PUBLIC} is served by process {pid} of root" in said
    assert "echo quit" in said
    enough(node, BOB)
    text = before + worker.communicate(timeout=60)[0]
    assert (worker.returncode, "last CUDA_SUCCESS" in text) == (0, True), text
    node.run("nvidia-cuda-mps-control", text="quit\n")
    until("it has ended", lambda: node.run("pgrep", "-f", "mps-control", check=False).returncode == 1)
    start_gate(node)


def test_the_common_hand_written_unit_neither_takes_the_gates_place_nor_is_stopped(node: Machine) -> None:
    """Two control daemons on one directory are a riddle for everyone; stopping one ends people's work."""
    node.write(
        "/etc/systemd/system/nvidia-mps.service",
        "[Service]\nType=forking\nExecStart=/usr/bin/nvidia-cuda-mps-control -d\n"
        "[Install]\nWantedBy=multi-user.target\n",
    )
    node.systemctl("daemon-reload")
    node.systemctl("start", "nvidia-mps.service")
    assert node.run("systemctl", "start", GATE, check=False).returncode != 0
    assert node.systemctl("is-active", "nvidia-mps.service") == "active"
    node.systemctl("stop", "nvidia-mps.service")
    start_gate(node)
    inode = node.path(f"{PUBLIC}/control").stat().st_ino
    node.systemctl("start", "nvidia-mps.service")
    assert node.systemctl("is-active", "nvidia-mps.service", check=False) == "inactive"
    assert node.show("nvidia-mps.service", "ConditionResult") == {"ConditionResult": "no"}
    assert node.path(f"{PUBLIC}/control").stat().st_ino == inode
    node.systemctl("enable", "nvidia-mps.service", GATE)
    node.reboot()
    assert [node.systemctl("is-active", unit) for unit in (*SOCKETS, GATE)] == ["active"] * 3
    assert node.systemctl("is-active", "nvidia-mps.service", check=False) == "inactive"


def test_the_policy_decides_where_the_sockets_are(node: Machine) -> None:
    """Units name paths; a generator reads the policy at each reload."""
    place, log = "/run/mps-of-this-node", "/srv/mps-logs"
    node.write(
        "/etc/mpsagent/policy.d/20-place.toml",
        f'[instance.gpu0]\npipe_directory = "{place}"\nlog_directory = "{log}"\n',
    )
    node.systemctl("daemon-reload")
    start_gate(node)
    assert sorted(path.name for path in node.path(place).iterdir()) == ["control", "control_privileged"]
    words = command(node)
    assert words[words.index("--daemon") + 1] == "/run/mpsagent/instances/gpu0/pipe"
    assert f"ReadWritePaths=-{log}" in node.systemctl("cat", "mpsagent.service")
    node.path("/etc/mpsagent/policy.d/20-place.toml").write_text("[instance\n")
    node.systemctl("daemon-reload")
    assert f"ListenSequentialPacket={PUBLIC}/control" in node.systemctl("cat", SOCKETS[0]), "a broken policy: defaults"


@pytest.mark.timeout(600)
def test_an_agent_that_cannot_start_opens_the_gate_with_the_fail_safe_limits(node: Machine) -> None:
    """Nobody waits for ever because of a bug of ours; and as soon as an agent starts it decides again."""
    node.write(
        "/etc/systemd/system/mpsagent.service.d/broken.conf",
        "[Service]\nEnvironment=MPSAGENT_OPEN_AFTER=3\nExecStart=\nExecStart=/bin/false\n",
    )
    node.systemctl("daemon-reload")
    start_gate(node)
    node.systemctl("start", "--no-block", "mpsagent.service")
    client = node.start(CLIENT, "query", user=BOB)
    assert_served(client, 10)
    assert node.systemctl("is-active", "mpsagent-open.service") == "active"
    assert "fallback limits" in node.journal("-u", "mpsagent.service")
    # One that starts: systemd hears that it is ready.
    node.write(
        "/etc/systemd/system/mpsagent.service.d/broken.conf",
        "[Service]\nType=exec\nExecStart=\nExecStart=/bin/sleep infinity\n",
    )
    node.systemctl("daemon-reload")
    until("an agent", lambda: node.systemctl("is-active", "mpsagent.service", check=False) == "active")
    until("closed", lambda: node.systemctl("is-active", "mpsagent-open.service", check=False) == "inactive")
    until("the gate is back", lambda: node.systemctl("is-active", GATE, check=False) == "active")
    waiting_client(node, BOB).kill()


def test_who_masks_the_opening_keeps_the_gate_closed(node: Machine) -> None:
    """For sites where waiting is better than users who are let in with the fallback limits."""
    node.write(
        "/etc/systemd/system/mpsagent.service.d/broken.conf",
        "[Service]\nEnvironment=MPSAGENT_OPEN_AFTER=1\nExecStart=\nExecStart=/bin/false\n",
    )
    node.systemctl("daemon-reload")
    node.systemctl("mask", "mpsagent-open.service")
    start_gate(node)
    waiting = waiting_client(node, BOB)
    node.systemctl("start", "--no-block", "mpsagent.service")
    until("it is said", lambda: "has not started" in node.journal("-u", "mpsagent.service"))
    until("it is tried on", lambda: int(node.show("mpsagent.service", "NRestarts")["NRestarts"]) > 12)
    assert waiting.poll() is None
    assert "pass" not in command(node)
    waiting.kill()


def test_an_agent_that_is_given_up_opens_the_gate(node: Machine) -> None:
    """The unit never fails for good; with a start limit of the administrator's it does."""
    node.write(
        "/etc/systemd/system/mpsagent.service.d/limit.conf",
        "[Unit]\nStartLimitIntervalSec=600\nStartLimitBurst=2\n[Service]\nExecStart=\nExecStart=/bin/false\n",
    )
    node.systemctl("daemon-reload")
    start_gate(node)
    client = node.start(CLIENT, "query", user=BOB)
    node.systemctl("start", "--no-block", "mpsagent.service")
    assert_served(client, 10)
    assert node.show("mpsagent.service", "ActiveState", "NRestarts") == {"ActiveState": "failed", "NRestarts": "2"}


@pytest.mark.parametrize("moment", ["ExecStartPre", "ExecStartPost"])
def test_an_agent_that_starts_while_the_gate_is_being_opened_closes_it(node: Machine, moment: str) -> None:
    """It opened after the agent had closed it, and then it stayed open."""
    node.write("/etc/systemd/system/mpsagent-open.service.d/slow.conf", f"[Service]\n{moment}=/bin/sleep 600\n")
    node.write(
        "/etc/systemd/system/mpsagent.service.d/started.conf",
        "[Service]\nType=exec\nExecStart=\nExecStart=/bin/sleep infinity\n",
    )
    node.systemctl("daemon-reload")
    start_gate(node)
    node.systemctl("start", "--no-block", "mpsagent-open.service")
    until("it opens", lambda: node.systemctl("is-active", "mpsagent-open.service", check=False) == "activating")
    if moment == "ExecStartPost":
        until("the gate is open", lambda: "pass" in command(node))
    node.systemctl("start", "mpsagent.service")
    ended = ("inactive", "failed")
    until("it is closed", lambda: node.systemctl("is-active", "mpsagent-open.service", check=False) in ended)
    until("the gate is back", lambda: node.systemctl("is-active", GATE, check=False) == "active")
    words = command(node)
    assert words
    assert "pass" not in words
    waiting_client(node, BOB).kill()


def test_opened_and_closed_by_hand(node: Machine) -> None:
    """For the person on call, without the agent; who was held before is served."""
    start_gate(node)
    client = waiting_client(node, BOB)
    node.systemctl("start", "mpsagent-open.service")
    assert_served(client, 10)
    node.systemctl("stop", "mpsagent-open.service")
    until("the gate is back", lambda: node.systemctl("is-active", GATE, check=False) == "active")
    waiting_client(node, BOB).kill()


def test_roots_front_end_works_as_always(node: Machine) -> None:
    """`echo get_server_list | nvidia-cuda-mps-control`, by everyone's habit, through the public directory."""
    start_gate(node)
    start_daemon(node, 20)
    said = node.run("nvidia-cuda-mps-control", text="get_default_active_thread_percentage\n").stdout
    assert float(said.split()[-1]) == 20.0


def test_who_waits_at_a_gate_that_is_stopped_waits_on_or_is_said_to_have_lost_its_place(running: Machine) -> None:
    """systemd before 254 keeps nothing of a unit that is stopped: who waits is refused there, and not "went away"."""
    worker = Worker(running, ALICE)
    waiting = running.start(CLIENT, "query", user=BOB)
    until("it waits", lambda: api(running, "/v1/queue")["queue"])
    running.systemctl("stop", GATE)
    running.systemctl("start", GATE)
    until("ready for users", lambda: ready(running))
    if running.show(GATE, "FileDescriptorStorePreserve"):
        assert [one["uid"] for one in api(running, "/v1/queue")["queue"]] == [int(BOB)]
        worker.finish()
        assert_served(waiting, 20)
    else:
        assert "MPS_CONNECTION_FAILED" in waiting.communicate(timeout=60)[0]
        [left] = [one for one in api(running, "/v1/events?limit=1000")["events"] if one["kind"] == "client.left"]
        assert left["lost"]
        worker.finish()


def test_stopped_with_its_socket_it_is_gone(node: Machine, tmp_path: Path) -> None:
    """What `systemctl stop` of the sockets means: the public directory is empty, and the next start finds it so."""
    del tmp_path
    start_gate(node)
    node.systemctl("stop", *SOCKETS, GATE)
    assert list(node.path(PUBLIC).iterdir()) == []
    assert not node.path("/run/mpsagent/public-control").is_symlink()
    start_gate(node)
