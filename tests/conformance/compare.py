"""What agrees and what differs between a played scenario and what real MPS did. Pure.

Two yardsticks. A transcript that this very script made on real MPS is compared line by line, each stream by itself.
Where only a recording exists, whose script was longer and began elsewhere, kinds of lines are compared: every answer
and every kind of line that the recording has must come, and none may come that real MPS was never seen to write.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.conformance.normalise import Section, kinds

# What the daemon writes about servers and about who waits for one.
SERVERS = re.compile(r": (Starting|NEW SERVER|Try |Server S\d+ exited|Force|NEW CLIENT|Exit)")
SAME, ORDER, DIFFERS = "agrees", "agrees, in another order", "differs"


@dataclass(frozen=True)
class Verdict:
    """`differences` are `-` lines (only real MPS), `+` lines (only here) and `~` lines (elsewhere), below the name of
    their stream."""

    level: str
    differences: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return sum(line.lstrip().startswith(("-", "+")) for line in self.differences)


def streams(real: Sequence[str], ours: Sequence[str], name: str = "control.log") -> tuple[str, list[str]]:
    """Level and differing lines of one stream: `-` only real, `+` only ours, `~` in another place.

    Threads overtake each other, so lines may be in another place. Within what one thread writes, order counts: what is
    in both but in another order there is shown as `-` and `+` too."""
    if list(real) == list(ours):
        return SAME, []
    common = Counter(real) & Counter(ours)
    theirs, own = _kept(real, common), _kept(ours, common)
    shown = []
    for key in dict.fromkeys([*map(thread_of(name), theirs), *map(thread_of(name), own)]):
        pair = [[line for line in lines if thread_of(name)(line) == key] for lines in (theirs, own)]
        if pair[0] != pair[1]:
            shown += [line for line in difflib.ndiff(*pair) if line[0] in "-+"]
    surplus = {"-": Counter(real) - common, "+": Counter(ours) - common}
    for line in difflib.ndiff(list(real), list(ours)):
        sign, text = line[0], line[2:]
        if sign in surplus and surplus[sign][text] > 0:
            surplus[sign][text] -= 1
            shown.append(line)
        elif sign == "-" and line not in shown:
            shown.append(f"~ {text}")
    level = DIFFERS if any(line[0] in "-+" for line in shown) else ORDER
    return level, shown


def _kept(lines: Iterable[str], common: Mapping[str, int]) -> list[str]:
    left = Counter(common)
    kept = []
    for line in lines:
        if left[line] > 0:
            left[line] -= 1
            kept.append(line)
    return kept


def thread_of(name: str) -> Callable[[str], str]:
    """Of a stream's line: whose doing it is. Lines with the same answer keep their order."""
    if name == "server.log" or name == "foreground.log":
        return _server_thread
    if name.startswith("control"):
        return _control_thread
    return lambda line: ""


def _server_thread(line: str) -> str:
    """A server's main thread, or the workers of one client."""
    match = re.search(r"(?:\{PID: |process )(c\d+)", line)
    if match and not re.search("torn down|encountered|server requesting", line):
        return f"{line.split(': ')[0]} {match[1]}"
    return _control_thread(line) if line.startswith("Control") else line.split(": ")[0]


def _control_thread(line: str) -> str:
    """The daemon has one thread; who connects when is chance, and with it what becomes of front-ends, servers
    and of who waits for one."""
    if re.search(r": (Accepting connection|User did not send|Unable to accept)", line):
        return line
    if match := re.search(r"NEW CLIENT (\w+) .*already exists", line):
        return match[1]
    if re.search(r": (Server S\d+ is busy|Control will|\(back-off)", line):
        return "timer"
    return "servers" if SERVERS.search(line) else "front-ends"


def with_real(real: Section, ours: Section) -> Verdict:
    """Line by line."""
    level, differences = SAME, []
    theirs, own = real.streams(), ours.streams()
    for name in dict.fromkeys([*theirs, *own]):
        stream_level, lines = streams(theirs.get(name, []), own.get(name, []), name)
        if stream_level == DIFFERS:
            level = DIFFERS
        elif stream_level == ORDER and level == SAME:
            level = ORDER
        if stream_level != SAME:
            differences += [f"{ours.name} {name}", *lines]
    return Verdict(level, tuple(differences))


def rank(verdict: Verdict) -> tuple[int, int]:
    """Small is near."""
    return (SAME, ORDER, DIFFERS).index(verdict.level), verdict.size


def with_recording(recorded: Section, ours: Sequence[Section], known: Mapping[str, set[str]]) -> Verdict:
    """By kinds of lines. `ours` are the parts of one scenario, the recorded part last; `known` is every kind of line of
    each stream in all recordings."""
    differences = []
    everything: dict[str, set[str]] = {}
    for section in ours:
        for name, found in of_kind(section).items():
            everything.setdefault(name, set()).update(found)
    asked = {line.split(" -> ")[0] for line in everything.get("steps", set())}
    theirs, own = of_kind(recorded), of_kind(ours[-1])
    for name in dict.fromkeys([*theirs, *own]):
        missing = theirs.get(name, set()) - everything.get(name, set())
        strange = own.get(name, set()) - known.get(name, set())
        if name == "steps":
            # What the recording's script asked and ours does not is no finding about MPS, nor the other way round.
            missing = {line for line in missing if line.split(" -> ")[0] in asked}
            answered = {line.split(" -> ")[0] for line in known.get(name, set())}
            strange = {line for line in strange if line.split(" -> ")[0] in answered}
        if missing or strange:
            differences += [f"{ours[-1].name} {name}", *(f"- {line}" for line in sorted(missing))]
            differences += [f"+ {line}" for line in sorted(strange)]
    return Verdict(DIFFERS if differences else SAME, tuple(differences))


def of_kind(section: Section) -> dict[str, set[str]]:
    """Stream -> kinds of lines. An answer stays with its command; what a rig notes by itself does not count."""
    found: dict[str, set[str]] = {"control.log": set(), "server.log": set()}
    for name, lines in section.streams().items():
        if name == "clients":
            found[name] = kinds(lines)
        elif name != "steps":
            # A second instance, or one in the foreground, writes what any other writes.
            for line in kinds(lines):
                server = line.startswith(("Server ", "Other ", "Client ")) or name.startswith("server")
                found["server.log" if server else "control.log"].add(line)
    found["steps"] = kinds(
        re.sub(r"^(ctl|start) in \w+", r"\1", block)  # the instance does not matter
        for block in blocks(section.steps)
        if block.startswith(("ctl", "option", "start", "ls", "ps", "clients listed", "failed clients"))
    )
    # The first recordings were made before the client named its device.
    found["clients"] = {line for line in found["clients"] if " using GPU" not in line}
    return found


def blocks(steps: Sequence[str]) -> list[str]:
    """A command and its indented answer as one line."""
    result: list[str] = []
    for step in steps:
        if step.startswith("  ") and result:
            result[-1] += " | " + step.strip()
        else:
            result.append(step)
    return result
