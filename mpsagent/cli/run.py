"""`mpsagent-cli run -- COMMAND`: a program that says why it waits for the GPU, and that ends without hurting others.

The program is in a process group of its own, so Ctrl-C, a closed terminal and a batch system's signal come here first.
A signal in the middle of a kernel is a fault for all on the server: the program's clients are ended through MPS before
it is passed on. Nothing is asked while the program works: a stream of events says when it waits, or when its turn ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import click

from mpsagent.cli import client
from mpsagent.cli.ask import Json, now, span
from mpsagent.cli.wording import local, safe

WAITED_TOO_LONG, NOT_FOUND, NOT_EXECUTABLE = 75, 127, 126
"""Exit statuses: EX_TEMPFAIL of sysexits.h, and those that shells use."""
ENDS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
PASSED_ON = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGWINCH, signal.SIGCONT}
TOO_LONG = signal.SIGALRM
TAKEN = ENDS | PASSED_ON | {signal.SIGCHLD, signal.SIGTSTP, TOO_LONG}
SHOWN = 0.3
"""Seconds after which a process that waits is in the queue that the api shows; most have been served by then."""
LOOK = 1.0
"""Seconds between two looks at the queue, while the program waits."""
AGAIN = 10.0
"""Seconds until an api that is away, or that has too many readers, is asked again."""
ENDED_FOR, ENDED_LOOK = 10.0, 0.05
"""Seconds in which MPS ends clients; a signal is passed on after that anyhow."""
FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""The kernel's number of it (PROC_PID_INIT_INO); in another one pids are not those that the agent knows."""


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--wait-at-most", "most", metavar="SPAN", callback=span,
              help='End it if it waits for the GPU longer ("10m"); the exit status is 75 then.')  # fmt: skip
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def run(path: str, most: float | None, command: tuple[str, ...]) -> None:
    """Start a program that says why it waits, and ends well.

    On standard error: why it waits for the GPU, its place, until when at the latest, and when its turn is to end.
    At SIGTERM, SIGINT and SIGHUP its clients are ended through MPS before the signal is passed on.
    The exit status is the program's.
    """
    program = Program(path, command)
    threading.Thread(target=Told(path, program.pid, most).follow, daemon=True).start()
    program.exit_as_it_does(program.wait())


def say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"mpsagent-cli: {text}\n".encode())


class Program:
    """The program, and what it is told."""

    def __init__(self, path: str, command: tuple[str, ...]) -> None:
        self._path = path
        self._ending = self._too_long = False
        signal.pthread_sigmask(signal.SIG_BLOCK, TAKEN)
        try:
            self.pid = os.posix_spawnp(command[0], command, os.environ, setpgroup=0, setsigmask=(), setsigdef=[
                signal.SIGPIPE,  # Python ignores it
            ])  # fmt: skip
        except OSError as error:
            say(f"{command[0]}: {error.strerror}")
            sys.exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)

    def wait(self) -> int:
        """Until it has ended; its wait status."""
        while True:
            number = signal.sigwait(TAKEN)
            if number == signal.SIGCHLD:
                if (status := self._children()) is not None:
                    return status
            elif number == signal.SIGTSTP:
                self._send(signal.SIGTSTP)
                os.kill(os.getpid(), signal.SIGSTOP)
                self._send(signal.SIGCONT)
            elif number in PASSED_ON:
                self._send(number)
            else:
                self._too_long |= number == TOO_LONG
                self._end(signal.SIGTERM if number == TOO_LONG else number)

    def exit_as_it_does(self, status: int) -> None:
        if self._too_long:
            sys.exit(WAITED_TOO_LONG)
        if not os.WIFSIGNALED(status):
            sys.exit(os.waitstatus_to_exitcode(status))
        import resource

        number = os.WTERMSIG(status)
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
                    if os.WSTOPSIG(status) in (signal.SIGTTIN, signal.SIGTTOU):
                        self._give_terminal()
                elif pid == self.pid:
                    ended = status
        return ended

    def _give_terminal(self) -> None:
        """It reads the terminal, so it gets it, and Ctrl-C goes to it alone from now on."""
        with suppress(OSError), open("/dev/tty", "rb", 0) as terminal:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
            if os.tcgetpgrp(terminal.fileno()) == os.getpgrp():
                os.tcsetpgrp(terminal.fileno(), self.pid)
        self._send(signal.SIGCONT)

    def _end(self, number: int) -> None:
        """A second signal is passed on at once."""
        if not self._ending:
            self._ending = True
            self._end_clients()
        self._send(number)

    def _end_clients(self) -> None:
        try:
            answer, _ = client.order(self._path, "terminate-each", {"below": True, "now": True}, ENDED_FOR)
            there = {one["pid"] for one in answer["ending"]}
            latest = time.monotonic() + ENDED_FOR
            while there and time.monotonic() < latest and not signal.sigpending() & ENDS:
                time.sleep(ENDED_LOOK)
                rows = client.ask(self._path, "/v1/clients")[0]["clients"]
                there &= {one["pid"] for one in rows if one["server"] is not None and one["detached"] is None}
        except (client.Unreachable, client.Refused, KeyError) as error:
            say(f"its clients are not ended through MPS: {safe(error, 200)}")

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class Told:
    """What is said of it while it runs. ``most``: seconds for which it may wait."""

    def __init__(self, path: str, pid: int, most: float | None) -> None:
        self._path, self._pid, self._most = path, pid, most
        self._said = ""
        self._all_mine = Path("/proc/self/ns/pid").stat().st_ino != FIRST_PID_NAMESPACE

    def follow(self) -> None:
        """For ever. What happened while the api was away is over."""
        while True:
            try:
                cursor = client.ask(self._path, "/v1/events?limit=1")[0]["cursor"]
                for line in client.lines(self._path, f"/v1/events?follow=1&limit=1000&cursor={cursor}"):
                    event = json.loads(line)
                    mine = event.get("uid") == os.getuid()
                    if "heartbeat" in event or (mine and event.get("kind") == "client.waiting"):
                        self._wait()
                    elif mine and event.get("kind") == "turn.warning":
                        say(safe(event.get("sentence") or event["kind"], 400))
            except client.Unreachable as gone:
                self._say(f"{safe(gone, 200)}; the program runs all the same")
            except (client.Refused, ValueError, KeyError):
                pass
            time.sleep(AGAIN)

    def _wait(self) -> None:
        """Until none of its processes waits."""
        since, waited = time.monotonic(), False
        time.sleep(SHOWN)
        while (mine := self._mine()) is not None:
            waited = True
            self._say(place(mine[0], mine[1]))
            if self._most is not None and time.monotonic() - since >= self._most:
                say("it has waited too long (--wait-at-most), and is ended")
                os.kill(os.getpid(), TOO_LONG)
                return
            time.sleep(LOOK)
        if waited:
            self._say("it has the GPU")

    def _mine(self) -> tuple[Json, int] | None:
        """This user's row, and how many wait, if a process of the program is among them."""
        queue = client.ask(self._path, "/v1/queue")[0]["queue"]
        row = next((one for one in queue if one["uid"] == os.getuid() and one["clients"]), None)
        if row is None or not (self._all_mine or any(map(self._is_below, row["clients"]))):
            return None
        return row, len(queue)

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
    latest = "" if mine["turn"] is None else f"; its turn comes at {local(mine['turn'], now())} at the latest"
    return f"it waits for the GPU, number {mine['position']} of {of}: {safe(mine['why'], 300)}{latest}"
