"""The workloads: small programs of the kinds that people run side by side, on CUDA's driver alone.

Each is made with a GPU (and its number among the processes of a run) and gives one step: a call that returns when the
step's work is done on the GPU. Sizes are fixed: a step is the same work on every node and in every way of sharing.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable
from ctypes import c_float, c_int, c_uint64
from dataclasses import dataclass

from mpsagent_bench.driver import Gpu

Step = Callable[[], float | None]
"""Does one step. Returns when that step could have begun (monotonic seconds) where it had to wait for the one before,
else None."""


@dataclass(frozen=True)
class Workload:
    name: str
    unit: str
    """The name of the steps, in the plural."""
    words: str
    make: Callable[[Gpu, int], Step]


def _floats(count: int, draw: Callable[[], float]) -> ctypes.Array[c_float]:
    return (c_float * count)(*(draw() for _ in range(count)))


def _uploaded(gpu: Gpu, values: ctypes.Array[c_float] | ctypes.Array[c_int]) -> c_uint64:
    pointer = gpu.allocate(ctypes.sizeof(values))
    gpu.upload(pointer, values)
    return pointer


def _block(gpu: Gpu, number: int) -> Step:
    values = _uploaded(gpu, (c_float * 256)())

    def step() -> None:
        gpu.launch("chain", 256, 256, values, c_int(1_000_000))
        gpu.wait()

    return step


def _launches(gpu: Gpu, number: int) -> Step:
    size = 16_384
    values = _uploaded(gpu, (c_float * size)())

    def step() -> None:
        for _ in range(200):
            gpu.launch("scale", size, 256, values, c_int(size), c_float(0.999), c_float(0.5))
        gpu.wait()

    return step


def _resize(gpu: Gpu, number: int) -> Step:
    width, height, wide, high = 1920, 1080, 224, 224
    size = width * height * 3
    image = (ctypes.c_ubyte * size).from_buffer(bytearray(random.Random(number).randbytes(size)))
    small = (ctypes.c_ubyte * (wide * high * 3))()
    source, target = gpu.allocate(ctypes.sizeof(image)), gpu.allocate(ctypes.sizeof(small))
    sizes = c_int(width), c_int(height), target, c_int(wide), c_int(high)

    def step() -> None:
        gpu.upload(source, image)
        gpu.launch("resize", wide * high, 128, source, *sizes)
        gpu.download(small, target)

    return step


def bodies(gpu: Gpu, count: int) -> Step:
    """``count`` bodies that attract each other."""
    draw = random.Random(count).random
    places = _uploaded(gpu, _floats(4 * count, draw))
    speeds = _uploaded(gpu, (c_float * (4 * count))())

    def step() -> None:
        gpu.launch("attract", count, 128, places, speeds, c_int(count), c_float(1e-4))
        gpu.launch("move", count, 128, places, speeds, c_int(count), c_float(1e-4))
        gpu.wait()

    return step


def _nbody(gpu: Gpu, number: int) -> Step:
    return bodies(gpu, 8192)


class Perceptron:
    """784 inputs, 256 hidden units, 10 classes; a batch of 128 made-up examples that can be learnt."""

    INPUTS, HIDDEN, CLASSES, ROWS = 784, 256, 10, 128

    def __init__(self, gpu: Gpu, seed: int) -> None:
        draw = random.Random(seed)
        centres = [[draw.gauss(0, 1) for _ in range(self.INPUTS)] for _ in range(self.CLASSES)]
        labels = [draw.randrange(self.CLASSES) for _ in range(self.ROWS)]
        examples = (c_float * (self.ROWS * self.INPUTS))(
            *(value + draw.gauss(0, 1) for label in labels for value in centres[label])
        )
        self._gpu = gpu
        self._examples = _uploaded(gpu, examples)
        self._labels = _uploaded(gpu, (c_int * self.ROWS)(*labels))
        sizes = (self.INPUTS * self.HIDDEN, self.INPUTS), (self.HIDDEN * self.CLASSES, self.HIDDEN)
        self._weights = [_uploaded(gpu, _floats(count, lambda: draw.gauss(0, n**-0.5))) for count, n in sizes]  # noqa: B023
        self._slopes = [gpu.allocate(4 * count) for count, _ in sizes]
        self._hidden, self._back = (gpu.allocate(4 * self.ROWS * self.HIDDEN) for _ in range(2))
        self._units, self._error = (gpu.allocate(4 * self.ROWS * self.CLASSES) for _ in range(2))
        self._losses = gpu.allocate(4 * self.ROWS)
        self._loss = (c_float * self.ROWS)()

    def step(self) -> None:
        """Forward, backward, and the weights go down the slope."""
        rows, inputs, hidden, classes = self.ROWS, self.INPUTS, self.HIDDEN, self.CLASSES
        launch = self._gpu.launch
        self._multiply(self._examples, self._weights[0], self._hidden, rows, inputs, hidden)
        launch("rectify", rows * hidden, 128, self._hidden, c_int(rows * hidden))
        self._multiply(self._hidden, self._weights[1], self._units, rows, hidden, classes)
        launch("losses", rows, 128, self._units, self._labels, self._error, self._losses, c_int(rows), c_int(classes))
        self._multiply(self._hidden, self._error, self._slopes[1], hidden, rows, classes, a_by=1)
        self._multiply(self._error, self._weights[1], self._back, rows, classes, hidden, b_by=1)
        launch("rectify_back", rows * hidden, 128, self._back, self._hidden, c_int(rows * hidden))
        self._multiply(self._examples, self._back, self._slopes[0], inputs, rows, hidden, a_by=1)
        for weights, slope, count in zip(self._weights, self._slopes, (inputs * hidden, hidden * classes), strict=True):
            launch("descend", count, 128, weights, slope, c_int(count), c_float(0.05))
        self._gpu.wait()

    def loss(self) -> float:
        """Return the loss of the last step, before its change of weights."""
        self._gpu.download(self._loss, self._losses)
        return sum(self._loss) / self.ROWS

    def _multiply(
        self, a: c_uint64, b: c_uint64, out: c_uint64, rows: int, inner: int, columns: int, a_by: int = 0, b_by: int = 0
    ) -> None:
        sizes = c_int(rows), c_int(inner), c_int(columns), c_int(a_by), c_int(b_by)
        self._gpu.launch("multiply", rows * columns, 128, a, b, out, *sizes)


def _train(gpu: Gpu, number: int) -> Step:
    return Perceptron(gpu, number).step


def _queue(gpu: Gpu, number: int) -> Step:
    """Requests at random times: many for a small model in even processes, few for a large model in odd ones."""
    rate, step = (100.0, _launches(gpu, number)) if number % 2 == 0 else (20.0, bodies(gpu, 16_384))
    draw = random.Random(number)
    due: float | None = None

    def next_one() -> float:
        nonlocal due
        now = time.monotonic()
        due = (now if due is None else due) + draw.expovariate(rate)
        if due > now:
            time.sleep(due - now)
        came = due
        step()
        return came

    return next_one


WORKLOADS = {
    one.name: one
    for one in (
        Workload("block", "kernels", "one kernel of one block at a time", _block),
        Workload("launches", "requests", "200 small launches a request, as in inference without batching", _launches),
        Workload("resize", "images", "1920x1080 to the GPU, made 224x224 there, and back", _resize),
        Workload("nbody", "steps", "8192 bodies, all on all", _nbody),
        Workload("train", "steps", "a perceptron of 784, 256 and 10 units, batches of 128, with gradients", _train),
        Workload("queue", "requests", "two models behind queues: 100 small and 20 large requests a second", _queue),
    )
}
