"""Processes by pidfd and start time: never the wrong one, never one that has gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mpsagent.linux.proc import ids, start_time
from mpsagent.linux.processes import Process, open_files, parent, stopped
from mpsagent.system import control_search
from tests.conformance.backends import other_users_python
from tests.coroutines import until
from tests.setuid import become, setuid_python
from tests.waiting import until as waits_until

ROOT = os.geteuid() == 0
A_USER, ANOTHER_USER = 30001, 30002
pytestmark = pytest.mark.usefixtures("no_leak")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "600"])
    yield child
    child.kill()
    child.wait()


def test_what_is_known_of_a_process(sleeper: subprocess.Popen[bytes]) -> None:
    """Start time and owner come from the kernel, not from the caller."""
    process = Process.open(sleeper.pid, os.getuid())
    assert process is not None
    assert process.pid == sleeper.pid
    assert process.uid == os.getuid()
    assert process.started == start_time(sleeper.pid)
    assert process.alive
    assert not process.stopped()
    assert process.cpu_seconds() == pytest.approx(0, abs=1)
    process.close()
    assert not process.alive


def test_a_name_with_brackets_and_blanks_confuses_nobody(tmp_path: Path) -> None:
    """A process calls itself what it likes; /proc/PID/stat quotes nothing."""
    path = tmp_path / ") T 1 1 (x"
    path.symlink_to("/usr/bin/sleep")
    child = subprocess.Popen([str(path), "600"])
    process = Process.open(child.pid)
    assert process is not None
    assert not process.stopped()
    assert process.started == start_time(child.pid)
    process.close()
    child.kill()
    child.wait()


@pytest.mark.parametrize("pid", [0, -1, -(2**31), 2**22 + 1, 2**31, 9_999_999_999])
def test_numbers_that_are_no_process(pid: int) -> None:
    """0 and negative numbers mean groups or everybody to kill(2). MPS's list of clients is the word of a server, which
    may be a user's process: one number too large ended each comparison with what MPS says."""
    assert Process.open(pid) is None
    assert (stopped(pid), parent(pid), open_files(pid)) == (False, None, None)


def test_a_process_that_calls_itself_its_own_uid_is_its_users(tmp_path: Path) -> None:
    """The kernel writes a name into /proc/PID/status as it is, tabs too. psutil 7.2.2 takes that for the ids."""
    path = tmp_path / "Uid:\t7\t7\t7"
    path.symlink_to("/usr/bin/sleep")
    child = subprocess.Popen([str(path), "600"])
    process = Process.open(child.pid, os.getuid())
    child.kill()
    child.wait()
    assert process is not None
    process.close()


ENDLESS = """
import ctypes, mmap, struct, time
size = 8 << 20
held = ctypes.c_char.from_buffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
ours = open("/proc/self/stat").read().rpartition(")")[2].split()
code, data, libc = map(int, ours[23:26]), map(int, ours[42:45]), ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
first, (*code, stack) = ctypes.addressof(held), code
words = struct.pack("=12QIi", *code, *data, libc.sbrk(0), stack, *[first, first + size] * 2, 0, 0, -1)
print(libc.prctl(35, 14, words, len(words), 0), flush=True)  # PR_SET_MM, PR_SET_MM_MAP: no right is needed
time.sleep(600)
"""


def test_a_process_says_of_itself_no_more_than_is_read() -> None:
    """Its command line and its environment are as long as it likes; psutil reads them whole."""
    with subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            if child.stdout.readline() != b"0\n":
                pytest.skip("this kernel has no PR_SET_MM_MAP")
            with open(f"/proc/{child.pid}/cmdline", "rb") as whole:
                assert len(whole.read()) == 8 << 20
            assert len(control_search._proc(child.pid, "cmdline")) == 256 << 10
        finally:
            child.kill()


def test_another_owner_or_start_time_is_another_process(sleeper: subprocess.Popen[bytes]) -> None:
    """MPS says which uid a client has; if the process has another one, the number was used again."""
    assert Process.open(sleeper.pid, os.getuid() + 1) is None
    started = start_time(sleeper.pid)
    assert started is not None
    assert Process.open(sleeper.pid, None, started - 1) is None
    process = Process.open(sleeper.pid, None, started)
    assert process is not None
    process.close()


