"""Views at their edges: what is not known yet, what is wrong, what goes backwards; and why each user is held."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from mpsagent.api import metrics, views
from mpsagent.api.instances import Everything
from mpsagent.cli import answer_text, wording
from mpsagent.core import inputs as inp
from mpsagent.core.coordinator import Core
from mpsagent.core.inputs import Peer
from mpsagent.core.model import Client, Control, Drain, Gate, Held, Server, State, Status
from mpsagent.core.sessions import Sessions
from mpsagent.core.view import Turn, View
from mpsagent.mps.limits import Device, Limits
from mpsagent.mps.loglines import LogParser
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.policy.instances import instances
from mpsagent.wire import link
from tests import recordings
from tests.api.stand_in import OTHER, USER, busy_state, decided, instance, nobody, page, queue
from tests.core.said import knocked
from tests.policies import in_turns

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def shown(view: View, now: float, about: views.About | None = None, **more: Any) -> Any:
    return views.status(page(instance(view, now, **more)), about or views.About(), now)


def text_of(body: Any) -> str:
    return "\n".join(answer_text.status(json.loads(json.dumps(body)), answer_text.plain, NOON))


def queue_of(*held: Held) -> Any:
    """The queue that the engine makes of these."""
    core = Core()
    core.absorb(
        [inp.GateSaid(0.0, link.Hello(1, 1000.0)), *(knocked(h.since, h.connection, h.peer, h.since) for h in held)]
    )
    return core.state.held


def waiting(connection: int, pid: int, uid: int, since: float) -> Held:
    return Held(connection, Peer(pid, uid, uid, pid), since)


def state_of(text: str, *uids: int) -> State:
    """User 7 is at work; the others wait, each since 10 s after its uid's number."""
    policy, errors = load([("p", text), ("turns", in_turns(text))])
    assert policy is not None, errors
    return State(
        policy=policy,
        gate=Gate(1, 0.0, synced=True),
        identities={uid: Identity(uid, f"u{uid}") for uid in (7, *uids)},
        control=Control(2, 0.0, "", proven=True),
        servers={5: Server(5, 7, Status.ACTIVE, started=1.0, ready=1.0)},
        clients={70: Client(Peer(70, 7, 7, 1), since=1.0)},
        held=queue_of(*(waiting(uid, 100 + uid, uid, 10.0 + uid) for uid in uids)),
    )


TURN = Turn(7, since=1.0, contested=18.0)


def test_a_state_without_anything_is_a_page_too() -> None:
    """At start, before the first line of a log and the gate's first word."""
    body = shown(View(State()), 100.0)
    assert (body["control"], body["turn"], body["holder"], body["waiting"]) == (None, None, None, [])
    text = text_of(body)
    assert "in use   by no user" in text
    assert "a control daemon for each user: none runs now" in text
    metrics.Metrics().text(json.loads(json.dumps(body)), 0, 0, 0)


def test_a_server_whose_user_is_not_known_has_none_in_pages_and_metrics() -> None:
    """Its own log was read before that of the control daemon."""
    body = shown(View(State(servers={5: Server(5, None, Status.ACTIVE, started=1.0)})), 100.0)
    text = metrics.Metrics().text(dict(body), 0, 0, 0).decode()
    assert 'mpsagent_servers{mps_instance="default",status="ACTIVE",user=""} 1.0' in text
    assert "None" not in text_of(body)


def test_a_process_with_several_connections_is_shown_once() -> None:
    """A client that waits for a further context is a client; a new process with two connections waits once."""
    held = queue_of(waiting(1, 50, 7, 3.0), waiting(2, 60, 8, 4.0), waiting(3, 60, 8, 5.0))
    state = State(clients={50: Client(Peer(50, 7, 7, 50), 1.0)}, held=held)
    assert [(c["pid"], c["state"]) for c in views.clients(instance(View(state)), nobody, 9.0)] == [
        (50, "starting"),
        (60, "waiting"),
    ]


def test_a_user_with_several_waiting_processes_has_one_place() -> None:
    """In the order of the first connection's arrival."""
    held = queue_of(waiting(1, 1, 7, 10.0), waiting(2, 2, 8, 11.0), waiting(3, 3, 7, 12.0), waiting(4, 3, 7, 13.0))
    found = list(queue(View(State(held=held)), 20.0))
    assert [(w["position"], w["uid"], w["processes"], w["clients"], w["seconds"]) for w in found] == [
        (1, 7, 2, [1, 3], 10.0),
        (2, 8, 1, [2], 9.0),
    ]


def _turns(view: View, now: float) -> dict[int, float]:
    return {one["uid"]: now + one["turn_seconds"] for one in queue(view, now) if one["turn_seconds"] is not None}


def test_expected_turns_add_up_what_each_user_ahead_may_keep() -> None:
    """7 has it; 8 waits since 18 and gets its turn after 100 + 10 s; 9 after 8's own 20 + 10 s more. Its processes
    have gone 10 s after that at the latest."""
    view = View(
        state_of('[turn]\ntime_limit = "100s"\ngrace = "10s"\n[user.u8]\nturn.time_limit = "20s"\n', 8, 9), turn=TURN
    )
    assert _turns(view, 30.0) == {8: 138.0, 9: 178.0}
    assert _turns(view, 140.0) == {8: 140.0, 9: 180.0}, "never in the past"


