"""Views at their edges: what is not known yet, what is wrong, what goes backwards; and why each user is held."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from mpsagent.api import metrics, views
from mpsagent.cli import answer_text, wording
from mpsagent.core import inputs as inp
from mpsagent.core import waiting as waits
from mpsagent.core.engine import Core
from mpsagent.core.inputs import Peer
from mpsagent.core.model import Attachment, Client, Control, Drain, Gate, Held, Server, StartFailure, State, Status
from mpsagent.core.rule import Reason
from mpsagent.core.sessions import Sessions
from mpsagent.core.view import Ending, Turn, View
from mpsagent.mps.limits import Device, Limits
from mpsagent.mps.loglines import LogParser
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.wire import link
from tests import recordings
from tests.api.stand_in import OTHER, USER, busy_state, decided, queue
from tests.core.said import knocked

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def page(body: Any) -> str:
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
    policy, errors = load([("p", text)])
    assert policy is not None, errors
    return State(
        policy=policy,
        gate=Gate(1, 0.0, synced=True),
        control=Control(2, 0.0, "", proven=True),
        identities={uid: Identity(uid, f"u{uid}") for uid in (7, *uids)},
        servers={5: Server(5, 7, Status.ACTIVE, started=1.0, ready=1.0)},
        clients={70: Client(Peer(70, 7, 7, 1), since=1.0)},
        held=queue_of(*(waiting(uid, 100 + uid, uid, 10.0 + uid) for uid in uids)),
    )


TURN = Turn(7, since=1.0, contested=18.0)


def test_a_state_without_anything_is_a_page_too() -> None:
    """At start, before the first line of a log and the gate's first word."""
    body = views.status(View(State()), views.About(), 100.0)
    assert (body["control"], body["turn"], body["holder"], body["waiting"]) == (None, None, None, [])
    text = page(body)
    assert "in use   by no user" in text
    assert "does not run" in text
    metrics.Metrics().text(json.loads(json.dumps(body)), 0, 0, 0)


def test_a_server_whose_user_is_not_known_has_none_in_pages_and_metrics() -> None:
    """Its own log was read before that of the control daemon."""
    body = views.status(View(State(servers={5: Server(5, None, Status.ACTIVE, started=1.0)})), views.About(), 100.0)
    text = metrics.Metrics().text(dict(body), 0, 0, 0).decode()
    assert 'mpsagent_servers{mps_instance="default",status="ACTIVE",user=""} 1.0' in text
    assert "None" not in page(body)


def test_what_a_server_started_with_is_verified_only_once_it_is_known() -> None:
    """Between Starting and Ready nothing is known; that is not drift."""
    server = Server(1, 7, Status.ACTIVE, started=1.0, limits=Limits(100.0), reported=True)
    view = View(State(servers={1: server}))
    told = [views.server(view, views.About(checked=known), server)["verified"] for known in ({}, {1: False}, {1: True})]
    assert told == [None, False, True]


def test_a_client_is_joined_with_its_server_by_what_the_log_says_of_its_pid() -> None:
    """Contexts and devices from the log; who it is, and with which limits, from the gate."""
    attached = {
        1: Attachment(2.0, frozenset({0, 1, 2}), frozenset({"GPU-a"})),
        2: Attachment(2.0, frozenset({0})),
        9: Attachment(2.0, frozenset({0, 1})),
    }
    server = Server(5, 7, Status.FAULT, started=1.0, sticky=(2,), attached=attached)
    peers = {pid: Peer(pid, 7, 8, pid, "/user.slice", None, f"job {pid}") for pid in (1, 2, 3, 4, 6)}
    clients = {pid: Client(peer, 2.0, 0.5, Limits(20.0)) for pid, peer in peers.items()}
    clients[4] = replace(clients[4], detached=3.0)
    view = View(State(servers={5: server}, clients=clients), ending={6: Ending(6, False, True, 8.0, "user 7 ends")})
    found = {one["pid"]: one for one in views.clients(view, 10.0)}
    assert {pid: one["state"] for pid, one in found.items()} == {
        1: "running", 2: "sticky", 3: "starting", 4: "detached", 6: "ending",
    }  # fmt: skip
    assert [one["why"] for one in found.values()].count("user 7 ends") == 1
    one = found[1]
    assert (one["server"], one["contexts"], one["devices"], one["command"], one["gid"]) == (5, 2, ["GPU-a"], "job 1", 8)
    assert (one["limits"], one["cgroup"], one["waited"]) == ({"threads": 20.0, "memory": {}}, "/user.slice", 0.5)
    body = views.status(view, views.About(), 10.0)
    assert (body["servers"][0]["clients"], body["servers"][0]["unknown_clients"]) == (2, 1)


def test_a_process_with_several_connections_is_shown_once() -> None:
    """A client that waits for a further context is a client; a new process with two connections waits once."""
    held = queue_of(waiting(1, 50, 7, 3.0), waiting(2, 60, 8, 4.0), waiting(3, 60, 8, 5.0))
    state = State(clients={50: Client(Peer(50, 7, 7, 50), 1.0)}, held=held)
    assert [(c["pid"], c["state"]) for c in views.clients(View(state), 9.0)] == [(50, "starting"), (60, "waiting")]


