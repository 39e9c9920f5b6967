"""Tables on a real terminal of 80 columns, with the names and figures that large sites have."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from typing import Any

import pytest

from mpsagent.cli.tables import cut, table
from mpsagent.core.model import Client
from mpsagent.mps.limits import Limits
from mpsagent.policy.identity import Identity
from tests.api.stand_in import ADMIN, OTHER, START, USER, Served, StandIn, serve
from tests.cli.program import on_terminal

NAMES = {USER: "alexander.schneider", OTHER: "wissenschaftler-07", ADMIN: "svc-inference-prod"}
LIMITS = Limits(37.5, {0: 20 << 30, 1: 20 << 30})
SUMS = {
    "gpu": 1234567.8, "waited": 345678.0, "longest": 293760.0, "clients": 123456, "left": 1234, "refused": 345,
    "faults": 12, "forced": 345, "turns": 12345, "paused": 23456.0,
    "counted": 1234567.8, "busy": 1234567.8, "utilization": 1.0, "shared": True, "energy": 1.8e10,
    "memory_used": 139 << 30,
}  # fmt: skip
ORIGIN = {
    "file": "/etc/mpsagent/policy.d/50-molecular-dynamics.toml",
    "line": 117,
    "key": "group.md.total_active_threads",
}
CHANGE = {"key": "total_threads", "before": {"written": 20, "value": 20}, "after": {"written": 30, "value": 30},
          "where": "/etc/mpsagent/policy.d/50-molecular-dynamics.toml:117"}  # fmt: skip
ALL_ON_ONE = """
import json, sys
from mpsagent.cli.verbs import cli
for words in json.loads(sys.argv[1]):
    print("---", *words, flush=True)
    try:
        cli(words, standalone_mode=False)
    except SystemExit:
        pass
