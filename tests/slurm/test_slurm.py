"""packaging/slurm with a real slurmctld and slurmd, the gate, and the simulator: a job's share is a ceiling."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsagent.linux.processes import stopped
from mpsagent.mps.units import multiprocessors_for_percent
from tests.agent.stage import USERS, Agent, Stage, alive
from tests.conformance.backends import other_users_python
from tests.scenes.stage import backend_of
from tests.slurm.cluster import Cluster, why_not

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]

OUTSIDE = 5
POLICY = f"[limits]\nactive_threads = '{OUTSIDE}%'\ntotal_active_threads = '100%'\n"
TOGETHER = 'sharing = "one-server"'
PAUSING = f"""{POLICY}[turn]
on_expiry = "pause"
pause_slice = "1h"
[user.{USERS[0]}]
turn.pause_slice = "1s"
"""
SHARES = (10, 20, 30, 40, 50, 60, 70, 80)
JOBS = 20
MIB = 1 << 20
LONG = 240.0
"""Seconds for what takes Slurm and several starts of Python; a busy machine needs a minute for some of it."""
CONTEXT = 1024
"""MiB that contexts and, without a limit, the server may take; the shares are 14 GiB apart."""


@contextlib.contextmanager
def slurm(
    stage: Stage,
    *more: str,
    proctrack: str = "cgroup",
    check: int = 2,
    policy: str = POLICY,
    instance: str = TOGETHER,
    shared: str = "mps:100",
    gpus: int = 1,
) -> Iterator[tuple[Cluster, Agent]]:
    """``more``: settings of the hooks. Their deadlines are far off: how fast a machine is, is not tested here."""
    if why := why_not():
        pytest.skip(why)
    agent = stage.with_agent(policy, extra=f"{instance}\n")
    found = os.pathsep.join(str(stage.place / "slurm" / name) for name in ("repository", "libraries"))
    program = ["env", f"PYTHONPATH={found}", other_users_python(USERS[0]), "-m", "mpsagent.cli.main"]
    words, settings = [*program, "--socket", str(agent.api.path)], ["answer=30", "patience=60", "memory=share", *more]
    cluster = Cluster(stage.place / "slurm", words, "\n".join(settings), proctrack, check, shared=shared, gpus=gpus)
    try:
        stage.until(cluster.ready, "the node of Slurm is idle", LONG, every=0.2)
        yield cluster, agent
    except Exception as error:
        raise AssertionError(f"{error}\n--- Slurm\n{cluster.log()}") from error
    finally:
        cluster.end()


def client(stage: Stage, *words: str) -> str:
    return " ".join([*stage.backend.client, *words])


def exact(stage: Stage, text: str, percent: float) -> list[bool]:
    """Of each client in a job's output, whether it had just this share of threads and memory."""
    right = multiprocessors_for_percent(percent, stage.machine.multiprocessors)
    most = stage.machine.total_mib * percent / 100
    found = re.findall(r"\] sms (\d+) meminfo \w+ free (\d+) MiB", text)
    return [int(sms) == right and most - CONTEXT <= int(free) < most for sms, free in found]


def names(agent: Agent) -> set[str]:
    return {one["name"] for one in agent.api.get("/v1/leases")["leases"]}


def standing(stage: Stage) -> list[Path]:
    """The marks of processes that the agent has frozen."""
    return list((stage.place / "run").glob("instances/*/frozen/*"))


def paused(agent: Agent) -> list[object]:
    return [one for one in agent.api.get("/v1/clients")["clients"] if one["state"] == "paused"]


def leases(agent: Agent) -> list[object]:
    return list(agent.api.get("/v1/leases")["leases"])


