"""A client that executes a setuid program is the same process to the kernel, with the same pidfd, and runs as root or
as another user: its user may not signal it any more, and so the agent must not do that in its place. Nor may it keep
the GPU by that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.stage import A, B, C, Stage, alive
from tests.conformance.backends import other_users_python
from tests.setuid import become, setuid_python

POLICY = (
    f"[limits]\nthreads = 10\n[user.{A}]\nthreads = 40\n[user.{B}]\nthreads = 20\n"
    'switch.after = "0.1s"\nswitch.grace = "0.1s"\n[switch]\naction = "terminate"\n[hang]\nkill_grace = "0.2s"\n'
)


@pytest.mark.parametrize("uid", [0, C], ids=["root", "user"])
def test_a_client_that_has_become_a_program_of_another_user_is_not_signalled(stage: Stage, uid: int) -> None:
    agent = stage.with_agent(POLICY)
    script = stage.place / "fake_client.py"
    script.write_bytes(Path(__file__).with_name("fake_client.py").read_bytes())
    script.chmod(0o644)
    python = [other_users_python(B), "-S", "-E", str(script), str(stage.rig.pipe), "exec"]
    with setuid_python(uid) as setuid:
        became = stage.rig.run([*python, *setuid, become(uid)], uid=B)
        stage.until(lambda: f"is {uid}" in became.read(), "it runs as another user")
        stage.exact(A, 40)
        assert alive(became.process.pid)
        assert "setuid" in stage.record("action.failed", pid=became.process.pid)["text"]
        stage.record("client.ended", pid=became.process.pid)
        stage.no_problem(agent)
