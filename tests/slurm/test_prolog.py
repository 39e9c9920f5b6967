"""The prolog alone: nothing that a job says of itself makes a lease that the agent refuses, which drains the node."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

PROLOG = Path(__file__).resolve().parents[2] / "packaging" / "slurm" / "prolog"


def leased(
    place: Path, shown: str | bytes, settings: str, *, shell: str = "sh", fails: bool = False, **environment: str
) -> list[str]:
    """Return the words with which a job's lease is ordered. ``fails``: the prolog fails, and no lease is ordered."""
    (place / "shown").write_bytes(shown if isinstance(shown, bytes) else shown.encode())
    (place / "said").unlink(missing_ok=True)
    for name, text in (("scontrol", f"cat {place}/shown"), ("cli", f'printf "%s\\n" "$@" >{place}/said')):
        (place / name).write_text(f"#!/bin/sh\n{text}\n")
        (place / name).chmod(0o755)
    (place / "conf").write_text(f"PATH={place}:$PATH\nclient={place}/cli\nproctrack=proctrack/cgroup\n{settings}\n")
    given = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_UID": "1000",
        "MPSAGENT_SLURM_SETTINGS": str(place / "conf"),
        **environment,
    }
    done = subprocess.run(
        [shell, str(PROLOG)], env={**os.environ, **given}, capture_output=True, text=True, errors="replace", check=False
    )
    assert done.returncode == int(fails), done.stderr
    return [] if fails else (place / "said").read_text().split("\n")


@pytest.mark.parametrize(
    ("text", "threads"),
    [
        ("JobName=x Nodes=a GRES=shard:4(IDX:0)", "50.0%"),
        ("JobName=x Nodes=a GRES=shard:h200:4(0/8) Nodes=b GRES=shard:2(IDX:0)", "25.0%"),
        ("JobName=x GRES=shard:0 Nodes=a GRES=shard:4(IDX:0)", "50.0%"),
        ("JobName=x GRES=shard:08 Nodes=a GRES=shard:4(IDX:0)", "50.0%"),
        ("JobName=x GRES=shard:99999 Nodes=a GRES=gpu:1(IDX:0)", "100.0%"),
        ("JobName=x GRES=shard:99999999999999999999 Nodes=a GRES=gpu:1(IDX:0)", "100.0%"),
        ("JobName=x GRES=gpu:1 Nodes=a GRES=gpu:1(IDX:0)", "100.0%"),
    ],
)
def test_a_jobs_name_neither_drains_a_node_nor_makes_a_share_larger(tmp_path: Path, text: str, threads: str) -> None:
    words = leased(tmp_path, text, "shards=8", SLURM_JOB_GPUS="0", CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="")
    assert words[words.index("--active-threads") + 1] == threads


HOSTILE = {
    "backslash c": rb"x\c",
    "octal": rb"x\0143\143",
    "backslashes": b"\\" * 256,
    "quotes": b"'\"`$(reboot)",
    "newline": b"x\nGRES=shard:8(IDX:0) ",
    "dashes": b"-n -e --",
    "256 bytes": b"n" * 256,
    "no UTF-8": b"\xff\xfe\x80",
    "a GPU": b"x GRES=gpu:1(IDX:0)",
}


@pytest.mark.parametrize("shell", ["dash", "bash"])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_changes_no_share(tmp_path: Path, name: str, locale: str, shell: str) -> None:
    """The echo of dash ends its output at a backslash and c: such a job had a whole GPU for one shard of eight."""
    shown = b"JobId=7 JobName=%b UserId=bob(1000) Nodes=a CPU_IDs=0 Mem=0 GRES=shard:1(IDX:0)\n" % HOSTILE[name]
    job = {"SLURM_JOB_GPUS": "0", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "", "LC_ALL": locale}
    words = leased(tmp_path, shown, "shards=8", shell=shell, **job)
    assert words[words.index("--active-threads") + 1] == "12.5%"


def test_a_share_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    job = {"SLURM_JOB_GPUS": "0", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": ""}
    leased(tmp_path, "JobId=7 JobName=x Nodes=a CPU_IDs=0", "shards=8", fails=True, **job)
    assert not (tmp_path / "said").exists()


@pytest.mark.parametrize(("tasks", "each"), [("4", "7.5%"), ("301", "0.1%"), ("100000", "0.1%")])
def test_a_job_of_many_tasks_drains_no_node(tmp_path: Path, tasks: str, each: str) -> None:
    words = leased(
        tmp_path, "", 'processes="$SLURM_JOB_NTASKS"', CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="30", SLURM_JOB_NTASKS=tasks
    )
    assert [words[words.index(one) + 1] for one in ("--active-threads", "--total-active-threads")] == [each, "30.0%"]


@pytest.mark.parametrize("hook", ["epilog", "health-check", "task-prolog"])
def test_other_hooks_stand_a_setting_that_only_the_prolog_can_fill_in(tmp_path: Path, hook: str) -> None:
    """They read the same file, and have no SLURM_JOB_NTASKS: with such a line they all failed at it."""
    for name in ("scontrol", "squeue", "cli"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    settings = f"PATH={tmp_path}:$PATH\nclient={tmp_path}/cli\nknown={tmp_path}/known\nprocesses=$SLURM_JOB_NTASKS\n"
    (tmp_path / "conf").write_text(settings)
    given = {"SLURM_JOB_ID": "7", "MPSAGENT_SLURM_SETTINGS": str(tmp_path / "conf")}
    done = subprocess.run(
        ["sh", str(PROLOG.with_name(hook))], env={**os.environ, **given}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.root
def test_no_user_keeps_the_files_of_other_jobs_as_they_are() -> None:
    """Who may read a file may lock it: jobstats would have taken all later jobs of that GPU for an earlier one."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        place.chmod(0o755)
        settings = f"gpustat={place}/gpustat\ngpus={place}/gpus"
        job = {"SLURM_JOB_GPUS": "0", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": ""}
        leased(place, "", settings, **job)
        user = ["setpriv", "--reuid=2001", "--regid=2001", "--clear-groups"]
        lock = [*user, "flock", "--nonblock", str(place / "gpus/lock"), "echo", "locked"]
        assert subprocess.run(lock, capture_output=True, check=False).stdout == b""
        leased(place, "", settings, SLURM_JOB_ID="8", **job)
        assert (place / "gpus/0").read_text() == "7 1000\n8 1000\n"
        assert (place / "gpustat").stat().st_mode & 0o777 == 0o755, "it is read by others"
