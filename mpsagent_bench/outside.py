"""The start of the runs in separate namespaces, and their figures."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mpsagent
from mpsagent_bench import plan
from mpsagent_bench.results import Figure

# Whatever ends this program ends them.
_WITH_US = ["setpriv", "--pdeathsig", "KILL"]
# No other process sees the mounts in this namespace (see inside.EMPTY).
_ALONE = ["unshare", "--fork", "--pid", "--mount", "--propagation=private", "--mount-proc", "--kill-child=KILL", "--"]
# It has the command line's own path: a package's Python does not know mpsagent, and PYTHONPATH would reach the programs
# that are measured. Without -I, modules would be taken from the directory where root happens to be.
_START = """\
import sys
sys.path[:0] = sys.argv[1].split(":")
from mpsagent_bench.inside import main
sys.exit(main(sys.argv[2]))
"""
_PATH = ":".join([str(Path(mpsagent.__file__).parents[1]), *filter(None, sys.path)])
_INSIDE = [sys.executable, "-I", "-c", _START, _PATH]


Said = plan.Run | Figure


class BenchError(Exception):
    """The runs were interrupted. The text has the reason."""


@contextmanager
def going(
    runs: Sequence[plan.Run], gpu: str | None, programs: Path | None, python: str = ""
) -> Iterator[Iterator[Said]]:
    """Yield an iterator over the output of inside.py: each run when it begins, then its figure.

    ``gpu``: the UUID of the GPU. ``python``: a Python that has PyTorch. All processes have exited at the end of the
    context. Raises BenchError.
    """
    alone = any(run.mode in plan.SHARING for run in runs)
    order = {
        "runs": [asdict(run) for run in runs],
        "gpu": gpu,
        "programs": programs and str(programs),
        "python": python,
    }
    command = [*_WITH_US, *(_ALONE if alone else []), *_INSIDE, json.dumps(order)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        try:
            yield _said(process, errors)
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _said(process: subprocess.Popen[bytes], errors: Any) -> Iterator[Said]:
    assert process.stdout is not None
    for line in process.stdout:
        said = json.loads(line)
        if "begins" in said:
            yield plan.Run(**{**said["begins"], "programs": tuple(said["begins"]["programs"])})
        else:
            lists = {name: tuple(said["figure"][name]) for name in ("each", "multiprocessors")}
            yield Figure(**{**said["figure"], **lists})
    if process.wait():
        errors.seek(0)
        lines = errors.read().strip().splitlines()
        raise BenchError(lines[-1] if lines else f"the runs ended with status {process.returncode}")
