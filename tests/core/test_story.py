"""The story of the recordings. What is expected here was read in the transcripts, not taken from the program."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsagent.cli.replay import merged
from mpsagent.core.story import ClientRecord, Outcome, ServerRecord, Story, tell
from mpsagent.mps import events as ev
from tests import recordings


def told(name: str, *sections: str) -> Story:
    logs = recordings.logs(name, *sections)
    return tell(merged(io.BytesIO(logs.control), io.BytesIO(logs.server), UTC))


def client(story: Story, pid: int) -> ClientRecord:
    (one,) = [c for c in story.clients if c.pid == pid]
    return one


def server(story: Story, pid: int) -> ServerRecord:
    (one,) = [s for s in story.servers if s.pid == pid]
    return one


def at(text: str) -> float:
    return pytest.approx(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp(), abs=0.0005)  # type: ignore


def test_a_forced_shutdown_loses_the_holders_clients_and_serves_who_waited() -> None:
    """Recording 01, S6: 710 computes, 725 of another user waits, `shutdown_server 716 -f` takes the server away."""
    story = told("01")
    lost = client(story, 710)
    assert (lost.outcome, lost.server, lost.disconnected) == (Outcome.LOST, 716, at("2026-11-20 23:56:53.773"))
    forced = server(story, 716)
    assert forced.forced
    assert (forced.exited, forced.exit_status) == (at("2026-11-20 23:56:53.773"), 0)
    served = client(story, 725)
    assert (served.outcome, served.server, served.uid) == (Outcome.OK, 744, 1002)
    assert (served.queued, served.connected) == (at("2026-11-20 23:56:46.746"), at("2026-11-20 23:56:53.831"))
    assert served.waited == pytest.approx(7.085, abs=0.001)
    assert [s.pid for s in story.servers if s.forced] == [716]


def test_a_terminated_client_and_its_neighbour() -> None:
    """Recording 01, S7: `terminate_client 769 778` ends 778; 763 beside it finishes."""
    story = told("01", "S7")
    assert client(story, 778).outcome is Outcome.TERMINATED
    assert client(story, 778).disconnected == at("2026-11-20 23:57:15.699")
    assert client(story, 763).outcome is Outcome.OK
    assert client(story, 791).outcome is Outcome.OK


def test_a_fault_its_sticky_clients_and_who_came_meanwhile() -> None:
    """Recording 02, R4: 988 did it, the log accuses 976, all three are listed; 1009 is refused until 976 is killed."""
    story = told("02", "R4")
    (fault,) = story.faults
    assert (fault.server, fault.at, list(fault.sticky)) == (978, at("2026-11-21 00:00:31.147"), [976, 987, 988])
    assert fault.recovered == at("2026-11-21 00:00:35.308"), "server context destroyed: clients are taken again"
    for pid in (976, 987, 988):
        assert client(story, pid).outcome is Outcome.FAULTED
    (refusal,) = story.refused
    assert (refusal.pid, refusal.at, refusal.reason) == (1009, at("2026-11-21 00:00:32.299"), "status 807")
    refused = client(story, 1009)
    assert (refused.outcome, refused.uid, refused.server, refused.connected) == (Outcome.REFUSED, 1001, 978, None)
    assert client(story, 1021).outcome is Outcome.OK
    assert server(story, 978).faults == 1


def test_a_killed_server_loses_its_client_and_the_next_one_gets_a_new_server() -> None:
    """Recording 02, R6, after the fault of R5 on the same server (hence the sections before it)."""
    story = told("02", "R4", "R5", "R6")
    assert client(story, 1058).outcome is Outcome.LOST
    assert client(story, 1068).server == 1070
    assert [(f.at, list(f.sticky)) for f in story.faults][1] == (at("2026-11-21 00:00:41.241"), [1031])
    assert not server(story, 978).forced, "a SIGKILL is not MPS's own force"


def test_quit_with_a_timeout_forces_and_a_plain_quit_waits() -> None:
    """Recording 02, R10: `quit -t 3` takes 1147's server away; under a plain `quit` 1174 finishes."""
    story = told("02", "R10")
    assert client(story, 1147).outcome is Outcome.LOST
    assert server(story, 1149).forced
    assert client(story, 1174).outcome is Outcome.OK
    assert not server(story, 1176).forced
    assert server(story, 1176).exited == at("2026-11-21 00:01:11.382")


def test_a_sticky_client_that_is_then_terminated_stays_faulted() -> None:
    """Recording 03, Q3 and Q4: the first cause counts; 28 s pass until the server takes clients again."""
    story = told("03", "Q3", "Q4")
    assert client(story, 633).outcome is Outcome.FAULTED
    (fault,) = story.faults
    assert list(fault.sticky) == [633, 645]
    assert fault.recovered == at("2026-11-21 00:09:31.096")
    assert client(story, 675).outcome is Outcome.OK


