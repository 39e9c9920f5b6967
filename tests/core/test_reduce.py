"""Inputs to state: lines and the gate's words in odd orders, and bounds. test_recordings.py: the logs of real MPS."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from datetime import UTC
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpsagent.core import actions as act
from mpsagent.core import admission, changes
from mpsagent.core import inputs as inp
from mpsagent.core import transitions as tr
from mpsagent.core.coordinator import Core
from mpsagent.core.model import FAULT_WITHIN, Doubt, State, Status
from mpsagent.core.reduce import reduce
from mpsagent.core.view import View
from mpsagent.mps import events as ev
from mpsagent.mps.limits import Limits
from mpsagent.mps.loglines import LogParser
from mpsagent.wire import link
from tests.core import said
from tests.core.reducing import KINDS, apply, apply_all

# --- the logs ---------------------------------------------------------------------------------------------------------


def daemon(*events: inp.Input) -> State:
    return apply_all(State(), [inp.ControlRuns(0, 10, 0, "/s"), *events])


READY = (ev.ServerStarting(1, 100, 1001), ev.ServerReady(1.1, 100))


def test_a_late_line_does_not_bring_a_server_back() -> None:
    state = daemon(*READY, ev.ServerExited(5, 100, 0), ev.ServerStopping(4.99, 100), ev.ServerStopping(5.02, 100))
    assert dict(state.servers) == {}
    assert dict(apply(state, ev.ContextConnected(4.9, 100, 200, 0)).servers) == {}


def test_a_line_of_an_earlier_daemons_server_changes_nothing() -> None:
    state = daemon(ev.ThreadsSet(-3, 77, 20.0), ev.ServerStartup(-4, 77), ev.ContextConnected(-2, 77, 5, 0))
    assert dict(state.servers) == {}


def test_a_line_cannot_make_the_daemon_older() -> None:
    """Lines of an earlier one would count again."""
    state = daemon(ev.ControlStarted(-1000, 10, "/s"), ev.ServerStartup(-500, 77))
    assert dict(state.servers) == {}


def test_a_pid_may_be_a_server_again() -> None:
    state = daemon(*READY, ev.ServerExited(5, 100, 0), ev.ServerStartup(9, 100), ev.ServerStarting(9, 100, 1002))
    assert (state.servers[100].uid, state.servers[100].status) == (1002, Status.INITIALIZING)
    assert apply(state, ev.ServerExited(5, 100, 0)) is state


def test_a_server_whose_own_log_came_first_keeps_what_it_said() -> None:
    state = daemon(
        ev.ServerStartup(1, 100), ev.ThreadsSet(1.1, 100, 20.0), ev.ServerStarted(1.1, 100),
        ev.ContextConnected(1.1, 100, 200, 0), ev.ServerStarting(0.99, 100, 1001),
    )  # fmt: skip
    server = state.servers[100]
    assert (server.uid, server.limits.threads, server.reported) == (1001, 20.0, True)
    assert 200 in server.attached


def test_what_other_daemons_lines_say_changes_nothing() -> None:
    state = daemon(*READY)
    assert apply(state, ev.ControlExited(2, 999, 1)) is state
    assert apply(state, ev.ControlStarted(2, 999, "/other")) is state


def test_a_daemon_that_has_gone_takes_everything_with_it() -> None:
    state = apply(passed(daemon(*READY)), ev.ContextConnected(2, 100, 200, 1))
    gone = apply(state, inp.ControlGone(3, 10))
    assert (gone.control, dict(gone.servers)) == (None, {})
    assert gone.clients[200].detached is not None
    assert gone.clients[200].outcome == "lost"
    assert apply(state, inp.ControlGone(3, 11)) is state  # another process than ours


def test_the_word_of_mps_outweighs_the_logs() -> None:
    state = daemon(*READY, inp.ServerStatusSeen(2, 100, "FAULT"))
    assert (state.servers[100].status, state.servers[100].fault_since) == (Status.FAULT, 2)
    assert apply(state, inp.ServerStatusSeen(3, 100, "ACTIVE")).servers[100].status is Status.ACTIVE
    assert apply(state, inp.ServerStatusSeen(3, 100, "GARBAGE")) == state


def test_an_answer_that_is_older_than_a_line_confirms_nothing() -> None:
    state = daemon(*READY, ev.FaultStarted(2, 100), inp.ServerStatusSeen(2.05, 100, "ACTIVE"))
    assert state.servers[100].status is Status.FAULT
    over = apply_all(state, [ev.FaultDevice(2, 100, 0), ev.ContextDestroyed(3, 100, 0)])
    assert over.servers[100].status is Status.ACTIVE
    assert apply(over, inp.ServerStatusSeen(3.01, 100, "FAULT")).servers[100].status is Status.ACTIVE
    assert apply(over, inp.ServerStatusSeen(4, 100, "FAULT")).servers[100].status is Status.FAULT


def test_a_fault_of_a_server_that_is_shutting_down_does_not_make_it_active_afterwards() -> None:
    state = daemon(*READY, ev.ServerStopping(2, 100), ev.FaultStarted(3, 100), ev.FaultDevice(3, 100, 0))
    assert apply(state, ev.ContextDestroyed(4, 100, 0)).servers[100].status is Status.SHUTTING_DOWN


def test_an_idle_server_knows_since_when() -> None:
    state = daemon(*READY)
    assert state.servers[100].idle_since == 1.1
    state = apply(state, ev.ContextConnected(2, 100, 200, 0))
    assert state.servers[100].idle_since is None
    assert apply(state, ev.ClientDisconnected(3, 100, 200)).servers[100].idle_since == 3


def test_a_client_that_leaves_properly_while_its_server_is_busy_has_not_died_at_work() -> None:
    """While a server waits for a client in a hand-over, only the thread of another client that leaves writes a line;
    "exiting" comes later, after the process has exited. Each of these clients held new ones up for 0.7 s."""
    lost = "[1970-01-01 00:00:{:06.3f} Server   100] Server failed to recevie command with status 806, assuming client "
    lost += "{{PID: 200, Context ID: 1}} exit\n"
    for closed, doubt in ((4.0, False), (4.028, True)):
        state = apply(passed(daemon(*READY)), ev.ContextConnected(2, 100, 200, 0))
        lines = LogParser("server", UTC).feed(lost.format(closed).encode())
        state = apply_all(state, [ev.ContextConnected(2, 100, 200, 1), *lines, inp.ProcessEnded(4.03, 200)])
        assert (state.servers[100].doubt is not None) is doubt


def test_a_stopped_server_may_notice_a_death_when_it_runs_again() -> None:
    """New clients were admitted as soon as it ran, and the fault came 0.15 s later (world, minute, seed 99207678)."""
    state = apply(passed(daemon(*READY)), ev.ContextConnected(2, 100, 200, 0))
    seen = [inp.ProcessesSeen(at, frozenset({100}), {}, {}) for at in (4.0, 5.0, 6.0, 7.0)]
    state = apply_all(state, [ev.ContextConnected(2, 100, 200, 1), seen[0], inp.ProcessEnded(4.3, 200), *seen[1:]])
    assert state.servers[100].doubt.until >= 7.0 + FAULT_WITHIN
    later = apply(state, inp.ProcessesSeen(8.0, frozenset(), {}, {}))
    assert later.servers[100].doubt == state.servers[100].doubt


def test_a_stopped_server_stays_in_the_lane_of_its_user() -> None:
    """It was put into the lane of all users as well, and was shown for ever after its end."""
    lines = [ev.ContextConnected(2, 100, 200, 0), ev.ContextConnected(2, 100, 200, 1)]
    user = [inp.Of(1001, one) for one in (inp.ControlRuns(0, 10, 0, "/s"), *READY, *lines)]
    core = Core()
    core.absorb([inp.DaemonOpened(0, 1001), *user, said.knocked(1.0, 1, PEER, 1.0)])
    passed = said.passed(1.5, 1, inp.Peer(200, 1001, 0, PEER.start), Limits(20.0), False, 0.1)
    core.absorb([inp.Of(1001, passed), inp.ProcessEnded(4.3, 200), inp.ProcessesSeen(4.5, frozenset({100}), {}, {})])
    assert core.state.servers[100].doubt.until > 5.5
    assert [set(one.state.servers) for one in core.engines.values()] == [set(), {100}]


def two_daemons() -> Core:
    """Users 1001 and 1002 have control daemons of their own, each with a server: 100 and 300."""
    core = Core()
    for uid, control, server in ((1001, 10, 100), (1002, 30, 300)):
        lines = ev.ServerStarting(1, server, uid), ev.ServerReady(1.5, server)
        own = (inp.Of(uid, one) for one in (inp.ControlRuns(0, control, 0, "/s"), *lines))
        core.absorb([inp.DaemonOpened(0, uid), *own])
    return core


def test_a_stopped_server_costs_no_other_daemon_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of one control daemon's servers was that of all together."""
    monkeypatch.setattr(changes, "_MOST_SERVERS", 1)
    core = two_daemons()
    engine = core.engines[1002]
    doubted = replace(engine.state.servers[300], doubt=Doubt(4.0, 6.0))
    core._became(engine, replace(engine.state, servers={300: doubted}))
    core.absorb([inp.ProcessesSeen(4.5, frozenset({300}), {}, {})])
    assert [set(one.state.servers) for one in core.engines.values()] == [set(), {100}, {300}]
    assert core.state.servers[300].doubt.until > 6.0


