"""The JSON that the API answers with. The OpenAPI document is written from these (see openapi.py).

Times are ISO 8601 in UTC; spans are seconds; sizes are bytes. ``null`` means: not known or not so.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict


class Problem(TypedDict):
    """Something a person should look at: since when, and what to do about it."""

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


class Control(TypedDict):
    pid: int
    version: int | None
    started: str
    socket: str
    quitting: str | None
    running: bool


class Limits(TypedDict):
    """``threads`` in percent; ``memory`` in bytes by device ordinal, a missing device has no limit."""

    threads: float
    memory: dict[str, int]


class Server(TypedDict):
    """``limits`` are what the server itself reported; ``wanted`` is the user's policy; ``verified`` compares them."""

    pid: int
    uid: int | None
    user: str | None
    status: str
    started: str
    ready: str | None
    limits: Limits
    wanted: Limits | None
    verified: bool | None
    clients: int
    max_clients: int
    idle_since: str | None
    fault_since: str | None
    sticky: list[int]
    forced: bool
    parked: bool


class Client(TypedDict):
    """``state``: ``running`` (a server's client), ``waiting`` (in the pending list) or ``sticky`` (in a fault)."""

    pid: int
    uid: int | None
    user: str | None
    server: int | None
    state: str
    since: str
    seconds: float
    waited: float | None
    contexts: int
    devices: list[str]
    command: str | None


class Waiting(TypedDict):
    """A waiting user, in order of being served. ``turn``: when, at the latest, the policy gives this user the GPU
    (null when the policy never takes it from the holder)."""

    position: int
    uid: int
    user: str | None
    clients: list[int]
    since: str
    seconds: float
    turn: str | None
    turn_seconds: float | None


class LimitsState(TypedDict):
    verified: list[int]
    drifted: list[int]


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
    """``pipe_directory``: what clients need as CUDA_MPS_PIPE_DIRECTORY."""

    agent: Agent
    health: Health
    pipe_directory: str | None
    control: Control | None
    holder: Server | None
    servers: list[Server]
    clients: int
    waiting: list[Waiting]
    last_switch: str | None
    limits: LimitsState
    unknown_lines: int
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
    """``cursor``: pass it to read on."""

    events: list[dict[str, Any]]
    cursor: int


class ErrorText(TypedDict):
    what: str
    where: str
    hint: str


class Error(TypedDict):
    error: ErrorText
