"""What is to be done when the agent dies: the daemon's defaults go back to the floor.

While a user waits the defaults are that user's. An agent that is killed then would leave them so, and the next user's
server would start with them (found by killing the agent under load: one client in fifteen got more than its policy). So
a small helper holds the commands; when the agent's end of the pipe closes, whatever the reason, it runs the front-end
with them. A change of user takes 55 ms or more (recording 04, T1), the helper about 10 ms.
"""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

END = b"\n\0\n"
"""Behind each set of commands; the last complete one counts."""
LONGEST = 16 << 10
DEADLINE = 10
"""Seconds for all; the daemon may be blocked."""
AGAIN, TRIES = 0.003, 9
"""Seconds until a front-end that printed nothing is run again, doubling; runs at most, 1.5 s in all. The dead agent's
own last run may still be connected: the daemon listens to one at a time (conformance scenarios X25 and X27)."""
FAREWELL = 0.5
UNHEARD = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGABRT, signal.SIGQUIT]
"""Signals that end a service are sent to all of it (SIGABRT by the watchdog). The helper, and the front-end after it,
never hear them."""


class LastWill:
    """The helper of one agent. Nothing here blocks (but :meth:`close`, shortly) or raises."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self._pid = 0
        self._pipe = -1
        self._said = b""

    def write(self, program: str, commands: Sequence[str]) -> bool:
        """``program`` (a path) is to be run with ``commands``; without commands nothing is. False when nobody is there
        to do it."""
        text = "\n".join([program, *commands]).encode() + END
        if self._alive() and text == self._said:
            return True
        if len(text) > LONGEST:
            return False
        for _ in range(2):
            with suppress(OSError):
                if not self._alive():
                    self._start()
                if os.write(self._pipe, text) == len(text):
                    self._said = text
                    return True
            self._drop()
        return False

    def close(self) -> None:
        """Let it be done now: the agent stops."""
        pid = self._pid
        self._drop()
        if pid:
            with suppress(OSError):
                signal.signal(signal.SIGALRM, lambda *_: None)
                signal.setitimer(signal.ITIMER_REAL, FAREWELL)
                os.waitpid(pid, 0)
            with suppress(OSError):
                signal.setitimer(signal.ITIMER_REAL, 0)

    def _alive(self) -> bool:
        if not self._pid:
            return False
        with suppress(OSError):
            if os.waitpid(self._pid, os.WNOHANG) == (0, 0):
                return True
        self._pid = 0
        return False

    def _start(self) -> None:
        self._drop()
        reader, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", os.path.abspath(__file__)],  # noqa: PTH100
                self.environment,
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate((reader, null, null))],
                setpgroup=0,
                setsigmask=UNHEARD,
            )
        finally:
            os.close(reader)
            os.close(null)

    def _drop(self) -> None:
        self._said, self._pid = b"", 0
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


# --- in the helper process -------------------------------------------------------------------------------------------


def read_will(descriptor: int) -> list[bytes]:
    """Waits for the other end to close; the lines of what was said last."""
    will, rest = b"", b""
    while True:
        data = os.read(descriptor, LONGEST)
        if not data:
            return [line for line in will.split(b"\n") if line]
        *whole, rest = (rest + data).split(END)
        will = whole[-1] if whole else will


def main() -> None:
    """It outlives the agent by a moment."""
    for number in UNHEARD:  # what has come since the start is dropped
        signal.signal(number, signal.SIG_IGN)
    program, *commands = read_will(0) or [b""]
    if not commands:
        return
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))  # the group is our own
    signal.alarm(DEADLINE)
    for attempt in range(TRIES):
        if heard(program, b"\n".join(commands) + b"\n"):
            break
        time.sleep(AGAIN * 2**attempt)


def heard(program: bytes, batch: bytes) -> bool:
    """Runs the front-end once; whether it printed anything, as the commands' read-back does."""
    asked, to_ask = os.pipe()
    said, to_say = os.pipe()
    os.write(to_ask, batch)
    os.close(to_ask)
    actions = [(os.POSIX_SPAWN_DUP2, asked, 0), (os.POSIX_SPAWN_DUP2, to_say, 1)]
    pid = os.posix_spawn(program, [program], os.environ, file_actions=actions)
    os.close(asked)
    os.close(to_say)
    answer = os.read(said, 1)
    os.waitpid(pid, 0)
    os.close(said)
    return bool(answer)


if __name__ == "__main__":
    main()
