#!/usr/bin/env python3
"""Plays the conformance scenarios on the simulator or on real MPS and says what agrees.

    run.py --backend real --out DIR [NAMES]   play on the real MPS of this machine (root, an NVIDIA GPU)
    run.py --backend sim  --out DIR [NAMES]   play on the simulator
    run.py --backend compare [NAMES]          play on the simulator, compare with real MPS (`make conformance`)
    run.py --backend compare --raw FILE       compare a transcript that exists already

DIR gets `raw.txt` (everything as it was seen) and `transcripts.txt` (normalised, which is what is compared). The files
of a real run belong into tests/conformance/real/DATE-DRIVER/.

Nothing of the GPU's settings is touched, and no process that was started here is left behind. Exit status: 0 fine,
1 something was left behind, was broken off or (compare) differs, 2 this machine cannot play them.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.conformance import report, scenarios  # noqa: E402
from tests.conformance import rig as rigs  # noqa: E402

ONE_SCENARIO = 120.0  # seconds after which a scenario is broken off


class Broken(Exception):
    """A scenario took too long, or this run is being ended."""


def break_off(number: int, frame: FrameType | None) -> None:
    raise Broken(f"signal {signal.Signals(number).name}")


def facts(backend: rigs.Backend) -> list[str]:
    """What must be known about the machine to judge a transcript. Only reads."""
    found = [f"backend {backend.name}, control {backend.control}, client {' '.join(backend.client)}"]
    found.append(f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} CPUs, uid {os.getuid()}")
    for path in ("/proc/driver/nvidia/version", "/sys/module/nvidia/version"):
        try:
            found.append(f"{path}: {Path(path).read_text().splitlines()[0]}")
        except OSError as error:
            found.append(f"{path}: {error.strerror}")
    interesting = ("CUDA_VISIBLE", "NVIDIA_VISIBLE", "LD_LIBRARY_PATH", "MPS_CONTROL", "RIG_")
    found += [f"environment {key}={value}" for key, value in sorted(os.environ.items()) if key.startswith(interesting)]
    return found


def devices(backend: rigs.Backend, place: Path) -> tuple[int, list[str]]:
    """How many devices a client of an ordinary user sees outside MPS, and what it printed."""
    rig = rigs.Rig(backend, place / "preflight")
    try:
        client = rig.spawn(rigs.USERS[0], "query", env={"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"})
        rc = rig.wait(client, 60)
        text = rig.clients[client].read()
    finally:
        rig.end()
    count = next((int(line.split(" devices ")[1].split()[0]) for line in text.splitlines() if "] devices " in line), 0)
    if backend.name == "real" and rc != 0:
        raise rigs.RigError("a CUDA client cannot run here even without MPS:\n" + "\n".join(rig.transcript))
    return count, rig.transcript


def play_one(chosen: scenarios.Scenario, backend: rigs.Backend, place: Path, verbose: bool) -> tuple[list[str], bool]:
    """The raw transcript of one scenario, and whether it ran to its end and left nothing behind."""
    # Short names: a socket's path must fit into 108 bytes.
    rig = rigs.Rig(backend, place / chosen.name, echo=print if verbose else None)
    good = True
    signal.setitimer(signal.ITIMER_REAL, ONE_SCENARIO)
    try:
        scenarios.play(chosen, rig)
    except Broken as error:
        good = False
        rig.note(f"BROKEN OFF: {error}")
    except Exception:
        good = False
        rig.note("BROKEN OFF:\n" + traceback.format_exc())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        left = rig.end()
    for line in left:
        good = False
        rig.note(f"LEFT BEHIND {line}")
    shutil.rmtree(place / chosen.name, ignore_errors=True)
    return rig.transcript, good


def play_all(
    names: Sequence[str], kind: str, out: Path | None, *, budget: float, verbose: bool
) -> tuple[dict[str, list[str]], bool]:
    """Name -> raw transcript of every scenario that could be played; and whether all went well."""
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, break_off)
    place = Path(tempfile.mkdtemp(prefix="mpsc", dir="/tmp"))
    place.chmod(0o755)
    played: dict[str, list[str]] = {}
    all_good = True
    begin = time.monotonic()
    try:
        backend = rigs.real_backend(place) if kind == "real" else rigs.sim_backend(place)
        count, preflight = devices(backend, place)
        head = [f"# {line}" for line in [*facts(backend), *preflight]]
        write(out, "raw.txt", head)
        print("\n".join(head), flush=True)
        backends = {1: backend}
        for name in names:
            chosen = scenarios.ALL[name]
            if kind == "real" and chosen.gpus > count:
                print(f"{name:4} skipped: {chosen.gpus} GPUs needed, {count} here", flush=True)
                continue
            if kind == "sim" and chosen.gpus not in backends:
                backends[chosen.gpus] = rigs.sim_backend(place, chosen.gpus)
            playing = backends.get(chosen.gpus, backend)
            if time.monotonic() - begin > budget:
                print(f"{name:4} skipped: more than {budget:g} s have gone", flush=True)
                all_good = False
                continue
            since = time.monotonic()
            played[name], good = play_one(chosen, playing, place, verbose)
            write(out, "raw.txt", played[name])
            all_good &= good
            odd = [line for line in played[name] if "WAIT-TIMEOUT" in line or "BROKEN" in line or "LEFT" in line]
            print(f"{name:4} {time.monotonic() - since:6.2f} s {'' if good else 'NOT GOOD '}{chosen.title}", flush=True)
            for line in odd:
                print(f"         {line.strip()}", flush=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(f"{len(played)} scenarios in {time.monotonic() - begin:.1f} s", flush=True)
    return played, all_good


def write(out: Path | None, name: str, lines: Sequence[str]) -> None:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        with (out / name).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write("".join(line + "\n" for line in lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="scenarios, e.g. S5 R4 or S for all of S0 to S7")
    parser.add_argument("--backend", choices=("sim", "real", "compare"), default="compare")
    parser.add_argument("--raw", type=Path, help="with compare: a raw.txt to compare instead of playing")
    parser.add_argument("--out", type=Path, help="folder for raw.txt and transcripts.txt")
    parser.add_argument("--budget", type=float, default=500, help="start no scenario after this many seconds (500)")
    parser.add_argument("--verbose", action="store_true", help="print every transcript line as it is written")
    parser.add_argument("--list", action="store_true", help="print the scenarios and end")
    arguments = parser.parse_args()
    wanted = [
        name
        for name in scenarios.ALL
        if not arguments.names or name in arguments.names or name.rstrip("0123456789") in arguments.names
    ]
    unknown = [
        n for n in arguments.names if n not in scenarios.ALL and n not in {w.rstrip("0123456789") for w in wanted}
    ]
    if unknown:
        print(f"no scenario {' '.join(unknown)}; there are {' '.join(scenarios.ALL)}", file=sys.stderr)
        return 2
    if arguments.list:
        for name in wanted:
            print(f"{name:4} {scenarios.ALL[name].title}")
        return 0
    if os.getuid() != 0:
        print("the clients run as other users, so this must run as root", file=sys.stderr)
        return 2
    kind = "sim" if arguments.backend == "compare" else arguments.backend
    try:
        if arguments.raw:
            text, good = arguments.raw.read_text(errors="replace"), True
        else:
            played, good = play_all(wanted, kind, arguments.out, budget=arguments.budget, verbose=arguments.verbose)
            text = "".join(line + "\n" for lines in played.values() for line in lines)
    except rigs.RigError as error:
        print(error, file=sys.stderr)
        return 2
    except Broken as error:
        print(f"ended by {error}", file=sys.stderr)
        return 1
    parts = {name: found for name, found in report.by_scenario(text).items() if name in wanted}
    write(arguments.out, "transcripts.txt", [part.text() for each in parts.values() for part in each])
    if arguments.backend != "sim":
        # On real MPS too: what differs from the recordings, or from the last real run, is worth seeing.
        whole = {name: found for name, found in report.played(text).items() if name in wanted}
        lines, agrees = report.report(whole, report.references())
        print("\n".join(lines), flush=True)
        good &= agrees or arguments.backend == "real"
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
