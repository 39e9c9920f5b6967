"""What a process of each seed does: PyTorch's programs, and those that need CUDA's driver alone.

``PROGRAMS[name](number, place)`` is called in the process itself, after its user has changed: the GPU's name, the
multiprocessors that it may use, and its step. PyTorch must have been imported before the process was forked, for that
takes seconds, and may not have touched the GPU there.
"""

from __future__ import annotations

import ctypes
import io
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.seeds import jpeg, mnist
from mpsagent_bench.driver import Gpu
from mpsagent_bench.workloads import WORKLOADS, Step, bodies

Made = tuple[str, int, Step]
DEVICE = os.environ.get("SEEDS_DEVICE", "cuda")
"""cpu: to try the programs themselves where there is no GPU."""
MODEL_BATCH, BATCH, MNIST_BATCH = 128, 32, 128
WIDE, HIGH, SMALL_WIDE, SMALL_HIGH = 1920, 1080, 480, 270
PER_STEP = {"batch": MODEL_BATCH, "thirty-two": BATCH}
"""Where a step is more than one of the seed's units."""
TORCH = ("image", "layers", "batch", "thirty-two", "jpeg", "jpeg-gpu", "mnist", "queue")
JPEG = ("jpeg", "jpeg-gpu", "jpeg-own")


def _seen(torch: Any) -> tuple[str, int]:
    torch.set_num_threads(1)
    if DEVICE != "cuda":
        return "the processor", 0
    about = torch.cuda.get_device_properties(0)
    return about.name, about.multi_processor_count


def _wait(torch: Any) -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _model(name: str, batch: int, recorded: bool = True) -> Step:
    """A forward pass in half precision, random weights. ``recorded``: on a GPU it is recorded once as a graph and then
    replayed: one launch, as an inference engine does it; else each layer is launched, as PyTorch does by itself."""
    import torch
    import torchvision

    form = torch.channels_last
    network = getattr(torchvision.models, name)(weights=None).eval().to(DEVICE, torch.half, memory_format=form)
    images = torch.randn(batch, 3, 224, 224, device=DEVICE, dtype=torch.half).to(memory_format=form)
    if DEVICE != "cuda" or not recorded:

        def forward() -> None:
            with torch.inference_mode():
                network(images)
            _wait(torch)

        return forward
    graph = torch.cuda.CUDAGraph()
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode():
        with torch.cuda.stream(beside):
            for _ in range(3):
                network(images)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            answers = network(images)

    def step(_kept: Any = (network, images, answers)) -> None:
        graph.replay()
        torch.cuda.synchronize()

    return step


def _inference(batch: int, recorded: bool = True) -> Callable[[int, Path], Made]:
    def make(number: int, place: Path) -> Made:
        import torch

        return *_seen(torch), _model("resnet50", batch, recorded)

    return make


def _queue(number: int, place: Path) -> Made:
    """Even processes serve a small model to requests that come by a clock of their own, odd ones a large model that
    always has a request waiting."""
    import torch

    seen = _seen(torch)
    if number % 2:
        return *seen, _model("resnet50", MODEL_BATCH)
    answer, draw, rate = _model("resnet18", 1), random.Random(number).expovariate, 100.0
    due: float | None = None

    def step() -> float:
        nonlocal due
        now = time.monotonic()
        # behind by more than a second it has not been waiting for requests: it was not its window
        due = (now if due is None or now - due > 1 else due) + draw(rate)
        if due > now:
            time.sleep(due - now)
        came = due
        answer()
        return came

    return *seen, step


