"""A user at the control socket who is no CUDA client: ``guest.py WHAT SOCKET COUNT``. Bare Python, run as that user.

silent: connects and says nothing; half: sends its credentials and then nothing; front-end: holds an open front-end;
vanish: says that it is a client, and goes. ``COUNT`` of them at once. Says ``there`` when they have come, and stays.
"""

import signal
import socket
import sys

CREDENTIALS, CLIENT, FRONT_END = b"OUTBCRED\0", b"\2\0\0\0", b"\4\0\0\0"


def come(what: str, path: str) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    peer.connect(path)
    if what != "silent":
        peer.recv(64)
        peer.send(CREDENTIALS)
    if what in ("front-end", "vanish"):
        peer.send(FRONT_END if what == "front-end" else CLIENT)
    if what == "vanish":
        peer.close()
    return peer


def main() -> None:
    what, path, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    peers = [come(what, path) for _ in range(count)]
    sys.stdout.write("there\n")
    sys.stdout.flush()
    signal.pause()
    del peers


if __name__ == "__main__":
    main()