def test_a_stopped_client_that_is_terminated() -> None:
    """Recording 03, Q6: the request stands for 13 s until the process is killed; its neighbour finishes."""
    story = told("03", "Q6")
    assert client(story, 747).outcome is Outcome.TERMINATED
    assert client(story, 747).disconnected == at("2026-11-21 00:10:06.268")
    assert client(story, 742).outcome is Outcome.OK


def test_a_killed_control_daemon_takes_its_server_with_it() -> None:
    """Recording 06, V4: no line says that server 581 ended; the next daemon's start is the latest that it lived."""
    story = told("06", "V4")
    assert (server(story, 581).exited, server(story, 581).exit_status) == (at("2026-11-21 00:53:35.525"), None)
    assert client(story, 579).outcome is Outcome.LOST
    assert client(story, 602).outcome is Outcome.OK


def test_a_stopped_server_that_is_killed_while_somebody_waits() -> None:
    """Recording 06, V3."""
    story = told("06", "V3")
    assert client(story, 551).outcome is Outcome.LOST
    assert client(story, 564).waited == pytest.approx(30.296 - 26.715, abs=0.001)


def test_limits_are_those_that_the_server_reported() -> None:
    """Recording 06, V3: 45 % and 0x80000000 bytes on device 0."""
    one = server(told("06", "V3"), 571)
    assert (one.threads, one.memory) == (45.0, {0: 0x80000000})


def test_a_fault_on_one_gpu_leaves_the_other_gpus_client_alone() -> None:
    """Recording 05, M2: 635 on GPU 1 is not in the list and goes on."""
    story = told("05", "M1", "M2")
    assert client(story, 635).outcome is Outcome.OK
    (fault,) = story.faults
    assert (list(fault.sticky), list(fault.devices)) == ([618, 669], [0])
    assert [(r.pid, r.reason) for r in story.refused] == [(678, "status 807"), (680, "status 807")]


def test_a_full_server_refuses_without_names() -> None:
    """Recording 02, R13 has only the refusals' lines: sixteen of them, with no pid."""
    lines = [line for line in recordings.path("02").read_text().splitlines() if "Failed to accept new client." in line]
    log = "".join(line.split("server.log*| ")[1] + "\n" for line in lines).encode()
    story = tell(merged(io.BytesIO(b""), io.BytesIO(log), UTC))
    assert [(r.pid, r.reason) for r in story.refused] == [(None, "server full (48 clients)")] * 16


def test_a_client_without_a_context_on_a_full_server_was_refused() -> None:
    """Recording 02, R13: cuInit succeeded (a channel), the context got MPS_MAX_CLIENTS_REACHED."""
    story = tell(
        [
            ev.ServerStarting(1.0, 10, 1001),
            ev.ServerReady(2.0, 10),
            ev.ContextConnected(3.0, 10, 7, 0),
            ev.ContextConnected(3.1, 10, 8, 0),
            ev.ContextConnected(3.2, 10, 8, 1),
            ev.ClientsFull(3.5, 10, 48),
            ev.ClientDisconnected(4.0, 10, 7),
            ev.ClientDisconnected(5.0, 10, 8),
        ]
    )
    assert (client(story, 7).outcome, client(story, 8).outcome) == (Outcome.REFUSED, Outcome.OK)


def test_who_still_waits_at_the_end_was_never_served_and_who_still_runs_is_ok() -> None:
    """So that a log cut off in the middle says what it can."""
    story = tell(
        [
            ev.ServerStarting(1.0, 10, 1001),
            ev.ServerReady(2.0, 10),
            ev.ContextConnected(3.0, 10, 7, 0),
            ev.ClientQueued(4.0, 8, 1002),
            ev.ShutdownTried(9.0, 10),
        ]
    )
    assert (client(story, 7).outcome, client(story, 7).disconnected) == (Outcome.OK, None)
    assert (client(story, 8).outcome, client(story, 8).waited) == (Outcome.NEVER_SERVED, 5.0)
    assert server(story, 10).exited is None


