"""Starting, proving, adopting and ending a control daemon, with real processes that look like one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsagent.system import control_search
from mpsagent.system.control import PID_FILE, ControlProblem, ProblemKind, Running
from mpsagent.system.control_child import ControlChild
from mpsagent.system.control_search import Foreign, foreign, prove
from mpsagent.system.directories import directories, listener_of, prepare_hidden, prepare_log
from tests.coroutines import until
from tests.never_comes import process_that_cannot_be_read
from tests.nvidia.fetch import Unavailable, get
from tests.system.conftest import MakeProgram, Play

pytestmark = pytest.mark.usefixtures("no_leak")

# Forks twice like the real one, whose first process returns when the daemon is up; what it was given is left in its
# directory. A file "old" there makes it a driver like 470.
DAEMON = textwrap.dedent(
    """
    import os, sys, time
    pipe = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
    old = os.path.exists(pipe + "/old")
    if old and "--multiuser-server" in sys.argv:
        print("Cannot find MPS control daemon process", file=sys.stderr)
        sys.exit(1)
    up, report = os.pipe()
    if "-d" in sys.argv or "-dM" in sys.argv:
        if os.fork():
            os.close(report)
            os.read(up, 1)
            sys.exit(0)
        os.setsid()
        if os.fork():
            os._exit(0)
    with open(pipe + "/given", "w") as file:
        file.write(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", ""))
    if not old:
        with open(pipe + "/nvidia-cuda-mps-control.pid.new", "w") as file:
            file.write("%d\\n" % os.getpid())
        os.rename(pipe + "/nvidia-cuda-mps-control.pid.new", pipe + "/nvidia-cuda-mps-control.pid")
    os.close(report)
    time.sleep(600)
    """
)


def end_all(directory: Path | str) -> None:
    """Whatever a test has started has this directory, or one below it, in its environment."""
    wanted = f"\0CUDA_MPS_PIPE_DIRECTORY={directory}".encode()
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and wanted in b"\0" + Path(f"/proc/{name}/environ").read_bytes():
                os.kill(int(name), signal.SIGKILL)
        except OSError:
            continue


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[str]:
    directory = tmp_path / "pipe"
    directory.mkdir()
    yield str(directory)
    end_all(directory)


@pytest.fixture
def daemon(program: MakeProgram) -> str:
    return str(program(DAEMON, interpreter=sys.executable))


def environment(pipe: str) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_MPS_LOG_DIRECTORY": "/var/log/there"}


def alone(daemon: str, pipe: str, *options: str, **more: object) -> None:
    """A daemon that is started by hand."""
    subprocess.run([daemon, *options], env=environment(pipe), check=True, **more)  # type: ignore[call-overload]


async def end(control: ControlChild) -> None:
    assert control.kill() is None
    await until(lambda: control.running is None)


async def test_start_gives_the_fail_safe_limit_at_once_and_proves_the_daemon(daemon: str, pipe: str) -> None:
    """It must be in the daemon's own environment: set by command it would come too late."""
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


async def test_the_daemon_outlives_the_agent_and_is_adopted(daemon: str, pipe: str) -> None:
    """A restart of the agent must not disturb any work: same process, held again."""
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
    await end(second)
    assert gone == [started.pid]
    missing = await second.adopt()
    assert isinstance(missing, ControlProblem)
    assert missing.kind is ProblemKind.ABSENT
    second.close()


async def test_a_wrong_pid_file_does_not_hide_the_daemon(daemon: str, pipe: str) -> None:
    """The pid file has mode 0666: any user may write the number of another root process into it."""
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


async def test_a_driver_without_a_pid_file_is_found_all_the_same(daemon: str, pipe: str) -> None:
    """Drivers 470 and 535 write none: the first edition waited 15 s and gave up."""
    Path(pipe, "old").touch()
    control = ControlChild(pipe, lambda _: None, program=daemon)
    running = await control.start(environment(pipe), 10)
    assert isinstance(running, Running), running
    assert running.how == "started by this agent"
    assert not Path(pipe, PID_FILE).exists()
    control.close()
    adopted = await control.adopt()
    assert isinstance(adopted, Running)
    assert adopted.pid == running.pid
    await end(control)


async def test_a_program_that_starts_nvidias_own_is_taken_for_it(program: MakeProgram, daemon: str, pipe: str) -> None:
    """A site's wrapper sets what it needs and becomes the daemon. It ran, and was not found: another one was started,
    again and again."""
    wrapper = str(program(f'exec {daemon} "$@"\n', "site-mps"))
    control = ControlChild(pipe, lambda _: None, program=wrapper)
    running = await control.start(environment(pipe), 10)
    assert isinstance(running, Running), running
    await end(control)
    control.close()


async def test_one_server_for_all_users_is_asked_for_by_its_option(daemon: str, pipe: str) -> None:
    """A driver that does not know it says so in words of the front-end: then it is to be started without."""
    control = ControlChild(pipe, lambda _: None, program=daemon)
    running = await control.start(environment(pipe), 10, multiuser=True)
    assert isinstance(running, Running), running
    assert running.multiuser
    await end(control)
    Path(pipe, "old").touch()
    found = await control.start(environment(pipe), 10, multiuser=True)
    assert isinstance(found, ControlProblem)
    assert found.kind is ProblemKind.UNSUPPORTED
    assert "--multiuser-server" in found.text
    control.close()


async def test_the_daemon_of_another_pipe_directory_is_not_ours(daemon: str, pipe: str, tmp_path: Path) -> None:
    """Several daemons may run; one that serves another directory is none of this instance's business."""
    other = tmp_path / "other"
    other.mkdir()
    control = ControlChild(str(other), lambda _: None, program=daemon)
    alone(daemon, pipe, "-d")
    await until(lambda: Path(pipe, PID_FILE).exists())
    shutil.copy(Path(pipe, PID_FILE), other / PID_FILE)
    found = await control.adopt()
    assert isinstance(found, ControlProblem)
    assert found.kind is ProblemKind.ABSENT
    control.close()


async def test_options_of_an_adopted_daemon_are_seen(daemon: str, pipe: str) -> None:
    """Whether one server serves all users is for the agent to know."""
    control = ControlChild(pipe, lambda _: None, program=daemon)
    alone(daemon, pipe, "-dM")
    await until(lambda: Path(pipe, PID_FILE).exists())
    found = await control.adopt()
    assert isinstance(found, Running)
    assert found.multiuser
    control.kill()
    await until(lambda: control.running is None)


async def test_a_foreground_daemon_is_refused_with_the_command_that_ends_it(daemon: str, pipe: str) -> None:
    """With -f the log files stay empty: what happens would not be seen, and the agent must say so."""
    control = ControlChild(pipe, lambda _: None, program=daemon)
    child = subprocess.Popen([daemon, "-f"], env=environment(pipe))
    await until(lambda: Path(pipe, PID_FILE).exists())
    found = await control.adopt()
    assert isinstance(found, ControlProblem)
    assert found.kind is ProblemKind.UNSAFE
    assert "foreground" in found.text
    assert pipe in found.commands[0]
    child.kill()
    child.wait()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root to start a daemon of another user")
async def test_another_users_daemon_is_refused(program: MakeProgram, pipe: str) -> None:
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
    control = ControlChild(pipe, lambda _: None, program=daemon)
    alone(daemon, pipe, "-d", user=20001, group=20001)
    await until(lambda: Path(pipe, PID_FILE).exists())
    found = await control.adopt()
    assert isinstance(found, ControlProblem)
    assert found.kind is ProblemKind.UNSAFE
    assert "20001" in found.text
    assert found.commands[0] == f"kill {Path(pipe, PID_FILE).read_text().strip()}"
    control.close()


@pytest.mark.parametrize(
    ("script", "deadline", "words"),
    [
        ("exit 244", 60, "libcuda.so.1"),
        ("echo An instance of this daemon is already running >&2; exit 1", 60, "already running"),
        ("exec sleep 600", 0.5, "did not end within"),
        ("exit 0", 60, "no control daemon was there a second later"),
    ],
)
async def test_a_failed_start_says_why(
    program: MakeProgram, pipe: str, script: str, deadline: float, words: str
) -> None:
    """Bounded in time, and with what the program said."""
    path = program(script)
    control = ControlChild(pipe, lambda _: None, program=str(path))
    found = await control.start(environment(pipe), 10, deadline=deadline)
    assert isinstance(found, ControlProblem)
    assert found.kind is ProblemKind.FAILED
    assert words in found.text
    control.close()


async def test_a_missing_program_is_said_at_once(tmp_path: Path, pipe: str) -> None:
    """Where it was looked for and what to install; nothing is removed and nothing started."""
    Path(pipe, PID_FILE).touch()
    for name in (str(tmp_path / "absent"), "nvidia-cuda-mps-absent"):
        control = ControlChild(pipe, lambda _: None, program=name)
        found = await control.start(environment(pipe), 10)
        assert isinstance(found, ControlProblem)
        assert found.kind is ProblemKind.MISSING
        assert name in found.text
    assert "is not installed (looked in /usr/bin:/bin); install" in found.text
    assert Path(pipe, PID_FILE).exists()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root to make a mount namespace")
async def test_a_containers_daemon_with_our_path_is_named_and_left_alone(
    daemon: str, pipe: str, tmp_path: Path
) -> None:
    """Same owner, same command line, same path in its environment, another directory: it must not be taken over."""
    script = 'mount --make-rprivate / && mount -t tmpfs tmpfs "$1" && shift && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", pipe, daemon, "-d"]
    if subprocess.run(command, env=environment(pipe), check=False).returncode:
        pytest.skip("no mount namespaces here")
    found: list[Foreign] = []

    async def named() -> bool:
        found[:] = [one for one in await foreign(pipe, program=daemon) if one.pipe_directory == pipe]
        return bool(found)

    while not await named():
        pass
    assert found[0].elsewhere
    assert not found[0].public
    assert f"control daemon {found[0].pid} of uid 0 on {pipe}" in found[0].text()
    assert "container" in found[0].text()
    control = ControlChild(pipe, lambda _: None, program=daemon)
    adopted = await control.adopt()
    assert isinstance(adopted, ControlProblem)
    assert adopted.kind is ProblemKind.ABSENT
    ours = await control.start(environment(pipe), 10)
    assert isinstance(ours, Running), "ours can be started beside it"
    assert ours.pid != found[0].pid
    await end(control)
    assert Path(f"/proc/{found[0].pid}").exists()


# As a job's prolog starts one, for the job; and as the device plugin of Kubernetes does, in a container of its own.
OTHERS = {
    "slurm": ("slurm/nvidia-mps-4711", ()),
    "kubernetes": ("mps/nvidia.com/gpu/pipe", ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs t "$0" && exec "$@"')),
}


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root, as those who start them are")
@pytest.mark.parametrize("whose", OTHERS)
async def test_the_daemon_of_a_slurm_prolog_or_a_kubernetes_plugin_is_named_and_left_alone(
    daemon: str, pipe: str, whose: str
) -> None:
    """Root's, like ours, and on the same node: neither ours is looked for there, nor does ours take its place."""
    place = Path(pipe, OTHERS[whose][0])
    place.mkdir(parents=True)
    inside = [*OTHERS[whose][1], str(place)] if OTHERS[whose][1] else []
    command = [*inside, "env", f"CUDA_MPS_PIPE_DIRECTORY={place}", daemon, "-d"]
    if subprocess.run(command, env=environment(pipe), check=False).returncode:
        pytest.skip("no mount namespaces here")
    control = ControlChild(pipe, lambda _: None, program=daemon)
    absent = await control.adopt()
    assert isinstance(absent, ControlProblem)
    assert absent.kind is ProblemKind.ABSENT
    ours = await control.start(environment(pipe), 10)
    assert isinstance(ours, Running)
    found = [one for one in await foreign(pipe, (ours.pid,), daemon) if one.pipe_directory == str(place)]
    assert [(one.uid, one.public, one.elsewhere) for one in found] == [(0, False, whose == "kubernetes")]
    assert f"control daemon {found[0].pid} of uid 0 on {place}" in found[0].text()
    await end(control)
    assert Path(f"/proc/{found[0].pid}").exists(), "it is never touched"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root to start a process of another user")
async def test_a_users_process_that_cannot_be_read_hides_no_daemon(daemon: str, pipe: str) -> None:
    """Of a driver that writes no pid file the next agent took the daemon for gone, and would have started a second one;
    and each look at the daemons of the machine left a thread behind."""
    control = ControlChild(pipe, lambda _: None, program=daemon)
    found = await control.start(environment(pipe), 10)
    assert isinstance(found, Running)
    number = Path(pipe, PID_FILE).rename(f"{pipe}/elsewhere")
    try:  # a test that is skipped here ends the daemon, too
        with process_that_cannot_be_read():
            again = ControlChild(pipe, lambda _: None, program=daemon)
            adopted = await again.adopt()
            assert isinstance(adopted, Running), adopted
            assert adopted.pid == found.pid
            again.close()
            assert found.pid in [one.pid for one in await foreign(pipe, (), daemon)]
    finally:
        number.rename(Path(pipe, PID_FILE))
        await end(control)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root to start a process of another user")
async def test_a_user_who_says_to_serve_the_public_directory_is_not_believed(pipe: str) -> None:
    """An administrator would be told to end that daemon, and `quit` at the public directory ends everybody's work."""
    liar = "import sys; print('on', flush=True); sys.stdin.read()"
    for directory in (Path(pipe), *Path(pipe).parents[:-2]):
        directory.chmod(0o755)
    with subprocess.Popen(
        ["nvidia-cuda-mps-control", "-d", "-c", liar], executable="/usr/bin/python3", env=environment(pipe),
        user=20001, group=20001, extra_groups=[], cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        assert child.stdout.readline() == b"on\n"
        assert child.pid not in [one.pid for one in await foreign(pipe)]
        child.communicate()


@pytest.mark.parametrize(("option", "protocol", "words"), [
    ("-S", "2", "static partitions (-S)"),
    ("-u", "3", "protocol 3"),
    ("-S", "3", "static partitions (-S) and protocol 3"),
])  # fmt: skip
async def test_a_daemon_with_what_later_drivers_have_is_said_not_to_be_ours(
    pipe: str, option: str, protocol: str, words: str
) -> None:
    """By NVIDIA's pages of drivers 590 to 615, none of which was run. The gate speaks protocol 2 alone."""
    waits = "import sys; print('on', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        ["nvidia-cuda-mps-control", "-d", option, "-c", waits], executable="/usr/bin/python3",
        env={**environment(pipe), "CUDA_MPS_PROTOCOL_VERSION": protocol}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        assert child.stdout.readline() == b"on\n"
        (one,) = [one for one in await foreign(pipe) if one.pid == child.pid]
        assert one.text().endswith(f", with {words}")
        found = await prove(child.pid, pipe, "its pid file")
        assert isinstance(found, ControlProblem)
        assert found.kind is ProblemKind.UNSAFE
        assert f"with {words}, which mpsagent does not use, so mpsagent did not start it" in found.text
        child.communicate()


async def test_a_daemon_that_was_started_by_hand_on_the_public_directory_is_seen(
    daemon: str, pipe: str, tmp_path: Path
) -> None:
    """The gate cannot listen there until it has ended; the administrator reads which process and what ends it."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    alone(daemon, pipe, "-d")
    await until(lambda: Path(pipe, PID_FILE).exists())
    control = ControlChild(str(hidden), lambda _: None, program=daemon)
    ours = await control.start(environment(str(hidden)), 10)
    assert isinstance(ours, Running)
    number = int(Path(pipe, PID_FILE).read_text())
    found = [one for one in await foreign(pipe, own=(ours.pid,), program=daemon) if one.pid in (number, ours.pid)]
    assert [(one.pid, one.public, one.uid, one.elsewhere) for one in found] == [(number, True, os.getuid(), False)]
    assert found[0].command() == f"echo quit | CUDA_MPS_PIPE_DIRECTORY={pipe} nvidia-cuda-mps-control"
    await end(control)
    assert Path(f"/proc/{number}").exists(), "it is never touched"
    os.kill(number, signal.SIGKILL)


SERVER = """
import os, sys, time
os.setgroups([])
os.setresgid(*[int(sys.argv[1])] * 3)
os.setresuid(20001, 20001, 20001)
time.sleep(600)
"""


def test_only_servers_of_a_daemon_of_ours_that_has_gone_are_ended(
    program: MakeProgram, daemon: str, pipe: str, tmp_path: Path, play: Play
) -> None:
    """Not one whose daemon lives, of another directory, or of a user who only calls it so: MPS's servers have root's
    group, which no user gets."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    server = str(program(SERVER, name="nvidia-cuda-mps-server", interpreter=sys.executable))
    keeper = str(program("import subprocess, sys; subprocess.run(sys.argv[2:])", interpreter=sys.executable))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    started: list[subprocess.Popen[bytes]] = []

    async def server_of(group: int, directory: object, *under: str) -> int:
        """Its pid."""
        one = subprocess.Popen([*under, server, str(group)], env=environment(str(directory)))
        started.append(one)
        children = Path(f"/proc/{one.pid}/task/{one.pid}/children")
        await until(lambda: not under or children.read_text().split() != [])
        pid = int(children.read_text().split()[0]) if under else one.pid
        await until(lambda: "Uid:\t20001" in Path(f"/proc/{pid}/status").read_text())
        return pid

    async def scene() -> None:
        orphan = await server_of(0, pipe)
        others = [
            await server_of(20001, pipe),
            await server_of(0, elsewhere),
            await server_of(0, pipe, keeper, "-d"),
        ]
        os.kill(orphan, signal.SIGSTOP)
        assert await control_search.end_orphans(pipe, daemon) == [orphan]
        assert started[0].wait(10) == -signal.SIGKILL
        assert all(Path(f"/proc/{one}/environ").read_bytes() for one in others)

    try:
        play(scene())
    finally:
        for one in started:
            one.kill()
            one.wait()
        end_all(elsewhere)


@pytest.fixture
def place() -> Iterator[str]:
    """With a short name: a socket's path has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="mpsn", dir="/tmp") as path:
        yield path
        end_all(path)


@pytest.mark.parametrize("branch", ["470", "535", "550"])
async def test_nvidias_own_daemon_is_started_found_adopted_and_stopped(branch: str, place: str) -> None:
    """Without a GPU the daemon itself is real; 470 and 535 write no pid file, none of them knows --multiuser-server."""
    try:
        driver = get(branch)
    except Unavailable as reason:
        pytest.skip(str(reason))
    where = directories("default", f"{place}/public", f"{place}/log", place)
    prepare_hidden(where)
    prepare_log(where.log)
    given = {**driver.environment(), "CUDA_MPS_LOG_DIRECTORY": where.log}
    gone: list[int] = []
    control = ControlChild(where.hidden, gone.append)
    unknown = await control.start(given, 10, multiuser=True)
    assert isinstance(unknown, ControlProblem)
    assert unknown.kind is ProblemKind.UNSUPPORTED
    running = await control.start(given, 10)
    assert isinstance(running, Running), running
    assert running.log_directory == where.log
    assert listener_of(f"{where.hidden}/control") == (running.pid, os.getuid())
    assert Path(where.hidden, PID_FILE).exists() == (branch == "550")
    twice = await ControlChild(where.hidden, gone.append).start(given, 10)
    assert isinstance(twice, ControlProblem)
    assert "already running" in twice.text
    control.close()
    adopted = await control.adopt()
    assert isinstance(adopted, Running)
    assert adopted.pid == running.pid
    await end(control)
    await until(lambda: gone == [running.pid])
