"""What reads words of others, each as a function of bytes that raises when a promise does not hold.

Not raising is the least of it: what was read must be the same when it is said again, what is refused must be refused by
the declared error, and nothing may grow beyond its bound.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import tempfile
import textwrap
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from mpsagent.agent import saved
from mpsagent.agent.orders import ORDERS, Orders
from mpsagent.core import inputs as inp
from mpsagent.core.coordinator import Core
from mpsagent.core.inputs import Peer
from mpsagent.gate import frontends
from mpsagent.gate import handover as ho
from mpsagent.gate.handshake import Handshake, Mark
from mpsagent.gate.handshake_rescue import Rescue
from mpsagent.gate.store import parse_name
from mpsagent.linux.peers import Credentials
from mpsagent.mps import commands, rendezvous
from mpsagent.mps import events as ev
from mpsagent.mps.limits import Device, Limits
from mpsagent.mps.loglines import LogParser, Source
from mpsagent.mps.rendezvous import ACKNOWLEDGED, CREDENTIALS, DESCRIPTOR, HELLO, Kind
from mpsagent.mps.skim import Skimmer
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.policy.plausible import in_itself
from mpsagent.policy.syntax import syntax_error
from mpsagent.snapshot import lease_body
from mpsagent.snapshot.problem import Json, Problem
from mpsagent.system.store import Store
from mpsagent.wire import codec, link
from tests import recordings
from tests.core.said import known

ROOT = Path(__file__).parents[2]
NOW = 1_795_439_130.0


class Target(NamedTuple):
    """``check`` raises; ``seeds``: what it begins with; ``words``: what may stand in what it reads."""

    check: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]
    json: bool = False
    words: tuple[bytes, ...] = ()


class Draws:
    """Choices out of bytes; without any more, the first of each."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def number(self, most: int) -> int:
        value = self._data[self._at] % (most + 1) if self else 0
        self._at += 1
        return value

    def some(self) -> bytes:
        size = self.number(255)
        piece = self._data[self._at : self._at + size]
        self._at += size
        return piece


# --- the handshake at the gate, and what it feeds --------------------------------------------------------------------

PEER = Credentials(700, 1001, 100)
SAID_WITH = (PEER, None, Credentials(701, 1001, 100), Credentials(700, 0, 100), Credentials(700, 1001, 0))
WORDS = (CREDENTIALS, *map(rendezvous.kind_bytes, Kind), HELLO, DESCRIPTOR, ACKNOWLEDGED, bytes(8), b"", b"\0")


_KINDS = Kind.CLIENT, Kind.FRONT_END, Kind.DEBUGGER
_MARKS = {
    Kind.CLIENT: Mark.HELD, Kind.FRONT_END: None, Kind.DEBUGGER: Mark.DEBUGGED, Kind.UNKNOWN: Mark.UNKNOWN,
}  # fmt: skip


def handshake(data: bytes) -> None:
    """A client or front-end is who has sent its own credentials and its kind. Others are held or refused, never passed,
    and what is held has its mark before its message is taken."""
    draws = Draws(data)
    restored = bool(draws.number(1))
    one, proven = Handshake(PEER, restored=restored), restored
    while draws:
        which = draws.number(len(WORDS))
        message = WORDS[which] if which < len(WORDS) else draws.some()
        who = SAID_WITH[draws.number(len(SAID_WITH) - 1)]
        ready = one.expects_kind()
        assert ready == proven, "whether the mark is set"
        mark, found = one.mark(message), one.message(message, who)
        assert one.heard
        if found is None:
            assert message == CREDENTIALS
            assert who is not None
            assert (who.pid, who.uid) == (PEER.pid, PEER.uid)
            proven = True
            continue
        if isinstance(found, str):
            assert 0 < len(found) < 200
            assert found.isprintable()
        else:
            assert proven
            assert (found is Kind.UNKNOWN) is (message not in map(rendezvous.kind_bytes, _KINDS))
            assert found in (Kind.UNKNOWN, *_KINDS)
            assert found is Kind.UNKNOWN or message == rendezvous.kind_bytes(found)
            assert not message or mark == _MARKS[found]
        break
    for text in (data, data[1:]):
        _commands(text)
        _answers(text)


