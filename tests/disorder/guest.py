#!/usr/bin/env python3
"""A user at the control socket who is no CUDA client: `guest.py KIND SECONDS SOCKET CONTROL_PROGRAM`.

silent: connects and says nothing. greeted: takes the greeting, then nothing. garbage: random bytes. half: credentials,
but not what it is. vanish: says that it is a client and goes. flood: 200 connections that say nothing. hostage: waits
until it is handed over, says nothing to the server and dies with the descriptor; on real MPS that holds up the daemon
and its server for ever. front-end: holds NVIDIA's front-end open without a command. ps, list: a query with it.

Bare Python. The last line is `guest KIND: ...`; a hostage's first one is `guest hostage: handed over`.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time

HELLO, CREDENTIALS, CLIENT = b"OUTBHELL\0", b"OUTBCRED\0", b"\2\0\0\0"


def connected(path):
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found.setsockopt(socket.SOL_SOCKET, 16, 1)  # SO_PASSCRED
    found.settimeout(10)
    found.connect(path)
    return found


def at_the_socket(kind, seconds, path):
    number = 200 if kind == "flood" else 1
    open_ones = [connected(path) for _ in range(number)]
    one = open_ones[0]
    if kind in ("greeted", "half", "vanish", "hostage"):
        heard = one.recv(64)
        if heard != HELLO:
            return "greeting %r" % heard
    if kind == "garbage":
        for size in (1, 9, 64, 4000):
            one.send(os.urandom(size))
    if kind in ("half", "vanish", "hostage"):
        one.send(CREDENTIALS)
    if kind == "vanish":
        one.send(CLIENT)
        one.close()
        return "gone"
    if kind == "hostage":
        one.send(CLIENT)
        one.settimeout(300)
        heard, _held, _, _ = one.recvmsg(64, 256)
        if not heard:
            return "refused"
        say("guest hostage: handed over")
    time.sleep(seconds)
    return "done"


def say(text):
    with contextlib.suppress(OSError):
        os.write(1, text.encode() + b"\n")


def front_end(kind, seconds, control):
    since = time.monotonic()
    commands = {"ps": b"ps\n", "list": b"get_server_list\n", "front-end": None}[kind]
    program = subprocess.Popen([control], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if commands is None:
        time.sleep(seconds)
    try:
        out = program.communicate(commands, timeout=30)[0]
    except subprocess.TimeoutExpired:
        program.kill()
        return "no answer in 30 s"
    return "rc %d in %.2f s: %r" % (program.returncode, time.monotonic() - since, out[:200])


def main():
    kind, seconds, path, control = sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4]
    try:
        if kind in ("ps", "list", "front-end"):
            said = front_end(kind, seconds, control)
        else:
            said = at_the_socket(kind, seconds, path)
    except OSError as error:
        said = "%s %s" % (type(error).__name__, error)
    say("guest %s: %s" % (kind, said))


if __name__ == "__main__":
    main()
