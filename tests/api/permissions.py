"""The table of who may do what in docs/api.md, measured: each call and each verb as each kind of person.

``python -m tests.api.permissions`` (root) writes it anew; tests/api/test_permissions.py compares.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from mpsagent.agent.orders import ORDERS
from mpsagent.cli.verbs import cli
from tests.api.stand_in import ADMIN, OTHER, USER, Served, serve

ROOT = Path(__file__).resolve().parents[2]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
BEGIN, END = "<!-- who may do what: measured by tests/api/permissions.py -->", "<!-- end of who may do what -->"
PEOPLE = {"root": 0, "admin group": ADMIN, "owner": USER, "stranger": OTHER}
"""``owner``: of client 501, at whom the calls that name a client are aimed."""
VERBS: dict[str, list[str]] = {
    "terminate": ["501", "--no-wait"],
    "clients": [],
    "doctor": [],
    "drain": [],
    "env": [],
    "events": [],
    "lease add": ["--uid", "1001", "--active-threads", "30%", "--until", "2h"],
    "lease delete": ["1"],
    "lease list": [],
    "metrics": [],
    "policy advise": [],
    "policy diff": [],
    "policy explain": ["alice"],
    "policy show": [],
    "probe": [],
    "queue": [],
    "reload": [],
    "restart-mps": ["--yes", "--no-wait"],
    "report": [],
    "resume": [],
    "servers": [],
    "status": [],
    "timeline": ["--json"],
    "top": [],
    "turn extend": ["1001", "1h"],
}
BODIES: dict[str, dict[str, Any]] = {
    "terminate": {"pid": 501}, "terminate-each": {"mine": True}, "delete-lease": {"number": 1},
    "extend-turn": {"uid": 1001, "by": "1h"},
    "lease": {"uid": 1001, "active_threads": "30%", "until": "2h"},
}  # fmt: skip
WITHOUT_AGENT = {"bench", "completion", "policy check", "replay", "run"}
# All is run once as root, so that all modules are in memory: the user may not be able to read this checkout.
_AS_USER = """
import contextlib, io, json, os, sys
from mpsagent.cli.verbs import cli
uid, verbs = int(sys.argv[1]), json.load(sys.stdin)

def run():
    for words in verbs:
        out, err, status = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                cli(["--socket", sys.argv[2], *words], prog_name="mpsagent-cli")
            except SystemExit as end:
                status = end.code or 0
        yield " ".join(words), [status, err.getvalue()]

told = dict(run())
if uid:
    os.setgroups([]); os.setgid(uid); os.setuid(uid)
    told = dict(run())
json.dump(told, sys.stdout)
"""


def verbs(group: click.Group = cli, before: str = "") -> Iterator[str]:
    """All that the command line has."""
    for name, one in group.commands.items():
        if isinstance(one, click.Group):
            yield from verbs(one, f"{before}{name} ")
        else:
            yield f"{before}{name}"


def calls(served: Served, document: Any) -> dict[str, list[str]]:
    """For each call, and each order, whether each of PEOPLE may."""
    from tests.api.test_permissions import ask, order

    found = {}
    for path in document["paths"]:
        target = path + ("?user=alice" if path.endswith("/explain") else "")
        statuses = [ask(served, uid, target)[0] for uid in PEOPLE.values()]
        assert set(statuses) == {200}, (path, statuses)
        found[f"GET {path}"] = ["yes" for _ in statuses]
    for name in ORDERS:
        statuses = []
        for uid in PEOPLE.values():
            served.backend.given[:] = [{"id": 1}]
            statuses.append(order(served, uid, name, **BODIES.get(name, {}))[0])
        assert set(statuses) <= {200, 403}, (name, statuses)
        found[f"order {name}"] = ["no" if one == 403 else "yes" for one in statuses]
    return found


def by_command_line(served: Served) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {verb: [] for verb in VERBS}
    served.backend.given[:] = []  # as root does it first, and gives the lease that is ended then
    told = {" ".join([*verb.split(), *words]): verb for verb, words in VERBS.items()}
    for uid in PEOPLE.values():
        done = subprocess.run(
            [sys.executable, "-c", _AS_USER, str(uid), str(served.path)],
            input=json.dumps([one.split() for one in told]), cwd="/", env={"PATH": "/usr/bin:/bin"},
            capture_output=True, text=True, timeout=100, check=True,
        )  # fmt: skip
        for words, (status, errors) in json.loads(done.stdout).items():
            refused = status == 5 and " may not " in errors
            assert refused or status in (0, 1), (uid, words, status, errors)
            found[told[words]].append("no" if refused else "yes")
    return found


def table() -> str:
    with serve() as served:
        document = runpy.run_path(str(ROOT / "packaging" / "write_openapi.py"))["document"]
        rows = {f"`{name}`": may for name, may in calls(served, document()).items()}
        rows |= {f"`{name}`": may for name, may in by_command_line(served).items()}
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, may in rows.items():
        alike.setdefault(tuple(may), []).append(name)
    lines = [f"| {' | '.join(PEOPLE)} | |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(may)} | {', '.join(names)} |" for may, names in alike.items())])


def text(present: str) -> str:
    before, _, rest = present.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(text(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
