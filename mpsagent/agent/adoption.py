"""Taking over a control daemon that runs already, and being the only agent that does."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from mpsagent.policy.policy import Policy
from mpsagent.system import lock, pipedir
from mpsagent.system.control import PROGRAM, ControlSupervisor, Running, Trouble, TroubleKind
from mpsagent.system.processes import TICKS, Process

LOCK = "mpsagent.lock"


class Claim:
    """The lock in the pipe directory: whoever holds it looks after its control daemon."""

    def __init__(self) -> None:
        self._fd = -1

    def renew(self, directory: str) -> None:
        """Take the lock, or take it again where the directory is another one now. Raises AlreadyLocked, OSError."""
        path = f"{directory}/{LOCK}"
        if self._fd >= 0 and lock.holds(self._fd, path):
            return
        fd = lock.take(path, f"the control daemon of {directory}")
        self.close()
        self._fd = fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


async def take_over(supervisor: ControlSupervisor, policy: Policy) -> Running | Trouble:
    """The daemon that runs on our pipe directory, if it is one that we can work with; nothing of it is changed but a
    directory that everybody may write to."""
    try:
        pipedir.secure(policy.pipe_directory)
    except (pipedir.PipeDirectoryRefused, OSError) as error:
        return Trouble(TroubleKind.UNSAFE, str(error), ())
    found = await supervisor.adopt()
    if isinstance(found, Running):
        problem = unfit(policy, found)
        if problem is not None:
            supervisor.close()
            return problem
    return found


def unfit(policy: Policy, found: Running) -> Trouble | None:
    """Why a daemon cannot be looked after under this policy, with the commands that end it."""
    why = None
    if found.multiuser:
        why = "was started with --multiuser-server: its log does not say whose client is whose, so nobody has limits"
    elif os.path.realpath(found.log_directory) != os.path.realpath(policy.log_directory):
        why = (
            f"writes its logs to {found.log_directory}, the policy says {policy.log_directory}: set log_directory in "
            "[instance.NAME] to that and start the agent again, or end the daemon"
        )
    elif (found.devices or "") != ",".join(policy.devices):
        theirs, ours = found.devices or "all", ", ".join(policy.devices) or "all"
        why = f"was started for other GPUs (CUDA_VISIBLE_DEVICES: {theirs}) than the policy's ({ours})"
    if why is None:
        return None
    stop = f"echo quit -t 30 | CUDA_MPS_PIPE_DIRECTORY={policy.pipe_directory} {PROGRAM}"
    return Trouble(TroubleKind.UNSAFE, f"control daemon {found.pid} {why}", (stop,))


def claim(policy: Policy, held: Claim) -> str | None:
    """Make or check the pipe directory and lock it. What is wrong with the directory, if anything; raises AlreadyLocked
    when another agent has it."""
    directory = policy.pipe_directory
    try:
        with suppress(pipedir.PipeDirectoryRefused):  # it is said again, in detail, when the daemon is looked for
            pipedir.secure(directory)
        pipedir.prepare(directory)
        held.renew(directory)
    except (pipedir.PipeDirectoryRefused, OSError) as error:
        return str(error)
    return None


def started_at(process: Process) -> float:
    """When a process started, seconds since the epoch; a second early rather than late."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + process.started / TICKS - 1.0
