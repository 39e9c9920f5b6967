"""``mpsagent-cli status`` and ``probe``: how the node is, on a page and as an exit status."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mpsagent import __version__
from mpsagent.cli import answer_text, wording
from mpsagent.core.model import Drain
from mpsagent.core.view import Turn
from mpsagent.policy.identity import Identity
from mpsagent.snapshot.condition import Condition
from tests.api.stand_in import ADMIN, OTHER, START, USER, Served, held
from tests.cli.program import run


def test_who_is_to_be_ended_for_computing_outside_mps_is_named(served: Served) -> None:
    """It stood in the API only."""
    one = {"pid": 77, "uid": 1002, "user": "bob", "ends": "2026-11-21T00:05:00+00:00"}
    body = served.backend.status()
    body["instances"][0]["outside"] = [one, {**one, "pid": 78, "ends": None}]
    page = answer_text.status(body, answer_text.plain, datetime(2026, 11, 21, 12, tzinfo=UTC))
    assert "  outside  process 77 of bob, outside MPS, is due to be ended at 00:05:00" in page
    assert not [line for line in page if "process 78" in line]


def test_times_are_those_of_this_machine(served: Served) -> None:
    """An administrator compares with a clock on the wall."""
    assert "05:45:00, 1 process" in run(served, "status", TZ="Asia/Kathmandu").stdout
    assert "00:00:00, 1 process" in run(served, "status", TZ="UTC").stdout


def test_status_fits_into_80_columns_whatever_is_in_it(served: Served) -> None:
    """Long names, many problems, many users."""
    backend = served.backend
    backend.conditions = (Condition("the control daemon is silent and " * 8, START, "do " * 60),)
    backend.state = replace(
        backend.state,
        identities={uid: Identity(uid, "a-user-with-a-very-long-name-" + "x" * 30) for uid in (USER, OTHER, ADMIN)},
        unconfirmed={USER: (START, "MPS printed 19G for 20389M " * 5)},
    )
    done = run(served, "status", TZ="UTC")
    assert done.returncode == 1
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_status_fits_on_one_screen_whatever_is_in_it(served: Served) -> None:
    """Many problems, many users, many doubts: what is too much is counted, and where the rest is to be seen is said."""
    backend = served.backend
    backend.conditions = tuple(
        Condition(f"problem {number} of the control daemon, said in many words: " + "it hangs " * 20, START, "do " * 60)
        for number in range(6)
    )
    backend.conditions += tuple(Condition(f"doubt {number}", START, bad="not sure") for number in range(3))
    line = backend.state.held
    for number in range(10, 40):
        line = line.put(held(number, 700 + number, 30000 + number, START + number))
    backend.state = replace(
        backend.state, held=line, unconfirmed={USER: (START, "printed 19G"), OTHER: (START, "no answer")}
    )
    lines = run(served, "status", TZ="UTC").stdout.splitlines()
    assert len(lines) <= answer_text.SCREEN
    assert max(map(len, lines)) <= 80
    assert any("problems more (mpsagent-cli doctor)" in one for one in lines)
    assert any("users more (mpsagent-cli queue)" in one for one in lines)
    assert not any("doubt" in one for one in lines), "promises that cannot be kept are notes in doctor"
    assert lines[0].startswith(f"● mpsagent {__version__}: 6 problems")


def test_a_drain_says_what_ends_when(served: Served) -> None:
    """Seen: "until 17:53:53: nothing new is let in" of a drain that lasts until a resume, two seconds after that time,
    and "for as long as it wants" of a user whose clients it was about to end."""

    def page(deadline: float | None, *, restart: bool, at: int) -> str:
        backend = served.backend
        backend.turn = Turn(USER, START)
        backend.state = replace(backend.state, drain=Drain(START, deadline, restart))
        lines = answer_text.status(backend.status(), answer_text.plain, datetime(2026, 11, 21, 0, 0, at, tzinfo=UTC))
        return " ".join(" ".join(lines).split())

    for restart, end in ((False, "mpsagent-cli resume"), (True, "MPS has been started again")):
        text = page(START + 30, restart=restart, at=10)
        assert (
            f"since 00:00:00, until {end}: no new client is admitted; clients still at work at 00:00:30 are ended"
            in text
        )
        assert "1G; until 00:00:30 at the latest, then its clients are ended" in text
    assert "until mpsagent-cli resume: no new client is admitted in use" in page(START + 30, restart=False, at=40)
    assert "for as long as it wants" not in page(START + 30, restart=False, at=10)
    assert "until 00:00:30" not in page(None, restart=False, at=10)


def test_a_drain_of_root_has_that_name(served: Served) -> None:
    """It was "by user 0", because no program of root's had come."""
    backend = served.backend
    backend.state = replace(backend.state, drain=Drain(START, None, by=0))
    text = " ".join(answer_text.status(backend.status(), answer_text.plain, datetime(2026, 11, 21, tzinfo=UTC)))
    assert "by root, until mpsagent-cli resume" in text


