"""A machine so busy that the agent's own question comes too late, while MPS serves others."""

from __future__ import annotations

import socket
import subprocess
import time

from tests.agent.stage import A, B, Stage

POLICY = '[limits]\nactive_threads = "10%"\nmemory_limit = "2G"\n[timeouts]\ncontrol_daemon = "5s"\n'


def test_a_server_that_serves_is_not_killed_because_the_agents_question_is_late(stage: Stage) -> None:
    """The control daemon's log goes on meanwhile: it is not silent. Killed, the server took everybody's work along:
    two clients ended unserved on a machine with a load of 124. Here the agent alone finds another socket where the
    daemon's is, at which no one answers."""
    stage.killed(stage.with_agent(POLICY, extra='sharing = "one-server"'))  # gate and daemon stay
    agent = stage.start_agent(prefix=["unshare", "--mount", "--propagation", "private"])
    stage.answering(agent)
    stage.until(lambda: not stage.waits_for(agent), "the agent is ready")
    worker = stage.client(A, "mind", 600)
    worker.known()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.bind(str(stage.place / "deaf"))
        deaf.listen()
        enter = ["nsenter", "-t", str(agent.started.process.pid), "-m"]
        hidden = f"{stage.hidden()}/control_privileged"
        subprocess.run([*enter, "mount", "--bind", str(stage.place / "deaf"), hidden], check=True)
        mark, began = agent.mark(), time.monotonic()

        def said() -> bool:
            told = str(agent.news()[mark:])
            return "does not answer" in told or "did not answer" in told

        number = 0
        while number < 4 or not said():  # 5 s for the question, then 2 s from SIGCONT to SIGKILL
            time.sleep(max(0.0, began + 3 * number - time.monotonic()))
            assert stage.client(B).ended() == 0, stage.last_words()
            number += 1
        assert worker.rc is None, worker.text()
        subprocess.run([*enter, "umount", hidden], check=True)
    stage.no_problem(agent)
