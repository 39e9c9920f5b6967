"""The JSON of who works and who waits: servers, clients, users, turns and leases, each a row of a list or of the status
page; see :mod:`mpsagent.api.shapes`."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict


class Limits(TypedDict):
    """``threads`` in percent; ``memory`` in bytes by device ordinal, a missing device has no limit. With the lower
    one of MPS's two client priorities there is ``below_normal``, and it is true."""

    threads: float
    memory: dict[str, int]
    below_normal: NotRequired[bool]


class Session(TypedDict):
    """A process from its coming to its end, or a turn, a pause or a fault: ``kind`` is client, turn, pause or fault.
    ``pid``: of a fault, the server's. ``began``: let in, null: not so far. ``ended`` null: it goes on. ``waited``,
    ``worked``: seconds until then, and from then on. ``outcome``: how it ended (of a client ok, ended, faulted, lost,
    left, refused, unknown), and ``why``, by which ``rule``. Of a client: ``limits`` and ``lease`` that it came with,
    ``memory``: the most that was seen; ``utilization`` of its server while it was at work, from 0 to 1, ``energy``: its
    part, in joules; ``shared``: other users were at work on that server, too. Of a turn: ``before``, who had the GPU,
    and the ``gap`` in seconds. Of a pause: ``clients``."""

    cursor: int
    kind: str
    instance: str | None
    uid: int | None
    user: str | None
    pid: int | None
    came: str
    began: str | None
    ended: str | None
    waited: float
    worked: float
    outcome: str | None
    why: str | None
    rule: NotRequired[str]
    job: str | None
    limits: NotRequired[Limits]
    lease: NotRequired[int]
    memory: NotRequired[int]
    utilization: NotRequired[float]
    energy: NotRequired[float]
    shared: NotRequired[bool]
    before: NotRequired[int | None]
    gap: NotRequired[float | None]
    clients: NotRequired[int]


class Turn(TypedDict):
    """Who has the GPU.

    ``memory``: device memory of its processes together, as far as it is known. ``limits``: what each of them was let in
    with, null where that differs; while there is none, what the policy gives. ``contested``: since when another user
    waits for it; ``ends``: when it is over at the latest (null: while no user waits, or never); ``after``, ``grace``:
    what the policy gives from then on, null: no end; ``slice``: how long the turn lasts where it ends in a pause, else
    null; ``action``: what happens at its end; ``ending``: since when that is under way.
    """

    uid: int
    user: str | None
    since: str
    seconds: float
    processes: int
    memory: int | None
    limits: Limits | None
    contested: str | None
    warned: str | None
    ends: str | None
    ends_in: float | None
    after: float | None
    grace: float
    slice: float | None
    action: str
    ending: str | None


class Server(TypedDict):
    """``limits`` are what the server itself reported at its start; ``wanted``: those of its user's policy, null for a
    shared server; ``verified``: whether it started with its first client's. ``shared``: one for all users.
    ``unknown_clients``: processes in its log that did not pass the gate."""

    pid: int
    uid: int | None
    user: str | None
    shared: bool
    status: str
    started: str
    ready: str | None
    limits: Limits
    wanted: Limits | None
    verified: bool | None
    clients: int
    unknown_clients: int
    max_clients: int
    idle_since: str | None
    fault_since: str | None
    sticky: list[int]
    forced: bool


class Container(TypedDict):
    """By the name of its cgroup. ``engine`` null: that does not say; ``pod``: the uid of its Kubernetes pod."""

    engine: str | None
    id: str
    pod: str | None


class Client(TypedDict):
    """A process. ``state``: ``waiting`` (held at the gate), ``starting`` (let in, and its server has not spoken of it),
    ``running``, ``paused`` (frozen until its user's turn, since ``paused``), ``sticky`` (in a fault),
    ``detached`` (left its server and lives), ``ending`` (being ended by the agent; ``why`` says for what).
    ``memory``: device memory in use, null: not known. ``utilization``: of its server at the last look, from 0 to 1,
    null: not known; ``shared``: other users were at work there too. ``limits``: those it was handed over with;
    ``fail_safe``: the strictest, because its own were not confirmed. ``unseen``: not seen by the gate, it came through
    another process. ``outcome``: how it will have ended, as far as
    that is known."""

    pid: int
    uid: int
    user: str | None
    gid: int
    cgroup: str | None
    container: Container | None
    command: str | None
    server: int | None
    state: str
    why: str | None
    since: str
    seconds: float
    waited: float | None
    memory: int | None
    utilization: float | None
    shared: bool
    limits: Limits | None
    fail_safe: bool
    unseen: bool
    paused: str | None
    detached: str | None
    outcome: str | None
    contexts: int
    devices: list[str]


class Waiting(TypedDict):
    """A user whose connections are held or who is paused, in order of being served. ``processes``: how many;
    ``clients``: their pids, the first 64. ``reason``: one word for ``why``, which is over by itself ``until`` then.
    ``turn``: when, at the latest, the policy gives this user the GPU (null: it says no time)."""

    position: int
    uid: int
    user: str | None
    processes: int
    clients: list[int]
    since: str
    seconds: float
    reason: str
    why: str
    until: str | None
    turn: str | None
    turn_seconds: float | None


class User(TypedDict):
    """A user with clients. ``since``: of the first of them; ``memory``: of all, if known; ``paused``: since when."""

    uid: int
    user: str | None
    since: str
    processes: int
    memory: int | None
    paused: str | None


class UserApart(TypedDict):
    """A user's control daemon with ``sharing = "apart"``. ``name``: of its directory in /run/mpsagent/instances, with
    its pipe directory; ``control``: its pid, null while it does not run; ``servers``: pids; ``waiting``: processes."""

    name: str
    uid: int
    control: int | None
    started: str | None
    servers: list[int]
    clients: int
    waiting: int
    draining: bool


class Lease(TypedDict):
    """A share for a job. ``name``: what the batch system calls it. ``threads``: percent or ``{"sms": N}``, null: as the
    user's; ``memory``, ``total_memory``: bytes or a part of each device; ``total_…``, ``max_clients``: what its
    processes have together, null: no more than their users; ``limits``: what a process of its user gets with it, null
    where no user is given or it is not known who that is; ``clients``: the pids of the job's clients."""

    id: int
    name: str | None
    uid: int | None
    user: str | None
    cgroup: str | None
    pid: int | None
    threads: float | dict[str, int] | None
    memory: int | str | None
    total_threads: float | dict[str, int] | None
    total_memory: int | str | None
    max_clients: int | None
    limits: Limits | None
    since: str
    until: str
    by: int
    clients: list[int]
