"""The seeds of the field, on one GPU: `python benchmarks/seeds/run.py --out DIR` (root; about seven minutes).

Each published measurement is repeated in kind, without MPS and with it behind the gate; docs/measured/seeds.md says
what each is. Agent, gate and MPS are started for it, in namespaces of their own, and nothing is left. DIR gets
results.json (as each window ends, so that a run which is broken off keeps what it has), the table as seeds.md, and
pictures where matplotlib is. With two GPUs the parts can run at once, and table.py takes both directories:

    python benchmarks/seeds/run.py --out A --gpu 0 --only block resnet inference nbody queue
    python benchmarks/seeds/run.py --out B --gpu 1 --only jpeg mnist threads
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.seeds import table
from benchmarks.seeds.published import BY_NAME, with_needed
from mpsagent.system import devices

ROOT = Path(__file__).resolve().parent.parent.parent
WITH_US = ["setpriv", "--pdeathsig", "KILL"]
ALONE = ["unshare", "--fork", "--pid", "--mount", "--mount-proc", "--kill-child=KILL", "--"]
GRACE = 45.0
"""Seconds over the limit after which what still runs is killed."""


def chosen(simulator: Path | None) -> tuple[str, str]:
    """The UUID and the name of the GPU that CUDA counts first; the program ends when there is none."""
    if simulator is not None:
        return devices.from_file(str(simulator / "devices.json"))[0].uuid, "simulated: nothing is computed"
    found = asyncio.run(devices.probe(os.environ))
    if isinstance(found, str) or not found:
        sys.exit(f"there is no GPU that could be measured: {found or 'none is visible'}; --sim tries the script")
    return found[0].uuid, found[0].name


def run(arguments: argparse.Namespace, simulator: Path | None) -> dict[str, Any]:
    """Writes results.json as it goes."""
    if arguments.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = arguments.gpu
    uuid, name = chosen(simulator)
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    results: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "gpu": name, "simulated": simulator is not None,
        "command": " ".join(["python", "benchmarks/seeds/run.py", *_words(sys.argv[1:])]), "seconds": arguments.seconds,
        "cores": os.cpu_count(), "took": 0.0, "about": {}, "figures": [],
    }  # fmt: skip
    order = {
        "seeds": with_needed(arguments.only), "seconds": arguments.seconds, "gpu": uuid,
        "limit": arguments.limit, "mnist": arguments.mnist, "programs": simulator and str(simulator),
    }  # fmt: skip
    began = time.monotonic()
    command = [*WITH_US, *ALONE, sys.executable, "-m", "benchmarks.seeds.inside", json.dumps(order)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
        )  # fmt: skip
        hung = threading.Timer(arguments.limit + GRACE, process.kill)
        hung.daemon = True
        hung.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                said = json.loads(line)
                if "begins" in said:
                    print(f"[{time.monotonic() - began:5.0f} s] {said['begins']}", flush=True)
                if "figure" in said:
                    one = said["figure"]
                    results["figures"].append(one)
                    told = one.get("problem") or f"{one['rate']:.1f}/s"
                    print(f"          {one['processes']} {one.get('percent', '')} {told}", flush=True)
                results["about"] |= said.get("about", {})
                results |= {key: said[key] for key in ("problem",) if key in said}
                results["took"] = time.monotonic() - began
                _write(arguments.out, results)
            if process.wait():
                errors.seek(0)
                last = errors.read().strip().splitlines()[-8:]
                results.setdefault("problem", " / ".join(last) or f"ended with status {process.returncode}")
        except KeyboardInterrupt:
            results["problem"] = "ended by a signal"
        finally:
            hung.cancel()
            process.kill()  # process 1 of the namespace goes with it, and all others with that
            process.wait()
    results["took"] = time.monotonic() - began
    return results


def _words(arguments: list[str]) -> list[str]:
    """As anybody would repeat it: the directory is nobody else's."""
    return ["DIR" if before == "--out" else one for before, one in zip(["", *arguments], arguments, strict=False)]


def _write(place: Path, results: dict[str, Any]) -> None:
    (place / "results.json").write_text(json.dumps(results, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Repeat what was published about MPS, on one GPU.")
    parser.add_argument("--out", type=Path, required=True, help="a directory for results.json, seeds.md and pictures")
    parser.add_argument("--only", nargs="+", choices=list(BY_NAME), default=[], metavar="NAME", help=", ".join(BY_NAME))
    parser.add_argument("--seconds", type=float, default=2.3, help="of each window (2.3)")
    parser.add_argument(
        "--limit", type=float, default=480.0, help="seconds for all; what does not fit is left out (480)"
    )
    parser.add_argument("--gpu", default="", help="its number or UUID (the first that CUDA_VISIBLE_DEVICES leaves)")
    parser.add_argument("--mnist", default="", help="a directory with MNIST's own files, unpacked (made ones)")
    parser.add_argument("--sim", action="store_true", help="on the simulator: nothing is computed")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("an MPS of its own needs root")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what there is by then is written
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(f"about {table.takes(arguments.only, arguments.seconds):.0f} s, at most {arguments.limit:.0f}", flush=True)
    if arguments.sim:
        print("simulated: nothing is computed, the figures mean nothing", flush=True)
        with tempfile.TemporaryDirectory(prefix="seeds-") as place:
            Path(place).chmod(0o755)
            install = [sys.executable, "-m", "mpsagent_sim.cli", "install", f"{place}/sim"]
            subprocess.run(install, check=True, capture_output=True, cwd=ROOT)
            results = run(arguments, Path(place, "sim"))
    else:
        results = run(arguments, None)
    _write(arguments.out, results)
    (arguments.out / "seeds.md").write_text(table.page(results))
    for problem in table.draw(results, arguments.out):
        print(problem)
    print(f"{len(results['figures'])} figures in {results['took']:.0f} s: {arguments.out}/seeds.md")
    if "problem" in results:
        print(f"broken off: {results['problem']}", file=sys.stderr)
    return 1 if "problem" in results else 0


if __name__ == "__main__":
    sys.exit(main())
