"""One hand-over: limits, daemon, client, acknowledgement. Events in, actions out; no I/O, no clock.

Both the defaults and the servers' limits are set each time: whichever way MPS takes, a server that starts or one that
runs, the limits are right (recording 08, G8). Strictly one hand-over at a time for a daemon, until the client has
acknowledged its descriptor: 60 of 60 exact that way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mpsagent.gate import limits as texts
from mpsagent.mps.limits import Limits
from mpsagent.mps.rendezvous import (
    CREDENTIALS,
    DESCRIPTOR,
    HELLO,
    Kind,
    acknowledgement_status,
    error_name,
    kind_bytes,
)

MOST_SESSIONS = 4
"""Sessions for one set of limits, while the servers change under our hands."""


class Stage(StrEnum):
    """Where a hand-over is; the words that the link uses."""

    LIMITS = "limits"
    CONNECT = "connect"
    GREETING = "greeting"
    ANSWER = "answer"
    ACKNOWLEDGEMENT = "acknowledgement"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that each stage may take. ``answer`` is long: a server starts, or another user's has to leave first."""

    limits: float = 15.0
    connect: float = 5.0
    greeting: float = 15.0
    answer: float = 90.0
    acknowledgement: float = 0.5

    def of(self, stage: Stage) -> float | None:
        return None if stage is Stage.DONE else float(getattr(self, stage.value))


@dataclass(frozen=True, slots=True)
class Plan:
    """What this client gets. ``servers``: those that ran when last asked, to save a session."""

    limits: Limits
    fail_safe: Limits
    set_limits: bool = True
    devices: tuple[int, ...] = ()
    servers: tuple[int, ...] = ()


# --- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """Run a front-end session with these commands; :meth:`HandOver.session` takes what came of it."""

    commands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect to the daemon's control socket."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Send this to the daemon with the client's credentials."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Give:
    """Send this to the client with the daemon's descriptor."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Doubt:
    """These limits are not confirmed; the fail-safe ones follow."""

    wanted: Limits
    why: str


@dataclass(frozen=True, slots=True)
class Passed:
    """Over: the client has its descriptor. Not ``acknowledged``: it has not said so in time."""

    limits: Limits
    fail_safe: bool
    acknowledged: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """Over: not handed over. ``lost``: the client's connection is gone after it had its descriptor. ``daemon``: the
    fault concerns every client, not this one."""

    stage: Stage
    why: str
    lost: bool = False
    daemon: bool = False
    status: int | None = None
    """The CUDA error that the client has met at its server."""


@dataclass(frozen=True, slots=True)
class Left:
    """Over: the client left before it had anything."""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Over: it is not admitted any more, and the daemon has not been told of it."""


Outcome = Passed | Failed | Left | Withdrawn
Action = Run | Connect | Tell | Give | Doubt | Outcome


