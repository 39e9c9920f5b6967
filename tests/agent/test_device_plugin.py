"""The device plugin between kubelet and agent, through restarts of each: no share is lost, and none given twice."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mpsagent_sim import gpu
from tests.agent.stage import Agent, Stage
from tests.conformance import rig as rigs
from tests.kubernetes.stand_in import Failed, Kubelet
from tests.scenes import jobs
from tests.scenes.stage import Client, StageError

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(find_spec("grpc") is None, reason="no grpcio (pip install 'mpsagent[kubernetes]')"),
]

USER = rigs.USERS[0]
SHARES = 10
POLICY = """[limits]
active_threads = '5%'
total_active_threads = '100%'
"""
PLUGIN = (sys.executable, "-c", "from mpsagent_kubernetes.main import main; main()")
UIDS = {name: f"{number}b4e28ba-2fa1-11d2-883f-0016d3cca427" for number, name in enumerate(("a", "b", "c", "d"))}


def directory(name: str) -> str:
    """Of a pod's cgroup, as the kubelet names it with systemd."""
    return f"kubepods-burstable-pod{UIDS[name].replace('-', '_')}.slice"


def removed(cgroup: Path) -> bool:
    try:
        cgroup.rmdir()
    except OSError:
        return False
    return True


class Node:
    """An agent, a kubelet and the plugin between them; a cgroup for each pod is there from the start."""

    def __init__(self, stage: Stage, pods: Path, patience: int) -> None:
        self.stage, self.pods, self.patience = stage, pods, patience
        self.agent: Agent = stage.with_agent(POLICY, extra='sharing = "one-server"')
        self.kubelet = Kubelet(stage.place / "kubelet")
        self.kubelet.call("start")
        self.plugin = self.start_plugin()

    def start_plugin(self) -> rigs.Started:
        kubelet = self.kubelet
        words = [
            *PLUGIN,
            "--shares",
            str(SHARES),
            "--socket",
            str(self.stage.place / "agent.sock"),
            "--plugins",
            str(kubelet.plugins),
        ]
        words += ["--pod-resources", str(kubelet.pods / "kubelet.sock"), "--logs", str(kubelet.logs)]
        return self.stage.rig.run(
            [*words, "--cgroups", str(self.pods.parent), "--patience", str(self.patience)], env={**os.environ}
        )

    def end_plugin(self) -> None:
        """The stage ends what has to do with MPS, and this has not."""
        self.plugin.process.kill()
        self.plugin.process.wait()

    def kubelet_says(self, true: Callable[[dict[str, Any]], bool], what: str) -> None:
        try:
            self.stage.until(lambda: true(self.kubelet.call("now")), what)
        except StageError as error:
            raise StageError(f"{error}\n--- health\n{self.agent.api.problems()}") from None

    def ready(self, registered: int) -> None:
        """The kubelet has heard of all shares, for this time."""
        self.kubelet_says(lambda now: now["registered"] >= registered, f"registered for the {registered}. time")
        self.kubelet_says(lambda now: list(now["health"].values()) == ["Healthy"] * SHARES, "all shares are there")

    def leases(self) -> dict[str, tuple[int, float]]:
        """Number and percent by the name of the pod."""
        found = self.agent.api.get("/v1/leases")["leases"]
        names = {f"pod:default/{name}:{uid}": name for name, uid in UIDS.items()}
        assert all(one["cgroup"] == f"/{self.pods.name}/{directory(names[one['name']])}" for one in found)
        assert len(found) == len({one["name"] for one in found}), "no pod has two"
        return {names[one["name"]]: (one["id"], float(one["active_threads"].rstrip("%"))) for one in found}

    def pod(self, name: str, shares: int) -> None:
        assert self.kubelet.call("admit", "default", name, shares) == ["mpsagent/mps=all"]
        self.kubelet.call("start_container", "default", name, UIDS[name])

    def started(self, name: str) -> Callable[[], bool]:
        """Whether a container that was begun has started. As the kubelet does it is tried again."""

        def has() -> bool:
            try:
                self.kubelet.answer()
            except Failed:
                self.kubelet.begin("start_container", "default", name, UIDS[name])
                return False
            return True

        return has

    def works(self, name: str, percent: float) -> Client:
        """A process of the pod has its share to the multiprocessor and the MiB."""
        with jobs.inside(self.pods / directory(name)):
            client = self.stage.client(USER, "sleep", 600)
        assert client.working(), client.text()
        sms = gpu.multiprocessors(percent)
        assert client.seen() == (sms, gpu.free(sms, int(gpu.TOTAL * percent / 100), 0, 0))
        return client