def test_signals_arrive_and_ended_processes_get_none(sleeper: subprocess.Popen[bytes]) -> None:
    """SIGSTOP is seen as stopped; after the end there is a reason in words, even while it is a zombie."""
    process = Process.open(sleeper.pid)
    assert process is not None
    assert process.send(signal.SIGSTOP) is None
    waits_until(process.stopped)
    assert process.send(signal.SIGKILL) is None
    waits_until(lambda: not process.alive)
    assert process.send(signal.SIGTERM) == f"process {sleeper.pid} has already ended"
    assert process.cpu_seconds() is None
    assert not process.stopped()
    assert Process.open(sleeper.pid) is None, "a zombie is no living process"
    process.close()
    assert process.send(signal.SIGTERM) == f"process {sleeper.pid} is not held any more"


@pytest.mark.root
@pytest.mark.skipif(not ROOT, reason="needs to be root to start a process of another user")
def test_the_real_uid_counts_and_a_refusal_is_said() -> None:
    """With real users: uid 20001's process is found as such, and uid 20002 may not signal it."""
    child = subprocess.Popen(["sleep", "600"], user=20001, group=20001)
    process = Process.open(child.pid, 20001)
    assert process is not None
    assert Process.open(child.pid, 0) is None
    os.seteuid(20002)
    try:
        problem = process.send(signal.SIGTERM)
    finally:
        os.seteuid(0)
    assert problem is not None
    assert "SIGTERM" in problem
    assert "20001" in problem
    assert child.poll() is None
    assert process.send(signal.SIGTERM) is None
    assert child.wait() == -signal.SIGTERM
    process.close()


REUSE = textwrap.dedent(
    """
    import os, signal, subprocess, sys
    from mpsagent.linux.processes import Process
    victim = subprocess.Popen(["sleep", "600"])
    held = Process.open(victim.pid, 0)
    assert held is not None
    victim.kill(); victim.wait()
    for _ in range(100):
        with open("/proc/sys/kernel/ns_last_pid", "w") as file:
            file.write(str(victim.pid - 1))
        other = subprocess.Popen(["sleep", "600"])
        if other.pid == victim.pid:
            break
        other.kill(); other.wait()
    assert other.pid == victim.pid, "the number was not used again"
    assert held.send(signal.SIGKILL) == f"process {victim.pid} has already ended"
    assert not held.alive
    assert other.poll() is None
    # By its old start time it is refused too, even with the same owner (the agent after a restart).
    import time
    later = subprocess.Popen(["sleep", "600"])
    assert Process.open(other.pid, 0, held.started - 1) is None
    again = Process.open(other.pid, 0)
    assert again is not None and again.send(signal.SIGKILL) is None
    assert other.wait() == -signal.SIGKILL
    later.kill()
    print("reused", victim.pid)
    """
)


