"""``replay --policy``: the engine's own decisions over clients of a recording. Times were worked out by hand."""

from __future__ import annotations

import io
import json
import subprocess
from dataclasses import replace
from datetime import UTC
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mpsagent.core.coordinator import Core
from mpsagent.core.sessions import Session
from mpsagent.mps.limits import Device
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.policy.instances import names, of
from mpsagent_tools.log_files import merged
from mpsagent_tools.logged import Logged
from mpsagent_tools.policy_trial import tried
from mpsagent_tools.replay import of_one
from tests import recordings
from tests.api.stand_in import serve
from tests.cli import program
from tests.policies import in_turns

DEVICE = Device(0, "GPU-0", "assumed", 143155 << 20, 132)
T = 1_795_219_200.0


def trial(text: str, rows: list[Session], until: float = T + 3600.0) -> list[Session]:
    """Users take turns unless the text says otherwise."""
    policy, errors = load([("policy.toml", text), ("turns.toml", in_turns(text))])
    assert policy is not None, errors
    return tried(of(policy, names(policy)[0]), rows, until, lambda uid: Identity(uid, f"u{uid}"), [DEVICE])


def came(*those: tuple[int, int, float, float]) -> list[Session]:
    """pid, uid, when it came, how long it worked, all without waiting."""
    return [
        Session(number, "client", None, uid, pid, T + at, T + at, T + at + seconds, "ok")
        for number, (pid, uid, at, seconds) in enumerate(those, 1)
    ]


def seen(rows: list[Session], kind: str = "client") -> list[tuple[Any, ...]]:
    """pid (or uid), came, let in, ended, outcome; seconds after T."""

    def after(at: float | None) -> float | None:
        return None if at is None else round(at - T, 2)

    found = (one for one in rows if one.kind == kind)
    return [(one.pid or one.uid, after(one.came), after(one.passed), after(one.ended), one.outcome) for one in found]


TURNS = '[turn]\ntime_limit = "3s"\ngrace = "1s"\n'
TWO = came((10, 1001, 0.0, 20.0), (20, 1002, 5.0, 2.0))


def test_a_turn_ends_when_the_policy_says() -> None:
    """Recording 01, S5 and S6: 1002 waits from 46.746 for 1001's server 716; after 3 s and 1 s of grace it is over."""
    logs, found = recordings.logs("01"), Logged()
    for line in merged(io.BytesIO(logs.control), io.BytesIO(logs.server), UTC):
        found.feed(line)
    rows = trial(TURNS, found.finish(), found.last)
    (ended,) = [one for one in rows if one.pid == 710]
    assert (ended.outcome, ended.why) == ("ended", "the turn of user 1001 is over")
    (served,) = [one for one in rows if one.pid == 725]
    assert ended.ended is not None
    assert served.passed == pytest.approx(ended.ended, abs=0.01)
    assert served.passed == pytest.approx(served.came + 4.0, abs=0.01), "7.085 in the recording"


WAYS = {
    TURNS: [(10, 0, 0, 9, "ended"), (20, 5, 9, 11, "ok")],
    '[turn]\ntime_limit = "1h"\n': [(10, 0, 0, 20, "ok"), (20, 5, 20, 22, "ok")],
    '[instance.a]\nsharing = "one-server"\n': [(10, 0, 0, 20, "ok"), (20, 5, 5, 7, "ok")],
    '[instance.a]\nsharing = "per-user"\n': [(10, 0, 0, 20, "ok"), (20, 5, 5, 7, "ok")],
    '[instance.a]\nserver_scope = "all"\n[turn]\non_expiry = "pause"\npause_slice = "3s"\n': [
        (10, 0, 0, 22, "ok"), (20, 5, 5, 7, "ok"),
    ],
    '[user.u1002]\naccess = "deny"\n': [(10, 0, 0, 20, "ok"), (20, 5, None, 5, "refused")],
    TURNS + '[user.u1001]\nmode = "report"\n': [(10, 0, 0, 20, "ok"), (20, 5, 20, 22, "ok")],
    f"mode = 'report'\n{TURNS}": [(10, 0, 0, 20, "ok"), (20, 5, 5, 7, "ok")],
    '[limits]\nmax_runtime = "4s"\n[turn]\ntime_limit = "1h"\n': [(10, 0, 0, 4, "ended"), (20, 5, 5, 7, "ok")],
}  # fmt: skip


@pytest.mark.parametrize("text", WAYS)
def test_two_users_under_each_policy(text: str) -> None:
    """One works for 20 s, the other comes after 5 and works for 2. Who is paused works on afterwards."""
    assert seen(trial(text, TWO)) == WAYS[text]


def test_turns_and_pauses_are_rows_too() -> None:
    rows = trial(TURNS, TWO)
    assert seen(rows, "turn")[:2] == [(1001, 0, 0, 9, "forced"), (1002, 9, 9, None, None)]
    rows = trial('[instance.a]\nserver_scope = "all"\n[turn]\non_expiry = "pause"\npause_slice = "3s"\n', TWO)
    assert seen(rows, "pause") == [(1001, 5, 5, 7, "resumed")]


