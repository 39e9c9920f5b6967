"""The socket itself: systemd's or our own, over what a dead agent left, never over a living one."""

from __future__ import annotations

import grp
import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mpsagent.cli import client
from mpsagent.linux import listen
from tests.api.stand_in import serve


def test_a_new_socket_is_open_to_everybody(tmp_path: Path) -> None:
    """Everyone may read; who may act is decided by uid. No temporary name is left behind."""
    with listen.bind(tmp_path / "s"):
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o666
        assert os.listdir(tmp_path) == ["s"]


def test_the_administrators_socket_is_closed_to_others(tmp_path: Path) -> None:
    """Root alone, or root and a group; one that does not exist is no reason to open it. The other is everybody's."""
    public = tmp_path / "mpsagent.sock"
    path = listen.administrators_path(public)
    assert path.name == "mpsagent-admin.sock"
    group = grp.getgrgid(os.getgid()).gr_name
    for name, mode in ((None, 0o600), ("there-is-no-such-group", 0o600), (group, 0o660)):
        with listen.bind_administrators(public, name):
            assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.stat().st_gid == os.getgid()
    with listen.bind_orders(public):
        assert stat.S_IMODE((tmp_path / "mpsagent-orders.sock").stat().st_mode) == 0o666


@pytest.mark.root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is missing")
def test_without_the_right_to_give_it_away_it_is_roots(tmp_path: Path) -> None:
    """As in the unit's sandbox. There was no socket for administrators at all then."""
    other = next(one.gr_name for one in grp.getgrall() if one.gr_gid not in (0, *os.getgroups()))
    script = "import sys; from pathlib import Path; from mpsagent.linux import listen\n"
    script += "listen.bind_administrators(Path(sys.argv[1]), sys.argv[2])"
    without = ["setpriv", "--inh-caps", "-chown", "--bounding-set", "-chown"]
    subprocess.run([*without, sys.executable, "-c", script, str(tmp_path / "s"), other], check=True)
    assert stat.S_IMODE((tmp_path / "s-admin").stat().st_mode) == 0o600


def test_a_dead_agents_socket_is_replaced(tmp_path: Path) -> None:
    """After a SIGKILL the file stays; the next agent must start all the same."""
    listen.bind(tmp_path / "s").close()
    assert (tmp_path / "s").exists()
    with listen.bind(tmp_path / "s"), socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(tmp_path / "s"))


def test_a_living_agent_is_not_replaced(tmp_path: Path) -> None:
    """Two agents on one MPS would fight; the second one is told."""
    with listen.bind(tmp_path / "s"), pytest.raises(FileExistsError, match="another mpsagent answers"):
        listen.bind(tmp_path / "s")


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    """A wrong path in a unit must not cost a user a file; a symbolic link is not followed either."""
    (tmp_path / "data").write_text("precious")
    (tmp_path / "link").symlink_to("data")
    for name in ("data", "link"):
        with pytest.raises(FileExistsError, match="not a socket"):
            listen.bind(tmp_path / name)
    assert (tmp_path / "data").read_text() == "precious"


def test_a_missing_directory_is_an_error_with_its_name(tmp_path: Path) -> None:
    """And no half-made socket. The last one of its path is made, as systemd does."""
    with pytest.raises(FileNotFoundError, match="/none/here"):
        listen.bind(tmp_path / "none" / "here" / "s")
    listen.bind(tmp_path / "here" / "s").close()


def test_stopping_leaves_the_sockets_file(tmp_path: Path) -> None:
    """systemd's socket outlives the agent: the file is not ours to remove, on any version of Python."""
    with serve(path=tmp_path / "s") as served:
        assert client.request(str(served.path), "/healthz")[0] == 200
    assert (tmp_path / "s").is_socket()


_INHERITS = """
import os, socket, sys
from mpsagent.linux import listen
os.environ["LISTEN_PID"] = sys.argv[1].replace("me", str(os.getpid()))
found = listen.sockets()
fds = [s.fileno() for s in found]
print(len(found), fds, "LISTEN_FDS" in os.environ, [os.get_inheritable(fd) for fd in fds])
"""


def _child(passed: list[socket.socket | int], pid: str = "me", count: int | None = None) -> str:
    """What a child finds that gets these descriptors as 3, 4, …, the way systemd passes them."""
    fds = [one if isinstance(one, int) else one.fileno() for one in passed]
    high = [os.dup2(fd, 100 + i) for i, fd in enumerate(fds)]
    code = f"import os,sys\nfor i in range({len(fds)}): os.dup2(100 + i, 3 + i)\nexec(sys.argv.pop(1))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, _INHERITS, pid], pass_fds=high, capture_output=True, text=True, check=True,
            env={**os.environ, "LISTEN_FDS": str(len(fds) if count is None else count)}, timeout=60,
        )  # fmt: skip
    finally:
        for fd in high:
            os.close(fd)
    return done.stdout.strip()


def test_systemds_socket_is_taken_and_its_variables_are_not_passed_on(tmp_path: Path) -> None:
    """Children (the control daemon!) must not believe that the socket is for them."""
    with listen.bind(tmp_path / "s") as sock:
        assert _child([sock]) == "1 [3] False [False]"


def test_sockets_for_another_process_are_left_alone(tmp_path: Path) -> None:
    """LISTEN_PID names another process: inherited variables, not ours."""
    with listen.bind(tmp_path / "s") as sock:
        assert _child([sock], pid="1") == "0 [] True []"


def test_only_listening_unix_sockets_are_taken(tmp_path: Path) -> None:
    """A stored file descriptor, a TCP socket and a connected pair may be passed too."""
    with listen.bind(tmp_path / "s") as sock, socket.socket() as tcp, (tmp_path / "f").open("w") as file:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        left, right = socket.socketpair()
        with left, right:
            assert _child([file.fileno(), tcp, left, sock]) == "1 [6] False [False]"
        assert _child([sock], count=5).startswith("1 [3] "), "more announced than passed"
