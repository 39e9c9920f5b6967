"""What the kernels compute, on the processor; and that the PTX that ships is theirs."""

from __future__ import annotations

import ctypes
import io
import re
import shutil
import subprocess
from ctypes import c_float, c_int
from pathlib import Path
from typing import Any

import pytest

from benchmarks.seeds import jpeg
from mpsagent_bench.workloads import WORKLOADS, Perceptron
from tests.bench.processor import SOURCE, Processor, compiled, kernels


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile the kernels for the processor")
    return compiled(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def gpu(library: ctypes.CDLL) -> Any:
    return Processor(library)


JPEG = Path(jpeg.__file__).with_name("jpeg.cu")


def floats(*values: float) -> ctypes.Array[c_float]:
    return (c_float * len(values))(*values)


def test_the_perceptron_learns(gpu: Any) -> None:
    one = Perceptron(gpu, seed=1)
    one.step()
    first = one.loss()
    assert 1.5 < first < 6, "ten classes that are not known yet: about log 10 or more"
    for _ in range(6):
        one.step()
    assert one.loss() < first / 2


def test_its_gradient_is_the_slope(gpu: Any) -> None:
    """By hand: the loss of one example, and how it changes when a unit does."""
    units, labels = floats(0.3, -0.2, 1.1), (c_int * 1)(2)
    memory = [gpu.allocate(12) for _ in range(3)]
    label = gpu.allocate(4)
    gpu.upload(label, labels)

    def loss(values: Any) -> tuple[float, list[float]]:
        gpu.upload(memory[0], values)
        gpu.launch("losses", 1, 1, memory[0], label, memory[1], memory[2], c_int(1), c_int(3))
        slope, found = floats(0, 0, 0), floats(0)
        gpu.download(slope, memory[1])
        gpu.download(found, memory[2])
        return found[0], list(slope)

    _, slope = loss(units)
    for place in range(3):
        above, below = list(units), list(units)
        above[place] += 0.01
        below[place] -= 0.01
        assert (loss(floats(*above))[0] - loss(floats(*below))[0]) / 0.02 == pytest.approx(slope[place], abs=1e-3)


@pytest.mark.parametrize(("a_by", "b_by"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_matrices_are_multiplied_whichever_way_they_lie(gpu: Any, a_by: int, b_by: int) -> None:
    a = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    b = [[1.0, -1.0], [0.5, 2.0], [3.0, 0.0]]
    turned = lambda rows: [list(column) for column in zip(*rows, strict=True)]  # noqa: E731
    flat = lambda rows: floats(*(value for row in rows for value in row))  # noqa: E731
    places = [gpu.allocate(24), gpu.allocate(24), gpu.allocate(16)]
    gpu.upload(places[0], flat(turned(a) if a_by else a))
    gpu.upload(places[1], flat(turned(b) if b_by else b))
    gpu.launch("multiply", 4, 32, *places, c_int(2), c_int(3), c_int(2), c_int(a_by), c_int(b_by))
    out = floats(0, 0, 0, 0)
    gpu.download(out, places[2])
    assert list(out) == [11, 3, 24.5, 6]


def test_an_image_is_made_smaller_by_averages(gpu: Any) -> None:
    """Half the size: each pixel lies in the middle of four."""
    rows = [[10, 20, 30, 40], [50, 60, 70, 80]]
    image = (ctypes.c_ubyte * 24)(*(value + colour for row in rows for value in row for colour in range(3)))
    source, target, small = gpu.allocate(24), gpu.allocate(6), (ctypes.c_ubyte * 6)()
    gpu.upload(source, image)
    gpu.launch("resize", 2, 32, source, c_int(4), c_int(2), target, c_int(2), c_int(1))
    gpu.download(small, target)
    assert list(small) == [35, 36, 37, 55, 56, 57]


def test_bodies_attract_each_other_alike(gpu: Any) -> None:
    bodies, speeds = gpu.allocate(32), gpu.allocate(32)
    gpu.upload(bodies, floats(0, 0, 0, 1, 2, 0, 0, 1))
    gpu.launch("attract", 2, 32, bodies, speeds, c_int(2), c_float(0.5))
    gpu.launch("move", 2, 32, bodies, speeds, c_int(2), c_float(1.0))
    found = floats(*[0.0] * 8)
    gpu.download(found, bodies)
    assert found[0] == pytest.approx(0.5 * 2 / 4.01**1.5, rel=1e-4)
    assert found[0] + found[4] == pytest.approx(2.0)
    assert [found[1], found[2], found[5], found[6]] == [0, 0, 0, 0]


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name not in ("nbody", "block", "queue", "train")])
def test_each_workload_does_a_step(gpu: Any, name: str) -> None:
    """Those that a processor can do in a moment; the others launch the same kernels with more work."""
    step = WORKLOADS[name].make(gpu, 0)
    step()
    assert set(gpu.launched) <= set(kernels())


def test_a_request_that_waited_says_since_when(gpu: Any) -> None:
    step = WORKLOADS["queue"].make(gpu, 0)
    came = [step() for _ in range(3)]
    assert None not in came
    assert came == sorted(came)  # type: ignore[type-var]


@pytest.mark.parametrize(("wide", "high", "restart"), [(256, 128, 1), (320, 200, 3)])
def test_a_jpeg_is_made_smaller(tmp_path: Path, wide: int, high: int, restart: int) -> None:
    """As Pillow does it, whose JPEG of the same small picture is no closer to it; the second one fills no whole units,
    and its intervals end in the middle of a row."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile the kernels for the processor")
    np, image = pytest.importorskip("numpy"), pytest.importorskip("PIL.Image")
    draw = np.random.default_rng(0)
    rough = image.fromarray(draw.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((wide, high))
    grain = draw.integers(-6, 7, (high, wide, 3))
    picture = image.fromarray((np.asarray(rough, dtype=int) + grain).clip(0, 255).astype(np.uint8))
    with io.BytesIO() as file:
        picture.save(file, "JPEG", quality=90, restart_marker_blocks=restart)
        data = file.getvalue()
    smaller = jpeg.Smaller(Processor(compiled(tmp_path, JPEG)), data)
    right = image.open(io.BytesIO(data)).reduce(jpeg.SHRUNK)
    with io.BytesIO() as file:
        right.save(file, "JPEG", quality=90)
        theirs = np.asarray(image.open(io.BytesIO(file.getvalue())), dtype=float)
    off = lambda one: np.abs(one - np.asarray(right, dtype=float)).mean()  # noqa: E731
    for _ in range(2):
        found = image.open(io.BytesIO(smaller(data)))
        assert found.size == (wide // 4, high // 4)
        assert off(np.asarray(found, dtype=float)) < 1.1 * off(theirs)


# --- the PTX


SOURCES = pytest.mark.parametrize("source", [SOURCE, JPEG], ids=["kernels", "jpeg"])


@SOURCES
def test_the_ptx_has_the_kernels_of_the_source(source: Path) -> None:
    entries = re.findall(r"\.visible \.entry (\w+)\(([^)]*)\)", source.with_suffix(".ptx").read_text())
    widths = {name: re.findall(r"\.param \.(\w+)", takes) for name, takes in entries}
    kinds = {"int": "u32", "float": "f32"}
    assert widths == {name: [kinds.get(one, "u64") for one in types] for name, types in kernels(source).items()}


@SOURCES
def test_every_driver_since_2020_takes_it(source: Path) -> None:
    text = source.with_suffix(".ptx").read_text()
    assert re.findall(r"^\.(?:version|target) .*", text, flags=re.MULTILINE) == [".version 7.0", ".target sm_70"]


@SOURCES
@pytest.mark.parametrize("model", ["sm_75", "sm_80", "sm_90"])
def test_nvidias_assembler_takes_it(source: Path, model: str, tmp_path: Path) -> None:
    if shutil.which("ptxas") is None:
        pytest.skip("ptxas is not installed")
    done = subprocess.run(
        ["ptxas", "--gpu-name", model, "-o", str(tmp_path / "out"), str(source.with_suffix(".ptx"))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
