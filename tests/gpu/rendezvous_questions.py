#!/usr/bin/env python3
"""Questions to a real MPS about the rendezvous at its control socket, each asked in a few seconds.

    rendezvous_questions.py [--out DIR] [--only 1,5] [--seconds 225] [--sim | --control PROGRAM --libraries DIR]

Root and a GPU with a driver that knows --multiuser-server. Prints `ANSWER n: ...` lines and writes everything to
DIR/rendezvous-questions.txt ($OUT if that is set). Nothing that it started is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.conformance.backends import other_users_python, real_backend, sim_backend
from tests.gpu.rendezvous_bench import (
    CREDENTIALS,
    FRONT_END,
    SCM_CREDENTIALS,
    SO_PASSCRED,
    Bench,
    Connection,
    Daemon,
    Output,
)  # fmt: skip

A, B, C = 20001, 20002, 20003
LARGE, SMALL = ("60", "20G"), ("20", "4G")  # 78 and 26 of 132 multiprocessors
CHATTER = r"Accepting connection|NEW UI|UI closed|Cmd:|User did not send valid"
MULTI = ("--multiuser-server",)


class TooLong(BaseException):
    """A question is over its time."""


def form(options: tuple[str, ...]) -> str:
    return "multi-user" if options else "own server"


def which(seen: tuple[int, int] | None) -> str:
    """Which limits a client got: threads and memory apart."""
    if seen is None:
        return "not served"
    return f"threads {'first' if seen[0] > 50 else 'second'}, memory {'first' if seen[1] > 10000 else 'second'}"


def ready(bench: Bench, daemon: Daemon, uid: int) -> Output:
    """A client of `uid` that stays, so that a server is there."""
    found = bench.client(daemon, uid, "sleep", 200)
    found.said(r"\] sms ")
    return found


# --- 1. when limits are taken -----------------------------------------------------------------------------------------

# name -> what happens at which step of which connection (0: channel, 1: context). `second`/`first`: limits are set;
# `stop`: SIGSTOP; `second-continue`: limits, then SIGCONT a moment later.
PLANS: dict[str, dict[tuple[int, str], str]] = {
    "control: nothing is changed": {},
    "a0 second limits while the channel's descriptor is held back, first ones again before the context":
        {(0, "answered"): "second", (1, "asked"): "first"},
    "a1 second limits while the context's descriptor is held back": {(1, "answered"): "second"},
    "b1 context's descriptor passed, client stopped at once, second limits, continued":
        {(1, "passed"): "stop second continue"},
    "b0 client stopped before it can take the context's descriptor, second limits, continued":
        {(1, "answered"): "stop", (1, "passed"): "second continue"},
    "b2 client stopped at its acknowledgement for the context, second limits, continued":
        {(1, "acknowledged"): "stop second continue"},
    "c  second limits between channel and context": {(1, "asked"): "second"},
    "d  second limits for the channel only": {(0, "asked"): "second", (1, "asked"): "first"},
}  # fmt: skip


def limits_taken(bench: Bench) -> None:
    for options in (MULTI, ()):
        daemon = Daemon(bench, *options)
        daemon.limits(*LARGE)
        watched = 0
        plan: dict[tuple[int, str], str] = {}

        def hook(step: str, one: Connection) -> None:
            if one.pid != watched:  # noqa: B023
                return
            for word in plan.get((one.index, step), "").split():  # noqa: B023
                if word == "stop":
                    os.kill(one.pid, signal.SIGSTOP)
                elif word == "continue":
                    time.sleep(0.03)
                    os.kill(one.pid, signal.SIGCONT)
                elif not daemon.limits(*(SMALL if word == "second" else LARGE)):  # noqa: B023
                    blocked.append(step)  # noqa: B023

        bench.relay(daemon, hook)
        stays = ready(bench, daemon, A)
        if stays.seen() is None:
            bench.say(f"ANSWER 1 {options}: no client is served: {stays.short()}")
            daemon.show(skip=CHATTER)
            return
        for name, plan in PLANS.items():  # noqa: B007
            got: Counter[str] = Counter()
            blocked: list[str] = []
            for _ in range(5):
                if blocked:
                    got[f"daemon did not answer at `{blocked[-1]}`, limits not changed"] += 1
                    break
                daemon.limits(*LARGE)
                client = bench.client(daemon, A, "steps")
                watched = client.pid  # set before it can connect: it waits in `steps` for nothing, so be quick
                client.line()
                client.line()
                client.line()
                client.ended(15)
                got[which(client.seen())] += 1
            bench.say(f"ANSWER 1 {form(options)}: {name}: {dict(got)}")
        # A context that is made later by a process that is in already.
        daemon.limits(*LARGE)
        client = bench.client(daemon, A, "steps")
        client.line()
        client.said(r"\] sms ")
        daemon.limits(*SMALL)
        client.line()
        client.said("second sms", 5)
        client.line()
        client.ended(5)
        second = client.seen("second ")
        got_then = f"{which(second)}, {client.short()}"
        bench.say(f"ANSWER 1 {form(options)}: e  a second context after second limits: {got_then}")
        bench.between()
        first_of_all(bench, options)


def first_of_all(bench: Bench, options: tuple[str, ...]) -> None:
    """The client that starts the server: defaults changed while its descriptor is held back."""
    for name, step in (("changed before the hand-over", "asked"), ("changed while the descriptor is held", "answered")):
        daemon = Daemon(bench, *options)
        daemon.limits(*LARGE)

        def hook(at: str, one: Connection) -> None:
            if at == step and one.index == 0:  # noqa: B023
                changed.append(daemon.limits(*SMALL))  # noqa: B023

        changed: list[bool] = []
        bench.relay(daemon, hook)
        client = bench.client(daemon, A, "query")
        client.ended(20)
        got = which(client.seen())
        bench.say(f"ANSWER 1 {form(options)}: first client of a server, {name}: {got}; daemon answered: {changed}")
        bench.between()


# --- 2. credentials of the relay itself -------------------------------------------------------------------------------


def own_pid(bench: Bench) -> None:
    for options in (MULTI, ()):
        daemon = Daemon(bench, *options)
        daemon.limits(*LARGE)
        relay = bench.relay_process(daemon, "own-pid", "without-sys-admin")
        first, second = ready(bench, daemon, A), ready(bench, daemon, B if options else A)
        bench.say(f"relay {relay.pid}: {relay.short()[:200]}")
        bench.say(f"clients: {first.pid} {first.short()} || {second.pid} {second.short()}")
        daemon.show(skip=CHATTER)
        bench.say(f"ANSWER 2 {form(options)}: ps: {daemon.ctl('ps')!r}")
        for server in daemon.servers():
            listed = daemon.ctl(f"get_client_list {server}")
            pids = f"relay is {relay.pid}, clients {first.pid} {second.pid}"
            bench.say(f"ANSWER 2: get_client_list {server}: {listed!r}; {pids}")
            for who, pid in (("the client's pid", first.pid), ("the relay's pid", relay.pid)):
                answer = daemon.ctl(f"terminate_client {server} {pid}", timeout=5)
                time.sleep(0.3)
                now = f"first {first.short()[-60:]!r}, second {second.short()[-60:]!r}"
                bench.say(f"ANSWER 2: terminate_client with {who}: {answer!r}; {now}")
        daemon.show(skip=CHATTER)
        # The proof that the capability matters: another process's pid without it.
        bench.relay_process(daemon, "without-sys-admin")
        proof = bench.client(daemon, A, "query")
        proof.ended(10)
        bench.say(f"ANSWER 2: with the client's pid and without CAP_SYS_ADMIN: {proof.short()}")
        bench.between()


# --- 3. hidden by plain modes -----------------------------------------------------------------------------------------

LOOK = r"""
import ctypes, os, socket, sys
pipe, log, server = sys.argv[1:4]
libc = ctypes.CDLL(None, use_errno=True)
def tried(name, what):
    try: print(name, "-> YES", str(what())[:300])
    except Exception as error: print(name, "-> no,", type(error).__name__, error)
