"""The plugin at its socket, registered with the kubelet, again after each restart of it; and whose the shares are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from mpsagent_kubernetes import protocol

DEADLINE = 5.0
THREADS = 32
"""A stream of a kubelet that has gone holds one for a second, and containers that start hold one each."""


class Refused(OSError):
    """The kubelet does not take the plugin, or does not answer."""


class AtKubelet:
    """``directory``: /var/lib/kubelet/device-plugins. ``name``: of the plugin's socket there."""

    def __init__(self, directory: Path, name: str, resource: str, handlers: Any) -> None:
        self._kubelet, self._socket = directory / "kubelet.sock", directory / name
        self._resource, self._handlers = resource, handlers
        self._server: Any = None
        self._ours = self._theirs = (0, 0)

    def look(self) -> bool:
        """Serve and register where that is not so. A kubelet that starts empties the directory, and has forgotten its
        plugins; a new kubelet.sock may come later than that. True: registered now. Raises Refused."""
        theirs = _file(self._kubelet)
        if self._server is not None and _file(self._socket) == self._ours and theirs == self._theirs:
            return False
        if theirs == (0, 0):
            self._theirs = theirs
            return False  # there is no kubelet
        self._serve()
        self._register()
        self._theirs = theirs
        return True

    def _serve(self) -> None:
        self.stop()
        with suppress(FileNotFoundError):
            self._socket.unlink()
        # A dead connection of an earlier kubelet must hold no thread for long.
        server = grpc.server(ThreadPoolExecutor(THREADS, "kubelet"), handlers=(self._handlers,))
        if not server.add_insecure_port(f"unix:{self._socket}"):
            raise Refused(f"{self._socket} cannot be made")
        server.start()
        self._server, self._ours = server, _file(self._socket)

    def _register(self) -> None:
        request = protocol.DEVICE["RegisterRequest"](
            version=protocol.VERSION, endpoint=self._socket.name, resource_name=self._resource
        )
        request.options.pre_start_required = True
        try:
            _ask(self._kubelet, f"/{protocol.REGISTRATION}/Register", request, protocol.DEVICE["Empty"])
        except Refused:
            self.stop()
            raise

    def stop(self) -> None:
        """The socket goes with it."""
        if self._server is not None:
            self._server.stop(grace=None).wait(DEADLINE)
            self._server = None


def shares_of_pods(socket: Path, resource: str) -> dict[tuple[str, str], frozenset[str]]:
    """Shares by namespace and name of the pod, from the kubelet's PodResources. Raises Refused."""
    request, answer = protocol.PODS["ListPodResourcesRequest"], protocol.PODS["ListPodResourcesResponse"]
    said = _ask(socket, f"/{protocol.POD_RESOURCES}/List", request(), answer)
    found: dict[tuple[str, str], frozenset[str]] = {}
    for pod in said.pod_resources:
        devices = [one for container in pod.containers for one in container.devices]
        mine = frozenset(name for one in devices if one.resource_name == resource for name in one.device_ids)
        if mine:
            found[pod.namespace, pod.name] = mine
    return found


def _ask(socket: Path, method: str, request: Any, answer: Any) -> Any:
    """Raises Refused."""
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        ask = channel.unary_unary(
            method, request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString
        )
        try:
            return ask(request, timeout=DEADLINE)
        except grpc.RpcError as error:
            raise Refused(f"{socket}: {error.details()}") from None


def _file(path: Path) -> tuple[int, int]:
    """Tells a file from a later one at its place; zeros: there is none."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_ino, status.st_ctime_ns
