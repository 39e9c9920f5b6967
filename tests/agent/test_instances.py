"""Two GPUs, an instance for each, one public directory: who goes where, and that nothing of one touches the other."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpsagent.linux.processes import parent
from mpsagent.mps.units import multiprocessors_for_percent
from tests.agent.stage import A, Agent, B, C, Client, Machine, Stage
from tests.conformance import backends
from tests.conformance import rig as rigs
from tests.scenes.stage import look_at

pytestmark = pytest.mark.root

EACH = """
[limits]
active_threads = '50%'
[timeouts]
control_daemon = "1s"
fault_recovery = "1s"
sigkill_delay = "1s"
"""


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[rigs.Backend, Machine]]:
    if os.geteuid() != 0:
        pytest.skip("needs root: clients of several users")
    place = Path(tempfile.mkdtemp(prefix="mpsi", dir="/tmp"))
    place.chmod(0o755)
    backend = backends.sim_backend(place, gpus=2)
    machine, _ = look_at(backend, place / "look")
    yield backend, machine
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def stage(two: tuple[rigs.Backend, Machine]) -> Iterator[Stage]:
    place = Path(tempfile.mkdtemp(prefix="mpsj", dir="/tmp"))
    place.chmod(0o755)
    with Stage(two[0], place / "s", two[1], quick=True) as one:
        yield one
    shutil.rmtree(place, ignore_errors=True)
    assert one.left == [], "something of the stage outlived it"


def start(stage: Stage, instances: str = "", *, text: str = EACH, placement: str = "least-loaded") -> Agent:
    """An agent with ``instances``, or with one for each GPU."""
    for path in stage.place.parents:
        path.chmod(path.stat().st_mode | 0o005) if path != Path("/") else None
    where = (
        f'pipe_directory = "{stage.rig.pipe}"\ncontrol_daemon_path = "{stage.backend.control}"\n'
        f'log_directory = "{stage.rig.log}'
    )
    instances = instances or '[instance.gpu]\ndevices = ["each"]\n'
    parts = instances.split("[instance.")[1:]
    for part in parts:
        name = part.partition("]")[0]
        way = "" if "sharing =" in part else 'sharing = "turns"\n'
        text += f"[instance.{part.rstrip()}\n" + (f'{where}/{name}"\n{way}' if "." not in name else "")
    (stage.place / "policy.toml").write_text(f'{text}\n[agent]\nplacement = "{placement}"\n')
    return again(stage)


def again(stage: Stage) -> Agent:
    agent = stage.start_agent()
    stage.answering(agent)
    stage.until(lambda: all_open(agent), "all instances serve")
    return agent


def all_open(agent: Agent) -> bool:
    return all(
        one["mode"]["sharing"] == "per-user" or (one["control"] and one["control"]["running"])
        for one in agent.api.status()["instances"]
    ) and bool(agent.api.status()["gate"]["in_force"])


def instances(agent: Agent) -> dict[str, Any]:
    return {one["name"]: one for one in agent.api.status()["instances"]}


def where(agent: Agent, client: Client) -> str | None:
    rows = agent.api.get("/v1/clients")["clients"]
    return next((str(one["instance"]) for one in rows if one["pid"] == client.pid), None)


def text_of(agent: Agent, target: str) -> str:
    """An answer that is not JSON."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(agent.api.path))
        sock.sendall(f"GET {target} HTTP/1.0\r\nHost: mps\r\n\r\n".encode())
        return b"".join(iter(lambda: sock.recv(65536), b"")).decode()


def working(stage: Stage, uid: int, *mode: float | str) -> Client:
    client = stage.client(uid, *(mode or ("sleep", 600)))
    client.known()
    return client


def share(client: Client) -> int:
    """The multiprocessors that it has."""
    found = client.seen()
    assert found is not None
    return found[0]


def share_of(stage: Stage, percent: float) -> int:
    return multiprocessors_for_percent(percent, stage.machine.multiprocessors)


