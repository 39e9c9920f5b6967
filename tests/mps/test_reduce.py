"""Events to state. Ground truth is what MPS itself answered in the recordings; the rest is order, bounds and edges."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpsagent.core.model import State, Status
from mpsagent.core.reduce import apply, apply_all
from mpsagent.mps import events as ev
from mpsagent.mps.limits import Limits
from mpsagent.mps.loglines import LogParser
from tests import recordings

Events = Sequence[ev.LogEvent]


@cache
def parsed(name: str, *sections: str) -> tuple[list[ev.LogEvent], list[ev.LogEvent]]:
    logs = recordings.logs(name, *sections)
    return LogParser("control", UTC).feed(logs.control), LogParser("server", UTC).feed(logs.server)


def by_time(control: Events, server: Events) -> list[ev.LogEvent]:
    return list(heapq.merge(control, server, key=lambda e: e.at))


def final(name: str, *sections: str) -> State:
    return apply_all(State(), by_time(*parsed(name, *sections)))


def at(name: str, clock: str, *sections: str) -> State:
    """The state at a time of day of the recording (``00:00:31.500``); after midnight it is the 21st."""
    day = 20 if clock.startswith("23:") else 21
    until = datetime.fromisoformat(f"2026-11-{day} {clock}").replace(tzinfo=UTC).timestamp() + 0.0001
    return apply_all(State(), [e for e in by_time(*parsed(name, *sections)) if e.at <= until])


# --- what MPS answered ------------------------------------------------------------------------------------------------


def _answer(events: Events, index: int) -> tuple[list[str], int]:
    """The lines of the answer to the command at ``index``, and the index of what ends it."""
    lines: list[str] = []
    for i in range(index + 1, len(events)):
        event = events[i]
        if isinstance(event, ev.CommandRead | ev.ConnectionLine):
            return lines, i
        if isinstance(event, ev.CommandAnswer):
            lines.append(event.text.strip())
    return lines, len(events) - 1


def _expected(state: State, command: list[str], answer: list[str]) -> bool | None:
    """Does the state agree with MPS's answer? None: not a question about the state."""
    known = state.servers.get(int(command[1])) if len(command) == 2 and command[1].isdecimal() else None
    unknown = [f"Server {command[1]} not found"] if len(command) == 2 else []
    match command:
        case ["get_server_list"]:
            return sorted(str(pid) for pid in state.servers) == sorted(answer)
        case ["get_server_status", _]:
            return answer == (unknown if known is None else [str(known.status)])
        case ["get_client_list", _]:
            clients = [] if known is None else [str(c.pid) for c in state.clients_of(known.pid)]
            return sorted(answer) == (unknown if known is None else sorted(clients))
        case ["ps"]:  # lists contexts, so a process that has only its channel to the server is not there
            listed = {line.split()[0]: line.split()[2] for line in answer if line[:1].isdecimal()}
            return listed == {str(c.pid): str(c.server) for c in state.clients.values() if c.contexts - {0}}
    return None


@pytest.mark.parametrize(
    ("name", "least"), [("01", 26), ("02", 75), ("03", 15), ("04", 1), ("05", 5), ("06", 9), ("07", 1)]
)
def test_the_state_agrees_with_every_answer_of_mps(name: str, least: int) -> None:
    """At each question of a recording the state built from the logs says what the daemon answered. Lines of the two
    logs with the same millisecond have no order, so any state within 3 ms around the answer may be the one."""
    events = by_time(*parsed(name))
    states, state = [], State()
    for event in events:
        state = apply(state, event)
        states.append(state)
    asked = 0
    for i, event in enumerate(events):
        if not isinstance(event, ev.CommandRead) or not event.text.split():
            continue
        answer, end = _answer(events, i)
        if _expected(states[i], event.text.split(), answer) is None:
            continue
        asked += 1
        near = [
            k
            for k in range(max(0, i - 60), min(len(events), end + 60))
            if event.at - 0.003 <= events[k].at <= events[end].at + 0.003
        ]
        assert any(_expected(states[k], event.text.split(), answer) for k in near), (event, answer, states[i])
    assert asked >= least


