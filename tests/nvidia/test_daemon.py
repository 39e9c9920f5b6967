"""NVIDIA's control daemons of three drivers in mpsagent's directories: starts, files, failures, log lines."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mpsagent.mps import events as ev
from mpsagent.mps import rendezvous as rv
from tests.nvidia import abilities
from tests.nvidia.daemon import LIMIT, USER, Daemon, Session, client, result
from tests.nvidia.page import saw
from tests.waiting import until

pytestmark = pytest.mark.root

Start = Callable[..., Daemon]
NO_DEVICE = "no CUDA-capable device is detected"


def wanted(daemon: Daemon) -> list[int]:
    """A client of a user arrives (root passes its credentials on) and is dropped. Returns the pids of the servers."""
    with Session(daemon.control, USER, rv.Kind.CLIENT) as waiting:
        assert waiting.receive() == b"", "the daemon closes when no server starts"
    until(lambda: any(line.startswith("Removed Shm file at") for line in daemon.lines()), "the client was not given up")
    return [event.server for event in daemon.events() if event.what is ev.ServerStarting and event.uid == USER]


@pytest.mark.parametrize("foreground", [False, True], ids=["background", "foreground"])
def test_servers_come_into_a_directory_of_root(daemons: Start, foreground: bool) -> None:
    """root:root 0710: a server is its user's process with gid 0, and gets as far as the driver, which has no GPU."""
    daemon = daemons(mode=0o710, foreground=foreground)
    servers = wanted(daemon)
    assert len(servers) == 6, "six starts for a client that waits"
    # What servers write comes through a FIFO, and may be written down after what the daemon says.
    until(lambda: sum(event.what is ev.ServerFailed for event in daemon.events()) >= 6, "servers do not say why")
    reasons = {event.server: event.text for event in daemon.events() if event.what is ev.ServerFailed}
    assert reasons == dict.fromkeys(servers, NO_DEVICE)
    assert any("onnecting to control daemon on socket" in line for line in daemon.lines("server"))
    assert [event.number for event in daemon.events() if event.what is ev.ServerExited] == [1] * 6
    saw(daemon.driver, "start with `-d` and with `-f`", "works")
    saw(daemon.driver, "pipe and log directories root:root 0710", "comes in")
    saw(daemon.driver, "no GPU: starts of a server for a waiting client", f"{len(servers)}, then the client is closed")
    said = {line.replace(NO_DEVICE, "R") for line in daemon.lines("server") if line.endswith(f" : {NO_DEVICE}")}
    saw(daemon.driver, "what the server says then", " and ".join(f"`{line}`" for line in sorted(said)))


@pytest.mark.parametrize("foreground", [False, True], ids=["background", "foreground"])
def test_servers_do_not_come_into_a_directory_of_root_alone(daemons: Start, foreground: bool) -> None:
    """0700: they end before they have said anything. The difference is what the test above rests on."""
    daemon = daemons(mode=0o700, foreground=foreground)
    assert len(wanted(daemon)) == 6
    assert not any(event.what in (ev.ServerFailed, ev.ServerStartup) for event in daemon.events())
    assert [event.number for event in daemon.events() if event.what is ev.ServerExited] == [0] * 6
    saw(daemon.driver, "the same with 0700", "server ends at once, status 0, no word")


def test_users_stay_outside(daemon: Daemon) -> None:
    """0710 root:root: a user's front-end and client find no daemon; the client goes on outside MPS (100: no GPU)."""
    asked = daemon.front_end("get_server_list\n", USER)
    assert (asked.returncode, asked.stderr) == (1, "Cannot find MPS control daemon process\n")
    assert result(client(daemon.driver, daemon.pipe, USER)) == 100
    assert result(client(daemon.driver, daemon.pipe)) == 805, "root is let in and fails for want of a GPU"
    saw(daemon.driver, "the same with 0710, a user's client and front-end", "find no daemon")


def test_a_server_that_is_asked_for_is_tried_once(daemon: Daemon) -> None:
    with daemon.session() as session:
        assert session.ask(f"start_server -uid {USER}") == []
        until(lambda: any(line.startswith("Removed Shm") for line in daemon.lines()), "it did not fail")
        assert session.ask("get_server_list") == []
    starts = len([event for event in daemon.events() if event.what is ev.ServerStarting])
    saw(daemon.driver, "no GPU: `start_server`", f"{starts} start")
    until(
        lambda: [event.text for event in daemon.events() if event.what is ev.ServerFailed] == [NO_DEVICE],
        "the server does not say why",
    )


