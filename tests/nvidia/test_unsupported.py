"""What an old driver cannot do is a mistake of the policy, found by asking NVIDIA's own program."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mpsagent.policy.files import load
from mpsagent.policy.origins import PolicyError
from mpsagent.system.unsupported import unsupported
from tests.nvidia.fetch import Driver


def found(program: str | Path, sharing: str = "one-server") -> tuple[PolicyError, ...]:
    text = f'[instance.gpu]\ncontrol_daemon_path = "{program}"\nsharing = "{sharing}"\n'
    policy, errors = load([("policy.toml", text)])
    assert policy is not None, errors
    return asyncio.run(unsupported(policy))


def test_users_together_need_a_driver_that_knows_one_server_for_all(
    nvidia: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is started for the question, and no daemon is asked."""
    for name, value in nvidia.environment().items():
        monkeypatch.setenv(name, value)
    (mistake,) = found(nvidia.control)
    assert (mistake.line, mistake.key) == (3, "instance.gpu.sharing")
    assert "--multiuser-server" in mistake.problem
    assert 'sharing = "turns"' in mistake.hint
    assert found(nvidia.control, "turns") == ()


@pytest.mark.parametrize(
    "text",
    [
        "#!/bin/sh\nexit 244\n",  # it cannot load libcuda.so.1
        "#!/bin/sh\necho broken\nexit 1\n",
        "no program",
    ],
)
def test_a_program_that_does_not_work_says_nothing_about_the_driver(tmp_path: Path, text: str) -> None:
    """Its start will say what is wrong."""
    program = tmp_path / "control"
    program.write_text(text)
    program.chmod(0o755)
    assert found(program) == ()
    assert found(tmp_path / "missing") == ()


def test_a_program_that_others_may_change_is_not_run(tmp_path: Path) -> None:
    program = tmp_path / "control"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/run\necho CUDA MPS Control\n")
    program.chmod(0o777)
    assert found(program) == ()
    assert not (tmp_path / "run").exists()
    program.chmod(0o755)
    assert found(program)
    assert (tmp_path / "run").exists()
