#!/usr/bin/env python3
"""Questions to a real MPS: a client takes its descriptor, lives, and does not meet its server (recording 12, H2, H3).

    false_acknowledgement.py [--out DIR] [--only NAME,...] [--sim]

Root, and a GPU with a driver that knows --multiuser-server; about two minutes. Two neighbours work on one server. Then
a process of another user takes a descriptor and does one of PLAYS. After each: which question is still answered, what
does server.log show and when; the rest of the handshake is said on a copy of the descriptor: does the server go on at
once, do the neighbours keep their work, whom does the server list. Prints `ANSWER name: ...`, all is in $OUT.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.conformance.backends import other_users_python, real_backend, sim_backend
from tests.gpu.rendezvous_bench import CREDENTIALS, SCM_CREDENTIALS, Bench, Connection, Daemon, Output

A, B, C = 20001, 20002, 20003
CHATTER = r"Accepting|NEW UI|UI closed|Cmd:"
QUESTIONS = ("get_server_status", "get_client_list", "get_active_thread_percentage", "ps", "a client")

HOSTILE = r"""
import os, socket, struct, sys
server = socket.socket(fileno=int(sys.argv[1])); server.settimeout(2)
def own(): return [(socket.SOL_SOCKET, 2, struct.pack("iII", os.getpid(), os.getuid(), os.getgid()))]
print("ready", flush=True)
for line in sys.stdin:
    word = line.strip()
    try:
        if word == "read":
            got = [server.recvmsg(64, 256)[0] for _ in range(5)]
        elif word == "credentials": got = server.sendmsg([b"OUTBCRED\0"], own())
        elif word == "channel": got = server.send(bytes(4))
        elif word == "device": got = server.send(b"\xff\0\0\0")
        elif word == "hear": got = server.recv(64)
        elif word == "close": got = server.close()
        elif word == "nothing": got = None
    except OSError as error: got = repr(error)
    print(word, got, flush=True)
