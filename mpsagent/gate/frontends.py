"""Front-ends at the public sockets. Each command is a session of its own at the daemon, so that one that is left open
holds up no other; what changes something is allowed to root (and to the gate's own user) only, and reported. The
commands of every other user are paced (``pacing``)."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mpsagent.gate.connection import Connection
from mpsagent.gate.lane import Lane, Request
from mpsagent.gate.pacing import PacedLine, answers_cost, command_cost
from mpsagent.linux import proc
from mpsagent.linux.channel import Channel
from mpsagent.linux.peers import Credentials
from mpsagent.mps.rendezvous import LONGEST_MESSAGE, answer_message, clean_command, exit_message, length_of
from mpsagent.mps.session import FrontEndSession

MOST_OF_A_USER = 16
"""Front-ends of one user at a time. The daemon itself takes one in all."""
MOST = 256
MOST_UNREAD = 512
"""Answers that one front-end may leave unread, beyond what its socket holds."""
LINGER = 1.0
PATIENCE = 120.0
"""Seconds for one command at the daemon: ``terminate_client`` may take half a minute."""
QUEUED = 30.0
"""Seconds in which its turn has to come; what its user's pace has cost before is not counted. It waits
behind other front-ends, and behind a client that is stopped in the middle of its hand-over until the agent resumes or
kills it."""

ROOT_OF_CONTAINERS = -1
"""Whose front-ends those of root in containers are: not those of the host's root, who is not to wait for them."""

QUESTIONS = frozenset({"ps", "device_query", "lspart", "help", "version"})
"""Commands that change nothing, beside ``get_...``."""
_ASKS = re.compile(r"get_[a-z_]+", re.ASCII)
_COMMAND = re.compile(r"(set|start|shutdown|terminate|snapshot|mkpart|rmpart|quit|nvidia)[a-z_]*", re.ASCII)
"""What is, or may be, a command of some driver that changes something."""


def word_of(command: str) -> str:
    """The command itself. NVIDIA's daemons skip blanks before and between words (tests/nvidia/test_gate.py)."""
    return next(iter(command.split()), "")


def changes(command: str) -> bool:
    """Whether a command may change something: everything that is not a question."""
    word = word_of(command)
    return not (word in QUESTIONS or _ASKS.fullmatch(word))


def forbidden(command: str, uid: int, *, contained: bool = False) -> str | None:
    """The refusal for this user, in MPS's own words; None when the command may be passed on. Users may ask and nothing
    else: the daemons of 470 and 535 would let them set the limits. So may who is root in a container."""
    if not changes(command) or (uid in (0, os.geteuid()) and not contained):
        return None
    word = word_of(command)
    if contained:
        return f'mpsagent: "{word}" changes MPS for the whole machine; root in a container may not, ask on the host'
    if word == "quit":
        return "Not enough privilege to execute quit command"
    if not _COMMAND.fullmatch(word):
        return f'Unknown command "{word}"'
    return (
        f"Insufficient privileges for UID {uid}. Control deamon settings can only be modified by the user started it "
        "or by the root user."
    )


@dataclass(eq=False, repr=False)
class FrontEnds:
    """``lane_of`` is asked which lane a front-end talks to; ``report`` hears of each command that changes
    something: lane, peer, command, when, whether it was refused."""

    loop: asyncio.AbstractEventLoop
    lane_of: Callable[[Connection], Lane]
    report: Callable[[Lane, Credentials, str, float, bool], None]
    leaving: dict[Farewell, None] = field(default_factory=dict, init=False)
    _open: dict[int, dict[FrontEnd, None]] = field(default_factory=dict, init=False)
    _line: PacedLine[FrontEnd] = field(default_factory=PacedLine, init=False)
    _timer: asyncio.TimerHandle | None = field(default=None, init=False)

    def add(self, connection: Connection) -> None:
        """A peer that has said it is a front-end; the connection is ours now. When all places are taken, who has most
        gives up its oldest, if those are at least two more: one user may come with many uids (subordinate ids)."""
        uid = connection.peer.uid
        contained = proc.contained(connection.peer.pid, connection.start)
        user = ROOT_OF_CONTAINERS if contained and uid in (0, os.geteuid()) else uid
        if len(self._open.get(user, ())) >= MOST_OF_A_USER:
            for one in self._line.of(user):
                one.drop_if_gone()
        mine = len(self._open.get(user, ()))
        others = sum(map(len, self._open.values()))
        if others >= MOST and mine < MOST_OF_A_USER and user not in (0, os.geteuid()):
            users = (theirs for other, theirs in self._open.items() if other not in (0, os.geteuid()))
            most = max(users, key=len, default={})
            if len(most) > mine + 1:
                next(iter(most)).give_way()
                others -= 1
        if mine >= MOST_OF_A_USER or (others >= MOST and user not in (0, os.geteuid())):
            Farewell(self, connection.sock, 1, f"mpsagent: user {uid} has {mine} front-ends open, all users {others}")
            return
        one = FrontEnd(self, connection, user, contained=contained)
        self._open.setdefault(user, {})[one] = None

    def gone(self, front_end: FrontEnd) -> None:
        user = front_end.user
        self._line.leave(user, front_end)
        mine = self._open.get(user, {})
        mine.pop(front_end, None)
        if not mine:
            self._open.pop(user, None)

    def wait(self, front_end: FrontEnd) -> None:
        """Its command goes on when its user may."""
        self._line.enter(front_end.user, front_end)
        self._go_on()

    def charge(self, user: int, size: int) -> None:
        self._line.charge(user, size, self.loop.time())

    def _go_on(self) -> None:
        while (one := self._line.next(self.loop.time())) is not None:
            if not one.drop_if_gone():
                one.go_on()
        if self._timer is not None:
            self._timer.cancel()
        when = self._line.when()
        self._timer = None if when is None else self.loop.call_at(when, self._go_on)


