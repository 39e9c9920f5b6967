"""The parent for machines without systemd: it must not die, and what it keeps is the gate's alone."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import string
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mpsagent.gate import keeper
from mpsagent.gate.store import KnownName, parse_name
from mpsagent.wire.link import Knock, Synced, User
from tests.gate.rig import ROOT, A, B, Rig, admissions, limits
from tests.waiting import until

pytestmark = pytest.mark.root


def kept(rig: Rig) -> set[str]:
    """What the keeper's descriptors are open on."""
    assert rig.keeper is not None
    found = set()
    for one in Path(f"/proc/{rig.keeper.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            found.add(os.readlink(one))
    return found


def test_a_gate_that_cannot_start_is_tried_again_and_clients_wait_in_the_backlog(rig: Rig) -> None:
    rig.start_daemon()
    rig.link = rig.directory / "later" / "link"  # the directory is not there yet
    words = ["--public", rig.public, "--daemon", rig.hidden, "--state", rig.state, "--link", rig.link]
    with rig.errors.open("wb") as errors:
        command = [sys.executable, "-m", "mpsagent.gate.main", "keep", *map(str, words)]
        rig.keeper = subprocess.Popen(command, cwd=ROOT, stderr=errors)
    until(lambda: rig.errors.read_text().count("started again") >= 2)
    assert "exit status 1" in rig.errors.read_text()
    assert "No such file or directory" in rig.errors.read_text()
    client = rig.client(A)
    time.sleep(0.2)
    assert not client.read()
    rig.link.parent.mkdir()
    rig.agent().say(admissions(User(A, "all", limits(30))))
    client.served()


@pytest.mark.parametrize("gone", ["directory", "control", "control_privileged"])
def test_public_sockets_that_were_removed_are_made_again_and_who_waits_goes_on_waiting(rig: Rig, gone: str) -> None:
    """By hand, or by whatever cleans /tmp. Twice, because old sockets are not kept for ever."""
    rig.start_daemon()
    rig.start_gate()
    held = rig.waiting_client(A)
    for times in (1, 2):
        if gone == "directory":
            shutil.rmtree(rig.public)
        else:
            (rig.public / gone).unlink()
        until(lambda: rig.errors.read_text().count("are made again") == times)  # noqa: B023
    after = [rig.waiting_client(B) for _ in range(2)]
    rig.agent().say(admissions(User(A, "all", limits(30)), User(B, "all", limits(30))))
    for one in (held, *after):
        one.served()


def test_a_public_directory_that_another_has_made_in_its_place_is_not_used(rig: Rig) -> None:
    rig.start_gate()
    rig.agent().wait(Synced)
    shutil.rmtree(rig.public)
    rig.public.mkdir()
    os.chown(rig.public, A, A)
    until(lambda: f"belongs to user {A}" in rig.errors.read_text())
    time.sleep(1.5)
    assert list(rig.public.iterdir()) == []
    assert rig.errors.read_text().count("cannot be made again") == 1
    shutil.rmtree(rig.public)
    until((rig.public / "control").exists)


def test_only_its_own_child_puts_something_into_its_store(rig: Rig) -> None:
    rig.start_gate()
    rig.agent().wait(Synced)
    before = kept(rig)  # the connection by which `start_gate` saw that it answers may still be among them
    read, write = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(str(rig.state / "notify"))
        for number in range(5):
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, read.to_bytes(4, "little") * 8)]
            sock.sendmsg([f"FDSTORE=1\nFDNAME=c{number}.0".encode()], rights)
        sock.send(os.urandom(64))
        sock.send(b"x" * 60_000)
    os.close(read)
    os.close(write)
    client = rig.waiting_client(A)
    until(lambda: len(kept(rig) - before) == 1)
    rig.kill_gate()
    agent = rig.agent()
    agent.wait(Synced)
    assert [one.pid for one in agent.all(Knock)] == [client.pid]
    until(lambda: len(kept(rig) - before) == 1)


