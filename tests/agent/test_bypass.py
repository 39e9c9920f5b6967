"""Programs that compute outside MPS, and the compute mode: said, with what to do, and forgotten when it is over."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mpsagent.agent.bypass import is_server, is_server_of_user, mode_trouble
from mpsagent.system.control import PROGRAM, SERVER
from tests.agent.stage import A, B, C, Stage, alive
from tests.agent.test_facts import forget, stop_both
from tests.waiting import until

OURS = ["GPU-1"]


@pytest.fixture
def server() -> Iterator[Path]:
    """Root's file with the name of MPS's server, which every user may run, with code of the user's own in it."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        program = Path(directory, SERVER)
        program.write_bytes(Path("/bin/sleep").read_bytes())
        program.chmod(0o755)
        yield program


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a process of another user")
@pytest.mark.parametrize(("uid", "gid", "expected"), [(0, 0, True), (B, 0, True), (B, B, False)])
def test_a_server_is_known_by_roots_group_and_not_by_its_files_name(
    server: Path, uid: int, gid: int, expected: bool
) -> None:
    """LD_PRELOAD=x.so nvidia-cuda-mps-server: neither on record nor ended, while a plain outsider was."""
    with subprocess.Popen([server, "60"], user=uid, group=gid, extra_groups=[]) as process:
        assert is_server(process.pid) == expected
        assert not is_server_of_user(process.pid), "its parent is no control daemon"
        process.kill()
    with subprocess.Popen([SERVER, "60"], executable="/bin/sleep") as process:
        assert not is_server(process.pid), "its file is another one"
        process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a process of another user")
