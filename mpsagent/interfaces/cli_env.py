"""``mpsagent-cli env``: what a CUDA process needs to find MPS, for shells, containers and batch systems."""

from __future__ import annotations

import json
import os
import sys
from shlex import quote

import click

from mpsagent.interfaces import cli_ask as ask
from mpsagent.interfaces.cli_words import safe
from mpsagent.mps.units import percent_text
from mpsagent.system import container_device

GIVE_WAY = {"CUDA_MPS_CLIENT_PRIORITY": "1"}
"""Below normal; 0 is normal, and there is nothing above it."""
MOST_OWN = 99.9
"""With 100 percent of its own MPS holds such a program to no limit (docs/measured.md), so not to its job's either."""


def env(path: str, form: str, give_way: bool = False, partitioning: bool = False, instance: str | None = None) -> None:
    """``form``: shell, json, cdi, docker or slurm. ``give_way``: with the lower one of MPS's two priorities.
    ``partitioning``: with partitioning by context, and with the user's limit as the program's own percentage, to which
    MPS holds it then. ``instance``: for this one, where each has a directory of its own."""
    if (give_way or partitioning) and form == "cdi":
        option = "--give-way" if give_way else "--partitioning"
        raise click.UsageError(f"a CDI file is for everybody: give {option} with another format")
    body, _ = ask.asked(path, "GET", "/v1/status")
    directory = body.get("pipe_directory")
    if not directory:
        click.echo("mpsagent-cli: the agent has no pipe directory yet; see mpsagent-cli status", err=True)
        sys.exit(ask.UNHEALTHY)
    found: dict[str, str] = body.get("environment") or {"CUDA_MPS_PIPE_DIRECTORY": directory}
    if instance is not None:
        each = {one["name"]: one for one in body.get("instances", [])}
        if instance not in each:
            known = ", ".join(map(safe, each))
            raise click.UsageError(f"there is no instance {safe(instance)}; known: {known}")
        found = each[instance].get("environment") or found
        directory = found["CUDA_MPS_PIPE_DIRECTORY"]
    if give_way:
        found = found | GIVE_WAY
    if partitioning:
        found = found | _partitioning(path)
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


def _partitioning(path: str) -> dict[str, str]:
    """A limit that is not known yet does no harm: MPS takes the smaller one of the server's and the program's own."""
    body, _ = ask.asked(path, "GET", f"/v1/policy/explain?user={os.getuid()}")
    limit = body["threads"]["value"] or MOST_OWN
    return {
        "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING": "1",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percent_text(min(limit, MOST_OWN)),
    }
