"""The shipped policies with clients of several users: each does what its header says."""

from __future__ import annotations

import re
import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mpsagent.mps.units import multiprocessors_for_percent
from tests.agent.stage import A, Agent, B, C, Client, D, Stage
from tests.conformance import rig as rigs

pytestmark = pytest.mark.root

POLICIES = Path(__file__).resolve().parents[2] / "policies"
GIB = 1024


def start(stage: Stage, name: str, people: dict[str, int], shorter: dict[str, str] | None = None) -> Agent:
    """Start an agent with a shipped policy, whose users and groups are users of the stage. ``shorter``: lines of the
    policy, each with the line that replaces it for a time or a path that a test can use."""
    text = (POLICIES / name).read_text(encoding="utf-8")
    for line, other in (shorter or {}).items():
        assert line in text
        text = text.replace(line, other)
    for section, uid in people.items():
        assert f"[{section}]" in text
        text = text.replace(f"[{section}]", f"[user.{uid}]")
    text = re.sub(r"^log_directory = .*$", "", text, flags=re.MULTILINE).replace(
        "[instance.default]", "[instance.scene]"
    )
    before, _, section = text.partition("[instance.scene]\n")
    keys, _, after = section.partition("\n[")
    stage.policy(before + (f"\n[{after}" if after else ""), extra=keys)
    agent = stage.start_agent()
    stage.answering(agent)
    stage.until(lambda: agent.api.status()["gate"]["in_force"], "the gate goes by the policy")
    assert not agent.api.status()["policy"]["errors"]
    return agent


def working(stage: Stage, uid: int) -> Client:
    client = stage.client(uid, "sleep", 600)
    client.known()
    return client


def given(client: Client) -> tuple[int, int]:
    """Multiprocessors, and GiB of free memory to the nearest one."""
    found = client.seen()
    assert found is not None
    return found[0], round(found[1] / GIB)


def nobody_waits(agent: Agent) -> None:
    assert agent.api.get("/v1/queue")["queue"] == []


def waiting_uids(stage: Stage, agent: Agent, client: Client) -> set[int]:
    """Return the users in the queue, as soon as the program is in it."""
    queue: list[dict[str, Any]] = []

    def is_there() -> bool:
        queue[:] = agent.api.get("/v1/queue")["queue"]
        return any(client.pid in one["clients"] for one in queue)

    stage.until(is_there, "the program is in the queue")
    return {one["uid"] for one in queue}


def test_no_policy_combines_small_shares_with_turns() -> None:
    """While one user has the GPU, the remainder of a small share is idle."""
    for path in sorted(POLICIES.glob("*.toml")):
        read = tomllib.loads(path.read_text(encoding="utf-8"))
        in_turns = [one for one in read.get("instance", {}).values() if one.get("sharing") == "turns"]
        assert not (in_turns and "active_threads" in str(read)), path.name


def test_a_lab_with_notebooks(stage: Stage) -> None:
    """All at once, each in its own part of the memory; a student's third notebook waits for memory, and a guest's
    third for a place. A fault of one user's program terminates no program of another user."""
    agent = start(stage, "lab-with-students.toml", {"group.staff": A, "group.students": B, "user.alice": C})
    staff, student, alice, guest = (working(stage, uid) for uid in (A, B, C, D))
    nobody_waits(agent)
    assert [given(one)[1] for one in (student, alice, guest)] == [7, 19, 1]
    assert given(staff)[1] >= 68
    assert {given(one)[0] for one in (staff, student, alice, guest)} == {stage.machine.multiprocessors}
    working(stage, B)
    third = stage.client(B, "sleep", 600)
    stage.until(lambda: "total" in [one["reason"] for one in agent.api.get("/v1/queue")["queue"]], "16G are in use")
    assert third.rc is None
    working(stage, D)
    surplus = stage.client(D, "sleep", 600)
    stage.waiting(surplus)
    assert waiting_uids(stage, agent, surplus) == {B, D}
    stage.client(A, "oob", 0.1).ended()
    stage.record("server.fault")
    assert all(one.rc is None for one in (student, alice, guest))
    assert not any("CUDA_ERROR" in one.text() for one in (student, alice, guest))


def test_a_forgotten_notebook_of_a_student_is_terminated_and_one_of_the_staff_is_not(stage: Stage) -> None:
    """Half a day is two seconds here."""
    shorter = {'max_runtime = "12h"': 'max_runtime = "2s"'}
    start(stage, "lab-with-students.toml", {"group.staff": A, "group.students": B}, shorter)
    staff, student = (working(stage, uid) for uid in (A, B))
    assert student.ended() != 0
    assert staff.rc is None