def test_there_is_no_expected_turn_behind_who_never_has_to_leave() -> None:
    """An exempt user at work, an exempt user ahead, no action, enforcement off, maintenance: no promise is made."""
    rules = '[turn]\ntime_limit = "100s"\ngrace = "10s"\n'
    assert _turns(View(state_of(rules + "[user.u7]\nturn.never_preempt = true\n", 8), turn=TURN), 30.0) == {}
    assert _turns(View(state_of(rules + "[user.u8]\nturn.never_preempt = true\n", 8, 9), turn=TURN), 30.0) == {8: 138.0}
    assert _turns(View(state_of(rules + 'on_expiry = "none"\n', 8), turn=TURN), 30.0) == {}
    assert _turns(View(state_of("mode = 'report'\n" + rules, 8), turn=TURN), 30.0) == {}
    assert _turns(View(replace(state_of(rules, 8), drain=Drain(20.0, None)), turn=TURN), 30.0) == {}


def test_in_a_drain_no_end_of_the_turn_is_announced() -> None:
    """A turn does not end then, and the page said when it would."""
    view = View(state_of('[turn]\ntime_limit = "100s"\ngrace = "10s"\n', 8), turn=TURN)
    drained = replace(view, state=replace(view.state, drain=Drain(20.0, None)))
    told = [views.turn(decided(one), {}, nobody, 30.0) for one in (view, drained)]
    assert [one["ends"] is None for one in told if one is not None] == [False, True]


def test_a_turn_has_the_limits_that_its_clients_were_let_in_with() -> None:
    """Right after a reload the page gave who is at work the new ones."""
    state = state_of("[limits]\nactive_threads = '30%'\n", 8)
    peer = Peer(70, 7, 7, 1)

    def told(*threads: float) -> object:
        clients = {70 + n: Client(peer._replace(pid=70 + n), 1.0, limits=Limits(t)) for n, t in enumerate(threads)}
        turn = views.turn(View(replace(state, clients=clients), turn=TURN), {}, nobody, 30.0)
        assert turn is not None
        return turn["limits"] and turn["limits"]["threads"]

    assert [told(), told(20.0, 20.0), told(20.0, 30.0)] == [30.0, 20.0, None]


def _why(view: View, uid: int = 8) -> str:
    return next(one["reason"] for one in queue(view, 30.0) if one["uid"] == uid)


def test_each_reason_for_being_held_is_told_apart() -> None:
    """Those of which tests/net has no state."""
    state = state_of('[user.u9]\naccess = "deny"\n', 8, 9, 10)
    assert state.control is not None
    failed = state.held.put(replace(next(one for one in state.held.values() if one.uid == 8), failed="why"))
    assert _why(View(replace(state, drain=Drain(1.0, None)), turn=TURN), 9) == "denied"
    assert _why(View(replace(state, held=failed), turn=Turn(8, 20.0))) == "handover_failed"
    assert _why(View(replace(state, control=replace(state.control, quitting=3.0)), turn=TURN)) == "control"
    assert _why(View(state, turn=Turn(10, 1.0, phase="ending")), 10) == "turn", "its own turn is over"


def test_gpus_that_are_only_assumed_are_not_shown() -> None:
    """Until NVML answers the engine counts on small ones; a person would take them for real."""
    body = shown(View(busy_state()), 1.0, devices_known=False)
    assert body["devices"] == []


def test_eight_equal_gpus_are_said_once() -> None:
    """Not as eight equal limits either."""
    memory = dict.fromkeys(range(8), 20 << 30)
    devices = tuple(Device(number, f"GPU-{number}", "NVIDIA H200", 140 << 30, 132) for number in range(8))
    body = shown(View(replace(busy_state(), devices=devices)), 1.0)
    assert "8 × NVIDIA H200 (140 GiB, 132 multiprocessors)" in text_of(body)
    assert wording.limits(Limits(20.0, memory).as_json()) == "20 %, 20G on each GPU"
    assert wording.limits(Limits(20.0, {0: 1 << 30, 1: 2 << 30}).as_json()) == "20 %, 0=1G 1=2G"


def test_a_clock_set_back_gives_no_negative_spans() -> None:
    """A person reading -3600 s thinks of a fault."""
    state = State(clients={1: Client(Peer(1, 7, 7, 1), since=100.0)}, held=queue_of(waiting(1, 2, 8, 300.0)))
    assert [one["seconds"] for one in views.clients(instance(View(state)), nobody, 50.0)] == [0.0, 0.0]
    assert [one["seconds"] for one in queue(View(state), 50.0)] == [0.0]


