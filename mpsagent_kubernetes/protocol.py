"""The kubelet's device plugin protocol v1beta1, and parts of its PodResources v1: messages and services.

The fields and their numbers are the published ones. Unused fields are left out: protobuf skips them. protobuf creates
the classes of messages at run time, so that no code is generated.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

VERSION = "v1beta1"
REGISTRATION = "v1beta1.Registration"
DEVICE_PLUGIN = "v1beta1.DevicePlugin"
POD_RESOURCES = "v1.PodResourcesLister"

_FIELDS = {
    "v1beta1": {
        "Empty": "",
        "DevicePluginOptions": "bool pre_start_required = 1",
        "RegisterRequest": "string version = 1; string endpoint = 2; string resource_name = 3; "
        "DevicePluginOptions options = 4",
        "Device": "string ID = 1; string health = 2",
        "ListAndWatchResponse": "repeated Device devices = 1",
        "ContainerAllocateRequest": "repeated string devices_ids = 1",
        "AllocateRequest": "repeated ContainerAllocateRequest container_requests = 1",
        "CDIDevice": "string name = 1",
        "ContainerAllocateResponse": "repeated CDIDevice cdi_devices = 5",
        "AllocateResponse": "repeated ContainerAllocateResponse container_responses = 1",
        "PreStartContainerRequest": "repeated string devices_ids = 1",
        "PreStartContainerResponse": "",
    },
    "v1": {
        "ListPodResourcesRequest": "",
        "ContainerDevices": "string resource_name = 1; repeated string device_ids = 2",
        "ContainerResources": "string name = 1; repeated ContainerDevices devices = 2",
        "PodResources": "string name = 1; string namespace = 2; repeated ContainerResources containers = 3",
        "ListPodResourcesResponse": "repeated PodResources pod_resources = 1",
    },
}
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {"bool": _Field.TYPE_BOOL, "string": _Field.TYPE_STRING, "int32": _Field.TYPE_INT32}
"""int32: campaigns/pod_stop.py asks a container runtime."""


def package(name: str, messages: dict[str, str]) -> dict[str, Any]:
    """The classes of its messages, by name."""
    file = descriptor_pb2.FileDescriptorProto(name=f"mpsagent/{name}.proto", package=name, syntax="proto3")
    for message, fields in messages.items():
        described = file.message_type.add(name=message)
        for text in filter(None, fields.split("; ")):
            *repeated, kind, field, _, number = text.split()
            one = described.field.add(name=field, number=int(number))
            one.label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
            if kind in _SCALARS:
                one.type = _SCALARS[kind]
            else:
                one.type, one.type_name = _Field.TYPE_MESSAGE, f".{name}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {message: pool.FindMessageTypeByName(f"{name}.{message}") for message in messages}
    if hasattr(message_factory, "GetMessageClass"):
        return {message: message_factory.GetMessageClass(one) for message, one in found.items()}
    factory = message_factory.MessageFactory(pool)  # protobuf before 4.22, as Debian 12 has it
    return {message: factory.GetPrototype(one) for message, one in found.items()}


DEVICE = package("v1beta1", _FIELDS["v1beta1"])
PODS = package("v1", _FIELDS["v1"])