def knock(path):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(2); s.connect(path); return s.recv(64)
def call(number, *words):
    r = libc.syscall(number, *words)
    if r < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return r
def getfd():
    handle = os.pidfd_open(int(server)); return [call(438, handle, n, 0) for n in range(3, 12)]
def memory():
    with open(f"/proc/{server}/mem", "rb") as f: f.seek(0x400000); return f.read(4)
def trace():
    r = libc.ptrace(16, int(server), None, None)
    if r < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.waitpid(int(server), 0x40000000); libc.ptrace(17, int(server), None, None); return "attached"
tried("list pipe", lambda: os.listdir(pipe))
tried("connect control", lambda: knock(pipe + "/control"))
tried("open log fifo", lambda: os.open(pipe + "/log", os.O_WRONLY | os.O_NONBLOCK))
tried("list log", lambda: os.listdir(log))
tried("read control.log", lambda: open(log + "/control.log").readline())
tried("append server.log", lambda: open(log + "/server.log", "a"))
root = f"/proc/{server}/root"
tried("server root", lambda: os.listdir(root + pipe))
tried("server root connect", lambda: knock(root + pipe + "/control"))
tried("server cwd", lambda: os.listdir(f"/proc/{server}/cwd"))
tried("server fds", lambda: [os.readlink(f"/proc/{server}/fd/{n}") for n in os.listdir(f"/proc/{server}/fd")])
tried("server fd 1 reopened", lambda: os.open(f"/proc/{server}/fd/1", os.O_WRONLY | os.O_NONBLOCK))
tried("server maps", lambda: open(f"/proc/{server}/maps").readline())
tried("server environ", lambda: open(f"/proc/{server}/environ").read(40))
tried("server mem", memory)
tried("ptrace server", trace)
tried("pidfd_getfd server", getfd)
tried("signal 0 to server", lambda: os.kill(int(server), 0))
"""


def hidden(bench: Bench) -> None:
    python = other_users_python(A)
    for options in (MULTI, ()):
        for modes in ((0o710, 0o710, 0o755), (0o710, 0o710, 0o710)):
            daemon = Daemon(bench, *options, modes=modes)
            daemon.limits(*LARGE)
            bench.relay(daemon)
            client = ready(bench, daemon, A)
            served = client.seen() is not None
            title = f"{form(options)} home/pipe/log {[oct(m) for m in modes]}"
            bench.say(f"ANSWER 3 {title}: client {client.short()}")
            if not served:
                daemon.show(skip=CHATTER)
                bench.between()
                continue
            server = next(iter(daemon.servers()), os.getpid())
            status = Path(f"/proc/{server}/status").read_text().splitlines()
            ids = [line for line in status if line.startswith(("Uid", "Gid", "Groups", "CapEff"))]
            owner = os.stat(f"/proc/{server}/fd")
            bench.say(f"ANSWER 3: server {server}: {ids}, /proc/{server} belongs to {owner.st_uid}:{owner.st_gid}")
            done = subprocess.run(
                [python, "-S", "-E", "-c", LOOK, str(daemon.pipe), str(daemon.log), str(server)],
                user=A, group=A, extra_groups=[], cwd="/", capture_output=True, text=True, timeout=15,
            )  # fmt: skip
            looked = (done.stdout + done.stderr).splitlines()
            for line in looked:
                bench.say(f"   as user {A}: {line}")
            bench.say(f"ANSWER 3: user could: {[line for line in looked if '-> YES' in line]}")
            bench.say(f"ANSWER 3: user could not: {[line.split(' -> ')[0] for line in looked if '-> YES' not in line]}")
            second = bench.client(daemon, A, "query")
            second.ended(15)
            bench.say(f"   after that, another client: {second.short()[-90:]}")
            if options:
                other = bench.client(daemon, B, "query")
                other.ended(15)
                bench.say(f"   another user's client: {other.short()[-90:]}")
            holds = sorted({os.readlink(one) for one in Path(f"/proc/{client.pid}/fd").iterdir()})
            bench.say(f"   descriptors of the client: {holds}")
            shm = [f"{p.name} {oct(p.stat().st_mode & 0o7777)} {p.stat().st_uid}" for p in Path("/dev/shm").iterdir()]
            bench.say(f"   /dev/shm: {shm}")
            bench.between()


# --- 4. the front-end natively ----------------------------------------------------------------------------------------


class Native:
    """A front-end session at the socket, message by message."""

    def __init__(self, pipe: Path, name: str = "control_privileged") -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setsockopt(socket.SOL_SOCKET, SO_PASSCRED, 1)
        self.socket.settimeout(3)
        self.socket.connect(str(pipe / name))
        self.greeting = self.socket.recv(64)
        claim = [(socket.SOL_SOCKET, SCM_CREDENTIALS, struct.pack("iII", os.getpid(), os.getuid(), os.getgid()))]
        self.socket.sendmsg([CREDENTIALS], claim)
        self.socket.sendmsg([FRONT_END], claim)

    def send(self, command: str) -> None:
        text = command.encode() + b"\n\0"
        self.socket.send(struct.pack("<Q", len(text)))
        self.socket.send(text)

    def listen(self, quiet: float = 0.15) -> list[tuple[float, bytes]]:
        """Every message until it has been quiet for so long, with milliseconds since the call."""
        since = time.monotonic()
        found = []
        self.socket.settimeout(quiet)
        with contextlib.suppress(TimeoutError):
            while True:
                data = self.socket.recv(65536)
                found.append((round((time.monotonic() - since) * 1000, 2), data))
                if not data:
                    break
        self.socket.settimeout(3)
        return found

    def close(self) -> list[bytes]:
        self.socket.send(bytes(8))
        found = []
        with contextlib.suppress(OSError):
            while data := self.socket.recv(64):
                found.append(data)
        self.socket.close()
        return found


def front_end(bench: Bench) -> None:
    daemon = Daemon(bench)
    bench.relay(daemon)
    for server in (False, True):
        if server:
            ready(bench, daemon, A)
        pid = (daemon.servers() or [0])[0]
        session = Native(daemon.pipe)
        bench.say(f"ANSWER 4: greeting {session.greeting!r}, server {'there' if server else 'none'}; one session:")
        commands = [
            "get_server_list", "get_default_active_thread_percentage", "set_default_active_thread_percentage 30",
            "get_default_active_thread_percentage", "set_default_device_pinned_mem_limit 0 3333M",
            "get_default_device_pinned_mem_limit 0", "mpsagent-17", "get_server_list", "ps",
        ]  # fmt: skip
        if server:
            commands += [f"set_active_thread_percentage {pid} 30", f"get_active_thread_percentage {pid}"]
            commands += [f"set_device_pinned_mem_limit {pid} 0 3333M", f"get_device_pinned_mem_limit {pid} 0"]
            commands += [f"get_server_status {pid}", f"get_client_list {pid}", "get_client_list 99999"]
        for command in commands:
            session.send(command)
            bench.say(f"   {command!r}: {session.listen(0.06)}")
        session.send("get_server_list")
        session.send("get_default_active_thread_percentage")
        bench.say(f"   two at once (no server, no answer to the first): {session.listen(0.06)}")
        other = time.monotonic()
        try:
            late = Native(daemon.pipe)
            late.send("get_default_active_thread_percentage")
            heard = str(late.listen(0.3))
        except OSError as error:
            heard = f"{type(error).__name__} {error}"
        bench.say(f"   a second native session meanwhile: {heard}")
        said = daemon.ctl("get_server_list", timeout=3)
        bench.say(f"   the program meanwhile: {said!r} in {time.monotonic() - other:.3f} s")
        waiting = bench.client(daemon, A, "query")
        bench.say(f"   a client meanwhile: rc {waiting.ended(4)}")
        bench.say(f"   end: {session.close()}; then the client: rc {waiting.ended(10)}")
        session = Native(daemon.pipe, "control")
        session.send("get_server_list")
        bench.say(f"   root through `control` instead: {session.listen(0.06)} end {session.close()}")
    times = front_end_times(bench, daemon)
    for name, values in times.items():
        values.sort()
        middle, high = statistics.median(values) * 1000, values[-2] * 1000
        bench.say(f"ANSWER 4: {name}: p50 {middle:.2f} ms, p99 {high:.2f} ms of {len(values)}")
    broken = Native(daemon.pipe)
    broken.send("get_server_list")
    broken.socket.close()
    half = Native(daemon.pipe)
    half.socket.send(struct.pack("<Q", 500))
    half.socket.close()
    bench.say(f"ANSWER 4: after sessions that broke off: {daemon.ctl('get_server_list', timeout=3)!r}")
    daemon.show("control", skip="^$", most=8)


def front_end_times(bench: Bench, daemon: Daemon) -> dict[str, list[float]]:
    """A session that sets both defaults and reads them back, in three ways, 100 times each."""
    batch = [
        "set_default_active_thread_percentage 30", "set_default_device_pinned_mem_limit 0 3G",
        "get_default_active_thread_percentage", "get_default_device_pinned_mem_limit 0",
    ]  # fmt: skip
    answered = (True, False, True, True)  # the second has no answer
    found: dict[str, list[float]] = {}
    turned_away: Counter[str] = Counter()

    def timed(name: str, session: Callable[[], None]) -> None:
        found[name] = []
        for _ in range(100):
            since = time.monotonic()
            while True:
                try:
                    session()
                    break
                except OSError:  # turned away: the one before is not closed yet
                    turned_away[name] += 1
            found[name].append(time.monotonic() - since)

    def asked() -> None:
        session = Native(daemon.pipe)
        for command, has_answer in zip(batch, answered, strict=True):
            session.send(command)
            if has_answer:
                session.socket.recv(65536)
        session.close()

    def at_once() -> None:
        session = Native(daemon.pipe)
        for command in batch:
            session.send(command)
        session.close()

    def not_closed() -> None:
        session = Native(daemon.pipe)
        for command, has_answer in zip(batch, answered, strict=True):
            session.send(command)
            if has_answer:
                session.socket.recv(65536)
        session.socket.close()

    timed("program, 4 commands", lambda: daemon.ctl(*batch) and None)
    timed("native, 4 commands, each answer read before the next", asked)
    timed("native, 4 commands sent at once", at_once)
    timed("native, each answer read, then simply closed", not_closed)
    bench.say(f"   turned away: {dict(turned_away)}")
    return found


# --- 5. a relay that dies ---------------------------------------------------------------------------------------------


def relay_dies(bench: Bench) -> None:
    for options in (MULTI, ()):
        for there in (True, False):
            for step in ("sent", "answered", "passed", "acknowledged"):
                for index in (0, 1) if there else (0,):
                    dies_at(bench, options, there, step, index)


def dies_at(bench: Bench, options: tuple[str, ...], there: bool, step: str, index: int) -> None:
    daemon = Daemon(bench, *options)
    daemon.limits(*LARGE)
    helper = bench.relay(daemon)
    if there:
        ready(bench, daemon, A)
    helper.end()
    bench.relays.clear()
    daemon.show(skip=".")  # forget what was logged so far
    dying = bench.relay_process(daemon, "die", step, str(index))
    client = bench.client(daemon, A, "steps")
    for _ in range(3):
        client.line()
    dying.ended(10)
    died = dying.process.poll() is not None
    time.sleep(0.1)
    bench.relay(daemon)
    since = time.monotonic()
    rc = client.ended(4)
    again = bench.client(daemon, A, "query")
    same = again.ended(4)
    alone = time.monotonic() - since
    words = [f"client rc {rc}: {client.short()[-130:]}", f"next client of the user: rc {same} ({alone:.2f} s for both)"]
    if options or not there:
        other = bench.client(daemon, B, "query")
        since = time.monotonic()
        words.append(f"client of another user: rc {other.ended(4)} after {time.monotonic() - since:.2f} s")
    words.append(f"servers {daemon.ctl('get_server_list', timeout=2)!r}")
    title = f"{form(options)}, server {'there' if there else 'starting'}, relay died at `{step}` of {index}"
    bench.say(f"ANSWER 5: {title} (died: {died}): " + "; ".join(words))
    daemon.show(skip=CHATTER, most=14)
    bench.between()


def ghost(bench: Bench) -> None:
    """The relay asks for another user while A's server is busy, and goes: does the daemon go on waiting for it?"""
    daemon = Daemon(bench)
    daemon.limits(*LARGE)
    bench.relay(daemon)
    holder = ready(bench, daemon, A)
    for relay in bench.relays:
        relay.end()
    daemon.show(skip=".")
    dying = bench.relay_process(daemon, "die", "sent", "0")
    waiting = bench.client(daemon, B, "query")
    dying.ended(5)
    bench.say(f"   B's client after its relay died: rc {waiting.ended(3)} {waiting.short()}")
    time.sleep(0.5)
    bench.relay(daemon)
    again = bench.client(daemon, A, "query")
    since = time.monotonic()
    rc = again.ended(6)
    took = time.monotonic() - since
    bench.say(f"ANSWER 5: ghost of another user in the pending list: A's next client rc {rc} after {took:.2f} s")
    holder.kill(signal.SIGTERM)
    time.sleep(1.5)
    bench.say(f"ANSWER 5: after A has left: servers {daemon.servers()}")
    daemon.show(skip=CHATTER, most=30)


