"""`mpsagent-cli bench`, with the simulator in the place of MPS: what it says, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import psutil
import pytest

import mpsagent
from mpsagent_bench import cli as bench
from mpsagent_bench import driver, outside
from mpsagent_bench.inside import FIRST_USER
from mpsagent_bench.plan import Run
from mpsagent_bench.results import Figure
from tests.system.nvml_stand_in import Machine

ALONE = "starts an MPS of its own: root and namespaces"


@pytest.fixture(scope="module")
def simulated() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        Path(place).chmod(0o755)  # the processes are other users
        install = [sys.executable, "-m", "mpsagent_sim.cli", "install", f"{place}/sim"]
        subprocess.run(install, check=True, capture_output=True)
        yield Path(place, "sim")


def command(simulated: Path | None, *arguments: str) -> list[str]:
    start = [sys.executable, "-m", "mpsagent.cli.main", "--socket", "/nonexistent", "bench", "--yes"]
    return [*start, *(["--simulated", str(simulated)] if simulated else []), *arguments]


def run(simulated: Path | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(simulated, *arguments), capture_output=True, text=True, timeout=250, check=False)


def left(simulated: Path) -> list[str]:
    """Processes and files that a benchmark with this simulator has left behind."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        if any(str(simulated) in word for word in one.info["cmdline"] or ()) and "bench" in (one.info["cmdline"] or ()):
            found.append(" ".join(one.info["cmdline"]))
        elif any("mpsagent_bench.inside" in word for word in one.info["cmdline"] or ()) and str(simulated) in str(
            one.info
        ):
            found.append("inside")
    return found


