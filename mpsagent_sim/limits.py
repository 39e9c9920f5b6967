"""The control daemon's parser and format of percentages and memory limits, with the recorded quirks. Pure."""

import re

_LIMIT = re.compile(r"([0-9]+)([GM])", re.ASCII)
MIB_PER_GIB = 1024


def percentage(word: str) -> float | None:
    """A percentage in (0, 100], rounded to one decimal; None when MPS refuses it."""
    try:
        value = float(word)
    except ValueError:
        return None
    return float(f"{value:.1f}") if 0 < value <= 100 else None


def memory(word: str) -> int:
    """A memory limit in MiB: whole numbers with G or M. Anything else is silently one MiB. 0 takes the limit away."""
    match = _LIMIT.fullmatch(word)
    if match is None:
        return 1
    return int(match[1]) * (MIB_PER_GIB if match[2] == "G" else 1)


def shown(mebibytes: int) -> str:
    """Return the text of the get commands: whole G from one GiB on (140000M is shown as 136G), else M."""
    return f"{mebibytes // MIB_PER_GIB}G" if mebibytes >= MIB_PER_GIB else f"{mebibytes}M"


def client_limits(text: str, uuids: list[str]) -> dict[int, int] | None:
    """CUDA_MPS_PINNED_DEVICE_MEM_LIMIT of a client, `0=700M,1=2G`, on devices with these UUIDs: ordinal to MiB. None: a
    part of it cannot be read, or names a device that is not there, and MPS forgets the client's limits (recording 11).
    """
    limits = {}
    for part in text.split(",") if text else ():
        device, _, value = part.partition("=")
        known = [at for at, uuid in enumerate(uuids) if device.strip() in (str(at), uuid)]
        if not known or not value:
            return None
        limits[known[0]] = memory(value.strip())
    return {device: limit for device, limit in limits.items() if limit}
