"""Conditions: what a person is told to look at, and what is no reason to."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mpsagent.agent.bypass import mode_doubts
from mpsagent.agent.conditions import WAIT_SLACK, Conditions, note_conditions
from mpsagent.agent.status_line import one_line
from mpsagent.core import inputs as inp
from mpsagent.core import limits
from mpsagent.core.coordinator import Core
from mpsagent.core.engine import Memories
from mpsagent.core.inputs import Peer
from mpsagent.core.model import Attachment, Control, Drain, Held, StartFailure, State
from mpsagent.core.queue import Queue
from mpsagent.core.view import UNCONFIRMED, Turn
from mpsagent.mps.limits import Limits
from mpsagent.policy import instances
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.policy.policy import Policy
from mpsagent.snapshot.condition import Condition, problems
from mpsagent.wire import link
from tests.api.stand_in import OTHER, POLICY, START, busy_state
from tests.core.harness import ALICE, BOB, Stage
from tests.core.harness import POLICY as TURNS
from tests.policies import in_turns

USER = 20001


def turns(text: str = "") -> Policy:
    """A policy under which users take turns."""
    policy, errors = load([("p", text), ("turns", in_turns(text))])
    assert policy is not None, errors
    return policy


def test_who_has_waited_for_a_whole_turn_does_not_wait_too_long_when_it_is_over() -> None:
    """Seen: for a second after a turn, `status` said that the next user waits longer than the policy allows."""
    core, left = Core(State(turns())), 200.0
    held = Queue().put(Held(1, Peer(10, USER, USER, 1), 100.0))
    control = Control(pid=5, started=1.0, socket="/c", version=13000, proven=True)
    core.engines[None].state = replace(
        core.state, control=control, held=held, identities={USER: Identity(USER, "alice")}
    )
    core.memories = replace(core.memories, turns=replace(core.memories.turns, left=left))
    conditions = Conditions()
    for now, expected in ((left + 1.0, 0), (left + WAIT_SLACK + 1.0, 1)):
        note_conditions(conditions, core, now)
        assert len([one for one in conditions.all() if "longer than the policy allows" in one.what]) == expected


def test_a_hand_over_that_takes_longer_than_its_deadlines_is_a_wait_that_nothing_explains() -> None:
    """Users who work together wait for no turn."""
    policy, _ = load([("p", '[instance.gpu]\nsharing = "one-server"\n')])
    assert policy is not None
    core = Core(State(instances.of(policy, "gpu")))
    assert core.view().together
    core.engines[None].state = replace(
        core.state, control=Control(pid=5, started=1.0, socket="/c", version=13000, proven=True),
        held=Queue().put(Held(1, Peer(10, USER, USER, 1), 100.0, handing=100.0)),
        identities={USER: Identity(USER, "alice")},
    )  # fmt: skip
    due = 100.0 + policy.hang_server + policy.hang_control + WAIT_SLACK
    conditions = Conditions()
    for now, expected in ((due, 0), (due + 0.1, 1)):
        note_conditions(conditions, core, now)
        assert len([one for one in conditions.all() if "longer than the policy allows" in one.what]) == expected


@pytest.mark.parametrize("turn", [Turn(USER, 100.0), None], ids=["in its turn", "behind a turn that is over"])
def test_who_waits_while_a_server_starts_does_not_wait_too_long(turn: Turn | None) -> None:
    """Seen: 5 s after it had come, though a server may take `timeouts.server` (30 s) for its start."""
    core = Core(State(turns()))
    for one in (Held(1, Peer(10, USER, USER, 1), 100.0, handing=100.0), Held(2, Peer(11, OTHER, OTHER, 1), 101.0)):
        core.engines[None].state = replace(core.state, held=core.state.held.put(one))
    names = {USER: Identity(USER, "alice"), OTHER: Identity(OTHER, "bob")}
    control = Control(pid=5, started=1.0, socket="/c", version=13000, proven=True)
    core.engines[None].state = replace(core.state, control=control, identities=names)
    core.memories = replace(core.memories, turns=replace(core.memories.turns, turn=turn))
    conditions, policy = Conditions(), core.state.policy
    most = policy.hang_server + policy.hang_control
    for now, expected in ((101.0 + WAIT_SLACK + 1.0, 0), (100.0 + most, 0), (100.0 + most + WAIT_SLACK + 1.0, 1)):
        note_conditions(conditions, core, now)
        assert len([one for one in conditions.all() if "longer than the policy allows" in one.what]) == expected, now


@pytest.mark.parametrize(
    ("hook", "seconds"), [("", 10.0), ('[hooks]\npre_terminate = "/usr/bin/true"\ntimeout = "60s"\n', 70.0)]
)
def test_who_waits_for_a_turn_to_end_waits_too_long_when_it_is_not_over_by_its_time(hook: str, seconds: float) -> None:
    """After its end come 5 s for `terminate_client`, `sigkill_delay` and the policy's hook, which was not counted."""
    stage = Stage(TURNS + hook).up()
    stage.client(ALICE)
    stage.run(1)
    stage.client(BOB)
    stage.run(1)
    assert stage.core is not None
    turn, conditions = stage.core.view().turn, Conditions()
    assert turn is not None
    assert turn.ends is not None
    for more, expected in ((-1.0, 0), (1.0, 1)):
        note_conditions(conditions, stage.core, turn.ends + seconds + WAIT_SLACK + more)
        assert len([one for one in conditions.all() if "longer than the policy allows" in one.what]) == expected