# --- 6. 48 clients ----------------------------------------------------------------------------------------------------


def full(bench: Bench) -> None:
    daemon = Daemon(bench, *MULTI)
    daemon.limits("100", "1G")
    relay = bench.relay(daemon)
    clients = [bench.client(daemon, (A, B, C)[n % 3], "steps") for n in range(48)]
    inside = sum(1 for one in clients if one.said("cuInit CUDA_SUCCESS", 25))
    daemon.show(skip=".")
    extra = bench.client(daemon, A, "steps")
    extra.said("cuInit", 8)
    answers = [one.answer for one in relay.of(extra.pid)]
    bench.say(f"ANSWER 6: 49th cuInit beside {inside} that did cuInit only: {extra.short()}; daemon: {answers}")
    daemon.show(skip=CHATTER, most=10)
    extra.kill()
    for one in clients:
        one.line()
    made = sum(1 for one in clients if one.said(r"\] sms ", 25))
    extra = bench.client(daemon, A, "query")
    extra.ended(10)
    answers = [one.answer for one in relay.of(extra.pid)]
    bench.say(f"ANSWER 6: 49th client beside {made} with a context: {extra.short()}; daemon: {answers}")
    bench.say(f"   lost at the relay: {relay.lost[-2:]}")
    clients[0].line()
    clients[0].said("second ctx", 5)
    bench.say(f"ANSWER 6: a second context in one of the 48: {clients[0].short()[-120:]}")
    daemon.show(skip=CHATTER, most=12)
    clients[1].kill()
    time.sleep(0.3)
    extra = bench.client(daemon, A, "query")
    bench.say(f"ANSWER 6: after one was killed: rc {extra.ended(10)} {extra.short()[-90:]}")


