"""`mpsagent-cli run -- COMMAND`: a program that says why it waits for the GPU, and that ends without hurting others.

The program has a process group of its own, so Ctrl-C, a closed terminal and a container's engine signal us first, and
its clients are ended through MPS before the signal is passed on: in the middle of a kernel it is a fault for all on the
server. A stream of events says when the program waits, or when its turn ends. Its imports are few: each program pays.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from mpsagent.cli import client
from mpsagent.linux.backoff import Backoff

Json = dict[str, Any]

WAITED_TOO_LONG, NOT_FOUND, NOT_EXECUTABLE = 75, 127, 126
"""Exit statuses: EX_TEMPFAIL of sysexits.h, and those that shells use."""
ENDS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
PASSED_ON = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGWINCH, signal.SIGCONT}
OF_TERMINAL = {signal.SIGTTIN, signal.SIGTTOU, signal.SIGTSTP}
TOO_LONG = signal.SIGALRM
TAKEN = ENDS | PASSED_ON | {signal.SIGCHLD, signal.SIGTSTP, TOO_LONG}
SHOWN = 0.3
"""Seconds after which a process that waits is in the queue that the api shows; most have been served by then."""
LOOK = 1.0
"""Seconds between two looks at the queue, while the program waits."""
AGAIN = 10.0
"""Seconds until an api that is away, or that has too many readers, is asked again."""
ENDED_FOR, ENDED_LOOK = 10.0, 0.1
"""Seconds in which MPS ends clients; a signal is passed on after that anyhow."""
LAST_LOOK = 1.0
LAST_LOOKS = 4
"""Seconds in which the api answers why a program that failed was refused, and how often it is asked."""
BUSY = (429, 503)
"""What the agent answers to one order too many at a time: it is given again."""
TOGETHER = 1.0
"""Seconds in which signals are one: a terminal that is closed sends SIGHUP twice, `timeout` SIGTERM."""
FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""The kernel's number of it (PROC_PID_INIT_INO); in another one pids are not those that the agent knows."""


def simple(words: list[str]) -> tuple[float | None, list[str]] | None:
    """How long it may wait, and the command; None: click says what of these words is wrong, or what they mean."""
    most, words = None, list(words)
    if words[:1] == ["--timeout"] and len(words) > 1:
        with suppress(ValueError):
            from mpsagent.mps.units import parse_duration

            most, words = parse_duration(words[1]), words[2:]
    if words[:1] == ["--"]:
        words = words[1:]
    elif words and words[0].startswith("-"):
        return None
    return (most, words) if words else None


def begin(path: str, most: float | None, command: Sequence[str]) -> NoReturn:
    program = Program(path, command)
    told = WaitNotice(path, program.pid, most)
    threading.Thread(target=told.follow, daemon=True).start()
    status = program.wait()
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        told.look_for_refusal()
    program.exit_as_it_does(status)


def say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"mpsagent-cli: {text}\n".encode())


