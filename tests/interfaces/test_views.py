"""Views at their edges: what is not known yet, what is wrong, what goes backwards."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from mpsagent.core.world import World

from mpsagent.core.model import Client, Server, State, Status, Waiting
from mpsagent.core.reduce import apply
from mpsagent.core.turns import Turn
from mpsagent.interfaces import cli_text, metrics, views
from mpsagent.mps.limits import Limits
from mpsagent.mps.loglines import LogParser
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from tests import recordings

NOBODY = 65534


def test_a_state_without_anything_is_a_page_too() -> None:
    """At start, before the first line of a log."""
    body = views.status(State(), views.About(), 100.0)
    assert (body["control"], body["holder"], body["waiting"]) == (None, None, [])
    text = "\n".join(cli_text.status(json.loads(json.dumps(body)), cli_text.plain))
    assert "nobody (no server runs)" in text
    assert "not running" in text


def test_limits_are_verified_only_once_the_server_has_said_them_all() -> None:
    """Between Starting and Ready nothing is known; that is not drift."""
    server = Server(1, 7, Status.INITIALIZING, started=1.0)
    about = views.About(wanted={7: Limits(20.0)})
    assert views.server(State(), about, server)["verified"] is None
    said = Server(1, 7, Status.ACTIVE, started=1.0, limits=Limits(100.0), reported=True)
    assert views.server(State(), about, said)["verified"] is False
    right = Server(1, 7, Status.ACTIVE, started=1.0, limits=Limits(20.0), reported=True)
    assert views.server(State(), about, right)["verified"] is True


def test_the_parked_server_is_nobodys_and_never_drifts() -> None:
    """It carries the floor of the moment in which it was started; no client ever uses it."""
    parked = Server(1, NOBODY, Status.ACTIVE, started=1.0, limits=Limits(10.0), reported=True)
    about = views.About(parked_uid=NOBODY, wanted={NOBODY: Limits(5.0)})
    body = views.status(State(servers={1: parked}), about, 2.0)
    assert (body["servers"][0]["parked"], body["limits"]["drifted"]) == (True, [])
    assert "free (server 1 is parked)" in "\n".join(cli_text.status(json.loads(json.dumps(body)), cli_text.plain))


def test_a_user_with_several_waiting_clients_has_one_place() -> None:
    """In the order of the first client's arrival."""
    state = State(waiting=(Waiting(1, 7, 10.0), Waiting(2, 8, 11.0), Waiting(3, 7, 12.0)))
    queue = views.queue(state, views.About(turns={8: 50.0}), 20.0)
    assert [(w["position"], w["uid"], w["clients"], w["seconds"], w["turn_seconds"]) for w in queue] == [
        (1, 7, [1, 3], 10.0, None),
        (2, 8, [2], 9.0, 30.0),
    ]


def _world(policy_text: str, *waiting: int) -> World:
    policy, errors = load([("p", policy_text)])
    assert policy is not None, errors
    server = Server(5, 7, Status.ACTIVE, started=1.0, ready=1.0)
    state = State(servers={5: server}, waiting=tuple(Waiting(100 + uid, uid, 10.0 + uid) for uid in waiting))
    identities = {uid: Identity(uid, f"u{uid}") for uid in (7, *waiting)}
    return World(state=state, policy=policy, identities=identities)


def test_expected_turns_add_up_what_each_user_ahead_may_keep() -> None:
    """7 holds; 8 waits since 18 and gets its turn after 100 + 10 s; 9 after 8's own 20 + 10 s more."""
    world = _world('[switch]\nafter = "100s"\ngrace = "10s"\n[user.u8]\nswitch.after = "20s"\n', 8, 9)
    turn = Turn(server=5, uid=7, since=18.0)
    assert views.expected_turns(world, turn, 30.0) == {8: 128.0, 9: 158.0}
    assert views.expected_turns(world, turn, 130.0) == {8: 130.0, 9: 160.0}, "never in the past"


def test_there_is_no_expected_turn_behind_who_never_has_to_leave() -> None:
    """An exempt holder, an exempt user ahead, no action, enforcement off, no turn known yet: no promise is made."""
    turn = Turn(server=5, uid=7, since=18.0)
    limits = '[switch]\nafter = "100s"\ngrace = "10s"\n'
    assert views.expected_turns(_world(limits + "[user.u7]\nswitch.exempt = true\n", 8), turn, 30.0) == {}
    assert views.expected_turns(_world(limits + "[user.u8]\nswitch.exempt = true\n", 8, 9), turn, 30.0) == {8: 128.0}
    assert views.expected_turns(_world(limits + 'action = "none"\n', 8), turn, 30.0) == {}
    assert views.expected_turns(_world("enforce = false\n" + limits, 8), turn, 30.0) == {}
    assert views.expected_turns(_world(limits, 8), None, 30.0) == {}


def test_a_clock_set_back_gives_no_negative_spans() -> None:
    """A person reading -3600 s thinks of a fault."""
    state = State(clients={1: Client(1, 7, 5, since=100.0, queued=200.0)}, waiting=(Waiting(2, 8, 300.0),))
    for entry in views.clients(state, views.About(), 50.0):
        assert entry["seconds"] == 0.0
        assert entry["waited"] == 0.0


def test_sticky_clients_are_shown_as_such() -> None:
    """They hold everybody up; an administrator looks for them."""
    server = Server(5, 7, Status.FAULT, started=1.0, sticky=(1,))
    state = State(servers={5: server}, clients={1: Client(1, 7, 5, 2.0), 2: Client(2, 7, 5, 2.0)})
    assert [c["state"] for c in views.clients(state, views.About(), 3.0)] == ["sticky", "running"]


def test_every_state_of_every_recording_can_be_shown() -> None:
    """Each moment of real MPS gives a page, tables and metrics without an exception."""
    pages = set()
    for name in recordings.names():
        for logs in recordings.sections(name).values():
            state = State()
            events = [*LogParser("control").feed(logs.control), *LogParser("server").feed(logs.server)]
            for event in sorted(events, key=lambda each: each.at)[:2000]:
                after = apply(state, event)
                if after is not state:
                    state = after
                    body = json.loads(json.dumps(views.status(state, views.About(), event.at)))
                    clients = json.loads(json.dumps(views.clients(state, views.About(), event.at)))
                    pages.add("\n".join(cli_text.status(body, cli_text.plain)))
                    cli_text.clients(clients)
                    cli_text.servers(body["servers"])
                    metrics.text(body, clients, 1, 0)
    assert any("FAULT" in page for page in pages)
    assert any("for 0." in page for page in pages), "somebody waits somewhere"


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5), min_size=1, max_size=1))
def test_no_label_breaks_a_metrics_line(labels: dict[str, str]) -> None:
    """Values come from users' names some day; a quote or a line break must stay inside."""
    ((_, value),) = labels.items()
    text = metrics._labels({"x": value})
    assert text.count("\n") == 0
    assert json.loads('"' + text[len('{x="') : -2].replace("\t", "\\t") + '"', strict=False) == value
