#!/usr/bin/env python3
"""Slurm's day on a GPU: a real slurmctld and slurmd with the hooks of packaging/slurm, and jobs with PyTorch.

    slurm_day.py --out DIR          with the real MPS and GPU of this machine: root and PyTorch needed
    slurm_day.py --sim              with the simulator and its clients
    slurm_day.py --packages FILE    Slurm as slurm_packages.sh packs it; without it .gpu/slurm/slurm.tar.xz where there
                                    is no slurmd
    slurm_day.py --seconds N        broken off after so many seconds (240)
    slurm_day.py --only paused      these steps; day (with containerd: containerd_packages.sh), stops_with and
                                    stops_without only where they are named (slurm_day.sh plays these three)

Slurm runs in namespaces of its own; nothing outside them is changed, and no setting of the GPU. mpsagent and what it
needs must be importable (PYTHONPATH). In DIR: report.md, raw.json, slurm.log. Exit status: 0 all is well, 1 something
is not, 2 this machine cannot play.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns import pod_stop
from campaigns.begin import Broken, facts, parser, place
from campaigns.gate_place import Out
from campaigns.gate_use import Watch as Meter
from campaigns.gate_use import real, simulated
from campaigns.slurm_watch import Span, Watch, divided
from mpsagent.linux.processes import stopped
from mpsagent.mps.units import multiprocessors_for_percent
from tests.conformance import rig as rigs
from tests.conformance.backends import REPOSITORY, other_users_python
from tests.scenes.stage import USERS, Agent, Client, Machine, Stage, StageError, seconds_of
from tests.slurm.cluster import Cluster, why_not

MIB = 1 << 20
OUTSIDE = 5
JOBS = ((40, 8, 9), (20, 2, 3), (10, 1, 1), (30, 1, 2), (80, 8, 9), (50, 2, 4), (16, 8, 8))
"""Jobs with totals that end by themselves: the share, how many of its processes have it together, how many are started.
One process of a job is PyTorch's where one is started."""
OVER, CANCELLED = (10, 1), ((30, 2), (20, 1))
"""And three that do not: the share, its processes."""
PODS = 2
BESIDE = (20006, 20007, 20008, 20009)
"""Users of the neighbours, who have no job."""
CLOSE = 0.05
"""How far figures may be from NVML's and nvidia-smi's own."""
LONG_ENOUGH = 3.0
"""Seconds of work that NVML's utilisation is judged for: it is of the last second."""
EXPORTS = "export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=140G"
NEIGHBOURS = 4
STEP, SCRIPT = "srun --mpi=none {}", "exec {}"
STARTS = "trap 'kill $!; wait' TERM\n{} &\nwait"
"""A script that passes a signal on: Slurm sends it to what slurmstepd has started alone, and kills the rest."""
STOPS = (
    ("over its time limit", STEP, STEP),
    ("scancel of a step", STEP, STEP),
    ("scancel of a script that is the program", SCRIPT, SCRIPT),
    ("scancel of a script that starts it", STARTS, "{}"),
    ("scancel", STEP, STEP),
)
"""How a job is stopped, and its script with `mpsagent-cli run` and without; with, the last one is ended by `client
terminate --job` before, and has no `run`."""
SHARES = (10, 20, 30, 40, 50, 60, 70, 80, 10, 30)
CONTEXT = 2048
"""MiB that contexts and PyTorch may take of a share; the shares are 14 GiB apart."""
UNSEEN = 0.01
"""The part of a GPU's memory that NVML counts, and so the policy, and CUDA does not."""
POLICY = f"[limits]\nactive_threads = '{OUTSIDE}%'\ntotal_active_threads = '100%'\n"
PAUSING = f'{POLICY}[turn]\non_expiry = "pause"\npause_slice = "1h"\n[user.{USERS[0]}]\nturn.pause_slice = "2s"\n'
LONG = 90.0


class Wrong(Exception):
    """What was found is not what was promised."""


def check(true: object, otherwise: str) -> None:
    if not true:
        raise Wrong(otherwise)


def names(agent: Agent) -> set[str]:
    return {one["name"] for one in agent.api.get("/v1/leases")["leases"]}


