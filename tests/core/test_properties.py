"""Lines of any kind, forged: nobody is hit by them. Any trouble that users, MPS and the kernel make is played in
tests/world, with the real gate; what must hold at every moment here is in the harness."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mpsagent.core import actions as act
from mpsagent.mps import events as ev
from mpsagent.wire import link
from tests.core.harness import ALICE, BOB, PATIENT, Stage
from tests.core.reducing import KINDS

PAUSES = st.sampled_from([0.0, 0.0005, 0.001, 0.002, 0.01, 0.05, 0.15, 0.2, 0.5, 1.0, 3.0, 8.0])

_FIELDS: dict[str, st.SearchStrategy[object]] = {
    "text": st.sampled_from(["quit", "ps", "x", "UI closed", "/s", "GPU-0", "status 807", ""]),
    "source": st.just("control"),
    "percent": st.floats(0, 100),
    "size": st.integers(0, 1 << 40),
    "number": st.sampled_from([*range(6), 16, 48, 470, 580, 590]),
    "uid": st.sampled_from([0, ALICE, BOB]),
    "context": st.integers(0, 4),
    "device": st.integers(0, 2),
}


@st.composite
def forgeries(draw: st.DrawFn) -> list[tuple[ev.What, dict[str, object], int, int, float]]:
    found = []
    for _ in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from(KINDS))
        values = {name: draw(_FIELDS[name]) for name in kind.fields if name in _FIELDS}
        found.append((kind, values, draw(st.integers(0, 5)), draw(st.integers(0, 3)), draw(PAUSES)))
    return found


def forge(stage: Stage, one: tuple[ev.What, dict[str, object], int, int, float]) -> None:
    """Pids of real processes where that makes sense: the worst that a forger can do."""
    kind, values, which, server, pause = one
    stage.run(pause)
    clients, servers = sorted(stage.procs), sorted(stage.mps.servers)
    of_server = [*servers, 5999, stage.mps.control, 1]
    of_client = [*clients, 1, stage.mps.control]
    about_server = "server" in kind.fields or "uid" in kind.fields
    for name in kind.fields:
        if name == "server":
            values[name] = of_server[server % len(of_server)]
        elif name == "pid":
            values[name] = of_client[which % len(of_client)] if about_server else of_server[server % len(of_server)]
    stage.forge(ev.Line(stage.now, kind, **values))


HITS = (act.SignalClient, act.SignalHeld, act.TerminateClient, act.KillControl, act.QuitControl, link.Refuse)


@settings(max_examples=50, deadline=None)
@given(forgeries(), st.booleans(), st.booleans())
def test_forged_lines_of_every_kind_hit_nobody(
    lines: list[tuple[ev.What, dict[str, object], int, int, float]], shared: bool, agent: bool
) -> None:
    """No signal, no end, no refusal, no other turn, no other limit; and who waits is served after it as before."""
    stage = Stage(PATIENT, shared=shared).up()
    alice, second = stage.client(ALICE), stage.client(ALICE, stays=True)
    stage.run(1)
    bob = stage.client(BOB)
    for one in lines:
        forge(stage, one)
    if agent:
        stage.kill_agent()
        stage.start_agent()
    stage.run(60)
    assert stage.actions(*HITS) == []
    assert [a for a in stage.actions(act.ShutdownServer) if a.force] == []  # type: ignore[attr-defined]
    assert stage.working(alice)
    assert stage.working(second)
    assert stage.turns() in ([ALICE], [])
    assert bob.pid not in stage.served
    stage.ends(alice)
    stage.ends(second)
    stage.run(5)
    assert stage.working(bob), (stage.core.state, stage.core.memories)
    for one in stage.gate.given:
        assert one.limits == stage.limits(one.uid)
    assert stage.mps.overlaps == []
