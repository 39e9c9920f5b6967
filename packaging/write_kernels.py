#!/usr/bin/env python3
"""Write the PTX of mpsagent_bench/kernels.cu and benchmarks/seeds/jpeg.cu beside them; needs nvcc.

The instructions are basic ones, so the text is marked for the oldest version and GPU that have them: every driver since
450 (2020) takes it, on Volta and newer. ptxas says whether it holds.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
SOURCES = HERE / "mpsagent_bench/kernels.cu", HERE / "benchmarks/seeds/jpeg.cu"
BUILD_FOR, MARK_VERSION, MARK_TARGET = "sm_75", "7.0", "sm_70"
ASSEMBLE_FOR = ("sm_75", "sm_80", "sm_90")


def kernels(source: Path) -> str:
    with tempfile.TemporaryDirectory() as place:
        made = Path(place) / "kernels.ptx"
        subprocess.run(["nvcc", "-ptx", f"-arch={BUILD_FOR}", "-o", str(made), str(source)], check=True)
        text = re.sub(r"^//.*\n", "", made.read_text(), flags=re.MULTILINE).lstrip("\n")
        text = re.sub(r"^\.version .*", f".version {MARK_VERSION}", text, flags=re.MULTILINE)
        text = re.sub(r"^\.target .*", f".target {MARK_TARGET}", text, flags=re.MULTILINE)
        made.write_text(text)
        for gpu in ASSEMBLE_FOR:
            subprocess.run(["ptxas", "--gpu-name", gpu, "-o", "/dev/null", str(made)], check=True)
    return text


if __name__ == "__main__":
    for source in SOURCES:
        source.with_suffix(".ptx").write_text(kernels(source))
        sys.stdout.write(f"{source.with_suffix('.ptx')}\n")