def test_each_gpu_has_an_instance_and_users_are_spread_and_stay(stage: Stage) -> None:
    agent = start(stage)
    devices = json.loads(Path(stage.backend.control).with_name("devices.json").read_text())
    found = instances(agent)
    assert list(found) == ["gpu0", "gpu1"]
    assert [one["devices"][0]["uuid"] for one in found.values()] == [one["uuid"] for one in devices]
    assert [one["devices"][0]["ordinal"] for one in found.values()] == [0, 0]
    a, b = working(stage, A), working(stage, B)
    assert {where(agent, a), where(agent, b)} == {"gpu0", "gpu1"}
    assert share(a) == share_of(stage, 50)
    assert share(b) == share_of(stage, 50)
    assert where(agent, working(stage, A)) == where(agent, a)
    assert {parent(one["servers"][0]["pid"]) for one in instances(agent).values()} == {
        one["control"]["pid"] for one in instances(agent).values()
    }
    waiting = stage.client(C, "sleep", 600)
    stage.waiting(waiting)
    assert agent.api.get("/v1/queue")["queue"][0]["instance"] in ("gpu0", "gpu1")
    assert stage.records("turn.began", uid=A)[0]["instance"] == where(agent, a)
    changes = {name: one["last_change"] for name, one in instances(agent).items()}
    assert {name: (one["uid"], one["before"]) for name, one in changes.items()} == {
        where(agent, a): (A, None), where(agent, b): (B, None),
    }, "the change of one was said of the other, too"  # fmt: skip
    metrics = text_of(agent, "/metrics")
    assert f'mpsagent_turn_info{{mps_instance="{where(agent, a)}",user="{A}"}} 1.0' in metrics
    assert metrics.count("# TYPE mpsagent_clients gauge") == 1
    status, page = stage.cli(agent, "status")
    assert status in (0, 1)
    heads = [line.split()[0] for line in page.splitlines() if line.strip()]
    assert heads.index("gpu0") < heads.index("gpu1") < heads.index("policy"), page
    assert stage.cli(agent, "env") == (
        0,
        f"export CUDA_MPS_PIPE_DIRECTORY={stage.rig.pipe}\nexport CUDA_VISIBLE_DEVICES=0\n"
        "export CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=''\n",
    )


def test_a_process_that_has_lost_its_server_stays_with_its_gpu_whoever_dies(stage: Stage) -> None:
    """Its CUDA goes on with the GPU that it saw. In disorder it went to the instance that was idle, and worked on its
    own GPU beside the user whose turn it was there."""
    agent = start(stage)
    other = working(stage, B)
    client = working(stage, A, "contexts", 2, 600)
    assert (where(agent, other), where(agent, client)) == ("gpu0", "gpu1")
    assert client.saw("made 2 contexts")
    os.kill(instances(agent)["gpu1"]["control"]["pid"], signal.SIGKILL)
    stage.record("client.ended", pid=client.pid)
    stage.until(lambda: all_open(agent), "both serve again")
    third = working(stage, C)
    assert where(agent, third) == "gpu1"
    os.kill(client.pid, signal.SIGUSR1)  # it makes another context

    def waits() -> list[tuple[int, str]]:
        return [(one["uid"], one["instance"]) for one in agent.api.get("/v1/queue")["queue"]]

    stage.until(lambda: waits() == [(A, "gpu1")], "it waits where it worked")
    other.finish()  # gpu0 is idle
    stage.until(lambda: other.rc is not None and where(agent, other) is None, "it has ended")
    gate = agent.api.status()["gate"]["pid"]
    os.kill(gate, signal.SIGKILL)
    stage.until(lambda: agent.api.status()["gate"]["pid"] not in (None, gate) and all_open(agent), "another gate")
    assert waits() == [(A, "gpu1")]
    stage.stop_agent(agent, signal.SIGKILL)
    agent = again(stage)
    stage.until(lambda: waits() == [(A, "gpu1")], "another agent knows it")
    beside = stage.client(A, "query")  # the user's others wait for the same GPU
    stage.waiting(beside)
    third.finish()
    assert client.saw("another ctx")
    assert beside.ended() == 0
    connected = stage.records("client.connected", uid=A)
    assert [(one["pid"], one["instance"]) for one in connected].count((client.pid, "gpu1")) == 2
    assert {one["instance"] for one in connected} == {"gpu1"}
    assert not stage.records("user.moved", uid=A)


def test_a_process_whose_instance_is_taken_away_is_told_to_start_again(stage: Stage) -> None:
    devices = json.loads(Path(stage.backend.control).with_name("devices.json").read_text())
    gpu0, gpu1 = (f'[instance.gpu{n}]\ndevices = ["{devices[n]["uuid"]}"]\n' for n in (0, 1))
    agent = start(stage, gpu0 + gpu1)
    other, client = working(stage, B), working(stage, A, "contexts", 2, 600)
    assert where(agent, client) == "gpu1"
    os.kill(instances(agent)["gpu1"]["control"]["pid"], signal.SIGKILL)
    stage.record("client.ended", pid=client.pid)
    other.finish()
    stage.stop_agent(agent)
    agent = start(stage, gpu0)
    assert list(instances(agent)) == ["gpu0"]
    os.kill(client.pid, signal.SIGUSR1)
    assert client.saw("another ctx CUDA_ERROR_MPS_CONNECTION_FAILED"), client.text()
    why = stage.record("client.refused", pid=client.pid)["why"]
    assert why.startswith("its process has worked at instance gpu1, which the policy no longer has")
    assert where(agent, working(stage, A)) == "gpu0"