"""


class Taker:
    """Announces a client as the gate does, gives its descriptor to a process of user C, and keeps a copy."""

    def __init__(self, bench: Bench, daemon: Daemon, uid: int = C) -> None:
        self.daemon = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.daemon.settimeout(10)
        self.daemon.connect(str(daemon.pipe / "control"))
        self.daemon.recv(64)
        self.own = [(socket.SOL_SOCKET, SCM_CREDENTIALS, struct.pack("iII", os.getpid(), uid, uid))]
        self.daemon.sendmsg([CREDENTIALS], self.own)
        self.daemon.sendmsg([b"\2\0\0\0"], self.own)
        _, ancillary, _, _ = self.daemon.recvmsg(64, 256)
        number = next(struct.unpack("i", data[:4])[0] for _, what, data in ancillary if what == socket.SCM_RIGHTS)
        self.copy = socket.socket(fileno=number)
        self.acknowledged = False
        self.process = subprocess.Popen(
            [other_users_python(uid), "-S", "-E", "-c", HOSTILE, str(number)], pass_fds=[number], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=uid, group=uid, extra_groups=[], cwd="/",
            env={"MPS_QUESTIONS": bench.mark},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def do(self, *words: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        said = []
        for word in words:
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
            said.append(self.process.stdout.readline().strip()[:120])
        return "; ".join(said)

    def acknowledge(self, status: int = 0) -> None:
        self.acknowledged = True
        self.daemon.sendmsg([struct.pack("<I", status)], self.own)
        self.daemon.close()

    def rescue(self) -> str:
        """The gate's own: what it finds unread, then the client's words, then what the server says."""
        heard = []
        self.copy.settimeout(0.1)
        with suppress(OSError):
            while True:
                data, ancillary, _, _ = self.copy.recvmsg(64, 256)
                heard.append(data[:9])
                for _, what, content in ancillary:
                    for (one,) in struct.iter_unpack("i", content) if what == socket.SCM_RIGHTS else ():
                        os.close(one)
                if data in (b"", b"\0"):
                    break
        said = []
        for word in (CREDENTIALS, bytes(4), b"\xff\0\0\0"):
            try:
                self.copy.sendmsg([word], self.own if word == CREDENTIALS else [])
                said.append("ok")
            except OSError as error:
                said.append(repr(error))
        began = time.monotonic()
        self.copy.settimeout(2)
        try:
            last = self.copy.recv(64)
        except OSError as error:
            return f"unread {heard}, sent {said}, server: {error!r}"
        return f"unread {heard}, sent {said}, server said {last.hex() or 'end'} after {time.monotonic() - began:.4f} s"

    def end(self) -> None:
        with suppress(OSError):
            self.copy.shutdown(socket.SHUT_RDWR)
        self.copy.close()
        self.process.kill()
        self.process.wait()
        self.daemon.close()


class Asked:
    """A question in a thread of its own: it may hang."""

    def __init__(self, bench: Bench, daemon: Daemon, server: int, question: str) -> None:
        self.took: float | None = None
        self.said = ""
        self._words = (bench, daemon, server, question)
        self.began = time.monotonic()
        self.thread = threading.Thread(target=self._ask, daemon=True)
        self.thread.start()

    def _ask(self) -> None:
        bench, daemon, server, question = self._words
        if question == "a client":
            one = bench.client(daemon, B, "query")
            self.said = f"rc {one.ended(12)} {one.short()[-60:]}"
        else:
            self.said = daemon.ctl(question if question == "ps" else f"{question} {server}", timeout=12).strip()[:200]
        self.took = time.monotonic() - self.began

    def answered(self, seconds: float) -> bool:
        self.thread.join(seconds)
        return self.took is not None


class Place:
    """One daemon, one server, two neighbours at work; made anew when a play has broken it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.daemon = Daemon(bench, "--multiuser-server")
        bench.relay(self.daemon)
        self.neighbours: list[Output] = [bench.client(self.daemon, uid, "mind", 200) for uid in (A, B)]
        for one in self.neighbours:
            one.said(r"\] step ")
        self.server = next(iter(self.daemon.servers()), 0)
        self.daemon.news("server")
        self.daemon.news("control")

    def steps(self) -> list[int]:
        return [len(re.findall(r"\] step ", one.text())) for one in self.neighbours]

    def log(self, when: str) -> None:
        for name in ("server", "control"):
            for line in self.daemon.news(name, CHATTER)[:14]:
                self.bench.say(f"      {when}: {name}.log| {line}")

    def whole(self) -> bool:
        """The same server serves, and both neighbours work on."""
        before = self.steps()
        time.sleep(0.6)
        working = all(now > then for now, then in zip(self.steps(), before, strict=True))
        return working and self.daemon.servers() == [self.server]


def look(place: Place, taker: Taker, name: str, question: str) -> None:
    """What is answered before and after the rest is said on the copy."""
    bench, daemon = place.bench, place.daemon
    place.log(f"{name}, before any question")
    easy = daemon.ctl("get_server_list", "get_default_active_thread_percentage", timeout=1.5).split()
    asked = Asked(bench, daemon, place.server, question)
    before = f"answered after {asked.took:.3f} s" if asked.answered(1.2) else "NOT answered in 1.2 s"
    steps = place.steps()
    place.log(f"{name}, `{question}` asked")
    unread = taker.rescue()
    said = time.monotonic()
    if not taker.acknowledged:
        taker.acknowledge()
    after = f"after {time.monotonic() - said:.3f} s" if asked.answered(3) else "NOT in 3 s"
    place.log(f"{name}, rest said")
    listed = daemon.ctl(f"get_client_list {place.server}", timeout=1.5).split()
    late = taker.do("credentials", "channel", "device", "hear") if name.startswith("late") else ""
    time.sleep(0.1)
    taker.end()
    client = bench.client(daemon, A, "query")
    rc = client.ended(4)
    whole = place.whole()
    bench.say(
        f"ANSWER {name}: easy {easy}; `{question}` {before}, {after}: {asked.said!r}; {unread}; listed {listed} (own "
        f"pid {os.getpid()}, its pid {taker.process.pid}); {late}; next client rc {rc}; whole {whole}, steps {steps}"
        f" -> {place.steps()}"
    )
    place.log(f"{name}, end")


