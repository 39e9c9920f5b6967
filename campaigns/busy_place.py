"""Parts of busy_ends.py and busy_ways.py: the programs on a busy GPU, and how they are followed."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ALICE, BOB, CAROL, DAVE = 20001, 20002, 20003, 20004
CROWDS = {"busy": (11, (BOB, CAROL, DAVE)), "light": (2, (ALICE,))}
"""Programs that always run: trainings of ALICE, and the users of small programs."""
AT_WORK = 0.4
"""Seconds after its first launch from which a program counts as at work."""
FAULT = re.compile(r"fatal GPU error|torn down|sticky error|is handling a")
"""Lines of server.log."""
GO = 511
"""Entry of the table that lets trainings start their work: contexts are made sooner while the GPU is idle."""
ON_SIM = {
    **dict.fromkeys(("queue", "graph", "managed", "endless", "copy", "torch", "jax"), ("spin", 600)),
    **dict.fromkeys(("small", "step"), ("mind", 900, 0)),
    "idle": ("sleep", 900),
}
"""What the simulator's client does for each kind of work."""


@dataclass
class Program:
    """A process that was started here, followed by a pidfd."""

    pid: int
    pidfd: int
    kind: str
    on_error: str
    output: Path
    entry: int = 0
    ready_at: float | None = None
    child: subprocess.Popen[bytes] | None = None

    def text(self) -> str:
        with contextlib.suppress(OSError):
            return self.output.read_text(errors="replace")
        return ""

    def gone(self) -> bool:
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def ready(self) -> bool:
        """Return whether its work has been on the GPU for AT_WORK seconds."""
        if self.ready_at is None and re.search(r"^T \S+ ready|launch|\] step", self.text(), re.M):
            self.ready_at = time.time()
        return self.ready_at is not None and time.time() > self.ready_at + AT_WORK

    def error(self) -> tuple[float, str] | None:
        """Return the time and the text of its first CUDA error."""
        found = re.search(r"^T (\S+) error (.*)", self.text(), re.M)
        return (float(found[1]), found[2]) if found else None

    def round(self) -> float | None:
        """Return the seconds from its first launches until the GPU had finished them."""
        found = re.search(r"^T \S+ round (\S+)", self.text(), re.M)
        return float(found[1]) if found else None

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def wait(self, seconds: float) -> bool:
        return bool(select.select([self.pidfd], [], [], max(0.0, seconds))[0])

    def close(self) -> None:
        if self.child is not None:
            self.child.wait()
        os.close(self.pidfd)


def end_all(programs: Sequence[Program]) -> None:
    """Kill programs and wait for their ends."""
    for one in programs:
        one.send(signal.SIGCONT)
        one.send(signal.SIGKILL)
    until = time.time() + 10
    for one in programs:
        one.wait(until - time.time())
        one.close()


