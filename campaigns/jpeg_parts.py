#!/usr/bin/env python3
"""Which part of JPEG to smaller JPEG is in the way of what: `jpeg_parts.py`, with PyTorch and a GPU, about a minute.

Decoding (by torchvision, and by nvJPEG's backends), making smaller and encoding, each alone, in one process and in
eight, without MPS; with NVML's utilisation of the multiprocessors and of the JPEG engines. A line of JSON for each.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.seeds.inside import Nvml
from benchmarks.seeds.process import Process, ProcessError
from benchmarks.seeds.programs import HIGH, SMALL_HIGH, SMALL_WIDE, WIDE, Made, NvJpeg, _seen, photographs

SECONDS, WARM = 1.5, 0.6
PARTS = ("torchvision", "hybrid", "gpu-hybrid", "resize", "encode")


def part(name: str, files: list[bytes]) -> Any:
    def make(number: int) -> Made:
        import torch
        import torchvision

        seen = _seen(torch)
        coded = [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in files]
        image = torch.zeros(3, HIGH, WIDE, dtype=torch.uint8, device="cuda")
        small = torch.randint(0, 255, (3, SMALL_HIGH, SMALL_WIDE), dtype=torch.uint8, device="cuda")
        backend = {"hybrid": NvJpeg.HYBRID, "gpu-hybrid": NvJpeg.GPU_HYBRID}.get(name)
        decoder = None if backend is None else NvJpeg(backend)
        turn = number

        def step() -> None:
            nonlocal turn
            turn = (turn + 1) % len(files)
            if decoder is not None:
                decoder.decode(files[turn], image)
            elif name == "torchvision":
                torchvision.io.decode_jpeg(coded[turn], device="cuda")
            elif name == "resize":
                torch.nn.functional.interpolate(image[None].float(), (SMALL_HIGH, SMALL_WIDE), mode="bilinear")
            else:
                torchvision.io.encode_jpeg(small, quality=90)
            torch.cuda.synchronize()

        return *seen, step

    return make


def main() -> int:
    import torch  # noqa: F401  # once for all processes
    import torchvision  # noqa: F401

    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = "/nonexistent"
    nvml = Nvml("0")
    with tempfile.TemporaryDirectory() as place:
        photographs(Path(place))
        files = [path.read_bytes() for path in sorted(Path(place).glob("*.jpeg"))]
    print(json.dumps({"bytes": [len(one) for one in files]}), flush=True)
    for name in PARTS:
        started: list[Process] = []
        try:
            started = [Process(part(name, files), number, None, {}) for number in range(8)]
            for process in started:
                process.hear(40)
            for count in (1, 8):
                at = time.monotonic() + WARM
                for process in started[:count]:
                    process.go(at - WARM, at, SECONDS)
                engines, busy = [], []
                while time.monotonic() < at + SECONDS:
                    time.sleep(0.1)
                    engines.append(nvml.engines())
                    busy.append(nvml.now())
                rate = sum(process.hear(30)["rate"] for process in started[:count])
                print(json.dumps({"part": name, "processes": count, "rate": round(rate, 1),
                                  "jpeg engines %": engines[-3:], "busy %, MHz": busy[-1:]}), flush=True)  # fmt: skip
        except (ProcessError, OSError) as error:
            print(json.dumps({"part": name, "problem": str(error)}), flush=True)
        finally:
            for process in started:
                process.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
