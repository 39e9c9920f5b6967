"""The keys of a good policy that this machine's MPS does not support: NVIDIA's program is asked, before any change."""

from __future__ import annotations

import os

from mpsagent.mps.versions import listed
from mpsagent.policy.instances import names, of
from mpsagent.policy.origins import PolicyError
from mpsagent.policy.policy import Policy
from mpsagent.system.control import MULTIUSER
from mpsagent.system.directories import NOWHERE
from mpsagent.system.hooks import refused
from mpsagent.system.spawn import find_program, run_program

DEADLINE = 5.0
HELP = "CUDA MPS Control"
"""How the help of every driver begins; since 580 it lists options and commands."""
TAKEN = ("PATH", "LD_LIBRARY_PATH", "HOME", "LANG")


async def unsupported(policy: Policy) -> tuple[PolicyError, ...]:
    """Return the mistakes of all instances, by file and line. If the program is missing, silent or not to be trusted,
    there is none: its start will tell."""
    found = [await _in_one(of(policy, name)) for name in names(policy)]
    return tuple(one for errors in found for one in errors)


async def _in_one(policy: Policy) -> tuple[PolicyError, ...]:
    if policy.sharing != "one-server":
        return ()
    path = find_program(policy.control_daemon_path, os.environ)
    if path is None or refused(path):
        return ()
    environment = {name: value for name, value in os.environ.items() if name in TAKEN}
    said = await run_program([path, "-h"], {**environment, "CUDA_MPS_PIPE_DIRECTORY": NOWHERE}, deadline=DEADLINE)
    if said.problem is not None or MULTIUSER in listed(said.out):
        return ()
    if HELP not in said.out:
        return ()  # it could not run at all
    problem = f'"one-server" is not possible: {path} of this driver does not know {MULTIUSER}'
    return _wrong(policy, problem, 'driver 580 and later know it; until then write sharing = "turns"')


def _wrong(policy: Policy, problem: str, hint: str) -> tuple[PolicyError, ...]:
    return (policy.origin(f"instance.{policy.instance}.sharing").wrong(problem, hint),)
