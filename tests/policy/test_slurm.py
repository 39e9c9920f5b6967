"""The jobs of Slurm by the names of their cgroups, as slurmstepd makes them."""

from __future__ import annotations

import pytest

from mpsagent.policy.slurm import slurm_job


@pytest.mark.parametrize(
    ("cgroup", "job"),
    [
        ("/system.slice/slurmstepd.scope/job_17/step_0/user/task_0", 17),
        ("/system.slice/node1_slurmstepd.scope/job_17", 17),
        ("/slurm/uid_1001/job_17/step_batch", 17),
        ("/slurm_node1/uid_1001/job_17", 17),
        ("/system.slice/slurmstepd.scope/job_17/step_0/libpod-3f.scope", 17),
        ("/user.slice/user-1001.slice/user@1001.service/system.slice/slurmstepd.scope/job_17", None),
        ("/user.slice/slurm/uid_1001/job_17", None),
        ("/system.slice/slurmstepd.scope/job_", None),
        ("/system.slice/slurmstepd.scope", None),
        ("/slurm/uid_1001/job_17x", None),
        ("/", None),
        (None, None),
    ],
)
def test_a_process_is_of_the_job_whose_cgroup_root_has_made(cgroup: str | None, job: int | None) -> None:
    assert slurm_job(cgroup) == job