# --- named points of the recordings -----------------------------------------------------------------------------------


def test_users_wait_in_the_order_of_their_arrival() -> None:
    """Recording 01, S5: 1002 and 1003 arrive while 1001 works, in this order."""
    state = at("01", "23:56:32.000", "S1", "S2", "S3", "S4", "S5")
    assert state.next_users() == (1002, 1003)
    assert [s.uid for s in state.servers.values()] == [1001]
    waiting = state.waiting[0]
    assert (waiting.pid, round(waiting.since % 60, 3)) == (670, 30.397)


def test_a_server_has_the_limits_that_it_stated_itself() -> None:
    """Recording 01, S4: limits of device 7, which does not exist, and device 0 from earlier commands."""
    state = at("01", "23:56:23.000", "S1", "S2", "S3", "S4")
    server = state.servers[608]
    assert (server.uid, server.reported, server.status) == (1001, True, Status.ACTIVE)
    assert server.limits == Limits(100.0, {7: 1 << 30, 0: 140000 << 20})
    client = state.clients[606]
    assert (client.uid, client.contexts) == (1001, {0, 1})
    assert client.devices == {"GPU-513e171f-4520-0894-ba89-06b9f5c1d7b8"}
    assert client.queued is not None
    assert round(client.since - client.queued, 3) == pytest.approx(0.339)


def test_a_fault_names_its_clients_and_ends_with_the_last_of_them() -> None:
    """Recording 02, R4: 976, 987 and 988 have a sticky error, 976 ignores it until it is killed."""
    state = at("02", "00:00:31.160", "R4")
    server = state.servers[978]
    assert (server.status, server.sticky, server.devices_faulted) == (Status.FAULT, (976, 987, 988), (0,))
    later = at("02", "00:00:35.300", "R4")
    assert (later.servers[978].status, later.servers[978].sticky) == (Status.FAULT, (976,))
    over = at("02", "00:00:35.400", "R4")
    assert (over.servers[978].status, over.servers[978].sticky) == (Status.ACTIVE, ())
    assert dict(over.clients) == {}


def test_a_client_on_another_gpu_is_not_sticky() -> None:
    """Recording 05, M2: a fault on GPU 0 lists 618's neighbours there and leaves GPU 1's client alone."""
    events = by_time(*parsed("05", "M1", "M2"))
    state, seen = State(), False
    for event in events:
        state = apply(state, event)
        server = state.servers.get(620)
        if server is not None and server.status is Status.FAULT and server.sticky:
            seen = True
            assert 635 not in server.sticky
    assert seen


def test_a_forced_shutdown_ends_the_server_and_its_clients() -> None:
    """Recording 01, S6: the processes live on, but they are no clients any more."""
    state = at("01", "23:56:53.760", *[f"S{i}" for i in range(1, 7)])
    assert state.servers[716].forced
    assert state.servers[716].status is Status.SHUTTING_DOWN
    assert 710 in state.clients
    after = at("01", "23:56:53.800", *[f"S{i}" for i in range(1, 7)])
    assert 716 not in after.servers
    assert 710 not in after.clients
    assert after.servers[744].uid == 1002


def test_a_stopped_server_has_been_asked_to_shut_down_and_has_not_answered() -> None:
    """Recording 06, V3: that is how its hang shows."""
    server = at("06", "00:53:29.000", "V1", "V2", "V3").servers[553]
    assert server.stop_tried is not None
    assert server.status is Status.ACTIVE


def test_a_quit_with_a_timeout_says_when_it_should_be_over() -> None:
    """Recording 02, R10."""
    control = at("02", "00:01:02.000", "R10").control
    assert control is not None
    assert control.quitting is not None
    assert control.quit_by == control.quitting + 3
    ended = at("02", "00:01:03.500", "R10")
    assert ended.control is not None
    assert ended.control.exited is not None
    assert dict(ended.servers) == {}


def test_a_plain_quit_waits_without_saying_for_how_long() -> None:
    """Recording 02, R10: the second daemon is quitting from 01:05.114 on and never says so."""
    control = at("02", "00:01:07.000", "R10").control
    assert control is not None
    assert (control.quitting is not None, control.quit_by) == (True, None)


