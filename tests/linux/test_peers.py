"""The start time of a peer: 0 if the process has ended, whatever has its pid now."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mpsagent.linux import peers, proc

_CONNECTS = """
import socket, sys
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect(sys.argv[1])
    sock.send(b"x")
    sys.stdin.read()
"""


def test_the_start_time_of_a_peer_is_known_while_it_lives(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        command = [sys.executable, "-c", _CONNECTS, str(tmp_path / "s")]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
            sock = listener.accept()[0]
            sock.recv(1)
            start = proc.start_time(child.pid)
            assert peers.start_of_peer(sock, child.pid, 0) == start
            assert peers.start_of_peer(sock, child.pid, start) == start
            assert peers.start_of_peer(sock, child.pid, start + 1) == 0, "the pid is another process's"
            child.communicate()
        with sock:
            assert peers.start_of_peer(sock, child.pid, 0) == 0
            assert peers.start_of_peer(sock, child.pid, start) == 0


def test_a_peer_without_a_pidfd_has_no_start_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of its process may be another's."""
    monkeypatch.setattr(peers, "peer_pidfd", lambda *_: None)
    one, other = socket.socketpair()
    with one, other:
        assert peers.start_of_peer(one, os.getpid(), 0) == 0
