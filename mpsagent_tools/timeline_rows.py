"""Sessions of the API as rows of spans and marks, for `mpsagent-cli timeline` to draw. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise

from mpsagent.cli.wording import Json, many, safe
from mpsagent.mps.units import duration_text, limits_words
from mpsagent.policy import apart

NODE = {
    "control.started": "control", "control.ended": "control", "control.restart_ordered": "control",
    "drain.ordered": "control", "drain.resumed": "control", "gate.lost": "control", "agent.error": "control",
    "policy.loaded": "policy", "policy.rejected": "policy", "outside_mps": "outside", "outside_mps.ended": "outside",
}  # fmt: skip
"""Kinds of events that concern all users, and their marks."""
KINDS = ",".join((*NODE, "lease.", "limits.unconfirmed"))
"""Kinds of events that are drawn as marks. Other events are part of sessions."""
NAMED = 5
"""Users, or clients, that a text names; more are counted."""
FINE, CELLS, MARKS = 5000, 1000, 1000
"""Stretches that are drawn one by one; into how many parts the time is divided when there are more; marks of a row."""


@dataclass(frozen=True, slots=True)
class Span:
    """``kind``: work, wait, pause, fault, alone or together. Seconds since the epoch. ``goes_on``: had not ended."""

    kind: str
    start: float
    end: float
    text: str
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """``kind``: forced, faulted, turn, refused, limits, lease, control, policy or outside."""

    kind: str
    start: float
    text: str


@dataclass(slots=True)
class Row:
    """A user's, or that of all users. ``marks``: the newest."""

    label: str
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    @property
    def entries(self) -> list[Span | Mark]:
        return [*self.spans, *self.marks]


@dataclass(slots=True)
class Picture:
    """``gpus``: a row for each instance; ``node``: what concerned all. ``grain``: seconds; breaks that are shorter are
    not drawn."""

    start: float
    end: float
    gpus: list[Row]
    users: list[Row]
    node: Row
    grain: float


_DID = {"work": "at work", "wait": "waited", "pause": "was paused", "fault": "in a fault"}
Who = tuple[str, int]
"""Instance and uid."""
_Part = tuple[float, float, str, bool]
"""A stretch of one process: start, end, words, and True if it has not ended."""