def test_a_refused_quit_is_no_quit() -> None:
    """Recording 02, R7: a user without the right may type ``quit``; the daemon goes on talking."""
    control = final("02", "R4", "R5", "R6", "R7").control
    assert control is not None
    assert control.quitting is None


def test_the_server_itself_says_how_many_clients_it_takes() -> None:
    """48 since Volta (recording 02, R13); older devices take 16."""
    state = daemon(*READY)
    assert state.servers[100].max_clients == 48
    assert apply(state, ev.ClientsFull(2, 100, 16)).servers[100].max_clients == 16


# --- order ------------------------------------------------------------------------------------------------------------

_SECTIONS = [
    ("01", "S3", "S4", "S5"),
    ("01", "S6", "S7"),
    ("02", "R3"),
    ("02", "R4", "R5", "R6"),
    ("02", "R10"),
    ("03", "Q1"),
    ("04", "T1"),
    ("05", "M2"),
    ("06", "V2"),
    ("06", "V3", "V4"),
]


def _plain(state: State) -> object:
    """What counts: not when each thing was first heard of, but what is so."""
    return (
        state.control and (state.control.pid, state.control.exited is None),
        {s.pid: (s.uid, s.status, s.limits, s.sticky, s.reported, s.forced) for s in state.servers.values()},
        {c.pid: (c.uid, c.server, c.contexts, c.devices) for c in state.clients.values()},
        {(w.pid, w.uid) for w in state.waiting},
    )


@settings(max_examples=60)
@given(st.sampled_from(_SECTIONS), st.floats(-0.05, 0.05), st.randoms(use_true_random=False))
def test_reading_one_log_up_to_50_ms_before_the_other_ends_in_the_same_state(
    section: tuple[str, ...], lead: float, random: object
) -> None:
    """Two files are read one after the other: a line of the one may be seen before an older line of the other."""
    control, server = parsed(*section)
    jitter: list[tuple[float, int, ev.LogEvent]] = []
    for source, events, shift in ((0, control, lead), (1, server, 0.0)):
        seen = float("-inf")
        for event in events:
            seen = max(seen, event.at + shift + random.uniform(-0.01, 0.01))  # type: ignore[attr-defined]
            jitter.append((seen, source, event))
    jitter.sort(key=lambda each: each[:2])
    assert _plain(apply_all(State(), [each[2] for each in jitter])) == _plain(final(*section))


@pytest.mark.parametrize("name", recordings.names())
def test_reading_from_the_last_start_of_the_daemon_arrives_at_the_same_state(name: str) -> None:
    """What an agent does when it is started: it reads control.log from there, and server.log from that time on or, if
    it cannot tell, from its beginning."""
    control, server = parsed(name)
    starts = [i for i, e in enumerate(control) if isinstance(e, ev.ControlStarted)]
    cut = control[starts[-1] :]
    expected = _plain(final(name))
    assert _plain(apply_all(State(), by_time(cut, [e for e in server if e.at >= cut[0].at]))) == expected
    assert _plain(apply_all(apply(State(), cut[0]), by_time(cut[1:], server))) == expected


# --- edges ------------------------------------------------------------------------------------------------------------


def daemon(*events: ev.Event) -> State:
    return apply_all(State(), [ev.ControlStarted(0, 10, "/s"), *events])  # type: ignore[list-item]


READY = (ev.ServerStarting(1, 100, 1001), ev.ServerReady(1.1, 100))


def test_a_late_line_does_not_bring_a_server_back() -> None:
    state = daemon(*READY, ev.ServerExited(5, 100, 0), ev.ServerStopping(4.99, 100), ev.ServerStopping(5.02, 100))
    assert dict(state.servers) == {}
    late = apply(state, ev.ContextConnected(4.9, 100, 200, 0))
    assert dict(late.clients) == {}


def test_a_line_of_an_earlier_daemons_server_changes_nothing() -> None:
    state = daemon(ev.ThreadsSet(-3, 77, 20.0), ev.ServerStartup(-4, 77), ev.ContextConnected(-2, 77, 5, 0))
    assert dict(state.servers) == {}
    assert dict(state.clients) == {}


