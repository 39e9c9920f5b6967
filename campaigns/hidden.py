#!/usr/bin/env python3
"""A question to a real MPS: what can a user do to the control daemon whose directories he cannot enter, and to his own
server?

    hidden.py [--out DIR] [--sim]

Root, and a GPU with a driver that knows --multiuser-server; ten seconds. Prints `ANSWER` lines and writes everything to
DIR/hidden.txt ($OUT if that is set). Nothing that it started is left behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns import rendezvous_bench
from campaigns.rendezvous_bench import Bench, Daemon
from tests.conformance.backends import other_users_python

A, B = 20001, 20002
MULTI = ("--multiuser-server",)

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
            bench.relay(daemon)
            client = bench.client(daemon, A, "sleep", 200)  # so that a server is there
            client.said(r"\] sms ")
            title = f"{'multi-user' if options else 'own server'} home/pipe/log {[oct(m) for m in modes]}"
            bench.say(f"ANSWER {title}: client {client.short()}")
            if client.seen() is None:
                daemon.show()
                bench.between()
                continue
            server = next(iter(daemon.servers()), os.getpid())
            status = Path(f"/proc/{server}/status").read_text().splitlines()
            ids = [line for line in status if line.startswith(("Uid", "Gid", "Groups", "CapEff"))]
            owner = os.stat(f"/proc/{server}/fd")
            bench.say(f"ANSWER server {server}: {ids}, /proc/{server} belongs to {owner.st_uid}:{owner.st_gid}")
            done = subprocess.run(
                [python, "-S", "-E", "-c", LOOK, str(daemon.pipe), str(daemon.log), str(server)],
                user=A, group=A, extra_groups=[], cwd="/", capture_output=True, text=True, timeout=15,
            )  # fmt: skip
            looked = (done.stdout + done.stderr).splitlines()
            for line in looked:
                bench.say(f"   as user {A}: {line}")
            bench.say(f"ANSWER user could: {[line for line in looked if '-> YES' in line]}")
            bench.say(f"ANSWER user could not: {[line.split(' -> ')[0] for line in looked if '-> YES' not in line]}")
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


if __name__ == "__main__":
    sys.exit(rendezvous_bench.main(__doc__, "hidden", {"hidden": (hidden, 60.0)}))