def test_a_user_with_several_waiting_processes_has_one_place() -> None:
    """In the order of the first connection's arrival."""
    held = queue_of(waiting(1, 1, 7, 10.0), waiting(2, 2, 8, 11.0), waiting(3, 3, 7, 12.0), waiting(4, 3, 7, 13.0))
    found = list(queue(View(State(held=held)), 20.0))
    assert [(w["position"], w["uid"], w["processes"], w["clients"], w["seconds"]) for w in found] == [
        (1, 7, 2, [1, 3], 10.0),
        (2, 8, 1, [2], 9.0),
    ]


def test_the_next_user_stands_first() -> None:
    """Who had a turn since it came is behind those who have waited for its end, as the engine has it."""
    view = View(state_of("", 8, 9), turn=TURN, served={8: 50.0})
    assert [w["uid"] for w in queue(view, 60.0)] == [9, 8] == list(view.waiting())


def _turns(view: View, now: float) -> dict[int, float]:
    return {one["uid"]: now + one["turn_seconds"] for one in queue(view, now) if one["turn_seconds"] is not None}


def test_expected_turns_add_up_what_each_user_ahead_may_keep() -> None:
    """7 has it; 8 waits since 18 and gets its turn after 100 + 10 s; 9 after 8's own 20 + 10 s more."""
    view = View(state_of('[switch]\nafter = "100s"\ngrace = "10s"\n[user.u8]\nswitch.after = "20s"\n', 8, 9), turn=TURN)
    assert _turns(view, 30.0) == {8: 128.0, 9: 158.0}
    assert _turns(view, 130.0) == {8: 130.0, 9: 160.0}, "never in the past"


def test_there_is_no_expected_turn_behind_who_never_has_to_leave() -> None:
    """An exempt user at work, an exempt user ahead, no action, enforcement off, maintenance: no promise is made."""
    rules = '[switch]\nafter = "100s"\ngrace = "10s"\n'
    assert _turns(View(state_of(rules + "[user.u7]\nswitch.exempt = true\n", 8), turn=TURN), 30.0) == {}
    assert _turns(View(state_of(rules + "[user.u8]\nswitch.exempt = true\n", 8, 9), turn=TURN), 30.0) == {8: 128.0}
    assert _turns(View(state_of(rules + 'action = "none"\n', 8), turn=TURN), 30.0) == {}
    assert _turns(View(state_of("enforce = false\n" + rules, 8), turn=TURN), 30.0) == {}
    assert _turns(View(replace(state_of(rules, 8), drain=Drain(20.0, None)), turn=TURN), 30.0) == {}


def test_in_a_drain_no_end_of_the_turn_is_announced() -> None:
    """A turn does not end then, and the page said when it would."""
    view = View(state_of('[switch]\nafter = "100s"\ngrace = "10s"\n', 8), turn=TURN)
    drained = replace(view, state=replace(view.state, drain=Drain(20.0, None)))
    told = [views.turn(decided(one), 30.0) for one in (view, drained)]
    assert [one["ends"] is None for one in told if one is not None] == [False, True]


def test_a_turn_has_the_limits_that_its_clients_were_let_in_with() -> None:
    """Right after a reload the page gave who is at work the new ones."""
    state = state_of("[limits]\nthreads = 30\n", 8)
    peer = Peer(70, 7, 7, 1)

    def told(*threads: float) -> object:
        clients = {70 + n: Client(peer._replace(pid=70 + n), 1.0, limits=Limits(t)) for n, t in enumerate(threads)}
        turn = views.turn(View(replace(state, clients=clients), turn=TURN), 30.0)
        assert turn is not None
        return turn["limits"] and turn["limits"]["threads"]

    assert [told(), told(20.0, 20.0), told(20.0, 30.0)] == [30.0, 20.0, None]


def _why(view: View, uid: int = 8) -> str:
    return next(one["reason"] for one in queue(view, 30.0) if one["uid"] == uid)


