"""Faults, signals and terminate_client: who dies with whom."""

from __future__ import annotations

import re
import signal
import subprocess

import pytest

from tests.sim.conftest import A, B, Client, Mps, messages


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_a_kernel_is_a_fault_for_the_neighbours(mps: Mps, number: int) -> None:
    """02 R5, 03 Q5."""
    mps.start()
    neighbour = mps.busy(A, "sleep", "600")
    victim = mps.busy(A, "spin", "600")
    victim.process.send_signal(number)
    neighbour.saw("work now CUDA_ERROR_ILLEGAL_ADDRESS")
    assert victim.end() == -number
    assert mps.ctl(f"get_server_status {mps.server()}") == "FAULT\n"
    assert f"Client {{PID: {neighbour.pid}, Context: 1}} encountered a fatal GPU error." in mps.log("server.log")


def test_sigkill_without_a_kernel_harms_nobody(mps: Mps) -> None:
    """03 Q5."""
    mps.start()
    neighbour = mps.busy(A, "spin", "3")
    victim = mps.busy(A, "sleep", "600")
    victim.process.kill()
    mps.saw("server.log", f"Client process {victim.pid} disconnected")
    assert neighbour.end() == 0
    assert "fatal" not in mps.log("server.log")


def test_terminate_client_first_protects_the_neighbours(mps: Mps) -> None:
    """01 S7, 03 Q5, 06 V6: then the signal, even for one that ignores SIGTERM."""
    mps.start()
    neighbour = mps.busy(A, "work", "200")
    victim = mps.busy(A, "sleep", "600", "--ignore-term")
    spinner = mps.busy(A, "spin", "600")
    server = mps.server()
    for client in (spinner, victim):
        assert mps.ctl(f"terminate_client {server} {client.pid}") == "0\n"
        client.saw("CUDA_ERROR_MPS_CLIENT_TERMINATED")
    assert spinner.end() == 16
    victim.process.terminate()
    victim.process.kill()
    assert victim.end() == -9
    assert neighbour.end() == 0
    assert "done 200 iterations, last CUDA_SUCCESS" in neighbour.text()
    log = messages(mps.log("server.log"))
    at = log.index(f"MPS server requesting client {{PID: {spinner.pid}, Context ID: 1}} to exit")
    lost = f"client {{PID: {spinner.pid}, Context ID: 1}} exit"
    assert log[at + 1] == "Client termination succeeded."
    assert log[at + 2] == f"Server failed to recevie command with status 806, assuming {lost}"
    assert log[at + 3].startswith(f"Client {{PID: {spinner.pid}, Context ID: 1}} exiting.")


def test_terminate_client_of_a_stopped_client_blocks_the_daemon(mps: Mps) -> None:
    """03 Q6: until it dies; what was asked meanwhile and given up shows as `Unable to accept connection`."""
    mps.start()
    client = mps.busy(A, "spin", "600")
    server = mps.server()
    client.process.send_signal(signal.SIGSTOP)
    asking = mps.front_end(f"terminate_client {server} {client.pid}")
    mps.saw("server.log", "requesting client")
    with pytest.raises(subprocess.TimeoutExpired):
        mps.run("get_server_list", timeout=1)
    client.process.kill()
    assert asking.wait(60) == 0
    mps.saw("control.log", r"\] 0\n[^\n]*Accepting connection...\n[^\n]*Unable to accept connection\n[^\n]*UI closed")
    assert mps.ctl(f"get_server_status {server}") == "ACTIVE\n"


def stopped_and_asked(mps: Mps) -> tuple[Client, Client, subprocess.Popen[bytes]]:
    """A neighbour, a stopped client, and the request to end it, which is not answered."""
    mps.start()
    neighbour, stopped = mps.busy(A, "work", "1000000"), mps.busy(A, "spin", "600")
    stopped.process.send_signal(signal.SIGSTOP)
    asking = mps.front_end(f"terminate_client {mps.server()} {stopped.pid}")
    mps.saw("server.log", "requesting client")
    return neighbour, stopped, asking


def test_a_stopped_client_killed_after_the_request_takes_its_neighbours_along(mps: Mps) -> None:
    """06 V6: the request protects nobody as long as the client could not answer it."""
    neighbour, stopped, asking = stopped_and_asked(mps)
    stopped.process.kill()
    assert asking.wait(60) == 0
    neighbour.saw("work now CUDA_ERROR_ILLEGAL_ADDRESS")
    mps.saw("server.log", "Client termination succeeded.")