def test_a_pid_may_be_a_server_again() -> None:
    state = daemon(*READY, ev.ServerExited(5, 100, 0), ev.ServerStartup(9, 100), ev.ServerStarting(9, 100, 1002))
    assert (state.servers[100].uid, state.servers[100].status) == (1002, Status.INITIALIZING)
    assert apply(state, ev.ServerExited(5, 100, 0)) is state


def test_a_server_whose_own_log_came_first_keeps_what_it_said() -> None:
    """Its clients get their user with it."""
    state = daemon(
        ev.ServerStartup(1, 100),
        ev.ThreadsSet(1.1, 100, 20.0),
        ev.ServerStarted(1.1, 100),
        ev.ContextConnected(1.1, 100, 200, 0),
        ev.ServerStarting(0.99, 100, 1001),
    )
    assert state.servers[100].limits.threads == 20.0
    assert state.servers[100].reported
    assert state.clients[200].uid == 1001
    assert state.clients[200].server == 100


def test_after_a_rotation_a_client_has_the_user_of_its_admission() -> None:
    """The line that named its server is gone from control.log."""
    admitted, connected = ev.ClientAdmitted(2, 200, 1001), ev.ContextConnected(2.1, 100, 200, 0)
    for order in ((admitted, connected), (connected, admitted)):
        state = apply_all(State(), list(order))
        assert (state.servers[100].uid, state.clients[200].uid) == (None, 1001)


def test_an_admission_to_a_known_users_server_leaves_nothing_behind() -> None:
    """With thousands of short clients a table of them was most of the time that reading a long log took."""
    state = daemon(*READY)
    assert apply(state, ev.ClientAdmitted(2, 200, 1001)) is state
    connected = apply(state, ev.ContextConnected(2.1, 100, 200, 0))
    assert connected.clients[200].uid == 1001


def test_another_daemons_exit_is_not_ours() -> None:
    """A second daemon on the same directories writes into the same log and exits (recording 02, R8)."""
    state = daemon(*READY)
    assert apply(state, ev.ControlExited(2, 999, 1)) is state


def test_a_daemon_that_has_gone_takes_everything_with_it() -> None:
    state = daemon(*READY, ev.ClientQueued(2, 200, 1002), ev.ControlGone(3))
    assert (dict(state.servers), state.waiting) == ({}, ())


def test_the_end_of_another_process_is_not_the_daemons() -> None:
    """A step of its fork into the background may have been taken for the daemon; that one runs on."""
    state = daemon(*READY)
    assert state.control is not None
    assert apply(state, ev.ControlGone(3, state.control.pid + 1)) is state
    gone = apply(state, ev.ControlGone(3, state.control.pid)).control
    assert gone is not None
    assert gone.exited == 3


def test_who_is_connected_is_not_put_back_into_the_list_by_an_older_line() -> None:
    state = daemon(*READY, ev.ContextConnected(2, 100, 200, 0), ev.ClientQueued(1.9, 200, 1001))
    assert state.waiting == ()


def test_a_waiting_process_that_has_ended_keeps_its_users_place() -> None:
    """MPS does not notice: it starts a server for its user all the same (conformance scenario X1)."""
    state = daemon(
        ev.ClientQueued(2, 200, 1002),
        ev.ClientQueued(2, 201, 1003),
        ev.ClientQueued(2, 202, 1002),
        ev.ProcessGone(3, 202),
        ev.ProcessGone(3, 200),
    )
    assert [(w.pid, w.gone) for w in state.waiting] == [(200, True), (201, False)]
    served = apply_all(state, [ev.ServerStarting(4, 100, 1002), ev.ServerReady(5, 100)])
    assert [w.pid for w in served.waiting] == [201]


def test_a_pid_may_wait_again_as_another_process() -> None:
    state = daemon(ev.ClientQueued(2, 200, 1002), ev.ProcessGone(3, 200), ev.ClientQueued(4, 200, 1003))
    assert [(w.uid, w.gone) for w in state.waiting] == [(1002, True), (1003, False)]