class Programs:
    """Starts programs. ``client``: busy_client.cu, compiled; ``sim``: the simulator's client instead of all."""

    def __init__(self, base: Path, client: str, environment: Mapping[str, str], sim: tuple[str, ...]) -> None:
        # PyTorch counts the GPUs through NVML, and would look for those that a control daemon does not have.
        self.environment = {**environment, "CUDA_VISIBLE_DEVICES": "0"}
        self.base, self.client, self.sim = base, client, sim
        self.numbers = itertools.count(1)
        (base / "out").mkdir(mode=0o755, parents=True, exist_ok=True)
        base.chmod(0o755)
        self.table = base / "table"
        self.script = base / "busy_programs.py"  # where every user can read it
        shutil.copy(HERE / "busy_programs.py", self.script)
        self.script.chmod(0o644)
        self.fresh_table()
        self.table.chmod(0o666)
        self.parent: subprocess.Popen[bytes] | None = None
        if not sim:
            self.parent = subprocess.Popen(
                [sys.executable, str(self.script), "fork"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env=self.environment, start_new_session=True,
            )  # fmt: skip

    def loaded(self) -> None:
        """Wait until PyTorch has been imported."""
        if self.parent is not None and self.parent.stdout is not None:
            self.parent.stdout.readline()

    def fresh_table(self) -> None:
        self.table.write_bytes(bytes(4096))

    def go(self) -> None:
        """Let the trainings start their work."""
        with self.table.open("r+b") as file:
            file.seek(8 * GO)
            file.write(struct.pack("d", 1.0))

    def last_step(self, entry: int) -> float:
        return float(struct.unpack_from("d", self.table.read_bytes(), 8 * entry)[0])

    def command(self, kind: str, on_error: str) -> list[str]:
        """Return the command of a program that is started in the usual way."""
        if self.sim:
            return [*self.sim, *map(str, ON_SIM[re.sub(r"\d.*", "", kind)])]
        if kind in ("torch", "jax"):
            return [sys.executable, str(self.script), kind, on_error]
        return [self.client, kind, on_error]

    def start(
        self, uid: int, kind: str, on_error: str, entry: int | None = None, more: Mapping[str, str] | None = None
    ) -> Program:
        """Start a program; PyTorch by fork, unless it needs ``more`` environment. ``entry``: its place in the table."""
        number = next(self.numbers)
        output = self.base / "out" / str(number)
        place = [str(self.table), str(entry)] if entry is not None else []
        parent = self.parent
        if kind.startswith("torch") and not more and parent is not None and parent.stdin and parent.stdout:
            words = [number, uid, on_error, output, *(place or ["-", 0]), kind.removeprefix("torch") or 40]
            parent.stdin.write((" ".join(map(str, words)) + "\n").encode())
            parent.stdin.flush()
            pid = int(parent.stdout.readline().split()[1])
            return Program(pid, os.pidfd_open(pid), kind, on_error, output, entry or 0)
        with output.open("wb") as file:
            child = subprocess.Popen(
                [*self.command(kind, on_error), *([] if self.sim else place)], stdin=subprocess.DEVNULL, stdout=file,
                stderr=file, cwd="/", start_new_session=True, user=uid, group=uid, extra_groups=[],
                env={**self.environment, **(more or {})},
            )  # fmt: skip
        return Program(child.pid, os.pidfd_open(child.pid), kind, on_error, output, entry or 0, child=child)

    def crowd(self, name: str) -> list[Program]:
        """Start a crowd and return it when all are at work. Raises RuntimeError."""
        since = time.time()
        trainings, small = CROWDS[name]
        self.fresh_table()
        found = [self.start(ALICE, "torch", "exit", number) for number in range(trainings)]
        found += [self.start(uid, "step", "exit", trainings + number) for number, uid in enumerate(small)]
        while not all(one.ready() for one in found):
            if all("loaded" in one.text() for one in found[:trainings]):
                self.go()
            if time.time() > since + 90 or any(one.gone() for one in found):
                said = [(one.kind, one.text()[-300:]) for one in found if one.gone() or not one.ready()]
                end_all(found)
                raise RuntimeError(f"the neighbours do not start: {said}")
            time.sleep(0.05)
        return found

    def end(self) -> None:
        if self.parent is not None:
            self.parent.kill()
            self.parent.wait()


def compiled(given: str, base: Path, sim: bool) -> Path:
    """Return busy_client.cu as a program that all users can run."""
    client = base / "busy_client"
    if given:
        shutil.copy(given, client)
        client.chmod(0o755)
    elif not sim:
        subprocess.run(["nvcc", "-O2", "-arch=native", "-o", client, HERE / "busy_client.cu"], check=True)
    return client


def wait_for(lanes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait for processes, and end those that take longer."""
    latest = time.monotonic() + seconds
    for one in lanes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.wait(max(0.1, latest - time.monotonic()))
        if one.poll() is None:
            one.terminate()
    for one in lanes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.wait(15)


def facts(begun: float) -> dict[str, str]:
    """Return what must be known to judge the figures."""
    found = {"date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(begun)), "command": " ".join(sys.argv)}
    with contextlib.suppress(OSError):
        found["driver"] = Path("/sys/module/nvidia/version").read_text().strip()
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a campaign with a process for each GPU, which is its lane."""
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first GPU")
    parser.add_argument("--sim", action="store_true", help="on the simulator")
    parser.add_argument("--client", default="", help="busy_client.cu as a program; compiled if not given")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "."))
    for name, kind in (("--base", Path), ("--lane", int), ("--until", float)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)


@contextlib.contextmanager
def lanes(options: argparse.Namespace, name: str, after: float) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """Run the lanes and yield their directory and what they wrote to files with this name. They have ``after`` seconds
    to end what they started."""
    if os.getuid() != 0:
        print("clients of several users are started here: run this as root", file=sys.stderr)
        sys.exit(2)
    until = time.time() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out.resolve()
    base = Path(tempfile.mkdtemp(prefix="busy", dir="/tmp"))
    base.chmod(0o755)
    try:
        client = compiled(options.client, base, options.sim)
        command = [sys.executable, *sys.argv, "--out", str(out), "--base", str(base)]
        command += ["--client", str(client), "--until", str(until)]
        wait_for(
            [subprocess.Popen([*command, "--lane", str(number)]) for number in range(options.gpus)],
            options.seconds + after,
        )
        ends = []
        for path in sorted(out.glob(f"{name}-*.jsonl")):
            ends += [json.loads(line) for line in path.read_text().splitlines()]
            path.unlink()
        yield base, ends
    finally:
        shutil.rmtree(base, ignore_errors=True)