def training(place: Path) -> Callable[[], Any]:
    """A step is a batch: to the GPU, forward, backward, and the weights go down the slope. It returns the loss."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    images, labels = (torch.from_numpy(one) for one in mnist.load(place))
    network = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    ).to(DEVICE)  # fmt: skip
    slope = torch.optim.Adadelta(network.parameters(), lr=1.0)
    order, at = torch.randperm(len(labels)), 0

    def step() -> Any:
        nonlocal at, order
        if at + MNIST_BATCH > len(order):
            order, at = torch.randperm(len(labels)), 0
        some = order[at : at + MNIST_BATCH]
        at += MNIST_BATCH
        slope.zero_grad()
        loss = nn.functional.cross_entropy(network(images[some].to(DEVICE)), labels[some].to(DEVICE))
        loss.backward()
        slope.step()
        return loss

    return step


def _mnist(number: int, place: Path) -> Made:
    import torch

    seen = _seen(torch)
    train = training(place)

    def step() -> None:
        train()
        _wait(torch)

    return *seen, step


RESTART = 4
"""Units of 16x16 pixels between two restart markers, without which no more than one thread can decode."""


def photographs(place: Path, count: int = 8, restart: int = 0) -> None:
    """Made-up photographs: smooth colours with some grain, as a camera's."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for number in range(count):
        rough = Image.fromarray(draw.integers(0, 256, (HIGH // 40, WIDE // 40, 3), dtype=np.uint8))
        smooth = np.asarray(rough.resize((WIDE, HIGH), Image.Resampling.BICUBIC), dtype=np.int16)
        grain = draw.integers(-6, 7, smooth.shape, dtype=np.int16)
        picture = Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8))
        picture.save(place / f"{number}.jpeg", quality=90, restart_marker_blocks=restart)


def decodes() -> bool:
    """Whether torchvision decodes and encodes on the GPU. It touches the GPU: in a process of its own only."""
    try:
        import torch
        import torchvision
        from PIL import Image

        with io.BytesIO() as file:
            Image.new("RGB", (64, 64)).save(file, "JPEG")
            data = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        torchvision.io.encode_jpeg(torchvision.io.decode_jpeg(data, device="cuda"))
    except Exception as error:
        print(f"no decoder on the GPU: {error}", file=sys.stderr, flush=True)
        return False
    return True


NVJPEG = "nvJPEG by torchvision: decoded, resized and encoded on the GPU"
PROCESSOR = "pillow: decoded and encoded on the processor, resized on the GPU"


def _jpeg(number: int, place: Path) -> Made:
    files = [path.read_bytes() for path in sorted(place.glob("*.jpeg"))]
    return (_jpeg_gpu if (place / "decoder").read_text() == NVJPEG else _jpeg_processor)(number, files)


class _Image(ctypes.Structure):
    """nvjpegImage_t."""

    _fields_ = (("channel", ctypes.c_void_p * 4), ("pitch", ctypes.c_size_t * 4))


class NvJpegError(Exception):
    """It is not there, refuses, or decodes something else."""


class NvJpeg:
    """nvJPEG's decoder with a backend of one's choice, stage by stage: nvjpegDecode may do it in another way. Its
    library is torchvision's, a wheel's or CUDA's."""

    HYBRID, GPU_HYBRID = 1, 2
    """Huffman decoding by the processor, or by the multiprocessors; all else by these."""
    _PLANES = 3  # NVJPEG_OUTPUT_RGB

    def __init__(self, backend: int) -> None:
        self._library = self._load()
        self._handle = self._made("nvjpegCreateEx", 0, None, None, 0)
        self._decoder = self._made("nvjpegDecoderCreate", self._handle, backend)
        self._state = self._made("nvjpegDecoderStateCreate", self._handle, self._decoder)
        pinned, device = (self._made(f"nvjpegBuffer{of}Create", self._handle, None) for of in ("Pinned", "Device"))
        self._call("nvjpegStateAttachPinnedBuffer", self._state, pinned)
        self._call("nvjpegStateAttachDeviceBuffer", self._state, device)
        self._file = self._made("nvjpegJpegStreamCreate", self._handle)
        self._parameters = self._made("nvjpegDecodeParamsCreate", self._handle)
        self._call("nvjpegDecodeParamsSetOutputFormat", self._parameters, self._PLANES)

    @staticmethod
    def _load() -> ctypes.CDLL:
        mapped = Path("/proc/self/maps").read_text().split()  # by torchvision, if it has one
        below = ("torchvision.libs/libnvjpeg*.so*", "nvidia/*/lib/libnvjpeg.so*")
        found = [one for one in mapped if "/libnvjpeg" in one]
        found += [str(one) for base in sys.path for pattern in below for one in Path(base or ".").glob(pattern)]
        for one in (*found, "libnvjpeg.so.13", "libnvjpeg.so.12", "/usr/local/cuda/lib64/libnvjpeg.so"):
            with suppress(OSError):
                return ctypes.CDLL(one)
        raise NvJpegError("no libnvjpeg.so: pip install nvidia-nvjpeg")

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise NvJpegError(f"{name}: nvjpegStatus_t {status}")

    def _made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call(name, *arguments, ctypes.byref(handle))
        return handle

    def decode(self, data: bytes, into: Any) -> None:
        """``into``: a tensor of three planes on the GPU. Done when the default stream is."""
        plane = into.shape[1] * into.shape[2]
        image = _Image()
        for number in range(3):
            image.channel[number], image.pitch[number] = into.data_ptr() + number * plane, into.shape[2]
        self._call("nvjpegJpegStreamParse", self._handle, data, ctypes.c_size_t(len(data)), 0, 0, self._file)
        what = (self._handle, self._decoder, self._state)
        self._call("nvjpegDecodeJpegHost", *what, self._parameters, self._file)
        self._call("nvjpegDecodeJpegTransferToDevice", *what, self._file, None)
        self._call("nvjpegDecodeJpegDevice", *what, ctypes.byref(image), None)


def _jpeg_decoded(backend: int) -> Callable[[int, Path], Made]:
    def make(number: int, place: Path) -> Made:
        import torch
        import torchvision

        files = [path.read_bytes() for path in sorted(place.glob("*.jpeg"))]
        seen = _seen(torch)
        image = torch.empty(3, HIGH, WIDE, dtype=torch.uint8, device="cuda")
        decoder = NvJpeg(backend)
        decoder.decode(files[0], image)
        torch.cuda.synchronize()
        right = torchvision.io.decode_jpeg(torch.frombuffer(bytearray(files[0]), dtype=torch.uint8))
        if (off := (image.cpu().float() - right.float()).abs().mean().item()) > 12:  # decoders differ by a few
            raise NvJpegError(f"it decodes another picture: each value is {off:.0f} off")

        def decode(turn: int) -> Any:
            decoder.decode(files[turn % len(files)], image)
            return image

        return *seen, _smaller(number, decode)

    return make


def _jpeg_gpu(number: int, files: list[bytes]) -> Made:
    import torch
    import torchvision

    seen = _seen(torch)
    coded = [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in files]
    return *seen, _smaller(number, lambda turn: torchvision.io.decode_jpeg(coded[turn % len(coded)], device="cuda"))


def _jpeg_own(number: int, place: Path) -> Made:
    import numpy as np
    from PIL import Image

    files = [path.read_bytes() for path in sorted(place.glob("*.jpeg"))]
    gpu = Gpu(jpeg.KERNELS)
    smaller = jpeg.Smaller(gpu, files[0])
    found, right = Image.open(io.BytesIO(smaller(files[0]))), Image.open(io.BytesIO(files[0])).reduce(jpeg.SHRUNK)
    if (off := np.abs(np.asarray(found, dtype=float) - np.asarray(right, dtype=float)).mean()) > 6:
        raise jpeg.JpegError(f"it writes another picture: each value is {off:.0f} off")
    turn = number

    def step() -> None:
        nonlocal turn
        turn += 1
        smaller(files[turn % len(files)])

    return gpu.name, gpu.multiprocessors, step


def _smaller(number: int, decode: Callable[[int], Any]) -> Step:
    import torch
    import torchvision

    turn = number

    def step() -> None:
        nonlocal turn
        turn += 1
        image = decode(turn)
        small = torch.nn.functional.interpolate(image[None].float(), (SMALL_HIGH, SMALL_WIDE), mode="bilinear")
        pixels = small[0].round().to(torch.uint8)
        torchvision.io.encode_jpeg(pixels, quality=90).cpu()

    return step


def _jpeg_processor(number: int, files: list[bytes]) -> Made:
    from PIL import Image

    gpu = Gpu()
    large, small = WIDE * HIGH * 3, SMALL_WIDE * SMALL_HIGH * 3
    source, target, back = gpu.allocate(large), gpu.allocate(small), (ctypes.c_ubyte * small)()
    sizes = ctypes.c_int(WIDE), ctypes.c_int(HIGH), target, ctypes.c_int(SMALL_WIDE), ctypes.c_int(SMALL_HIGH)
    turn = number

    def step() -> None:
        nonlocal turn
        turn += 1
        pixels = bytearray(Image.open(io.BytesIO(files[turn % len(files)])).convert("RGB").tobytes())
        gpu.upload(source, (ctypes.c_ubyte * large).from_buffer(pixels))
        gpu.launch("resize", SMALL_WIDE * SMALL_HIGH, 128, source, *sizes)
        gpu.download(back, target)
        Image.frombytes("RGB", (SMALL_WIDE, SMALL_HIGH), bytes(back)).save(io.BytesIO(), "JPEG", quality=90)

    return gpu.name, gpu.multiprocessors, step


def _block(number: int, place: Path) -> Made:
    gpu = Gpu()
    return gpu.name, gpu.multiprocessors, WORKLOADS["block"].make(gpu, number)


def _nbody(number: int, place: Path) -> Made:
    gpu = Gpu()
    return gpu.name, gpu.multiprocessors, bodies(gpu, 1024 * gpu.multiprocessors)


PROGRAMS: dict[str, Callable[[int, Path], Made]] = {
    "block": _block,
    "nbody": _nbody,
    "image": _inference(1),
    "layers": _inference(1, recorded=False),
    "batch": _inference(MODEL_BATCH),
    "thirty-two": _inference(BATCH),
    "queue": _queue,
    "jpeg": _jpeg,
    "jpeg-gpu": _jpeg_decoded(NvJpeg.GPU_HYBRID),
    "jpeg-own": _jpeg_own,
    "mnist": _mnist,
}
