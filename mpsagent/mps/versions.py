"""What the MPS of a driver differs in, as far as mpsagent has to know it. Pure."""

from __future__ import annotations

import re


def places(driver: int) -> int:
    """Contexts that a server takes on a device: 48 since Volta (recording 02, R13; 580 on two H200), 60 from 590 on by
    NVIDIA's pages."""
    return 60 if driver >= 590 else 48


def listed(help_text: str) -> frozenset[str]:
    """The options and commands that ``nvidia-cuda-mps-control -h`` names; before driver 580 it names none."""
    if "COMMAND" not in help_text:
        return frozenset()
    return frozenset(re.findall(r"(?m)^ {0,8}(?:-\w,)?(-{0,2}[a-z][a-z_-]*)", help_text))
