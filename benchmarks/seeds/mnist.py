"""MNIST's file format: read it, and write made-up images in it. The real files, unpacked, are read just the same."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
_BYTES = 0x08  # the type of the values: one unsigned byte each


def read(path: Path) -> Any:
    """An array, as many dimensions as the file says. Raises ValueError."""
    data = path.read_bytes()
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != _BYTES:
        raise ValueError(f"{path} is no IDX file of bytes; is it still packed?")
    sizes = struct.unpack_from(f">{data[3]}I", data, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * len(sizes)).reshape(sizes)


def write(path: Path, values: Any) -> None:
    head = bytes((0, 0, _BYTES, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(head + values.astype(np.uint8).tobytes())


def make(directory: Path, count: int = 60_000, seed: int = 0) -> None:
    """Ten blurred shapes with noise on them: something that can be learnt."""
    draw = np.random.default_rng(seed)
    shapes = np.kron(draw.integers(0, 200, (10, 7, 7), dtype=np.uint8), np.ones((4, 4), np.uint8))
    labels = draw.integers(0, 10, count, dtype=np.uint8)
    noise = draw.integers(0, 56, (1000, 28, 28), dtype=np.uint8)
    write(directory / IMAGES, shapes[labels] + noise[np.arange(count) % 1000])
    write(directory / LABELS, labels)


def load(directory: Path) -> tuple[Any, Any]:
    """Images as floats around 0, one channel; labels."""
    images, labels = read(directory / IMAGES), read(directory / LABELS)
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise ValueError(f"{directory}: {images.shape} images and {labels.shape} labels do not belong together")
    return (images.astype(np.float32)[:, None] / 255 - 0.1307) / 0.3081, labels.astype(np.int64)
