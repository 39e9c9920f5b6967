"""The warning before a turn's end, where programs see it: real processes of real users, a real hook."""

from __future__ import annotations

import json
from pathlib import Path

from tests.agent.stage import A, B, Stage

POLICY = """
[limits]
active_threads = '50%'
[turn]
time_limit = "1s"
grace = "1h"
warning_signal = "SIGUSR1"
[hooks]
turn_warning = "{hook}"
"""


def test_a_program_gets_the_signal_and_the_hook_says_until_when_and_why(stage: Stage) -> None:
    """The stand-in ends well at it, as a script that saves, and the next user is served an hour early."""
    hook, told = Path(stage.place / "warn"), Path(stage.place / "told")
    hook.write_text(f"#!/bin/sh\ncat > {told}.new && mv {told}.new {told}\n")
    hook.chmod(0o755)
    agent = stage.with_agent(POLICY.format(hook=hook))
    first = stage.client(A, "sleep", 3600)
    first.working()
    second = stage.client(B)
    assert first.ended() == 0  # it would have worked for an hour
    assert second.ended() == 0
    stage.until(told.exists, "the hook has written")
    subject = json.loads(told.read_text())
    assert (subject["uid"], subject["pids"]) == (A, [first.pid])
    assert 3500 < subject["seconds"] <= 3600
    assert f"while user {B} waits; its turn ends in" in subject["reason"]
    said = [one["sentence"] for one in agent.api.ask("/v1/events?limit=1000")[1]["events"]]
    assert [one for one in said if "SIGUSR1" in one and f"client {first.pid}" in one], said


def test_a_program_that_does_not_handle_the_signal_is_not_ended_by_it(stage: Stage) -> None:
    """It died in the middle of a kernel, which is a fault for all on its server."""
    agent = stage.with_agent(POLICY.partition("[hooks]")[0].replace('"1h"', '"2s"'))
    first = stage.client(A, "spin", 3600)
    first.working()
    second = stage.client(B)
    text = stage.record("action.done", action="WarnClient", pid=first.pid)["text"]
    assert text == "nothing was sent: the program does not handle SIGUSR1"
    assert second.ended() == 0
    assert stage.records("action.done", action="TerminateClient", pid=first.pid), "it was ended through MPS"
    assert agent.api.problems() == []
