"""JPEG to a JPEG of a quarter of its width by kernels of ours, jpeg.cu; the processor reads and writes the headers."""

from __future__ import annotations

import ctypes
import io
import math
from ctypes import c_int
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

KERNELS = Path(__file__).with_name("jpeg.ptx").read_bytes() + b"\0"
PART, BLOCK, EACH, UNIT = 512, 32, 2, 2592
"""Bytes that a thread looks through for markers; threads of a block; units of 16x16 in an interval that is written; the
most bytes of a unit."""
SHRUNK = 4
Array = ctypes.Array[Any]


class JpegError(Exception):
    """Not a JPEG of the kind that is read here."""


class Header(NamedTuple):
    wide: int
    high: int
    each: int
    """Units between two restart markers."""
    codes: Array
    numbers: Array
    size: int
    """Of the header itself: its data follow."""


def _zigzag() -> list[int]:
    places = [(row, column) for row in range(8) for column in range(8)]
    places.sort(key=lambda at: (sum(at), at[0] if sum(at) % 2 else at[1]))
    return [8 * row + column for row, column in places]


@lru_cache
def _parsed(data: bytes) -> Header:
    """Of a file up to its data."""
    divisors: dict[int, list[int]] = {}
    codes = (ctypes.c_uint16 * (4 << 16))()
    wide = high = each = 0
    at = 2
    while at < len(data):
        marker, size = data[at + 1], int.from_bytes(data[at + 2 : at + 4])
        body, at = data[at + 4 : at + 2 + size], at + 2 + size
        if marker == 0xDB:
            for begin in range(0, len(body), 65):
                divisors[body[begin]] = list(body[begin + 1 : begin + 65])
        elif marker == 0xC4:
            while body:
                counts, symbols = body[1:17], body[17:]
                first = (2 * (body[0] & 15) + (body[0] >> 4)) << 16
                for length, count in enumerate(counts, 1):
                    for symbol in symbols[:count]:
                        span = 1 << 16 - length
                        codes[first : first + span] = [length << 8 | symbol] * span
                        first += span
                    symbols = symbols[count:]
                body = symbols
        elif marker == 0xC0:
            high, wide = int.from_bytes(body[1:3]), int.from_bytes(body[3:5])
            if body[7:15:3] != b"\x22\x11\x11":
                raise JpegError("not 4:2:0")
        elif marker == 0xDD:
            each = int.from_bytes(body)
    if not wide or not each or sorted(divisors) != [0, 1]:
        raise JpegError("not a baseline JPEG with restart markers")
    numbers = (c_int * 192)(*_zigzag(), *divisors[0], *divisors[1])
    return Header(wide, high, each, codes, numbers, len(data))


def header(data: bytes) -> Header:
    return _parsed(data[: _begin(data)])


def _begin(data: bytes) -> int:
    scan = data.index(b"\xff\xda")
    return scan + 2 + int.from_bytes(data[scan + 2 : scan + 4])


class Smaller:
    """``like``: a file of the size of all that come. ``gpu`` has the kernels of jpeg.cu."""

    def __init__(self, gpu: Any, like: bytes, quality: int = 90) -> None:
        from PIL import Image

        self._gpu, first = gpu, header(like)
        self._wide, self._units = -(-first.wide // 16), -(-first.wide // 16) * -(-first.high // 16)
        wide, high = first.wide // SHRUNK, first.high // SHRUNK
        self._small_wide, self._small_units = -(-wide // 16), -(-wide // 16) * -(-high // 16)
        with io.BytesIO() as file:  # its header is the one that is written
            Image.new("RGB", (wide, high)).save(file, "JPEG", quality=quality, restart_marker_blocks=EACH)
            made = file.getvalue()
        self._head, theirs = made[: _begin(made)], header(made)
        words = (c_int * 1024)()
        for kind in range(4):
            for number in range(1 << 16):
                length, symbol = divmod(theirs.codes[kind << 16 | number], 256)
                if length and number % (1 << 16 - length) == 0:
                    words[kind * 256 + symbol] = number >> (16 - length) << 5 | length
        waves = [(0.5 if k else math.sqrt(0.125)) * math.cos((2 * place + 1) * k * math.pi / 16)
                 for place in range(8) for k in range(8)]  # fmt: skip
        self._room = 2 * len(like) + 65536
        self._data, self._counts = gpu.allocate(self._room), gpu.allocate(4 * (self._room // PART + 1))
        self._begins = gpu.allocate(4 * (self._units + 1))
        self._coefficients, self._planes = gpu.allocate(self._units * 768), gpu.allocate(self._units * 384)
        self._less, self._small = gpu.allocate(self._small_units * 768), gpu.allocate(self._small_units * 384)
        self._parts, self._out = (gpu.allocate(self._small_units * UNIT) for _ in range(2))
        self._sizes = gpu.allocate(4 * (self._small_units + 1))
        self._codes, self._numbers = gpu.allocate(4 << 17), gpu.allocate(768)
        self._read: Header | None = None
        self._words, self._waves, self._theirs = gpu.allocate(4096), gpu.allocate(256), gpu.allocate(768)
        gpu.upload(self._words, words)
        gpu.upload(self._waves, (ctypes.c_float * 64)(*waves))
        gpu.upload(self._theirs, theirs.numbers)

    def __call__(self, data: bytes) -> bytes:
        gpu, found = self._gpu, header(data)
        if len(data) > self._room:
            raise JpegError("larger than it was made for")
        if self._read is not found:
            gpu.upload(self._codes, found.codes)
            gpu.upload(self._numbers, found.numbers)
            self._read = found
        gpu.upload(self._data, (ctypes.c_ubyte * len(data)).from_buffer_copy(data))
        parts, intervals = -(-(len(data) - found.size) // PART), -(-self._units // found.each)
        scan = self._data, c_int(found.size), c_int(len(data)), c_int(PART), c_int(parts), self._counts
        wide, units = c_int(self._wide), c_int(self._units)
        small = c_int(self._small_wide), c_int(self._small_units)
        written = -(-self._small_units // EACH)
        gpu.launch("count", parts, BLOCK, *scan)
        gpu.launch("mark", parts, BLOCK, *scan, self._begins)
        gpu.launch("entropy", intervals, BLOCK, self._data, self._begins, c_int(intervals), c_int(found.each), units,
                   self._codes, self._numbers, self._coefficients)  # fmt: skip
        gpu.launch("inverse", self._units * 6, 128, self._coefficients, wide, units, self._waves, self._planes)
        gpu.launch("shrink", self._small_units * 384, 128, self._planes, wide, units, *small, self._small)
        gpu.launch("forward", self._small_units * 6, BLOCK, self._small, *small, self._waves, self._theirs, self._less)
        out = c_int(written), c_int(EACH)
        gpu.launch("code", written, BLOCK, self._less, *out, small[1], self._words, self._parts, self._sizes)
        gpu.launch("gather", written, BLOCK, self._parts, *out, self._sizes, self._out)
        size = (c_int * 1)()
        gpu.download(size, ctypes.c_uint64(self._sizes.value + 4 * written))
        coded = (ctypes.c_ubyte * size[0])()
        gpu.download(coded, self._out)
        return self._head + bytes(coded) + b"\xff\xd9"