@pytest.mark.parametrize(("program", "works"), [("nvidia-cuda-mps-server", False), ("train", True)])
def test_an_idle_server_of_mps_is_nobody_who_works(
    program: str, works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernel keeps 15 letters of a name, and NVML lists servers as it does programs."""
    machine = Machine(tmp_path)
    shutil.copy("/bin/sleep", tmp_path / program)
    with subprocess.Popen([tmp_path / program, "600"]) as process:
        machine.set("processes", f"{process.pid} plain 5")
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
        try:
            with pytest.raises(SystemExit) if works else contextlib.nullcontext():
                bench._nobody_works("/nonexistent")
        finally:
            process.kill()
    assert ("1 process works" in capsys.readouterr().err) == works


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason=ALONE)


@needs_root
@pytest.mark.root
def test_each_way_of_sharing_has_figures(simulated: Path) -> None:
    """Without MPS, one user after the other, and at once with limits: half and a quarter of 132 multiprocessors."""
    limits = f"[user.{FIRST_USER}]\nactive_threads = '50%'\n[user.{FIRST_USER + 1}]\nactive_threads = '25%'\n"
    runs = [
        Run("off", "block", 2, 2, 0.3), Run("turns", "block", 3, 2, 0.3),
        Run("one-server", "a mix", 2, 2, 0.3, ("block", "train"), limits),
    ]  # fmt: skip
    with outside.going(runs, None, simulated) as said:
        everything = list(said)
    assert everything[::2] == runs
    off, turns, together = (one for one in everything[1::2] if isinstance(one, Figure))
    assert not off.problem + turns.problem + together.problem
    assert (off.multiprocessors, together.multiprocessors) == ((132, 132), (66, 32))
    assert all(one.throughput > 0 and (one.p50 or 0) >= 10 for one in (off, turns, together))
    # two users in turns, with a change of user between them
    assert turns.throughput < sum(turns.each) / 1.5
    assert left(simulated) == []


@pytest.mark.long
@needs_root
@pytest.mark.root
def test_rules_are_compared_and_the_best_is_named_as_lines_of_a_policy(simulated: Path, tmp_path: Path) -> None:
    done = run(simulated, "--provision", "block*2=2,train", "--seconds", "0.2", "--html", str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines[1:10:2]} == {"none", "even", "overlapping", "weighted", "exact"}
    assert all(each in lines[1] for each in ("block ", "train "))
    best = lines[1].split()[0]
    assert any(line.startswith(f"Best: {best} (") for line in lines)
    assert lines[-1] == "# no limits" if best == "none" else sum("[user.USER" in line for line in lines) == 3
    assert "rule: even" in (tmp_path / "page.html").read_text()


@needs_root
@pytest.mark.root
def test_the_workloads_as_json() -> None:
    """`bench --list --json` printed text."""
    done = run(None, "--list", "--json")
    assert (done.returncode, "launches" in json.loads(done.stdout)["workloads"]) == (0, True)


def test_figures_as_json_and_pictures(simulated: Path, tmp_path: Path) -> None:
    done = run(simulated, "--json", "--modes", "off", "--workloads", "block", "--processes", "1,3",
               "--seconds", "0.3", "--html", str(tmp_path / "page.html"), "--png", str(tmp_path / "p.png"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    body: dict[str, Any] = json.loads(done.stdout)
    assert body["gpu"] == "simulated: nothing is computed"
    assert [(one["mode"], one["processes"], one["users"], one["problem"]) for one in body["runs"]] == [
        ("off", 1, 1, ""), ("off", 3, 2, ""),
    ]  # fmt: skip
    assert "nothing is computed" in done.stderr
    assert all(len(line) < 80 for line in done.stderr.splitlines())
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@needs_root
@pytest.mark.root
@pytest.mark.parametrize("package", [True, False])
def test_it_runs_from_where_it_is_and_nothing_that_lies_in_the_directory(
    simulated: Path, tmp_path: Path, package: bool
) -> None:
    """A package's Python does not know mpsagent: its command line has a path of its own. Or all comes by PYTHONPATH."""
    home, here = tmp_path / "home", tmp_path / "here"
    for one in (home, here):
        one.mkdir()
    for one in Path(click.__file__).parents[1].iterdir():
        if "mpsagent" not in one.name:
            (home / one.name).symlink_to(one)
    code = home if package else tmp_path / "code"
    code.mkdir(exist_ok=True)
    for name in ("mpsagent", "mpsagent_bench"):
        (code / name).symlink_to(Path(mpsagent.__file__).parents[1] / name)
    for name in ("json.py", "click.py", "mpsagent.py"):
        (here / name).write_text("open('was-here', 'w')\nraise SystemExit('planted')\n")
    path = f"import sys; sys.path.insert(0, {str(home)!r}); " if package else "import sys; sys.path.remove(''); "
    start = f"{path}from mpsagent.cli.main import main; main()"
    environment = {**os.environ, "PYTHONPATH": "" if package else f"{code}:{home}"}
    python = Path(sys._base_executable).resolve()  # type: ignore[attr-defined]
    words = [str(python), *(["-IS"] if package else []), "-c", start, *command(simulated)[3:]]
    words += ["--modes", "one-server", "--workloads", "block", "--processes", "1", "--seconds", "0.3"]
    done = subprocess.run(words, cwd=here, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no figures" not in done.stdout
    assert not (here / "was-here").exists()


WATCHES = """
import sys
from pathlib import Path
import psutil
from mpsagent_bench import outside
from mpsagent_bench.plan import Run

def seen(pid): return "mpsagent-bench" in Path(f"/proc/{pid}/mounts").read_text()
with outside.going([Run("one-server", "block", 1, 1, 0.3)], None, Path(sys.argv[1])) as said:
    next(said)
    print(any(seen(one.pid) for one in psutil.Process().children(recursive=True)), seen("self"))
    assert not next(said).problem
"""


@needs_root
@pytest.mark.root
def test_what_it_mounts_is_seen_by_nobody_else(simulated: Path) -> None:
    """As systemd has it: mounts of the machine are shared with the namespaces that come from it."""
    words = ["unshare", "--mount", "--propagation=shared", sys.executable, "-c", WATCHES, str(simulated)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["True", "False"], done.stderr


@needs_root
@pytest.mark.root
@pytest.mark.parametrize(("moment", "number"), [(0, signal.SIGINT), (1, signal.SIGINT), (3, signal.SIGINT),
                                                (2, signal.SIGTERM), (2, signal.SIGKILL)])  # fmt: skip
def test_broken_off_at_any_moment_nothing_is_left(simulated: Path, moment: int, number: int) -> None:
    """Moments: before the first run, in a run without MPS, between and in runs with one of its own."""
    words = command(
        simulated, "--modes", "off,one-server", "--workloads", "block", "--processes", "1,2", "--seconds", "1"
    )
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "runs, about" in process.stderr.readline()
    for _ in range(moment):
        assert process.stderr.readline()
    inside = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    errors = process.communicate(timeout=60)[1]
    psutil.wait_procs(inside, timeout=60)
    assert [one for one in inside if one.is_running()] == []
    # what was started after that list was made dies with its parent, which is not at once
    end = time.monotonic() + 60
    while left(simulated) and time.monotonic() < end:
        time.sleep(0.05)
    assert left(simulated) == []
    if number == signal.SIGINT:
        assert process.returncode == 1
        assert "stopped after" in errors or "Aborted!" in errors  # before there was anything to break off


def test_without_a_gpu_it_says_so() -> None:
    with contextlib.suppress(driver.CudaError):
        pytest.skip(f"there is a driver, for CUDA {driver.version()}")
    done = run(None)
    assert done.returncode == 2
    assert "no GPU that could be measured" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--modes", "of"], "there are off, turns"),
        (["--workloads", "jpeg"], "there are block, launches"),
        (["--processes", "0,1"], "1 to 48 processes"),
        (["--processes", "x"], "with commas"),
        (["--provision", "train"], "2 to 48 workloads"),
        (["--provision", "train=0,block"], "above 0"),
        (["--provision", "train*0,block"], "1 to 48"),
    ],
)
def test_what_cannot_be_meant_is_said(simulated: Path, arguments: list[str], words: str) -> None:
    done = run(simulated, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
