"""GPUs on the status page: what NVML said, whose it is, and nothing where it said nothing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from mpsagent.api.views import device
from mpsagent.cli.gpus import gpus_now
from mpsagent.mps.gpus import Gpu, GpusSeen, Part, Xid
from mpsagent.mps.limits import Device

GPU = Gpu(
    0, "GPU-1", "NVIDIA H200", "Hopper", 140 << 30, 3 << 30, 132, "default", True, (Part("MIG-1", 10 << 30, 1 << 30),),
    None, 250.4, 55,
)  # fmt: skip
NOW = datetime(1970, 1, 1, 0, 1, 5, tzinfo=UTC)
"""Five seconds after NVML said it."""
SEEN = GpusSeen({"GPU-1": GPU, "MIG-1": GPU}, {"GPU-1": (Xid(0.0, "GPU-1", 79),)}, {"GPU-1": 1}, at=60.0)


def test_a_mig_device_has_its_own_memory_and_its_gpus_errors() -> None:
    whole = device(Device(0, "GPU-1", "NVIDIA H200", 140 << 30, 132), SEEN)
    part = device(Device(0, "MIG-1", "NVIDIA H200 MIG", 10 << 30, 16), SEEN)
    assert (whole["memory_used"], part["memory_used"]) == (3 << 30, 1 << 30)
    assert [xid["number"] for xid in part["xids"]] == [79]
    assert (whole["seen"], whole["utilization"]) == ("1970-01-01T00:01:00.000+00:00", None)


def test_a_gpu_of_which_nvml_says_nothing_is_not_made_up() -> None:
    found = device(Device(0, "GPU-2", "NVIDIA H200", 140 << 30, 132), SEEN)
    unknown = {key: value for key, value in found.items() if value is None}
    assert unknown.keys() >= {"memory_used", "utilization", "power", "temperature", "compute_mode", "mig", "seen"}
    assert gpus_now([dict(found)], NOW) == gpus_now([dict(found)], NOW, 5 << 30) == [], "NVML has not answered"


def test_a_person_reads_what_is_known_in_one_line() -> None:
    found = dict(device(Device(0, "GPU-1", "NVIDIA H200", 140 << 30, 132), SEEN))
    said = "3.0 GiB in use, 250 W, 55 °C, compute mode default, divided into MIG devices, Xid 79"
    assert gpus_now([found], NOW) == [(said, "warn")]
    assert gpus_now([{**found, "problem": "has fallen off the bus"}], NOW) == [("has fallen off the bus", "bad")]


def test_what_nvml_said_long_ago_has_its_time() -> None:
    """GpusSeen: "42% busy" of a GPU whose NVML had been hanging for a while, and of an idle node since an hour."""
    found = dict(device(Device(0, "GPU-1", "NVIDIA H200", 140 << 30, 132), SEEN))
    ((said, _),) = gpus_now([found], NOW + timedelta(hours=1))
    assert said.endswith("Xid 79 (as of 00:01:00)")


def test_the_memory_in_use_is_never_less_than_that_of_the_clients() -> None:
    """NVML's answer may be half a minute old: `0.0 GiB in use` stood above a process with 381 MiB."""
    found = {**device(Device(0, "GPU-1", "NVIDIA H200", 140 << 30, 132), SEEN), "memory_used": 0}
    ((idle, _),) = gpus_now([found], NOW)
    ((busy, _),) = gpus_now([found], NOW, 381 << 20)
    assert ("0 MiB in use" in idle, "381 MiB in use" in busy) == (True, True)
    several = gpus_now([found, found], NOW, 381 << 20)
    assert not [said for said, _ in several if "in use" in said], "which of them has it is not known"