def test_each_client_has_exactly_what_its_job_asked_for(stage: Stage) -> None:
    """Many jobs of four users, several at a time, also two of one user with different shares; who exports 100 % in a
    step has the job's share all the same, who comes outside of jobs what is for those; no lease stays."""
    with slurm(stage, check=60) as (cluster, agent):
        wanted = {}
        for number in range(JOBS):
            share, uid = SHARES[number * 3 % len(SHARES)], USERS[number % 4]
            step = f"srun --mpi=none {client(stage, 'sleep', '0.2')}"
            lines = [client(stage, "sleep", "0.3"), "export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100", step]
            wanted[cluster.submit(uid, f"mps:{share}", *lines)] = share
        stage.until(lambda: any("RUNNING" in row for row in cluster.jobs()), "a job runs", LONG)
        outside = stage.client(USERS[0])
        stage.until(lambda: not cluster.unfinished(), "all jobs have ended", LONG, every=0.3)
        said = {job: cluster.said(job) for job in wanted}
        wrong = {job: text for job, text in said.items() if exact(stage, text, wanted[job]) != [True, True]}
        assert not wrong
        assert outside.ended() == 0
        assert outside.inside(OUTSIDE), outside.text()
        stage.until(lambda: not leases(agent), "no lease is left", LONG)
        job_of = {one["number"]: int(one["cgroup"].rpartition("_")[2]) for one in agent.found("lease.given")}
        assert sorted(job_of.values()) == sorted(wanted)
        stage.until(
            lambda: (
                sorted(job_of[one["lease"]] for one in agent.found("client.ended") if "lease" in one)
                == sorted([*wanted, *wanted])
            ),
            "the history says of each client which job it was",
        )
        rows = {row["job"]: row for row in agent.api.get("/v1/report?by=job")["rows"]}
        assert set(rows) == {f"slurm-{job}" for job in wanted}
        for job, share in wanted.items():
            row = rows[f"slurm-{job}"]
            waits = [one["waited"] for one in agent.found("client.connected", job=row["job"])]
            assert (row["clients"], row["threads"], row["forced"]) == (2, share, 0)
            assert row["memory"] // MIB == int(stage.machine.total_mib * share / 100), "as the policy counts percent"
            assert row["waited"] == pytest.approx(sum(waits))
            assert row["gpu"] > 0.4, "its clients worked for half a second"
        stage.until(
            lambda: cluster.state() == "IDLE",
            "no job is planned any more, and nothing drains the node",
            LONG,
            every=0.2,
        )


@pytest.mark.parametrize(("shared", "gres", "each"), [("mps:100", "mps:40", 20), ("shard:8", "shard:4", 25)])
def test_a_job_has_its_share_in_total(stage: Stage, shared: str, gres: str, each: int) -> None:
    """Three processes of a job that two may share: two work, each with half of it, whatever they export."""
    settings = ("processes=2", "shards=8") if shared == "shard:8" else ("processes=2",)
    with slurm(stage, *settings, check=60, shared=shared) as (cluster, agent):
        crowd = " & ".join([client(stage, "sleep", "600")] * 3)
        job = cluster.submit(USERS[0], gres, "export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100", f"{crowd} & wait")
        words = f"job slurm-{job}'s total is in use: {2 * each} of {2 * each} % of threads"
        stage.until(lambda: words in str(agent.api.get("/v1/queue")), "the third process waits for it", LONG)
        stage.until(lambda: cluster.said(job).count("] sms ") == 2, "two work", LONG)
        assert exact(stage, cluster.said(job), each) == [True] * 2, cluster.said(job)


def test_a_jobs_name_changes_no_share(stage: Stage) -> None:
    """As far as Slurm takes the name. With a backslash and c in it, a job had the whole GPU for one shard of eight."""
    names = (r"x\c", r"x\0143", "\\" * 250, "'\"`$(reboot)", "x\nGRES=gpu:1(IDX:0) ", "-n -e --", "n" * 256)
    with slurm(stage, "shards=8", check=60, shared="shard:8") as (cluster, _):
        for name in names:
            job = cluster.submit(USERS[0], "shard:1", client(stage, "query"), options=(f"--job-name={name}",))
            stage.until(lambda job=job: "] sms " in cluster.said(job), f"the job with the name {name!r} works", LONG)  # type: ignore[misc]
            assert exact(stage, cluster.said(job), 12.5) == [True], (name, cluster.said(job))