class Program:
    """The program, and what it is told."""

    def __init__(self, path: str, command: Sequence[str]) -> None:
        self._path = path
        self._too_long, self._ending = False, 0
        """The signal by which it is being ended; 0: none."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who ignores it is not told of a child's end
        ignored = {one for one in TAKEN - {TOO_LONG} if signal.getsignal(one) == signal.SIG_IGN}  # by nohup, or `sh &`
        self._taken = TAKEN - ignored
        signal.pthread_sigmask(signal.SIG_BLOCK, self._taken)
        try:
            self.pid = os.posix_spawnp(command[0], list(command), os.environ, setpgroup=0, setsigmask=(), setsigdef=[
                signal.SIGPIPE, signal.SIGXFSZ,  # Python ignores them
            ])  # fmt: skip
        except OSError as error:
            say(f"{command[0]}: {error.strerror}")
            sys.exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)

    def wait(self) -> int:
        """Until it has ended; its wait status."""
        while True:
            number = signal.sigwait(self._taken)
            if number == signal.SIGCHLD:
                if (status := self._children()) is not None:
                    return status
            elif number == signal.SIGTSTP:
                self._send(signal.SIGTSTP)
                self._stand(signal.SIGTSTP)
            elif number in PASSED_ON:
                self._send(number)
            else:
                self._too_long |= number == TOO_LONG
                self._end(signal.SIGTERM if number == TOO_LONG else number)

    def exit_as_it_does(self, status: int) -> NoReturn:
        terminal_goes(self.pid, os.getpgrp())
        if self._too_long:
            sys.exit(WAITED_TOO_LONG)
        if not os.WIFSIGNALED(status):
            sys.exit(os.waitstatus_to_exitcode(status))
        import resource

        number = os.WTERMSIG(status)
        if number == signal.SIGTERM and self._ending:
            number = self._ending  # the agent's SIGTERM came for it; a shell's loop ends at Ctrl-C alone
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core is the program's
        with suppress(OSError):  # SIGKILL has no other action
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
        sys.exit(128 + number)

    def _children(self) -> int | None:
        """As a container's first process it is the parent of all whose own have gone."""
        ended = None
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG | os.WUNTRACED))[0]:
                pid, status = found
                if os.WIFSTOPPED(status):
                    if os.WSTOPSIG(status) in OF_TERMINAL:
                        self._stand(os.WSTOPSIG(status))
                elif pid == self.pid:
                    ended = status
        return ended

    def _stand(self, number: int) -> None:
        """Both are stopped until the shell lets them go on, with all of a job that waits for the terminal or had it.
        One that needs the terminal gets it where it is ours, and Ctrl-C goes to it alone from then on."""
        needs = number != signal.SIGTSTP
        if not (needs and terminal_goes(os.getpgrp(), self.pid)):
            needs |= terminal_goes(self.pid, os.getpgrp())
            (os.killpg if needs else os.kill)(os.getpgrp() if needs else os.getpid(), signal.SIGSTOP)
            if needs:
                terminal_goes(os.getpgrp(), self.pid)
        signal.sigtimedwait({signal.SIGCONT}, 0)  # passed on here, and not once more behind a Ctrl-Z that comes now
        self._send(signal.SIGCONT)

    def _end(self, number: int) -> None:
        """A second signal is passed on at once."""
        numbers = {number}
        if not self._ending:
            self._ending = number
            numbers |= self._end_clients()
        for one in numbers:
            self._send(one)

    def _end_clients(self) -> set[int]:
        """Returns the signals that came meanwhile. The order is given until it finds none: there may be new ones."""
        begun, came = time.monotonic(), set[int]()
        while (gone := time.monotonic() - begun) < ENDED_FOR:
            try:
                body = {"below": True, "now": True}
                if not client.order(self._path, "terminate-each", body, ENDED_FOR - gone)[0]["ending"]:
                    break
            except (client.Unreachable, client.RequestRefused, KeyError) as error:
                if not isinstance(error, client.RequestRefused) or error.status not in BUSY:
                    say(f"its clients are not ended through MPS: {safe(error, 200)}")
                    break
            if (another := signal.sigtimedwait(ENDS & self._taken, ENDED_LOOK)) is not None:
                came.add(another.si_signo)
                if gone > TOGETHER:
                    break
        return came

    def _send(self, number: int) -> None:
        with suppress(OSError):  # it has gone, or sudo has made it another's
            os.killpg(self.pid, number)


def safe(value: object, most: int) -> str:
    from mpsagent.cli import wording

    return wording.safe(value, most)


def terminal_goes(giver: int, taker: int) -> bool:
    """From one process group to another, if the first has it."""
    with suppress(OSError), open("/dev/tty", "rb", 0) as terminal:
        if os.tcgetpgrp(terminal.fileno()) == giver:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
            os.tcsetpgrp(terminal.fileno(), taker)
            return True
    return False


