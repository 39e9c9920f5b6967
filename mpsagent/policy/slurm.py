"""The job of Slurm that a process belongs to, by the cgroup that slurmstepd makes for it. Pure.

Only root makes cgroups at these places, so a user cannot give a process another job.
"""

from __future__ import annotations

import re

_JOB = re.compile(
    r"/(?:system\.slice/[^/]*slurmstepd\.scope|slurm[^/]*/uid_[0-9]{1,10})/job_([0-9]{1,10})(?:/.*)?",
    re.ASCII | re.DOTALL,
)
"""With cgroups of version 2, or of version 1."""


def slurm_job(cgroup: str | None) -> int | None:
    """Return the number of the job; None: the process is in no job of Slurm."""
    found = _JOB.fullmatch(cgroup or "")
    return None if found is None else int(found[1])
