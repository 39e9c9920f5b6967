"""The JSON that the API answers with. The OpenAPI document is written from these (see openapi.py).

Times are ISO 8601 in UTC; spans are seconds; sizes are bytes. ``null`` means: not known or not so.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict


class Problem(TypedDict):
    """What a person should look at: since when, and what to do about it."""

    what: str
    since: str | None
    do: str


class Agent(TypedDict):
    version: str
    pid: int
    started: str
    uptime: float


class Health(TypedDict):
    ok: bool
    problems: list[Problem]


class Mode(TypedDict):
    """``server``: ``own`` (one for each turn) or ``shared`` (one for all users); ``enforced``: false when the policy
    only reports."""

    server: str
    enforced: bool


class Device(TypedDict):
    ordinal: int
    uuid: str
    name: str
    memory: int
    multiprocessors: int


class Control(TypedDict):
    """``version``: as MPS writes it, 13000 for CUDA 13.0; ``running``: the kernel confirmed the process."""

    pid: int
    version: int | None
    started: str
    socket: str
    quitting: str | None
    running: bool


class Gate(TypedDict):
    """``connected`` false: the gate goes on with what it was told last, and who waits is not known here. ``synced``: it
    has told all that it holds. ``handshake``: whether the control daemon's greeting is known. ``open``, ``admitted``:
    the table that was sent last; ``in_force``: the gate works by it."""

    connected: bool
    pid: int | None
    since: str | None
    synced: bool
    handshake: bool | None
    open: bool
    admitted: list[int]
    in_force: bool


class Limits(TypedDict):
    """``threads`` in percent; ``memory`` in bytes by device ordinal, a missing device has no limit."""

    threads: float
    memory: dict[str, int]


class Turn(TypedDict):
    """Who has the GPU.

    ``limits``: of each of its processes, by the policy. ``contested``: since when another user waits for it; ``ends``:
    when it is over at the latest (null: while no user waits, or never); ``after``, ``grace``: what the policy gives
    from then on, null: no end; ``action``: what happens at its end; ``ending``: since when that is under way.
    """

    uid: int
    user: str | None
    since: str
    seconds: float
    processes: int
    limits: Limits
    contested: str | None
    warned: str | None
    ends: str | None
    ends_in: float | None
    after: float | None
    grace: float
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


class Client(TypedDict):
    """A process. ``state``: ``waiting`` (held at the gate), ``starting`` (let in, and its server has not spoken of it),
    ``running``, ``sticky`` (in a fault), ``detached`` (left its server and lives), ``ending`` (being ended by the
    agent). ``limits``: those it was handed over with; ``fail_safe``: the strictest, because its own were not confirmed.
    ``outcome``: how it will have ended, as far as that is known."""

    pid: int
    uid: int
    user: str | None
    gid: int
    cgroup: str | None
    command: str | None
    server: int | None
    state: str
    since: str
    seconds: float
    waited: float | None
    limits: Limits | None
    fail_safe: bool
    detached: str | None
    outcome: str | None
    contexts: int
    devices: list[str]


class Waiting(TypedDict):
    """A user whose connections are held, in order of being served. ``processes``: how many; ``clients``: their pids,
    the first 64. ``reason``: one word for ``why``. ``turn``: when, at the latest, the policy gives this user the GPU
    (null: it says no time)."""

    position: int
    uid: int
    user: str | None
    processes: int
    clients: list[int]
    since: str
    seconds: float
    reason: str
    why: str
    turn: str | None
    turn_seconds: float | None


class Change(TypedDict):
    """The last change of user. ``before``: who had the GPU before, null: not known; ``gap``: seconds in between."""

    at: str
    before: int | None
    before_user: str | None
    uid: int
    user: str | None
    gap: float | None


class Fault(TypedDict):
    """The last fault. ``seconds``: how long it took, null: it goes on; ``recovered`` false: the server ended."""

    at: str
    server: int
    uid: int | None
    user: str | None
    seconds: float | None
    recovered: bool | None


class Unconfirmed(TypedDict):
    uid: int
    user: str | None
    why: str


class LimitsState(TypedDict):
    """``verified``, ``drifted``: servers by what they started with. ``unconfirmed``: users whose limits MPS did not
    confirm; ``fail_safe``: processes that have the strictest limits for that reason."""

    verified: list[int]
    drifted: list[int]
    unconfirmed: list[Unconfirmed]
    fail_safe: list[int]


class Drain(TypedDict):
    draining: bool
    since: str | None
    deadline: str | None


class PolicyState(TypedDict):
    digest: str | None
    loaded: str | None
    errors: list[str]


class History(TypedDict):
    """``oldest``: a cursor that reads everything kept; ``newest``: the last event's cursor."""

    oldest: int
    newest: int


class Status(TypedDict):
    """``pipe_directory``: what clients need as CUDA_MPS_PIPE_DIRECTORY. ``holder``: the server of the user whose turn
    it is. ``waiting``: the first 100 users. ``not_guaranteed``: what mpsagent cannot promise at the moment, in plain
    words. ``foreign_lines``: log lines about processes that did not pass the gate."""

    agent: Agent
    health: Health
    mode: Mode
    devices: list[Device]
    pipe_directory: str | None
    control: Control | None
    gate: Gate
    turn: Turn | None
    holder: Server | None
    servers: list[Server]
    clients: int
    clients_by_uid: dict[str, int]
    waiting: list[Waiting]
    waiting_users: int
    waiting_processes: int
    last_switch: str | None
    last_change: Change | None
    last_fault: Fault | None
    limits: LimitsState
    not_guaranteed: list[str]
    unknown_lines: int
    foreign_lines: int
    drain: Drain
    policy: PolicyState
    history: History


class Servers(TypedDict):
    servers: list[Server]


class Clients(TypedDict):
    clients: list[Client]


class Queue(TypedDict):
    queue: list[Waiting]


class Healthz(TypedDict):
    ok: bool
    problems: list[str]


class Events(TypedDict):
    """Each event has ``cursor``, ``at``, ``kind``, ``sentence`` (for people) and its own fields. ``cursor``: pass it to
    read on."""

    events: list[dict[str, Any]]
    cursor: int


class ErrorText(TypedDict):
    what: str
    where: str
    hint: str


class Error(TypedDict):
    error: ErrorText