def test_a_process_is_a_client_of_one_daemon_at_a_time() -> None:
    """What came again at another daemon before its end was known stayed a client of the first one for ever."""
    core = two_daemons()
    first, again = inp.Peer(200, 1001, 0, 1), inp.Peer(200, 1002, 0, 2)
    limits = Limits(20.0)
    core.absorb([inp.Of(1001, said.passed(2.0, 1, first, limits, False, 0.1))])
    core.absorb([inp.Of(1002, said.passed(3.0, 2, again, limits, False, 0.1))])
    assert [set(one.state.clients) for one in core.engines.values()] == [set(), set(), {200}]
    core.absorb([inp.ProcessEnded(4.0, 200, 2)])
    assert not core.state.clients
    assert not any(one.state.clients for one in core.engines.values())


def test_the_server_itself_says_how_many_clients_it_takes() -> None:
    """48 since Volta (recording 02, R13); older devices take 16, and less is not believed."""
    state = daemon(*READY)
    assert state.servers[100].max_clients == 48
    assert apply(state, ev.ClientsFull(2, 100, 16)).servers[100].max_clients == 16
    assert apply(state, ev.ClientsFull(2, 100, 1)).servers[100].max_clients == 16


def test_a_process_that_is_refused_one_more_context_has_not_left() -> None:
    """An H200: after the line that says that it is full, the server says of that process that it has disconnected; it
    goes on with the contexts that it has."""
    lines = [ev.ContextConnected(2, 100, 200, context) for context in range(3)]
    refused = [ev.ContextConnected(3, 100, 200, 3), ev.ClientsFull(3, 100, 48), ev.ClientDisconnected(3, 100, 200)]
    state = apply_all(daemon(*READY), [*lines, *refused])
    assert state.servers[100].attached[200].contexts == {0, 1, 2}
    assert 200 not in apply(state, ev.ClientDisconnected(4, 100, 200)).servers[100].attached