def handshakes() -> Iterable[bytes]:
    yield bytes([0, 0, 0, 2, 0])
    yield bytes([1, 4, 0])
    yield from (b"set_default_x 1\n\0", b"ps\n\0", b"\0\0\0\x00100.0\n\0", b"get_server_list\n\0", b"71\n72\n100.0\n")


def _commands(data: bytes) -> None:
    """Of a front-end: what passes is one line that the daemon can take, and users change nothing."""
    length = rendezvous.length_of(data)
    assert length is None or length < 1 << 64
    text = rendezvous.clean_command(data)
    if text is None:
        return
    command = " ".join(text.split())
    if not command:
        return
    announced, sent = rendezvous.command_messages(command)
    assert rendezvous.length_of(announced) == len(sent)
    assert rendezvous.clean_command(sent) == command
    assert sent.count(b"\n") == 1
    refusal = frontends.forbidden(command, 1001)
    word = frontends.word_of(command)
    if refusal is None:
        assert word in frontends.QUESTIONS or word.startswith("get_")
    else:
        assert refusal.isprintable()
        assert len(rendezvous.answer_message(refusal)) <= rendezvous.LONGEST_MESSAGE
    assert frontends.forbidden(command, 0, contained=True) is None or refusal is not None


def _answers(data: bytes) -> None:
    """Of the daemon, whose answers carry names of users' processes."""
    said = rendezvous.decode_answer(data)
    if isinstance(said, rendezvous.Answer):
        assert len(said.text) <= len(data)
    text = data.decode("utf-8", "replace")
    assert all(0 <= pid < 10**10 for pid in commands.pids(text))
    for found in (commands.refusal(text), commands.not_terminated(text), commands.parse_status(text)):
        assert found is None or 0 < len(found) <= 200
    proven = commands.proven(text)
    assert proven is None or text.startswith(proven)
    assert 0 <= rendezvous.acknowledgement_status(data) < 1 << 32


# --- a hand-over -----------------------------------------------------------------------------------------------------

LIMITS, STRICT = Limits(20.0, {0: 4 << 30}), Limits(10.0, {0: 1 << 30})
CONFIRMED = {
    False: ["20.0", "20.0", "4G", "20.0", "20.0", "20.0", "4G", "20.0"],
    True: ["10.0", "10.0", "1G", "10.0", "10.0", "10.0", "1G", "10.0"],
}
OUTCOMES = (ho.ClientPassed, ho.ClientFailed, ho.ClientGone, ho.Withdrawn)


