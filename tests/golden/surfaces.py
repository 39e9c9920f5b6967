"""The surfaces with words: each function returns the whole text of one, the same on every machine."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import indent
from unittest.mock import patch

import click
from click.testing import CliRunner

from mpsagent.cli import checkup, doctor
from mpsagent.cli.verbs import cli
from mpsagent.core import actions as act
from mpsagent.core import transitions as tr
from mpsagent.core.sentences import sentence
from mpsagent.mps.limits import Limits
from mpsagent.policy.files import load
from mpsagent.policy.syntax import syntax_error
from tests.api.stand_in import serve
from tests.api.test_http import ask
from tests.core.harness import ALICE, BOB, CAROL, POLICY, Stage
from tests.golden.policies import CASES, TEN

Surface = Callable[[], str]
SURFACES: dict[str, Surface] = {}
NAMES = {1001: "alice", 1002: "bob", 0: "root"}.get


def surface(write: Surface) -> Surface:
    SURFACES[write.__name__] = write
    return write


@surface
def commands_help() -> str:
    """Return the help of each command, 80 columns wide."""

    def walk(command: click.Command, words: list[str]) -> Iterator[list[str]]:
        yield words
        if isinstance(command, click.Group):
            for name, one in sorted(command.commands.items()):
                yield from walk(one, [*words, name])

    def text(words: list[str]) -> str:
        done = CliRunner().invoke(cli, [*words, "--help"], prog_name="mpsagent-cli", terminal_width=80)
        return f"$ mpsagent-cli {' '.join([*words, '--help'])}\n{done.output}\n"

    return "".join(text(words) for words in walk(cli, []))


@surface
def policy_check() -> str:
    """Return what is said of each wrong policy."""
    parts = []
    for text in (TEN, *CASES):
        shown = ascii(text) if len(text) < 400 else f"{text[:60]!a}, {len(text)} characters"
        errors = load([("policy.toml", text)], syntax_error)[1]
        parts.append(f"{shown}\n" + indent("".join(f"{one}\n" for one in errors), "    "))
    return "".join(parts)


TERMINATE = act.TerminateClient(
    server=5, pid=70, uid=1001, start=3, deadline=5.0, reason="the turn of user 1001 is over", rule="turn.time_limit"
)
HAPPENED = (
    tr.TurnBegan(1.0, 1002, 0.104),
    tr.TurnBegan(1.0, 1003, None),
    tr.TurnEnded(1.0, 1001, 90.0, False),
    tr.TurnEnded(1.0, 1001, 1830.0, True, "turn.time_limit = 30m, p.toml:4"),
    tr.FaultClient(1.0, 5, 70, 1001),
    tr.ClientConnected(1.0, 70, 1001, 3.2, Limits(20.0, {0: 1 << 30}), True),
    tr.ClientEnded(1.0, 70, 1001, 5, "lost", 12.0, 0.0),
    tr.FaultBegan(1.0, 5, None),
    tr.FaultOver(1.0, 5, 6.3, True),
    tr.ServerStartFailed(1.0, 5, "", 3),
    tr.HandoverFailed(1.0, 70, 1001, "connect", "no socket", False),
    tr.FrontEndUsed(1.0, 9, 0, "quit"),
    tr.FrontEndUsed(1.0, 9, 1001, "quit", refused=True),
)


@surface
def journal() -> str:
    """Return the sentences that events and the journal have; tests/net has those of whole states."""
    done = {"kind": "action.done", "action": "TerminateClient", "ok": True, "text": "", **act.action_fields(TERMINATE)}
    rejected = {"kind": "policy.rejected", "errors": ["a.toml:1: x", "a.toml:2: y"]}
    records = [
        *({"kind": one.kind, "at": one.at, **tr.transition_fields(one)} for one in HAPPENED),
        done,
        {**done, "kind": "action"},
        {**done, "ok": False, "text": "no answer"},
        {**done, "enforce": False},
        {**done, "action": "SignalClient", "signal": 15, "reason": "ordered by uid 0; SIGTERM to client 7"},
        {**done, "action": "RunHook", "program": "/save", "subject": {"uid": 1001}, "reason": "ordered by user 1001"},
        rejected,
        {**rejected, "kept": "there is no earlier policy, so no one is admitted"},
        {**rejected, "errors": ["a.toml:1: x; write y"], "first": "a.toml:1: x"},
        {"kind": "outside_mps.warned", "at": 10.0, "pid": 7, "uid": 1002, "ends": 70.0},
        {"kind": "drain.ended", "reason": "new clients are admitted again"},
        {"kind": "drain.resumed", "by": 0, "instance": "gpu1"},
        {"kind": "turn.warning", "uid": 1001, "reason": "user 1001 has had the GPU for 30m00s while user 1002 waits"},
    ]  # fmt: skip
    return "".join(f"{one['kind']}: {sentence(one, NAMES)}\n" for one in records)


@surface
def messages() -> str:
    """Return the lines that users read on their terminals."""
    tells = POLICY.replace("[limits]", "[limits]\nnotify_terminal = true")
    turns = Stage(f'{tells}[user.carol]\naccess = "deny"\n').up()
    turns.client(ALICE)
    turns.run(1)
    turns.client(BOB)
    turns.client(CAROL)
    turns.run(60)
    apart = Stage(f'{tells}[instance.gpu]\nsharing = "per-user"\nmax_users = 1\n', together=True)
    apart.start_agent()
    apart.run(1)
    alice = apart.client(ALICE)
    apart.run(1)
    apart.client(BOB)
    apart.run(20)
    apart.ends(alice)
    apart.run(5)
    lines = [f"to user {one.uid}: {one.reason}\n" for stage in (turns, apart) for one in stage.actions(act.Tell)
             if isinstance(one, act.Tell)]  # fmt: skip
    return "".join(lines)


ASKED = (
    "/nothing", "/v1/events?limit=0", "/v1/events?limit=x", "/v1/events?cursor=9223372036854775807",
    "/v1/events?colour=red", "/v1/events?since=soon",
    "/v1/policy/explain", "/v1/policy/explain?user=not-there", "/v1/report?first=yesterday",
    "/v1/report?by=colour", "/v1/report?by=user&job=7",
)  # fmt: skip


@surface
def api_errors() -> str:
    """Return the answers to wrong questions, without the server's own headers."""
    with serve() as served:
        answers = [(target, ask(served, target)) for target in ASKED]
    return "".join(f"GET {target} {status}\n    {json.dumps(body)}\n" for target, (status, _, body) in answers)