def test_one_is_not_said_in_the_plural() -> None:
    """It was: "do not start (1 times in a row)"."""
    core, conditions = Core(State(turns())), Conditions()
    for count, often in ((1, ""), (3, " (3 times in a row)")):
        core.engines[None].state = replace(core.state, start_failure=StartFailure(count, 99.0, 100.0, "no device"))
        note_conditions(conditions, core, 101.0)
        assert [one.what for one in problems(conditions.all())] == [f"MPS's servers do not start{often}: no device"]


def test_a_server_that_started_with_other_limits_is_a_problem() -> None:
    """Even when all else is well: `status` ends with 1."""
    core, conditions = Core(busy_state()), Conditions()
    core.engines[None].memories = Memories(limits=limits.Memory(differs=frozenset({500})))
    note_conditions(conditions, core, START)
    (found,) = problems(conditions.all())
    assert "server 500 started with other limits" in found.what


def test_a_table_that_the_gate_cannot_write_is_a_problem() -> None:
    """/run was full, the gate's journal said so four times a second, and `status` was healthy."""
    core, conditions = Core(), Conditions()
    for number, why in ((1, "/run/mpsagent cannot be written: No space left on device"), (2, "")):
        core.receive_all(
            [inp.GateSaid(START, said) for said in (link.Hello(7, START), link.Applied(number, unkept=why))], START
        )
        note_conditions(conditions, core, START)
        assert [one.what for one in problems(conditions.all())] == ([why] if why else [])


def test_a_way_of_sharing_that_waits_for_clients_is_no_reason_to_drain_the_node() -> None:
    """Seen: after a reload `status` ended with 1 for as long as those at work went on, and Slurm's health check drained
    the node. Two users at work in turns are a problem all the same where one has come in the other's turn."""
    core = Core(busy_state())
    (first,) = core.state.clients.values()
    for came, bad in ((START - 1.0, "not sure"), (START + WAIT_SLACK + 1.0, "problem")):
        conditions, other = Conditions(), replace(first, peer=Peer(900, OTHER, OTHER, 9000), since=came)
        core.engines[None].state = replace(core.state, clients={first.pid: first, 900: other})
        core.memories = replace(core.memories, turns=replace(core.memories.turns, turn=Turn(first.uid, START)))
        note_conditions(conditions, core, START + 10.0)
        (found,) = [one for one in conditions.all() if "takes effect later" in one.what]
        assert (found.bad, 'sharing = "turns" takes effect later' in found.what) == (bad, True)


def test_the_line_of_several_instances_says_one_as_one() -> None:
    """Seen in `systemctl status`: "2 instances, 1 clients, 1 users wait"."""

    def line(clients: int, waiting: int, wrong: int, apart: int = 0) -> str:
        views = [SimpleNamespace(waiting=lambda count=count: range(count)) for count in (waiting, 0)]
        agents = [
            SimpleNamespace(
                state=SimpleNamespace(clients=range(clients if number == 0 else 0)),
                core=SimpleNamespace(view=lambda _, number=number: views[number], engines=range(daemons)),
            )
            for number, daemons in enumerate([1, 1 + apart])
        ]  # fmt: skip
        found = [Condition("it is slow")] * wrong
        return one_line(agents, found, lambda uid: None)  # type: ignore[arg-type]

    assert line(1, 1, 1) == "it is slow (1 problem); 2 instances, 1 client, 1 user waits"
    assert line(2, 0, 2) == "it is slow (2 problems); 2 instances, 2 clients, 0 users wait"
    assert line(0, 2, 0, apart=1) == "2 instances, 1 user with a control daemon, 0 clients, 2 users wait"


