"""Limits, and who runs outside MPS, as far as no scenario of tests/conformance holds it against NVIDIA's."""

from __future__ import annotations

import os

import pytest

from mpsagent_sim import registry
from tests.sim.conftest import A, B, Mps, messages


def test_the_daemon_answers_nothing_while_a_server_starts(mps: Mps) -> None:
    """03 Q1: a command sent in that time is answered after Ready, so defaults set by it come too late."""
    mps.start(MPSSIM_SPEED="0.2")
    client = mps.client(A, "query")
    mps.saw("server.log", "Creating server context on device 0")
    assert mps.ctl("set_default_active_thread_percentage 10") == "10.0\n"
    log = messages(mps.log("control.log"))
    ready = next(at for at, line in enumerate(log) if line.endswith("Ready"))
    assert log.index("Cmd:set_default_active_thread_percentage 10") > ready
    assert client.sms() == 132


UUID = "GPU-513e171f-4520-0894-ba89-06b9f5c1d7b8"
LIFTS = ("x", "7=4G", "0=2G,1=4G", "GPU-00000000-0000-0000-0000-000000000000=4G", "0=2G,7=1G")
"""Values of CUDA_MPS_PINNED_DEVICE_MEM_LIMIT with which MPS forgets a client's limit on a machine with one GPU."""


def test_the_environment_of_a_client_lowers_its_memory_limit_or_takes_it_away(mps: Mps) -> None:
    """11 E1, value by value."""
    mps.start()
    mps.ctl("set_default_device_pinned_mem_limit 0 4G")
    lowers = {"0=2G": 1534, f"{UUID}=2G": 1534, "0=700M": 186}
    holds = dict.fromkeys((f"{UUID}=100G", "0=100G", "0=1024G", ""), 3582)
    expected = lowers | holds | dict.fromkeys(LIFTS, 142565)
    got = {one: mps.client(A, "query", CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=one) for one in expected}
    assert {one: client.free() for one, client in got.items()} == expected
    over = mps.client(A, "alloc", "8000", "60", CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="x")
    over.saw("cuMemAlloc 8000 MiB: CUDA_SUCCESS")


def test_the_environment_of_a_client_only_lowers_its_share_of_the_multiprocessors(mps: Mps) -> None:
    """01 S4."""
    mps.start()
    assert mps.client(A, "query", CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="10").sms() == 12
    mps.ctl(f"set_active_thread_percentage {mps.server()} 20")
    assert mps.client(A, "query", CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="90").sms() == 26


def test_partitioning_by_context_passes_the_limit_but_for_a_percentage_of_its_own(mps: Mps) -> None:
    """docs/measured.md, "A client's own environment"."""
    mps.start()
    mps.ctl("set_default_active_thread_percentage 20")
    asking = {"CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING": "1"}
    own = {"10": 12, "20": 26, "50": 26, "99.9": 26, "100": 132, "0": 132, "": 132}
    got = {one: mps.client(A, "query", **asking, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=one).sms() for one in own}
    assert got == own
    assert mps.client(A, "query", **asking).sms() == 132


def test_contexts_of_one_process_fill_a_server(mps: Mps) -> None:
    """Recording 12, H4."""
    mps.start(MPSSIM_SPEED="10", MPSSIM_GPUS="2")
    one = mps.client(A, "contexts", "60", "600")
    one.saw("made 48 contexts, last CUDA_ERROR_MPS_MAX_CLIENTS_REACHED")
    late = mps.client(A, "query")
    assert late.end() == 12
    assert "ctx CUDA_ERROR_MPS_MAX_CLIENTS_REACHED" in late.text()
    said = messages(mps.log("server.log"))
    assert f"Client process {one.pid} disconnected" in said, "in these words, of a process that goes on"
    assert mps.ctl("get_device_client_list").count(f"{one.pid}.") == 48
    assert mps.client(A, "query", DEV="1").end() == 0, "each device has places of its own"


def kinds(mps: Mps, monkeypatch: pytest.MonkeyPatch) -> dict[object, object]:
    monkeypatch.setenv("MPSSIM_REGISTRY", str(mps.processes))
    return {pid: kind for pid, kind, _, _ in registry.processes(0)}


def test_clients_run_outside_mps_without_a_word(mps: Mps, monkeypatch: pytest.MonkeyPatch) -> None:
    """03 Q7 and Q8, 04 T2: no daemon, another pipe directory, a socket that may not be written to."""
    outside = mps.busy(A, "sleep", "600")
    assert (outside.sms(), outside.free()) == (132, 142629)
    mps.start()
    inside = mps.busy(A, "sleep", "600")
    elsewhere = mps.busy(B, "sleep", "600", CUDA_MPS_PIPE_DIRECTORY="/nonexistent")
    os.chmod(mps.pipe / "control", 0o600)
    denied = mps.busy(B, "sleep", "600")
    os.chmod(mps.pipe / "control", 0o666)
    mps.pipe.chmod(0o700)
    shut_out = mps.busy(B, "sleep", "600")
    found = kinds(mps, monkeypatch)
    assert found == {
        outside.pid: "bypass",
        mps.server(): "server",
        inside.pid: "mps",
        elsewhere.pid: "bypass",
        denied.pid: "bypass",
        shut_out.pid: "bypass",
    }
    outside.process.kill()
    outside.end()
    assert outside.pid not in kinds(mps, monkeypatch), "a dead process uses no GPU"
    (mps.processes / "0.compute_mode").write_text("EXCLUSIVE_PROCESS\n")
    refused = mps.client(B, "query", CUDA_MPS_PIPE_DIRECTORY="/nonexistent")
    assert refused.end() == 12
    assert "ctx CUDA_ERROR_DEVICE_UNAVAILABLE" in refused.text()


def test_a_client_finds_its_limit_by_allocating(mps: Mps) -> None:
    """The mode `limit` of the client: in steps of 64 MiB until there is no more."""
    mps.start()
    mps.ctl("set_default_device_pinned_mem_limit 0 2G")
    client = mps.client(A, "limit")
    assert client.end() == 0
    allocated = int(client.saw(r"allocated (\d+) MiB, then CUDA_ERROR_OUT_OF_MEMORY")[1])
    assert client.free() - 64 < allocated <= client.free()
