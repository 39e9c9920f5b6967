"""Several instances behind one gate: a control daemon each, and who is handed over to which."""

from __future__ import annotations

import itertools

import pytest

from mpsagent.gate import state
from mpsagent.gate.handovers import CONTEXT
from mpsagent.gate.queue import Held, KnownProcess
from mpsagent.gate.service import everybody
from mpsagent.gate.store import DaemonName, KnownName, parse_name
from mpsagent.mps.limits import Limits
from mpsagent.wire.codec import LinkError, encode
from mpsagent.wire.link import (
    Admissions,
    Applied,
    Handing,
    Instances,
    Knock,
    Known,
    Passed,
    Release,
    Synced,
    User,
    decode_from_agent,
)
from tests.gate.queues import Asked
from tests.gate.rig import A, Agent, B, C, Lines, Rig, admissions, limits
from tests.gate.test_front_ends import as_user
from tests.waiting import until

ONE, TWO = "gpu0", "gpu1"


def admit(instance: str, *users: int, threads: float = 30) -> Admissions:
    return admissions(*(User(uid, "all", limits(threads, 2)) for uid in users), instance=instance)


def start(rig: Rig, *said: Admissions) -> tuple[Lines, Lines, Agent]:
    """The daemons of both, and behind the gate an agent that has said this."""
    one, two = rig.start_instances(ONE, TWO)
    rig.start_gate()
    agent = rig.agent()
    for message in said:
        agent.say(message)
    return one, two, agent


# --- who waits where (pure) -------------------------------------------------------------------------------------------


def test_a_user_waits_where_he_is_admitted_and_with_what_is_free_there() -> None:
    queue = Asked()
    for number, uid in ((1, A), (2, B), (3, B)):
        queue.add(Held(number, number, uid, uid, 5, 0.0, instance=None))
    assert queue.next(0.0, admit(ONE, A, B)) is None
    queue.place(A, ONE)
    queue.place(B, TWO)
    assert queue.next(0.0, admit(ONE, A, B)) is queue.get(1)
    assert queue.next(0.0, admit(TWO, A, B)) is queue.get(2)
    queue.know(KnownProcess(70, C, C, 5, 0.0, Limits(), instance=ONE))
    full = Admissions(open=True, room=1, users=admit(ONE, A).users)
    assert queue.next(0.0, Admissions(open=True, room=1, users=full.users, instance=ONE)) is None
    assert queue.next(0.0, Admissions(open=True, room=1, users=admit(TWO, B).users, instance=TWO)) is queue.get(2)


def test_a_known_process_stays_in_its_instance() -> None:
    queue = Asked()
    queue.know(KnownProcess(70, A, A, 5, 0.0, Limits(), instance=ONE))
    queue.add(Held(1, 70, A, A, 5, 0.0, instance=TWO))
    queue.place(A, TWO)
    assert queue.next(0.0, admit(TWO, A)) is None
    assert queue.next(0.0, admit(ONE, A)) is queue.get(1)
    assert queue.instance_of(A) == ONE
    queue.forget((70, 5))
    assert (queue.instance_of(A), queue.known_in(ONE)) == (None, 0)


def test_a_process_that_has_left_its_server_stays_in_its_instance_until_it_ends() -> None:
    """Its CUDA goes on with the GPU that it saw there: in disorder two users worked on one GPU."""
    queue, known = Asked(), KnownProcess(70, A, A, 5, 0.0, Limits(), instance=ONE)
    queue.know(known)
    queue.add(Held(1, 70, A, A, 5, 0.0, instance=ONE))
    queue.leave(known)
    assert (queue.known_process((70, 5)), queue.known_in(ONE)) == (None, 0), "it counts for nothing"
    queue.place(A, TWO)
    queue.ask(1, None, TWO)
    assert queue.next(0.0, admit(TWO, A)) is None
    assert queue.next(0.0, admit(ONE, A)) is queue.get(1)
    queue.know(known)
    queue.forget((70, 5))
    assert queue.left((70, 5)) is None


def test_of_apart_it_stays_in_the_section() -> None:
    queue, known = Asked(), KnownProcess(70, A, A, 5, 0.0, Limits(), instance=f"{ONE}-u{A}")
    queue.know(known)
    queue.add(Held(1, 70, A, A, 5, 0.0, instance=ONE))
    queue.leave(known)
    queue.give_up(f"{ONE}-u{A}")
    queue.place(A, TWO)
    assert queue.next(0.0, admit(ONE, A)) is queue.get(1)


