"""Who does what and when, and what each user is entitled to. Pure: everything follows from a seed.

A client is a CUDA program of one user with one `Deed`. A guest is not: it speaks to the control socket, or runs the
front-end. The policy is written here as text and what it gives is computed here once more, from the words of the
documentation and not by the program under test.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from mpsagent.mps.units import multiprocessors_for_percent
from tests.policies import SCOPES, SHARING

FIRST_UID = 20101
USERS = 6
"""Users who may use the GPU; one more may not."""
SLICE = 1.5
"""Seconds of a turn that ends in a pause."""
AFTER, GRACE, TERMINATE, KILL, FAULT = 3.0, 2.0, 5.0, 2.0, 2.0
"""Seconds of the policy: a turn, its warning, `terminate_client`, SIGTERM to SIGKILL, sticky clients after a fault."""

KINDS: dict[str, float] = {
    "query": 30, "work": 15, "sleep": 12, "spin": 6, "alloc": 4, "long": 2,
    "kill-idle": 6, "kill-kernel": 2, "kill-early": 7, "kill-waiting": 4,
    "stop": 5, "stop-early": 3, "fault": 2, "term": 2,
}  # fmt: skip
"""Kinds of clients, and how often each comes.

query, work, sleep, spin, alloc, long: end by themselves; `alloc` asks for more than its limit. kill-idle, term:
SIGKILL or SIGTERM between two kernels; kill-kernel: SIGKILL with a kernel in flight, which is a fault for its
neighbours; kill-early: SIGKILL within 0.4 s of the start, wherever it is then; kill-waiting: after 1 to 4 s, only if
it has not been served; stop: SIGSTOP at work; stop-early: SIGSTOP within 0.4 s of the start; both are continued.
fault: an illegal access.
"""
GUESTS: dict[str, float] = {
    "silent": 3, "greeted": 2, "garbage": 3, "half": 3, "vanish": 3, "flood": 1, "hostage": 0.5,
    "front-end": 2, "ps": 4, "list": 4,
}  # fmt: skip
"""What is done at the control socket by users who are no clients (see guest.py), and how often."""


@dataclass(frozen=True)
class Machine:
    """What the policy's words are counted on: GPUs, their multiprocessors, and their memory in bytes as NVML says."""

    gpus: int
    multiprocessors: int
    memory: int

    @property
    def mebibytes(self) -> int:
        return self.memory >> 20


@dataclass(frozen=True)
class User:
    """One user, what the policy says about them, and what that is: percent and MiB for each device; `max_clients`: so
    many processes at a time, by the key of that name or by a total."""

    uid: int
    text: str
    percent: float
    memory: tuple[int, ...]
    max_clients: int | None = None
    denied: bool = False

    def multiprocessors(self, machine: Machine) -> int:
        return multiprocessors_for_percent(self.percent, machine.multiprocessors)


@dataclass(frozen=True)
class Deed:
    """A client (`arguments` for cuda_client.py) or a guest. `after` and `until`: seconds of its signals, if any."""

    at: float
    uid: int
    kind: str
    arguments: tuple[str, ...] = ()
    device: int = 0
    after: float = 0.0
    until: float = 0.0
    guest: bool = False


@dataclass(frozen=True)
class Population:
    """Everything about one run that is decided before it."""

    users: tuple[User, ...]
    deeds: tuple[Deed, ...]
    policy: str
    seconds: float
    users_by_uid: dict[int, User] = field(default_factory=dict)

    def user(self, uid: int) -> User:
        return self.users_by_uid[uid]


def populate(
    seed: int, machine: Machine, *, clients: int, seconds: float, server: str, sharing: str = "turns",
    guests: bool = True, action: str = "terminate",
) -> Population:  # fmt: skip
    """The population of one run. `server` is the policy's "own" or "shared", `sharing` its "turns", "together" or
    "apart"; `guests`: others at the socket as well; `action`: at the end of a turn, "terminate" or "pause"."""
    draw = random.Random(seed)
    users = _users(draw, machine)
    deeds = _clients(draw, users, machine, clients, seconds) + _guests(
        draw, users, clients // 10 if guests else 0, seconds
    )
    deeds.sort(key=lambda deed: deed.at)
    policy = _policy(users, server, sharing, action)
    return Population(tuple(users), tuple(deeds), policy, seconds, {user.uid: user for user in users})


# --- who may use what -------------------------------------------------------------------------------------------------


