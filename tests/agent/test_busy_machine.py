"""A machine so busy that the agent's own question comes too late, while MPS serves others."""

from __future__ import annotations

import time

from tests.agent.stage import A, B, Stage

POLICY = '[limits]\nthreads = 10\nmemory = "2G"\n[hang]\ncontrol = "8s"\n'
FRONT_END = """#!/bin/sh
# As a program on a machine with a load of a hundred: it does not come to ask.
if [ $# = 0 ] && [ -e {slow} ]; then exec sleep 600; fi
exec {control} "$@"
"""


def test_a_server_that_serves_is_not_killed_because_the_agents_question_is_late(stage: Stage) -> None:
    """The control daemon's log goes on meanwhile: it is not silent. Killed, the server took everybody's work along:
    two clients ended unserved on a machine with a load of 124."""
    slow, program = stage.place / "slow", stage.place / "nvidia-cuda-mps-control"
    program.write_text(FRONT_END.format(slow=slow, control=stage.backend.control))
    program.chmod(0o755)
    agent = stage.with_agent(POLICY, control=str(program), extra='sharing = "together"')
    worker = stage.client(A, "mind", 600)
    worker.known()
    slow.touch()
    mark, began = agent.mark(), time.monotonic()
    for number in range(5):  # 8 s for the question, then 2 s from SIGCONT to SIGKILL
        time.sleep(max(0.0, began + 4 * number - time.monotonic()))
        assert stage.client(B).ended() == 0, stage.last_words()
    assert worker.rc is None, worker.text()
    assert any("does not answer" in str(one) or "did not answer" in str(one) for one in agent.news()[mark:])
    slow.unlink()
    stage.no_problem(agent)