@pytest.mark.parametrize(
    ("clients", "drain", "said"),
    [
        (1, None, "until 1 process of 1 user has ended; at most 31m00s once another user waits"),
        (2, None, "until 2 processes of 1 user have ended; at most 31m00s once another user waits"),
        (1, Drain(START, None), "until 1 process of 1 user has ended; the policy sets no latest time"),
    ],
)
def test_until_when_the_old_way_holds_is_said(clients: int, drain: Drain | None, said: str) -> None:
    """Seen: "until 1 process of 1 user have ended"; and in a drain, in which no turn ends by time, "at most 31m00s"."""
    state, policy = busy_state(), turns(f'{POLICY}[instance.default]\nsharing = "one-server"\n')
    one = state.clients[501]
    more = {501 + n: replace(one, peer=one.peer._replace(pid=501 + n)) for n in range(clients)}
    core, conditions = Core(replace(state, drain=drain, policy=policy, clients=more)), Conditions()
    note_conditions(conditions, core, START)
    (found,) = conditions.all()
    old = 'sharing = "one-server" with one server for all users takes effect later: the old way holds '
    assert found.what == old + said


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: replace(s, gate=None), "the gate is not connected"),
        (
            lambda s: replace(s, clients={**s.clients, 7: replace(s.clients[501], connections=0)}),
            "started before the gate: 501 (alice)",
        ),
        (
            lambda s: replace(
                s,
                servers={500: replace(s.servers[500], attached={**s.servers[500].attached, 9: Attachment(START)})},
            ),
            "1 process is served by MPS without passing the gate, with unknown limits: 9",
        ),
        (lambda s: replace(s, unseen=2), "2 clients were refused, because mpsagent cannot see their processes"),
        (
            lambda s: replace(s, clients={501: replace(s.clients[501], fail_safe=True)}),
            "fallback limits, because MPS did not confirm their own or",
        ),
        (
            lambda s: replace(s, policy=replace(turns("mode = 'report'"), sharing="turns")),
            "report mode",
        ),
        (lambda s: replace(s, policy=turns("[user.bob]\nmode = 'report'")), "not enforced for user bob"),
    ],
)
def test_what_cannot_be_promised_is_said_in_plain_words(change: Any, text: str) -> None:
    """Each alone; and when all is well, nothing."""
    conditions = Conditions()
    note_conditions(conditions, Core(busy_state()), START)
    assert conditions.all() == ()
    note_conditions(conditions, Core(change(busy_state())), START)
    (found,) = conditions.all()
    assert (found.bad, text in found.text(lambda uid: "alice")) == ("not sure", True)


@pytest.mark.parametrize(
    ("modes", "text"),
    [
        ({"GPU-0": "default"}, None),
        ({"GPU-0": "prohibited"}, "the compute mode is PROHIBITED on GPU 0: no program can use it"),
        ({"GPU-0": "exclusive-process"}, None),
        ({"GPU-9": "default"}, None),
        ({}, None),
    ],
)
def test_a_compute_mode_that_no_program_can_use_is_said(modes: dict[str, str], text: str | None) -> None:
    """Of our GPUs, as far as their mode is known. The driver's default is a note of `doctor`, not of each status."""
    found = [what for _, what in mode_doubts(modes, busy_state().devices) if what is not None]
    assert (len(found) == 1 and text in found[0]) if text else found == []


def test_limits_that_mps_did_not_confirm_are_no_problem_some_time_after_their_user_has_gone() -> None:
    """The problem remained until that user's next client was admitted, and a health check drained the node for it."""
    stage, conditions = Stage(TURNS).up(), Conditions()
    alice = stage.client(ALICE)
    stage.run(1)
    assert stage.core is not None
    stage.feed(inp.GateSaid(stage.now, link.Unconfirmed(ALICE, Limits(20.0), "19.0 instead")))
    note_conditions(conditions, stage.core, stage.now)
    assert any("19.0 instead" in one.what for one in problems(conditions.all()))
    stage.ends(alice)
    stage.run(1)
    note_conditions(conditions, stage.core, stage.now + UNCONFIRMED)
    assert problems(conditions.all()) == []


def test_a_refusal_for_limits_that_this_mps_does_not_have_is_a_problem_after_the_client_has_gone() -> None:
    """It came and went between two regular looks: `status` was healthy while each client of the user was refused."""
    stage, conditions = Stage(TURNS).up(), Conditions()
    stage.client(ALICE)
    bob = stage.client(BOB)
    stage.run(1)
    assert stage.core is not None
    (held,) = stage.core.state.held.line(BOB)
    why = "none, which this driver's MPS does not have"
    refused = link.Refused(held.connection, bob.pid, BOB, why)
    stage.feed(inp.GateSaid(stage.now, link.Unconfirmed(BOB, Limits(20.0), why)), inp.GateSaid(stage.now, refused))
    assert BOB not in stage.core.state.held.users()
    note_conditions(conditions, stage.core, stage.now)
    assert any(why in one.what for one in problems(conditions.all()))
