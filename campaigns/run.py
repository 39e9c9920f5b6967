#!/usr/bin/env python3
"""Plays the scenes and says which promises were kept (`make test-gpu`).

    run.py                          on the real MPS of this machine, full counts: root and an NVIDIA GPU needed
    run.py --backend sim            on the simulator
    run.py --only limits,fault      these scenes, or all whose name begins so
    run.py --quick | --count N      small counts | N rounds of each
    run.py --out DIR                report.md and raw.json go there ($OUT if that is set)

mpsagent and what it needs must be importable (installed, or on PYTHONPATH). No setting of the GPU is touched, and no
process that was started here is left behind. Exit status: 0 all promises kept, 1 one was not, 2 this machine cannot
play.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns.begin import Broken, facts, place, say_facts
from tests.scenes import catalog
from tests.scenes.stage import Result, Scene, Stage


def play(scene: Scene, stage: Stage, count: int, limit: float) -> Result:
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        return scene.play(stage, count)
    except Broken as error:
        return Result({}, False, f"broken off: {error}", [stage.last_words()])
    except Exception as error:
        verdict = f"broken off: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        return Result({}, False, verdict, [traceback.format_exc(), stage.last_words()])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def chosen(only: str, kind: str) -> list[Scene]:
    names = [name.strip() for name in only.split(",") if name.strip()]
    for name in names:
        if not any(one.startswith(name) for one in catalog.ALL):
            raise SystemExit(f"no scene {name!r}; there are: {', '.join(catalog.ALL)}")
    return [
        scene for scene in catalog.ALL.values()
        if scene.only in ("", kind) and (not names or any(scene.name.startswith(name) for name in names))
    ]  # fmt: skip


def report(about: dict[str, str], rows: list[dict[str, Any]]) -> str:
    lines = ["# What was shown\n", *(f"- {key}: {value}" for key, value in about.items()), ""]
    lines += ["| scene | rounds | kept | what came out | seconds |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['name']} | {row['count']} | {'yes' if row['good'] else 'NO'} | {row['verdict']} | {row['seconds']} |"
        for row in rows
    ]
    for row in rows:
        lines += ["", f"## {row['name']}: {row['title']}", "", row["verdict"], ""]
        lines += [f"- {key}: {value}" for key, value in row["figures"].items()]
        if row["left"]:
            lines.append(f"- LEFT BEHIND: {row['left']}")
    return "\n".join(lines) + "\n"


def write(out: Path | None, about: dict[str, str], rows: list[dict[str, Any]]) -> None:
    """After each scene, so that a run that is cut off keeps what it had."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.md").write_text(report(about, rows))
        (out / "raw.json").write_text(json.dumps({"about": about, "scenes": rows}, indent=1, default=str))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("sim", "real"), default="real")
    parser.add_argument("--only", default="", help="names of scenes, or how they begin, with commas")
    parser.add_argument("--out", type=Path, default=Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds; no scene is begun that does not fit")
    parser.add_argument("--quick", action="store_true", help="the small counts of `make test`")
    parser.add_argument("--count", type=int, help="rounds of each scene")
    parser.add_argument("--lanes", type=int, help="MPS instances side by side in scenes that mostly wait (5 on a GPU)")
    parser.add_argument("--verbose", action="store_true", help="every line as it happens")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    options = parser.parse_args()
    scenes = chosen(options.only, options.backend)
    if options.list:
        for scene in scenes:
            print(f"{scene.name:24} {scene.full:4} rounds, about {scene.seconds:4.0f} s  {scene.title}")
        return 0
    rows: list[dict[str, Any]] = []
    begin = time.monotonic()
    with place(options.backend == "sim") as (backend, machine, base):
        about = facts(backend, machine)
        say_facts(about)
        for number, scene in enumerate(scenes):
            count = options.count or (scene.quick if options.quick else scene.full)
            expected = scene.seconds * count / scene.full
            if Broken.all:
                break
            if time.monotonic() - begin + expected > options.budget:
                print(f"{'skipped':7} {scene.name}: about {expected:.0f} s do not fit", flush=True)
                continue
            since = time.monotonic()
            echo = print if options.verbose else None
            lanes = options.lanes or (1 if backend.name == "sim" else 5)
            stage = Stage(backend, base / f"s{number}", machine, quick=options.quick, lanes=lanes, echo=echo)
            with stage:
                result = play(scene, stage, count, 60 + 4 * expected)
            row = {
                "name": scene.name, "title": scene.title, "count": count, "good": result.good and not stage.left,
                "verdict": result.verdict, "figures": result.figures, "left": stage.left,
                "seconds": round(time.monotonic() - since, 1), "raw": result.raw, "said": stage.said[-400:],
            }  # fmt: skip
            rows.append(row)
            word = "kept" if row["good"] else "NOT KEPT"
            print(f"{word:8} {scene.name:22} {row['seconds']:6.1f} s  {result.verdict}", flush=True)
            for key, value in result.figures.items():
                print(f"           {key}: {value}", flush=True)
            for line in [f"left behind: {one}" for one in stage.left] + ([] if row["good"] else result.raw[-2:]):
                print(f"           {line}", flush=True)
            write(options.out, about, rows)
    kept = sum(row["good"] for row in rows)
    print(f"{kept} of {len(rows)} kept in {time.monotonic() - begin:.0f} s", flush=True)
    return 0 if kept == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
