"""A CUDA client in name only: `fake_client.py DIRECTORY WHAT` speaks the rendezvous as far as its descriptor, and then

    sleep    does nothing
    acknowledge    says that it has met its server, and does nothing
    stop     stops itself
    die      ends without a word
    exec     becomes the program behind it, which keeps the connections
It says each step on its standard output. Bare Python: other users run it.
"""

import array
import os
import signal
import socket
import sys
import time

directory, what = sys.argv[1:3]
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.setsockopt(socket.SOL_SOCKET, 16, 1)  # SO_PASSCRED
sock.connect(f"{directory}/control")
assert sock.recv(64) == b"OUTBHELL\0"
credentials = array.array("i", [os.getpid(), os.getuid(), os.getgid()]).tobytes()
sock.sendmsg([b"OUTBCRED\0"], [(socket.SOL_SOCKET, 2, credentials)])
sock.send(b"\2\0\0\0")
print("waits", flush=True)
data, ancillary, _, _ = sock.recvmsg(64, 256)
print("has its descriptor" if ancillary else f"was refused: {data!r}", flush=True)
if what == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
    print("was resumed", flush=True)
if what == "acknowledge":
    sock.send(bytes(4))
    print("has acknowledged", flush=True)
if what == "exec":
    given = next(content for _, kind, content in ancillary if kind == socket.SCM_RIGHTS)
    for kept in (sock.fileno(), *array.array("i", given)):
        os.set_inheritable(kept, True)
    os.execv(sys.argv[3], sys.argv[3:])
if what != "die":
    time.sleep(600)
