"""What the parts of gate.py have in common: where they play, and what comes out of them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from campaigns.begin import Broken, say_facts
from tests.conformance import rig as rigs
from tests.scenes.stage import Agent, Client, Machine, Stage, StageError

PROGRAMS = (Path(__file__).parent, Path(rigs.__file__).parent)
TOLERANCE = 40
"""MiB that the same client sees more or less on a GPU that others use."""


@dataclass
class Out:
    """What came out of a part."""

    name: str
    tables: list[tuple[str, list[str], list[list[object]]]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def table(self, title: str, *head: str) -> list[list[object]]:
        """A new table; append rows to what is returned."""
        rows: list[list[object]] = []
        self.tables.append((title, list(head), rows))
        return rows

    def say(self, text: str) -> None:
        self.said.append(text)

    def wrong(self, text: str) -> None:
        self.problems.append(text)

    def check(self, good: object, text: str) -> str:
        if not good:
            self.wrong(text)
        return "yes" if good else "NO"

    def markdown(self) -> list[str]:
        good = "as it should be" if not self.problems else f"{len(self.problems)} PROBLEMS"
        lines = [f"## {self.name}: {good} ({self.seconds} s)", ""]
        lines += [f"- {text}" for text in self.said]
        lines += [f"- PROBLEM: {cell(text)[:600]}" for text in self.problems]
        for title, head, rows in self.tables:
            lines += ["", f"### {title}", "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
            lines += [f"| {' | '.join(cell(value) for value in row)} |" for row in rows]
        return lines

    def answers(self) -> list[str]:
        lines = [f"ANSWER {self.name}: {text}" for text in self.said]
        lines += [f"ANSWER {self.name}: PROBLEM {cell(text)[:300]}" for text in self.problems[:8]]
        state = "good" if not self.problems else f"{len(self.problems)} problems"
        return [*lines, f"ANSWER {self.name}: {state}, {self.seconds} s"]

    def json(self) -> dict[str, Any]:
        return {"name": self.name, "seconds": self.seconds, "said": self.said, "problems": self.problems,
                "tables": self.tables, "raw": self.raw}  # fmt: skip


def cell(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("|", "/").split())


class Here:
    """Where one part plays: stages and threads that end with it."""

    def __init__(
        self, backend: rigs.Backend, machine: Machine, base: Path, quick: bool, echo: Callable[[str], None] | None
    ) -> None:
        self.backend, self.machine, self.base, self.quick, self.echo = backend, machine, base, quick, echo
        self.sim = backend.name == "sim"
        self.stages: list[Stage] = []
        self.peers: list[subprocess.Popen[bytes]] = []
        self.left: list[str] = []
        self.last_words = ""

    def __enter__(self) -> Here:
        self.base.mkdir(mode=0o755)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for peer in self.peers:
            _end(peer)
        for stage in self.stages:
            with contextlib.suppress(Exception):
                self.last_words += f"=== {stage.place.name}\n{stage.last_words()[-8000:]}\n"
                self.last_words += "".join(_tail(path) for path in stage.place.glob("run/*.log"))
        for stage in self.stages:
            with contextlib.suppress(Exception):
                stage.end()
            self.left += stage.left
        shutil.rmtree(self.base, ignore_errors=True)

    def stage(self) -> Stage:
        place = self.base / f"s{len(self.stages)}"
        found = Stage(self.backend, place, self.machine, quick=self.sim, echo=self.echo)
        self.stages.append(found)
        return found

    # what users run

    def program(self, name: str) -> str:
        """A program of campaigns/ or tests/conformance/ where every user can read it."""
        copy = self.base / name
        if not copy.exists():
            temporary = copy.with_suffix(f".{threading.get_ident()}")  # two parts may need it at once
            temporary.write_bytes(next(one / name for one in PROGRAMS if (one / name).exists()).read_bytes())
            temporary.chmod(0o644)
            temporary.replace(copy)
        return str(copy)

    def home(self, uid: int) -> dict[str, str]:
        """A home directory and an environment for programs that keep caches and ask who they are."""
        home = self.base / f"home{uid}"
        if not home.exists():
            home.mkdir(mode=0o700)
            (home / "tmp").mkdir()
            for path in (home, home / "tmp"):
                os.chown(path, uid, uid)
        caches = ("XDG_CACHE_HOME", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR",
                  "TRITON_CACHE_DIR", "MPLCONFIGDIR")  # fmt: skip
        return {"HOME": str(home), "TMPDIR": str(home / "tmp"), "USER": f"user{uid}", "LOGNAME": f"user{uid}",
                **{name: str(home / name.lower()) for name in caches}}  # fmt: skip

    def environment(self, stage: Stage, uid: int, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        found = stage.rig.environment({**self.home(uid), **(extra or {})})
        for name in ("CUDA_MPS_LOG_DIRECTORY", "PYTHONPATH", "PYTHONHOME"):
            found.pop(name, None)
        return found

    def python_with(self, uid: int, *modules: str) -> str:
        """A Python that `uid` may run and that has these modules."""
        question = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {modules!r})))"
        tried = []
        for candidate in (os.environ.get("GATE_PYTHON"), sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
            if not candidate or not os.path.exists(candidate):
                continue
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                done = subprocess.run([candidate, "-c", question], user=uid, group=uid, extra_groups=[], cwd="/",
                                      capture_output=True, timeout=30, env={"PATH": "/usr/bin:/bin"})  # fmt: skip
                if done.returncode == 0:
                    return candidate
                tried.append(f"{candidate}: {done.stderr.decode(errors='replace')[-200:]}")
        raise StageError(f"no Python with {modules} that uid {uid} may run: {tried}")


AnyHere = TypeVar("AnyHere", bound=Here)


def _play(name: str, part: Callable[[AnyHere, Out], None], here: AnyHere, limit: float) -> Out:
    out = Out(name)
    since = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        with here:
            part(here, out)
    except Broken as error:
        out.wrong(f"broken off: {error}")
    except BaseException as error:
        out.wrong(f"broken off: {type(error).__name__}: {str(error)[:400]}")
        out.raw["traceback"] = traceback.format_exc()[-6000:]
        if isinstance(error, SystemExit):
            Broken.all = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if here.left:
        out.wrong(f"left behind: {here.left}")
    if out.problems:
        out.raw["logs"] = here.last_words[-30000:]
    out.seconds = round(time.monotonic() - since, 1)
    return out


def write(directory: Path | None, name: str, title: str, about: dict[str, str], outs: list[Out]) -> None:
    """``name``.md and ``name``.json."""
    if directory is None:
        return
    directory.mkdir(parents=True, exist_ok=True)
    lines = [f"# {title}", "", *(f"- {key}: {value}" for key, value in about.items())]
    for out in outs:
        lines += ["", *out.markdown()]
    (directory / f"{name}.md").write_text("\n".join(lines) + "\n")
    parts = [out.json() for out in outs]
    (directory / f"{name}.json").write_text(json.dumps({"about": about, "parts": parts}, indent=1, default=str))


def played(
    options: argparse.Namespace, name: str, title: str, about: dict[str, str],
    parts: Mapping[str, tuple[Callable[[AnyHere, Out], None], float]], here: Callable[[int], AnyHere],
    tell: Callable[[Out], list[str]] = Out.answers,
) -> int:  # fmt: skip
    """Each part in a place of its own, at most as long as it says and as there is time; the exit status."""
    say_facts(about)
    end = time.monotonic() + options.seconds
    outs: list[Out] = []
    for number, (part, (does, most)) in enumerate(parts.items()):
        left = end - time.monotonic() - 8
        if Broken.all or left < 10:
            print(f"ANSWER {part}: not begun, {left:.0f} s left", flush=True)
            continue
        outs.append(_play(part, does, here(number), min(most, left)))
        print("\n".join(tell(outs[-1])), flush=True)
        write(options.out, name, title, about, outs)
    return 0 if len(outs) == len(parts) and not any(out.problems for out in outs) else 1


def _end(peer: subprocess.Popen[bytes]) -> None:
    for pipe in (peer.stdin, peer.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()
    try:
        peer.wait(15)
    except subprocess.TimeoutExpired:
        peer.kill()
        peer.wait(5)


def _tail(path: Path) -> str:
    return f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}\n"


def first(client: Client, timeout: float = 60.0) -> float | None:
    """When its first result was there (monotonic); None if it ended without one, or never came."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if "] sms " in client.text():
            return time.monotonic()
        if client.rc is not None:
            return time.monotonic() if "] sms " in client.text() else None
        time.sleep(0.001)
    return None


