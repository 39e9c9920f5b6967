"""How many places are taken, by hand-overs and by MPS's list; who waits for one, and who does not. Pure."""

from __future__ import annotations

from typing import Any

import pytest

from mpsagent.gate.places import SETTLED, Places
from mpsagent.gate.queue import Held, KnownProcess
from mpsagent.mps.limits import Limits, Total
from mpsagent.wire.link import Admissions, Job, Named, User
from tests.gate.queues import Asked

A, B, C = 1101, 1102, 1103


def listed(*contexts: str, device: int = 0) -> list[str]:
    return [f"[{device}] 00:00.0, NVIDIA H200", *contexts]


def admits(*users: User, room: int = 48) -> Admissions:
    return Admissions(open=True, users={user.uid: user for user in users}, room=room)


def user(uid: int, most: int | None = None) -> User:
    return User(uid, "all", Limits(), max_contexts=most)


def known(pid: int, uid: int) -> KnownProcess:
    return KnownProcess(pid, uid, uid, 5, 0.0, Limits())


class Stage:
    """A queue whose hand-overs succeed at once, and what MPS would list."""

    def __init__(self) -> None:
        self.queue = Asked()
        self.number = 0
        self.contexts: dict[int, int] = {}
        self.now = 100.0

    def come(self, pid: int, uid: int, count: int = 1) -> None:
        for _ in range(count):
            self.number += 1
            self.queue.add(Held(self.number, pid, uid, uid, 5, self.now))

    def serve(self, table: Admissions) -> list[tuple[int, int]]:
        """(pid, uid) of all that pass now."""
        passed = []
        while (one := self.queue.next(self.now, table)) is not None:
            self.queue.take(one.connection, "", self.now)
            self.queue.free(one.connection)
            self.queue.remove(one.connection)
            known = self.queue.known_process(one.process)
            if known is None:
                self.queue.know(KnownProcess(one.pid, one.uid, one.gid, one.start, 0.0, Limits()))
            else:
                self.contexts[one.pid] = self.contexts.get(one.pid, 0) + 1
                self.queue.places("").count(known, yes=True)
                self.queue.places("").opened(one.process, self.now)
            passed.append((one.pid, one.uid))
        return passed

    def without(self, pid: int) -> None:
        """It has made no context for a while."""
        one = self.queue.known_process((pid, 5))
        assert one is not None
        self.queue.places("").count(one, yes=False)

    def look(self) -> None:
        self.now += 2 * SETTLED
        rows = [f"{pid}.{n}" for pid, count in self.contexts.items() for n in range(1, count + 1)]
        self.queue.places("").listed(listed(*rows), self.now)


def test_one_process_that_makes_contexts_takes_no_other_users_place() -> None:
    """Recording 12, H4: it made 48, and everybody else was refused. All others have their places, and it waits."""
    stage, table = Stage(), admits(user(A, 36), user(B, 36))
    stage.come(70, A)
    stage.serve(table)
    stage.come(70, A, 60)
    assert len(stage.serve(table)) == 36
    stage.look()
    assert stage.serve(table) == []
    assert stage.queue.choose(stage.now, table) == (None, None, True), "it waits for a place, and MPS is asked"
    for pid in range(80, 92):
        stage.come(pid, B, 2)
    assert len(stage.serve(table)) == 24, "twelve others, each with its context"
    stage.come(92, B)
    assert stage.serve(table) == [], "the server is full: held, not refused"
    stage.queue.forget((85, 5))
    assert stage.serve(table) == [], "MPS has not said that its context has gone"
    del stage.contexts[85]
    stage.look()
    assert stage.serve(table) == [(92, B)]


def test_who_has_contexts_and_wants_more_than_its_user_may_have_is_told_so() -> None:
    """Held, it would wait for itself, and others of its user for it. Whoever has none, and all others, wait."""
    stage, table = Stage(), admits(user(A, 4), user(B), room=6)
    stage.come(70, A)
    stage.serve(table)
    stage.come(70, A, 4)
    stage.come(71, B, 3)
    assert len(stage.serve(table)) == 7
    stage.come(70, A, 2)
    stage.come(72, A)
    stage.come(71, B)
    assert stage.serve(table) == []
    stage.look()
    beyond = [(one.pid, one.connection) for one in stage.queue.beyond(table)]
    assert beyond == [(70, 9)], "one at a time of each user, the oldest"
    assert list(stage.queue.beyond(admits(user(A, 5), user(B), room=6))) == [], "within its bound it waits for room"
    assert list(stage.queue.beyond(admits(user(B), room=6))) == [], "who may not work now waits"