# --- 7. the server's own lines ----------------------------------------------------------------------------------------


def server_lines(bench: Bench) -> None:
    for options in (MULTI, ()):
        daemon = Daemon(bench, *options)
        daemon.limits("50", "10G")
        bench.relay(daemon)
        bench.say(f"ANSWER 7 {form(options)}: first client")
        ready(bench, daemon, A)
        daemon.show(skip=CHATTER)
        server = (daemon.servers() or [0])[0]
        for command in (
            f"set_active_thread_percentage {server} 19.7", f"set_device_pinned_mem_limit {server} 0 20389M",
            f"get_device_pinned_mem_limit {server} 0", f"set_device_pinned_mem_limit {server} 0 3333M",
            f"get_device_pinned_mem_limit {server} 0", f"set_device_pinned_mem_limit {server} 0 3333M",
            "set_default_device_pinned_mem_limit 0 1500M", "get_default_device_pinned_mem_limit 0",
        ):  # fmt: skip
            bench.say(f"ANSWER 7: {command}: {daemon.ctl(command)!r}")
            time.sleep(0.05)
            daemon.show("server")
        bench.say("ANSWER 7: a hand-over:")
        client = bench.client(daemon, A, "query")
        client.ended(10)
        bench.say(f"   {client.short()}")
        daemon.show()
        bench.between()


