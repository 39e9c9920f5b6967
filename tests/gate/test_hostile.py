"""Peers that mean no good: others are served all the same, and what one user can hold of the gate has a bound."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mpsagent.gate.public import AT_A_TIME, MOST_UNFINISHED_OF_A_USER, STORED
from mpsagent.gate.queue import MOST_HELD, MOST_HELD_OF_A_USER
from mpsagent.wire.link import Knock, Refused, Synced, User
from tests.gate.rig import A, B, Rig, admissions, descriptor, introduce, limits, raw
from tests.lingering import SECONDS, lingering, needs_refusal
from tests.waiting import until

pytestmark = pytest.mark.root

_HOSTILE = r"""
import os, socket, struct, sys, time
path, uid, how, count = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
import resource
import signal
resource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))
os.setgroups([]); os.setgid(uid); os.setuid(uid)
CRED, who = b"OUTBCRED\0", struct.pack("iII", os.getpid(), uid, uid)
def connect():
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.connect(path)
    return s
def attack(s):
    creds = [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, who)]
    if how == "silent": return
    s.recv(64)
    if how == "greeted": return
    if how == "garbage":
        s.send(os.urandom(48))
    elif how == "long":
        s.send(b"x" * 100_000)
    elif how == "credentials":
        s.sendmsg([CRED], creds)
    elif how == "kind":
        s.sendmsg([CRED], creds); s.send(struct.pack("<I", 7))
    elif how == "descriptors":
        s.sendmsg([CRED], [*creds, (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("8i", *[0] * 8))])
        s.sendmsg([b"\2\0\0\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("8i", *[0] * 8))])
    elif how == "vanish":
        s.sendmsg([CRED], creds); s.send(b"\2\0\0\0"); s.close()
    elif how == "held":
        s.sendmsg([CRED], creds); s.send(b"\2\0\0\0")
    elif how == "talk":
        s.sendmsg([CRED], creds); s.send(b"\2\0\0\0")
        for _ in range(50): s.send(b"more")
    elif how == "front-end":
        s.sendmsg([CRED], creds); s.send(b"\4\0\0\0"); s.send(struct.pack("<Q", 5))
kept = []
for _ in range(count):
    try:
        s = connect(); kept.append(s); attack(s)
    except OSError: pass
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "again":
        kept.clear()
        for _ in range(count):
            try:
                s = connect(); kept.append(s); attack(s)
            except OSError: pass
        print("ready", flush=True)
"""


@contextmanager
def hostile(rig: Rig, how: str, count: int = 500, uid: int = B) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-I", "-S", "-c", _HOSTILE, str(rig.public / "control"), str(uid), how, str(count)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stdin.close()


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


WAYS = ["silent", "greeted", "garbage", "long", "credentials", "kind", "descriptors", "vanish", "talk", "front-end"]


@pytest.mark.parametrize("how", WAYS)
def test_others_are_served_beside(rig: Rig, how: str) -> None:
    rig.start(admissions(User(A, "all", limits(30))))
    rig.client(A).served()
    usual = descriptors(rig.gate_pid())
    pid = rig.gate_pid()
    with hostile(rig, how):
        rig.client(A).served()
        # who sends descriptors is a client otherwise, and held; what was sent along is not even installed
        until(lambda: descriptors(pid) <= usual + 20 + 500)
    # nothing of it stays behind, neither here nor in the store
    assert rig.keeper is not None
    until(lambda: descriptors(pid) <= usual + 4)
    keeper = rig.keeper.pid
    until(lambda: descriptors(keeper) <= 20)
    assert rig.gate_pid() == pid


def test_who_says_nothing_holds_so_many_descriptors_and_then_loses_the_oldest(rig: Rig) -> None:
    rig.start(admissions(User(A, "all", limits(30))))
    rig.client(A).served()
    pid = rig.gate_pid()
    usual = descriptors(pid)
    with hostile(rig, "greeted", MOST_UNFINISHED_OF_A_USER + 300):
        rig.client(A).served()
        assert descriptors(pid) <= usual + 20 + MOST_UNFINISHED_OF_A_USER
        assert descriptors(pid) >= usual + MOST_UNFINISHED_OF_A_USER // 2, "they are still there"
    until(lambda: descriptors(pid) <= usual + 4)


def test_a_crowd_of_one_user_that_is_greeted_together_is_heard_out(rig: Rig) -> None:
    """None has said a word when the last one comes."""
    _, agent = rig.start(admissions(open=False))
    with ExitStack() as stack:
        crowd = [stack.enter_context(raw(rig.public / "control")) for _ in range(300)]
        for one in crowd:
            introduce(one)
        until(lambda: len(agent.all(Knock)) == len(crowd))


def test_a_user_who_reconnects_without_end_keeps_nobody_out(rig: Rig) -> None:
    rig.start(admissions(User(A, "all", limits(30))))
    with hostile(rig, "vanish", 200) as process:
        assert process.stdin is not None
        for _ in range(5):
            process.stdin.write("again\n" * 5)
            process.stdin.flush()
            rig.client(A).served()


def test_two_thousand_are_held_come_back_and_are_served_in_order(rig: Rig) -> None:
    """Of two users, because one may have 1,024."""
    daemon = rig.start_daemon()
    rig.start_gate()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    socks = []
    try:
        with hostile(rig, "held", 1000):
            socks = [introduce(raw(rig.public / "control")) for _ in range(1000)]
            agent = rig.agent()
            agent.wait(Knock, 2000)
            rig.kill_gate()
            agent = rig.agent()
            agent.wait(Synced)
            knocks = agent.all(Knock)
            assert len(knocks) == 2000
            assert [one.connection for one in knocks] == sorted(one.connection for one in knocks)
            agent.say(admissions(User(0, "all", limits(30)), set_limits=False))
            for sock in socks[:30]:  # of one process: a server takes 48 contexts
                descriptor(sock)
            rig.client(A).waiting()
        until(lambda: len(daemon.saw("acknowledged")) >= 30)
    finally:
        for sock in socks:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_user_who_holds_too_many_is_refused_and_nobody_else(rig: Rig) -> None:
    _, agent = rig.start()
    agent.wait(Synced)
    with hostile(rig, "held", 1030):
        agent.wait(Refused, 6)
        assert len(agent.all(Knock)) == 1024
        agent.say(admissions(User(A, "all", limits(30))))
        rig.client(A).served()


def test_a_user_with_many_uids_takes_no_place_from_others(rig: Rig) -> None:
    """Subordinate ids: each of them may hold 1,024, and eight of them all there is."""
    _, agent = rig.start()
    agent.wait(Synced)
    with ExitStack() as crowd:
        for uid in range(20100, 20100 + MOST_HELD // MOST_HELD_OF_A_USER):
            crowd.enter_context(hostile(rig, "held", MOST_HELD_OF_A_USER, uid))
        agent.say(admissions(User(A, "all", limits(30))))
        rig.client(A).served()
        assert agent.wait(Refused).uid >= 20100


def test_a_user_with_many_uids_does_not_flood_the_service_manager(rig: Rig) -> None:
    """Each connection that was accepted went into the store and out of it, 100 a second of each uid: thousands."""
    count, kept = 3000, []
    rig.start(admissions(User(A, "all", limits(30))))
    rig.client(A).served()
    assert rig.keeper is not None
    keeper = rig.keeper.pid
    usual = descriptors(keeper)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    begun = time.monotonic()
    try:
        for uid in range(100_000, 100_000 + count):
            os.seteuid(uid)  # what root of a user namespace can do with the uids that it has
            try:
                kept.append(raw(rig.public / "control"))
            finally:
                os.seteuid(0)
        rig.client(A).served()
        most = STORED.burst_all + STORED.rate_all * (time.monotonic() - begun)
        assert descriptors(keeper) <= usual + most + 20
    finally:
        for sock in kept:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_descriptor_that_takes_long_to_close_is_not_taken(rig: Rig) -> None:
    """The gate stood still for as long as its sender liked: it is the receiver of a message who closes what came."""
    needs_refusal()
    rig.start(admissions(User(A, "all", limits(30))))
    rig.client(A).served()
    pid = rig.gate_pid()
    begun = time.monotonic()
    with lingering(rig.public / "control", socket.SOCK_SEQPACKET, B) as became:
        assert became == "refused"
        rig.client(A).served()
        assert time.monotonic() - begun < SECONDS / 2
    rig.kill_gate()  # the next one gets the listening socket as it is
    assert rig.gate_pid() != pid
    with lingering(rig.public / "control", socket.SOCK_SEQPACKET, B) as became:
        assert became == "refused"


def before_6_16(where: Path, monkeypatch: pytest.MonkeyPatch, more: str = "") -> None:
    """For gates that are started from now on: the kernel cannot refuse descriptors."""
    script = f"import mpsagent.linux.sent_descriptors as one; one.SO_PASSRIGHTS = 9999\n{more}"
    (where / "sitecustomize.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", f"{where}:{Path(__file__).parents[2]}")


def test_where_it_cannot_be_refused_nobody_waits_for_it(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Linux 6.16. The gate is stopped meanwhile, so that the last one who has the descriptor is the gate."""
    before_6_16(tmp_path, monkeypatch)
    rig.start(admissions(User(A, "all", limits(30))))
    rig.client(A).served()
    os.kill(rig.gate_pid(), signal.SIGSTOP)
    begun = time.monotonic()
    with lingering(rig.public / "control", socket.SOCK_SEQPACKET, B) as became:
        assert became == "sent"
        os.kill(rig.gate_pid(), signal.SIGCONT)
        rig.client(A).served()
        assert time.monotonic() - begun < SECONDS / 2


def test_an_agent_that_does_not_read_holds_up_nobody(rig: Rig) -> None:
    rig.start(admissions(User(A, "all", limits(30))))
    with hostile(rig, "vanish", 2000):
        rig.client(A).served()
    rig.agent().wait(Synced)


def test_what_a_client_says_while_it_is_held_ends_it(rig: Rig) -> None:
    _, agent = rig.start()
    sock = introduce(raw(rig.public / "control"))
    agent.wait(Knock)
    sock.send(b"let me in")
    assert agent.wait(Refused).why == "sent something while it was held"
    assert sock.recv(64) == b""


def test_credentials_that_are_not_ones_own_cannot_even_be_sent(rig: Rig) -> None:
    """The kernel's promise on which everything rests."""
    rig.start_gate()
    script = (
        "import os, socket, struct, sys\n"
        f"os.setgroups([]); os.setgid({A}); os.setuid({A})\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1]); s.recv(64)\n"
        "for who in ((1, 0, 0), (os.getpid(), 0, 0)):\n"
        "    try: s.sendmsg([b'OUTBCRED\\0'], [(1, 2, struct.pack('iII', *who))]); print('sent')\n"
        "    except PermissionError: print('refused')\n"
    )
    words = [sys.executable, "-I", "-c", script, str(rig.public / "control")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["refused", "refused"], done.stderr


_SLOW = r"""
import array, os, resource, select, socket, sys
path, uid = sys.argv[1], int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))
os.setgroups([]); os.setgid(uid); os.setuid(uid)
events = [os.eventfd(0) for _ in range(7500)]
slow = [select.epoll() for _ in range(40)]
for one in slow:
    for event in events: one.register(event, select.EPOLLIN)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); sock.connect(path)
for first in sys.argv[3:]: sock.send(first.encode() + b"\0")
sock.sendmsg([b"GET "], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [one.fileno() for one in slow]))])
for one in slow: one.close()
print("sent", flush=True)
sys.stdin.read()
"""
"""Sends what takes whoever closes it some tenths of a second in the kernel; nothing interrupts that."""


@contextmanager
def slow_to_close(path: Path, uids: range, *first: str) -> Iterator[None]:
    with ExitStack() as stack:
        sent = []
        for uid in uids:
            words = [sys.executable, "-I", "-S", "-c", _SLOW, str(path), str(uid), *first]
            one = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(one)
            stack.callback(one.kill)
            sent.append(one)
        for one in sent:
            assert one.stdout is not None
            assert one.stdout.readline() == "sent\n"
        yield


def cost_to_close(path: Path) -> float:
    """Return the CPU time in seconds that the close of one of them takes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen()
        with slow_to_close(path, range(40000, 40001)):
            taken, _ = listener.accept()
            begun = time.thread_time()
            taken.close()
            return time.thread_time() - begun


def spent(pid: int) -> tuple[float, float]:
    """Return the CPU time in seconds of a process's main thread, and that of its other threads together."""
    found = {}
    for path in Path(f"/proc/{pid}/task").iterdir():
        fields = (path / "stat").read_text().rpartition(")")[2].split()
        found[int(path.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    main = found.pop(pid)
    return main, sum(found.values())


@pytest.mark.long
@pytest.mark.parametrize("first", [(), ("OUTBCRED",)])
def test_what_cannot_be_interrupted_is_closed_elsewhere(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: tuple[str, ...]
) -> None:
    """Before Linux 6.16. The gate stood until all was closed that some users had sent. The time is CPU time,
    by thread: on a busy machine everything takes longer, and the loop's thread closes nothing all the same."""
    before_6_16(tmp_path, monkeypatch)
    rig.start(admissions(User(A, "all", limits(30))))
    rig.client(A).served()
    gate, each = rig.gate_pid(), cost_to_close(rig.public / "other")
    os.kill(gate, signal.SIGSTOP)
    uids, before = range(40001, 40001 + 8), spent(gate)
    with slow_to_close(rig.public / "control", uids, *first):
        os.kill(gate, signal.SIGCONT)
        rig.client(A).served()
        until(lambda: sum(spent(gate)) - sum(before) > each * len(uids) / 2)
        loop, others = (now - then for now, then in zip(spent(gate), before, strict=True))
        assert loop < others


def test_while_too_many_wait_to_be_closed_no_more_are_accepted_and_root_is(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes one of the gate's descriptors. Here nothing is closed at all."""
    most = 64
    before_6_16(tmp_path, monkeypatch, f"one._close = lambda _: None; one.MOST_CLOSING = {most}")
    rig.start(admissions(User(A, "all", limits(30))))
    usual = descriptors(rig.gate_pid())
    for _ in range(10 * AT_A_TIME):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(str(rig.public / "control"))
    until(lambda: descriptors(rig.gate_pid()) > most)
    for _ in range(20):  # it has had time to accept them all
        raw(rig.public / "control_privileged").close()
    assert descriptors(rig.gate_pid()) <= usual + most + 2 * AT_A_TIME + 20
