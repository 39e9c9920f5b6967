"""The commands of docs/operations.md for the night when it goes wrong, on a booted machine with users at work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.booted.gate import GATE, PUBLIC
from tests.booted.machine import Machine
from tests.booted.service import (
    ALICE,
    BOB,
    CLIENT,
    assert_served_exactly,
    enough,
    multiprocessors,
    ready,
    until,
)
from tests.booted.service import until_it_computes as until_at_work
from tests.test_docs import examples

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
STRICTEST = 26
"""Multiprocessors: 20 percent, the smallest share in the tests' policy."""


def commands(node: Machine, word: str) -> None:
    """Runs what the page shows, as a person would who copies it: the block with this word."""
    section = PAGE.read_text(encoding="utf-8").partition("## The night")[2].partition("\n## ")[0]
    (block,) = [one.text for one in examples(section) if word in one.text]
    node.run("sh", "-e", text=block)


@pytest.mark.parametrize("sharing", ["turns", "one-server"])
def test_out_of_the_way_with_one_command_and_everybody_served(running: Machine, sharing: str) -> None:
    """Work goes on, who waits and who comes is served, no order of a user's starts the agent; and the way back."""
    running.write("/etc/mpsagent/policy.d/20-way.toml", f'[instance.default]\nsharing = "{sharing}"\n')
    running.systemctl("restart", "mpsagent.service")
    until("ready for users", lambda: ready(running))
    worker = running.start(CLIENT, "sleep", "600", user=ALICE)
    said = until_at_work(worker)
    other = running.start(CLIENT, "query", user=BOB)

    commands(running, "mpsagent-off")
    stopped = ("mpsagent.service", "mpsagent.socket", "mpsagent-admin.socket")
    assert [running.systemctl("is-active", unit, check=False) for unit in stopped] == ["inactive"] * 3
    order = running.run("mpsagent-cli", "terminate", "1", user=ALICE, check=False)
    assert (order.returncode, running.systemctl("is-active", "mpsagent.service", check=False)) == (3, "inactive")
    assert [multiprocessors(running.run(CLIENT, "query", user=ALICE).stdout) for _ in range(3)] == [STRICTEST] * 3
    if sharing == "one-server":
        assert other.wait(60) == 0
        assert multiprocessors(running.run(CLIENT, "query", user=BOB).stdout) == STRICTEST
    enough(running, ALICE)
    said += worker.communicate(timeout=60)[0]
    assert (worker.returncode, "last CUDA_SUCCESS" in said) == (0, True), said
    assert multiprocessors(other.communicate(timeout=60)[0]) == STRICTEST

    running.systemctl("start", "mpsagent")
    until("ready for users", lambda: ready(running))
    assert running.systemctl("is-active", "mpsagent-off.service", check=False) == "inactive"
    assert b"pass" not in running.path(f"/proc/{running.show(GATE, 'MainPID')['MainPID']}/cmdline").read_bytes()
    assert_served_exactly(running, ALICE)

    commands(running, "99-night.toml")
    status = ("mpsagent-cli", "status")
    until("it is said", lambda: "report mode" in " ".join(running.run(*status, check=False).stdout.split()))
    running.run("rm", "/etc/mpsagent/policy.d/99-night.toml")
    assert running.run("mpsagent-cli", "queue", user=BOB).returncode == 0
    commands(running, "private.conf")
    until("root reads again", lambda: ready(running))
    assert running.run("mpsagent-cli", "queue", user=BOB, check=False).returncode == 3

    commands(running, "mpsagent-off")
    worker = running.start(CLIENT, "sleep", "600", user=ALICE)
    said = until_at_work(worker)
    running.run("dpkg", "--remove", "mpsagent")
    units = ("mpsagent-off.service", "mpsagent-open.service", GATE, "mpsagent-api.service")
    assert [running.systemctl("is-active", unit, check=False) for unit in units] == ["inactive"] * 4
    assert not running.path(f"{PUBLIC}/control").exists(), "who starts now runs without MPS"
    enough(running, ALICE)
    said += worker.communicate(timeout=60)[0]
    assert (worker.returncode, "last CUDA_SUCCESS" in said) == (0, True), said


def test_out_of_the_way_with_users_apart_and_a_boot_brings_it_back(running: Machine) -> None:
    """Who works stays on the user's own daemon, who comes is served, and after a boot the policy holds again."""
    running.write("/etc/mpsagent/policy.d/20-way.toml", '[instance.default]\nsharing = "per-user"\n')
    running.systemctl("restart", "mpsagent.service")
    until("ready for users", lambda: ready(running))
    worker = running.start(CLIENT, "sleep", "600", user=ALICE)
    said = until_at_work(worker)

    commands(running, "mpsagent-off")
    for user in (ALICE, BOB, ALICE):
        assert multiprocessors(running.run(CLIENT, "query", user=user).stdout) == STRICTEST
    enough(running, ALICE)
    said += worker.communicate(timeout=60)[0]
    assert (worker.returncode, "last CUDA_SUCCESS" in said) == (0, True), said

    running.reboot()
    until("ready for users", lambda: ready(running))
    assert running.systemctl("is-active", "mpsagent-off.service", check=False) == "inactive"
    assert_served_exactly(running, ALICE)
