"""What this version leaves on disk, written as tests/data/released has it of each release:

    python -m tests.agent.released DIRECTORY    # as root; before a release tests/data/released/VERSION

On the simulator: the first user has had a turn, the second has it, the third has a lease, and there is a drain."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from mpsagent.api import database
from mpsagent.gate.store import ConnectionName, DaemonName, KnownName
from mpsagent.mps.limits import Limits
from mpsagent.wire.codec import encode
from mpsagent.wire.link import Hello, Knock, Known, Synced
from tests.agent.stage import A, B, C, Stage
from tests.scenes.stage import backend_of

POLICY = '[limits]\nactive_threads = "10%"\nmemory_limit = "2G"\n'
WORKED = 1.2
"""Seconds for which each had the GPU, at least: more than one, by the report."""
LIMITS = Limits(10.0, {0: 2 << 30})
DESCRIPTORS = (
    ConnectionName(3, 7),
    ConnectionName(4, 8, privileged=True),
    KnownName(B, B, 5, 998.0, LIMITS, most=LIMITS),
    KnownName(B, B, 6, 999.0, None, "gpu1", unseen=True),
    KnownName(B, B, 9, 997.0, None, "gpu1", left=True),
    DaemonName(3, 1, A, A, False, LIMITS),
)
LINK = (
    Hello(60, 1000.0),
    Knock(3, 72, A, A, 7, 1001.0, "/user.slice"),
    Known(71, B, B, 5, 998.0, LIMITS),
    Synced(),
)


def write(stage: Stage, directory: Path) -> None:
    directory.mkdir(parents=True)
    agent = stage.with_agent(POLICY)
    first = stage.client(A, "sleep", 600)
    first.known()
    time.sleep(WORKED)
    second = stage.client(B, "sleep", 600)
    second.queued()
    first.finish()
    second.known()
    time.sleep(WORKED)
    given = {"uid": C, "name": "job-7", "active_threads": "30%", "memory_limit": "4G", "until": "300d"}
    assert agent.api.order("lease", **given)[0] == 200
    assert agent.api.order("drain", timeout="300d")[0] == 200
    agent.written_down()
    stage.stop_agent(agent)
    shutil.copyfile(stage.place / "state" / "state.json", directory / "state.json")
    shutil.copyfile(stage.place / "run" / "admissions.json", directory / "admissions.json")
    with closing(sqlite3.connect(stage.place / "state-api" / database.NAME)) as file:
        ((version,),) = file.execute("PRAGMA user_version")
        lines = [*file.iterdump(), f"PRAGMA user_version={version};"]
        (directory / "history.sql").write_text("".join(f"{line}\n" for line in lines))
    (directory / "descriptors.txt").write_text("".join(f"{one}\n" for one in DESCRIPTORS))
    (directory / "link.jsonl").write_text("".join(f"{encode(one).decode()}\n" for one in LINK))


def form(value: object) -> object:
    """Keys and kinds of what is kept, without what depends on the day."""
    if isinstance(value, dict):
        return {key: form(one) for key, one in value.items()}
    if isinstance(value, list):
        return sorted({json.dumps(form(one), sort_keys=True) for one in value}) if value else []
    return type(value).__name__


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="mpsb", dir="/tmp") as name:
        Path(name).chmod(0o755)
        with (
            backend_of("sim", Path(name) / "sim") as (backend, machine),
            Stage(backend, Path(name) / "s", machine) as one,
        ):
            write(one, Path(sys.argv[1]))