class HandOver:
    """``stage`` says which deadline counts; :meth:`expired` tells that it has passed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.stage = Stage.LIMITS
        self.servers = plan.servers
        """The servers that the last session found."""
        self.fail_safe = False
        self.limits = plan.limits
        """Those that are being set, or are: the plan's or, with ``fail_safe``, the fail-safe ones."""
        self._sessions = 0
        self._gone = False

    def start(self) -> list[Action]:
        if not self.plan.set_limits:
            self.stage = Stage.CONNECT
            return [Connect()]
        return [self._session()]

    def resume(self, *, fail_safe: bool, gone: bool) -> list[Action]:
        """Goes on where an earlier gate was cut: the daemon has been told, its answer is outstanding. A server waits
        for ever for a client whose relay has left in this moment (seen on an H100). ``gone``: the client has left."""
        self.stage = Stage.ANSWER
        self.fail_safe = fail_safe
        self._gone = gone
        return []

    def _session(self) -> Action:
        self._sessions += 1
        return Run(tuple(texts.commands(self.limits, self.plan.devices, self.servers)))

    # --- the limits' sessions ---

    def session(self, answers: Sequence[str] | None, why: str = "") -> list[Action]:
        """A session is over; ``answers`` None: it did not come about, and ``why``."""
        if self.stage is not Stage.LIMITS:
            return []
        if answers is None:
            return self._left() if self._gone else self._fail(why, daemon=True)
        verdict = texts.judge(self.limits, self.plan.devices, self.servers, answers)
        self.servers = verdict.servers
        if self._gone:
            return self._left()
        if verdict.again and self._sessions < MOST_SESSIONS:
            return [self._session()]
        if verdict.why is None and not verdict.again:
            self.stage = Stage.CONNECT
            return [Connect()]
        doubt = verdict.why or "the servers changed each time they were asked for"
        if self.fail_safe:
            return self._fail(f"neither the user's limits nor the fail-safe limits are confirmed: {doubt}", daemon=True)
        actions: list[Action] = [Doubt(self.limits, doubt)]
        self.limits = self.plan.fail_safe
        self.fail_safe = True
        self._sessions = 0
        return [*actions, self._session()]

    # --- the daemon ---

    def connected(self) -> list[Action]:
        if self.stage is Stage.CONNECT:
            self.stage = Stage.GREETING
        return []

    def unreachable(self, why: str) -> list[Action]:
        """The daemon's socket cannot be connected to."""
        return self._fail(why, daemon=True) if self.stage is Stage.CONNECT else []

    def daemon_message(self, data: bytes, descriptors: int) -> list[Action]:
        if self.stage is Stage.GREETING:
            if data != HELLO:
                return self._fail(f"the daemon greets with {data[:16].hex()}, which is not known", daemon=True)
            if self._gone:
                return self._left()
            self.stage = Stage.ANSWER
            return [Tell(CREDENTIALS), Tell(kind_bytes(Kind.CLIENT))]
        if self.stage is Stage.ANSWER:
            if self._gone:
                return self._left()
            if data != DESCRIPTOR or descriptors != 1:
                return self._fail(f"the daemon answered {data[:16].hex()} with {descriptors} descriptors")
            self.stage = Stage.ACKNOWLEDGEMENT
            return [Give(data)]
        return []

    def daemon_closed(self) -> list[Action]:
        if self.stage is Stage.GREETING:
            return self._fail("the daemon closed the connection instead of greeting", daemon=True)
        if self.stage is Stage.ANSWER:
            return self._left() if self._gone else self._fail("the daemon closed the connection instead of answering")
        return []  # with the acknowledgement outstanding the client has all it needs

    # --- the client ---

    def client_message(self, data: bytes) -> list[Action]:
        if self.stage is not Stage.ACKNOWLEDGEMENT:
            return []
        status = acknowledgement_status(data)
        if status:
            why = f"the client was not served: CUDA_ERROR_{error_name(status)}"
            return [Tell(data), *self._fail(why, lost=True, status=status)]
        return [Tell(data), self._passed(acknowledged=True)]

    def client_closed(self) -> list[Action]:
        """Before the daemon has answered the wait goes on: a connection that closes while its client is in the pending
        list leaves a server that hangs (scenario X1); with the descriptor taken and closed it notices."""
        if self.stage is Stage.ACKNOWLEDGEMENT:
            return self._fail("the client closed the connection without acknowledging its descriptor", lost=True)
        if self.stage is Stage.CONNECT:
            return self._left()
        self._gone = True
        return []

    def undeliverable(self) -> list[Action]:
        """The client has gone: its descriptor could not be sent to it, or its credentials not to the daemon."""
        return [] if self.stage is Stage.DONE else self._left()

    # --- ends ---

    def withdraw(self) -> list[Action]:
        """The client is not admitted any more. What the daemon has been told cannot be taken back."""
        if self.stage not in (Stage.LIMITS, Stage.CONNECT, Stage.GREETING):
            return []
        if self._gone:
            return self._left()
        self.stage = Stage.DONE
        return [Withdrawn()]

    def expired(self) -> list[Action]:
        """The stage's deadline has passed."""
        if self.stage is Stage.ACKNOWLEDGEMENT:
            return [self._passed(acknowledged=False)]
        if self.stage is Stage.DONE:
            return []
        if self._gone:
            return self._left()
        return self._fail(f"no {self.stage.value} in time", daemon=self.stage is not Stage.ANSWER)

    def _passed(self, *, acknowledged: bool) -> Passed:
        self.stage = Stage.DONE
        return Passed(self.limits, self.fail_safe, acknowledged)

    def _fail(self, why: str, *, lost: bool = False, daemon: bool = False, status: int | None = None) -> list[Action]:
        stage, self.stage = self.stage, Stage.DONE
        return [Failed(stage, why, lost, daemon, status)]

    def _left(self) -> list[Action]:
        self.stage = Stage.DONE
        return [Left()]
