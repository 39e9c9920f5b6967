"""packaging/ansible/policy.yml, played by Ansible on a node whose agent runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.stage import A, Stage

PLAY = Path(__file__).resolve().parents[2] / "packaging" / "ansible" / "policy.yml"
BESIDE = Path(sys.executable).parent


@pytest.mark.skipif(not (BESIDE / "ansible-playbook").exists(), reason="ansible-core is not installed")
def test_a_policy_is_checked_compared_and_taken_and_a_bad_one_changes_nothing(stage: Stage) -> None:
    agent = stage.with_agent(f"[user.{A}]\nactive_threads = '60%'\n")
    (stage.place / "policy.d").mkdir(mode=0o755)
    new = stage.place / "10-site.toml"

    def play(text: str) -> subprocess.CompletedProcess[str]:
        new.write_text(text)
        words = {
            "nodes": "localhost",
            "directory": stage.place,
            "file": new,
            "ansible_python_interpreter": sys.executable,
        }
        env = {
            "PATH": f"{BESIDE}:{os.environ['PATH']}", "LC_ALL": "C.UTF-8", "HOME": str(stage.place),
            "MPSAGENT_SOCKET": str(stage.place / "agent.sock"),
        }  # fmt: skip
        command = [str(BESIDE / "ansible-playbook"), "--inventory", "localhost,", "--connection", "local", str(PLAY)]
        command += [word for name, value in words.items() for word in ("--extra-vars", f"{name}={value}")]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)

    done = play(f"[user.{A}]\nactive_threads = '20%'\n")
    assert done.returncode == 0, done.stdout + done.stderr
    assert agent.api.get(f"/v1/policy/explain?user={A}")["active_threads"]["value"] == 20
    done = play(f"[user.{A}]\nthread = 30\n")
    assert done.returncode != 0
    assert "thread" in done.stdout
    assert "active_threads = '20%'" in (stage.place / "policy.d" / new.name).read_text()
    shutil.rmtree(stage.place / ".ansible", ignore_errors=True)