def test_how_many_contexts_fit_is_known_by_the_driver_that_the_server_names() -> None:
    assert apply(daemon(*READY), ev.DriverNamed(2, 100, 580)).servers[100].max_clients == 48
    assert apply(daemon(*READY), ev.DriverNamed(2, 100, 590)).servers[100].max_clients == 60


# --- the gate ---------------------------------------------------------------------------------------------------------

PEER = inp.Peer(200, 1001, 1001, 77, "/user.slice", 4026531836, "python")


def knocked(state: State, connection: int = 1, peer: inp.Peer = PEER, since: float = 1.0) -> State:
    return apply(state, said.knocked(since, connection, peer, since))


def passed(state: State, connection: int = 1, at: float = 1.5) -> State:
    """As the gate tells it: without what it said when the client came."""
    bare = inp.Peer(PEER.pid, PEER.uid, 0, PEER.start)
    return apply(knocked(state, connection), said.passed(at, connection, bare, Limits(20.0), False, 0.1))


def test_a_client_is_who_the_kernel_said_when_it_came() -> None:
    client = passed(State()).clients[200]
    assert client.peer == PEER
    assert (client.waited, client.limits.threads, client.connections) == (0.5, 20.0, 1)


def test_its_next_connection_is_known_to_be_of_a_client() -> None:
    state = knocked(knocked(State(), 1), 2)
    assert not state.held[2].of_client
    state = apply(state, said.passed(2, 1, inp.Peer(200, 1001, 0, 77), Limits(), False, 0.1))
    assert state.held[2].of_client
    assert knocked(state, 3).held[3].of_client
    assert not knocked(state, 3, PEER._replace(start=78)).held[3].of_client