def test_nobody_is_told_so_before_mps_has_said_which_contexts_have_ended() -> None:
    """A context that its process has just destroyed may be in the list still; one handed over may count twice."""
    stage, table = Stage(), admits(user(A, 4))
    stage.come(70, A, 5)
    assert len(stage.serve(table)) == 5
    stage.look()
    stage.come(70, A)
    assert list(stage.queue.beyond(table)) == [], "it came after MPS was asked"
    stage.queue.places("").listed(listed(*(f"70.{n}" for n in range(1, 5))), stage.now + SETTLED / 2)
    assert list(stage.queue.beyond(table)) == []
    stage.contexts[70] = 3
    stage.look()
    assert list(stage.queue.beyond(table)) == []
    assert stage.serve(table) == [(70, A)]
    stage.come(70, A)
    stage.now += SETTLED / 2
    stage.queue.places("").listed(listed(*(f"70.{n}" for n in range(1, 4))), stage.now + SETTLED / 2)
    assert list(stage.queue.beyond(table)) == [], "three and one that is not in the list yet"
    stage.look()
    assert [one.pid for one in stage.queue.beyond(table)] == [70]


def test_a_thousand_connections_of_a_process_are_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """47 processes with 1,024 took the gate 35 ms each time that anything ended."""
    stage, table = Stage(), admits(user(A, 5), room=4)
    stage.come(70, A, 4)
    stage.serve(table)
    stage.come(70, A, 1000)
    stage.look()
    asked, beyond = list[tuple[int, int]](), Places.beyond

    def counted(places: Places, process: tuple[int, int], most: int, since: float) -> bool:
        asked.append(process)
        return beyond(places, process, most, since)

    monkeypatch.setattr(Places, "beyond", counted)
    assert list(stage.queue.beyond(table)) == []
    assert asked == [(70, 5)]


def test_a_process_without_contexts_counts_for_its_user_and_is_never_turned_away() -> None:
    stage, table = Stage(), admits(user(A, 3))
    for pid in (70, 71):
        stage.come(pid, A)
    stage.serve(table)
    stage.come(70, A, 3)
    assert len(stage.serve(table)) == 2
    stage.look()
    assert [one.pid for one in stage.queue.beyond(table)] == [70], "the third place is the other's"
    stage.come(71, A)
    assert stage.serve(table) == [(71, A)]


def test_a_context_that_was_destroyed_gives_its_place_back_when_mps_says_so() -> None:
    stage, table = Stage(), admits(user(A), room=3)
    stage.come(70, A, 5)
    assert len(stage.serve(table)) == 4
    stage.contexts[70] -= 1
    assert stage.serve(table) == []
    stage.look()
    assert stage.serve(table) == [(70, A)]


def test_a_process_has_a_place_before_it_has_a_context() -> None:
    """What passed finds its first context's place, whoever comes meanwhile."""
    stage, table = Stage(), admits(user(A), user(B), room=2)
    for pid, uid in ((70, A), (71, B), (72, B)):
        stage.come(pid, uid)
    assert stage.serve(table) == [(70, A), (71, B)]
    stage.come(70, A, 2)
    stage.come(71, B)
    assert stage.serve(table) == [(70, A), (71, B)]


def test_each_device_has_places_of_its_own() -> None:
    """48 on the first and 48 on the second of two GPUs, of one process (an H200)."""
    places = Places()
    places.know(known(70, A))
    places.know(known(71, B))
    rows = [*listed(*(f"70.{n}" for n in range(20))), *listed(*(f"70.{n}" for n in range(20, 50)), "71.1", device=1)]
    places.listed(rows, 10.0)
    assert (places.taken(), places.taken(A), places.taken(B), places.taken(C)) == (31, 30, 1, 0)


def test_contexts_of_processes_that_came_through_another_take_places() -> None:
    places = Places()
    places.know(known(70, A))
    places.listed(listed("70.1", "99.1", "99.2", "98.1"), 10.0)
    assert (places.taken(), places.taken(A)) == (4, 1)
    places.listed(listed("70.1"), 10.0)
    assert places.taken() == 1