def hand_over(data: bytes) -> None:
    """Whatever daemon and client say, in whatever order: it ends once, gives the descriptor once, says a last word to
    the daemon once, takes back nothing that the daemon was told, and ends by itself when nobody says anything more."""
    draws = Draws(data)
    one = ho.HandOver(ho.Plan(LIMITS, STRICT, set_limits=bool(draws.number(1)), devices=(0,)))
    done: list[ho.Action] = []

    def take(actions: list[ho.Action]) -> None:
        over = any(isinstance(each, OUTCOMES) for each in done)
        assert not (over and actions), f"{actions} after the end"
        done.extend(actions)
        for kind in (ho.Announce, ho.Give, ho.Acknowledge, ho.Abandon, ho.LimitsDoubted):
            most = 2 if kind is ho.Acknowledge else 1
            assert sum(isinstance(each, kind) for each in done) <= most, f"{kind.__name__} again"
        assert sum(isinstance(each, OUTCOMES) for each in done) <= 1
        told = any(isinstance(each, ho.Announce) for each in done)
        for each in actions:
            assert not (isinstance(each, ho.Withdrawn) and told), "what the daemon has heard cannot be taken back"
            assert not isinstance(each, ho.Give | ho.Acknowledge | ho.StartRescue) or told
            if isinstance(each, ho.ClientPassed):
                assert each.limits == (STRICT if each.fail_safe else LIMITS)
                assert any(isinstance(before, ho.Acknowledge) for before in done)
            if isinstance(each, ho.RunSession):
                for command in each.commands:
                    rendezvous.command_messages(command)

    def answers() -> list[str] | None:
        which = draws.number(5)
        if which == 0:
            return None
        if which == 1:
            return CONFIRMED[one.fail_safe][:4]
        if which == 2:
            return ["800", *CONFIRMED[one.fail_safe][:4]]
        if which == 3:
            return ["800", "ACTIVE", *CONFIRMED[one.fail_safe]]
        if which == 4:
            return ["800", "FAULT"]
        return [draws.some().decode("utf-8", "replace") for _ in range(draws.number(4))]

    def word() -> bytes:
        which = draws.number(len(WORDS))
        return WORDS[which] if which < len(WORDS) else draws.some()

    steps: tuple[Callable[[], list[ho.Action]], ...] = (
        lambda: one.session(answers(), "the daemon is away"),
        one.connected,
        lambda: one.daemon_message(word(), draws.number(2)),
        lambda: one.client_message(word()),
        one.client_closed,
        one.daemon_closed,
        lambda: one.unreachable("no such file"),
        lambda: one.rescued(None if draws.number(1) else "its server is silent"),
        one.undeliverable,
        one.withdraw,
        one.expired,
    )
    take(one.start())
    while draws:
        take(steps[draws.number(len(steps) - 1)]())
    for _ in range(4):  # nobody says anything more
        if one.stage is ho.Stage.LIMITS:
            take(one.session(None, "no answer in time"))
        elif one.stage is ho.Stage.RESCUE:
            take(one.rescued("its server is silent"))
        else:
            take(one.expired())
    assert one.stage is ho.Stage.DONE
    assert sum(isinstance(each, OUTCOMES) for each in done) == 1
    _rescue(data)


def hand_overs() -> Iterable[bytes]:
    """One that goes well, and two that do not."""
    yield bytes([1, 0, 1, 1, 2, 5, 0, 2, 6, 1, 3, 7, 0, 3])
    yield bytes(range(64))
    yield bytes([0, 1, 2, 6, 0, 2, 7, 1, 3, 8])


def _rescue(data: bytes) -> None:
    draws = Draws(data)
    one = Rescue(untouched=bool(draws.number(1)), acknowledged=bool(draws.number(1)))
    said = 0
    while draws:
        which = draws.number(3)
        if which == 0:
            one.closed()
        elif which == 1:
            said += len(one.silent())
        else:
            said += len(one.message(WORDS[draws.number(len(WORDS) - 1)] if which == 2 else draws.some()))
    said += len(one.silent()) + len(one.silent())
    assert one.over
    assert said <= 3, "what a client says it says once"


# --- the link --------------------------------------------------------------------------------------------------------


def packet(data: bytes) -> None:
    """What is taken in can be said again and is the same; everything else is a LinkError."""
    for decode in (link.decode_from_gate, link.decode_from_agent):
        try:
            message = decode(data)
        except codec.LinkError as refused:
            if len(str(refused)) > 1000:
                raise AssertionError("an error that grows with the packet") from refused
            continue
        try:
            again = codec.encode(message)
        except codec.LinkError:
            assert len(data) > codec.LONGEST_PACKET // 8  # it was compressed better than here
            continue
        assert len(again) <= codec.LONGEST_PACKET
        assert decode(again) == message
        for one in _whole_numbers(message):
            assert 0 <= one < 1 << 63


def _whole_numbers(message: object) -> Iterable[int]:
    for name in getattr(type(message), "__dataclass_fields__", ()):
        value = getattr(message, name)
        if isinstance(value, int) and not isinstance(value, bool):
            yield value