# --- 8. FAULT ---------------------------------------------------------------------------------------------------------


def in_fault(bench: Bench) -> None:
    for options in (MULTI, ()):
        daemon = Daemon(bench, *options)
        daemon.limits(*LARGE)
        relay = bench.relay(daemon)
        neighbour = ready(bench, daemon, B if options else A)
        culprit = bench.client(daemon, A, "oob", 0.3)
        culprit.ended(10)
        server = (daemon.servers() or [0])[0]
        bench.say(f"   {culprit.short()[-80:]} | status {daemon.ctl(f'get_server_status {server}')!r}")
        daemon.show(skip=".")
        for uid in (A, C) if options else (A,):
            late = bench.client(daemon, uid, "query")
            late.ended(10)
            steps = [(one.index, one.answer, list(one.at)[-1]) for one in relay.of(late.pid)]
            bench.say(f"ANSWER 8 {form(options)}: client in FAULT: {late.short()}; at the relay {steps}")
        daemon.show(skip=CHATTER)
        neighbour.kill()
        since = time.monotonic()
        while "ACTIVE" not in daemon.ctl(f"get_server_status {server}") and time.monotonic() - since < 5:
            time.sleep(0.01)
        after = bench.client(daemon, A, "query")
        after.ended(10)
        took = time.monotonic() - since
        bench.say(f"ANSWER 8: ACTIVE and served {took:.2f} s after the neighbour's SIGKILL; {after.short()[-90:]}")
        # The same daemon, the descriptor of a hand-over held back while the fault happens.
        held: list[float] = []

        def hold(step: str, one: Connection) -> None:
            if step == "answered" and one.uid == C and one.index == 1 and not held:  # noqa: B023
                held.append(1)  # noqa: B023
                time.sleep(1.5)

        relay.hook = hold
        if options:
            late = bench.client(daemon, C, "query")
            culprit = bench.client(daemon, A, "oob", 0.2)
            late.ended(10)
            culprit.ended(5)
            ends = f"C {late.short()} | culprit {culprit.short()[-60:]}"
            bench.say(f"ANSWER 8: a fault while C's descriptor is held back: {ends}")
        bench.between()


