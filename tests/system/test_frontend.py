"""The front-end's runs: queue, deadlines, every way to end, and nothing left behind after 500 of them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from mpsagent.system.frontend import FrontEnd, Status
from tests.system.conftest import MakeProgram, Play, until, zombies

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "CUDA_MPS_PIPE_DIRECTORY": "/tmp/somewhere"}
pytestmark = pytest.mark.usefixtures("no_leak")


def test_answers_come_from_one_run_with_all_commands_and_only_the_given_environment(
    program: MakeProgram, play: Play
) -> None:
    """The program sees the commands at once, end of input behind them, and nothing of the agent's own environment."""
    path = program('/usr/bin/sed "s/^/got /"; /usr/bin/env | /bin/grep -v -e ^PWD -e ^_ -e SHLVL | /usr/bin/sort')

    async def scenario() -> None:
        front = FrontEnd(str(path), ENVIRONMENT)
        reply = await front.run(["get_server_list", "ps"])
        assert reply.status is Status.ANSWERED
        assert reply.ok
        assert reply.out.splitlines() == [
            "got get_server_list",
            "got ps",
            "CUDA_MPS_PIPE_DIRECTORY=/tmp/somewhere",
            "PATH=/usr/bin:/bin",
        ]
        assert reply.seconds > 0
        assert not reply.late
        front.close()

    play(scenario())


def test_a_bare_name_is_found_on_the_given_path(program: MakeProgram, play: Play) -> None:
    """The simulator takes the place of NVIDIA's program through PATH."""
    path = program("echo mine")

    async def scenario() -> None:
        front = FrontEnd(path.name, {"PATH": f"{path.parent}:/usr/bin:/bin"})
        assert (await front.run(["x"])).out == "mine\n"
        front.close()

    play(scenario())


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("echo Cannot find MPS control daemon process >&2; exit 1", Status.NO_DAEMON),
        ("echo Cannot send command to MPS control daemon process >&2; exit 1", Status.BUSY),
        ("echo An instance of this daemon is already running >&2; exit 1", Status.FAILED),
        ("exit 7", Status.FAILED),
        ("kill -SEGV $$", Status.FAILED),
        ("echo Server 99999 not found", Status.ANSWERED),
    ],
)
def test_ends_are_told_apart(program: MakeProgram, play: Play, script: str, status: Status) -> None:
    """Each text and exit status of the recordings has its own status, and a failure says how it ended."""
    path = program(script)

    async def scenario() -> None:
        front = FrontEnd(str(path), ENVIRONMENT)
        reply = await front.run(["get_server_list"])
        assert reply.status is status
        assert reply.out or reply.err
        front.close()

    play(scenario())


def test_a_missing_or_unfit_program_is_said(tmp_path: Path, program: MakeProgram, play: Play) -> None:
    """Missing, not executable, a directory, not a program: a status that says which, and no exception."""
    plain = tmp_path / "plain"
    plain.write_text("echo no")
    nonsense = program("", name="nonsense", interpreter="/nonexistent/interpreter")

    async def scenario() -> None:
        for bad in (tmp_path / "absent", plain, tmp_path, nonsense):
            front = FrontEnd(str(bad), ENVIRONMENT)
            reply = await front.run(["ps"])
            assert reply.status is Status.MISSING, bad
            assert str(bad) in reply.err
            front.close()

    play(scenario())


def test_a_silent_program_is_killed_with_its_children_and_the_next_batch_is_served(
    program: MakeProgram, tmp_path: Path, play: Play
) -> None:
    """A stuck run must not stall the agent: killed at its deadline, children included, and the queue goes on."""
    path = program(
        f'read line; if [ "$line" = stuck ]; then sleep 600 & echo $! >{tmp_path}/child; echo half; wait; '
        'else echo "fine $line"; fi'
    )

    async def scenario() -> None:
        front = FrontEnd(str(path), ENVIRONMENT)
        stuck = asyncio.create_task(front.run(["stuck"], deadline=2.0))
        later = asyncio.create_task(front.run(["later"], deadline=60))
        reply = await stuck
        assert reply.status is Status.SILENT
        assert reply.late
        assert reply.out == "half\n"
        assert (await later).out == "fine later\n"
        child = int((tmp_path / "child").read_text())
        await until(lambda: not Path(f"/proc/{child}").exists() or "\nState:\tZ" in _status(child))
        front.close()

    play(scenario())


