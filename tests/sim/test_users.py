"""Users changing places: who gets which limits, who waits, who runs outside MPS."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess

import pytest

from mpsagent.sim import cli
from tests import recordings
from tests.sim.conftest import A, B, C, Mps, messages, normal


def test_defaults_at_ready_hold_for_the_first_client(mps: Mps) -> None:
    """04 T1: set while the server of another user has to go, the first client gets exactly its limits. The other one is
    at work until they are set: an idle server would be gone in 55 ms, and a front-end may take longer to start."""
    mps.start()
    for uid, percentage, gibibytes, sms in ((A, 20, 1, 26), (B, 60, 3, 78), (A, 35, 2, 46)):
        holder = mps.busy(C, "sleep", "60")
        after = len(mps.log("control.log"))
        client = mps.client(uid, "query")
        mps.saw("control.log", "push client to pending list", after)
        mps.ctl(
            f"set_default_active_thread_percentage {percentage}\nset_default_device_pinned_mem_limit 0 {gibibytes}G"
        )
        holder.process.kill()
        assert client.sms() == sms
        assert client.free() < gibibytes * 1024
        assert client.end() == 0
        assert f"user {uid}" in mps.log("control.log")[after:]


def test_an_override_after_ready_misses_the_first_client(mps: Mps) -> None:
    """02 R2: a process's limits are those of its channel; an override reaches later processes only."""
    mps.start()
    first = mps.busy(A, "sleep", "60")
    server = mps.server()
    assert mps.ctl(f"set_active_thread_percentage {server} 20\nset_device_pinned_mem_limit {server} 0 1G") == "20.0\n"
    second = mps.client(A, "query")
    assert (first.sms(), second.sms()) == (132, 26)
    assert (first.free(), second.free()) == (142565, 901)


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


def test_others_wait_while_the_holder_works_and_the_tries_double(mps: Mps) -> None:
    """02 R3: at once, then after 200, 400, 800 ms; the holder's new clients are still accepted; then in turn."""
    mps.start()
    holder = mps.busy(A, "sleep", "60")
    server = mps.server()
    second = mps.client(B, "query")
    mps.saw("control.log", f"from user {B}: Server is not ready")
    third = mps.client(C, "query")
    mps.saw("control.log", f"from user {C}: Server is not ready")
    mps.saw("control.log", "again in at most 1600ms")
    assert mps.client(A, "query").end() == 0
    tries = [line for line in messages(mps.log("control.log")) if f"server {server}" in line and "hut" in line]
    assert tries[:6] == [
        f"Try shutting down server {server}, backoff is disabled",
        f"Control will try shutting down server {server} again in at most 200ms",
        f"Try shutting down server {server}, backoff is enabled",
        f"Control will try shutting down server {server} again in at most 400ms",
        f"Try shutting down server {server}, backoff is enabled",
        f"Control will try shutting down server {server} again in at most 800ms",
    ]
    holder.process.kill()
    mps.saw("server.log", f"Client process {holder.pid} disconnected")
    mps.ctl(f"shutdown_server {server}")
    assert (second.end(), third.end()) == (0, 0)
    users = re.findall(r"Starting new server \d+ for user (\d+)", mps.log("control.log"))
    assert users == [str(A), str(B), str(C)]


def test_a_forced_shutdown_leaves_the_clients_alive(mps: Mps) -> None:
    """01 S6: their calls fail with MPS_RPC_FAILURE and they keep running; the waiting user is served."""
    mps.start()
    holder = mps.busy(A, "sleep", "60")
    waiting = mps.client(B, "query")
    mps.saw("control.log", f"from user {B}: Server is not ready")
    assert mps.ctl(f"shutdown_server {mps.server()} -f") == ""
    assert waiting.end() == 0
    holder.saw("work now CUDA_ERROR_MPS_RPC_FAILURE")
    assert holder.process.poll() is None
    assert "Force shutting down server" in mps.log("control.log")


def test_a_client_that_dies_while_it_waits_hangs_the_server_that_starts_for_it(mps: Mps) -> None:
    """X1 of the real runs: the server answers nobody, and with it the daemon hangs, until the server is killed."""
    mps.start()
    holder = mps.busy(A, "sleep", "600")
    waiting = []
    for uid in (B, C):
        waiting.append(mps.client(uid, "query"))
        mps.saw("control.log", f"from user {uid}: Server is not ready")
    waiting[0].process.kill()
    waiting[0].end()
    holder.process.kill()
    started = mps.saw("control.log", rf"Starting new server (\d+) for user {B}")
    mps.saw("server.log", r"Server +\d+\] User did not send valid credentials")
    mps.saw("control.log", f"Try shutting down server {started[1]}, backoff is disabled")
    with pytest.raises(subprocess.TimeoutExpired):
        mps.run("get_server_list", timeout=1)
    os.kill(int(started[1]), signal.SIGKILL)
    assert waiting[1].end() == 0


