"""Questions to the control daemon: their order, deadlines, every way to end, and nothing left behind after 500 of them.
What NVIDIA's own daemons answer to them: tests/nvidia/test_both_ways.py."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mpsagent.mps import rendezvous as rv
from mpsagent.system.frontend import AnswerStatus, FrontEndQueue
from tests.coroutines import until
from tests.system.conftest import MakeProgram, Play, zombies

pytestmark = pytest.mark.usefixtures("no_leak")
OTHER_GREETING = b"OUTBHELM\0"


class Daemon:
    """A control daemon in a thread: one front-end at a time, each command is answered in full before the next is heard.
    ``answer`` says what a command brings; it may take its time."""

    def __init__(self, place: Path, answer: Callable[[str], list[str]], greeting: bytes = rv.HELLO) -> None:
        self.place, self.greeting, self.answer = place, greeting, answer
        self.heard: list[str] = []
        self.open = self.most_open = 0
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(place / "control_privileged"))
        self.listener.listen(64)
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def front_end(self, **more: int) -> FrontEndQueue:
        environment = {"PATH": f"{self.place}/bin:/usr/bin:/bin", "CUDA_MPS_PIPE_DIRECTORY": str(self.place)}
        return FrontEndQueue("nvidia-cuda-mps-control", environment, **more)

    def end(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.thread.join(60)
        self.listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection = self.listener.accept()[0]
            except OSError:
                return
            with connection, suppress(OSError):  # it has hung up
                self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        connection.send(self.greeting)
        if connection.recv(64) != rv.CREDENTIALS or connection.recv(64) != rv.kind_bytes(rv.Kind.FRONT_END):
            return
        while rv.length_of(connection.recv(64)):
            command = rv.clean_command(connection.recv(4200))
            assert command is not None
            self.heard.append(command)
            if command == "turn away":
                return
            for text in self.answer(command):
                connection.send(rv.answer_message(text))
        connection.send(rv.exit_message(0))


@pytest.fixture
def place() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mps"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def make(place: Path) -> Iterator[Callable[..., Daemon]]:
    made: list[Daemon] = []

    def start(answer: Callable[[str], list[str]] = lambda command: [f"got {command}"], **more: bytes) -> Daemon:
        made.append(Daemon(place, answer, **more))
        return made[-1]

    yield start
    for daemon in made:
        daemon.end()


Make = Callable[..., Daemon]


async def test_all_commands_are_one_session_and_the_answer_is_what_the_program_would_print(make: Make) -> None:
    daemon = make(lambda command: command.split()[1:])
    front = daemon.front_end()
    reply = await front.run(["get 100.0 2G", "nothing", "ps  a"])
    assert (reply.status, reply.out, reply.ok) == (AnswerStatus.ANSWERED, "100.0\n2G\na\n", True)
    assert not front.busy
    front.close()
    assert daemon.heard == ["get 100.0 2G", "nothing", "ps  a"]


async def test_no_daemon(place: Path) -> None:
    """No directory, no socket, a socket that nobody listens at."""
    inside = place / "pipe"
    front = FrontEndQueue("x", {"CUDA_MPS_PIPE_DIRECTORY": str(inside)})
    assert (await front.run(["ps"])).status is AnswerStatus.NO_DAEMON
    inside.mkdir()
    assert (await front.run(["ps"])).status is AnswerStatus.NO_DAEMON
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left_behind:
        left_behind.bind(str(inside / "control_privileged"))
    reply = await front.run(["ps"])
    assert (reply.status, reply.err) == (AnswerStatus.NO_DAEMON, "Cannot find MPS control daemon process")
    front.close()


async def test_who_is_turned_away_is_told(make: Make) -> None:
    """Another front-end is connected: closed after it has said what it is, before any answer, or in the middle."""
    daemon = make()
    front = daemon.front_end()
    assert (await front.run(["turn away"])).status is AnswerStatus.BUSY
    assert (await front.run(["a", "turn away"])).status is AnswerStatus.BUSY
    assert (await front.run(["quit"])).out == "got quit\n"
    front.close()


@pytest.mark.parametrize("ended", ["deadline", "cancelled"])
async def test_a_daemon_that_hangs_is_hung_up_on_and_answers_the_next(make: Make, ended: str) -> None:
    """A session that was left open would keep everybody else out of the daemon."""
    go_on = threading.Event()
    daemon = make(lambda command: ["late"] if command != "stuck" or go_on.wait(60) else [])
    front = daemon.front_end()
    stuck = asyncio.create_task(front.run(["stuck", "get"], deadline=60.0 if ended == "cancelled" else 0.2))
    await until(lambda: "stuck" in daemon.heard)
    later = asyncio.create_task(front.run(["later"], deadline=60))
    if ended == "cancelled":
        stuck.cancel()
        await asyncio.wait([stuck])
        assert stuck.cancelled()
    else:
        reply = await stuck
        assert (reply.status, reply.err) == (AnswerStatus.SILENT, "the control daemon did not answer within 0.2 s")
    go_on.set()
    assert (await later).out == "late\n"
    front.close()


async def test_a_question_that_was_never_greeted_is_never_sent(make: Make) -> None:
    """What has failed by its deadline must not happen later."""
    go_on = threading.Event()
    daemon = make(lambda _: [str(go_on.wait(60))])
    first, second = daemon.front_end(), daemon.front_end()
    asking = asyncio.create_task(first.run(["first"], deadline=60))
    await until(lambda: daemon.heard)
    assert (await second.run(["second"], deadline=0.2)).status is AnswerStatus.SILENT
    go_on.set()
    assert (await asking).ok
    assert (await second.run(["third"])).ok
    first.close()
    second.close()
    assert daemon.heard == ["first", "third"]


def test_a_full_backlog_is_waited_for(place: Path, play: Play) -> None:
    """A stopped daemon accepts nothing, and a connection that would block must not stop the agent."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(place / "control_privileged"))
    listener.listen(0)

    async def scenario() -> None:
        front = FrontEndQueue("x", {"CUDA_MPS_PIPE_DIRECTORY": str(place)})
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.connect(str(place / "control_privileged"))
            reply = await front.run(["get"], deadline=0.2)
            assert (reply.status, "queue was full" in reply.err) == (AnswerStatus.SILENT, True)
        front.close()

    play(scenario())
    listener.close()