def test_who_belongs_nowhere_is_refused_and_told(stage: Stage) -> None:
    """The user by `policy explain` and so by `queue`; the administrator by `policy check` and on record."""
    devices = json.loads(Path(stage.backend.control).with_name("devices.json").read_text())
    agent = start(
        stage,
        f'[instance.one]\ndevices = ["{devices[0]["uuid"]}"]\nusers = ["{A}"]\n'
        f'[instance.two]\ndevices = ["{devices[1]["uuid"]}"]\nusers = ["{B}"]\n',
    )
    checked = stage.cli(agent, "policy", "check", str(stage.place / "policy.toml"))[1]
    assert "no instance serves the users whom no instance names" in " ".join(checked.split())
    explained = stage.cli(agent, "policy", "explain", str(C))[1]
    assert "the policy has no instance for this user" in " ".join(explained.split())
    told = agent.api.get(f"/v1/policy/explain?user={C}")
    assert (told["instance"], told["access"]["value"]) == (None, "deny")
    refused = stage.client(C)
    assert refused.ended() != 0
    assert "MPS_CONNECTION_FAILED" in refused.text()
    assert "the policy has no instance for this user" in stage.record("client.refused", pid=refused.pid)["why"]
    lines = [
        one for kind in ("action.done", "action.failed") for one in stage.records(kind, action="Tell", pid=refused.pid)
    ]
    assert ["was refused: the policy has no instance for this user" in one["reason"] for one in lines] == [True]
    assert where(agent, working(stage, B)) == "two"


def test_a_changed_policy_is_shown_and_taken_by_the_instance_that_it_is_for(stage: Stage) -> None:
    agent = start(stage)
    assert agent.api.order("diff")[1]["same"]
    path = stage.place / "policy.toml"
    path.write_text(path.read_text() + "[instance.gpu.limits]\nactive_threads = '20%'\n")
    told = agent.api.order("diff")[1]
    assert {row["who"] for row in told["users"]} == {"all other users at gpu0", "all other users at gpu1"}
    assert told["settings"] == []
    assert agent.api.order("reload")[0] == 200
    client = working(stage, A)
    assert share(client) == share_of(stage, 20)
    devices = json.loads(Path(stage.backend.control).with_name("devices.json").read_text())
    more = f'[instance.more]\ndevices = ["{devices[0]["uuid"]}"]\npipe_directory = "{stage.rig.pipe}"\n'
    path.write_text(path.read_text() + more)
    told = agent.api.order("diff")[1]
    added = {"key": "instances", "before": "gpu0, gpu1", "after": "gpu1, more", "restart": True}
    assert added in told["settings"]
    status, answer = agent.api.order("reload")
    assert (status, answer["digest"]) == (200, told["digest"])
    assert "more added: takes effect when mpsagent is restarted" in answer["later"], "it said that all is in force"
    assert added in agent.api.order("diff")[1]["settings"], "what the files say is not in force"
    assert "more added" in stage.problem(agent, "takes effect when mpsagent is restarted")
    assert list(instances(agent)) == ["gpu0", "gpu1"]
    assert stage.record("client.connected", pid=client.pid)["instance"] == "gpu0", "which is not in the policy any more"
    path.write_text(path.read_text() + f'[user.{A}]\naccess = "deny"\n')
    assert "gpu0 removed" in agent.api.order("reload")[1]["later"]
    denied = stage.client(A)
    assert denied.ended() != 0, "the rules for users hold there, too"
    assert "in the policy for user" in stage.record("client.refused", pid=denied.pid)["why"]
    assert client.rc is None


def test_orders_are_for_one_instance_or_for_all(stage: Stage) -> None:
    agent = start(stage)
    pids = {name: one["control"]["pid"] for name, one in instances(agent).items()}
    assert agent.api.order("restart-mps", instance="gpu1")[0] == 200
    stage.until(
        lambda: (found := instances(agent)["gpu1"]["control"]) and found["running"] and found["pid"] != pids["gpu1"],
        "another daemon",
    )
    assert instances(agent)["gpu0"]["control"]["pid"] == pids["gpu0"]
    status, said = stage.cli(agent, "restart-mps", "--yes", "--instance", "gpu0")
    assert (status, said.count("started the control daemon"), "gpu1" in said) == (0, 1, False), said
    status, said = stage.cli(agent, "restart-mps", "--yes")
    assert status == 0, said
    for name in ("gpu0", "gpu1"):  # the first that ran again was enough
        assert f"{name}: started the control daemon" in said, said
    ordered = len(stage.records("control.restart_ordered"))
    assert agent.api.order("drain", instance="gpu1")[0] == 200
    assert agent.api.order("restart-mps")[0] == 409
    assert len(stage.records("control.restart_ordered")) == ordered, "gpu0 was restarted, and then it was refused"
    assert agent.api.order("resume", instance="gpu1")[0] == 200
    stage.until(lambda: all_open(agent), "open again")
    status, answer = agent.api.order("drain", instance="gpu0")
    assert (status, answer["instances"]) == (200, ["gpu0"])
    assert [one["drain"]["draining"] for one in instances(agent).values()] == [True, False]
    assert not agent.api.status()["drain"]["draining"]
    for uid in (A, B):  # who comes goes where something is let in
        client = stage.client(uid)
        assert client.ended() == 0, client.text()
        assert stage.record("client.connected", pid=client.pid)["instance"] == "gpu1"
    assert agent.api.order("drain", instance="nosuch")[0] == 404
    assert agent.api.order("resume")[0] == 200
    assert not any(one["drain"]["draining"] for one in instances(agent).values())
    stage.until(lambda: all_open(agent), "open again")


