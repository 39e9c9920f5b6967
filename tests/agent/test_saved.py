"""What an agent keeps for the next one, and what it writes down of the time between them: nothing lost, nothing twice,
and nothing done to a process that was not meant."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from mpsagent.agent import saved
from mpsagent.agent.node import Node
from mpsagent.agent.saved import ROWS
from mpsagent.api import without_agent
from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core import transitions as tr
from mpsagent.core.coordinator import Core
from mpsagent.core.inputs import Peer
from mpsagent.core.sessions import Sessions
from mpsagent.mps.limits import Limits
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.system.store import Store, StorePart
from mpsagent.wire import link
from tests.core.said import knocked, known
from tests.policies import in_turns

NOW = 1000.0
KEYS = tuple(
    f"{where}{key}" for where in ("", "big/", "small/", "gpu0/", "gpu1/", "new/", "newer/")
    for key in ("drain", "served", "turn", *saved.OF_NODE)
)  # fmt: skip
DRAIN = {"since": 10.0, "until": None, "restart": False}
ALICE, BOB = Peer(71, 1001, 1001, 5), Peer(72, 1002, 1002, 6)


def core(text: str = '[turn]\ntime_limit = "10s"\ngrace = "20s"\n') -> Core:
    """With two users whose names are known, a control daemon and a gate that has not told anything yet."""
    text = f"[limits]\nactive_threads = '20%'\n{text}"
    policy, errors = load([("p", text), ("turns", in_turns(text))])
    assert policy is not None, errors
    found = Core()
    identities = {1001: Identity(1001, "alice"), 1002: Identity(1002, "bob")}
    found.absorb([
        inp.PolicyChanged(NOW, policy), inp.PeopleKnown(NOW, identities),
        inp.ControlRuns(NOW, 50, NOW - 1, "/p/control"),
    ])  # fmt: skip
    return found


def told(*more: inp.Input) -> list[inp.Input]:
    return [inp.GateSaid(NOW, link.Hello(60, 1000.0)), *more, inp.GateSaid(NOW, link.Synced())]


def at_work(peer: Peer = ALICE, since: float = 900.0) -> inp.GateSaid[link.Known]:
    return known(NOW, peer, since, Limits(20.0))


def holder(one: Core, events: list[inp.Input]) -> int:
    """Whose turn it is once MPS has said which servers there are, and the gate works by what it is told."""
    actions = one.receive_all([*events, inp.ServersListed(NOW, {}, frozenset())], NOW).actions
    for action in actions:
        if isinstance(action, act.TellGate) and isinstance(action.message, link.Admissions):
            one.receive(inp.GateSaid(NOW, link.Applied(action.message.number)), NOW)
    turn = one.view().turn
    assert turn is not None
    return turn.uid


def kinds(actions: tuple[act.Action, ...]) -> list[str]:
    return [one.kind if isinstance(one, act.Report) else type(one).__name__ for one in actions]


# --- a drain ----------------------------------------------------------------------------------------------------------


def test_a_drain_goes_on() -> None:
    (order,) = saved.drain({"drain": {"since": 10.0, "until": 70.0}}, NOW)
    assert order == inp.DrainOrdered(NOW, 10.0, 70.0)
    assert saved.drain({"drain": {"since": 10, "until": None}}, NOW) == [inp.DrainOrdered(NOW, 10.0, None)]
    (by_root,) = saved.drain({"drain": {"since": 10, "until": None, "by": 0}}, NOW)
    assert by_root == inp.DrainOrdered(NOW, 10.0, None, by=0)
    assert saved.drain({}, NOW) == []


@pytest.mark.parametrize("broken", [None, 7, [], {"since": 1.0}, {"since": "x", "until": None}, {"until": 3.0}])
def test_what_is_no_drain_is_none(broken: object) -> None:
    assert saved.drain({"drain": broken}, NOW) == []


# --- who is being ended -----------------------------------------------------------------------------------------------


def ladder(step: str, peer: Peer = ALICE, start: int | None = None) -> dict[str, Any]:
    row = [peer.pid, peer.start if start is None else start, peer.uid, "its turn is over", "turn.time_limit", step, NOW]
    return {"ending": [row]}


def resumed(kept_values: dict[str, Any], *clients: inp.Input) -> tuple[act.Action, ...]:
    one = core()
    return one.receive_all([*told(*clients), saved.ending(kept_values, NOW)], NOW).actions


def test_what_mps_was_asked_is_not_asked_again() -> None:
    """A second terminate_client hangs the daemon until the process exits (conformance scenario X8)."""
    actions = resumed(ladder("asked"), at_work())
    (signal,) = [one for one in actions if isinstance(one, act.SignalClient)]
    assert (signal.pid, signal.start, signal.signal) == (ALICE.pid, ALICE.start, 15)
    assert "TerminateClient" not in kinds(actions)


def test_no_other_process_is_put_on_the_ladder() -> None:
    """Numbers are used again, and users differ."""
    hits = {"SignalClient", "TerminateClient", "RunHook"}
    assert not hits & set(kinds(resumed(ladder("asked", start=4), at_work()))), "another process with that number"
    assert not hits & set(kinds(resumed(ladder("asked"), at_work(ALICE._replace(uid=1002))))), "of another user"
    assert not hits & set(kinds(resumed(ladder("asked")))), "it has ended"


@pytest.mark.parametrize("broken", [None, 7, "x", [7], [["x"] * 7], [[1, 2]], {"a": 1}])
def test_what_is_no_ladder_is_none(broken: object) -> None:
    assert saved.ending({"ending": broken}, NOW).ending == ()


def test_what_is_kept_is_what_the_next_one_reads() -> None:
    """Both ends of the file together."""
    one = core()
    one.receive_all(told(at_work()), NOW)
    one.receive(inp.EndOrdered(NOW, ALICE.pid, 0, True), NOW)
    rows = saved.ending_rows(one)
    assert [row[:3] for row in rows] == [[ALICE.pid, ALICE.start, ALICE.uid]]
    assert saved.ending({"ending": rows}, NOW).ending[0][:3] == (ALICE.pid, ALICE.start, ALICE.uid)


# --- whose turn it is -------------------------------------------------------------------------------------------------


def waits(since: float = 980.0) -> inp.GateSaid[link.Knock]:
    return knocked(NOW, 1, BOB, since)


def test_a_turn_in_its_grace_is_warned_once_and_its_grace_does_not_begin_anew() -> None:
    """Otherwise an agent that is restarted now and then lets a turn last for ever."""
    first = core()
    first.receive_all(told(at_work(), waits()), NOW)
    row = saved.turn_row(first)
    assert row is not None
    assert row[:4] == [1001, 900.0, 980.0, NOW], "warned now, ten seconds after bob came"
    second, later, events = core(), NOW + 15.0, told(at_work(), waits())
    saved.take_up_turn(second, {"turn": row}, events, later)
    assert "turn.warning" not in kinds(second.receive_all(events, later).actions)
    assert "turn.ending" in kinds(second.tick(NOW + 20.1).actions), "20 s after the first warning"
    third = core()
    assert "turn.warning" in kinds(third.receive_all(events, later).actions), "without what was kept it would be"


def test_a_turn_ends_by_those_who_wait_and_not_by_those_who_have_left() -> None:
    """Who waited had lost their places with a gate and an agent that were away for 20 s. The next one to come ended the
    turn at once (world, habits, seed 790000845)."""
    row = [1001, 900.0, 960.0, None, None]
    for since, warned in ((955.0, True), (995.0, False)):
        one, events = core(), told(at_work(), waits(since))
        saved.take_up_turn(one, {"turn": row}, events, NOW)
        assert ("turn.warning" in kinds(one.receive_all(events, NOW).actions)) is warned
    one, events = core(), told(at_work(), waits(995.0))
    saved.take_up_turn(one, {"turn": [*row[:3], 970.0, None]}, events, NOW)
    assert "turn.ending" in kinds(one.receive_all(events, NOW).actions), "that was announced"


def test_a_client_is_sent_the_signal_of_the_warning_once() -> None:
    """A second SIGINT makes many programs stop without saving."""
    text = '[turn]\ntime_limit = "10s"\ngrace = "20s"\nwarning_signal = "SIGINT"\n'
    first, events = core(text), told(at_work(), waits())
    assert "WarnClient" in kinds(first.receive_all(events, NOW).actions)
    row = saved.turn_row(first)
    second = core(text)
    saved.take_up_turn(second, {"turn": row}, events, NOW + 5.0)
    late = known(NOW, Peer(72, 1001, 1001, 6), NOW + 1.0, Limits(20.0))
    actions = second.receive_all(told(at_work(), late, waits()), NOW + 5.0).actions
    assert [one.pid for one in actions if isinstance(one, act.WarnClient)] == [72]


def test_a_turn_of_a_user_who_has_gone_is_over() -> None:
    """Kept for a user without a client it would hold up everybody."""
    one, events = core(), told(waits())
    saved.take_up_turn(one, {"turn": [1001, 900.0, 980.0, 990.0, None]}, events, NOW)
    assert holder(one, events) == 1002


def test_who_had_a_turn_stays_behind_who_came_meanwhile() -> None:
    """The order of the queue outlives the agent."""
    one, events = core(), told(knocked(NOW, 1, ALICE, 940.0), waits(950.0))
    saved.take_up_turn(one, {"served": [[1001, 960.0]]}, events, NOW)
    assert holder(one, events) == 1002
    assert [1001, 960.0] in ROWS["served"].write(one)


@pytest.mark.parametrize("broken", [None, 7, "x", [], [1001], [1001, "x", None, None, None], {"a": 1}])
def test_what_is_no_turn_is_none(broken: object) -> None:
    one = core()
    before = one.memories
    saved.take_up_turn(one, {"turn": broken, "served": broken or None}, told(at_work()), NOW)
    assert one.memories is before


# --- records ----------------------------------------------------------------------------------------------------------


def records(*rows: tuple[str, float, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"seq": 1 + n, "kind": kind, "at": at, **fields} for n, (kind, at, fields) in enumerate(rows)]


WAITS = ("client.waiting", 890.0, {"pid": 71, "uid": 1001, "connection": 3})
WORKS = ("client.connected", 900.001, {"pid": 71, "uid": 1001, "waited": 10.0})


def written(known: list[dict[str, Any]], *events: inp.Input) -> list[tr.Transition]:
    one = core()
    one.receive_all(told(*events), NOW)
    sessions = Sessions()
    for record in known:
        sessions.take(record)
    return without_agent.missed(sessions.open.values(), one.state, NOW, NOW)


def test_who_is_on_record_is_not_written_again() -> None:
    assert written(records(WAITS, WORKS), at_work()) == []
    assert written(records(WAITS), knocked(NOW, 3, ALICE, 890.0)) == []
    (one,) = written(records(), knocked(NOW, 3, ALICE, 890.0))
    assert one == tr.ClientWaiting(890.0, 71, 1001, 3)
    assert written(records(), knocked(NOW, 3, ALICE, NOW)) == [], "that one the agent itself has seen"


def test_who_came_and_went_without_an_agent_is_written_once() -> None:
    (one,) = written(records(), at_work())
    assert isinstance(one, tr.ClientConnected)
    assert (one.at, one.pid) == (900.0, 71)
    (one,) = written(records(WORKS))
    assert isinstance(one, tr.ClientEnded)
    assert (one.pid, one.uid, one.outcome) == (71, 1001, "unknown")
    assert one.seconds == pytest.approx(NOW - 900.0, abs=0.1)
    (one,) = written(records(WAITS))
    assert isinstance(one, tr.ClientLeft)
    assert written(records(WORKS, ("client.ended", 950.0, {"pid": 71, "uid": 1001, "outcome": "ok"}))) == []


def test_who_was_refused_has_not_left() -> None:
    """Seen: after a restart the report of a user whom the policy denies had a wait of minutes."""
    assert written(records(WAITS, ("client.refused", 890.1, {"pid": 71, "uid": 1001, "why": "denied"}))) == []


def test_a_number_that_is_used_again_is_another_client() -> None:
    """The first has ended and the second has come while nobody looked."""
    found = written(records(WORKS), at_work(ALICE._replace(start=9), 950.0))
    assert [type(one).__name__ for one in found] == ["ClientEnded", "ClientConnected"]


CLIENT = inp.Remembered(
    880.0, 12.346, Limits(40.0, {0: 5, 1: 7}, below_normal=True), {0: 9}, True, 3, 890.0, "faulted", 4, "slurm-7"
)


UNLIMITED = CLIENT._replace(limits=Limits(20.0), most_memory={}, fail_safe=False)
"""After a hand-over without a memory limit."""


def test_who_waits_and_what_is_known_of_clients_is_kept() -> None:
    one = core()
    one.receive_all(told(at_work()._replace(earlier=CLIENT), waits(950.0)), NOW)
    rows = json.loads(json.dumps({"waiting": ROWS["waiting"].write(one), "clients": saved.client_rows(one)}))
    assert saved.waited_here(rows) == frozenset({1002})
    told_again = {(71, ALICE.start): saved.EarlierClient(ALICE._replace(command=""), None, UNLIMITED)}
    assert saved.clients(rows, NOW) == told_again, "the limits are those that the gate says"
    for broken in ({"clients": 7}, {"waiting": ["x"]}, {"clients": [[1]]}, {"clients": [{"pid": 1}]}, {}):
        assert (saved.waited_here(broken), saved.clients(broken, NOW)) == (frozenset(), {})


@pytest.mark.parametrize("asked", [None, 890.0])
def test_a_client_that_mps_was_not_asked_to_end_is_not_signalled_by_the_next_agent(asked: float | None) -> None:
    """A world of habits (endings, seed 11): "not asked" was kept as "asked at 0", and SIGTERM hit a working client."""
    one = core()
    one.receive_all(told(at_work()._replace(earlier=CLIENT._replace(terminated=asked))), NOW)
    rows = json.loads(json.dumps({"clients": saved.client_rows(one)}))
    (kept,) = saved.clients(rows, NOW).values()
    assert kept.what.terminated == asked
    assert kept.what.terminated is None or type(kept.what.terminated) is float


def test_a_client_that_the_gate_does_not_know_is_as_the_earlier_agent_knew_it() -> None:
    """And the gate is told of it, with all that is known."""
    one = core()
    hello, synced = told()
    actions = one.receive_all([hello, inp.ClientRemembered(NOW, ALICE, CLIENT), synced], NOW).actions
    client = one.state.clients[ALICE.pid]
    assert (client.since, client.waited, client.limits, client.most_memory) == CLIENT[:4]
    assert (client.outcome, client.terminated, client.lease, client.job) == ("faulted", 890.0, 4, "slurm-7")
    found = [
        act_.message for act_ in actions if isinstance(act_, act.TellGate) and isinstance(act_.message, link.Found)
    ]
    most = Limits(memory={0: 9})
    assert found == [link.Found(71, 1001, ALICE.start, CLIENT.limits, one.state.policy.instance, most, 3)]
    assert not one.receive_all([inp.ProcessesSeen(NOW, frozenset(), {})], NOW).actions, "once"


class Starts:
    """Agents that start one after the other on what the ones before have kept."""

    def __init__(self) -> None:
        self.store = Store(None)
        self.agents: dict[str, Any] = {}

    def start(self, *names: str) -> dict[str, dict[str, Any]]:
        """Agents for these instances; what each of them finds."""
        single = len(names) == 1
        agents = [
            SimpleNamespace(name=name, store=self.store if single else StorePart(self.store, name)) for name in names
        ]
        node: Any = SimpleNamespace(single=single, agents=agents, store=self.store)
        node._leases = lambda everything: Node._leases(node, everything)
        everything = {key: self.store.get(key) for key in KEYS if self.store.get(key) is not None}
        found = {one.name: Node._earlier(node, everything, one) for one in agents}
        self.store.put(saved.INSTANCE, names[0] if single else None)
        for one in agents:
            one.store.put("served", [[1001, NOW]])  # as each agent does soon after
        self.agents = {one.name: one for one in agents}
        return found

    def drains(self, *names: str) -> dict[str, Any]:
        return {name: one.get("drain") for name, one in self.start(*names).items()}


def test_what_one_instance_kept_moves_to_its_name_of_several_and_back() -> None:
    """Seen: drained, restarted with a second instance, resumed; when there was one instance again it was drained, and
    who came waited. And an agent of several that was started twice had forgotten the drain."""
    one = Starts()
    one.store.put(saved.LEASE, 7)
    one.drains("big")
    one.store.put("drain", DRAIN)
    one.agents["big"].store.put("turn", [1001, 1.0, None, None, None])
    kept = one.start("small", "big")
    assert (kept["big"].get("turn"), kept["small"].get("turn")) == ([1001, 1.0, None, None, None], None)
    assert one.drains("small", "big") == {"big": DRAIN, "small": DRAIN}
    one.agents["big"].store.put("drain", None)
    assert one.drains("small", "big") == {"big": None, "small": DRAIN}
    assert one.drains("big") == {"big": None}
    one.store.put("big/drain", DRAIN)  # of an agent of an earlier version, which left both
    assert one.drains("big") == {"big": None}
    assert one.store.get(saved.LEASE) == 7


def test_a_drain_of_the_node_and_the_leases_hold_at_instances_that_are_added() -> None:
    """The documented way to add instances is a drain, an edit and a restart: the new ones were open."""
    one, leases = Starts(), [{"number": 3}]
    one.drains("gpu0", "gpu1")
    for name in ("gpu0", "gpu1"):
        one.agents[name].store.put("drain", DRAIN)
    one.store.put(saved.DRAINED, DRAIN)
    one.store.put(saved.LEASES, leases)
    kept = one.start("new", "gpu0", "gpu1")
    assert [each.get("drain") for each in kept.values()] == [DRAIN] * 3
    assert [each[saved.LEASES] for each in kept.values()] == [leases] * 3
    one.agents["new"].store.put("drain", None)  # resumed there alone
    assert one.drains("new", "gpu0", "gpu1") == {"new": None, "gpu0": DRAIN, "gpu1": DRAIN}
    one.store.put(saved.DRAINED, None)
    assert one.drains("new", "newer", "gpu0", "gpu1")["newer"] is None


# --- the wall clock ---------------------------------------------------------------------------------------------------


def test_what_is_kept_moves_with_the_wall_clock() -> None:
    """Every time that an agent keeps, and nothing else: MPS's logs have stamps of their own."""
    at, hour = 1_800_000_000.5, 3600.0
    values = {
        "turn": [1001, at, at, None, None], "gpu/served": [[1002, at]], "suspended": [[1003, at]],
        "leases": [{"number": 1, "since": at, "until": at, "memory": {"0": 20 << 30}, "threads": 12.5}],
        "drain": {"since": at, "until": at, "restart": False},
        "logs": {"control": [5, at]}, "lease": 4,
    }  # fmt: skip
    text, there = json.dumps(values), json.dumps(saved.moved(values, hour))
    assert text.count(str(at)) == 9
    assert there.count(str(at + hour)) == 8
    assert saved.moved(values, hour)["logs"] == values["logs"]
    assert json.loads(there.replace(str(at + hour), str(at))) == values


@pytest.mark.parametrize("row", [{"served": [[1001, NOW + 9000.0]]}, {"suspended": [[1001, NOW + 9000.0]]}])
def test_a_time_from_the_future_keeps_no_user_waiting(row: dict[str, Any]) -> None:
    """A machine whose clock was set back while it was off."""
    one, events = core(), told(knocked(NOW, 1, ALICE, NOW))
    saved.take_up_turn(one, row, events, NOW)
    assert holder(one, events) == 1001
    assert all(at <= NOW for _, at in [*ROWS["served"].write(one), *ROWS["suspended"].write(one)])
