"""The end of one client on a busy GPU: MPS answers before the client's work has left the GPU (recording 16)."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.sim.conftest import A, Client, Mps


def ended(mps: Mps, neighbours: int, wait: float) -> list[Client]:
    """End a training among neighbours. SIGTERM follows ``wait`` seconds after the answer of MPS."""
    mps.start()
    others = [mps.busy(A, "train", "600") for _ in range(neighbours)]
    victim = mps.busy(A, "train", "600")
    assert mps.ctl(f"terminate_client {mps.server()} {victim.pid}") == "0\n"
    time.sleep(wait)
    os.kill(victim.pid, signal.SIGTERM)
    assert victim.end() == -signal.SIGTERM
    return others


def test_a_signal_right_after_the_answer_ends_all_neighbours_on_a_busy_gpu(mps: Mps) -> None:
    others = ended(mps, 4, 0.003)
    assert [one.end() for one in others] == [16] * 4
    log = mps.log("server.log")
    assert log.index("Client termination succeeded") < log.index("encountered a fatal GPU error")


@pytest.mark.parametrize(("neighbours", "wait"), [(1, 0.003), (4, 1.5)], ids=["quiet", "later"])
def test_no_neighbour_is_lost(mps: Mps, neighbours: int, wait: float) -> None:
    others = ended(mps, neighbours, wait)
    time.sleep(0.6)  # a fault takes 180 to 600 ms
    assert mps.ctl(f"get_server_status {mps.server()}") == "ACTIVE\n"
    assert [one.process.poll() for one in others] == [None] * neighbours
