"""`mpsagent-cli run` without an agent, or with the agent's end of the socket alone: signals, and terminals."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.waiting import until

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE = 15.0
TRAPS = 'trap "echo HUP" HUP; trap "exit 3" TERM; echo there; while :; do sleep 0.05; done'


def command(path: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "mpsagent.cli.main", "--socket", str(path / "m.sock"), "run", "--", *words]


@pytest.fixture
def orders(tmp_path: Path) -> Iterator[socket.socket]:
    """The agent's end of the socket for orders."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.settimeout(PATIENCE)
        listening.bind(str(tmp_path / "m-orders.sock"))
        listening.listen()
        yield listening


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def one(*words: str, ignored: tuple[int, ...] = ()) -> subprocess.Popen[str]:
        run = subprocess.Popen(
            command(tmp_path, *words), cwd=REPOSITORY, stdout=subprocess.PIPE, text=True,
            preexec_fn=lambda: [signal.signal(number, signal.SIG_IGN) for number in ignored],
        )  # fmt: skip
        started.append(run)
        assert run.stdout is not None
        assert run.stdout.readline() == "there\n"
        return run

    yield one
    for run in started:
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
        for pid in [] if run.poll() is not None else children.read_text().split():
            os.killpg(int(pid), signal.SIGKILL)
        run.kill()
        run.communicate()


def answered(orders: socket.socket, status: int, *ending: int, before: Callable[[], object] = lambda: None) -> None:
    asked, _ = orders.accept()
    before()
    with asked:
        assert json.loads(asked.recv(1000)) == {"order": "terminate-each", "below": True, "now": True}
        answer = {"ending": [{"pid": one} for one in ending], "detail": "busy"}
        asked.send(json.dumps({"status": status, "answer": answer}).encode())


def test_signals_that_come_together_are_passed_on_when_its_clients_have_ended(
    start: Callable[..., subprocess.Popen[str]], orders: socket.socket
) -> None:
    """A terminal that is closed sends SIGHUP twice; an agent that has many orders at a time is asked again."""
    run = start("sh", "-c", TRAPS)
    os.kill(run.pid, signal.SIGHUP)
    answered(orders, 429, before=lambda: os.kill(run.pid, signal.SIGHUP))
    answered(orders, 200, 7)
    answered(orders, 200, 8)  # a client that has only just come
    assert run.stdout is not None
    assert select.select([run.stdout], [], [], 0)[0] == []
    answered(orders, 200)
    assert run.stdout.readline() == "HUP\n"
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait(PATIENCE) == 3


def test_what_nohup_ignores_ends_nothing(start: Callable[..., subprocess.Popen[str]], orders: socket.socket) -> None:
    run = start("sh", "-c", "echo there; while :; do sleep 0.05; done", ignored=(signal.SIGHUP, signal.SIGCHLD))
    os.kill(run.pid, signal.SIGHUP)
    os.kill(run.pid, signal.SIGTERM)
    answered(orders, 200)
    assert run.wait(PATIENCE) == -signal.SIGTERM


class Terminal:
    """An interactive shell on a terminal."""

    def __init__(self, path: Path) -> None:
        self.pid, self.fd = pty.fork()
        if not self.pid:
            os.chdir(REPOSITORY)
            environment = {**os.environ, "HISTFILE": ""}
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)
        self.seen = ""
        self.types("PS1=; set +o emacs; run() { %s \"$@\"; }; echo be''gin" % " ".join(command(path)))
        self.shows("begin")

    def types(self, text: str, end: str = "\n") -> None:
        os.write(self.fd, (text + end).encode())

    def shows(self, words: str) -> None:
        latest = time.monotonic() + PATIENCE
        while words not in self.seen:
            assert select.select([self.fd], [], [], max(0.0, latest - time.monotonic()))[0], self.seen
            self.seen += os.read(self.fd, 4096).decode(errors="replace")
        self.seen = self.seen.partition(words)[2]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    one = Terminal(tmp_path)
    yield one
    os.close(one.fd)
    os.kill(one.pid, signal.SIGKILL)
    os.waitpid(one.pid, 0)


