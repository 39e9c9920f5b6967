"""What earlier versions left on disk (tests/data/released/VERSION, written by them beside the simulator) is taken over:
an upgrade with a drain, a lease and a turn. Files of a version that was released are never changed; the next one's are
written by tests/agent/released.py, and what this code leaves has to have their form."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from pathlib import Path

import pytest

import mpsagent
from mpsagent.agent import saved
from mpsagent.api import database
from mpsagent.core.inputs import DrainOrdered, Peer
from mpsagent.gate import state
from mpsagent.gate.store import ConnectionName, DaemonName, KnownName, parse_name
from mpsagent.mps.limits import Limits
from mpsagent.policy.values import Percent
from mpsagent.system.gate_link import GateLink
from mpsagent.system.store import Store
from mpsagent.wire.link import VERSION, Hello, decode_from_gate
from tests.agent.released import form, write
from tests.agent.stage import Stage
from tests.agent.test_saved import core, told
from tests.core.said import known

RELEASED = sorted((Path(__file__).resolve().parent.parent / "data/released").iterdir())
FIRST, SECOND, THIRD = 20001, 20002, 20003
"""The first user had a turn, the second has it, and the third has a lease."""

each = pytest.mark.parametrize("released", RELEASED, ids=lambda path: path.name)


@each
def test_an_agent_goes_on_with_drain_lease_and_turn(released: Path, tmp_path: Path) -> None:
    """The file from before 0.1.0 also has `usage`, the GPU time of users, which no agent reads now."""
    file = tmp_path / "state.json"
    shutil.copyfile(released / file.name, file)
    file.chmod(0o600)
    store = Store(file)
    values = store.load()
    assert store.notes == []
    now = values["drain"]["since"] + 1.0
    (drain,) = saved.drain(values, now)
    assert isinstance(drain, DrainOrdered)
    assert drain.until == values["drain"]["until"]

    one = core()
    one.receive_all(saved.leases(values, now), now)
    (lease,) = one.state.leases
    assert (lease.uid, lease.name, lease.share.threads) == (THIRD, "job-7", Percent(30.0))
    (row,), (before,) = saved.lease_rows(one), values["leases"]
    assert {**dict.fromkeys(row), **before} == row  # what it did not know is not set
    saved.take_up_turn(one, values, told(known(now, Peer(71, SECOND, SECOND, 5), now - 2.0, Limits(10.0))), now)
    assert (saved.turn_row(one) or [])[:5] == values["turn"][:5]
    assert saved.ROWS["served"].write(one) == values["served"]


@each
def test_a_gate_goes_on_with_what_it_was_told_last(released: Path, tmp_path: Path) -> None:
    shutil.copyfile(released / "admissions.json", tmp_path / "admissions.json")
    (tmp_path / "admissions.json").chmod(0o600)
    told_last = state.load(tmp_path)
    assert told_last is not None
    assert told_last.fail_safe.threads == 10.0
    assert told_last.users[SECOND].limits == Limits(10.0, {0: 2 << 30})


@each
def test_a_gate_goes_on_with_the_connections_that_the_one_before_has_stored(released: Path) -> None:
    """Who waits, who works, and how far a hand-over was: all that systemd keeps of them is a name for each."""
    names = [parse_name(one) for one in (released / "descriptors.txt").read_text().splitlines()]
    limits = Limits(10.0, {0: 2 << 30})
    ours = [
        ConnectionName(3, 7),
        ConnectionName(4, 8, privileged=True),
        KnownName(SECOND, SECOND, 5, 998.0, limits, most=limits),
        KnownName(SECOND, SECOND, 6, 999.0, None, "gpu1", unseen=True),
        KnownName(SECOND, SECOND, 9, 997.0, None, "gpu1", left=True),
        DaemonName(3, 1, FIRST, FIRST, False, limits),
    ]
    if released.name != mpsagent.__version__:
        ours = [name for name in ours if not getattr(name, "left", False)]
    assert names == ours


@each
def test_a_gate_of_another_version_is_told_of_and_not_half_understood(released: Path) -> None:
    """A package restarts both; where only the agent was, it says which command is missing."""
    hello = decode_from_gate((released / "link.jsonl").read_bytes().splitlines()[0])
    assert isinstance(hello, Hello)
    if hello.version == VERSION:
        assert released.name == mpsagent.__version__
        return
    assert hello.version < VERSION
    said = GateLink._deliver(object.__new__(GateLink), hello, None)
    assert said is not None
    assert said.endswith("the gate is older and has to be restarted (systemctl restart mpsagent-gate)")


@each
def test_the_history_goes_on(released: Path, tmp_path: Path) -> None:
    """With its records and the time of each user."""
    path = tmp_path / database.NAME
    with sqlite3.connect(path) as file:
        file.executescript((released / "history.sql").read_text())
    file.close()
    path.chmod(0o640)
    opened = database.Database(path)
    newest = opened.newest(10_000)
    opened.close()
    assert [one["seq"] for one in newest] == list(range(1, len(newest) + 1))
    day, _ = database.local_day(float(str(newest[0]["at"])))
    report = database.report(path, day, day, "uid", float(str(newest[-1]["at"])))
    assert {one["uid"] for one in report if one["gpu"] > 1.0} == {FIRST, SECOND}


def test_what_this_version_leaves_has_the_form_that_is_kept_of_it(stage: Stage, tmp_path: Path) -> None:
    """Where it differs: write it again if this version is not released, else give it another number."""
    kept, now = RELEASED[0].parent / mpsagent.__version__, tmp_path / "now"
    write(stage, now)
    for name in ("state.json", "admissions.json"):
        assert form(json.loads((now / name).read_text())) == form(json.loads((kept / name).read_text()))
    for name in ("link.jsonl", "descriptors.txt"):
        assert (now / name).read_text() == (kept / name).read_text()
    tables = [re.sub(r"\bINSERT.*", "", (one / "history.sql").read_text()).split() for one in (now, kept)]
    assert tables[0] == tables[1]