"""
VERBS = [
    ["status"], ["servers"], ["clients"], ["queue"], ["events"], ["events", "--since", "30d"], ["report"],
    ["report", "--by", "group"],
    ["report", "--by", "day"], ["report", "--by", "job"], ["policy", "explain", "alice"], ["policy", "show"],
    ["policy", "diff"], ["lease", "list"], ["terminate", "501", "--dry-run"],
]  # fmt: skip


class Large(StandIn):
    """Long names, seven digits of a pid, two GPUs, months of work."""

    def __init__(self) -> None:
        super().__init__()
        state = self.state
        peer = state.clients[501].peer._replace(pid=1234567, command="python")
        clients = {**state.clients, 1234567: Client(peer, since=START + 5, waited=4321.5, limits=LIMITS)}
        servers = {500: replace(state.servers[500], limits=LIMITS)}
        identities = {uid: Identity(uid, name) for uid, name in NAMES.items()}
        self.state = replace(state, servers=servers, identities=identities, clients=clients)
        self.memory = {1234567: 77 << 30}
        self.happen("action.failed", action="TerminateClient", reason="the turn of user 20001 is over, and two wait",
                    rule="turn.time_limit", pid=1234567, uid=USER, server=500, ok=False, text="silent")  # fmt: skip
        self.given = [{
            "id": 1, "name": "slurm-1234567_890", "uid": USER, "user": NAMES[USER], "pid": None,
            "active_threads": "37.5%",
            "cgroup": "/system.slice/slurmstepd.scope/job_1234567", "memory_limit": {"": 20 << 30},
            "clients": [1234567],
            "until": "2026-11-23T00:00:00+00:00", "total_active_threads": None, "total_memory_limit": None,
            "max_clients": None,
        }]  # fmt: skip

    async def report(self, by: str, first: str, last: str, job: str | None = None) -> Any:
        one = {"user": {"uid": USER, "user": NAMES[USER]}, "group": {"group": "molecular-dynamics", "users": 12},
               "day": {"day": "2026-11-21"}}  # fmt: skip
        of_job = {"job": "slurm-1234567_890", "uid": USER, "user": NAMES[USER], "threads": 37.5, "memory": 20 << 30}
        return {"by": by, "first": first, "last": last, "rows": [{**one.get(by, of_job), **SUMS}] * 2}

    async def explain(self, user: str, cgroup: str | None = None) -> Any:
        return {"user": NAMES[USER], "uid": USER, "groups": ["molecular-dynamics"],
                "total_active_threads": {"value": "60%", "from": ORIGIN}}  # fmt: skip

    def policy(self) -> Any:
        return {
            **super().policy(),
            "sections": {"group.molecular-dynamics.total_active_threads": {"value": "60%", "from": ORIGIN}},
        }

    async def policy_diff(self) -> Any:
        users = [{"who": "group molecular-dynamics", "changes": [CHANGE]}]
        return {"same": False, "digest": "abc123", "users": users, "settings": []}


def on_a_terminal(served: Served, columns: int) -> dict[str, list[str]]:
    """What each verb prints on a terminal of this width."""
    env = {"PATH": os.environ["PATH"], "TZ": "UTC", "MPSAGENT_SOCKET": str(served.path)}
    command = [sys.executable, "-c", ALL_ON_ONE, json.dumps(VERBS)]
    status, text = on_terminal(command, columns=columns, rows=200, **env)
    assert status == 0, text[-3000:].decode()
    pages = text.decode().replace("\r\n", "\n").split("--- ")[1:]
    return {page.split("\n")[0]: page.split("\n")[1:] for page in pages}


@pytest.fixture
def served() -> Any:
    with serve(Large()) as one:
        yield one


def test_wide_and_combining_signs_move_no_column() -> None:
    """On a terminal a Chinese name takes two columns for each sign, and an accent on its own none."""
    names = ["alice", "\u5f20\u4f1f", "e\u0301ve", "\uff21\uff22"]
    lines = table(["USER", "PID"], [[one, "7"] for one in names])
    assert [line.rindex("7") for line in lines[1:]] == [7, 7 - 2, 7 + 1, 7 - 2]
    assert cut("\u5f20" * 10, 10) == "\u5f20" * 4 + "\u2026"
    assert cut("e\u0301" * 10, 10) == "e\u0301" * 10
    right = table(["A", "N"], [["x", "\u5f20"], ["y", "12"]], right={1})
    assert right == ["A   N", "x  \u5f20", "y  12"]


def test_tables_fit_80_columns(served: Served) -> None:
    """A line that the terminal breaks in the middle of a column cannot be read."""
    pages = on_a_terminal(served, 80)
    assert list(pages) == [" ".join(words) for words in VERBS]
    for verb, lines in pages.items():
        assert [line for line in lines if len(re.sub(r"\x1b\[[\d;]*m", "", line)) > 80] == [], verb
        assert "Error" not in "".join(lines), verb
    rows = {verb: [" ".join(line.split()) for line in lines] for verb, lines in pages.items()}
    assert "1234567 alexander… starting" in rows["clients"][2], "pids and states are whole"
    assert rows["clients"][2].endswith("37.5 %, 20G python")
    assert rows["servers"][1].endswith("as set 2026-11-21 00:00:00")
    assert rows["report --by day"][1].startswith("2026-11-21 14d06h")
    assert rows["report"][1].split()[-2:] == ["345", "6h30m"]
    assert "alexander.schneider" in "".join(rows["queue"]), "the reason is not cut"
    joined = "".join(part for line in rows["policy explain alice"] for part in line.split())
    assert "50-molecular-dynamics.toml:117" in joined
    assert "50-molecular-dynamics.toml:117" in "".join("".join(rows["policy diff"]).split())


def test_a_wide_terminal_shows_all(served: Served) -> None:
    pages = {verb: "\n".join(lines) for verb, lines in on_a_terminal(served, 200).items()}
    for verb in ("servers", "clients", "queue", "report", "lease list"):
        assert "alexander.schneider" in pages[verb], verb
        assert "…" not in pages[verb], verb


def test_what_is_cut_and_what_goes_on_below() -> None:
    """Names first, then the gap; the last column is cut, or flows beside the others or below them."""
    head, row = ["PID", "USER", "WHY"], ["7", "a-very-long-name-indeed", "one two three four five six"]
    assert table(head, [row], names=(1,))[1] == "7    a-very-long-name-indeed  one two three four five six"
    assert table(head, [row], 45, names=(1,))[1] == "7    a-very-long-name-…  one two three four …"
    assert table(head, [row], 30, names=(1,))[1] == "7   a-very-lo… one two three …"
    assert table(head, [row], 45, names=(1,), below=True)[1:] == [
        "7    a-very-long-name-…  one two three four", "                         five six",
    ]  # fmt: skip
    assert table(head, [row], 30, names=(1,), below=True)[1:] == ["7   a-very-lo…", "   one two three four five six"]
    for width in range(1, 80):
        for below in (False, True):
            lines = table(head, [row], max(width, 24 if below else 1), names=(1,), below=below)
            assert max(map(len, lines)) <= max(width, 24 if below else 1)
