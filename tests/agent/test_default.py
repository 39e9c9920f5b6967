"""What an agent does without a policy: every user works at once, on all GPUs, on a control daemon of the user's own."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpsagent.policy.policy import Policy
from tests.agent.stage import A, Agent, B, C, Client, D, Machine, Stage
from tests.conformance import backends
from tests.conformance import rig as rigs
from tests.scenes.stage import look_at

pytestmark = pytest.mark.root

DEFAULT = 'sharing = "per-user"\n'
"""The built-in default, said because a stage's users take turns where nothing is said."""
GPUS = 3


@pytest.fixture(scope="module")
def three() -> Iterator[tuple[rigs.Backend, Machine]]:
    if os.geteuid() != 0:
        pytest.skip("needs root: clients of several users")
    place = Path(tempfile.mkdtemp(prefix="mpsd", dir="/tmp"))
    place.chmod(0o755)
    backend = backends.sim_backend(place, gpus=GPUS)
    machine, _ = look_at(backend, place / "look")
    yield backend, machine
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def stage(three: tuple[rigs.Backend, Machine]) -> Iterator[Stage]:
    backend, machine = three
    place = Path(tempfile.mkdtemp(prefix="mpse", dir="/tmp"))
    place.chmod(0o755)
    with Stage(backend, place / "s", machine, quick=True) as one:
        yield one
    exclusive(one)
    shutil.rmtree(place, ignore_errors=True)
    assert one.left == [], "something of the stage outlived it"


def exclusive(stage: Stage, *ordinals: int) -> None:
    """These GPUs are in EXCLUSIVE_PROCESS mode, and no others."""
    processes = Path(stage.backend.control).with_name("processes")
    processes.mkdir(exist_ok=True)
    for ordinal in range(GPUS):
        mode = "EXCLUSIVE_PROCESS" if ordinal in ordinals else "DEFAULT"
        (processes / f"{ordinal}.compute_mode").write_text(f"{mode}\n")


def uuids(stage: Stage) -> list[str]:
    devices = json.loads(Path(stage.backend.control).with_name("devices.json").read_text())
    return [str(one["uuid"]) for one in devices]


def working(stage: Stage, uid: int, **environment: str) -> Client:
    client = stage.client(uid, "sleep", 600, **environment)
    client.known()
    return client


def start(stage: Stage, text: str = "") -> Agent:
    stage.policy(text, extra=DEFAULT)
    agent = stage.start_agent()
    stage.answering(agent)
    stage.until(lambda: open_to_all(agent), "all instances serve")
    return agent


def open_to_all(agent: Agent) -> bool:
    status = agent.api.status()
    runs = (
        one["mode"]["sharing"] == "per-user" or (one["control"] or {}).get("running") for one in status["instances"]
    )
    return all(runs) and bool(status["gate"]["in_force"])


def instances(agent: Agent) -> dict[str, Any]:
    return {one["name"]: one for one in agent.api.status()["instances"]}


def test_every_user_works_at_once_on_all_gpus_as_without_mps(stage: Stage) -> None:
    """CUDA_VISIBLE_DEVICES counts in the machine's order, by number and by UUID, and no user waits."""
    assert f'sharing = "{Policy().sharing}"\n' == DEFAULT
    agent = start(stage)
    for client in [working(stage, uid) for uid in (A, B, C, A)]:
        assert f"devices {GPUS}" in client.text()
    for number, uuid in enumerate(uuids(stage)):
        for wanted in (str(number), uuid):
            one = stage.client(D, "query", CUDA_VISIBLE_DEVICES=wanted)
            assert one.ended() == 0, one.text()
            assert uuid[:12] in one.text()
    stage.until(lambda: agent.api.get("/v1/queue")["queue"] == [], "no user waits")
    assert agent.api.problems() == []
    (one,) = instances(agent).values()
    assert [each["uid"] for each in one["daemons"]] == [A, B, C, D]
    assert (one["mode"]["sharing"], one["mode"]["why"]) == ("per-user", None)
    assert "CUDA_VISIBLE_DEVICES" not in agent.api.status()["environment"]


def test_reports_alone_keep_no_user_waiting(stage: Stage) -> None:
    """`mode = 'report'` with turns: the second user waited without end."""
    stage.policy(f'mode = "report"\n[limits]\nactive_threads = "10%"\nmax_clients = 1\n[user.{C}]\naccess = "deny"\n')
    agent = stage.again()
    clients = [working(stage, uid) for uid in (A, B, C, A)]
    assert {found[0] for one in clients if (found := one.seen()) is not None} == {stage.machine.multiprocessors}
    assert agent.api.get("/v1/queue")["queue"] == []
    assert all(one.rc is None for one in clients)


def test_users_take_turns_on_an_exclusive_gpu_and_work_at_once_on_the_others(stage: Stage) -> None:
    exclusive(stage, 1)
    agent = start(stage)
    found = instances(agent)
    all_gpus = uuids(stage)
    assert {name: [each["uuid"] for each in one["devices"]] for name, one in found.items()} == {
        "scene": [all_gpus[0], all_gpus[2]], "scene-gpu1": [all_gpus[1]],
    }  # fmt: skip
    assert [one["mode"]["sharing"] for one in found.values()] == ["per-user", "turns"]
    for client in [working(stage, uid) for uid in (A, B, C)]:
        assert "devices 2" in client.text()
    assert agent.api.get("/v1/queue")["queue"] == []


def test_a_node_of_exclusive_gpus_spreads_its_users_over_them(stage: Stage) -> None:
    """The policy was refused, and the agent kept all users out. A turn has no end, and people are told why."""
    exclusive(stage, 0, 1, 2)
    agent = start(stage)
    clients = [working(stage, uid) for uid in (A, B, C)]
    names = {one["pid"]: one["instance"] for one in agent.api.get("/v1/clients")["clients"]}
    assert {names[one.pid] for one in clients} == {"scene", "scene-gpu1", "scene-gpu2"}
    late = stage.client(D, "sleep", 600)
    stage.waiting(late)
    (waits,) = agent.api.get("/v1/queue")["queue"]
    assert (waits["uid"], waits["reason"], waits["turn_seconds"]) == (D, "turn", None)
    words = (
        f"the compute mode of GPU {uuids(stage)[0]} is EXCLUSIVE_PROCESS, in which one control daemon alone can use it"
    )
    for verb in (["status"], ["doctor"], ["policy", "explain", str(A)]):
        assert words in " ".join(stage.cli(agent, *verb)[1].split()), verb
    assert agent.api.get(f"/v1/policy/explain?user={A}")["turn.time_limit"]["value"] is None
    clients[1].finish()
    late.known()
    names = {one["pid"]: one["instance"] for one in agent.api.get("/v1/clients")["clients"]}
    assert names[late.pid] == "scene-gpu1", "a GPU is not idle while a user waits for another one"


def test_a_mode_that_changes_is_noticed(stage: Stage) -> None:
    """The agent's next start goes by it, and status says so until then."""
    agent = start(stage)
    exclusive(stage, 2)
    client = working(stage, A)
    later = "scene-gpu2 added: takes effect when mpsagent is restarted"
    stage.until(lambda: later in str(agent.api.status()["health"]["problems"]), "it is noticed while people look")
    client.finish()
    stage.stop_agent(agent)
    agent = start(stage)
    assert list(instances(agent)) == ["scene", "scene-gpu2"]
