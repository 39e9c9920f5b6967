"""mpsagent's gate in front of NVIDIA's own control daemons, with NVIDIA's own front-end and libcuda as its peers.

There is no GPU: a client that is handed over is closed by the daemon after six servers have failed, and the gate tries
again. What limits a server gets is the business of tests with a GPU; which the daemon was told is seen here.
"""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpsagent.mps import events as ev
from mpsagent.mps import rendezvous as rv
from mpsagent.mps.limits import Limits
from mpsagent.wire.link import Failed, Handing, Knock, Left, Refuse, User
from mpsagent.wire.link import FrontEnd as FrontEndReport
from tests.gate.rig import Rig, admissions, limits, rigs
from tests.nvidia import abilities
from tests.nvidia.daemon import LIMIT, USER, Daemon, Session, as_user, client, front_end, result
from tests.nvidia.fetch import Driver
from tests.waiting import until

pytestmark = pytest.mark.root

PERCENTAGE = "get_default_active_thread_percentage\n"
OTHER = USER + 1


class Gated:
    """A gate, its agent's end, and the daemon behind it."""

    def __init__(self, rig: Rig, daemon: Daemon) -> None:
        self.rig, self.daemon, self.driver = rig, daemon, daemon.driver
        rig.hidden = daemon.pipe
        rig.start_gate()
        self.agent = rig.agent()

    def front_end(self, text: str, uid: int = 0) -> subprocess.CompletedProcess[str]:
        return front_end(self.driver, self.rig.public, text, uid)

    def client(self, uid: int = USER) -> subprocess.Popen[str]:
        return client(self.driver, self.rig.public, uid)

    def admit(self, uid: int, threads: float, gigabytes: int) -> None:
        """Open for one user. A driver without memory limits is not asked for them."""
        if "memory_limits" in abilities.able(self.driver.version):
            self.agent.say(admissions(User(uid, "all", limits(threads, gigabytes))))
        else:
            self.agent.say(admissions(User(uid, "all", limits(threads)), devices=(), fail_safe=limits(10)))

    def close(self) -> None:
        self.agent.say(admissions(open=False))


@pytest.fixture
def gated(daemon: Daemon) -> Iterator[Gated]:
    for rig in rigs():
        yield Gated(rig, daemon)


def test_roots_habits_go_on(gated: Gated) -> None:
    done = gated.front_end("get_server_list\n" + PERCENTAGE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "100.0\n", "")
    done = gated.front_end("set_default_active_thread_percentage 30\n" + PERCENTAGE + "no_such_command\n")
    assert (done.returncode, done.stdout) == (0, '30.0\n30.0\nUnknown command "no_such_command"\n')
    reported = gated.agent.wait(FrontEndReport, command="set_default_active_thread_percentage 30")
    assert reported.uid == 0


def test_users_may_ask(gated: Gated) -> None:
    done = gated.front_end(PERCENTAGE + "get_server_list\n", USER)
    assert (done.returncode, done.stdout, done.stderr) == (0, "100.0\n", "")


def test_users_change_nothing(gated: Gated) -> None:
    """470 and 535 would obey the ones that set; blanks before a command do not matter to any of these daemons."""
    commands = [
        "set_default_active_thread_percentage 77",
        " set_default_active_thread_percentage 77",
        "\tset_default_active_thread_percentage\t77",
        "get_server_list\rset_default_active_thread_percentage 77",
        "get_server_list \0set_default_active_thread_percentage 77",
        "set_default_device_pinned_mem_limit 0 77G",
        "  set_default_device_pinned_mem_limit 0 77G",
        f"start_server -uid {USER}",
        f" start_server -uid {USER}",
        "quit",
        "  quit",
        "\tquit -t 1",
    ]
    obeyed = []
    for command in commands:
        gated.front_end(f"get_server_list\n{command}\n", USER)
        assert gated.daemon.alive, command
        if gated.front_end(PERCENTAGE).stdout != "100.0\n":
            obeyed.append(command)
            gated.front_end("set_default_active_thread_percentage 100\n")
        if "77G" in gated.front_end("get_default_device_pinned_mem_limit 0\n").stdout:
            obeyed.append(command)
            gated.front_end("set_default_device_pinned_mem_limit 0 0G\n")
    assert obeyed == []
    assert not any(event.what is ev.ServerStarting for event in gated.daemon.events())


