"""Orders on the command line: whose work they cost is said first, and then what became of them."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mpsagent.cli import order_text, policy_check
from mpsagent.cli.verbs import cli
from mpsagent.snapshot.problem import Problem
from tests.api.stand_in import ADMIN, USER, Served
from tests.cli.program import read_on_terminal, run
from tests.waiting import until


def test_terminate_passes_its_options_on(served: Served) -> None:
    """--now and --dry-run change what is done to a user's process; they must arrive."""
    done = run(served, "terminate", "501", "--now", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert served.backend.asked == [("terminate", 501, True, True, os.getuid())]
    assert done.stdout.splitlines() == [
        "Client 501 of alice at server 500 would be ended, until it has gone:",
        "  1. terminate_client 500 501, at most 5 s",
        "  2. SIGTERM",
        "  3. after 5 s SIGKILL",
    ]
    done = run(served, "terminate", "501", "--no-wait")
    assert done.stdout.startswith("Client 501 of alice at server 500 is being ended, until it has gone:\n")


def test_all_of_a_user_are_named(served: Served) -> None:
    done = run(served, "terminate", "--mine", "--dry-run")
    assert (done.returncode, done.stdout) == (0, "no client: nothing is to be ended\n"), "root has none"
    done = run(served, "terminate", "--job", "slurm-7", "--no-wait")
    assert (done.returncode, done.stdout) == (0, "Client 501 of alice is being ended.\n")
    assert [(one[1].uid, one[1].job) for one in served.backend.asked] == [(0, None), (None, "slurm-7")]
    for words in ([], ["501", "--mine"]):
        assert run(served, "terminate", *words).returncode == 2


def test_terminate_says_what_became_of_it(served: Served) -> None:
    """Each step as it comes, one line for an action and its outcome, until the client has ended."""
    done = []
    served.backend.happen("client.ended", pid=501, uid=USER, outcome="ok", seconds=1.0, waited=0.0)  # another, earlier
    waits = threading.Thread(target=lambda: done.append(run(served, "terminate", "501")))
    waits.start()
    until(lambda: bool(served.backend.asked))
    action = {"action": "TerminateClient", "pid": 501, "uid": USER, "server": 500, "reason": f"ordered by uid {ADMIN}"}
    begun = served.backend.happen("action", **action)
    served.backend.happen("client.ended", pid=999, uid=USER, outcome="ok", seconds=1.0, waited=0.0)
    served.backend.happen("action.done", **action, begun=begun, ok=True, text="")
    served.backend.happen("client.ended", pid=501, uid=USER, outcome="ended", seconds=39.5, waited=1.0)
    waits.join(30)
    assert done[0].returncode == 0, done
    assert [line[21:] for line in done[0].stdout.splitlines()] == [
        "asked MPS to terminate client 501 of alice: ordered by carol",
        "client 501 of alice ended after 39.5s, terminated by mpsagent",
    ]


def test_a_restart_says_whose_work_it_costs(served: Served) -> None:
    """In a script it needs --yes; while no client is at work it needs nothing."""
    done = run(served, "restart-mps", "--dry-run")
    assert (done.returncode, done.stdout) == (0, "1 client of alice would lose work\n")
    done = run(served, "restart-mps")
    assert (done.returncode, "1 client of alice would lose work" in done.stderr) == (2, True)
    assert served.backend.asked == []
    done = run(served, "restart-mps", "--yes", "--timeout", "10m")
    assert (done.returncode, done.stderr) == (0, "")
    said = ["control daemon 400 has ended", "started the control daemon: no control daemon is running"]
    assert [line[21:] for line in done.stdout.splitlines()] == said
    assert run(served, "restart-mps", "--yes", "--timeout", "10").returncode == 2, "ten what?"
    served.backend.state = replace(served.backend.state, clients={})
    assert run(served, "restart-mps").returncode == 0
    assert [one[:2] for one in served.backend.asked] == [("restart", 600.0), ("restart", None)]


def test_who_may_not_restart_is_not_asked_first(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asked whether alice's work may be lost, and refused when the answer was yes."""

    async def refuses(timeout: float | None, by: int, instance: str | None, *, dry_run: bool) -> None:
        raise Problem(403, "uid 1 may not restart MPS", "/v1/restart")

    monkeypatch.setattr(served.backend, "restart", refuses)
    for words in (["restart-mps"], ["restart-mps", "--dry-run"]):  # nor is it said what a restart would cost
        done = run(served, *words)
        assert (done.returncode, "may not restart" in done.stderr, "lose work" in done.stderr) == (5, True, False)
        assert done.stdout == "", "seen: of an instance that is not there, and in a drain, no client would lose work"


def test_a_resume_says_whether_there_was_a_drain(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for drained, said in (
        (True, "Waiting users are admitted.\n"),
        (False, "There was no drain: nothing has changed.\n"),
    ):

        async def resume(by: int, instance: str | None, drained: bool = drained) -> dict[str, bool]:
            return {"draining": False, "drained": drained}

        monkeypatch.setattr(served.backend, "resume", resume)
        assert run(served, "resume").stdout == said


def test_a_restart_that_fails_is_not_fine(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said "restarting: yes" where MPS was not even installed."""

    async def fails(timeout: float | None, by: int, instance: str | None, *, dry_run: bool) -> dict[str, bool]:
        action = {"action": "StartControl", "reason": "no control daemon is running"}
        begun = served.backend.happen("action", **action)
        served.backend.happen("action.failed", **action, begun=begun, ok=False, text="it is not installed")
        return {"restarting": True}

    monkeypatch.setattr(served.backend, "restart", fails)
    done = run(served, "restart-mps", "--yes")
    assert done.returncode == 1
    assert "it failed: it is not installed" in " ".join(done.stdout.split())


def test_a_reload_that_fails_is_not_fine(served: Served) -> None:
    """The old policy stays and the exit status says that the new one did not take."""
    done = run(served, "reload")
    assert (done.returncode, "policy.toml:1: no" in done.stdout) == (1, True)


@pytest.mark.parametrize("good", [True, False])
def test_what_a_reload_says_fits_on_a_terminal(served: Served, monkeypatch: pytest.MonkeyPatch, good: bool) -> None:
    """Seen: a mistake with its hint in 228 columns, and a warning in 208. Into a pipe each is one line."""
    what = f"/etc/mpsagent/policy.toml:16: instance.right.pipe_directory: has another one; {'write the same one ' * 8}"

    async def reload(by: int) -> dict[str, object]:
        if not good:
            raise Problem(400, f"the policy has a mistake: {what}", "policy", "the old one is in force " * 4)
        return {"digest": "604a46bf269d", "files": ["p.toml"], "later": what}

    monkeypatch.setattr(served.backend, "reload", reload)
    done = run(served, "reload")
    whole = (done.stdout or done.stderr).splitlines()
    lines = read_on_terminal("--socket", str(served.path), "reload")
    assert max(map(len, lines)) <= 80 < max(map(len, whole))
    assert " ".join(" ".join(lines).split()) == " ".join(" ".join(whole).split())
    assert len(whole) == 2


def test_orders_are_answered_in_words_and_local_time() -> None:
    """Seen: "deadline: 2026-11-22T00:21:09.594+00:00" after `drain`."""
    now = datetime(2026, 11, 22, 1, tzinfo=timezone(timedelta(hours=1)))
    for answer, text in (
        ({"draining": True, "deadline": "2026-11-22T00:21:09.594+00:00"},
         "No new client is admitted. Clients still at work at 01:21:09 are ended."),
        ({"draining": True, "deadline": None},
         "No new client is admitted until mpsagent-cli resume. Clients at work end by themselves."),
        ({"draining": False}, "Waiting users are admitted."),
        ({"digest": "604a46bf269d0815", "files": ["/etc/mpsagent/policy.toml"]},
         "The policy is in force: 604a46bf269d, from /etc/mpsagent/policy.toml"),
        ({"of": "a later version"}, "of: a later version"),
    ):  # fmt: skip
        assert order_text.answered(answer, now) == [text]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="the policy has to be root's")
def test_a_reload_says_what_is_surely_not_meant(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: with a misspelt group it said "in force" and no more, and that group's users were refused."""

    async def reload(by: int) -> dict[str, object]:
        return {"digest": "604a46bf269d", "files": ["p.toml"], "later": None}

    monkeypatch.setattr(served.backend, "reload", reload)
    monkeypatch.setattr(policy_check, "DIRECTORY", tmp_path)
    (tmp_path / "policy.toml").write_text("[group.roooot]\nactive_threads = '5%'\n")
    said = CliRunner().invoke(cli, ["--socket", str(served.path), "reload"]).output
    assert f"warning: {tmp_path}/policy.toml:1: group.roooot: there is no group roooot here" in said


def test_a_reload_says_what_is_not_in_force_yet() -> None:
    """Seen: "in force" and no more, after the name of the instance and its directory had been changed."""
    what = "pipe_directory, instance changed: takes effect when mpsagent is restarted"
    answer = {"digest": "604a46bf269d0815", "files": ["p.toml"], "later": what}
    now = datetime(2026, 11, 22, 1, tzinfo=UTC)
    assert order_text.answered(answer, now) == [
        "The policy is loaded: 604a46bf269d, from p.toml",
        f"Not yet in force: {what}: systemctl restart mpsagent (no CUDA work is lost)",
    ]


def test_a_span_without_a_unit_is_told_in_terms_of_the_command_line(served: Served) -> None:
    """`drain --timeout 3` was answered in terms of JSON, with the places of mistakes behind them."""
    for words in (["drain"], ["restart-mps", "--yes"]):
        done = run(served, *words, "--timeout", "3")
        assert done.returncode == 2
        assert 'write it like "30s"' in done.stderr
        assert "JSON" not in done.stderr
    assert served.backend.asked == []
    done = run(served, "terminate", "77")
    assert done.stderr.startswith("mpsagent-cli: process 77 is not a client of MPS\n")


def test_an_order_that_is_not_on_disk_is_no_success(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def drain(*_: object) -> Any:
        return {"draining": True, "deadline": None, "instances": ["default"], "unsaved": "No space left on device"}

    monkeypatch.setattr(served.backend, "drain", drain)
    done = run(served, "drain")
    assert done.returncode == 1
    assert "in force, but it is not on disk and ends with the agent: No space left on device" in done.stderr
