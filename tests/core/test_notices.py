"""Words on terminals: why a process waits, that it is served, and that its turn ends; only where the policy says so."""

from __future__ import annotations

from dataclasses import fields

from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core.reduce import MOST_REFUSALS
from mpsagent.wire import link
from tests.core.harness import ALICE, BOB, CAROL, DAVE, POLICY, Stage

TELLS = POLICY.replace("[limits]", "[limits]\nnotify_terminal = true")


def told(stage: Stage) -> list[tuple[int, str]]:
    said = [one for one in stage.actions(act.Tell) if isinstance(one, act.Tell)]
    return [(one.pid, one.reason.removeprefix(f"process {one.pid} ")) for one in said]


def test_who_waits_is_told_once_and_again_when_served_and_who_has_to_go_before() -> None:
    stage = Stage(TELLS).up()
    alice = stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(9.5)
    assert told(stage) == [], "nobody has waited for 10 s"
    stage.run(3)
    assert [pid for pid, _ in told(stage)] == [alice.pid, bob.pid], "the words are in tests/golden/messages.txt"
    stage.run(60)
    assert stage.working(bob)
    assert [pid for pid, _ in told(stage)] == [alice.pid, bob.pid, bob.pid]


def test_who_waited_for_a_place_apart_is_told_when_it_has_the_gpu() -> None:
    apart = '[instance.gpu]\nsharing = "per-user"\nmax_users = 1\n'
    stage = Stage(TELLS + apart, together=True)
    stage.start_agent()
    stage.run(1)
    alice = stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(20)
    stage.ends(alice)
    stage.run(5)
    assert stage.working(bob)
    assert [pid for pid, _ in told(stage)] == [bob.pid] * 2


def test_a_policy_may_keep_terminals_quiet() -> None:
    stage = Stage(POLICY.replace("[limits]", "[limits]\nnotify_terminal = false")).up()
    stage.client(ALICE)
    stage.run(1)
    stage.client(BOB)
    stage.run(60)
    assert told(stage) == []


def test_a_crowd_of_one_user_is_told_a_few_at_a_time_and_who_has_gone_never() -> None:
    stage = Stage(TELLS.replace('"10s"', '"1h"')).up()
    stage.client(ALICE)
    stage.run(1)
    crowd = [stage.client(BOB) for _ in range(50)]
    stage.run(20)
    assert [pid for pid, _ in told(stage)] == [one.pid for one in crowd[:4]]
    stage.ends(crowd[0])
    stage.run(1)
    assert [pid for pid, _ in told(stage)] == [one.pid for one in crowd[:5]]


def test_no_action_says_what_its_record_says_already() -> None:
    """Each line on a terminal ended in a fault of the agent's own: two texts for one record."""
    own = {"at", "action", "begun", "ok", "text"}
    assert not [kind for kind in act.Action.__subclasses__() if own & {field.name for field in fields(kind)}]


DENIES = f'{POLICY}[user.carol]\naccess = "deny"\n'


def test_a_refused_process_learns_the_reason_before_the_error() -> None:
    """It exits at its error, and has no terminal any more. One process in a minute: a line costs a helper."""
    stage = Stage(DENIES).up()
    carol = stage.client(CAROL)
    stage.run(1)
    ((pid, text),) = told(stage)
    assert (pid, "in the policy for user 1003" in text) == (carol.pid, True)
    assert stage.refused == [CAROL]
    kinds = [type(one) for _, one in stage.done if isinstance(one, act.Tell) or "in the policy for user" in one.reason]
    assert kinds == [act.Tell, act.TellGate]
    for _ in range(5):
        stage.client(CAROL)
    stage.run(1)
    assert (len(told(stage)), len(stage.refused)) == (1, 6)
    stage.run(60)
    stage.client(CAROL)
    stage.run(1)
    assert (len(told(stage)), len(stage.refused)) == (2, 7)