def packets() -> Iterable[bytes]:
    """What gate and agent say in the states of the net."""
    found = set()
    for path in sorted((ROOT / "tests" / "net" / "link").glob("*.txt")):
        for line in path.read_text().splitlines():
            if "{" in line:
                found.add(line[line.index("{") :].encode())
    each: dict[tuple[str, ...], bytes] = {}
    for one in sorted(found, key=len):
        content = json.loads(one)
        each.setdefault((content["kind"], *(key for key, value in content.items() if value)), one)
    yield from each.values()
    yield zlib.compress(max(found, key=len))


# --- orders ----------------------------------------------------------------------------------------------------------

OWN, OTHERS = 71, 72
"""The pids of a client of uid 1001 and of one of uid 1002."""


class Taken:
    """In the place of the agent: takes nothing that the types do not allow."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def owner(self, pid: int) -> int | None:
        return {OWN: 1001, OTHERS: 1002}.get(pid)

    def waits(self, pid: int) -> bool:
        return pid == 80

    def name(self, uid: int) -> None:
        """No name is known."""

    async def terminate(self, pid: int, *, now: bool, dry_run: bool, by: int) -> Json:
        assert by == 0 or self.owner(pid) == by, "another's client"
        return self._did("terminate", pid)

    async def terminate_each(self, those: Any, *, now: bool, dry_run: bool, by: int) -> Json:
        assert by == 0 or those.uid == by, "others' clients"
        assert isinstance(those.job, str | None)
        assert isinstance(those.below, int | None)
        return self._did("terminate-each", 1)

    async def drain(self, timeout: float | None, by: int, instance: str | None = None) -> Json:
        return self._root("drain", by, timeout)

    async def resume(self, by: int, instance: str | None = None) -> Json:
        return self._root("resume", by)

    async def extend_turn(self, uid: int | None, seconds: float | None, by: int) -> Json:
        assert isinstance(uid, int | None)
        return self._root("extend-turn", by, seconds)

    async def restart(self, timeout: float | None, by: int, instance: str | None, *, dry_run: bool) -> Json:
        return self._root("restart", by, timeout)

    async def reload(self, by: int) -> Json:
        return self._root("reload", by)

    async def policy_diff(self) -> Json:
        return self._did("diff", 1)

    async def give_lease(self, body: Json, by: int) -> Json:
        asked = lease_body.asked(body, NOW)
        span = asked.seconds if asked.seconds is not None else (asked.until or 0.0) - NOW
        assert 0 < span <= lease_body.LONGEST
        assert (asked.uid, asked.cgroup, asked.pid) != (None, None, None)
        for number in (asked.uid, asked.pid):
            assert number is None or 0 <= number < 1 << 32
        return self._root("lease", by)

    async def end_lease(self, number: int, by: int) -> Json:
        assert isinstance(number, int)
        return self._root("delete-lease", by)

    def _root(self, what: str, by: int, timeout: float | None = None, pid: int = 1) -> Json:
        assert by == 0
        assert timeout is None or (math.isfinite(timeout) and 0 <= timeout <= 366 * 86400)
        return self._did(what, pid)

    def _did(self, what: str, pid: int) -> Json:
        assert 0 < pid < 1 << 32
        self.done.append(what)
        return {"ok": True}


_LOOP = asyncio.new_event_loop()


def order(data: bytes) -> None:
    """Each is carried out for who may give it, or refused with a Problem that can be told."""
    for uid in (0, 1001):
        taken = Taken()

        async def is_admin(_: int) -> bool:
            return False

        orders = Orders(taken, is_admin, lambda error: None)  # type: ignore[arg-type]
        problem: Problem | None = None
        try:
            answer = _LOOP.run_until_complete(orders._carry_out(data, 500, uid))
        except Problem as refused:
            problem, answer = refused, refused.body()
        if problem is not None:
            assert 400 <= problem.status < 500
            assert len(problem.what) < 2000, "an answer that grows with the question"
            assert taken.done == []
        assert len(json.dumps(answer)) < 16384
        assert uid == 0 or set(taken.done) <= {"terminate", "terminate-each"}


def orders() -> Iterable[bytes]:
    some: dict[str, tuple[Json, ...]] = {
        "terminate": ({"pid": OWN}, {"pid": OTHERS, "now": True, "dry_run": True}),
        "terminate-each": ({"job": "job-7"}, {"cgroup": "/slurm/*"}, {"mine": True}, {"below": True, "now": True}),
        "drain": ({"timeout": 5.5, "instance": "left"}, {"timeout": None}),
        "restart-mps": ({"timeout": "10m", "dry_run": True},),
        "lease": (
            {"uid": 1001, "threads": 20, "memory": "4G", "until": "2h", "name": "job-7"},
            {"pid": 71, "threads": {"sms": 26}, "memory": {"0": "25%", "GPU-abc": "1G"}, "until": "2h"},
            {"cgroup": "/slurm/*", "threads": {"clients": 4, "rule": "even"}, "until": "2026-11-24T00:00:00+01:00"},
        ),
        "delete-lease": ({"number": 3},),
    }
    for name in ORDERS:
        for body in some.get(name, ({},)):
            yield json.dumps({"order": name, **body}).encode()


# --- MPS's logs ------------------------------------------------------------------------------------------------------

SOURCES: tuple[Source, ...] = ("control", "server", "merged")


def log_lines(data: bytes) -> None:
    """Any text, in any pieces: the same lines, each bounded; and a skimmed log gives the same as one that was read."""
    source = SOURCES[data[0] % 3 if data else 0]
    size = 1 + (data[1] if len(data) > 1 else 0)
    text = data[2:]
    whole, pieces = LogParser(source), LogParser(source)
    lines = [*whole.feed(text), *whole.close()]
    cut = [one for at in range(0, len(text), size) for one in pieces.feed(text[at : at + size])]
    assert [*cut, *pieces.close()] == lines, "other pieces, other lines"
    assert len(lines) <= text.count(b"\n") + 1
    for line in lines:
        assert len(line.text) <= 4096
        assert math.isfinite(line.at)
        assert all(abs(one) < 10**10 for one in (line.server, line.pid, line.uid, line.context, line.device))
        assert 0 <= line.size < 1 << 64
        assert 0.0 <= line.percent < 1000.0
        assert source == "merged" or line.what not in (ev.SERVER_LOG if source == "control" else ())
    if source == "control":
        _skimmed(text, size)


HARMLESS = (ev.ConnectionLine, ev.CommandRead, ev.CommandAnswer, ev.ClientQueued, ev.ClientAdmitted, ev.Harmless,
            ev.Unknown)  # fmt: skip
_AFTER = b"4242\n[2026-11-21 00:00:09.000 Control   471] UI closed\n"


def _skimmed(text: bytes, size: int) -> None:
    one, skimmer, other = LogParser("control"), Skimmer(), LogParser("control")
    short = [line for at in range(0, len(text), size) for line in one.feed(skimmer.take(text[at : at + size]))]
    short += one.feed(skimmer.end())
    full = other.feed(text)
    short, full = short + one.feed(_AFTER), full + other.feed(_AFTER)
    assert [each for each in short if each.what not in HARMLESS] == [
        each for each in full if each.what not in HARMLESS
    ], "skimmed and read differ"


def logs() -> Iterable[bytes]:
    for name in recordings.names():
        for part in recordings.sections(name).values():
            for which, text in ((0, part.control), (1, part.server), (2, part.control[:600] + part.server[:600])):
                lines = text.splitlines(keepends=True)
                for at in range(0, min(len(lines), 200), 25):
                    yield bytes([which, 40]) + b"".join(lines[at : at + 25])


# --- policies --------------------------------------------------------------------------------------------------------

DEVICES = [Device(0, "GPU-a", "", 139 << 30, 132), Device(1, "GPU-b", "", 16 << 30, 10)]
USERS = (Identity(1001, "alice", ("students",)), Identity(0, "root"), Identity(4_000_000_000, "4000000000"))


def policy(data: bytes) -> None:
    """A policy or mistakes that say where; and what a policy gives is what MPS can be told."""
    texts = [(f"{place}.toml", text) for place, text in enumerate(data.decode("utf-8", "replace").split("\0")[:3])]
    found, errors = load(texts, syntax_error)
    assert (found is None) == bool(errors)
    lines = {name: text.count("\n") + 1 for name, text in texts}
    for error in (*errors, *load(texts)[1], *(in_itself(found, texts) if found is not None else ())):
        assert str(error).isprintable()
        assert error.problem
        assert len(str(error)) < 2000
        assert 0 <= error.line <= lines.get(error.file, 0)
    if found is None:
        return
    assert load(texts)[0] == found
    json.dumps(found.sections())
    strictest = found.fail_safe(DEVICES)
    for who in USERS:
        rules = found.rules(who)
        limits = rules.limits(DEVICES)
        assert 0.1 <= limits.threads <= 100.0
        assert strictest.threads <= limits.threads
        for size in limits.memory.values():
            assert size >= 1 << 20
        for device in DEVICES:
            own, least = limits.memory.get(device.ordinal), strictest.memory.get(device.ordinal)
            assert own is None or least is not None
            assert own is None or least is None or least <= own
        json.dumps(rules.explain(DEVICES))


def policies() -> Iterable[bytes]:
    for path in sorted((ROOT / "policies").glob("*.toml")):
        yield path.read_bytes()
    for page in ("policy.md", "operations.md", "jobs.md", "first-hour.md"):
        for block in re.findall(r"(?:^    .*\n|^\n)+", (ROOT / "docs" / page).read_text(), re.MULTILINE):
            if "[" in block and " = " in block:
                yield textwrap.dedent(block).encode()


# --- what lies on disk -----------------------------------------------------------------------------------------------

_DIRECTORY = tempfile.TemporaryDirectory(prefix="mpsagent-fuzz-")
STATE = Path(_DIRECTORY.name) / "state.json"
ALICE = Peer(71, 20002, 20002, 5)
_POLICY = load([("p", '[limits]\nactive_threads = "20%"\n[instance.gpu]\nsharing = "turns"\nserver_scope = "all"\n')])[
    0
]


def state(data: bytes) -> None:
    """An agent starts with whatever lies there, and what it takes up it keeps in the same form."""
    STATE.write_bytes(data)
    STATE.chmod(0o600)
    kept = Store(STATE).load()
    kept.pop(saved.CLOCK, None)
    kept = saved.moved(kept, 3600.0)
    rows = _taken_up(kept)
    again = json.loads(json.dumps(rows, allow_nan=False))
    assert _taken_up(again) == rows, "what was taken up and kept is another thing the next time"


def _taken_up(kept: dict[str, Any]) -> dict[str, Any]:
    """As the agent's start does it; what is kept then."""
    assert _POLICY is not None
    core = Core()
    core.absorb([inp.PolicyChanged(NOW, _POLICY), inp.ControlRuns(NOW, 50, NOW - 1, "/p/control")])
    core.absorb([*saved.drain(kept, NOW), *saved.leases(kept, NOW)])
    told: list[inp.Input] = [known(NOW, ALICE, 900.0, Limits(20.0))]
    there = [one for one in saved.clients(kept, NOW).values() if one.peer.pid != ALICE.pid]
    assert all(math.isfinite(one.what.waited) and one.what.since <= NOW for one in there)
    told += [inp.ClientRemembered(NOW, one.peer, one.what) for one in there]
    said = [inp.GateSaid(NOW, link.Hello(60, 1000.0)), *told, inp.GateSaid(NOW, link.Synced())]
    saved.take_up_turn(core, kept, said, NOW)
    core.receive_all([*said, saved.ending(kept, NOW)], NOW)
    drain = core.state.drain
    return {
        "drain": None if drain is None else {"since": drain.since, "until": drain.until, "restart": drain.restart},
        "turn": saved.turn_row(core),
        "served": saved.ROWS["served"].write(core),
        "suspended": saved.ROWS["suspended"].write(core),
        "leases": saved.lease_rows(core), "waiting": sorted(saved.waited_here(kept)),
        "clients": saved.client_rows(core), "released": saved.released(kept),
    }  # fmt: skip


