"""The promises over random interleavings of what users, MPS, the kernel and forgers do. What must hold at every moment
is in the harness; here are the programs that are played, and what must hold at their end. Limits, the
order of turns and an idle GPU are judged in tests/world, beside the real gate."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.mps import events as ev
from mpsagent.wire import link
from tests.core.harness import ALICE, BOB, CAROL, DAVE, PATIENT, POLICY, USERS, Stage
from tests.core.reducing import KINDS

UIDS = st.sampled_from(USERS)
PAUSES = st.sampled_from([0.0, 0.0005, 0.001, 0.002, 0.01, 0.05, 0.15, 0.2, 0.5, 1.0, 3.0, 8.0])
LAGS = st.sampled_from([0.0002, 0.001, 0.01, 0.05])


class Step(NamedTuple):
    pause: float
    what: str
    uid: int
    which: int


def programs(*kinds: str, most: int = 30) -> st.SearchStrategy[list[Step]]:
    step = st.builds(Step, PAUSES, st.sampled_from(kinds), UIDS, st.integers(0, 7))
    return st.lists(step, min_size=most // 4, max_size=most)


def log_lags(seed: int, lost: float) -> Callable[[], float | None]:
    """Lines come a moment later, seconds later, or never."""
    chance = random.Random(seed)

    def lag() -> float | None:
        if chance.random() < lost:
            return None
        return chance.choice([0.0, 0.002, 0.002, 0.02, 0.3, 2.0])

    return lag


def play(stage: Stage, program: list[Step]) -> None:
    for step in program:
        stage.run(step.pause)
        live = [stage.procs[pid] for pid in sorted(stage.procs)]
        proc = live[step.which % len(live)] if live else None
        server = next(iter(stage.mps.servers.values()), None)
        match step.what:
            case "client":
                stage.client(step.uid)
            case "contexts":
                stage.client(step.uid, contexts=3)
            case "stubborn":
                stage.client(step.uid, stubborn=True)
            case "leftover":
                stage.client(step.uid, stays=True, stubborn=True)
            case "frozen":
                stage.client(step.uid, stopped=True, stays=True)
            case "leave" if proc is not None:
                stage.ends(proc)
            case "freeze" if proc is not None:
                proc.stopped = True
            case "detach" if proc is not None and proc.server is not None:
                stage.detaches(proc)
            case "come back" if proc is not None and proc.key in stage.gate.connections:
                stage.comes_back(proc)
            case "end" if proc is not None:
                stage.feed(inp.EndOrdered(stage.now, proc.pid, 0, bool(step.which % 2)))
            case "reuse" if proc is not None:
                stage.ends(proc)
                stage.client(step.uid, pid=proc.pid)
            case "fault" if server is not None:
                stage.mps.fault(server)
            case "freeze server" if server is not None:
                server.stopped = True
            case "kill server" if server is not None:
                stage.mps.exited(server)
            case "freeze daemon":
                stage.mps.stopped = bool(stage.mps.control)
            case "crash":
                stage.crash_control()
            case "deaf":
                stage.front_end_fails = not stage.front_end_fails
            case "reload":
                texts = [POLICY, PATIENT, "enforce = false\n" + POLICY, "", POLICY.replace("60", "30")]
                stage.reload(texts[step.which % len(texts)])
            case "deny":
                stage.reload(POLICY + '[user.carol]\naccess = "deny"\n')
            case "drain":
                until = stage.now + 5 if step.which % 2 else None
                stage.feed(inp.DrainOrdered(stage.now, stage.now, until))
            case "resume":
                stage.feed(inp.DrainResumed(stage.now))
            case "restart":
                stage.feed(inp.RestartOrdered(stage.now, 0))
            case "cut":
                stage.cut_link()
            case "connect":
                stage.cut_link()
                if stage.core is not None:
                    stage.connect()
            case "kill agent":
                stage.kill_agent()
            case "agent" if stage.core is None:
                stage.start_agent()
            case "forget":
                stage.know(*[uid for uid in USERS if uid != step.uid])


def settle(stage: Stage, *, text: str = POLICY) -> None:
    """All that was broken is mended by hand; what MPS and clients do goes on."""
    stage.front_end_fails = stage.gate_deaf = False
    stage.mps.can_start, stage.start_fails = True, False
    if stage.core is None:
        stage.start_agent()
    elif not stage.link:
        stage.connect()
    stage.know(*USERS)
    stage.feed(inp.DrainResumed(stage.now), inp.RestartOrdered(stage.now, 0))
    stage.reload(text)


BENIGN = ("client", "client", "client", "contexts", "stubborn", "leave", "leave", "leave")
GATE = ("cut", "connect", "connect", "kill agent", "agent", "agent")
WILD = (
    *BENIGN, "leftover", "frozen", "freeze", "detach", "come back", "end", "reuse", "fault", "freeze server",
    "kill server", "freeze daemon", "crash", "deaf", "reload", "deny", "drain", "resume", "restart", "forget",
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    programs(*WILD, *GATE), st.booleans(), LAGS, st.integers(0, 999), st.sampled_from([0.0, 0.0, 0.1]), st.booleans()
)
def test_after_any_trouble_everybody_is_served_again(
    program: list[Step], shared: bool, lag: float, seed: int, lost: float, named: bool
) -> None:
    """Promise 4: within the deadlines, without a hand. Who waits is served without coming anew. And it does not decide
    without end."""
    stage = Stage(shared=shared, lag=lag, log_lag=log_lags(seed, lost), named=named).up()
    play(stage, program)
    stage.run(5)
    seconds = stage.now - 1000.0
    assert len(stage.done) <= 100 + 10 * stage.inputs + 5 * seconds, (len(stage.done), stage.inputs, seconds)
    assert stage.ticks <= 50 + 20 * stage.inputs + 25 * seconds
    settle(stage)
    last = [stage.client(uid) for uid in (DAVE, CAROL, BOB, ALICE)]
    waits = len({p.uid for p in stage.procs.values()}) + 1
    for _ in range(waits):
        stage.run(15 + 5 + 30 + 10)
        for proc in last:
            if proc.pid in stage.served and stage.working(proc):
                stage.ends(proc)
    for proc in last:
        assert proc.pid in stage.served or stage.procs.get(proc.pid) is not proc, (
            proc,
            stage.core.state,
            stage.core.memories,
        )


# --- forged lines -----------------------------------------------------------------------------------------------------

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