def play(name: str, words: tuple[str, ...], *, acknowledge: int | None, question: str) -> Callable[[Place], None]:
    def act(place: Place) -> None:
        taker = Taker(place.bench, place.daemon)
        said = taker.do(*words) if words else ""
        if acknowledge is not None:
            taker.acknowledge(acknowledge)
        time.sleep(0.05)
        place.bench.say(f"   {name}: {said}")
        look(place, taker, name, question)

    return act


def told_again(place: Place, index: int) -> None:
    """A client that has met its server as it should; then the rest is said once more on a copy: is it harmed?"""
    bench = place.bench
    relay = bench.relays[-1]
    kept: list[int] = []

    def hook(at: str, one: Connection) -> None:
        if at == "answered" and (one.uid, one.index) == (C, index):
            kept.append(_newest_socket())

    relay.hook = hook
    client = bench.client(place.daemon, C, "mind", 4)
    client.said(r"\] step ")
    relay.hook = None
    said: list[object] = []
    if kept:
        copy = socket.socket(fileno=kept[0])
        own = [(socket.SOL_SOCKET, SCM_CREDENTIALS, struct.pack("iII", os.getpid(), C, C))]
        for word in (CREDENTIALS, bytes(4), b"\xff\0\0\0"):
            try:
                said.append(copy.sendmsg([word], own if word == CREDENTIALS else []))
            except OSError as error:
                said.append(error)
        copy.close()
    rc = client.ended(8)
    bench.say(
        f"ANSWER told again, connection {index}: copy {bool(kept)}, sent {said}; client rc {rc} "
        f"{client.short()[-90:]}; whole {place.whole()}"
    )
    place.log("told again")


def _newest_socket() -> int:
    """A copy of the descriptor that the relay has received last."""
    found = [int(one.name) for one in Path("/proc/self/fd").iterdir() if "socket:" in _link(one)]
    return os.dup(max(found))


def _link(path: Path) -> str:
    with suppress(OSError):
        return str(path.readlink())
    return ""


def late_context(place: Place) -> None:
    """A real client is stopped when it gets the descriptor of its context; the rest is said for it; it goes on."""
    bench, daemon = place.bench, place.daemon
    relay = bench.relays[-1]
    kept: list[int] = []

    def hook(at: str, one: Connection) -> None:
        if one.uid == C and one.index == 1 and at == "answered":
            os.kill(one.pid, signal.SIGSTOP)
            kept.append(_newest_socket())

    relay.hook = hook
    client = bench.client(daemon, C, "mind", 3)
    end = time.monotonic() + 5
    while not kept and time.monotonic() < end:
        time.sleep(0.01)
    relay.hook = None
    if not kept:
        client.kill()
        bench.say("ANSWER late context: no copy")
        return
    time.sleep(0.3)
    taker = Taker.__new__(Taker)
    taker.own = [(socket.SOL_SOCKET, SCM_CREDENTIALS, struct.pack("iII", os.getpid(), C, C))]
    taker.copy = socket.socket(fileno=kept[0])
    unread = taker.rescue()
    answered = daemon.ctl(f"get_client_list {place.server}", timeout=1.5).split()
    os.kill(client.pid, signal.SIGCONT)
    rc = client.ended(8)
    bench.say(
        f"ANSWER late context: {unread}; listed {answered}; client {client.pid} rc {rc} {client.short()[-120:]}; whole "
        f"{place.whole()}"
    )
    taker.copy.close()
    client.kill()
    place.log("late context")


