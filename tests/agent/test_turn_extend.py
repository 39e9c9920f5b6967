"""`mpsagent-cli turn extend`, by real programs at a real agent."""

from __future__ import annotations

from tests.agent.stage import A, B, Stage

POLICY = '[turn]\ntime_limit = "1s"\ngrace = "0s"\n'


def test_a_turn_lasts_longer_and_it_is_on_record_who_extended_it(stage: Stage) -> None:
    """Also across the death of the agent, where a new policy would have ended the turn long ago."""
    agent = stage.with_agent('[turn]\ntime_limit = "1h"\n')
    status, text = stage.cli(agent, "turn", "extend", str(A), "1h")
    assert "has no turn" in text
    assert status == 7
    first = stage.client(A, "sleep", 3600)
    first.working()
    second = stage.client(B)
    stage.waiting(second)
    status, text = stage.cli(agent, "turn", "extend", str(A), "1h")
    assert (status, "does not end before" in text) == (0, True), text
    assert stage.record("turn.extended", uid=A)["by"] == 0
    stage.killed(agent)
    stage.policy(POLICY)
    agent = stage.again()
    stage.waiting(second)
    stage.until(lambda: agent.api.status()["turn"]["ends"], "an end is known")
    stage.record("client.waiting", pid=second.pid)
    assert first.rc is None
    status, said = agent.api.order("extend-turn", uid=B, by="1h")
    assert status == 409, said
    for body in ({"uid": B}, {"by": "1h"}):
        assert agent.api.order("extend-turn", **body)[0] == 400, "it was accepted, and changed nothing"


def test_with_the_default_there_is_no_turn_to_extend(stage: Stage) -> None:
    """It was "alice has no turn at present", as if one would come."""
    status, said = stage.with_agent("", extra='sharing = "per-user"\n').api.order("extend-turn", uid=A, by="1h")
    assert (status, said["detail"]) == (409, "there are no turns, because all users work at the same time")
