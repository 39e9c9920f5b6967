"""A user who asks the API for all there is, as fast as it is given: ``flood.py SOCKET``, until standard input ends.
Then it prints how many bytes came. It runs as another user, who cannot read this checkout. Its loops ask one question
after the other, or twenty at once, or read the answers to twenty a byte a second."""

from __future__ import annotations

import socket
import sys
import threading
import time

THREADS, AT_ONCE = 8, 20
REQUEST = b"GET /v1/events?limit=1000&cursor=0 HTTP/1.1\r\nHost: m\r\n\r\n"
came = [0] * THREADS


def ask(number: int) -> None:
    alone, slowly = number % 4 == 0, number % 4 == 1
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(20)
                sock.connect(sys.argv[1])
                sock.sendall(REQUEST * (1 if alone else AT_ONCE))
                while data := sock.recv(1 if slowly else 65536):
                    came[number] += len(data)
                    if slowly:
                        time.sleep(1)
                    if alone:
                        sock.sendall(REQUEST)
        except OSError:  # cut off, as one who asks too much is
            pass


for each in range(THREADS):
    threading.Thread(target=ask, args=(each,), daemon=True).start()
print("on", flush=True)
sys.stdin.read()
print(sum(came), flush=True)
