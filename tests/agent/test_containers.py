"""Containers of podman are clients like all others: by the CDI file, with everything else private to them."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsagent_sim import gpu
from tests.agent.stage import Agent, Stage
from tests.conformance import rig as rigs
from tests.conformance.backends import REPOSITORY
from tests.policies import SHARING
from tests.scenes.containers import Podman, cgroup_parent, why_not, why_not_mapped

A, B = rigs.USERS[:2]
CHANGE = "set_default_active_thread_percentage 90"
POLICY = (
    f'[user.{A}]\nactive_threads = "20%"\nmemory_limit = "4G"\n[user.{B}]\nactive_threads = "50%"\n'
    'memory_limit = "9G"\n'
)
DUE = {A: (26, gpu.free(26, 4096, 0, 0)), B: (66, gpu.free(66, 9216, 0, 0))}
"""Multiprocessors and free MiB."""


@pytest.fixture(scope="session")
def podman_works(tmp_path_factory: pytest.TempPathFactory) -> None:
    if why := why_not(tmp_path_factory.mktemp("podman")):
        pytest.skip(why)


@pytest.fixture
def contained(podman_works: None, stage: Stage) -> Contained:
    return Contained(stage)


class Contained:
    """An agent, its CDI file as `mpsagent-cli` prints it, and podman."""

    def __init__(self, stage: Stage, sharing: str = "turns", policy: str = POLICY) -> None:
        self.stage = stage
        self.agent: Agent = stage.with_agent(policy, extra=f'sharing = "{SHARING[sharing]}"')
        self.podman = Podman(stage.place / "podman", [Path(stage.backend.control).parent])
        code, text = stage.cli(self.agent, "env", "--format", "cdi")
        assert code == 0, text
        self.podman.spec.write_text(text)

    def client(
        self, uid: int, *words: str, mapped: bool = False, device: bool = True, parent: str | None = None
    ) -> rigs.Started:
        """A CUDA client that gets nothing of MPS but what the CDI file says."""
        if mapped and (why := why_not_mapped()):
            pytest.skip(why)
        command = self.podman.command(
            uid, *self.stage.backend.client, *words, mapped=mapped, device=device, parent=parent
        )
        started = self.stage.rig.run(command, env=self.stage.python_environment())
        started.uid = uid
        return started

    def saw(self, started: rigs.Started) -> tuple[int, int]:
        """Multiprocessors and free MiB that it was given."""
        found: list[re.Match[str]] = []

        def is_there() -> bool:
            if started.process.poll() not in (None, 0):
                raise AssertionError(started.read() + started.err.read_text())
            found[:] = re.finditer(r"\] sms (\d+) meminfo \w+ free (\d+) MiB", started.read())
            return bool(found)

        self.stage.until(is_there, "the container's client is served")
        return int(found[0][1]), int(found[0][2])

    def listed(self, uid: int, state: str) -> dict[str, object]:
        """What the agent says of this user's only client, once it says so: it hears on its own of one that works."""
        found: list[dict[str, object]] = []

        def is_there() -> bool:
            clients = self.agent.api.get("/v1/clients")["clients"]
            found[:] = [one for one in clients if one["uid"] == uid]
            return [one["state"] for one in found] == [state]

        self.stage.until(is_there, f"one client of user {uid}, {state}, not {found}")
        return found[0]


def namespaces(pid: int | str) -> set[str]:
    return {os.readlink(f"/proc/{pid}/ns/{name}") for name in ("ipc", "mnt", "net", "pid")}


def test_containers_of_two_users(contained: Contained) -> None:
    """Each gets its own limits to the MiB; the agent knows user and host's pid, also of who is root in there."""
    stage = contained.stage
    first = contained.client(A, "sleep", "600")
    assert contained.saw(first) == DUE[A]
    at_work = contained.listed(A, "running")
    second = contained.client(B, "query", mapped=True)
    waiting = contained.listed(B, "waiting")
    for one, name in ((at_work, A), (waiting, B)):
        status = Path(f"/proc/{one['pid']}/status").read_text()
        assert re.search(rf"^NSpid:\t{one['pid']}\t.*\t1$", status, re.M), (
            "the host's pid, of a container's first process"
        )
        assert not namespaces(str(one["pid"])) & namespaces("self"), "nothing is shared"
        assert (one["gid"], one["command"]) == (name, Path(stage.backend.control).with_name("cuda-client").name)
    inside = Path(f"/proc/{waiting['pid']}/uid_map").read_text().split()
    assert inside == ["0", str(B), "1"], "it is root in there"
    code, text = stage.cli(contained.agent, "terminate", str(at_work["pid"]), "--now")
    assert code == 0, text
    assert contained.saw(second) == DUE[B]
    assert rigs.exited(second.process, 60)
    assert rigs.exited(first.process, 60)
    stage.no_problem(contained.agent)


def test_without_the_cdi_file_a_container_is_outside(contained: Contained) -> None:
    """What the tests above rest on: nothing else brings a container to the gate."""
    outside = contained.client(A, "query", device=False)
    assert contained.saw(outside)[0] == gpu.MULTIPROCESSORS
    assert contained.agent.api.get("/v1/clients")["clients"] == []


