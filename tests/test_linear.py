"""Whatever stands in a log, ten times as much of it costs ten times the work: nobody stops an agent by making it read.

300,000 lines of clients with a sticky error once took 100 s, and a replay with 20,000 waiting clients 79 s. What is
measured is processor time: of ten equal pieces, one after the other, against ten times the first.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from datetime import UTC

import pytest

from mpsagent.core import caps
from mpsagent.core import inputs as inp
from mpsagent.core.coordinator import Core
from mpsagent.core.waiting import waiting
from mpsagent.mps.limits import Device, Limits
from mpsagent.mps.loglines import LogParser
from mpsagent.mps.skim import Skimmer
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.policy.policy import Rules
from mpsagent.wire import link
from mpsagent_tools.logged import Logged
from tests.agent.forgery import CONTROL, SERVER
from tests.core.said import knocked

PIECES, LINES, MOST = 10, 150, 12.0
WARM = 1200
"""Lines that come first: what is kept of the state has bounds, up to which each line costs a little more."""
ATTEMPTS = 40
DEVICES = (Device(0, "GPU-0", "assumed", 143155 << 20, 132),)
QUEUED = "NEW CLIENT {p} from user {u}: Server is not ready, push client to pending list"
COMES_AND_GOES = ("NEW SERVER {p}: Ready", "Server {p} exited with status 0")
# Lines that do more together than each alone; the rest is one kind of line again and again.
TOGETHER = {
    "waiting and exits": ("Control", (QUEUED, "Server {p} exited with status 0")),
    "waiting and given up": ("Control", (QUEUED, "Removed Shm file at /dev/shm/x")),
    "waiting and another's servers": (
        "Control", (QUEUED, "Starting new server {p} for user 5", *COMES_AND_GOES),
    ),
    "served": (
        "Control", (QUEUED, "Starting new server {p} for user {u}", *COMES_AND_GOES),
    ),
}  # fmt: skip
KINDS = {
    **{f"Control: {text[:40]}": ("Control", (text,)) for text in CONTROL},
    **{f"Server: {text[:40]}": ("Server", (text,)) for text in SERVER},
    **TOGETHER,
    "all of control.log": ("Control", CONTROL),
    "all of server.log": ("Server", SERVER),
}
Feed = Callable[[bytes], object]


def lines(who: str, texts: tuple[str, ...], count: int) -> Iterator[bytes]:
    """Each round about another process of another user, a few in each millisecond."""
    head, rounds = 40 if who == "Control" else 61, random.Random(10)
    for number in range(count):
        said = texts[number % len(texts)] if len(texts) < 10 else rounds.choice(texts)
        at, process = number // 5, number // len(texts)
        text = said.format(p=100_000 + process, u=1000 + process, socket="/p/control")
        yield f"[2026-11-20 23:{at // 60_000:02}:{at // 1000 % 60:02}.{at % 1000:03} {who} {head:5}] {text}\n".encode()


BEGIN = (
    b"[2026-11-20 23:00:00.000 Control    40] Starting control daemon using socket /p/control\n"
    b"[2026-11-20 23:00:00.000 Control    40] Starting new server 61 for user 1000\n"
    b"[2026-11-20 23:00:00.000 Control    40] NEW SERVER 61: Ready\n",
    b"[2026-11-20 23:00:00.000 Server    61] Client {PID: 7, Context ID: 1} connected\n"
    b"[2026-11-20 23:00:00.000 Server    61] Server is handling a fatal GPU error.\n"
    b"[2026-11-20 23:00:00.000 Server    61] The following clients have a sticky error set:\n",
)


def agent(who: str) -> Feed:
    """What the running agent does with it."""
    core, now = Core(), 2e9
    policy, _ = load([("policy.toml", "")])
    assert policy is not None
    start = [
        inp.PolicyChanged(0, policy),
        inp.DevicesFound(0, DEVICES),
        inp.GateSaid(0, link.Hello(1, 1000.0)),
        inp.GateSaid(0, link.Synced()),
    ]
    core.receive_all([*start, inp.ControlRuns(0.0, 40, 0.0, "/p/control")], now)
    both = LogParser("control", UTC), LogParser("server", UTC)
    for parser, begin in zip(both, BEGIN, strict=True):
        core.receive_all(parser.feed(begin), now)
    parser = both[who == "Server"]
    return lambda data: core.receive_all(parser.feed(data), now)


def replay(who: str) -> Feed:
    return _fold(who, Logged().feed)


def _fold(who: str, feed: Callable[[object], None]) -> Feed:
    both = LogParser("control", UTC), LogParser("server", UTC)
    parser = both[who == "Server"]

    def take(data: bytes) -> None:
        for event in parser.feed(data):
            feed(event)

    for one, begin in zip(both, BEGIN, strict=True):
        for event in one.feed(begin):
            feed(event)
    return take


def start(who: str) -> Feed:
    """What a start does with it; a part without the end of a line too."""
    skimmer = Skimmer()
    return lambda data: skimmer.take(data)


@pytest.mark.parametrize("reader", [agent, replay])
@pytest.mark.parametrize("kind", KINDS)
def test_ten_times_the_lines_take_ten_times_the_work(kind: str, reader: Callable[[str], Feed]) -> None:
    who, texts = KINDS[kind]
    written = list(lines(who, texts, WARM + PIECES * LINES))
    pieces = [written[:WARM], *(written[at : at + LINES] for at in range(WARM, len(written), LINES))]
    assert_linear(lambda: reader(who), [b"".join(one) for one in pieces])


@pytest.mark.parametrize("reader", [agent, replay, start])
@pytest.mark.parametrize("text", [b"\0", b"x", b"\n", b"\0\n", b"[", b"Cmd:quit\n"])
def test_neither_do_bytes_that_are_no_lines(text: bytes, reader: Callable[[str], Feed]) -> None:
    """A file with a hole, a line without an end."""
    piece = text * ((400_000 if reader is start else 40_000) // len(text))
    assert_linear(lambda: reader("Control"), [piece] * (PIECES + 1))


@pytest.mark.parametrize("text", ["", '[user.5]\naccess = "deny"\n[group.g]\nturn.time_limit = "1h"\n'])
def test_ten_times_the_users_who_wait_take_ten_times_the_work(text: str) -> None:
    """With 3,000 uids (subordinate ids of one user) an agent took all of a processor though nothing happened, and what
    it was asked took 25 s: rules were kept for 1,024 users."""
    both = _waiting(text, 400), _waiting(text, 4000)
    quickest = [float("inf")] * 2
    for attempt in range(ATTEMPTS):
        for number, core in enumerate(both):
            begun = time.process_time()
            core.tick(1e9)
            assert len(waiting(core.view(), 1e9)) == len(core.state.held)
            if attempt:  # the first time everything is new
                quickest[number] = min(quickest[number], time.process_time() - begun)
        if attempt and quickest[1] <= 2 * MOST * quickest[0]:
            return
    raise AssertionError([f"{1000 * one:.1f} ms" for one in quickest])


def test_ten_times_the_users_at_work_take_ten_times_the_work() -> None:
    """For each user all clients were looked through."""
    policy, _ = load([("policy.toml", '[limits]\nmax_runtime = "1h"\n')])
    assert policy is not None
    both = [Core(), Core()]
    for core, users in zip(both, (300, 3000), strict=True):
        known = [link.Known(pid, 100_000 + pid, 0, 1, 1.0, Limits(20.0)) for pid in range(1, users + 1)]
        names = {one.uid: Identity(one.uid) for one in known}
        said = [link.Hello(1, 1000.0), *known, link.Synced()]
        core.receive_all([inp.PolicyChanged(0, policy), inp.DevicesFound(0, DEVICES), inp.PeopleKnown(0.5, names),
                          *(inp.GateSaid(1.0, one) for one in said)], 2.0)  # fmt: skip
        assert len(core.state.clients) == users
    quickest = [float("inf")] * 2
    for _ in range(ATTEMPTS):
        for number, core in enumerate(both):
            view, begun = core.view(), time.process_time()
            caps.decide(view, caps.Memory(), 3.0)
            quickest[number] = min(quickest[number], time.process_time() - begun)
        if quickest[1] <= 2 * MOST * quickest[0]:
            return
    raise AssertionError([f"{1000 * one:.1f} ms" for one in quickest])


def test_what_changes_nothing_for_users_works_out_no_user_s_limits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """468,799 rows of tables were made in 4,808 looks of an engine with 300 users, together."""
    core, made = (
        _waiting('[limits]\nactive_threads = "20%"\n[instance.gpu]\nsharing = "one-server"\n', 100),
        list[int](),
    )
    limits = Rules.limits
    monkeypatch.setattr(Rules, "limits", lambda rules, devices: made.append(rules.who.uid) or limits(rules, devices))
    core.receive(inp.ControlRuns(2e9, 40, 2e9, "/p/control", True), 2e9)
    assert sorted(made) == [one.uid for one in core.view().state.held.values()]
    core.receive(inp.GateSaid(2e9, link.Handing(7, 7, 100_007, 2e9)), 2e9)
    core.receive(inp.GateSaid(2e9, link.Left(100)), 2e9)
    sent = core.view().sent
    assert (len(made), sent is not None and len(sent[1].users)) == (100, 99)


def _waiting(text: str, users: int) -> Core:
    core, (policy, _) = Core(), load([("policy.toml", text)])
    assert policy is not None
    peers = [inp.Peer(pid, 100_000 + pid, 0, 1) for pid in range(1, users + 1)]
    told = [knocked(1.0, one.pid, one, 1.0) for one in peers]
    names = {one.uid: Identity(one.uid) for one in peers}
    start: list[inp.Input] = [
        inp.PolicyChanged(0, policy),
        inp.DevicesFound(0, DEVICES),
        inp.GateSaid(0, link.Hello(1, 1000.0)),
        *told,
    ]
    core.receive_all([*start, inp.GateSaid(1.0, link.Synced()), inp.PeopleKnown(1.0, names)], 1e9)
    return core


def assert_linear(make: Callable[[], Feed], pieces: list[bytes]) -> None:
    """Another program may take the processor in between: of each piece the quickest of a few attempts counts."""
    quickest = [float("inf")] * PIECES
    for _ in range(ATTEMPTS):
        feed = make()
        feed(pieces[0])
        gc.collect()
        gc.disable()
        try:
            for number, piece in enumerate(pieces[1:]):
                begun = time.process_time()
                for at in range(0, len(piece), 65_536):
                    feed(piece[at : at + 65_536])
                quickest[number] = min(quickest[number], time.process_time() - begun)
        finally:
            gc.enable()
        if sum(quickest) <= MOST * quickest[0]:
            return
    raise AssertionError([f"{1000 * one:.1f} ms" for one in quickest])
