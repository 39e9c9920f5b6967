"""A client that uses more memory than it was given: by its environment it can, and NVML says so (recording 11)."""

from __future__ import annotations

import pytest

from mpsagent.core import actions as act
from mpsagent.core import caps
from mpsagent.core import inputs as inp
from mpsagent.core.waiting import waiting
from mpsagent.mps.units import MIB
from tests.core.harness import ALICE, BOB, CAROL, GIB, PATIENT, Stage
from tests.core.test_pause import PAUSE, started
from tests.core.toy import Proc

ENDS = PATIENT  # the default
TELLS = PATIENT.replace("[limits]", '[limits]\non_limit_exceeded = "report"')
LIMIT = 10 * GIB
"""Carol's, by the policy."""
EVERY = 2.0


def looks(stage: Stage, client: Proc, *used: int | None) -> None:
    """So many bytes at each look; None: NVML says nothing of it."""
    for size in used:
        stage.feed(inp.MemorySeen(stage.now, {} if size is None else {client.pid: {"GPU-0": size}}))
        stage.run(EVERY)


def started_with(text: str) -> tuple[Stage, Proc]:
    stage = Stage(text).up()
    carol = stage.client(CAROL)
    stage.run(5)
    return stage, carol


def names(stage: Stage) -> list[int]:
    """Whom the status would name."""
    assert stage.core is not None
    return [client.pid for client, _, _ in caps.beyond(stage.core.view())]


def test_it_is_named_at_the_first_look_and_ended_after_ten_seconds_in_sum() -> None:
    """Dips do not begin anew, and a neighbour is left alone."""
    stage, carol = started_with(ENDS)
    other = stage.client(CAROL)
    stage.run(5)
    looks(stage, carol, LIMIT + GIB)
    assert names(stage) == [carol.pid]
    looks(stage, carol, LIMIT, LIMIT + GIB, LIMIT, LIMIT + GIB, LIMIT, LIMIT + GIB, LIMIT, LIMIT + GIB, LIMIT)
    assert names(stage) == []
    assert stage.working(carol), "8 s in sum"
    assert stage.actions(act.TerminateClient) == []
    looks(stage, carol, LIMIT + GIB)
    (asked,) = stage.actions(act.TerminateClient)
    assert (asked.pid, asked.rule) == (carol.pid, "limits.on_limit_exceeded")
    assert asked.reason == f"client {carol.pid} of user {CAROL} uses 11G on device 0, and was given 10G"
    assert not stage.working(carol)
    assert stage.working(other)
    assert [one.pid for one in stage.reports("client.unlimited")] == [carol.pid]


def test_where_the_policy_says_so_it_is_only_told_of() -> None:
    stage, carol = started_with(TELLS)
    stage.lifts = {carol.pid: inp.Lifts(carol.start, memory="7=4G")}
    stage.run(2)
    looks(stage, carol, *[LIMIT + GIB] * 20)
    assert stage.working(carol)
    (told,) = stage.reports("client.unlimited")
    assert told.reason.endswith("was given 10G: its environment has CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=7=4G")


def test_a_policy_that_comes_later_ends_nobody_who_is_within_the_limit_again() -> None:
    stage, carol = started_with(TELLS)
    looks(stage, carol, *[LIMIT + GIB] * 10, LIMIT)
    stage.reload(ENDS)
    looks(stage, carol, *[LIMIT] * 3)
    assert stage.working(carol)
    looks(stage, carol, LIMIT + GIB)
    assert not stage.working(carol)


@pytest.mark.parametrize("text", [ENDS, TELLS], ids=["memory", "report"])
def test_who_fills_its_limit_to_the_last_piece_is_not_named(text: str) -> None:
    """2 MiB for each context, as measured on an H200, and a server takes 60."""
    stage, carol = started_with(text)
    looks(stage, carol, *[LIMIT + 128 * MIB] * 20)
    assert stage.reports("client.unlimited") == []
    assert stage.working(carol)
    looks(stage, carol, LIMIT + 129 * MIB)
    assert names(stage) == [carol.pid]


def test_nobody_is_ended_where_nvml_says_nothing() -> None:
    """Neither of a process that it does not name, nor for the time in which it was silent."""
    stage, carol = started_with(ENDS)
    looks(stage, carol, LIMIT + GIB, *[None] * 20)
    stage.run(600)
    looks(stage, carol, LIMIT + GIB)
    assert stage.working(carol), "a look counts for 5 s at most"
    looks(stage, carol, *[None] * 20)
    assert stage.working(carol)


def test_nobody_is_ended_once_limits_are_not_enforced() -> None:
    stage, carol = started_with(ENDS)
    looks(stage, carol, LIMIT + GIB)
    stage.reload("mode = 'report'\n" + ENDS)
    looks(stage, carol, *[LIMIT + GIB] * 20)
    assert stage.working(carol)
    (report,) = stage.reports("client.over")
    assert "does not enforce this" in report.reason