def test_a_users_bound_holds_as_at_the_gate() -> None:
    rows = trial("[limits]\nmax_clients = 1\n", came((10, 1001, 0.0, 4.0), (11, 1001, 1.0, 4.0)))
    assert seen(rows) == [(10, 0, 0, 4, "ok"), (11, 1, 4, 8, "ok")]


def test_a_pid_that_came_again_and_one_that_never_worked() -> None:
    """The second 20 comes while the first one waits here. Who left without having worked leaves when it did."""
    rows = [*TWO, *came((20, 1002, 10.0, 2.0)), Session(9, "client", None, 1003, 30, T + 6, None, T + 8, "left")]
    found = trial('[turn]\ntime_limit = "1h"\n', rows)
    assert seen(found)[1:] == [(20, 5, 20, 22, "ok"), (30, 6, None, 8, "left"), (20, 10, 20, 22, "ok")]


def test_what_has_not_ended_goes_on() -> None:
    rows = [*TWO, Session(9, "client", None, 1003, 30, T + 6, T + 6, None, None)]
    found = trial('[turn]\ntime_limit = "1h"\n', rows, until=T + 60)
    assert seen(found)[2] == (30, 6, 22, None, None)


def test_a_month_takes_no_more_decisions_than_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """While somebody waits the agent asks a control daemon every 10 s whether it hangs: here none does."""
    decisions, receive = count(), Core.receive_all

    def counted(core: Core, told: Any, now: float) -> Any:
        assert next(decisions) < 40
        return receive(core, told, now)

    monkeypatch.setattr(Core, "receive_all", counted)
    rows = came((10, 1001, 0.0, 30 * 86400.0), (20, 1002, 5.0, 2.0))
    trial('[turn]\non_expiry = "none"\n', rows, until=T + 40 * 86400)


@pytest.mark.parametrize("name", recordings.names())
def test_the_same_log_gives_the_same_rows(name: str) -> None:
    """Decisions are replayable, and nothing is done without a reason."""
    logs, found = recordings.logs(name), Logged()
    for line in merged(io.BytesIO(logs.control), io.BytesIO(logs.server), UTC):
        found.feed(line)
    rows = found.finish()
    text = '[limits]\nactive_threads = "30%"\nmemory_limit = "25%"\n[turn]\ntime_limit = "2s"\ngrace = "1s"\n'
    first = trial(text, rows, found.last)
    assert first == trial(text, rows, found.last)
    assert all(one.why for one in first if one.outcome in ("ended", "refused"))


def test_a_history_of_several_instances_is_of_one_of_them() -> None:
    """Users apart have each an instance of their own, which is of the section's."""
    rows = [replace(one, instance=name) for one, name in zip(TWO, ("a-u1001", "a-u1002"), strict=True)]
    assert of_one(rows, None) == rows
    mixed = [rows[0], replace(rows[1], instance="b")]
    assert of_one(mixed, "a") == rows[:1]
    with pytest.raises(ValueError, match=r"several instances.*\(a, b\)"):
        of_one(mixed, None)


# --- the program ------------------------------------------------------------------------------------------------------


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return program.run(None, *map(str, words), TZ="UTC")


def test_the_program_says_it_in_both_forms_draws_it_and_refuses_a_bad_policy(tmp_path: Path) -> None:
    logs, policy = recordings.logs("01"), tmp_path / "policy.toml"
    (tmp_path / "c").write_bytes(logs.control)
    (tmp_path / "s").write_bytes(logs.server)
    policy.write_text(TURNS + in_turns(TURNS))
    words: list[str | Path] = [
        "replay",
        "--control",
        tmp_path / "c",
        "--server",
        tmp_path / "s",
        "--policy",
        policy,
    ]
    body = json.loads(run(*words, "--json").stdout)
    (served,) = [one for one in body["would"]["sessions"] if one["pid"] == 725]
    assert served["waited"] == pytest.approx(4.0, abs=0.01)
    longest = {row["uid"]: row["longest"] for row in body["would"]["report"]["rows"]}
    assert longest[1003] < {row["uid"]: row["longest"] for row in body["report"]["rows"]}[1003]
    page = run(*words).stdout
    assert "2026-11-20 23:56:50  user 1001: process 710 was ended (the turn of user 1001 is over)" in page
    assert "1 process: 725; user 1001 had the GPU" in page
    run(*words, "--svg", tmp_path / "picture.svg")
    assert "process 710 was ended" in (tmp_path / "picture.svg").read_text()
    policy.write_text("[turn]\nafter = soon\n")
    done = run(*words)
    assert (done.returncode, "the policy is not valid" in done.stderr) == (2, True)


def test_without_logs_it_is_of_the_history(tmp_path: Path) -> None:
    """There one works, and another waits all the time."""
    (tmp_path / "p").write_text('[instance.a]\nsharing = "one-server"\n')
    with serve() as served:
        body = json.loads(program.run(served, "replay", "--policy", str(tmp_path / "p"), "--json").stdout)
        assert program.run(served, "replay", "--since", "1d").returncode == 2, "the history as it is: timeline, report"
    assert [(one["pid"], one["began"]) for one in body["sessions"]][1] == (601, None)
    assert [(one["pid"], one["waited"], one["ended"]) for one in body["would"]["sessions"]] == [
        (501, 0.0, None), (601, 0.0, None),
    ]  # fmt: skip