def test_a_pid_that_another_process_has_now_is_another_client() -> None:
    state = knocked(passed(State()), 2, PEER._replace(start=78))
    state, happened = reduce(state, said.passed(3, 2, inp.Peer(200, 1001, 0, 78), Limits(), False, 0.1))
    assert [type(one) for one in happened] == [tr.ClientEnded, tr.ClientConnected]
    assert apply(state, inp.ProcessEnded(4, 200, 77)) is state
    assert 200 not in apply(state, inp.ProcessEnded(4, 200, 78)).clients


def test_a_client_that_has_ended_is_counted_once_whatever_the_gate_tells_of_it_later() -> None:
    """It was handing over a further context, or had found it in its store (world, habits, seeds 668273652 and
    668261101)."""
    bare = inp.Peer(200, 1001, 0, 77)
    further = said.passed(5, 2, bare, Limits(), False, 0.1)
    ended, happened = reduce(knocked(passed(daemon(*READY)), 2), inp.ProcessEnded(4, 200, 77))
    assert [type(one) for one in happened] == [tr.ClientEnded]
    late = [further, said.known(6, PEER, 1.5, Limits()), said.knocked(7, 3, PEER, 7.0), inp.ProcessEnded(8, 200, 77)]
    for event in [*late, inp.GateSaid(9, link.Left(3))]:
        ended, happened = reduce(ended, event)
        assert (happened, dict(ended.clients)) == ([], {})
    assert len(ended.held) == 0
    lives = apply(knocked(passed(daemon(*READY)), 2), inp.ProcessEnded(4, 200, 77, lives=True))
    assert list(apply(lives, further).clients) == [200], "one that is no client any more may become one again"


def test_what_a_log_said_before_the_gate_did_counts() -> None:
    state = apply_all(
        knocked(daemon(*READY)), [ev.ContextConnected(1.2, 100, 200, 0), ev.ClientDisconnected(1.4, 100, 200)]
    )
    client = passed(state).clients[200]
    assert (client.said_left, client.server) == (1.4, 100)
    old = apply_all(daemon(*READY), [ev.ContextConnected(0.2, 100, 200, 0), ev.ClientDisconnected(0.4, 100, 200)])
    assert passed(old).clients[200].said_left is None  # an earlier process of that pid