def test_what_nvml_said_of_an_earlier_process_with_its_number_is_not_held_against_it() -> None:
    stage = Stage(ENDS).up()
    carol = stage.client(CAROL)
    stage.run(0.5)
    stage.feed(inp.MemorySeen(stage.now, {carol.pid: {"GPU-0": LIMIT + GIB}}))
    assert stage.core is not None
    assert stage.core.state.clients
    assert names(stage) == []


def test_another_gpu_than_the_limit_is_for_does_not_count() -> None:
    stage, carol = started_with(ENDS)
    for _ in range(20):
        stage.feed(inp.MemorySeen(stage.now, {carol.pid: {"GPU-1": 100 * GIB}}))
        stage.run(EVERY)
    assert stage.working(carol)
    assert stage.reports("client.unlimited") == []


def test_a_later_agent_judges_by_the_most_that_was_given() -> None:
    """A reload that lowers the limit reaches the next context of a process. What it was given before is the gate's to
    know, and a later agent ended it for that."""
    stage, carol = started_with(ENDS)
    stage.reload(ENDS.replace('memory_limit = "10G"', 'memory_limit = "5G"'))
    stage.run(1)
    stage.gate.knock(carol)
    stage.run(5)
    looks(stage, carol, LIMIT)
    assert [one.memory[0] for one in stage.given(carol)] == [LIMIT, LIMIT, LIMIT // 2]
    stage.kill_agent()
    stage.start_agent()
    stage.run(5)
    looks(stage, carol, *[LIMIT] * 20)
    assert stage.working(carol)
    assert stage.reports("client.unlimited") == []


def test_limits_that_are_not_known_end_no_client() -> None:
    """mpsagent was removed and installed again: the fallback limits were taken for the client's own."""
    stage, carol = started_with(ENDS + "[user.dave]\nmemory_limit = '1G'\n")
    stage.kill_agent()
    stage.gate.restarts(forgets=True)
    stage.identities = {}
    stage.start_agent()
    stage.run(5)
    stage.know(CAROL)
    looks(stage, carol, *[LIMIT] * 20)
    assert stage.working(carol)
    assert stage.reports("client.unlimited") == []
    assert stage.core is not None
    client = stage.core.state.clients[carol.pid]
    assert (client.limits, client.most_memory) == (None, None)


def test_one_that_is_paused_goes_on_before_it_is_asked_to_end() -> None:
    """A stopped client cannot answer, and its unanswered end is a fault for its neighbours (X13)."""
    stage = started(PAUSE.replace("[limits]", '[limits]\non_limit_exceeded = "terminate"'))
    alice = stage.client(ALICE)
    stage.run(25)
    stage.client(BOB)
    stage.run(5)
    assert stage.actions(act.Freeze)
    before = len(stage.actions(act.Thaw))
    looks(stage, alice, *[100 * GIB] * 8)
    assert alice.pid not in stage.procs
    thawed = stage.times(act.Thaw)[before]
    (asked,) = [at for at, one in zip(stage.times(act.TerminateClient), stage.actions(act.TerminateClient), strict=True)
                if one.pid == alice.pid]  # fmt: skip
    assert thawed <= asked


def test_a_total_counts_what_is_really_in_use_where_that_is_more() -> None:
    stage = Stage(PATIENT + '[user.carol]\ntotal_memory_limit = "20G"\n').up()
    carol = stage.client(CAROL)
    stage.run(5)
    looks(stage, carol, LIMIT + 5 * GIB)
    second = stage.client(CAROL)
    stage.run(5)
    assert not stage.working(second)
    assert stage.core is not None
    view = stage.core.view()
    (why,) = (one.why for one in waiting(view, stage.now))
    assert why.text == "this user's total is in use: 15G of 20G on device 0, the next process needs 10G" + (
        f" (user.carol.total_memory_limit, policy.toml:15)"
        f"; only this user's own process {carol.pid} can make room: wait, or run mpsagent-cli terminate {carol.pid}"
    )
    looks(stage, carol, LIMIT)
    stage.run(5)
    assert stage.working(second)


def test_an_environment_that_would_lift_the_limit_is_said_to_who_waits() -> None:
    stage = Stage(PATIENT).up()
    stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(1)
    stage.lifts = {bob.pid: inp.Lifts(bob.start, memory="0=2G,1=4G")}
    stage.run(5)
    words = "may take its memory limit away (CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2G,1=4G)"
    (told,) = stage.reports("client.environment")
    assert (told.pid, told.uid) == (bob.pid, BOB)
    assert words in told.reason
    assert stage.core is not None
    view = stage.core.view()
    (why,) = (one.why for one in waiting(view, stage.now))
    assert why.text.endswith(f"; process {bob.pid}: its environment {words}")
