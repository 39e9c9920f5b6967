"""Parts of modes.py: several users at once, each with exactly its own limits; faults; totals and leases."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable

from campaigns.gate_place import Out
from campaigns.modes_place import Clock, Lane, Limits, all_end, at_work, reasons, rows_of, shuffled, times
from tests.conformance import rig as rigs
from tests.scenes.stage import USERS, A, Agent, B, C, Client, D, Stage, seconds_of

PERCENTS = {A: 45.0, B: 30.0, C: 20.0}
POLICY = f"""
[user.{A}]
threads = 45
memory = "10%"
[user.{B}]
threads = 30
memory = "8G"
[user.{C}]
threads = {{ sms = 26 }}
memory = "3333M"
[user.{D}]
threads = 10
memory = "2G"
[hang]
fault = "2s"
kill_grace = "1s"
"""
WRITTEN = {A: '45, "10%"', B: '30, "8G"', C: '{ sms = 26 }, "3333M"'}
HEAD = ("multiprocessors that they saw", "right", "free memory that they saw (MiB)", "limit (MiB)")
RUSH = 12
FAULT, KILL_GRACE, SLACK = 2.0, 1.0, 1.5
"""By the policy; and what the server itself may take to be well again (0.33 s on an H100)."""


def start(here: Lane, sharing: str, percents: dict[int, float] = PERCENTS) -> tuple[Stage, Agent, Limits]:
    stage = here.stage()
    agent = here.agent(stage, POLICY, f'sharing = "{sharing}"\n')
    return stage, agent, Limits(stage, agent, percents)


def rushes(sharing: str) -> Callable[[Lane, Out], None]:
    """200 clients of three users in rushes of twelve, which all have their contexts at the same time."""

    def play(here: Lane, out: Out) -> None:
        title = f"{sharing}: three users at once, their clients' limits as these themselves see them"
        rows = out.table(title, "user", "threads, memory in the policy", "clients", *HEAD)
        stage, _, limits = start(here, sharing)
        draw, left, count = random.Random(9), 200 if not here.quick else 24, 0
        number, least, took = left, RUSH, []
        while left > 0:
            users = shuffled(draw, [tuple(PERCENTS)[one % 3] for one in range(min(left, RUSH))])
            left -= len(users)
            since = time.monotonic()
            crowd = [stage.client(uid, "sleep", 600) for uid in users]
            there = at_work(stage, crowd)
            took.append(time.monotonic() - since)
            least = min(least, len(there) if len(users) == RUSH else least)
            all_end(crowd)
            for one in crowd:
                limits.judge(one)
            count += 1
        rows += [[uid, WRITTEN[uid], *limits.row(uid)] for uid in PERCENTS]
        for text in limits.wrong:
            out.wrong(text)
        out.check(least == RUSH, f"of a rush only {least} had their contexts at the same time")
        out.say(f"{limits.exact} of {number} clients exact; in each of {count} rushes all {least} clients of three "
                f"users had their contexts at the same time, after {times(took)} s")  # fmt: skip

    return play


# --- faults -----------------------------------------------------------------------------------------------------------

WORK = 300
"""Kernels of 10 ms, each waited for, of a program that is not to be disturbed."""


class Undisturbed:
    """Programs of other users that compute without a pause; each that ends is judged, and another one begins."""

    def __init__(self, stage: Stage, uids: tuple[int, ...]) -> None:
        self._stage = stage
        self._running = {(uid, number): self._begin(uid) for uid in uids for number in range(2)}
        self.well: Counter[int] = Counter()
        self.wrong: list[str] = []
        self.seconds: list[float] = []

    def _begin(self, uid: int) -> Client:
        return self._stage.client(uid, "work", WORK)

    def working(self) -> None:
        at_work(self._stage, self._running.values())

    def look(self, again: bool = True) -> None:
        for (uid, number), one in list(self._running.items()):
            if one.rc is None:
                continue
            if one.rc == 0 and "last CUDA_SUCCESS" in one.text():
                self.well[uid] += 1
                self.seconds.append(time.monotonic() - one.started.since)
            else:
                self.wrong.append(f"a program of {uid} was disturbed, rc {one.rc}: {one.text()}")
            del self._running[uid, number]
            if again:
                self._running[uid, number] = self._begin(uid)

    def end(self) -> None:
        for one in self._running.values():
            one.ended(60)
        self.look(again=False)


def apart_faults(here: Lane, out: Out) -> None:
    """Illegal accesses by one user, a hundred; two other users compute all the while."""
    number, clock = (4, Clock(600)) if here.quick else (100, Clock(140))
    stage, agent, limits = start(here, "apart", PERCENTS | {D: 10.0})
    others = Undisturbed(stage, (B, C))
    others.working()
    begun, faults, odd = time.monotonic(), 0, []
    for _ in range(number):
        if clock.over():
            break
        culprit = stage.client(A, "oob", 0)
        culprit.ended(60)
        own = culprit.rc == 17 and "oob sync CUDA_ERROR_ILLEGAL_ADDRESS" in culprit.text()
        faults += own
        if not own:
            odd.append(f"rc {culprit.rc}: {culprit.text()[-200:]}")
        others.look()
    took = time.monotonic() - begun
    new = [stage.client(uid) for uid in (A, B, C, D)]
    for one in new:
        one.ended()
        limits.judge(one)
    others.end()
    on_record = agent.found("server.fault")
    whose = Counter(one["uid"] for one in on_record)
    rows = out.table(
        f"apart: illegal accesses of one user beside two who compute (programs of {WORK} kernels of 10 ms)",
        *("illegal accesses", "on record as faults of", "programs of others that ended well", "disturbed"),
        *("seconds of each", "seconds in all"),
    )
    well = sum(others.well.values())
    rows.append([faults, dict(whose), well, len(others.wrong), times(others.seconds), round(took, 1)])
    out.check(faults == number, f"{faults} of {number} illegal accesses in the time; {odd[:2]}")
    out.check(set(whose) <= {A}, f"faults of other users are on record: {dict(whose)}")
    for text in (*others.wrong, *limits.wrong):
        out.wrong(text)
    out.say(f"{faults} illegal accesses of one user in {took:.0f} s: {len(others.wrong)} disturbances of the {well} "
            f"programs of two others; then {limits.exact} of 4 users' new clients exact")  # fmt: skip


def together_faults(here: Lane, out: Out) -> None:
    """The same where all are on one server: who is hit, who is held meanwhile, and how long it takes."""
    number, clock = (2, Clock(600)) if here.quick else (10, Clock(85))
    stage, agent, limits = start(here, "together", PERCENTS | {D: 10.0})
    rows = out.table(
        f"together: illegal accesses of one user (hang.fault {FAULT:g} s, kill_grace {KILL_GRACE:g} s)",
        *("one ignores its error", "clients of others hit", "that came meanwhile", "held", "refused", "exact then"),
        *("well again after (s)", "bound by the policy (s)"),
    )
    total: Counter[str] = Counter()
    for turn in range(number):
        if clock.over():
            break
        ignores = ("sleep", 600, "--ignore-term") if turn % 2 else ("sleep", 600)
        bound = FAULT + (KILL_GRACE if turn % 2 else 0) + SLACK + stage.allowance
        neighbours = [stage.client(B, "work", 3000), stage.client(D, "work", 3000), stage.client(C, *ignores)]
        at_work(stage, neighbours)
        mark = agent.mark()
        culprit = stage.client(A, "oob", 0.1)
        since = seconds_of(agent.wait("server.fault", since=mark))
        late = [stage.client(uid) for uid in (A, B, C, D) for _ in range(2)]
        held: set[int] = set()
        while not (over := agent.found("server.fault_over", mark)) and time.time() < since + 60:
            queue = agent.api.get("/v1/queue")["queue"]
            held |= {pid for one in queue if one["reason"] == "fault" for pid in one["clients"]}
            time.sleep(0.02)
        for one in (culprit, *neighbours, *late):
            one.ended()
        hit = sum("work now CUDA_ERROR" in one.text() for one in neighbours)
        exact = sum(limits.judge(one) for one in late)
        refused = sum("MPS_CONNECTION_FAILED" in one.text() for one in late)
        took = seconds_of(over[0]) - since if over else 99.0
        rows.append(["yes" if turn % 2 else "no", f"{hit} of {len(neighbours)}", len(late),
                     len(held & {one.pid for one in late}), refused, exact, took, f"{bound:g}"])  # fmt: skip
        out.check(over and took <= bound, f"round {turn + 1}: well again after {took:.2f} s, the policy says {bound:g}")
        out.check(held, f"round {turn + 1}: nobody was held")
        total.update(
            rounds=1, hit=hit, of=len(neighbours), late=len(late), held=len(held), exact=exact, refused=refused
        )
    for text in limits.wrong:
        out.wrong(text)
    out.check(total["rounds"] == number, f"{total['rounds']} of {number} rounds in the time")
    out.say(f"{total['rounds']} illegal accesses: {total['hit']} of {total['of']} clients of other users hit; of "
            f"{total['late']} that came meanwhile {total['held']} seen held, {total['refused']} refused, "
            f"{total['exact']} served then with exactly their limits; well again after "
            f"{times(float(str(row[6])) for row in rows)} s")  # fmt: skip


# --- totals -----------------------------------------------------------------------------------------------------------

TOTALS = {  # threads, MiB, total threads, total MiB; what is not given is a number that binds nobody
    USERS[0]: (20, 4096, 50, 9216),
    USERS[1]: (10, 1024, 30, 8192),
    USERS[2]: (10, 1500, 100, 6144),
    USERS[3]: (15, 2048, 60, 20480),
    USERS[4]: (25, 3333, 100, 10240),
}


def totals(here: Lane, out: Out) -> None:
    """500 clients of five users with totals, for random times; what is at work together, by their own words and by the
    agent's, at each look."""
    number, clock = (40, Clock(600)) if here.quick else (500, Clock(130))
    policy = "".join(
        f'[user.{uid}]\nthreads = {threads}\nmemory = "{mib}M"\ntotal_threads = {most}\ntotal_memory = "{all_mib}M"\n'
        for uid, (threads, mib, most, all_mib) in TOTALS.items()
    )
    stage = here.stage()
    agent = here.agent(stage, policy, 'sharing = "together"\n')
    limits = Limits(stage, agent, {uid: float(one[0]) for uid, one in TOTALS.items()})
    draw, started, killed, looks = random.Random(5), 0, 0, 0
    living: list[Client] = []
    most: dict[tuple[str, int], tuple[float, float]] = {}
    over: list[str] = []
    why: set[str] = set()
    until: dict[Client, float] = {}

    def take(whose: str, found: Counter[tuple[int, str]]) -> None:
        for uid, (_, _, threads, mib) in TOTALS.items():
            percent, memory = found[uid, "threads"], found[uid, "memory"]
            before = most.get((whose, uid), (0.0, 0.0))
            most[whose, uid] = (max(before[0], percent), max(before[1], memory))
            if percent > threads or memory > mib:
                over.append(f"user {uid} has {percent} % and {memory} MiB together, says {whose}")

    while started < number or living:
        if clock.over() and started < number:
            out.wrong(f"{started} of {number} clients in the time")
            number = started
        while started < number and len(living) < 24:
            living.append(stage.client(draw.choice(list(TOTALS)), "sleep", round(draw.uniform(0.1, 0.9), 2)))
            until[living[-1]] = time.monotonic() + 60
            started += 1
        if draw.random() < 0.02:  # one that waits is killed
            waiting = [one for one in living if "] cuInit" not in one.text()]
            if waiting:
                draw.choice(waiting).signal(signal.SIGKILL)
        has = [one for one in living if "] sms " in one.text()]
        now: Counter[tuple[int, str]] = Counter()
        for one in has:  # these have had their contexts all at the same moment: none had said by then that it is done
            if "] done " not in one.text() and one.rc is None:
                now[one.uid, "threads"] += TOTALS[one.uid][0]
                now[one.uid, "memory"] += TOTALS[one.uid][1]
        take("the clients", now)
        if looks % 4 == 0:
            told: Counter[tuple[int, str]] = Counter()
            for row in rows_of(agent):
                if row["state"] not in ("waiting", "detached") and row["limits"]:
                    told[row["uid"], "threads"] += row["limits"]["threads"]
                    told[row["uid"], "memory"] += int(next(iter(row["limits"]["memory"].values()))) >> 20
            take("the agent", told)
            why |= {one[1] for one in reasons(agent)}
        looks += 1
        for one in [one for one in living if one.rc is not None or time.monotonic() > until[one]]:
            living.remove(one)
            one.kill()
            killed += one.rc == -signal.SIGKILL
            if one.rc != -signal.SIGKILL or time.monotonic() > until[one]:
                limits.judge(one)
        time.sleep(0.01)
    rows = out.table(
        f"Users with totals: the most that was at work together in {looks} looks",
        *("user", "threads, memory of each (MiB)", "total_threads, total_memory (MiB)", "clients"),
        *("most threads, memory by the clients' words", "by the agent's"),
    )
    for uid, (threads, mib, percent, all_mib) in TOTALS.items():
        by = [f"{most[whose, uid][0]:g} %, {most[whose, uid][1]:g}" for whose in ("the clients", "the agent")]
        rows.append([uid, f"{threads} %, {mib}", f"{percent} %, {all_mib}", len(limits.seen[uid]), *by])
    for text in (*over[:20], *limits.wrong):
        out.wrong(text)
    out.check("total" in why, f"nobody was held for a total: {why}")
    out.say(f"{number} clients of five users: the sum was over {len(over)} times in {looks} looks; {limits.exact} "
            f"clients exact, {killed} killed while they waited, {len(limits.wrong)} wrong")  # fmt: skip


