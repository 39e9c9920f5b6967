"""What the gate goes by without an agent: its file of admissions, the fail-safe limits of `mpsagent-gate pass`; and the
public directory that it takes."""

from __future__ import annotations

import json
import os
import stat
import time

import pytest

from tests.gate.rig import A, B, Rig, admissions, limits
from tests.sim.conftest import Mps, mps, programs
from tests.waiting import until

__all__ = ["mps", "programs"]

pytestmark = pytest.mark.root


def test_pass_lets_everybody_in_with_the_fail_safe_limits(rig: Rig) -> None:
    rig.start(admissions(fail_safe=limits(15, 2)))
    until((rig.state / "admissions.json").exists)
    assert rig.keeper is not None
    rig.keeper.terminate()
    rig.keeper.wait()
    rig.start_gate("pass")
    for uid in (A, B):
        served = rig.client(uid).served()
        assert (served["threads"], served["memory"]) == ("15.0", {"0": 2048})


def test_pass_is_strict_when_nothing_was_ever_said(rig: Rig) -> None:
    rig.start_daemon()
    rig.start_gate("pass")
    assert rig.client(A).served()["threads"] == "10.0"


def test_a_file_of_admissions_that_cannot_be_trusted_holds_everybody(rig: Rig) -> None:
    rig.start_daemon()
    rig.state.mkdir(mode=0o700)
    (rig.state / "admissions.json").write_text(json.dumps({"kind": "admissions", "open": True}))
    (rig.state / "admissions.json").chmod(0o666)
    rig.start_gate()
    client = rig.waiting_client(A)
    time.sleep(0.2)
    assert not client.saw("served")
    assert "others could have written it" in rig.errors.read_text()


def test_the_keeper_takes_no_directory_of_another_user(rig: Rig) -> None:
    rig.public.mkdir()
    os.chown(rig.public, A, A)
    with pytest.raises(AssertionError, match=f"belongs to user {A}"):
        rig.start_gate()
    rig.may_end = True


def test_the_public_sockets_have_the_modes_of_the_daemons_own(rig: Rig) -> None:
    rig.start_gate()
    found = {one.name: stat.S_IMODE(one.stat().st_mode) for one in rig.public.iterdir()}
    assert found == {"control": 0o666, "control_privileged": 0o755}
    assert stat.S_IMODE(rig.public.stat().st_mode) == 0o755


def test_with_a_server_for_each_user_pass_lets_one_user_in_after_the_other(rig: Rig, mps: Mps) -> None:
    """MPS would take another user's client and keep it until the first one has left; all others would wait behind it,
    and so would the next processes of a program that is at work."""
    mps.start()
    rig.hidden = mps.pipe
    rig.state.mkdir(mode=0o700)
    (rig.state / f"instance-{mps.pipe.parent.name}.env").write_text('MPSAGENT_CONTROL_OPTIONS=""\n')
    rig.start_gate("pass")
    public = {"CUDA_MPS_PIPE_DIRECTORY": str(rig.public)}
    worker = mps.client(A, "sleep", "600", **public)
    worker.saw("sms ")
    waiting = mps.client(B, "query", **public)
    assert [mps.client(A, "query", **public).sms() for _ in range(4)] == [12] * 4
    assert waiting.process.poll() is None
    worker.process.kill()
    assert waiting.sms() == 12