def test_the_limits_of_a_turn_on_several_gpus(served: Served) -> None:
    """It said "20G on each GPU each"."""
    body = served.backend.status()
    body["turn"] |= {"processes": 2, "limits": {"threads": 20.0, "memory": {"0": 20 << 30, "1": 20 << 30}}}
    text, _ = wording.in_use(body, datetime(2026, 11, 21, 12, tzinfo=UTC))
    assert text.startswith("by alice since 00:00:00, 2 processes, each with 20 %, 20G on each GPU; until 00:31:10")


def test_users_at_once_are_shown_each(served: Served) -> None:
    """Where users do not take turns: who they are, since when, with how many processes and how much memory."""
    backend = served.backend
    one = backend.state.clients[501]
    more = {
        pid: replace(one, peer=one.peer._replace(pid=pid, uid=uid, start=pid), since=START + pid - 501)
        for pid, uid in ((501, USER), (502, OTHER), (503, OTHER))
    }
    backend.state, backend.turn = replace(backend.state, clients=more), None
    backend.memory = {501: 1 << 30, 502: 3 << 30, 503: 1 << 29}
    lines = run(served, "status", TZ="UTC").stdout.splitlines()
    found = next(number for number, line in enumerate(lines) if line.startswith("  in use"))
    assert [" ".join(line.split()).replace("2026-11-21 ", "") for line in lines[found : found + 2]] == [
        "in use by alice since 00:00:00, 1 process with 1.0 GiB",
        "by bob since 00:00:01, 2 processes with 3.5 GiB",
    ]


# --- for programs that look after the node


@pytest.mark.parametrize(
    ("conditions", "status", "first"),
    [((), 0, "healthy"), ((Condition("the control daemon is silent", START, "wait"),), 1, "the control daemon")],
)
def test_a_probe_says_whether_all_is_well(
    served: Served, conditions: tuple[Condition, ...], status: int, first: str
) -> None:
    """Its exit status is what HealthCheckProgram, a prolog or a readiness probe looks at."""
    served.backend.conditions = conditions
    done = run(served, "probe")
    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout.startswith(first)
    body = json.loads(run(served, "probe", "--json").stdout)
    assert body == {"ok": status == 0, "problems": [f"{one.what}; {one.do}" for one in conditions], "drains": []}


@pytest.mark.parametrize("how", ["silent", "drips", "full"])
def test_a_probe_ends_though_the_agent_hangs(how: str, tmp_path: Path) -> None:
    """One that accepts and says nothing, one that says a byte now and then for ever, one whose backlog is full: a probe
    that hangs with what it probes says nothing. (Without a deadline for all of it this test runs into its own.)"""
    path, over, waiting = tmp_path / "hangs", threading.Event(), []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(0)

        def drip() -> None:
            sock, _ = server.accept()
            with sock, suppress(OSError):
                while not over.wait(0.05):
                    sock.sendall(b"H")

        thread = threading.Thread(target=drip)
        if how == "drips":
            thread.start()
        if how == "full":
            waiting = [socket.socket(socket.AF_UNIX) for _ in range(2)]
            for one in waiting:
                one.setblocking(False)
                with suppress(BlockingIOError):
                    one.connect(str(path))
        done = run(None, "--socket", str(path), "probe")
        over.set()
        if how == "drips":
            thread.join()
        for one in waiting:
            one.close()
    assert done.returncode == 3, done
    assert len(done.stdout.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_a_probe_without_an_agent(tmp_path: Path) -> None:
    """Not healthy; programs get JSON here too."""
    done = run(None, "--socket", str(tmp_path / "none"), "probe", "--json")
    assert (done.returncode, json.loads(done.stdout)["ok"]) == (3, False)


def test_a_drain_is_the_first_word_of_status_and_probe_has_an_exit_status_for_it(served: Served) -> None:
    """It was "healthy" everywhere, with status 0, while no user got the GPU, and it survives a reboot."""
    backend = served.backend
    for restart, first in ((False, "draining"), (True, "healthy")):
        backend.state = replace(backend.state, drain=Drain(START, None, restart, USER))
        done = run(served, "status", TZ="UTC")
        assert done.stdout.splitlines()[0].startswith(f"● mpsagent {__version__}: {first}, up")
        assert "since 00:00:00, by alice, until" in " ".join(done.stdout.replace("2026-11-21 ", "").split())
    backend.state = replace(backend.state, drain=Drain(START, None, by=USER))
    done = run(served, "probe", TZ="UTC")
    said = "draining since 2026-11-21 00:00:00, by alice: no new program is admitted until mpsagent-cli resume\n"
    assert (done.returncode, done.stdout) == (4, said)
    found = json.loads(run(served, "probe", "--json").stdout)
    assert (found["ok"], found["drains"][0]["by"]) == (False, USER)
    backend.conditions = (Condition("something is wrong", START),)
    assert run(served, "probe").returncode == 1
    assert ": 1 problem, draining, up" in run(served, "status").stdout
    backend.conditions = ()
    backend.state = replace(backend.state, drain=None)
    assert run(served, "probe").stdout == "healthy\n"
