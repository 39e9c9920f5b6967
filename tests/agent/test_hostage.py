"""A client that takes its descriptor and then does nothing: MPS answers nobody until it has met its server. It ends,
and nobody else is refused or served wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.stage import A, B, C, Stage
from tests.conformance import rig as rigs
from tests.conformance.backends import other_users_python

POLICY = (
    f'[limits]\nthreads = 10\nmemory = "2G"\n[user.{A}]\nthreads = 40\n'
    f'[user.{B}]\nthreads = 20\nswitch.after = "1s"\nswitch.grace = "1s"\n[switch]\naction = "terminate"\n'
    '[hang]\ncontrol = "2s"\nterminate = "2s"\nkill_grace = "1s"\n'
)


def fake(stage: Stage, uid: int, what: str) -> rigs.Started:
    script = stage.place / "fake_client.py"
    script.write_bytes(Path(__file__).with_name("fake_client.py").read_bytes())
    script.chmod(0o644)
    return stage.rig.run([other_users_python(uid), "-S", "-E", str(script), str(stage.rig.pipe), what], uid=uid)


@pytest.mark.parametrize("what", ["stop", "die"])
def test_a_client_that_takes_its_descriptor_and_no_more_does_not_hold_up_others(stage: Stage, what: str) -> None:
    """Stopped or dead in the middle of it, while others wait. A stopped one is resumed: it has nothing yet that could
    be lost, but it may have a reason."""
    agent = stage.with_agent(POLICY)
    taker = fake(stage, B, what)
    stage.until(lambda: "has its descriptor" in taker.read(), "the fake client has its descriptor")
    waiting = [stage.client(A, "query"), stage.client(C, "query")]
    if what == "stop":
        stage.until(lambda: "was resumed" in taker.read(), "it is resumed")
        rigs.send_signal(taker.process.pid, 9)
    for one, percent in zip(waiting, (40, 10), strict=True):
        assert one.ended(90) == 0, one.text()
        assert one.inside(percent), one.text()
    stage.no_problem(agent)


def test_a_client_that_lives_and_never_meets_its_server_holds_others_up_for_seconds(stage: Stage) -> None:
    """Not stopped, not dead: nothing is wrong with it but that it says nothing. The gate says the rest for it, and no
    server is killed, on which another client of that user works."""
    agent = stage.with_agent(POLICY.replace('control = "2s"', 'control = "30s"\nexit = "30s"\nserver = "30s"'))
    neighbour = stage.client(B, "sleep", 600)
    neighbour.working()
    taker = fake(stage, B, "sleep")
    stage.until(lambda: "has its descriptor" in taker.read(), "the fake client has its descriptor")
    second = stage.client(B, "query")
    assert second.ended(90) == 0, second.text() + stage.last_words()
    assert second.inside(20), second.text()
    assert neighbour.rc is None, neighbour.text()
    assert "has not met its server" in stage.record("client.handover_failed", pid=taker.process.pid)["why"]
    others = [stage.client(A, "query"), stage.client(C, "query")]
    for one, percent in zip(others, (40, 10), strict=True):
        assert one.ended(90) == 0, one.text()
        assert one.inside(percent), one.text()
    assert not stage.records("action", action="KillServer")
    assert not stage.records("action", action="KillControl")
    stage.no_problem(agent)


def test_a_client_that_says_it_has_met_its_server_and_has_not_costs_nobody_any_work(stage: Stage) -> None:
    """Recording 12, H2: two neighbours of other users at work lost it with the server, which was killed."""
    agent = stage.with_agent(POLICY, extra='sharing = "together"\n')
    neighbours = [stage.client(uid, "sleep", 600) for uid in (A, C)]
    for one in neighbours:
        one.working()
    taker = fake(stage, B, "acknowledge")
    stage.until(lambda: "has acknowledged" in taker.read(), "the fake client has acknowledged")
    for uid, percent in ((A, 40), (C, 10)):
        one = stage.client(uid, "query")
        assert one.ended(90) == 0, one.text() + stage.last_words()
        assert one.inside(percent), one.text()
    assert "says that it has met its server" in stage.record("client.handover_failed", pid=taker.process.pid)["why"]
    assert not stage.records("action", action="KillServer")
    assert not stage.records("action", action="KillControl")
    for one in neighbours:
        assert one.rc is None, one.text()
    stage.no_problem(agent)


def test_a_user_who_pays_for_that_reads_in_the_queue_until_when(stage: Stage) -> None:
    """By the gate's own word, and after an agent has been replaced, too: the gate says it again."""
    agent = stage.with_agent(POLICY, extra='sharing = "together"\n')
    neighbour = stage.client(A, "sleep", 600)
    neighbour.working()
    taker = fake(stage, B, "sleep")
    stage.until(lambda: "has its descriptor" in taker.read(), "the fake client has its descriptor")
    late = stage.client(B, "query")

    def told() -> bool:
        (row,) = [one for one in agent.api.get("/v1/queue")["queue"] if one["uid"] == B] or [{"why": "", "until": None}]
        return "took long to meet their server" in row["why"] and row["until"] is not None

    stage.until(told, "the queue says why and until when")
    stage.killed(agent)
    agent = stage.again()
    stage.until(told, "the next agent's queue, too")
    assert late.rc is None
