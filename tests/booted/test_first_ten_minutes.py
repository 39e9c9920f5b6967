"""The first ten minutes of an administrator on a node where four users work: none is harmed, and none waits."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.booted.machine import Machine
from tests.booted.service import CLIENT, SIMULATED, api, until

USERS = {"2001": "alice", "2002": "bob", "2003": "carol", "2004": "dave"}
POLICY = '[limits]\nmemory_limit = "20G"\nmax_clients = 8\n[user.bob]\nmemory_limit = "8G"\n'


class Programs:
    """What the four users have started: everything runs on until the test ends it."""

    def __init__(self, node: Machine) -> None:
        self.node = node
        self.all: list[tuple[str, subprocess.Popen[str]]] = []
        self.waiting: list[int] = []

    def start(self) -> None:
        """One more program of each user. All of them work at once."""
        for uid in USERS:
            program = self.node.start(CLIENT, "sleep", "3000", user=uid)
            assert program.stdout is not None
            said = ""
            while "] sms " not in said:
                line = program.stdout.readline()
                assert line, f"{USERS[uid]}: {said}"
                said += line
            self.all.append((USERS[uid], program))
        self.unharmed()

    def outcome(self) -> str:
        """Return the counts for the record of measurements. Each program that was started has been served."""
        harmed = sum(program.poll() is not None for _, program in self.all)
        return (
            f"{len(self.all)} programs of {len(USERS)} users served, {harmed} harmed, users that wait: {self.waiting}"
        )

    def unharmed(self) -> None:
        ended = [name for name, program in self.all if program.poll() is not None]
        assert not ended, f"programs of {ended} have ended"

    def none_waits(self) -> None:
        """All of them have been served: the page shows it a moment later."""
        until("the queue is empty", lambda: api(self.node, "/v1/queue")["queue"] == [], timeout=10)
        self.waiting.append(len(api(self.node, "/v1/queue")["queue"]))
        self.unharmed()


def served(node: Machine) -> None:
    """The agent works by the policy that is there now."""
    until("the gate goes by the policy", lambda: api(node, "/v1/status")["gate"]["in_force"])


def enable_default(node: Machine) -> None:
    """Start the agent on the simulator's GPUs, without any policy of the administrator."""
    node.write(
        "/etc/systemd/system/mpsagent.service.d/simulated.conf",
        "[Service]\nExecStart=\n"
        f"ExecStart=/usr/bin/mpsagent run --supervise systemd --devices {SIMULATED}/devices.json\n",
    )
    node.systemctl("daemon-reload")
    node.systemctl("enable", "--now", "mpsagent.socket", "mpsagent.service")
    served(node)


@pytest.mark.timeout(600)
def test_doctor_succeeds_strictly_on_a_healthy_default_node(node: Machine) -> None:
    """`doctor --strict` has exit status 0 before any program works and while four users do. The compute mode, which no
    administrator has to change, is one note in `doctor` and nothing in `status`."""
    node.run("sh", "-ec", f"ln -sf {SIMULATED}/nvidia-* /usr/bin/")  # both programs of the driver, as in First hour
    enable_default(node)
    strict(node)
    for uid, name in USERS.items():
        node.run("useradd", "--uid", uid, "--no-create-home", name)
    programs = Programs(node)
    programs.start()
    programs.none_waits()
    strict(node)
    shown = node.run("mpsagent-cli", "status").stdout
    assert "EXCLUSIVE_PROCESS" not in shown
    assert "not sure" not in shown
    assert api(node, "/v1/status")["not_guaranteed"] == []
    for _, program in programs.all:
        program.kill()


def strict(node: Machine) -> None:
    """`doctor --strict` succeeds without a warning, and notes the compute mode once."""
    done = node.run("mpsagent-cli", "doctor", "--strict", "--json", check=False)
    found = json.loads(done.stdout)["findings"]
    assert [one for one in found if one["grade"] in ("warning", "problem")] == []
    assert done.returncode == 0
    assert [one["grade"] for one in found if "EXCLUSIVE_PROCESS" in one["what"]] == ["note"]


@pytest.mark.timeout(600)
def test_nobody_notices_the_first_ten_minutes(node: Machine, package: Path) -> None:
    """Install, look, report, write a policy, enforce it, uninstall: with programs of four users from before the
    installation, and new ones at each step. Installing turned the GPU into one of a single user."""
    node.run("dpkg", "--purge", "mpsagent")
    for uid, name in USERS.items():
        node.run("useradd", "--uid", uid, "--no-create-home", name)
    programs = Programs(node)
    programs.start()  # outside MPS, as on a node without it

    shutil.copyfile(package, node.path("/root/mpsagent.deb"))
    node.run("dpkg", "--install", "/root/mpsagent.deb")
    enable_default(node)
    programs.start()
    programs.none_waits()

    of_other_packages = (["bench", "--list"], ["timeline"], ["replay", "--help"], ["policy", "advise"])
    of_agent = (["status"], ["doctor"], ["clients"], ["queue"], ["policy", "explain", "bob"], ["report"])
    for verb in (*of_agent, *of_other_packages):
        said = node.run("mpsagent-cli", *verb, check=False)
        assert said.returncode in (0, 1), f"{verb}: {said.stdout}{said.stderr}"
    status = api(node, "/v1/status")
    assert {one["uid"] for one in status["instances"][0]["daemons"]} == {int(uid) for uid in USERS}
    assert status["outside_processes"] == len(USERS), "programs from before the installation are shown"

    node.write("/etc/mpsagent/policy.d/99-report.toml", "mode = 'report'\n")
    node.write("/etc/mpsagent/policy.d/10-lab.toml", POLICY)
    node.run("mpsagent-cli", "policy", "check")
    node.run("mpsagent-cli", "reload")
    served(node)
    programs.start()
    programs.none_waits()

    node.path("/etc/mpsagent/policy.d/99-report.toml").unlink()
    node.run("mpsagent-cli", "policy", "diff", check=False)
    node.run("mpsagent-cli", "reload")
    served(node)
    programs.start()
    programs.none_waits()
    limits = {one["uid"]: one["limits"]["memory"] for one in api(node, "/v1/clients")["clients"]}
    assert limits[2002]["0"] == 8 << 30, "the newest program of each user has the policy's limits"

    node.run("systemctl", "disable", "--now", "mpsagent.service", "mpsagent.socket")
    node.run("dpkg", "--remove", "mpsagent")
    programs.unharmed()
    programs.start()  # outside MPS again
    print(programs.outcome())
    for _, program in programs.all:
        program.kill()
