"""Sets the compute mode of an instance's GPUs before its control daemon starts, and gives back what was found after it.

A program of its own that the daemon's unit runs: `mpsagent-compute-mode set|restore NAME`, and `restore-all` when the
package goes. The driver takes the mode from CAP_SYS_ADMIN alone, which the agent does not have. What was found is on
disk before anything is changed. A mode that was changed otherwise meanwhile is left as it is. A reboot forgets modes,
and so do we.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpsagent.linux import atomic_file
from mpsagent.linux.proc import boot_id

STATE = "/var/lib/mpsagent"
WANTED = "MPSAGENT_COMPUTE_MODE"
"""In the unit's environment: the policy's ``compute_mode``; not there: the modes are left alone."""
DEADLINE = 10.0
"""Seconds for NVML to answer all that it is asked at once; the unit's start has 30."""
USAGE = "usage: mpsagent-compute-mode set|restore NAME, or restore-all"
Json = dict[str, Any]


def ask(questions: list[Json]) -> list[list[Json]]:
    """What NVML's helper answers, one for each. Raises OSError when it does not."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    argv = [sys.executable, "-P", "-m", "mpsagent.system.nvml_helper"]
    feed = "".join(json.dumps(one) + "\n" for one in questions)
    try:
        ended = subprocess.run(
            argv, input=feed, capture_output=True, text=True, timeout=DEADLINE, env=environment, check=False
        )
        lines = [json.loads(line) for line in ended.stdout.splitlines()]
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise OSError(f"NVML does not answer: {type(error).__name__}") from error
    answers = [line for line in lines if "xid" not in line]
    wrong = next((line["error"] for line in answers if "error" in line), None)
    if wrong is not None or len(answers) != len(questions):
        raise OSError(f"NVML could not be asked: {wrong or 'no answer'}")
    return [line["answer"] for line in answers]


def set_mode(kept: Path, mode: str, visible: str | None) -> list[str]:
    """The GPUs that the daemon sees get ``mode``. Returns what was done, for people; raises OSError."""
    found = {gpu["uuid"]: gpu for gpu in ask([{"ask": "gpus"}])[0] if gpu["problem"] is None}
    wanted = [word.strip() for word in visible.split(",")] if visible else list(found)
    ours = [uuid for uuid, gpu in found.items() if {uuid, *(part["uuid"] for part in gpu["parts"])} & set(wanted)]
    change = [uuid for uuid in ours if found[uuid]["mode"] not in (mode, None)]
    if not change:
        return []
    before = load(kept)
    for uuid in change:
        first = before[uuid]["before"] if uuid in before else str(found[uuid]["mode"])
        before[uuid] = {"before": first, "set": mode}
    save(kept, before)
    ask([{"ask": "set-mode", "device": uuid, "mode": mode} for uuid in change])
    return [f"compute mode of {uuid}: {mode} (it was {found[uuid]['mode']})" for uuid in change]


def restore(kept: Path) -> list[str]:
    """What was found is given back. Returns what was done, for people; raises OSError, and what is kept stays."""
    before = load(kept)
    if before:
        now = {gpu["uuid"]: gpu["mode"] for gpu in ask([{"ask": "gpus"}])[0] if gpu["problem"] is None}
        ours = {uuid: one["before"] for uuid, one in before.items() if now.get(uuid) == one["set"] != one["before"]}
        ask([{"ask": "set-mode", "device": uuid, "mode": mode} for uuid, mode in ours.items()])
        done = [f"compute mode of {uuid}: {mode} again" for uuid, mode in ours.items()]
        others = [uuid for uuid, one in before.items() if uuid in now and now[uuid] not in (one["set"], one["before"])]
        done += [f"compute mode of {uuid}: left at {now[uuid]}, which mpsagent did not set" for uuid in others]
        silent = [uuid for uuid in before if uuid not in now]
        done += [f"compute mode of {uuid}: not given back, because the GPU does not answer" for uuid in silent]
        if silent:
            save(kept, {uuid: before[uuid] for uuid in silent})
            return done
    else:
        done = []
    kept.unlink(missing_ok=True)
    return done


def load(kept: Path) -> dict[str, dict[str, str]]:
    """The modes that were found, by UUID; nothing from before a reboot."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(kept.read_bytes())
        if known["boot"] == boot_id():
            return {str(uuid): {"before": str(one["before"]), "set": str(one["set"])}
                    for uuid, one in known["modes"].items()}  # fmt: skip
    return {}


def save(kept: Path, modes: dict[str, dict[str, str]]) -> None:
    """On disk when this returns. Raises OSError."""
    found = {"boot": boot_id(), "modes": modes}
    atomic_file.write(kept, json.dumps(found), lasting=True)


def main() -> int:
    """The exit status: 0, 1 when NVML or the disk refuses, 2 for a wrong call."""
    words = sys.argv[1:]
    state = Path(os.environ.get("MPSAGENT_STATE") or STATE)
    try:
        if words == ["restore-all"]:
            notes = [note for kept in sorted(state.glob("compute-mode-*.json")) for note in restore(kept)]
        elif len(words) == 2 and words[0] in ("set", "restore") and re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", words[1]):
            kept = state / f"compute-mode-{words[1]}.json"
            mode = os.environ.get(WANTED)
            if words[0] == "restore":
                notes = restore(kept)
            else:
                notes = set_mode(kept, mode, os.environ.get("CUDA_VISIBLE_DEVICES")) if mode else []
        else:
            print(USAGE, file=sys.stderr)  # noqa: T201
            return 2
    except OSError as error:
        print(f"<3>the compute mode stays as it is: {error}", file=sys.stderr)  # noqa: T201
        return 1
    for note in notes:
        print(f"<5>{note}", file=sys.stderr)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