def test_a_line_that_cannot_be_written_holds_no_refusal_up() -> None:
    stage = Stage(DENIES.replace("[limits]", "[limits]\nnotify_terminal = false")).up()
    stage.client(CAROL)
    stage.run(1)
    assert (told(stage), stage.refused) == ([], [CAROL])


IN_JOB = "/system.slice/slurmstepd.scope/job_17/step_0"


def files(stage: Stage) -> list[tuple[int, bool]]:
    return [(one.pid, one.files) for one in stage.actions(act.Tell) if isinstance(one, act.Tell)]


def test_only_a_job_of_slurm_gets_its_lines_in_files_and_pipes() -> None:
    """The line about the wait, about its end, and the warning before the end of a turn."""
    stage = Stage(TELLS).up()
    alice = stage.client(ALICE, cgroup=IN_JOB)
    stage.run(1)
    bob, carol = stage.client(BOB, cgroup=IN_JOB), stage.client(CAROL, cgroup="/user.slice/slurmstepd.scope/job_17")
    stage.run(60)
    assert set(files(stage)) == {(alice.pid, True), (bob.pid, True), (carol.pid, False)}
    assert len([one for one in files(stage) if one[0] == bob.pid]) >= 2


def test_a_refused_process_of_a_job_gets_the_line_in_its_file() -> None:
    stage = Stage(DENIES).up()
    carol = stage.client(CAROL, cgroup=IN_JOB)
    stage.run(1)
    assert files(stage) == [(carol.pid, True)]


def refuses(stage: Stage, *refused: link.Refused) -> None:
    stage.feed(*(inp.GateSaid(stage.now, one) for one in refused))


def test_a_process_that_the_gate_refuses_learns_why() -> None:
    """A held one, one for which there is no place, and one that MPS does not take: each user once in a minute."""
    stage = Stage(TELLS).up()
    stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(1)
    assert stage.core is not None
    (held,) = stage.core.state.held.line(BOB)
    full = "1024 connections of user 1003 wait already: end some of their programs"
    refuses(
        stage,
        link.Refused(held.connection, bob.pid, BOB, "MPS has not confirmed its limits", bob.start),
        link.Refused(77, 7001, CAROL, full, 70, IN_JOB),
        link.Refused(78, 7002, CAROL, full, 71, IN_JOB),
        link.Refused(79, 7003, 0, full, 72),
        link.Refused(80, -1, DAVE, "its process cannot be seen"),
    )
    assert told(stage) == [(bob.pid, "was refused: MPS has not confirmed its limits"), (7001, f"was refused: {full}")]
    assert files(stage) == [(bob.pid, False), (7001, True)]
    stage.run(61)
    refuses(stage, link.Refused(81, 7004, CAROL, full, 73))
    assert told(stage)[-1] == (7004, f"was refused: {full}")
    for number in range(100):
        refuses(stage, link.Refused(100 + number, 7100 + number, DAVE, full, 74))
    assert len([pid for pid, _ in told(stage) if pid >= 7100]) == 1
    assert len(stage.core.state.refusals) <= MOST_REFUSALS


def test_a_policy_may_keep_refusals_quiet() -> None:
    stage = Stage(POLICY.replace("[limits]", "[limits]\nnotify_terminal = false")).up()
    refuses(stage, link.Refused(77, 7001, CAROL, "no place", 70))
    assert told(stage) == []


def test_a_refused_context_names_the_key_and_its_line() -> None:
    """The program sees CUDA error 808 alone, and the gate does not know the policy's files."""
    stage = Stage(TELLS.replace("[user.alice]", "[user.alice]\nmax_contexts = 2")).up()
    why = "its user has as many contexts as max_contexts allows, 2 (CUDA error 808)"
    refuses(stage, link.Refused(77, 7001, ALICE, why, 70))
    assert told(stage) == [(7001, f"was refused: {why} (user.alice.max_contexts, policy.toml:7)")]
