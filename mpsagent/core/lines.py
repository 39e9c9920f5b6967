"""The order to write a line to a process of a user. Pure."""

from __future__ import annotations

from mpsagent.core import actions as act
from mpsagent.core.view import View
from mpsagent.policy.slurm import slurm_job


def line(view: View, process: tuple[int, int], uid: int, cgroup: str | None, text: str) -> act.Tell:
    """Return the order for a process (pid, start). In a job of Slurm the output is a log that its user reads, so there
    the line may also go into a file or pipe. Elsewhere another program may read it and expect no such line."""
    rule = view.rules(uid).origin("notify_terminal").key
    in_job = slurm_job(cgroup) is not None
    return act.Tell(pid=process[0], start=process[1], uid=uid, reason=text, rule=rule, files=in_job)