def test_a_server_that_is_just_starting_is_not_root_s_because_it_still_runs_as_root() -> None:
    """Its own first moments: seen as user 0 until the next list, long after it served its user."""
    starting = apply(daemon(), ev.ServerStarting(1, 100, 1001))
    listed = inp.ServersListed(1.1, {100: 0}, frozenset({100}))
    assert apply(starting, listed).servers[100].uid == 1001
    ready = apply(starting, ev.ServerReady(2, 100))
    assert apply(ready, listed).servers[100].uid == 1001, "it was looked at before"
    assert apply(ready, listed._replace(at=3)).servers[100].uid == 0, "the kernel counts, not the log"


def test_a_server_that_does_not_start_counts_as_that_whatever_mps_said_of_it_last() -> None:
    """550 without a GPU says FAULT of it: it had a fault then, and was tried without a pause."""
    events = ev.ServerStarting(1, 100, 1001), inp.ServerStatusSeen(1.04, 100, "FAULT"), ev.ServerExited(1.05, 100, 1)
    failure = apply_all(daemon(), events).start_failure
    assert failure is not None
    assert failure.count == 1


def test_a_server_that_mps_lists_before_its_log_does_is_not_root_s_because_it_still_runs_as_root() -> None:
    listed = inp.ServersListed(1.05, {100: 0}, frozenset())
    state = apply(daemon(), listed)
    assert (state.servers[100].uid, state.servers[100].confirmed) == (None, False)
    assert apply_all(state, READY).servers[100].uid == 1001
    later = inp.ServersListed(3, {100: 1001}, frozenset({100}))
    assert apply(state, later).servers[100].uid == 1001, "without its log, too"
    assert apply(state, later._replace(servers={100: 0})).servers[100].uid == 0, "a server of root's own"
    shared = apply_all(State(), [inp.ControlRuns(0, 10, 0, "/s", multiuser=True), listed])
    assert (shared.servers[100].uid, shared.servers[100].confirmed) == (0, True), "all users' is root's from the first"


def test_leaving_is_a_hint_until_mps_says_so() -> None:
    state = apply(passed(daemon(*READY)), ev.ContextConnected(2, 100, 200, 1))
    state = apply(state, ev.ClientDisconnected(3, 100, 200))
    assert (state.clients[200].said_left, state.clients[200].detached) == (3, None)
    listed = inp.ServersListed(4, {100: 1001}, frozenset({100}))
    assert apply(state, listed).clients[200].detached is None
    still = apply_all(state, [listed, inp.ClientsListed(4, 100, frozenset({200}))])
    assert (still.clients[200].said_left, still.servers[100].attached[200].contexts) == (None, {0, 1})
    gone = apply_all(state, [listed, inp.ClientsListed(4, 100, frozenset())])
    assert gone.clients[200].detached == 3
    again = apply(gone, ev.ContextConnected(5, 100, 200, 1))
    assert (again.clients[200].said_left, again.clients[200].detached) == (5, None), "MPS is asked"
    assert apply(again, inp.ClientsListed(6, 100, frozenset({200}))).clients[200].said_left is None
    assert apply_all(again, [inp.ServersListed(6, {100: 1001}, frozenset({100})),
                             inp.ClientsListed(6, 100, frozenset())]).clients[200].detached == 5  # fmt: skip
    channel = apply(gone, ev.ContextConnected(5, 100, 200, 0))  # MPS lists none (world, crossing, seed 99206201)
    for at, detached in ((6, None), (7.5, 7)):
        without = [inp.ServersListed(at, {100: 1001}, frozenset({100})), inp.ClientsListed(at, 100, frozenset())]
        assert apply_all(channel, without).clients[200].detached == detached
    early = apply_all(state, [listed, inp.ClientsListed(2.9, 100, frozenset())])
    assert early.clients[200].detached is None
    assert apply(state, inp.ServersListed(4, {}, frozenset({100}))).clients[200].detached == 3
    back = apply(knocked(gone, 5), said.passed(6, 5, PEER, Limits(), False, 0.1))
    assert (back.clients[200].detached, back.clients[200].connections) == (None, 2)