def test_a_program_that_reads_the_terminal_is_the_shells_job(terminal: Terminal) -> None:
    terminal.types("run cat &")
    terminal.types("until jobs | grep Stop''ped; do sleep 0.1; done")
    terminal.shows("Stopped")
    terminal.types("fg")
    terminal.shows("run cat\r\n")
    terminal.types("one")
    terminal.shows("one\r\n")  # the terminal's echo
    terminal.shows("one\r\n")
    terminal.types("\x1a", "")
    terminal.shows("Stopped")
    terminal.types("fg")
    terminal.shows("run cat\r\n")
    terminal.types("two")
    terminal.shows("two\r\n")  # the terminal's echo
    terminal.shows("two\r\n")
    terminal.types("\x04", "")
    terminal.types("echo $?-bac''k")
    terminal.shows("0-back")


def test_a_script_has_the_terminal_again(terminal: Terminal, tmp_path: Path) -> None:
    script = tmp_path / "script"
    words = " ".join(command(tmp_path))
    script.write_text(f"{words} sh -c 'read x; echo first-$x'; read y; echo then-$y\n")
    terminal.types(f"sh {script}")
    terminal.types("a")
    terminal.shows("first-a")
    terminal.types("b")
    terminal.shows("then-b")


def program_of(tmp_path: Path, handling: str) -> str:
    """Write a program that shows "inside" when it is ready for signals, and return its command line.

    It is no shell script: dash loses a SIGINT that comes while it starts a child by vfork(2), with `run` and without.
    """
    program = tmp_path / "program.py"
    program.write_text(f"import signal\n{handling}\nprint('inside', flush=True)\nwhile True:\n    signal.pause()\n")
    return f"{sys.executable} {program}"


def ends_the_loop(terminal: Terminal) -> None:
    terminal.types("\x03", "")
    terminal.types("echo sta''tus $?")
    terminal.shows("status 130")
    terminal.types("echo $(jobs | wc -l)-le''ft")
    terminal.shows("0-left")


def test_ctrl_c_ends_a_loop_of_the_shell(terminal: Terminal, tmp_path: Path) -> None:
    """`run` ends by the signal that ended the program: else the shell would start the next one."""
    program = program_of(tmp_path, "signal.signal(signal.SIGINT, signal.SIG_DFL)")
    terminal.types(f"for i in 1 2 3; do run {program}; done; echo af''ter")
    terminal.shows("inside")
    ends_the_loop(terminal)


def test_a_second_ctrl_c_ends_a_program_that_lost_the_first(terminal: Terminal, tmp_path: Path) -> None:
    loses = "signal.signal(signal.SIGINT, signal.SIG_DFL)\n    print('lost', flush=True)"
    program = program_of(tmp_path, f"def lose(*_):\n    {loses}\nsignal.signal(signal.SIGINT, lose)")
    terminal.types(f"for i in 1 2 3; do run {program}; done; echo af''ter")
    terminal.shows("inside")
    terminal.types("\x03", "")
    terminal.shows("lost")
    ends_the_loop(terminal)


def test_a_terminal_that_is_closed_ends_the_program(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    pid = tmp_path / "pid"
    terminal.types(f"run sh -c 'echo $$ >{pid}; echo in''side; exec sleep 600'")
    terminal.shows("inside")
    program = Path("/proc", pid.read_text().strip())
    os.close(terminal.fd)
    until(lambda: not program.exists())
    os.waitpid(terminal.pid, 0)


def test_its_start_is_cheap(tmp_path: Path) -> None:
    """Each program pays for it: click alone is half of what a verb takes to start."""
    words = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "mpsagent.cli.main",
        "run",
        "--timeout",
        "10m",
        "--",
        "true",
    ]
    environment = {**os.environ, "MPSAGENT_SOCKET": str(tmp_path / "none")}
    done = subprocess.run(words, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "mpsagent.cli.program" in loaded
    assert {"click", "pathlib", "mpsagent.cli.pages"} & loaded == set()


def test_the_shell_of_these_tests_writes_into_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines stood in root's history after `make test`."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    one = Terminal(tmp_path)
    one.types("exit")
    os.waitpid(one.pid, 0)
    os.close(one.fd)
    assert os.listdir(home) == []
