"""What holds in every control.log, however its lines were interleaved by chance. Pure.

Order of service: when a server has gone, the next one is for its own user if one of that user waits, else for whom
waited first (X20 and X21 of the real runs). Those for whom a server was started that ended before it was Ready go
behind all others (X24 and X26). A client that died while it waited keeps its place (X1).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.conformance.normalise import USERS

EVENT = re.compile(
    r"NEW CLIENT \S+ from user (?P<waits>\w+): Server is not ready"
    r"|Starting new server (?P<server>\S+) for user (?P<user>\w+)"
    r"|NEW SERVER (?P<ready>\S+): Ready|Server (?P<gone>\S+) exited with|Cmd:start_server -uid (?P<asked>\w+)"
    r"|(?P<daemon>Starting control daemon)"
)


@dataclass(frozen=True)
class Choice:
    """Whose server was started, when several users or the last server's own waited."""

    server: str
    user: str
    expected: str
    waiting: tuple[str, ...]


def choices(control_log: Sequence[str]) -> Iterator[Choice]:
    """Every time that the daemon had a choice. `control_log` is normalised."""
    waiting: list[str] = []
    users: dict[str, str] = {}
    ready: set[str] = set()
    last = current = ""
    for line in control_log:
        found = EVENT.search(line)
        if not found:
            continue
        event = found.groupdict()
        if event["daemon"]:
            waiting, last, current = [], "", ""
        elif event["waits"]:
            waiting.append(event["waits"])
        elif event["asked"]:
            asked = USERS.get(event["asked"], event["asked"])
            if asked != current:
                waiting.append(asked)
        elif event["server"]:
            current = users[event["server"]] = event["user"]
            if len(set(waiting)) > 1:
                yield Choice(event["server"], current, last if last in waiting else waiting[0], tuple(waiting))
        elif event["ready"]:
            ready.add(event["ready"])
            waiting = [user for user in waiting if user != users.get(event["ready"])]
        elif event["gone"]:
            last, current = users.get(event["gone"], ""), ""
            if event["gone"] not in ready:
                waiting.sort(key=lambda user: user == last)
                last = ""


def broken(control_log: Sequence[str]) -> list[str]:
    """A line for every choice that went another way than the rule says."""
    return [
        f"{one.server} is for {one.user}, not for {one.expected}, while {' '.join(one.waiting)} wait"
        for one in choices(control_log)
        if one.user != one.expected
    ]
