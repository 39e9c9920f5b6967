"""Who a client is comes from the kernel at the gate: one that the agent cannot see is refused."""

from __future__ import annotations

from tests.agent.stage import A, Stage


def test_a_client_whose_process_cannot_be_seen_is_refused(stage: Stage) -> None:
    """An agent in a container without the host's pid namespace sees pid 0. It used to serve that and count it as ended
    at once, so the next user's turn began beside the work. Clients of its own namespace are served."""
    stage.policy("")
    agent = stage.start_agent(
        prefix=["unshare", "--propagation", "unchanged", "--pid", "--fork", "--kill-child", "--mount-proc"]
    )
    stage.answering(agent)
    stage.open(agent)
    outside = stage.client(A)
    assert outside.ended() == 10
    assert "MPS_CONNECTION_FAILED" in outside.text()
    assert "pid namespace" in stage.record("client.refused", uid=A)["why"]
    stage.until(lambda: "hostPID" in str(agent.api.status()["not_guaranteed"]), "status says it")
    inner = next(one.pid for one in stage.rig.ours() if one.parent == agent.pid)
    within = ["nsenter", f"--pid=/proc/{inner}/ns/pid", *stage.backend.client, "query"]
    started = stage.rig.run(within, env=stage.rig.environment())
    stage.until(lambda: started.process.poll() is not None, "a client inside ends")
    assert started.process.returncode == 0, started.read()
    stage.record("client.connected", uid=0)
    stage.killed(agent)  # unshare does not pass SIGTERM on
