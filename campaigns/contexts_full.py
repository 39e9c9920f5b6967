#!/usr/bin/env python3
# ruff: noqa: E501
"""Questions to a real MPS about a server that is full of contexts.

    campaigns/contexts_full.py [--out DIR] [--only limit,close,...] [--seconds 360]

Root, a GPU (two for `devices`), a driver that knows --multiuser-server. MPS alone, without mpsagent; where a relay is
in between, it is this script's own. Prints `ANSWER` lines and writes everything to DIR/contexts-full.txt ($OUT).
Nothing that it started is left behind.

    limit    what counts against the 48, what the calls of a client return at the 49th, and does it work on
    talk     what server and client say to each other then (the relay stands between them)
    devices  is the table one for each device
    close    how soon server.log, get_client_list, ps and get_device_client_list say that a context is closed, and is there room again
    refuse   can a relay give 808 in the server's place, and how does the client go on
    logs     does MPS write on after a hole is punched into its logs, the head is cut off, the file is truncated
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
import re
import select
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns import rendezvous_bench
from campaigns.rendezvous_bench import (
    CREDENTIALS,
    PASSED,
    SCM_CREDENTIALS,
    SO_PASSCRED,
    Bench,
    Connection,
    Daemon,
    Output,
    Relay,
)  # fmt: skip

A, B, C = 20001, 20002, 20003
MULTI = "--multiuser-server"

CLIENT = r'''
"""Does what the lines on standard input say; answers `NUMBER WORDS RESULT TIME SECONDS`."""
import ctypes, os, sys, time
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cuda_client
cuda = cuda_client.Driver()
contexts = {}
def work():
    result, pointer = cuda.allocate(1 << 20)
    result = result or cuda.fill(pointer, 1 << 20) or cuda.synchronize()
    if not result:
        result = cuda.call("cuMemFree_v2", pointer)
    return result
number = 0
buffer = b""
while True:
    while b"\n" not in buffer:
        more = os.read(0, 4096)
        if not more:
            os._exit(0)
        buffer += more
    line, buffer = buffer.split(b"\n", 1)
    words = line.decode().split()
    at = time.monotonic()
    result = 0
    if words[0] == "init":
        result = cuda.call("cuInit", ctypes.c_uint(0))
    elif words[0] == "ctx":  # name device
        handle = ctypes.c_void_p()
        result, device = cuda.device(int(words[2]))
        result = result or cuda.call("cuCtxCreate_v2", ctypes.byref(handle), ctypes.c_uint(0), device)
        if not result:
            contexts[words[1]] = handle
    elif words[0] == "primary":  # name device
        handle = ctypes.c_void_p()
        result, device = cuda.device(int(words[2]))
        result = result or cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(handle), device)
        result = result or cuda.call("cuCtxSetCurrent", handle)
        if not result:
            contexts[words[1]] = handle
    elif words[0] == "release":  # name device
        result, device = cuda.device(int(words[2]))
        result = result or cuda.call("cuDevicePrimaryCtxRelease_v2", device)
        contexts.pop(words[1], None)
    elif words[0] == "destroy":
        result = cuda.call("cuCtxDestroy_v2", contexts.pop(words[1]))
    elif words[0] == "work":
        result = cuda.call("cuCtxSetCurrent", contexts[words[1]]) or work()
    elif words[0] == "all":
        for handle in contexts.values():
            result = result or cuda.call("cuCtxSetCurrent", handle) or work()
    elif words[0] == "exit":
        os.write(1, ("%d %s - TIME %.6f SECONDS 0\n" % (number, line.decode(), at)).encode())
        sys.exit(0)
    now = time.monotonic()
    os.write(1, ("%d %s %s TIME %.6f SECONDS %.6f\n" % (number, line.decode(), cuda.name(result), now, now - at)).encode())
    number += 1
'''


class Client:
    """A client that does one thing after the other; `do` waits for the answer."""

    def __init__(self, bench: Bench, daemon: Daemon, uid: int) -> None:
        *python, cuda_client = bench.client_command
        program = Path(cuda_client).with_name("filler.py")
        if not program.exists():
            program.write_text(CLIENT)
            program.chmod(0o644)
        self.out = Output(bench, [*python, str(program)], bench.environment(daemon.public), uid)
        self.pid = self.out.pid
        self.number = 0
        self.said: dict[str, float] = {}

    def tell(self, words: str) -> int:
        number, self.number = self.number, self.number + 1
        with contextlib.suppress(OSError):
            os.write(self.out.process.stdin.fileno(), words.encode() + b"\n")
        return number

    def heard(self, number: int, timeout: float = 15.0) -> tuple[str, float, float]:
        """(result, when, how long it took)"""
        found = self.out.said(rf"(?m)^{number} .* (\S+) TIME ([\d.]+) SECONDS ([\d.]+)$", timeout)
        return (found[1], float(found[2]), float(found[3])) if found else ("(no answer)", time.monotonic(), timeout)

    def do(self, words: str, timeout: float = 15.0) -> str:
        result, _, seconds = self.heard(self.tell(words), timeout)
        return result if seconds < 1 else f"{result} after {seconds:.2f} s"

    def make(self, count: int, device: int = 0, prefix: str = "c") -> tuple[int, str, float]:
        """Contexts until one fails: how many, the failure, seconds for one."""
        numbers = [self.tell(f"ctx {prefix}{one} {device}") for one in range(count)]
        took = 0.0
        for made, number in enumerate(numbers):
            result, _, seconds = self.heard(number, 30)
            if result != "CUDA_SUCCESS":
                for later in numbers[made + 1 :]:
                    self.heard(later, 30)
                return made, result, took / max(1, made)
            took += seconds
        return count, "", took / count


def direct(bench: Bench, *options: str) -> Daemon:
    daemon = Daemon(bench, *options)
    daemon.public = daemon.pipe
    daemon.limits("50", "40G")
    return daemon


SHORT = re.compile(r"^\[\S+ \S+ +\w+ +\d+\] ")


def kinds(lines: list[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in lines:
        text = re.sub(r"\d+", "N", SHORT.sub("", line))[:110]
        found[text] = found.get(text, 0) + 1
    return found


# --- limit ------------------------------------------------------------------------------------------------------------


def limit(bench: Bench) -> None:
    for options in ((MULTI,), ()):
        form = "multi-user" if options else "own server"
        daemon = direct(bench, *options)
        first = Client(bench, daemon, A)
        bench.say(f"ANSWER limit {form}: cuInit {first.do('init')}")
        made, why, each = first.make(52)
        bench.say(f"ANSWER limit {form}: one process, cuCtxCreate: {made} made, {each * 1000:.1f} ms each, then {why}")
        bench.say(
            f"ANSWER limit {form}: its others work on: {first.do('all', 30)}; primary context: {first.do('primary p 0')}"
        )
        bench.say(f"      server.log kinds {kinds(daemon.news('server'))}")
        server = daemon.servers()[0]
        bench.say(f"ANSWER limit {form}: list {daemon.ctl(f'get_client_list {server}')!r} ps {daemon.ctl('ps')!r}")
        for words in (
            "get_device_client_list",
            f"get_device_client_list {server}",
            f"get_device_client_list {server + 1}",
        ):
            bench.say(f"ANSWER limit {form}: {words} {(said := daemon.ctl(words))[:300]!r} … {said[-60:]!r}")
        other = Client(bench, daemon, B if options else A)
        bench.say(
            f"ANSWER limit {form}: another process when full: cuInit {other.do('init')}, "
            f"primary {other.do('primary p 0')}, cuCtxCreate {other.do('ctx x 0')}"
        )
        bench.say(
            f"ANSWER limit {form}: first destroys one: {first.do('destroy c0')}; the other at once: {other.do('primary p 0')}, "
            f"works {other.do('work p')}; the first again: {first.do('ctx again 0')}"
        )
        third = Client(bench, daemon, C if options else A)
        bench.say(f"ANSWER limit {form}: the other exits, third cuInit {third.do('init')}")
        other.tell("exit")
        began = time.monotonic()
        while (got := third.do("ctx x 0")) != "CUDA_SUCCESS" and time.monotonic() - began < 3:
            time.sleep(0.005)
        bench.say(
            f"ANSWER limit {form}: third's context: {got} {time.monotonic() - began:.3f} s after the other was told to exit"
        )
        bench.say(f"      server.log tail {[SHORT.sub('', line) for line in daemon.news('server')][-14:]}")
        bench.between()
    # channels: 60 processes with cuInit only, then one context
    daemon = direct(bench, MULTI)
    crowd = [Client(bench, daemon, A) for _ in range(56)]
    numbers = [(one, one.tell("init")) for one in crowd]
    results: dict[str, int] = {}
    for one, number in numbers:
        got = one.heard(number, 20)[0]
        results[got] = results.get(got, 0) + 1
    other = Client(bench, daemon, B)
    bench.say(
        f"ANSWER limit channels: 56 processes with cuInit only: {results}; then another: cuInit {other.do('init')}, ctx {other.do('ctx x 0')}"
    )
    bench.say(f"      server.log kinds {kinds(daemon.news('server'))}")
    made, why, _ = other.make(50)
    bench.say(f"ANSWER limit channels: that one makes {made} more, then {why}")
    bench.between()


# --- talk -------------------------------------------------------------------------------------------------------------


class Tap(Relay):
    """Stands between client and server as well, and writes down what they say. `mode` for the next connections of a
    process (`who`): `tap`; or an answer that the relay gives itself, without a word to the daemon (see `answer`)."""

    def __init__(self, bench: Bench, public: Path, real: Path) -> None:
        self.bench = bench
        self.mode: dict[int, str] = {}
        self.heard: list[str] = []
        super().__init__(public, real)

    def _forward(self, client: socket.socket, daemon: socket.socket, one: Connection) -> None:
        mode = self.mode.get(one.pid, "")
        if mode.startswith("tap"):
            self._tap(client, daemon, one, int(mode.partition("-")[2] or 0))
        elif mode:
            self._answer(client, one, mode)
        else:
            super()._forward(client, daemon, one)

    def _tap(self, client: socket.socket, daemon: socket.socket, one: Connection, error: int) -> None:
        daemon.settimeout(20)
        daemon.connect(str(self.real / "control"))
        daemon.recv(64)
        claim = [(socket.SOL_SOCKET, SCM_CREDENTIALS, struct.pack("iII", one.pid, one.uid, one.gid))]
        daemon.sendmsg([CREDENTIALS], claim)
        daemon.sendmsg([one.kind], claim)
        answer, ancillary, _, _ = daemon.recvmsg(64, 256)
        number = next(struct.unpack("i", data[:4])[0] for _, what, data in ancillary if what == socket.SCM_RIGHTS)
        server = socket.socket(fileno=number)
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in (mine, theirs, server):
            sock.setsockopt(socket.SOL_SOCKET, SO_PASSCRED, 1)
        client.sendmsg([answer], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", theirs.fileno()))])
        theirs.close()
        threading.Thread(target=self._pass, args=(mine, server, one, error), daemon=True).start()
        client.settimeout(20)
        word = client.recv(64)
        self.heard.append(f"#{one.index} client to daemon {word.hex() or 'hung up'}")
        if word:
            daemon.sendmsg([word], claim)

    def _pass(self, client: socket.socket, server: socket.socket, one: Connection, error: int) -> None:
        """Both ways, until one closes; only the first 30 messages are written down."""
        count = 0
        poll = select.poll()
        poll.register(client, select.POLLIN)
        poll.register(server, select.POLLIN)
        with contextlib.suppress(OSError):
            while True:
                for number, _ in poll.poll():
                    source, sink = (client, server) if number == client.fileno() else (server, client)
                    data, ancillary, _, _ = source.recvmsg(65536, 512)
                    fds = array.array("i")
                    for _, what, content in ancillary:
                        if what == socket.SCM_RIGHTS:
                            fds.frombytes(content[: len(content) // 4 * 4])
                    if count < 30:
                        count += 1
                        way = "client" if source is client else "server"
                        self.heard.append(
                            f"#{one.index} {way} {len(data)}B {data[:16].hex() or 'closed'} fds{len(fds)}"
                        )
                    if not data:
                        client.close()
                        server.close()
                        return
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else []
                    if source is client:
                        rights.append(
                            (socket.SOL_SOCKET, SCM_CREDENTIALS, struct.pack("iII", one.pid, one.uid, one.gid))
                        )
                    if error and source is server and data == bytes(4):
                        data, error = struct.pack("<I", error), 0
                    sink.sendmsg([data], rights)
                    for descriptor in fds:
                        os.close(descriptor)

    def _answer(self, client: socket.socket, one: Connection, mode: str) -> None:
        """The relay is daemon and server in one. `mode`: WAY-ERROR, as in `full-808`."""
        way, _, code = mode.partition("-")
        word = struct.pack("<I", int(code or 0))
        if way == "close":
            self.heard.append(f"#{one.index} closed after the credentials")
            return
        if way == "control":  # the error where the descriptor would be
            client.send(word)
        else:
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for sock in (mine, theirs):
                sock.setsockopt(socket.SOL_SOCKET, SO_PASSCRED, 1)
            mine.settimeout(3)  # not `theirs`: the client's end must block (on 2026-11-23 it did not, and it hung up)
            client.sendmsg([PASSED], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", theirs.fileno()))])
            theirs.close()
            with contextlib.suppress(OSError):
                self._server(mine, way, word, one)
            mine.close()
        client.settimeout(3)
        try:
            got = client.recv(64).hex() or "hung up"
        except OSError as error:
            got = f"nothing ({error})"
        self.heard.append(f"#{one.index} {mode}: client's last word to the daemon: {got}")

    def _server(self, mine: socket.socket, way: str, word: bytes, one: Connection) -> None:
        if way == "hangup":
            return
        if way == "first":  # the error before anything else
            mine.send(word)
            return
        spare = os.open("/dev/null", os.O_RDONLY)
        for _ in range(4):
            mine.sendmsg([PASSED], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", spare))])
        os.close(spare)
        if way == "early":  # in place of the zero byte
            mine.send(word)
            return
        mine.send(b"\0")
        said = [mine.recv(64).hex() for _ in range(3)]
        self.heard.append(f"#{one.index} {way}: client said {said}")
        if way == "late":  # after a good word, as MPS may do it
            mine.send(bytes(4))
            time.sleep(0.05)
        mine.send(word)
        if way == "late":
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                self.heard.append(f"#{one.index} late: then client said {mine.recv(4096)[:32].hex()}")


def tapped(bench: Bench) -> tuple[Daemon, Tap]:
    daemon = Daemon(bench, MULTI)
    daemon.limits("50", "40G")
    relay = Tap(bench, daemon.public, daemon.pipe)
    bench.relays.append(relay)
    return daemon, relay


def talk(bench: Bench) -> None:
    daemon, relay = tapped(bench)
    seen = Client(bench, daemon, B)
    relay.mode[seen.pid] = "tap"
    bench.say(
        f"ANSWER talk: tapped cuInit {seen.do('init')}, a context {seen.do('ctx a 0')}, works {seen.do('work a')}"
    )
    full = Client(bench, daemon, A)
    full.do("init")
    made, why, _ = full.make(50)
    relay.heard.append("--- full")
    bench.say(
        f"ANSWER talk: beside it {made}, then {why}; the tapped one's second context: {seen.do('ctx b 0')}, works on {seen.do('work a')}"
    )
    for line in relay.heard:
        bench.say(f"ANSWER talk:    {line}")
    daemon.show("control", skip="Accepting|NEW UI|UI closed|Cmd:|valid cred", most=20)
    bench.between()


# --- devices ----------------------------------------------------------------------------------------------------------


def devices(bench: Bench) -> None:
    daemon = direct(bench, MULTI)
    first = Client(bench, daemon, A)
    first.do("init")
    made, why, _ = first.make(50, 0, "a")
    more, then, _ = first.make(50, 1, "b")
    bench.say(
        f"ANSWER devices: device 0: {made}, then {why}; device 1: {more}, then {then}; all work: {first.do('all', 30)}"
    )
    bench.say(f"ANSWER devices: {daemon.ctl('get_device_client_list')[-500:]!r}")
    bench.say(f"      server.log kinds {kinds(daemon.news('server'))}")
    bench.between()


# --- close ------------------------------------------------------------------------------------------------------------


SERVERS: dict[Daemon, int] = {}


def watched(daemon: Daemon, pid: int, began: float, seconds: float, *, ask: bool) -> str:
    """What server.log says of `pid`, and when MPS's own lists know of it no more."""
    path, found = daemon.log / "server.log", []
    server = SERVERS[daemon]
    offset = daemon.offsets["server"]
    listed = ps = None
    rows: list[str] = []
    end = began + seconds
    while time.monotonic() < end:
        size = path.stat().st_size
        now = time.monotonic()
        if size > offset:
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            offset += len(data)
            for line in data.decode(errors="replace").splitlines():
                if f"PID: {pid}," in line or "806" in line:
                    found.append(f"{(now - began) * 1000:.1f} ms {SHORT.sub('', line)}")
        if ask and listed is None and str(pid) not in daemon.ctl(f"get_client_list {server}").split():
            listed = time.monotonic() - began
        if ask:
            said = daemon.ctl("get_device_client_list").split()
            mine = f"{' '.join(word for word in said if word.startswith(f'{pid}.'))[:100]}"
            if not rows or rows[-1].split(": ", 1)[1] != mine:
                rows.append(f"{(time.monotonic() - began) * 1000:.1f} ms: {mine}")
        if ask and ps is None and not re.search(rf"(?m)^{pid}\b", daemon.ctl("ps")):
            ps = time.monotonic() - began
        time.sleep(0.0005)
    daemon.offsets["server"] = offset
    text = (
        ""
        if not ask
        else "".join(
            f" | {name} {'still names it' if at is None else f'without it after {at * 1000:.1f} ms'}"
            for name, at in (("list", listed), ("ps", ps))
        )
    )
    return f"{found}{text}{f' | device list {rows}' if ask else ''}"