@pytest.fixture
def two_gpus() -> Iterator[Stage]:
    place = Path(tempfile.mkdtemp(prefix="mpss", dir="/tmp"))
    place.chmod(0o755)
    with backend_of("sim", place / "two", gpus=2) as (backend, machine), Stage(backend, place / "s", machine) as one:
        yield one
    shutil.rmtree(place, ignore_errors=True)
    assert one.left == [], "something of the stage outlived it"


def test_shards_of_two_gpus(two_gpus: Stage) -> None:
    """Each GPU has 8. Slurm places a job on one of them, and the job has its part of that one: two jobs of 6 are at
    work at once, each on a GPU, and Slurm has the third one wait."""
    stage = two_gpus
    with slurm(stage, "shards=8", check=60, shared="shard:8", gpus=2) as (cluster, _):
        lines = ["echo gpu $CUDA_VISIBLE_DEVICES", client(stage, "sleep", "600")]
        jobs = [cluster.submit(USERS[number], "shard:6", *lines) for number in range(3)]
        stage.until(lambda: all(cluster.said(job).count("] sms ") == 1 for job in jobs[:2]), "two work", LONG)
        assert {cluster.said(job).split()[1] for job in jobs[:2]} == {"0", "1"}
        for job in jobs[:2]:
            assert exact(stage, cluster.said(job), 75) == [True], cluster.said(job)
        assert f"{jobs[2]} PENDING" in cluster.jobs()
        cluster.run("scancel", str(jobs[0]))
        stage.until(lambda: cluster.said(jobs[2]).count("] sms ") == 1, "the third one works in its place", LONG)
        assert exact(stage, cluster.said(jobs[2]), 75) == [True]


def test_files_say_which_jobs_a_gpu_has(stage: Stage) -> None:
    """For jobstats as long as one job has it, for dcgm-exporter each; and none is left."""
    with slurm(stage, f"gpustat={stage.place}/gpustat", f"dcgm={stage.place}/dcgm", check=60) as (cluster, _):

        def text(path: Path) -> str:
            with contextlib.suppress(FileNotFoundError):
                return path.read_text()
            return ""

        def there() -> tuple[str, str]:
            return text(stage.place / "gpustat/0"), text(stage.place / "dcgm/0")

        first = cluster.submit(USERS[0], "mps:30", "sleep 600")
        stage.until(lambda: there() == (f"{first} {USERS[0]}\n", f"{first}\n"), "the first job's files", LONG)
        second = cluster.submit(USERS[1], "mps:40", "sleep 600")
        stage.until(lambda: there() == ("", f"{first}\n{second}\n"), "both have the GPU", LONG)
        cluster.run("scancel", str(first))
        stage.until(lambda: there() == (f"{second} {USERS[1]}\n", f"{second}\n"), "the second one has it alone", LONG)
        cluster.run("scancel", str(second))
        stage.until(lambda: there() == ("", ""), "no job has it", LONG)