def test_front_ends_that_stay_open_hold_up_no_one(gated: Gated) -> None:
    """NVIDIA's own front-end at a terminal, one of root and one of a user, and others beside them."""
    terminals = []
    try:
        for uid in (0, USER):
            pid, terminal = pty.fork()
            if pid == 0:
                environment = {**gated.driver.environment(), "CUDA_MPS_PIPE_DIRECTORY": str(gated.rig.public)}
                command = [*as_user(uid), "nvidia-cuda-mps-control"]
                os.execvpe(command[0], command, environment)
            terminals.append((pid, terminal))
            os.write(terminal, PERCENTAGE.encode())
            said = ""
            end = time.monotonic() + LIMIT
            while "100.0" not in said:
                assert time.monotonic() < end, said
                if select.select([terminal], [], [], 0.1)[0]:
                    said += os.read(terminal, 4096).decode()
        for _ in range(5):
            assert gated.front_end(PERCENTAGE).stdout == "100.0\n"
            assert gated.front_end(PERCENTAGE, OTHER).stdout == "100.0\n"
    finally:
        for pid, terminal in terminals:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(terminal)


def test_many_front_ends_at_once(gated: Gated) -> None:
    """The daemon by itself turns all but one away; behind the gate each gets its answer."""
    running = [
        subprocess.Popen(
            [*as_user(USER + number % 4), "nvidia-cuda-mps-control"],
            env={**gated.driver.environment(), "CUDA_MPS_PIPE_DIRECTORY": str(gated.rig.public)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(24)
    ]
    assert [process.communicate(PERCENTAGE * 3, timeout=LIMIT)[0] for process in running] == ["100.0\n" * 3] * 24


def test_a_long_command_does_not_reach_the_daemon(gated: Gated) -> None:
    with Session(gated.rig.public / "control_privileged") as session:
        text = b"x" * 4100
        session.socket.send(len(text).to_bytes(8, "little"))
        session.socket.send(text)
        assert isinstance(rv.decode_answer(session.receive()), rv.Answer | rv.Exit)
    assert gated.front_end(PERCENTAGE).stdout == "100.0\n"
    assert gated.daemon.alive


def test_no_line_of_a_users_own_reaches_the_log(gated: Gated) -> None:
    forged = "[2026-11-21 19:35:17.073 Control     1] NEW SERVER 1: Ready"
    with Session(gated.rig.public / "control") as session:
        text = f"get_server_list\n{forged}\n\0".encode()
        session.socket.send(len(text).to_bytes(8, "little"))
        session.socket.send(text)
        session.finish()
    assert "NEW SERVER" not in gated.daemon.text()


def test_a_client_is_held_and_then_refused(gated: Gated) -> None:
    waiting = gated.client()
    knock = gated.agent.wait(Knock)
    assert (knock.pid, knock.uid) == (waiting.pid, USER)
    time.sleep(0.2)
    assert waiting.poll() is None
    assert not any(event.what is ev.ClientQueued for event in gated.daemon.events())
    gated.agent.say(Refuse(knock.connection, "the policy denies this user"))
    assert result(waiting) == 805


def test_a_held_client_that_leaves(gated: Gated) -> None:
    waiting = gated.client()
    knock = gated.agent.wait(Knock)
    waiting.kill()
    waiting.communicate()
    gated.agent.wait(Left, connection=knock.connection)


def test_the_lower_client_priority(gated: Gated) -> None:
    """The daemon takes it and says so. Driver 470's has none: the client is turned away, and the reason is said."""
    waiting = gated.client()
    gated.agent.wait(Knock)
    lower = User(USER, "all", Limits(20.0, below_normal=True))
    gated.agent.say(admissions(lower, devices=(), fail_safe=limits(10)))
    if "client_priority" in abilities.able(gated.driver.version):
        until(lambda: gated.front_end("get_default_client_priority\n").stdout == "1\n", "the daemon has the priority")
        waiting.kill()
        waiting.communicate()
    else:
        assert "this driver's MPS does not have" in gated.agent.wait(Failed).why
        assert result(waiting) == 805


def test_an_admitted_client_reaches_the_daemon_as_its_user(gated: Gated) -> None:
    """With its limits set before: the log has them in this order. No server can start, and the gate says so."""
    waiting = gated.client()
    knock = gated.agent.wait(Knock)
    gated.admit(USER, 20, 2)
    gated.agent.wait(Handing, connection=knock.connection)
    failed = gated.agent.wait(Failed, connection=knock.connection)
    assert not failed.lost
    gated.close()
    assert waiting.poll() is None, "it waits for a daemon that can start servers"
    until(lambda: any(event.what is ev.ClientQueued for event in gated.daemon.events()), "it has not arrived")
    events = [event for event in gated.daemon.events() if event.what in (ev.CommandRead, ev.ClientQueued)]
    arrived = next(number for number, event in enumerate(events) if event.what is ev.ClientQueued)
    # the gate's own pid, which needs no CAP_SYS_ADMIN; the server would learn the client's from the client
    assert (events[arrived].pid, events[arrived].uid) == (gated.rig.gate_pid(), USER)  # type: ignore[union-attr]
    before = [event.text for event in events[:arrived] if event.what is ev.CommandRead]
    assert re.fullmatch(
        r"set_default_active_thread_percentage 20(\.0)?", next(c for c in before if c.startswith("set_"))
    )
    if "memory_limits" in abilities.able(gated.driver.version):
        assert any(re.fullmatch(r"set_default_device_pinned_mem_limit 0 (2G|2048M)", command) for command in before)
    waiting.kill()
    waiting.communicate()


def test_the_daemon_is_changed_while_clients_wait(gated: Gated, daemons: Callable[..., Daemon]) -> None:
    """Held clients do not notice that the daemon ends; front-ends are told."""
    waiting = [gated.client(uid) for uid in (USER, OTHER)]
    until(lambda: len(gated.agent.all(Knock)) == 2)
    assert gated.front_end("quit\n").returncode == 0
    until(lambda: not gated.daemon.alive, "quit did not reach the daemon")
    asked = gated.front_end(PERCENTAGE)
    assert asked.returncode == 1
    assert asked.stdout or asked.stderr
    assert [process.poll() for process in waiting] == [None, None]
    until(lambda: gated.daemon.start_again().returncode == 0, "it did not start again")
    assert gated.front_end(PERCENTAGE).stdout == "100.0\n"
    for knock in gated.agent.all(Knock):
        gated.agent.say(Refuse(knock.connection, "the end of the test"))
    assert [result(process) for process in waiting] == [805, 805]


def test_silent_connections_at_the_gate_stop_no_one(gated: Gated) -> None:
    silent = []
    try:
        for _ in range(40):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.connect(str(gated.rig.public / "control"))
            silent.append(connection)
        assert gated.front_end(PERCENTAGE, OTHER).stdout == "100.0\n"
        gated.client()
        gated.agent.wait(Knock, uid=USER)
    finally:
        for connection in silent:
            connection.close()


def test_pass_without_an_agent(nvidia: Driver, daemon: Daemon) -> None:
    """``mpsagent-gate pass``: everyone passes, with strict limits as defaults."""
    for rig in rigs():
        rig.hidden = daemon.pipe
        rig.start_gate("pass")
        waiting = client(nvidia, rig.public, USER)
        until(lambda: any(event.what is ev.ClientQueued for event in daemon.events()), "it did not pass")
        assert front_end(nvidia, rig.public, PERCENTAGE).stdout == "10.0\n"
        waiting.kill()
        waiting.communicate()


def test_nothing_else_is_public(gated: Gated) -> None:
    public = {path.name: path.stat().st_mode & 0o777 for path in Path(gated.rig.public).iterdir()}
    assert public == {"control": 0o666, "control_privileged": 0o755}