def crowd(place: Place) -> None:
    """How long does a server leave a question unanswered while 40 clients start at once?"""
    bench, daemon = place.bench, place.daemon
    clients = [bench.client(daemon, (A, B)[n % 2], "sleep", 8) for n in range(40)]
    began = time.monotonic()
    took: list[tuple[float, float]] = []
    while time.monotonic() - began < 8:
        asked = time.monotonic()
        said = daemon.ctl(f"get_active_thread_percentage {place.server}", f"get_client_list {place.server}", timeout=8)
        took.append((time.monotonic() - asked, asked - began))
        if "no answer" in said:
            break
        time.sleep(0.05)
    ended = [one.ended(15) for one in clients]
    first = sorted(
        float(match[1]) for one in clients if (match := re.search(r"^\[\s*([\d.]+)", one.text(), re.M)) is not None
    )
    longest = [round(one[0], 3) for one in sorted(took)[-5:]]
    bench.say(
        f"ANSWER crowd: 40 clients at once, rc {sorted(set(map(str, ended)))}; a question took at most "
        f"{max(took)[0]:.3f} s (at {max(took)[1]:.1f} s), five longest {longest}; "
        f"heads {first[:2]} {first[-2:]}; whole {place.whole()}"
    )
    place.daemon.news("server")
    place.daemon.news("control")


def false_807(place: Place) -> None:
    """A client that has met its server says 807 (H3): what does the server's own status say?"""
    taker = Taker(place.bench, place.daemon)
    met = taker.do("read", "credentials", "channel", "device", "hear")
    taker.acknowledge(807)
    status = place.daemon.ctl(f"get_server_status {place.server}", timeout=2).strip()
    listed = place.daemon.ctl(f"get_client_list {place.server}", timeout=2).split()
    ps = place.daemon.ctl("ps", timeout=2)
    taker.end()
    place.bench.say(
        f"ANSWER 807: {met}; status {status!r}; listed {listed}, its pid {taker.process.pid}; whole {place.whole()}; "
        f"{ps!r}"
    )
    place.log("807")


PLAYS: dict[str, Callable[[Place], None]] = {
    **{
        f"acknowledged and silent, {question}": play(
            f"acknowledged and silent, {question}", (), acknowledge=0, question=question
        )
        for question in QUESTIONS
    },
    "read, acknowledged and silent": play(
        "read, acknowledged and silent", ("read",), acknowledge=0, question="get_server_status"
    ),
    "silent": play("silent", (), acknowledge=None, question="get_server_status"),
    "read and silent": play("read and silent", ("read",), acknowledge=None, question="a client"),
    "credentials only": play(
        "credentials only", ("read", "credentials"), acknowledge=0, question="get_server_status"
    ),
    "credentials and channel": play(
        "credentials and channel", ("read", "credentials", "channel"), acknowledge=0, question="get_server_status"
    ),
    "late words": play("late words", (), acknowledge=0, question="get_server_status"),
    "late words, read": play("late words, read", ("read",), acknowledge=None, question="get_server_status"),
    "807": false_807,
    "late context": late_context,
    "told again, channel": lambda place: told_again(place, 0),
    "told again, context": lambda place: told_again(place, 1),
    "crowd": crowd,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", ""))
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=130.0)
    parser.add_argument("--sim", action="store_true")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="mpsf", dir="/tmp"))
    work.chmod(0o755)
    backend = sim_backend(work) if options.sim else real_backend(work)
    bench = Bench(
        backend.control, backend.client, dict(backend.environment), Path(options.out) if options.out else None,
        options.seconds,
    )  # fmt: skip
    place: Place | None = None
    try:
        for name, act in PLAYS.items():
            if options.only and name not in options.only.split(","):
                continue
            if time.monotonic() > bench.deadline - 8:
                bench.say(f"left out: {name}")
                continue
            try:
                if place is None or not place.whole():
                    bench.between()
                    place = Place(bench)
                bench.say(f"==== {name}, server {place.server}")
                act(place)
            except Exception as error:
                bench.say(f"ANSWER {name}: broken off: {error!r}")
                place = None
                bench.between()
    finally:
        bench.end()
        shutil.rmtree(work, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
