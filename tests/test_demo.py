"""What people run first has to run: the demo keeps its promises, the benchmarks reach their last line."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from demo.verdict import TITLES

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def stages_of(pid: int) -> list[Path]:
    """Directories of a process's stages; each is removed when all that was started in it has ended."""
    return list(Path("/tmp").glob(f"mpsagent-{pid}-*"))


def with_mark(stage: Path) -> list[str]:
    """Processes that were started on that stage: they carry its directory in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] * (str(stage).encode() in path.read_bytes())
    return found


@pytest.mark.timeout(300)
def test_the_demo_keeps_the_promises_that_it_shows() -> None:
    """Exit status 0, each promise judged, and said plainly that MPS is simulated. A pipe gets no colours."""
    done = run("demo/demo.py", "--quick", timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "SIMULATED" in done.stdout.splitlines()[0]
    assert len(re.findall(r"^[1-4]\. .*: kept$", done.stdout, re.MULTILINE)) == (4 if os.geteuid() == 0 else 3)
    assert "\x1b" not in done.stdout
    default, _, policy = done.stdout.partition("With a policy from here on")
    assert "Without a policy no user waits, and a fault harms no other user: kept\n" in default
    assert default.count("finishes with exit status 0") == 3
    assert policy
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [one for one in TITLES if f"**{one}" not in readme] == []


def test_a_broken_promise_is_seen(tmp_path: Path) -> None:
    """A summary that cannot say "broken" would be an advertisement: each fact breaks its promise, and no other."""
    check = tmp_path / "check.py"
    check.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from types import SimpleNamespace as N\n"
        "from demo.show import Show\n"
        "from demo.verdict import Facts, entitled, judge\n"
        "sms, status, gap, wait, silent, fault = map(float, sys.argv[2:8])\n"
        "error = None if sys.argv[8] == 'served' else sys.argv[8]\n"
        "seen = (int(sms), entitled(20.0, '1G')[1])\n"
        "client = N(uid=1, pid=7, limits=lambda: seen, process=N(returncode=status), lines=[], error=lambda: error,\n"
        "           outside=lambda: sys.argv[9] == 'outside', waited=lambda: silent)\n"
        "facts = Facts({1: (20.0, '1G')}, 6.0, [client], [gap], [wait], [], [client], [client])\n"
        "facts.blocked(client)\n"
        "facts.answers.append(('it is the turn of alice', 3.0 if sys.argv[11] == 'latest' else None))\n"
        "facts.outage('fault', fault, 2.0)\n"
        "sys.exit(not judge(facts, [], Show({}), took=1.0, left=[9] if sys.argv[10] == 'left' else []))\n"
    )
    good = ["26", "0", "0.4", "5.0", "0.2", "2.5", "served", "inside", "ended", "latest"]
    bad = ["28", "14", "2.5", "6.5", "2.5", "3.5", "CUDA_ERROR_MPS_CONNECTION_FAILED", "outside", "left", "none"]
    broken = [1, 3, 2, 2, 2, 4, 4, 1, 4, 2]
    under = ["24", *good[1:]]
    assert run(str(check), str(ROOT), *good, timeout=60).returncode == 0
    for at, value in enumerate(bad):
        done = run(str(check), str(ROOT), *good[:at], value, *good[at + 1 :], timeout=60)
        assert (done.returncode, done.stdout.count("BROKEN")) == (1, 1), done.stdout + done.stderr
        assert f"{broken[at]}. " in next(line for line in done.stdout.splitlines() if "BROKEN" in line)
    assert run(str(check), str(ROOT), *under, timeout=60).returncode == 1


def test_a_broken_default_is_seen(tmp_path: Path) -> None:
    """A user who waited, a harmed or lost neighbour, a neighbour outside MPS, and a fault that did not occur."""
    check = tmp_path / "check.py"
    check.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from types import SimpleNamespace as N\n"
        "from demo.show import Show\n"
        "from demo.verdict import judge_default\n"
        "def program(status, outside=False):\n"
        "    return N(uid=1, pid=7, process=N(returncode=status), lines=[], outside=lambda: outside)\n"
        "def kept(status=0, fault=17, at_once=True, outside=False):\n"
        "    neighbours = [program(0), program(status, outside)]\n"
        "    return judge_default(neighbours, program(fault), Show({}), at_once=at_once)\n"
        "print([kept(), kept(14), kept(fault=0), kept(at_once=False), kept(outside=True)])\n"
    )
    done = run(str(check), str(ROOT), timeout=60)
    assert done.stdout.splitlines()[-1] == "[True, False, False, False, False]", done.stdout + done.stderr
    assert done.stdout.count("BROKEN") == 4


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(number: signal.Signals) -> None:
    """People press Ctrl-C; a GPU process of a demo must not outlive it."""
    demo = subprocess.Popen([sys.executable, "demo/demo.py", "--quick"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    for line in demo.stdout:
        if "was admitted" in line:
            break
    (stage,) = stages_of(demo.pid)
    demo.send_signal(number)
    demo.stdout.read()
    assert demo.wait(60) in (130, 143)
    assert not stages_of(demo.pid)
    assert not with_mark(stage)


@pytest.mark.timeout(300)
def test_the_benchmarks_reach_their_last_figure(tmp_path: Path) -> None:
    """What they measure is not judged here, only that each figure is there, with something to compare it with."""
    out = tmp_path / "figures.md"
    done = run("benchmarks/bench.py", "--quick", "--only=lines", "--only=decisions", "--only=handover", f"--out={out}",
               timeout=290)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line for line in out.read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= (13 if os.geteuid() == 0 else 5)
    assert all(row.count(" | ") == 3 and re.search(r"\d", row) for row in rows)
