"""A GPU that one control daemon owns cannot be shared apart; said before anything is touched."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from mpsagent.policy.files import load
from mpsagent.system.unsupported import unsupported

DEFAULT, EXCLUSIVE = {"GPU-1": "default"}, {"GPU-1": "default", "GPU-2": "exclusive-process"}


@pytest.mark.parametrize(
    ("section", "modes", "wrong"),
    [
        ('sharing = "apart"', EXCLUSIVE, True),
        ('sharing = "apart"', DEFAULT, False),
        ('sharing = "apart"', "NVML does not answer", False),
        ('sharing = "apart"\ndevices = ["each"]', EXCLUSIVE, True),
        ('sharing = "apart"\ndevices = ["GPU-2"]', EXCLUSIVE, True),
        ('sharing = "apart"\ndevices = ["GPU-1"]', EXCLUSIVE, False),
        ('sharing = "turns"', EXCLUSIVE, False),
    ],
)
def test_apart_needs_gpus_that_several_daemons_may_use(
    section: str, modes: Mapping[str, str] | str, wrong: bool
) -> None:
    policy, errors = load([("p.toml", f"[instance.gpu]\n{section}\n")])
    assert policy is not None, errors
    asked = []

    async def ask() -> Mapping[str, str] | str:
        asked.append(1)
        return modes

    found = asyncio.run(unsupported(policy, ask))
    assert bool(asked) is ("apart" in section)
    assert [(one.file, one.line, one.key) for one in found] == (
        [("p.toml", 2, "instance.gpu.sharing")] if wrong else []
    )
    assert all("EXCLUSIVE_PROCESS" in one.problem and "nvidia-smi" in one.hint for one in found)
