"""Starting, proving, adopting and ending a control daemon, with real processes that look like one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsagent.system.control import PID_FILE, Running, Trouble, TroubleKind
from mpsagent.system.control_child import ControlChild
from tests.system.conftest import MakeProgram, Play, until

pytestmark = pytest.mark.usefixtures("no_leak")

# Forks twice like the real one and leaves its pid; what it was given is left in the pipe directory.
DAEMON = textwrap.dedent(
    """
    import os, sys, time
    pipe = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
    if sys.argv[1:] == ["-d"] and os.path.exists(pipe + "/refuse"):
        print("An instance of this daemon is already running", file=sys.stderr)
        sys.exit(1)
    if "-d" in sys.argv or "-dM" in sys.argv:
        if os.fork():
            sys.exit(0)
        os.setsid()
        if os.fork():
            os._exit(0)
    with open(pipe + "/given", "w") as file:
        file.write(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", ""))
    time.sleep(0.05)
    with open(pipe + "/nvidia-cuda-mps-control.pid.new", "w") as file:
        file.write("%d\\n" % os.getpid())
    os.rename(pipe + "/nvidia-cuda-mps-control.pid.new", pipe + "/nvidia-cuda-mps-control.pid")
    time.sleep(600)
    """
)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[str]:
    directory = tmp_path / "pipe"
    directory.mkdir()
    yield str(directory)
    # Whatever a test has started has this directory in its environment.
    wanted = f"CUDA_MPS_PIPE_DIRECTORY={directory}".encode()
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                os.kill(int(name), signal.SIGKILL)
        except OSError:
            continue


@pytest.fixture
def daemon(program: MakeProgram) -> str:
    return str(program(DAEMON, interpreter=sys.executable))


def environment(pipe: str) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_MPS_LOG_DIRECTORY": "/var/log/there"}


def alone(daemon: str, pipe: str, *options: str, **more: object) -> None:
    """A daemon that somebody else starts."""
    subprocess.run([daemon, *options], env=environment(pipe), check=True, **more)  # type: ignore[call-overload]


def test_start_gives_the_floor_from_the_first_moment_and_proves_the_daemon(daemon: str, pipe: str, play: Play) -> None:
    """The floor must be in the daemon's own environment: set by command it would come too late."""

    async def scenario() -> None:
        gone: list[int] = []
        control = ControlChild(pipe, gone.append, program=daemon)
        Path(pipe, PID_FILE).write_text(f"{os.getpid()}\n")  # stale, and even a living process
        running = await control.start(environment(pipe), 12.75)
        assert isinstance(running, Running), running
        assert Path(pipe, "given").read_text() == "12.8"
        assert running.threads == "12.8"
        assert running.log_directory == "/var/log/there"
        assert running.pid == int(Path(pipe, PID_FILE).read_text())
        assert control.running is running
        assert not running.multiuser
        assert control.kill() is None
        await until(lambda: gone == [running.pid])
        assert control.running is None
        assert control.kill() == "no control daemon is held"
        control.close()

    play(scenario())


def test_the_daemon_outlives_the_agent_and_is_adopted(daemon: str, pipe: str, play: Play) -> None:
    """A restart of the agent must not disturb anybody: same process, held again."""

    async def scenario() -> None:
        first = ControlChild(pipe, lambda _: None, program=daemon)
        started = await first.start(environment(pipe), 10)
        assert isinstance(started, Running)
        first.close()
        gone: list[int] = []
        second = ControlChild(pipe, gone.append, program=daemon)
        adopted = await second.adopt()
        assert isinstance(adopted, Running)
        assert adopted.pid == started.pid
        assert adopted.how == "its pid file"
        assert await second.stop() is None
        assert gone == [started.pid]
        missing = await second.adopt()
        assert isinstance(missing, Trouble)
        assert missing.kind is TroubleKind.ABSENT
        second.close()

    play(scenario())


def test_a_wrong_pid_file_does_not_hide_the_daemon(daemon: str, pipe: str, play: Play) -> None:
    """The pid file has mode 0666: any user may write the number of another root process into it."""

    async def scenario() -> None:
        control = ControlChild(pipe, lambda _: None, program=daemon)
        alone(daemon, pipe, "-d")
        await until(lambda: Path(pipe, PID_FILE).exists())
        number = int(Path(pipe, PID_FILE).read_text())
        for text in (f"{os.getppid()}", "1", "garbage", "", "9" * 40, "-1"):
            Path(pipe, PID_FILE).write_text(text)
            adopted = await control.adopt()
            assert isinstance(adopted, Running), text
            assert adopted.pid == number
        control.kill()
        await until(lambda: control.running is None)

    play(scenario())


def test_the_daemon_of_another_pipe_directory_is_not_ours(daemon: str, pipe: str, tmp_path: Path, play: Play) -> None:
    """Several daemons may run; one that serves another directory is none of this instance's business."""
    other = tmp_path / "other"
    other.mkdir()

    async def scenario() -> None:
        control = ControlChild(str(other), lambda _: None, program=daemon)
        alone(daemon, pipe, "-d")
        await until(lambda: Path(pipe, PID_FILE).exists())
        shutil.copy(Path(pipe, PID_FILE), other / PID_FILE)
        found = await control.adopt()
        assert isinstance(found, Trouble)
        assert found.kind is TroubleKind.ABSENT
        control.close()

    play(scenario())


def test_options_of_an_adopted_daemon_are_seen(daemon: str, pipe: str, play: Play) -> None:
    """--multiuser-server makes limits per user impossible; the agent has to know."""

    async def scenario() -> None:
        control = ControlChild(pipe, lambda _: None, program=daemon)
        alone(daemon, pipe, "-dM")
        await until(lambda: Path(pipe, PID_FILE).exists())
        found = await control.adopt()
        assert isinstance(found, Running)
        assert found.multiuser
        control.kill()
        await until(lambda: control.running is None)

    play(scenario())


def test_a_foreground_daemon_is_refused_with_the_command_that_ends_it(daemon: str, pipe: str, play: Play) -> None:
    """With -f the log files stay empty: the agent would be blind, and must say so."""

    async def scenario() -> None:
        control = ControlChild(pipe, lambda _: None, program=daemon)
        child = subprocess.Popen([daemon, "-f"], env=environment(pipe))
        await until(lambda: Path(pipe, PID_FILE).exists())
        found = await control.adopt()
        assert isinstance(found, Trouble)
        assert found.kind is TroubleKind.UNSAFE
        assert "foreground" in found.text
        assert pipe in found.commands[0]
        child.kill()
        child.wait()

    play(scenario())


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root to start a daemon of another user")
def test_another_users_daemon_is_refused(program: MakeProgram, pipe: str, play: Play) -> None:
    """A user may run MPS himself on this directory; the agent must neither trust nor fight it."""
    # In sh: the interpreter of the tests may lie where other users cannot go.
    daemon = str(
        program(
            f'if [ "$1" = -d ]; then "$0" -x -d </dev/null >/dev/null 2>&1 & exit 0; fi\n'
            f'echo $$ >"$CUDA_MPS_PIPE_DIRECTORY/{PID_FILE}"; while :; do sleep 1; done'
        )
    )
    for directory in (Path(pipe), *Path(pipe).parents[:-2]):
        directory.chmod(0o755)
    os.chown(pipe, 20001, 20001)

    async def scenario() -> None:
        control = ControlChild(pipe, lambda _: None, program=daemon)
        alone(daemon, pipe, "-d", user=20001, group=20001)
        await until(lambda: Path(pipe, PID_FILE).exists())
        found = await control.adopt()
        assert isinstance(found, Trouble)
        assert found.kind is TroubleKind.UNSAFE
        assert "20001" in found.text
        assert found.commands[0] == f"kill {Path(pipe, PID_FILE).read_text().strip()}"
        control.close()

    play(scenario())


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 244", "libcuda.so.1"),
        ("echo An instance of this daemon is already running >&2; exit 1", "already running"),
        ("exec sleep 600", "did not end within"),
        ("exit 0", "no control daemon was there"),
    ],
)
def test_a_failed_start_says_why(program: MakeProgram, pipe: str, play: Play, script: str, words: str) -> None:
    """Bounded in time, and with what the program said."""
    path = program(script)

    async def scenario() -> None:
        control = ControlChild(pipe, lambda _: None, program=str(path))
        found = await control.start(environment(pipe), 10, deadline=0.5)
        assert isinstance(found, Trouble)
        assert found.kind is TroubleKind.FAILED
        assert words in found.text
        control.close()

    play(scenario())


def test_a_missing_program_is_said(tmp_path: Path, pipe: str, play: Play) -> None:
    """Nothing is removed and nothing started."""

    async def scenario() -> None:
        control = ControlChild(pipe, lambda _: None, program=str(tmp_path / "absent"))
        found = await control.start(environment(pipe), 10)
        assert isinstance(found, Trouble)
        assert "absent" in found.text

    play(scenario())


def test_stop_ends_one_that_ignores_sigterm(program: MakeProgram, pipe: str, play: Play) -> None:
    """`quit` and SIGTERM do not always end it; SIGKILL does."""
    path = program(
        DAEMON.replace("import os", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nimport os", 1),
        interpreter=sys.executable,
    )

    async def scenario() -> None:
        control = ControlChild(pipe, lambda _: None, program=str(path))
        running = await control.start(environment(pipe), 10)
        assert isinstance(running, Running)
        assert await control.stop(grace=0.2) is None
        assert control.running is None
        assert await control.stop() is None

    play(scenario())
