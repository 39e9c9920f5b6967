"""A user who asks the API for all there is, as fast as it is given: ``flood.py SOCKET``, until standard input ends.
Then it prints how many bytes came. It runs as another user, who cannot read this checkout."""

from __future__ import annotations

import socket
import sys
import threading

THREADS, AT_ONCE = 8, 20
REQUEST = b"GET /v1/events?limit=1000&cursor=0 HTTP/1.1\r\nHost: m\r\n\r\n"
came = [0] * THREADS


def ask(number: int) -> None:
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(20)
                sock.connect(sys.argv[1])
                sock.sendall(REQUEST * AT_ONCE)
                while data := sock.recv(65536):
                    came[number] += len(data)
        except OSError:  # cut off, as one who asks too much is
            pass


for each in range(THREADS):
    threading.Thread(target=ask, args=(each,), daemon=True).start()
print("on", flush=True)
sys.stdin.read()
print(sum(came), flush=True)