def test_each_reason_for_being_held_is_told_apart() -> None:
    """Who waits wants to know for what; each state of affairs gives its own word."""
    state = state_of('[user.u9]\naccess = "deny"\n[user.u10]\nmax_clients = 1\n', 8, 9, 10)
    gate, control = state.gate, state.control
    assert gate is not None
    assert control is not None
    server = state.servers[5]
    table = link.Admissions(open=True, users={10: link.User(10, "all", Limits(), max_clients=1)}, room=1)
    full = (1, replace(table, users={10: link.User(10, "all", Limits())}))
    mine = Turn(10, 1.0)
    at_work = {80: Client(Peer(80, 10, 10, 1), 1.0)}
    held = {one.connection: one for one in state.held.values()}
    cases: dict[str, tuple[View, int]] = {
        "gate": (View(replace(state, gate=replace(gate, synced=False)), turn=TURN), 8),
        "failed": (View(state, turn=TURN, given_up="MPS's servers do not start"), 8),
        "drain": (View(replace(state, drain=Drain(1.0, None)), turn=TURN), 8),
        "control": (View(replace(state, control=None), turn=TURN), 8),
        "fault": (View(replace(state, servers={5: replace(server, status=Status.FAULT)}), turn=TURN), 8),
        "starts": (View(replace(state, start_failure=StartFailure(6, 1.0, 2.0, "why")), pause_until=99.0), 8),
        "denied": (View(state, turn=TURN), 9),
        "turn": (View(state, turn=TURN), 8),
        "name": (View(replace(state, identities={}, servers={})), 8),
        "server": (View(state, turn_waits=Reason("server", "server 5 of user 7 is ending")), 8),
        "next": (View(replace(state, servers={})), 8),
        "max_clients": (View(replace(state, clients=at_work), turn=mine, sent=(1, replace(table, room=9))), 10),
        "max_contexts": (
            View(
                replace(state, clients=at_work),
                turn=mine,
                sent=(1, replace(table, room=9, users={10: link.User(10, "all", Limits(), max_contexts=1)})),
            ),
            10,
        ),
        "full": (View(replace(state_of("", 10), clients=at_work), turn=mine, sent=full), 10),
        "handover": (
            View(replace(state, held=state.held.put(replace(held[8], handing=20.0))), turn=Turn(8, 20.0)),
            8,
        ),
        "handover_failed": (
            View(replace(state, held=state.held.put(replace(held[8], failed="why"))), turn=Turn(8, 20.0)),
            8,
        ),
    }
    assert {word: _why(view, uid) for word, (view, uid) in cases.items()} == {word: word for word in cases}
    (row,) = (one for one in queue(cases["starts"][0], 30.0) if one["uid"] == 8)
    assert row["until"] == views.iso(99.0)
    assert "why, until 00:01:39 at the latest" in answer_text.waiting(dict(row), datetime(1970, 1, 1, tzinfo=UTC))
    assert _why(View(replace(state, control=replace(control, quitting=3.0)), turn=TURN)) == "control"
    assert _why(View(state, turn=replace(mine, phase="ending")), 10) == "turn", "its own turn is over"


def test_gpus_that_are_only_assumed_are_not_shown() -> None:
    """Until NVML answers the engine counts on small ones; a person would take them for real."""
    body = views.status(View(busy_state()), views.About(devices_known=False), 1.0)
    assert body["devices"] == []


def test_eight_equal_gpus_are_said_once() -> None:
    """Not as eight equal limits either."""
    memory = dict.fromkeys(range(8), 20 << 30)
    devices = tuple(Device(number, f"GPU-{number}", "NVIDIA H200", 140 << 30, 132) for number in range(8))
    body = views.status(View(replace(busy_state(), devices=devices)), views.About(), 1.0)
    assert "8 × NVIDIA H200 (140 GiB, 132 multiprocessors)" in page(body)
    assert wording.limits(dict(views.limits(Limits(20.0, memory)))) == "20 %, 20G on each GPU"
    assert wording.limits(dict(views.limits(Limits(20.0, {0: 1 << 30, 1: 2 << 30})))) == "20 %, 0=1G 1=2G"


def test_a_clock_set_back_gives_no_negative_spans() -> None:
    """A person reading -3600 s thinks of a fault."""
    state = State(clients={1: Client(Peer(1, 7, 7, 1), since=100.0)}, held=queue_of(waiting(1, 2, 8, 300.0)))
    assert [one["seconds"] for one in views.clients(View(state), 50.0)] == [0.0, 0.0]
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
        about = views.About(last_change=sessions.changes[None], last_fault=sessions.faults[None], names={})
        return views.status(View(busy_state()), about, 1.0)

    for one in records:
        sessions.take(one)
    change, fault = told()["last_change"], told()["last_fault"]
    assert (change["at"], change["uid"], change["before"], change["gap"]) == (views.iso(2.0), OTHER, USER, 0.1)
    assert (fault["at"], fault["server"], fault["uid"], fault["seconds"]) == (views.iso(4.0), 5, OTHER, None)
    sessions.take({"seq": 6, "at": 6.5, "kind": "server.fault_over", "server": 5, "seconds": 2.5, "recovered": True})
    body = told()
    assert (body["last_fault"]["seconds"], body["last_fault"]["recovered"]) == (2.5, True)
    assert (body["last_change"] or {})["before_user"] == "alice"
    assert "on server 5 of bob, over after 2.50s" in page(body)


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
    body = views.status(view, views.About(waiting=waits.waiting(view, 999.0)), 999.0)
    assert (len(body["waiting"]), body["waiting_users"], body["waiting_processes"]) == (100, 300, 300)
    assert "and 295 users more" in page(body)
    assert len(list(queue(view, 999.0))) == 300


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
                    body = json.loads(json.dumps(views.status(core.view(), views.About(), event.at)))
                    clients = json.loads(json.dumps(list(views.clients(core.view(), event.at))))
                    pages.add("\n".join(answer_text.status(body, answer_text.plain, NOON)))
                    pages.add("\n".join(answer_text.servers(body["servers"], NOON)))
                    answer_text.clients(clients)
                    metered.text(body, 1, 0, 0)
    assert any("FAULT" in one for one in pages)
