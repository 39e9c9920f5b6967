"""The JSON that the API answers with. The OpenAPI document is written from these (`make openapi`).

Times are ISO 8601 in UTC; spans are seconds; sizes are bytes. ``null`` means: not known or not so.
"""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict

from mpsagent.api.shapes_gpus import Device, Outside
from mpsagent.api.shapes_rows import Client, Lease, Server, Session, Turn, User, Waiting


class Condition(TypedDict):
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
    problems: list[Condition]


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
    """``deadline``: when what still runs is ended. ``restart``: it ends with the control daemon, which is started
    again; any other lasts until a resume."""

    draining: bool
    since: str | None
    deadline: str | None
    restart: bool


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
    the moment. ``foreign_lines``: log lines about processes that did not pass the gate."""

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
    last_change: Change | None
    last_fault: Fault | None
    limits: LimitsState
    not_guaranteed: list[Condition]
    unknown_lines: int
    foreign_lines: int
    drain: Drain
    policy: PolicyState
    history: History


class NodeStatus(Status):
    """``environment``: what users' programs need to find MPS. ``instances``: each one's own page, with its ``name`` and
    ``environment``, which is another one for each with ``placement = "own"``.
    With several of them the lists above are those of all, each row with its ``instance``, and ``control``, ``turn``,
    ``holder`` and what was last are null, because each instance has its own. An instance apart has its users' servers
    and clients on its page, and these users with their control daemons in ``apart`` (:class:`UserApart`)."""

    environment: dict[str, str]
    instances: list[dict[str, Any]]


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


class Sessions(TypedDict):
    """``cursor``: pass it to read on."""

    sessions: list[Session]
    cursor: int


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
    limit; ``ended`` (of jobs): how the last of its clients did: running, finished, fault, lost (with its server),
    order, drain, turn, the policy's key that ended it (``max_runtime``), left or refused (it never had the GPU),
    unknown. ``gpu``, ``waited``, ``longest``, ``paused`` in seconds: with a client at work; of all processes' waits
    together; of the longest wait; frozen in pauses, no part of ``gpu``. ``left``: processes that went away while they
    waited. ``forced``: clients that mpsagent has ended. ``utilization``, from 0 to 1, null: not known: the GPU was
    ``busy`` for so many seconds of those that were ``counted``; ``shared``: that is of several users on one server.
    ``energy`` in joules, ``memory_used``: the most bytes of one process."""

    uid: NotRequired[int]
    user: NotRequired[str | None]
    group: NotRequired[str | None]
    users: NotRequired[int]
    day: NotRequired[str]
    job: NotRequired[str]
    threads: NotRequired[float]
    memory: NotRequired[int]
    ended: NotRequired[str]
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
    counted: float
    busy: float
    utilization: float | None
    energy: float
    memory_used: int
    shared: bool


class Report(TypedDict):
    """From the beginning of the day ``first`` to the end of the day ``last``."""

    by: str
    first: str
    last: str
    rows: list[ReportRow]