class _Told:
    """Stretches and marks from sessions and events. ``parts``: for each user and kind."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.parts: defaultdict[tuple[Who, str], list[_Part]] = defaultdict(list)
        self.marks: defaultdict[Who, list[Mark]] = defaultdict(list)
        self.node: list[Mark] = []
        self._leases: dict[int, Who] = {}
        self._names: dict[int, str] = {}

    def name(self, uid: int) -> str:
        return "not known whose" if uid < 0 else self._names.get(uid, f"user {uid}")

    def session(self, one: Json) -> None:
        if one["user"]:
            self._names[one["uid"]] = one["user"]
        who = _who(one)
        came, goes_on = _at(one["came"]), one["ended"] is None
        end = self.until if goes_on else _at(one["ended"])
        if one["kind"] == "client":
            self._client(who, one, came, end, goes_on)
        elif one["kind"] == "pause":
            count = one.get("clients")
            words = f"{many(count, 'process')} frozen" if count else "frozen"
            self.parts[who, "pause"].append((came, end, words, goes_on))
        elif one["kind"] == "fault":
            words = {"recovered": "over", "ended": "over, the server ended"}.get(one["outcome"], "not over")
            self.parts[who, "fault"].append((came, end, f"a fault of server {one['pid']}, {words}", goes_on))
        elif one["outcome"] == "forced":
            self._mark(who, "turn", end, f"its turn was ended after {duration_text(one['worked'])}")

    def _client(self, who: Who, one: Json, came: float, end: float, goes_on: bool) -> None:
        pid, outcome = one["pid"], one["outcome"]
        why = f" ({safe(one['why'], 400)})" if one["why"] else ""
        began = end if one["began"] is None else _at(one["began"])
        if began - came >= 0.005 and outcome != "refused":
            self.parts[who, "wait"].append((came, began, str(pid), goes_on and not one["began"]))
        if one["began"]:
            job = f", job {one['job']}" if one["job"] else ""
            limits = f" ({safe(limits_words(one['limits']))}{safe(job)})" if one.get("limits") else ""
            unknown = ", whose end is not on record" if outcome == "unknown" else ""
            self.parts[who, "work"].append((began, end, f"{pid}{limits}{unknown}", goes_on))
        if outcome == "refused":
            self._mark(who, "refused", end, f"process {pid} was refused{why}")
        elif outcome == "ended" or (outcome == "lost" and why):
            self._mark(who, "forced", end, f"process {pid} was ended{why}")
        elif outcome in ("faulted", "lost"):
            how = "ended in a fault" if outcome == "faulted" else "lost its server"
            self._mark(who, "faulted", end, f"process {pid} {how}")

    def event(self, event: Json) -> None:
        at, kind = _at(event["at"]), event["kind"]
        who, text = _who(event), safe(event["sentence"], 400)
        if kind == "limits.unconfirmed":
            self._mark(who, "limits", at, text)
        elif kind in ("lease.given", "lease.ended"):
            number = event["number"]
            if kind == "lease.given" and number in self._leases:  # told to another instance, or to another agent
                return
            who = self._leases.setdefault(number, who)
            if who[1] >= 0:
                self._mark(who, "lease", at, text)
            else:  # one that names a cgroup or a process is for all to see
                self.node.append(Mark("lease", at, text))
        elif kind in NODE:
            self.node.append(Mark(NODE[kind], at, text))

    def _mark(self, who: Who, kind: str, at: float, text: str) -> None:
        self.marks[who].append(Mark(kind, at, text))


def _who(one: Json) -> Who:
    """Return the section and the user of a session or an event: the lanes of several users are on one GPU."""
    uid = -1 if one.get("uid") is None else int(one["uid"])
    return apart.section_of(one.get("instance") or "", uid), uid


def _at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def picture(
    sessions: Iterable[Json],
    events: Iterable[Json],
    since: float,
    until: float,
    clock: Callable[[float], str],
) -> Picture:
    """``events``: those of KINDS; ``clock``: a time as people read it."""
    fold = _Told(until)
    for one in sessions:
        fold.session(one)
    for one in events:
        fold.event(one)
    whose = sorted({who for who, _ in fold.parts} | set(fold.marks))
    several = len({instance for instance, _ in whose if instance}) > 1

    def label(who: Who) -> str:
        user = fold.name(who[1])
        return f"{user} at {who[0]}" if several and who[0] else user

    def span_text(kind: str, who: str, start: float, end: float, parts: list[_Part], goes_on: bool) -> str:
        """Return the text of a span: user, activity, start, end, processes."""
        until = "still" if goes_on else f"until {clock(end)}"
        each = list(dict.fromkeys(part[2] for part in parts))  # once, however often it was paused
        words = ", ".join(each[:NAMED])
        more = f" and {len(each) - NAMED} more" if len(each) > NAMED else ""
        what = f"{many(len(each), 'process')}: {words}{more}"
        if kind == "pause" and len(parts) > 1:
            what = f"{len(parts)} times, {duration_text(sum(part[1] - part[0] for part in parts))} in all"
        elif kind in ("pause", "fault"):
            what = words
        return f"{who} {_DID[kind]} from {clock(start)} {until} ({duration_text(end - start)}), {what}"

    def merged(kind: str, who: str, parts: list[_Part], grain: float) -> list[Span]:
        """Return spans, each for the parts that overlap or are less than ``grain`` seconds apart."""
        found: list[Span] = []
        group: list[_Part] = []
        latest = 0.0
        shown = sorted(part for part in parts if part[1] >= since and part[0] <= until)
        for part in [*shown, None]:
            if group and (part is None or part[0] > latest + grain):
                start, end, goes_on = max(since, group[0][0]), min(until, latest), any(one[3] for one in group)
                found.append(Span(kind, start, end, span_text(kind, who, start, end, group, goes_on), goes_on))
                group, latest = [], 0.0
            if part is not None:
                group.append(part)
                latest = max(latest, part[1])
        return found

    for who in whose:
        fold.parts[who, "work"] = _without(fold.parts[who, "work"], fold.parts[who, "pause"])
    grain = 0.0 if sum(map(len, fold.parts.values())) <= FINE else (until - since) / CELLS
    of_user, by_instance = dict[Who, Row](), dict[str, list[tuple[Span, str]]]()
    for who in whose:
        name, pauses = label(who), {part[0] for part in fold.parts[who, "pause"]}
        marks = sorted((one for one in fold.marks[who] if since <= one.start <= until), key=lambda one: one.start)
        row = Row(
            name, [span for kind in _DID for span in merged(kind, name, fold.parts[who, kind], grain)],
            [one for one in marks if one.kind != "turn" or one.start not in pauses][-MARKS:],  # the pause shows it
        )  # fmt: skip
        if row.entries:
            of_user[who] = row
            exact = merged("work", name, fold.parts[who, "work"], 0.0)
            by_instance.setdefault(who[0], []).extend((one, fold.name(who[1])) for one in exact if one.end > one.start)
    gpus = []
    for instance, had in by_instance.items():
        stages = _at_once(had)
        stages = _mostly(stages, since, grain) if grain else stages
        for who, row in of_user.items():
            if who[0] == instance:
                row.spans = [_behind(one, stages, fold.name(who[1])) for one in row.spans]
        spans = [_stage(one, clock, "mostly " if grain else "") for one in stages]
        gpus.append(Row(f"GPU of {instance}" if several and instance else "GPU", spans))
    node = Row("node", [], [one for one in fold.node if since <= one.start <= until][-MARKS:])
    return Picture(since, until, gpus, [*of_user.values()], node, grain)


def _without(work: list[_Part], pauses: list[_Part]) -> list[_Part]:
    """Return the work without the pauses: a paused user keeps clients and memory, but does not use the GPU."""
    pauses = sorted(pauses)
    ends = [pause[1] for pause in pauses]
    found: list[_Part] = []
    for start, end, words, goes_on in work:
        at, cut = start, False
        for number in range(bisect_right(ends, start), len(pauses)):
            begin, over = pauses[number][:2]
            if begin >= end:
                break
            if begin > at:
                found.append((at, begin, words, False))
            at, cut = max(at, over), True
        if at < end or not cut:
            found.append((at, end, words, goes_on))
    return found


_Stage = tuple[str, float, float, tuple[str, ...]]
"""``alone`` or ``together``, start, end, users."""


def _at_once(work: list[tuple[Span, str]]) -> list[_Stage]:
    """Return the stages in which one user had the GPU alone or several users had it together."""
    edges = sorted({edge for span, _ in work for edge in (span.start, span.end)})
    begins: dict[float, list[str]] = {}
    ends: dict[float, list[str]] = {}
    for span, user in work:
        begins.setdefault(span.start, []).append(user)
        ends.setdefault(span.end, []).append(user)
    found: list[_Stage] = []
    now: list[str] = []
    for start, end in pairwise(edges):
        for user in ends.get(start, []):
            now.remove(user)
        now += begins.get(start, [])
        if now:
            found.append(("alone" if len(now) == 1 else "together", start, end, tuple(sorted(now))))
    return found


def _mostly(stages: list[_Stage], since: float, grain: float) -> list[_Stage]:
    """Return the stages in cells of ``grain`` seconds: the longest stage in each cell, equal neighbours merged."""
    spent: dict[int, dict[str, float]] = {}
    users: dict[int, set[str]] = {}
    for word, start, end, names in stages:
        for cell in range(int((start - since) / grain), int((end - since) / grain) + 1):
            begin = since + cell * grain
            part = spent.setdefault(cell, {})
            part[word] = part.get(word, 0.0) + max(0.0, min(end, begin + grain) - max(start, begin))
            users.setdefault(cell, set()).update(names)
    found: list[_Stage] = []
    for cell in sorted(spent):
        word, begin = max(spent[cell], key=spent[cell].__getitem__), since + cell * grain
        if found and found[-1][0] == word and found[-1][2] >= begin - grain / 2:
            names = tuple(sorted({*found[-1][3], *users[cell]}))
            found[-1] = (word, found[-1][1], begin + grain, names)
        else:
            found.append((word, begin, begin + grain, tuple(sorted(users[cell]))))
    return found


def _behind(one: Span, stages: list[_Stage], user: str) -> Span:
    """Add to the text of waiting the users who had the GPU meanwhile."""
    if one.kind != "wait":
        return one
    others = dict[str, None]()
    for number in range(bisect_right(stages, one.start, key=lambda stage: stage[2]), len(stages)):
        if stages[number][1] >= one.end or len(others) > NAMED:
            break
        others |= dict.fromkeys(name for name in stages[number][3] if name != user)
    names = [*others]
    more = " and others" if len(names) > NAMED else ""
    return replace(one, text=f"{one.text}; {', '.join(names[:NAMED])}{more} had the GPU") if names else one


def _stage(one: _Stage, clock: Callable[[float], str], mostly: str) -> Span:
    word, start, end, users = one
    names = ", ".join(users[:NAMED]) + (f" and {len(users) - NAMED} more" if len(users) > NAMED else "")
    when = f"from {clock(start)} until {clock(end)} ({duration_text(end - start)})"
    return Span(word, start, end, f"{names} {mostly}{word} {when}")