def _users(draw: random.Random, machine: Machine) -> list[User]:
    uids = list(range(FIRST_UID, FIRST_UID + USERS))
    # Each way to write a share comes once, each way to write memory at least once; who has which is drawn.
    weights = [draw.randint(1, 4) for _ in range(2)]
    percent = draw.choice([10.0, 12.7, 20.0, 33.3, 45.0, 60.0])
    sms = draw.randrange(8, machine.multiprocessors - 8, 2)
    parts = draw.randint(2, 6)
    shares = [
        (f"active_threads = '{percent:g}%'", percent),
        (f"active_threads = {sms}", math.ceil(sms * 1000 / machine.multiprocessors) / 10),
        (f'active_threads = {{ clients = {parts}, rule = "even" }}', _down(100 / parts)),
        (f'active_threads = {{ clients = {2 * parts}, rule = "double" }}', _down(200 / (2 * parts))),
        *((f"active_threads = {{ weight = {one} }}", _down(100 * one / sum(weights))) for one in weights),
    ]
    whole = machine.mebibytes
    part, gib, mib = draw.randint(5, 30), draw.randint(2, 20), draw.randint(1100, 9000)
    first, second = draw.randint(2, 9), draw.randint(5, 30)
    small = draw.randint(600, 1023)
    by_device = (f'memory_limit = {{ 0 = "{first}G" }}', (first << 10,))
    if machine.gpus > 1:
        others = ", ".join(f'{ordinal} = "{second}%"' for ordinal in range(1, machine.gpus))
        sizes = (first << 10, *(_part(whole, second),) * (machine.gpus - 1))
        by_device = (f'memory_limit = {{ 0 = "{first}G", {others} }}', sizes)
    ways = [
        (f'memory_limit = "{part}%"', (_part(whole, part),) * machine.gpus),
        (f'memory_limit = "{gib}G"', (gib << 10,) * machine.gpus),
        (f'memory_limit = "{mib}M"', (mib,) * machine.gpus),
        by_device,
        ('memory_limit = "3333M"', (3333,) * machine.gpus),
        (f'memory_limit = "{small}M"', (small,) * machine.gpus),
    ]
    draw.shuffle(shares)
    draw.shuffle(ways)
    capped = draw.choice(uids)
    totalled = uids[(uids.index(capped) + 1) % USERS]
    users = []
    for uid, (share, value), (memory, given) in zip(uids, shares, ways, strict=True):
        most, bound = None, []
        if uid == capped:
            most = draw.randint(2, 4)
            bound = [f"max_clients = {most}"]
        elif uid == totalled:
            total = min(100.0, _down(2.5 * value))
            most = round(total * 10) // round(value * 10)
            bound = [f"total_active_threads = '{total:g}%'"]
        # MPS's other priority, which must not make anything else wrong; chosen without a draw, so that seeds stay.
        lower = ['client_priority = "below-normal"'] if uid % 3 == 0 else []
        users.append(User(uid, "\n".join([share, memory, *bound, *lower]), value, given, most))
    users.append(User(FIRST_UID + USERS, 'access = "deny"', 10.0, (1024,) * machine.gpus, denied=True))
    return users


def _down(percent: float) -> float:
    return math.floor(percent * 10 + 1e-6) / 10


def _part(mebibytes: int, percent: int) -> int:
    return mebibytes * percent // 100


def _policy(users: Sequence[User], server: str, sharing: str, action: str) -> str:
    text = (
        f'[turn]\ntime_limit = "{AFTER:g}s"\ngrace = "{GRACE:g}s"\non_expiry = "{action}"\n'
        f'pause_slice = "{SLICE:g}s"\n\n'
        f'[timeouts]\nfault_recovery = "{FAULT:g}s"\n'
        f'sigkill_delay = "{KILL:g}s"\n\n'
        # A user whom no section names gets little.
        '[limits]\nactive_threads = "5%"\nmemory_limit = "600M"\n\n'
    )
    text += "".join(f"[user.{user.uid}]\n{user.text}\n\n" for user in users)
    # Daemons come and go while clients come.
    idle = 'daemon_idle_timeout = "1s"\n' if sharing == "apart" else ""
    return text + f'[instance.default]\nsharing = "{SHARING[sharing]}"\nserver_scope = "{SCOPES[server]}"\n{idle}'


# --- what they do -----------------------------------------------------------------------------------------------------


def _clients(draw: random.Random, users: Sequence[User], machine: Machine, count: int, seconds: float) -> list[Deed]:
    deeds: list[Deed] = []
    while len(deeds) < count:
        at = draw.uniform(0, seconds)
        # Half of them come alone, half in a rush of several users at the same instant.
        rush = 1 if draw.random() < 0.8 else draw.randint(2, 10)
        for _ in range(min(rush, count - len(deeds))):
            user = draw.choices(users, [0.4 if user.max_clients or user.denied else 1.0 for user in users])[0]
            deeds.append(_client(draw, at, user, machine))
    return deeds


def _client(draw: random.Random, at: float, user: User, machine: Machine) -> Deed:
    kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
    device = draw.randrange(machine.gpus)
    after, until = 0.0, 0.0
    match kind:
        case "query":
            arguments = ["query"]
        case "work":
            arguments = ["work", str(draw.randint(1, 40))]
        case "sleep":
            arguments = ["sleep", f"{draw.uniform(0.1, 1.2):.2f}"]
        case "spin":
            arguments = ["spin", f"{draw.uniform(0.05, 0.8):.2f}"]
        case "long":
            arguments = ["sleep", f"{draw.uniform(4, 9):.2f}"]
        case "alloc":
            arguments = ["alloc", str(user.memory[device] + 16)]
        case "kill-kernel":
            arguments, after = ["spin", "20"], draw.uniform(0.02, 0.5)
        case "kill-idle" | "term":
            arguments, after = ["sleep", "20"], draw.uniform(0.02, 0.8)
        case "stop":
            arguments, after = [draw.choice(["sleep", "spin"]), "0.8"], draw.uniform(0.02, 0.5)
            until = after + draw.uniform(0.2, 2.0)
        case "kill-early":
            arguments, after = ["sleep", "20"], draw.uniform(0.0, 0.4)
        case "kill-waiting":
            arguments, after = ["sleep", "0.5"], draw.uniform(1.0, 4.0)
        case "stop-early":
            arguments, after = ["query"], draw.uniform(0.0, 0.4)
            until = after + draw.uniform(0.2, 2.0)
        case _:
            arguments = ["oob", f"{draw.uniform(0.0, 0.4):.2f}"]
    return Deed(at, user.uid, kind, tuple(arguments), device, after, until)


def _guests(draw: random.Random, users: Sequence[User], count: int, seconds: float) -> list[Deed]:
    deeds = []
    for _ in range(count):
        kind = draw.choices(list(GUESTS), list(GUESTS.values()))[0]
        stays = draw.uniform(0.5, 8.0)
        uid = draw.choice(users).uid
        deeds.append(Deed(draw.uniform(0, seconds), uid, kind, (kind, f"{stays:.2f}"), guest=True))
    return deeds
