"""What the doctor says of Slurm: whether leases can tell its jobs apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpsagent.cli import checkup_slurm
from mpsagent.cli.checkup import OK, WARNING


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine where a slurmd runs; its ``bin`` is PATH."""
    (tmp_path / "proc" / "17").mkdir(parents=True)
    (tmp_path / "proc" / "17" / "comm").write_text("slurmd\n")
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def scontrol(node: Path, *lines: str) -> None:
    path = node / "bin" / "scontrol"
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("lines", "grade", "words"),
    [
        (["echo 'PriorityType = x'; echo 'ProctrackType           = proctrack/cgroup'"], OK, "each job has a cgroup"),
        (["echo 'ProctrackType           = proctrack/linuxproc'"], WARNING, "for all processes of its user"),
        (["echo 'Unable to contact slurm controller' >&2; exit 1"], WARNING, "Unable to contact"),
        (["echo 'scontrol: error: no host' >&2; echo and more >&2; exit 1"], WARNING, "scontrol: error: no host"),
        (["echo 'ClusterName = x'"], WARNING, "no ProctrackType"),
    ],
)
def test_what_slurm_says_of_itself(node: Path, lines: list[str], grade: str, words: str) -> None:
    scontrol(node, *lines)
    (found,) = checkup_slurm.slurm(node)
    assert (found.grade, words in found.what) == (grade, True), found
    assert "\n" not in found.what, "a terminal is shown one escaped"
    assert (found.do == "") == (grade == OK), "what to do"


def test_a_controller_that_hangs_is_said(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor goes on with the other checks."""
    scontrol(node, "exec /bin/sleep 600")
    monkeypatch.setattr(checkup_slurm, "ANSWER", 0.2)
    (found,) = checkup_slurm.slurm(node)
    assert "does not answer" in found.what


def test_without_scontrol_nobody_can_say(node: Path) -> None:
    (found,) = checkup_slurm.slurm(node)
    assert found.grade == WARNING


def test_nothing_is_said_where_no_slurmd_runs(node: Path) -> None:
    """A machine that only submits jobs has Slurm's programs, too."""
    (node / "proc" / "17" / "comm").write_text("slurmctld\n")
    assert list(checkup_slurm.slurm(node)) == []