def close(bench: Bench) -> None:
    daemon = direct(bench, MULTI)
    stays = Client(bench, daemon, B)
    stays.do("init"), stays.do("ctx a 0")
    SERVERS[daemon] = daemon.servers()[0]
    for ask in (False, True):
        one = Client(bench, daemon, A)
        one.do("init"), one.do("ctx a 0"), one.do("ctx b 0"), one.do("primary p 0")
        time.sleep(0.1)
        daemon.news("server")
        for words in ("destroy a", "release p 0"):
            began = time.monotonic()
            number = one.tell(words)
            text = watched(daemon, one.pid, began, 0.4, ask=False)
            result, at, _ = one.heard(number)
            bench.say(f"ANSWER close {words}: {result} after {(at - began) * 1000:.1f} ms: {text}")
        for words in ("destroy b", "exit"):
            began = time.monotonic()
            number = one.tell(words)
            text = watched(daemon, one.pid, began, 0.6, ask=ask)
            result, at, _ = one.heard(number, 1)
            bench.say(
                f"ANSWER close {words} (asking {ask}): {result} {(at - began) * 1000:.1f} ms: {text}; ended {one.out.process.poll()}"
            )
    for ask in (False, True):
        one = Client(bench, daemon, A)
        one.do("init"), one.do("ctx a 0"), one.do("ctx b 0")
        time.sleep(0.1)
        daemon.news("server")
        began = time.monotonic()
        one.out.kill(signal.SIGKILL)
        bench.say(f"ANSWER close SIGKILL (asking {ask}): {watched(daemon, one.pid, began, 0.8, ask=ask)}")
    # room again, at once: full, one is closed in some way, and another tries every 2 ms
    holder = Client(bench, daemon, A)
    holder.do("init")
    goes = Client(bench, daemon, A)
    goes.do("init"), goes.do("ctx a 0")
    killed = Client(bench, daemon, A)
    killed.do("init"), killed.do("ctx a 0")
    made, why, _ = holder.make(50)
    comer = Client(bench, daemon, C)
    comer.do("init")
    bench.say(f"ANSWER close room: {made} of the holder, then {why}; comer {comer.do('ctx a 0')}")
    for name, action in (
        ("destroy", lambda: holder.do("destroy c0")),
        ("exit", lambda: goes.tell("exit")),
        ("SIGKILL", lambda: killed.out.kill(signal.SIGKILL)),
    ):
        began = time.monotonic()
        action()
        acted = time.monotonic() - began
        tries = 1
        while comer.do(f"ctx {name} 0") != "CUDA_SUCCESS" and time.monotonic() - began < 3:
            tries += 1
            time.sleep(0.002)
        bench.say(
            f"ANSWER close room after {name} ({acted * 1000:.1f} ms): comer served after {(time.monotonic() - began) * 1000:.1f} ms, {tries} tries"
        )
    began = time.monotonic()
    holder.out.kill(signal.SIGKILL)
    text = watched(daemon, holder.pid, began, 1.5, ask=True)
    bench.say(f"ANSWER close SIGKILL of one with 46: {text[:300]} … {text[-400:]}")
    bench.between()


