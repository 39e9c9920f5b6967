"""Put one mistake into each module of mpsagent/ and report the modules in which no test notices.

    python -m tests.mutation TREE REACHED RESULTS [--seed 1] [--room gate] [--module mpsagent/core/turns.py]

TREE is a throwaway copy of the checkout with a .venv of its own, never the checkout. REACHED is the folder in which the
plugin tests.mutation.reached wrote the functions that each file of tests calls. RESULTS is a file to which a line of
JSON is appended for each module. A module that has a line is left out.

The test files that call the mutated function run until a test fails: those named after the module first, then those
that import it, then the quickest. All processes are in a pid namespace of their own, /tmp is private and /work is
read-only, because a mistake in a root daemon must not reach the machine.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.world.mutator import Mutation, drawn_in

ROOMS = ("gate", "core", "system", "agent", "linux", "wire", "mps", "policy", "snapshot", "api", "cli")
_MOST_SECONDS = 100
_ISOLATED = """
mount --make-rprivate /
mount --bind {private} /tmp
mount --bind {tree} {tree}
[ ! -d /work ] || {{ mount --bind /work /work && mount -o remount,bind,ro /work; }}
ulimit -v 8000000
cd {tree}
exec timeout --kill-after 5 {seconds} "$@"
"""


class Reached(NamedTuple):
    seconds: dict[str, float]
    """Of each file of tests."""
    callers: dict[str, set[str]]
    """Files of tests, by "file:first line" of a function."""
    failed: list[str]
    """Tests that fail without any mistake."""


def read_reached(folder: Path) -> Reached:
    found = Reached({}, {}, [])
    for path in folder.glob("*.json"):
        said = json.loads(path.read_text())
        found.failed.extend(said["failed"])
        for name, of_file in said["files"].items():
            found.seconds[name] = found.seconds.get(name, 0.0) + of_file["seconds"]
            for call in of_file["calls"]:
                found.callers.setdefault(call, set()).add(name)
    return found


def function_at(text: str, line: int) -> int | None:
    """Return the first line of the innermost function that contains the line."""
    best = None
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.body[0].lineno <= line <= (
            node.end_lineno or 0
        ):
            best = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    return best


def nearest(tree: Path, mutation: Mutation, reached: Reached, most: float) -> tuple[list[str], bool]:
    """Return the test files to run, first the most likely one, and if they are known to call the function."""
    module = mutation.file.removesuffix(".py").replace("/", ".")
    room, stem = Path(mutation.file).parent.name, Path(mutation.file).stem
    line = function_at((tree / mutation.file).read_text(), mutation.line)
    if line is None:
        calling = {
            name for call, names in reached.callers.items() if call.startswith(f"{mutation.file}:") for name in names
        }
    else:
        calling = reached.callers.get(f"{mutation.file}:{line}", set())
    parent, _, last = module.rpartition(".")
    imported = re.compile(rf"{re.escape(module)}\b|from {re.escape(parent)} import [^\n]*\b{last}\b|patch.*{stem}")
    importing = {
        str(path.relative_to(tree))
        for path in (tree / "tests").glob("**/test_*.py")
        if imported.search(path.read_text())
    }
    named = {str(path.relative_to(tree)) for path in (tree / "tests").glob(f"*/test_*{stem}*.py")}
    known = bool(calling)
    found = (
        calling
        if known and line is not None
        else calling
        | importing
        | named
        | {str(path.relative_to(tree)) for path in (tree / "tests" / room).glob("test_*.py")}
    )

    def rank(name: str) -> tuple[bool, bool, bool, float]:
        return (
            f"test_{stem}.py" not in name,
            name not in named,
            name not in importing,
            reached.seconds.get(name, 20.0),
        )

    ordered, total = [], 0.0
    for name in sorted(found, key=rank):
        seconds = reached.seconds.get(name, 20.0)
        if len(ordered) < 2 or total + seconds <= most:
            ordered.append(name)
            total += seconds
    return ordered, known


def isolated(tree: Path, command: list[str], seconds: int) -> subprocess.CompletedProcess[str]:
    private = tree.parent / "private"
    private.mkdir(exist_ok=True)
    private.chmod(0o1777)
    script = _ISOLATED.format(private=private, tree=tree, seconds=seconds)
    words = "unshare --mount --pid --fork --kill-child --mount-proc sh -ec".split()
    words += [script, "sh", *command]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    subprocess.run(["find", str(private), "-mindepth", "1", "-delete"], check=False, capture_output=True)
    return done


def imports(tree: Path, file: str) -> bool:
    module = file.removesuffix(".py").replace("/", ".")
    return isolated(tree, [str(tree / ".venv/bin/python"), "-c", f"import {module}"], 30).returncode == 0


def judge(tree: Path, mutation: Mutation, reached: Reached, most: float) -> dict[str, object]:
    files, known = nearest(tree, mutation, reached, most)
    begun = time.monotonic()
    row: dict[str, object] = {
        "module": mutation.file,
        "line": mutation.line,
        "before": mutation.before,
        "after": mutation.after,
    }
    if not files:
        return row | {"end": "survived", "why": "no test", "files": files}
    words = [str(tree / ".venv/bin/python"), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "60"]
    words += ["-m", "long or not long", *files]
    for name in reached.failed:
        words += ["--deselect", name]
    done = isolated(tree, words, _MOST_SECONDS)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    end = {0: "survived", 5: "survived", 124: "not judged in time"}.get(done.returncode, "killed")
    why = failed[1] if failed else (done.stdout + done.stderr)[-200:] if end == "killed" else ""
    return row | {
        "end": end, "why": why, "called": known, "seconds": round(time.monotonic() - begun, 1), "files": files,
    }  # fmt: skip


def modules(tree: Path) -> Iterator[str]:
    for room in ROOMS:
        yield from sorted(str(path.relative_to(tree)) for path in (tree / "mpsagent" / room).glob("*.py"))


def main() -> None:
    words = argparse.ArgumentParser("tests.mutation", description=__doc__)
    words.add_argument("tree", type=Path)
    words.add_argument("reached", type=Path)
    words.add_argument("results", type=Path)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--seconds", type=float, default=60.0)
    words.add_argument("--room", action="append")
    words.add_argument("--module", action="append")
    asked = words.parse_args()
    reached = read_reached(asked.reached)
    done = (
        {json.loads(line)["module"] for line in asked.results.read_text().splitlines()}
        if asked.results.exists()
        else set()
    )
    for file in asked.module or modules(asked.tree):
        if file in done or (asked.room and Path(file).parent.name not in asked.room):
            continue
        path = asked.tree / file
        before = path.read_text()
        for mutation in drawn_in(asked.tree, file, f"{asked.seed}:{file}"):
            path.write_text(mutation.text)
            try:
                if not imports(asked.tree, file):
                    continue
                row = judge(asked.tree, mutation, reached, asked.seconds)
            finally:
                path.write_text(before)
            with asked.results.open("a") as results:
                results.write(json.dumps(row) + "\n")
            print(row["end"], mutation, row["why"], row.get("seconds"), flush=True)
            break


if __name__ == "__main__":
    main()