def test_the_last_change_and_the_last_fault_come_from_the_records() -> None:
    """A user's second turn in a row is no change; a record with parts missing is left out."""
    records: list[dict[str, Any]] = [
        {"seq": 1, "at": 1.0, "kind": "turn.began", "uid": USER},
        {"seq": 2, "at": 2.0, "kind": "turn.began", "uid": OTHER, "gap": 0.1},
        {"seq": 3, "at": 3.0, "kind": "turn.began", "uid": OTHER, "gap": 9.0},
        {"seq": 4, "at": 4.0, "kind": "server.fault", "server": 5, "uid": OTHER},
        {"seq": 5, "at": 5.0, "kind": "turn.began"},
    ]
    sessions = Sessions()

    def told() -> Any:
        names = {USER: "alice", OTHER: "bob"}.get
        return shown(View(busy_state()), 1.0, views.About(names, (), sessions.changes, sessions.faults))

    for one in records:
        sessions.take(one)
    change, fault = told()["last_change"], told()["last_fault"]
    assert (change["at"], change["uid"], change["before"], change["gap"]) == (views.when(2.0), OTHER, USER, 0.1)
    assert (fault["at"], fault["server"], fault["uid"], fault["seconds"]) == (views.when(4.0), 5, OTHER, None)
    sessions.take({"seq": 6, "at": 6.5, "kind": "server.fault_over", "server": 5, "seconds": 2.5, "recovered": True})
    body = told()
    assert (body["last_fault"]["seconds"], body["last_fault"]["recovered"]) == (2.5, True)
    assert (body["last_change"] or {})["before_user"] == "alice"
    assert "on server 5 of bob, over after 2.50s" in text_of(body)


def test_a_turn_and_a_fault_at_another_instance_are_no_change_and_no_fault_here() -> None:
    """Two GPUs, a user at each: neither had the other's before."""
    records: list[dict[str, Any]] = [
        {"seq": 1, "at": 1.0, "kind": "turn.began", "uid": USER, "instance": "gpu0"},
        {"seq": 2, "at": 2.0, "kind": "turn.began", "uid": OTHER, "instance": "gpu1"},
        {"seq": 3, "at": 3.0, "kind": "server.fault", "server": 5, "uid": OTHER, "instance": "gpu1"},
    ]

    sessions = Sessions()
    for one in records:
        sessions.take(one)
    assert {name: (one.came, one.uid) for name, one in sessions.changes.items()} == {
        "gpu0": (1.0, USER), "gpu1": (2.0, OTHER),
    }  # fmt: skip
    assert {name: (one.came, one.pid) for name, one in sessions.faults.items()} == {"gpu1": (3.0, 5)}


def test_a_long_queue_is_named_in_part_and_counted_in_full() -> None:
    """The status is a page; the queue has all."""
    many = queue_of(*(waiting(number, 1000 + number, 5000 + number, float(number)) for number in range(300)))
    view = View(replace(busy_state(), held=many), turn=Turn(USER, 0.0))
    body = shown(view, 999.0)
    assert (len(body["waiting"]), body["waiting_users"], body["waiting_processes"]) == (100, 300, 300)
    assert "and 295 users more" in text_of(body)
    assert len(list(queue(view, 999.0))) == 300


def test_users_apart_stand_in_one_queue() -> None:
    """Each has a control daemon and a lane of the user's own; `queue` had two rows numbered 1."""
    policy, errors = load([("p", '[instance.lab]\nsharing = "per-user"\n')])
    assert policy is not None, errors
    (mine,) = instances(policy, ())
    held = queue_of(*(waiting(uid, 100 + uid, uid, 10.0 + uid) for uid in (8, 9)))
    section = instance(View(State(policy=mine, held=held)), 30.0, name="lab")
    lane = State(policy=mine, user=7, held=queue_of(waiting(7, 107, 7, 10.0)))
    seen = page(section, instance(View(lane), 30.0, name="lab-u7"))
    body = views.status(seen, views.About(), 30.0)
    assert [(one["position"], one["uid"]) for one in body["waiting"]] == [(1, 8), (2, 9), (3, 7)]
    received = SimpleNamespace(page=seen, name=nobody, now=lambda: 30.0, history=None)
    rows = list(Everything(received).queue())  # type: ignore[arg-type]
    assert [(one["position"], one["uid"], one["instance"]) for one in rows] == [
        (1, 8, "lab"),
        (2, 9, "lab"),
        (3, 7, "lab"),
    ]


def test_every_state_of_every_recording_can_be_shown() -> None:
    """Each moment of real MPS gives a page, tables and metrics without an exception."""
    pages = set()
    metered = metrics.Metrics()
    for name in recordings.names():
        for logs in recordings.sections(name).values():
            core = Core()
            events = [*LogParser("control").feed(logs.control), *LogParser("server").feed(logs.server)]
            for event in sorted(events, key=lambda each: each.at)[:1000]:
                before = core.state
                core.absorb([event])
                if core.state is not before:
                    body = json.loads(json.dumps(shown(core.view(), event.at)))
                    clients = json.loads(json.dumps(list(views.clients(instance(core.view()), nobody, event.at))))
                    pages.add("\n".join(answer_text.status(body, answer_text.plain, NOON)))
                    pages.add("\n".join(answer_text.servers(body["servers"], NOON)))
                    answer_text.clients(clients)
                    metered.text(body, 1, 0, 0)
    assert any("FAULT" in one for one in pages)
