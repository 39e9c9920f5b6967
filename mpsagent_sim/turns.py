"""Turns of users: the pending list and the doubling back-off of the control daemon. Pure: no clock, no I/O.

The daemon keeps one server at a time. A client of its user is attached. All others wait, in order of arrival, and the
server is asked to exit: at once ("backoff is disabled"), then after 200, 400, 800 ... ms ("backoff is enabled").
"""

FIRST_INTERVAL_MS = 200
TRIES = 6


class BackOff:
    """The interval until the next try. A try ordered by a command repeats the interval; one by the timer doubles it."""

    __slots__ = ("interval_ms", "running")

    def __init__(self) -> None:
        self.interval_ms = FIRST_INTERVAL_MS
        self.running = False

    def busy(self, by_timer: bool) -> int:
        """The server would not leave: milliseconds until the next try."""
        if by_timer and self.running:
            self.interval_ms *= 2
        elif not self.running:
            self.interval_ms = FIRST_INTERVAL_MS
        self.running = True
        return self.interval_ms

    def clear(self) -> None:
        self.running = False
        self.interval_ms = FIRST_INTERVAL_MS


class Turns:
    """The server's user and phase, and the waiting clients. Methods return the next action of the daemon."""

    def __init__(self) -> None:
        self.user: int | None = None
        self.phase = "none"  # none, starting, ready, exiting
        self.waiting: list[tuple[int, int | None]] = []  # (uid, key of the connection; None for `start_server -uid`)
        self.failures: dict[int, int] = {}  # uid: servers that could not start, one after the other
        self.back_off = BackOff()

    def client(self, uid: int, key: int) -> str:
        """A client of `uid` came: "attach"; or it waits, and "start" a server, "try" to end this one, or "wait"."""
        if self.phase == "ready" and self.user == uid:
            return "attach"
        self.waiting.append((uid, key))
        return self._next()

    def start_request(self, uid: int) -> str:
        """`start_server -uid`: "start", "try" or "wait"."""
        if self.user == uid and self.phase in ("starting", "ready"):
            return "wait"
        self.waiting.append((uid, None))
        return self._next()

    def _next(self) -> str:
        if self.phase == "none":
            return "start"
        if self.phase == "ready" and not self.back_off.running:
            return "try"
        return "wait"

    def next_user(self) -> int | None:
        """Return the next server's user: clients and start requests in order of arrival (X3, X4 of the real runs)."""
        return self.waiting[0][0] if self.waiting else None

    def starting(self, uid: int) -> None:
        self.user, self.phase = uid, "starting"
        self.back_off.clear()

    def ready(self) -> tuple[list[int], bool]:
        """The server is Ready: connections to attach now, and whether others still wait (then try to end it)."""
        self.phase = "ready"
        self.failures.pop(-1 if self.user is None else self.user, None)
        # the last to come is attached first (X3 and X18 of the real runs)
        attach = [key for uid, key in reversed(self.waiting) if uid == self.user and key is not None]
        self.waiting = [entry for entry in self.waiting if entry[0] != self.user]
        return attach, bool(self.waiting)

    def leaving(self) -> None:
        """The server agreed to exit."""
        self.phase = "exiting"
        self.back_off.clear()

    def gone(self) -> int | None:
        """Note that the server has exited; return the user for whom to start one, or None.

        Clients of the exiting server's own user go first, even if others wait longer (01 S4). If the server that is
        started here exits before it is Ready, its clients go behind all others (X24, X26 of the real runs). Clients for
        whom a server was started at once have one more try (driver 550, no GPU).
        """
        own, failed = self.user, self.phase == "starting"
        self.user, self.phase = None, "none"
        self.back_off.clear()
        uid = own if not failed and any(entry[0] == own for entry in self.waiting) else self.next_user()
        self.waiting.sort(key=lambda entry: entry[0] == uid)
        return uid

    def failed(self) -> bool:
        """The server cannot start: whether its user's waiting clients are to be dropped now. They have six tries, a
        start request has one (drivers 470, 535 and 550 without a GPU)."""
        user = -1 if self.user is None else self.user
        self.failures[user] = self.failures.get(user, 0) + 1
        clients = any(uid == user and key is not None for uid, key in self.waiting)
        last = self.failures[user] >= TRIES or not clients
        if last:
            del self.failures[user]
        return last
