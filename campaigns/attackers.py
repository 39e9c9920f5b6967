#!/usr/bin/env python3
"""What hostile users run in hostile.py. Bare Python; each ends when its standard input does.

    attackers.py relay SOCKET DIRECTORY           passes whoever comes to DIRECTORY/control on to SOCKET as itself (H1)
    attackers.py acknowledge SOCKET COUNT [AGAIN] a false acknowledgement, and nothing to the server (H2)
    attackers.py silent SOCKET COUNT [AGAIN]      takes the descriptor and says nothing to anybody (H2)
    attackers.py error SOCKET COUNT [AGAIN]       meets its server and acknowledges with 807 (H3)
    attackers.py inside NAME=VALUE CLIENT ...     a CUDA client whose environment is set in the process itself (E4)
    attackers.py become SOCKET PROGRAM ...        takes its descriptor and becomes another program, which keeps it
    attackers.py knock SOCKET COUNT               COUNT connections that say nothing, half of it or garbage
    attackers.py uids SOCKET COUNT FIRST          COUNT users from FIRST on, each with a client that waits (needs root)
    attackers.py ask SOCKET COUNT COMMAND ...     front-ends that give these commands again and again
    attackers.py pretend SOCKET UID               another user's credentials; a connection that changes hands
    attackers.py touch JSON                       files, sockets and processes that are not this user's
    attackers.py signal NUMBER PID ...            a signal to each
    attackers.py read SOCKET COUNT                COUNT connections of requests whose answers nobody reads
    attackers.py order SOCKET COUNT ORDER         COUNT connections to the orders' socket, again and again

COUNT processes; AGAIN seconds after its begin each is ended and another comes in its place.
"""

import json
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
said = []


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
    if len(said) < 1000:  # a loop says enough
        said.append(text)
        os.write(1, text.encode() + b"\n")


# --- H1 ---------------------------------------------------------------------------------------------------------------


def relay(public, directory):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    listener.bind(directory + "/control")
    os.chmod(directory + "/control", 0o666)  # for whoever is denied elsewhere
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
    say("%d has its descriptor at %.3f" % (os.getpid(), time.monotonic()))
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
                say("%d ended at %.3f" % (child, now))
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


# --- what docs/security.md names beside the recordings ----------------------------------------------------------------


def become(public, words):
    gate = connected(public)
    received(gate)
    gate.sendmsg([CREDENTIALS], own())
    gate.sendmsg([CLIENT], own())
    _, numbers = received(gate)
    say("has its descriptor" if numbers else "refused")
    for number in [gate.fileno(), *numbers]:
        os.set_inheritable(number, True)
    os.execv(words[0], words)


def half(public, number):
    """A connection that says this much."""
    gate = connected(public)
    gate.setblocking(False)
    how = number % 6
    if how:
        time.sleep(0.001)
        gate.recv(64)
    if how == 2:
        gate.send(os.urandom(48))
    if how == 3:
        gate.send(b"x" * 60000)
    if how > 3:
        gate.sendmsg([CREDENTIALS], own())
    if how == 5:
        gate.send(struct.pack("<I", 7))
    return gate


