"""Without it, users of another pipe directory than NVIDIA's run outside MPS, and nobody notices."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from mpsagent.system.user_environment import write_user_environment

SYSTEMD = Path(__file__).resolve().parent.parent.parent / "systemd"


def test_every_user_can_read_it_and_only_it_is_there(tmp_path: Path) -> None:
    """The agent's umask is 0077."""
    before = os.umask(0o077)
    try:
        assert write_user_environment({"CUDA_MPS_PIPE_DIRECTORY": "/run/mps/gpu0"}, str(tmp_path / "user.env")) is None
    finally:
        os.umask(before)
    assert (tmp_path / "user.env").read_text() == "CUDA_MPS_PIPE_DIRECTORY=/run/mps/gpu0\n"
    assert (tmp_path / "user.env").stat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["user.env"]


def test_with_the_default_there_is_nothing_to_say(tmp_path: Path) -> None:
    """The policy may have been changed back."""
    write_user_environment({"CUDA_MPS_PIPE_DIRECTORY": "/run/mps/gpu0"}, str(tmp_path / "user.env"))
    assert write_user_environment({"CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps"}, str(tmp_path / "user.env")) is None
    assert os.listdir(tmp_path) == []


def test_what_a_shell_would_read_otherwise_is_refused(tmp_path: Path) -> None:
    """And the one from before is wrong by then."""
    path = tmp_path / "user.env"
    write_user_environment({"CUDA_MPS_PIPE_DIRECTORY": "/run/mps/gpu0"}, str(path))
    for bad in ("/run/my mps", "/run/mps\nLD_PRELOAD=/tmp/x", "/run/$HOME", '/run/"mps"'):
        assert "cannot stand" in str(write_user_environment({"CUDA_MPS_PIPE_DIRECTORY": bad}, str(path)))
        assert not path.exists()
    assert "user.env" in str(
        write_user_environment({"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}, str(tmp_path / "missing/user.env"))
    )


def test_shells_and_user_services_get_it(tmp_path: Path) -> None:
    """Both readers, as they are installed."""
    write_user_environment({"CUDA_MPS_PIPE_DIRECTORY": "/run/mps/gpu0"}, str(tmp_path / "user.env"))
    for name, tail in (("mpsagent.profile.sh", 'echo "CUDA_MPS_PIPE_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY"'),
                       ("50-mpsagent.environment-generator", "")):  # fmt: skip
        text = (SYSTEMD / name).read_text().replace("/run/mpsagent", str(tmp_path))
        done = subprocess.run(["sh", "-c", f"{text}\n{tail}"], capture_output=True, text=True, check=True, env={})
        assert done.stdout == "CUDA_MPS_PIPE_DIRECTORY=/run/mps/gpu0\n", name


def test_a_gpu_of_its_own_is_number_0_for_users(tmp_path: Path) -> None:
    """PyTorch counts GPUs by NVML, which shows all of the machine."""
    path = tmp_path / "user.env"
    wanted = {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert write_user_environment(wanted, str(path)) is None
    assert path.read_text() == "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps\nCUDA_VISIBLE_DEVICES=0,1\n"
