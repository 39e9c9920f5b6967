"""What others published, and how each of it is repeated here. Pure: figures and words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

OFF, ON = "off", "on"
"""Without MPS; with MPS, behind the gate."""
FIRST_USER = 61184
"""User ids of the processes, from here on: systemd's for services without a user of their own, so no person's."""
PERCENTAGES = (100, 10, 50, 30, 70, 20, 40, 60, 80, 90)
"""In the order of measuring: when time ends early, what there is still shows the whole range."""


@dataclass(frozen=True)
class Start:
    """Processes of one program that are started together; in a window the first so many of them work."""

    program: str
    counts: tuple[int, ...]
    """A window for each."""
    modes: tuple[str, ...] = (OFF, ON)
    user: int = FIRST_USER
    percent: int = 0
    """Of the multiprocessors, by the policy; 0: no limit."""


@dataclass(frozen=True)
class Seed:
    name: str
    title: str
    gpu: str
    """Of the published figures."""
    unit: str
    """Of what is counted a second."""
    starts: tuple[Start, ...]
    published: str
    """In one cell."""
    why: str
    """One sentence: why ours may differ."""
    rows: Mapping[int, tuple[str, str, str]] = field(default_factory=dict)
    """By number of processes: off, on, times; empty where nothing was published."""
    amount: tuple[float, str] | None = None
    """Work of each process whose time is told, with its words: published were times, not rates."""
    needs: str = ""
    """The seed whose figures it is compared with."""


SEEDS = (
    Seed(
        "block", "kernels of one block", "Titan V", "kernels", (Start("block", (1, 2, 4)),),
        "4 processes 13,952 ms off, 3,492 ms on: 4.0 times",
        "Ours is one dependent chain of a million multiply-adds in a block of 256 threads, so the times differ with "
        "the chain and the clock; the ratio may not, because one block fills one multiprocessor of either GPU.",
        {4: ("13,952 ms", "3,492 ms", "4.00")}, (1000, "1,000 kernels each"),
    ),
    Seed(
        "resnet", "ResNet-50, an image at a time", "V100", "images", (Start("image", (1, 2, 4, 8, 16)),),
        "1, 2, 4, 8 processes 537, 591, 579, 588 images/s off; 537, 909, 1169, 1538 on: 2.6 times at 8",
        "Published was TensorRT; ours is PyTorch in half precision with the forward pass recorded as a CUDA graph, "
        "so that an image is one launch there, too, and a process alone leaves more of an H200 idle than of a V100.",
        {1: ("537", "537", "1.00"), 2: ("591", "909", "1.54"), 4: ("579", "1,169", "2.02"),
         8: ("588", "1,538", "2.62")},
    ),
    Seed(
        "jpeg", "JPEG to smaller JPEG", "V100", "images", (Start("jpeg", (1, 2, 4, 8, 16, 18)),),
        "2, 4, 8, 16, 18 processes 1.42, 2.26, 2.98, 3.42, 3.53 times",
        "Which decoder, which sizes, and over what the times are, is not in our source; with nvJPEG part of the work "
        "is the processor's, or that of an H200's few JPEG engines, which MPS does not divide.",
        {2: ("", "", "1.42"), 4: ("", "", "2.26"), 8: ("", "", "2.98"), 16: ("", "", "3.42"), 18: ("", "", "3.53")},
    ),
    Seed(
        "jpeg-own", "JPEG to smaller JPEG by kernels of ours", "V100", "images",
        (Start("jpeg-own", (1, 2, 4, 8, 16, 18)),),
        "2, 4, 8, 16, 18 processes 1.42, 2.26, 2.98, 3.42, 3.53 times",
        "Decoding, resizing and encoding are all kernels (benchmarks/seeds/jpeg.cu), Huffman codes by a thread for "
        "each interval between restart markers; what limits many processes is copying the files, and the GPU.",
        {2: ("", "", "1.42"), 4: ("", "", "2.26"), 8: ("", "", "2.98"), 16: ("", "", "3.42"), 18: ("", "", "3.53")},
    ),
    Seed(
        "jpeg-gpu", "JPEG to smaller JPEG by multiprocessors", "V100", "images",
        (Start("jpeg-gpu", (1, 2, 4, 8, 16, 18)),),
        "2, 4, 8, 16, 18 processes 1.42, 2.26, 2.98, 3.42, 3.53 times",
        "nvJPEG's backend GPU_HYBRID decodes with kernels, which MPS lets run side by side, and the first row has JPEG "
        "engines; resizing and encoding are the same.",
        {2: ("", "", "1.42"), 4: ("", "", "2.26"), 8: ("", "", "2.98"), 16: ("", "", "3.42"), 18: ("", "", "3.53")},
    ),
    Seed(
        "mnist", "MNIST trainings side by side", "P100", "batches", (Start("mnist", (1, 5, 10)),),
        "1 training 80 s; 5: 136 s off, 86 s on; 10: 221 s off, 124 s on: 1.8 times",
        "Ours is the small network of two convolutions and two layers in PyTorch, batches of 128 from made images in "
        "MNIST's own files, without the program's start; each small launch waits for the processor, which is another.",
        {1: ("80 s", "", ""), 5: ("136 s", "86 s", "1.58"), 10: ("221 s", "124 s", "1.78")},
        (12 * 60_000 / 128, "12 epochs of 60,000 images each"),
    ),
    Seed(
        "nbody", "n-body, each filling the GPU", "not said", "steps", (Start("nbody", (1, 4)),),
        "4 runs in about 20 % less time",
        "Ours has 1,024 bodies for each multiprocessor and no shared memory; programs that fill the GPU gain only "
        "what is idle between their launches and in their tails, and how much that is depends on the kernel.",
        {4: ("", "", "about 1.25")}, (1000, "1,000 steps each"),
    ),
    Seed(
        "inference", "inference, one client or many, with and without batching", "V100", "images",
        (Start("batch", (1,), (OFF,)),),
        "many clients with MPS 7 times one client without; batching 60 % more than that",
        "One client of ours already replays a CUDA graph, so it leaves less to gain than a client that launches layer "
        "by layer; batches of 128 leave nothing of the GPU idle. The clients are those of ResNet-50 above.",
        needs="resnet",
    ),
    Seed(
        "layers", "inference, clients that launch layer by layer", "V100", "images", (Start("layers", (1, 8)),),
        "many clients with MPS 7 times one client without",
        "PyTorch as it is, an image at a time: one client waits for its processor between some hundred launches an "
        "image, so many clients gain more than those above that replay a graph.",
    ),
    Seed(
        "queue", "two programs behind queues, a model each", "not said", "requests", (Start("queue", (1, 2)),),
        "no figures in our sources",
        "Ours is ResNet-18 for 100 requests a second that come by chance, beside ResNet-50 in batches of 128 that "
        "always has a request waiting; a time includes the waiting.",
    ),
    Seed(
        "threads", "active threads, 10 to 100 percent", "not said", "images",
        tuple(Start("thirty-two", (1,), (ON,), FIRST_USER + one, one) for one in PERCENTAGES),
        "no figures in our sources: throughput, memory and utilisation by percentage",
        "Ours is ResNet-50 in batches of 32, with the percentage by the policy, a user for each; NVML's utilisation is "
        "the time in which any kernel runs, not the share of multiprocessors that it has.",
    ),
)  # fmt: skip
BY_NAME = {one.name: one for one in SEEDS}


def with_needed(names: Sequence[str]) -> list[str]:
    """In their order here; all, when none is named."""
    wanted = {*names, *(BY_NAME[name].needs for name in names)}
    return [one.name for one in SEEDS if not names or one.name in wanted]


def limits() -> str:
    """Sections of the policy: a user for each percentage."""
    return "".join(
        f"[user.{start.user}]\nactive_threads = '{start.percent}%'\n"
        for one in SEEDS
        for start in one.starts
        if start.percent
    )