def test_a_service_and_its_neighbours(stage: Stage) -> None:
    """Four replicas with half the GPU each, and engineers alongside, with a tenth of the memory."""
    agent = start(stage, "inference-node.toml", {"user.inference": A})
    replicas = [working(stage, A) for _ in range(4)]
    engineer = working(stage, B)
    nobody_waits(agent)
    half = multiprocessors_for_percent(50.0, stage.machine.multiprocessors)
    assert {given(one)[0] for one in replicas} == {half}
    assert given(engineer)[1] <= 14
    stage.client(B, "oob", 0.1).ended()
    stage.record("server.fault")
    assert all(one.rc is None for one in replicas), "an engineer's fault does not reach the service"
    fifth = stage.client(A, "sleep", 600)
    stage.waiting(fifth)
    assert waiting_uids(stage, agent, fifth) == {A}
    working(stage, C)
    working(stage, C)
    surplus = stage.client(C, "sleep", 600)
    stage.waiting(surplus)
    assert waiting_uids(stage, agent, surplus) == {A, C}
    rigs.send_signal(agent.pid, signal.SIGTERM)
    assert rigs.exited(agent.started.process, 20), "the agent does not wait until the service has stopped"
    for one in replicas:
        one.finish()
        assert one.ended() == 0, "the service works on without the agent"


def test_turns_with_time_limits(stage: Stage) -> None:
    """One user at a time with the whole GPU, and a latest time for the next one; none behind an operator."""
    agent = start(stage, "turns.toml", {"group.students": B, "group.operators": C})
    first = working(stage, B)
    assert given(first)[0] == stage.machine.multiprocessors
    waits = stage.client(A, "sleep", 600)
    stage.waiting(waits)
    stage.until(lambda: agent.api.get("/v1/queue")["queue"], "it waits")
    (row,) = agent.api.get("/v1/queue")["queue"]
    assert (row["uid"], row["reason"]) == (A, "turn")
    assert 20 * 60 < row["turn_seconds"] < 24 * 60, "a student's 20 minutes, two of warning, and the end"
    first.kill()
    waits.known()
    waits.kill()
    operator = working(stage, C)
    late = stage.client(A, "sleep", 600)
    stage.waiting(late)
    stage.until(lambda: agent.api.get("/v1/queue")["queue"], "it waits")
    assert agent.api.get("/v1/queue")["queue"][0]["turn_seconds"] is None
    assert operator.rc is None


def test_a_turn_lasts_an_hour_and_ends_after_the_checkpoint(stage: Stage) -> None:
    """A user who is no student has an hour while another user waits. A student's turn, here of a second, ends with the
    hook that requests a checkpoint and the termination of the student's programs."""
    saved, hook = stage.place / "saved", stage.place / "request-checkpoint"
    hook.write_text(f"#!/bin/sh\ncat >{saved}\n")
    hook.chmod(0o755)
    shorter = {
        'turn.time_limit = "20m"': 'turn.time_limit = "1s"',
        'grace = "2m" ': 'grace = "1s" ',
        "/usr/local/sbin/request-checkpoint": str(hook),
    }
    agent = start(stage, "turns.toml", {"group.students": B}, shorter)
    student = working(stage, B)
    other = working(stage, A)
    assert student.ended() != 0
    assert str(student.pid) in saved.read_text()
    waits = stage.client(B, "sleep", 600)
    stage.waiting(waits)
    assert waiting_uids(stage, agent, waits) == {B}
    (row,) = agent.api.get("/v1/queue")["queue"]
    assert 59 * 60 < row["turn_seconds"] < 62 * 60
    assert other.rc is None


def test_a_slurm_node(stage: Stage) -> None:
    """A job has what its lease says, jobs of two users run at once, and outside of jobs there is little."""
    agent = start(stage, "slurm.toml", {})
    assert agent.api.order("lease", uid=A, active_threads="30%", memory_limit="30%", until="10m", name="job")[0] == 200
    job, other = working(stage, A), working(stage, B)
    nobody_waits(agent)
    present = stage.machine.multiprocessors
    assert [given(one)[0] for one in (job, other)] == [
        multiprocessors_for_percent(part, present) for part in (30.0, 10.0)
    ]
    assert given(job)[1] <= 42
    (instance,) = agent.api.status()["instances"]
    assert (len(instance["servers"]), instance["daemons"]) == (1, []), "all jobs are on one server"
    stage.client(B, "oob", 0.1).ended()
    stage.record("server.fault")
    stage.until(lambda: "CUDA_ERROR" in job.text() or job.rc is not None, "a fault of one user ends the job of another")
