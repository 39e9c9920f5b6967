"""Workloads that are programs of their own: PyTorch's."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click
import psutil
import pytest

from mpsagent_bench import cli as cli_bench
from mpsagent_bench import inside, programs
from mpsagent_bench.inside import FIRST_USER
from mpsagent_bench.plan import Run
from mpsagent_bench.process import ProcessError, Ready
from mpsagent_bench.torch_workloads import TORCH


def figures(ready: Ready) -> tuple[float, list[int]]:
    """On a machine with other things to do a short time may be too short."""
    for seconds in (0.3, 3.0):
        with suppress(ProcessError):
            return ready.work(time.monotonic(), seconds)
    return ready.work(time.monotonic(), 30.0)


def test_pytorch_is_spoken_to_line_by_line(tmp_path: Path) -> None:
    """By a stand-in for a Python that has it."""
    stand_in = tmp_path / "python"
    stand_in.write_text(
        '#!/bin/sh\n[ "$3" = mnist ] || { echo no such model >&2; exit 1; }\n'
        'echo \'{"gpu": "a", "multiprocessors": 66}\'\nwhile read -r _; do echo done; done\n'
    )
    stand_in.chmod(0o755)
    ready = programs.Torch(str(stand_in), "mnist")(0)
    assert (ready.gpu, ready.multiprocessors) == ("a", 66)
    assert ready.work(time.monotonic(), 30.0 / 100)[0] >= 0
    ready.end()
    with pytest.raises(ProcessError, match="no such model"):
        programs.Torch(str(stand_in), "other")(0)


FAKE_TORCH = """
import os, sys
from unittest.mock import MagicMock
print("noise of an import", flush=True)
steps = 0
def item():
    global steps
    steps += 1
    print("done")  # noise that looks like an answer
    print("a warning", file=sys.stderr)
    if steps > int(os.environ["STEPS"]):
        raise RuntimeError("CUDA error: unspecified launch failure\\nCompile with TORCH_USE_CUDA_DSA")
torch = MagicMock()
torch.cuda.get_device_properties.return_value.name = "a"
torch.cuda.get_device_properties.return_value.multi_processor_count = 66
torch.nn.CrossEntropyLoss.return_value.return_value.item = item
sys.modules["torch"] = torch
"""


@pytest.fixture
def fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> programs.Torch:
    """The workload's own text in a Python of which only PyTorch is a stand-in, started by a script that is noisy."""
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho Loading modules\necho "[]"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return programs.Torch(str(python), "mnist")


def test_what_else_is_printed_is_no_answer_of_pytorch(
    fake_torch: programs.Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPS", "1000000000")
    ready = fake_torch(0)
    assert (ready.gpu, ready.multiprocessors) == ("a", 66)
    assert figures(ready)[0] > 0
    ready.end()


def test_a_cuda_error_in_the_middle_is_told_without_advice_for_programmers(
    fake_torch: programs.Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPS", "10")
    ready = fake_torch(0)
    with pytest.raises(ProcessError, match=r"^PyTorch: RuntimeError: CUDA error: unspecified launch failure$"):
        ready.work(time.monotonic(), 30.0)
    ready.end()


def test_pytorch_that_dies_before_a_step_is_said_to_have_ended(
    fake_torch: programs.Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPS", "1000000000")
    before = psutil.Process().children()
    ready = fake_torch(0)
    (process,) = [one for one in psutil.Process().children() if one not in before]
    process.kill()
    while process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    with pytest.raises(ProcessError, match="PyTorch was ended by SIGKILL"):
        ready.work(time.monotonic(), 30.0)


def test_what_lies_in_the_directory_is_not_taken_for_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may be in anybody's directory when he measures."""
    (tmp_path / "torch.py").write_text("open('was-here', 'w')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProcessError, match=r"^PyTorch: "):
        programs.Torch(sys.executable, "mnist")(0)
    assert not (tmp_path / "was-here").exists()


@pytest.fixture
def pythons(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stand-ins that any user can run, by name."""
    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        Path(place).chmod(0o755)
        for name, script in (("with", "exit 0"), ("without", f"exit {programs._NO_TORCH}"),
                             ("broken", "echo ImportError: libcudnn.so.9 >&2; exit 1")):  # fmt: skip
            (Path(place) / name).mkdir()
            (Path(place) / name / "python3").write_text(f"#!/bin/sh\n{script}\n")
            (Path(place) / name / "python3").chmod(0o755)
        yield Path(place)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("without", "has no PyTorch"),
        ("none", "does not start"),
        ("broken", "cannot import PyTorch.*: ImportError: libcudnn.so.9"),
    ],
)
def test_without_pytorch_those_who_ask_are_told_which_python_was_tried_and_why(
    pythons: Path, name: str, why: str
) -> None:
    python = str(pythons / name / "python3")
    with pytest.raises(click.UsageError, match=f"^resnet: {python} {why}"):
        cli_bench._torch(python, ["block", "resnet"], ["off"])
    with pytest.raises(click.UsageError, match=f"^{python} {why}"):
        cli_bench._torch(python, [], ["off"])
    assert set(TORCH) == {"resnet", "resnet16", "mnist"}


def test_unasked_the_first_python_on_path_is_tried_and_named(
    pythons: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_bench._torch(None, ["block"], ["off"]) == ""
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{pythons}/with:{pythons}/without:{path}")
    assert cli_bench._torch(None, [], ["off"]) == f"{pythons}/with/python3"
    assert capsys.readouterr().err == f"PyTorch: {pythons}/with/python3\n"
    monkeypatch.setenv("PATH", f"{pythons}/without:{pythons}/with:{path}")
    assert cli_bench._torch(None, [], ["off"]) == ""
    said = " ".join(capsys.readouterr().err.split())
    assert f"without resnet, resnet16, mnist: {pythons}/without/python3 has no PyTorch" in said


def test_a_python_is_named_from_where_one_is(pythons: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started in another directory."""
    monkeypatch.chdir(pythons)
    assert cli_bench._torch("with/python3", ["resnet"], ["off"]) == f"{pythons}/with/python3"


def test_a_python_that_is_asked_for_long_ends_with_whoever_asks(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid\nexec sleep 600\n")
    python.chmod(0o755)
    ask = f"from mpsagent_bench import programs; programs.python_with_torch({str(python)!r}, None)"
    with subprocess.Popen([sys.executable, "-c", ask]) as asking:
        end = time.monotonic() + 60
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("\n"):
            assert time.monotonic() < end
            time.sleep(0.01)
        asking.kill()
    found = int((tmp_path / "pid").read_text())
    with suppress(psutil.NoSuchProcess):
        psutil.Process(found).wait(60)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="the processes are another user's for root only")
def test_a_python_that_only_root_can_read_is_not_taken(pythons: Path) -> None:
    (pythons / "with").chmod(0o700)
    python = str(pythons / "with" / "python3")
    with pytest.raises(click.UsageError, match=f"does not start for user {FIRST_USER}.*: Permission denied"):
        cli_bench._torch(python, ["resnet"], ["off", "node"])
    assert cli_bench._torch(python, ["resnet"], ["node"]) == python


def test_pytorch_that_is_not_ready_in_time_says_what_may_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow import looks like a hang to who does not know which Python was taken."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(inside, "READY", 0.2)
    makers = inside.Makers(python=str(python))
    told = inside.measure(Run("node", "mnist", 1, 1, 0.2), {}, makers)
    assert told.throughput is None
    assert f"said nothing for 0.2 s; importing PyTorch with {python} may take longer" in told.problem
    assert "try again" in told.problem
