"""The warning before a turn's end, where programs see it: real processes of real users."""

from __future__ import annotations

from tests.agent.stage import A, B, Stage

POLICY = """
[limits]
active_threads = '50%'
[turn]
time_limit = "1s"
grace = "1h"
warning_signal = "SIGUSR1"
"""


def test_a_program_gets_the_signal_and_the_event_says_until_when_and_why(stage: Stage) -> None:
    """The stand-in ends well at it, as a script that saves, and the next user is served an hour early."""
    agent = stage.with_agent(POLICY)
    first = stage.client(A, "sleep", 3600)
    first.working()
    second = stage.client(B)
    assert first.ended() == 0  # it would have worked for an hour
    assert second.ended() == 0
    assert f"while user {B} waits; its turn ends in" in stage.record("turn.warning", uid=A)["reason"]
    said = [one["sentence"] for one in agent.api.ask("/v1/events?limit=1000")[1]["events"]]
    assert [one for one in said if "SIGUSR1" in one and f"client {first.pid}" in one], said


def test_a_program_that_does_not_handle_the_signal_is_not_ended_by_it(stage: Stage) -> None:
    """It died in the middle of a kernel, which is a fault for all on its server."""
    agent = stage.with_agent(POLICY.replace('"1h"', '"2s"'))
    first = stage.client(A, "spin", 3600)
    first.working()
    second = stage.client(B)
    text = stage.record("action.done", action="WarnClient", pid=first.pid)["text"]
    assert text == "nothing was sent: the program does not handle SIGUSR1"
    assert second.ended() == 0
    assert stage.records("action.done", action="TerminateClient", pid=first.pid), "it was ended through MPS"
    assert agent.api.problems() == []
