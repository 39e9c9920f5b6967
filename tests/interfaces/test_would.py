"""``replay --policy``: the agent's own decisions over a recording. Times were worked out from the transcript."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest

from mpsagent.interfaces.replay import merged
from mpsagent.interfaces.would import Would
from mpsagent.mps.limits import Device
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from tests import recordings

DEVICE = Device(0, "GPU-0", "assumed", 143155 << 20, 132)
PROGRAM = str(Path(sys.executable).with_name("mpsagent-cli"))


def would(text: str, name: str, *sections: str) -> list[dict[str, Any]]:
    policy, errors = load([("policy.toml", text)])
    assert policy is not None, errors
    fold = Would(policy, lambda uid: Identity(uid, f"u{uid}"), [DEVICE], 65534)
    logs = recordings.logs(name, *sections)
    for event in merged(io.BytesIO(logs.control), io.BytesIO(logs.server), UTC):
        fold.feed(event)
    return fold.finish()


def times(actions: list[dict[str, Any]], kind: str, **fields: Any) -> list[str]:
    wanted = [a for a in actions if a["action"] == kind and all(a.get(key) == value for key, value in fields.items())]
    return [a["at"][11:23] for a in wanted]


def test_a_turn_ends_when_the_policy_says() -> None:
    """Recording 01, S5 and S6: 1002 waits from 46.746 for 1001's server 716; after 3 s and 1 s of grace it is over."""
    actions = would('[switch]\nafter = "3s"\ngrace = "1s"\n', "01")
    assert "23:56:49.746" in times(actions, "turn.warning", uid=1001)
    assert times(actions, "TerminateClient", pid=710) == ["23:56:50.746"]
    assert times(actions, "ShutdownServer", server=716, force=True) == ["23:56:50.746"]
    assert {a["rule"] for a in actions if a["action"] == "TerminateClient"} == {"switch.after"}


def test_the_nudge_comes_with_the_last_clients_leaving() -> None:
    """Recording 01, S5: 665 leaves at 34.525 while 1002 waits; without a nudge its server stayed until 34.867."""
    actions = would('[switch]\nafter = "1h"\n', "01")
    assert times(actions, "ShutdownServer", server=608, force=False) == ["23:56:34.525"]
    assert times(actions, "TerminateClient") == []


def test_arming_comes_with_the_pending_line() -> None:
    """Recording 01, S4: 606 is put into the pending list at 21.865, 92 ms before the old server exits."""
    actions = would("[limits]\nthreads = 50\n[user.1002]\nthreads = 20\n", "01")
    assert times(actions, "SetDefaults", uid=1001)[0] == "23:56:21.865"
    first = next(a for a in actions if a["action"] == "SetDefaults" and a.get("uid") == 1001)
    assert first["limits"]["threads"] == 50.0


def test_a_leftover_in_a_fault_is_signalled_and_never_terminated() -> None:
    """Recording 03, Q4: 633 ignores its error from 42.92; `terminate_client` there blocked the daemon for 28 s."""
    actions = would('[hang]\nfault = "5s"\nkill_grace = "2s"\n', "03", "Q3", "Q4")
    assert times(actions, "fault", server=635) == ["00:09:02.924"]
    assert times(actions, "SignalClient", pid=633, signal=15) == ["00:09:07.924"]
    assert times(actions, "TerminateClient") == []


@pytest.mark.parametrize("name", recordings.names())
def test_the_same_log_gives_the_same_actions_and_each_has_a_rule(name: str) -> None:
    """Decisions are replayable, and nothing is done without a reason."""
    text = '[limits]\nthreads = 30\nmemory = "25%"\n[switch]\nafter = "2s"\ngrace = "1s"\n'
    first = would(text, name)
    assert first == would(text, name)
    assert all(action["reason"] and action["rule"] for action in first)
    assert [a["at"] for a in first] == sorted(a["at"] for a in first)


def test_the_program_says_it_in_both_forms_and_refuses_a_bad_policy(tmp_path: Path) -> None:
    """JSON under ``would``; a table for people; exit 2 with the first mistake."""
    logs = recordings.logs("01")
    (tmp_path / "c").write_bytes(logs.control)
    (tmp_path / "s").write_bytes(logs.server)
    (tmp_path / "p").write_text('[switch]\nafter = "3s"\ngrace = "1s"\n')
    words = [PROGRAM, "replay", "--control", str(tmp_path / "c"), "--server", str(tmp_path / "s"), "--zone", "UTC"]
    done = subprocess.run(
        [*words, "--policy", str(tmp_path / "p"), "--json"], capture_output=True, text=True, timeout=60
    )
    assert times(json.loads(done.stdout)["would"], "TerminateClient", pid=710) == ["23:56:50.746"]
    done = subprocess.run([*words, "--policy", str(tmp_path / "p")], capture_output=True, text=True, timeout=60)
    assert "the turn of user 1001 is over" in done.stdout
    (tmp_path / "p").write_text("[switch]\nafter = soon\n")
    done = subprocess.run([*words, "--policy", str(tmp_path / "p")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "the policy is not valid" in done.stderr) == (2, True)
