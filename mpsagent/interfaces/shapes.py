"""The JSON that the API answers with. The OpenAPI document is written from these (see openapi.py).

Times are ISO 8601 in UTC; spans are seconds; sizes are bytes. ``null`` means: not known or not so.
"""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict

from mpsagent.interfaces.shapes_gpus import Device, Outside


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
    """How the GPU is shared now; a changed policy may wait for those at work. ``sharing``: ``turns`` (one user at a
    time), ``together`` (all at once) or ``apart`` (all at once, each on a control daemon of the user's own);
    ``server``: ``own`` (one for each turn, or for each user) or ``shared`` (one for all users); ``enforced``: false
    when the policy only reports."""

    sharing: str
    server: str
    enforced: bool


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

    ``memory``: device memory of its processes together, as far as it is known. ``limits``: of each of them, by the
    policy. ``contested``: since when another user waits for it; ``ends``:
    when it is over at the latest (null: while no user waits, or never); ``after``, ``grace``: what the policy gives
    from then on, null: no end; ``slice``: how long the turn lasts where it ends in a pause, else null; ``action``: what
    happens at its end; ``ending``: since when that is under way.
    """

    uid: int
    user: str | None
    since: str
    seconds: float
    processes: int
    memory: int | None
    limits: Limits
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
    ``detached`` (left its server and lives), ``ending`` (being ended by the
    agent). ``memory``: device memory in use, null: not known. ``limits``: those it was handed over with;
    ``fail_safe``: the strictest, because its own were not confirmed. ``outcome``: how it will have ended, as far as
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
    since: str
    seconds: float
    waited: float | None
    memory: int | None
    limits: Limits | None
    fail_safe: bool
    paused: str | None
    detached: str | None
    outcome: str | None
    contexts: int
    devices: list[str]


class Waiting(TypedDict):
    """A user whose connections are held or who is paused, in order of being served. ``processes``: how many;
    ``clients``: their pids, the first 64. ``reason``: one word for ``why``. ``turn``: when, at the latest, the policy
    gives this user the GPU (null: it says no time)."""

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


class User(TypedDict):
    """A user with clients. ``since``: of the first of them; ``memory``: of all, if known; ``paused``: since when."""

    uid: int
    user: str | None
    since: str
    processes: int
    memory: int | None
    paused: str | None


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


class Lease(TypedDict):
    """A share for a job. ``name``: what the batch system calls it. ``threads``: percent or ``{"sms": N}``, null: as the
    user's; ``memory``: bytes or a part by device ("" for each); ``clients``: the pids of the job's clients."""

    id: int
    name: str | None
    uid: int | None
    user: str | None
    cgroup: str | None
    pid: int | None
    threads: float | dict[str, int] | None
    memory: dict[str, int | str] | None
    since: str
    until: str
    by: int
    clients: list[int]


class Leases(TypedDict):
    leases: list[Lease]


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
    it is. ``users``, ``waiting``, ``outside``: the first 100 each. ``not_guaranteed``: what mpsagent cannot promise at
    the moment, in plain words. ``foreign_lines``: log lines about processes that did not pass the gate."""

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
    users: list[User]
    waiting: list[Waiting]
    waiting_users: int
    waiting_processes: int
    outside: list[Outside]
    outside_processes: int
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


class NodeStatus(Status):
    """``environment``: what users' programs need to find MPS. ``instances``: each one's own page, with its ``name``.
    With several of them the lists above are those of all, each row with its ``instance``, and ``control``, ``turn``,
    ``holder`` and what was last are null, because each instance has its own. An instance apart has its users' servers
    and clients on its page, and these users with their control daemons in ``apart`` (:class:`UserApart`)."""

    environment: dict[str, str]
    instances: list[dict[str, Any]]


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


class Servers(TypedDict):
    servers: list[Server]


class Clients(TypedDict):
    """``next``: of a page, the ``after`` of the next one; null: there is none."""

    clients: list[Client]
    next: str | None


class Queue(TypedDict):
    """``next``: of a page, the ``after`` of the next one; null: there is none."""

    queue: list[Waiting]
    next: str | None


class Healthz(TypedDict):
    ok: bool
    problems: list[str]


class Events(TypedDict):
    """Each event has ``cursor``, ``at``, ``kind``, ``sentence`` (for people) and its own fields. ``cursor``: pass it to
    read on."""

    events: list[dict[str, Any]]
    cursor: int


class PolicyChange(TypedDict):
    """``before``, ``after``: the value, and how it was written. ``where``: the file and line that say so."""

    key: str
    before: dict[str, Any]
    after: dict[str, Any]
    where: str


class UserChanges(TypedDict):
    """``who``: a user, the members of a group, or all others. ``uid``: null where it is not one user."""

    who: str
    uid: int | None
    changes: list[PolicyChange]


class SettingChange(TypedDict):
    """A setting that is not a user's, as a file would have it. ``restart``: it takes hold when the agent is started
    again."""

    key: str
    before: str
    after: str
    restart: bool


class PolicyDiff(TypedDict):
    """What a reload would change. ``digest``: of the files."""

    same: bool
    digest: str | None
    users: list[UserChanges]
    settings: list[SettingChange]


class Error(TypedDict):
    """A problem detail (RFC 9457). ``type``: about:blank, so ``title`` is the status in words; ``detail``: what is
    wrong; ``hint``: what to do. ``oldest``, for a cursor that is too old: one from which all that is kept can be
    read."""

    type: str
    title: str
    status: int
    detail: str
    where: str
    hint: str
    oldest: NotRequired[int]


class ReportRow(TypedDict):
    """``uid`` and ``user``, ``group`` and ``users`` (how many), ``day``, or ``job``, ``uid`` and ``user``, as ``by``
    says. ``threads``, ``memory`` (of jobs): the most that one of its clients had: percent, and bytes on a device, 0: no
    limit. ``gpu``, ``waited``, ``longest``, ``paused`` in seconds: with a client at work; of all processes' waits
    together; of the longest wait; frozen in pauses, no part of ``gpu``. ``left``: processes that went away while they
    waited. ``forced``: clients that mpsagent has ended."""

    uid: NotRequired[int]
    user: NotRequired[str | None]
    group: NotRequired[str | None]
    users: NotRequired[int]
    day: NotRequired[str]
    job: NotRequired[str]
    threads: NotRequired[float]
    memory: NotRequired[int]
    gpu: float
    waited: float
    longest: float
    clients: int
    left: int
    refused: int
    faults: int
    forced: int
    turns: int
    paused: float


class Report(TypedDict):
    """From the beginning of the day ``first`` to the end of the day ``last``."""

    by: str
    first: str
    last: str
    rows: list[ReportRow]
