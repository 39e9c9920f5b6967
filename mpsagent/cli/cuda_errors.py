"""CUDA's errors 805 to 810: what each means, what to do, and which events of this machine explain it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

Json = dict[str, Any]
SHOWN = 3


class CudaError(NamedTuple):
    """``kinds``: of the events that explain it."""

    name: str
    meaning: str
    do: str
    kinds: tuple[str, ...]


ERRORS: dict[int, CudaError] = {
    805: CudaError(
        "CUDA_ERROR_MPS_CONNECTION_FAILED",
        "the program was turned away: by the policy, because MPS does not start here, or because its place in the "
        "queue was lost (the gate's sockets were stopped, too many connections of one user)",
        "mpsagent-cli policy explain USER; mpsagent-cli status",
        ("client.refused", "client.handover_failed", "server.given_up", "control.failed"),
    ),
    806: CudaError(
        "CUDA_ERROR_MPS_RPC_FAILURE",
        "the MPS server ended under the program: it was shut down by force, killed, or ended with the control daemon",
        "start the program again; who restarts or kills MPS is in the events",
        ("control.ended", "control.restart_ordered", "server.ended"),
    ),
    807: CudaError(
        "CUDA_ERROR_MPS_SERVER_NOT_READY",
        "the server was in FAULT or did not start when the program came; the gate holds programs meanwhile, so this is "
        "rare: one that was handed over in that moment, or that came around the gate",
        "start the program again; after a fault the leftovers are ended by themselves",
        ("server.fault", "server.start_failed"),
    ),
    808: CudaError(
        "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED",
        "its user had as many contexts as the policy allows, and the program had some of them (the events say so); "
        "else the server had all the contexts it takes on a device (48), of programs that came around the gate",
        "mpsagent-cli servers; max_contexts in the policy bounds each user",
        ("server.full", "clients.nearly_full", "client.refused"),
    ),
    809: CudaError(
        "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED",
        "the device has no connection left for another client: CUDA_DEVICE_MAX_CONNECTIONS of the programs is large",
        "use fewer processes, or a smaller CUDA_DEVICE_MAX_CONNECTIONS",
        ("server.full", "clients.nearly_full"),
    ),
    810: CudaError(
        "CUDA_ERROR_MPS_CLIENT_TERMINATED",
        "mpsagent or an administrator ended the client: its turn was over, it ran too long, lay idle or was beyond its "
        "limits, a drain's time was over, or a person asked for it. From driver 615 on, by NVIDIA's pages, the driver "
        "also evicts clients beyond a memory limit of nvidia-smi's",
        "mpsagent-cli policy explain USER says how long a turn lasts",
        ("turn.ending", "client.unlimited", "client.end_ordered", "action.done"),
    ),
}


def explaining(error: CudaError, events: Iterable[Json]) -> list[Json]:
    """The last events that may be its cause. ``action.done``: of ends of clients only. Who was refused was told 805, or
    what the record says."""
    found = [
        one
        for one in events
        if one.get("kind") in error.kinds
        and (one["kind"] != "action.done" or one.get("action") in ("TerminateClient", "SignalClient"))
        and (one["kind"] != "client.refused" or ("error 808" in str(one.get("why"))) is (error is ERRORS[808]))
    ]
    return found[-SHOWN:]