def test_a_killed_job_leaves_no_lease_and_nobody_paused(stage: Stage) -> None:
    """Whether it was at work or its processes were frozen when it was killed, or its slurmstepd was. Nor does one leave
    a lease that ended while the node had no power; a job that runs keeps its own."""

    def submit(uid: int) -> tuple[int, int]:
        """A job, and its process once that is a client."""
        job = cluster.submit(uid, "mps:40", client(stage, "sleep", "600"))
        return job, agent.wait("client.connected", LONG, job=f"slurm-{job}")["pid"]

    def left(job: int, *others: int) -> None:
        """Only these have leases, and nobody is paused; the job has ended."""
        due = {"other-4711", *(f"slurm-{other}" for other in others)}
        stage.until(lambda: names(agent) == due, f"job {job} has no lease any more", LONG)
        stage.until(lambda: not standing(stage) and not paused(agent), "nobody is paused", LONG)
        stage.until(
            lambda: not any(row.startswith(f"{job} ") for row in cluster.unfinished()), "the job has ended", LONG
        )

    with slurm(stage, policy=PAUSING, instance='server_scope = "all"') as (cluster, agent):
        share = {"uid": USERS[2], "active_threads": "30%", "until": "1h"}
        for name in ("slurm-4711", "other-4711"):
            assert agent.api.order("lease", **share, name=name)[0] == 200
        kill = ("scancel", "--signal=KILL", "--full")
        first, frozen = submit(USERS[0])
        second, _ = submit(USERS[1])
        stage.until(lambda: stopped(frozen), "the first job is paused", LONG)
        stage.until(
            lambda: "slurm-4711" not in names(agent), "the lease of a job that Slurm does not know is ended", LONG
        )

        cluster.run(*kill, str(second))  # it was at work
        left(second, first)
        assert alive(frozen)
        assert not stopped(frozen)

        third, _ = submit(USERS[1])
        stage.until(lambda: stopped(frozen), "the first job is paused again", LONG)
        cluster.run(*kill, str(first))
        left(first, third)
        assert not alive(frozen)

        cluster.run(*kill, str(third))
        left(third)

        # Nobody is left who would report the end: the node's own check finds out. The kernel hangs up a stopped process
        # whose parent has gone; one at work stays, without a lease.
        fourth, frozen = submit(USERS[0])
        fifth, _ = submit(USERS[1])
        stage.until(lambda: stopped(frozen), "the fourth job is paused", LONG)
        for job, others in ((fourth, [fifth]), (fifth, [])):
            cluster.run("pkill", "-KILL", "-f", f"slurmstepd: .{job}.")
            cluster.run("scancel", str(job))
            left(job, *others)
        assert not alive(frozen)


def test_a_job_that_waits_says_so(stage: Stage) -> None:
    """At the gate, where its user has no share left: in its output, whether the batch script or a step has it, in its
    comment, and then in the report."""
    with slurm(stage) as (cluster, agent):
        outside = stage.client(USERS[1], "sleep", "600")  # no kernel in flight: its end is no fault
        agent.wait("client.connected", pid=outside.pid)
        program = client(stage, "sleep", "600")
        job = cluster.submit(USERS[1], "gpu:1", f"{program} &", f"srun --mpi=none {program} &", "wait")

        def comment() -> str:
            return next(iter(cluster.show(job).split(" AdminComment=")[1:]), "")

        lines = re.compile(
            r"mpsagent: process \d+ waits for the GPU: .*\(limits\.total_active_threads, .*policy\.toml:\d+\)"
        )
        stage.until(lambda: len(lines.findall(cluster.said(job))) == 2, "program and step have a line", LONG)
        stage.until(lambda: comment().startswith("mpsagent: waits for the GPU: "), "the comment", LONG, every=0.3)
        cluster.run("scancel", f"{job}.0")
        outside.kill()

        def shown() -> str | None:
            found = re.search(r"mpsagent: waited (\d+) s for the GPU", comment())
            return None if found is None else found[1]

        stage.until(shown, "the job's comment", LONG, every=0.3)
        stage.until(lambda: exact(stage, cluster.said(job), 100) == [True], "the job's client has all of the GPU", LONG)
        assert "has the GPU now, after " in cluster.said(job)
        (row,) = agent.api.get(f"/v1/report?by=job&job=slurm-{job}")["rows"]
        assert (row["uid"], row["clients"], row["threads"]) == (USERS[1], 1, 100.0)
        assert row["waited"] >= row["longest"] >= 10.0
        assert shown() == str(int(round(row["waited"], 3))), "as the report's CSV has it"


