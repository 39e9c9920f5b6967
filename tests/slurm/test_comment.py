"""The health check alone: the comment of a job says why it waits, and slurmctld is asked only if there is news."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CHECK = Path(__file__).resolve().parents[2] / "packaging" / "slurm" / "health-check"
TOOLS = ("awk", "cat", "cut", "date", "grep", "head", "mv", "sed", "sh", "timeout", "tr")
LEASES = "ID  NAME      WHOSE\\n3   slurm-17  user alice\\n4   slurm-18  user bob\\n5   other-1  user bob\\n"
REPORT = "job,uid,user,waited_seconds,refused\\nslurm-18,7,bob,{},{}\\nslurm-18,7,bob,{},0\\nslurm-9,7,bob,99,9\\n"


class Node:
    """A node with two jobs. ``waits``: what ``lease list --waiting`` prints; ``there``: the comment of each job."""

    def __init__(self, place: Path) -> None:
        self.place, self.waits, self.there = place, "", ""
        self.report = REPORT.format(0, 0, 0)
        self.scontrol = True

    def check(self, settings: str = "") -> list[str]:
        """Run the health check once. Return what Slurm was asked about jobs."""
        place = self.place
        (place / "waits").write_text(self.waits)
        (place / "there").write_text(self.there)
        (place / "asked").write_text("")
        (place / "cli").write_text(
            f'#!/bin/sh\ncase "$*" in probe) ;; "lease list") printf "{LEASES}" ;;\n'
            f'"lease list --waiting") cat {place}/waits ;; report*) printf "{self.report}" ;; esac\n'
        )
        (place / "squeue").write_text("#!/bin/sh\necho 17\necho 18\n")
        (place / "scontrol").write_text(
            f'#!/bin/sh\ncase "$*" in *"show node"*) echo " State=IDLE " ; exit ;; esac\n'
            f'for word; do printf "%s|" "$word"; done >>{place}/asked; echo >>{place}/asked\n'
            f'case "$*" in "show job"*) echo "JobId=17 JobName=x"; cat {place}/there ;; esac\n'
        )
        for name in ("cli", "squeue", "scontrol"):
            (place / name).chmod(0o755)
        if not self.scontrol:
            (place / "scontrol").unlink()
        tools = place / "tools"  # this machine may have a Slurm
        tools.mkdir(exist_ok=True)
        for name in TOOLS:
            (tools / name).unlink(missing_ok=True)
            (tools / name).symlink_to(shutil.which(name) or "")
        lines = [f"PATH={place}:{tools}", f"client={place}/cli", f"known={place}/known", f"comments={place}/comments"]
        (place / "conf").write_text("\n".join([*lines, "proctrack=proctrack/cgroup", settings, ""]))
        environment = {"PATH": os.environ["PATH"], "MPSAGENT_SLURM_SETTINGS": str(place / "conf")}
        done = subprocess.run(["sh", str(CHECK)], env=environment, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        return (place / "asked").read_text().splitlines()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


SAYS = "update|jobid=17|AdminComment=mpsagent: {}|"


def test_a_job_that_waits_has_the_reason_and_slurm_is_asked_once(node: Node) -> None:
    assert node.check() == []
    node.waits = "3 slurm-17 it is the turn of bob\n"
    assert node.check() == ["show|job|17|", SAYS.format("waits for the GPU: it is the turn of bob")]
    node.there = "   AdminComment=mpsagent: waits for the GPU: it is the turn of bob\n"
    assert node.check() == []
    node.waits = "3 slurm-17 MPS is starting again; you keep your place\n"
    assert node.check()[1:] == [SAYS.format("waits for the GPU: MPS is starting again; you keep your place")]


def test_a_job_that_has_waited_or_was_refused_has_that(node: Node) -> None:
    node.report = REPORT.format(2, 0, 3)
    assert node.check()[1:] == ["update|jobid=18|AdminComment=mpsagent: waited 5 s for the GPU|"]
    node.report = REPORT.format(2, 4, 3)
    (_, says) = node.check()
    assert "waited 5 s for the GPU; refused: 4 (mpsagent-cli events --kind client.refused)" in says


def test_a_comment_of_others_stays(node: Node) -> None:
    node.waits, node.there = "3 slurm-17 it is the turn of bob\n", "   AdminComment=checked by ops\n"
    assert node.check() == ["show|job|17|"]
    assert node.check() == [], "it is not asked again and again"


def test_a_jobs_name_does_not_forge_the_comment_of_others(node: Node) -> None:
    node.waits = "3 slurm-17 it is the turn of bob\n"
    node.there = "   AdminComment=mpsagent: forged\n   AdminComment=checked by ops\n"
    assert node.check() == ["show|job|17|"]


def test_a_site_may_take_another_field_or_none(node: Node) -> None:
    node.waits, node.there = "3 slurm-17 it is the turn of bob\n", "   AdminComment=checked by ops\n"
    assert "|Comment=mpsagent: waits" in node.check("comment=Comment")[1]
    assert node.check("comment=") == []


def test_a_reason_is_one_argument_whatever_is_in_it(node: Node) -> None:
    node.waits = "3 slurm-17 \"$(touch {place})`id`' AdminComment=x\x1b[2J\\n %s *\n4 slurm-99 no job of ours\n"
    assert node.check()[1] == SAYS.format("waits for the GPU: \"$(touch {place})`id`' AdminComment=x[2J\\n %s *")


def test_without_scontrol_nothing_is_written_and_nothing_fails(node: Node) -> None:
    node.waits, node.scontrol = "3 slurm-17 it is the turn of bob\n", False
    assert node.check() == []
    assert not (node.place / "comments").exists()