class Farewell:
    """Says why not, or nothing more, and the exit status; then waits for the front-end to hang up. Closed at once, what
    it has sent and is not read would reset the connection, and the answers be lost to it."""

    def __init__(self, owner: FrontEnds, sock: socket.socket, status: int, why: str = "") -> None:
        self._leaving = owner.leaving
        self._channel = Channel(owner.loop, sock, lambda *_: None, self._close, longest=LONGEST_MESSAGE, users=True)
        if why:
            self._channel.send(answer_message(why))
        self._channel.send(exit_message(status))
        self._timer = owner.loop.call_later(LINGER, self._close)
        self._leaving[self] = None
        if len(self._leaving) > MOST:
            next(iter(self._leaving))._close()

    def _close(self) -> None:
        self._leaving.pop(self, None)
        self._timer.cancel()
        self._channel.close()


class FrontEnd:
    """One front-end. While a command of it runs nothing more is read, so it holds one place in the lane's queue."""

    def __init__(self, owner: FrontEnds, connection: Connection, user: int, *, contained: bool) -> None:
        self.user = user
        self._owner = owner
        self._peer = connection.peer
        self._contained = contained
        self._paced = user not in (0, os.geteuid())
        self._lane = owner.lane_of(connection)
        self._length: int | None = None
        self._request: Request | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._ended = False
        self._channel = Channel(
            owner.loop, connection.sock, self._receive, self._closed, longest=4200, most_waiting=MOST_UNREAD, users=True
        )

    def _closed(self) -> None:
        if not self._ended:
            self._ended = True
            if self._limit is not None:
                self._limit.cancel()
            if self._request is not None:
                self._lane.withdraw(self._request)
            self._owner.gone(self)

    def give_way(self) -> None:
        self._channel.send(answer_message("mpsagent: all places for front-ends are taken, and another user has come"))
        self._end(1)

    def _end(self, status: int) -> None:
        self._closed()
        Farewell(self._owner, self._channel.detach(), status)

    def _receive(self, data: bytes, _who: Credentials | None, _descriptors: list[int]) -> None:
        try:
            self._hear(data)
        except Exception:  # a front-end that finds a fault of ours ends its own connection, and nothing else
            self._end(1)

    def _hear(self, data: bytes) -> None:
        if self._length is None:
            self._length = length_of(data)
            if not self._length:  # its end, or what NVIDIA's daemon takes for one
                self._end(0)
            return
        length, self._length = self._length, None
        if length != len(data):
            self._end(0)
            return
        command = clean_command(data)
        if command is None:
            self._channel.send(answer_message("mpsagent: this is not a command; it was not passed on"))
            return
        # what is judged must be what is sent: one blank between words, none around them
        command = " ".join(command.split())
        if command:
            self._run(command)

    def _run(self, command: str) -> None:
        refusal = forbidden(command, self._peer.uid, contained=self._contained)
        if changes(command) and (refusal is not None or self._peer.uid == 0):
            self._owner.report(self._lane, self._peer, command, time.monotonic(), refusal is not None)
        if refusal is not None:
            self._channel.send(answer_message(refusal))
            return
        sets = word_of(command).startswith("set_")
        self._request = Request(self._peer, command, sets, PATIENCE, self._answered)
        self._channel.pause()
        if self._paced:
            self._owner.wait(self)
        else:
            self.go_on()

    def drop_if_gone(self) -> bool:
        """While it waits nothing is read, and nothing said that it has hung up."""
        if self._channel.hung_up():
            self._closed()
            self._channel.close()
        return self._ended

    def go_on(self) -> None:
        """Its command waits for the daemon from now on."""
        try:
            self._ask()
        except Exception:  # a fault of ours ends this front-end, and not the line of the others
            self._end(1)

    def _ask(self) -> None:
        assert self._request is not None
        if self._paced:
            self._owner.charge(self.user, command_cost(self._request.command))
        self._limit = self._owner.loop.call_later(QUEUED, self._too_late, self._request)
        self._lane.request(self._request)

    def _too_late(self, request: Request) -> None:
        if request.run is not None:
            return  # its turn has come, and it waits for its answer
        handing = self._lane.handing
        why = "a client is handed over, and MPS answers nothing meanwhile" if handing else "the control daemon is busy"
        self._channel.send(answer_message(f"mpsagent: {why}; this command has waited for {QUEUED:g} s"))
        self._end(1)

    def _answered(self, session: FrontEndSession | None, why: str) -> None:
        self._request = None
        if self._limit is not None:
            self._limit.cancel()
        if self._paced and session is not None:
            self._owner.charge(self.user, answers_cost(session.answers))
        if self._ended:
            return
        if session is None:
            self._channel.send(answer_message(f"mpsagent: {why}"))
            self._end(1)
            return
        for text in session.answers:
            self._channel.send(answer_message(text))
        if session.status is None or (session.status and word_of(session.commands[0]) == "quit"):
            # the daemon has ended, as after `quit`
            self._end(session.status or 0)
            return
        self._channel.resume()