@surface
def doctor_findings() -> str:
    """Return the findings about a machine on which many things are wrong, as a terminal has them."""
    with tempfile.TemporaryDirectory() as place, patch.dict(os.environ, PATH=place):
        root = Path(place)

        def put(name: str, text: str = "") -> Path:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return path

        put(
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Sep  2 2026\n",
        )
        library = put("usr/lib/x86_64-linux-gnu/libcuda.so.580.200.01")
        library.with_name("libcuda.so.1").symlink_to(library.name)
        for number in range(3):
            put(f"proc/driver/nvidia/gpus/{number}/information")
        put("etc/logrotate.d/all", "/var/log/*/*.log {\n  daily\n}\n")
        put("etc/systemd/system/mpsagent.service.d/mine.conf")
        (root / "etc/systemd/system/mpsagent-admin.socket").symlink_to("/dev/null")
        put("etc/profile.d/b.sh", "export CUDA_MPS_PIPE_DIRECTORY=/opt/mps\n")
        control = put("bin/nvidia-cuda-mps-control")
        control.chmod(0o755)
        devices = [{"ordinal": 0, "compute_mode": "default"}, {"ordinal": 1, "compute_mode": "exclusive-process"}]
        unit = "ExecStart={ path=/usr/bin/mpsagent ; argv[]=/usr/bin/mpsagent run --gpus 1 ; }\nNeedDaemonReload=%s\n"
        found = [
            *doctor._agent("/run/mpsagent/api.sock", doctor._Seen(None, {}, [], [])),
            *checkup.programs(str(root / "none")),
            *checkup.programs(str(control)),
            *checkup.driver(True, root),
            *checkup.driver(False, root / "none"),
            *checkup.driver(True, root / "none"),
            *checkup.device_count(2, root),
            *checkup.compute_mode(devices),
            *checkup.public_directory(str(root / "none")),
            *checkup.log_rotation("/var/log/nvidia-mps", root),
            *checkup.units(root),
            *checkup.environment_files("/tmp/nvidia-mps", root),
            *checkup.command_in_force(unit % "no", "/usr/bin/python3 -I /usr/bin/mpsagent run"),
            *checkup.command_in_force(unit % "yes", "/usr/bin/python3 -I /usr/bin/mpsagent run"),
        ]
        shown = [
            one._replace(what=one.what.replace(place, "/ROOT"), do=one.do.replace(place, "/ROOT")) for one in found
        ]
    return "".join(f"{line}\n" for one in shown for line in doctor._lines(one))