async def test_urgent_questions_overtake_and_never_two_run_at_once(make: Make) -> None:
    """The end of a server must not wait behind questions; the daemon is asked one thing at a time."""
    daemon = make(lambda _: time.sleep(0.05) or [])  # type: ignore[func-returns-value]
    front = daemon.front_end()
    names = ("a", "b", "c", "urgent1", "urgent2")
    calls = [front.run([name], deadline=60, urgent=name.startswith("urgent")) for name in names]
    assert [reply.status for reply in await asyncio.gather(*calls)] == [AnswerStatus.ANSWERED] * 5
    front.close()
    assert daemon.heard == ["a", "urgent1", "urgent2", "b", "c"]


async def test_a_full_queue_refuses_and_a_question_that_waits_too_long_is_never_sent(make: Make) -> None:
    """Bounded memory and bounded waits; what is refused must not happen later."""
    go_on = threading.Event()
    daemon = make(lambda _: [str(go_on.wait(60))])
    front = daemon.front_end(capacity=2)
    first = asyncio.create_task(front.run(["first"], deadline=60))
    await until(lambda: daemon.heard)
    second = asyncio.create_task(front.run(["second"], deadline=0.1))
    third = asyncio.create_task(front.run(["third"], deadline=60))
    await asyncio.sleep(0)
    assert (await front.run(["fourth"])).status is AnswerStatus.REFUSED_QUEUE
    urgent = asyncio.create_task(front.run(["urgent"], urgent=True, deadline=60))
    assert (await second).status is AnswerStatus.REFUSED_QUEUE
    go_on.set()
    assert [(await one).ok for one in (first, urgent, third)] == [True] * 3
    front.close()
    assert daemon.heard == ["first", "urgent", "third"]


async def test_a_cancelled_caller_leaves_the_queue_intact(make: Make) -> None:
    go_on = threading.Event()
    daemon = make(lambda _: [str(go_on.wait(60))])
    front = daemon.front_end()
    running, queued, last = (asyncio.create_task(front.run([name], deadline=60)) for name in ("a", "b", "c"))
    await until(lambda: daemon.heard)
    running.cancel()
    queued.cancel()
    go_on.set()
    assert (await last).ok
    front.close()
    assert daemon.heard == ["a", "c"]


async def test_endless_answers_are_bounded(make: Make) -> None:
    """A daemon gone wild costs neither memory nor a place in the queue."""
    go_on = threading.Event()

    def endless(command: str) -> Iterator[str]:
        while command == "endless" and not go_on.is_set():
            yield "x" * 4096

    daemon = make(endless)  # type: ignore[arg-type]
    front = daemon.front_end()
    assert (await front.run(["endless"], deadline=1.0)).status is AnswerStatus.SILENT
    assert (await front.run(["next"])).out == ""
    go_on.set()
    front.close()


async def test_a_long_answer_is_cut(make: Make) -> None:
    daemon = make(lambda _: ["\xff" * 2000] * 100)
    front = daemon.front_end()
    reply = await front.run(["ps"])
    assert reply.ok
    assert len(reply.out) == 64 << 10
    front.close()


async def test_an_agent_that_was_held_up_does_not_blame_the_daemon(make: Make) -> None:
    """Swapped out, or stopped, while the daemon would have answered."""
    daemon = make(lambda _: [str(time.sleep(0.1))])  # type: ignore[func-returns-value]
    front = daemon.front_end()
    call = asyncio.create_task(front.run(["ps"], deadline=2.0))
    await asyncio.sleep(0)
    time.sleep(4)
    assert (await call).out == "None\n"
    front.close()


