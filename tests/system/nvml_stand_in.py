"""A machine with one GPU, as far as NVML is concerned: the library is made of nvml.c, and files beside it say what it
tells. The helper process and pynvml are the real ones."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

UUID = "GPU-11111111-2222-3333-4444-555555555555"
PART = "MIG-66666666-7777-8888-9999-000000000000"
SOURCE = Path(__file__).with_name("nvml.c")


class Machine:
    """``environment`` lets a program find the library."""

    def __init__(self, place: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("needs a C compiler, for the stand-in below NVML")
        self.place = place
        library = place / "libnvidia-ml.so.1"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
        self.environment = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": str(place)}

    def set(self, name: str, value: object = 1) -> None:
        """Whole or not at all: it is read at any moment."""
        fresh = self.place / f"{name}.new"
        fresh.write_text(f"{value}\n")
        fresh.rename(self.place / name)

    def unset(self, name: str) -> None:
        (self.place / name).unlink()