class WaitNotice:
    """What is said of it while it runs. ``most``: seconds for which it may wait."""

    def __init__(self, path: str, pid: int, most: float | None) -> None:
        self._path, self._pid, self._most = path, pid, most
        self._said = ""
        self._since: float | None = None
        self._begun, self._refusals = time.time(), set[int]()
        """Since when refusals are about it, and the cursors of those that were shown."""
        self._all_mine = os.stat("/proc/self/ns/pid").st_ino != FIRST_PID_NAMESPACE  # noqa: PTH116

    def follow(self) -> None:
        """For ever. What happened while the api was away is over."""
        again = Backoff(AGAIN, AGAIN)
        while True:
            try:
                cursor = client.ask(self._path, "/v1/events?limit=1")[0]["cursor"]
                self._wait()  # also where there is no place for one more stream
                for line in client.lines(self._path, f"/v1/events?follow=1&limit=1000&cursor={cursor}"):
                    event = json.loads(line)
                    mine = event.get("uid") == os.getuid()
                    if "heartbeat" in event or (mine and event.get("kind") == "client.waiting"):
                        self._wait()
                    elif mine and event.get("kind") == "client.refused":
                        self._refused(event)
                    elif mine and event.get("kind") == "turn.warning":
                        say(safe(event.get("sentence") or event["kind"], 400))
            except client.Unreachable as gone:
                self._say(f"{safe(gone, 200)}; the program runs all the same")
            except (client.RequestRefused, ValueError, KeyError):
                pass
            time.sleep(again.pause())

    def look_for_refusal(self) -> None:
        """Show why processes of a program that failed were refused: it may have failed before the stream shows it."""
        begun = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self._begun))
        with suppress(client.Unreachable, client.RequestRefused, ValueError, KeyError):
            for _ in range(LAST_LOOKS):
                events = client.ask(self._path, "/v1/events?limit=200", LAST_LOOK)[0]["events"]
                mine = [one for one in events if one.get("uid") == os.getuid() and one["at"] >= begun and "pid" in one]
                for one in mine:
                    if one["kind"] == "client.refused":
                        self._refused(one)
                clients = [(one["pid"], one["kind"]) for one in mine if one["kind"].startswith("client.")]
                if clients and all(kind != "client.waiting" for kind in dict(clients).values()):
                    return  # of each process the last event counts: none is still between the gate and MPS
                time.sleep(ENDED_LOOK)

    def _refused(self, event: Json) -> None:
        if event["cursor"] not in self._refusals:
            self._refusals.add(event["cursor"])
            say(safe(event["sentence"], 400))

    def _wait(self) -> None:
        """Until none of its processes waits."""
        time.sleep(SHOWN)
        while (mine := self._mine()) is not None or not self._is_served():
            if mine is not None:
                self._since = time.monotonic() if self._since is None else self._since
                self._say(place(mine[0], mine[1]))
                if self._most is not None and time.monotonic() - self._since >= self._most:
                    say("it has waited too long (--timeout), and is ended")
                    os.kill(os.getpid(), TOO_LONG)
                    return
            time.sleep(LOOK)
        if self._since is not None:
            self._since = None
            self._say("it has the GPU")

    def _is_served(self) -> bool:
        """That it waits no more, if it did: while the gate is away it is not known who waits."""
        if self._since is None:
            return True
        known = bool(client.ask(self._path, "/v1/status")[0]["gate"]["synced"])
        return known and self._mine() is None

    def _mine(self) -> tuple[Json, int] | None:
        """This user's row, and how many wait, if a process of the program is among them."""
        queue = client.ask(self._path, "/v1/queue")[0]["queue"]
        row = next((one for one in queue if one["uid"] == os.getuid() and one["clients"]), None)
        if row is None or not (self._all_mine or any(map(self._is_below, row["clients"]))):
            return None
        return row, sum(one.get("instance") == row.get("instance") for one in queue)

    def _is_below(self, pid: int) -> bool:
        """Whether a process descends from the program."""
        for _ in range(64):
            if pid in (self._pid, 0, 1):
                break
            try:
                with open(f"/proc/{pid}/stat", "rb") as file:
                    pid = int(file.read(4096).rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                return False
        return pid == self._pid

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            say(text)


def place(mine: Json, of: int) -> str:
    from mpsagent.cli.ask import now
    from mpsagent.cli.wording import local

    latest = "" if mine.get("until") is None else f", until {local(mine['until'], now())} at the latest"
    latest += "" if mine["turn"] is None else f"; its turn comes at {local(mine['turn'], now())} at the latest"
    return f"it waits for the GPU, number {mine['position']} of {of}: {safe(mine['why'], 600)}{latest}"
