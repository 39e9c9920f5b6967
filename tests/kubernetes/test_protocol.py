"""The messages as bytes. The kubelet's stand-in has the plugin's own messages, so their numbers are held here, by
the published api.proto: a field's tag is its number times 8, plus 2 for texts and messages, plus 0 for bool."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("google.protobuf", reason="no protobuf (pip install 'mpsagent[kubernetes]')")

from mpsagent_kubernetes.protocol import DEVICE, PODS

BYTES: list[tuple[Any, bytes]] = [
    (DEVICE["DevicePluginOptions"](pre_start_required=True), b"\x08\x01"),
    (
        DEVICE["RegisterRequest"](version="v1", endpoint="e", resource_name="r", options={"pre_start_required": True}),
        b"\x0a\x02v1\x12\x01e\x1a\x01r\x22\x02\x08\x01",
    ),
    (DEVICE["ListAndWatchResponse"](devices=[{"ID": "a", "health": "b"}]), b"\x0a\x06\x0a\x01a\x12\x01b"),
    (
        DEVICE["AllocateRequest"](container_requests=[{"devices_ids": ["a", "b"]}]),
        b"\x0a\x06\x0a\x01a\x0a\x01b",
    ),
    (
        DEVICE["AllocateResponse"](container_responses=[{"cdi_devices": [{"name": "x"}]}]),
        b"\x0a\x05\x2a\x03\x0a\x01x",
    ),
    (DEVICE["PreStartContainerRequest"](devices_ids=["a"]), b"\x0a\x01a"),
    (
        PODS["ListPodResourcesResponse"](
            pod_resources=[
                {
                    "name": "p",
                    "namespace": "n",
                    "containers": [{"name": "c", "devices": [{"resource_name": "r", "device_ids": ["d"]}]}],
                }
            ]
        ),
        b"\x0a\x13\x0a\x01p\x12\x01n\x1a\x0b\x0a\x01c\x12\x06\x0a\x01r\x12\x01d",
    ),
]


@pytest.mark.parametrize(("message", "said"), BYTES, ids=lambda one: type(one).__name__)
def test_each_field_has_its_published_number(message: Any, said: bytes) -> None:
    assert message.SerializeToString() == said
    assert type(message).FromString(said) == message


def test_what_a_newer_kubelet_says_beside_is_passed_over() -> None:
    """Topology of a device, memory and cpus of a container: fields that are not used here."""
    assert DEVICE["ListAndWatchResponse"].FromString(b"\x0a\x07\x0a\x01a\x1a\x02\x0a\x00").devices[0].ID == "a"
