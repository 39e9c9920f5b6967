"""`mpsagent-cli doctor`: the real program on a node that is well, and on one that is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.agent.stage import A, Stage

PROGRAM = str(Path(sys.executable).with_name("mpsagent-cli"))
POLICY = "[limits]\nactive_threads = '20%'\n"


def doctor(stage: Stage, *words: str, socket: str = "agent.sock") -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "MPSAGENT_SOCKET": str(stage.place / socket)}
    command = [PROGRAM, "doctor", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def findings(stage: Stage, grade: str) -> list[dict[str, Any]]:
    """Of this stage: other tests' processes are on this machine too."""
    found = json.loads(doctor(stage, "--json").stdout)["findings"]
    return [
        one for one in found if one["grade"] == grade and one["topic"] not in ("environment", "containers", "units")
    ]


def test_a_node_that_is_well(stage: Stage) -> None:
    """Exit status 0, with --strict, too. 80 columns."""
    stage.with_agent(POLICY)
    client = stage.client(A, "sleep", 600)
    client.known()
    done = doctor(stage)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80 or str(stage.place) in done.stdout
    assert findings(stage, "problem") == []
    assert {one["topic"] for one in findings(stage, "ok")} >= {"mpsagent", "programs", "public directory", "logs"}
    assert [one for one in findings(stage, "note") if "compute mode" in one["what"]]
    assert findings(stage, "warning") == []
    strict = doctor(stage, "--strict")
    others = [one for one in json.loads(doctor(stage, "--json").stdout)["findings"] if one["grade"] == "warning"]
    assert strict.returncode == int(bool(others)), strict.stdout
    done = doctor(stage, socket="none")  # without an agent the machine is looked at all the same
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.startswith("problem  mpsagent: no answer on ")


def test_a_daemon_started_by_hand_is_named_once_and_its_files_are_left_alone(stage: Stage) -> None:
    """It serves the public directory; the first version of this check would have had its pid file removed."""
    assert stage.rig.start("-d").rc == 0
    stage.policy(POLICY)
    agent = stage.start_agent()
    stage.answering(agent)
    stage.problem(agent, "control daemon")
    found = json.loads(doctor(stage, "--json").stdout)["findings"]
    assert [one for one in found if one["grade"] == "problem" and "echo quit" in one["do"]]
    assert not [one for one in found if one["do"].startswith(f"cd {stage.rig.pipe} && rm")]
    texts = [one["what"] for one in found]
    assert len(texts) == len(set(texts))
