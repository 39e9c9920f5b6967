"""A stand-in for the kubelet: what its device manager says and does, over real gRPC on the same sockets.

After kubelet's devicemanager: a start removes every socket in the directory and forgets the plugins, not which device
is whose (its checkpoint); a plugin is asked for its options and its devices after it has registered; devices are given
to containers of a pod at its admission (Allocate), and PreStartContainer comes before each start of a container.

A process of its own, because gRPC's threads and the forks of a test do not go together: `python -m
tests.kubernetes.kubelet DIRECTORY` takes the name of a method and its arguments as a line of JSON, and
answers with one.
"""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from mpsagent_kubernetes import protocol

RESOURCE = "nvidia.com/mps-share"
D, P = protocol.DEVICE, protocol.PODS


class Kubelet:
    """``given``: devices by pod (namespace, name), which its restart does not forget."""

    def __init__(self, place: Path) -> None:
        self.plugins, self.pods, self.logs = place / "device-plugins", place / "pod-resources", place / "pods"
        for path in (self.plugins, self.pods, self.logs):
            path.mkdir(parents=True, exist_ok=True)
        self.given: dict[tuple[str, str], list[str]] = {}
        self.health: dict[str, str] = {}
        self.lists = 0
        self.registered = 0
        self._servers: list[Any] = []
        self._channel: Any = None
        self._lock = threading.Lock()

    def start(self) -> None:
        for path in self.plugins.iterdir():
            path.unlink()
        self.health = {}
        for socket, service, name, answer, taken, given in (
            (self.pods / "kubelet.sock", protocol.POD_RESOURCES, "List", self._list,
             P["ListPodResourcesRequest"], P["ListPodResourcesResponse"]),
            (self.plugins / "kubelet.sock", protocol.REGISTRATION, "Register", self._register,
             D["RegisterRequest"], D["Empty"]),
        ):  # fmt: skip
            method = grpc.unary_unary_rpc_method_handler(
                answer, request_deserializer=taken.FromString, response_serializer=given.SerializeToString
            )
            handler = grpc.method_handlers_generic_handler(service, {name: method})
            server = grpc.server(ThreadPoolExecutor(4), handlers=(handler,))
            socket.unlink(missing_ok=True)
            assert server.add_insecure_port(f"unix:{socket}")
            server.start()
            self._servers.append(server)

    def stop(self) -> None:
        for server in self._servers:
            server.stop(None).wait(10)
        self._servers = []
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    # --- what plugins ask ---------------------------------------------------------------------------------------------

    def _register(self, request: Any, _context: Any) -> Any:
        assert (request.version, request.resource_name) == ("v1beta1", RESOURCE)
        if self._channel is not None:
            self._channel.close()
        self._channel = grpc.insecure_channel(f"unix:{self.plugins / request.endpoint}")
        threading.Thread(target=self._watch, args=(self._channel,), daemon=True).start()
        return D["Empty"]()

    def _watch(self, channel: Any) -> None:
        """The options, then the devices, until the plugin goes; then all of them are unhealthy."""
        try:
            options = self.ask("GetDevicePluginOptions", D["Empty"](), D["DevicePluginOptions"], channel)
            assert options.pre_start_required
            stream = channel.unary_stream(
                f"/{protocol.DEVICE_PLUGIN}/ListAndWatch",
                request_serializer=D["Empty"].SerializeToString,
                response_deserializer=D["ListAndWatchResponse"].FromString,
            )
            with self._lock:
                self.registered += 1
            for answer in stream(D["Empty"]()):
                with self._lock:
                    self.health = {one.ID: one.health for one in answer.devices}
                    self.lists += 1
        except (grpc.RpcError, ValueError):
            pass
        with self._lock:
            if channel is self._channel:
                self.health = dict.fromkeys(self.health, "Unhealthy")

    def _list(self, _request: Any, _context: Any) -> Any:
        answer = P["ListPodResourcesResponse"]()
        for (namespace, name), devices in list(self.given.items()):
            container = answer.pod_resources.add(namespace=namespace, name=name).containers.add(name="main")
            container.devices.add(resource_name="example.com/other", device_ids=["share-0"])
            container.devices.add(resource_name=RESOURCE, device_ids=devices)
        answer.pod_resources.add(namespace="kube-system", name="without").containers.add(name="main")
        return answer

    # --- pods ---------------------------------------------------------------------------------------------------------

    def ask(self, method: str, request: Any, answer: Any, channel: Any = None, timeout: float = 30) -> Any:
        call = (channel or self._channel).unary_unary(
            f"/{protocol.DEVICE_PLUGIN}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        return call(request, timeout=timeout)

    def allocate(self, devices: list[str]) -> list[str]:
        """The CDI devices for a container."""
        request = D["AllocateRequest"](container_requests=[{"devices_ids": devices}])
        (container,) = self.ask("Allocate", request, D["AllocateResponse"]).container_responses
        return [one.name for one in container.cdi_devices]

    def pre_start(self, devices: list[str]) -> None:
        request = D["PreStartContainerRequest"](devices_ids=devices)
        self.ask("PreStartContainer", request, D["PreStartContainerResponse"])

    def admit(self, namespace: str, name: str, shares: int) -> list[str]:
        """Devices for a new pod; LookupError: not as many are free and healthy. The CDI devices for its container."""
        taken = {one for devices in self.given.values() for one in devices}
        free = [one for one, health in self.health.items() if health == "Healthy" and one not in taken]
        if len(free) < shares:
            raise LookupError(f"{len(free)} are free")
        found = self.allocate(free[:shares])
        self.given[namespace, name] = free[:shares]
        return found

    def start_container(self, namespace: str, name: str, uid: str) -> None:
        """What comes right before the container is started. Raises grpc.RpcError: then it is not."""
        (self.logs / f"{namespace}_{name}_{uid}").mkdir(exist_ok=True)
        self.pre_start(self.given[namespace, name])

    def take(self, namespace: str, name: str, devices: list[str]) -> None:
        """For a pod that was admitted before."""
        self.given[namespace, name] = devices

    def end(self, namespace: str, name: str) -> None:
        """Of a pod: its devices are free."""
        del self.given[namespace, name]

    def now(self) -> dict[str, Any]:
        with self._lock:
            devices = {f"{namespace}/{name}": given for (namespace, name), given in self.given.items()}
            return {"registered": self.registered, "health": self.health, "given": devices}


def main() -> None:
    kubelet = Kubelet(Path(sys.argv[1]))
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            answer = {"answer": getattr(kubelet, method)(*arguments)}
        except LookupError as error:
            answer = {"error": str(error)}
        except grpc.RpcError as error:
            answer = {"error": error.details()}
        print(json.dumps(answer), flush=True)
    kubelet.stop()


if __name__ == "__main__":
    main()
