"""The machine as `mpsagent-cli doctor` looks at it: each thing that goes wrong in practice, made to go wrong."""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpsagent.cli import checkup
from mpsagent.cli.checkup import NOTE, OK, PROBLEM, WARNING, Finding
from mpsagent.mps.rendezvous import HELLO
from mpsagent.system.directories import NOWHERE
from tests.waiting import until

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Sep  2 2026\nGCC version:  gcc 12.2.0\n"
OPEN_DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 12.2.0\n"
)


def put(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def of(grade: str, findings: list[Finding]) -> list[str]:
    return [one.what for one in findings if one.grade == grade]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other tests is not one that hangs."""
    monkeypatch.setattr(checkup, "GREETING", 45.0)


# --- programs and driver


def test_missing_programs(tmp_path: Path) -> None:
    """The daemon, and the server that it starts."""
    control = put(tmp_path / "nvidia-cuda-mps-control")
    (found,) = checkup.programs(str(control))
    assert (found.grade, "is not installed" in found.what) == (PROBLEM, True)
    control.chmod(0o755)
    (found,) = checkup.programs(str(control))
    assert (found.grade, found.what) == (PROBLEM, "nvidia-cuda-mps-server is not installed")
    put(tmp_path / "nvidia-cuda-mps-server")
    assert [one.grade for one in checkup.programs(str(control))] == [OK]


@pytest.mark.parametrize("text", [DRIVER, OPEN_DRIVER])
def test_a_driver_that_was_upgraded_and_not_loaded_anew(tmp_path: Path, text: str) -> None:
    """The usual end of unattended upgrades: libcuda of one version, the kernel's module of another."""
    put(tmp_path / "proc/driver/nvidia/version", text)
    library = tmp_path / "usr/lib/x86_64-linux-gnu/libcuda.so.1"
    put(library.with_name("libcuda.so.580.159.04"))
    library.symlink_to("libcuda.so.580.159.04")
    assert list(checkup.driver(True, tmp_path)) == [Finding(OK, "driver", "580.159.04")]
    put(library.with_name("libcuda.so.580.200.01"))
    library.unlink()
    library.symlink_to("libcuda.so.580.200.01")
    (found,) = checkup.driver(True, tmp_path)
    assert (found.grade, "580.159.04" in found.what, "580.200.01" in found.what) == (PROBLEM, True, True)


def test_no_driver(tmp_path: Path) -> None:
    """A problem, unless the agent knows GPUs all the same (the simulator's)."""
    assert [one.grade for one in checkup.driver(False, tmp_path)] == [PROBLEM]
    assert [one.grade for one in checkup.driver(True, tmp_path)] == [NOTE]


def test_more_gpus_in_the_machine_than_in_mps(tmp_path: Path) -> None:
    """PyTorch counts those of NVML and fails on the third."""
    for name in ("0000:06:00.0", "0000:07:00.0", "0000:08:00.0"):
        put(tmp_path / "proc/driver/nvidia/gpus" / name / "information")
    (found,) = checkup.device_count(2, tmp_path)
    assert (found.grade, "CUDA_VISIBLE_DEVICES=0,1 " in found.do) == (WARNING, True)
    assert list(checkup.device_count(3, tmp_path)) == []
    assert list(checkup.device_count(0, tmp_path)) == [], "the agent does not know its GPUs"


# --- the public directory


@contextmanager
def gate(path: Path, greeting: bytes = HELLO) -> Iterator[None]:
    """A socket at which every peer is greeted once."""
    child = subprocess.Popen(
        [sys.executable, "-c", _GATE, str(path), greeting.hex()], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "there\n"
    yield
    child.kill()
    child.communicate()


_GATE = """
import socket, sys
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.bind(sys.argv[1]); server.listen()
print("there", flush=True)
kept = []
while True:
    kept.append(server.accept()[0])
    try:
        kept[-1].send(bytes.fromhex(sys.argv[2]))
    except OSError:
        pass  # it only looked who listens
"""


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """Below directories that every user may enter."""
    for one in (tmp_path, *tmp_path.parents):
        if one.stat().st_mode & 0o7777 == 0o700:  # pytest's own: two or, with workers, three
            one.chmod(0o755)
    path = tmp_path / "mps"
    path.mkdir(mode=0o755)
    return path


def test_a_public_directory_that_is_fine(public: Path) -> None:
    with gate(public / "control"):
        assert [one.grade for one in checkup.public_directory(str(public))] == [OK]


def test_what_can_be_wrong_with_the_public_directory(public: Path) -> None:
    """Each with the command that mends it: others may write, users may not enter, what a daemon has left."""
    with gate(public / "control"):
        public.chmod(0o777)
        (found,) = checkup.public_directory(str(public))
        assert (found.grade, found.do) == (PROBLEM, f"chmod 0755 {public}")
        public.chmod(0o755)
        public.parent.chmod(0o700)
        (found,) = checkup.public_directory(str(public))
        assert (found.grade, f"chmod o+x {public.parent}" in found.do) == (PROBLEM, True)
        public.parent.chmod(0o755)
        put(public / "nvidia-cuda-mps-control.pid", "77")  # of a daemon that has ended: this socket is not its own
        ok, found = checkup.public_directory(str(public))
        assert (ok.grade, found.grade, "nvidia-cuda-mps-control.pid" in found.do) == (OK, NOTE, True)


@pytest.mark.parametrize(
    ("greeting", "text"),
    [(None, "No such file"), (b"SOMETHING ELSE", "something else than MPS"), ("dead", "Connection refused")],
)
def test_programs_that_are_not_greeted_run_outside_mps(public: Path, greeting: bytes | str | None, text: str) -> None:
    """No socket, a socket of a dead process, and another daemon's."""
    if isinstance(greeting, bytes):
        with gate(public / "control", greeting):
            (found,) = checkup.public_directory(str(public))
    else:
        if greeting == "dead":
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
                server.bind(str(public / "control"))
        (found,) = checkup.public_directory(str(public))
    assert (found.grade, text in found.what) == (PROBLEM, True)


def test_no_public_directory(tmp_path: Path) -> None:
    assert of(PROBLEM, list(checkup.public_directory(str(tmp_path / "none"))))


# --- logs, units, settings


def test_logs_that_were_rotated_by_rename(tmp_path: Path) -> None:
    """The daemon goes on writing into the old file; truncated in place is fine."""
    log = tmp_path / "control.log"
    with log.open("a"):
        assert [one.grade for one in checkup.logs(str(tmp_path), [os.getpid()])] == [OK]
        log.rename(tmp_path / "control.log.1")
        assert "control.log.1" in of(PROBLEM, list(checkup.logs(str(tmp_path), [os.getpid()])))[0]
        put(log, "a new one")
        assert "control.log.1" in of(PROBLEM, list(checkup.logs(str(tmp_path), [os.getpid()])))[0]
        (tmp_path / "control.log.1").unlink()
        assert "(deleted)" in of(PROBLEM, list(checkup.logs(str(tmp_path), [os.getpid()])))[0]
    assert list(checkup.logs(str(tmp_path), [os.getpid()])) == [], "nothing is open, so nothing is said"


def test_a_rule_of_logrotate_that_renames(tmp_path: Path) -> None:
    """The package's own copies and truncates; a general one of an administrator may not."""
    ours = Path(__file__).parents[2] / "systemd" / "mpsagent.logrotate"
    put(tmp_path / "etc/logrotate.d/mpsagent", ours.read_text())
    put(tmp_path / "etc/logrotate.d/other", "/var/log/other/*.log {\n  daily\n}\n")
    assert list(checkup.log_rotation("/var/log/nvidia-mps", tmp_path)) == []
    path = put(tmp_path / "etc/logrotate.d/all", "# all\n/var/log/*/*.log {\n  daily\n  # copytruncate\n}\n")
    (found,) = checkup.log_rotation("/var/log/nvidia-mps", tmp_path)
    assert (found.grade, str(path) in found.what) == (PROBLEM, True)


def test_units_that_were_changed(tmp_path: Path) -> None:
    """Drop-ins and replacements by hand; links of `systemctl enable` are none."""
    put(tmp_path / "etc/systemd/system/mpsagent.service.d/mine.conf")
    put(tmp_path / "run/systemd/system/mpsagent-gate.service")
    wants = put(tmp_path / "etc/systemd/system/other.service")
    (wants.parent / "mpsagent-gate.socket").symlink_to(wants)
    (wants.parent / "mpsagent-admin.socket").symlink_to("/dev/null")
    assert [one.do for one in checkup.units(tmp_path)] == [
        "systemctl unmask mpsagent-admin.socket",
        "systemctl cat mpsagent.service",
        "systemctl cat mpsagent-gate.service",
    ]


def test_settings_for_all_users_that_lead_past_the_gate(tmp_path: Path) -> None:
    """In the places where administrators put them; what is right, or only remarked, is not said."""
    put(tmp_path / "etc/environment", "PATH=/usr/bin\nCUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps\n")
    put(tmp_path / "etc/profile.d/a.sh", "# export CUDA_MPS_PIPE_DIRECTORY=/old\n")
    assert list(checkup.environment_files("/tmp/nvidia-mps", tmp_path)) == []
    put(tmp_path / "etc/profile.d/b.sh", 'export CUDA_MPS_PIPE_DIRECTORY="/opt/mps"; true\n')
    (found,) = checkup.environment_files("/tmp/nvidia-mps", tmp_path)
    assert (found.grade, "b.sh says CUDA_MPS_PIPE_DIRECTORY=/opt/mps" in found.what) == (WARNING, True)


# --- processes


@pytest.fixture
def all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others of the kind run on this machine."""
    monkeypatch.setattr(checkup, "SHOWN", 100_000)


@pytest.mark.usefixtures("all_named")
def test_a_program_that_looks_for_mps_elsewhere(public: Path, tmp_path: Path) -> None:
    """By its environment; by another name of the same directory it is right. The agent's own helper is no CUDA program:
    it was warned of in the minute after each `status`."""
    with gate(public / "control"):
        link = tmp_path / "same"
        link.symlink_to(public)
        helper = NOWHERE if os.geteuid() == 0 else public
        for where, count in ((link, 0), (public, 0), (helper, 0), (tmp_path / "other", 1)):
            with subprocess.Popen(["sleep", "600"], env={**os.environ, checkup.PIPE: str(where)}) as child:
                until(lambda child=child: Path(f"/proc/{child.pid}/comm").read_text() == "sleep\n")
                texts = [
                    one for one in of(WARNING, list(checkup.processes(str(public)))) if f"process {child.pid} " in one
                ]
                child.kill()
            assert len(texts) == count, where


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a mount namespace")
@pytest.mark.usefixtures("all_named")
def test_a_container_without_the_socket(public: Path) -> None:
    """It uses the GPU (as NVIDIA's container runtime says it), and where the socket should be there is nothing."""
    with gate(public / "control"):
        for hides, count in ((True, 1), (False, 0)):
            before = f"mount -t tmpfs none {public} && " if hides else ""
            env = {**os.environ, "NVIDIA_VISIBLE_DEVICES": "all"}
            command = ["unshare", "--mount", "sh", "-c", f"{before}exec sleep 600"]
            with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as child:
                until(lambda child=child: child.poll() is not None
                      or Path(f"/proc/{child.pid}/comm").read_text() == "sleep\n")  # fmt: skip
                if child.poll() is not None:
                    pytest.skip(f"no mount namespaces here: {child.communicate()[1]}")
                found = [one for one in checkup.processes(str(public)) if f"process {child.pid} " in one.what]
                child.kill()
            assert [one.topic for one in found] == ["containers"] * count


def test_jax_that_reserves_the_whole_gpu(tmp_path: Path) -> None:
    """A client that has it loaded; one that was told not to reserve is fine."""
    library = put(tmp_path / "jaxlib" / "xla_extension.so", "x" * mmap.PAGESIZE)
    code = (
        "import mmap, sys, time; file = open(sys.argv[1], 'r+b'); m = mmap.mmap(file.fileno(), 0); "
        "print('there', flush=True); time.sleep(600)"
    )
    for extra, count in (({}, 1), ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, 0)):
        command = [sys.executable, "-c", code, str(library)]
        with subprocess.Popen(command, env={**os.environ, **extra}, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "there\n"
            found = list(checkup.jax([child.pid, os.getpid()]))
            child.kill()
        assert [str(child.pid) in one.what for one in found] == [True] * count


def test_no_check_of_the_machine_fails(tmp_path: Path) -> None:
    """Whatever is there or is not, as any user; the clock's answer is the kernel's."""
    assert len(list(checkup.clock())) <= 1
    for check in (
        checkup.units,
        lambda root: checkup.log_rotation("/x", root),
        lambda root: checkup.driver(True, root),
    ):
        list(check(tmp_path))


def test_a_daemon_of_before_an_upgrade(tmp_path: Path) -> None:
    """Its program has been replaced under it."""
    program = tmp_path / "nvidia-cuda-mps-control"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
    with subprocess.Popen([program, "600"]) as child:
        until(lambda: Path(f"/proc/{child.pid}/exe").resolve() == program.resolve())
        assert list(checkup.replaced([child.pid])) == []
        program.unlink()
        (found,) = checkup.replaced([child.pid, 1 << 30])
        child.kill()
    assert (found.grade, f"process {child.pid} runs {program}" in found.what) == (WARNING, True)


def test_a_clock_that_nothing_sets_right(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        state = 5

        def adjtimex(self, _buffer: object) -> int:
            return self.state

    monkeypatch.setattr(checkup.ctypes, "CDLL", lambda _name: Kernel())
    assert [one.grade for one in checkup.clock()] == [NOTE]
    Kernel.state = 0
    assert list(checkup.clock()) == []


UNIT = """ExecStart={ path=/usr/bin/mpsagent ; argv[]=/usr/bin/mpsagent run --devices /x.json ; ignore_errors=no }
MainPID=7
NeedDaemonReload=%s
"""


@pytest.mark.parametrize(("command", "reload", "do"), [
    ("/usr/bin/python3 -I /usr/bin/mpsagent run --devices /x.json", "no", []),
    ("/usr/bin/python3 -I /usr/bin/mpsagent run --supervise systemd", "no", ["systemctl restart mpsagent"]),
    ("/usr/bin/python3 -I /usr/bin/mpsagent run", "yes", ["systemctl daemon-reload && systemctl restart mpsagent"]),
    ("", "no", []),
])  # fmt: skip
def test_a_unit_that_was_changed_under_a_running_agent_is_named(command: str, reload: str, do: list[str]) -> None:
    """`systemctl enable --now` starts nothing that runs: the old command stayed in force, and no output said so."""
    found = list(checkup.command_in_force(UNIT % reload, command))
    assert [one.do for one in found] == do
    assert {one.grade for one in found} <= {WARNING}


def test_a_unit_whose_command_has_variables_is_not_compared() -> None:
    assert not list(checkup.command_in_force(UNIT.replace("/x.json", "$DEVICES") % "no", "/usr/bin/mpsagent run"))


@pytest.mark.parametrize(("modes", "what"), [
    (["default"], ["the compute mode is not EXCLUSIVE_PROCESS"]),
    (["exclusive-process", "default"], ["the compute mode of GPU 1 is not EXCLUSIVE_PROCESS"]),
    (["exclusive-process"], []),
    ([None], []),
])  # fmt: skip
def test_what_the_compute_mode_does_not_prevent_is_a_note(modes: list[str | None], what: list[str]) -> None:
    """It is the driver's default, so it is no warning: `doctor --strict` could not succeed on any healthy node."""
    devices = [{"ordinal": number, "compute_mode": mode} for number, mode in enumerate(modes)]
    found = list(checkup.compute_mode(devices))
    assert [one.what.partition(":")[0] for one in found] == what
    assert {one.grade for one in found} <= {NOTE}
