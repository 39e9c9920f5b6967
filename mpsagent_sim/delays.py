"""Delays, drawn from recorded times. MPSSIM_SPEED divides every delay, MPSSIM_SEED fixes the draws.

Protocol timers (the back-off, `quit -t`) are not delays of the GPU and are never scaled.
"""

import os
import random


class Delays:
    """All results in seconds."""

    def __init__(self, speed: float, seed: str | None) -> None:
        self.speed = speed
        self.busy_from = 4
        """From this many other contexts with work in flight on the GPU is busy."""
        self._draw = random.Random(seed)
        self._free_at: dict[int, float] = {}

    def _between(self, low_ms: float, high_ms: float) -> float:
        return self._draw.uniform(low_ms, high_ms) / 1000 / self.speed

    def usual_start(self) -> str:
        """A server's start on a device that no process uses takes 140 to 160 ms, one in twelve 245 ms and more."""
        return "slow" if self._draw.random() < 0.08 else "idle"

    def initialise(self, kind: str, devices: int) -> float:
        """From `Initializing server process` to the first context.

        kind: "used" when a process still uses the device (R6, X10, X11, V4: 9 ms), "idle", "slow", or "after a kill"
        of the last server when no process has the device any more (X1, X16, S5).
        """
        extra = 1 + 0.6 * (devices - 1)
        if kind == "used":
            return self._between(8, 10)
        if kind == "idle":
            return self._between(93, 101) * extra
        return (self._between(175, 190) if kind == "after a kill" else self._between(175, 235)) * extra

    def failed_start(self) -> float:
        """From `Initializing server process` to the driver's refusal (driver 550 without a GPU)."""
        return self._between(21, 60)

    def context(self, kind: str) -> float:
        """Creation of the server's context on one device."""
        return self._between(43, 56) if kind in ("idle", "used") else self._between(60, 76)

    def association(self) -> float:
        """Between "is associated" and "is ACTIVE": less than a millisecond on an H100; more here, so that a test meets
        it."""
        return self._between(4, 6)

    def client_context(self, device: int, now: float) -> float:
        """Return the time for which a client's context waits for earlier ones. A device creates them one after the
        other, in 80 to 90 ms each (docs/measured, contexts-at-once.txt). The client adds the time of its own."""
        begin = max(now, self._free_at.get(device, 0.0))
        self._free_at[device] = begin + self._between(80, 90)
        return begin - now

    def idle_exit(self) -> float:
        """Return the time of an idle server's exit, in which its limits can no longer be set: 52 to 80 ms, for one in
        ten up to 130 ms."""
        return self._between(88, 130) if self._draw.random() < 0.08 else self._between(53, 78)

    def destroy(self) -> float:
        """The end of the server's context after a fault, when the last client that it hit has gone (Q6, V6)."""
        return self._between(58, 64)

    def killed_exit(self) -> float:
        """From the end of a killed server to the daemon's notice of it (02 R6, 06 V3)."""
        return self._between(17, 21)

    def recreate(self) -> float:
        """The first client after a fault waits for a new server context."""
        return self._between(45, 77)

    def fault_notice(self) -> float:
        """From an illegal access, or the loss of a client with a kernel in flight, to the server's reaction."""
        return self._between(95, 190)

    def terminate(self) -> float:
        """From a client's letting go of its work to the answer of terminate_client (X13: 6 to 8 ms)."""
        return self._between(5, 7)

    def leaving(self, others: int) -> float:
        """Return the time from the answer to terminate_client until the client's work has left the GPU, which is also
        at work for ``others``. It takes no time among a few (04, 06), and up to 1.5 s, one launch of a graph, among 14
        (recording 16)."""
        return self._between(300, 1500) if others >= self.busy_from else 0.0

    def late_fault(self) -> float:
        """Return the time from the exit of a client with work on the GPU until the fault (recording 16)."""
        return self._between(180, 600)

    def limits_told(self) -> float:
        """From a client's channel to its having heard its limits: those of the last 8 ms before their server was killed
        had not (server-lost-at-start.txt)."""
        return 0.008 / self.speed

    def channel_close(self) -> float:
        """Between the loss of a client's context and that of its channel (context 0)."""
        return self._between(13, 17)

    def pick(self, count: int) -> int:
        """Return a random index: the log blames any client for a fault, not the one that caused it."""
        return self._draw.randrange(count)


def start_error() -> str:
    """Return the error of servers that cannot start: MPSSIM_FAIL_START, or with @PATH the text of that file while it
    exists."""
    text = os.environ.get("MPSSIM_FAIL_START", "")
    if not text.startswith("@"):
        return text
    try:
        with open(text[1:]) as file:
            return file.read(4096).strip()
    except OSError:
        return ""