def test_who_left_while_waiting_was_never_served() -> None:
    """All who wait are attached when the server becomes Ready; who was not had gone, and its pid may come again."""
    story = tell(
        [
            ev.ClientQueued(1.0, 8, 1002),
            ev.ServerStarting(2.0, 10, 1002),
            ev.ServerReady(3.0, 10),
            ev.ServerExited(4.0, 10, 0),
            ev.ClientQueued(50.0, 8, 1002),
            ev.ServerStarting(50.1, 11, 1002),
            ev.ServerReady(50.2, 11),
            ev.ContextConnected(50.2, 11, 8, 0),
            ev.ClientDisconnected(51.0, 11, 8),
        ]
    )
    assert [(c.outcome, c.waited) for c in story.clients] == [
        (Outcome.NEVER_SERVED, 2.0),
        (Outcome.OK, pytest.approx(0.2)),
    ]


@pytest.mark.parametrize("name", recordings.names())
def test_every_client_of_every_recording_has_an_outcome_a_user_and_no_negative_wait(name: str) -> None:
    """The promise of `replay`: nobody is left out, and no line is unknown."""
    story = told(name)
    assert story.unknown_lines == 0
    for one in story.clients:
        assert one.outcome is not None
        assert one.uid is not None
        assert one.waited >= 0.0


_PIDS = st.integers(1, 4)
_ANY = st.one_of(
    st.builds(ev.ClientQueued, st.just(0.0), _PIDS, _PIDS),
    st.builds(ev.ClientAdmitted, st.just(0.0), _PIDS, _PIDS),
    st.builds(ev.ServerStarting, st.just(0.0), _PIDS, _PIDS),
    st.builds(ev.ServerStartup, st.just(0.0), _PIDS),
    st.builds(ev.ServerReady, st.just(0.0), _PIDS),
    st.builds(ev.ServerExited, st.just(0.0), _PIDS, st.just(0)),
    st.builds(ev.ShutdownForced, st.just(0.0), _PIDS),
    st.builds(ev.ContextConnected, st.just(0.0), _PIDS, _PIDS, st.integers(0, 2)),
    st.builds(ev.ClientDisconnected, st.just(0.0), _PIDS, _PIDS),
    st.builds(ev.FaultStarted, st.just(0.0), _PIDS),
    st.builds(ev.FaultDevice, st.just(0.0), _PIDS, _PIDS),
    st.builds(ev.FaultClient, st.just(0.0), _PIDS, _PIDS),
    st.builds(ev.ContextDestroyed, st.just(0.0), _PIDS, _PIDS),
    st.builds(ev.TerminationAsked, st.just(0.0), _PIDS, _PIDS),
    st.builds(ev.ClientRefused, st.just(0.0), _PIDS, _PIDS, st.just("status 807")),
    st.builds(ev.ClientsFull, st.just(0.0), _PIDS, st.just(48)),
    st.builds(ev.ControlStarted, st.just(0.0), _PIDS, st.just("s")),
    st.builds(ev.ControlExited, st.just(0.0), _PIDS, st.just(0)),
)


@given(st.lists(_ANY, max_size=40))
def test_no_order_of_events_breaks_the_story(events: list[ev.Line]) -> None:
    """Logs are cut, rotated and hostile: any order gives a story in which every client has ended in exactly one way."""
    story = tell([event._replace(at=float(i)) for i, event in enumerate(events)])
    assert all(c.outcome is not None for c in story.clients)
    assert all(c.connected is None or c.disconnected is None or c.disconnected >= c.connected for c in story.clients)
    assert sum(s.faults for s in story.servers) == len(story.faults)


def test_pids_that_are_none_are_no_clients() -> None:
    """A daemon in another pid namespace does not know them (recording 09); a line may say anything below 1."""
    story = tell(
        [
            ev.ClientQueued(1.0, 0, 1001),
            ev.ClientQueued(1.0, 0, 1002),
            ev.ServerStarting(1.0, 10, 1001),
            ev.ServerReady(2.0, 10),
            ev.ContextConnected(2.0, 10, 0, 0),
            ev.ContextConnected(2.0, 10, -1003, 0),
            ev.ClientRefused(2.5, 10, 0, "status 807"),
            ev.ClientDisconnected(3.0, 10, 0),
            ev.ServerExited(4.0, 10, 0),
        ]
    )
    assert [(one.pid, one.uid, one.outcome, one.waited) for one in story.clients] == [
        (None, 1001, Outcome.UNKNOWN, 1.0),
        (None, 1002, Outcome.NEVER_SERVED, 3.0),
    ]
    assert [one.pid for one in story.refused] == [None]


def test_a_tie_of_both_logs_makes_nobody_a_gate() -> None:
    """server.log goes first on a tie: a client may connect before it is announced, while another one waits in vain."""
    story = tell([
        ev.ClientQueued(1.0, 10, 1001),
        ev.ContextConnected(2.0, 5, 20, 0),
        ev.ClientAdmitted(2.0, 20, 1002),
    ])  # fmt: skip
    assert [one.pid for one in story.clients] == [10, 20]
