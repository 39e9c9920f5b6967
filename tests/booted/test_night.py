"""The commands of docs/operations.md for the night when it goes wrong, on a booted machine with users at work."""

from __future__ import annotations

import pytest

from tests.booted.gate import GATE
from tests.booted.machine import Machine
from tests.booted.service import ALICE, BOB, CLIENT, assert_served_exactly, enough, multiprocessors, ready, until
from tests.booted.service import until_it_computes as until_at_work

STRICTEST = 26
"""Multiprocessors: 20 percent, the smallest share in the tests' policy."""


@pytest.mark.parametrize("sharing", ["turns", "together"])
def test_out_of_the_way_with_one_command_and_everybody_served(running: Machine, sharing: str) -> None:
    """Work goes on, who waits and who comes is served, no order of a user's starts the agent; and the way back."""
    running.write("/etc/mpsagent/policy.d/20-way.toml", f'[instance.default]\nsharing = "{sharing}"\n')
    running.systemctl("restart", "mpsagent.service")
    until("ready for users", lambda: ready(running))
    worker = running.start(CLIENT, "sleep", "600", user=ALICE)
    said = until_at_work(worker)
    other = running.start(CLIENT, "query", user=BOB)

    running.systemctl("start", "mpsagent-off")
    stopped = ("mpsagent.service", "mpsagent.socket", "mpsagent-admin.socket")
    assert [running.systemctl("is-active", unit, check=False) for unit in stopped] == ["inactive"] * 3
    order = running.run("mpsagent-cli", "client", "terminate", "1", user=ALICE, check=False)
    assert (order.returncode, running.systemctl("is-active", "mpsagent.service", check=False)) == (3, "inactive")
    assert [multiprocessors(running.run(CLIENT, "query", user=ALICE).stdout) for _ in range(3)] == [STRICTEST] * 3
    if sharing == "together":
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
