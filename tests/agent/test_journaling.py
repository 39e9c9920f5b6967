"""The journal's lines: in their order, with names, and not late."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from mpsagent.agent import journaling
from mpsagent.agent.journaling import Telling
from mpsagent.agent.people import People
from mpsagent.policy.identity import Identity
from mpsagent.system import names as name_service
from mpsagent.system.names import Names


class Lines:
    """In the place of the log."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def info(self, kind: str, *, sentence: str, **_fields: Any) -> None:
        self.said.append(sentence)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    found = Lines()
    monkeypatch.setattr(journaling, "log", found)
    return found


def waiting(uid: int) -> dict[str, Any]:
    return {"kind": "client.waiting", "pid": 7, "uid": uid}


def play(names: Names, *records: dict[str, Any], until: int, lines: Lines) -> None:
    """Records come while a question about user 1 is asked; waits for so many lines."""

    async def main() -> None:
        told = Telling(names)
        asked = asyncio.create_task(names.look_up(1))
        await asyncio.sleep(0)

        def name_of(uid: int) -> str | None:
            who = names.known(uid)
            return None if who is None else who.name

        for record in records:
            told.tell(record, name_of)
        async with asyncio.timeout(90):
            while len(lines.said) < until:
                await asyncio.sleep(0.005)
        asked.cancel()

    asyncio.run(main())


def test_the_first_line_about_a_user_has_the_name(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what comes behind it does not overtake it."""
    monkeypatch.setattr(journaling, "PATIENCE", 30.0)
    monkeypatch.setattr(name_service, "identity_of", lambda uid: Identity(uid, "alice"))
    play(Names(), waiting(1), {"kind": "control.ended", "pid": 9}, waiting(1), until=3, lines=lines)
    alice = "process 7 of alice waits at the gate"
    assert lines.said == [alice, "control daemon 9 has ended", alice]


def test_the_line_of_a_hook_has_the_name(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A world of habits (endings, seed 7012): only its subject says whose client it is about."""
    monkeypatch.setattr(journaling, "PATIENCE", 30.0)
    monkeypatch.setattr(name_service, "identity_of", lambda uid: Identity(uid, "alice"))
    hook = {
        "kind": "action.done",
        "action": "RunHook",
        "program": "/save",
        "subject": {"uid": 1},
        "reason": "ordered by user 1",
    }
    play(Names(), hook, until=1, lines=lines)
    assert lines.said == ["ran the hook /save: ordered by alice"]


def test_a_line_waits_for_the_names_of_all_users_in_it(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed, seed 668264275: an agent had just started, and the answer about the waiting user came second."""
    monkeypatch.setattr(journaling, "PATIENCE", 30.0)
    second = threading.Event()

    def identity_of(uid: int) -> Identity:
        if uid == 2:
            second.wait(60)
        return Identity(uid, {1: "alice", 2: "bob"}[uid])

    monkeypatch.setattr(name_service, "identity_of", identity_of)
    reason = "the last client of server 8 of user 1 has gone and user 2 waits"
    record = {"kind": "action.done", "action": "ShutdownServer", "server": 8, "uid": 1, "ok": True, "reason": reason}

    async def main() -> None:
        names = Names()
        told, people = Telling(names), People(names, lambda: None)
        people.meet([1, 2])
        told.tell(record, people.name)
        await names.look_up(1)
        second.set()
        async with asyncio.timeout(20):
            while not lines.said:
                await asyncio.sleep(0.005)
        people.close()

    asyncio.run(main())
    assert lines.said == ["asked server 8 to shut down: the last client of server 8 of alice has gone and bob waits"]


def test_a_line_behind_a_user_s_first_process_has_the_name(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen in each world of habits: the line was written in the callback in which the agent met the user, before the
    question had begun."""
    monkeypatch.setattr(journaling, "PATIENCE", 30.0)
    monkeypatch.setattr(name_service, "identity_of", lambda uid: Identity(uid, "alice"))

    async def main() -> None:
        names = Names()
        told, people = Telling(names), People(names, lambda: None)
        people.meet([1])
        told.tell(waiting(1), people.name)
        async with asyncio.timeout(90):
            while not lines.said:
                await asyncio.sleep(0.005)
        people.close()

    asyncio.run(main())
    assert lines.said == ["process 7 of alice waits at the gate"]


def test_a_name_service_that_hangs_keeps_no_line(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def hangs(uid: int) -> Identity:
        over.wait(60)
        return Identity(uid, "alice")

    monkeypatch.setattr(name_service, "identity_of", hangs)
    try:
        play(Names(), waiting(1), {"kind": "control.ended", "pid": 9}, until=2, lines=lines)
    finally:
        over.set()
    assert lines.said == ["process 7 of user 1 waits at the gate", "control daemon 9 has ended"]


def test_a_crowd_of_lines_waits_for_no_name(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded, and nothing is left out."""
    monkeypatch.setattr(journaling, "PATIENCE", 60.0)
    over = threading.Event()
    monkeypatch.setattr(name_service, "identity_of", lambda uid: Identity(uid, str(over.wait(60))))
    try:
        play(Names(), *(waiting(1) for _ in range(journaling.MOST + 1)), until=journaling.MOST + 1, lines=lines)
    finally:
        over.set()
    assert len(lines.said) == journaling.MOST + 1
