"""A client that takes its descriptor and then does nothing: MPS answers nobody until it has met its server. It ends,
and nobody else is refused or served wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.stage import A, B, C, Stage
from tests.conformance import rig as rigs
from tests.conformance.backends import other_users_python

POLICY = (
    f'[limits]\nthreads = 10\nmemory = "2G"\n[user.{A}]\nthreads = 40\n[user.{B}]\nthreads = 20\n'
    '[switch]\nafter = "1s"\ngrace = "1s"\naction = "terminate"\n'
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
