"""Who takes over the gate, which is root without CAP_KILL, ends no other process with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gate.rig import A, Rig
from tests.waiting import until

pytestmark = pytest.mark.root
ROOT = Path(__file__).resolve().parents[2]
AS_THE_UNIT = ("setpriv", "--bounding-set=-all,+setuid,+setgid", "--inh-caps=-all")

TAKEN_OVER = r"""
import fcntl, json, os, resource, signal, socket, struct, sys, threading
root, user, keep = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if keep:
    from mpsagent.gate import own_signals
    assert not own_signals.keep()
one, two = socket.socketpair()
done = []

def attempt(name, *what):
    try:
        what[0](*what[1:])
        done.append(name)
    except OSError as error:
        assert error.errno == 1, (name, error)

def all_of_them(where=""):
    for who, pid in (("root", root), ("user", user)):
        attempt(f"kill {who}{where}", os.kill, pid, 0)
        attempt(f"own a file {who}{where}", fcntl.fcntl, one, fcntl.F_SETOWN, pid)
        attempt(f"own a file, thread {who}{where}", fcntl.fcntl, one, 15, struct.pack("ii", 0, pid))
        for number in (0x8901, 0x8902):
            attempt(f"own a socket {number:x} {who}{where}", fcntl.ioctl, one, number, struct.pack("i", pid))
        attempt(f"limit {who}{where}", resource.prlimit, pid, resource.RLIMIT_CPU, (1, 1))

all_of_them()
thread = threading.Thread(target=all_of_them, args=(" from a thread",))
thread.start()
thread.join()
# What the gate does itself.
signal.signal(signal.SIGURG, lambda *_: None)
signal.pthread_kill(threading.get_ident(), signal.SIGURG)
os.kill(os.getpid(), 0)
resource.getrlimit(resource.RLIMIT_NOFILE)
fcntl.fcntl(one, fcntl.F_GETFL)
one.setblocking(False)
one.dup()
attempt("die", fcntl.fcntl, one, fcntl.F_SETOWN, user)
fcntl.fcntl(one, 10, signal.SIGKILL)  # F_SETSIG
fcntl.fcntl(one, fcntl.F_SETFL, os.O_ASYNC)
two.send(b"x")
print(json.dumps(done))
"""


@pytest.fixture
def victims() -> Iterator[list[subprocess.Popen[bytes]]]:
    """One of root and one of a user."""
    become = ["setpriv", f"--reuid={A}", f"--regid={A}", "--clear-groups"]
    found = [subprocess.Popen([*prefix, "sleep", "600"]) for prefix in ([], become)]
    until(lambda: os.stat(f"/proc/{found[1].pid}").st_uid == A)
    yield found
    for one in found:
        one.kill()
        one.wait()


def taken_over(victims: list[subprocess.Popen[bytes]], keep: str) -> list[str]:
    words = [*AS_THE_UNIT, sys.executable, "-c", TAKEN_OVER, *(str(one.pid) for one in victims), keep]
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def test_it_can_signal_limit_and_own_nothing_but_itself(victims: list[subprocess.Popen[bytes]]) -> None:
    assert taken_over(victims, "keep") == []
    assert [one.poll() for one in victims] == [None, None]


def test_without_it_any_users_process_ends_although_root_may_not_kill_it(
    victims: list[subprocess.Popen[bytes]],
) -> None:
    """The test above holds nothing where the kernel would refuse all the same."""
    found = taken_over(victims, "")
    assert "kill user" not in found
    assert {"kill root", "limit root", "own a file user", "own a socket 8901 user", "own a socket 8902 user"} < {*found}
    assert victims[1].wait(60) == -9


def test_the_gate_has_it(rig: Rig) -> None:
    rig.start_gate()

    def filters(pid: int) -> int:
        text = Path(f"/proc/{pid}/status").read_text()
        return int(text.partition("Seccomp_filters:")[2].split()[0])

    assert rig.keeper is not None
    assert filters(rig.gate_pid()) == filters(rig.keeper.pid) + 1
    assert "could signal" not in rig.errors.read_text()