def test_of_too_many_who_have_left_the_oldest_of_the_user_with_most_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mpsagent.gate.queue.MOST_LEFT", 3)
    queue = Asked()
    forgotten = []
    for pid, uid in ((1, B), (2, A), (3, A), (4, B), (5, A)):
        beyond = queue.leave(KnownProcess(pid, uid, uid, 5, 0.0, Limits(), instance=ONE))
        if beyond is not None:
            queue.forget(beyond)
            forgotten.append(beyond[0])
    assert forgotten == [2, 1]


def test_a_connection_that_is_being_handed_over_is_not_taken_away() -> None:
    queue = Asked()
    queue.add(Held(1, 70, A, A, 5, 0.0, instance=ONE))
    queue.take(1, ONE, 0.0)
    queue.place(A, TWO)
    assert queue.next(0.0, admit(TWO, A)) is None
    queue.free(1)
    queue.place(A, TWO)
    assert queue.next(0.0, admit(TWO, A)) is queue.get(1)
    queue.remove(1)
    assert not queue.users_in(ONE)
    assert not queue.users_in(TWO)


def test_who_has_asked_for_an_instance_waits_there_and_nowhere_else() -> None:
    queue = Asked()
    for number, asked in ((1, None), (2, ONE), (3, TWO)):
        queue.add(Held(number, number, A, A, 5, 0.0, instance=asked, asked=asked))
    queue.place(A, TWO)
    assert [queue.get(number).instance for number in (1, 2, 3)] == [TWO, ONE, TWO]  # type: ignore[union-attr]
    queue.place(A, f"{ONE}-u{A}")  # apart
    assert queue.get(2).instance == f"{ONE}-u{A}"  # type: ignore[union-attr]
    queue.place(A, TWO)
    queue.give_up(f"{ONE}-u{A}")
    assert queue.get(2).instance == ONE  # type: ignore[union-attr]
    queue.ask(1, ONE, ONE)
    queue.place(A, TWO)
    assert queue.get(1).instance == ONE  # type: ignore[union-attr]
    queue.ask(1, None, None)
    queue.place(A, TWO)
    assert queue.get(1).instance == TWO, "each instance may have it again"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "name",
    [
        KnownName(5, 6, 7, 8.0, Limits(20, {0: 1 << 30}), "gpu-0.a_B"),
        KnownName(5, 6, 7, 8.0, Limits(20), "gpu0", most=Limits(20)),
        KnownName(5, 6, 7, 8.0, Limits(20), "gpu0", most=Limits(30)),
        KnownName(5, 6, 7, 8.0, None, "gpu0"),
        KnownName(5, 6, 7, 8.0, None, "gpu0", left=True),
        KnownName(5, 6, 7, 8.0, Limits(20), "gpu0", bare=True),
        DaemonName(1, 2, 3, 4, True, Limits(20), "gpu0"),
        DaemonName(1, 2, 3, 4, False, None, "gpu0"),
    ],
)
def test_what_lies_in_the_store_says_its_instance(name: KnownName | DaemonName) -> None:
    assert parse_name(str(name)) == name


def test_a_name_that_is_no_directory_is_no_instance() -> None:
    for name in ("..", ".", "a/b", "a b", "x" * 65, ""):
        assert parse_name(f"k1.2.3.4@{name}") is None
    for name in ("..", "a/b"):
        with pytest.raises(LinkError):
            decode_from_agent(encode(Admissions(instance=name)))
        with pytest.raises(LinkError):
            decode_from_agent(encode(Instances((name,))))
        with pytest.raises(LinkError):
            decode_from_agent(encode(Instances((ONE,), (name,))))


