"""Which GPUs there are: from NVML, from a file, or, until one of them answers, what was found last."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from mpsagent.agent.settings import Settings
from mpsagent.mps.limits import Device
from mpsagent.system import devices as gpus

CACHE = "devices.json"
UNKNOWN = tuple(Device(ordinal, "", "unknown GPU", 4 << 30, 256) for ordinal in range(8))
"""What limits are counted by while nobody knows the GPUs: memory in percent as of 4 GiB, multiprocessors as of 256, on
eight devices (MPS takes limits for devices that do not exist; recording 01, S2). So a client gets less, never more."""


async def find(settings: Settings, environment: Mapping[str, str]) -> tuple[Device, ...] | str:
    """The GPUs as the control daemon numbers them, or what is wrong."""
    if settings.devices_file is None:
        return await gpus.probe(environment)
    try:
        return gpus.from_file(settings.devices_file)
    except (OSError, ValueError) as error:
        return f"{settings.devices_file}: {error}"


def remembered(settings: Settings, visible: Sequence[str]) -> tuple[Device, ...]:
    """What was found by the last agent, if that looked at the same ``visible`` GPUs; else nothing."""
    if settings.state_directory is None or settings.devices_file is not None:
        return ()
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(Path(settings.state_directory, CACHE).read_bytes())
        if known["visible"] == list(visible):
            return gpus.parse_devices(known["devices"])
    return ()


def remember(settings: Settings, visible: Sequence[str], found: Sequence[Device]) -> None:
    """For the next agent. A disk that does not take it costs that one a second."""
    if settings.state_directory is None or settings.devices_file is not None:
        return
    text = json.dumps({"visible": list(visible), "devices": [asdict(device) for device in found]})
    path = Path(settings.state_directory, CACHE)
    with suppress(OSError):
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").replace(path)
