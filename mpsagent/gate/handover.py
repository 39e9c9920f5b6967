"""One hand-over: limits, daemon, client, acknowledgement. Events in, actions out; no I/O, no clock.

Both the defaults and the servers' limits are set each time: whichever way MPS takes, a server that starts or one that
runs, the limits are right (recording 08, G8). Strictly one hand-over at a time for a daemon, until the client has
acknowledged its descriptor: 60 of 60 exact that way. Between the daemon's answer and the end of the client's handshake
with its server MPS answers nothing (measured on an H100, answer 1), so nothing is gained by going on sooner; and for a
client that goes away before that end the gate says the rest, so that its server does not wait for ever (see rescue).

An acknowledgement proves nothing (recording 12, H2): the server is asked a question after it, which it answers within
3 ms when it has met its client, also while 40 others start, and never before (false-acknowledgement.txt of
docs/measured/2026-11-23-2xH200-580.159.04).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mpsagent.gate import limits as texts
from mpsagent.mps.limits import Limits
from mpsagent.mps.rendezvous import ACKNOWLEDGED, DESCRIPTOR, HELLO, acknowledgement_status

MOST_SESSIONS = 7
"""Sessions for one set of limits, while servers change under our hands. With four of them, 0.12 s in all, 1 of 1,000
clients on an H100 got the fail-safe limits because its user's server was ending just then."""
DYING = 0.02
"""Seconds before a server that does not answer as it should is asked again; doubled each time, 1.2 s in all."""


class Stage(StrEnum):
    """Where a hand-over is; the words that the link uses."""

    LIMITS = "limits"
    CONNECT = "connect"
    GREETING = "greeting"
    ANSWER = "answer"
    ACKNOWLEDGEMENT = "acknowledgement"
    MEETING = "meeting"
    """The client says that it has met its server; the server is asked."""
    RESCUE = "rescue"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that each stage may take. ``answer`` is long: a server starts, or another user's has to leave first.
    ``acknowledgement`` is short, because MPS answers no one until then: a client meets its server in milliseconds (1.4,
    the whole hand-over on an H100), one that is stopped is resumed by the agent within a second, and who takes longer
    than that on any machine does not mean to. Then the gate takes its place. The agent leaves it so much time
    (``core.hangs.HANDOVER``) before it kills a server because MPS is silent."""

    limits: float = 15.0
    connect: float = 5.0
    greeting: float = 15.0
    answer: float = 90.0
    acknowledgement: float = 5.0
    meeting: float = 5.0

    def of(self, stage: Stage) -> float | None:
        """None: no deadline, or one of its own."""
        if stage in (Stage.LIMITS, Stage.RESCUE, Stage.DONE):
            return None
        return float(getattr(self, stage.value))


@dataclass(frozen=True, slots=True)
class Plan:
    """What this client gets. ``servers``: those that ran when last asked, to save a session. ``priority``: the daemon
    is told of the client priority as well."""

    limits: Limits
    fail_safe: Limits
    set_limits: bool = True
    devices: tuple[int, ...] = ()
    servers: tuple[int, ...] = ()
    priority: bool = False


# --- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunSession:
    """Run a front-end session with these commands, after so many seconds; :meth:`HandOver.session` takes what came of
    it."""

    commands: tuple[str, ...]
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect to the daemon's control socket."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the daemon that this client wants a server."""


@dataclass(frozen=True, slots=True)
class Give:
    """Send this to the client with the daemon's descriptor. A copy of that is kept until the end."""

    data: bytes


@dataclass(frozen=True, slots=True)
class StartRescue:
    """Finish the client's handshake with its server over the copy; :meth:`HandOver.rescued` hears of it. ``untouched``:
    the client never had the descriptor. ``acknowledged``: it says that it has met its server."""

    untouched: bool
    acknowledged: bool = False


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Send this to the daemon as the client's last word."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Abandon:
    """No client waits for the daemon's answer here any more; hanging up would leave a server that waits for ever."""


@dataclass(frozen=True, slots=True)
class LimitsDoubted:
    """These limits are not confirmed; the fail-safe ones follow."""

    wanted: Limits
    why: str