@pytest.mark.root
@pytest.mark.skipif(not ROOT, reason="needs to be root to make a pid namespace")
def test_a_number_that_was_really_used_again_is_not_signalled(tmp_path: Path) -> None:
    """In a pid namespace of its own, where the next pid can be chosen: the bystander with the old number survives."""
    script = tmp_path / "reuse.py"
    script.write_text(REUSE)
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        # in a chroot `/` is no mount point whose propagation could be changed; that of /proc is, by --mount-proc
        ["unshare", "--mount-proc", "--propagation", "unchanged", "--pid", "--fork", "--kill-child",
         sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )  # fmt: skip
    if "unshare failed" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip(f"no new pid namespace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("reused")


async def test_a_callback_at_the_end() -> None:
    """``when_gone`` for a single process, and no callback after ``close``."""
    calls: list[str] = []
    children = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    held = [Process.open(child.pid) for child in children]
    assert held[0] is not None
    assert held[1] is not None
    held[0].when_gone(lambda: calls.append("first"))
    held[1].when_gone(lambda: calls.append("second"))
    held[1].close()
    for child in children:
        child.kill()
    await until(lambda: calls == ["first"])
    await asyncio.sleep(0.05)
    assert calls == ["first"]
    held[0].close()
    for child in children:
        child.wait()


def test_cpu_seconds_grow_with_work() -> None:
    """The measure for ``idle_timeout``: a busy process uses time, a sleeping one does not."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    process = Process.open(child.pid)
    assert process is not None
    waits_until(lambda: (process.cpu_seconds() or 0) > 0.2)
    process.close()
    child.kill()
    child.wait()


async def test_a_pidfd_from_elsewhere_is_held_when_it_is_the_one_that_was_said() -> None:
    """The gate is a process of its own: a descriptor that is no pidfd, or another one's, never becomes a target."""
    child = subprocess.Popen(["sleep", "600"])
    process = Process.from_pidfd(os.pidfd_open(child.pid), child.pid, os.getuid(), 4711)
    assert (process.pid, process.uid, process.started, process.alive) == (child.pid, os.getuid(), 4711, True)
    gone: list[int] = []
    process.when_gone(lambda: gone.append(child.pid))
    late = os.pidfd_open(child.pid)
    assert process.send(signal.SIGKILL) is None
    await until(lambda: gone)
    child.wait()
    assert not process.alive
    process.close()
    ended = Process.from_pidfd(late, child.pid, os.getuid(), 4711)
    assert not ended.alive
    assert "already ended" in (ended.send(signal.SIGKILL) or "")
    ended.close()
    for fd in (os.pidfd_open(os.getpid()), os.open("/dev/null", os.O_RDONLY)):
        with pytest.raises(ValueError, match="not a pidfd"):
            Process.from_pidfd(fd, child.pid, os.getuid(), 4711)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


@pytest.mark.root
@pytest.mark.skipif(not ROOT, reason="needs other users")
@pytest.mark.parametrize("uid", [0, ANOTHER_USER])
def test_one_that_has_executed_a_setuid_program_is_not_signalled(uid: int) -> None:
    """It is the same process to a pidfd. `passwd` makes itself root's so that no user stops or ends it half-way."""
    before = [
        other_users_python(A_USER),
        "-I",
        "-S",
        "-c",
        "import os, sys; input(); os.execv(sys.argv[1], sys.argv[1:])",
    ]
    with (
        setuid_python(uid) as setuid,
        _talks([*before, *setuid, become(uid)], user=A_USER, group=A_USER, extra_groups=[]) as child,
    ):
        process = Process.open(child.pid, A_USER)
        assert process is not None
        assert not process.is_anothers()
        assert _said(child) == f"is {uid}"
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
            assert "runs a setuid program of another user" in (process.send(number) or "")
        assert process.alive
        assert process.send(signal.SIGCONT) is None
        process.close()


@pytest.mark.root
@pytest.mark.skipif(not ROOT, reason="needs other users")
def test_another_uid_of_a_user_namespace_keeps_no_signal_off() -> None:
    """Root of a container has many uids, and signals all of them: it has all rights in its user namespace."""
    script = (
        "import ctypes, os; print(ctypes.CDLL(None).unshare(0x10000000), flush=True); input()\n"
        "os.setresuid(0, 0, 0); print(0, flush=True); input(); os.setresuid(5, 5, 5); print(5, flush=True); input()"
    )
    words = [other_users_python(A_USER), "-I", "-S", "-c", script]
    with _talks(words, user=A_USER, group=A_USER, extra_groups=[]) as child:
        assert child.stdout is not None
        if child.stdout.readline() != b"0\n":
            pytest.skip("no user namespaces, as in a chroot")
        Path(f"/proc/{child.pid}/uid_map").write_text(f"0 {A_USER} 10")
        assert _said(child) == "0"
        process = Process.open(child.pid, A_USER)
        assert process is not None
        assert _said(child) == "5"
        assert (ids(child.pid, b"Uid:") or ())[:1] == (A_USER + 5,)
        assert process.send(signal.SIGKILL) is None
        child.wait()
        process.close()


@contextmanager
def _talks(words: list[str], **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **more)
    with child:
        try:
            yield child
        finally:
            child.kill()


def _said(child: subprocess.Popen[bytes]) -> str:
    """What it says when it is told to go on."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(b"\n")
    child.stdin.flush()
    return child.stdout.readline().decode().strip()
