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
from mpsagent.cli.client import DEFAULT_SOCKET, Refused, Unreachable
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
@click.option("--resource", default="nvidia.com/mps-share", show_default=True, help="What pods ask for.")
@click.option("--node", envvar="NODE_NAME", help="The node's name, for its condition and events. [env: NODE_NAME]")
@click.option("--socket", default=DEFAULT_SOCKET, show_default=True, help="The agent's.")
@click.option("--plugins", type=Path, default="/var/lib/kubelet/device-plugins", show_default=True)
@click.option("--pod-resources", type=Path, default="/var/lib/kubelet/pod-resources/kubelet.sock", show_default=True)
@click.option("--logs", type=Path, default="/var/log/pods", show_default=True)
@click.option("--cgroups", type=Path, default="/sys/fs/cgroup", show_default=True)
@click.option("--patience", type=float, default=30.0, show_default=True,
              help="Seconds that a container (20 at most) and the node's shares wait for an agent.")  # fmt: skip
def main(
    resource: str, node: str | None, socket: str, plugins: Path, pod_resources: Path, logs: Path, cgroups: Path,
    patience: float,
) -> None:  # fmt: skip
    """The device plugin of mpsagent: runs on each node, beside the agent."""
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
    shares = _shares(agent, stop)
    if shares is None:
        return
    plugin = Plugin(agent, Pods(logs, cgroups), shares, lambda: shares_of_pods(pod_resources, resource), patience)
    kubelet = AtKubelet(plugins, "mpsagent.sock", resource, plugin.handlers())
    send = cluster.in_cluster() if node else None
    told = cluster.Node(node, send) if node and send else None
    _run(stop, agent, plugin, kubelet, told, patience)
    kubelet.stop()


def _shares(agent: NodeAgent, stop: threading.Event) -> Shares | None:
    """Of the policy in force when the plugin starts; None: it was stopped first. Pods that run have shares of that
    size, so another size takes hold at the next start."""
    said = ""
    while not stop.is_set():
        try:
            return agent.shares()
        except (Unreachable, Refused) as error:
            if str(error) != said:
                said = str(error)
                log.warning("the agent does not say what the policy gives: %s", error)
        stop.wait(EVERY)
    return None


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
        """What fails is tried again at the next look, and said once."""
        try:
            do()
            why = ""
        except (Unreachable, Refused, OSError) as error:
            why = str(error)
        if why and said.get(what) != why:
            log.warning("%s: %s", what, why)
        said[what] = why

    well, settled, shown, before = time.monotonic(), float("-inf"), float("-inf"), Health(True)
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
