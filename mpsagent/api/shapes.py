"""The JSON that the API answers with. The OpenAPI document is written from these (`make openapi`), and
:mod:`mpsagent.api.views` fills them: a field has the name of what it shows.

Times are ISO 8601 in UTC; spans are seconds; sizes are bytes. ``null`` means: not known or not so.
"""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict

Time = str


class LimitsShape(TypedDict):
    """``threads`` in percent; ``memory`` in bytes by device ordinal, a missing device has no limit. With the lower
    one of MPS's two client priorities there is ``below_normal``, and it is true."""

    threads: float
    memory: dict[str, int]
    below_normal: NotRequired[bool]


class SessionShape(TypedDict):
    """A process from its coming to its end, or a turn, a pause or a fault: ``kind`` is client, turn, pause or fault.
    ``pid``: of a fault, the server's. ``began``: when it was let in, or null. ``ended`` null: it goes on. ``waited``,
    ``worked``: seconds before and after ``began``. ``outcome``: how it ended (of a client ok, ended, faulted, lost,
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
    came: Time
    began: Time | None
    ended: Time | None
    waited: float
    worked: float
    outcome: str | None
    why: str | None
    rule: NotRequired[str]
    job: str | None
    limits: NotRequired[LimitsShape]
    lease: NotRequired[int]
    memory: NotRequired[int]
    utilization: NotRequired[float]
    energy: NotRequired[float]
    shared: NotRequired[bool]
    before: NotRequired[int | None]
    gap: NotRequired[float | None]
    clients: NotRequired[int]


class TurnShape(TypedDict):
    """Who has the GPU.

    ``memory``: device memory of the user's processes together, null: not known. ``limits``: those with which each of
    them was let in, null: they differ or are not known; without a process, those of the policy. ``contested``: since
    when another user waits; ``ends``: when the turn is over at the latest (null: no user waits, or it has no end);
    ``time_limit``, ``grace``: the policy's seconds from ``contested`` on, null: no end; ``pause_slice``: the seconds of
    a turn that ends in a pause, else null; ``on_expiry``: what happens at its end; ``ending``: since when it ends."""

    uid: int
    user: str | None
    since: Time
    seconds: float
    processes: int
    memory: int | None
    limits: LimitsShape | None
    contested: Time | None
    warned: Time | None
    ends: Time | None
    ends_in: float | None
    time_limit: float | None
    grace: float
    pause_slice: float | None
    on_expiry: str
    ending: Time | None


class ServerShape(TypedDict):
    """``limits`` are what the server itself reported at its start; ``wanted``: those of its user's policy, null for a
    shared server; ``verified``: whether it started with its first client's. ``shared``: one for all users.
    ``unknown_clients``: processes in its log that did not pass the gate. ``instance`` is missing only in the status of
    a node with a single instance, here and in the rows of clients and of the queue."""

    pid: int
    uid: int | None
    user: str | None
    shared: bool
    status: str
    started: Time
    ready: Time | None
    limits: LimitsShape
    wanted: LimitsShape | None
    verified: bool | None
    clients: int
    unknown_clients: int
    max_clients: int
    idle_since: Time | None
    fault_since: Time | None
    sticky: list[int]
    forced: bool
    instance: NotRequired[str]


class ContainerShape(TypedDict):
    """Known by the name of its cgroup. ``engine`` null: the name does not say it; ``pod``: the uid of its Kubernetes
    pod."""

    engine: str | None
    id: str
    pod: str | None


class ClientShape(TypedDict):
    """A process. ``state``: ``waiting`` (held at the gate), ``starting`` (let in, and its server has not reported it),
    ``running``, ``paused`` (frozen until its user's turn, since ``paused``), ``sticky`` (in a fault),
    ``detached`` (left its server and lives), ``ending`` (the agent ends it; ``why`` says the reason).
    ``memory``: device memory in use, null: not known. ``utilization``: of its server at the last look, from 0 to 1,
    null: not known; ``shared``: other users were at work there too. ``limits``: those it was handed over with,
    null: not known, or it waits; ``fail_safe``: the fallback limits, because its own were not
    confirmed. ``unseen``: not seen by the gate, it came through another process. ``outcome``: how it will have ended,
    null: not known."""

    pid: int
    uid: int
    user: str | None
    gid: int
    cgroup: str | None
    container: ContainerShape | None
    command: str | None
    server: int | None
    state: str
    why: str | None
    since: Time
    seconds: float
    waited: float | None
    memory: int | None
    utilization: float | None
    shared: bool
    limits: LimitsShape | None
    fail_safe: bool
    unseen: bool
    paused: Time | None
    detached: Time | None
    outcome: str | None
    contexts: int
    devices: list[str]
    instance: NotRequired[str]


class WaitingShape(TypedDict):
    """A user whose connections are held or who is paused, in order of being served. ``processes``: how many;
    ``clients``: their pids, the first 64. ``reason``: one word for ``why``; ``until``: when that is over by itself.
    ``turn``: when, at the latest, the policy gives this user the GPU (null: it says no time)."""

    position: int
    uid: int
    user: str | None
    processes: int
    clients: list[int]
    since: Time
    seconds: float
    reason: str
    why: str
    until: Time | None
    turn: Time | None
    turn_seconds: float | None
    instance: NotRequired[str]


class UserShape(TypedDict):
    """A user with clients. ``since``: of the first of them; ``memory``: of all, if known; ``paused``: since when."""

    uid: int
    user: str | None
    since: Time
    processes: int
    memory: int | None
    paused: Time | None
    instance: NotRequired[str]


class UserDaemonShape(TypedDict):
    """A user's control daemon with ``sharing = "per-user"``. ``name``: of its directory in /run/mpsagent/instances,
    with its pipe directory; ``control``: its pid, null while it does not run; ``servers``: pids; ``waiting``:
    processes."""

    name: str
    uid: int
    control: int | None
    started: Time | None
    servers: list[int]
    clients: int
    waiting: int
    draining: bool


class LeaseShape(TypedDict):
    """A share for a job. ``name``: what the batch system calls it. ``active_threads``: "25%" or a number of
    multiprocessors, null: as the user's; ``memory_limit``: bytes or a part by device ("" for each); ``total_…``,
    ``max_clients``: what its processes have together, null: no more than their users; ``limits``: what a process of its
    user gets with it, null where no user is given or it is not known who that is; ``clients``: the pids of the job's
    clients; ``waits``: why processes of the job wait, null: none does."""

    id: int
    name: str | None
    uid: int | None
    user: str | None
    cgroup: str | None
    pid: int | None
    active_threads: str | int | None
    memory_limit: dict[str, int | str] | None
    total_active_threads: str | int | None
    total_memory_limit: int | str | None
    max_clients: int | None
    limits: LimitsShape | None
    since: Time
    until: Time
    by: int
    clients: list[int]
    waits: str | None


class XidShape(TypedDict):
    """An error that the driver has reported; NVIDIA's manual of Xid errors has the numbers. ``at``: when the agent
    heard of it."""

    at: Time
    number: int


class OutsideShape(TypedDict):
    """A process that computes on our GPUs outside MPS. ``began``: when it started, ``since``: when it was seen first;
    ``why``: the likely reason, by what the process itself shows; ``ends``: when the agent asks it to end, null:
    never."""

    pid: int
    uid: int
    user: str | None
    command: str | None
    device: str
    memory: int | None
    began: Time | None
    since: Time
    why: str
    ends: Time | None
    instance: NotRequired[str]


class DeviceShape(TypedDict):
    """``generation`` and what follows are what NVML said at ``seen``; null: it cannot say, or was not asked yet.
    ``utilization``: from 0 to 1, the part of the last second or so in which a kernel ran; ``power`` in watts;
    ``temperature`` in °C; ``mig``: the GPU is divided into MIG devices; ``memory_used``: by all processes, of any kind;
    ``xids``: the last of the ``xids_seen`` that the agent heard of; ``problem``: why the GPU does not answer."""

    ordinal: int
    uuid: str
    name: str
    memory: int
    multiprocessors: int
    generation: str | None
    compute_mode: str | None
    mig: bool | None
    memory_used: int | None
    utilization: float | None
    power: float | None
    temperature: int | None
    xids: list[XidShape]
    xids_seen: int
    problem: str | None
    seen: Time | None
    instance: NotRequired[str]


class ConditionShape(TypedDict):
    """What a person should look at: since when, and what to do about it."""

    what: str
    since: Time | None
    do: str


class AgentShape(TypedDict):
    version: str
    pid: int
    started: Time
    uptime: float


class HealthShape(TypedDict):
    ok: bool
    problems: list[ConditionShape]


class ModeShape(TypedDict):
    """How the GPU is shared now; a changed policy may wait for clients at work. ``sharing``: ``turns`` (one user at a
    time), ``one-server`` (all at once on one server) or ``per-user`` (all at once, each on a control daemon of the
    user's own); ``server``: ``user`` (one for each turn, or for each user) or ``all`` (one for all users), the policy's
    server_scope; ``enforced``: false when the policy's mode is ``report``; ``why``: why users take turns although the
    policy does not say so."""

    sharing: str
    server: str
    enforced: bool
    why: str | None


class ControlShape(TypedDict):
    """``version``: as MPS writes it, 13000 for CUDA 13.0; ``running``: the kernel confirmed the process."""

    pid: int
    version: int | None
    started: Time
    socket: str
    quitting: Time | None
    running: bool


class GateShape(TypedDict):
    """``connected`` false: the gate goes on with what the agent told it last, and the agent does not know the queue.
    ``synced``: the gate has told all that it holds. ``handshake``: whether the control daemon's greeting is known.
    ``open``, ``admitted``: the table that was sent last; ``in_force``: the gate applies it."""

    connected: bool
    pid: int | None
    since: Time | None
    synced: bool
    handshake: bool | None
    open: bool
    admitted: list[int]
    in_force: bool


class ChangeShape(TypedDict):
    """The last change of user. ``before``: who had the GPU before, null: not known; ``gap``: seconds in between."""

    at: Time
    before: int | None
    before_user: str | None
    uid: int
    user: str | None
    gap: float | None


class FaultShape(TypedDict):
    """The last fault. ``seconds``: how long it took, null: it goes on; ``recovered`` false: the server ended."""

    at: Time
    server: int
    uid: int | None
    user: str | None
    seconds: float | None
    recovered: bool | None


class UnconfirmedShape(TypedDict):
    uid: int
    user: str | None
    why: str


class LimitsStateShape(TypedDict):
    """``verified``, ``drifted``: servers by what they started with. ``unconfirmed``: users whose limits MPS did not
    confirm; ``fail_safe``: processes that have the fallback limits for that reason."""

    verified: list[int]
    drifted: list[int]
    unconfirmed: list[UnconfirmedShape]
    fail_safe: list[int]


class DrainShape(TypedDict):
    """``deadline``: when clients still at work are ended. ``restart``: the drain is over when the control daemon has
    been started again; any other drain lasts until a resume. ``by``, ``by_user``: the user who ordered it."""

    draining: bool
    since: Time | None
    deadline: Time | None
    restart: bool
    by: int | None
    by_user: str | None


class PolicyStateShape(TypedDict):
    digest: str | None
    loaded: Time | None
    errors: list[str]


class HistoryShape(TypedDict):
    """``oldest``: a cursor that reads everything kept; ``newest``: the last event's cursor."""

    oldest: int
    newest: int


class PageShape(TypedDict):
    """The state of an instance, or of all of them. ``holder``: the server of the user whose turn it is. ``users``,
    ``waiting``, ``outside``: the first 100 each. ``not_guaranteed``: what mpsagent cannot promise at the moment.
    ``foreign_lines``: log lines about processes that did not pass the gate."""

    mode: ModeShape
    devices: list[DeviceShape]
    control: ControlShape | None
    turn: TurnShape | None
    holder: ServerShape | None
    servers: list[ServerShape]
    clients: int
    clients_by_uid: dict[str, int]
    users: list[UserShape]
    waiting: list[WaitingShape]
    waiting_users: int
    waiting_processes: int
    outside: list[OutsideShape]
    outside_processes: int
    last_change: ChangeShape | None
    last_fault: FaultShape | None
    limits: LimitsStateShape
    not_guaranteed: list[ConditionShape]
    unknown_lines: int
    foreign_lines: int
    drain: DrainShape


class InstanceShape(PageShape):
    """With ``sharing = "per-user"`` the page has all users' servers and clients; ``daemons``: their control daemons."""

    name: str
    log_directory: str
    environment: dict[str, str]
    daemons: list[UserDaemonShape]


class StatusShape(PageShape):
    """``environment``: what users' programs need to find MPS, another one for each instance with
    ``placement = "by-directory"``; ``pipe_directory``: its CUDA_MPS_PIPE_DIRECTORY. ``instances``: each one's own page.
    With several of them the lists are those of all, each row with its ``instance``, and ``control``,
    ``turn``, ``holder`` and the last change and fault are null, because each instance has its own."""

    agent: AgentShape
    health: HealthShape
    gate: GateShape
    pipe_directory: str | None
    policy: PolicyStateShape
    history: HistoryShape
    environment: dict[str, str]
    instances: list[InstanceShape]


class DrainingShape(TypedDict):
    """A drain that lasts until a resume."""

    instance: str
    since: Time
    by: int | None
    by_user: str | None


class HealthzShape(TypedDict):
    """``drains``: by order no new program gets a GPU there. The answer's status does not depend on it."""

    ok: bool
    drains: list[DrainingShape]
    problems: list[str]


class ErrorShape(TypedDict):
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


class ReportRowShape(TypedDict):
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


class ReportShape(TypedDict):
    """From the beginning of the day ``first`` to the end of the day ``last``."""

    by: str
    first: str
    last: str
    rows: list[ReportRowShape]


class EventsShape(TypedDict):
    """Each event has ``cursor``, ``at``, ``kind``, ``sentence`` (for people) and its own fields. ``cursor``: pass it to
    read on."""

    events: list[dict[str, Any]]
    cursor: int


class SessionsShape(TypedDict):
    """``cursor``: pass it to read on."""

    sessions: list[SessionShape]
    cursor: int


class ServersShape(TypedDict):
    servers: list[ServerShape]


class ClientsShape(TypedDict):
    clients: list[ClientShape]


class QueueShape(TypedDict):
    queue: list[WaitingShape]


class LeasesShape(TypedDict):
    leases: list[LeaseShape]
