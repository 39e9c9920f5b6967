"""What became of every client of a run, against what the policy says. Pure: records in, counts and sentences out.

Each client is counted once, under the first of these that holds:

    denied       refused, and the policy says so
    over         more multiprocessors or memory than its policy, or let in although it is denied
    outside      not under MPS at all
    under        less than its policy
    stuck        still there when the run was over
    refused      an error instead of a context, and no fault was near
    moment       the same, in the moment of a neighbour's fault
    cut          the same, in the moment in which this test killed the gate, the control daemon or a server
    died         killed by this test before it was served
    hit          under way or served exactly, then ended by a neighbour's fault or with its server
    turn         served exactly, then ended because its user's turn was over (users who take turns)
    unexplained  refused or harmed, and server.log says that a server faulted then, though nothing that this test did
                 is a reason for it
    harmed       served exactly, then ended by something else than itself and this test
    broken       ended without a word: the test's own fault
    exact        served exactly, and ended by itself or by this test
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.disorder.clients import Record
from tests.disorder.population import AFTER, FAULT, GRACE, KILL, TERMINATE, USERS, Machine, Population

CRASHES = (-6, -11)
"""NVIDIA's library crashes in a client that waits for its context when its server ends (2 clients of an H100: "double
free", and a segmentation fault; disorder-shared-1202.txt, disorder-apart-1101.txt of 2026-11-24)."""
NEVER = ("over", "outside", "under", "stuck", "refused", "unexplained", "harmed", "broken")
"""What may not happen to a single client."""
NEAR_FAULT = 1.0
"""Seconds around a fault in which a hand-over counts as `moment`."""
CHANNEL = 1.5
"""Seconds before cuInit returns in which a client may have its channel already: 1.3 and 0.4 s were seen on two busy
H100s (disorder-own-2001.txt of 2026-11-26). If its server ends then, its context is CUDA_ERROR_NOT_SUPPORTED."""
LATE = 5.0
"""Seconds after a SIGKILL with a kernel in flight in which its server may fault: 1.1, 1.4 and 2.3 s were seen on a busy
H200 (docs/measured.md), long after the server had called the client disconnected."""
SLOW = 20.0
"""The same for a server that has made no context since the SIGKILL: 10.4 s were seen on an H200 with seven servers at
work, where starts of servers took 7 to 9 s. A second fault cannot be meant: the first one ends all contexts."""
HOSTAGE = 15.0
"""Seconds after a hostage was handed over in which its server may have to be killed: a fault for its neighbours."""
SLACK = 10.0
"""Seconds that a wait may be longer than the policy allows: starts of processes on a busy machine."""
RC = {"alloc": 13, "fault": 17}
GPU = re.compile(r"\] devices \d+ using (GPU-[0-9a-f]+)")
SEEN = re.compile(r"\] sms (\d+) meminfo \w+ free (\d+) MiB")
ERROR = re.compile(r"\] (?:cuInit|ctx|cuDeviceGet) (CUDA_ERROR_\w+)")


@dataclass(frozen=True)
class Entitled:
    """What a client of a user sees on a device when all is right. `tolerance` in MiB."""

    multiprocessors: int
    free: int
    tolerance: int = 0


Entitlements = Mapping[tuple[int, int], Entitled]
"""By uid and device."""


