"""The simulator's numbers are the recorded ones: multiprocessors, memory, percentages, limits."""

from __future__ import annotations

import pytest

from mpsagent_sim import gpu, limits
from mpsagent_sim.delays import Delays


@pytest.mark.parametrize(
    ("percentage", "sms"),
    [
        (100, 132),
        (30, 38),
        (40, 52),
        (60, 78),
        (10, 12),
        (90, 118),
        (45, 58),
        (20, 26),
        (35, 46),
        (80, 104),
        (12.8, 16),
        (6.2, 8),
        (5, 8),
        (2, 8),
    ],
)
def test_multiprocessors_as_recorded(percentage: float, sms: int) -> None:
    assert gpu.multiprocessors(percentage) == sms


@pytest.mark.parametrize(
    ("sms", "gibibytes", "free"),
    [
        (38, 2, 1881), (26, 1, 901), (78, 3, 2757), (46, 2, 1852), (52, 1, 806), (78, 6, 5829), (38, 3, 2905),
        (58, 2, 1808), (104, 9, 8805), (132, 2, 1534), (132, 4, 3582), (132, 6, 5630),
    ],
)  # fmt: skip
def test_free_memory_under_a_limit_as_recorded(sms: int, gibibytes: int, free: int) -> None:
    assert gpu.free(sms, gibibytes * 1024, 0, 0) == free


@pytest.mark.parametrize(("sms", "free"), [(132, 142565), (26, 142959), (12, 143009), (16, 142995)])
def test_free_memory_without_a_limit_as_recorded(sms: int, free: int) -> None:
    assert gpu.free(sms, None, 0, 0) == free
    assert gpu.free(sms, 1000 * 1024, 0, 0) == free, "a limit above the device's memory changes nothing (07 W3)"


def test_a_working_neighbour_takes_what_nvml_shows() -> None:
    assert gpu.usage(132, 64) == 580


@pytest.mark.parametrize(
    ("word", "value"),
    [("50", 50.0), ("33.3", 33.3), ("12.75", 12.8), ("100", 100.0), ("0", None), ("101", None), ("abc", None),
     ("", None), ("-1", None), ("nan", None)],
)  # fmt: skip
def test_percentages(word: str, value: float | None) -> None:
    assert limits.percentage(word) == value


@pytest.mark.parametrize(
    ("word", "mebibytes"),
    [("10G", 10240), ("500M", 500), ("0G", 0), ("0M", 0), ("1X", 1), ("1.5G", 1), ("512K", 1), ("", 1)],
)
def test_memory_limits_with_their_silent_refusals(word: str, mebibytes: int) -> None:
    assert limits.memory(word) == mebibytes


@pytest.mark.parametrize(("mebibytes", "text"), [(10240, "10G"), (500, "500M"), (140000, "136G"), (1, "1M")])
def test_limits_as_the_get_commands_print_them(mebibytes: int, text: str) -> None:
    assert limits.shown(mebibytes) == text


@pytest.mark.parametrize(
    ("wanted", "ordinals"),
    [(None, [0, 1, 2]), ("1", [1]), ("2,0", [2, 0]), ("7", []), ("0,7,1", [0]), ("", []), ("GPU-3d07cd2a", [1])],
)
def test_visible_devices_stop_at_the_first_invalid_one(wanted: str | None, ordinals: list[int]) -> None:
    assert [device.ordinal for device in gpu.visible(gpu.machine(3), wanted)] == ordinals


def test_contexts_on_one_device_are_made_one_after_the_other() -> None:
    """80 to 90 ms each, whoever asks (docs/measured, contexts-at-once.txt); who comes alone waits for nobody."""
    delays = Delays(1.0, "1")
    first, second, third = (delays.client_context(0, 10.0) for _ in range(3))
    assert first == 0
    assert 0.08 <= second <= 0.09
    assert 0.16 <= third <= 0.18
    assert delays.client_context(1, 10.0) == 0
    assert delays.client_context(0, 11.0) == 0