CLIENT = {
    "pid": 72, "start": 5, "uid": 20001, "gid": 20001, "cgroup": "/a", "lane": 20001, "since": NOW - 9, "waited": 2.5,
    "limits": {"threads": 40.0, "memory": {"0": 5}}, "most_memory": {"0": 7}, "fail_safe": True, "connections": 3,
    "terminated": False, "outcome": "faulted", "lease": 4, "job": "slurm-7",
}  # fmt: skip


def states() -> Iterable[bytes]:
    released = ROOT / "tests" / "data" / "released"
    for path in sorted(released.rglob("state.json")):
        yield path.read_bytes()
    ending = [[71, 5, 20002, "by order", "people", False]]
    values = {
        "ending": ending, "waiting": [20002], "suspended": [[1, NOW]],
        "clients": [CLIENT, {**CLIENT, "pid": 73, "limits": None, "most_memory": None, "lane": None}],
        "released": [[74, 5]], "served": [[20001, NOW - 9]], "turn": [20002, NOW - 9, NOW - 5, NOW - 3, NOW - 1],
        "drain": {"since": NOW - 9, "until": NOW + 60, "restart": True}, "left/drain": None, "clock": ["x", 1.5],
    }  # fmt: skip
    yield json.dumps({"version": 1, "values": values}).encode()


