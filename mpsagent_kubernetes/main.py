"""The program mpsagent-kubernetes: shares of the GPU as the node's resource, leases for pods, the node's condition."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

import mpsagent
from mpsagent.cli.client import DEFAULT_SOCKET, RequestRefused, Unreachable
from mpsagent_kubernetes import cluster
from mpsagent_kubernetes.node_agent import Health, NodeAgent
from mpsagent_kubernetes.pods import Pods
from mpsagent_kubernetes.shares import Shares

if TYPE_CHECKING:
    from mpsagent_kubernetes.kubelet import AtKubelet
    from mpsagent_kubernetes.plugin import Plugin

EVERY = 1.0
LEASES = 2.0
CONDITION = 30.0

log = logging.getLogger("mpsagent-kubernetes")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(mpsagent.__version__, prog_name="mpsagent-kubernetes")
@click.option(
    "--resource", default="nvidia.com/mps-share", show_default=True, help="Name the resource that pods request."
)
@click.option(
    "--shares",
    type=click.IntRange(1, 1000),
    default=100,
    show_default=True,
    help="Divide the GPU into this many shares. Change the number only while no pod has shares.",
)
@click.option(
    "--share-memory/--no-share-memory",
    default=True,
    show_default=True,
    help="Make a share also a share of the memory. Otherwise the user's memory limit applies.",
)
@click.option(
    "--processes-per-pod",
    type=click.IntRange(1, 48),
    default=1,
    show_default=True,
    help="Let this many processes of a pod use its shares, each an equal part. Further processes wait.",
)
@click.option("--node", envvar="NODE_NAME", help="Set the node's name, for its condition and events. [env: NODE_NAME]")
@click.option("--socket", default=DEFAULT_SOCKET, show_default=True, help="Connect to this socket of the agent.")
@click.option("--plugins", type=Path, default="/var/lib/kubelet/device-plugins", show_default=True)
@click.option("--pod-resources", type=Path, default="/var/lib/kubelet/pod-resources/kubelet.sock", show_default=True)
@click.option("--logs", type=Path, default="/var/log/pods", show_default=True)
@click.option("--cgroups", type=Path, default="/sys/fs/cgroup", show_default=True)
@click.option("--patience", type=float, default=30.0, show_default=True,
              help="Wait at most this many seconds for an agent (a container: 20).")  # fmt: skip
def main(
    resource: str, shares: int, share_memory: bool, processes_per_pod: int, node: str | None, socket: str,
    plugins: Path, pod_resources: Path, logs: Path, cgroups: Path, patience: float,
) -> None:  # fmt: skip
    """The device plugin of mpsagent. It runs on each node, next to the agent."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        from mpsagent_kubernetes.kubelet import AtKubelet, shares_of_pods
        from mpsagent_kubernetes.plugin import Plugin
    except ImportError as error:
        sys.exit(f"mpsagent-kubernetes: {error}; it needs grpcio and protobuf: pip install grpcio protobuf")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    agent = NodeAgent(socket)
    given = Shares(shares, share_memory, processes_per_pod)
    plugin = Plugin(agent, Pods(logs, cgroups), given, lambda: shares_of_pods(pod_resources, resource), patience)
    kubelet = AtKubelet(plugins, "mpsagent.sock", resource, plugin.handlers())
    send = cluster.in_cluster() if node else None
    told = cluster.Node(node, send) if node and send else None
    _run(stop, agent, plugin, kubelet, told, patience)
    kubelet.stop()


def _run(
    stop: threading.Event,
    agent: NodeAgent,
    plugin: Plugin,
    kubelet: AtKubelet,
    told: cluster.Node | None,
    patience: float,
) -> None:
    said: dict[str, str] = {}

    def tried(what: str, do: Callable[[], object]) -> None:
        """Call ``do``. A failure is logged once; the next round tries again."""
        try:
            do()
            why = ""
        except (Unreachable, RequestRefused, OSError) as error:
            why = str(error)
        if why and said.get(what) != why:
            log.warning("%s: %s", what, why)
        said[what] = why

    well, settled, shown, before = float("-inf"), float("-inf"), float("-inf"), Health(True)
    while not stop.is_set():
        now, health = time.monotonic(), agent.health()
        well = now if health.well else well
        plugin.tell(healthy=now - well < patience)
        tried("registration", kubelet.look)
        if now - settled >= LEASES:
            settled = now
            tried("leases", plugin.settle)
        if told is not None and (now - shown >= CONDITION or health.well is not before.well):
            shown, before = now, health
            say, current = told.say, health
            tried("the node's condition", lambda: say(current, time.time()))  # noqa: B023
        stop.wait(EVERY)