@dataclass
class Verdict:
    counts: Counter[str]
    sentences: list[str]
    """One for each client that counts under one of `NEVER`, and for each rule below that was broken."""
    waits: dict[int, dict[str, float]]
    faults: int
    turns: bool = True
    """One user at a time, as the policy says."""
    together: int = 0
    """Clients that were served while another user's client worked."""
    capped: int = 0
    """Clients that a user had beyond max_clients or a total."""
    late: int = 0
    """Clients that waited longer than the policy allows."""
    driver: float = 0.0
    """The longest time in which the driver made a context that a server had called active, in seconds."""
    stood: float = 0.0
    """Seconds in which the driver did not answer nvidia-smi either."""
    frozen: int = 0
    """Processes that were left frozen."""
    unanswered: int = 0
    """Front-ends that got no answer."""
    guests: Counter[str] = field(default_factory=Counter)
    killed: list[tuple[float, str]] = field(default_factory=list)
    gpus: Counter[str] = field(default_factory=Counter)
    """Clients that worked on each GPU."""

    @property
    def good(self) -> bool:
        return not any(self.counts[name] for name in NEVER) and not (
            (self.turns and self.together) or self.capped or self.late or self.unanswered or self.frozen
        )

    @property
    def served(self) -> int:
        return sum(self.counts[name] for name in ("exact", "over", "under", "hit", "turn", "harmed", "unexplained"))

    def text(self) -> str:
        counted = ", ".join(f"{name} {self.counts[name]}" for name in ORDER if self.counts[name] or name in NEVER)
        killed = dict(Counter(what for _, what in self.killed))
        lines = [
            f"{sum(self.counts.values())} clients: {counted}",
            f"faults {self.faults}, killed {killed or 'nothing'}; two users at once {self.together}, "
            f"beyond max_clients {self.capped}, waited too long {self.late}, left frozen {self.frozen}, "
            f"front-ends without an answer {self.unanswered}; clients on each GPU {sorted(self.gpus.values())}; "
            f"the driver made a context in {self.driver:.1f} s at most, and stood still for {self.stood:.1f} s in all",
        ]
        for uid, wait in sorted(self.waits.items()):
            lines.append(
                f"  user {uid}: {wait['served']:.0f} served, waits p50 {wait['p50']:.2f} s, p99 {wait['p99']:.2f} s, "
                f"longest {wait['max']:.2f} s"
            )
        lines.append("  guests: " + ", ".join(f"{name} {count}" for name, count in sorted(self.guests.items())))
        return "\n".join([*lines, *(f"  {one}" for one in self.sentences[:40])])

    def json(self) -> dict[str, Any]:
        return {
            "good": self.good, "counts": dict(self.counts), "waits": self.waits, "faults": self.faults,
            "together": self.together, "capped": self.capped, "late": self.late, "driver": round(self.driver, 1),
            "stood": round(self.stood, 1), "frozen": self.frozen,
            "unanswered": self.unanswered, "guests": dict(self.guests), "killed": self.killed,
            "sentences": self.sentences,
        }  # fmt: skip


ORDER = ("exact", "turn", "hit", "moment", "cut", "died", "denied", *NEVER)


@dataclass(frozen=True)
class Case:
    """What is known of a run when one client is judged. `faults`: when work was lost that a neighbour may have had;
    `cuts`: when this test killed something that was handing over. Seconds of the run."""

    clients: Sequence[Record]
    population: Population
    machine: Machine
    entitled: Entitlements
    faults: Sequence[float]
    cuts: Sequence[float] = ()
    unexplained: Sequence[float] = ()
    """When server.log says that a server faulted, and none of `faults` is near."""
    turns: bool = True


def judge(
    records: Sequence[Record], population: Population, machine: Machine, entitled: Entitlements, *,
    turns: bool = True, kills: Sequence[tuple[float, str]] = (), logged: Sequence[float] = (), each: bool = False,
    slack: float = SLACK,
    apart: bool = False,
    pause: bool = False, frozen: int = 0, active: Mapping[int, Sequence[float]] | None = None,
    stalls: Sequence[tuple[float, float]] = (),
) -> Verdict:  # fmt: skip
    """`turns`: one user at a time, as the policy says; False for a bare MPS and for users together. `kills`: when this
    test killed what
    (agent, gate, daemon, server): with a server, also by its daemon, the work of its clients ends. `logged`: when
    servers faulted as server.log says. `each`: each GPU has an instance, so users may work on two at once, and a fault
    on one excuses nothing on the other. `apart`: each user has a server, so a fault excuses nothing of another
    user's. `slack`: seconds for starts of processes and servers. `pause`: turns end in a pause, so that clients of
    several users live at once; `frozen`: how many were left so. `active`: by pid, when its server called a context of
    it active; `stalls`: from when to when the driver stood still."""
    clients = [record for record in records if not record.deed.guest]
    lethal = [at for at, what in kills if what in ("daemon", "server")]
    faults = sorted([*fault_times(records), *lethal])
    servers = [_of_user(records, user.uid) for user in population.users] if apart else [records]
    unexplained = [at for at in logged if not any(_caused(at, lethal, of_one) for of_one in servers)]
    known = len(faults)
    # A server notices a fault some time after its cause; who came between the two is hit as well.
    faults = sorted([*faults, *(at for at in logged if at not in unexplained)])
    cuts = [at for at, what in kills if what != "agent"]
    case = Case(clients, population, machine, entitled, faults, cuts, unexplained, turns)
    counts: Counter[str] = Counter()
    sentences = [f"at {at:.2f} a server faulted, and nothing that was done here is a reason" for at in unexplained]
    for record in clients:
        near = _on_its_gpu(case, record, records, lethal) if each else case
        word = outcome(record, _of_its_user(near, record, records, lethal, logged) if apart else near)
        counts[word] += 1
        if word in NEVER:
            sentences.append(f"{word}: {told(record, entitled)}")
    verdict = Verdict(counts, sentences, _waits(clients), known, turns)
    verdict.killed, verdict.frozen = list(kills), frozen
    verdict.gpus = Counter(name for record in clients if (name := _gpu(record)) is not None)
    verdict.stood = sum(end - begin for begin, end in stalls)
    _late(verdict, clients, population, [*faults, *(at for at, _ in kills)], slack, active or {}, stalls)
    _capped(verdict, clients, population)
    for group in [] if pause else _by_gpu(clients) if each else [clients]:
        _together(verdict, group, lethal)
    for record in records:
        if record.deed.guest:
            _guest(verdict, record)
    return verdict


