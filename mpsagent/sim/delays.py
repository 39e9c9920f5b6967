"""How long things take, drawn from what was recorded. MPSSIM_SPEED divides every delay, MPSSIM_SEED fixes the draws.

Protocol timers (the back-off, `quit -t`) are not delays of the GPU and are never scaled.
"""

import random


class Delays:
    """All results in seconds."""

    def __init__(self, speed: float, seed: str | None) -> None:
        self.speed = speed
        self._draw = random.Random(seed)

    def _between(self, low_ms: float, high_ms: float) -> float:
        return self._draw.uniform(low_ms, high_ms) / 1000 / self.speed

    def initialise(self, kind: str, devices: int) -> float:
        """From `Initializing server process` to the first context. kind: "first", "again", "forced" (02 R6: 9 ms)."""
        extra = 1 + 0.6 * (devices - 1)
        if kind == "first":
            return self._between(178, 190) * extra
        if kind == "forced":
            return self._between(9, 12)
        return self._between(93, 101) * extra if self._draw.random() < 0.9 else self._between(170, 185) * extra

    def context(self, kind: str) -> float:
        """Creation of the server's context on one device."""
        return self._between(66, 84) if kind == "first" else self._between(43, 58)

    def idle_exit(self, since_last: float) -> float:
        """An idle server's exit, 55 to 70 ms: the window in which limits can be armed.

        Longer when its last client left only `since_last` seconds ago (02 R3, 06 V2: 119 to 247 ms).
        """
        return self._between(115, 245) if since_last < 0.045 / self.speed else self._between(55, 69)

    def killed_exit(self) -> float:
        """From the end of a killed server to the daemon's notice of it (02 R6, 06 V3)."""
        return self._between(12, 22)

    def recreate(self) -> float:
        """The first client after a fault waits for a new server context."""
        return self._between(45, 77)

    def fault_notice(self) -> float:
        """From an illegal access, or the loss of a client with a kernel in flight, to the server's reaction."""
        return self._between(95, 190)

    def channel_close(self) -> float:
        """Between the loss of a client's context and that of its channel (context 0)."""
        return self._between(13, 17)

    def pick(self, count: int) -> int:
        """Any of `count` things: which client the log blames for a fault is not the one that did it."""
        return self._draw.randrange(count)
