"""What NVIDIA's front-end and mpsagent's own are answered by the daemons of three drivers, and what a question that was
hung up on leaves behind there. On a GPU, with a server: campaigns/both_ways.py."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from campaigns import both_ways
from mpsagent.mps import rendezvous as rv
from mpsagent.system.frontend import AnswerStatus, FrontEndQueue, Reply
from tests.nvidia.daemon import Daemon
from tests.waiting import until

pytestmark = pytest.mark.root


@pytest.fixture(autouse=True)
def path(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the name of the program that is looked up in this process."""
    monkeypatch.setenv("PATH", daemon.environment["PATH"])


def ask(daemon: Daemon, *commands: str, deadline: float = 60.0) -> Reply:
    async def one() -> Reply:
        front = FrontEndQueue("nvidia-cuda-mps-control", daemon.environment)
        reply = await front.run(commands, deadline=deadline)
        front.close()
        return reply

    return asyncio.run(one())


def answered(daemon: Daemon) -> None:
    """By both ways, as soon as the daemon has seen the last one go."""
    until(lambda: ask(daemon, "get_default_active_thread_percentage").out == "100.0\n", "ours is answered")
    done = daemon.front_end
    until(lambda: done("get_default_active_thread_percentage\n").stdout == "100.0\n", "NVIDIA's is answered")


def test_the_answers_are_equal_to_the_byte(daemon: Daemon) -> None:
    """And so are the lines of control.log about them."""
    compared = [both_ways.compare(daemon.environment, commands) for commands in both_ways.questions()]
    assert [line for equal, line in compared if not equal] == []


def test_quit_and_what_comes_after_it(daemons: Callable[..., Daemon]) -> None:
    first, second = daemons(), daemons()
    done = first.front_end("quit\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert ask(second, "quit") == Reply(AnswerStatus.ANSWERED)
    for one in (first, second):
        until(lambda one=one: not one.alive, "it has ended")  # type: ignore[misc]
    done = first.front_end("ps\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert ask(second, "ps") == Reply(AnswerStatus.NO_DAEMON, err=done.stderr.strip())
    assert first.lines()[-3:] == second.lines()[-3:]


def test_another_front_end_is_open(daemon: Daemon) -> None:
    with daemon.session() as session:
        session.ask("get_server_list")
        done, reply = daemon.front_end("ps\n"), ask(daemon, "ps")
        assert (done.stdout, done.stderr) in [("", ""), ("", f"{reply.err}\n")]
        assert (reply.status, reply.err) == (AnswerStatus.BUSY, "Cannot send command to MPS control daemon process")
    answered(daemon)


@pytest.mark.parametrize("how", ["stopped", "half a question"])
def test_a_daemon_that_hangs(daemon: Daemon, how: str) -> None:
    """The question ends at its deadline, and no session stays: whoever comes next is answered."""
    if how == "stopped":
        os.kill(daemon.pid, signal.SIGSTOP)
        assert ask(daemon, "get_server_list", deadline=0.3).status is AnswerStatus.SILENT
        os.kill(daemon.pid, signal.SIGCONT)
    else:
        with daemon.session() as session:
            session.socket.send(rv.command_messages("ps")[0])
            time.sleep(0.1)
            assert ask(daemon, "set_default_active_thread_percentage 20", deadline=0.3).status is AnswerStatus.SILENT
            session.socket.send(rv.command_messages("ps")[1])
    answered(daemon)


def test_stopped_in_the_middle_of_a_session(daemon: Daemon) -> None:
    """At any moment between connecting and the last answer."""
    for number in range(20):
        replies: list[Reply] = []
        thread = threading.Thread(target=lambda to=replies: to.append(ask(daemon, "get_server_list", deadline=0.05)))  # type: ignore[misc]
        thread.start()
        time.sleep(0.0005 * number)
        os.kill(daemon.pid, signal.SIGSTOP)
        thread.join(60)
        os.kill(daemon.pid, signal.SIGCONT)
        assert replies[0].status in (AnswerStatus.SILENT, AnswerStatus.ANSWERED, AnswerStatus.BUSY), replies
        answered(daemon)