@dataclass(frozen=True, slots=True)
class ClientPassed:
    """Over: the client has met its server. ``status``: what it says of that, 0 or a CUDA error (807 in FAULT), which
    proves nothing."""

    limits: Limits
    fail_safe: bool
    status: int = 0


@dataclass(frozen=True, slots=True)
class ClientFailed:
    """Over: not handed over. ``lost``: the client had its descriptor, and its handshake was finished for it.
    ``daemon``: the fault concerns every client, not this one. ``unconfirmed``: the daemon answers, and its limits are
    not those that were set. ``fault``: a server is in FAULT; a client that went there now would be lost. ``never``:
    this driver cannot give what the policy asks for, so it is no use to wait."""

    stage: Stage
    why: str
    lost: bool = False
    daemon: bool = False
    unconfirmed: bool = False
    never: bool = False
    fault: bool = False


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Over: the client left before it had anything."""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Over: it is not admitted any more, and the daemon has not been told of it."""


Outcome = ClientPassed | ClientFailed | ClientGone | Withdrawn
Action = RunSession | Connect | Announce | Give | StartRescue | Acknowledge | Abandon | LimitsDoubted | Outcome


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
        self._given = False
        self._status: int | None = None
        """What the client has acknowledged with."""
        self._why = "the client went away before it had met its server"

    def start(self) -> list[Action]:
        if not self.plan.set_limits:
            self.stage = Stage.CONNECT
            return [Connect()]
        return [self._session()]

    def resume(self, *, fail_safe: bool) -> list[Action]:
        """Goes on where an earlier gate was cut: the daemon has been told, its answer is outstanding or unread."""
        self.stage = Stage.ANSWER
        self.fail_safe = fail_safe
        return []

    def resume_given(self, *, fail_safe: bool) -> list[Action]:
        """The same, and the client had its descriptor already."""
        self.stage = Stage.ACKNOWLEDGEMENT
        self.fail_safe = fail_safe
        self._given = True
        return []

    def _session(self, pause: float = 0.0) -> Action:
        self._sessions += 1
        return RunSession(
            tuple(texts.commands(self.limits, self.plan.devices, self.servers, priority=self.plan.priority)), pause
        )

    # --- the limits' sessions ---

    def session(self, answers: Sequence[str] | None, why: str = "") -> list[Action]:
        """A session is over; ``answers`` None: it did not come about, and ``why``."""
        if self.stage is Stage.MEETING:
            return self._met(answers)
        if self.stage is not Stage.LIMITS:
            return []
        if answers is None:
            return self._left() if self._gone else self._fail(why, daemon=True)
        verdict = texts.judge(self.limits, self.plan.devices, self.servers, answers, priority=self.plan.priority)
        self.servers = verdict.servers
        if self._gone:
            return self._left()
        if verdict.fault:
            return self._fail(verdict.why or "", fault=True)
        if verdict.again and self._sessions < MOST_SESSIONS:
            # a server that was killed is named by the daemon for some 20 ms more (recording 02, R6)
            new = verdict.why is None and self._sessions == 1  # the first session tells who serves
            return [self._session(0.0 if new else DYING * 2 ** (self._sessions - 1))]
        if verdict.why is None and not verdict.again:
            self.stage = Stage.CONNECT
            return [Connect()]
        doubt = verdict.why or "the servers changed each time they were asked for"
        if self.fail_safe:
            why = f"neither the user's limits nor the fallback limits are confirmed: {doubt}"
            return self._fail(why, unconfirmed=not verdict.never, never=verdict.never)
        actions: list[Action] = [LimitsDoubted(self.limits, doubt)]
        self.limits = self.plan.fail_safe
        self.fail_safe = True
        self._sessions = 0
        return [*actions, self._session()]

    # --- the daemon ---

    def connected(self) -> list[Action]:
        if self.stage is Stage.CONNECT:
            self.stage = Stage.GREETING
        return []

    def daemon_message(self, data: bytes, descriptors: int) -> list[Action]:
        if self.stage is Stage.GREETING:
            if data != HELLO:
                return self._fail(f"the daemon greets with {data[:16].hex()}, which is not known", daemon=True)
            if self._gone:
                return self._left()
            self.stage = Stage.ANSWER
            return [Announce()]
        if self.stage is Stage.ANSWER:
            if data != DESCRIPTOR or descriptors != 1:
                why = f"the daemon answered {data[:16].hex()} with {descriptors} descriptors"
                return self._left() if self._gone else self._fail(why)
            if self._gone:
                return self._rescue()
            self.stage = Stage.ACKNOWLEDGEMENT
            self._given = True
            return [Give(data)]
        return []

    def unreachable(self, why: str) -> list[Action]:
        """The daemon's socket cannot be connected to, or the daemon not be told of the client."""
        return self._fail(why, daemon=True) if self.stage in (Stage.CONNECT, Stage.ANSWER) else []

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
        self._status = acknowledgement_status(data)
        self._why = "the client says that it has met its server, and has not; MPS answered no one meanwhile"
        self.stage = Stage.MEETING
        self._sessions = 0
        return [Acknowledge(data), self._question()]

    def _met(self, answers: Sequence[str] | None) -> list[Action]:
        """No answers: the daemon has ended, and its servers with it, or speaks with another front-end only."""
        asked = self.servers
        if asked and answers is not None and not any("not found" in answer for answer in answers):
            return self._passed()
        self.servers = () if answers is None else texts.servers_in(answers)
        if answers is None or not (asked or self.servers) or self._sessions >= MOST_SESSIONS:
            return self._passed()
        return [self._question()]

    def _question(self) -> Action:
        self._sessions += 1
        return RunSession(tuple(texts.question(self.servers)))

    def _passed(self) -> list[Action]:
        self.stage = Stage.DONE
        return [ClientPassed(self.limits, self.fail_safe, self._status or 0)]

    def client_closed(self) -> list[Action]:
        """Once the daemon has been told, the wait for its answer goes on: a client that leaves while it is in the
        pending list, or before it has met its server, leaves a server that waits for ever (X1 and X15)."""
        if self.stage is Stage.ACKNOWLEDGEMENT:
            return self._rescue()
        if self.stage is Stage.CONNECT:
            return self._left()
        self._gone = True
        return []

    def client_ended(self) -> None:
        """Its process: it meets no server any more."""
        self._why = "the client says that it has met its server, and has ended without; MPS answered no one meanwhile"

    def undeliverable(self) -> list[Action]:
        """The client has gone: its descriptor could not be sent to it."""
        if self.stage is not Stage.ACKNOWLEDGEMENT:
            return []
        self._given = False
        return self._rescue()

    def _rescue(self) -> list[Action]:
        self.stage = Stage.RESCUE
        return [StartRescue(untouched=not self._given, acknowledged=self._status is not None)]

    def rescued(self, why: str | None) -> list[Action]:
        """The server has been answered in the client's place; or ``why`` that is not certain."""
        if self.stage is not Stage.RESCUE:
            return []
        if why is not None and self._status is not None:  # its server is silent for another reason
            return self._passed()
        self.stage = Stage.ACKNOWLEDGEMENT
        if why is None and not self._given:
            return [Acknowledge(ACKNOWLEDGED), *self._left()]
        what = self._why if why is None else f"{self._why}, and {why}"
        return [Acknowledge(ACKNOWLEDGED), *self._fail(what, lost=True)]

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
            self._why = "the client has not met its server in time, and MPS answered no one meanwhile"
            return self._rescue()
        if self.stage is Stage.MEETING:
            return self._rescue()
        if self.stage in (Stage.RESCUE, Stage.DONE):
            return []
        abandon: list[Action] = [Abandon()] if self.stage is Stage.ANSWER else []
        if self._gone:
            return [*abandon, *self._left()]
        return [*abandon, *self._fail(f"no {self.stage.value} in time", daemon=self.stage is not Stage.ANSWER)]

    def _fail(self, why: str, **kind: bool) -> list[Action]:
        stage, self.stage = self.stage, Stage.DONE
        return [ClientFailed(stage, why, **kind)]

    def _left(self) -> list[Action]:
        self.stage = Stage.DONE
        return [ClientGone()]