# --- 9. changing users on servers of their own ------------------------------------------------------------------------


def change_of_user(bench: Bench) -> None:
    for first in (False, True):
        daemon = Daemon(bench)
        relay = bench.relay(daemon)
        told: list[str] = []

        def hook(step: str, one: Connection) -> None:
            if step != "asked" or one.index or one.uid != B:
                return
            since = time.monotonic()
            daemon.limits(*SMALL)  # noqa: B023
            limits = time.monotonic() - since
            if first:  # noqa: B023
                for server in daemon.servers():  # noqa: B023
                    daemon.ctl(f"shutdown_server {server}")  # noqa: B023
                    with contextlib.suppress(OSError):
                        while time.monotonic() - since < 5:
                            os.kill(server, 0)
                            time.sleep(0.002)
            told.append(f"limits {limits * 1000:.1f} ms, exit {(time.monotonic() - since) * 1000:.0f} ms")  # noqa: B023

        relay.hook = hook
        for held in (1.0, 3.0, 6.0):
            daemon.limits(*LARGE)
            holder = bench.client(daemon, A, "sleep", held)
            holder.ended(20)
            since = time.monotonic()
            client = bench.client(daemon, B, "query")
            client.said(r"\] sms ", 15)
            gap = time.monotonic() - since
            client.ended(5)
            way = "shutdown_server first, exit awaited" if first else "idle server left to the daemon"
            ends = f"{gap:.3f} s, {which(client.seen())}; {told[-1:]}"
            bench.say(f"ANSWER 9: {way}: A held {held:g} s: B's start to first result {ends}")
        daemon.show("control", skip=CHATTER, most=24)
        bench.between()
    daemon = Daemon(bench, *MULTI)
    bench.relay(daemon)
    ready(bench, daemon, A)
    for _ in range(3):
        since = time.monotonic()
        client = bench.client(daemon, B, "query")
        client.said(r"\] sms ", 15)
        bench.say(f"ANSWER 9: multi-user server that stays: B's start to first result {time.monotonic() - since:.3f} s")