# --- a directory for each ---------------------------------------------------------------------------------------------

OWN = f"""
[instance.gpu0]
devices = ["GPU-513e171f-4520-0894-ba89-06b9f5c1d7b8"]
sharing = "per-user"
users = ["{A}", "{C}"]
[instance.gpu0.limits]
active_threads = '20%'
[instance.gpu1]
devices = ["GPU-3d07cd2a-6e14-11b8-c643-07a1e14ae7bc"]
sharing = "one-server"
users = ["{A}", "{B}"]
[instance.gpu1.limits]
active_threads = '40%'
total_active_threads = '80%'
"""


def at(stage: Stage, instance: str) -> dict[str, str]:
    """What a client needs that is for this instance."""
    agent = stage.agents[-1]
    page = instances(agent)[instance]
    return {key: value for key, value in page["environment"].items() if key == "CUDA_MPS_PIPE_DIRECTORY"}


def own(stage: Stage, uid: int, instance: str, *mode: float | str) -> Client:
    return stage.client(uid, *(mode or ("sleep", 600)), **at(stage, instance))


def test_a_client_goes_to_the_instance_in_whose_directory_it_looks(stage: Stage) -> None:
    agent = start(stage, OWN, placement="by-directory")
    stage.until(lambda: os.path.exists(f"{at(stage, 'gpu1')['CUDA_MPS_PIPE_DIRECTORY']}/control"), "it is there")
    clients = {name: own(stage, A, name) for name in ("gpu0", "gpu1")}
    for name, one in clients.items():
        one.known()
        assert where(agent, one) == name, "one user's clients, in two instances at once"
    assert {name: share(one) for name, one in clients.items()} == {
        "gpu0": share_of(stage, 20),
        "gpu1": share_of(stage, 40),
    }
    assert [one["uid"] for one in instances(agent)["gpu0"]["daemons"]] == [A]
    late = own(stage, A, "gpu1")
    late.known()
    third = own(stage, A, "gpu1")
    stage.until(
        lambda: [(one["uid"], one["reason"]) for one in agent.api.get("/v1/queue")["queue"]] == [(A, "total")],
        "its total counts there",
    )
    denied = own(stage, C, "gpu1", "query")
    assert denied.ended() != 0
    refused = agent.wait("client.refused", uid=C)
    assert refused["why"] == "the directory is that of gpu1; the policy has gpu0 for this user"
    gate = agent.api.status()["gate"]["pid"]
    os.kill(gate, signal.SIGKILL)  # its sockets lie in the store
    again_here = own(stage, B, "gpu1", "query")
    assert again_here.ended() == 0
    assert share(again_here) == share_of(stage, 40)
    assert agent.api.status()["gate"]["pid"] != gate
    late.finish()
    third.known()
    assert where(agent, third) == "gpu1"
    stage.stop_agent(agent, signal.SIGKILL)
    agent = again(stage)
    stage.until(
        lambda: [where(agent, one) for one in (clients["gpu0"], third)] == ["gpu0", "gpu1"], "another agent knows them"
    )
    environment = stage.cli(agent, "env", "--instance", "gpu1", "--json")
    given = {**at(stage, "gpu1"), "CUDA_VISIBLE_DEVICES": "0", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": ""}
    assert json.loads(environment[1]) == given


def test_a_fault_in_a_users_own_daemon_is_said_of_its_section(stage: Stage) -> None:
    agent = start(stage, OWN, placement="by-directory")
    stage.until(lambda: os.path.exists(f"{at(stage, 'gpu1')['CUDA_MPS_PIPE_DIRECTORY']}/control"), "it is there")
    own(stage, A, "gpu0", "oob", 0.1)
    stage.record("server.fault")
    assert {name for name, one in instances(agent).items() if one["last_fault"]} == {"gpu0"}
