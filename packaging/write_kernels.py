#!/usr/bin/env python3
"""Write mpsagent/bench/kernels.ptx from kernels.cu; needs nvcc.

The instructions are basic ones, so the text is marked for the oldest version and GPU that have them: every driver since
450 (2020) takes it, on Volta and newer. ptxas says whether it holds.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent / "mpsagent" / "bench"
BUILD_FOR, MARK_VERSION, MARK_TARGET = "sm_75", "7.0", "sm_70"
ASSEMBLE_FOR = ("sm_75", "sm_80", "sm_90")


def kernels() -> str:
    with tempfile.TemporaryDirectory() as place:
        made = Path(place) / "kernels.ptx"
        subprocess.run(["nvcc", "-ptx", f"-arch={BUILD_FOR}", "-o", str(made), str(HERE / "kernels.cu")], check=True)
        text = re.sub(r"^//.*\n", "", made.read_text(), flags=re.MULTILINE).lstrip("\n")
        text = re.sub(r"^\.version .*", f".version {MARK_VERSION}", text, flags=re.MULTILINE)
        text = re.sub(r"^\.target .*", f".target {MARK_TARGET}", text, flags=re.MULTILINE)
        made.write_text(text)
        for gpu in ASSEMBLE_FOR:
            subprocess.run(["ptxas", "--gpu-name", gpu, "-o", "/dev/null", str(made)], check=True)
    return text


if __name__ == "__main__":
    (HERE / "kernels.ptx").write_text(kernels())
    sys.stdout.write(f"{HERE / 'kernels.ptx'}\n")