def test_its_store_can_be_reached_by_root_only(rig: Rig) -> None:
    rig.start_gate()
    assert (rig.state / "notify").stat().st_mode & 0o777 == 0o600
    assert not any(one.stat().st_mode & 0o077 for one in rig.state.iterdir()), "the directory is open to others"


def test_a_state_directory_of_another_user_is_not_used(rig: Rig) -> None:
    rig.state.mkdir()
    os.chown(rig.state, A, A)
    with pytest.raises(AssertionError, match="only this user may write to"):
        rig.start_gate()
    rig.may_end = True


def test_told_to_stop_it_takes_the_gate_along(rig: Rig) -> None:
    rig.start_gate()
    assert rig.keeper is not None
    gate = rig.gate_pid()
    rig.keeper.send_signal(signal.SIGTERM)
    assert rig.keeper.wait(60) == 0
    assert not Path(f"/proc/{gate}").exists()
    assert not (rig.state / "notify").exists()
    rig.may_end = True


def test_it_passes_on_that_the_gate_is_ready(rig: Rig) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        address = rig.directory / "manager"
        sock.bind(str(address))
        sock.settimeout(60)
        before = os.environ.get("NOTIFY_SOCKET")
        os.environ["NOTIFY_SOCKET"] = str(address)
        try:
            rig.start_gate()
        finally:
            del os.environ["NOTIFY_SOCKET"]
            if before is not None:
                os.environ["NOTIFY_SOCKET"] = before
        assert b"READY=1" in sock.recv(4096).splitlines()


def test_an_error_of_the_gates_own_ends_it_once_it_has_settled() -> None:
    """What lies in the store is taken up by the next one. Right after a start it may be the cause."""
    script = (
        "import asyncio, sys\n"
        "from mpsagent.gate import service\n"
        "loop = asyncio.new_event_loop()\n"
        "loop.set_exception_handler(service._unexpected(loop.time() - float(sys.argv[1])))\n"
        "loop.call_soon(lambda: 1 / 0)\n"
        "loop.call_later(0.05, loop.stop)\n"
        "loop.run_forever()\n"
    )
    for lived, status in (("60", 70), ("0", 0)):
        done = subprocess.run(
            [sys.executable, "-c", script, lived], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == status
        assert "ZeroDivisionError" in done.stderr


LETTERS = [one for one in string.ascii_letters if isinstance(parse_name(f"{one}1.1.1.1"), KnownName)]


@pytest.mark.parametrize("letter", LETTERS)
def test_processes_that_have_ended_are_dropped_before_a_start(letter: str) -> None:
    """What is kept is bounded, and clients that wait are to have room."""
    kept = keeper.Kept()
    with subprocess.Popen(["sleep", "60"]) as gone, subprocess.Popen(["sleep", "60"]) as there:
        for name, child in (("gone", gone), ("there", there)):
            kept.hear(f"FDSTORE=1\nFDNAME={letter}{name}".encode(), [os.pidfd_open(child.pid)])
        gone.kill()
        gone.wait()
        kept.forget_the_dead()
        assert [name for name, _ in kept.items()] == [f"{letter}there"]
        there.kill()
    kept.drop(f"{letter}there")


def test_the_next_gate_is_not_given_processes_that_have_ended(rig: Rig) -> None:
    rig.start(admissions(User(A, "all", limits(30))))
    client, other = rig.client(A), rig.client(A)
    client.served()
    other.served()
    before = rig.gate_pid()
    os.kill(before, signal.SIGSTOP)
    client.process.kill()
    client.process.wait()
    os.kill(before, signal.SIGKILL)
    until(lambda: rig.gate_pid() not in (0, before))
    until(lambda: b"LISTEN_FDNAMES" in Path(f"/proc/{rig.gate_pid()}/environ").read_bytes())
    environment = Path(f"/proc/{rig.gate_pid()}/environ").read_bytes().split(b"\0")
    (names,) = [one.partition(b"=")[2].split(b":") for one in environment if one.startswith(b"LISTEN_FDNAMES=")]
    assert len([name for name in names if name.decode().startswith(keeper.OF_PROCESSES)]) == 1, names
