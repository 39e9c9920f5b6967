#!/usr/bin/env python3
"""What hostile users run in hostile.py. Bare Python; each ends when its standard input does.

    attackers.py relay SOCKET DIRECTORY           passes whoever comes to DIRECTORY/control on to SOCKET as itself (H1)
    attackers.py acknowledge SOCKET COUNT [AGAIN] a false acknowledgement, and nothing to the server (H2)
    attackers.py silent SOCKET COUNT [AGAIN]      takes the descriptor and says nothing to anybody (H2)
    attackers.py error SOCKET COUNT [AGAIN]       meets its server and acknowledges with 807 (H3)
    attackers.py inside NAME=VALUE CLIENT ...     a CUDA client whose environment is set in the process itself (E4)

COUNT processes; AGAIN seconds after its begin each is ended and another comes in its place.
"""

import os
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import time

HELLO, CREDENTIALS, CLIENT = b"OUTBHELL\0", b"OUTBCRED\0", b"\2\0\0\0"
SCM_CREDENTIALS = 2


def own():
    return [(socket.SOL_SOCKET, SCM_CREDENTIALS, struct.pack("iII", os.getpid(), os.getuid(), os.getgid()))]


def connected(path):
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    found.connect(path)
    return found


def received(one):
    """A packet: its bytes, and the descriptors that came along."""
    data, ancillary, _, _ = one.recvmsg(4096, 256)
    rights = [content for _, kind, content in ancillary if kind == socket.SCM_RIGHTS]
    return data, [number for content in rights for (number,) in struct.iter_unpack("i", content)]


def say(text):
    os.write(1, text.encode() + b"\n")


# --- H1 ---------------------------------------------------------------------------------------------------------------


def relay(public, directory):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    listener.bind(directory + "/control")
    listener.listen(64)
    say("ready")
    while True:
        threading.Thread(target=passed_on, args=(listener.accept()[0], public), daemon=True).start()


def passed_on(client, public):
    try:
        client.send(HELLO)
        if not received(client)[0]:
            return
        kind = received(client)[0]
        gate = connected(public)
        received(gate)
        gate.sendmsg([CREDENTIALS], own())
        gate.sendmsg([kind], own())
        answer, numbers = received(gate)
        client.sendmsg([answer], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("%di" % len(numbers), *numbers))])
        for number in numbers:
            os.close(number)
        gate.send(received(client)[0])
        gate.close()
    except OSError as error:
        say("relay: %s" % error)
    finally:
        client.close()


# --- H2, H3 -----------------------------------------------------------------------------------------------------------


def one_client(way, public):
    """In a process of its own; it stays, with what it was given, until it is killed."""
    kept = []
    for attempt in range(2):  # as a CUDA client does: first to see whether anybody is there
        gate = connected(public)
        if gate.recv(64) != HELLO:
            say("no greeting")
            return
        if not attempt:
            gate.close()
    gate.sendmsg([CREDENTIALS], own())
    gate.sendmsg([CLIENT], own())
    data, numbers = received(gate)
    kept += [gate, *numbers]
    if not numbers:
        say("refused %s" % data.hex())
        return
    say("has its descriptor")
    if way == "acknowledge":
        gate.send(bytes(4))
    elif way == "error":
        server = socket.socket(fileno=numbers[0])
        while received(server)[0] not in (b"\0", b""):
            pass
        server.sendmsg([CREDENTIALS], own())
        server.send(bytes(4))
        server.send(b"\xff\0\0\0")
        say("met its server, which said %s" % received(server)[0].hex())
        gate.send(struct.pack("<I", 807))
    time.sleep(600)


def many(way, public, count, again):
    children = {}
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLHUP)
    until = 0.0
    while not poller.poll(20):
        now = time.monotonic()
        for child, since in list(children.items()):
            if os.waitpid(child, os.WNOHANG)[0]:
                del children[child]
            elif again and now - since > again:
                os.kill(child, signal.SIGKILL)
        while len(children) < count and now > until:
            child = os.fork()
            if child == 0:
                try:
                    one_client(way, public)
                except OSError as error:
                    say(repr(error))
                os._exit(0)
            children[child] = now
        if not again and not until:
            until = float("inf")  # each comes once
    for child in children:
        os.kill(child, signal.SIGKILL)
    os._exit(0)


def main():
    way, *rest = sys.argv[1:]
    if way == "inside":
        name, _, value = rest[0].partition("=")
        os.environ[name] = value
        sys.argv = rest[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
    elif way == "relay":
        threading.Thread(target=relay, args=rest, daemon=True).start()
        os.read(0, 1)
    else:
        many(way, rest[0], int(rest[1]), float(rest[2]) if len(rest) > 2 else 0.0)


if __name__ == "__main__":
    main()
