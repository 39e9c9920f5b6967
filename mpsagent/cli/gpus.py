"""What NVML says of the GPUs at the moment, as a person reads it."""

from __future__ import annotations

from datetime import datetime

from mpsagent.cli.wording import Json, local, size

OLD = 10.0
"""Seconds after which it is told when NVML said it: an idle node is not asked, and a hung one does not answer."""


def gpus_now(devices: list[Json], now: datetime, least: int = 0) -> list[tuple[str, str]]:
    """Return a line and its style for each GPU that says anything. ``least``: bytes that the clients are known to use.
    If NVML's last answer is less, because it is older, the clients' bytes are shown. Of several GPUs none is."""
    said = [one["memory_used"] for one in devices if one.get("memory_used") is not None]
    if said and sum(said) < least:
        used = least if len(devices) == 1 else None
        devices = [{**one, "memory_used": used} for one in devices]
    rows = []
    for one in devices:
        which = f"GPU {one['ordinal']}: " if len(devices) > 1 else ""
        if one.get("problem"):
            rows.append((f"{which}{one['problem']}", "bad"))
        elif facts := ", ".join(_facts(one)):
            rows.append((f"{which}{facts}{_as_of(one.get('seen'), now)}", "warn" if one.get("xids") else "dim"))
    return rows


def _as_of(seen: str | None, now: datetime) -> str:
    old = seen is not None and (now - datetime.fromisoformat(seen)).total_seconds() > OLD
    return f" (as of {local(seen, now)})" if old else ""


def _facts(one: Json) -> list[str]:
    used, xids = one.get("memory_used"), one.get("xids") or ()
    said = (
        ("{:.0%} busy", one.get("utilization")),
        ("{} in use", None if used is None else size(used)),
        ("{:.0f} W", one.get("power")),
        ("{} °C", one.get("temperature")),
        ("compute mode {}", one.get("compute_mode")),
        ("divided into MIG devices{}", "" if one.get("mig") else None),
        ("Xid {}", ", ".join(str(xid["number"]) for xid in xids[-3:]) or None),
    )
    return [text.format(value) for text, value in said if value is not None]