def test_dead_waiting_processes_do_not_fill_the_list() -> None:
    state = daemon()
    for pid in range(200, 700):
        state = apply_all(state, [ev.ClientQueued(2, pid, 1002), ev.ProcessGone(2, pid)])
    assert len(state.waiting) == 1


def test_the_word_of_mps_outweighs_the_logs() -> None:
    state = daemon(*READY, ev.ServerStatusSeen(2, 100, "FAULT"))
    assert (state.servers[100].status, state.servers[100].fault_since) == (Status.FAULT, 2)
    assert apply(state, ev.ServerStatusSeen(3, 100, "ACTIVE")).servers[100].status is Status.ACTIVE
    assert apply(state, ev.ServerStatusSeen(3, 100, "GARBAGE")) == state


def test_a_fault_of_a_server_that_is_shutting_down_does_not_make_it_active_afterwards() -> None:
    state = daemon(*READY, ev.ServerStopping(2, 100), ev.FaultStarted(3, 100), ev.FaultDevice(3, 100, 0))
    assert apply(state, ev.ContextDestroyed(4, 100, 0)).servers[100].status is Status.SHUTTING_DOWN


def test_an_idle_server_knows_since_when() -> None:
    state = daemon(*READY)
    assert state.servers[100].idle_since == 1.1
    state = apply(state, ev.ContextConnected(2, 100, 200, 0))
    assert state.servers[100].idle_since is None
    assert apply(state, ev.ClientDisconnected(3, 100, 200)).servers[100].idle_since == 3


# --- anything at all --------------------------------------------------------------------------------------------------

_SMALL = st.integers(0, 5)
_FIELDS: dict[str, st.SearchStrategy[object]] = {
    "at": st.floats(0, 100),
    "socket": st.just("/s"),
    "text": st.sampled_from(["quit", "ps", "x"]),
    "source": st.just("control"),
    "uuid": st.sampled_from(["GPU-0", "GPU-1"]),
    "backoff": st.booleans(),
    "percent": st.floats(0, 100),
    "delay": st.floats(0, 10),
    "reason": st.just("status 807"),
    "size": st.integers(0, 1 << 40),
    "limit": st.integers(1, 48),
    "context": st.integers(0, 3),
}
_KINDS = [*get_args(ev.LogEvent), ev.ProcessGone, ev.ServerStatusSeen, ev.ControlGone]
_STATUS = st.sampled_from([*Status, "GARBAGE"])


def _any(kind: type) -> st.SearchStrategy[ev.Event]:
    names: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    choose = {}
    for name in names:
        numeric = _STATUS if kind is ev.ServerStatusSeen else _SMALL
        choose[name] = _FIELDS.get(name, numeric if name == "status" else _SMALL)
    return st.builds(kind, **choose)


@settings(max_examples=300)
@given(st.lists(st.one_of([_any(kind) for kind in _KINDS]), max_size=60))
def test_no_order_of_events_raises_and_the_state_stays_whole(events: list[ev.Event]) -> None:
    state = State()
    for event in events:
        state = apply(state, event)
        assert all(s.pid == pid for pid, s in state.servers.items())
        assert all(c.server in state.servers for c in state.clients.values())
        live = [w.pid for w in state.waiting if not w.gone]
        assert len(set(live)) == len(live)
        assert all(s.status is not Status.FAULT or s.fault_since is not None for s in state.servers.values())
        assert not set(state.servers) & set(state.ended)


def test_the_state_is_bounded_whatever_the_logs_say() -> None:
    state = daemon()
    for i in range(6000):
        state = apply(state, ev.ClientQueued(i, i, 1001))
        state = apply(state, ev.ServerStartup(i, 10000 + i))
        state = apply(state, ev.ServerExited(i, 20000 + i, 0))
        state = apply(state, ev.ContextConnected(i, 10000, 30000 + i, 0))
    assert len(state.servers) <= 64
    assert len(state.ended) <= 64
    assert len(state.waiting) <= 4096
    assert len(state.clients) <= 4096
    assert len(state.uids) <= 64