def test_a_hung_server_holds_the_daemon_for_each_client_it_is_given(mps: Mps) -> None:
    """X15 of the real runs: nobody waits behind the dead one; the list is answered until a next client comes."""
    mps.start()
    holder = mps.busy(A, "sleep", "600")
    dead = mps.client(B, "query")
    mps.saw("control.log", f"from user {B}: Server is not ready")
    dead.process.kill()
    dead.end()
    holder.process.kill()
    mps.saw("server.log", r"Server +\d+\] User did not send valid credentials")
    assert mps.server()
    late = mps.client(B, "query")
    mps.saw("control.log", f"NEW CLIENT {late.pid} from user {B}: Server already exists")
    with pytest.raises(subprocess.TimeoutExpired):
        mps.run("get_server_list", timeout=1)
    late.process.kill()
    assert mps.server()


def test_two_contexts_of_one_process(mps: Mps) -> None:
    """X6 of the real runs: one row in ps, two in the list by device."""
    mps.start()
    client = mps.client(A, "two", "600")
    client.saw("second ctx CUDA_SUCCESS")
    assert mps.ctl("ps").count("\n") == 2
    assert mps.ctl(f"get_client_list {mps.server()}") == f"{client.pid}\n"
    assert mps.ctl("get_device_client_list").split("\n")[1:] == [f"{client.pid}.1", f"{client.pid}.2", ""]
    client.process.kill()
    mps.saw("server.log", r"(?s)Context ID: 2\} exiting.*Context ID: 1\} exiting.*Context ID: 0\} exit")


def test_another_kind_of_socket_in_the_daemons_place_means_no_mps(mps: Mps) -> None:
    """X14 of the real runs."""
    mps.pipe.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as fake:
        fake.bind(str(mps.pipe / "control"))
        (mps.pipe / "control").chmod(0o666)
        fake.listen()
        assert mps.client(A, "query").free() == 142629


def test_the_forty_ninth_client(mps: Mps) -> None:
    """02 R13."""
    mps.start(MPSSIM_SPEED="10")
    clients = [mps.client(A, "sleep", "600") for _ in range(48)]
    for client in clients:
        client.saw("meminfo")
    late = mps.client(A, "query")
    assert late.end() == 12
    assert "cuInit CUDA_SUCCESS" in late.text()
    assert "ctx CUDA_ERROR_MPS_MAX_CLIENTS_REACHED" in late.text()
    assert "Failed to accept new client. Maximum number of clients (48) reached." in messages(mps.log("server.log"))
    assert mps.ctl(f"get_client_list {mps.server()}").count("\n") == 48


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
    return {process["pid"]: process["kind"] for process in cli.processes(1)}


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


def test_one_server_for_all_users(mps: Mps) -> None:
    """02 R12: with --multiuser-server everybody is user 0 and the server runs as root."""
    mps.start("--multiuser-server")
    clients = [mps.busy(uid, "sleep", "60") for uid in (A, B)]
    server = mps.server()
    assert mps.ctl(f"get_client_list {server}") == "".join(f"{client.pid}\n" for client in clients)
    assert os.stat(f"/proc/{server}").st_uid == 0
    assert f"NEW CLIENT {clients[1].pid} from user 0: Server already exists" in mps.log("control.log")


def test_two_users_in_turn_as_recorded(mps: Mps) -> None:
    """02 R2 without its commands: two servers, line by line."""
    control = mps.start()
    clients, servers = [], []
    for uid in (A, B, A, B):
        clients.append(mps.client(uid, "query"))
        assert clients[-1].end() == 0
        mps.saw("server.log", f"Client process {clients[-1].pid} disconnected")
        servers.append(int(re.findall(r"NEW SERVER (\d+)", mps.log("control.log"))[-1]))
    mps.ctl("quit -t 1")
    words = ["control", *[f"s{at}" for at in range(4)], *[f"c{at}" for at in range(4)], "A", "B"]
    here = dict(zip([control, *servers, *[client.pid for client in clients], A, B], words, strict=True))
    there = dict(zip([526, 531, 544, 557, 570, 529, 542, 555, 568, 1001, 1002], words, strict=True))

    def rest(lines: list[str]) -> list[str]:
        noise = ("Cmd:set", ": 20.0", "UI", "memory limit", "new client request")
        return [line for line in lines if not any(word in line for word in noise) and "Accepting" not in line]

    recorded = recordings.sections("02")["R2"]
    assert rest(normal(mps.log("control.log"), here)) == rest(normal(recorded.control.decode(), there))
    assert rest(normal(mps.log("server.log"), here)) == rest(normal(recorded.server.decode(), there))


def test_a_client_finds_its_limit_by_allocating(mps: Mps) -> None:
    """The mode `limit` of the client: in steps of 64 MiB until there is no more."""
    mps.start()
    mps.ctl("set_default_device_pinned_mem_limit 0 2G")
    client = mps.client(A, "limit")
    assert client.end() == 0
    allocated = int(client.saw(r"allocated (\d+) MiB, then CUDA_ERROR_OUT_OF_MEMORY")[1])
    assert client.free() - 64 < allocated <= client.free()
