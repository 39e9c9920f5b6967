"""A client that asks for partitioning by context in its environment: MPS does not hold it to its limit, and it is told
of."""

from __future__ import annotations

from tests.agent.stage import A, B, C, Stage

ASKING = {"CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING": "1"}


def test_a_client_that_asks_for_partitioning_by_context_is_told_of_while_it_lives(stage: Stage) -> None:
    """Not one that says no, and not one that has all multiprocessors anyway."""
    policy = f"[limits]\nthreads = 20\n[user.{C}]\nthreads = 100\n"
    agent = stage.with_agent(policy, extra='sharing = "together"')
    says_no = stage.client(A, "sleep", 600, **dict.fromkeys(ASKING, "0"))
    has_all = stage.client(C, "sleep", 600, **ASKING)
    for client in (says_no, has_all):
        client.working()
    asking = stage.client(B, "sleep", 600, **ASKING)
    asking.working()
    assert "] sms 132 " in asking.text()
    assert "] sms 26 " in says_no.text()
    found = stage.record("client.unlimited")
    assert (found["pid"], found["uid"]) == (asking.pid, B)
    assert f"process {asking.pid} of user {B}" in stage.problem(agent, "whatever its thread limit")
    asking.kill()
    stage.until(lambda: not any("thread limit" in one for one in agent.api.problems()), "over when it has ended")
    assert [one["pid"] for one in stage.records("client.unlimited")] == [asking.pid]
