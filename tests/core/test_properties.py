"""The promises over random interleavings of what users, MPS and the kernel do."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import event, given, settings
from hypothesis import strategies as st

from mpsagent.core import actions as act
from mpsagent.core.decide import Memory, decide, end_client
from mpsagent.core.world import Drain, World, exceeds
from tests.core.harness import ALICE, BOB, CAROL, DAVE, POLICY, Toy, policy

PATIENT = POLICY.replace('"10s"', '"1h"')
UIDS = st.sampled_from([ALICE, BOB, CAROL, DAVE])
PAUSES = st.sampled_from([0.0, 0.001, 0.01, 0.05, 0.054, 0.06, 0.1, 0.2, 0.5, 1.0, 3.0, 8.0])


class Step(NamedTuple):
    pause: float
    what: str
    uid: int
    which: int


def steps(*kinds: str, most: int = 25) -> st.SearchStrategy[list[Step]]:
    return st.lists(st.builds(Step, PAUSES, st.sampled_from(kinds), UIDS, st.integers(0, 5)), max_size=most)


def play(toy: Toy, program: list[Step]) -> None:
    for step in program:
        toy.run(step.pause)
        live = sorted(toy.procs)
        pid = live[step.which % len(live)] if live else None
        server = toy.server
        match step.what:
            case "client":
                toy.client(step.uid)
            case "stubborn":
                toy.client(step.uid, stubborn=True)
            case "frozen":
                toy.client(step.uid, stopped=True)
            case "leave" if pid is not None:
                toy.leave(pid)
            case "end" if pid is not None:
                toy.memory = end_client(
                    toy.world(), toy.memory, pid, toy.now, reason="asked", rule="by root", at_once=False
                )
                toy._wake()
            case "reuse" if pid is not None:
                uid = toy.procs[pid].uid
                toy.leave(pid)
                if pid not in toy.pending:
                    toy.client(uid, pid=pid)
            case "fault":
                toy.fault()
            case "freeze server" if server is not None:
                server.stopped = True
            case "kill server" if server is not None:
                toy._exited(server)
            case "freeze daemon":
                toy.control_stopped = True
                toy._wake()  # the agent looks at the process now and then
            case "crash":
                toy.crash_control()
            case "deaf":
                toy.front_end_fails = not toy.front_end_fails
            case "reload":
                toy.policy = policy([POLICY, PATIENT, "enforce = false\n" + POLICY, ""][step.which % 4])
                toy._wake()
            case "forget":
                toy.identities.pop(step.uid, None)
                toy._wake()
            case "drain":
                toy.drain = None if toy.drain else Drain(toy.now, toy.now + 5 if step.which % 2 else None)
                toy._wake()
            case "stubborn resume":
                toy.never_resumes = True
    toy.run(5)


# Not "kill server": one that is killed by somebody within the agent's reaction time after it became Ready hands its
# limits to the next one, and nothing can be done about that.
BENIGN = ("client", "client", "client", "stubborn", "leave", "leave")
HOSTILE = (
    *BENIGN,
    "kill server",
    "frozen",
    "end",
    "reuse",
    "fault",
    "freeze server",
    "freeze daemon",
    "crash",
    "deaf",
    "reload",
)
HOSTILE = (*HOSTILE, "forget", "drain", "stubborn resume")


@settings(max_examples=150, deadline=None)
@given(steps(*BENIGN, most=40), st.floats(0.0005, 0.03), st.sampled_from([POLICY, PATIENT]))
def test_no_first_client_gets_more_than_its_policy(program: list[Step], lag: float, text: str) -> None:
    """Promise 1, for an agent that decides within 30 of the 55 ms that there are."""
    toy = Toy(text, lag=lag).up()
    play(toy, program)
    for pid, uid, limits in toy.given:
        assert not exceeds(limits, toy.limits(uid)), (pid, uid, limits)
    event(f"first clients: {min(len(toy.given), 10)}")


@settings(max_examples=60, deadline=None)
@given(steps("client", "client", "leave", most=30), st.floats(0.0005, 0.02))
def test_first_clients_that_had_to_wait_for_another_user_get_exactly_their_policy(
    program: list[Step], lag: float
) -> None:
    toy = Toy(PATIENT, lag=lag).up()
    for step in program:
        toy.run(0.5 + step.pause)  # nobody dies while he waits, so each change has its window
        if step.what == "client":
            toy.client(step.uid)
        else:
            connected = [p for p in toy.procs if p in toy.served]
            if connected:
                toy.leave(connected[step.which % len(connected)])
    for pid, uid, limits in toy.given:
        assert limits == toy.limits(uid), (pid, uid, limits)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 40),
            st.sampled_from(["client", "client", "stubborn", "leave", "frozen"]),
            st.integers(0, 5),
        ),
        max_size=30,
    ),
    st.floats(0.0005, 0.05),
)
def test_the_wait_for_a_turn_is_bounded_whatever_the_holder_does(
    doings: list[tuple[float, str, int]], lag: float
) -> None:
    """Promise 2: after + grace, and hang.terminate for each client that is stopped, because the daemon waits for it."""
    toy = Toy(lag=lag).up()
    toy.client(ALICE)
    toy.run(1)
    frozen = 0
    bob = toy.client(BOB)
    for when, what, which in doings:
        if what == "leave":

            def go(which: int = which) -> None:
                mine = [p for p, proc in sorted(toy.procs.items()) if proc.uid == ALICE]
                if mine:
                    toy.leave(mine[which % len(mine)])

            toy.at(when, go)
        else:
            frozen += what == "frozen"
            how = {"stubborn": what == "stubborn", "stopped": what == "frozen"}
            toy.at(when, lambda how=how: toy.client(ALICE, **how))
    toy.run(18 + 5 * frozen)
    assert bob in toy.served
    assert toy.served[bob] - toy.arrived[bob] <= 10 + 5 + 5 * frozen + 2
    assert bob not in toy.hurt


@settings(max_examples=100, deadline=None)
@given(steps("client", "client", "stubborn", "frozen", "leave", "end", "reuse", most=30), st.floats(0.0005, 0.05))
def test_ending_clients_hurts_nobody_else(program: list[Step], lag: float) -> None:
    """Promise 3: a signal comes after terminate_client, or when there is no neighbour to protect. Clients that are
    ended together do not count as innocent."""
    toy = Toy(PATIENT, lag=lag).up()
    play(toy, program)
    toy.run(60)
    ended = {a.pid for a in toy.actions(act.TerminateClient) if isinstance(a, act.TerminateClient)}
    assert toy.hurt <= ended
    for at, action in toy.done:
        if isinstance(action, act.SignalClient):
            asked = [t for t, a in toy.done if isinstance(a, act.TerminateClient) and a.pid == action.pid and t <= at]
            assert asked, action


@settings(max_examples=250, deadline=None)
@given(steps(*HOSTILE, most=30), st.floats(0.0005, 0.1))
def test_whatever_happens_the_decisions_stay_sane(program: list[Step], lag: float) -> None:
    """In the harness: no action without rule and reason, nothing new when asked twice at the same time, a deadline that
    lies in the future, no signal to another process. Here: no storm of actions, and rest when nothing happens."""
    toy = Toy(lag=lag).up()
    play(toy, program)
    seconds = toy.now - 1000.0
    assert len(toy.done) <= 40 + 8 * toy.events + 4 * seconds, (len(toy.done), toy.events, seconds)
    toy.run(300)
    before = len(toy.done)
    toy.run(100)
    # At most a nudge of the server each second and a look at the daemon every ten: a client that nothing ends, with a
    # user behind it.
    assert len(toy.done) - before <= 115


@settings(max_examples=100, deadline=None)
@given(steps(*[k for k in HOSTILE if k not in ("deaf", "drain", "stubborn resume", "reload")], most=25))
def test_after_any_trouble_everybody_is_served_again(program: list[Step]) -> None:
    """Promise 4: within the deadlines, without a hand."""
    toy = Toy().up()
    play(toy, program)
    toy.identities.clear()
    for pid in sorted(toy.procs):
        toy.leave(pid)
    toy.run(150)
    if toy.memory.hangs.failed:
        event("given up")
        return
    pid = toy.client(DAVE)
    toy.run(10)
    assert pid in toy.served, toy.state


@settings(max_examples=60, deadline=None)
@given(steps(*[k for k in HOSTILE if k not in ("reload", "drain")], most=25))
def test_without_enforcement_no_interleaving_changes_anything(program: list[Step]) -> None:
    toy = Toy("enforce = false\n" + POLICY).up()
    play(toy, [step for step in program if step.what != "end"])
    toy.run(100)
    allowed = {act.Report, act.Reconcile, act.StartControl, act.OpenDoor}
    assert {type(a) for _, a in toy.done if a.enforce} <= allowed
    assert len(toy.done) <= 60 + 4 * toy.events + 2 * (toy.now - 1000.0)


@settings(max_examples=40, deadline=None)
@given(steps(*HOSTILE, most=20))
def test_the_same_happenings_give_the_same_actions(program: list[Step]) -> None:
    first, second = Toy().up(), Toy().up()
    play(first, program)
    play(second, program)
    assert first.done == second.done


def test_a_crowd_is_decided_upon_with_few_actions() -> None:
    """48 clients and 200 who wait."""
    toy = Toy(PATIENT).up()
    for _ in range(48):
        toy.client(ALICE)
    toy.run(1)
    before = len(toy.done)
    for i in range(200):
        toy.client([BOB, CAROL, DAVE][i % 3])
    toy.run(1)
    assert len(toy.done) - before <= 3


def test_an_empty_world_decides_nothing_it_cannot_know() -> None:
    toy = Toy()
    found = decide(World(state=toy.state, policy=toy.policy), Memory(), 5.0)
    assert [type(a) for a in found.actions] == []
