#!/usr/bin/env python3
"""What a user's own process can do between the gate and CUDA programs of hers (recording 12, H1).

    user_relay.py relay DIRECTORY CONTROL   listens at DIRECTORY/control, passes each connection on to CONTROL as itself
    user_relay.py passes CONTROL SECONDS    takes its descriptor and passes it on to a sibling, which meets the server
    user_relay.py forks CONTROL SECONDS     the same by fork: the child meets the server
    user_relay.py leaves SECONDS            a context, then fork; the parent ends, the child keeps what it inherited

A bare Python and nothing of this project, because an ordinary user runs it.
"""

import array
import os
import socket
import struct
import sys
import threading
import time

CREDENTIALS = b"OUTBCRED\0"
BEGAN = time.monotonic()


def say(text):
    os.write(1, b"[%8.3f pid %d uid %d] %s\n" % (time.monotonic() - BEGAN, os.getpid(), os.getuid(), text.encode()))


def packet(connection):
    """One packet: its bytes and its descriptors."""
    data, ancillary, _, _ = connection.recvmsg(8192, 512)
    descriptors = array.array("i")
    for _, kind, content in ancillary:
        if kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) // 4 * 4])
    return data, list(descriptors)


def credentials(connection):
    own = struct.pack("iII", os.getpid(), os.getuid(), os.getgid())
    connection.sendmsg([CREDENTIALS], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, own)])


def give(connection, data, descriptors):
    connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])


def introduced(control, kind):
    """A connection that has said who and what it is."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    connection.connect(control)
    packet(connection)
    credentials(connection)
    connection.send(kind)
    return connection


def relay(directory, control):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    listener.bind(directory + "/control")
    os.chmod(directory + "/control", 0o666)
    listener.listen(64)
    say("listens")

    def serve(client):
        try:
            client.send(b"OUTBHELL\0")
            if packet(client)[0] != CREDENTIALS:
                return  # a probe
            daemon = introduced(control, packet(client)[0])
            answer, descriptors = packet(daemon)
            if answer:
                give(client, answer, descriptors)
                daemon.send(packet(client)[0])
            for descriptor in descriptors:
                os.close(descriptor)
            daemon.close()
        except OSError as error:
            say("broken off: %s" % error)
        finally:
            client.close()

    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


def meet(server):
    """A client's part of the handshake with its server, for its channel: the status."""
    server.settimeout(10)
    while True:
        data, descriptors = packet(server)
        for descriptor in descriptors:
            os.close(descriptor)
        if data in (b"\0", b""):
            break
    credentials(server)
    server.send(bytes(4))
    server.send(b"\xff\0\0\0")
    status = packet(server)[0]
    say("met the server: %s" % (status.hex() or "nothing"))
    return status


def passes(control, seconds, by_fork):
    """Who meets the server is not who asked for the descriptor."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = 0 if by_fork else os.fork()
    if not by_fork and child == 0:  # begun before there is a descriptor
        _, descriptors = packet(theirs)
        server = socket.socket(fileno=descriptors[0])
        theirs.send(meet(server) or b"?")
        time.sleep(seconds)
        os._exit(0)
    daemon = introduced(control, b"\2\0\0\0")
    answer, descriptors = packet(daemon)
    say("descriptor %s" % answer)
    if by_fork:
        child = os.fork()
        if child == 0:
            server = socket.socket(fileno=descriptors[0])
            theirs.send(meet(server) or b"?")
            time.sleep(seconds)
            os._exit(0)
    else:
        give(ours, b"take", descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    status = packet(ours)[0]
    daemon.send(status)
    daemon.close()
    say("child %d, acknowledged %s" % (child, status.hex()))
    os.waitpid(child, 0)


def leaves(seconds):
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from ctypes import c_uint

    import cuda_client

    cuda = cuda_client.Driver()
    results = [cuda.call("cuInit", c_uint(0))]
    _, device = cuda.device(0)
    results.append(cuda.primary_context(device))
    result, pointer = cuda.allocate(512 << 20)
    results += [result, cuda.fill(pointer, 1 << 20), cuda.synchronize()]
    say("sms parent at work %s" % results)
    time.sleep(1)
    child = os.fork()
    if child:
        say("parent ends, child %d" % child)
        os._exit(0)
    time.sleep(1)
    say("child: fill %s" % cuda.name(cuda.fill(pointer, 1 << 20)))
    time.sleep(seconds)
    say("child ends")
    os._exit(0)


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "relay":
        relay(*rest)
    elif what == "leaves":
        leaves(float(rest[0]))
    else:
        passes(rest[0], float(rest[1]), what == "forks")