# --- as processes -----------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_a_gate_that_is_killed_finds_each_one_where_it_was_without_an_agent(rig: Rig) -> None:
    one, two, agent = start(rig, admit(ONE, A), admit(TWO, B))
    a, b = rig.client(A), rig.client(B)
    a.served(), b.served()
    agent.wait(Passed, 2)
    held = rig.waiting_client(C)
    until(lambda: state.load(rig.state, TWO))
    agent.close()
    rig.kill_gate()
    a.more(), b.more()
    a.served(2), b.served(2)
    rig.client(B).served()
    assert [found["uid"] for found in one.saw("gave")] == [A, A]
    assert [found["uid"] for found in two.saw("gave")] == [B, B, B]
    again = rig.agent()
    again.wait(Synced)
    assert {(known.uid, known.instance) for known in again.all(Known)} == {(A, ONE), (B, TWO)}
    kinds = [type(message) for message in again.heard]
    assert max(i for i, kind in enumerate(kinds) if kind is Known) < kinds.index(Knock)
    assert [knock.instance for knock in again.all(Knock, uid=C)] == [None]
    again.say(admit(TWO, B, C))
    held.served()
    assert two.saw("gave", uid=C)


@pytest.mark.root
@pytest.mark.parametrize("waits", [False, True], ids=["comes later", "waits already"])
def test_a_process_that_was_released_comes_back_to_its_instance_whoever_dies(rig: Rig, waits: bool) -> None:
    """The agent says that it has left its server; then both die, and the tables name its user elsewhere."""
    one, two, agent = start(rig, admit(ONE, A))
    client = rig.client(A)
    client.served()
    start_time = agent.wait(Passed).start
    agent.say(admit(ONE, B))
    if waits:
        client.more()
        agent.wait(Knock, 2, pid=client.pid)
    agent.say(Release(client.pid, start_time, 1))
    agent.say(admit(TWO, A))
    agent.wait(Applied, instance=TWO)
    agent.close()
    rig.kill_gate()
    if not waits:
        client.more()
    rig.client(A).served()  # the gate has looked who may pass
    again = rig.agent()
    again.wait(Synced)
    knock = again.wait(Knock, pid=client.pid)
    assert (knock.instance, knock.asked) == (ONE, ONE)
    assert not again.all(Known, pid=client.pid), "it counts for nothing"
    again.say(admit(TWO, A))
    again.say(admit(ONE, A))
    client.served(2)
    assert [len(daemon.saw("gave", uid=A)) for daemon in (one, two)] == [2, 1]
    assert again.wait(Passed, pid=client.pid).instance == ONE
    again.say(Release(client.pid, start_time, 1))
    again.say(Release(client.pid, start_time, 1))  # which changes nothing
    client.more()
    again.wait(Knock, 2, pid=client.pid)
    client.served(3)
    client.end()


@pytest.mark.root
def test_a_front_end_is_answered_where_its_user_is_and_roots_by_the_first(rig: Rig) -> None:
    one, two, _ = start(rig, admit(TWO, B, threads=40))
    rig.client(B).served()
    assert as_user(rig, B, "get_default_active_thread_percentage") == (["40.0"], 0)
    assert as_user(rig, 0, "get_default_active_thread_percentage") == (["100.0"], 0)
    assert two.saw("command", uid=B)
    assert not one.saw("command", uid=B)


@pytest.mark.root
def test_without_an_agent_to_be_had_all_are_served(rig: Rig) -> None:
    """`mpsagent-gate pass`, with what the agent has said last of each instance."""
    one, _, agent = start(rig, admit(ONE, A), admit(TWO, B))
    agent.wait(Applied, instance=TWO)
    tables = everybody(rig.state, None, rig.hidden)
    assert [(table.instance, table.open, dict(table.users)) for table in tables] == [("", True, {}), (TWO, True, {})]
    assert rig.keeper is not None
    rig.keeper.terminate()
    rig.keeper.wait()
    rig.start_gate("pass")
    assert rig.client(C).served()["threads"] == "10.0"
    assert one.saw("gave", uid=C)


@pytest.mark.root
def test_contexts_of_all_instances_are_paced_together(rig: Rig) -> None:
    """The driver makes them one after the other, on whichever GPU. At least so long lies between any two; first
    connections of processes are not contexts and wait for none."""
    rig.start_instances(ONE, TWO)
    rig.start_gate()
    agent = rig.agent()
    agent.say(admit(ONE, A))
    agent.say(admit(TWO, B))
    clients = [rig.client(A), rig.client(B)]
    for client in clients:
        client.served()
    for _ in range(3):
        for client in clients:
            client.more()
    for client in clients:
        client.served(4)
    begun = sorted(one.at for one in agent.all(Handing))[2:]
    assert min(b - a for a, b in itertools.pairwise(begun)) > 0.9 * CONTEXT
