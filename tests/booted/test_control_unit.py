"""mpsagent-control@.service on the simulator: what the agent relies on when it starts and stops a control daemon."""

from __future__ import annotations

import re

import pytest

from tests.booted.machine import Machine
from tests.booted.service import CLIENT, SIMULATED, enough, until, until_it_computes
from tests.nvidia import abilities, fetch
from tests.nvidia.page import saw

FRONT_END = "nvidia-cuda-mps-control"
UNIT = "mpsagent-control@gpu0.service"
PIPE = "/run/mpsagent/instances/gpu0/pipe"
LOG = "/var/log/nvidia-mps"
AROUND = {"CUDA_MPS_PIPE_DIRECTORY": PIPE}
A_USER = "2001"


def prepare(node: Machine, threads: str = "20") -> None:
    """What the agent does before it starts the unit: directories and environment. Clients go around the gate here."""
    node.run("install", "-d", "-m", "0755", PIPE, LOG)
    node.write(
        "/run/mpsagent/instance-gpu0.env",
        f"CUDA_MPS_PIPE_DIRECTORY={PIPE}\nCUDA_MPS_LOG_DIRECTORY={LOG}\nCUDA_MPS_ACTIVE_THREAD_PERCENTAGE={threads}\n"
        "MPSAGENT_CONTROL=nvidia-cuda-mps-control\nMPSAGENT_CONTROL_OPTIONS=\n",
        0o600,
    )


def log(node: Machine, name: str = "control.log") -> str:
    return node.path(f"{LOG}/{name}").read_text()


def daemon(node: Machine) -> str:
    return node.path(f"{PIPE}/nvidia-cuda-mps-control.pid").read_text().strip()


def test_systemd_finds_the_daemon_and_gives_it_its_environment(node: Machine) -> None:
    """There is no PIDFile=: systemd has to guess right, and the fail-safe limit must hold from its first moment."""
    prepare(node)
    node.systemctl("start", UNIT)
    state = node.show(UNIT, "ActiveState", "MainPID")
    assert state == {"ActiveState": "active", "MainPID": daemon(node)}
    answer = node.run(FRONT_END, text="get_default_active_thread_percentage\n", environment=AROUND).stdout
    assert answer.strip() == "20.0"
    assert "quit" not in log(node), "the text for ExecStop was read by the daemon"


def test_a_server_and_its_clients_belong_where_they_should(node: Machine) -> None:
    """The server is in the unit's cgroup and ends with it; the users' processes are not in it and are left alone."""
    prepare(node)
    node.systemctl("start", UNIT)
    client = node.start(CLIENT, "query", user=A_USER, environment=AROUND)
    assert client.communicate(timeout=60)[0]
    assert client.returncode == 0
    group = node.path("/sys/fs/cgroup" + node.show(UNIT, "ControlGroup")["ControlGroup"])
    inside = {line for line in (group / "cgroup.procs").read_text().split() if line != "0"}
    assert len(inside) == 2, "the daemon and one server"