def test_a_new_gate_counts_anew_how_often_a_process_passed() -> None:
    """A release that crosses a hand-over was believed: the agent named its own count, which was larger."""
    more = said.passed(3, 5, PEER, Limits(), False, 0.1)
    state = apply(knocked(passed(daemon(*READY)), 5), more)
    hello = [inp.GateSaid(4, link.Hello(61, 0.0)), said.known(4, PEER, 1.0, Limits()), inp.GateSaid(4, link.Synced())]
    state = apply_all(state, [inp.LinkLost(3.5), *hello, inp.ControlGone(5, 10)])
    decision = admission.decide(View(state), admission.Memory(), 6.0)
    told = [one.message for one in decision.actions if isinstance(one, act.TellGate)]
    assert [one for one in told if isinstance(one, link.Release)] == [link.Release(PEER.pid, PEER.start, 1)]


def test_a_client_with_a_sticky_error_has_it_for_a_later_agent_too() -> None:
    """It was on record as ended well."""
    lines = [ev.ContextConnected(2, 100, 200, 1), ev.FaultStarted(3, 100), ev.FaultClient(3, 100, 200)]
    state = apply(daemon(*READY, *lines), said.known(5, PEER, 1.5, Limits()))
    assert state.clients[200].outcome == "faulted"


def test_a_gate_that_cannot_say_the_limits_of_a_known_process_changes_none() -> None:
    """It took the process over from an earlier gate. Unlimited, as it was taken for, it is nowhere else."""
    what = link.Known(PEER.pid, PEER.uid, PEER.gid, PEER.start, 1.0, None, connections=2)
    client = apply(passed(State()), inp.GateSaid(4.0, what)).clients[200]
    assert (client.connections, client.limits) == (2, Limits(20.0))


def test_a_gate_that_names_a_process_again_is_held_against_its_own_count() -> None:
    """An earlier gate had counted five contexts. Compared with these, the second one of this gate was missed."""
    one, two, five = (link.Known(PEER.pid, PEER.uid, PEER.gid, PEER.start, 1.0, None, connections=n) for n in (1, 2, 5))
    state = apply(passed(daemon(*READY)), ev.ContextConnected(2, 100, 200, 1))
    state = apply_all(state, [inp.GateSaid(2.5, five), inp.LinkLost(2.6), inp.GateSaid(2.7, one)])
    listed = [inp.ServersListed(4, {100: 1001}, frozenset({100})), inp.ClientsListed(4, 100, frozenset())]
    gone = apply_all(state, [ev.ClientDisconnected(3, 100, 200), *listed])
    assert (gone.clients[200].connections, gone.clients[200].detached) == (5, 3)
    again = apply(gone, inp.GateSaid(5, two)).clients[200]
    assert (again.said_left, again.detached) == (5, None), "MPS is asked"


def test_a_client_that_worked_before_gate_and_agent_were_there_has_no_known_memory_limit() -> None:
    """Its further context got the limit of a policy that had lowered it, and the client was ended for what it had used
    before (world, habits, seeds 668263285 and 668270905)."""
    given = Limits(20.0, {0: 1 << 30})
    for line, most in ((2.0, None), (9.5, given.memory)):
        state = daemon(*READY, ev.ContextConnected(line, 100, 200, 0), ev.ContextConnected(line, 100, 200, 1))
        held = apply(state, said.knocked(10, 2, PEER, 10.0))
        passed_here = apply(held, said.passed(11, 2, inp.Peer(200, 1001, 0, 77), given, False, 0.1))
        passed_before_agent = apply(state, said.known(12, PEER, 10.2, given))
        for client in (passed_here.clients[200], passed_before_agent.clients[200]):
            assert (client.limits, client.most_memory) == (given, most)


