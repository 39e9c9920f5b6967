"""The first moment in which users may come, and what is left in force when no agent is there any more."""

from __future__ import annotations

from tests.booted.machine import Machine
from tests.booted.service import BOB, CLIENT, MULTIPROCESSORS, SHARES, enable, multiprocessors, ready, until

PIPE = "/tmp/mps-of-this-node"
FRONT_END = "nvidia-cuda-mps-control"


def test_when_the_unit_is_up_users_may_come(node: Machine) -> None:
    """Units that are ordered after the agent start CUDA programs at once: before the door is open those would run
    outside MPS. And where the pipe directory is not NVIDIA's default, everybody is told."""
    node.write("/etc/mpsagent/policy.d/20-place.toml", f'[instance.gpu0]\npipe_directory = "{PIPE}"\n')
    enable(node, wait=False)
    place = node.path("/run/mpsagent/user.env").read_text()
    assert place == f"CUDA_MPS_PIPE_DIRECTORY={PIPE}\n"
    login = node.run("sh", "-c", f". /etc/profile.d/mpsagent.sh && exec {CLIENT} query", user=BOB)
    assert multiprocessors(login.stdout) == MULTIPROCESSORS * SHARES[BOB] // 200 * 2
    service = node.run("/usr/lib/systemd/user-environment-generators/50-mpsagent", user=BOB)
    assert service.stdout == place


def test_killed_with_all_its_processes_it_leaves_the_floor(running: Machine) -> None:
    """`systemctl kill` ends the agent's helper too; another user's limits must not stay for whoever comes next."""
    running.write("/etc/systemd/system/mpsagent.service.d/once.conf", "[Service]\nRestart=no\n")
    running.systemctl("daemon-reload")
    running.run(FRONT_END, text="set_default_active_thread_percentage 60\n")
    running.systemctl("kill", "--signal=KILL", "mpsagent.service")
    until("it has ended", lambda: running.systemctl("is-active", "mpsagent.service", check=False) == "failed")
    said = running.run(FRONT_END, text="get_default_active_thread_percentage\n").stdout
    assert float(said.split()[-1]) == min(40, *SHARES.values())
    running.systemctl("start", "mpsagent.service")
    until("ready for users", lambda: ready(running))