def test_a_program_that_ignores_everything_but_sigkill_ends(program: MakeProgram, play: Play) -> None:
    """SIGTERM would not do."""
    path = program("trap '' TERM INT HUP; while :; do sleep 0.05; done")

    async def scenario() -> None:
        front = FrontEnd(str(path), ENVIRONMENT)
        assert (await front.run(["ps"], deadline=0.2)).status is Status.SILENT
        await until(lambda: not front._abandoned)
        front.close()

    play(scenario())


def test_urgent_batches_overtake_and_never_two_run_at_once(program: MakeProgram, tmp_path: Path, play: Play) -> None:
    """Setting limits must not wait behind queries; the daemon is asked one thing at a time."""
    path = program(
        f"""
import os, sys, time
line = sys.stdin.read().strip()
os.mkdir("{tmp_path}/inside")
time.sleep(0.05)
os.rmdir("{tmp_path}/inside")
with open("{tmp_path}/order", "a") as order:
    order.write(line + "\\n")
""",
        interpreter="/usr/bin/env python3",
    )

    async def scenario() -> None:
        front = FrontEnd(str(path), dict(os.environ))
        names = ("a", "b", "c", "urgent1", "urgent2")
        calls = [front.run([name], deadline=60, urgent=name.startswith("urgent")) for name in names]
        replies = await asyncio.gather(*calls)
        assert [reply.status for reply in replies] == [Status.ANSWERED] * 5
        front.close()

    play(scenario())
    assert (tmp_path / "order").read_text().split() == ["a", "urgent1", "urgent2", "b", "c"]


def test_a_full_queue_refuses_and_a_batch_that_waits_too_long_is_never_sent(
    program: MakeProgram, tmp_path: Path, play: Play
) -> None:
    """Bounded memory and bounded waits; what is refused must not happen later."""
    path = program(f"read line; echo $line >>{tmp_path}/sent; sleep 0.6")

    async def scenario() -> None:
        front = FrontEnd(str(path), ENVIRONMENT, capacity=2)
        first = asyncio.create_task(front.run(["first"]))
        second = asyncio.create_task(front.run(["second"], deadline=0.1))
        third = asyncio.create_task(front.run(["third"]))
        await asyncio.sleep(0)
        refused = await front.run(["fourth"])
        assert refused.status is Status.REFUSED_QUEUE
        assert not refused.late
        urgent = asyncio.create_task(front.run(["urgent"], urgent=True))
        expired = await second
        assert expired.status is Status.REFUSED_QUEUE
        assert expired.late
        assert (await first).ok
        assert (await urgent).ok
        assert (await third).ok
        front.close()

    play(scenario())
    assert (tmp_path / "sent").read_text().split() == ["first", "urgent", "third"]


def test_a_cancelled_caller_leaves_the_queue_intact(program: MakeProgram, tmp_path: Path, play: Play) -> None:
    """A command on its way cannot be taken back, one in the queue can."""
    path = program(f"read line; echo $line >>{tmp_path}/sent; sleep 0.2")

    async def scenario() -> None:
        front = FrontEnd(str(path), ENVIRONMENT)
        running, queued, last = (asyncio.create_task(front.run([name])) for name in ("running", "queued", "last"))
        await asyncio.sleep(0.05)
        running.cancel()
        queued.cancel()
        assert (await last).ok
        front.close()

    play(scenario())
    assert (tmp_path / "sent").read_text().split() == ["running", "last"]


@pytest.mark.parametrize("stream", ["1", "2"])
def test_endless_output_is_bounded_and_ended(program: MakeProgram, play: Play, stream: str) -> None:
    """A program gone wild costs neither memory nor time up to the deadline."""
    path = program(f"exec yes abcdefgh >&{stream}")

    async def scenario() -> None:
        front = FrontEnd(str(path), ENVIRONMENT)
        reply = await front.run(["ps"], deadline=60)
        assert reply.status is Status.FAILED
        assert not reply.late
        assert len(reply.out) <= 64 << 10
        await until(lambda: not front._abandoned)
        front.close()

    play(scenario())


