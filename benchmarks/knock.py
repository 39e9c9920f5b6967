"""CUDA clients as far as the control socket goes, for many of them at little cost: ``knock.py ROOT SOCKET COUNT``.

Bare Python, run as the user. COUNT 0: for each line on standard input a new process goes through one rendezvous, leaves
again, and the milliseconds from its credentials to its descriptor are printed. Otherwise COUNT processes come at once;
``there`` is printed when all have sent their credentials, then for each ``served TIME``, in the order of their service.
"""

import os
import sys
import time

sys.path.insert(0, sys.argv[1])

from mpsagent_sim import rendezvous

FAILED = 99


def knock(path: str, there: int | None = None) -> float | None:
    """One rendezvous: seconds from credentials to descriptor; None when it was turned away. ``there``: a descriptor
    for a byte when the credentials have been sent."""
    control = rendezvous.connect(path)
    if not rendezvous.greeted(control):
        return None
    began = time.perf_counter()
    rendezvous.send_credentials(control, rendezvous.CREDENTIALS)
    rendezvous.send(control, rendezvous.CLIENT)
    if there is not None:
        os.write(there, b".")
    server = rendezvous.answer(control)
    took = time.perf_counter() - began
    if server is None:
        return None
    status = rendezvous.meet(server, 0, rendezvous.NO_DEVICE)
    if status == 0:
        rendezvous.send(server, b"NAME 3f")
    rendezvous.send_status(control, status or 0)
    control.close()
    if status == 0:
        rendezvous.receive(server)
    server.close()
    return took if status == 0 else None


def one_after_the_other(path: str) -> None:
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            took = knock(path)
            os.write(1, b"refused\n" if took is None else b"%.6f\n" % (took * 1000))
            os._exit(0)
        os.waitpid(child, 0)


def all_at_once(path: str, count: int) -> None:
    there, tell = os.pipe()
    for _ in range(count):
        if os.fork() == 0:
            took = knock(path, tell)
            os.write(1, b"refused\n" if took is None else b"served %.6f\n" % time.time())
            os._exit(0)
    come = 0
    while come < count:
        come += len(os.read(there, 4096))
    os.write(1, b"there\n")
    for _ in range(count):
        os.wait()


if __name__ == "__main__":
    if int(sys.argv[3]):
        all_at_once(sys.argv[2], int(sys.argv[3]))
    else:
        one_after_the_other(sys.argv[2])