def test_what_a_process_had_takes_its_places_until_mps_says_that_it_has_gone() -> None:
    """MPS needs a moment after a SIGKILL; and a process that it has forked may go on with them (two H200)."""
    places = Places()
    of = {pid: known(pid, A) for pid in (70, 71)}
    for one in of.values():
        places.know(one)
    places.opened((70, 5), 10.0)
    for one in of.values():
        places.forget(one)
    assert (places.taken(), places.taken(A)) == (1, 0), "71 had none"
    places.listed(listed("70.1"), 10.1)
    assert places.taken() == 1
    places.listed(listed(), 10.2)
    assert places.taken() == 0


def test_a_context_that_the_list_does_not_have_yet_counts() -> None:
    places = Places()
    places.know(known(70, A))
    places.opened((70, 5), 10.0)
    places.listed(listed(), 10.1)
    assert places.has_any((70, 5))
    places.listed(listed("70.1"), 20.0)
    assert places.taken() == 1


def test_before_driver_580_each_process_counts_as_one() -> None:
    """Its MPS has no such list, and what has ended could never be known."""
    places = Places()
    places.know(known(70, A))
    places.opened((70, 5), 10.0)
    places.opened((70, 5), 10.0)
    places.listed(['Unknown command "get_device_client_list"'], 20.0)
    places.opened((70, 5), 30.0)
    assert places.taken() == 1
    assert not places.has_any((70, 5))


def test_after_a_restart_mps_is_asked_first() -> None:
    """How many contexts a process has that an earlier gate handed over, only MPS knows."""
    stage, table = Stage(), admits(user(A), room=2)
    stage.queue.know(KnownProcess(70, A, A, 5, 0.0, Limits()))
    stage.queue.places("").doubtful = True
    stage.come(71, A)
    assert stage.queue.choose(0.0, table) == (None, None, True)
    stage.contexts[70] = 2
    stage.look()
    assert stage.serve(table) == []
    stage.contexts[70] = 1
    stage.look()
    assert stage.serve(table) == [(71, A)]


@pytest.mark.parametrize(
    "most", [{"max_clients": 2}, {"max_contexts": 2}, {"total": Total(200.0)}], ids=["clients", "contexts", "total"]
)
def test_a_process_that_makes_no_context_gives_its_place_up_and_needs_one_for_its_first(most: dict[str, Any]) -> None:
    """As torchrun beside its ranks; and at no time there are more than the user may have."""
    stage, table = Stage(), admits(User(A, "all", Limits(), **most))
    stage.come(70, A, 2)
    stage.come(80, A)
    assert stage.serve(table) == [(70, A), (70, A), (80, A)], "the last one is the launcher"
    stage.come(81, A, 2)
    assert stage.serve(table) == []
    stage.without(80)
    assert stage.serve(table) == [(81, A), (81, A)]
    stage.come(80, A, 2)
    stage.come(82, A)
    assert stage.serve(table) == [], "neither its first context nor another process"
    stage.queue.forget((81, 5))
    del stage.contexts[81]
    stage.look()
    assert stage.serve(table)[:1] == [(80, A)], "it came first"
    assert (82, A) not in stage.serve(table)


def test_its_first_context_waits_for_room_on_the_server() -> None:
    """Which MPS would refuse with error 808."""
    stage, table = Stage(), admits(user(A), user(B), room=1)
    stage.come(70, A)
    stage.serve(table)
    stage.without(70)
    stage.come(71, B, 2)
    assert stage.serve(table) == [(71, B), (71, B)]
    stage.come(70, A)
    assert stage.serve(table) == []
    assert list(stage.queue.beyond(table)) == []
    stage.queue.forget((71, 5))
    del stage.contexts[71]
    stage.look()
    assert stage.serve(table) == [(70, A)]


def test_its_first_context_waits_for_room_in_its_job() -> None:
    """Its user's other processes pass meanwhile, and a thousand connections are asked about once."""
    of_job = [Named(pid, 5, Limits(30.0), "job") for pid in (70, 71)]
    table = Admissions(
        open=True, users={A: User(A, "all", Limits(), named=True)}, jobs={"job": Job("job", 1, Total(30.0))},
        processes={one.key: one for one in (*of_job, Named(72, 5, Limits()))},
    )  # fmt: skip
    stage = Stage()
    stage.come(70, A)
    stage.serve(table)
    stage.without(70)
    stage.come(71, A, 2)
    assert stage.serve(table) == [(71, A), (71, A)]
    stage.come(70, A, 3)
    stage.come(72, A)
    assert stage.serve(table) == [(72, A)]
    stage.queue.forget((71, 5))
    assert stage.serve(table)[:1] == [(70, A)]