def names(data: bytes) -> None:
    """Of descriptors in the store: one that is understood is said again as it was understood."""
    for text in data.decode("utf-8", "replace").split("\n")[:8]:
        found = parse_name(text)
        if found is not None:
            assert len(str(found)) <= 255
            assert parse_name(str(found)) == found


def name_seeds() -> Iterable[bytes]:
    yield b"c1Ab.9z\np1Ab.9z\nk1.2.3.4\nu1.2.3.4.5k.0=4gfFC3@left"
    yield b"d1.2.3.4.1.5k.0=4gfFC3.1=4gfFC3.-@left\nk1.2.3.4@a.b"


OF_COMMANDS = (b"get_", b"set_", b"quit", b"ps", b"Unknown command", b"not found")
OF_LOGS = tuple(
    sorted({part.encode() for table in (ev._CONTROL, ev._SERVER) for part in re.findall(r"[A-Za-z ]{6,40}", table)})
)
OF_POLICIES = (
    b"threads", b"memory", b"{ sms = 26 }", b"{ clients = 4 }", b"{ weight = 2 }", b"[user.alice]", b"[group.students]",
    b"[instance.left]", b'sharing = "per-user"', b'"25%"', b'"20G"', b"[instance.left.limits]", b"total_threads",
    b"total_memory", b"max_clients", b"enforce", b"'''", b'"""', b"nan", b"inf", b"1979-05-27T07:32:00Z", b"0x10",
    b"\\U0010ffff", b"turn.time_limit",
)  # fmt: skip

TARGETS = {
    "handshake": Target(handshake, handshakes, words=OF_COMMANDS),
    "hand-over": Target(hand_over, hand_overs),
    "link": Target(packet, packets, json=True),
    "orders": Target(order, orders, json=True),
    "log-lines": Target(log_lines, logs, words=OF_LOGS),
    "policy": Target(policy, policies, words=OF_POLICIES),
    "state": Target(state, states, json=True),
    "names": Target(names, name_seeds),
}
