"""GPUs: from a file, from the helper process, and when the driver is missing, broken or hangs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpsagent.mps.limits import Device
from mpsagent.system import nvml_helper
from mpsagent.system.devices import from_file, parse_devices, probe
from mpsagent.system.directories import NOWHERE
from tests.system.conftest import MakeProgram, Play

pytestmark = pytest.mark.usefixtures("no_leak")

ROW = {"ordinal": 0, "uuid": "GPU-1", "name": "NVIDIA H200", "memory": 150_754_820_096, "multiprocessors": 132}


def test_a_file_of_devices_is_read_in_order(tmp_path: Path) -> None:
    """For the simulator and for machines whose driver must not be asked."""
    path = tmp_path / "devices.json"
    path.write_text(json.dumps([{**ROW, "ordinal": 1, "uuid": "GPU-2"}, ROW]))
    assert from_file(str(path)) == (
        Device(0, "GPU-1", "NVIDIA H200", 150_754_820_096, 132),
        Device(1, "GPU-2", "NVIDIA H200", 150_754_820_096, 132),
    )


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({}, "list"),
        ([1], "device 0"),
        ([{"ordinal": 0}], "uuid"),
        ([{**ROW, "memory": "80G"}], "memory"),
        ([{**ROW, "memory": True}], "memory"),
        ([{**ROW, "multiprocessors": 0}], "multiprocessors"),
        ([{**ROW, "ordinal": -1}], "ordinal"),
        ([{**ROW, "extra": 1}], "expected an object"),
        ([ROW, ROW], "same ordinal"),
    ],
)
def test_wrong_devices_are_said(rows: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_devices(rows)


def test_a_file_that_is_no_json_names_itself(tmp_path: Path) -> None:
    path = tmp_path / "devices.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"devices\.json"):
        from_file(str(path))


async def test_the_real_helper_answers_here_too() -> None:
    """On a machine with a GPU it lists devices, on one without it says why not; it never raises."""
    found = await probe({"PATH": "/usr/bin:/bin"})
    if isinstance(found, str):
        assert found.startswith("the GPUs could not be asked: ")
        assert len(found) > len("the GPUs could not be asked: ")
    else:
        assert all(device.multiprocessors > 0 for device in found)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exec sleep 600", "nvidia-smi"),
        ("echo Traceback: no module >&2; exit 1", "no module"),
        ("echo garbage", "status 0"),
        ("""echo '{"error": "the driver has fallen off the bus"}'""", "fallen off"),
        ("""echo '[{"ordinal": 0}]'""", "uuid"),
        ("echo 5", "unexpected"),
    ],
)
async def test_a_broken_or_hanging_driver_is_a_sentence(
    program: MakeProgram, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    """The helper is the only place that touches the driver; whatever becomes of it, the agent gets a text in time."""
    monkeypatch.setattr(sys, "executable", str(program(script, name="python")))
    found = await probe({"PATH": "/usr/bin:/bin"}, deadline=0.5 if "sleep" in script else 10)
    assert isinstance(found, str)
    assert words in found


def test_the_helper_is_never_a_client_of_mps(
    program: MakeProgram, tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pipe directory does not exist, whatever the instance's is; the instance's devices stay visible."""
    path = program(f"/usr/bin/env >{tmp_path}/given; echo '[]'", name="python")
    monkeypatch.setattr(sys, "executable", str(path))

    async def scenario() -> None:
        assert await probe({"CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps", "CUDA_VISIBLE_DEVICES": "GPU-2"}) == ()

    play(scenario())
    given = (tmp_path / "given").read_text().splitlines()
    assert f"CUDA_MPS_PIPE_DIRECTORY={NOWHERE}" in given
    assert not Path(NOWHERE).exists()
    assert "CUDA_VISIBLE_DEVICES=GPU-2" in given


CUDAS, NVMLS, RESERVED = 143_155, 143_771, 615
"""MiB of an H200 (driver 580.159.04): what CUDA says that it has, what NVML does, and what of this is reserved."""


class FakeNvml:
    """As pynvml is; ``reserved`` None: a driver that does not say."""

    nvmlMemory_v2 = 2

    class NVMLError(Exception):
        pass

    def __init__(self, reserved: int | None) -> None:
        self.reserved = reserved

    def nvmlDeviceGetMemoryInfo(self, handle: object, version: int | None = None) -> SimpleNamespace:
        if version is not None and self.reserved is None:
            raise self.NVMLError
        return SimpleNamespace(total=NVMLS << 20, reserved=(self.reserved or 0) << 20)

    def __getattr__(self, name: str) -> object:
        answers = {"Count": 1, "Capability": (9, 0), "Cores": 132 * 128, "UUID": "GPU-1", "Name": "NVIDIA H200"}
        return lambda *_: next((one for part, one in answers.items() if name.endswith(part)), None)


@pytest.mark.parametrize(
    ("cuda", "reserved", "memory"), [(True, None, CUDAS), (True, RESERVED, CUDAS), (False, RESERVED, NVMLS - RESERVED)]
)
def test_a_device_has_the_memory_that_cuda_says(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, reserved: int | None, memory: int
) -> None:
    """A quarter of NVML's total would be 154 MiB more than a quarter of what programs can have."""
    row = {**ROW, "memory": CUDAS << 20}
    monkeypatch.setattr(nvml_helper, "_from_cuda", lambda: [dict(row)] if cuda else None)
    monkeypatch.setattr(nvml_helper.importlib, "import_module", lambda name: FakeNvml(reserved))
    assert parse_devices(nvml_helper.devices()) == (Device(0, "GPU-1", "NVIDIA H200", memory << 20, 132),)


def test_without_cuda_and_with_an_old_driver_it_is_nvmls_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml_helper, "_from_cuda", lambda: None)
    monkeypatch.setattr(nvml_helper.importlib, "import_module", lambda name: FakeNvml(None))
    assert [row["memory"] for row in nvml_helper.devices()] == [NVMLS << 20]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, ["GPU-aa", "GPU-ab", "GPU-bb"]),
        ("2,0", ["GPU-bb", "GPU-aa"]),
        ("GPU-bb", ["GPU-bb"]),
        ("GPU-b, 1", ["GPU-bb", "GPU-ab"]),
        ("0,9,1", ["GPU-aa"]),
        ("GPU-a", []),
        ("-1", []),
        ("", []),
    ],
)
def test_visible_devices_are_numbered_as_cuda_does(wanted: str | None, expected: list[str]) -> None:
    """Without libcuda the helper has to do it: memory limits go by the daemon's own ordinals."""
    rows: list[dict[str, object]] = [
        {**ROW, "ordinal": n, "uuid": u} for n, u in enumerate(["GPU-aa", "GPU-ab", "GPU-bb"])
    ]
    found = nvml_helper._visible(rows, wanted)
    assert [row["uuid"] for row in found] == expected
    assert [row["ordinal"] for row in found] == list(range(len(expected)))