def knock(public, count):
    kept = []
    while True:
        try:
            kept.append(half(public, len(kept)))
        except OSError:
            time.sleep(0.002)
        if len(kept) >= count:
            say("knocked %d times" % count)
            del kept[: count // 2]


def uids(public, count, first):
    for uid in range(first, first + count):
        if os.fork() == 0:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            while True:
                try:
                    one_client("silent", public)
                except OSError as error:
                    say(repr(error))
                time.sleep(1.0)


def ask(public, commands):
    """One front-end: its commands, and what it was told."""
    gate = connected(public)
    received(gate)
    gate.sendmsg([CREDENTIALS], own())
    gate.send(b"\4\0\0\0")
    for command in commands:
        text = command.encode() + b"\n\0"
        gate.send(struct.pack("<Q", len(text)))
        gate.send(text)
    gate.send(bytes(8))
    while True:
        data, _ = received(gate)
        if not data or data[0] == 1:
            return
        say("told: %s" % data[4:].decode(errors="replace"))


def again_and_again(count, what):
    def loop():
        while True:
            try:
                what()
            except OSError:
                time.sleep(0.01)

    for _ in range(count):
        threading.Thread(target=loop, daemon=True).start()


def pretend(public, uid):
    gate = connected(public)
    received(gate)
    try:
        gate.sendmsg([CREDENTIALS], [(socket.SOL_SOCKET, SCM_CREDENTIALS, struct.pack("iII", os.getpid(), uid, uid))])
        say("another user's credentials: WORKED")
    except PermissionError:
        say("another user's credentials: refused")
    ours, theirs = socket.socketpair()
    if os.fork() == 0:  # it connects, and ends
        gate = connected(public)
        received(gate)
        gate.sendmsg([CREDENTIALS], own())
        socket.send_fds(theirs, [b"."], [gate.fileno()])
        os._exit(0)
    gate = socket.socket(fileno=socket.recv_fds(ours, 1, 1)[1][0])
    os.wait()
    try:
        gate.sendmsg([CLIENT], own())
        worked = received(gate)[1]
    except OSError:
        worked = []
    say("a connection that changed hands: %s" % ("WORKED" if worked else "refused"))


def touch(place):
    """Each attempt is refused, or it worked."""

    def attempt(name, what, *arguments):
        try:
            what(*arguments)
            tried[name] = "worked"
        except PermissionError:
            tried[name] = "refused"
        except OSError as error:
            tried[name] = repr(error)

    def connect(kind, path):
        with socket.socket(socket.AF_UNIX, kind) as sock:
            sock.connect(path)

    tried = {}
    for name in ("public", "log"):
        directory = place[name]
        attempt(f"{name}: make a file", os.open, f"{directory}/x", os.O_CREAT | os.O_WRONLY, 0o666)
        attempt(f"{name}: make a link", os.symlink, "/etc/passwd", f"{directory}/mpsagent.lock")
        for file in os.listdir(directory):
            attempt(f"{name}: remove {file}", os.unlink, f"{directory}/{file}")
            attempt(f"{name}: rename {file}", os.rename, f"{directory}/{file}", f"{directory}/y")
            attempt(f"{name}: replace {file}", os.rename, place["mine"], f"{directory}/{file}")
            attempt(f"{name}: give away {file}", os.chmod, f"{directory}/{file}", 0o777)
    for file in place["logs"]:
        attempt(f"write into {file}", os.open, file, os.O_WRONLY | os.O_APPEND)
    for hidden in place["hidden"]:
        attempt(f"look into {hidden}", os.listdir, hidden)
        attempt(f"write into the FIFO of {hidden}", os.open, f"{hidden}/log", os.O_WRONLY | os.O_NONBLOCK)
        attempt(f"write the pid file of {hidden}", os.open, f"{hidden}/nvidia-cuda-mps-control.pid", os.O_WRONLY)
        attempt(f"plant a lock beside {hidden}", os.open, f"{hidden}/../agent.lock", os.O_RDWR | os.O_CREAT, 0o666)
        attempt(f"go around the gate to {hidden}", connect, socket.SOCK_SEQPACKET, f"{hidden}/control")
    attempt("write the admissions", os.open, f"{place['run']}/admissions.json", os.O_WRONLY)
    attempt("write the history", os.open, f"{place['state']}-api/history.db", os.O_WRONLY)
    attempt("write what is remembered", os.open, f"{place['state']}/state.json", os.O_WRONLY)
    attempt("be root's front-end", connect, socket.SOCK_SEQPACKET, f"{place['public']}/control_privileged")
    attempt("be the agent", connect, socket.SOCK_SEQPACKET, f"{place['run']}/gate.sock")
    attempt("be an administrator", connect, socket.SOCK_STREAM, place["administrators"])
    for name, pid in place["pids"].items():
        attempt(f"signal {name}", os.kill, pid, 0)
        attempt(f"read the memory of {name}", os.open, f"/proc/{pid}/mem", os.O_RDONLY)
        attempt(f"the descriptors of {name}", os.listdir, f"/proc/{pid}/fd")
        attempt(f"the mounts of {name}", os.listdir, f"/proc/{pid}/root/")
    say(json.dumps(tried))


def send_signals(number, pids):
    for pid in pids:
        try:
            os.kill(pid, number)
            say("%d: worked" % pid)
        except OSError as error:
            say("%d: %s" % (pid, type(error).__name__))


def read(path, count):
    kept = []
    while True:
        try:
            one = socket.socket(socket.AF_UNIX)
            one.setblocking(False)
            one.connect(path)
            kept.append(one)
            one.send(b"GET /v1/events?limit=1000 HTTP/1.1\r\nHost: m\r\n\r\n" * 1000)
        except OSError:
            time.sleep(0.002)
        if len(kept) >= count:
            kept.pop(0).close()


def order(path, text):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.settimeout(5)
        one.connect(path)
        one.send(text.encode())
        say("answered: %s" % one.recv(65536).decode(errors="replace"))


def in_a_thread(what, *arguments):
    threading.Thread(target=what, args=arguments, daemon=True).start()


def beside(way, rest):
    """What goes on until standard input ends, by its name."""
    if way == "relay":
        in_a_thread(relay, *rest)
    elif way == "knock":
        in_a_thread(knock, rest[0], int(rest[1]))
    elif way == "uids":
        uids(rest[0], int(rest[1]), int(rest[2]))
    elif way == "ask":
        again_and_again(int(rest[1]), lambda: ask(rest[0], rest[2:]))
    elif way == "read":
        in_a_thread(read, rest[0], int(rest[1]))
    elif way == "order":
        again_and_again(int(rest[1]), lambda: order(rest[0], rest[2]))
    elif way == "pretend":
        in_a_thread(pretend, rest[0], int(rest[1]))
    elif way == "touch":
        touch(json.loads(rest[0]))
    else:
        send_signals(int(rest[0]), map(int, rest[1:]))
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)  # its children, too


def main():
    way, *rest = sys.argv[1:]
    if way == "inside":
        name, _, value = rest[0].partition("=")
        os.environ[name] = value
        sys.argv = rest[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
    elif way == "become":
        become(rest[0], rest[1:])
    elif way in ("acknowledge", "silent", "error"):
        many(way, rest[0], int(rest[1]), float(rest[2]) if len(rest) > 2 else 0.0)
    else:
        beside(way, rest)


if __name__ == "__main__":
    main()