def test_who_was_refused_by_its_server_says_so_itself() -> None:
    """At the gate, as its last word. A line of a log may name any process."""
    state, happened = reduce(knocked(State()), ev.ClientRefused(2, 100, 200, "status 807"))
    assert happened == []
    message = link.Passed(1, 200, 1001, 77, Limits(), 0.1, 2.0, status=807)
    _, happened = reduce(state, inp.GateSaid(2.0, message))
    (refused,) = (one for one in happened if isinstance(one, tr.ClientRefused))
    assert (refused.pid, refused.uid) == (200, 1001)
    assert "807" in refused.why


def test_a_refused_connection_is_no_longer_held_unless_it_was_being_handed_over() -> None:
    refuse = act.TellGate(message=link.Refuse(1, "denied"), reason="denied", rule="user.x.access")
    state, happened = reduce(knocked(State()), act.Done(2, refuse, True))
    assert len(state.held) == 0
    assert [type(one) for one in happened] == [tr.ClientRefused]
    again = apply(state, inp.GateSaid(2.1, link.Handing(1, 0, 0, 2.1)))
    assert again.held[1].handing == 2.1
    assert len(apply(state, inp.GateSaid(2.1, link.Left(1))).turned_away) == 0


def test_a_server_that_could_not_be_killed_is_none() -> None:
    kill = act.KillServer(server=100, reason="x", rule="y")
    assert dict(apply(daemon(*READY), act.Done(3, kill, False, "no child of the control daemon")).servers) == {}  # type: ignore[arg-type]


# --- anything at all --------------------------------------------------------------------------------------------------

_SMALL = st.integers(0, 5)
_LIMITS = st.builds(Limits, st.floats(0, 100))
_FIELDS: dict[str, st.SearchStrategy[object]] = {
    "at": st.floats(0, 100), "started": st.floats(0, 100), "since": st.floats(0, 100), "seconds": st.floats(0, 9),
    "socket": st.just("/s"), "text": st.sampled_from(["quit", "ps", "UI closed", "GPU"]), "source": st.just("control"),
    "percent": st.floats(0, 100), "size": st.integers(0, 1 << 40), "number": st.sampled_from([0, 5, 48, 590]),
    "context": st.integers(0, 3), "limits": st.none() | _LIMITS, "most": st.none() | _LIMITS,
    "fail_safe": st.booleans(), "stage": st.just("answer"), "why": st.just("x"), "lost": st.booleans(),
    "command": st.sampled_from(["quit", "terminate_client 1 2", "ps"]), "known": st.booleans(), "greeting": st.just(""),
    "servers": st.dictionaries(_SMALL, _SMALL, max_size=3), "known_before": st.frozensets(_SMALL, max_size=3),
    "pids": st.frozensets(_SMALL, max_size=3), "multiuser": st.sampled_from([None, True, False]),
    "start": st.sampled_from([None, 1, 2]), "silent": st.booleans(),
    "stopped": st.frozensets(_SMALL, max_size=2), "cpu_idle": st.dictionaries(_SMALL, st.floats(0, 9), max_size=2),
    "lifts": st.dictionaries(_SMALL, st.builds(inp.Lifts), max_size=2),
    "seen": st.dictionaries(_SMALL, st.builds(inp.Seen, *[_SMALL] * 4), max_size=2),
    "memory": st.dictionaries(_SMALL, st.just({"GPU-0": 1 << 20}), max_size=2),
}  # fmt: skip
_KINDS = [
    *KINDS, *link.FromGate.__subclasses__(), inp.LinkLost, *get_args(inp.KernelInput), *get_args(inp.AnswerInput),
]  # fmt: skip
_STATUS = st.sampled_from([*Status, "GARBAGE"])