# --- refuse -----------------------------------------------------------------------------------------------------------


def refuse(bench: Bench) -> None:
    daemon, relay = tapped(bench)
    for mode in (
        "tap-808",
        "full-808",
        "full-0",
        "late-808",
        "early-808",
        "first-808",
        "hangup",
        "control-808",
        "close",
    ):
        for when in ("context", "first context", "channel"):
            if when == "channel" and mode in ("full-0", "tap-808"):
                continue
            one = Client(bench, daemon, A)
            start = len(relay.heard)
            told = []
            if when == "channel":
                relay.mode[one.pid] = mode
                told.append(f"cuInit {one.do('init', 6)}")
                relay.mode.pop(one.pid)
                told.append(f"again {one.do('init', 6)}, ctx {one.do('ctx a 0', 6)}")
            else:
                told.append(f"cuInit {one.do('init')}")
                if when == "context":
                    told.append(f"ctx {one.do('ctx a 0')}")
                relay.mode[one.pid] = mode
                told.append(f"REFUSED cuCtxCreate {one.do('ctx b 0', 6)}, primary {one.do('primary p 0', 6)}")
                if when == "context":
                    told.append(f"works on {one.do('work a', 6)}")
                relay.mode.pop(one.pid)
                told.append(
                    f"let in: {one.do('ctx d 0', 6)}, works {one.do('all', 6)}, primary {one.do('primary p 0', 6)}"
                )
            bench.say(
                f"ANSWER refuse {mode}, {when}: {'; '.join(told)}; process {one.out.process.poll()} {one.out.short()[-200:]!r}; relay {relay.heard[start:]}"
            )
            one.out.kill()
            if time.monotonic() > bench.deadline - 40:
                bench.say("left out: the rest")
                bench.between()
                return
    bench.say(f"      server.log kinds {kinds(daemon.news('server'))}")
    bench.between()