@pytest.fixture
def patience() -> int:
    """Long enough for the slowest machine: shares stay healthy while agents are replaced."""
    return 60


@pytest.fixture
def node(stage: Stage, patience: int) -> Iterator[Node]:
    with ExitStack() as ends:
        top = ends.enter_context(jobs.cgroups(*(directory(name) for name in UIDS)))
        if top is None:
            pytest.skip("no cgroup can be made here")
        made = Node(stage, top, patience)
        ends.callback(made.kubelet.close)
        ends.callback(made.end_plugin)
        yield made
        stage.end()


def test_no_share_is_lost_or_given_twice(node: Node) -> None:
    stage, kubelet = node.stage, node.kubelet
    node.ready(1)
    node.pod("a", 3)
    first = node.leases()
    assert {name: percent for name, (_, percent) in first.items()} == {"a": 30.0}
    node.works("a", 30)
    kubelet.call("start_container", "default", "a", UIDS["a"])
    assert node.leases() == first, "a container that is started again has what it had"

    # Agent and gate are killed; a container that is to start waits for its lease, and starts.
    kubelet.call("admit", "default", "b", 4)
    os.kill(stage.gate(node.agent), signal.SIGKILL)
    stage.killed(node.agent)
    kubelet.begin("start_container", "default", "b", UIDS["b"])
    node.agent = stage.again()
    stage.until(node.started("b"), "the container has started")
    second = node.leases()
    assert (second["a"], second["b"][1], len(second)) == (first["a"], 40.0, 2)
    node.works("b", 40)

    # The plugin is killed.
    node.end_plugin()
    node.kubelet_says(
        lambda now: "Healthy" not in now["health"].values(), "the kubelet has seen that its plugin is gone"
    )
    node.plugin = node.start_plugin()
    node.ready(2)
    assert node.leases() == second

    # The kubelet is restarted: it has forgotten the plugin, and not whose the shares are.
    kubelet.call("stop")
    kubelet.call("start")
    node.ready(3)
    assert node.leases() == second
    with pytest.raises(Failed, match="3 are free"):
        kubelet.call("admit", "default", "c", 4)
    node.pod("c", 3)
    assert len({one for given in kubelet.call("now")["given"].values() for one in given}) == SHARES
    last = node.works("c", 30)

    # A pod that has ended has no lease any more, and its shares are another's.
    last.kill()
    stage.until(lambda: removed(node.pods / directory("c")), "the pod's cgroup is empty, and removed")
    kubelet.call("end", "default", "c")
    stage.until(lambda: "c" not in node.leases(), "the lease of a pod that has ended is over")
    node.pod("d", 3)
    assert {name: percent for name, (_, percent) in node.leases().items()} == {"a": 30.0, "b": 40.0, "d": 30.0}
    (node.pods / directory("c")).mkdir()


@pytest.mark.parametrize("patience", [1])
def test_what_the_kubelet_may_ask(node: Node) -> None:
    """Shares are alike; one that there is not, or that no pod has, is refused in words for the pod's events; and a node
    without an agent gets no new pods."""
    node.ready(1)
    kubelet = node.kubelet
    with pytest.raises(Failed, match="there is no share-10"):
        kubelet.call("allocate", ["share-1", "share-10"])
    with pytest.raises(Failed, match="share-1: the kubelet says that 0 pods have them"):
        kubelet.call("pre_start", ["share-1"])
    kubelet.call("take", "default", "a", ["share-0"])
    with pytest.raises(Failed, match="pod default/a: no default_a_UID in"):
        kubelet.call("pre_start", ["share-0"])
    assert node.leases() == {}

    node.stage.stop_agent(node.agent)
    node.kubelet_says(lambda now: set(now["health"].values()) == {"Unhealthy"}, "a node without an agent")
    node.agent = node.stage.again()
    node.kubelet_says(lambda now: set(now["health"].values()) == {"Healthy"}, "a node with an agent again")