# --- leases -----------------------------------------------------------------------------------------------------------

LEASES = f"""
[user.{A}]
threads = 60
memory = "20G"
[user.{B}]
threads = 20
memory = "20G"
total_threads = 60
total_memory = "80G"
"""


def leases(here: Lane, out: Out) -> None:
    """A job with 30 % of a user who has 60, beside this user's other clients; and of one who has 20 of 60 in all."""
    rounds, clock = (2, Clock(600)) if here.quick else (10, Clock(45))
    stage = here.stage()
    agent = here.agent(stage, LEASES, 'sharing = "together"\n')
    own = Limits(stage, agent, {A: 60.0, B: 20.0})
    leased = Limits(stage, agent, {A: 30.0, B: 30.0})
    done = 0
    for _ in range(rounds):
        if clock.over():
            break
        jobs = {uid: _job(stage, uid) for uid in (A, B)}
        numbers = []
        for job, _ in jobs.values():
            arguments = ["--pid", str(job.pid), "--threads", "30", "--until", "10m"]
            status, said = stage.cli(agent, "lease", "add", *arguments)
            out.check(status == 0, f"lease add: {said}")
            numbers.append(said.strip())
        beside = [stage.client(uid) for uid in jobs]
        for _, writer in jobs.values():
            os.write(writer, b"go\n")
        for one, (job, _) in zip(beside, jobs.values(), strict=True):
            job.saw("] sms ")
            one.ended()
            own.judge(one)
        for number in numbers:
            status, said = stage.cli(agent, "lease", "end", number)
            out.check(status == 0, f"lease end: {said}")
        for job, writer in jobs.values():  # its second client comes after the lease has ended
            os.write(writer, b"go\n")
            os.close(writer)
            job.ended()
            seen = [line for line in job.text().splitlines() if "] sms " in line]
            leased.judge(job)
            after = [stage.client(job.uid)]
            after[0].ended()
            own.judge(after[0])
            sms = own.right[job.uid][0]
            out.check(len(seen) == 2 and f" sms {sms} " in seen[1], f"after the lease {job.uid} wanted {sms}: {seen}")
        done += 1
    rows = out.table(
        "Leases: a job's clients with a lease of 30 %, and the user's others at the same time",
        *("user", "the policy", "clients of the job", *HEAD[:2], "other clients", *HEAD[:2]),
    )
    texts = {A: "60 % each", B: "20 % each, 60 % in all"}
    rows += [[uid, texts[uid], *leased.row(uid)[:3], *own.row(uid)[:3]] for uid in texts]
    for text in (*own.wrong, *leased.wrong):
        out.wrong(text)
    out.check(done == rounds, f"{done} of {rounds} rounds in the time")
    out.say(f"{leased.exact} of {2 * rounds} jobs with a lease of 30 % exact, {own.exact} of {4 * rounds} other "
            f"clients of the same users exact, and so were the jobs' next clients after the lease's end")  # fmt: skip


def _job(stage: Stage, uid: int) -> tuple[Client, int]:
    """A shell that waits for a word, then runs a client; and once more."""
    client = " ".join([*stage.backend.client, "query"])
    reader, writer = os.pipe()
    script = f"read word; {client} || exit; read word; {client}"
    started: rigs.Started = stage.rig.run(["sh", "-c", script], stdin_from=reader, uid=uid, program="/bin/sh")
    os.close(reader)
    return Client(stage, stage.rig._client(started, uid, ("job",), None), uid), writer