@contextlib.contextmanager
def pods_beside(stage: Stage) -> Iterator[pod_stop.Pods]:
    programs = pod_stop.unpacked(REPOSITORY / ".gpu/containerd/containerd.tar.xz", stage.place / "programs")
    with pod_stop.containerd_beside(stage, stage.place / "ctd", programs) as containerd:
        yield pod_stop.Pods(stage, containerd, USERS[-1], BESIDE)


class Day:
    """One agent and one cluster, and the steps that are played on them."""

    def __init__(self, stage: Stage, below: Path | None, policy: str, instance: str) -> None:
        self.stage, self.machine = stage, stage.machine
        self.figures: dict[str, Any] = {}
        self.agent = stage.with_agent(policy, extra=f"{instance}\n", server="shared")
        code = stage.place / "code"  # users may not read this repository where root has it
        shutil.copytree(REPOSITORY / "mpsagent", code / "mpsagent")
        shutil.copyfile(REPOSITORY / "campaigns/slurm_job.py", code / "slurm_job.py")
        found = [str(code), *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
        if stage.backend.name == "sim":
            found += [path for path in sys.path if path.endswith("site-packages")]
        python = other_users_python(USERS[0])
        client = ["env", f"PYTHONPATH={os.pathsep.join(found)}", python, "-m", "mpsagent.cli.main"]
        words = [*client, "--socket", str(self.agent.api.path)]
        done = subprocess.run([*words, "probe"], user=USERS[0], group=USERS[0], extra_groups=[], cwd="/", check=False)
        check(done.returncode == 0, f"mpsagent-cli does not run as a user: {words}")
        job = [*stage.backend.client, "sleep"] if stage.backend.name == "sim" else [python, str(code / "slurm_job.py")]
        self.job = " ".join(job)
        self.small = " ".join(stage.backend.client)
        self.run = " ".join([*words, "run", "--"])
        self.cluster = Cluster(
            stage.place / "slurm", words, "answer=30\npatience=5\nmemory=share\nprocesses=$SLURM_JOB_NTASKS", check=2,
            below=below, kill_wait=10,
        )  # fmt: skip

    def end(self) -> None:
        self.cluster.end()

    def ready(self) -> None:
        took = self.stage.until(self.cluster.ready, f"the node of Slurm is idle\n{self.cluster.log()}", LONG, every=0.2)
        self.figures["the node was idle after"] = f"{took:.1f} s"

    def until(self, true: Callable[[], object], what: str) -> float:
        return self.stage.until(true, what, LONG, every=0.2)

    def submit(self, user: int, gres: str, seconds: float) -> int:
        return self.cluster.submit(USERS[user], gres, f"{self.job} {seconds}")

    def connected(self, job: int) -> int:
        """The pid of a job's first client, once it is at work."""
        pid = self.agent.wait("client.connected", LONG, job=f"slurm-{job}")["pid"]
        self.until(lambda: "sms" in self.cluster.said(job), f"job {job} is at work")
        assert isinstance(pid, int)
        return pid

    def row(self, job: int) -> dict[str, Any]:
        (row,) = self.agent.api.get(f"/v1/report?by=job&job=slurm-{job}")["rows"]
        assert isinstance(row, dict)
        return row

    def exact(self, job: int, percent: float, clients: int = 1) -> list[tuple[int, int]]:
        """Multiprocessors and free MiB of a job's clients; Wrong if they, or the report, are not just its share."""
        text, row = self.cluster.said(job), self.row(job)
        found = [(int(a), int(b)) for a, b in re.findall(r"\] sms (\d+) meminfo \w+ free (\d+) MiB", text)]
        right = multiprocessors_for_percent(percent, self.machine.multiprocessors)
        due = self.machine.total_mib * percent / 100
        limit = row["memory"] // MIB or due  # a share of 100 % needs no limit
        check(due - 1 <= limit <= due * (1 + UNSEEN), f"job {job} has {limit:.0f} MiB, {due:.0f} is {percent} %: {row}")
        good = all(sms == right and due - CONTEXT <= free <= limit for sms, free in found)
        check(good and len(found) == clients, f"job {job}, {percent} % is {right} and {limit:.0f} MiB: {text}")
        check("GIVEN" not in text, f"job {job} had more memory than its share: {text}")
        check((row["clients"], row["threads"], row["forced"]) == (clients, percent, 0), f"the report says {row}")
        return found

    def finished(self, *jobs: int) -> None:
        ids = {str(job) for job in jobs}
        self.until(lambda: not any(row.split()[0] in ids for row in self.cluster.unfinished()), f"{jobs} have ended")

    def no_lease(self) -> None:
        self.until(lambda: not names(self.agent), f"no lease is left of {names(self.agent)}")

    # --- steps --------------------------------------------------------------------------------------------------------

    def shares(self) -> None:
        """Jobs of four users with mps:10 to mps:80, each with a step that exports 100: exactly the lease, then none."""
        seconds = 1 if self.stage.backend.name == "sim" else 3
        wanted = {}
        for number, share in enumerate(SHARES):
            lines = [f"{self.job} {seconds}", "export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100"]
            lines.append(f"srun --mpi=none {self.job} {seconds}")
            wanted[self.cluster.submit(USERS[number % 4], f"mps:{share}", *lines)] = share
        began, together = time.monotonic(), 0
        while self.cluster.unfinished():
            together = max(together, sum("RUNNING" in row for row in self.cluster.jobs()))
            check(time.monotonic() < began + 150, f"the jobs do not end: {self.cluster.jobs()}")
            time.sleep(0.3)
        self.figures["all jobs took"] = f"{time.monotonic() - began:.1f} s, at most {together} at once"
        wrong, rows = [], []
        for job, share in wanted.items():
            try:
                (first, second), row = self.exact(job, share, 2), self.row(job)
                check(row["gpu"] > seconds, f"its clients worked for 2 times {seconds} s: {row}")
                more = self.cluster.said(job).count("OUT_OF_MEMORY")
                rows.append(
                    f"| {job} | {row['uid']} | {share} | {first[0]}, {second[0]} | {first[1]}, {second[1]} | {more} | "
                    f"{row['waited']:.2f} | {row['longest']:.2f} | {row['gpu']:.1f} |"
                )
            except (Wrong, KeyError, ValueError) as error:
                wrong.append(f"{type(error).__name__}: {error}\n{self.cluster.said(job)}")
        head = "| job | user | mps | multiprocessors (job, step) | free MiB | more memory refused |"
        head += " waited s | longest s | GPU s |"
        self.figures["jobs"] = "\n".join([head, "|" + "---|" * 9, *rows])
        check(not wrong, "\n".join(wrong))
        self.no_lease()
        status, said = self.stage.cli(self.agent, "report", "--by", "job")
        self.figures["mpsagent-cli report --by job"] = said
        check(status == 0, said)

    def day(self) -> None:
        """Ten jobs with a total that export all of the GPU, of 1, 2 and 8 processes: their sum is never over it. Two
        are cancelled and one is over its time, two pods are stopped, all in a kernel: the neighbours finish."""
        out = Out("day")
        with (
            pods_beside(self.stage) as pods,
            Watch(self.stage.backend.name) as smi,
            Meter(simulated(self.stage.backend) if self.stage.backend.name == "sim" else real(out)) as nvml,
        ):
            works, stops = f"{self.small} duty 0.3 40", f"{self.small} spin 600"
            over = self.cluster.submit(
                USERS[0], f"mps:{OVER[0]}", EXPORTS, STEP.format(f"{self.run} sh -c '{works}; exec {stops}'"),
                options=["--time=1"],
            )  # fmt: skip
            cancelled = [
                self.cluster.submit(
                    USERS[number], f"mps:{share}", EXPORTS, STEP.format(f"{self.run} {stops}"),
                    options=[f"--ntasks={tasks}"],
                )
                for number, (share, tasks) in enumerate(CANCELLED, 1)
            ]  # fmt: skip
            wanted = {}
            for number, (share, tasks, started) in enumerate(JOBS):
                one = f"{self.job if started == 1 else f'{self.small} mind'} 4"
                crowd = " & ".join([one] * started)
                job = self.cluster.submit(
                    USERS[number % 4], f"mps:{share}", EXPORTS, f"{crowd} & wait", options=[f"--ntasks={tasks}"]
                )
                wanted[job] = (share, tasks, started)
            found = []
            for job, (_, tasks) in zip(cancelled, CANCELLED, strict=True):
                self.until(lambda: self.cluster.said(job).count("launch") == tasks, "its kernels are in flight")  # noqa: B023
                beside = self.neighbours()
                found.append(("scancel", job, *self.unharmed(beside, lambda: self.cancel(job))))  # noqa: B023
            for _ in range(PODS):
                outcome, _, good, faults = pods.round("runtime")
                found.append((f"a pod is stopped: its client {outcome}", 0, good, faults))
            beside = self.neighbours()
            self.until(lambda: "launch" in self.cluster.said(over), "a kernel of the job over its time is in flight")
            found.append(("over its time", over, *self.unharmed(beside, lambda: self.finished(over))))
            self.finished(*wanted)
            self.no_lease()
            self.stage.until(lambda: all(one["ended"] for one in self.sessions()), "all sessions have ended", 30)
            time.sleep(2.5)  # the last look at what they used
        rows = [
            f"| {how} | {self.ended(job) if job else '-'} | {good} of {NEIGHBOURS} | {faults} |"
            for how, job, good, faults in found
        ]
        head = "| stopped in a kernel | how it ended | neighbours that finished | faults of MPS |"
        self.figures["stopped"] = "\n".join([head, "|" + "---|" * 4, *rows])
        good, faults = (sum(one[column] for one in found) for column in (2, 3))
        said = f"{good} of {len(found) * NEIGHBOURS} neighbours finished, {faults} faults"
        self.figures["neighbours"] = said
        wrong = [] if (good, faults) == (len(found) * NEIGHBOURS, 0) else [said]
        wrong += self.totals(wanted)
        wrong += self.beside_nvml([over, *cancelled, *wanted], nvml, smi.by_pid())
        self.figures |= smi.figures()
        self.reports()
        check(not wrong, "\n".join(wrong))

    def neighbours(self) -> list[Client]:
        beside = [self.stage.client(uid, "mind", 600) for uid in BESIDE]
        for one in beside:
            one.known()
        return beside

    def unharmed(self, beside: list[Client], stop: Callable[[], object]) -> tuple[int, int]:
        """How many of them finish, and faults of MPS."""
        began = self.agent.mark()
        stop()
        time.sleep(1.5)
        good = sum(one.finish() == 0 for one in beside)
        return good, len(self.agent.found("server.fault", since=began))

    def cancel(self, job: int) -> None:
        self.cluster.run("scancel", str(job))
        self.finished(job)

    def totals(self, wanted: dict[int, tuple[int, int, int]]) -> list[str]:
        """What jobs had more than their total, or not just their share."""
        rows, wrong, mib = [], [], self.machine.total_mib
        for job, (share, tasks, started) in wanted.items():
            text = self.cluster.said(job)
            found = [(int(a), int(b)) for a, b in re.findall(r"\] sms (\d+) meminfo \w+ free (\d+) MiB", text)]
            at_once = self.most_at_once(job)
            may = multiprocessors_for_percent(share, self.machine.multiprocessors)
            most, free = max(found, default=(0, 0)), max((b for _, b in found), default=0)
            each = multiprocessors_for_percent(share / tasks, self.machine.multiprocessors)
            if (
                len(found) != started or at_once > tasks or any(sms != each for sms, _ in found)
                or at_once * most[0] > may or at_once * free > mib * share / 100 or "GIVEN" in text
            ):  # fmt: skip
                wrong.append(f"job {job}, {share} % for {tasks}, {at_once} at once, {each} each: {text}")
            rows.append(
                f"| {job} | {share} | {tasks} | {started} | {at_once} | {at_once * most[0]} of {may} | "
                f"{at_once * free} of {mib * share / 100:.0f} |"
            )
        head = "| job | mps | processes | started | at once | multiprocessors of all | free MiB of all |"
        self.figures["totals"] = "\n".join([head, "|" + "---|" * 7, *rows])
        return wrong

    def sessions(self) -> list[dict[str, Any]]:
        found = self.agent.api.get("/v1/sessions?kind=client&limit=1000")["sessions"]
        assert isinstance(found, list)
        return found

    def beside_nvml(self, jobs: list[int], nvml: Meter, by_smi: dict[int, int]) -> list[str]:
        """The report of each job beside NVML's figures: what these say of the time in which its processes were at work,
        energy divided among all processes at work. What is further from them than CLOSE."""
        spans = [
            Span(one["uid"], one.get("job") or "", seconds_of({"at": one["began"]}), seconds_of({"at": one["ended"]}))
            for one in self.sessions()
        ]
        whole = nvml.between(min(one.begin for one in spans), max(one.end for one in spans))[1]
        total = sum(row["energy"] for row in self.agent.api.get("/v1/report?by=user")["rows"])
        self.figures["energy of all"] = f"{total:.0f} J by the report, {whole:.0f} J by NVML"
        wrong = [] if abs(total - whole) <= CLOSE * whole else [f"energy: {total:.0f} J, NVML {whole:.0f} J"]
        rows = []
        for job in jobs:
            row, name = self.row(job), f"slurm-{job}"
            busy, joules = divided(nvml.moments, spans, name)
            used = (row["memory_used"] or 0) / MIB
            smi = max((by_smi.get(pid, 0) for pid in self.clients_of(job)), default=0)
            rows.append(
                f"| {job} | {row['gpu']:.1f} | {row['waited']:.1f} | {row['utilization']:.3f} | {busy:.3f} | "
                f"{row['energy']:.0f} | {joules:.0f} | {used:.0f} | {smi or '-'} | {row['ended']} | {self.ended(job)} |"
            )
            if row["gpu"] > LONG_ENOUGH and abs(row["utilization"] - busy) > CLOSE:
                wrong.append(f"job {job}: utilisation {row['utilization']:.3f}, NVML {busy:.3f}")
            if smi and abs(used - smi) > max(CLOSE * smi, 2):
                wrong.append(f"job {job}: {used:.0f} MiB, nvidia-smi {smi} MiB")
        head = "| job | GPU s | waited s | utilisation: report | NVML | J: report | NVML, divided | "
        head += "most MiB of a process: report | nvidia-smi | ended: report | Slurm, and its clients |"
        self.figures["report beside NVML"] = "\n".join([head, "|" + "---|" * 11, *rows])
        return wrong

    def reports(self) -> None:
        """What people are told afterwards."""
        status, said = self.stage.cli(self.agent, "report", "--by", "job")
        self.figures["mpsagent-cli report --by job"] = "\n".join(f"    {line}" for line in said.splitlines())
        rows = json.dumps(self.agent.api.get("/v1/report?by=job")["rows"])
        self.figures["the same with --json"] = rows
        check(status == 0, said)

    def clients_of(self, job: int) -> set[int]:
        return {one["pid"] for one in self.agent.found("client.connected", job=f"slurm-{job}")}

    def most_at_once(self, job: int) -> int:
        """Clients of a job that MPS had at the same time, by the order of the records."""
        now = most = 0
        for one in self.agent.news():
            if one.get("job") == f"slurm-{job}":
                now += {"client.connected": 1, "client.ended": -1}.get(one["kind"], 0)
                most = max(most, now)
        return most

    def ended(self, job: int) -> str:
        """In Slurm's words, and how its clients did in ours."""
        state = self.cluster.show(job).partition("JobState=")[2].partition(" ")[0]
        outcomes = [one["outcome"] for one in self.agent.found("client.ended", job=f"slurm-{job}")]
        return f"{state}; {', '.join(f'{outcomes.count(one)} {one}' for one in sorted(set(outcomes)))}"

    def stops_with(self) -> None:
        """Five jobs are stopped with a kernel in flight, as docs/jobs.md says: all of their 20 neighbours finish."""
        finished, faults = self.stopped(self.run)
        check((finished, faults) == (len(STOPS) * NEIGHBOURS, 0), f"{finished} finished, {faults} faults")

    def stops_without(self) -> None:
        """The same with nothing but Slurm. What that did to the neighbours is told, not judged."""
        self.stopped("")

    def stopped(self, wrapper: str) -> tuple[int, int]:
        """How many neighbours finished well, and faults of MPS."""
        rows, all_finished, all_faults = [], 0, 0
        for how, *scripts in STOPS:
            ask_first = wrapper and how == "scancel"
            script = scripts[0] if wrapper else scripts[1]
            program = f"{'' if ask_first else wrapper} {self.small} spin 600".strip()
            options = ["--time=1"] if "limit" in how else []
            beside = [self.cluster.submit(USERS[n], "mps:15", f"exec {self.small} mind 600") for n in range(NEIGHBOURS)]
            job = self.cluster.submit(USERS[NEIGHBOURS], "mps:30", script.format(program), options=options)
            self.until(lambda: "launch" in self.cluster.said(job), "a kernel is in flight")  # noqa: B023
            self.until(lambda: all("step" in self.cluster.said(one) for one in beside), "neighbours work")  # noqa: B023
            since = time.monotonic()
            began = self.agent.mark()
            if not options:
                if ask_first:
                    status, said = self.stage.cli(
                        self.agent, "terminate", "--job", f"slurm-{job}", "--now", "--timeout", "20s"
                    )
                    check(status == 0, said)
                with contextlib.suppress(StageError):  # it may have ended
                    self.cluster.run("scancel", str(job))
            self.finished(job)
            took = time.monotonic() - since
            time.sleep(2)
            for one in beside:
                with contextlib.suppress(StageError):
                    self.cluster.run("scancel", "--signal=USR1", "--full", str(one))
            self.finished(*beside)
            good = sum("last CUDA_SUCCESS" in self.cluster.said(one) for one in beside)
            faults = len(self.agent.found("server.fault", since=began))
            all_finished, all_faults = all_finished + good, all_faults + faults
            how = "`terminate --job`, then scancel" if ask_first else how
            rows.append(f"| {how} | {self.ended(job)} | {took:.1f} | {good} of {len(beside)} | {faults} |")
            head = "| the job is stopped | how it ended | after s | neighbours that finished | faults of MPS |"
            self.figures["stopped"] = "\n".join([head, "|" + "---|" * 5, *rows])
        self.figures["neighbours that finished"] = f"{all_finished} of {len(STOPS) * NEIGHBOURS}, {all_faults} faults"
        self.no_lease()
        self.reports()
        return all_finished, all_faults

    def waits(self) -> None:
        """A job that wants all of the GPU waits while its user works outside of jobs; the report says so."""
        outside = self.stage.client(USERS[1], "sleep", "60")
        outside.known()
        job = self.submit(1, "gpu:1", 1)
        self.until(lambda: self.agent.api.get("/v1/queue")["queue"], "the job's client waits")
        time.sleep(2)
        outside.kill()  # it has no kernel in flight
        self.finished(job)
        self.exact(job, 100)
        row = self.row(job)
        self.figures["waited for the GPU"] = f"{row['waited']:.2f} s"
        check(row["waited"] >= 2, f"it waited for 2 s at least: {row}")
        self.no_lease()

    def drains(self) -> None:
        """The agent is killed while a job works: the node is drained, the job goes on, recovery resumes the node."""
        job = self.submit(2, "mps:40", 12)
        self.connected(job)
        self.stage.stop_agent(self.agent, signal.SIGKILL)
        took = self.until(lambda: "DRAIN" in self.cluster.state(), "drained")
        reason = self.cluster.reason()
        self.figures["drained"] = f"after {took:.1f} s: {reason}"
        check(reason.startswith("mpsagent: "), reason)
        self.agent = self.stage.start_agent()
        self.stage.answering(self.agent)
        self.stage.open(self.agent)
        took = self.until(lambda: "DRAIN" not in self.cluster.state(), "resumed")
        self.figures["resumed"] = f"{took:.1f} s after the gate was open"
        self.finished(job)
        self.exact(job, 40)
        check("COMPLETED" in self.cluster.show(job), "the job was disturbed")
        self.no_lease()

    def killed(self) -> None:
        """A job that works is killed: no lease, and the next job has its share."""
        job = self.submit(0, "mps:60", 600)
        self.connected(job)
        if self.stage.backend.name != "sim":
            self.until(lambda: "works" in self.cluster.said(job), "kernels run")
        self.cluster.run("scancel", "--signal=KILL", "--full", str(job))
        began = time.monotonic()
        self.no_lease()
        self.figures["no lease"] = f"{time.monotonic() - began:.1f} s after SIGKILL"
        after = self.submit(1, "mps:20", 1)
        self.finished(job, after)
        self.figures["the next job"] = self.exact(after, 20)
        self.no_lease()

    def cancelled(self) -> None:
        """A job is cancelled at work beside another user's: no lease, and the next job has its share. What that did to
        the neighbour is told, not judged: the signals are Slurm's."""
        job, neighbour = self.submit(0, "mps:30", 600), self.submit(1, "mps:30", 600)
        for one in (job, neighbour):
            self.connected(one)
        if self.stage.backend.name != "sim":
            self.until(lambda: all("works" in self.cluster.said(one) for one in (job, neighbour)), "kernels run")
        since = time.time()
        self.cluster.run("scancel", str(job))
        self.finished(job)
        self.until(lambda: f"slurm-{job}" not in names(self.agent), "the cancelled job has no lease")
        time.sleep(2)
        died = not any(row == f"{neighbour} RUNNING" for row in self.cluster.jobs())
        self.figures["the neighbour"] = f"ended with it: {self.cluster.said(neighbour)[-600:]}" if died else "works on"
        faults = [one for one in self.agent.found("server.fault") if seconds_of(one) > since]
        self.figures["faults of MPS"] = len(faults)
        if not died:
            self.cluster.run("scancel", "--signal=KILL", "--full", str(neighbour))
        self.no_lease()
        after = self.submit(2, "mps:20", 1)
        self.finished(after)
        self.figures["the next job"] = self.exact(after, 20)
        self.no_lease()

    def paused(self) -> None:
        """With turns: a paused job is killed, and one whose slurmstepd is; nobody is paused, no lease is left."""
        frozen = self.submit(0, "mps:40", 600)
        pid = self.connected(frozen)
        other = self.submit(1, "mps:40", 600)
        self.until(lambda: stopped(pid), "the first job is paused")
        self.connected(other)
        self.cluster.run("scancel", "--signal=KILL", "--full", str(frozen))
        self.until(lambda: names(self.agent) == {f"slurm-{other}"}, "the paused job that was killed has no lease")
        self.nobody_paused()

        self.cluster.run("scancel", "--signal=KILL", "--full", str(other))
        self.no_lease()
        frozen = self.submit(0, "mps:40", 600)
        pid = self.connected(frozen)
        other = self.submit(1, "mps:40", 600)
        self.until(lambda: stopped(pid), "the job is paused")
        self.connected(other)
        self.cluster.run("pkill", "-KILL", "-f", f"slurmstepd: .{frozen}.")
        self.cluster.run("scancel", str(frozen))
        self.until(lambda: names(self.agent) == {f"slurm-{other}"}, "the job without slurmstepd has no lease")
        self.nobody_paused()
        self.until(lambda: not Path(f"/proc/{pid}").exists(), "its process has ended")
        self.cluster.run("scancel", "--signal=KILL", "--full", str(other))
        self.finished(frozen, other)
        self.no_lease()

    def nobody_paused(self) -> None:
        def so() -> bool:
            marks = list((self.stage.place / "run").glob("instances/*/frozen/*"))
            clients = self.agent.api.get("/v1/clients")["clients"]
            return not marks and not any(one["state"] == "paused" for one in clients)

        self.until(so, "nobody is paused")


TOGETHER = ("shares", "waits", "drains", "killed", "cancelled")
"""Steps with `sharing = "one-server"`; the step `paused` has turns."""
NAMED = ("day", "stops_with", "stops_without")


def play(day: Day, steps: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    for name in ("ready", *steps):
        since, day.figures, problem = time.monotonic(), {}, ""
        step = getattr(day, name)
        try:
            step()
        except Broken:
            problem = "out of time"
            raise
        except Exception as error:
            problem = str(error) if isinstance(error, Wrong | StageError) else traceback.format_exc()
            problem += f"\n--- the node is {day.cluster.state()}: {day.cluster.reason()}\n{day.cluster.log()}"
        finally:
            title = " ".join((step.__doc__ or "").split())
            row = {"name": name, "title": title, "problem": problem, "figures": day.figures}
            rows.append({**row, "seconds": round(time.monotonic() - since, 1)})
            print(f"{'WRONG' if problem else 'well':5} {name} {rows[-1]['seconds']} s {problem}", flush=True)
        if problem and name == "ready":
            break


def report(about: dict[str, str], rows: list[dict[str, Any]]) -> str:
    lines = ["# Slurm's day", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    lines += ["| step | well | what | seconds |", "|---|---|---|---|"]
    lines += [f"| {r['name']} | {'NO' if r['problem'] else 'yes'} | {r['title']} | {r['seconds']} |" for r in rows]
    for row in rows:
        lines += ["", f"## {row['name']}", ""]
        for key, value in row["figures"].items():
            lines += [f"- {key}:", "", value, ""] if "\n" in str(value) else [f"- {key}: {value}"]
        if row["problem"]:
            lines += ["", "WRONG:", "", *(f"    {line}" for line in row["problem"].splitlines())]
    return "\n".join(lines) + "\n"


def main() -> int:
    arguments = parser(__doc__, 240.0)
    arguments.add_argument("--packages", type=Path)
    options = arguments.parse_args()
    packed = REPOSITORY / ".gpu/slurm/slurm.tar.xz"
    packages = options.packages or (packed if packed.exists() and shutil.which("slurmd") is None else None)
    rows: list[dict[str, Any]] = []
    logs = ""
    with place(options.sim) as (backend, machine, base):
        below = None
        if packages:
            with tarfile.open(packages) as archive:
                archive.extractall(base / "below", filter="tar")
            below = base / "below/usr"
        if reason := why_not(below):
            raise rigs.RigError(reason)
        about = {**facts(backend, machine), "Slurm": "packed" if below else "this machine's"}
        signal.setitimer(signal.ITIMER_REAL, options.seconds)
        try:
            for name, all_steps, policy, instance in (
                ("together", (*TOGETHER, *NAMED), POLICY, 'sharing = "one-server"'),
                ("turns", ("paused",), PAUSING, ""),
            ):  # fmt: skip
                if steps := tuple(step for step in all_steps if step in (options.only or [*TOGETHER, "paused"])):
                    logs += played(backend, base / name, machine, below, steps, policy, instance, rows)
        except Broken as error:
            rows.append(
                {"name": "the day", "title": "", "problem": f"broken off: {error}", "figures": {}, "seconds": 0}
            )
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    text = report(about, rows)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "report.md").write_text(text)
        (options.out / "raw.json").write_text(json.dumps({"about": about, "steps": rows}, indent=1, default=str))
        (options.out / "slurm.log").write_text(logs)
    print(text)
    return 1 if any(row["problem"] for row in rows) else 0


def played(
    backend: rigs.Backend, place: Path, machine: Machine, below: Path | None, steps: tuple[str, ...], policy: str,
    instance: str, rows: list[dict[str, Any]],
) -> str:  # fmt: skip
    """What Slurm's daemons and the hooks said."""
    said = ""
    stage = Stage(backend, place, machine)
    with stage:
        day = None
        try:
            day = Day(stage, below, policy, instance)
            play(day, steps, rows)
        except Exception:
            problem = {"name": "the beginning", "title": "", "problem": traceback.format_exc()}
            rows.append({**problem, "figures": {}, "seconds": 0})
        finally:
            if day is not None:
                said = day.cluster.everything_said()
                day.end()
    left = {"name": "the end", "title": "Nothing outlives it", "figures": {}, "seconds": 0}
    rows.append({**left, "problem": "\n".join(stage.left)})
    return said


if __name__ == "__main__":
    sys.exit(main())