def test_a_container_that_waits_while_gate_and_agent_are_replaced(contained: Contained) -> None:
    """The directory that was mounted stays the same one: a container that runs on finds the gate of the next agent."""
    stage = contained.stage
    holder = stage.client(B, "sleep", 600)
    assert holder.working()
    waiting = contained.client(A, "query")
    contained.listed(A, "waiting")
    os.kill(stage.gate(contained.agent), signal.SIGKILL)
    stage.killed(contained.agent)
    contained.agent = stage.again()
    holder.kill()
    assert contained.saw(waiting) == DUE[A]


@pytest.fixture
def parent(podman_works: None, tmp_path: Path) -> Iterator[str]:
    """A cgroup for containers to have theirs in."""
    with cgroup_parent() as path:
        if why := why_not(tmp_path, path):
            pytest.skip(why)
        yield path


def test_containers_of_two_users_at_once(parent: str, stage: Stage) -> None:
    """On one server for all: each its own limits, and the free memory is what its own limit leaves. The agent knows
    which container is whose."""
    contained = Contained(stage, "together")
    started = {uid: contained.client(uid, "sleep", "600", mapped=uid == B, parent=parent) for uid in (A, B)}
    assert {uid: contained.saw(one) for uid, one in started.items()} == DUE
    listed = [contained.listed(uid, "running") for uid in (A, B)]
    containers = [one["container"] for one in listed]
    assert containers[0] != containers[1]
    for one in listed:
        assert one["container"] == {"engine": "podman", "id": str(one["cgroup"]).partition("libpod-")[2], "pod": None}


def test_root_in_a_container_is_told_apart(parent: str, stage: Stage) -> None:
    """Beside root of the host, each with its own limits: by the cgroup, that nothing inside can change. Root in there
    sets nothing of MPS, and is ended like all others. The CDI file is the agent's own."""
    place = stage.place / "cdi.json"
    policy = (
        f'[user.0]\nactive_threads = "50%"\nmemory_limit = "9G"\n[cgroup."{parent}"]\nactive_threads = "20%"\n'
        'memory_limit = "4G"\n'
    )
    contained = Contained(stage, "together", f'[agent]\ncdi_file = "{place}"\n{policy}')
    agent = contained.agent
    assert place.read_text() == contained.podman.spec.read_text()
    inside = contained.client(0, "sleep", "600", parent=parent)
    assert contained.saw(inside) == DUE[A]
    listed = contained.listed(0, "running")
    path = str(listed["cgroup"])
    assert listed["container"] == {"engine": "podman", "id": path.rpartition("libpod-")[2], "pod": None}
    assert path.startswith(f"{parent}/libpod-")
    code, text = stage.cli(agent, "clients")
    assert (code, f"podman {listed['container']['id'][:12]} " in text) == (0, True), text
    outside = stage.client(0, "sleep", 600)
    assert outside.working()
    assert outside.seen() == DUE[B]

    front_end = contained.podman.command(0, "sh", "-c", f"echo {CHANGE} | {stage.backend.control}")
    refused = stage.rig.run(front_end, env=stage.python_environment())
    stage.until(lambda: refused.process.poll() is not None, "the front-end in a container has its answer")
    assert "root in a container may not" in refused.read(), refused.err.read_text()

    code, text = stage.cli(agent, "terminate", str(listed["pid"]), "--now")
    assert code == 0, text
    assert rigs.exited(inside.process, 60)
    assert outside.rc is None
    stage.no_problem(agent)


@pytest.mark.parametrize(("signals", "status"), [("TERM KILL", 0), ("", 14)])
def test_a_container_that_is_stopped_hurts_no_neighbour(parent: str, stage: Stage, signals: str, status: int) -> None:
    """By our runtime, which has its clients ended through MPS before podman's SIGTERM. Where it does not, the signal
    ends one with a kernel in flight, and its neighbour has a fault."""
    contained = Contained(stage, "together", "")
    script, settings = stage.place / "runtime", stage.place / "containers.conf"
    words = f"env PYTHONPATH={REPOSITORY} {sys.executable} -m mpsagent.cli.main --socket {contained.agent.api.path}"
    settings.write_text(f'runtime=crun\nclient="{words}"\nsignals="{signals}"\n')
    ours = REPOSITORY / "packaging/containers/mpsagent-runtime"
    script.write_text(f'#!/bin/sh\nMPSAGENT_CONTAINERS_SETTINGS={settings} exec {ours} "$@"\n')
    script.chmod(0o755)
    neighbour = stage.client(B, "mind", 600)
    neighbour.known()
    program = f"trap 'kill $!; wait' TERM; {' '.join(stage.backend.client)} spin 600 & wait"
    command = contained.podman.command(A, "sh", "-c", program, parent=parent, runtime=script)
    started = stage.rig.run(command, env=stage.python_environment())
    stage.until(lambda: "launch" in started.read(), "the container's kernel runs")
    contained.listed(A, "running")
    (podman,) = Path(f"/proc/{started.process.pid}/task/{started.process.pid}/children").read_text().split()
    os.kill(int(podman), signal.SIGTERM)  # podman passes it on, by its runtime
    assert rigs.exited(started.process, 60)
    stage.until(lambda: len(contained.agent.found("client.ended", uid=A)) == 1, "the agent knows")
    if status == 0:
        assert neighbour.finish() == 0
        assert not contained.agent.found("server.fault")
    else:
        assert neighbour.ended() == status
        stage.until(lambda: contained.agent.found("server.fault"), "the agent knows of the fault")