def test_garbage_is_decoded_and_capped(program: MakeProgram, play: Play) -> None:
    """Bytes that are no UTF-8 and more than is kept: still an answer."""
    path = program("printf '\\377\\376\\000ok\\n'; head -c 200000 /dev/urandom")

    async def scenario() -> None:
        front = FrontEnd(str(path), ENVIRONMENT)
        reply = await front.run(["ps"])
        assert reply.ok
        assert reply.out.startswith("\ufffd\ufffd\0ok\n")
        assert len(reply.out.encode("utf-8", "replace")) >= 64 << 10 or len(reply.out) <= 64 << 10
        assert len(reply.out) <= 64 << 10
        front.close()

    play(scenario())


def test_an_output_pipe_held_by_a_grandchild_does_not_delay_the_answer(program: MakeProgram, play: Play) -> None:
    """``-d`` style programs leave a child with the pipe: the exit counts, not the end of the stream."""
    path = program("sleep 600 & echo answer; echo $!")

    async def scenario() -> None:
        front = FrontEnd(str(path), ENVIRONMENT)
        reply = await front.run(["ps"])
        assert reply.ok
        assert reply.out.startswith("answer\n")
        assert not reply.late
        os.kill(int(reply.out.split()[1]), signal.SIGKILL)
        front.close()

    play(scenario())


def test_an_answer_that_was_there_in_time_counts_though_the_loop_was_late(program: MakeProgram, play: Play) -> None:
    """If the agent itself was held up (swapped out, stopped), the daemon must not be blamed for it."""
    path = program("echo answer")

    async def scenario() -> None:
        front, ended = FrontEnd(str(path), ENVIRONMENT), set(zombies())
        call = asyncio.create_task(front.run(["ps"], deadline=0.3))
        await asyncio.sleep(0)
        while set(zombies()) <= ended:
            time.sleep(0.01)
        time.sleep(0.4)
        reply = await call
        assert reply.status is Status.ANSWERED
        assert reply.out == "answer\n"
        assert reply.late
        front.close()

    play(scenario())


def test_commands_cannot_smuggle_a_second_line(program: MakeProgram, play: Play) -> None:
    """A line break in a name would become a command of its own, sent as root."""
    path = program("cat")

    async def scenario() -> None:
        front = FrontEnd(str(path), ENVIRONMENT)
        for bad in ("ps\nquit", "ps\rquit", "ps\0"):
            assert (await front.run([bad])).status is Status.FAILED
        assert (await front.run(["x" * 40_000])).status is Status.FAILED
        front.close()

    play(scenario())


def test_close_answers_everybody_and_leaves_no_process(program: MakeProgram, tmp_path: Path, play: Play) -> None:
    """At the agent's end nobody hangs."""
    path = program(f"echo $$ >{tmp_path}/pid; exec sleep 600")

    async def scenario() -> None:
        front = FrontEnd(str(path), ENVIRONMENT)
        calls = [asyncio.create_task(front.run(["ps"])) for _ in range(3)]
        await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
        front.close()
        statuses = [reply.status for reply in await asyncio.gather(*calls)]
        assert statuses == [Status.SILENT, Status.REFUSED_QUEUE, Status.REFUSED_QUEUE]
        assert (await front.run(["ps"])).status is Status.REFUSED_QUEUE
        assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()

    play(scenario())


def test_five_hundred_runs_leave_no_zombie_and_no_descriptor(program: MakeProgram, play: Play) -> None:
    """The agent runs for months; the fixture compares descriptors and children afterwards."""
    path = program("cat; [ $(( $$ % 5 )) = 0 ] && exit 3; exit 0")

    async def scenario() -> None:
        front = FrontEnd(str(path), ENVIRONMENT)
        for number in range(500):
            reply = await front.run([f"n{number}"], deadline=60)
            assert reply.out == f"n{number}\n"
        front.close()

    play(scenario())


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "\nState:\tZ"