@pytest.mark.parametrize("foreground", [False, True], ids=["background", "foreground"])
def test_every_line_is_known(daemons: Start, foreground: bool) -> None:
    daemon = daemons(foreground=foreground)
    wanted(daemon)
    with daemon.session() as session:
        for command in ("get_server_list", "ps", "no_such_command", "get_server_status 1", "shutdown_server 1 -f"):
            session.ask(command)
        with daemon.session() as turned_away:
            assert turned_away.receive() == b""
    with Session(daemon.control, USER, rv.Kind.DEBUGGER) as debugger:
        assert debugger.receive() == b""
    with Session(daemon.privileged, USER, kind=None) as outsider:
        assert outsider.receive() == b""
    assert daemon.front_end("quit\n").returncode in (0, 1)
    until(lambda: not daemon.alive, "it did not quit")
    until(lambda: any(event.what is ev.ControlExited for event in daemon.events()), "it does not say that it ends")
    assert [event.text for event in daemon.events() if event.what is ev.Unknown] == []


def test_a_daemon_in_another_pid_namespace_names_no_one(daemons: Start) -> None:
    """As in a container without the host's pid namespace: it knows the user of a client, and 0 for its pid."""
    daemon = daemons(
        foreground=True,
        prefix=("unshare", "--propagation", "unchanged", "--pid", "--fork", "--kill-child", "--mount-proc"),
    )
    wanted(daemon)
    events = daemon.events()
    ((pid, uid),) = {(event.pid, event.uid) for event in events if event.what is ev.ClientQueued}
    assert (pid, uid) == (0, USER)
    saw(daemon.driver, "a daemon in another pid namespace than its client", f"control.log has pid {pid} and the user")
    assert [event.text for event in events if event.what is ev.Unknown] == []


def test_files_of_the_pipe_directory(daemon: Daemon) -> None:
    able = abilities.able(daemon.driver.version)
    files = {path.name: path.stat().st_mode & 0o777 for path in daemon.pipe.iterdir()}
    assert files.pop("nvidia-cuda-mps-control.pid", None) == (0o666 if "pid_file" in able else None)
    assert files == {"control": 0o666, "control_privileged": 0o755, "control_lock": 0o666, "log": 0o777}
    daemon.front_end("quit\n")
    until(lambda: not daemon.alive, "it did not quit")
    assert {path.name for path in daemon.pipe.iterdir()} == {"control", "control_privileged", "control_lock"}


def test_the_tests_leave_no_device_files_behind(daemons: Start, place: Path) -> None:
    """Root's client and root's server would make /dev/nvidiactl, and other programs would take this for a machine with
    a GPU. Here each has an empty /dev of its own, as this machine's may have the file already."""
    empty = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev && "$@"; ls /dev', "sh")
    daemon = daemons(foreground=True, prefix=empty)
    with daemon.session() as session:
        session.ask("start_server -uid 0")
        until(lambda: any(line.startswith("Removed Shm") for line in daemon.lines()), "it did not fail")
    assert any(event.what is ev.ServerStarting and event.uid == 0 for event in daemon.events())
    assert os.listdir(f"/proc/{daemon.pid}/root/dev") == []
    out, _ = client(daemon.driver, place, prefix=empty).communicate(timeout=LIMIT)
    assert out == "100\n", "no GPU, and nothing was made"


def test_a_second_daemon_is_refused_and_stale_files_are_not(daemon: Daemon) -> None:
    refused = daemon.start_again()
    assert (refused.returncode, refused.stdout) == (1, b"An instance of this daemon is already running\n")
    daemon.end()
    assert daemon.control.is_socket(), "a killed daemon leaves its sockets"
    until(lambda: daemon.start_again().returncode == 0, "a new one does not start over them")
    with daemon.session() as session:
        assert session.ask("get_default_active_thread_percentage") == ["100.0"]


def test_the_version_line(daemon: Daemon) -> None:
    said = any(event.what is ev.ControlVersion for event in daemon.events())
    assert said is ("version_line" in abilities.able(daemon.driver.version))


def test_one_server_for_all_users_is_not_an_option_of_these(daemon: Daemon) -> None:
    """It is taken for a front-end's word: with a daemon in another directory there is none to talk to."""
    assert "multiuser_server" not in abilities.able(daemon.driver.version)
    environment = {**daemon.environment, "CUDA_MPS_PIPE_DIRECTORY": str(daemon.log)}
    command = ["nvidia-cuda-mps-control", "-d", "--multiuser-server"]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (1, b"Cannot find MPS control daemon process\n")
    assert not (daemon.log / "control").exists()
    saw(daemon.driver, "`--multiuser-server`", f"exit status {done.returncode}")


def test_the_default_percentage_comes_from_the_environment(daemon: Daemon) -> None:
    daemon.front_end("quit\n")
    until(lambda: not daemon.alive, "it did not quit")
    until(lambda: daemon.start_again(CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="10").returncode == 0, "it did not start again")
    with daemon.session() as session:
        assert session.ask("get_default_active_thread_percentage") == ["10.0"]
