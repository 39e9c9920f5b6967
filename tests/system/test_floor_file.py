"""What is left to systemd when the agent dies has to be complete, or not there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from mpsagent.system.floor_file import FloorFile

SCRIPT = Path(__file__).resolve().parent.parent.parent / "systemd/mpsagent-floor"
COMMANDS = ["set_default_active_thread_percentage 20.0", "set_default_device_pinned_mem_limit 0 4G"]


def test_it_holds_what_the_script_needs_and_root_alone_reads_it(tmp_path: Path) -> None:
    file = FloorFile("gpu0", str(tmp_path))
    file.keep("/tmp/nvidia-mps", COMMANDS)
    assert file.path.read_text().splitlines() == ["/tmp/nvidia-mps", *COMMANDS]
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["floor.gpu0"]


def test_it_is_replaced_at_once_and_only_when_it_changes(tmp_path: Path) -> None:
    """It is kept every second."""
    file = FloorFile("gpu0", str(tmp_path))
    file.keep("/a", COMMANDS)
    first = file.path.stat().st_ino
    file.keep("/a", COMMANDS)
    assert file.path.stat().st_ino == first
    file.keep("/b", COMMANDS)
    assert file.path.read_text().startswith("/b\n")


def test_where_no_limits_are_enforced_nothing_is_put_back(tmp_path: Path) -> None:
    """Also after a reload, and with the file of an agent before this one."""
    FloorFile("gpu0", str(tmp_path)).keep("/b", COMMANDS)
    file = FloorFile("gpu0", str(tmp_path))
    file.keep("/b", [])
    assert not file.path.exists()
    file.keep("/b", COMMANDS)
    assert file.path.exists()


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    """A full or read-only /run must not end the agent."""
    said = FloorFile("gpu0", str(tmp_path / "missing")).keep("/b", COMMANDS)
    assert said is not None
    assert "floor.gpu0" in said


def test_a_line_break_cannot_smuggle_in_a_command(tmp_path: Path) -> None:
    """The pipe directory comes from the policy; `quit` on a line of its own would be a command."""
    assert "line break" in str(FloorFile("gpu0", str(tmp_path)).keep("/tmp/x\nquit", COMMANDS))
    assert os.listdir(tmp_path) == []


def test_the_script_tells_each_control_daemon_its_own(tmp_path: Path) -> None:
    """Run by systemd after the agent's death: nobody is there any more to see that it went wrong."""
    programs = tmp_path / "bin"
    programs.mkdir()
    front_end = programs / "nvidia-cuda-mps-control"
    front_end.write_text(f'#!/bin/sh\n{{ echo "$CUDA_MPS_PIPE_DIRECTORY"; cat; }} >>{tmp_path}/heard\necho 50.0\n')
    front_end.chmod(0o755)
    for instance in ("gpu0", "gpu1"):
        FloorFile(instance, str(tmp_path)).keep(f"/pipe/{instance}", COMMANDS)
    script = tmp_path / "script"
    script.write_text(SCRIPT.read_text().replace("/run/mpsagent", str(tmp_path)))
    done = subprocess.run(["sh", script], env={"PATH": f"{programs}:/usr/bin:/bin"}, check=False, timeout=20)
    assert done.returncode == 0
    heard = (tmp_path / "heard").read_text().splitlines()
    assert heard == ["/pipe/gpu0", *COMMANDS, "/pipe/gpu1", *COMMANDS]


def test_the_script_tries_again_when_the_control_daemon_listens_to_another(tmp_path: Path) -> None:
    """A front-end that is turned away prints nothing, and may end with exit status 0."""
    programs = tmp_path / "bin"
    programs.mkdir()
    front_end = programs / "nvidia-cuda-mps-control"
    away = f"echo x >>{tmp_path}/turns; [ $(wc -l <{tmp_path}/turns) -gt 2 ] || exit 0"
    front_end.write_text(f"#!/bin/sh\n{away}\ncat >{tmp_path}/heard\necho 50.0\n")
    front_end.chmod(0o755)
    FloorFile("gpu0", str(tmp_path)).keep("/pipe/gpu0", COMMANDS)
    script = tmp_path / "script"
    script.write_text(SCRIPT.read_text().replace("/run/mpsagent", str(tmp_path)))
    subprocess.run(["sh", script], env={"PATH": f"{programs}:/usr/bin:/bin"}, check=True, timeout=20)
    assert (tmp_path / "heard").read_text().splitlines() == [*COMMANDS]