def _any(kind: type | ev.What) -> st.SearchStrategy[inp.Input]:
    if isinstance(kind, ev.What):
        return st.builds(kind, _FIELDS["at"], *(_FIELDS.get(name, _SMALL) for name in kind.fields))
    if is_dataclass(kind):
        said = {one.name: _FIELDS.get(one.name, _SMALL) for one in fields(kind)}
        return st.builds(inp.GateSaid, _FIELDS["at"], st.builds(kind, **said))
    names: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    choose = {}
    for name in names:
        numeric = _STATUS if kind is inp.ServerStatusSeen else _SMALL
        choose[name] = _FIELDS.get(name, numeric if name == "status" else _SMALL)
    return st.builds(kind, **choose)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of([_any(kind) for kind in _KINDS]), max_size=60))
def test_no_order_of_inputs_raises_and_the_state_stays_whole(events: list[inp.Input]) -> None:
    state = State()
    for event in events:
        state = apply(state, event)
        assert all(s.pid == pid for pid, s in state.servers.items())
        assert all(c.pid == pid for pid, c in state.clients.items())
        assert all(s.status is not Status.FAULT or s.fault_since is not None for s in state.servers.values())
        # Without a word of its leaving only whom others came through (Client.unseen, State.carries).
        assert all(c.detached is None or c.said_left is not None or c.server is None for c in state.clients.values())
        assert not set(state.servers) & set(state.ended)
        queue = state.held
        assert sorted(held.connection for uid in queue.users() for held in queue.line(uid)) == sorted(queue)
        assert queue.handing == {number for number, held in queue.items() if held.handing is not None}
        firsts = sorted(min((h.since, h.connection) for h in queue.line(uid)) for uid in queue.users())
        assert [queue.first(uid).since for uid in queue.users()] == [since for since, _ in firsts]  # type: ignore[union-attr]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of([_any(kind) for kind in KINDS]), max_size=60))
def test_no_line_makes_a_client_or_changes_who_one_is(lines: list[inp.Input]) -> None:
    state = passed(daemon(*READY))
    before = {pid: (c.peer, c.limits, c.detached) for pid, c in state.clients.items()}
    for line in lines:
        state = apply(state, line)
        assert {pid: (c.peer, c.limits, c.detached) for pid, c in state.clients.items()} == before
        assert len(state.held) == 0


def test_the_state_is_bounded_whatever_the_logs_say() -> None:
    state = daemon()
    for i in range(3000):
        state = apply(state, ev.ServerStartup(i, 10000 + i))
        state = apply(state, ev.ServerExited(i, 20000 + i, 0))
        state = apply(state, ev.ContextConnected(i, 10000, 30000 + i, 0))
        state = apply(state, ev.ClientDisconnected(i, 10000 + i, 40000 + i))
    assert len(state.servers) <= 64
    assert len(state.ended) <= 64
    assert len(state.left) <= 256


def test_what_is_kept_of_one_server_is_bounded_whatever_its_log_says() -> None:
    """Of clients that connect the latest are kept; of those with a sticky error the first, who came with the fault."""
    pids = range(30000, 31000)
    state = daemon(*READY, *(ev.ContextConnected(2, 100, pid, 1) for pid in pids))
    assert list(state.servers[100].attached) == list(pids[-256:])
    state = apply_all(state, [ev.FaultStarted(3, 100), *(ev.FaultClient(3, 100, pid) for pid in pids)])
    assert state.servers[100].sticky == tuple(pids[:256])


def test_who_is_refused_by_the_gate_waits_no_more() -> None:
    """For what it said while it was held, or because others of its user crowd: the gate has closed the connection."""
    state = knocked(daemon(), 7)
    assert list(state.held) == [7]
    state, told = reduce(
        state, inp.GateSaid(30.0, link.Refused(7, PEER.pid, PEER.uid, "sent something while it was held"))
    )
    assert (list(state.held), [type(one) for one in told]) == ([], [tr.ClientRefused])
