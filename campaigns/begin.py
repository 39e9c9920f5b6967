"""How a campaign begins: its options, who may end it, MPS and a place to play, what must be known of the machine."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from mpsagent_sim import gpu
from tests.conformance import rig as rigs
from tests.scenes.stage import Machine, backend_of


class Broken(BaseException):
    """A part took too long, or (`all`) this run is being ended. Not an Exception: no part may take it for its own."""

    all = False


def break_off(number: int, frame: FrameType | None) -> None:
    Broken.all |= number != signal.SIGALRM
    raise Broken("it took too long" if number == signal.SIGALRM else signal.Signals(number).name)


def parser(text: str | None, seconds: float) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter,
                                    conflict_handler="resolve")  # fmt: skip
    words = lambda given: [one.strip() for one in given.split(",") if one.strip()]  # noqa: E731
    found.add_argument("--only", type=words, default=[], help="with commas")
    found.add_argument("--sim", action="store_true", help="on the simulator")
    found.add_argument("--seconds", type=float, default=seconds, help="for everything together")
    found.add_argument("--out", type=Path, default=Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    found.add_argument("--verbose", action="store_true", help="every line as it happens")
    return found


@contextlib.contextmanager
def place(sim: bool, gpus: int = 1) -> Iterator[tuple[rigs.Backend, Machine, Path]]:
    """MPS, its machine and a directory, which is removed at the end. Exit status 2 where nothing can be played."""
    if os.getuid() != 0:
        print("clients of several users are started here: run this as root", file=sys.stderr)
        raise SystemExit(2)
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, break_off)
    base = Path(tempfile.mkdtemp(prefix="mpsc", dir="/tmp"))  # short: a socket's path has 108 bytes
    try:
        with backend_of("sim" if sim else "real", base, gpus) as (backend, machine):
            yield backend, machine, base
    except rigs.RigError as error:
        print(f"cannot play here: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except Broken as error:
        print(f"broken off: {error}", file=sys.stderr)
        raise SystemExit(143) from None


def facts(backend: rigs.Backend, machine: Machine) -> dict[str, str]:
    """What must be known about the machine to judge the figures. Only reads."""
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "MPS": "NVIDIA's" if backend.name == "real" else "SIMULATED (mpsagent-sim)",
        "device 0": f"{machine.multiprocessors} multiprocessors, {machine.total_mib} MiB",
        "machine": f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} CPUs",
    }
    for path in ("/proc/driver/nvidia/version", "/sys/module/nvidia/version"):
        with contextlib.suppress(OSError):
            found["driver"] = Path(path).read_text().splitlines()[0]
            break
    if backend.name == "real":
        try:
            import pynvml

            pynvml.nvmlInit()
            found["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
            found["device 0"] += f", {pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))}"
            pynvml.nvmlShutdown()
        except Exception as error:
            found["NVML"] = f"{type(error).__name__}: {error}"
    return found


def uuids(simulated: bool) -> list[str]:
    """Of the machine's GPUs; two where they are simulated."""
    if simulated:
        return [device.uuid for device in gpu.machine(2)]
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def say_facts(about: dict[str, str]) -> None:
    print("\n".join(f"# {key}: {value}" for key, value in about.items()), flush=True)
