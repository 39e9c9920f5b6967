"""``mpsagent-cli env``: what a CUDA process needs to find MPS, for shells, containers and batch systems."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any

import click

from mpsagent.cli import ask
from mpsagent.cli.wording import safe
from mpsagent.mps.units import percent_text
from mpsagent.system import container_device

GIVE_WAY = {"CUDA_MPS_CLIENT_PRIORITY": "1"}
"""Below normal; 0 is normal, and there is nothing above it."""
NO_LIMIT_OF_ITS_OWN = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": ""}
"""A text in it that MPS cannot read takes the memory limit away; an empty one does not (recording 11)."""
JAX = "XLA_PYTHON_CLIENT_MEM_FRACTION"
BESIDE, BESIDE_LITTLE = 1 << 30, 600 << 20
"""Bytes that JAX had beside what it reserves, and worked at each limit that was tried (docs/measured.md): from 2 GiB
on, and below; a context alone takes 516 MiB of an H200."""
MOST_OWN = 99.9
"""With 100 percent of its own MPS holds such a program to no limit (docs/measured.md), so not to its job's either."""


def env(path: str, form: str, give_way: bool = False, partitioning: bool = False, instance: str | None = None) -> None:
    """``form``: shell, json, cdi, docker or slurm. ``give_way``: with the lower one of MPS's two priorities.
    ``partitioning``: with partitioning by context, and with the user's limit as the program's own percentage, to which
    MPS holds it then. ``instance``: for this one, where each has a directory of its own."""
    if (give_way or partitioning) and form == "cdi":
        option = "--give-way" if give_way else "--partitioning"
        raise click.UsageError(f"a CDI file is for everybody: give {option} with another format")
    body, _ = ask.asked(path, "/v1/status")
    directory = body.get("pipe_directory")
    if not directory:
        click.echo("mpsagent-cli: the agent has no pipe directory yet; see mpsagent-cli status", err=True)
        sys.exit(ask.UNHEALTHY)
    found: dict[str, str] = body["environment"]
    if instance is not None:
        each = {one["name"]: one for one in body["instances"]}
        if instance not in each:
            known = ", ".join(map(safe, each))
            raise click.UsageError(f"there is no instance {safe(instance)}; known: {known}")
        found = each[instance]["environment"]
        directory = found["CUDA_MPS_PIPE_DIRECTORY"]
    fraction = None
    if form != "cdi":
        explained, _ = ask.asked(path, f"/v1/policy/explain?user={os.getuid()}")
        fraction = _fraction(explained["memory_limit"]["value"], body["devices"])
        found = found | NO_LIMIT_OF_ITS_OWN | ({} if fraction is None else {JAX: fraction})
        found |= _partitioning(explained) if partitioning else {}
    if give_way:
        found = found | GIVE_WAY
    if form == "json":
        click.echo(json.dumps(found))
    elif form == "cdi":
        click.echo(container_device.text(directory, found), nl=False)
    elif form == "docker":
        settings = " ".join(f"--env {quote(f'{name}={value}')}" for name, value in found.items())
        click.echo(f"{settings} --volume {quote(f'{directory}:{directory}')}")
    else:  # slurmd reads its lines as they are, without a shell
        for name, value in found.items():
            click.echo(f"export {name}={value if form == 'slurm' else quote(value)}")
        if form == "shell" and fraction is not None:
            said = f"vLLM: --gpu-memory-utilization {fraction}; TensorFlow: per_process_gpu_memory_fraction {fraction}"
            click.echo(f"# {said}")


def _fraction(limits: Mapping[str, int | None], devices: Sequence[Mapping[str, Any]]) -> str | None:
    """What part of the whole GPU a framework may reserve within its user's memory limit, on the device where that is
    least; None where there is no limit, or too little of it."""
    parts = [
        (limit - (BESIDE if limit >= 2 * BESIDE else BESIDE_LITTLE)) / device["memory"] for device in devices
        if (limit := limits.get(str(device["ordinal"]))) is not None
    ]  # fmt: skip
    least = math.floor(min(parts, default=0.0) * 10_000)
    return f"{least / 10_000:.4f}" if least > 0 else None


def _partitioning(explained: Mapping[str, Any]) -> dict[str, str]:
    """A limit that is not known yet does no harm: MPS takes the smaller one of the server's and the program's own."""
    limit = explained["active_threads"]["value"] or MOST_OWN
    return {
        "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING": "1",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percent_text(min(limit, MOST_OWN)),
    }