def test_a_server_of_a_users_own_daemon_is_reported_and_not_ended(server: Path) -> None:
    """Its end would hurt that daemon's other clients."""
    daemon = server.with_name(PROGRAM)
    daemon.write_bytes(Path("/bin/bash").read_bytes())
    daemon.chmod(0o755)
    words = [daemon, "-c", f"{server} 600 & echo $!; wait"]
    with subprocess.Popen(words, user=B, group=B, extra_groups=[], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        until(lambda: is_server_of_user(pid))
        assert not is_server(pid)
        os.kill(pid, signal.SIGKILL)


def test_only_our_gpus_mode_counts_and_only_if_the_policy_says_one() -> None:
    modes = {"GPU-1": "default", "GPU-2": "prohibited"}
    assert mode_trouble("unchanged", modes, OURS) is None
    assert mode_trouble("default", modes, OURS) is None
    assert mode_trouble("exclusive-process", {}, OURS) is None
    text = mode_trouble("exclusive-process", modes, OURS) or ""
    assert "default on GPU-1" in text
    assert "GPU-2" not in text


def test_who_has_lost_its_server_and_lives_on_is_not_outside(stage: Stage) -> None:
    """It passed the gate, and NVML lists it while it lives. It was said to use another control daemon."""
    agent = stage.with_agent("[limits]\nactive_threads = '20%'\n")
    holder = stage.client(A, "sleep", 600)
    holder.working()
    os.kill(stage.control(agent), signal.SIGKILL)
    assert holder.saw("CUDA_ERROR_MPS_RPC_FAILURE")
    stage.record("client.ended", pid=holder.pid)
    outside = stage.client(B, "sleep", 600, CUDA_MPS_PIPE_DIRECTORY="/nonexistent")
    outside.working()
    assert f"process {holder.pid} " not in stage.problem(agent, f"process {outside.pid} of user {B}")
    assert alive(holder.pid)
    assert [one["pid"] for one in stage.records("outside_mps")] == [outside.pid]
    stage.until(lambda: f"[{holder.pid}," in (stage.place / "state" / "state.json").read_text(), "it is kept")
    stage.killed(agent)
    agent = stage.again()
    later = stage.client(C, "sleep", 600, CUDA_MPS_PIPE_DIRECTORY="/nonexistent")
    later.working()
    stage.problem(agent, f"process {later.pid} of user {C}")
    stage.until(lambda: len(agent.api.status()["outside"]) == 2, "both are found by the next agent")
    assert {one["pid"] for one in agent.api.status()["outside"]} == {outside.pid, later.pid}
    assert holder.pid not in {one["pid"] for one in stage.records("outside_mps")}
    assert alive(holder.pid)


def test_a_process_that_lost_its_server_is_not_outside_for_an_agent_without_records(stage: Stage) -> None:
    """The gate, its descriptor store and the state file are gone: whether the process passed the gate is unknown."""
    extra = 'on_outside_mps = "terminate"\noutside_mps_grace = "1s"'
    agent = stage.with_agent("[limits]\nactive_threads = '20%'\n", extra=extra)
    holder = stage.client(A, "sleep", 600)
    holder.working()
    os.kill(stage.control(agent), signal.SIGKILL)
    assert holder.saw("CUDA_ERROR_MPS_RPC_FAILURE")
    stage.record("client.ended", pid=holder.pid)
    stop_both(stage, agent)
    forget(stage)
    agent = stage.again()
    outside = stage.client(B, "sleep", 600, CUDA_MPS_PIPE_DIRECTORY="/nonexistent")
    outside.working()
    assert outside.ended() != 0
    assert {one["pid"] for one in stage.records("outside_mps")} == {outside.pid}
    # What the first agent took up is on record for the next one.
    stage.client(B, "sleep", 600).working()
    stage.until(lambda: f"[{holder.pid}," in (stage.place / "state" / "state.json").read_text(), "it is kept")
    stage.killed(agent)
    agent = stage.again()
    later = stage.client(C, "sleep", 600, CUDA_MPS_PIPE_DIRECTORY="/nonexistent")
    later.working()
    assert later.ended() != 0
    assert {one["pid"] for one in stage.records("outside_mps")} == {outside.pid, later.pid}
    assert alive(holder.pid)


def test_a_process_outside_is_ended_where_the_policy_says_so(stage: Stage) -> None:
    """After a warning; not one of an exempt user, nor one that passed the gate."""
    agent = stage.with_agent(
        "[limits]\nactive_threads = '20%'\n",
        extra=f'on_outside_mps = "terminate"\noutside_mps_grace = "2s"\noutside_mps_exempt = ["{C}"]',
    )
    inside = stage.client(A, "sleep", 600)
    inside.working()
    exempt = stage.client(C, "sleep", 600, CUDA_MPS_PIPE_DIRECTORY="/nonexistent")
    exempt.working()
    stage.record("outside_mps", pid=exempt.pid)
    outside = stage.client(B, "sleep", 600, CUDA_MPS_PIPE_DIRECTORY="/nonexistent")
    outside.working()
    warned = stage.record("outside_mps.warned", pid=outside.pid)
    assert outside.ended() != 0
    ended = stage.record("outside_mps.ended")
    assert (ended["pid"], ended["signal"], ended["enforce"]) == (outside.pid, signal.SIGTERM, True)
    assert ended["at"] >= warned["ends"]

    def shown() -> list[tuple[int, str | None]]:
        return [(one["pid"], one["ends"]) for one in agent.api.status()["outside"]]

    stage.until(lambda: shown() == [(exempt.pid, None)], "only the exempt one is left")
    assert alive(inside.pid)


def test_people_see_the_memory_of_clients_and_the_compute_mode(stage: Stage) -> None:
    """Within a second or two of its start: who asks has it looked at, and nobody else does."""
    agent = stage.with_agent("[limits]\nactive_threads = '20%'\n")
    client = stage.client(A, "sleep", 600)
    client.working()

    def is_known() -> bool:
        """It still takes some when its context is there, and a look is a moment old."""
        own = next((one for one in machine_memory(stage) if one[0] == client.pid), None)
        shown = [one["memory"] for one in agent.api.get("/v1/clients")["clients"] if one["pid"] == client.pid]
        return own is not None and shown == [own[1] << 20] == [agent.api.status()["turn"]["memory"]]

    stage.until(is_known, "the memory of the client")
    status = agent.api.status()
    assert status["not_guaranteed"] == []
    assert [one["compute_mode"] for one in status["devices"]] == ["default"]


def machine_memory(stage: Stage) -> list[tuple[int, int]]:
    """Pid and MiB of the processes on the simulated GPU, as the simulator has them."""
    place, found = Path(stage.backend.control).with_name("processes"), []
    for path in place.glob("0.[0-9]*[0-9]"):
        with suppress(OSError, IndexError):  # it ends just now, or is being written
            found.append((int(path.name.split(".")[1]), int(path.read_text().split()[2])))
    return found
