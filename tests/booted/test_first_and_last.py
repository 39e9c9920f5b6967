"""The first moment in which users may come, and what holds while no agent is there."""

from __future__ import annotations

from tests.booted.gate import waiting_client
from tests.booted.machine import Machine
from tests.booted.service import (
    ALICE,
    BOB,
    CLIENT,
    MULTIPROCESSORS,
    SHARES,
    agent_pid,
    assert_served_exactly,
    enable,
    multiprocessors,
    ready,
    until,
)

PIPE = "/tmp/mps-of-this-node"
FRONT_END = "nvidia-cuda-mps-control"


def test_when_the_unit_is_up_users_may_come(node: Machine) -> None:
    """Units that are ordered after the agent start CUDA programs at once: none may run outside MPS. And where the
    public directory is not NVIDIA's default, everyone is told."""
    node.write("/etc/mpsagent/policy.d/20-place.toml", f'[instance.gpu0]\npipe_directory = "{PIPE}"\n')
    enable(node, wait=False)
    place = node.path("/run/mpsagent/user.env").read_text()
    assert place == f"CUDA_MPS_PIPE_DIRECTORY={PIPE}\n"
    login = node.run("sh", "-c", f". /etc/profile.d/mpsagent.sh && exec {CLIENT} query", user=BOB)
    assert multiprocessors(login.stdout) == MULTIPROCESSORS * SHARES[BOB] // 200 * 2
    service = node.run("/usr/lib/systemd/user-environment-generators/50-mpsagent", user=BOB)
    assert service.stdout == place


def test_while_no_agent_is_there_who_comes_waits_and_gets_what_is_due_then(running: Machine) -> None:
    """Killed with everything of its unit, and limits changed by hand meanwhile: neither reaches the next user."""
    assert_served_exactly(running, ALICE)
    running.write("/etc/systemd/system/mpsagent.service.d/later.conf", "[Service]\nRestartSec=1h\n")
    running.systemctl("daemon-reload")
    running.systemctl("kill", "--signal=KILL", "mpsagent.service")
    until("it has ended", lambda: agent_pid(running) == "0")
    running.run(FRONT_END, text="set_default_active_thread_percentage 100\n")
    client = waiting_client(running, BOB)
    running.systemctl("restart", "mpsagent.service")
    said = client.communicate(timeout=60)[0]
    assert client.returncode == 0, said
    assert multiprocessors(said) == MULTIPROCESSORS * SHARES[BOB] // 200 * 2
    until("ready for users", lambda: ready(running))
