"""The device plugin: answers to the kubelet, and leases for pods.

``Allocate`` gives a container the gate as a CDI device. The protocol does not name the pod, and the pod's cgroup may
not exist yet. Before the container starts, the kubelet calls ``PreStartContainer``, when both can be found out. So a
pod's first process already has its lease, or the container does not start and the kubelet tries again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc

from mpsagent.cli.client import RequestRefused, Unreachable
from mpsagent_kubernetes import protocol
from mpsagent_kubernetes.kubelet import Refused as NotTold
from mpsagent_kubernetes.node_agent import NodeAgent
from mpsagent_kubernetes.pods import Pods, Unknown
from mpsagent_kubernetes.shares import Shares, has_lease, lease, ours, renewed

LONGEST = 20.0
"""Seconds that a container waits for its lease at most; the kubelet itself gives up after 30, and tries again."""
AGAIN = 0.5
DEVICE = "mpsagent/mps=all"
HEARTBEAT = 1.0
"""Seconds after which a stream sees that its kubelet has gone."""

Whose = Callable[[], Mapping[tuple[str, str], frozenset[str]]]
"""Shares by namespace and name of the pod, as the kubelet says. Raises kubelet.Refused."""

log = logging.getLogger("mpsagent-kubernetes")


class Plugin:
    """The plugin. Its state is in the kubelet and the agent, so that a new plugin continues where it stopped."""

    def __init__(self, agent: NodeAgent, pods: Pods, shares: Shares, whose: Whose, patience: float) -> None:
        self._agent, self._pods, self._shares, self._whose = agent, pods, shares, whose
        self._patience = min(patience, LONGEST)
        self._giving = threading.Lock()
        self._changed = threading.Condition()
        self._healthy = True

    # --- what the kubelet asks ----------------------------------------------------------------------------------------

    def handlers(self) -> Any:
        methods: dict[str, tuple[Callable[..., Any], str, str, bool]] = {
            "GetDevicePluginOptions": (self._options, "Empty", "DevicePluginOptions", False),
            "ListAndWatch": (self._list, "Empty", "ListAndWatchResponse", True),
            "Allocate": (self._allocate, "AllocateRequest", "AllocateResponse", False),
            "PreStartContainer": (self._pre_start, "PreStartContainerRequest", "PreStartContainerResponse", False),
        }  # fmt: skip
        made = {}
        for name, (answer, taken, given, stream) in methods.items():
            kind = grpc.unary_stream_rpc_method_handler if stream else grpc.unary_unary_rpc_method_handler
            made[name] = kind(
                answer,
                request_deserializer=protocol.DEVICE[taken].FromString,
                response_serializer=protocol.DEVICE[given].SerializeToString,
            )
        return grpc.method_handlers_generic_handler(protocol.DEVICE_PLUGIN, made)

    def _options(self, _request: Any, _context: Any) -> Any:
        return protocol.DEVICE["DevicePluginOptions"](pre_start_required=True)

    def _list(self, _request: Any, context: Any) -> Iterator[Any]:
        """All shares at once, and again when their health changes."""
        told: bool | None = None
        while context.is_active():
            with self._changed:
                if self._healthy is told:
                    self._changed.wait(HEARTBEAT)
                healthy = self._healthy
            if healthy is not told:
                told = healthy
                word = "Healthy" if healthy else "Unhealthy"
                devices = [protocol.DEVICE["Device"](ID=name, health=word) for name in self._shares.devices]
                yield protocol.DEVICE["ListAndWatchResponse"](devices=devices)

    def _allocate(self, request: Any, context: Any) -> Any:
        answer, known = protocol.DEVICE["AllocateResponse"](), set(self._shares.devices)
        for one in request.container_requests:
            if strange := sorted(set(one.devices_ids) - known):
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"there is no {strange[0]}")
            answer.container_responses.add().cdi_devices.add(name=DEVICE)
        return answer

    def _pre_start(self, request: Any, context: Any) -> Any:
        end = time.monotonic() + self._patience
        while True:
            try:
                self._give(frozenset(request.devices_ids))
                return protocol.DEVICE["PreStartContainerResponse"]()
            except (Unreachable, Unknown, NotTold) as error:
                why = str(error)
            except RequestRefused as refused:
                why = f"mpsagent gives no lease: {refused}"
            if time.monotonic() > end or not context.is_active():
                log.warning("a container does not start: %s", why)
                context.abort(grpc.StatusCode.UNAVAILABLE, f"mpsagent: {why}")
            time.sleep(AGAIN)

    # --- leases -------------------------------------------------------------------------------------------------------

    def _give(self, devices: frozenset[str]) -> None:
        """Give a lease to the pod that has these devices. Raises Unknown, NotTold, Unreachable, Refused."""
        whose = [(pod, mine) for pod, mine in self._whose().items() if devices & mine]
        if len(whose) != 1:
            raise Unknown(f"{', '.join(sorted(devices)[:3])}: the kubelet says that {len(whose)} pods have them")
        (namespace, name), mine = whose[0]
        pod = self._pods.pod(namespace, name, len(mine))
        with self._giving:  # containers of one pod may start together
            if not has_lease(pod, self._agent.leases()):
                self._agent.give(lease(pod, self._shares))
                log.info("pod %s/%s has a lease of %g %%", namespace, name, self._shares.percent(pod.shares))

    def settle(self) -> None:
        """End the leases of pods that no longer exist, and renew leases that expire soon. Raises Unreachable, Refused.

        A pod no longer exists if its cgroup does not: no process can run in it. The kubelet is not asked, so that its
        restart ends no lease.
        """
        with self._giving:
            for one in ours(self._agent.leases()):
                if self._pods.gone(one["cgroup"]):
                    self._agent.end(one["id"])
                    log.info("%s has gone, and its lease is over", one["name"])
                elif (longer := renewed(one, time.time())) is not None:
                    self._agent.give(longer)

    def tell(self, *, healthy: bool) -> None:
        with self._changed:
            self._healthy = healthy
            self._changed.notify_all()