def test_run_under_srun(stage: Stage) -> None:
    """A step's words and exit statuses are those of its program; one that is cancelled in the middle of a kernel ends
    through MPS, and no neighbour is hurt."""
    with slurm(stage) as (cluster, agent):
        run = " ".join(["srun --mpi=none", *cluster.client, "run"])
        neighbour = stage.client(USERS[2], "mind", "600")
        outside = stage.client(USERS[1], "sleep", "600")
        for one in (neighbour, outside):
            agent.wait("client.connected", pid=one.pid)
        waits = cluster.submit(USERS[1], "gpu:1", f"{run} -- {client(stage, 'query')}; echo status $?")
        stage.until(lambda: "mpsagent-cli: it waits for the GPU" in cluster.said(waits), "the step says so", LONG)
        outside.kill()  # it has no kernel in flight
        stage.until(lambda: "status 0" in cluster.said(waits), "it has been served", LONG)
        late = f"{run} --timeout 1s -- {client(stage, 'query')}; echo late $?"
        lines = [
            "export PATH=/usr/bin:/bin",
            f'{run} -- sh -c "exit 7"; echo status $?',
            f"{run} -- nosuch; echo none $?",
            late,
        ]
        outside = stage.client(USERS[1], "sleep", "600")
        agent.wait("client.connected", pid=outside.pid)
        job = cluster.submit(USERS[1], "gpu:1", *lines)
        for words in ("status 7", "none 127", "late 75"):
            stage.until(lambda words=words: words in cluster.said(job), words, LONG)  # type: ignore[misc]
        outside.kill()
        job = cluster.submit(USERS[0], "mps:40", f"{run} -- {client(stage, 'spin', '600')}")
        stage.until(lambda: "launch" in cluster.said(job), "a kernel is in flight", LONG)
        cluster.run("scancel", str(job))
        assert agent.wait("client.ended", LONG, job=f"slurm-{job}")["outcome"] == "ended"
        stage.until(lambda: not leases(agent), "no lease is left", LONG)
        assert not agent.found("server.fault")
        assert neighbour.finish() == 0


def test_a_node_is_drained_while_the_agent_is_away_and_by_nothing_else_resumed(stage: Stage) -> None:
    with slurm(stage, "patience=3") as (cluster, agent):
        stage.killed(agent)
        stage.until(lambda: "DRAIN" in cluster.state(), "drained", LONG, every=0.2)
        assert cluster.reason().startswith("mpsagent: "), cluster.reason()
        agent = stage.again()
        stage.until(lambda: cluster.state() == "IDLE", "resumed by the recovery", LONG, every=0.2)
        cluster.run("scontrol", "update", f"nodename={cluster.node}", "state=drain", "reason=disk")
        stage.killed(agent)
        mark = cluster.ran("health-check") + 1
        stage.until(lambda: cluster.ran("health-check") > mark, "the node was checked without it", LONG, every=0.2)
        agent = stage.again()
        mark = cluster.ran("health-check") + 1
        stage.until(lambda: cluster.ran("health-check") > mark, "the node was checked by then", LONG, every=0.2)
        assert "DRAIN" in cluster.state()
        assert cluster.reason() == "disk"


def test_a_prolog_without_an_agent_says_so_and_the_job_runs_later(stage: Stage) -> None:
    """It must not run without its lease: the node is drained with the reason, and the job waits for the recovery. Where
    jobs have no cgroups, a lease is for all processes of the user, and that is said."""
    with slurm(stage, "patience=3", proctrack="linuxproc", check=5) as (cluster, agent):
        stage.killed(agent)
        job = cluster.submit(USERS[0], "mps:30", client(stage, "query"))
        stage.until(lambda: "DRAIN" in cluster.state(), "drained", LONG, every=0.1)
        assert cluster.reason().startswith("mpsagent: "), cluster.reason()
        agent = stage.again()
        stage.until(lambda: cluster.state() == "IDLE", "resumed by the recovery", LONG, every=0.2)
        cluster.run(
            "scontrol", "update", f"jobid={job}", "starttime=now"
        )  # Slurm would wait until its credential is old
        stage.until(lambda: not cluster.unfinished(), "the job has run", LONG, every=0.3)
        assert exact(stage, cluster.said(job), 30) == [True], cluster.said(job)
        given = agent.found("lease.given")[-1]
        assert (given["uid"], given.get("cgroup"), given["job"]) == (USERS[0], None, f"slurm-{job}")
        assert f"its share is for all processes of user {USERS[0]}" in cluster.everything_said()
        stage.until(lambda: not leases(agent), "no lease is left", LONG)
        stage.exact(USERS[0], OUTSIDE)
