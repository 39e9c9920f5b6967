"""What of a good policy the MPS of this machine cannot do: NVIDIA's program and the GPUs' compute modes are asked,
before anything is touched."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Mapping

from mpsagent.mps.versions import listed
from mpsagent.policy.instances import names, of
from mpsagent.policy.origins import PolicyError
from mpsagent.policy.parse import EACH
from mpsagent.policy.policy import Policy
from mpsagent.system.control import MULTIUSER
from mpsagent.system.devices import simulated_gpus
from mpsagent.system.directories import NOWHERE
from mpsagent.system.hooks import refused
from mpsagent.system.nvml import Nvml
from mpsagent.system.spawn import find_program, run_program

DEADLINE, GPUS = 5.0, 10.0
"""Seconds for the program, and for the GPUs."""
Modes = Callable[[], Awaitable[Mapping[str, str] | str]]
HELP = "CUDA MPS Control"
"""How the help of every driver begins; since 580 it lists options and commands."""
TAKEN = ("PATH", "LD_LIBRARY_PATH", "HOME", "LANG")


async def unsupported(policy: Policy, modes: Modes | None = None) -> tuple[PolicyError, ...]:
    """Mistakes of all instances, by file and line. Where the program is missing, silent or not to be trusted nothing
    is said: its start will tell. ``modes()``: compute modes by UUID, or why they are not known; asked if it matters."""
    sections = [of(policy, name) for name in names(policy)]
    found = [await _in_one(one) for one in sections]
    apart = [one for one in sections if one.sharing == "apart"]
    if apart and modes is not None:
        known = await modes()
        found += [_apart(one, known) for one in apart if not isinstance(known, str)]
    return tuple(one for errors in found for one in errors)


async def compute_modes(devices_file: str | os.PathLike[str] | None) -> Mapping[str, str] | str:
    """By UUID, of the machine's GPUs or of those in a file, or why they are not known."""
    if devices_file is None:
        nvml = Nvml(lambda: os.environ, time.time)
        try:
            found = await nvml.gpus(deadline=GPUS)
        finally:
            nvml.close()
    else:
        try:
            found = simulated_gpus(os.fspath(devices_file))
        except (OSError, ValueError) as error:
            return f"{devices_file}: {error}"
    if isinstance(found, str):
        return found
    return {one.uuid: one.mode for one in found if one.uuid is not None and one.mode is not None}


def _apart(policy: Policy, modes: Mapping[str, str]) -> tuple[PolicyError, ...]:
    """One control daemon owns such a GPU, and servers of others do not start on it."""
    wanted = {uuid.lower() for uuid in policy.devices if uuid != EACH}
    shut = [uuid for uuid, mode in modes.items()
            if mode == "exclusive-process" and (not wanted or uuid.lower() in wanted)]  # fmt: skip
    if not shut:
        return ()
    more = f" and {len(shut) - 1} more" if len(shut) > 1 else ""
    problem = f'"apart" is not possible: the compute mode of {shut[0]}{more} is EXCLUSIVE_PROCESS, for one daemon alone'
    return _wrong(policy, problem, 'nvidia-smi -i GPU -c DEFAULT, or sharing = "together" or "turns"')


async def _in_one(policy: Policy) -> tuple[PolicyError, ...]:
    if policy.sharing != "together":
        return ()
    path = find_program(policy.control_program, os.environ)
    if path is None or refused(path):
        return ()
    environment = {name: value for name, value in os.environ.items() if name in TAKEN}
    said = await run_program([path, "-h"], {**environment, "CUDA_MPS_PIPE_DIRECTORY": NOWHERE}, deadline=DEADLINE)
    if said.problem is not None or MULTIUSER in listed(said.out):
        return ()
    if HELP not in said.out:
        return ()  # it could not run at all
    problem = f'"together" is not possible: {path} of this driver does not know {MULTIUSER}'
    return _wrong(policy, problem, 'driver 580 and later know it; until then write sharing = "turns"')


def _wrong(policy: Policy, problem: str, hint: str) -> tuple[PolicyError, ...]:
    return (policy.origin(f"instance.{policy.instance}.sharing").wrong(problem, hint),)
