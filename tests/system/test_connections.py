"""Whose connection a descriptor of another process is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mpsagent.system.connections import peer_of

LISTENS = """
import os, socket, sys
door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
door.bind(sys.argv[1])
door.listen()
print("up", flush=True)
connection, _ = door.accept()
os.dup2(connection.fileno(), 0)
print("connected", flush=True)
connection.recv(1)
"""


def test_the_other_end_of_another_processs_socket(tmp_path: Path) -> None:
    """Descriptor 0 of a process: first no socket, then our connection to it, then nothing."""
    door = str(tmp_path / "door")
    listener = subprocess.Popen([sys.executable, "-c", LISTENS, door], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert listener.stdout is not None
    try:
        assert listener.stdout.readline() == b"up\n"
        assert peer_of(listener.pid, 0) is None
        assert peer_of(listener.pid, 9) is None
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ours:
            ours.connect(door)
            assert listener.stdout.readline() == b"connected\n"
            assert peer_of(listener.pid, 0) == os.getpid()
    finally:
        listener.communicate(timeout=10)


def test_a_process_that_has_ended_has_no_descriptors() -> None:
    """It went between the log line and the look."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert peer_of(gone.pid, 0) is None


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="changes the user")
def test_somebody_else_may_not_look() -> None:
    """It says that it cannot tell, instead of saying that there is nobody."""
    child = os.fork()
    if child == 0:
        os.setresuid(65534, 65534, 65534)
        try:
            peer_of(os.getppid(), 0)
        except PermissionError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