def test_stopping_the_unit_quits_the_daemon_in_words(node: Machine) -> None:
    """`ExecStop=echo quit | ...`, as hand-written units have it, does nothing; this one must be heard."""
    prepare(node)
    node.systemctl("start", UNIT)
    node.run(CLIENT, "query", user=A_USER, environment=AROUND)
    node.systemctl("stop", UNIT)
    assert re.search(r"quit", log(node))
    assert "Exit with status 0" in log(node), "its end was the daemon's own, not the timeout's"
    assert node.show(UNIT, "ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
    assert node.run("pgrep", "-f", "nvidia-cuda-mps", check=False).returncode == 1


def test_the_unit_ends_when_its_daemon_is_killed(node: Machine) -> None:
    """The agent learns of it over D-Bus; systemd itself starts nothing again behind its back."""
    prepare(node)
    node.systemctl("start", UNIT)
    node.run("kill", "-KILL", daemon(node))
    until("the unit has ended", lambda: node.show(UNIT, "ActiveState") == {"ActiveState": "failed"})
    assert node.show(UNIT, "Result") == {"Result": "signal"}
    node.systemctl("reset-failed", UNIT)
    node.systemctl("start", UNIT)
    assert node.show(UNIT, "MainPID")["MainPID"] == daemon(node), "the stale files of the one before are in the way"


def test_no_start_without_the_agents_preparation(node: Machine) -> None:
    """Started by hand without an environment file, the daemon would run with no limits at all."""
    assert node.run("systemctl", "start", UNIT, check=False).returncode != 0
    assert node.show(UNIT, "ActiveState")["ActiveState"] == "failed"
    assert node.run("pgrep", "-f", "nvidia-cuda-mps", check=False).returncode == 1


def test_options_and_program_come_from_the_agent(node: Machine) -> None:
    """One server for all users, and a `control_daemon_path` of the policy's."""
    prepare(node)
    node.run("ln", "-s", f"{SIMULATED}/nvidia-cuda-mps-control", "/opt/nvidia-cuda-mps-control")
    environment = node.path("/run/mpsagent/instance-gpu0.env")
    text = environment.read_text().replace("CONTROL=nvidia", "CONTROL=/opt/nvidia")
    environment.write_text(text.replace("OPTIONS=", "OPTIONS=--multiuser-server"))
    node.systemctl("start", UNIT)
    assert node.show(UNIT, "MainPID")["MainPID"] == daemon(node)
    assert "--multiuser-server" in node.path(f"/proc/{daemon(node)}/cmdline").read_text().split("\0")
    node.run(CLIENT, "query", user=A_USER, environment=AROUND)
    node.systemctl("stop", UNIT)
    assert node.show(UNIT, "ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}


@pytest.mark.parametrize("signal", ["TERM", "KILL"])
def test_a_client_survives_the_end_of_the_unit_as_a_process(node: Machine, signal: str) -> None:
    """KillMode= reaches the servers, never users' processes: they get an error from CUDA and decide themselves."""
    prepare(node)
    node.systemctl("start", UNIT)
    client = node.start(CLIENT, "sleep", "600", user=A_USER, environment=AROUND)
    until_it_computes(client)
    node.run("kill", f"-{signal}", daemon(node))
    until("the unit has ended", lambda: node.show(UNIT, "MainPID") == {"MainPID": "0"})
    enough(node, A_USER)
    said = client.communicate(timeout=60)[0]
    assert client.returncode >= 0, f"the client was killed by signal {-client.returncode}"
    assert "done" in said


@pytest.mark.parametrize("branch", sorted(fetch.SUITES))
def test_nvidias_daemons_of_older_drivers(node: Machine, branch: str) -> None:
    """470 and 535 write no pid file. systemd guesses the daemon all the same, and it hears the words at the stop."""
    try:
        driver = fetch.get(branch)
    except fetch.Unavailable as error:
        pytest.skip(f"NVIDIA's programs of driver {branch}: {error}")
    node.run("cp", "-a", f"{driver.root}/.", f"/opt/{branch}")
    control = f"/opt/{branch}/{driver.control.relative_to(driver.root)}"
    libraries = f"/opt/{branch}/{driver.libraries.relative_to(driver.root)}"
    prepare(node)
    # What the daemon answers to the unit's words: it is ended as soon as it has, and may not write its last lines.
    heard = "/run/heard"
    node.write("/opt/control", f'#!/bin/sh\n[ $# = 0 ] || exec {control} "$@"\n{control}\necho $? >{heard}\n', 0o755)
    environment = node.path("/run/mpsagent/instance-gpu0.env")
    text = environment.read_text().replace("CONTROL=nvidia-cuda-mps-control", "CONTROL=/opt/control")
    environment.write_text(f"{text}LD_LIBRARY_PATH={libraries}\n")
    node.systemctl("start", UNIT)
    state = node.show(UNIT, "ActiveState", "MainPID")
    assert state["ActiveState"] == "active"
    assert re.search(rf"Control +{state['MainPID']}\] Starting control daemon using socket {PIPE}/control", log(node))
    assert node.path(f"{PIPE}/nvidia-cuda-mps-control.pid").exists() is ("pid_file" in abilities.able(driver.version))
    files = "" if node.path(f"{PIPE}/nvidia-cuda-mps-control.pid").exists() else ", without a pid file"
    node.systemctl("stop", UNIT)
    assert node.show(UNIT, "ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
    assert node.path(heard).read_text() == "0\n"
    saw(driver, "under systemd: the unit knows its daemon, and `quit` ends it at the stop", f"works{files}")
