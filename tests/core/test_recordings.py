"""The logs of the recordings to state. Ground truth is what MPS itself answered in them.

The logs make nobody a client: here they are held against what servers said of pids (attachments)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpsagent.core.model import State, Status
from mpsagent.mps import events as ev
from mpsagent.mps.limits import Limits
from mpsagent.mps.loglines import LogParser
from tests import recordings
from tests.core.reducing import apply, apply_all

Events = Sequence[ev.Line]


@cache
def parsed(name: str, *sections: str) -> tuple[list[ev.Line], list[ev.Line]]:
    logs = recordings.logs(name, *sections)
    return LogParser("control", UTC).feed(logs.control), LogParser("server", UTC).feed(logs.server)


def by_time(control: Events, server: Events) -> list[ev.Line]:
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
        if event.what in (ev.CommandRead, ev.ConnectionLine):
            return lines, i
        if event.what is ev.CommandAnswer:
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
            clients = [] if known is None else [str(pid) for pid in known.attached]
            return sorted(answer) == (unknown if known is None else sorted(clients))
        case ["ps"]:  # lists contexts, so a process that has only its channel to the server is not there
            listed = {line.split()[0]: line.split()[2] for line in answer if line[:1].isdecimal()}
            return listed == {
                str(pid): str(s.pid) for s in state.servers.values() for pid, one in s.attached.items()
                if one.contexts - {0}
            }  # fmt: skip
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
        if event.what is not ev.CommandRead or not event.text.split():
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


def test_a_server_has_the_limits_that_it_stated_itself() -> None:
    """Recording 01, S4: limits of device 7, which does not exist, and device 0 from earlier commands."""
    state = at("01", "23:56:23.000", "S1", "S2", "S3", "S4")
    server = state.servers[608]
    assert (server.uid, server.reported, server.status) == (1001, True, Status.ACTIVE)
    assert server.limits == Limits(100.0, {7: 1 << 30, 0: 140000 << 20})
    attached = server.attached[606]
    assert attached.contexts == {0, 1}
    assert attached.devices == {"GPU-513e171f-4520-0894-ba89-06b9f5c1d7b8"}
    assert dict(state.clients) == {}, "a line makes nobody a client"


def test_a_fault_names_its_clients_and_ends_with_the_last_of_them() -> None:
    """Recording 02, R4: 976, 987 and 988 have a sticky error, 976 ignores it until it is killed."""
    server = at("02", "00:00:31.160", "R4").servers[978]
    assert (server.status, server.sticky, server.devices_faulted) == (Status.FAULT, (976, 987, 988), (0,))
    later = at("02", "00:00:35.300", "R4").servers[978]
    assert (later.status, later.sticky) == (Status.FAULT, (976,))
    over = at("02", "00:00:35.400", "R4").servers[978]
    assert (over.status, over.sticky, dict(over.attached)) == (Status.ACTIVE, (), {})


def test_a_forced_shutdown_ends_the_server() -> None:
    """Recording 01, S6."""
    sections = [f"S{i}" for i in range(1, 7)]
    state = at("01", "23:56:53.760", *sections)
    assert state.servers[716].forced
    assert state.servers[716].status is Status.SHUTTING_DOWN
    assert 710 in state.servers[716].attached
    after = at("01", "23:56:53.800", *sections)
    assert 716 not in after.servers
    assert after.servers[744].uid == 1002


def test_a_stopped_server_has_been_asked_to_shut_down_and_has_not_answered() -> None:
    """Recording 06, V3: that is how its hang shows."""
    server = at("06", "00:53:29.000", "V1", "V2", "V3").servers[553]
    assert server.stop_tried is not None
    assert server.status is Status.ACTIVE


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
    """What counts: not when each thing was first heard of, but what it is."""
    return (
        state.control and state.control.pid,
        {s.pid: (s.uid, s.status, s.limits, s.sticky, s.reported, s.forced) for s in state.servers.values()},
        {(s.pid, pid): (a.contexts, a.devices) for s in state.servers.values() for pid, a in s.attached.items()},
    )


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(_SECTIONS), st.floats(-0.05, 0.05), st.randoms(use_true_random=False))
def test_reading_one_log_up_to_50_ms_before_the_other_ends_in_the_same_state(
    section: tuple[str, ...], lead: float, random: object
) -> None:
    """Two files are read one after the other: a line of the one may be seen before an older line of the other. (The
    daemon's first line comes from the kernel's word that it runs, before any of its servers.)"""
    control, server = parsed(*section)
    jitter: list[tuple[float, int, ev.Line]] = []
    for source, events, shift in ((0, control, lead), (1, server, 0.0)):
        seen = float("-inf")
        for event in events:
            seen = max(seen, event.at + shift + random.uniform(-0.01, 0.01))  # type: ignore[attr-defined]
            first = event.what is ev.ControlStarted
            jitter.append((event.at - 0.1 if first else seen, source, event))
    jitter.sort(key=lambda each: each[:2])
    assert _plain(apply_all(State(), [each[2] for each in jitter])) == _plain(final(*section))


@pytest.mark.parametrize("name", [name for name in recordings.names() if name < "08"])  # a daemon starts in these
def test_reading_from_the_last_start_of_the_daemon_arrives_at_the_same_state(name: str) -> None:
    """What an agent does when it is started: it reads control.log from there, and server.log from that time on or, if
    it cannot tell, from its beginning."""
    control, server = parsed(name)
    starts = [i for i, e in enumerate(control) if e.what is ev.ControlStarted]
    cut = control[starts[-1] :]
    expected = _plain(final(name))
    assert _plain(apply_all(State(), by_time(cut, [e for e in server if e.at >= cut[0].at]))) == expected
    assert _plain(apply_all(apply(State(), cut[0]), by_time(cut[1:], server))) == expected