def test_a_stopped_client_that_is_continued_first_lets_go(mps: Mps) -> None:
    """X13 of the real runs: request, SIGCONT, then SIGKILL; the neighbours lose time and nothing else."""
    neighbour, stopped, asking = stopped_and_asked(mps)
    stopped.process.send_signal(signal.SIGCONT)
    assert asking.wait(60) == 0
    stopped.process.kill()
    mps.saw("server.log", f"Client process {stopped.pid} disconnected")
    assert mps.client(A, "work", "50").end() == 0
    assert mps.ctl(f"get_server_status {mps.server()}") == "ACTIVE\n"
    assert "work now" not in neighbour.text()


def test_terminate_client_of_odd_targets(mps: Mps) -> None:
    """X8 of the real runs: no context, no client; and one that was terminated already blocks until it is dead."""
    mps.start()
    client = mps.busy(A, "sleep", "600")
    idle = mps.client(A, "init", "600")
    idle.saw("cuInit CUDA_SUCCESS")
    server = mps.server()
    for pid in (idle.pid, 1):
        assert mps.ctl(f"terminate_client {server} {pid}") == "201\n"
        assert messages(mps.log("server.log"))[-2:] == [
            f"Client termination request failed: There is no active client context found for process {pid}.",
            "Client termination failed with invalid device context.",
        ]
    assert mps.ctl(f"terminate_client {server} {client.pid}") == "0\n"
    client.saw("work now CUDA_ERROR_MPS_CLIENT_TERMINATED")
    asking = mps.front_end(f"terminate_client {server} {client.pid}")
    mps.saw("server.log", "(?s)requesting.*requesting")
    with pytest.raises(subprocess.TimeoutExpired):
        asking.wait(1)
    client.process.kill()
    assert asking.wait(60) == 0


def test_terminate_client_in_fault_waits_for_the_clients_exit(mps: Mps) -> None:
    """03 Q4."""
    mps.start()
    leftover = mps.busy(A, "sleep", "600")
    assert mps.client(A, "oob", "0").end() == 17
    leftover.saw("work now")
    asking = mps.front_end(f"terminate_client {mps.server()} {leftover.pid}")
    mps.saw("server.log", "requesting client")
    with pytest.raises(subprocess.TimeoutExpired):
        asking.wait(1)
    leftover.process.kill()
    assert asking.wait(60) == 0
    mps.saw("server.log", "Client termination succeeded.")


def test_a_fault_on_one_gpu_spares_the_other_but_refuses_clients_on_both(mps: Mps) -> None:
    """05 M2."""
    mps.start(MPSSIM_GPUS="2")
    left = mps.busy(A, "sleep", "600", DEV="0")
    right = mps.busy(A, "sleep", "600", DEV="1")
    assert "devices 2 using GPU-" in right.text()
    assert mps.client(A, "oob", "0", DEV="0").end() == 17
    left.saw("work now CUDA_ERROR_ILLEGAL_ADDRESS")
    assert mps.client(A, "query", DEV="1").end() == 10
    left.process.kill()
    mps.saw("server.log", "Destroy server context on device 0")
    assert mps.client(A, "query", DEV="0").end() == 0
    assert "work now" not in right.text()
    assert right.process.poll() is None


def test_an_instance_on_one_gpu(mps: Mps) -> None:
    """05 M3: inside the instance the device is ordinal 0; the machine's ordinal or another UUID finds nothing."""
    mps.start(MPSSIM_GPUS="2", CUDA_VISIBLE_DEVICES="1")
    good = mps.client(B, "query")
    assert good.end() == 0
    assert "devices 1 using GPU-3d07cd2a" in good.text()
    for wanted in ("1", "GPU-513e171f-4520-0894-ba89-06b9f5c1d7b8"):
        bad = mps.client(B, "query", CUDA_VISIBLE_DEVICES=wanted)
        assert bad.end() == 10
        assert "cuInit CUDA_ERROR_NO_DEVICE" in bad.text()
    assert re.search(r"Client +\d+\] Client requested 1 which is not a valid GPU ID", mps.log("server.log"))
