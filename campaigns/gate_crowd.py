#!/usr/bin/env python3
"""Peers at the control socket that are no CUDA clients, for gate.py: `gate_crowd.py WAY SOCKET COUNT [A_SECOND]`.

silent: COUNT connections that say nothing. greeted: take the greeting, then nothing. garbage: random bytes. half: go
after their credentials. vanish: say that they are clients and go. What is closed is opened again, A_SECOND (500) at
most. wait: COUNT processes that wait at the gate like clients. Bare Python; prints `ready` once all have come for the
first time, and ends with whoever started it (its standard input).
"""

import contextlib
import os
import resource
import select
import socket
import sys
import time

HELLO, CREDENTIALS, CLIENT = b"OUTBHELL\0", b"OUTBCRED\0", b"\2\0\0\0"
LEAVES = ("half", "vanish")


def connected(path):
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found.setsockopt(socket.SOL_SOCKET, 16, 1)  # SO_PASSCRED
    found.settimeout(20)
    found.connect(path)
    return found


def act(way, one):
    """The connection if it is to stay open."""
    if way == "silent":
        return one
    if one.recv(64) != HELLO:
        one.close()
        return None
    if way == "garbage":
        for size in (1, 9, 64, 4000):
            one.send(os.urandom(size))
    elif way in ("half", "vanish", "wait"):
        one.send(CREDENTIALS)
        if way != "half":
            one.send(CLIENT)
    if way in LEAVES:
        one.close()
        return None
    return one


def attack(way, path, count, a_second):
    kept, done, began, said = [], 0, time.monotonic(), False
    looked = began
    poller = select.poll()
    poller.register(0, select.POLLHUP | select.POLLIN)
    while not poller.poll(0):
        if len(kept) < count:
            with contextlib.suppress(OSError):
                if (one := act(way, connected(path))) is not None:
                    kept.append(one)
            done += 1
        else:
            time.sleep(0.01)
        if done >= count:
            if not said:
                say(f"ready {len(kept)}")
                said, began, done = True, time.monotonic(), count
            time.sleep(max(0.0, (done - count) / a_second - (time.monotonic() - began)))
        if kept and time.monotonic() - looked > 0.05:  # who was hung up on
            looked = time.monotonic()
            watch = select.poll()
            for one in kept:
                watch.register(one, select.POLLRDHUP)
            gone = {number for number, event in watch.poll(0) if event & (select.POLLRDHUP | select.POLLHUP)}
            for one in kept:
                if one.fileno() in gone:
                    one.close()
            kept = [one for one in kept if one.fileno() >= 0]
    os._exit(0)


def wait(path, count):
    """A process for each, because the kernel says who knocks."""
    ready_in, ready_out = os.pipe()
    alive_in, alive_out = os.pipe()
    for _ in range(count):
        if os.fork() == 0:
            os.close(alive_out)
            os.close(ready_in)
            _stay(path, ready_out, alive_in)
            os._exit(0)
    os.close(ready_out)
    heard = b""
    os.set_blocking(ready_in, False)
    poller = select.poll()
    poller.register(ready_in, select.POLLIN)
    while poller.poll(60_000 if heard.count(b"y") < count else 1000):  # and a second in which nobody is hung up on
        heard += os.read(ready_in, 4096)
    say(f"ready {heard.count(b'y')}, closed {heard.count(b'r')}")
    os.read(0, 1)
    os.close(alive_out)
    for _ in range(count):
        os.wait()


def _stay(path, told, alive):
    """One that waits; `y` once it does, `r` each time that it was hung up on, and it comes again."""
    new = True
    for _ in range(50):
        one = None
        with contextlib.suppress(OSError):
            one = act("wait", connected(path))
        if one is not None:
            if new:
                os.write(told, b"y")
            new = False
            watch = select.poll()
            watch.register(alive, select.POLLHUP)
            watch.register(one, select.POLLRDHUP)
            if any(number == alive for number, _ in watch.poll()):
                return
        os.write(told, b"r")
        time.sleep(0.05)


def say(text):
    os.write(1, text.encode() + b"\n")


if __name__ == "__main__":
    way, path, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    if way == "wait":
        wait(path, count)
    else:
        attack(way, path, count, float(sys.argv[4]) if len(sys.argv) > 4 else 500.0)