async def test_commands_cannot_smuggle_a_second_line(make: Make) -> None:
    """A line break in a name would become a command of its own, sent as root; a long text kills the daemon."""
    daemon = make()
    front = daemon.front_end()
    for bad in ("ps\nquit", "ps\rquit", "ps\0", "x" * 1025):
        assert (await front.run(["fine", bad])).status is AnswerStatus.FAILED
    assert (await front.run(["ps"])).ok
    front.close()
    assert daemon.heard == ["ps"]


async def test_close_answers_everybody(make: Make) -> None:
    """At the agent's end nobody hangs."""
    go_on = threading.Event()
    daemon = make(lambda _: [str(go_on.wait(60))])
    front = daemon.front_end()
    calls = [asyncio.create_task(front.run(["ps"], deadline=60)) for _ in range(3)]
    await until(lambda: daemon.heard)
    front.close()
    statuses = [reply.status for reply in await asyncio.gather(*calls)]
    assert statuses == [AnswerStatus.SILENT, AnswerStatus.REFUSED_QUEUE, AnswerStatus.REFUSED_QUEUE]
    assert (await front.run(["ps"])).status is AnswerStatus.REFUSED_QUEUE
    go_on.set()


async def test_five_hundred_questions_leave_no_descriptor(make: Make) -> None:
    """The agent runs for months; the fixture compares descriptors and children afterwards."""
    daemon = make()
    front = daemon.front_end()
    for number in range(500):
        await front.run(["turn away"] if number % 5 == 0 else [f"n{number}"], deadline=60)
    front.close()
    assert len(daemon.heard) == 500


# --- a daemon that is not understood: NVIDIA's program is asked ------------------------------------------------------


async def test_the_program_gets_all_commands_and_only_the_given_environment(
    make: Make, place: Path, program: MakeProgram
) -> None:
    """It sees the commands at once, end of input behind them, and nothing of the agent's own environment."""
    path = program('/usr/bin/sed "s/^/got /"; /usr/bin/env | /bin/grep CUDA | /usr/bin/sort; echo 100.0')
    make(greeting=OTHER_GREETING)
    front = FrontEndQueue(str(path), {"PATH": "/usr/bin:/bin", "CUDA_MPS_PIPE_DIRECTORY": str(place)})
    reply = await front.run(["get_server_list", "ps"])
    assert reply.status is AnswerStatus.ANSWERED
    assert reply.out.splitlines() == [
        "got get_server_list",
        "got ps",
        "got get_default_active_thread_percentage",
        f"CUDA_MPS_PIPE_DIRECTORY={place}",
    ]
    front.close()


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("echo Cannot find MPS control daemon process >&2; exit 1", AnswerStatus.NO_DAEMON),
        ("echo Cannot send command to MPS control daemon process >&2; exit 1", AnswerStatus.BUSY),
        ("exit 0", AnswerStatus.BUSY),
        ("echo An instance of this daemon is already running >&2; exit 1", AnswerStatus.FAILED),
        ("exit 7", AnswerStatus.FAILED),
        ("kill -SEGV $$", AnswerStatus.FAILED),
        ("echo nonsense", AnswerStatus.FAILED),
        ("exec yes", AnswerStatus.SILENT),
        ("echo Server 99999 not found; echo 100.0", AnswerStatus.ANSWERED),
        ("sleep 600 & echo $! >&2; echo 100.0", AnswerStatus.ANSWERED),
        ("trap '' TERM; while :; do sleep 0.05; done", AnswerStatus.SILENT),
    ],
)
async def test_ends_of_the_program_are_told_apart(
    make: Make, program: MakeProgram, script: str, status: AnswerStatus
) -> None:
    """Each text and exit status of the recordings has its own status, and a failure says how it ended."""
    path = program(script)
    daemon = make(greeting=OTHER_GREETING)
    front = daemon.front_end()
    front.program = str(path)
    ended = set(zombies())
    reply = await front.run(["get_server_list"], deadline=2.0 if status is AnswerStatus.SILENT else 60.0)
    assert reply.status is status
    assert reply.out or reply.err
    if "$!" in script:
        os.kill(int(reply.err), signal.SIGKILL)
    await until(lambda: set(zombies()) <= ended)
    front.close()


async def test_a_missing_or_unfit_program_is_said(make: Make, tmp_path: Path, program: MakeProgram) -> None:
    """Missing, not executable, a directory, not a program: said, and no exception."""
    plain = tmp_path / "plain"
    plain.write_text("echo no")
    nonsense = program("", name="nonsense", interpreter="/nonexistent/interpreter")
    daemon = make(greeting=OTHER_GREETING)
    front = daemon.front_end()
    for bad in (tmp_path / "absent", plain, tmp_path, nonsense):
        front.program = str(bad)
        reply = await front.run(["ps"])
        assert reply.status is AnswerStatus.FAILED, bad
        assert str(bad) in reply.err
    front.close()