def _gpu(record: Record) -> str | None:
    """The GPU that it worked on."""
    return next((match[1] for _, line in record.lines if (match := GPU.search(line))), None)


def _by_gpu(clients: Sequence[Record]) -> list[list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in clients:
        if (name := _gpu(record)) is not None:
            found.setdefault(name, []).append(record)
    return list(found.values())


def _on_its_gpu(case: Case, record: Record, records: Sequence[Record], lethal: Sequence[float]) -> Case:
    """With the faults that this client can have been hit by: those on its GPU, and those of which it is not known."""
    mine = _gpu(record)
    if mine is None:
        return case
    near = [one for one in records if _gpu(one) in (None, mine)]
    return replace(case, faults=sorted([*fault_times(near), *lethal]))


def _of_its_user(
    case: Case, record: Record, records: Sequence[Record], lethal: Sequence[float], logged: Sequence[float]
) -> Case:
    """With the faults of this client's user alone, and when its server noticed them."""
    same = _of_user(records, record.deed.uid)
    noticed = [at for at in logged if _caused(at, (), same)]
    return replace(case, faults=sorted([*fault_times(same), *noticed, *lethal]))


def _of_user(records: Sequence[Record], uid: int) -> list[Record]:
    return [one for one in records if one.deed.uid == uid]


# --- one client -------------------------------------------------------------------------------------------------------


def outcome(record: Record, case: Case) -> str:
    """One word for what became of a client (see above)."""
    user = case.population.user(record.deed.uid)
    got = seen(record)
    error = next((match[1] for _, line in record.lines if (match := ERROR.search(line))), None)
    ours = any(name in ("KILL", "TERM") for _, name in record.signals)
    if got is not None:
        if user.denied:
            return "over"
        amount = _amount(record, got, case.entitled[user.uid, record.deed.device], case.machine)
        if amount != "exact":
            return amount
    if record.ended is None:
        return "stuck"
    if error is not None and got is None:
        if user.denied:
            return "denied"
        when = record.at(error) or record.ended
        connected = record.between("cuInit CUDA_SUCCESS")
        if _lost_server(record, when, case):
            return "hit"
        if _near(when, case.cuts):
            return "cut"
        if _near(when, case.faults):
            return "moment"
        return "unexplained" if _during(connected[0] if connected else when, when, case) else "refused"
    if got is None:
        if ours:
            return "died"
        if record.rc in CRASHES and _lost_server(record, record.ended, case):
            return "hit"
        return _ended_early(record, case) if record.rc in (-9, -15) else "broken"
    if ours or record.rc == RC.get(record.deed.kind, 0):
        return "exact"
    return _ended_early(record, case)


def _lost_server(record: Record, until: float, case: Case) -> bool:
    """Its server ended between its channel and its context."""
    connected = record.between("cuInit CUDA_SUCCESS")
    return connected is not None and any(connected[0] - CHANNEL <= at <= until for at in case.faults)


def _near(when: float, events: Sequence[float]) -> bool:
    return any(-0.5 <= when - event <= NEAR_FAULT for event in events)


def seen(record: Record) -> tuple[int, int] | None:
    """Multiprocessors and free MiB."""
    for _, line in record.lines:
        if match := SEEN.search(line):
            return int(match[1]), int(match[2])
    return None


def _amount(record: Record, got: tuple[int, int], right: Entitled, machine: Machine) -> str:
    # Outside MPS nothing is limited. A client says it itself where the driver can tell.
    unlimited = got[0] == machine.multiprocessors and got[1] > right.free + right.tolerance
    if record.said("] mps no") or (unlimited and not record.said("] mps yes")):
        return "outside"
    if got[0] > right.multiprocessors or got[1] > right.free + right.tolerance:
        return "over"
    if record.deed.kind == "alloc" and record.said("MiB: CUDA_SUCCESS"):
        return "over"
    if got[0] < right.multiprocessors or got[1] < right.free - right.tolerance:
        return "under"
    return "exact"


def _ended_early(record: Record, case: Case) -> str:
    """It was served, and something that is not itself and not this test ended it."""
    ended = record.ended or 0.0
    since = (record.at("cuInit") or record.started) - 0.1
    first = next((read for read, line in record.lines if "work now" in line or "sync CUDA_ERROR" in line), ended)
    if any(since <= fault <= min(first, ended) + 0.1 for fault in case.faults):
        return "hit"
    # Its turn may be over: a client of another user has been waiting for as long as the policy says.
    for other in case.clients if case.turns else ():
        if other.deed.uid != record.deed.uid and other.started <= first - AFTER:
            until = other.at("] sms ") or other.ended
            if until is None or until > first - GRACE - 0.5:
                return "turn"
    return "unexplained" if _during(since, min(first, ended), case) else "harmed"


def _during(begin: float, end: float, case: Case) -> bool:
    """Whether a server faulted meanwhile for no reason that is known."""
    return any(begin - 0.5 <= at <= end + NEAR_FAULT for at in case.unexplained)


def fault_times(records: Sequence[Record]) -> list[float]:
    """When clients faulted, or were killed with a kernel in flight; the seconds in which a guest held a server."""
    found = []
    for record in records:
        if (handed_over := record.at("handed over")) is not None:
            last = min(record.ended or handed_over + HOSTAGE, handed_over + HOSTAGE)
            found += [handed_over + seconds for seconds in range(int(last - handed_over) + 2)]
        if record.deed.kind == "fault":  # it may be ended before it reads of its fault
            at = record.at("oob sync CUDA_ERROR_ILLEGAL") or record.at("oob launch cudaSuccess")
            if at is not None:
                found.append(at)
    return sorted([*found, *killed_at_work(records)])


def killed_at_work(records: Sequence[Record]) -> list[float]:
    """When clients were killed with a kernel in flight."""
    return [
        at
        for record in records
        for at, name in record.signals
        if name == "KILL" and record.said("launch") and not record.said("sync")
    ]


def _caused(at: float, lethal: Sequence[float], records: Sequence[Record]) -> bool:
    """Whether what was done to the clients of a server, or to the server, is a reason for the fault that server.log
    tells of."""
    contexts = [made for one in records if (made := one.at("ctx CUDA_SUCCESS")) is not None]

    def late(since: float) -> bool:
        served = any(since < made <= at for made in contexts)
        return 0 <= at - since <= (LATE if served else SLOW)

    near = any(abs(at - one) <= NEAR_FAULT for one in [*fault_times(records), *lethal])
    return near or any(late(kill) for kill in killed_at_work(records))


def told(record: Record, entitled: Entitlements) -> str:
    right = entitled.get((record.deed.uid, record.deed.device))
    wanted = f"{right.multiprocessors} multiprocessors {right.free} MiB" if right else "nothing"
    ended = "lives" if record.ended is None else f"rc {record.rc} at {record.ended:.2f}"
    said = " | ".join(line.split("] ", 1)[-1] for _, line in record.lines)
    signals = " ".join(f"{name}@{at:.2f}" for at, name in record.signals)
    return (
        f"#{record.number} {record.deed.kind} pid {record.pid} user {record.deed.uid} device {record.deed.device} "
        f"from {record.started:.2f}, {ended}, {signals or 'no signals'}, entitled to {wanted}: {said or 'silent'}"
    )


# --- all of them together ---------------------------------------------------------------------------------------------


def _percentile(values: Sequence[float], percent: float) -> float:
    return values[min(len(values) - 1, int(len(values) * percent / 100))]


def _waits(clients: Sequence[Record]) -> dict[int, dict[str, float]]:
    """From the start of a process to its first result."""
    found: dict[int, list[float]] = {}
    for record in clients:
        served = record.at("] sms ")
        if served is not None and record.deed.kind != "stop-early":
            found.setdefault(record.deed.uid, []).append(served - record.started)
    waits = {}
    for uid, values in found.items():
        values.sort()
        waits[uid] = {
            "served": len(values), "p50": _percentile(values, 50), "p99": _percentile(values, 99), "max": values[-1],
        }  # fmt: skip
    return waits


def _late(
    verdict: Verdict, clients: Sequence[Record], population: Population, faults: Sequence[float], slack: float,
    active: Mapping[int, Sequence[float]], stalls: Sequence[tuple[float, float]],
) -> None:  # fmt: skip
    """Longer than every other user's turn, warning and ending (users together have none), and the recovery of the
    faults meanwhile, together. What a server calls active waits for the driver alone: 16 s were seen on an H200 with
    six servers at work, which made 6 contexts a second (disorder-430.txt). What the driver stood still does not count:
    6 s in which no server made a context and nvidia-smi did not return (disorder-apart-434.txt)."""
    round_of_all = (USERS - 1) * (AFTER + GRACE + TERMINATE + KILL) * verdict.turns + slack
    for record in clients:
        served = record.at("] sms ")
        if served is None or record.deed.kind == "stop-early" or population.user(record.deed.uid).max_clients:
            continue
        handed = next((at for at in active.get(record.pid, ()) if record.started <= at <= served), served)
        verdict.driver = max(verdict.driver, served - handed)
        meanwhile = sum(record.started - FAULT <= fault <= handed for fault in faults)
        stood = sum(max(0.0, min(end, handed) - max(begin, record.started)) for begin, end in stalls)
        if handed - record.started - stood > round_of_all + meanwhile * (FAULT + KILL + 1):
            verdict.late += 1
            waits = f"waited {handed - record.started:.1f} s, and {served - handed:.1f} s for the driver"
            verdict.sentences.append(f"{waits}: {told(record, {})}")


def _span(record: Record, lethal: Sequence[float] = ()) -> tuple[float, float, float] | None:
    """Its first result, at the earliest and at the latest, and a moment at which it certainly still was under MPS.
    `lethal`: when servers were killed; one that is stopped then does not even notice."""
    served = record.between("] sms ")
    if served is None:
        return None
    last = served[0]
    if (stamped := record.between(record.lines[-1][1])) is not None:
        last = max(last, stamped[0])
    if record.rc is None or record.rc < 0:
        # One that ends by itself may have left MPS when a signal finds it: stopped on its way out, it lives on.
        last = max([last, *(at for at, _ in record.signals if record.ended is None or at < record.ended)])
    for _, line in record.lines:
        if "work now CUDA_ERROR" in line and (broken := record.between(line)) is not None:
            last = min(last, broken[0])  # from then on it lives on without its server
    last = min([last, *(at for at in lethal if at >= served[0])])
    return served[0], served[1], last


def _capped(verdict: Verdict, clients: Sequence[Record], population: Population) -> None:
    for user in population.users:
        if user.max_clients is None:
            continue
        spans = [span for record in clients if record.deed.uid == user.uid and (span := _span(record))]
        for span in spans:
            first, latest, _ = span
            # Those that had been served before this one could be, and were there when it was for certain.
            at_once = 1 + sum(other[1] <= first and other[2] >= latest for other in spans if other is not span)
            if at_once > user.max_clients:
                verdict.capped += 1
                verdict.sentences.append(f"user {user.uid} had {at_once} clients of {user.max_clients} at {latest:.2f}")


def _together(verdict: Verdict, clients: Sequence[Record], lethal: Sequence[float]) -> None:
    spans = [(span, record) for record in clients if (span := _span(record, lethal))]
    for (first, latest, _), record in spans:
        for (_, other_latest, other_end), other in spans:
            if other.deed.uid != record.deed.uid and other_latest < first - 0.02 and other_end > latest + 0.02:
                verdict.together += 1
                if not verdict.turns:
                    break
                verdict.sentences.append(
                    f"at {latest:.2f} #{record.number} of {record.deed.uid} was served while #{other.number} of "
                    f"{other.deed.uid} worked until {other_end:.2f}"
                )
                break


def _guest(verdict: Verdict, record: Record) -> None:
    verdict.guests[record.deed.kind] += 1
    said = record.lines[-1][1] if record.lines else "silent"
    if record.deed.kind in ("ps", "list", "front-end") and ("no answer" in said or record.ended is None):
        verdict.unanswered += 1
        verdict.sentences.append(f"front-end of {record.deed.uid} from {record.started:.2f}: {said}")