# --- logs -------------------------------------------------------------------------------------------------------------

PUNCH, COLLAPSE = 0x02 | 0x01, 0x08


def logs(bench: Bench) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    places = {
        name: next(
            (
                line.split()[2]
                for line in reversed(Path("/proc/mounts").read_text().splitlines())
                if line.split()[1] == name
            ),
            "?",
        )
        for name in ("/", "/tmp", "/var/log", "/dev/shm")
    }
    bench.say(f"ANSWER logs: file systems {places}")
    daemon = direct(bench, MULTI)
    client = Client(bench, daemon, A)
    client.do("init")
    for way, mode in (("punch", PUNCH), ("collapse", COLLAPSE), ("truncate", None)):
        before = {name: (daemon.log / f"{name}.log").stat().st_size for name in ("control", "server")}
        for number in range(60):
            if min(before.values()) >= 12288:
                break
            daemon.ctl("ps", "get_server_list", "get_default_active_thread_percentage")
            client.do(f"ctx x{number} 0")
            client.do(f"destroy x{number}")
            before = {name: (daemon.log / f"{name}.log").stat().st_size for name in ("control", "server")}
        for name in ("control", "server"):
            path = daemon.log / f"{name}.log"
            with path.open("r+b") as file:
                if mode is None:
                    file.truncate(0)
                    rc, error = 0, 0
                else:
                    rc = libc.fallocate(file.fileno(), mode, 0, 8192)
                    error = ctypes.get_errno() if rc else 0
            cut = path.stat()
            client.do("ctx y 0"), client.do("destroy y")
            time.sleep(0.1)
            after = path.stat()
            data = path.read_bytes()
            bench.say(
                f"ANSWER logs {way} {name}.log: {os.strerror(error) if error else 'done'}; {before[name]} -> {cut.st_size} bytes "
                f"({cut.st_blocks} blocks) -> {after.st_size}; NULs {data.count(0)}; last line {data[-80:]!r}"
            )
    bench.between()


QUESTIONS = {one.__name__: (one, 60.0) for one in (limit, talk, refuse, close, devices, logs)}


if __name__ == "__main__":
    sys.exit(rendezvous_bench.main(__doc__, "contexts-full", QUESTIONS))