# --- 10. the relay hands over several at once -------------------------------------------------------------------------


def silent_relay(bench: Bench) -> None:
    """Connections to the daemon that say nothing: does one hold up the next?"""
    daemon = Daemon(bench, *MULTI)
    daemon.limits(*LARGE)
    bench.relay(daemon)
    ready(bench, daemon, A)
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    silent.connect(str(daemon.pipe / "control"))
    silent.settimeout(1)
    bench.say(f"   a silent connection gets {silent.recv(64)!r}")
    client = bench.client(daemon, A, "query")
    rc, said = client.ended(4), daemon.ctl("get_server_list", timeout=3)
    bench.say(f"ANSWER 10: beside a silent connection to the daemon: client rc {rc}, front-end {said!r}")
    silent.close()
    bench.say(f"   after it was closed: client rc {client.ended(10)}")


QUESTIONS: list[tuple[str, str, Callable[[Bench], None], float]] = [
    ("1", "when limits are taken", limits_taken, 60),
    ("2", "the relay's own pid", own_pid, 25),
    ("3", "hidden by plain modes", hidden, 30),
    ("4", "the front-end natively", front_end, 25),
    ("7", "the server's own lines", server_lines, 15),
    ("8", "hand-over in FAULT", in_fault, 25),
    ("6", "48 clients", full, 35),
    ("9", "a change of user", change_of_user, 40),
    ("5g", "a ghost in the pending list", ghost, 20),
    ("10", "a silent connection to the daemon", silent_relay, 15),
    ("5", "a relay that dies", relay_dies, 80),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", ""))
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=225.0, help="for everything")
    parser.add_argument("--sim", action="store_true", help="on the simulator, to try the script itself")
    parser.add_argument("--libraries", default="", help="LD_LIBRARY_PATH of the daemon and the clients")
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="mpsp", dir="/tmp"))
    place.chmod(0o755)
    backend = sim_backend(place) if options.sim else real_backend(place)
    extra = {**backend.environment, **({"LD_LIBRARY_PATH": options.libraries} if options.libraries else {})}
    out = Path(options.out) if options.out else None
    bench = Bench(backend.control, backend.client, extra, out, options.seconds)
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TooLong()))
    try:
        for number, title, question, seconds in QUESTIONS:
            if options.only and number not in options.only.split(","):
                continue
            left = min(seconds, bench.deadline - time.monotonic())
            if left < 2:
                bench.say(f"==== {number} {title}: left out, the time is over")
                continue
            bench.say(f"==== {number} {title}")
            signal.setitimer(signal.ITIMER_REAL, left)
            try:
                question(bench)
            except TooLong:
                bench.say(f"ANSWER {number}: broken off after {left:.0f} s")
            except Exception:
                bench.say(f"ANSWER {number}: broken off: {traceback.format_exc()}")
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                bench.between()
    finally:
        bench.end()
        shutil.rmtree(place, ignore_errors=True)
        print(f"threads left: {threading.active_count()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