def own_start(stage: Stage, uid: int, timeout: float = 60.0) -> tuple[float | None, Client]:
    """Seconds from a new client's start to its first result."""
    client = stage.client(uid)
    at = first(client, timeout)
    client.ended(10)
    return (None if at is None else at - client.started.since), client


def all_of(threads: Sequence[threading.Thread]) -> None:
    """Start them and wait; the waiting can be broken off."""
    for thread in threads:
        thread.daemon = True
        thread.start()
    while any(thread.is_alive() for thread in threads):
        threads[0].join(0.05)
        time.sleep(0.02)


def processor_of(pid: int) -> float:
    """Seconds of processor time."""
    with contextlib.suppress(psutil.Error):
        return sum(psutil.Process(pid).cpu_times()[:2])
    return 0.0


def listed(agent: Agent) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError, KeyError, ValueError):
        return list(agent.api.get("/v1/clients")["clients"])
    return []


def exact(out: Out, client: Client, right: tuple[int, int], what: str) -> bool:
    """Whether it ended well with exactly these multiprocessors and, but for what others use, this free memory (MiB)."""
    got = client.seen()
    good = client.rc == 0 and got is not None and got[0] == right[0] and abs(got[1] - right[1]) <= TOLERANCE
    if not good:
        out.wrong(f"{what}: rc {client.rc}, wanted {right}: {client.text()[-500:]}")
    return good
